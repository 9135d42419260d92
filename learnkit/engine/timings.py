"""Where the time of a training goes: one step in 32 is measured, through handler tables that look at the clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from learnkit.core.errors import OptionError
from learnkit.core.html import never_raising, table
from learnkit.core.learner_type import LoopLike
from learnkit.core.plotting import axes_or_new, color
from learnkit.engine.dispatch import Entry, HandlerTable
from learnkit.engine.events import CONTEXTS

__all__ = ['EVERY', 'FIRST', 'Timings', 'TimedTable']

EVERY = 32  # steps of which one is measured
FIRST = 8  # the first of a fit: those before it are slower than the rest

# what lies between the end of one event and the beginning of the next
PARTS = {
    ('before_draw', 'after_draw'): 'data',
    ('after_draw', 'before_batch'): 'transfer',
    ('before_pred', 'after_pred'): 'forward',
    ('after_pred', 'after_loss'): 'loss',
    ('before_backward', 'after_backward'): 'backward',
    ('before_step', 'after_step'): 'step',
    ('before_batch', 'after_batch'): 'compiled step',
}
MODEL = 'data and model'  # what those parts are together, beside the callbacks and the loop
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
        self.n = 0  # steps that were measured
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._flying: list[tuple[str, Any, Any]] = []  # parts on a GPU, with the events around them
        self._before, self._at, self._mark = '', 0.0, None  # the event that ended last, and when
        self._started = False
        self.device: torch.device | None = None  # where the model is; set as a step begins
        self.steps_left = FIRST  # until the next one that is measured

    # -- measuring ---------------------------------------------------------------------------------

    def switch(self, learn: LoopLike) -> None:
        "Begin to measure a step, through timed handlers, or end it: the next step begins."
        if self.stop(learn):
            self.steps_left = EVERY - 1
        elif learn.tables is learn.callbacks.tables:
            learn.tables = learn.tables[False], self._timed_table(learn)
            self.device = learn.run.device
            self.begin_step()

    def stop(self, learn: LoopLike) -> bool:
        "Let the loop read its own handler tables again; return True if a step was being measured."
        if not isinstance(learn.tables[True], TimedTable):
            return False
        learn.tables = learn.callbacks.tables
        self.end_step()
        return True

    def _timed_table(self, learn: LoopLike) -> TimedTable:
        "Return the timed handlers of this fit; they are made again only if callbacks have changed."
        tables = learn.callbacks.more_tables
        for known in tables:
            if isinstance(known, TimedTable) and known.timings is self:
                return known
        timed = TimedTable(learn.tables[True], self)
        tables[:] = [*(t for t in tables if not isinstance(t, TimedTable)), timed]
        return timed

    def begin_step(self) -> None:
        self._started, self._at, self._before, self._mark = True, perf_counter(), '', None

    def end_step(self) -> None:
        if not self._started:
            return
        self._sums['loop'] += perf_counter() - self._at
        self.n, self._started = self.n + 1, False
        self._land()

    def looks(self, name: str) -> tuple[Callable[[], None], Callable[[], None]]:
        "Return what runs before and after the handlers of an event: they look at the clock, in under a microsecond."
        part_since = {before: part for (before, now), part in PARTS.items() if now == name}
        sums = self._sums

        def begin() -> None:
            now = perf_counter()
            part = part_since.get(self._before, 'loop')
            if self._mark is not None and part in ON_DEVICE:
                self._flying.append((part, self._mark, cuda_mark(self.device)))
                part = 'loop'
            sums[part] += now - self._at
            self._at = now

        def end() -> None:
            self._before, self._at = name, perf_counter()
            if self.device is not None and self.device.type == 'cuda':
                self._mark = cuda_mark(self.device)

        return begin, end

    def watched(self, handler: Callable[[], Any], who: str) -> Callable[[], None]:
        "Return a handler that runs on its callback's account."
        sums = self._sums

        def run() -> None:
            __tracebackhide__ = True
            started = perf_counter()
            try:
                handler()
            finally:
                sums[who] += perf_counter() - started

        return run

    def _land(self, wait: bool = False) -> None:
        "Take over what the GPU is through with, or wait for all of it."
        while self._flying and (wait or self._flying[0][2].query()):
            part, start, end = self._flying.pop(0)
            end.synchronize()
            self._sums[part] += start.elapsed_time(end) / 1000

    def __getstate__(self) -> dict[str, Any]:
        _ = self.seconds  # what is on its way arrives: a GPU's events cannot be copied
        return self.__dict__.copy()

    # -- reading -----------------------------------------------------------------------------------

    @property
    def seconds(self) -> dict[str, float]:
        "Seconds a step, by part, the longest first."
        self._land(wait=True)
        return dict(
            sorted(
                ((part, s / max(self.n, 1)) for part, s in self._sums.items()),
                key=lambda kv: -kv[1],
            )
        )

    def __repr__(self) -> str:
        seconds = self.seconds
        if not seconds:
            return 'No step has been measured yet: one in 32 is.'
        total = sum(seconds.values())
        width = max(map(len, seconds))
        rows = [
            f'{part:<{width}}  {s * 1e6:>10,.1f} us  {s / total:>5.1%}'
            for part, s in seconds.items()
        ]
        return '\n'.join(
            [f'{"a step":<{width}}  {total * 1e6:>10,.1f} us  ({self.n} measured)', *rows]
        )

    @never_raising
    def _repr_html_(self) -> str:
        seconds = self.seconds
        if not seconds:
            return repr(self)
        total = sum(seconds.values())
        rows = [
            (part, f'{s * 1e6:,.1f} us', f'{s / total:.1%}')
            for part, s in {'a step': total, **seconds}.items()
        ]
        return table(
            ['part', 'time', 'share'], rows, f'where the time of a step goes ({self.n} measured)'
        )

    def plot(
        self,
        ax: Any = None,  # matplotlib axes; None: those of a new figure
    ) -> Any:
        """Draw where the time of a step goes, a bar for each part, the longest on top; return the axes.

        Raises `OptionError` before a step has been measured, one in 32.
        """
        seconds = self.seconds
        if not seconds:
            raise OptionError(
                'No step has been measured yet: one in 32 is. Call `learn.fit(1)` first.'
            )
        ax = axes_or_new(ax, (7, 0.28 * len(seconds) + 1.2))
        total = sum(seconds.values())
        scale, unit = next(
            (f, u) for f, u in ((1e6, 'us'), (1e3, 'ms'), (1, 's')) if total * f < 1e4 or f == 1
        )
        kinds, colors = (
            [_kind(name) for name in seconds],
            {MODEL: color(0), 'callbacks': color(1), 'loop': 'grey'},
        )
        bars = ax.barh(
            list(seconds),
            [s * scale for s in seconds.values()],
            color=[colors[kind] for kind in kinds],
            label=['_' * (kind in kinds[:i]) + kind for i, kind in enumerate(kinds)],
        )
        ax.bar_label(
            bars,
            [f'{_brief(s * scale)} {unit}, {s / total:.1%}' for s in seconds.values()],
            padding=3,
            fontsize='small',
        )
        ax.invert_yaxis()
        ax.margins(x=0.3)
        ax.set(
            xlabel=f'{unit} a step',
            title=f'a step takes {_brief(total * scale)} {unit} ({self.n} measured)',
        )
        ax.legend(loc='lower right')
        return ax


def _brief(number: float) -> str:
    return f'{number:,.0f}' if number >= 100 else f'{number:.3g}'


def _kind(part: str) -> str:
    return MODEL if part in PARTS.values() else 'loop' if part == 'loop' else 'callbacks'


class TimedTable(HandlerTable):
    "The handlers of training, with a look at the clock around each event and each handler."

    def __init__(self, own: HandlerTable, timings: Timings) -> None:
        super().__init__(own.callbacks, own.training)
        self.own, self.timings = own, timings

    def __missing__(self, name: str) -> list[Entry]:
        own, on = self.own[name], [True]
        if name in CONTEXTS.values():
            return own
        begin, end = self.timings.looks(name)
        watched = self.timings.watched
        self[name] = [
            (begin, on, None),
            *((watched(f, type(cb).__name__), switch, cb) for f, switch, cb in own),
            (end, on, None),
        ]
        return self[name]


def cuda_mark(device: torch.device | None) -> Any:
    "Note the present point of a GPU's work."
    mark = torch.cuda.Event(enable_timing=True)
    mark.record(torch.cuda.current_stream(device))
    return mark
