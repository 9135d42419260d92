"""LightningModules, one for each behavior of Lightning's Trainer that modules rely on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics.classification import BinaryAccuracy, BinaryF1Score

N_TRAIN, N_VALID, BATCH = 38, 12, 8  # 5 batches of training, the last one smaller


def make_loader(n: int, seed: int, shuffle: bool = False) -> DataLoader[Any]:
    "Return a loader with generators of its own: an evaluation draws nothing from the global one."
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=g)
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), BATCH, shuffle=shuffle, generator=g)


def loaders(valid: int = 1) -> tuple[Any, Any]:
    "Return a training loader, and one or several validation loaders."
    own = [make_loader(N_VALID - 3 * i, 2 + i) for i in range(valid)]
    return make_loader(N_TRAIN, 1, shuffle=True), own[0] if valid == 1 else own


class Stream(IterableDataset[Any]):
    "Samples without a number."

    def __iter__(self) -> Iterator[Any]:
        return iter(make_loader(N_TRAIN, 1).dataset)


def streams() -> tuple[Any, Any]:
    g = torch.Generator().manual_seed(1)
    return DataLoader(Stream(), BATCH, generator=g), loaders()[1]


def global_loaders() -> tuple[Any, Any]:
    "Return loaders that draw from the global generator."
    train, valid = loaders()
    return DataLoader(train.dataset, BATCH, shuffle=True), DataLoader(valid.dataset, BATCH)


class Classifier(L.LightningModule):
    "A module as a tutorial has it."

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(hidden, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log('train_loss', loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        pred = self(x)
        self.log('val_loss', F.cross_entropy(pred, y), prog_bar=True)
        self.log('val_acc', (pred.argmax(1) == y).float().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class NoValidation(Classifier):
    "No `validation_step`: the validation loader is unused."

    validation_step = L.LightningModule.validation_step


class ScheduledByStep(Classifier):
    "A schedule of as many steps as the trainer expects."

    def configure_optimizers(self) -> Any:
        opt = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        n = self.trainer.estimated_stepping_batches
        schedule = lr_scheduler.OneCycleLR(opt, 0.1, total_steps=n)
        return {'optimizer': opt, 'lr_scheduler': {'scheduler': schedule, 'interval': 'step'}}


class ScheduledByEpoch(Classifier):
    "Two lists."

    def configure_optimizers(self) -> Any:
        opt = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [opt], [lr_scheduler.StepLR(opt, 1, 0.5)]


class Plateau(Classifier):
    "A schedule that waits for a logged value."

    def configure_optimizers(self) -> Any:
        opt = torch.optim.SGD(self.parameters(), lr=0.5)
        schedule = lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.1)
        return {'optimizer': opt, 'lr_scheduler': schedule, 'monitor': 'val_loss'}


class Frequency(Classifier):
    "A schedule every second step, stepped by the module itself."

    def configure_optimizers(self) -> Any:
        opt = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = lr_scheduler.ExponentialLR(opt, 0.8)
        return [opt], [{'scheduler': schedule, 'interval': 'step', 'frequency': 2, 'name': 'rate'}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()
        self.steps = getattr(self, 'steps', 0) + 1


class Gan(L.LightningModule):
    "Two optimizers, stepped by hand, with a schedule of each."

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.gen = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        g_opt, c_opt = self.optimizers()
        z = torch.randn(len(x), 2)
        self.toggle_optimizer(g_opt)
        g_loss = F.softplus(-self.critic(self.gen(z))).mean()
        self.log('g_loss', g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        g_opt.step()
        g_opt.zero_grad()
        self.untoggle_optimizer(g_opt)

        self.toggle_optimizer(c_opt)
        fake = self.critic(self.gen(z).detach())
        c_loss = F.softplus(-self.critic(x)).mean() + F.softplus(fake).mean()
        self.log('c_loss', c_loss, prog_bar=True)
        self.manual_backward(c_loss)
        self.clip_gradients(c_opt, gradient_clip_val=0.1, gradient_clip_algorithm='norm')
        c_opt.step()
        c_opt.zero_grad()
        self.untoggle_optimizer(c_opt)

    def on_train_epoch_end(self) -> None:
        for schedule in self.lr_schedulers():
            schedule.step()

    def configure_optimizers(self) -> Any:
        g_opt = torch.optim.Adam(self.gen.parameters(), lr=0.01, betas=(0.5, 0.9))
        c_opt = torch.optim.Adam(self.critic.parameters(), lr=0.02, betas=(0.5, 0.9))
        return [
            {'optimizer': g_opt, 'lr_scheduler': lr_scheduler.StepLR(g_opt, 1, 0.9)},
            {'optimizer': c_opt, 'lr_scheduler': lr_scheduler.StepLR(c_opt, 1, 0.8)},
        ]


class ManualClosure(Classifier):
    "Manual optimization with a closure, a step every second batch, and a dict as its result."

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        opt = self.optimizers()
        losses = []

        def closure() -> None:
            loss = F.cross_entropy(self(x), y)
            losses.append(loss.detach())
            self.manual_backward(loss)

        if batch_idx % 2:
            opt.step(closure=closure)
            opt.zero_grad()
        else:
            closure()
        self.log('train_loss', losses[0], on_epoch=True)
        return {'loss': losses[0], 'n': len(x)}


class ClipsItself(Classifier):
    "Clipping of its own."

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.log('clip', gradient_clip_val or 0.0)
        torch.nn.utils.clip_grad_value_(self.net.parameters(), (gradient_clip_val or 0.0) / 10)


class StepsItself(Classifier):
    "A warm-up in `optimizer_step`, as of Lightning's own documentation."

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any
    ) -> None:
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 6:
            for group in optimizer.param_groups:
                group['lr'] = 0.01 * (self.trainer.global_step + 1) / 6


class EverySecond(Classifier):
    "Step every second batch only; the closure runs in each."

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any
    ) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2:
            optimizer.zero_grad(set_to_none=False)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward(*args, **kwargs)


class Lbfgs(Classifier):
    "An optimizer that computes the loss several times a step."

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class LogsAll(Classifier):
    "`self.log` in its forms and from its hooks."

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log('both', loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log('epoch_only', loss, on_step=False, on_epoch=True)
        self.log('step_only', loss, on_step=True, on_epoch=False)
        self.log('largest', loss, on_step=False, on_epoch=True, reduce_fx='max')
        self.log('smallest', loss, on_step=False, on_epoch=True, reduce_fx=torch.min)
        self.log('summed', loss, on_epoch=True, reduce_fx='sum')
        self.log('sized', loss, on_epoch=True, batch_size=batch_idx + 1)
        self.log('unlogged', loss, logger=False, on_epoch=True)
        self.log('whole', batch_idx, on_epoch=True)
        self.log_dict({'a/x': loss, 'a/y': 2 * loss}, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_start(self) -> None:
        self.log('start', 1.0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [p.grad.norm() for p in self.parameters()]
        self.log('grad_norm', torch.stack(norms).norm())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log('output', outputs['loss'], on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log('epoch_end', float(self.current_epoch))
        self.log('again', self.trainer.callback_metrics['epoch_only'])

    def on_validation_epoch_end(self) -> None:
        self.log('val_end', float(self.global_step))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log('val_step', float(batch_idx), on_step=True, on_epoch=True)


class TorchMetrics(Classifier):
    "Metrics of torchmetrics, alone and in a collection."

    def __init__(self) -> None:
        super().__init__()
        self.train_acc = BinaryAccuracy()
        self.val_acc = BinaryAccuracy()
        self.val_f1 = BinaryF1Score()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        pred = self(x)
        self.train_acc(pred.argmax(1), y)
        self.log('train_acc', self.train_acc, on_step=True, on_epoch=True)
        return F.cross_entropy(pred, y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        pred = self(x).argmax(1)
        self.val_acc.update(pred, y)
        self.val_f1.update(pred, y)
        self.log_dict({'val_acc': self.val_acc, 'val_f1': self.val_f1}, on_epoch=True)


class SeveralLoaders(Classifier):
    "Two validation loaders, and a value without their numbers."

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        self.log('val_loss', F.cross_entropy(self(x), y))
        self.log(f'own_{dataloader_idx}', float(len(x)), add_dataloader_idx=False)


class Autoencoder(L.LightningModule):
    "A dict as the result, a step without `batch_idx`, and a list of outputs of its own."

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 2), nn.Linear(2, 4)
        self.codes: list[Tensor] = []

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        code = self.encoder(batch[0])
        loss = F.mse_loss(self.decoder(code), batch[0])
        self.codes.append(code.detach().mean())
        return {'loss': loss, 'code': code.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log('code', outputs['code'].mean())

    def on_train_epoch_end(self) -> None:
        self.log('codes', torch.stack(self.codes).mean())
        self.codes.clear()

    def validation_step(self, batch: Any) -> Tensor:
        loss = F.mse_loss(self.decoder(self.encoder(batch[0])), batch[0])
        self.log('val_loss', loss)
        return loss

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1)]


class SkipsBatches(Classifier):
    "`None` as the result of a batch: no step's gradient."

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class SkipsEpoch(Classifier):
    "-1 from a hook: the rest of the epoch is left out."

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None

    def configure_optimizers(self) -> Any:
        opt = torch.optim.SGD(self.parameters(), lr=0.1)
        return [opt], [lr_scheduler.StepLR(opt, 1, 0.5)]


class Hyperparameters(Classifier):
    "Its arguments, and a counter in the checkpoint."

    def __init__(self, hidden: int = 8, lr: float = 0.02) -> None:
        super().__init__(hidden)
        self.save_hyperparameters()
        self.n_seen = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.n_seen += len(batch[0])

    def on_train_epoch_end(self) -> None:
        self.log('n_seen', float(self.n_seen))

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        checkpoint['seen'] = self.n_seen

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class AllSteps(Classifier):
    "A step for each function of the trainer."

    def __init__(self, hidden: int = 6) -> None:
        super().__init__(hidden)
        self.save_hyperparameters()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log('test_acc', (self(x).argmax(1) == y).float().mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).softmax(1)


class ReadsTrainer(Classifier):
    "What modules read of `self.trainer`."

    def on_train_start(self) -> None:
        t = self.trainer
        self.seen: list[Any] = [
            *(
                t.max_epochs,
                t.num_training_batches,
                t.num_val_batches,
                t.estimated_stepping_batches,
            ),
            *(
                t.world_size,
                t.global_rank,
                t.local_rank,
                t.num_devices,
                t.num_nodes,
                t.is_global_zero,
            ),
            *(t.accumulate_grad_batches, t.gradient_clip_val, t.check_val_every_n_epoch),
            *(t.val_check_interval, t.fast_dev_run, t.sanity_checking, t.max_steps, t.datamodule),
            *(
                dict(t.callback_metrics),
                len(t.optimizers),
                len(t.lr_scheduler_configs),
                t.ckpt_path,
            ),
            *(t.train_dataloader is not None, t.val_dataloaders is not None, t.model is self),
            *(str(self.device), str(t.strategy.root_device), self.logger is not None),
        ]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        t = self.trainer
        self.seen.append(
            (t.global_step, t.current_epoch, t.training, t.validating, t.is_last_batch)
        )
        self.seen.append((t.state.fn == 'fit', t.should_stop, self.global_step, self.current_epoch))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        t = self.trainer
        self.seen.append((t.global_step, t.training, t.validating, t.testing, self.training))
        super().validation_step(batch, batch_idx)

    def on_train_end(self) -> None:
        self.seen.append((self.trainer.current_epoch, self.trainer.global_step))
        self.log_text = str(self.seen)


class StopsItself(Classifier):
    "`should_stop`, set within an epoch."

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 7:
            self.trainer.should_stop = True


class Frozen(Classifier):
    "A part in evaluation mode, which stays in it, and one that is trained later."

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
        for p in self.body.parameters():
            p.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.body(x))

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            for p in self.body.parameters():
                p.requires_grad_(True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(
            [{'params': self.net.parameters()}, {'params': self.body.parameters(), 'lr': 0.01}],
            lr=0.1,
        )


class BringsCallback(Classifier):
    "`configure_callbacks`."

    def configure_callbacks(self) -> Any:
        return [EarlyStopping('val_loss', patience=0, min_delta=10.0)]


class OwnLoaders(Classifier):
    "Loaders, made in `setup`, are methods of the module; the last layer too."

    def setup(self, stage: str) -> None:
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale

    def train_dataloader(self) -> Any:
        return loaders()[0]

    def val_dataloader(self) -> Any:
        return loaders()[1]


class Data(L.LightningDataModule):
    "A data module with hooks of the transfer."

    def prepare_data(self) -> None:
        self.is_prepared = True

    def setup(self, stage: str) -> None:
        self.train, self.valid = loaders()

    def train_dataloader(self) -> Any:
        return self.train

    def val_dataloader(self) -> Any:
        return self.valid

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x + (0.1 if self.trainer.training else 0.0), y


class Hooked(Classifier):
    "Every hook, in the order of the calls."


HOOKS = (
    'prepare_data setup configure_model teardown on_fit_start on_fit_end on_train_start on_train_end '
    'on_train_epoch_start on_train_epoch_end on_train_batch_start on_train_batch_end '
    'on_validation_model_zero_grad on_validation_start on_validation_end on_validation_epoch_start '
    'on_validation_epoch_end on_validation_batch_start on_validation_batch_end on_before_zero_grad '
    'on_before_backward on_after_backward on_before_optimizer_step on_before_batch_transfer '
    'on_after_batch_transfer'
).split()


def recording(name: str, label: str) -> Any:
    "Return a hook that notes its call, its arguments' types and the number of the batch."

    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        numbers = [a for a in args if type(a) is int]
        self.calls.append(f'{label}.{name}{numbers or ""}')
        return args[0] if name.endswith('batch_transfer') else None

    return hook


def record_calls(cls: type, label: str, names: Iterator[str] | list[str]) -> None:
    for name in names:
        setattr(cls, name, recording(name, label))


record_calls(Hooked, 'module', [n for n in HOOKS if n != 'prepare_data'])


def note_call(name: str) -> Any:
    "Return an override that notes its call, and calls the original."

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(f'module.{name}')
        return getattr(super(Hooked, self), name)(*args, **kwargs)

    return method


for _name in (
    'training_step validation_step configure_optimizers optimizer_step optimizer_zero_grad backward '
    'configure_gradient_clipping lr_scheduler_step configure_callbacks'
).split():
    setattr(Hooked, _name, note_call(_name))


class Recording(L.Callback):
    "A callback that notes each hook."

    def __init__(self) -> None:
        self.calls: list[str] = []


record_calls(Recording, 'callback', [n for n in HOOKS if hasattr(L.Callback, n)])
