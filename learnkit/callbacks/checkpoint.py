# SPDX-License-Identifier: Apache-2.0
"""Callback that writes checkpoints during training, at an interval and on SIGTERM."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any, cast

import torch
from fastcore.basics import noop
from torch import Tensor
from typing_extensions import override

from learnkit.callbacks.recorder import check_monitor, read_monitor, recorder_of
from learnkit.callbacks.sigterm import StopRequest, in_ipython
from learnkit.checkpoint.dcp import Writers, find_parts_folder, take_parts
from learnkit.checkpoint.file import write_state
from learnkit.checkpoint.folder import (
    Entry,
    entries,
    find_other_files,
    find_superfluous,
    next_path,
    parse_number,
    remove_checkpoint,
    sweep_folders,
    write_own_files,
)
from learnkit.checkpoint.host import HostMemory, view_on_host
from learnkit.checkpoint.mirror import Mirror, Uploader
from learnkit.checkpoint.rehearsal import (
    SUMMARY,
    Inventory,
    find_lost,
    find_rank_states,
    note_computed,
    take_inventory,
)
from learnkit.checkpoint.state import collect_state
from learnkit.checkpoint.weights import find_trainable, leave_out_frozen_weights
from learnkit.comm.dtensor import mesh_of
from learnkit.core.errors import CancelFitException, CheckpointError, OptionError, TimeError
from learnkit.core.files import FolderLock, as_local_path, check_writable, sweep
from learnkit.core.model import model_device
from learnkit.core.time import Time, as_time
from learnkit.core.validation import check_count, warn_user
from learnkit.core.version import VERSION
from learnkit.core.watched import as_number, can_be_best
from learnkit.engine.callback import Callback
from learnkit.engine.callback_state import callback_names
from learnkit.engine.counters import Every
from learnkit.engine.resumed_run import CheckpointWriter, checkpoint_point
from learnkit.engine.traits import trait_of
from learnkit.metrics.direction import MetricProperties

# units whose intervals end at one event only: `epoch_checkpoint`, `iteration_checkpoint`
EVENT_OF_UNIT = {'ep': 'epoch', 'iter': 'iteration'}


class Checkpoint(CheckpointWriter, Callback):
    """Write checkpoints from which `fit(n, resume=True)` resumes exactly.

    A checkpoint is written at the interval `every` and at the end of the fit, into `folder`, with a name such as
    `00012-ep3-ba1200.ckpt`. It is a safetensors file with a SHA-256 of its whole content, without pickle, and is
    written atomically: the file is complete or absent. It holds model, optimizers, pending gradients, counters,
    history, all random generators, the position in the training data, and every callback's state
    (`learn.checkpoint_state()`).

    Training waits only for a copy of the state to host memory; a background thread writes the file. An error in the
    thread is raised at the next batch. A second checkpoint waits for the first, and is copied into the same memory,
    which is freed at the end of the fit. `background=False` writes synchronously, without a copy of tensors that are
    in host memory.

    If the weights are sharded (strategy 'fsdp'), each rank writes its shards by `torch.distributed.checkpoint` to a
    folder next to the checkpoint, `00012-ep3-ba1200.parts`; any number of ranks can resume from it.

    `trainable_only=True` leaves out the weights that were frozen in all fits with this callback, such as the base
    model of LoRA. The file has their digests (SHA-256, computed once a fit), and a run resumes only with a model that
    has the same values: load or build that model before `fit(resume=True)`. `learn.load(path, strict=False)` loads the
    trained weights of such a file.

    Of the checkpoints of this run, the `keep_last` newest and the `keep_best` best by `monitor` are kept; NaN is never
    best. `monitor` is a column of the history. A checkpoint is ranked only if its weights have been
    evaluated. With a `monitor`, a checkpoint is therefore also written after each evaluation that is one of the
    `keep_best` best so far. Of several with the same value the earliest is the best. Two runs cannot use one folder at
    a time.

    The first checkpoint of a fit compares the attributes of modules, data set and callbacks with those at the fit's
    start. One warning names all that have changed and that no checkpoint holds; `rehearse=False` leaves it out.

    With `mirror='s3://bucket/run'`, or another URL that fsspec opens, a thread of rank 0 copies the newest and the best
    checkpoints to this store, and removes those that the folder would not keep. `fit(resume=True)` fetches the store's
    newest complete checkpoint if the folder's are older. Training does not wait for an upload, and no failure
    of the store stops it: the thread warns once for each kind of failure, and tries again. The end of a fit waits for
    the last upload, also on SIGTERM. Two runs cannot share a store's folder. The first checkpoint of a fit names the
    callbacks with files that a new machine would lack.

    With `on_pause=True`, a pause (`learn.pause()`, `pause_at=`, Ctrl-C in a training batch) also writes a checkpoint,
    from which a new process resumes at the same batch.

    On SIGTERM the current batch, or the current evaluation, is finished, a checkpoint is written, and the process calls
    the earlier signal handler and exits with code 143; in IPython the fit ends. `preemption=False` installs no signal
    handler.

    Raises `OptionError` for invalid options, `MissingExtraError` if a library for the mirror is missing, and before
    training `CheckpointError` for a folder that cannot be written and for a mirror that refuses to be, as a bucket that
    does not exist, `FolderInUseError`, and `MetricError` if `monitor` is not recorded. A resumed fit raises
    `WeightsError` if the model lacks the frozen weights that were left out.
    Checkpointed: the time at which the interval was last checked, the monitored value, the best values, and with
    `trainable_only` the names of the trained parameters.

    >>> import tempfile
    >>> from learnkit.testing import synth_learner
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     learn = synth_learner(path=folder, cbs=Checkpoint(every='1ep', keep_last=2))
    ...     with learn.no_bar(): learn.fit(3)
    ...     sorted(p.name for p in Path(folder, 'checkpoints').glob('*.ckpt'))
    ['00002-ep2-ba20.ckpt', '00003-ep3-ba30.ckpt']
    """

    order = 1000  # after all callbacks whose changes the checkpoint must hold
    remove_on_find = remove_on_fetch = writes_files = True

    def __init__(
        self,
        every: str | int | Time | None = '1ep',  # interval: epochs, '500ba'; None: only at the end
        folder: str | Path | None = None,  # folder; None: `checkpoints` in the Learner's `path`
        keep_last: int | None = 3,  # number of newest checkpoints to keep; None: all
        keep_best: int = 1,  # number of best checkpoints to keep in addition
        monitor: str | None = None,  # column of the history; None: the validation loss
        mode: str | None = None,  # 'min' or 'max'; None: by the column's name
        background: bool = True,  # whether a background thread writes the file
        preemption: bool = True,  # whether SIGTERM saves a checkpoint and exits
        trainable_only: bool = False,  # whether to leave out weights that are frozen from the start
        rehearse: bool = True,  # whether the first checkpoint of a fit warns of what would be lost
        mirror: str | None = None,  # URL of a store for copies, such as 's3://bucket/run'
        on_pause: bool = False,  # whether a pause of the fit writes a checkpoint
    ) -> None:
        try:
            self.every = None if every is None else as_time(every, 'ep')
        except TimeError as e:
            raise TimeError(f'Checkpoint: {e} A folder is given as `folder=`.') from None
        self._interval = None if self.every is None else Every(self.every)
        if keep_last is not None:
            check_count('keep_last', keep_last)
        check_count('keep_best', keep_best, 0)
        if mode not in (None, 'min', 'max'):
            raise OptionError(f"mode={mode!r}: pass 'min', 'max', or None.")
        if not isinstance(monitor, str | None):
            raise OptionError(f'monitor={monitor!r}: pass the name of a column of the history.')
        if monitor is not None and mode is None:
            mode = _find_mode(monitor)
        self._folder = None if folder is None else as_local_path(folder)
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.monitor = monitor
        self.mode = mode
        self.background = background
        self.rehearse = rehearse
        self.preemption = preemption
        self.trainable_only = trainable_only
        self.on_pause = on_pause
        self._saved_at: tuple[str, int] | None = None  # point and batches of the last checkpoint
        self.mirror = None if mirror is None else Mirror(mirror)
        self._uploader: Uploader | None = None  # in rank 0, during a fit
        self._has_named_files = False  # whether this fit has named the files of other callbacks
        self._stop_request = StopRequest()
        self._lock: FolderLock | None = None
        self._has_folder = False  # whether this run, or rank 0 of it, has locked the folder
        self._value: float | None = None  # monitored value of the last evaluation
        self._measured_at: int | None = None  # number of batches trained before this evaluation
        self._best_values: list[float] = []  # best values, with the sign such that lower is better
        self._trained: set[str] = set()  # parameters that were trainable at some time of the run
        self._digests: dict[str, str] = {}  # digests of the frozen weights, by name
        self._inventory: Inventory | None = None  # what the first checkpoint is compared with
        self._begins = False  # whether a fit has begun, and has not trained a batch
        self._lost: list[str] = []  # what the rehearsal has warned of
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None
        self._memory: HostMemory | None = None  # memory of the copy that the thread writes
        self._writers: Writers | None = None  # writers of the shards, on all ranks
        self._run_id = ''
        self._monitored: str | None = None  # name of the monitored value
        self._run_entries: list[Entry] = []  # checkpoints of this run

    # -- the fit -----------------------------------------------------------------------------------

    def checkpoint_folder(self) -> Path:
        "Return the folder of the checkpoints."
        if self._lock is not None:
            return self._lock.folder  # absolute, as the process may change its working directory
        return self.learn.path / 'checkpoints' if self._folder is None else self._folder

    @property
    def run_id(self) -> str:
        "Id of the run that writes; '' outside of a fit."
        return self._run_id

    @property
    def has_own_folder(self) -> bool:
        "True if the folder does not follow `learn.path`."
        return self._folder is not None

    def before_load(self) -> None:
        "Lock the folder before a checkpoint is loaded."
        if self.learn.fitting:
            self._lock_folder()

    def before_fit(self) -> None:
        "Lock the folder, and install the handler of SIGTERM."
        learn = self.learn
        if not learn.fitting:
            return
        if self._interval is not None:
            self._interval.start(learn)
        self._monitored = self._find_monitored_name()
        self._lock_folder()
        self._begin_run(learn.run.resuming)
        self._value = self._measured_at = None
        self._best_values = []
        self._begin_trainable()
        self._inventory = None
        self._begins = True
        if self.preemption:
            self._stop_request.install(learn.dls)

    def before_train(self) -> None:
        """Note before the first batch what the first checkpoint is compared with.

        A resumed run fires the events up to here too, and they set the same again."""
        if self._begins and self.rehearse and self.learn.fitting:
            self._inventory = take_inventory(self.learn)

    def before_validate(self) -> None:
        "Note the results of training, which evaluation computes without a graph."
        if self._inventory is not None:
            self._inventory = note_computed(self._inventory, take_inventory(self.learn))

    def _begin_trainable(self) -> None:
        "Note the parameters that this fit trains. Raises `OptionError` for a sharded model."
        self._digests = {}
        if not self.trainable_only:
            return
        if mesh_of(self.learn.model) is not None:
            raise OptionError(
                "Checkpoint(trainable_only=True) cannot compare frozen weights that the strategy 'fsdp' shards: leave "
                "it out, or use the strategy 'ddp'."
            )
        self._trained |= find_trainable(self.learn.model)

    def _begin_run(
        self,
        resumed: Any,  # the checkpoint that the fit resumes from, None for a new run
    ) -> None:
        "Set the run's id, to the id in the checkpoint or a new one, and find the run's earlier checkpoints."
        world = self.learn.world
        run_id = None if resumed is None else resumed.info.get('run')
        self._run_id = world.broadcast(run_id or token_hex(4))
        world.run_on_all(self._begin_uploads if world.is_first else noop)

    def _begin_uploads(self) -> None:
        "Find the run's earlier checkpoints, and start the thread that uploads to the mirror, if there is one."
        existing = entries(self.checkpoint_folder())
        self._run_entries = [e for e in existing if e.info.get('run') == self._run_id]
        if self.mirror is not None:
            folder = self.checkpoint_folder()
            self._uploader = Uploader(
                self.mirror, folder, self._run_id, self.keep_last, self.keep_best
            )
            self._uploader.start(self._run_entries)

    def _find_monitored_name(self) -> str | None:
        "Return the name of the monitored value, or None if no value is monitored."
        recorder = recorder_of(self.learn)
        if self.monitor is None:
            if recorder is None or not self.keep_best:
                return None
            losses = [name for name in recorder.evaluated_columns() if name.endswith('loss')]
            return losses[0] if losses else None
        check_monitor(self, self.monitor)
        return self.monitor

    def _lock_folder(self) -> None:
        "Create and lock the folder in rank 0."
        if self._has_folder:
            return
        world = self.learn.world
        self.learn.run.releases.append(self.release)
        world.run_on_all(self._create_and_lock if world.is_first else noop)
        self._has_folder = True

    def _create_and_lock(self) -> None:
        folder = self.checkpoint_folder().absolute()
        lock = FolderLock(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)  # raises for a link to nowhere
            check_writable(folder / 'checkpoint')
            self._lock = lock  # first, so that it is released also if this is interrupted
            lock.acquire()
        except OSError as e:
            raise CheckpointError(f'{folder} cannot hold checkpoints: {e}.') from None
        sweep(folder)
        sweep_folders(folder)

    def batch_checkpoint(self) -> None:
        self._begins = False
        self._save_if_due('batch')

    def epoch_checkpoint(self) -> None:
        self._save_if_due('epoch')

    def iteration_checkpoint(self) -> None:
        self._save_if_due('iteration')

    def _save_if_due(self, point: str) -> None:
        "Save a checkpoint if the interval is over, or save and exit after SIGTERM."
        if not self._run_id:
            self.before_fit()  # the callback was added during the fit
        is_due = self._is_due(point)
        is_best = self._is_new_best()
        post = self.learn.world.post
        if post('leave', self._stop_request.received):
            return self._save_and_leave()
        writing = self._writing
        has_failed = writing is not None and writing.done() and writing.exception() is not None
        if post('failed', has_failed):
            self.learn.world.run_on_all(self._wait)
        if self._uploader is not None:
            self._uploader.warn()
        if is_due or is_best:
            self.save()

    def _get_value(self) -> float | None:
        "Return the monitored value if the current weights are the weights that were evaluated."
        return self._value if self._measured_at == self.learn.parts.counters.batches else None

    def _is_new_best(self) -> bool:
        "Return True once for a value of `monitor` that is one of the best so far."
        value = self._get_value()
        if value is None or self.monitor is None:
            return False
        signed = -value if self.mode == 'max' else value
        best = sorted([*self._best_values, signed])[: self.keep_best]
        is_new = best != self._best_values
        self._best_values = best
        return is_new

    def _is_due(self, point: str) -> bool:
        learn = self.learn
        is_last = learn.run.stopping or learn.epoch + 1 == learn.n_epoch
        if point == 'epoch' and is_last:
            return True
        interval = self._interval
        if interval is None or EVENT_OF_UNIT.get(interval.interval.unit, point) != point:
            return False
        return interval.is_due(learn)

    # -- saving ------------------------------------------------------------------------------------

    def save(self) -> Path:
        """Write a checkpoint now, and return its path. A background thread may still be writing the file.

        The method can be called at `batch_checkpoint`, `epoch_checkpoint` and `iteration_checkpoint`. Raises
        `CheckpointError` elsewhere, and an error of writing the previous checkpoint.
        """
        point = checkpoint_point(self.learn)
        if not point:
            raise CheckpointError(
                'A checkpoint is made at batch_checkpoint, epoch_checkpoint or iteration_checkpoint only.'
            )
        return self._save(point, self.background)

    @override
    def save_pause(self, point: str) -> None:
        "Write a checkpoint if the fit is paused and `on_pause` is True, unless this batch has one."
        if self.on_pause and self._saved_at != (point, self.learn.parts.counters.batches):
            self._save(point, background=False)

    def _save(
        self,
        point: str,  # 'batch', 'epoch' or 'iteration'
        background: bool,
    ) -> Path:
        learn = self.learn
        learn.world.run_on_all(self._wait)
        self._rehearse(point)
        state = self._collect_state(point, background)
        path, files = self._write_own_files()
        self._name_other_files()
        if files:
            state['files'] = files
        self._saved_at = point, learn.parts.counters.batches
        write = partial(self._write, state, path, self._make_info(point))
        is_writer = learn.world.is_first or 'parts' in state
        if not background:
            learn.world.run_on_all(write if is_writer else noop)
        elif is_writer:
            self._thread = self._thread or ThreadPoolExecutor(1, 'checkpoint')
            self._writing = self._thread.submit(write)
        return path

    def _rehearse(self, point: str) -> None:
        "Warn once a fit of what a run that resumes from its checkpoints would lose."
        before, self._inventory = self._inventory, None
        if before is None:
            return
        lost = find_lost(before, take_inventory(self.learn)) + find_rank_states(self.learn)
        if lost:
            warn_user('\n  '.join([SUMMARY, *lost]))
        of_data = self.learn.parts.positions.describe_lost_state(self.learn, point == 'batch')
        for text in of_data:
            warn_user(text)
        self._lost = [*lost, *of_data]

    def _write_own_files(self) -> tuple[Path, dict[str, Any]]:
        "Return the path of the next checkpoint, and the files that callbacks have written for it in rank 0."
        learn = self.learn
        path = ''
        if learn.world.is_first:
            after = 0 if self._uploader is None else self._uploader.newest_before
            path = str(next_path(self.checkpoint_folder(), learn.time.ep, learn.time.ba, after))
        path = learn.world.broadcast(path)
        write = partial(write_own_files, learn, Path(path)) if learn.world.is_first else dict
        return Path(path), learn.world.run_on_all(write)

    def _name_other_files(self) -> None:
        "Warn once per fit with a mirror of callbacks whose files a new machine would lack."
        if self._uploader is None or self._has_named_files:
            return
        self._has_named_files = True
        found = find_other_files(self.learn)
        if found:
            warn_user(
                f'These callbacks have files that no checkpoint holds, and {self._uploader.mirror.url} does not get: '
                f'{", ".join(found)}. To resume on a new machine with them, write them in `save_to_checkpoint(folder)`.'
            )

    def _make_info(self, point: str) -> dict[str, Any]:
        "Return the metadata of a checkpoint's file."
        info = {
            'learnkit': VERSION,
            'torch': str(torch.__version__),
            'run': self._run_id,
            'point': point,
            'epoch': self.learn.epoch,
            'ba': self.learn.time.ba,
            **self._describe_run(),
        }
        if self._monitored is not None:
            mode = self.mode or 'min'
            info |= {'monitor': self._monitored, 'mode': mode, 'value': self._get_value()}
        return info

    def _describe_run(self) -> dict[str, Any]:
        "Return what `learn.rewind` has to know before it reads a checkpoint."
        learn = self.learn
        keys = learn.parts.callbacks.keys
        return {
            'time': learn.time.state_dict(),
            'train_iter': learn.train_iter,
            'callback_names': callback_names(learn),
            'n_epoch': learn.n_epoch,
            'stopped_by': learn.run.stopped_by,
            'ranks': learn.world.size,
            'device': str(model_device(learn.model, learn.dls)),
            'callbacks': [keys[id(cb)] for cb in learn.cbs if is_repeated(cb)],
            'lost': self._lost,
        }

    def _collect_state(self, point: str, background: bool) -> dict[str, Any]:
        """Return the state in host memory: the whole state in rank 0, the rank's shards in other ranks.

        For a save in the background, it is a copy in the memory of the previous copy, whose file is complete.
        """
        learn = self.learn
        if self.trainable_only:
            self._trained |= find_trainable(learn.model)
        state = collect_state(learn, point)
        if self.trainable_only and learn.world.is_first:
            state = leave_out_frozen_weights(learn.model, state, self._trained, self._digests)
        if mesh_of(learn.model) is not None:
            state = self._separate_shards(state)
        elif not learn.world.is_first:
            return state
        if not background:
            return cast(dict[str, Any], view_on_host(state))
        self._memory = self._memory or HostMemory()
        return cast(dict[str, Any], self._memory.copy(state))

    def _separate_shards(self, state: dict[str, Any]) -> dict[str, Any]:
        "Return the state with this rank's shards apart, as `parts`; in other ranks than rank 0 only the shards."
        if self._writers is None:
            self._writers = Writers(self.learn.world)
        state, places, tensors = take_parts(state)
        parts = {'places': places, 'tensors': tensors}
        if not self.learn.world.is_first:
            return {'parts': parts}
        # also the model's buffers, so that torch's tools can read the whole model
        weights = {f'model.{k}': t for k, t in state['model'].items() if isinstance(t, Tensor)}
        return {**state, 'parts': {**parts, 'tensors': {**tensors, **weights}}}

    def _note_measured(self, row: Mapping[str, Any] | None) -> None:
        "Keep the monitored value of an evaluation, or of an epoch's row of the history; NaN counts as None."
        name = self._monitored
        if name is None or row is None or row.get(name) is None:
            return
        if self._is_outer_fit():
            value = as_number(self, name, row[name])
            self._value = value if can_be_best(value) else None
            self._measured_at = self.learn.parts.counters.batches

    def _write(self, state: dict[str, Any], path: Path, info: dict[str, Any]) -> None:
        if self._writers is not None:
            parts = state['parts']
            files = self._writers.write(parts['tensors'], find_parts_folder(path))
            state = {**state, 'parts': {'places': parts['places'], 'files': files}}
        if not self.learn.world.is_first:
            return
        write_state(path, state, info)
        self._run_entries.append(Entry(path, parse_number(path), info))
        self._remove_superfluous()

    def _remove_superfluous(self) -> None:
        "Remove checkpoints that are not kept, and let the thread upload the others."
        old = find_superfluous(self._run_entries, self.keep_last, self.keep_best)
        if self._uploader is not None:
            kept = [e for e in self._run_entries if e.path not in old]
            reading = self._uploader.push(kept)
            old = [path for path in old if path != reading]
        for path in old:
            remove_checkpoint(path)
        self._run_entries = [e for e in self._run_entries if e.path not in old]

    def _finish_uploads(self) -> None:
        "Wait on all ranks for the last upload, in intervals shorter than the process group's timeout."
        world = self.learn.world
        while self.mirror is not None and world.any(world.run_on_all(self._is_uploading)):
            pass

    def _is_uploading(self) -> bool:
        "Wait some seconds for the last upload, and return True if it still runs."
        if self._uploader is None:
            return False
        if not self._uploader.finish():
            return True
        self._uploader = None
        self._remove_superfluous()  # also what the upload was reading
        return False

    def _wait(self) -> None:
        "Wait for the checkpoint that is being written, and raise an error of the background thread."
        if self._writing is None:
            return
        wait([self._writing])  # Ctrl-C ends the waiting, not the writing
        future = self._writing
        self._writing = None
        future.result()

    # -- preemption --------------------------------------------------------------------------------

    def after_fit(self) -> None:
        "Wait for the last checkpoint, and share a late SIGTERM between the ranks while all of them still run."
        if self._is_outer_fit():
            self.learn.world.run_on_all(self._wait)
            self._finish_uploads()
            self._stop_request.received = self.learn.world.any(self._stop_request.received)

    def _is_outer_fit(self) -> bool:
        "Return True in the fit that this callback checkpoints, False in a run inside it."
        return bool(self._run_id) and self.learn.fitting and self.learn.run.depth == 1

    def after_epoch(self) -> None:
        recorder = recorder_of(self.learn)
        name = self.monitor  # not the loss that is monitored by default, which evaluations may lack
        if recorder is not None and name and name not in recorder.evaluated_columns():
            self._note_measured({name: read_monitor(self, name)})
        self.learn.world.post('leave', self._stop_request.received)  # before ranks exchange posts

    def after_eval(self) -> None:
        recorder = recorder_of(self.learn)
        if recorder is not None:
            self._note_measured(recorder.measured)

    def _save_and_leave(self) -> None:
        path = self._save(checkpoint_point(self.learn), background=False)
        if self.learn.world.is_first:
            print(f'SIGTERM: the run is saved in {path}', file=sys.stderr, flush=True)
        self._finish_uploads()
        self._stop_request.received = False
        checkpoints = [cb for cb in self.learn.cbs if isinstance(cb, Checkpoint)]
        if any(cb._stop_request.received for cb in checkpoints):
            return  # the last Checkpoint that saves ends the process
        if not in_ipython():
            self._stop_request.leave()
        raise CancelFitException

    def cleanup(self) -> None:
        "Wait for the background threads, release the folder, and restore the signal handler."
        try:
            self._wait()
            while self._is_uploading():
                pass
        finally:
            must_leave = self._stop_request.received
            self._stop_request.received = False
            self.release()
        if must_leave and not in_ipython():
            self._stop_request.leave()

    def release(self) -> None:
        "Release the folder and restore the signal handler, also if the cleanup was aborted."
        self._inventory = None
        self._stop_request.restore()
        if self._uploader is not None:
            self._uploader.close()
        self._uploader = None
        try:
            if self._thread is not None:
                self._thread.shutdown()
        finally:
            self._release_resources()

    def _release_resources(self) -> None:
        if self._lock is not None:
            self._lock.release()
        self._lock = None
        self._has_folder = False
        self._run_id = ''
        self._has_named_files = False
        self._saved_at = None
        self._thread = None
        self._memory = None
        self._run_entries = []
        if self._writers is not None:
            self._writers.close()
        self._writers = None

    @override
    def state_dict(self) -> dict[str, Any]:
        "Return the number of intervals passed, the monitored and best values, and the names of trained parameters."
        passed = None if self._interval is None else self._interval.state_dict()
        sd = {
            'interval': passed,
            'monitor': self._monitored,
            'value': self._value,
            'measured_at': self._measured_at,
            'best_values': self._best_values,
        }
        return {**sd, 'trained': sorted(self._trained)} if self.trainable_only else sd

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the number of intervals passed, and the values if they are of the same name."
        if self._interval is not None and sd.get('interval'):
            self._interval.load_state_dict(sd['interval'])
        if self._monitored is not None and sd.get('monitor') == self._monitored:
            self._value = sd['value']
            self._measured_at = sd['measured_at']
            self._best_values = list(sd['best_values'])
        self._trained |= set(sd.get('trained', ()))


def is_repeated(cb: Any) -> bool:
    "Return True for a callback that a rewound run must have, too: not for loggers, nor for the process group's."
    return not trait_of(cb, 'writes_files') and trait_of(cb, 'needed_to_rewind')


def _find_mode(monitor: str) -> str:
    "Return 'min' or 'max' for a known metric. Raises `OptionError` for an unknown one."
    direction = MetricProperties().get(monitor)
    if direction in ('lower', 'higher'):
        return 'min' if direction == 'lower' else 'max'
    raise OptionError(f"Which {monitor!r} are better: pass mode='min' or 'max'.")
