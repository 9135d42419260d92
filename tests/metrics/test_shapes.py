"""Shapes of predictions and targets."""

import pytest
import torch

from learnkit.core.errors import MetricError
from learnkit.metrics.shapes import flatten_classes, flatten_labels


def test_flattened_scores_and_labels_keep_their_targets() -> None:
    pred, targ = torch.randn(2, 3, 4), torch.randint(3, (2, 4))
    scores, classes = flatten_classes('m', pred, targ, axis=1)
    assert torch.equal(scores[5], pred[1, :, 1]) and classes[5] == targ[1, 1]
    with pytest.raises(MetricError, match='do not fit targets'):
        flatten_classes('m', pred, targ[:1], axis=1)
    labels = (pred > 0).long()
    probs, flat, n = flatten_labels('m', True, pred.half(), labels)
    assert n == 3 and probs.dtype == torch.float32
    assert torch.equal(flat[5], labels[1, :, 1]) and torch.equal(flat, (probs > 0.5).long())
