"""`Every`: the multiples of an interval that a Learner's time has reached."""

from types import SimpleNamespace
from typing import Any

import pytest

from learnkit.core.time import Time
from learnkit.engine.counters import Every


def at(position: float) -> Any:
    return SimpleNamespace(fitting=False, pct_train=position, finished=lambda unit: position)


@pytest.mark.parametrize(
    ('interval', 'positions', 'due'),
    [
        ('3ba', [1, 2, 3, 4, 5, 6], [3, 6]),
        ('3ba', [2, 7, 8, 9], [7, 9]),
        ('10sec', [0.5, 9.9, 10.0, 35.5, 36.0], [10.0, 35.5]),
        ('0.1dur', [0.1, 0.1 + 0.2, 0.35], [0.1, 0.1 + 0.2]),
    ],
)
def test_it_is_due_once_a_multiple(interval: str, positions: list[float], due: list[float]) -> None:
    every = Every(Time(interval))
    assert [p for p in positions if every.is_due(at(p))] == due


def test_it_counts_from_the_start_of_the_learner() -> None:
    every = Every(Time('10ba'))
    every.start(at(25))
    assert [p for p in range(26, 45) if every.is_due(at(p))] == [30, 40]


@pytest.mark.parametrize(
    ('interval', 'due'),
    [('10ba', [60, 70]), ('30ba', [60]), ('5ba', [55, 60, 65, 70]), ('10sp', [60, 70])],
)
def test_a_run_may_resume_with_another_interval(interval: str, due: list[int]) -> None:
    before, after = Every(Time('10ba')), Every(Time(interval))
    before.start(at(52))
    after.load_state_dict(before.state_dict())
    assert [p for p in range(53, 71) if after.is_due(at(p))] == due
