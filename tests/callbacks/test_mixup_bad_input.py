"""Wrong use of MixUp and CutMix raises typed errors with the fix, before a weight changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fastcore.basics import noop
from torch import Tensor, nn

from learnkit import BatchError, Learner, LossError
from learnkit.callbacks.mixup import CutMix, MixUp


def images() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(8, 3, 8, 6), torch.randint(5, (8,)))] * 2


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 5))


def no_reduction(pred: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(pred, y)


class Plain(nn.Module):
    "A loss without a reduction."

    def forward(self, pred: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(pred, y)


def reduced(pred: Tensor, y: Tensor, reduction: str = 'mean') -> Tensor:
    return F.cross_entropy(pred, y)


def tokens(b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return b[0].long(), b[1]


def unlike(b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return b[0], b[1][:3]


BAD: list[tuple[Any, Any, Callable[..., Any] | None, type[Exception], str]] = [
    (MixUp, no_reduction, None, LossError, 'no_reduction has no `reduction`. Give it that keyword'),
    (CutMix, Plain(), None, LossError, 'Plain has no `reduction`'),
    (
        MixUp,
        reduced,
        None,
        LossError,
        "reduced with reduction='none' gave a tensor of shape \\(\\) for 8 samples",
    ),
    (MixUp, None, tokens, BatchError, 'no floating-point tensor'),
    (MixUp, None, unlike, BatchError, 'cannot blend the targets'),
    (CutMix, None, lambda b: (b[0].flatten(1), b[1]), BatchError, 'CutMix found no images'),
]


@pytest.mark.parametrize(('mixer', 'loss_func', 'change', 'error', 'message'), BAD)
def test_what_cannot_be_blended_is_reported_before_anything_changes(
    mixer: Any, loss_func: Any, change: Any, error: type[Exception], message: str
) -> None:
    batches = [change(b) for b in images()] if change else images()
    learn = Learner(batches, net(), loss_func or nn.CrossEntropyLoss(), cbs=mixer)
    learn.logger = noop
    before = [p.detach().clone() for p in learn.model.parameters()]
    with pytest.raises(error, match=message):
        learn.fit(1)
    assert all(torch.equal(p, q) for p, q in zip(before, learn.model.parameters(), strict=True))


def test_a_model_with_its_own_loss_cannot_have_it_blended() -> None:
    learn = Learner(images(), net(), cbs=MixUp)
    with pytest.raises(LossError, match='MixUp needs a loss function'):
        learn.fit(1)
