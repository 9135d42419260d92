"""The trainer that callbacks of ksuit are given."""

from typing import Any

import torch
from torch import nn

from learnkit.interop import from_ksuit
from learnkit.testing import synth_learner
from tests.peers.ksuit_callbacks import CallbackBase


def test_train_step_returns_the_loss_of_a_plain_step() -> None:
    class Train(CallbackBase):
        def after_training(self, *, update_counter: Any) -> None:
            self.result = self.trainer.train_step(self.batch, self.model)

        def __init__(self, batch: Any, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.batch = batch

    torch.manual_seed(0)
    x, y = batch = torch.randn(4, 1), torch.randn(4, 1)
    adapter = from_ksuit(Train, batch=batch)
    learn = synth_learner(n_train=2, cbs=adapter)
    with learn.no_bar(), learn.no_logging():
        learn.fit(0)
    loss = nn.functional.mse_loss(learn.model(x), y)
    assert adapter.wrapped.result.total_loss.item() == loss.item()
    assert list(adapter.wrapped.result.losses_to_log) == ['loss']
