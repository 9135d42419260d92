# SPDX-License-Identifier: Apache-2.0
"""Train a run again from its nearest checkpoint, silently, up to any batch, and stand before this batch.

`rewind` finds the checkpoint, resumes the fit from it, and ends the fit before the batch. Exact resume makes the state
equal to the run's, bit for bit. The recorded losses of the run are compared with the losses on the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from learnkit.checkpoint.file import read_state
from learnkit.checkpoint.folder import Entry, entries, has_own_files
from learnkit.checkpoint.state import find_checkpoint
from learnkit.core.errors import CheckpointError, OptionError
from learnkit.core.time import Time, Timestamp
from learnkit.core.validation import warn_user
from learnkit.debug.moment import Fit, Moment, StopBefore, travel
from learnkit.engine.budget import check_not_running
from learnkit.engine.callback import declared
from learnkit.engine.resume import ResumeState, find_checkpoint_folder

if TYPE_CHECKING:
    from learnkit.learner import Learner

_NEARBY = 10  # batches on each side of a jump, whose jumps are the noise

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

    def read_losses(self) -> dict[int, float]:
        "Return the recorded losses by the number of the batch; empty if they are not known."
        state, _ = read_state(self.checkpoints[0].path)
        losses = state['callbacks'].get('recorder', {}).get('smooth_loss', {}).get('raw', ())
        if len(losses) != self.info['train_iter']:
            return {}  # a batch without a loss has no number
        return dict(enumerate(losses.tolist(), self.first))


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

    A jump is divided by the noise there: the median of the absolute jumps of ten batches on each side.

    >>> find_spike({10: 1.0, 11: 5.0, 12: 4.0})
    Time('11ba')
    """
    if len(losses) < 2:
        raise CheckpointError('The run has recorded no losses, so there is no spike: give a time.')
    batches, values = [*losses], np.array([*losses.values()])
    odd = np.flatnonzero(~np.isfinite(values))
    if len(odd):
        return Time(batches[odd[0]], 'ba')
    jumps = np.diff(values)
    sizes = np.abs(jumps)
    windows = sliding_window_view(np.pad(sizes, _NEARBY, mode='edge'), 2 * _NEARBY + 1)
    least = max(np.median(sizes) / 1000, np.finfo(float).tiny)  # noise of constant losses
    noise = np.median(windows, axis=-1).clip(least)
    return Time(batches[int(np.argmax(jumps / noise)) + 1], 'ba')


def find_inexact(learn: Learner, info: Mapping[str, Any]) -> list[str]:
    "Return why a run cannot be repeated from a checkpoint with this `info`, as far as it is known before."
    reasons = list(info['lost'])
    version = str(torch.__version__)
    if info['torch'] != version:
        reasons.append(f'the run was of torch {info["torch"]}, this is {version}')
    names = [type(cb).__name__ for cb in learn.cbs if has_own_files(cb)]
    reasons += [f'{name} keeps files of its own in checkpoints' for name in names]
    return reasons


def find_other_losses(losses: Mapping[int, float], recorded: Mapping[int, float]) -> list[str]:
    "Return a description of the first loss that is not the recorded one, bit for bit."
    for ba, loss in losses.items():
        known = recorded.get(ba, loss)
        if loss != known and not (np.isnan(loss) and np.isnan(known)):
            return [f'batch {ba} has the loss {loss!r}, and had {known!r}']
    return []


# -- rewind ----------------------------------------------------------------------------------------


def rewind(
    learn: Learner,
    to: str | int | Time | None,
    spike: bool,
    fit: Fit | None,
    folder: str | Path | None,
    exact: bool,
) -> Moment:
    "Return the moment before a batch of an earlier run; see `Learner.rewind`."
    check_not_running(learn)
    if (to is None) != spike:
        raise OptionError("Give a time, `learn.rewind('1234ba')`, or `spike=True`.")
    place = find_checkpoint_folder(learn) if folder is None else Path(folder)
    if to is None:
        run = list_runs(place)[0]
        until = find_spike(run.read_losses())
    else:
        until = Time(to, 'ba') if isinstance(to, int) else Time(to)
        run = find_run(place, until)
    origin = run.find_before(until)
    if origin is None and learn.time.ba:
        raise CheckpointError(
            f'The run has no checkpoint before {until}, and this Learner has trained: make it as for training.'
        )
    reasons = [] if origin is None else find_inexact(learn, origin.info)
    _refuse(reasons, exact)
    moment = _go(learn, run, origin, until, fit or make_fit(run.info))
    if {run.info['ranks'], learn.world.size} == {1}:
        recorded = run.read_losses()
        if moment.losses and not recorded:
            warn_user(
                'The run has not recorded a loss for each batch: the losses on the way were not compared.'
            )
        _refuse(find_other_losses(moment.losses, recorded), exact)
    elif run.info['ranks'] != learn.world.size:
        warn_user(
            f'The run was of {run.info["ranks"]} processes, this is {learn.world.size}: numbers are equal up to '
            'rounding.'
        )
    return moment


def make_fit(info: Mapping[str, Any]) -> Fit:
    "Return a function that calls `fit` for as many epochs as the run had."
    n_epoch = info['n_epoch']
    if n_epoch is None:
        raise OptionError(
            "The run had a budget. Give the function that trained: `fit=lambda learn, **kw: learn.fit('2h', **kw)`."
        )
    return lambda learn, **kw: learn.fit(n_epoch, **kw)


def _refuse(reasons: list[str], exact: bool) -> None:
    if not reasons:
        return
    text = '\n  '.join(['The run cannot be repeated exactly:', *reasons])
    if exact:
        raise CheckpointError(f'{text}\nTo go there nevertheless: `exact=False`.')
    warn_user(text)


def _go(learn: Learner, run: RecordedRun, origin: Entry | None, until: Time, fit: Fit) -> Moment:
    "Train from the checkpoint up to the batch, and stand there."
    outside = _collect_outside(learn)
    resume = None
    if origin is not None:
        resume, callbacks = _read_checkpoint(learn, run, origin)
        outside |= {key: callbacks[key] for key in outside if key in callbacks}
    stop = StopBefore(until, None if resume is None else resume.state, run.info['callbacks'])
    travel(learn, stop, fit, resume or False)
    if not stop.drawn:
        raise CheckpointError(f'The run ends before {until}: there is no batch to stand before.')

    def find_before(ba: int) -> Any:
        "Return where to resume to come to a batch: a checkpoint, the start of the run, or None."
        before = run.find_before(Time(max(ba, 0), 'ba')) if ba >= run.first else None
        if before is None:
            return stop.first if ba >= run.first else None
        return _read_checkpoint(learn, run, before)[0]

    return Moment(learn, fit, stop, outside, find_before)


def _read_checkpoint(
    learn: Learner, run: RecordedRun, entry: Entry
) -> tuple[ResumeState, dict[str, Any]]:
    "Return a checkpoint with the states of the callbacks that are repeated, and the states of all."
    resume = find_checkpoint(learn, entry.path)
    assert resume is not None  # the file was there
    callbacks = resume.state['callbacks']
    needed = {key: callbacks[key] for key in run.info['callbacks'] if key in callbacks}
    resume.state = {**resume.state, 'callbacks': needed}
    resume.is_owner = False  # a moment keeps the state, too
    return resume, callbacks


def _collect_outside(learn: Learner) -> dict[str, Any]:
    "Return the states of the callbacks that are left out while the run is repeated."
    keys = learn.parts.callbacks.keys
    silent = {keys[id(cb)] for cb in learn.cbs if declared(cb, 'writes_files')}
    return {key: state for key, state in learn.callback_states().items() if key in silent}
