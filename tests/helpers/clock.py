"""A clock that tests advance, so that no test depends on the machine's load."""

import pytest


class Clock:
    "Stand-in for `perf_counter` and `sleep`: `clock()` reads it, `clock.sleep(s)` moves it."

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def use_clock(monkeypatch: pytest.MonkeyPatch, *modules: str) -> Clock:
    "Replace the clock in modules of the package and in the counters of every fit."
    clock = Clock()
    for module in ('learnkit.engine.counters', 'learnkit.engine.run', *modules):
        monkeypatch.setattr(f'{module}.perf_counter', clock)
    return clock
