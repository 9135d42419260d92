# SPDX-License-Identifier: Apache-2.0
"""Views of the Learner with the attributes of ksuit's trainer and of Noether's models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from learnkit.callbacks.nan_guard import GuardNonFinite
from learnkit.callbacks.schedule import ParamScheduler
from learnkit.callbacks.torch_scheduler import LRScheduler
from learnkit.core.batch import apply_model, form_of, unpack_output
from learnkit.core.errors import LossError
from learnkit.core.model import model_device
from learnkit.interop.common.adapter import list_adapters
from learnkit.interop.composer.state import precision_of
from learnkit.interop.ksuit.construct import Options, extend
from learnkit.interop.ksuit.views import View

# attributes of the trainer that the update counter has
OF_COUNTER = ('start_checkpoint', 'end_checkpoint', 'updates_per_epoch', 'effective_batch_size')


@dataclass(frozen=True)
class TrainerResult:
    "Result of `trainer.train_step`."

    total_loss: Tensor
    losses_to_log: dict[str, Tensor]  # parts of the loss by name
    additional_outputs: dict[str, Any] | None = None  # outputs of the model by name


class Trainer(View):
    """View of the Learner as ksuit's trainer, with the services that callbacks receive.

    Attributes that are not defined here are read from the services, the update counter or the Learner.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(name)
        services = self._adapter.services
        if name in services:
            return services[name]
        owner = services['update_counter'] if name in OF_COUNTER else self._adapter.learn
        return getattr(owner, name)

    @property
    def config(self) -> Options:
        "Options of the trainer; None if unknown or not set."
        learn = self._adapter.learn
        end = self.end_checkpoint
        guards = [cb for cb in learn.cbs if isinstance(cb, GuardNonFinite)]
        return Options(
            effective_batch_size=self.effective_batch_size,
            max_epochs=end.epoch,
            max_updates=end.update,
            max_samples=end.sample,
            max_batch_size=learn.microbatch if isinstance(learn.microbatch, int) else None,
            precision=self.precision,
            skip_nan_loss=any(cb.policy == 'skip' for cb in guards),
        )

    @property
    def device(self) -> torch.device:
        return model_device(self._adapter.learn.model, self._adapter.learn.dls)

    @property
    def total_training_updates(self) -> int | None:
        return self.end_checkpoint.update

    @property
    def callbacks(self) -> list[Any]:
        adapters = list_adapters(self._adapter.learn, 'ksuit')
        return [cb.wrapped for cb in adapters if cb.wrapped is not None]

    @property
    def autocast_context(self) -> Any:
        return self._adapter.learn.contexts('forward')

    @property
    def precision(self) -> str:
        return precision_of(self._adapter.learn).value.removeprefix('amp_')

    @property
    def last_loss(self) -> Any:
        return self._adapter.learn.loss

    def train_step(
        self,
        batch: Any,  # batch of a loader, on the device of the model
        model: nn.Module | None = None,  # None: the Learner's
    ) -> TrainerResult:
        "Compute the loss of a batch, without events and without changing the Learner's batch."
        learn = self._adapter.learn
        xb, yb = form_of(learn.dls, 'train').split(batch)
        pred, loss = unpack_output(apply_model(learn.model if model is None else model, xb))
        if learn.loss_func is not None:
            loss = learn.loss_func(pred, *yb)
        if loss is None:
            raise LossError('`train_step` needs a loss function, or a model that returns a loss.')
        parts = dict(loss) if isinstance(loss, Mapping) else {'loss': loss}
        total: Any = parts['loss'] if 'loss' in parts else sum(parts.values())
        return TrainerResult(total, parts, name_outputs(pred))

    def state_dict(self) -> dict[str, Any]:
        "Return the progress of the run and the states of its ksuit callbacks."
        states = [cb.state_dict() if hasattr(cb, 'state_dict') else None for cb in self.callbacks]
        return {**dict(self.update_counter.cur_iteration), 'callback_state_dicts': states}


def name_outputs(pred: Any) -> dict[str, Any]:
    "Return detached predictions by name; a single output is named 'pred'."
    parts = pred if isinstance(pred, Mapping) else {'pred': pred}
    return {
        name: part.detach() if hasattr(part, 'detach') else part for name, part in parts.items()
    }


class ModelOptimizer(View):
    "View of the Learner's optimizer and schedulers as the `optimizer` of a Noether model."

    @property
    def torch_optim(self) -> Any:
        return self._adapter.learn.opt

    @property
    def schedule(self) -> Any:
        "The callback that schedules the learning rate, or None."
        cbs = self._adapter.learn.cbs
        torch_scheduler = next((cb for cb in cbs if isinstance(cb, LRScheduler)), None)
        return self._find_scheduler('lr') or torch_scheduler

    @property
    def weight_decay_schedule(self) -> Any:
        "The callback that schedules the weight decay, or None."
        return self._find_scheduler('wd') or self._find_scheduler('weight_decay')

    def _find_scheduler(self, name: str) -> Any:
        schedulers = [cb for cb in self._adapter.learn.cbs if isinstance(cb, ParamScheduler)]
        return next((cb for cb in schedulers if name in cb.scheds), None)

    def state_dict(self) -> dict[str, Any]:
        return self.torch_optim.state_dict()


def model_view(model: nn.Module, adapter: Any) -> Any:
    "Return a view of the model with the attributes of Noether's models."

    def count(model: nn.Module, requires_grad: bool) -> int:
        return sum(p.numel() for p in model.parameters() if p.requires_grad == requires_grad)

    return extend(
        model,
        {
            'name': lambda model: type(model).__name__,
            'device': lambda model: model_device(model, adapter.learn.dls),
            'param_count': lambda model: count(model, True) + count(model, False),
            'trainable_param_count': lambda model: count(model, True),
            'frozen_param_count': lambda model: count(model, False),
            'optimizer': lambda model: (
                None if adapter.learn.opt is None else ModelOptimizer(adapter)
            ),
            'get_named_models': lambda model: lambda: {model.name: model},
        },
    )
