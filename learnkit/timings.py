"""Where the time of a training goes: one step in 32 is measured, through handler tables that look at the clock."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch

from learnkit.dispatch import Entry, HandlerTable
from learnkit.events import CONTEXTS

__all__ = ['EVERY', 'FIRST', 'Timings', 'TimedTable']

EVERY = 32   # steps of which one is measured
FIRST = 8    # the first of a fit: those before it are slower than the rest

# what lies between the end of one event and the beginning of the next
PARTS = {('before_draw', 'after_draw'): 'data', ('after_draw', 'before_batch'): 'transfer',
         ('before_pred', 'after_pred'): 'forward', ('after_pred', 'after_loss'): 'loss',
         ('before_backward', 'after_backward'): 'backward', ('before_step', 'after_step'): 'step',
         ('before_batch', 'after_batch'): 'compiled step'}
ON_DEVICE = ('forward', 'loss', 'backward', 'step', 'compiled step')


class Timings:
    """The time of a training step by part: data, transfer, forward, loss, backward, step, each callback, and the loop.

    `learn.timings` has those of the latest fit. On a GPU the parts that run there are timed by it, without waiting.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(n_train=64)
    >>> with learn.no_bar(), learn.no_logging(): learn.fit(1)
    >>> learn.timings.n, 'backward' in learn.timings.seconds, 'Recorder' in learn.timings.seconds
    (2, True, True)
    """

    def __init__(self) -> None:
        self.n = 0                                                  # steps that were measured
        self._sums: dict[str, float] = {}
        self._flying: list[tuple[str, Any, Any]] = []               # parts on a GPU, with the events around them
        self._before, self._at, self._mark = '', 0., None           # the event that ended last, and when
        self._started: float | None = None

    # -- measuring -----------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._started = self._at = perf_counter()
        self._before, self._mark = '', None

    def end_step(self) -> None:
        if self._started is None: return
        self.add('loop', perf_counter() - self._at)
        self.n, self._started = self.n + 1, None

    def add(self, part: str, seconds: float) -> None: self._sums[part] = self._sums.get(part, 0.) + seconds

    def before_event(self, name: str) -> None:
        part, now = PARTS.get((self._before, name), 'loop'), perf_counter()
        if self._mark is not None and part in ON_DEVICE:
            self._flying.append((part, self._mark, cuda_mark()))
            part = 'loop'
        self.add(part, now - self._at)
        self._at = now

    def after_event(self, name: str) -> None:
        if self._started is None: return
        self._before, self._mark = name, cuda_mark() if torch.cuda.is_initialized() else None
        self._at = perf_counter()

    def run(self, handler: Callable[[], Any], who: str) -> None:
        "Run a handler on its callback's account."
        started = perf_counter()
        try: handler()
        finally: self.add(who, perf_counter() - started)

    def __getstate__(self) -> dict[str, Any]:
        _ = self.seconds  # what is on its way arrives: a GPU's events cannot be copied
        return self.__dict__.copy()

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def seconds(self) -> dict[str, float]:
        "Seconds a step, by part, the longest first."
        for part, start, end in self._flying:
            end.synchronize()
            self.add(part, start.elapsed_time(end) / 1000)
        self._flying = []
        return dict(sorted(((part, s / max(self.n, 1)) for part, s in self._sums.items()), key=lambda kv: -kv[1]))

    def __repr__(self) -> str:
        seconds = self.seconds
        if not seconds: return 'No step has been measured yet: one in 32 is.'
        total = sum(seconds.values())
        width = max(map(len, seconds))
        rows = [f'{part:<{width}}  {s * 1e6:>10,.1f} us  {s / total:>5.1%}' for part, s in seconds.items()]
        return '\n'.join([f'{"a step":<{width}}  {total * 1e6:>10,.1f} us  ({self.n} measured)', *rows])

    def plot(self, ax: Any = None) -> Any:
        "Draw the parts as bars, the longest on top; return the axes."
        import matplotlib.pyplot as plt
        seconds = self.seconds
        ax = ax or plt.subplots(figsize=(6, 0.3 * len(seconds) + 1))[1]
        ax.barh(list(seconds), [s * 1e6 for s in seconds.values()])
        ax.invert_yaxis()
        ax.set(xlabel='microseconds a step', title=f'where the time goes ({self.n} steps measured)')
        return ax


class TimedTable(HandlerTable):
    "The handlers of training, with a look at the clock around each event and each handler."

    def __init__(self, own: HandlerTable, timings: Timings) -> None:
        super().__init__(own.callbacks, own.training)
        self.own, self.timings = own, timings

    def __missing__(self, name: str) -> list[Entry]:
        timings, on, own = self.timings, [True], self.own[name]
        if name in CONTEXTS.values(): return own
        entries: list[Entry] = [(partial(timings.run, f, type(cb).__name__), switch, cb) for f, switch, cb in own]
        before, after = partial(timings.before_event, name), partial(timings.after_event, name)
        self[name] = [(before, on, None), *entries, (after, on, None)]
        return self[name]


def cuda_mark() -> Any:
    "Note the present point of the GPU's work."
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark
