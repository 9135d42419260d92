"""Subjects of a real training: bf16 autocast, clipping, AdamW, one cycle of the rate, an average of the weights.

All train with the same features: by hand, by hand with torch.compile, with learnkit, and with other libraries as
their documentation recommends."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import GPT
from benchmarks.subjects import Batch, Fit, Task

__all__ = ['REAL', 'ClassTask', 'TokenTask']

LR = 1e-3
MAX_NORM = 1.0
DECAY = 0.999


def class_loss(pred: Tensor, targ: Tensor) -> Tensor:
    "Return the cross-entropy of classes at the last axis."
    return F.cross_entropy(pred.flatten(0, -2), targ.flatten())


class ClassTask(Task):
    "A perceptron 16-64-64-10 on batches of 32, with ten classes."

    loss_func = staticmethod(F.cross_entropy)

    def batch(self) -> Batch:
        return torch.randn(32, 16), torch.randint(10, (32,))

    def make_model(self) -> nn.Module:
        layers = [nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)]
        return nn.Sequential(*layers)


class TokenTask(Task):
    "A transformer of 2 blocks of width 64 on batches of 4 sequences of 32 tokens of 65."

    loss_func = staticmethod(class_loss)

    def batch(self) -> Batch:
        tokens = torch.randint(65, (4, 33))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def make_model(self) -> nn.Module:
        return GPT(65, 32, width=64)


# ------------------------------------------------------------------------------------------ by hand


def raw(task: Task) -> Fit:
    "Build the hand-written training loop."
    model = task.model
    params: list[Tensor] = list(model.parameters())
    averages = [p.detach().clone() for p in params]
    opt = torch.optim.AdamW(params, lr=LR, fused=True)

    def fit(n_epoch: int) -> None:
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            opt, LR, total_steps=n_epoch * len(task.train) + 1
        )
        for _ in range(n_epoch):
            model.train()
            for xb, yb in task.train:
                with torch.autocast('cpu', dtype=torch.bfloat16):
                    loss = task.loss_func(model(xb), yb)
                loss.backward()
                nn.utils.clip_grad_norm_(params, MAX_NORM)
                opt.step()
                opt.zero_grad()
                schedule.step()
                with torch.no_grad():
                    torch._foreach_lerp_(averages, params, 1 - DECAY)

    return fit


def raw_compiled(task: Task) -> Fit:
    """Build the hand-written loop with torch.compile around forward and loss, and around clip, step and average.

    The rate is a tensor, so that a new rate compiles nothing again; betas are constants for the same reason."""
    model = task.model
    params: list[Tensor] = list(model.parameters())
    averages = [p.detach().clone() for p in params]
    opt = torch.optim.AdamW(params, lr=torch.tensor(LR))

    @torch.compile
    def compute_loss(xb: Tensor, yb: Tensor) -> Tensor:
        with torch.autocast('cpu', dtype=torch.bfloat16):
            return task.loss_func(model(xb), yb)

    @torch.compile
    def update() -> None:
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        opt.step()
        with torch.no_grad():
            torch._foreach_lerp_(averages, params, 1 - DECAY)

    def fit(n_epoch: int) -> None:
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            opt, LR, total_steps=n_epoch * len(task.train) + 1, cycle_momentum=False
        )
        for _ in range(n_epoch):
            model.train()
            for xb, yb in task.train:
                compute_loss(xb, yb).backward()
                update()
                opt.zero_grad()
                schedule.step()

    return warmed_up(task, fit)


def warmed_up(task: Task, fit: Fit) -> Fit:
    "Compile in a first epoch, which is not measured."
    fit(2)
    task.train.began_s.clear()
    task.train.ended_s.clear()
    return fit


# ---------------------------------------------------------------------------------------- libraries


def learnkit(task: Task, compiles: str = '', opt_func: Any = None) -> Fit:
    "Build a default `Learner` with the features as callbacks."
    from learnkit import EMA, DataLoaders, GradientClip, Learner, MixedPrecision

    learn = Learner(
        DataLoaders(task.train),
        task.model,
        task.loss_func,
        opt_func=opt_func or partial(torch.optim.AdamW, fused=True),
        cbs=[MixedPrecision('bf16'), GradientClip(MAX_NORM), EMA(DECAY)],
    )

    def fit(n_epoch: int) -> None:
        learn.fit_one_cycle(n_epoch, LR)

    if not compiles:
        return fit
    learn.compile(step=compiles == 'step')
    return warmed_up(task, fit)


def fastai(task: Task) -> Fit:
    "Build fastai's `Learner` with mixed precision and clipping; it has no average of the weights."
    from fastai.callback.fp16 import AMPMode, MixedPrecision
    from fastai.callback.progress import ProgressCallback  # noqa: F401  its import makes it one of the defaults
    from fastai.callback.schedule import fit_one_cycle  # noqa: F401  its import adds the method
    from fastai.callback.training import GradientClip
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.optimizer import OptimWrapper

    learn = Learner(
        DataLoaders(task.train, [], device=torch.device('cpu')),
        task.model,
        task.loss_func,
        opt_func=partial(OptimWrapper, opt=torch.optim.AdamW, fused=True),
        cbs=[MixedPrecision(amp_mode=AMPMode.BF16), GradientClip(MAX_NORM)],
    )

    def fit(n_epoch: int) -> None:
        learn.fit_one_cycle(n_epoch, LR)

    return fit


def ignite(task: Task) -> Fit:
    "Build Ignite's `Engine` around a step written by hand, since its own mixed precision needs a GPU."
    from ignite.engine import Engine, Events
    from ignite.handlers import EMAHandler
    from ignite.handlers.param_scheduler import LRScheduler

    model = task.model
    opt = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step(engine: Any, batch: Batch) -> Tensor:
        model.train()
        xb, yb = batch
        with torch.autocast('cpu', dtype=torch.bfloat16):
            loss = task.loss_func(model(xb), yb)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        opt.step()
        opt.zero_grad()
        return loss.detach()

    def fit(n_epoch: int) -> None:
        steps = n_epoch * len(task.train) + 1
        schedule = torch.optim.lr_scheduler.OneCycleLR(opt, LR, total_steps=steps)
        trainer = Engine(step)
        trainer.add_event_handler(Events.ITERATION_STARTED, LRScheduler(schedule))
        EMAHandler(model, momentum=1 - DECAY).attach(trainer)
        trainer.run(task.train, max_epochs=n_epoch)

    return fit


def lightning(task: Task) -> Fit:
    """Build Lightning's `Trainer` with its mixed precision, clipping and average.

    AdamW is not fused: Lightning refuses to clip the gradients of a fused optimizer under mixed precision."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import EMAWeightAveraging

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = task.model

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return task.loss_func(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            opt = torch.optim.AdamW(self.parameters(), lr=LR, foreach=True)
            steps = int(self.trainer.estimated_stepping_batches) + 1
            schedule = torch.optim.lr_scheduler.OneCycleLR(opt, LR, total_steps=steps)
            return [opt], [{'scheduler': schedule, 'interval': 'step'}]

    module = Module()

    def fit(n_epoch: int) -> None:
        trainer = Trainer(
            max_epochs=n_epoch,
            accelerator='cpu',
            precision='bf16-mixed',
            gradient_clip_val=MAX_NORM,
            callbacks=[EMAWeightAveraging(decay=DECAY)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, task.train)

    return fit


REAL: dict[str, Callable[[Task], Fit]] = {
    'raw': raw,
    'raw-compiled': raw_compiled,
    'learnkit': learnkit,
    'learnkit-plain-adamw': partial(learnkit, opt_func=torch.optim.AdamW),
    'learnkit-model-compiled': partial(learnkit, compiles='model'),
    'learnkit-compiled': partial(learnkit, compiles='step'),
    'fastai': fastai,
    'ignite': ignite,
    'lightning': lightning,
}
