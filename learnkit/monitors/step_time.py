# SPDX-License-Identifier: Apache-2.0
"""Time of a training step by part, measured in some steps through handler tables that read the clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from learnkit.core.device import has_streams
from learnkit.core.plotting import axes_or_new
from learnkit.core.validation import check_count
from learnkit.engine.callback import Callback
from learnkit.engine.dispatch import Entry, HandlerTable
from learnkit.engine.events import METHODS

if TYPE_CHECKING:
    from learnkit.learner import Learner

FIRST = 8  # first measured step of a fit, because earlier steps are slower

# parts of a step by the events before and after the part
PARTS = {
    ('before_draw', 'after_draw'): 'data',
    ('after_draw', 'before_batch'): 'transfer',
    ('before_pred', 'after_pred'): 'forward',
    ('after_pred', 'after_loss'): 'loss',
    ('before_backward', 'after_backward'): 'backward',
    ('before_step', 'after_step'): 'step',
    ('before_batch', 'after_batch'): 'compiled step',
}
ON_DEVICE = ('forward', 'loss', 'backward', 'step', 'compiled step')  # parts that run on a GPU


class StepTimeMonitor(Callback):
    """Measure the time of a training step by part, in one step of `every`; `learn.timings` has the times.

    The parts are data, transfer, forward, loss, backward, step, each callback, and the loop. Parts that run on a GPU
    are timed by CUDA events, without waiting. The first steps of a fit, which are slower, are not measured. A measured
    step takes some microseconds longer; all other steps run as without the monitor.

    Checkpointed: nothing. A resumed fit measures again from its start. Raises `OptionError` for an interval below 1.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(n_train=64)
    >>> with learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=StepTimeMonitor())
    >>> learn.timings.n, 'backward' in learn.timings.seconds, 'Recorder' in learn.timings.seconds
    (2, True, True)
    """

    order = 1000  # last, so that the time between two draws has all handlers of a step
    observer = True
    run_valid = False
    remove_on_find = True
    remove_on_fetch = True
    run_in = 'fit'

    def __init__(
        self,
        every: int = 32,  # interval of measured steps
    ) -> None:
        super().__init__()
        self.every = check_count('every', every)
        self._n_drawn = 0  # draws of this fit

    def state_dict(self) -> None:
        return None

    def before_fit(self) -> None:
        self._n_drawn = 0
        self.learn.timings = Timings()

    def before_draw(self) -> None:
        learn = self.learn
        learn.timings.end_step(learn)
        is_at_end = learn.n_iter is not None and learn.iter >= learn.n_iter
        if self._n_drawn % self.every == (FIRST - 1) % self.every and not is_at_end:
            if self._n_drawn >= FIRST - 1:
                learn.timings.begin_step(learn)
        self._n_drawn += 1

    def after_train(self) -> None:
        self.learn.timings.end_step(self.learn)

    def cleanup(self) -> None:
        self.learn.timings.end_step(self.learn)


class Timings:
    "Times of the parts of training steps: `learn.timings`, of the latest fit with a `StepTimeMonitor`."

    def __init__(self) -> None:
        self.n = 0  # number of measured steps
        self._sums: defaultdict[str, float] = defaultdict(float)  # seconds by part
        self._pending: list[tuple[str, Any, Any]] = []  # parts on a GPU, with their CUDA events
        self._last_event = 'before_draw'  # last event whose handlers have run
        self._last_time = 0.0  # time at the end of its handlers
        self._last_mark: Any = None  # CUDA event at the end of its handlers
        self.device: torch.device | None = None  # device of the model, set before a step

    # -- measuring ---------------------------------------------------------------------------------

    def begin_step(self, learn: Learner) -> None:
        "Replace the loop's handler tables by tables that read the clock, from one draw to the next."
        callbacks = learn.parts.callbacks
        if callbacks.tables is not callbacks.plain_tables:
            return  # `learn.trace()` has replaced them
        callbacks.tables = (
            callbacks.tables[False],
            self._get_timed_table(learn),
        )
        self.device = learn.run.batch_device
        self._last_event = 'before_draw'
        self._last_time = perf_counter()
        self._last_mark = None

    def end_step(self, learn: Learner) -> None:
        "Restore the loop's handler tables if a step is being measured."
        callbacks = learn.parts.callbacks
        if not isinstance(callbacks.tables[True], TimedTable):
            return
        callbacks.tables = callbacks.plain_tables
        self._sums['loop'] += perf_counter() - self._last_time
        self.n += 1
        self._collect()

    def _get_timed_table(self, learn: Learner) -> TimedTable:
        "Return the timed handlers of this fit, created once: `refresh` clears the table when callbacks change."
        callbacks = learn.parts.callbacks
        tables = callbacks.more_tables
        for known in tables:
            if isinstance(known, TimedTable) and known.timings is self:
                return known
        timed = TimedTable(callbacks.tables[True], self)
        tables[:] = [*(t for t in tables if not isinstance(t, TimedTable)), timed]
        return timed

    def make_probes(self, name: str) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return the functions that read the clock before and after the handlers of an event.

        A call takes less than a microsecond.
        """
        part_after = {before: part for (before, event), part in PARTS.items() if event == name}
        sums = self._sums

        def begin() -> None:
            now = perf_counter()
            part = part_after.get(self._last_event, 'loop')
            if self._last_mark is not None and part in ON_DEVICE:
                self._pending.append((part, self._last_mark, record_event(self.device)))
                part = 'loop'
            sums[part] += now - self._last_time
            self._last_time = now

        def end() -> None:
            self._last_event = name
            self._last_time = perf_counter()
            if self.device is not None and has_streams(self.device):
                self._last_mark = record_event(self.device)

        return begin, end

    def time_handler(self, handler: Callable[[], Any], part: str) -> Callable[[], None]:
        "Return a handler whose time is added to a part, which has the name of the callback's class."
        sums = self._sums

        def run() -> None:
            __tracebackhide__ = True
            started = perf_counter()
            try:
                handler()
            finally:
                sums[part] += perf_counter() - started

        return run

    def _collect(self, wait: bool = False) -> None:
        "Add the times of the parts that the GPU has finished, or wait for all of them."
        while self._pending and (wait or self._pending[0][2].query()):
            part, start, end = self._pending.pop(0)
            end.synchronize()
            self._sums[part] += start.elapsed_time(end) / 1000

    def __getstate__(self) -> dict[str, Any]:
        self._collect(wait=True)  # CUDA events cannot be copied
        return self.__dict__.copy()

    # -- reading -----------------------------------------------------------------------------------

    @property
    def seconds(self) -> dict[str, float]:
        "Seconds per step by part, in descending order."
        self._collect(wait=True)
        means = {part: s / max(self.n, 1) for part, s in self._sums.items()}
        return dict(sorted(means.items(), key=lambda kv: -kv[1]))

    def _list_rows(self) -> list[tuple[str, str, str]]:
        "Return name, time and share of the whole step and of its parts."
        seconds = self.seconds
        total = sum(seconds.values())
        return [
            (part, f'{s * 1e6:,.1f} us', f'{s / total:.1%}')
            for part, s in {'a step': total, **seconds}.items()
        ]

    def __repr__(self) -> str:
        if not self.n:
            return f'No step has been measured: the first one is step {FIRST} of a fit.'
        rows = self._list_rows()
        width = max(len(part) for part, _, _ in rows)
        rows[0] = *rows[0][:2], f'({self.n} measured)'
        return '\n'.join(f'{part:<{width}}  {time:>13}  {share:>6}' for part, time, share in rows)

    def plot(
        self,
        ax: Any = None,  # matplotlib axes; None: axes of a new figure
    ) -> Any:
        "Plot the time of a step as a bar per part, the longest on top, and return the axes."
        times = {part: s * 1e3 for part, s in self.seconds.items()}
        total = sum(times.values())
        ax = axes_or_new(ax, (7, 0.28 * len(times) + 1.2))
        bars = ax.barh(list(times), list(times.values()))
        labels = [f'{t:.3g} ms, {t / total:.1%}' for t in times.values()]
        ax.bar_label(bars, labels, padding=3, fontsize='small')
        ax.invert_yaxis()
        ax.margins(x=0.3)
        ax.set(xlabel='ms a step', title=f'a step takes {total:.3g} ms ({self.n} measured)')
        return ax


class TimedTable(HandlerTable):
    "Handlers of training that read the clock before and after each event and each handler."

    def __init__(self, base: HandlerTable, timings: Timings) -> None:
        super().__init__(base.callbacks, base.training)
        self.base = base
        self.timings = timings

    def __missing__(self, name: str) -> list[Entry]:
        entries = self.base[name]
        if name in METHODS:
            return entries
        begin, end = self.timings.make_probes(name)
        time_handler = self.timings.time_handler
        timed = [(time_handler(f, type(cb).__name__), switch, cb) for f, switch, cb in entries]
        always_on = [True]
        self[name] = [(begin, always_on, None), *timed, (end, always_on, None)]
        return self[name]


def record_event(device: torch.device | None) -> Any:
    "Record an event in the device's current stream, and return the event."
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event
