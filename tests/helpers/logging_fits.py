"""A regression with known numbers, trained with loggers, and resumed from their checkpoints."""

import io
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from learnkit import SGD, Callback, DataLoaders, Learner
from learnkit.loggers import Logger
from tests.helpers.learners import quiet_learner

N_BATCHES, BS = 10, 4

# the libraries would report each use to their makers
os.environ.update(
    DO_NOT_TRACK='true',
    MLFLOW_DISABLE_TELEMETRY='true',
    MLFLOW_ALLOW_FILE_STORE='true',
    WANDB_ERROR_REPORTING='false',
)


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    "Return x and y for training, then for validation."
    g = torch.Generator().manual_seed(1)
    x, v = torch.randn(N_BATCHES * BS, 3, generator=g), torch.randn(6, 3, generator=g)
    return x, x.sum(1, keepdim=True), v, v.sum(1, keepdim=True)


def learner(path: Path, *cbs: Any, **kwargs: Any) -> Learner:
    "Return a Learner that trains on the same batches in the same order every time."
    x, y, vx, vy = data()
    torch.manual_seed(3)
    model = nn.Linear(3, 1)
    dls = DataLoaders.from_tensors((x, y), (vx, vy), bs=BS, shuffle=False)
    options: dict[str, Any] = {'opt_func': SGD, 'lr': 0.1, **kwargs}
    return quiet_learner(dls, model, nn.MSELoss(), cbs=list(cbs), path=path, **options)


def plain_losses(n_epoch: int, lr: float = 0.1) -> tuple[list[float], list[float]]:
    "Return the training loss of every step and the validation loss of every epoch of a plain torch loop."
    x, y, vx, vy = data()
    torch.manual_seed(3)
    model = nn.Linear(3, 1)
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    train, valid = [], []
    for _ in range(n_epoch):
        for xb, yb in zip(x.split(BS), y.split(BS), strict=True):
            loss = nn.functional.mse_loss(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            train.append(loss.item())
        with torch.no_grad():
            valid.append(nn.functional.mse_loss(model(vx), vy).item())
    return train, valid


class LogHalf(Callback):
    "Logs half of the loss at every training and evaluation batch."

    def after_loss(self) -> None:
        self.learn.log('half', self.loss / 2)


class KeepState(Callback):
    "Keeps the loggers' part of a checkpoint after a batch."

    order = 200

    def __init__(self, at: int) -> None:
        self._at = at

    def batch_checkpoint(self) -> None:
        if self.learn.time.ba != self._at:
            return
        states = [cb.state_dict() for cb in self.learn.cbs if isinstance(cb, Logger)]
        self.saved = {
            'done': self.learn.parts.counters.by_unit(),
            'model': self.learn.model.state_dict(),
            'loggers': states,
        }
        self.saved = torch.load(_through_file(self.saved), weights_only=True)


def _through_file(state: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


class PutBackState(Callback):
    "Restores the state of `KeepState` when the training of an epoch begins, as late as a checkpoint does."

    order = 200

    def __init__(self, saved: dict[str, Any]) -> None:
        self._saved: Any = saved

    def before_train(self) -> None:
        if self._saved is None:
            return
        saved, self._saved = self._saved, None
        self.learn.parts.counters.load_units(saved['done'])
        self.learn.model.load_state_dict(saved['model'])
        loggers = [cb for cb in self.learn.cbs if isinstance(cb, Logger)]
        for cb, state in zip(loggers, saved['loggers'], strict=True):
            cb.load_state_dict(state)


def run_and_resume(path: Path, make: Any) -> tuple[Learner, Learner]:
    """Train 2 epochs with a logger, then resume from the checkpoint after batch 10 in a new Learner for 2 more.

    The checkpoint lies before the evaluation after batch 10: the epoch that follows it is trained again."""
    keep = KeepState(at=N_BATCHES)
    first = learner(path, LogHalf, make(), keep)
    first.fit(2)
    first.close()
    second = learner(path, LogHalf, make(), PutBackState(keep.saved))
    second.fit(2)
    second.close()
    return first, second
