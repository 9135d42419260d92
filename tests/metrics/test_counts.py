"""Counts of classes."""

from __future__ import annotations

import torch

from learnkit.metrics.counts import count_classes


def test_targets_that_are_no_class() -> None:
    best, targ = torch.tensor([0, 1, 1, 2, 2]), torch.tensor([0, 1, 2, 255, -100])
    hits, preds, targs = count_classes(best, targ, 3).tolist()
    assert (hits[:3], preds[:3], targs) == ([1, 1, 0], [1, 2, 1], [1, 1, 1, 2])
