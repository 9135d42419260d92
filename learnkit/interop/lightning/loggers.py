# SPDX-License-Identifier: Apache-2.0
"""Values that Lightning's own loggers receive, at the steps at which its Trainer logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from learnkit.interop.lightning.host import LightningHost


class LoggedSteps:
    "Values since the last call of the Trainer's loggers: of batches, and of epochs or evaluations."

    def __init__(self, host: LightningHost) -> None:
        self.host = host
        self.of_batch: dict[str, Any] = {}
        self.of_evaluation: dict[str, Any] = {}  # of a batch of it
        self.of_epoch: dict[str, Any] = {}
        self.n_evaluated: dict[str, int] = {}  # batches by evaluation loader

    def note(self, name: str, value: Any, is_batch: bool, training: bool) -> None:
        "Note a value that loggers receive."
        of_batch = self.of_batch if training else self.of_evaluation
        (of_batch if is_batch else self.of_epoch)[name] = value

    def log_batch(self) -> None:
        "Log the values of a training batch, if they are due."
        if self.host.is_log_due and not self.host.optimization.accumulates():
            self.log(self.of_batch)

    def log_evaluation_batch(self) -> None:
        "Log the values of a batch of an evaluation, at the number of the batch."
        learn = self.host.learn
        n = self.n_evaluated.get(learn.dl_name, 0)
        self.n_evaluated[learn.dl_name] = n + 1
        self.log(self.of_evaluation, n)
        self.of_evaluation = {}

    def log_epoch(self, training: bool) -> None:
        "Log the values of an epoch or an evaluation."
        self.log(self.of_epoch, None, -1 if training else 0)
        self.of_epoch = {}
        if training:
            self.of_batch = {}

    def log(self, metrics: Mapping[str, Any], step: int | None = None, offset: int = 0) -> None:
        "Pass values to the loggers of the Trainer; the step is the number of batches that stepped."
        loggers = self.host.trainer.own_loggers
        if not loggers or not metrics:
            return
        scalars = {k: v.item() if isinstance(v, Tensor) else v for k, v in metrics.items()}
        if step is None and 'step' in scalars:
            step = int(scalars.pop('step'))
        elif step is None:
            scalars.setdefault('epoch', self.host.trainer.current_epoch)
            step = self.host.n_stepped + offset
        for logger in loggers:
            logger.log_metrics(metrics=dict(scalars), step=step)
            logger.save()

    def forget(self) -> None:
        "Forget all values."
        self.of_batch, self.of_evaluation, self.of_epoch = {}, {}, {}


def log_hyperparams(host: LightningHost) -> None:
    "Log the hyperparameters of module and data module, and the graph, as Lightning does before a run."
    trainer, module = host.trainer, host.module
    params: dict[str, Any] = {}
    has_params = False
    for owner in (module, trainer.datamodule):
        if getattr(owner, '_log_hyperparams', False):
            has_params = True
            params |= owner.hparams_initial
    params.pop('_class_path', None)
    for logger in trainer.own_loggers:
        if has_params:
            logger.log_hyperparams(params)
        logger.log_graph(module)
        logger.save()


def open_loggers(loggers: list[Any]) -> None:
    "Begin the experiments of loggers, that of W&B first."
    for logger in sorted(loggers, key=lambda logger: type(logger).__name__ != 'WandbLogger'):
        getattr(logger, 'experiment', None)
