"""Tasks of the benchmarks, and the subjects: hand-written loops, learnkit, fastai and other libraries.

A subject is a function of a `Task` that builds model and optimizer once and returns `fit(n_epoch)`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.peers import PEERS

__all__ = ['SUBJECTS', 'Task', 'ImageTask', 'Window', 'accuracy']

Batch = tuple[Tensor, Tensor]
Fit = Callable[[int], object]
LR = 0.01


class Window:
    """Training loader that records the CPU times at which the steady part of each pass begins and ends.

    The steady part ends when the last batch is requested, because some libraries never request another one."""

    def __init__(
        self,
        batches: list[Batch],
        skip: int,  # batches of each pass before the steady part
    ) -> None:
        self.first = batches[:skip]
        self.steady = batches[skip:-1]
        self.last = batches[-1:]
        self.began_s: list[float] = []
        self.ended_s: list[float] = []

    def __len__(self) -> int:
        return len(self.first) + len(self.steady) + len(self.last)

    def __iter__(self) -> Iterator[Batch]:
        yield from self.first
        self.began_s.append(time.process_time())
        yield from self.steady
        self.ended_s.append(time.process_time())
        yield from self.last


class Task:
    "A 16-16-1 perceptron on batches of 8, as tensors; each instance draws new ones from the current seed."

    loss_func: Callable[..., Tensor] = staticmethod(F.mse_loss)

    def __init__(
        self,
        n_train: int,  # batches to train on
        n_valid: int,  # batches to validate on
        skip: int,  # training batches before the steady part
    ) -> None:
        batches = [self.batch() for _ in range(n_train + n_valid)]
        self.train = Window(batches[:n_train], skip)
        self.valid = batches[n_train:]
        self.model = self.make_model()

    def batch(self) -> Batch:
        x = torch.randn(8, 16)
        return x, x[:, :4].sum(1, keepdim=True)

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))


class ImageTask(Task):
    "Three convolutions and a linear layer on batches of 64 images of 28 x 28, in ten classes."

    loss_func = staticmethod(F.cross_entropy)

    def batch(self) -> Batch:
        return torch.randn(64, 1, 28, 28), torch.randint(10, (64,))

    def make_model(self) -> nn.Module:
        sizes = [1, 8, 16, 32]
        convolutions = [
            layer
            for n_in, n_out in pairwise(sizes)
            for layer in (nn.Conv2d(n_in, n_out, 3, stride=2, padding=1), nn.ReLU())
        ]
        return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32 * 4 * 4, 10))


def accuracy(pred: Tensor, targ: Tensor) -> Tensor:
    "Return the share of predictions that have the target's sign."
    return ((pred > 0) == (targ > 0)).float().mean()


# ------------------------------------------------------------------------------------------ by hand


def raw(task: Task) -> Fit:
    "Build the hand-written training loop."
    model = task.model
    loss_func = task.loss_func
    opt = torch.optim.SGD(model.parameters(), lr=LR)

    def fit(n_epoch: int) -> None:
        for _ in range(n_epoch):
            model.train()
            for xb, yb in task.train:
                pred = model(xb)
                loss = loss_func(pred, yb)
                loss.backward()
                opt.step()
                opt.zero_grad()

    return fit


def raw_compiled(task: Task) -> Fit:
    "Build the hand-written training loop with torch.compile around the model with its loss, and around the step."
    model = task.model
    opt = torch.optim.SGD(model.parameters(), lr=LR)
    compute_loss = torch.compile(lambda xb, yb: task.loss_func(model(xb), yb))
    step = torch.compile(opt.step)

    def fit(n_epoch: int) -> None:
        for _ in range(n_epoch):
            model.train()
            for xb, yb in task.train:
                compute_loss(xb, yb).backward()
                step()
                opt.zero_grad()

    fit(1)  # compiles
    task.train.began_s.clear()
    task.train.ended_s.clear()
    return fit


def raw_evaluating(task: Task) -> Fit:
    "Build the hand-written loop with a validation pass per epoch that prints mean losses and accuracy."
    model = task.model
    loss_func = task.loss_func
    opt = torch.optim.SGD(model.parameters(), lr=LR)

    def fit(n_epoch: int) -> None:
        for epoch in range(n_epoch):
            model.train()
            train_loss = torch.zeros(())
            for xb, yb in task.train:
                pred = model(xb)
                loss = loss_func(pred, yb)
                loss.backward()
                opt.step()
                opt.zero_grad()
                train_loss += loss.detach()

            model.eval()
            valid_loss = torch.zeros(())
            correct = torch.zeros(())
            n = 0
            with torch.no_grad():
                for xb, yb in task.valid:
                    pred = model(xb)
                    valid_loss += loss_func(pred, yb) * len(xb)
                    correct += accuracy(pred, yb) * len(xb)
                    n += len(xb)
            print(
                epoch,
                train_loss.item() / len(task.train),
                valid_loss.item() / n,
                correct.item() / n,
            )

    return fit


# ----------------------------------------------------------------------------------------- learnkit


def learnkit(task: Task, metrics: Any = None, **kwargs: Any) -> Fit:
    "Build a default `Learner`."
    from learnkit import DataLoaders, Learner

    dls = DataLoaders(task.train, task.valid) if task.valid else DataLoaders(task.train)
    return Learner(
        dls, task.model, task.loss_func, opt_func=torch.optim.SGD, lr=LR, metrics=metrics, **kwargs
    ).fit


def learnkit_bare(task: Task) -> Fit:
    "Build a `Learner` that only counts batches and sets the model's mode."
    from learnkit import TrainEvalCallback

    return learnkit(task, default_cbs=False, cbs=[TrainEvalCallback])


def learnkit_compiled(task: Task, make: Callable[[Task], Any]) -> Fit:
    "Build a `Learner` whose whole training step is compiled already."
    learn = make(task).__self__
    learn.compile(step=True)
    for _ in range(4):
        learn.fit(1)
    task.train.began_s.clear()
    task.train.ended_s.clear()
    return learn.fit


def learnkit_idle(task: Task, n: int) -> Fit:
    "Build the default `Learner` with `n` more callbacks that handle no event of a step."
    from learnkit import Callback

    class Idle(Callback):
        def before_fit(self) -> None:
            pass

    return learnkit(task, cbs=[Idle() for _ in range(n)])


def learnkit_handlers(task: Task, n: int) -> Fit:
    "Build the default `Learner` with `n` more callbacks whose `after_batch` does nothing."
    from learnkit import Callback

    class Handler(Callback):
        def after_batch(self) -> None:
            pass

    return learnkit(task, cbs=[Handler() for _ in range(n)])


# ------------------------------------------------------------------------------------------- fastai


def fastai(task: Task, metrics: Any = None, **kwargs: Any) -> Fit:
    "Build fastai's default `Learner` around the same optimizer."
    from fastai.callback.progress import ProgressCallback  # noqa: F401  its import makes it one of the defaults
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.optimizer import OptimWrapper

    dls = DataLoaders(task.train, task.valid, device=torch.device('cpu'))
    opt_func = partial(OptimWrapper, opt=torch.optim.SGD)
    return Learner(
        dls, task.model, task.loss_func, opt_func=opt_func, lr=LR, metrics=metrics, **kwargs
    ).fit


def fastai_bare(task: Task) -> Fit:
    "Build fastai's `Learner` that only counts batches and sets the model's mode."
    from fastai.learner import TrainEvalCallback

    return fastai(task, default_cbs=False, cbs=TrainEvalCallback)


def fastai_idle(task: Task, n: int) -> Fit:
    "Build fastai's default `Learner` with `n` more callbacks that handle no event of a step."
    from fastai.callback.core import Callback

    class Idle(Callback):
        def before_fit(self) -> None:
            pass

    return fastai(task, cbs=[Idle() for _ in range(n)])


def fastai_handlers(task: Task, n: int) -> Fit:
    "Build fastai's default `Learner` with `n` more callbacks whose `after_batch` does nothing."
    from fastai.callback.core import Callback

    class Handler(Callback):
        def after_batch(self) -> None:
            pass

    return fastai(task, cbs=[Handler() for _ in range(n)])


SUBJECTS: dict[str, dict[str, Callable[[Task], Fit]]] = {
    'a': {
        'raw': raw,
        'raw-compiled': raw_compiled,
        'learnkit-bare': learnkit_bare,
        'learnkit': learnkit,
        'learnkit-bare-compiled': partial(learnkit_compiled, make=learnkit_bare),
        'learnkit-compiled': partial(learnkit_compiled, make=learnkit),
        'learnkit-idle10': partial(learnkit_idle, n=10),
        'learnkit-idle50': partial(learnkit_idle, n=50),
        'learnkit-idle200': partial(learnkit_idle, n=200),
        'learnkit-idle1000': partial(learnkit_idle, n=1000),
        'learnkit-handlers50': partial(learnkit_handlers, n=50),
        'fastai-bare': fastai_bare,
        'fastai': fastai,
        'fastai-idle50': partial(fastai_idle, n=50),
        'fastai-handlers50': partial(fastai_handlers, n=50),
    },
    'b': {
        'raw': raw_evaluating,
        'raw-train': raw,
        'learnkit': partial(learnkit, metrics=accuracy),
        'fastai': partial(fastai, metrics=accuracy),
    },
}
for _subjects in SUBJECTS.values():
    _subjects.update({_name: partial(_peer, accuracy=accuracy) for _name, _peer in PEERS.items()})
