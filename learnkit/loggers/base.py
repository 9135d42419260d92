# SPDX-License-Identifier: Apache-2.0
"""Base class of loggers: collect values step by step, and write each step once."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

from torch import Tensor
from typing_extensions import override

from learnkit.callbacks.history import describe_change
from learnkit.callbacks.recorder import recorder_of
from learnkit.core.errors import OptionError
from learnkit.core.files import check_folder
from learnkit.core.random import preserved_rng
from learnkit.core.time import Time, as_time
from learnkit.engine.callback import Callback
from learnkit.engine.counters import Every
from learnkit.engine.pause import resumes_in_memory
from learnkit.loggers.grid import arrange_images
from learnkit.loggers.values import (
    configuration,
    decode_rows,
    encode_rows,
    fetch,
)
from learnkit.metrics.base import Mean, is_scalar

Rows = list[tuple[int, dict[str, float]]]  # step, and logged values by name

_ALL_STEPS = 2**62  # later than any step: keep the whole log
# open loggers, which are closed at exit, even if they were removed from their Learner
open_loggers: WeakSet[Logger] = WeakSet()


class Logger(Callback):
    """Collect values and pass them to `log_metrics`, which subclasses define; the base class writes nothing.

    Logged values:

    - at the interval `every`: the training loss (`loss`) and the hyperparameters (`lr`, `mom`; `lr/0`, `lr/1` ... of
      several groups)
    - each value that a callback passes to `learn.log`
    - the losses and metrics of each evaluation
    - the other columns of each epoch's row, as `epoch/epoch`, `epoch/train_loss` and so on, except values that were
      logged with `shown=False` (by monitors)
    - images, text and settings, from `log_images`, `log_text` and `log_params`
    - the text `changes`, of what was changed before `learn.resume()`

    The values of one step are written together, after the step, at the next time that something is due. If a batch
    fails, the values logged before the failure are written as a step.

    Steps are batches over all fits (`learn.time.ba`). Every other counter may pause (optimizer steps while gradients
    accumulate, epochs between evaluations), restart with each fit, or be unknown. If the log already has later steps,
    for example of another Learner, the steps continue after the last logged step.

    Values stay on their device and are fetched together, in one transfer. A name that is logged several
    times in a step (for microbatches) is averaged. `lr_find`, `validate()` and `get_preds()` log nothing.

    A backend defines `log_metrics`, `log_params`, `log_images` and `log_text`, which write; `open` and `shut`, between
    which these methods are called; and `flush`, `where` and `check`. The backend is opened at the first write, and at
    the first write after `close`; it continues the same log. Checkpointed: the step, the values that are not written
    yet, and the state that the backend needs to continue the log.

    >>> from learnkit.testing import synth_learner
    >>> class PrintLogger(Logger):
    ...     def log_metrics(self, step, values): print(step, *values)
    >>> with synth_learner(n_train=10, cbs=PrintLogger(every='5ba')).no_bar() as learn: learn.fit(1)
    5 loss lr mom
    10 loss lr mom valid_loss epoch/epoch epoch/train_loss epoch/time
    """

    order = 100
    run_valid = False
    remove_on_fetch = True
    remove_on_find = True
    writes_files = True
    first_process_only = True
    nondeterministic_state = ('rows.*.1.epoch/time',)
    metric_names = {
        'loss': 'in logs: the loss of a training batch',
        'lr': 'in logs: the learning rate (`lr/0`, `lr/1` ... of several param groups)',
        'mom': 'in logs: the momentum, likewise',
        'epoch/{column}': 'in logs: a column of the history',
    }

    def __init__(
        self,
        every: str | Time = '10ba',  # interval of losses and hyperparameters: ba, st, sp, tok, sec
    ) -> None:
        self.every = as_time(every, 'ba')
        self._interval = Every(self.every)
        self._handle: Any = None  # return value of `open`, None while closed
        self._id: str | None = None  # id of the run of a service; None before the first `open`
        self._is_new_log = True  # whether the log was never opened
        self._kept_step: int | None = None  # last step that a resumed log keeps
        self._has_batches = True  # whether a resumed fit has trained or evaluated a batch
        self._n_in_log = -1  # last step that a resumed log has already
        self._step_offset = 0  # step minus number of batches
        self._last_written = -1  # last written step
        self._first_batch = 0  # number of batches when the fit started
        self._has_failed = False
        self._is_new_fit = False  # True from the start of a fit to the first write
        self._settings: dict[str, Any] = {}  # settings from `log_params`
        self._clear()

    def _clear(self) -> None:
        self._rows: list[tuple[int, dict[str, Any]]] = []  # number of batches, and logged values
        self._logged_columns: set[str] = set()  # columns of the epoch's row that need not be logged
        self._is_due = False

    @property
    @override
    def name(self) -> str:
        "Name of the class in snake case; 'logger' would hide `learn.logger`."
        return 'base_logger' if type(self) is Logger else super().name

    # -- interface of backends ---------------------------------------------------------------------

    def log_metrics(self, step: int, values: dict[str, float]) -> None:
        "Write the values of a step; steps are increasing."

    def log_params(self, params: dict[str, Any]) -> None:
        "Write the configuration, plain values by name, at the start of each fit."

    def log_images(self, step: int, name: str, images: Any) -> None:
        "Write images, an array (N, H, W, C) of bytes with 1, 3 or 4 channels; a grid is one image."

    def log_text(self, step: int, name: str, text: str) -> None:
        "Write a text."

    def write(self, rows: Rows) -> None:
        "Write several steps; backends that can write them together override this method."
        for step, values in rows:
            self.log_metrics(step, values)

    def flush(self) -> None:
        "Make written values durable, after each run and before a checkpoint."

    def where(self) -> Any:
        "Return the target of this logger: a folder, a path, or None."
        return None

    def check(self) -> None:
        "Raise a typed error before training if writing would fail: by default, if `where` is a folder without access."
        if isinstance(self.where(), Path):
            check_folder(self.where())

    def open(
        self,
        keep: int | None,  # last step to keep, in a resumed run; None: keep all
    ) -> tuple[Any, int]:
        """Open the backend and continue an existing log; return a handle and the last step (-1 for an empty log).

        A resumed run does not write steps up to that one again."""
        return True, -1

    def shut(self, handle: Any) -> None:
        "Close the handle that `open` returned."

    def saved(self) -> dict[str, Any]:
        "Return the state that a resumed process needs to continue the log: by default the id of the run."
        return {'id': self._id}

    def restore(self, sd: dict[str, Any]) -> None:
        "Restore the state that `saved` returned."
        self._id = sd['id']

    # -- collecting --------------------------------------------------------------------------------

    def before_fit(self) -> None:
        "Check that the log can be written."
        learn = self.learn
        if not learn.fitting:
            return
        self.check()
        self._interval.start(learn)
        self._first_batch = learn.parts.counters.batches
        self._is_new_fit = True
        self._has_failed = False
        if resumes_in_memory(learn):
            learn.parts.callbacks.check_once(self, 'before_batch', self._log_changes)

    def _log_changes(self) -> None:
        "Log what was changed while the fit was paused, at the step of its first batch."
        recorder = recorder_of(self.learn)
        ba = self.learn.parts.counters.batches
        changes = [] if recorder is None else recorder.history.changes
        texts = [describe_change(change) for change in changes if change['ba'] == ba]
        if texts:
            self.send_text('changes', f'{ba}ba: {"; ".join(texts)}')

    def before_batch(self) -> None:
        "Write finished steps if they are due."
        self._has_batches = True
        if self._is_due:
            self._write_rows()

    def after_batch(self) -> None:
        "Log the loss and the hyperparameters if they are due."
        if self._interval.is_due(self.learn):
            self._log_step()

    def _log_step(self) -> None:
        learn = self.learn
        groups = learn.opt.hypers if learn.opt is not None else []
        values = self._find_row()
        if 'loss_grad' in learn.__dict__:
            loss = learn.loss.mean() if learn.loss.dim() else learn.loss
            values['loss'] = loss.item() if loss.is_cpu else loss
        for i, hypers in enumerate(groups):
            for name in ('lr', 'mom'):
                if name not in hypers:
                    continue
                # a rate in a tensor is overwritten by the next step
                value = hypers[name].clone() if isinstance(hypers[name], Tensor) else hypers[name]
                values[name if len(groups) == 1 else f'{name}/{i}'] = value
        self._is_due = True

    def receive_log(
        self,
        name: str,  # name in the log
        value: Any,  # number, or tensor of one element on any device
        weight: Any = 1,  # weight in the average; None: keep the latest value only
        shown: bool = True,  # whether the Recorder's printed table also has the value
    ) -> None:
        "Log a value that was passed to `learn.log`."
        learn = self.learn
        if not learn.fitting or learn.phase == 'predict':
            return
        if not isinstance(name, str) or not name.isprintable() or name in ('', 'step'):
            raise OptionError(f'{name!r} cannot be logged: use a printable name other than `step`.')
        if not shown or not learn.training:
            self._logged_columns.add(name)
        values = self._find_row()
        mean = values.get(name)
        values[name] = mean if isinstance(mean, Mean) else Mean()
        if weight is None:
            values[name].reset()
        values[name].add(value, 1 if weight is None else weight)

    @property
    def _step(self) -> int:
        "The number of training batches, including the current batch."
        learn = self.learn
        return learn.parts.counters.batches + (bool(learn.training) and 'batch' in learn.run.levels)

    def _find_row(self) -> dict[str, Any]:
        "Return the values of the current step; an evaluation belongs to the step before it."
        if not self._rows or self._rows[-1][0] != self._step:
            self._rows.append((self._step, {}))
        return self._rows[-1][1]

    def after_validate(self) -> None:
        "Log the losses and metrics of a loader from the Recorder, at the step before the evaluation."
        recorder = recorder_of(self.learn)
        if not self.learn.fitting or recorder is None:
            return
        measured = {k: v for k, v in recorder.measured.items() if is_scalar(v)}
        self._find_row().update(measured)
        self._logged_columns |= measured.keys()
        self._is_due = True

    def after_epoch(self) -> None:
        "Log the other columns of the epoch's row."
        learn = self.learn
        recorder = recorder_of(self.learn)
        if not learn.fitting or recorder is None or not recorder.history:
            return
        row = recorder.history[-1]
        if (row.get('fit'), row.get('epoch')) != (recorder.n_fits - 1, learn.epoch):
            return
        columns = {
            f'epoch/{name}': value
            for name, value in row.items()
            if name != 'fit' and name not in self._logged_columns and is_scalar(value)
        }
        if columns:
            self._find_row().update(columns)
        self._is_due = True

    # -- writing -----------------------------------------------------------------------------------

    def _write_rows(self, include_current: bool = False) -> None:
        "Write the rows of finished steps, and with `include_current` of the current step."
        self._is_due = False
        n = len(self._rows)
        if n and not include_current and self._rows[-1][0] == self._step:
            n -= 1
        rows = self._rows[:n]
        self._rows = self._rows[n:]
        if not rows:
            return
        self._begin()
        values = fetch([row for _, row in rows])
        steps = [ba + self._step_offset for ba, _ in rows]
        new = [row for row in zip(steps, values, strict=True) if row[0] > self._n_in_log]
        if new:
            self.write(new)
        self._last_written = steps[-1]
        if self._kept_step is not None:
            self._kept_step = max(self._kept_step, steps[-1])

    def _begin(self) -> None:
        "Open the backend if it is closed; at the start of a fit, also set the first step and log the configuration."
        is_resumed = self._kept_step is not None
        if is_resumed and self._has_batches:
            self.close()  # a fit that had ended has opened it without dropping steps
        if self._handle is None:
            keep = self._kept_step if self._has_batches else _ALL_STEPS
            with preserved_rng():  # W&B and MLflow draw names and ids
                self._handle, found = self.open(keep)
            if is_resumed:
                self._n_in_log = found
            else:
                self._last_written = max(self._last_written, found)
            self._is_new_log = False
            _close_at_exit(self)
        if self._has_batches:
            self._kept_step = None
        if not self._is_new_fit:
            return
        self._is_new_fit = False
        if not is_resumed:
            self._step_offset = max(self._step_offset, self._last_written - self._first_batch)
        self._log_settings()

    def _log_settings(self) -> None:
        with preserved_rng():
            self.log_params({**configuration(self.learn), **self._settings})

    def receive_images(
        self,
        name: str,  # name in the log
        images: Any,  # images, as in `log_images`
        captions: Sequence[Any] | None = None,  # text above each image
        grid: bool = True,  # whether several images become one picture
    ) -> None:
        "Log images at the current step."
        self._send(self.log_images, name, arrange_images(images, captions, grid))

    def send_text(
        self,
        name: str,  # name in the log
        text: str,
    ) -> None:
        "Log text at the current step."
        self._send(self.log_text, name, text)

    def add_settings(
        self,
        settings: dict[str, Any],  # plain values by name
    ) -> None:
        "Add settings to the configuration; log the configuration, unless the next write logs it."
        self._settings |= settings
        if self._handle is not None and not self._is_new_fit:
            self._log_settings()

    def _send(self, log: Any, name: str, content: Any) -> None:
        "Write an image or a text at the current step, after the values of earlier steps."
        self._write_rows()
        self._begin()
        step = self._step + self._step_offset
        if step > self._n_in_log:
            with preserved_rng():
                log(step, name, content)

    def after_error(self) -> None:
        "Record that the run failed."
        self._has_failed = True

    def cleanup(self) -> None:
        "Write and flush the remaining values of the run."
        try:
            if self._rows:
                self._write_rows(include_current=True)
            if self._handle is not None:
                self.flush()
        finally:
            self._clear()

    def close(self) -> None:
        "Close the backend; the next write opens it again."
        if self._handle is None:
            return
        handle = self._handle
        self._handle = None
        open_loggers.discard(self)
        with preserved_rng():
            self.shut(handle)

    @override
    def state_dict(self) -> dict[str, Any]:
        "Return the values that are not written yet, and the position in the log."
        if self._handle is not None:
            self.flush()
        return {
            'shift': self._step_offset,
            'is_new_fit': self._is_new_fit,
            'interval': self._interval.state_dict(),
            'handed': self._last_written,
            'due': self._is_due,
            'rows': encode_rows(self._rows),
            'in_log': sorted(self._logged_columns),
            'settings': dict(self._settings),
            **self.saved(),
        }

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        """Continue after the last step of the state; later steps are dropped from the log at the next batch.

        A fit that had ended has no next batch, and the log may hold the steps of later fits."""
        self._clear()
        self.close()
        self._interval.load_state_dict(sd['interval'])
        self._step_offset = sd['shift']
        self._is_new_fit = sd['is_new_fit']
        self._last_written = sd['handed']
        self._logged_columns = set(sd['in_log'])
        self._is_new_log = False
        self._kept_step = sd['handed']
        self._has_batches = False
        self._settings = {**sd['settings'], **self._settings}
        self._rows = decode_rows(sd['rows'])
        self._is_due = sd['due']
        self.restore(sd)

    def __getstate__(self) -> dict[str, Any]:
        "Return the attributes without the open handle: a copy opens a new one."
        return {**self.__dict__, '_handle': None}


def _close_at_exit(logger: Logger) -> None:
    "Close a logger at exit, before its library closes: exit functions run in reverse order of registration."
    open_loggers.add(logger)
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def _close_all() -> None:
    for cb in list(open_loggers):
        cb.close()
