"""Counts of numbers and classes."""

from __future__ import annotations

import pytest
import torch

from learnkit.metrics.counts import MAX_COMPARED, count_classes, count_each


@pytest.mark.parametrize('n', [3, MAX_COMPARED + 20])
@pytest.mark.parametrize('on_host', [True, False])
def test_how_often_each_number_occurs(n: int, on_host: bool) -> None:
    values = torch.randint(n, (3, 200))
    counts = count_each(values, n, on_host)
    assert counts.tolist() == [[row.count(i) for i in range(n)] for row in values.tolist()]


def test_targets_that_are_no_class() -> None:
    best, targ = torch.tensor([0, 1, 1, 2, 2]), torch.tensor([0, 1, 2, 255, -100])
    hits, preds, targs = count_classes(best, targ, 3).tolist()
    assert (hits[:3], preds[:3], targs) == ([1, 1, 0], [1, 2, 1], [1, 1, 1, 2])
