# SPDX-License-Identifier: Apache-2.0
"""Compiled training of a LightningModule: `training_step`, the backward pass and the optimizer as one function.

`training_step` is called with the number of the batch as a tensor, so that it need not be compiled
for each number. What it logs is returned from the compiled code, and logged afterwards. If hooks
between the backward pass and the end of the step have to be called, only `training_step` and the
backward pass are compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from learnkit.callbacks.step_parts import list_handled
from learnkit.callbacks.traced_batch import Ordinary, TracedBatch
from learnkit.callbacks.whole_step import OutputLoss
from learnkit.core.errors import LossError
from learnkit.engine.callback import name_handler
from learnkit.interop.common.hooks import takes_several

if TYPE_CHECKING:
    from learnkit.interop.lightning.host import LightningHost
    from learnkit.learner import Learner

# hooks between `training_step` and the end of the backward pass
HOOKS_OF_PASSES = (
    'on_before_zero_grad optimizer_zero_grad on_before_backward backward on_after_backward'
).split()
# hooks around the optimizer's step, which do not rule out compiled passes
HOOKS_OF_STEP = ('optimizer_step', 'on_before_optimizer_step', 'configure_gradient_clipping')


class TrainingStep:
    "The `training_step` of a module as a model, which a compiled step calls."

    def __init__(self, host: LightningHost) -> None:
        self.module: Any = host.module
        self.logged = host.logged
        self.takes_number = takes_several(self.module.training_step)

    def buffers(self) -> Iterator[Tensor]:
        "Yield the buffers of the module."
        return self.module.buffers()

    def __call__(self, batch: Any, number: Tensor) -> Any:
        "Return the result of `training_step`; collect what it logs."
        self.logged.collected = []
        if self.takes_number:
            return self.module.training_step(batch, number)
        return self.module.training_step(batch)


class TrainingLoss(OutputLoss):
    "Loss in the result of `training_step`, which is divided by the number of batches of a step."

    def __init__(self) -> None:
        self.n_batches = 1

    @override
    def __call__(self, output: Any) -> Tensor:
        loss = output['loss'] if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise LossError('training_step() returned no loss')
        return loss

    @override
    def scale(self, loss: Tensor) -> Tensor:
        return loss / self.n_batches


class TracedTraining(TracedBatch):
    "Batch of a LightningModule with automatic optimization."

    def __init__(self, host: LightningHost, base: type[Learner]) -> None:
        self.host = host
        self.base = base
        self.step: TrainingStep | None = None
        self.loss = TrainingLoss()

    @override
    def find_refusals(self, learn: Learner) -> Iterator[str]:
        yield from super().find_refusals(learn)
        host = self.host
        if not host.optimization.is_automatic:
            yield f'{type(host.module).__name__} has manual optimization'
        yield from self._find_hooks(HOOKS_OF_PASSES)
        for cb, switch, events in list_handled(learn):
            if switch and 'before_pred' in events:
                yield f'{name_handler(cb, "before_pred")} has to be called'
        if host.trainer.active_profiler is not None:
            yield f'{type(host.trainer.profiler).__name__} measures `training_step`'
        if host.trainer.precision_option.dtype is not None:
            yield f'precision={host.trainer.precision!r} sets the type of new tensors'
        for name in host.logged.list_metrics():
            yield f'self.log({name!r}) gets a metric of torchmetrics, which keeps a state'

    def _find_hooks(self, names: Iterable[str]) -> Iterator[str]:
        for name in names:
            for hook in self.host.name_hooks(name):
                yield f'{hook} has to be called'

    @override
    def find_step_refusals(self, learn: Learner) -> Iterator[str]:
        yield from self._find_hooks(HOOKS_OF_STEP)
        n = self.host.trainer.accumulate_grad_batches
        if n > 1:
            yield f'accumulate_grad_batches={n}'

    @override
    def begin(self, learn: Learner) -> None:
        if not self.host.trainer.fit_loop._skip_backward:
            self.host.optimization.clear_gradients()

    @override
    def train(self, learn: Learner) -> None:
        self.host.optimization.train_with_step()

    @override
    def run_passes(self, learn: Learner) -> None:
        self.host.optimization.run_passes()

    @override
    def take_step(self, learn: Learner, run: Callable[[Ordinary], bool]) -> None:
        self.host.optimization.train_with_step(partial(run, self.run_passes))

    @override
    def list_arguments(self, learn: Learner) -> tuple[Any, ...]:
        host = self.host
        if self.step is None or self.step.module is not host.module:
            self.step = TrainingStep(host)
        self.loss.n_batches = host.trainer.accumulate_grad_batches
        number = torch.full((), learn.iter, device=learn.run.batch_device)
        return self.step, self.loss, None, (host.current_batch(), number), ()
