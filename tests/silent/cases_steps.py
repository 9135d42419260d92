"""Steps of the optimizer: how often the level of a step opens, which is how often its events fire."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from learnkit import GradientAccumulation, Learner, OptionError
from learnkit.interop import from_lightning
from tests.silent.cases import case

row = partial(case, 'steps')


def batches(n: int = 10) -> list[tuple[Tensor, Tensor]]:
    gen = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, generator=gen, dtype=torch.float64)
    return [(draw(4, 3), draw(4, 1)) for _ in range(n)]


class Counting(Learner):
    n_opened = 0

    def _with_events(
        self, f: Callable[[], Any], event_type: str, *args: Any, **kwargs: Any
    ) -> None:
        self.n_opened += event_type == 'step'
        super()._with_events(f, event_type, *args, **kwargs)


class Twice(Counting):
    def train_batch(self) -> None:
        for _ in range(2):
            self.optimize(self.compute_loss(self.forward(self.model, self.x)))


def count_steps(cls: type[Counting], *cbs: Any, **options: Any) -> int:
    "Return how often the level of a step was opened in an epoch of 10 batches."
    options = {'opt_func': torch.optim.SGD, 'lr': 0.1, **options}
    learn = cls(batches(), nn.Linear(3, 1).double(), nn.MSELoss(), cbs=list(cbs), **options)
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
    return learn.n_opened


@row('levels of a step opened by 10 batches, 5 to a step', old='10')
def accumulated() -> Any:
    return count_steps(Counting, GradientAccumulation(batches=5)), 2


@row('the same in microbatches', old='10')
def accumulated_microbatches() -> Any:
    return count_steps(Counting, GradientAccumulation(batches=5), microbatch=2), 2


@row('in two calls of optimize() a batch, 10 calls to a step', old='20')
def accumulated_calls() -> Any:
    return count_steps(Twice, GradientAccumulation(batches=10)), 2


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 1).double()

    def training_step(self, batch: Any, i: int) -> Tensor:
        return F.mse_loss(self.lin(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@row('GradientAccumulation on a LightningModule', old='each step with the last batch alone')
def accumulated_lightning() -> Any:
    learn = from_lightning(Module(), batches(), cbs=[GradientAccumulation(batches=2)])
    try:
        with learn.no_bar(), learn.no_logging():
            learn.fit(1)
    except OptionError:
        return 'OptionError', 'OptionError'
    return 'trains', 'OptionError'
