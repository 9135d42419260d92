"""Optimizers as a LightningModule sees them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from learnkit.interop import from_lightning
from learnkit.interop.lightning.optim import LightningOptimizer


class Manual(nn.Module):
    "Steps its optimizer itself, with a schedule that patches `step`, and notes what the optimizer is."

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.kinds: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        opt: Any = self.optimizers()  # type: ignore[operator]
        self.kinds = [
            isinstance(opt, kind) for kind in (torch.optim.Optimizer, torch.optim.SGD, dict)
        ]
        assert type(opt) is LightningOptimizer and opt.param_groups is opt.optimizer.param_groups
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        opt.zero_grad()
        self.manual_backward(loss)  # type: ignore[operator]
        opt.step()
        return loss

    def configure_optimizers(self) -> Any:
        opt = torch.optim.SGD(self.parameters(), lr=0.1)
        return [opt], [torch.optim.lr_scheduler.StepLR(opt, 1)]


def test_a_wrapped_optimizer_is_of_the_class_that_it_wraps() -> None:
    module = Manual()
    learn = from_lightning(module, [[torch.ones(2, 1), torch.ones(2, 1)]] * 3)
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
    assert module.kinds == [True, True, False]
    assert learn.time.st == 3 and module.trainer.global_step == 3  # type: ignore[union-attr]
