"""Annealing functions and their combinations, compared with their formulas."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from learnkit.callbacks.schedule import (
    SchedCos,
    SchedExp,
    SchedLin,
    SchedNo,
    SchedPoly,
    combine_scheds,
    combined_cos,
)
from learnkit.core.errors import ScheduleError

FORMS = {  # value at position p, from 0.5 to 2
    SchedLin: lambda p: 0.5 + 1.5 * p,
    SchedCos: lambda p: 0.5 + 1.5 * math.sin(math.pi * p / 2) ** 2,
    SchedNo: lambda p: 0.5,
    SchedExp: lambda p: 0.5 * 4**p,
    partial(SchedPoly, power=3): lambda p: 0.5 + 1.5 * p**3,
}


@pytest.mark.parametrize('make', FORMS)
def test_annealing_follows_its_formula(make: Any) -> None:
    f, g = FORMS[make], make(0.5, 2.0)
    for p in (0.0, 0.25, 0.5, 0.75, 1.0):
        assert g(p) == pytest.approx(f(p), rel=1e-12)
        assert float(g(torch.tensor(p))) == pytest.approx(f(p), rel=1e-6)
    several = make(np.array([0.5, 1.0]), np.array([2.0, 4.0]))(0.3)
    np.testing.assert_allclose(several, [f(0.3), 2 * f(0.3)], rtol=1e-12)
    np.testing.assert_allclose(make([0.5, 1.0], [2.0, 4.0])(0.3), several)
    as_tensor = make(torch.tensor([0.5, 1.0]), torch.tensor([2.0, 4.0]))(0.3)
    torch.testing.assert_close(as_tensor, torch.tensor(several, dtype=torch.float32))
    positions = np.linspace(0, 1, 7)
    np.testing.assert_allclose(make(0.5, 2.0)(positions), [f(p) for p in positions], rtol=1e-12)
    found = torch.as_tensor(make(0.5, 2.0)(torch.linspace(0, 1, 7))).expand(7)
    torch.testing.assert_close(found, torch.tensor([f(p) for p in positions], dtype=torch.float32))


def test_combined_schedules_follow_each_piece_in_its_place() -> None:
    pcts = [0.25, 0.25, 0.5]
    f = combine_scheds(pcts, [SchedLin(0.0, 1.0), SchedNo(5.0, 5.0), SchedLin(3.0, 1.0)])
    at = {0.0: 0.0, 0.125: 0.5, 0.25: 5.0, 0.49: 5.0, 0.5: 3.0, 0.75: 2.0, 1.0: 1.0}
    assert {p: f(p) for p in at} == pytest.approx(at, abs=1e-12)
    assert f(torch.tensor(0.75)) == 2.0
    found = combine_scheds([0.0, 1.0, 0.0], [SchedNo(9, 9), SchedLin(0.0, 1.0), SchedNo(9, 9)])(1.0)
    assert found == 1.0
    many = combine_scheds([0.1] * 10, [SchedNo(i, i) for i in range(10)])  # 0.1 * 10 is not quite 1
    assert [many(i / 10 + 0.05) for i in range(10)] == list(range(10)) and many(1.0) == 9


def test_combined_cos_matches_fastai() -> None:
    f = combined_cos(0.25, 0.5, 1.0, 0.0)
    # fastai 2.8
    theirs = {
        0.0: 0.5,
        0.1: 0.6727457514062632,
        0.25: 1.0,
        0.5: 0.75,
        0.7: 0.3454915028125263,
        1.0: 0.0,
    }
    assert {p: f(p) for p in theirs} == pytest.approx(theirs, abs=1e-7)
    found = combined_cos(0.5, *map(np.array, ([1.0, 2.0], [2.0, 4.0], [0.0, 0.0])))(0.75)
    np.testing.assert_allclose(found, [1.0, 2.0])


@pytest.mark.parametrize(
    ('pcts', 'n', 'message'),
    [
        ([0.5, 0.6], 2, r'sum to 1\.1'),
        ([1.0], 2, '1 shares for 2'),
    ],
)
def test_invalid_shares_are_refused(pcts: Any, n: int, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        combine_scheds(pcts, [SchedNo(1, 1)] * n)
