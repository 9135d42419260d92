"""Wrong use of MixUp and CutMix raises typed errors with the fix, before a weight changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnkit import BatchError, Callback, Learner, LossError
from learnkit.callbacks.mixup import CutMix, MixHandler, MixUp
from learnkit.core.errors import OptionError
from tests.helpers.learners import quiet_learner


def images() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(8, 3, 8, 6), torch.randint(5, (8,)))] * 2


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 5))


@pytest.mark.parametrize('mixer', [MixUp, CutMix])
@pytest.mark.parametrize('alpha', [0, -1.0, float('nan'), float('inf'), '0.4', None, True])
def test_alpha_has_to_be_positive(mixer: type[MixHandler], alpha: Any) -> None:
    with pytest.raises(OptionError, match=rf'{mixer.__name__}\(alpha=.*above 0'):
        mixer(alpha)


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
    (MixUp, no_reduction, None, LossError, 'no_reduction has no `reduction`. Add that keyword'),
    (CutMix, Plain(), None, LossError, 'Plain has no `reduction`'),
    (
        MixUp,
        reduced,
        None,
        LossError,
        "reduced with reduction='none' returned a tensor of shape \\(\\) for 8 samples",
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
    learn = quiet_learner(batches, net(), loss_func or nn.CrossEntropyLoss(), cbs=mixer)
    before = [p.detach().clone() for p in learn.model.parameters()]
    with pytest.raises(error, match=message):
        learn.fit(1)
    assert all(torch.equal(p, q) for p, q in zip(before, learn.model.parameters(), strict=True))


def test_microbatches_of_a_batch_that_has_changed_since_are_reported() -> None:
    def double(cb: Callback) -> None:
        if cb.training:
            cb.learn.xb, cb.learn.yb = (cb.x.repeat(2, 1, 1, 1),), (cb.y.repeat(2),)

    cbs = [MixUp, Callback(before_batch=double)]
    learn = Learner(images(), model := net(), nn.CrossEntropyLoss(), cbs=cbs, microbatch=4)
    before = model[1].weight.detach().clone()
    with pytest.raises(BatchError, match=r'made \d+ samples of 8'):
        learn.fit(1)
    assert torch.equal(before, model[1].weight)


def test_a_model_with_its_own_loss_cannot_have_it_blended() -> None:
    learn = Learner(images(), net(), cbs=MixUp)
    with pytest.raises(LossError, match='MixUp needs a loss function'):
        learn.fit(1)
