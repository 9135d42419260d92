"""Activations and decoders of torch's losses, each compared with its formula."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from learnkit.core.activation import find_activation, find_decoder, outputs_of
from learnkit.losses import (
    BaseLoss,
    BCELossFlat,
    BCEWithLogitsLossFlat,
    CrossEntropyLossFlat,
    DiceLoss,
    FocalLossFlat,
    MSELossFlat,
)

LOGITS = torch.tensor([[-1.0, 0.5, 2.0], [0.0, 1.0, -3.0]])
SOFTMAX, SIGMOID = LOGITS.exp() / LOGITS.exp().sum(1, keepdim=True), 1 / (1 + (-LOGITS).exp())


@pytest.mark.parametrize(
    ('loss_func', 'pred', 'probs', 'classes'),
    [
        (partial(F.cross_entropy, label_smoothing=0.1), LOGITS, SOFTMAX, [2, 1]),
        (nn.NLLLoss(), SOFTMAX.log(), SOFTMAX, [2, 1]),
        (nn.BCEWithLogitsLoss(), LOGITS, SIGMOID, (LOGITS > 0).tolist()),
        (F.binary_cross_entropy, SIGMOID, SIGMOID, (LOGITS > 0).tolist()),
        (nn.MultiMarginLoss(), LOGITS, LOGITS, [2, 1]),
        (nn.MSELoss(), LOGITS, LOGITS, LOGITS.tolist()),
    ],
)
def test_losses_of_torch(loss_func: Any, pred: Tensor, probs: Tensor, classes: list[Any]) -> None:
    found = find_activation(loss_func)(pred)
    assert torch.allclose(found, probs)
    assert find_decoder(loss_func)(found).tolist() == classes


@pytest.mark.parametrize('name', [n for n in dir(nn) if n.endswith('Loss')])
def test_what_outputs_mean_to_each_loss_of_torch(name: str) -> None:
    of_classes = {
        'CrossEntropyLoss': ('classes', True),
        'NLLLoss': ('classes', True),
        'MultiMarginLoss': ('classes', False),
        'BCELoss': ('labels', True),
        'BCEWithLogitsLoss': ('labels', True),
        'MultiLabelSoftMarginLoss': ('labels', True),
        'SoftMarginLoss': ('signs', False),
        'HingeEmbeddingLoss': ('distances', False),
    }
    sizes = {'LinearCrossEntropyLoss': (4, 3), 'AdaptiveLogSoftmaxWithLoss': (4, 3, [1])}
    found = outputs_of(getattr(nn, name)(*sizes.get(name, ())))
    assert (found.targets, found.are_probabilities) == of_classes.get(name, ('numbers', False))


def test_what_outputs_mean_to_other_losses() -> None:
    class Own(nn.Module):
        def activation(self, x: Tensor) -> Tensor:
            return x.sigmoid()

    for loss_func, targets, are_probabilities in (
        (CrossEntropyLossFlat(), 'classes', True),
        (FocalLossFlat(), 'classes', True),
        (DiceLoss(), 'classes', True),
        (BCEWithLogitsLossFlat(), 'labels', True),
        (BCELossFlat(), 'labels', True),
        (MSELossFlat(), 'numbers', False),
        (BaseLoss(nn.CrossEntropyLoss), 'classes', False),  # its activation is the identity
        (partial(F.soft_margin_loss, reduction='sum'), 'signs', False),
        (F.mse_loss, 'numbers', False),
        (Own(), '', True),
        (lambda pred, targ: pred.mean(), '', False),
        (nn.CrossEntropyLoss, '', False),  # a class, which cannot be a loss function
    ):
        found = outputs_of(loss_func)
        assert (found.targets, found.are_probabilities) == (targets, are_probabilities)


def test_losses_that_contain_an_activation() -> None:
    contained = {
        'softmax': (nn.CrossEntropyLoss(), F.cross_entropy, FocalLossFlat(), DiceLoss()),
        'sigmoid': (nn.BCEWithLogitsLoss(), BCEWithLogitsLossFlat(), nn.MultiLabelSoftMarginLoss()),
        '': (nn.NLLLoss(), nn.BCELoss(), BCELossFlat(), nn.MultiMarginLoss(), nn.MSELoss(), None),
    }
    for kind, losses in contained.items():
        assert [outputs_of(loss).contains for loss in losses] == [kind] * len(losses)
