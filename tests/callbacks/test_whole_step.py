"""Arguments of a compiled step: parameters without a gradient, and gradients that are left over."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learnkit import Callback
from tests.helpers.compiling import distance, fit_both, learner, needs_whole_step

pytestmark = needs_whole_step


class Partly(nn.Module):
    "Has an unused layer, and a layer that starts frozen."

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 1)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(self.frozen(x).relu())


@pytest.mark.parametrize(
    'opt_func', [torch.optim.Adam, partial(torch.optim.SGD, momentum=0.9), torch.optim.SGD]
)
def test_frozen_and_unused_parameters(opt_func: Any) -> None:
    def unfreeze(cb: Any) -> None:
        cb.model.frozen.requires_grad_(cb.epoch > 0)

    def make() -> Any:
        splitter = lambda m: [
            [*m.frozen.parameters()],
            [*m.used.parameters()],
            [*m.unused.parameters()],
        ]
        cbs = Callback(before_epoch=unfreeze)
        return learner(Partly, opt_func=opt_func, splitter=splitter, cbs=cbs)

    plain, learn, backend = fit_both(make, lr=[1e-2, 1e-3, 1e-4])
    # all but the first batch of each epoch
    assert distance(plain, learn) < 1e-6 and backend.calls == 18
    assert len(learn.opt.state_dict()['state']) == len(plain.opt.state_dict()['state'])


def test_gradients_that_are_left_over_count() -> None:
    def act(cb: Any) -> None:
        if cb.iter == 4:
            cb.model(cb.x).sum().backward()

    plain, learn, backend = fit_both(lambda: learner(cbs=Callback(before_batch=act)), 1)
    assert distance(plain, learn) < 1e-6 and backend.calls == 8
