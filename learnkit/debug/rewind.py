# SPDX-License-Identifier: Apache-2.0
"""Repeat a run silently from its nearest checkpoint up to any batch.

`rewind` finds the checkpoint, resumes the fit from it, and ends the fit before the batch. Exact resume makes the state
equal to the run's, bit for bit. The recorded losses of the run are compared with the losses on the way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from learnkit.callbacks.save_model import SaveModelCallback
from learnkit.checkpoint.file import read_state
from learnkit.checkpoint.folder import DEFERRED, Entry, entries, has_own_files
from learnkit.checkpoint.resume import find_checkpoint
from learnkit.core.errors import CheckpointError, OptionError
from learnkit.core.file_tensor import read_values
from learnkit.core.model import preserved_modes
from learnkit.core.random import preserved_rng
from learnkit.core.time import Time, Timestamp
from learnkit.core.validation import warn_user
from learnkit.debug.moment import Fit, Moment, StopBefore, list_attributes, seek
from learnkit.debug.record import STANDS_OUT, Record, measure_jumps, read_record, refuse
from learnkit.engine.budget import check_not_running
from learnkit.engine.resumed_run import SAVE_POINTS, ResumeState, find_checkpoint_folder
from learnkit.engine.traits import trait_of
from learnkit.optim.state import copy_value

if TYPE_CHECKING:
    from learnkit.learner import Learner

# -- the run in its folder -------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordedRun:
    "One fit of a run in a folder, as its checkpoints describe it."

    folder: Path
    checkpoints: list[Entry] = field(default_factory=list)  # newest first

    @property
    def info(self) -> dict[str, Any]:
        "The newest checkpoint's metadata."
        return self.checkpoints[0].info

    @property
    def first(self) -> int:
        "Number of the first batch of the fit."
        first: int = self.info['ba'] - self.info['train_iter']
        return first

    @property
    def lost(self) -> list[str]:
        "State that a resumed run loses, by the warnings of all checkpoints of the run."
        return [*dict.fromkeys(text for entry in self.checkpoints for text in entry.info['lost'])]

    def find_before(self, until: Time) -> Entry | None:
        "Return the nearest checkpoint at or before a time, or None."
        # batches share an epoch, a step or a second, but not a number
        may_equal = until.unit in ('ba', 'sp')
        before = []
        for entry in self.checkpoints:
            time = Timestamp.from_state_dict(entry.info['time'])
            if time < until or (may_equal and time <= until):
                before.append(entry)
        return max(before, key=lambda e: e.number, default=None)

    def find_after(self, origin: Entry | None) -> Entry:
        "Return the first checkpoint after another one, or the first of the run; without one, the newest."
        number = 0 if origin is None else origin.number
        after = [entry for entry in self.checkpoints if entry.number > number]
        return min(after, key=lambda e: e.number, default=self.checkpoints[0])

    def read_recorder(self) -> dict[str, Any]:
        "Return the newest state of the Recorder; empty without one."
        state, _ = read_state(self.checkpoints[0].path)
        recorder: dict[str, Any] = state['callbacks'].get('recorder', {})
        return recorder

    def has_ended(self) -> bool:
        "Return True if the newest checkpoint is of the end of the fit, not of a run that was killed."
        loop = read_state(self.checkpoints[0].path)[0]['loop']
        is_last = loop['stopping'] or loop['epoch'] + 1 == loop['n_epoch']
        return bool(SAVE_POINTS[loop['point']] == 'epoch' and is_last)

    def read_record(self) -> Record:
        "Return the recorded losses."
        return read_record(self.read_recorder(), self.first, self.info['train_iter'])


def list_runs(folder: Path) -> list[RecordedRun]:
    "Return the fits that have written checkpoints into a folder, newest first."
    runs: dict[Any, RecordedRun] = {}
    for entry in entries(folder):
        if 'time' in entry.info:
            fit = entry.info.get('run'), entry.info['ba'] - entry.info['train_iter']
            run = runs.setdefault(fit, RecordedRun(folder))
            run.checkpoints.append(entry)
    if runs:
        return [*runs.values()]
    raise CheckpointError(
        f'There is no run to rewind in {folder.absolute()}: train with the callback `Checkpoint()`.'
    )


def find_run(folder: Path, until: Time) -> RecordedRun:
    "Return the newest fit that has a checkpoint before a time, or that was the first of its Learner."
    for run in list_runs(folder):
        if run.find_before(until) is not None or not run.first:
            return run
        if until.unit == 'ba' and until.value >= run.first:
            raise CheckpointError(
                f'The fit that began at batch {run.first} has no checkpoint before {until}: rewind to a later batch.'
            )
    raise CheckpointError(f'No run in {folder.absolute()} has a checkpoint before {until}.')


def find_spike(losses: Mapping[int, float]) -> Time:
    """Return the time of the batch with the largest jump of the loss, or of the first loss that is not finite.

    A jump is divided by the noise there: the median of the absolute jumps of ten batches on each side. Warns if the
    largest jump is less than ten times the noise.

    >>> find_spike({10: 1.0, 11: 1.1, 12: 1.0, 13: 5.0, 14: 4.9})
    Time('13ba')
    """
    if len(losses) < 2:
        raise CheckpointError('The run has recorded no losses, so there is no spike: pass a time.')
    odd = next((ba for ba, loss in losses.items() if not math.isfinite(loss)), None)
    if odd is not None:
        return Time(odd, 'ba')
    spike = max(measure_jumps(losses), key=lambda jump: jump.size)
    if spike.size < STANDS_OUT:
        warn_user(
            f'rewind(spike=True): no batch stands out. The largest jump is at batch {spike.ba}: {spike}.'
        )
    return Time(spike.ba, 'ba')


def find_inexact(learn: Learner, run: RecordedRun, origin: Entry | None) -> list[str]:
    """Return the reasons, known in advance, why a run cannot be repeated exactly from a checkpoint.

    Without a checkpoint before the batch, each look starts from the state that a checkpoint would contain there."""
    reasons = run.lost if origin is None else list(origin.info['lost'])
    version = str(torch.__version__)
    used = (run.find_after(None) if origin is None else origin).info['torch']
    if used != version:
        reasons.append(f'the run used torch {used}, this is torch {version}')
    if origin is None:
        return reasons
    repeated = [cb for cb in learn.cbs if not trait_of(cb, 'writes_files')]
    names = [type(cb).__name__ for cb in repeated if has_own_files(cb)]
    reasons += [f'{name} keeps its own files in checkpoints' for name in names]
    return reasons


# -- rewind ----------------------------------------------------------------------------------------


def rewind(
    learn: Learner,
    *,
    to: str | int | Time | None,
    spike: bool,
    fit: Fit | None,
    folder: str | Path | None,
    exact: bool,
) -> Moment:
    "Return the moment before a batch of an earlier run; see `Learner.rewind`."
    check_not_running(learn)
    if (to is None) != spike:
        raise OptionError("Pass a time, `learn.rewind('1234ba')`, or `spike=True`.")
    place = find_checkpoint_folder(learn) if folder is None else Path(folder)
    if to is None:
        run = list_runs(place)[0]
        until = find_spike(run.read_record().losses)
    else:
        until = Time(to, 'ba') if isinstance(to, int) else Time(to)
        run = find_run(place, until)
    origin = run.find_before(until)
    if origin is None and learn.time.ba:
        raise CheckpointError(
            f'The run has no checkpoint before {until}, and this Learner has trained: make it as for training.'
        )
    if origin is None and any(is_lazy(t) for t in learn.model.parameters()):
        raise CheckpointError(
            f'The run has no checkpoint before {until}, and lazy layers have no weights yet that a look could restore: '
            f'rewind to batch {run.find_after(None).info["ba"]} or a later one.'
        )
    refuse(find_inexact(learn, run, origin), exact)
    record = _read_comparable(learn, run)
    length = run.find_after(origin).info['n_epoch']
    moment = _replay(learn, run, origin, until, fit or make_fit(length), record, exact)
    if moment.n_epoch != length:
        budgets = [
            'until a budget is used' if n is None else f'{n} epochs'
            for n in (length, moment.n_epoch)
        ]
        refuse([f'the run trained {budgets[0]}, and `fit` trains {budgets[1]}'], exact)
    if record is not None:
        begin = run.first if origin is None else origin.info['ba']
        refuse(record.find_other(moment.losses, range(begin, moment.ba)), exact)
    return moment


def _read_comparable(learn: Learner, run: RecordedRun) -> Record | None:
    "Return the recorded losses, or None for a run of several processes, whose losses are equal up to rounding."
    ranks = run.info['ranks']
    if ranks != learn.world.size:
        warn_user(
            f'The run used {ranks} processes, this one uses {learn.world.size}: numbers are equal up to rounding, and '
            'are not compared.'
        )
    return run.read_record() if ranks == learn.world.size == 1 else None


def make_fit(n_epoch: int | None) -> Fit:
    "Return a function that calls `fit` for as many epochs as the run had."
    if n_epoch is None:
        raise OptionError(
            "The run had a budget. Pass the function that trained: `fit=lambda learn, **kw: learn.fit('2h', **kw)`."
        )
    return lambda learn, **kw: learn.fit(n_epoch, **kw)


def _replay(
    learn: Learner,
    run: RecordedRun,
    origin: Entry | None,
    until: Time,
    fit: Fit,
    record: Record | None,
    exact: bool,
) -> Moment:
    "Train from the checkpoint up to the batch."
    resume, saved = None, dict[str, Any]()
    if origin is not None:
        resume, saved = _read_checkpoint(learn, run, origin)
    outside = _collect_outside(learn, saved)
    made = list_attributes(learn)
    needed = set(run.info['callbacks']).difference(key for _, key in _list_silent(learn))
    stop = StopBefore(until, None if resume is None else resume.state, needed)
    try:
        seek(learn, stop, fit, resume or False)
    finally:
        learn.parts.positions.rewound = run.folder.absolute()
    if not stop.drawn:
        raise CheckpointError(f'The run ends before {until}: there is no such batch.')
    _run_lazy_layers(learn, stop.drawn['xb'])

    def find_before(ba: int) -> Any:
        "Return where to resume to come to a batch: a checkpoint, the start of the run, or None."
        before = run.find_before(Time(max(ba, 0), 'ba')) if ba >= run.first else None
        if before is None:
            return stop.first if ba >= run.first else None
        return _read_checkpoint(learn, run, before)[0]

    return Moment(learn, fit, stop, outside, find_before, made, record, exact)


def _run_lazy_layers(learn: Learner, xb: tuple[Any, ...]) -> None:
    "Initialize lazy layers that have not run yet: a look could not undo it."
    if not any(isinstance(m, LazyModuleMixin) for m in learn.model.modules()):
        return
    given = patch.object(learn, 'xb', xb)
    with preserved_modes(learn.model), preserved_rng(), torch.no_grad(), given:
        learn.model.eval()
        learn.seams.model(learn)


def _read_checkpoint(
    learn: Learner, run: RecordedRun, entry: Entry
) -> tuple[ResumeState, dict[str, Any]]:
    "Return a checkpoint with the states of the callbacks that are repeated, and the states of all."
    resume = find_checkpoint(learn, entry.path)
    assert resume is not None  # the file was there
    callbacks = resume.state['callbacks']
    needed = {key: callbacks[key] for key in run.info['callbacks'] if key in callbacks}
    trained = {name: copy_value(resume.state[name], read_values) for name in DEFERRED}
    resume.state = {**resume.state, **trained, 'callbacks': needed}
    resume.info = {}  # a moment adds callbacks, and compares their names itself
    resume.is_owner = False  # a moment keeps the state, too
    return resume, callbacks


def _collect_outside(learn: Learner, saved: Mapping[str, Any]) -> dict[str, Any]:
    "Return the states of the callbacks of `_list_silent` for a branch, from the states in a checkpoint."
    outside = {}
    states = learn.callback_states()
    for cb, key in _list_silent(learn):
        if isinstance(cb, SaveModelCallback):
            outside[key] = cb.state_without_files()
        elif key in states:
            outside[key] = saved.get(key, states[key])
    return outside


def _list_silent(learn: Learner) -> list[tuple[Any, str]]:
    "Return the callbacks that are left out while the run is repeated, with their keys."
    keys = learn.parts.callbacks.keys
    return [(cb, keys[id(cb)]) for cb in learn.cbs if trait_of(cb, 'writes_files')]
