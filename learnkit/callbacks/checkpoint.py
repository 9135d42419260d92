"""Write checkpoints while training: on an interval, and when the process is asked to end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from fastcore.basics import noop
from torch import Tensor

from learnkit.callbacks.monitor import check_count
from learnkit.callbacks.monitored import as_number, epoch_row, find_column
from learnkit.callbacks.recorder import recorder_of
from learnkit.callbacks.sigterm import StopRequest, in_ipython
from learnkit.checkpoint.dcp import (
    Writers,
    find_parts_folder,
    remove_parts,
    sweep_parts,
    take_parts,
)
from learnkit.checkpoint.file import write_state
from learnkit.checkpoint.folder import Entry, entries, find_superfluous, next_path, parse_number
from learnkit.checkpoint.own_files import remove_own_files, sweep_own_files, write_own_files
from learnkit.checkpoint.state import collect_state, copy_to_host
from learnkit.core.dtensor import mesh_of, whole_state
from learnkit.core.errors import CancelFitException, CheckpointError, OptionError
from learnkit.core.files import check_writable, sweep
from learnkit.core.locks import FolderLock
from learnkit.core.model import name_of
from learnkit.core.time import Time, Timestamp, as_time, crossings
from learnkit.core.validation import warn_user
from learnkit.data.dataloaders import evaluation_loaders
from learnkit.engine.callback import Callback
from learnkit.engine.countable import check_countable
from learnkit.metrics.direction import MetricProperties

__all__ = ['Checkpoint']

# units that are finished at one place of the loop only
UNITS_OF_EVENTS = {'ep': 'epoch', 'iter': 'iteration'}

_runs: set[str] = set()  # those of this process


class Checkpoint(Callback):
    """Write checkpoints that `fit(n, resume=True)` goes on from, exactly.

    One is written on the interval `every`, and at the end of the fit, into `folder`, as `00012-ep3-ba1200.ckpt`: a file
    that is there whole or not at all: a safetensors file with a SHA-256 over all of it, and no pickle. It holds model,
    optimizers, pending gradients, counters, history, all random generators, the place in the training data, and every
    callback's state (`learn.checkpoint_state()`).

    Training waits only for a copy of the state to host memory; another thread writes it. What goes wrong there is
    raised at the next batch. A second checkpoint waits for the first. `background=False` writes at once.

    Where weights are cut over processes (strategy 'fsdp'), each writes its shards, into a folder of safetensors files
    next to the checkpoint, `00012-ep3-ba1200.parts`; any number of processes can resume from it.
    `sharded=False` puts them together for one file.

    `keep_last` of the newest and `keep_best` of the best by `monitor` stay, of those that this run has written; NaN is
    never best. `monitor` is a column of the history or a function of the Learner. Two runs cannot use one
    folder at a time.

    On SIGTERM the batch under way is finished (an evaluation is broken off, to be repeated on resume; several processes
    finish it), a checkpoint written, and the process exits with 143, after the handler of before; in IPython the fit
    ends. For that, the state is copied before each evaluation. `preemption=False` leaves signals alone.

    Raises `OptionError` for options that cannot be followed, and before training `CheckpointError` for a folder that
    cannot be written, `FolderInUseError`, and `MetricError` where `monitor` is not recorded. Checkpointed: when it last
    wrote.

    >>> import tempfile
    >>> from learnkit.testing import synth_learner
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     learn = synth_learner(path=folder, cbs=Checkpoint(every='1ep', keep_last=2))
    ...     with learn.no_bar(): learn.fit(3)
    ...     sorted(p.name for p in Path(folder, 'checkpoints').glob('*.ckpt'))
    ['00002-ep2-ba20.ckpt', '00003-ep3-ba30.ckpt']
    """

    order = 1000  # whatever others do at an event is in the checkpoint
    remove_on_find = remove_on_fetch = writes_files = True

    def __init__(
        self,
        every: str | int | Time | None = '1ep',  # interval: epochs, '500ba'; None: only at the end
        folder: str | Path | None = None,  # where to; None: `checkpoints` in the Learner's `path`
        keep_last: int | None = 3,  # how many of the newest stay; None: all
        keep_best: int = 1,  # how many of the best stay besides
        monitor: str | Callable[[Any], Any] | None = None,  # which is best; None: validation loss
        mode: str | None = None,  # 'min' or 'max'; None: by the column's name
        background: bool = True,  # write on another thread
        preemption: bool = True,  # save and leave on SIGTERM
        sharded: bool = True,  # each process writes its parts of what is cut over processes
    ) -> None:
        self.every = None if every is None else as_time(every, 'ep')
        if keep_last is not None:
            check_count('keep_last', keep_last)
        check_count('keep_best', keep_best, 0)
        if mode not in (None, 'min', 'max'):
            raise OptionError(f"mode={mode!r}: give 'min', 'max', or None.")
        if monitor is not None and mode is None:
            mode = _mode_of(monitor)
        self._folder = None if folder is None else Path(folder)
        self.keep_last, self.keep_best, self.monitor, self.mode = (
            keep_last,
            keep_best,
            monitor,
            mode,
        )
        self.background, self.preemption, self.sharded = background, preemption, sharded
        self._stop = StopRequest()
        self._lock: FolderLock | None = None
        self._has_folder = False  # it is in use by this run, of several processes by the first
        self._before = Timestamp()  # when it last looked whether one is due
        self._next = 0.0  # until when, in the unit of `every`, none can be
        self._buffers: dict[str, Tensor] = {}  # host memory, filled again for each checkpoint
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None
        self._writers: Writers | None = None  # of parts, with all processes
        self._is_writer = False  # of the checkpoint's file: the first process
        self._run_id = ''
        self._own: list[Entry] = []  # this run's checkpoints
        # what was before the evaluation
        self._broken_off: tuple[dict[str, Any], Path, dict[str, Any]] | None = None

    # -- the fit -----------------------------------------------------------------------------------

    def checkpoint_folder(self) -> Path:
        "Return the folder that checkpoints are in; while it is in use, wherever the process goes."
        if self._lock is not None:
            return self._lock.folder
        return self.learn.path / 'checkpoints' if self._folder is None else self._folder

    def before_load(self) -> None:
        "Take the folder into use before anything of a checkpoint is put in place."
        if self.learn.fitting:
            self._take_folder()

    def before_fit(self) -> None:
        "Take the folder into use, and listen for SIGTERM."
        learn = self.learn
        if not learn.fitting:
            return
        if self.every is not None:
            check_countable(learn, self.every)
        self._watched = self._what_is_watched()
        self._take_folder()
        self._begin_run(learn.run.resume)
        self._before, self._next, self._broken_off = learn.time, 0.0, None
        if self.preemption:
            self._stop.install(learn.dls if learn.world.size > 1 else None)

    def _begin_run(self, found: Any) -> None:
        "Go on with the run of the checkpoint that is gone on from, or begin a new one."
        world = self.learn.world
        self._run_id = world.broadcast(
            (found.info.get('run') if found is not None else None) or token_hex(4)
        )
        if not world.is_first:
            return
        there = entries(self.checkpoint_folder())
        self._own = [e for e in there if e.info.get('run') == self._run_id]
        if found is None and there and there[0].info.get('run') not in _runs:
            warn_user(
                f'{self.checkpoint_folder().absolute()} has checkpoints of an earlier run, the newest of them '
                f'{there[0].path.name}. They stay there, and this run begins afresh beside them: to go on from them, '
                '`fit(..., resume=True)`.'
            )
        _runs.add(self._run_id)

    def _what_is_watched(self) -> tuple[str, str] | None:
        "Return the name of what says which checkpoint is best, and which way; None where there is nothing."
        recorder = recorder_of(self.learn)
        if self.monitor is None:
            if recorder is None or not self.keep_best or not evaluation_loaders(self.learn.dls):
                return None
            names = [n for n in recorder.metric_names if n.endswith('loss') and n != 'train_loss']
            return (names[0], self.mode or 'min') if names else None
        if isinstance(self.monitor, str):
            find_column(self, self.monitor)
        return _name_of(self.monitor), self.mode or 'min'

    def _take_folder(self) -> None:
        if self._has_folder:
            return
        world = self.learn.world
        world.run_on_all(self._take if world.is_first else noop)
        self._has_folder = True

    def _take(self) -> None:
        folder = self.checkpoint_folder().absolute()
        lock, self._is_writer = FolderLock(folder), True
        try:
            folder.mkdir(parents=True, exist_ok=True)
            check_writable(folder / 'checkpoint')
            lock.acquire()
        except OSError as e:
            raise CheckpointError(f'{folder.absolute()} cannot hold checkpoints: {e}.') from None
        self._lock = lock
        sweep(folder)
        sweep_parts(folder)
        sweep_own_files(folder)

    def batch_checkpoint(self) -> None:
        self._look('batch')

    def epoch_checkpoint(self) -> None:
        self._look('epoch')

    def iteration_checkpoint(self) -> None:
        self._look('iteration')

    def _look(self, place: str) -> None:
        "Save if it is time, or leave if that was asked for."
        if not self._run_id:
            self.before_fit()  # it came in the middle of the fit
        if self._broken_off is not None:
            self._broken_off = None  # an evaluation that was cancelled is over, too
        is_due, post = self._is_due(place), self.learn.world.post
        if post('leave', self._stop.received):
            return self._leave(place)
        if post('failed', self._has_failed()):
            self._wait_alike()
        if is_due:
            self.save()

    def _has_failed(self) -> bool:
        return (
            self._writing is not None
            and self._writing.done()
            and self._writing.exception() is not None
        )

    def _is_due(self, place: str) -> bool:
        if place == 'epoch' and self._is_last():
            return True
        if self.every is None or UNITS_OF_EVENTS.get(self.every.unit, place) != place:
            return False
        unit = self.every.unit
        if (self.learn.pct_train if unit == 'dur' else self.learn.finished(unit)) < self._next:
            return False
        now = self.learn.time
        before, self._before, self._next = self._before, now, _next_multiple(now, self.every)
        return bool(crossings(before, now, self.every))

    def _is_last(self) -> bool:
        return self.learn.run.stopping or self.learn.epoch + 1 == self.learn.n_epoch

    # -- saving ------------------------------------------------------------------------------------

    def save(self) -> Path:
        """Write a checkpoint now, and return the path that it will have.

        It can be called at `batch_checkpoint`, `epoch_checkpoint` and `iteration_checkpoint`. Raises `CheckpointError`
        elsewhere, and what writing the one before has raised."""
        if not self.learn.run.checkpoint_event:
            raise CheckpointError(
                'A checkpoint is made at batch_checkpoint, epoch_checkpoint or iteration_checkpoint '
                'of a fit: elsewhere there is no place to go on from.'
            )
        if not self._run_id:
            self.before_fit()
        self._wait_alike()
        state, path, info = self._snapshot(self.learn.run.checkpoint_event)
        state = self._with_own_files(state, path)
        if not self.background:
            self._write_alike(state, path, info)
            return path
        if not self.learn.world.is_first and 'parts' not in state:
            return path
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, 'checkpoint')
        self._writing = self._thread.submit(self._write, state, path, info)
        return path

    def _with_own_files(self, state: dict[str, Any], path: Path) -> dict[str, Any]:
        "Let callbacks write their files in the first process; return the state with a list of them."
        learn = self.learn
        write = partial(write_own_files, learn, path) if learn.world.is_first else dict
        files = learn.world.run_on_all(write)
        return {**state, 'files': files} if files else state

    def _snapshot(self, place: str) -> tuple[dict[str, Any], Path, dict[str, Any]]:
        "Copy the state to host memory; return it, the file it is for, and what is said of it there."
        learn, folder = self.learn, self.checkpoint_folder()
        if self._lock is not None and not (folder / '.lock').exists():
            self._take_another_folder()
        state, time = self._state(place), learn.time
        path = Path(
            learn.world.broadcast(
                str(next_path(folder, time.ep, time.ba)) if learn.world.is_first else ''
            )
        )
        info = {
            'learnkit': _version(),
            'torch': str(torch.__version__),
            'run': self._run_id,
            'place': place,
            'epoch': learn.epoch,
            'ba': time.ba,
            'saved': datetime.now(UTC).isoformat('T', 'seconds'),
        }
        if self._watched:
            name, mode = self._watched
            info |= {
                'monitor': name,
                'mode': mode,
                'value': as_number(self, name, self._value(name, place)),
            }
        return state, path, info

    def _state(self, place: str) -> dict[str, Any]:
        "Return the state on the host: all of it in the first process, in the others what they write of it."
        learn, state = self.learn, collect_state(self.learn, place)
        if not self.sharded:
            state = whole_state(state)
        elif mesh_of(learn.model) is not None:
            state, places, parts = take_parts(state)
            if self._writers is None:
                self._writers = Writers(learn.world)
            state['parts'] = {'places': places, 'tensors': parts}
            if not learn.world.is_first:
                state = {'parts': state['parts']}
        elif not learn.world.is_first:
            return state
        return copy_to_host(state, self._buffers)

    def _take_another_folder(self) -> None:
        "Make the folder anew, which somebody has removed with its lock."
        assert self._lock is not None  # it is being written to
        self._lock.release()
        self._lock.folder.mkdir(parents=True, exist_ok=True)
        self._lock.acquire()

    def _value(self, name: str, place: str) -> Any:
        "Return the monitored value as it is now, None where nothing has measured it here."
        at_end, recorder = place in ('epoch', 'iteration'), recorder_of(self.learn)
        if callable(self.monitor):
            return self.monitor(self.learn) if at_end else None
        if recorder is None:
            return None
        latest = recorder.evaluations[-1] if recorder.evaluations else {}
        if latest.get('ba') == self.learn.time.ba and name in latest:
            return latest[name]
        return (epoch_row(self) or {}).get(name) if at_end else None

    def _write(self, state: dict[str, Any], path: Path, info: dict[str, Any]) -> None:
        if 'parts' in state:
            state = self._write_parts(state, path)
        if not self._is_writer:
            return
        write_state(path, state, info)
        self._own.append(Entry(path, parse_number(path), info))
        for old in find_superfluous(self._own, self.keep_last, self.keep_best):
            old.unlink(missing_ok=True)
            remove_parts(old)
            remove_own_files(old)
            self._own = [e for e in self._own if e.path != old]

    def _write_parts(self, state: dict[str, Any], path: Path) -> dict[str, Any]:
        "Write this process's parts; return what the file is to have of those of all."
        assert self._writers is not None  # they were made when the parts were taken
        parts = state['parts']
        written = self._writers.write(parts['tensors'], find_parts_folder(path))
        return {**state, 'parts': {'places': parts['places'], **written}}

    def _write_alike(self, state: dict[str, Any], path: Path, info: dict[str, Any]) -> None:
        "Write in the first process while the others wait, or write their parts."
        world = self.learn.world
        world.run_on_all(
            partial(self._write, state, path, info) if world.is_first or 'parts' in state else noop
        )

    def _wait_alike(self) -> None:
        self.learn.world.run_on_all(self._wait)

    def _wait(self) -> None:
        "Wait for the checkpoint that is being written, and raise what that has raised."
        if self._writing is None:
            return
        wait([self._writing])  # Ctrl-C ends the waiting, not the writing
        written, self._writing = self._writing, None
        written.result()

    # -- leaving -----------------------------------------------------------------------------------

    def on_evaluation(self) -> None:
        "Copy the state as it is now: an evaluation changes it in ways that only its end undoes."
        learn = self.learn
        if not (self.preemption and self._run_id and learn.fitting and learn.run.depth == 1):
            return
        if learn.world.size > 1:
            return  # they agree between batches of training only
        self._wait()
        self._broken_off = self._snapshot('within' if 'train' in learn.run.levels else 'evaluation')

    def after_fit(self) -> None:
        "Wait for the last checkpoint, and hear of a late signal, where all processes can still do so together."
        if not (self.learn.fitting and self.learn.run.depth == 1 and self._run_id):
            return
        self._wait_alike()
        self._stop.received = self.learn.world.any(self._stop.received)

    def after_epoch(self) -> None:
        self.learn.world.post('leave', self._stop.received)  # before all agree

    def after_eval(self) -> None:
        if self.learn.run.depth == 1:
            self._broken_off = None

    def before_batch(self) -> None:
        "Break off an evaluation when it is asked for."
        if self._stop.received and self._evaluates():
            self._leave_evaluation()

    def _evaluates(self) -> bool:
        return (
            self._broken_off is not None and self.learn.run.evaluating and self.learn.run.depth == 1
        )

    def on_draw_failed(self) -> None:
        "Take the failure of workers that got the signal too for the stop that it asked for."
        if not self._stop.received:
            return
        if self._evaluates():
            self._leave_evaluation()
        elif self.learn.training and self.learn.run.depth == 1 and self.learn.world.size == 1:
            self.learn.iter -= 1  # this batch was not drawn
            self._leave('batch')

    def _leave(self, place: str) -> None:
        try:
            self._wait_alike()
        finally:
            # the one before may have failed, as long as this one does not
            self._finish(*self._snapshot(place))

    def _leave_evaluation(self) -> None:
        assert self._broken_off is not None
        (state, path, info), self._broken_off = self._broken_off, None
        self._finish(state, path, info)

    def _finish(self, state: dict[str, Any], path: Path, info: dict[str, Any]) -> None:
        state = self._with_own_files(state, path)
        self._write_alike(state, path, info)
        if self.learn.world.is_first:
            print(f'SIGTERM: the run is saved in {path}', file=sys.stderr, flush=True)
        self._stop.received = False
        if any(isinstance(cb, Checkpoint) and cb._stop.received for cb in self.learn.cbs):
            return  # it saves, too
        if not in_ipython():
            self._stop.leave()
        raise CancelFitException

    def cleanup(self) -> None:
        "Wait for the writer, and give folder and signals back."
        try:
            self._wait()
        finally:
            self._stop.restore()
            asked, self._stop.received, self._broken_off, self._run_id = (
                self._stop.received,
                False,
                None,
                '',
            )
            try:
                if self._thread is not None:
                    self._thread.shutdown()
            finally:
                if self._lock is not None:
                    self._lock.release()
                self._lock, self._thread, self._buffers, self._own, self._has_folder = (
                    None,
                    None,
                    {},
                    [],
                    False,
                )
                if self._writers is not None:
                    self._writers.close()
                self._writers, self._is_writer = None, False
        if asked and not in_ipython():
            self._stop.leave()

    def state_dict(self) -> dict[str, Any]:
        "Return when it last looked whether a checkpoint was due."
        return {'before': self._before.state_dict()}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Go on from there."
        self._before, self._next = Timestamp.from_state_dict(sd['before']), 0.0


def _next_multiple(now: Timestamp, every: Time) -> float:
    "Return the next multiple of an interval, as a plain number that is not above it by a rounding."
    return (now._in(every.unit) // every.value + 1 - 1e-6) * every.value


@cache
def _version() -> str:
    try:
        return version('learnkit')
    except PackageNotFoundError:
        return ''


def _mode_of(monitor: Any) -> str:
    "Return 'min' or 'max', as is known of a metric; raise `OptionError` where nothing is."
    if not callable(monitor) and not (isinstance(monitor, str) and monitor):
        raise OptionError(
            f'monitor={monitor!r}: give a column of the history, such as `valid_loss`, or a function of '
            'the learner.'
        )
    way = MetricProperties().get(_name_of(monitor))
    if way in ('lower', 'higher'):
        return 'min' if way == 'lower' else 'max'
    raise OptionError(
        f"Nobody has said which values of {_name_of(monitor)!r} are better: give mode='min' or 'max'."
    )


def _name_of(monitor: Any) -> str:
    return monitor if isinstance(monitor, str) else name_of(monitor)
