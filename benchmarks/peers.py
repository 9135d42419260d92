"""Other libraries on the same tasks, written as their documentation recommends; measured if they are installed.

A library that was not installed when its subject was written has never run: the tables mark its name. With
validation batches in the task, a library's usual defaults are on; without, everything that can be off is off."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ['PEERS']

LR = 0.01
Fit = Callable[[int], object]


def ignite(task: Any, accuracy: Callable[..., Tensor]) -> Fit:
    "Build a supervised trainer with an evaluator and a progress bar."
    from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer

    trainer = create_supervised_trainer(
        task.model, torch.optim.SGD(task.model.parameters(), lr=LR), task.loss_func
    )
    if task.valid:
        from ignite.handlers import ProgressBar
        from ignite.metrics import Loss

        metrics = {'loss': Loss(task.loss_func), 'accuracy': Loss(accuracy)}
        evaluator = create_supervised_evaluator(task.model, metrics=metrics)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(task.valid))
        ProgressBar().attach(trainer, output_transform=lambda loss: {'loss': loss})
    return lambda n_epoch: trainer.run(task.train, max_epochs=n_epoch)


class Batches:
    "Loader of a list of batches: Lightning takes a list for several loaders."

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def lightning(task: Any, accuracy: Callable[..., Tensor]) -> Fit:
    "Build a `Trainer` for a module with the usual three methods."
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = task.model

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = task.loss_func(self.model(batch[0]), batch[1])
            if task.valid:
                self.log('train_loss', loss, prog_bar=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pred = self.model(batch[0])
            self.log('valid_loss', task.loss_func(pred, batch[1]), prog_bar=True)
            self.log('accuracy', accuracy(pred, batch[1]), prog_bar=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=LR)

    module = Module()
    shown = bool(task.valid)

    def fit(n_epoch: int) -> None:
        trainer = Trainer(
            max_epochs=n_epoch,
            accelerator='cpu',
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=shown,
            enable_model_summary=shown,
            num_sanity_val_steps=0,
        )
        valid = Batches(task.valid) if task.valid else None
        trainer.fit(module, Batches(task.train), valid)

    return fit


def skorch(task: Any, accuracy: Callable[..., Tensor]) -> Fit:
    "Build a `NeuralNet` that takes its batches from the task's loaders."
    from skorch import NeuralNet
    from skorch.callbacks import PassthroughScoring
    from skorch.helper import predefined_split
    from torch.utils.data import TensorDataset

    # they only stand for the loaders
    train, valid = (TensorDataset(*[t[:1] for t in task.batch()]) for _ in range(2))

    class Net(NeuralNet):
        def get_iterator(self, dataset: Any, training: bool = False) -> Iterable[Any]:
            return task.train if training else task.valid

        def get_loss(self, y_pred: Tensor, y_true: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return task.loss_func(y_pred, y_true)

        def validation_step(self, batch: Any, **kwargs: Any) -> Any:
            step = super().validation_step(batch, **kwargs)
            self.history.record_batch('accuracy', accuracy(step['y_pred'], batch[1]).item())
            return step

    shown: dict[str, Any] = (
        {
            'callbacks': [('accuracy', PassthroughScoring('accuracy', lower_is_better=False))],
            'train_split': predefined_split(valid),
        }
        if task.valid
        else {'train_split': None}
    )
    net = Net(
        task.model,
        torch.nn.MSELoss,
        optimizer=torch.optim.SGD,
        lr=LR,
        verbose=int(bool(task.valid)),
        **shown,
    )
    net.initialize()
    return lambda n_epoch: net.partial_fit(train, y=None, epochs=n_epoch)


def composer(task: Any, accuracy: Callable[..., Tensor]) -> Fit:
    "Build a `Trainer` for a `ComposerModel`; each call continues the training."
    from composer import DataSpec, Trainer
    from composer.models import ComposerModel
    from torchmetrics.aggregation import MeanMetric

    class Model(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.model = task.model
            self.accuracy = MeanMetric()

        def forward(self, batch: Any) -> Tensor:
            return self.model(batch[0])

        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            return task.loss_func(outputs, batch[1])

        def get_metrics(self, is_train: bool = False) -> dict[str, Any]:
            return {'accuracy': self.accuracy}

        def update_metric(self, batch: Any, outputs: Tensor, metric: Any) -> None:
            metric.update(accuracy(outputs, batch[1]), len(batch[0]))

    model = Model()
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=LR),
        max_duration='0ep',
        train_dataloader=DataSpec(task.train, get_num_samples_in_batch=lambda b: len(b[0])),
        eval_dataloader=DataSpec(task.valid, get_num_samples_in_batch=lambda b: len(b[0]))
        if task.valid
        else None,
        progress_bar=bool(task.valid),
        device='cpu',
    )
    return lambda n_epoch: trainer.fit(duration=f'{n_epoch}ep')


PEERS: dict[str, Callable[..., Fit]] = {
    'ignite': ignite,
    'lightning': lightning,
    'skorch': skorch,
    'composer': composer,
}
