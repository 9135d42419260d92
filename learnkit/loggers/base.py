"""What all loggers have in common: they gather what there is to log, step by step, and hand each step over once."""

from __future__ import annotations

import atexit
import sys
from importlib.util import find_spec
from typing import Any
from weakref import WeakSet

from torch import Tensor

from learnkit.callbacks.recorder import recorder_of
from learnkit.core.errors import MissingExtraError, OptionError, TimeError
from learnkit.core.random import preserved_rng
from learnkit.core.time import Time, as_time, crossings
from learnkit.engine.callback import Callback
from learnkit.loggers.values import (
    as_images,
    configuration,
    fetch,
    kept_rows,
    name_writer,
    read_rows,
    writer_of,
)
from learnkit.metrics.base import Mean, is_number

__all__ = ['Logger', 'Rows', 'need', 'open_loggers']

Rows = list[tuple[int, dict[str, float]]]  # step, and what was logged there

# a logger that was removed from its Learner has no other end
open_loggers: WeakSet[Logger] = WeakSet()


class Logger(Callback):
    """Gather what there is to log and hand it to `log_metrics`, which a subclass defines; by itself it does nothing.

    Logged are: every `every` batches the training loss (`loss`) and the hyper-parameters (`lr`, `mom`; `lr/0`, `lr/1`
    ... of several groups); each value that a callback gives to `learn.log`; the losses and metrics of each evaluation;
    and the other columns of each epoch's row, as `epoch/epoch`, `epoch/train_loss` and so on, except those that are
    logged with `shown=False` (monitors do). Images, texts and settings come from `log_images`, `log_text` and
    `log_params`. What belongs to one step comes in one piece, once the step is over and something is due; of a batch
    that fails, what was logged before counts as a step.

    Steps are batches over all fits (`learn.time.ba`): every other counter stands still at times (optimizer steps while
    gradients accumulate, epochs between evaluations), starts again with each fit, or is unknown. Where a Learner's
    counter lies behind what was logged before, by another Learner for one, steps go on after the last one.

    Values stay on their device and are fetched together, in one transfer. A name that is logged several times in a step
    (for microbatches) by one callback is averaged; by two it is an `OptionError` that names both. Nothing is logged by
    `lr_find`, and nothing of `validate()` and `get_preds()`.

    A backend defines `log_metrics`, `log_params`, `log_images` and `log_text`, `open` and `shut` around them, `flush`,
    `where` and `check`. It is opened when there is something to write, also after `close`, and goes on where it was.
    Checkpointed: the step, what is not handed over yet, and what the backend needs to go on in the same place.

    >>> from learnkit.testing import synth_learner
    >>> class Told(Logger):
    ...     def log_metrics(self, step, values): print(step, *values)
    >>> with synth_learner(n_train=10, cbs=Told(every='5ba')).no_bar() as learn: learn.fit(1)
    5 loss lr mom
    10 loss lr mom valid_loss epoch/epoch epoch/train_loss epoch/time
    """

    order, run_valid, remove_on_fetch, remove_on_find, writes_files = 100, False, True, True, True
    first_process_only = True
    wall_clock = ('rows.*.1.epoch/time',)
    metric_names = {
        'loss': 'in logs: the loss of a training batch',
        'lr': 'in logs: the learning rate (`lr/0`, `lr/1` ... of several param groups)',
        'mom': 'in logs: the momentum, likewise',
        'epoch/{column}': 'in logs: a column of the history',
    }

    def __init__(
        self,
        every: str | Time = '10ba',  # interval of losses and hyper-parameters: ba, st, sp, tok, sec
    ) -> None:
        self.every = as_time(every, 'ba')
        if self.every.unit not in ('ba', 'st', 'sp', 'tok', 'sec'):
            raise TimeError(
                f'every={str(every)!r}: what is logged at each step is counted in ba, st, sp, tok or sec. '
                'Evaluations and epochs are logged when they end.'
            )
        self._handle: Any = None  # what the backend writes to, None while closed
        # never opened; the step behind which a resumed log is cut off
        self._fresh, self._keep = True, None
        self._shift, self._handed = 0, -1  # from batches to steps; the last step handed over
        # batches at the last look, and their step at the last run's end
        self._ba, self._last = 0, -1
        self._failed = self._new_fit = False
        self._ba_at_start: int | None = None
        self._settings: dict[str, Any] = {}  # what `log_params` added to the configuration
        self._params: dict[str, Any] | None = None  # the configuration as it was last logged
        self._looked: Any = None  # when it was last seen whether something is due
        self._clear()

    def _clear(self) -> None:
        self._rows: list[tuple[int, dict[str, Any]]] = []  # batches, and what was logged there
        self._writers: dict[str, Any] = {}  # who logged what in the last of them
        self._evaluated: dict[str, Any] | None = None  # what is logged while an evaluation runs
        self._eval_by: dict[str, Any] = {}  # and by whom
        self._in_log: set[str] = set()  # columns that the epoch's row need not give again
        self._due = False

    @property
    def name(self) -> str:
        "The class's name in snake_case; that of `Logger` itself would hide `learn.logger`."
        return 'base_logger' if type(self) is Logger else super().name

    # -- the protocol ------------------------------------------------------------------------------

    def log_metrics(self, step: int, values: dict[str, float]) -> None:
        "Write the values of a step; steps come in order, each once."

    def log_params(self, params: dict[str, Any]) -> None:
        "Write the configuration: plain values by name, at the start of each fit."

    def log_images(self, step: int, name: str, images: Any) -> None:
        "Write images, an array (N, H, W, C) of bytes with 1, 3 or 4 channels."

    def log_text(self, step: int, name: str, text: str) -> None:
        "Write a text."

    def write(self, rows: Rows) -> None:
        "Write several steps; for backends that can take them at once."
        for step, values in rows:
            self.log_metrics(step, values)

    def flush(self) -> None:
        "Bring what was written to where nothing is lost: after each run, and before a checkpoint."

    def where(self) -> Any:
        "Return what this logger writes to, which no other one may: a path, for one."
        return None

    def check(self) -> None:
        "Raise a typed error where writing would fail; before training."

    def open(
        self,
        keep: int | None,  # a run resumed after this step: drop what was logged later
    ) -> tuple[Any, int]:
        "Open the backend, go on with what is there; return what is written to, and the last step there (-1: none)."
        return True, -1

    def shut(self, handle: Any) -> None:
        "Close what `open` returned."

    def saved(self) -> dict[str, Any]:
        "Return what a resumed process needs to go on in the same place."
        return {}

    def restore(self, sd: dict[str, Any]) -> None:
        "Take what `saved` returned."

    # -- gathering ---------------------------------------------------------------------------------

    def before_fit(self) -> None:
        "See that writing will work."
        learn = self.learn
        if not learn.fitting:
            return
        for cb in learn.cbs:
            if (
                cb is not self
                and isinstance(cb, Logger)
                and self.where() is not None
                and cb.where() == self.where()
            ):
                raise OptionError(
                    f'{name_writer(cb)} and {name_writer(self)} both log to {self.where()}: give one of '
                    'them another place, or remove it.'
                )
        self.check()
        self._looked, self._ba = learn.time, learn.counters.batches
        self._ba_at_start, self._new_fit, self._failed = self._ba, True, False

    def before_batch(self) -> None:
        "Hand over what is due, now that its step is over."
        if self._due:
            self._hand_over()

    def after_batch(self) -> None:
        "Log loss and hyper-parameters, when they are due."
        self._ba = self.learn.counters.batches
        if self._ba % self.every.value == 0 if self.every.unit == 'ba' else self._crossed():
            self._log_step()

    def _crossed(self) -> bool:
        before, self._looked = self._looked, self.learn.time
        return crossings(before, self._looked, self.every) > 0

    def _log_step(self) -> None:
        learn, groups = self.learn, self.learn.opt.hypers if self.learn.opt is not None else []
        if 'loss_grad' in learn.__dict__:
            loss = learn.loss.mean() if learn.loss.dim() else learn.loss
            self._put('loss', loss.item() if loss.is_cpu else loss, self)
        for i, hypers in enumerate(groups):
            for name in ('lr', 'mom'):
                if name not in hypers:
                    continue
                # it will be filled
                value = hypers[name].clone() if isinstance(hypers[name], Tensor) else hypers[name]
                self._put(name if len(groups) == 1 else f'{name}/{i}', value, self)
        self._due = True

    def receive_log(
        self,
        name: str,  # what it is called in the log
        value: Any,  # a number, or a tensor of one element on any device
        weight: Any = 1,  # how much it counts in the average; None: the latest value counts alone
        shown: bool = True,  # whether it is printed in the Recorder's table too
    ) -> None:
        "Take in what a callback gave to `learn.log`."
        learn = self.learn
        if not learn.fitting or learn.phase == 'predict':
            return
        if not isinstance(name, str) or not name.isprintable() or name in ('', 'step'):
            raise OptionError(
                f'{name!r} cannot be logged: give a printable name other than `step`.'
            )
        if not shown:
            self._in_log.add(name)
        writer = writer_of(sys._getframe(1))
        values = self._row() if self._evaluated is None else self._evaluated
        there = values.get(name)
        self._put(name, there if isinstance(there, Mean) else Mean(), writer)
        if weight is None:
            values[name].reset()
        values[name].add(value, 1 if weight is None else weight)

    def _put(self, name: str, value: Any, writer: Any) -> None:
        "Put a value where the running evaluation, or else the current step, has its own."
        values, writers = (
            (self._row(), self._writers)
            if self._evaluated is None
            else (self._evaluated, self._eval_by)
        )
        if name in values and writers.get(name, writer) is not writer:
            self._refuse(name, writers[name], writer)
        values[name], writers[name] = value, writer

    def _refuse(self, name: str, *writers: Any) -> None:
        who = ' and by '.join(name_writer(w) for w in writers)
        raise OptionError(
            f'`{name}` was logged twice in step {self._now + self._shift}: by {who}. Give one of them '
            'another name.'
        )

    @property
    def _now(self) -> int:
        "The number of batches, with the one under way."
        learn = self.learn
        return learn.counters.batches + (bool(learn.training) and 'batch' in learn.run.levels)

    def _row(self) -> dict[str, Any]:
        if not self._rows or self._rows[-1][0] != self._now:
            self._rows.append((self._now, {}))
            self._writers = {}
        return self._rows[-1][1]

    def before_eval(self) -> None:
        "Gather for this evaluation."
        if self.learn.fitting:
            self._evaluated, self._eval_by = {}, {}

    def after_validate(self) -> None:
        "Take the losses and metrics of a loader from the Recorder."
        recorder = recorder_of(self.learn)
        if self._evaluated is None or not self.learn.fitting or recorder is None:
            return
        for name, value in recorder.measured.items():
            if is_number(value):
                self._put(name, value, recorder)

    def after_eval(self) -> None:
        "Log this evaluation at the step that it came after."
        if not self.learn.fitting:
            return  # a validate() inside the fit
        evaluated, self._evaluated = self._evaluated or {}, None
        for name, value in evaluated.items():
            self._put(name, value, self._eval_by[name])
        self._in_log |= evaluated.keys()
        self._due = True

    def before_train(self) -> None:
        "Forget an evaluation that was cancelled before its end."
        self._evaluated = None

    def on_run_failed(self) -> None:
        if self.learn.fitting:
            self._evaluated = None

    def after_epoch(self) -> None:
        "Log what else is in the epoch's row."
        learn, recorder = self.learn, recorder_of(self.learn)
        if not learn.fitting or recorder is None or not recorder.history:
            return
        row = recorder.history[-1]
        if (row.get('fit'), row.get('epoch')) != (recorder.n_fits - 1, learn.epoch):
            return
        for name, value in row.items():
            if name != 'fit' and name not in self._in_log and is_number(value):
                self._put(f'epoch/{name}', value, recorder)
        self._due = True

    # -- handing over ------------------------------------------------------------------------------

    def _hand_over(self, also_now: bool = False) -> None:
        "Hand over the rows of finished steps, and that of the current step when nothing more will come to it."
        self._due = False
        n = len(self._rows)
        if n and not also_now and self._rows[-1][0] == self._now:
            n -= 1
        rows, self._rows = self._rows[:n], self._rows[n:]
        if not rows:
            return
        self._begin(rows[0][0])
        values = fetch([row for _, row in rows])
        self.write([(ba + self._shift, vs) for (ba, _), vs in zip(rows, values, strict=True)])
        self._handed = rows[-1][0] + self._shift

    def _begin(self, ba: int) -> None:
        "Open the backend if it is closed; at the start of a fit find the place of its steps, and log how it is set up."
        if self._handle is None:
            with preserved_rng():
                self._handle, found = self.open(self._keep)  # W&B and MLflow draw names and ids
            if self._keep is None:
                self._last = max(self._last, found)
            self._fresh, self._keep = False, None
            _close_at_exit(self)
        if not self._new_fit:
            return
        self._new_fit, before = False, self._params if self._ba_at_start is None else None
        if self._ba_at_start is not None:
            self._shift = max(0, self._last - self._ba_at_start)
        elif ba + self._shift <= self._handed:
            self._shift = self._last - ba  # the Learner's counters were not resumed
        self._log_settings(before)

    def _log_settings(self, before: dict[str, Any] | None = None) -> None:
        "Log the configuration, unless the process that is resumed has logged it; rates are those of its beginning."
        self._params = {**configuration(self.learn), **self._settings}
        if before is not None:
            hypers = self.learn.opt.hypers[0]
            self._params |= {
                name: v for name, v in before.items() if name.partition('/')[0] in hypers
            }
        if self._params == before:
            return
        with preserved_rng():
            self.log_params(self._params)

    def send_images(
        self,
        name: str,  # what they are called
        images: Any,  # as for `log_images`
    ) -> None:
        "Write images at the current step."
        self._send(self.log_images, name, as_images(images))

    def _send(self, log: Any, name: str, content: Any) -> None:
        "Log an image or a text at the current step, after all that came before."
        self._hand_over()
        self._begin(self._now)
        with preserved_rng():
            log(self._now + self._shift, name, content)

    def after_error(self) -> None:
        "Remember that the run failed."
        self._failed = True

    def cleanup(self) -> None:
        "Hand over what is left of the run, and have it written."
        try:
            if self._rows:
                self._hand_over(also_now=True)
            if self._handle is not None:
                self.flush()
        finally:
            self._last = self._end()
            self._clear()

    def _end(self) -> int:
        return max(self._last, self._handed, self._ba + self._shift)

    def close(self) -> None:
        "Close the backend; it is opened again when there is more to log."
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        open_loggers.discard(self)
        with preserved_rng():
            self.shut(handle)

    def state_dict(self) -> dict[str, Any]:
        "Hand over all finished steps, and return the rest with the place in the log."
        if self._rows and self.learn is not None:
            self._settle()
        if self._handle is not None:
            self.flush()
        return {
            'ba': self._ba,
            'shift': self._shift,
            'last': self._end(),
            'handed': self._handed,
            'due': self._due,
            'rows': kept_rows(self._rows),
            'in_log': sorted(self._in_log),
            'settings': dict(self._settings),
            'params': None if self._new_fit else self._params,
            **self.saved(),
        }

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Go on after the state's last step: what was logged later is dropped."
        self._clear()
        self.close()
        self._ba, self._shift, self._last, self._handed = (
            sd['ba'],
            sd['shift'],
            sd['last'],
            sd['handed'],
        )
        self._in_log = set(sd['in_log'])
        self._fresh, self._keep, self._ba_at_start = False, sd['handed'], None
        self._settings, self._params = {**sd['settings'], **self._settings}, sd['params']
        self._rows, self._due = read_rows(sd['rows']), sd['due']
        self.restore(sd)

    def _settle(self) -> None:
        self._hand_over()  # a process that is lost has them in its log

    def __getstate__(self) -> dict[str, Any]:
        "Leave out what is open: a copy opens its own."
        return {**self.__dict__, '_handle': None}


def need(module: str, extra: str, who: str) -> None:
    "Raise `MissingExtraError` where a library is not installed; it is not imported."
    if find_spec(module) is None:
        raise MissingExtraError(f'{who} needs {module}: pip install "learnkit[{extra}]"')


def _close_at_exit(logger: Logger) -> None:
    "Have a logger closed at exit, before the library that it has just opened closes itself: the last come is first."
    open_loggers.add(logger)
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def _close_all() -> None:
    for cb in list(open_loggers):
        cb.close()
