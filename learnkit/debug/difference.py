# SPDX-License-Identifier: Apache-2.0
"""The first difference between two runs: the event, the callback and the quantity.

The recorded losses give the first batch that differs. Both Learners are rewound to the batch before it, whose step may
be the cause, and train from there event by event. All quantities are compared before and after each handler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from learnkit.core.batch import tensors_in
from learnkit.core.errors import CheckpointError, OptionError
from learnkit.core.random import preserved_rng
from learnkit.core.validation import check_number
from learnkit.debug.moment import Fit, StopBefore
from learnkit.debug.rewind import RecordedRun, list_runs
from learnkit.debug.trace import WatchedTable, digest, digest_state, replace_tables
from learnkit.engine.dispatch import Entry, HandlerTable
from learnkit.engine.resume import find_checkpoint_folder

if TYPE_CHECKING:
    from learnkit.learner import Learner

__all__ = ['Difference', 'first_difference']

Values = Mapping[str, Any]  # by the name of a quantity: its digest, or its tensors

# kinds of quantities: of several that differ at one place, the first kind is the cause
_KINDS = (
    'order',
    'batch',
    'xb',
    'yb',
    'hyper',
    'weight',
    'buffer',
    'optimizer',
    'random',
    'pred',
    'loss',
    'loss_grad',
    'gradient',
)


@dataclass(frozen=True)
class Difference:
    """First difference between two runs.

    >>> print(Difference(7, 'before_batch', 'Noise', 'xb', ['xb'], 8, (0.5, 0.25)))
    batch 7, before_batch: Noise changed xb; the losses differ from batch 8 on (0.5 and 0.25)
    """

    batch: int  # number of the batch, over all fits
    event: str  # event at which it was found; '' for the environment
    callback: str  # class of the callback that made it; '' for the loop, the data or the start
    what: str  # 'xb', 'hyper lr', 'weight 0.bias', 'random numbers', 'order of samples' ...
    others: list[str] = field(default_factory=list)  # all quantities that differ there
    first_loss: int = 0  # number of the first batch with another loss
    losses: tuple[float, float] = (0.0, 0.0)  # losses of this batch

    def __str__(self) -> str:
        change = f'{self.callback} changed {self.what}' if self.callback else f'{self.what} differs'
        a, b = self.losses
        return (
            f'batch {self.batch}, {self.event or "environment"}: {change}; the losses differ from batch '
            f'{self.first_loss} on ({a!r} and {b!r})'
        )


def first_difference(
    a: Learner | str | Path,  # Learner made as for its run, or the folder of the run
    b: Learner | str | Path,  # the other one
    make: Callable[[Any], Learner] | None = None,  # f(folder) -> Learner, for folders
    fit: Fit
    | None = None,  # f(learn, resume=...) that trained; None: `learn.fit` of as many epochs
    atol: float = 0.0,  # largest difference of two numbers that counts as none
) -> Difference | None:
    """Return the first difference between two runs, or None if no recorded loss differs.

    Both runs need checkpoints, and Learners that are made as for training: see `Learner.rewind`. Another version of
    torch, another device and another number of processes are named first. Otherwise the recorded losses are compared,
    and both runs are repeated from the batch before the first other loss, event by event.

    A quantity is a loss, a batch, the order of samples, a weight, a buffer, a gradient, an option or a state of the
    optimizer, or the generators of random numbers. With `atol` tensors are kept instead of digests, in the memory of
    the host.

    Raises `OptionError` for folders without `make`, `CheckpointError` for runs without recorded losses, and what
    `Learner.rewind` raises.

    >>> import tempfile
    >>> from learnkit import Callback, Checkpoint
    >>> from learnkit.testing import synth_learner
    >>> def double(cb):
    ...     if cb.learn.time.ba == 7: cb.learn.xb = tuple(2 * x for x in cb.xb)
    >>> def make(folder, *cbs):
    ...     _ = torch.manual_seed(0)
    ...     return synth_learner(n_train=10, path=folder, cbs=[Checkpoint('4ba'), *cbs])
    >>> with tempfile.TemporaryDirectory() as f, tempfile.TemporaryDirectory() as g:
    ...     for folder, cbs in ((f, []), (g, [Callback(before_batch=double)])):
    ...         with make(folder, *cbs).no_bar() as learn: learn.fit(1)
    ...     found = first_difference(make(f), make(g, Callback(before_batch=double)))
    >>> found.batch, found.event, found.callback, found.what
    (7, 'before_batch', 'Callback', 'xb')
    """
    if atol:
        check_number('atol', atol)
    learners = [_as_learner(o, make) for o in (a, b)]
    if learners[0] is learners[1]:
        raise OptionError('Both runs have the same Learner: make one for each.')
    runs = [list_runs(find_checkpoint_folder(learn))[0] for learn in learners]
    environment = _compare_environments(*runs)
    if environment:
        return Difference(runs[0].first, '', '', environment[0], environment)
    losses = [run.read_record().losses for run in runs]
    first = _find_first_loss(losses[0], losses[1], atol)
    if first is None:
        return None
    start = max(first - 1, *(run.first for run in runs))
    observed = [_observe(learn, start, first + 1 - start, fit, keep=atol > 0) for learn in learners]
    pair = losses[0][first], losses[1][first]
    found = _find_first(observed[0], observed[1], atol)
    if found is None:  # the two steps again are equal: what differed was not repeated
        return Difference(first, 'after_loss', '', 'loss', ['loss'], first, pair)
    return Difference(*found, first, pair)


def _as_learner(o: Any, make: Callable[[Any], Learner] | None) -> Learner:
    if not isinstance(o, (str, Path)):
        return o
    if make is None:
        raise OptionError(
            f'{o} is a folder: give `make=`, a function of it that returns the Learner.'
        )
    return make(o)


def _compare_environments(a: RecordedRun, b: RecordedRun) -> list[str]:
    names = {'torch': 'version of torch', 'device': 'device', 'ranks': 'number of processes'}
    return [
        f'{text} ({a.info[name]} and {b.info[name]})'
        for name, text in names.items()
        if a.info[name] != b.info[name]
    ]


def _find_first_loss(a: Mapping[int, float], b: Mapping[int, float], atol: float) -> int | None:
    "Return the number of the first batch with two losses, or None; raise `CheckpointError` without any to compare."
    if not a.keys() & b.keys():
        raise CheckpointError(
            'No batch has a recorded loss in both runs. Train with `Recorder` and `Checkpoint`, from the same batch on.'
        )
    return next((ba for ba in a if ba in b and not _are_close(a[ba], b[ba], atol)), None)


def _are_close(x: Any, y: Any, atol: float) -> bool:
    "Return True for equal digests, numbers and tensors, with NaN equal to itself."
    if isinstance(x, list) and isinstance(y, list):
        pairs = zip_longest(x, y)
        return len(x) == len(y) and all(_are_close(s, t, atol) for s, t in pairs)
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            return False
        return torch.allclose(x.double(), y.double(), rtol=0, atol=atol, equal_nan=True)
    if isinstance(x, float) and isinstance(y, float):
        return x == y or abs(x - y) <= atol or (x != x and y != y)
    return bool(x == y)


# -- events ----------------------------------------------------------------------------------------


@dataclass
class Observed:
    "Quantities at one event: before its handlers, and after each."

    event: str
    batch: int
    before: Values
    after: list[tuple[str, Values]] = field(default_factory=list)  # by the class of the callback

    @property
    def end(self) -> Values:
        "Quantities after all handlers."
        return self.after[-1][1] if self.after else self.before

    def list_changes(self, what: str) -> list[tuple[str, Any]]:
        "Return the callbacks that have changed a quantity, with its value after it."
        values = [self.before, *(values for _, values in self.after)]
        return [
            (name, now.get(what))
            for (name, now), last in zip(self.after, values, strict=False)
            if not _are_close(now.get(what), last.get(what), 0.0)
        ]


class ObservedTable(WatchedTable):
    "Handler table that notes the quantities at each event of the repeated batches."

    def __init__(self, learn: Learner, table: HandlerTable, events: list[Observed], keep: bool):
        super().__init__(learn, table)
        self.events = events
        self.read = _copy_tensors if keep else digest  # f(value): what is compared of it

    @override
    def wrap(self, name: str, entries: list[Entry]) -> list[Entry]:
        watched: list[Entry] = [(partial(self._begin, name), [True], None)]
        for handler, switch, cb in entries:
            call = handler if isinstance(cb, StopBefore) else partial(self._watch, handler, cb)
            watched.append((call, switch, cb))
        return watched

    def _is_repeating(self) -> bool:
        "Return True from the time on at which the state before the batches was restored."
        return self.learn.parts.resuming is None and self.learn.run.is_active

    def _begin(self, name: str) -> None:
        if self._is_repeating():
            values = self._read(name)
            self.events.append(Observed(name, self.learn.time.ba, values))

    def _watch(self, handler: Callable[[], Any], cb: Any) -> None:
        __tracebackhide__ = True
        event = self.events[-1] if self._is_repeating() else None
        try:
            handler()
        finally:
            if event is not None:
                event.after.append((type(cb).__name__, self._read(event.event)))

    def _read(self, event: str) -> Values:
        learn = self.learn
        values = digest_state(learn, self.read) | _read_optimizer(learn, self.read)
        if event == 'after_draw' and learn.training:
            values['batch'] = self.read(learn.batch)
            values['order of samples'] = learn.parts.passes.indices(learn)
        return values


def _copy_tensors(o: Any) -> list[Tensor]:
    return [t.detach().cpu().clone() for t in tensors_in(o)]


def _read_optimizer(learn: Learner, read: Callable[[Any], Any]) -> dict[str, Any]:
    "Return the options of the optimizer's groups, and its state by parameter."
    if learn.opt is None:
        return {}
    names = {id(p): name for name, p in learn.model.named_parameters()}
    found: dict[str, Any] = {}
    for kind, opt in learn.opt.optimizers.items():
        where = f' of {kind}' if len(learn.opt.optimizers) > 1 else ''
        for i, group in enumerate(opt.param_groups):
            options = {k: v for k, v in group.items() if k not in ('params', 'param_names')}
            found |= {f'hyper {k}{where}, group {i}': repr(v) for k, v in options.items()}
        for p, state in opt.state.items():
            name = names.get(id(p), 'a parameter of the loss')
            found[f'optimizer state of {name}'] = read([*state.values()])
    return found


def _observe(learn: Learner, ba: int, n: int, fit: Fit | None, keep: bool) -> list[Observed]:
    """Return the quantities at each event of `n` batches.

    The generators are preserved: a run without a checkpoint before the batch begins as its Learner was made."""
    events: list[Observed] = []
    with preserved_rng():
        moment = learn.rewind(ba, fit=fit)
        with replace_tables(learn, lambda table: ObservedTable(learn, table, events, keep)):
            moment.play(n)
    return events


# -- comparison ------------------------------------------------------------------------------------


def _find_first(
    a: list[Observed], b: list[Observed], atol: float
) -> tuple[int, str, str, str, list[str]] | None:
    "Return batch, event, callback and quantity of the first difference, and all quantities that differ there."
    for x, y in zip(a, b, strict=False):
        others = list(_list_other(x.before, y.before, atol))
        if others:
            return x.batch, x.event, '', others[0], others
        others = list(_list_other(x.end, y.end, atol))
        if others:
            return x.batch, x.event, _find_callback(x, y, others[0], atol), others[0], others
        if x.event != y.event:
            return x.batch, x.event, '', f'event ({x.event} and {y.event})', []
    return None


def _list_other(x: Values, y: Values, atol: float) -> Iterator[str]:
    "Yield the quantities that differ, causes first."
    names = [name for name in {**x, **y} if not _are_close(x.get(name), y.get(name), atol)]
    yield from sorted(names, key=lambda name: _KINDS.index(name.split()[0]))


def _find_callback(x: Observed, y: Observed, what: str, atol: float) -> str:
    "Return the first callback that has changed a quantity in one run, and not in the same way in the other."
    missing = ('', None)
    for s, t in zip_longest(x.list_changes(what), y.list_changes(what), fillvalue=missing):
        if s[0] != t[0] or not _are_close(s[1], t[1], atol):
            return t[0] or s[0]
    return ''
