# SPDX-License-Identifier: Apache-2.0
"""Optimizers, schedules and the training batch of a LightningModule, with automatic or manual optimization."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from learnkit.core.contexts import replacing_yield
from learnkit.core.errors import LossError, MetricError, OptimizerError, OptionError
from learnkit.core.validation import warn_user
from learnkit.engine.custom_batch import take_step
from learnkit.engine.run import run_level
from learnkit.interop.lightning.host import LightningHost
from learnkit.optim.wrapper import OptimWrapper


@dataclass
class SchedulerConfig:
    "A scheduler with its interval, as in Lightning's `lr_scheduler_configs`."

    scheduler: Any
    name: str | None = None
    interval: str = 'epoch'
    frequency: int = 1
    reduce_on_plateau: bool = False
    monitor: str | None = None
    strict: bool = True


def read_optimizers(conf: Any) -> tuple[list[Any], list[SchedulerConfig]]:
    """Return optimizers and schedulers from any form that `configure_optimizers` may return.

    Raises `OptimizerError` for another form.
    """
    if isinstance(conf, (list, tuple)) and len(conf) == 2 and isinstance(conf[0], list):
        schedulers = conf[1] if isinstance(conf[1], (list, tuple)) else [conf[1]]
        return conf[0], [read_scheduler(s, None) for s in schedulers]
    entries = conf if isinstance(conf, (list, tuple)) else [conf]
    dicts = [entry if isinstance(entry, Mapping) else {'optimizer': entry} for entry in entries]
    if not all(isinstance(d.get('optimizer'), torch.optim.Optimizer) for d in dicts):
        raise OptimizerError(
            f'configure_optimizers() returned {conf!r}: return an optimizer, several, or dicts with '
            '`optimizer` and `lr_scheduler`.'
        )
    found = [d for d in dicts if d.get('lr_scheduler') is not None]
    configs = [read_scheduler(d['lr_scheduler'], d.get('monitor')) for d in found]
    return [d['optimizer'] for d in dicts], configs


def read_scheduler(entry: Any, monitor: str | None) -> SchedulerConfig:
    "Return the configuration of a scheduler, or of a dict with `scheduler`; raise `OptimizerError` if it is unusable."
    options = dict(entry) if isinstance(entry, Mapping) else {'scheduler': entry}
    unknown = options.keys() - {field.name for field in fields(SchedulerConfig)}
    if unknown or options.get('interval', 'epoch') not in ('epoch', 'step'):
        raise OptimizerError(
            f'lr_scheduler={entry!r}: the keys are scheduler, interval (epoch or step), frequency, '
            'monitor, strict and name.'
        )
    is_plateau = isinstance(options['scheduler'], torch.optim.lr_scheduler.ReduceLROnPlateau)
    config = SchedulerConfig(**{'reduce_on_plateau': is_plateau, 'monitor': monitor, **options})
    if config.reduce_on_plateau and config.monitor is None:
        raise OptimizerError('ReduceLROnPlateau needs the name of a logged value: add `monitor`.')
    return config


class LightningOptimizer:
    "An optimizer as `self.optimizers()` returns it: `step` runs the events and hooks of a step."

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        name: str,  # its name in `learn.opt`; '' for the only one
        optimization: Optimization,
    ) -> None:
        self.optimizer = optimizer
        self._name = name
        self._optimization = optimization

    # Modules check that it is a torch.optim.Optimizer, with which no class can be registered. An instance of a subclass
    # would share the optimizer's attributes: there schedulers patch `step`, which then replaces the one below.
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.optimizer)

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        "Take a step; the closure computes the gradients first."
        return self._optimization.step(self.optimizer, self._name or None, closure)


class Optimization:
    "Training batches of a LightningModule: forward, backward and step, in Lightning's order."

    def __init__(self, host: LightningHost) -> None:
        self.host = host
        self.configs: list[Any] = []  # Lightning's `lr_scheduler_configs`
        self.n_steps = 0  # Lightning's `global_step`
        self.output: Any = None  # result of the last step, as `on_train_batch_end` gets it
        self.repeats = False  # the running step of the optimizer computes its gradients itself
        self._optimizers: list[LightningOptimizer] = []
        self._losses: list[Tensor] = []  # losses of the batch that had a backward pass

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), '_optimizers': [], 'configs': []}  # each fit makes its own

    @property
    def is_automatic(self) -> bool:
        "True for a module with automatic optimization."
        module = self.host.module
        return module is not None and getattr(module, 'automatic_optimization', True)

    # -- optimizers and schedules ------------------------------------------------------------------

    def make_optimizers(self, params: Any, lr: Any) -> Any:
        "Return the optimizers of `configure_optimizers`; the arguments of an `opt_func` are unused."
        with self.host.running('configure_optimizers'):
            conf = self.host.module.configure_optimizers()
        optimizers, self.configs = read_optimizers(conf)
        if len(optimizers) > 1 and self.is_automatic:
            raise OptimizerError(
                f'configure_optimizers() returned {len(optimizers)} optimizers: set '
                '`self.automatic_optimization = False`, and step them in `training_step`.'
            )
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def list_optimizers(self) -> list[LightningOptimizer]:
        "Return the optimizers as the module sees them."
        raw = self.host.learn.opt.optimizers
        if [o.optimizer for o in self._optimizers] != list(raw.values()):
            self._optimizers = [LightningOptimizer(o, name, self) for name, o in raw.items()]
        return self._optimizers

    def replace(self, optimizers: list[torch.optim.Optimizer]) -> None:
        "Train with other optimizers from now on."
        learn = self.host.learn
        learn.opt = OptimWrapper(opt=optimizers[0] if len(optimizers) == 1 else optimizers)
        learn.opt.seen = None

    def step_schedulers(self, interval: str, plateau: bool) -> None:
        "Step the schedulers of an interval that are due: those that need a value, or the others."
        learn = self.host.learn
        n = (learn.iter if interval == 'step' else learn.epoch) + 1
        for config in self.configs if self.is_automatic else ():
            is_due = config.interval == interval and n % config.frequency == 0
            if not is_due or bool(config.reduce_on_plateau) != plateau:
                continue
            value = self._find_monitored(config) if plateau else None
            if plateau and value is None:
                continue
            args = (value,) if plateau else ()
            step = partial(_step_scheduler, args)
            self.host.fire_own('lr_scheduler_step', step, config.scheduler, value)

    def _find_monitored(self, config: Any) -> Any:
        metrics = self.host.logged.callback_metrics
        if config.monitor in metrics:
            return metrics[config.monitor]
        message = (
            f'ReduceLROnPlateau: monitor={config.monitor!r} was not logged, but '
            f'{", ".join(metrics)}.'
        )
        if config.strict:
            raise MetricError(message)
        warn_user(message)
        return None

    # -- a training batch ------------------------------------------------------------------------

    def accumulates(self) -> bool:
        "Return True if the current batch ends without a step."
        host = self.host
        is_due = (host.learn.iter + 1) % host.trainer.accumulate_grad_batches == 0
        return not is_due and not host.is_last_batch

    def train_batch(self) -> None:
        "Train on the batch as the module's optimization asks."
        learn = self.host.learn
        self._losses = []
        if not self.is_automatic:
            self.output = as_outputs(self.host.run_step('training_step'))
        elif self.accumulates():
            self._choose(learn.seams.passes, self.run_passes)
        else:
            self._choose(learn.seams.batch, self.train_with_step)
            self.n_steps += 1
        if len(self._losses) > 1:
            learn.loss = torch.stack(self._losses).mean()

    def _choose(self, compiled: Callable[[Any], None] | None, ordinary: Callable[[], None]) -> None:
        "Call the function at a seam that `compile(step=True)` has taken, otherwise the ordinary one."
        learn = self.host.learn
        if compiled is None or learn.microbatch:
            ordinary()
        else:
            compiled(learn)

    def train_with_step(
        self,
        passes: Callable[[], Any] | None = None,  # compiled passes; None: `run_passes`
    ) -> None:
        "Train on the batch by the step of the optimizer, whose closure runs the passes."
        learn = self.host.learn

        @torch.enable_grad()
        def compute_gradients() -> Any:
            (passes or self.run_passes)()
            return self.output.get('loss')

        [optimizer] = self.list_optimizers()
        args = learn.epoch, learn.iter, optimizer, compute_gradients
        self.host.fire_own('optimizer_step', lambda *a: a[2].step(a[3]), *args)

    @torch.enable_grad()
    def run_passes(self) -> None:
        "Run `training_step`, clear the gradients, and run the backward pass, with their hooks."
        host = self.host
        output = host.run_step('training_step')
        loss = output.get('loss') if isinstance(output, Mapping) else output
        if loss is None and output is not None:
            raise LossError('training_step() returned a dict without `loss`.')
        self._note_output(output, loss)
        if host.trainer.fit_loop._skip_backward:
            return
        self.clear_gradients()
        if loss is not None:
            self._backward(loss, loss / host.trainer.accumulate_grad_batches)

    def _note_output(self, output: Any, loss: Tensor | None) -> None:
        "Keep the result of `training_step` as `on_train_batch_end` gets it."
        self.output = {} if loss is None else as_outputs(output)
        if loss is not None:
            self.output['loss'] = loss.detach() / self.host.trainer.accumulate_grad_batches

    def clear_gradients(self) -> None:
        "Clear the gradients in the first batch of a step, with the hooks."
        host = self.host
        if host.learn.iter % host.trainer.accumulate_grad_batches:
            return
        [optimizer] = host.trainer.optimizers
        host.fire('on_before_zero_grad', optimizer)
        args = host.learn.epoch, host.learn.iter, optimizer
        host.fire_own('optimizer_zero_grad', lambda *a: a[2].zero_grad(), *args)

    def end_compiled_passes(self) -> None:
        "Keep the results of compiled passes, which are the Learner's."
        learn = self.host.learn
        self._note_output(learn.pred, learn.loss)
        self._losses.append(learn.loss)

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        "Run the backward pass of a loss, as `LightningModule.manual_backward`."
        self._backward(loss, loss, *args, **kwargs)

    def _backward(self, loss: Tensor, scaled: Tensor, *args: Any, **kwargs: Any) -> None:
        learn = self.host.learn
        learn.report_loss(loss)
        learn.loss_grad = scaled
        self._losses.append(learn.loss.detach())

        def run_backward() -> None:
            with learn.contexts('backward'):
                self.host.fire_own('backward', Tensor.backward, learn.loss_grad, *args, **kwargs)

        run_level(learn, 'backward', run_backward)

    def step(self, optimizer: torch.optim.Optimizer, only: str | None, closure: Any) -> Any:
        "Take the step of an optimizer, with its events."
        learn = self.host.learn
        repeats = closure is not None and learn.opt.needs_closure
        result = None if closure is None or repeats else closure()

        def evaluate() -> Any:
            loss = closure()
            self.prepare_step(optimizer)
            return loss

        take = partial(learn.opt.step, evaluate, only=only) if repeats else None
        with replacing_yield(self, 'repeats', repeats):
            take_step(learn, only, take)
        self.n_steps += not self.is_automatic
        return result

    def prepare_step(self, optimizer: torch.optim.Optimizer) -> None:
        "Call the hooks between the backward pass and the step."
        trainer = self.host.trainer
        self.host.fire('on_before_optimizer_step', optimizer)
        if self.is_automatic:
            clip = {
                'gradient_clip_val': trainer.gradient_clip_val,
                'gradient_clip_algorithm': trainer.gradient_clip_algorithm,
            }
            self.host.fire_own(
                'configure_gradient_clipping', self.clip_gradients, optimizer, **clip
            )

    # -- methods of the module ---------------------------------------------------------------------

    def clip_gradients(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,  # None: the trainer's
        gradient_clip_algorithm: Any = None,  # 'norm' or 'value'; None: the trainer's
    ) -> None:
        "Clip the gradients of an optimizer, as `LightningModule.clip_gradients`."
        trainer = self.host.trainer
        limit = trainer.gradient_clip_val if gradient_clip_val is None else gradient_clip_val
        kind = gradient_clip_algorithm or trainer.gradient_clip_algorithm or 'norm'
        kind = getattr(kind, 'value', kind)
        if kind not in ('norm', 'value'):
            raise OptionError(f"gradient_clip_algorithm={kind!r}: pass 'norm' or 'value'.")
        if limit:
            params = [p for group in optimizer.param_groups for p in group['params']]
            clip = nn.utils.clip_grad_norm_ if kind == 'norm' else nn.utils.clip_grad_value_
            clip(params, limit)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        "Return the optimizer, or a list of several, as `LightningModule.optimizers`."
        found = self.list_optimizers() if use_pl_optimizer else self.host.trainer.optimizers
        return found[0] if len(found) == 1 else found

    def lr_schedulers(self) -> Any:
        "Return the scheduler, a list of several, or None, as `LightningModule.lr_schedulers`."
        schedulers = [config.scheduler for config in self.configs]
        return schedulers[0] if len(schedulers) == 1 else schedulers or None


def _step_scheduler(args: tuple[Any, ...], scheduler: Any, value: Any) -> None:
    scheduler.step(*args)


def as_outputs(output: Any) -> dict[str, Any]:
    "Return the result of `training_step` as `on_train_batch_end` gets it."
    outputs = {'loss': output} if isinstance(output, Tensor) else dict(output or {})
    if isinstance(outputs.get('loss'), Tensor):
        outputs['loss'] = outputs['loss'].detach()
    return outputs
