"""What counts as an evaluation, and which value is better."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from learnkit.core.errors import MetricError
from learnkit.core.watched import as_number, can_be_best, is_better

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ('value', 'number'),
    [
        (None, None),
        (2, 2.0),
        (Fraction(1, 4), 0.25),
        (np.float32(0.5), 0.5),
        (np.array([3.0]), 3.0),
        (torch.tensor([[2.5]]), 2.5),
        (INF, INF),
        (NAN, NAN),
        (torch.tensor(NAN), NAN),
    ],
)
def test_numbers_of_any_type_and_absent_values(value: Any, number: float | None) -> None:
    assert as_number(None, 'loss', value) == pytest.approx(number, nan_ok=True)


@pytest.mark.parametrize('value', ['low', True, torch.ones(2), [1.0], 1j])
def test_anything_else_is_an_error(value: Any) -> None:
    with pytest.raises(MetricError, match="int: 'loss'"):
        as_number(3, 'loss', value)


@pytest.mark.parametrize('comp', [np.less, np.greater])
def test_which_value_is_better(comp: Any) -> None:
    better, worse = (1.0, 2.0) if comp is np.less else (2.0, 1.0)
    assert is_better(better, worse, comp) and not is_better(worse, better, comp)
    assert not is_better(better, better, comp)
    for none in (None, NAN):
        assert not can_be_best(none)
        assert is_better(worse, none, comp)
        assert not any(is_better(none, best, comp) for best in (None, NAN, -INF, better, INF))


def test_nan_is_not_better_by_any_comparison() -> None:
    assert not is_better(NAN, 1.0, lambda new, best: not new > best)
