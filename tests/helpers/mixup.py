"""Images, a model and a Learner for tests of MixUp and CutMix."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnkit import Callback, Learner
from learnkit.callbacks.mixup import MixHandler
from tests.helpers.learners import quiet_learner

N, CLASSES = 8, 5


def images(
    n: int = 4, seed: int = 1, dtype: torch.dtype = torch.float64
) -> list[tuple[Tensor, Tensor]]:
    gen = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(N, 3, 8, 6, generator=gen, dtype=dtype),
            torch.randint(CLASSES, (N,), generator=gen),
        )
        for _ in range(n)
    ]


def net(n_out: int = CLASSES) -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Flatten(), nn.Linear(144, n_out)).double()


def learner(
    *cbs: Any,
    batches: Any = None,
    model: nn.Module | None = None,
    loss_func: Any = None,
    **kwargs: Any,
) -> Learner:
    dls = (images(), images(2, seed=2)) if batches is None else batches
    options = {'opt_func': torch.optim.SGD, 'lr': 0.1, 'cbs': list(cbs), **kwargs}
    return quiet_learner(dls, model or net(), loss_func or nn.CrossEntropyLoss(), **options)


class Notes(Callback):
    "Record the inputs of the loss and the gradients of each training batch."

    order, run_valid = 30, False

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def before_step(self) -> None:
        mixer = next(cb for cb in self.learn.cbs if isinstance(cb, MixHandler))
        self.rows.append(
            {
                'lam': mixer.lam,
                'yb1': mixer.yb1,
                'xb': self.learn.xb,
                'y': self.learn.yb[0],
                'loss': self.learn.loss,
                'batch': self.learn.batch,
                'grads': [p.grad.clone() for p in self.learn.model.parameters()],
            }
        )


def soft(y: Tensor, y1: Tensor, lam: Tensor) -> Tensor:
    "Return targets as probabilities: `lam` for the sample's class, the rest for its partner's class."
    lam = lam.double()[:, None]
    return lam * F.one_hot(y, CLASSES) + (1 - lam) * F.one_hot(y1, CLASSES)
