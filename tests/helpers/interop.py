"""A Learner for callbacks in the style of other libraries, and a callback that reads the state."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from learnkit import Callback, DataLoaders, Learner
from learnkit.testing import RegModel
from tests.helpers.learners import quiet_learner


def make_learner(
    *cbs: Any,
    adapt: Callable[[Any], Callback],  # for a callback of the other library
    n_train: int = 3,
    microbatch: int | None = 4,
    model: nn.Module | None = None,
    **kwargs: Any,
) -> Learner:
    "Return a Learner on batches of 8 samples in microbatches of 4, with two validation loaders of 2 batches."
    torch.manual_seed(0)
    x = torch.randn(8 * n_train, 1)
    batches = [(x[i : i + 8], 2 * x[i : i + 8] + 1) for i in range(0, len(x), 8)]
    dls = DataLoaders(batches, {'day': batches[:2], 'night': batches[1:3]})
    return quiet_learner(
        dls,
        model or RegModel(),
        nn.MSELoss(),
        opt_func=torch.optim.SGD,
        lr=0.1,
        microbatch=microbatch,
        cbs=[cb if isinstance(cb, (Callback, type)) else adapt(cb) for cb in cbs],
        **kwargs,
    )


class Read:
    "Records a function of the state at each given event."

    def __init__(self, read: Any, *events: str) -> None:
        self.read, self.events, self.got = read, events, []

    def run_event(self, event: Any, state: Any, logger: Any) -> None:
        if event in self.events:
            self.got.append(self.read(state))
