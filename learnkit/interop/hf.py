# SPDX-License-Identifier: Apache-2.0
"""Adapter that runs callbacks of Hugging Face's Trainer in a Learner: `from_hf(cb)`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from fastcore.basics import camel2snake
from typing_extensions import override

from learnkit.callbacks.recorder import recorder_of
from learnkit.core.errors import CallbackError, CancelTrainException
from learnkit.core.model import bare_model
from learnkit.data.dataloaders import batch_size_of, evaluation_loaders
from learnkit.engine.callback import Callback
from learnkit.engine.callback_state import note_attributes
from learnkit.interop.hooks import check_style, load_state, own_hooks, state_of

if TYPE_CHECKING:
    from learnkit.callbacks.checkpoint import Checkpoint

HOOKS = tuple(
    'on_init_end on_train_begin on_train_end on_epoch_begin on_epoch_end on_step_begin on_pre_optimizer_step '
    'on_optimizer_step on_substep_end on_step_end on_evaluate on_predict on_save on_log on_prediction_step'.split()
)
_BASE = 'transformers.trainer_callback.TrainerCallback'  # its methods do nothing


def from_hf(
    cb: Any,  # `transformers.TrainerCallback`, or an object with its methods
    args: Any = None,  # `transformers.TrainingArguments` that the callback reads; None: made from the Learner
    processing_class: Any = None,  # tokenizer or processor that the callback receives
) -> Callback:
    """Return a callback that runs a callback of Hugging Face's Trainer.

    Its methods run in the Trainer's order, with `args`, a `TrainerState`, a `TrainerControl`, and the keywords of the
    Trainer: `model`, `optimizer`, `lr_scheduler`, `train_dataloader`, `eval_dataloader`, `processing_class`, `metrics`
    and `logs`. A step is a step of the optimizer. The Learner decides when it evaluates and saves; `args` decides when
    `on_log` runs (`logging_strategy`, by default each epoch), and which metric is the best.

    `control.should_training_stop` ends the fit after the evaluation of the epoch, and `should_epoch_stop` the epoch.
    `should_evaluate` evaluates, `should_log` logs, and `should_save` saves by the Learner's `Checkpoint`, after which
    `on_save` runs. Metrics have the Trainer's names: `valid_loss` is `eval_loss`, `accuracy` is `eval_accuracy`.

    Checkpointed: the callback's `state()` (without one, its attributes with plain data), and the `TrainerState`.

    Raises `CallbackError` for an object without hooks, if transformers is missing, and for `should_save` without a
    `Checkpoint`.

    >>> from transformers import TrainerCallback
    >>> from learnkit.testing import synth_learner
    >>> class Shout(TrainerCallback):
    ...     def on_epoch_end(self, args, state, control, **kwargs): print(state.epoch, state.global_step)
    >>> learn = synth_learner(n_train=3, cbs=from_hf(Shout()))
    >>> with learn.no_bar(), learn.no_logging(): learn.fit(2)
    1.0 3
    2.0 6
    """
    return _FromHF(cb, args, processing_class)


class _FromHF(Callback):
    "Run a callback of Hugging Face's Trainer."

    order = 95  # after the Recorder, from which the metrics come
    remove_on_find = True

    def __init__(self, cb: Any, args: Any, processing_class: Any) -> None:
        hooks = own_hooks(cb, HOOKS)
        self._hooks = {k: f for k, f in hooks.items() if _qualified(f) != f'{_BASE}.{k}'}
        check_style(cb, HOOKS, self._hooks, 'transformers', 'from_hf')
        note_attributes(cb)
        self.wrapped = cb
        self.args = args
        self.processing_class = processing_class
        self.state, self.control = _make_state()
        self._is_initialized = False  # whether `on_init_end` ran
        self._in_step = self._has_stepped = False
        self._window: list[Any] = []  # losses of the batches of a step
        self._losses: Any = 0.0  # sum of the steps' mean losses
        self._n_losses = 0
        self._logged: tuple[Any, int] = (0.0, 0)  # sum and number at the last log
        self._began = 0.0

    @property
    @override
    def name(self) -> str:
        return f'hf_{camel2snake(type(self.wrapped).__name__)}'

    def __repr__(self) -> str:
        return f'from_hf({type(self.wrapped).__name__})'

    # -- calls of the callback ---------------------------------------------------------------------

    def _call(self, hook: str, **more: Any) -> None:
        "Call a method of the callback, if it has the method, and keep the control that it returns."
        f = self._hooks.get(hook)
        if f is None:
            return
        learn = self.learn
        optimizers = learn.opt.optimizers
        optimizer = next(iter(optimizers.values())) if len(optimizers) == 1 else learn.opt
        loaders = evaluation_loaders(learn.dls)
        result = f(
            self.args,
            self.state,
            self.control,
            model=bare_model(learn.model),
            processing_class=self.processing_class,
            optimizer=optimizer,
            lr_scheduler=Schedule(optimizer),
            train_dataloader=learn.dls.train,
            eval_dataloader=loaders[0][1] if loaders else None,
            **more,
        )
        self.control = self.control if result is None else result

    def _log(self, logs: dict[str, Any]) -> None:
        self.control.should_log = False
        logs = {**logs, 'epoch': self.state.epoch}
        self.state.log_history.append({**logs, 'step': self.state.global_step})
        self._call('on_log', logs=logs)

    def _log_training(self) -> None:
        "Log the mean loss since the last log, and the rate."
        total, n = self._logged
        self._logged = self._losses, self._n_losses
        if self._n_losses > n:
            loss = float(self._losses - total) / (self._n_losses - n)
            self._log({'loss': loss, 'learning_rate': self.opt.param_groups[-1]['lr']})

    def _obey(self) -> None:
        "Do what the callback asks for by its control."
        if self.control.should_log:
            self._log_training()
        if self.control.should_evaluate:
            values = self.learn.validate()  # in which this callback is not called
            self._report(dict(zip(values.names, values, strict=True)))
        if self.control.should_save:
            self.control.should_save = False
            self._find_checkpoint().save()
            self._call('on_save')

    def _find_checkpoint(self) -> Checkpoint:
        from learnkit.callbacks.checkpoint import Checkpoint

        for cb in self.learn.cbs:
            if isinstance(cb, Checkpoint):
                return cb
        raise CallbackError(
            f'{type(self.wrapped).__name__} set `control.should_save`, and there is no `Checkpoint` to save with: '
            'add one to the Learner.'
        )

    # -- events of a fit ---------------------------------------------------------------------------

    def before_fit(self) -> None:
        learn = self.learn
        if self.args is None:
            self.args = _make_arguments(learn)
        if not self._is_initialized:
            self._is_initialized = True
            self._call('on_init_end')
        per_epoch = learn.dls.n_iter if getattr(learn.dls, 'n_iter', None) else len(learn.dls.train)
        accumulated = self.args.gradient_accumulation_steps
        state = self.state
        state.epoch, state.global_step = 0.0, 0
        state.log_history, state.best_metric = [], None
        state.num_train_epochs = learn.n_epoch or 1
        state.max_steps = -(-per_epoch // accumulated) * state.num_train_epochs
        state.is_world_process_zero = state.is_local_process_zero = learn.world.is_first
        state.train_batch_size = self.args.per_device_train_batch_size
        state.compute_steps(self.args, state.max_steps)
        self._window, self._losses, self._n_losses, self._logged = [], 0.0, 0, (0.0, 0)
        self._began = perf_counter()
        self.control.should_training_stop = False
        self._call('on_train_begin')

    def before_epoch(self) -> None:
        self.control.should_epoch_stop = False
        self._call('on_epoch_begin')

    def before_batch(self) -> None:
        if not self.training or self._in_step:
            return
        self._in_step, self._has_stepped = True, False
        control = self.control
        control.should_log = control.should_evaluate = control.should_save = False
        self._call('on_step_begin')

    def after_backward(self) -> None:
        self._window.append(self.learn.loss.detach())

    def before_step(self) -> None:
        self._call('on_pre_optimizer_step')

    def after_step(self) -> None:
        self._has_stepped = True
        self._call('on_optimizer_step')

    def after_batch(self) -> None:
        if not self.training:
            return self._call('on_prediction_step')
        if not self._has_stepped:
            is_last = self.n_iter is not None and self.iter + 1 == self.n_iter
            return None if is_last else self._call('on_substep_end')
        self._end_step((self.iter + 1) / self.n_iter if self.n_iter else 0.0)

    def _end_step(self, share: float) -> None:
        self._in_step = False
        self._losses = self._losses + torch.stack(self._window).mean()
        self._n_losses += 1
        self._window = []
        state = self.state
        state.global_step += 1
        state.epoch = self.epoch + share
        self._call('on_step_end')
        if self.args.logging_strategy == 'steps' and state.global_step % state.logging_steps == 0:
            self.control.should_log = True

    def batch_checkpoint(self) -> None:
        if self._in_step:
            return
        self._obey()
        if self.control.should_epoch_stop or self.control.should_training_stop:
            raise CancelTrainException

    def after_train(self) -> None:
        if self._in_step and self._has_stepped:
            self._end_step(1.0)  # of the batches that were left over
        self._in_step = False
        self._call('on_epoch_end')
        if self.args.logging_strategy == 'epoch':
            self.control.should_log = True
        if self.control.should_log:
            self._log_training()

    def after_eval(self) -> None:
        recorder = recorder_of(self.learn)
        if self.learn.fitting and recorder is not None:
            self._report(recorder.measured)

    def _report(self, measured: Mapping[str, Any]) -> None:
        "Log the metrics of an evaluation, and note the best one."
        self.control.should_evaluate = False
        metrics = {_rename(name): value for name, value in measured.items()}
        self._log(metrics)
        self._call('on_evaluate', metrics={**metrics, 'epoch': self.state.epoch})
        self._note_best(metrics)

    def _note_best(self, metrics: Mapping[str, Any]) -> None:
        name = self.args.metric_for_best_model
        value = metrics.get(name if str(name).startswith('eval_') else f'eval_{name}')
        best = self.state.best_metric
        if value is None:
            return
        if best is None or (value > best if self.args.greater_is_better else value < best):
            self.state.best_metric = value
            self.state.best_global_step = self.state.global_step

    def epoch_checkpoint(self) -> None:
        self._obey()
        if self.control.should_training_stop:
            self.learn.stop()

    def after_predict(self) -> None:
        self._call('on_predict', metrics={})

    def after_fit(self) -> None:
        seconds = perf_counter() - self._began
        mean = float(self._losses) / self._n_losses if self._n_losses else 0.0
        steps = self.state.global_step
        self._log(
            {
                'train_runtime': seconds,
                'train_steps_per_second': steps / seconds,
                'total_flos': 0.0,
                'train_loss': mean,
            }
        )
        self._call('on_train_end')

    # -- checkpoints -------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        "Return the callback's state, the `TrainerState`, and the sums of losses."
        own = self.wrapped.state() if hasattr(self.wrapped, 'state') else state_of(self.wrapped)
        losses = {'sum': float(self._losses), 'n': self._n_losses}
        logged = {'sum': float(self._logged[0]), 'n': self._logged[1]}
        state = {k: v for k, v in asdict(self.state).items() if k != 'stateful_callbacks'}
        return {'own': own, 'trainer': state, 'losses': losses, 'logged': logged}

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the callback's state, the `TrainerState`, and the sums of losses."
        if hasattr(self.wrapped, 'state'):
            vars(self.wrapped).update({**sd['own']['args'], **sd['own']['attributes']})
        else:
            load_state(self.wrapped, sd['own'])
        vars(self.state).update(sd['trainer'])
        self._losses, self._n_losses = torch.tensor(sd['losses']['sum']), sd['losses']['n']
        self._logged = torch.tensor(sd['logged']['sum']), sd['logged']['n']


class Schedule:
    "What callbacks of the Trainer read of its scheduler: the rates. The Learner has no scheduler object."

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def get_last_lr(self) -> list[float]:
        "Return the rate of each parameter group."
        return [group['lr'] for group in self.optimizer.param_groups]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f'`lr_scheduler.{name}`: a Learner has no scheduler object, only `get_last_lr()`. Its schedules are '
            'callbacks, such as `ParamScheduler`.'
        )


def _make_state() -> tuple[Any, Any]:
    "Return the Trainer's state and control."
    try:
        from transformers import TrainerControl, TrainerState
    except ImportError:
        raise CallbackError(
            'from_hf needs transformers, whose state its callbacks read: pip install transformers.'
        ) from None
    return TrainerState(), TrainerControl()


def _make_arguments(learn: Any) -> Any:
    "Return the Trainer's arguments that correspond to a Learner."
    from transformers import TrainingArguments

    bs = batch_size_of(learn.dls.train) or 1
    return TrainingArguments(
        str(learn.path),
        num_train_epochs=learn.n_epoch or 1,
        per_device_train_batch_size=bs,
        gradient_accumulation_steps=_count_accumulated(learn, bs),
        learning_rate=max(group['lr'] for group in learn.opt.param_groups),
        eval_strategy='epoch' if evaluation_loaders(learn.dls) else 'no',
        logging_strategy='epoch',
        save_strategy='no',
        metric_for_best_model='eval_loss',
        greater_is_better=False,
        report_to='none',
        use_cpu=learn.dls.device is None or learn.dls.device.type == 'cpu',
    )


def _count_accumulated(learn: Any, bs: int) -> int:
    from learnkit.callbacks.accumulation import GradientAccumulation

    for cb in learn.cbs:
        if isinstance(cb, GradientAccumulation):
            return cb.batches or max(1, -(-cb.n_acc // bs))
    return 1


def _rename(name: str) -> str:
    "Return the Trainer's name of a metric."
    return f'eval_{name.removeprefix("valid_")}'


def _qualified(f: Any) -> str:
    return f'{getattr(f, "__module__", "")}.{getattr(f, "__qualname__", "")}'
