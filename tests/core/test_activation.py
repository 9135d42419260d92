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
SOFTMAX, SIGMOID = LOGITS.exp() / LOGITS.exp().sum(1, keepdim=True), 1 / (1 + (-LOGITS).exp())


@pytest.mark.parametrize(
    ('loss_func', 'pred', 'probs', 'classes'),
    [
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
