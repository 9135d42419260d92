"""Check that a Learner resumes exactly: compare an uninterrupted run with a resumed one, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Container, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from learnkit.checkpoint.compare import differences, digest
from learnkit.checkpoint.file import read_state, write_state
from learnkit.checkpoint.state import COUNTERS
from learnkit.core.errors import CancelFitException, FitError, OptionError
from learnkit.core.html import definitions, never_raising
from learnkit.core.interrupts import deferred_interrupts
from learnkit.core.learner_type import LearnerLike
from learnkit.core.model import bare_model
from learnkit.core.random import preserved_generators
from learnkit.core.validation import check_count
from learnkit.data.dataloaders import epoch_length
from learnkit.data.loader_state import capture_loader_state, restore_loader_state
from learnkit.engine.budget import check_not_running
from learnkit.engine.callback import Callback, declared
from learnkit.engine.callback_state import has_own_state, lost_attributes
from learnkit.engine.run import STATE
from learnkit.engine.snapshot import restored

__all__ = ['ResumeCheck', 'check_resume']

LOADER_PARTS = ('dataset', 'sampler', 'batch_sampler')
MAX_LENGTH = 100  # of a list or dict in a loader that is compared
# suggested fixes for attributes that no checkpoint holds
BY_CALLBACK = 'let a callback keep it'
BY_STATE = 'add it to what `state_dict` returns and `load_state_dict` takes'
BY_DATA = 'keep a number, or give the loader `state_dict` and `load_state_dict`'

# digests of attributes, by owner, name and suggested fix
Digests = dict[tuple[str, str, str], str]


@dataclass(frozen=True)
class ResumeCheck:
    """Result of `learn.check_resume`; true if the resumed run was exact.

    >>> ResumeCheck(8, 4, 'ab12' * 16)
    Exact: 8 batches without a stop and with one after 4 end in the same state (SHA-256 ab12ab12ab12...).
    """

    n_batches: int  # number of training batches of each run
    stopped_after: int  # number of batches before the stop
    digest: str  # digest of the uninterrupted run's final state
    differences: list[str] = field(default_factory=list)  # differences of the resumed run's state
    hints: list[str] = field(default_factory=list)  # values that no checkpoint holds

    def __bool__(self) -> bool:
        return not self.differences

    def __repr__(self) -> str:
        if self:
            return (
                f'Exact: {self.n_batches} batches without a stop and with one after {self.stopped_after} end in '
                f'the same state (SHA-256 {self.digest[:12]}...).'
            )
        return '\n  '.join(
            [
                f'Not exact: {self.n_batches} batches without a stop (first) and with one after '
                f'{self.stopped_after} (second) end in states that differ:',
                *self.differences,
                *self.hints,
            ]
        )

    @never_raising
    def _repr_html_(self) -> str:
        result = {
            'resumes': 'exactly, to the last bit' if self else 'not exactly',
            'batches': self.n_batches,
            'stopped after': self.stopped_after,
            'SHA-256': f'{self.digest[:12]}...',
            'differences': self.differences,
            'hints': self.hints,
        }
        return definitions({name: value for name, value in result.items() if value != []})


class _StopAt(Callback):
    "Callback that keeps the checkpoint state after one batch, and ends the fit."

    order = 10_000
    state_key = '_stop_at'

    def __init__(self, n: int) -> None:
        self._n = n
        self.kept = dict[str, Any]()
        self.hints = list[str]()
        self.digests: Digests = {}

    def batch_checkpoint(self) -> None:
        if self.learn.train_iter < self._n:
            return
        self.kept = self.learn.checkpoint_state()
        self.hints = [hint for cb in self.learn.cbs for hint in list_hints(cb)]
        self.digests = digest_attributes(self.learn)
        raise CancelFitException


def check_resume(
    learn: LearnerLike,
    n_batches: int,
    stop_after: int | None,
) -> ResumeCheck:
    "Compare an uninterrupted run with a resumed one, bit by bit."
    n = check_count('n_batches', n_batches, 2, FitError)
    middle = n // 2 if stop_after is None else check_count('stop_after', stop_after, 1, FitError)
    if middle >= n:
        raise FitError(f'stop_after={stop_after} does not lie within {n_batches} batches.')
    check_not_running(learn)
    if any(map(is_lazy, learn.model.parameters())):
        raise FitError(
            f'{type(bare_model(learn.model)).__name__} has parameters without values: pass a batch through it first.'
        )
    per_epoch = epoch_length(learn.dls, learn.dls.train)[0]
    n_epoch = n // per_epoch + 1 if per_epoch else n

    def train(until: int, resume: Any = False) -> _StopAt:
        stop = _StopAt(until)
        with _as_new_process(learn), deferred.paused():
            if resume is not False:
                _seed_from_entropy()
            learn.fit(n_epoch, cbs=stop, resume=resume)
        if not stop.kept:
            raise FitError(f'The loader ended before batch {until}: lower n_batches={n_batches}.')
        return stop

    writers = [cb for cb in learn.cbs if declared(cb, 'writes_files')]
    with (
        deferred_interrupts() as deferred,
        learn.lock,
        learn.removed_cbs(writers),
        _redirect_files(learn) as folder,
        learn.no_bar(),
        learn.no_logging(),
    ):
        uninterrupted = train(n)
        write_state(folder / 'state.pt', train(middle).kept, {})
        resumed = train(n, read_state(folder / 'state.pt')[0])
    found = differences(uninterrupted.kept, resumed.kept)
    hints = uninterrupted.hints + _list_changed(uninterrupted.digests, resumed.digests)
    return ResumeCheck(n, middle, digest(uninterrupted.kept), found, hints if found else [])


def _list_changed(uninterrupted: Digests, resumed: Digests) -> list[str]:
    "Return a line for each attribute that no checkpoint holds and that differs at the end of the resumed run."
    return [
        f'`{name}` of {owner} differs as well, and no checkpoint holds it: {fix}.'
        for (owner, name, fix), value in uninterrupted.items()
        if resumed.get((owner, name, fix)) != value
    ]


@contextmanager
def _as_new_process(learn: LearnerLike) -> Iterator[None]:
    """Restore the Learner at the end of the block, and what only a new process would reset.

    These are the loader's state, and the random generators in objects of callbacks.
    """
    state = capture_loader_state(learn.dls.train)
    with ExitStack() as stack:
        stack.callback(restore_loader_state, learn.dls.train, state)
        for cb in learn.cbs:
            stack.enter_context(preserved_generators(cb))
        stack.enter_context(restored(learn))
        yield


@contextmanager
def _redirect_files(learn: LearnerLike) -> Iterator[Path]:
    "Set `learn.path` to a temporary folder within the block, and yield the folder."
    path = learn.path
    with TemporaryDirectory() as folder:
        learn.path = Path(folder)
        try:
            yield learn.path
        finally:
            learn.path = path


def list_hints(cb: Any) -> list[str]:
    "Return a line for each attribute of a callback without `state_dict` that no checkpoint holds."
    if has_own_state(cb):
        return []
    return [
        f'{type(cb).__name__} keeps `{name}` ({type(value).__name__}), which no checkpoint holds: '
        'give it `state_dict` and `load_state_dict`.'
        for name, value in lost_attributes(cb).items()
    ]


def digest_attributes(learn: LearnerLike) -> Digests:
    "Return digests of public attributes that no checkpoint holds, by owner and name, and the suggested fix."
    found = {}
    for owner, thing, excluded, fix in _list_owners(learn):
        for name, value in getattr(thing, '__dict__', {}).items():
            # the data themselves are too long to compare
            is_data = fix == BY_DATA and not _is_short(value)
            if name.startswith('_') or name in excluded or is_data:
                continue
            with suppress(OptionError):
                found[owner, name, fix] = digest(value)
    return found


def _list_owners(learn: LearnerLike) -> Iterator[tuple[str, Any, Container[str], str]]:
    "Yield what may have such attributes: its name, itself, names that do not count, and the suggested fix."
    own_attributes = vars(nn.Module())
    for name, m in bare_model(learn.model).named_modules():
        owner = f'{type(m).__name__} ({name})' if name else type(m).__name__
        yield owner, m, own_attributes, 'make it a buffer'
    yield type(learn).__name__, learn, (*STATE, *COUNTERS), BY_CALLBACK
    for cb in learn.cbs:
        if has_own_state(cb) and not type(cb).__module__.startswith('learnkit.'):
            yield type(cb).__name__, cb, (), BY_STATE
    dl = learn.dls.train
    for part in (dl, *(getattr(dl, name, None) for name in LOADER_PARTS)):
        yield type(part).__name__, part, (), BY_DATA


def _is_short(value: Any) -> bool:
    return isinstance(value, (list, dict)) and len(value) <= MAX_LENGTH


def _seed_from_entropy() -> None:
    "Seed the global random generators of torch, Python and NumPy from entropy."
    torch.seed()
    random.seed()
    np.random.seed()
