"""Activations and decoders of torch's losses, each compared with its formula."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from learnkit.core.activation import find_activation, find_decoder

LOGITS = torch.tensor([[-1.0, 0.5, 2.0], [0.0, 1.0, -3.0]])
SOFTMAX = LOGITS.exp() / LOGITS.exp().sum(1, keepdim=True)
SIGMOID = 1 / (1 + (-LOGITS).exp())


@pytest.mark.parametrize(
    ('loss_func', 'pred', 'probs', 'classes'),
    [
        (nn.CrossEntropyLoss(), LOGITS, SOFTMAX, [2, 1]),
        (partial(F.cross_entropy, label_smoothing=0.1), LOGITS, SOFTMAX, [2, 1]),
        (nn.NLLLoss(), SOFTMAX.log(), SOFTMAX, [2, 1]),
        (nn.BCEWithLogitsLoss(), LOGITS, SIGMOID, (LOGITS > 0).tolist()),
        (F.binary_cross_entropy, SIGMOID, SIGMOID, (LOGITS > 0).tolist()),
        (nn.MSELoss(), LOGITS, LOGITS, LOGITS.tolist()),
    ],
)
def test_losses_of_torch(loss_func: Any, pred: Tensor, probs: Tensor, classes: list[Any]) -> None:
    found = find_activation(loss_func)(pred)
    assert torch.allclose(found, probs)
    assert find_decoder(loss_func)(found).tolist() == classes


def test_pixels_have_their_classes_in_dimension_1() -> None:
    pred = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    probs = find_activation(nn.CrossEntropyLoss())(pred)
    assert torch.allclose(probs.sum(1), torch.ones(2, 3, 3))
    assert find_decoder(nn.CrossEntropyLoss())(probs).equal(pred.argmax(1))


def test_attributes_of_the_loss_come_first_and_other_predictions_stay() -> None:
    loss_func = nn.CrossEntropyLoss()
    boxes = [torch.ones(2)]
    assert find_activation(loss_func)(boxes) is boxes
    loss_func.activation, loss_func.decodes = torch.exp, torch.round
    assert find_activation(loss_func) is torch.exp and find_decoder(loss_func) is torch.round
