# SPDX-License-Identifier: Apache-2.0
"""Adapter that runs callbacks of Hugging Face's Trainer in a Learner: `from_hf(cb)`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from learnkit.callbacks.checkpoint import Checkpoint
from learnkit.callbacks.recorder import records
from learnkit.callbacks.training import GradientClip
from learnkit.comm.dtensor import total_norm
from learnkit.core.errors import CallbackError, CancelTrainException, add_place
from learnkit.core.model import bare_model
from learnkit.core.watched import as_number, is_better
from learnkit.data.dataloaders import evaluation_loaders
from learnkit.engine.callback import Callback
from learnkit.engine.run import preserved_state
from learnkit.interop.common.adapter import CallbackAdapter, find_or_add, list_adapters
from learnkit.interop.common.hooks import StandIn, collect_measured, own_hooks
from learnkit.interop.hf.items import ItemLoss, add_weighted, counts_items
from learnkit.interop.hf.state import find_arguments, make_control, make_state

HOOKS = tuple(
    'on_init_end on_train_begin on_train_end on_epoch_begin on_epoch_end on_step_begin '
    'on_pre_optimizer_step on_optimizer_step on_substep_end on_step_end on_evaluate on_predict '
    'on_save on_log on_prediction_step'.split()
)
# fields of `control` that are set to False before a hook runs
RESETS = {
    'on_train_begin': ('should_training_stop',),
    'on_epoch_begin': ('should_epoch_stop',),
    'on_step_begin': ('should_log', 'should_evaluate', 'should_save'),
    'on_evaluate': ('should_evaluate',),
    'on_log': ('should_log',),
    'on_save': ('should_save',),
}
TIMES = ('train_runtime', 'train_steps_per_second')


def from_hf(
    cb: Any,  # `transformers.TrainerCallback`, or an object with its methods; or `args` alone
    args: Any = None,  # `transformers.TrainingArguments` to read; None: made from the Learner
    processing_class: Any = None,  # tokenizer or processor that the callback receives
) -> Callback:
    """Return a callback that runs a callback of Hugging Face's Trainer.

    Its methods run in the Trainer's order, with `args`, `state`, `control`, and the Trainer's
    keywords. All such callbacks of a Learner share these objects; they are transformers' own where
    it is imported. A step is a step of the optimizer. Metrics have the Trainer's names: `valid_loss`
    is `eval_loss`, `accuracy` is `eval_accuracy`.

    The Learner decides when it evaluates and saves. `args` decides when `on_log` runs (by default
    after each epoch) and which metric is the best. The callback decides by `control`:
    `should_training_stop` ends the fit, `should_epoch_stop` the epoch; `should_evaluate` evaluates,
    `should_log` logs, and `should_save` saves with the Learner's `Checkpoint`; then `on_save` runs.

    `from_hf(args)` brings the Trainer's `DefaultFlowCallback`: `args` alone decide when the fit
    evaluates, logs and saves.

    The own loss of a causal language model is the Trainer's: the sum over the tokens of a step,
    divided by `num_items_in_batch`.

    Checkpointed: the callback's attributes with plain data, and once for all callbacks `state`,
    `control` and the losses since the last log.

    Raises `CallbackError` for an object without hooks, for `should_save` without a `Checkpoint`,
    and for an `args` with another number of batches a step than the Learner's.

    >>> from learnkit.testing import synth_learner
    >>> class Shout:
    ...     def on_epoch_end(self, args, state, control, **kwargs):
    ...         print(state.epoch, state.global_step, state.max_steps)
    >>> learn = synth_learner(n_train=3, cbs=from_hf(Shout()))
    >>> with learn.no_bar(), learn.no_logging(): learn.fit(2)
    1.0 3 6
    2.0 6 6
    """
    if args is None and _is_arguments(cb):
        flow = sys.modules['transformers'].DefaultFlowCallback()
        return _FromHF(flow, cb, processing_class, decides=True)
    return _FromHF(cb, args, processing_class)


class _FromHF(CallbackAdapter):
    "Hold a callback of Hugging Face's Trainer, which `TrainerRun` calls."

    library = 'hf'
    style = "Hugging Face's Trainer"
    saved_as = 'own'

    def __init__(self, cb: Any, args: Any, processing_class: Any, decides: bool = False) -> None:
        found = own_hooks(cb, HOOKS)
        # the base class defines all hooks, which do nothing
        self.hooks = {k: f for k, f in found.items() if not _is_of_base(f)}
        self.wrap(cb, HOOKS, self.hooks)
        self.args = args
        self.processing_class = processing_class
        self.decides = decides  # whether `args` alone decide when the fit evaluates

    def on_added(self) -> None:
        "Take part in the counts of the Learner's callbacks of the Trainer."
        find_or_add(self.learn, TrainerRun)


@dataclass
class Progress:
    "Position of a fit within its steps, and losses since the last log."

    is_in_step: bool = False
    # weighted sum of the losses of the step's batches, and sum of the weights; None: no batch yet
    window: tuple[Any, Any] | None = None
    has_stepped: bool = False  # whether the optimizer stepped since the step began
    n_window: int = 1  # number of batches of the step
    loss: Any = 0.0  # sum of the steps' losses since the last log
    total_loss: float = 0.0  # sum of the steps' losses before the last log
    logged_step: int = 0  # step of the last log
    grad_norm: Any = None  # norm of the last step's gradients, before clipping
    learning_rate: float = 0.0  # rate of the last step


class TrainerRun(Callback):
    """Hold what all Trainer callbacks of a Learner share, count for them, and call them.

    `from_hf` adds it. Checkpointed: `state`, `control`, and the losses since the last log.
    """

    order = 95  # after the Recorder, from which the metrics come
    remove_on_find = True

    def __init__(self) -> None:
        self.args: Any = None
        self.state: Any = StandIn('TrainerState')
        self.control = make_control()
        self.progress = Progress()
        self._started_at = 0.0
        self._items: ItemLoss | None = None
        self._restore: list[Callable[[], object]] = []  # undo what this run has changed

    # -- calls of callbacks ------------------------------------------------------------------------

    def _call(self, hook: str, **more: Any) -> None:
        "Call a hook of all callbacks, keep the control that they return, and stop if it says so."
        for name in RESETS.get(hook, ()):
            setattr(self.control, name, False)
        callers = [cb for cb in list_adapters(self.learn, 'hf') if hook in cb.hooks]
        for cb in callers:
            try:
                result = cb.hooks[hook](
                    self.args, self.state, self.control, **self._keywords(cb), **more
                )
            except Exception as e:
                add_place(e, f'{type(cb.wrapped).__name__}.{hook}, a callback of the Trainer')
                raise
            self.control = self.control if result is None else result
        if callers and self.control.should_training_stop and self.learn.fitting:
            self.learn.stop()

    def _keywords(self, cb: _FromHF) -> dict[str, Any]:
        learn = self.learn
        optimizers = list(learn.opt.optimizers.values()) if learn.opt else [None]
        optimizer = optimizers[0] if len(optimizers) == 1 else learn.opt
        loaders = evaluation_loaders(learn.dls)
        return {
            'model': bare_model(learn.model),
            'processing_class': cb.processing_class,
            'optimizer': optimizer,
            'lr_scheduler': StandIn(
                'lr_scheduler',
                'The schedules of a Learner are callbacks, such as `ParamScheduler`.',
                get_last_lr=self._list_rates,
            ),
            'train_dataloader': learn.dls.train,
            'eval_dataloader': loaders[0][1] if loaders else None,
        }

    def _list_rates(self) -> list[float]:
        return [group['lr'] for group in self.learn.opt.param_groups]

    def _log(self, logs: dict[str, Any]) -> None:
        logs['epoch'] = self.state.epoch
        self.state.log_history.append({**logs, 'step': self.state.global_step})
        self._call('on_log', logs=logs)

    def _log_training(self) -> None:
        "If asked for, log the mean loss since the last log, the gradients' norm, and the rate."
        now = self.progress
        n = self.state.global_step - now.logged_step
        if not self.control.should_log or not n:
            return
        total = float(now.loss)
        now.loss = now.loss - now.loss  # a NaN that is not filtered stays, as in the Trainer
        now.total_loss += total
        now.logged_step = self.state.global_step
        norm = float(now.grad_norm)
        self._log({'loss': total / n, 'grad_norm': norm, 'learning_rate': now.learning_rate})

    def _evaluate_if_asked(self) -> None:
        if self.control.should_evaluate:
            with preserved_state(self.learn):
                self.learn.do_evaluation()

    def _save_if_asked(self) -> None:
        if not self.control.should_save:
            return
        saver = next((cb for cb in self.learn.cbs if isinstance(cb, Checkpoint)), None)
        if saver is None:
            raise CallbackError('`control.should_save` is set: add a `Checkpoint` to the Learner.')
        saver.save()
        self._call('on_save')

    # -- events ------------------------------------------------------------------------------------

    def before_fit(self) -> None:
        learn = self.learn
        is_new = self.args is None
        if is_new or learn.fitting:
            self.args = find_arguments(learn, [cb.args for cb in list_adapters(learn, 'hf')])
            self.state = make_state(self.args, learn)
        if self._items is None and counts_items(learn):
            self._items = ItemLoss(learn)
        if is_new:
            self.control = make_control()
            self._call('on_init_end')
        if not learn.fitting:
            return
        if any(cb.decides for cb in list_adapters(learn, 'hf')) and not self._restore:
            self._restore.append(partial(setattr, learn, 'eval_every', learn.eval_every))
            learn.eval_every = None
        self.progress = Progress()
        self._started_at = perf_counter()
        checkpoint = learn.run.resuming
        if learn.resumed and checkpoint is not None:  # it is restored after this event
            self.load_state_dict(checkpoint.find_state(self) or {})
        self._call('on_train_begin')

    def before_epoch(self) -> None:
        if self.learn.fitting:
            self._call('on_epoch_begin')

    def before_batch(self) -> None:
        if not self.training or self.progress.is_in_step:
            return
        self.progress.is_in_step = True
        self.progress.has_stepped = False
        n_left = (self.n_iter or 0) - self.iter
        if n_left <= 0:  # unknown: no length, or the first epoch has more batches than the length
            n_left = sys.maxsize
        self.progress.n_window = min(self.args.gradient_accumulation_steps, n_left)
        self._call('on_step_begin')

    def before_step(self) -> None:
        grads = [p.grad for p in self.learn.step_parameters if p.grad is not None]
        norms = [cb.total_norm for cb in self.learn.cbs if isinstance(cb, GradientClip)]
        self.progress.grad_norm = norms[0] if norms else total_norm(grads)
        self.progress.learning_rate = self._list_rates()[0]
        self._call('on_pre_optimizer_step')

    def after_step(self) -> None:
        self.progress.has_stepped = True
        self._call('on_optimizer_step')

    def after_batch(self) -> None:
        if not self.training:
            return self._call('on_prediction_step')
        if 'loss_grad' in vars(self.learn):
            self._add_batch(self.learn.loss.detach())
        if self.progress.has_stepped:
            self._end_step(min(1.0, (self.iter + 1) / self.n_iter) if self.n_iter else 0.0)
        elif self.iter + 1 != self.n_iter:
            self._call('on_substep_end')
        return None

    def _add_batch(self, loss: Any) -> None:
        "Add a batch's loss, or keep it until the weights of all batches of the step are known."
        now = self.progress
        if self._items is None or now.n_window == 1:
            return self._add_loss(loss / now.n_window)
        weight = self._items.weigh(self.learn.xb, self.learn.yb)
        now.window = add_weighted(now.window or (0.0, 0), loss, weight)
        return None

    def _add_loss(self, loss: Any) -> None:
        """Add a batch's loss.

        NaN and infinity count as the mean since the last log, as in the Trainer, unless
        `args.logging_nan_inf_filter` is False.
        """
        now = self.progress
        if getattr(self.args, 'logging_nan_inf_filter', True):
            n = 1 + self.state.global_step - now.logged_step
            loss = torch.where(loss.isfinite(), loss, now.loss / n)
        now.loss = now.loss + loss

    def _end_step(self, share: float) -> None:
        self.progress.is_in_step = False
        window = self.progress.window
        if window is not None:
            self.progress.window = None
            self._add_loss(window[0] / window[1])
        state = self.state
        state.global_step += 1
        state.epoch = self.epoch + share
        self._call('on_step_end')
        is_first = state.global_step == 1 and self.args.logging_first_step
        by_steps = self.args.logging_strategy == 'steps'
        if is_first or (by_steps and state.global_step % state.logging_steps == 0):
            self.control.should_log = True
        self._log_training()
        self._evaluate_if_asked()

    def batch_checkpoint(self) -> None:
        if not self.progress.is_in_step:
            self._save_if_asked()
        if self.control.should_epoch_stop and self.iter + 1 != self.n_iter:
            raise CancelTrainException

    def after_train(self) -> None:
        if self.progress.is_in_step and self.progress.has_stepped:
            self._end_step(1.0)  # of the batches left over at the end of the epoch
        self.progress.is_in_step = False
        self._call('on_epoch_end')
        if self.args.logging_strategy == 'epoch':
            self.control.should_log = True
        self._log_training()

    def after_eval(self) -> None:
        "Log the metrics of an evaluation, and note the best one."
        measured = collect_measured(self.learn)
        metrics = {_rename_column(name): value for name, value in measured.items()}
        self._log(metrics)
        self._call('on_evaluate', metrics=metrics)
        if self.learn.fitting and self.args.metric_for_best_model is not None:
            self._note_best(metrics)

    def _note_best(self, metrics: Mapping[str, Any]) -> None:
        "Compare the monitored metric with the best one, as the Trainer does: its first best value is infinite."
        name = f'eval_{self.args.metric_for_best_model.removeprefix("eval_")}'
        columns = records(self).evaluated_columns()
        if name not in metrics and name not in map(_rename_column, columns):
            raise CallbackError(
                f'metric_for_best_model={name!r}: the evaluation measured {", ".join(metrics)}.'
            )
        value = as_number(self, name, metrics.get(name))
        if value is None:
            return  # this evaluation used another loader
        is_greater = self.args.greater_is_better
        if self.state.best_metric is None:
            self.state.best_metric = -math.inf if is_greater else math.inf
        if is_better(value, self.state.best_metric, np.greater if is_greater else np.less):
            self.state.best_metric = value
            if self.args.save_strategy != 'no':
                self.state.best_global_step = self.state.global_step

    def epoch_checkpoint(self) -> None:
        self._evaluate_if_asked()
        self._save_if_asked()

    def after_predict(self) -> None:
        self._call('on_predict', metrics={})

    def after_fit(self) -> None:
        if not self.learn.fitting:
            return
        n = self.state.global_step
        seconds = perf_counter() - self._started_at
        total = self.progress.total_loss + float(self.progress.loss)
        times = dict(zip(TIMES, (seconds, n / seconds), strict=True))
        self._log({**times, 'total_flos': 0.0, 'train_loss': total / max(n, 1)})
        self._call('on_train_end')

    def cleanup(self) -> None:
        "Restore the Learner's loss, and its schedule of evaluations."
        if self._items is not None:
            self._items.restore()
            self._items = None
        while self._restore:
            self._restore.pop()()

    # -- checkpoints -------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        "Return `state` without times, `control`, and the losses since the last log."
        state = {k: v for k, v in vars(self.state).items() if k != 'stateful_callbacks'}
        rows = state.get('log_history', [])
        state['log_history'] = [{k: v for k, v in r.items() if k not in TIMES} for r in rows]
        return {
            'state': state,
            'control': dict(vars(self.control)),
            'progress': dict(vars(self.progress)),
        }

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore what `state_dict` returned."
        for name, fields in sd.items():
            vars(getattr(self, name)).update(fields)
        self.state.log_history = list(self.state.log_history)


def _rename_column(name: str) -> str:
    "Return the Trainer's name of a column of an evaluation."
    return f'eval_{name.removeprefix("valid_")}'


def _is_arguments(o: Any) -> bool:
    "Return True for `transformers.TrainingArguments`."
    transformers = sys.modules.get('transformers')
    return transformers is not None and isinstance(o, transformers.TrainingArguments)


def _is_of_base(hook: Any) -> bool:
    return getattr(hook, '__qualname__', '').startswith('TrainerCallback.')
