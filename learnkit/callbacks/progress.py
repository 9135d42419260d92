"""What a run shows while it runs: a table with one row an epoch, and a bar that counts the batches.

`make_display` looks once a run at where the output goes: a notebook (one output area, updated in place), a terminal
(tqdm, the rows above it), or anything else (plain lines and no bar)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import zip_longest
from math import inf
from shutil import get_terminal_size
from time import perf_counter, time
from typing import Any, TextIO

from learnkit.core.html import DisplayHandle, format_cell, html_row, in_notebook, truncate_rows
from learnkit.core.time import format_seconds
from learnkit.data.checks import epoch_length
from learnkit.engine.callback import Callback

__all__ = [
    'ProgressCallback',
    'Display',
    'NotebookDisplay',
    'TerminalDisplay',
    'Bar',
    'Table',
    'make_display',
]

FOLDED = '... {} more, in learn.history ...'
# an evaluation on its own that is over sooner shows nothing: many of them leave no blank outputs
PATIENCE_S = 0.5


@dataclass(slots=True)
class Bar:
    "How far one pass over one loader is."

    label: str  # what is counted, 'epoch 1/5 train'
    total: int | None = None  # batches; None when the loader has no length
    done: int = 0  # batches finished
    note: str = ''  # shown behind the numbers: the loss
    first: int = 0  # batches finished before this run, which goes on from a checkpoint
    started: float = field(default_factory=perf_counter)

    @property
    def elapsed_s(self) -> float:
        return perf_counter() - self.started

    def text(self) -> str:
        """Return count, share, elapsed<remaining and note on one line.

        >>> Bar('train', 500, 320, 'loss 0.4312', started=perf_counter() - 12.8).text()
        'train 320/500 64% 00:12<00:07 loss 0.4312'
        """
        spent = self.elapsed_s
        if self.total:
            n = self.done - self.first
            left = format_seconds(spent * max(self.total - self.done, 0) / n) if n > 0 else '?'
            count = f'{self.done}/{self.total} {self.done / self.total:.0%} {format_seconds(spent)}<{left}'
        else:
            rate = (self.done - self.first) / max(spent, 1e-9)
            count = f'{self.done} batches {format_seconds(spent)} {rate:.1f}/s'
        return ' '.join(part for part in (self.label, count, self.note) if part)

    def html(self) -> str:
        "Return the same with the browser's own progress bar, which follows its theme."
        value = f'value="{min(self.done, self.total)}" max="{self.total}"' if self.total else ''
        element = f'<progress {value}></progress> ' if value else ''
        return f'<div style="font-size:small;font-variant-numeric:tabular-nums">{element}{escape(self.text())}</div>'


class Section:
    "Consecutive rows under one header; each is put into words once, when it is added."

    def __init__(
        self,
        names: Sequence[str],  # the header's cells
        cells: Sequence[str],  # the first row, whose widths count too
    ) -> None:
        self.names = [*names, *[''] * (len(cells) - len(names))]
        self.widths = [max(map(len, pair)) for pair in zip_longest(self.names, cells, fillvalue='')]
        self.lines: list[str] = []  # rows as text
        self.html_rows: list[str] = []  # and as HTML

    def fits(self, names: Sequence[str], cells: Sequence[str]) -> bool:
        "Whether such a row can stand under this header."
        return self.names[: len(names)] == [*names] and len(self.names) == max(
            len(names), len(cells)
        )

    def add(self, cells: Sequence[str]) -> None:
        "Add a row."
        self.lines.append(self.line(cells))
        self.html_rows.append(html_row('td', cells))

    def line(self, cells: Sequence[str]) -> str:
        "Return one aligned line of text."
        return '  '.join(
            cell.rjust(width) for cell, width in zip(cells, self.widths, strict=False)
        ).rstrip()

    def head(self) -> list[str]:
        "Return the header's line, where there is a header."
        return [self.line(self.names)] if any(self.names) else []

    def text(self, max_rows: int) -> str:
        "Return aligned lines."
        return '\n'.join(self.head() + truncate_rows(self.lines, max_rows, '{}', FOLDED))

    def html(self, max_rows: int) -> str:
        "Return the same as a table; colours and borders are left to the page's theme."
        head = f'<thead>{html_row("th", self.names)}</thead>' if any(self.names) else ''
        rows = truncate_rows(
            self.html_rows, max_rows, f'<tr><td colspan="{len(self.names)}">{{}}</td></tr>', FOLDED
        )
        return f'<table style="text-align:right">{head}<tbody>{"".join(rows)}</tbody></table>'


class Table:
    "The rows of a run. A row with other columns than the one before it starts a section with a header of its own."

    def __init__(self) -> None:
        self.sections: list[Section] = []

    def add(
        self,
        names: Sequence[str],  # the header as it is now; may be empty
        row: Sequence[Any],  # one value a column
    ) -> list[str]:
        "Add a row and return the new lines of text: the row, behind a header where one is due."
        cells = [format_cell(value) for value in row]
        new = not self.sections or not self.sections[-1].fits(names, cells)
        if new:
            self.sections.append(Section(names, cells))

        section = self.sections[-1]
        section.add(cells)
        return [*(section.head() if new else []), section.lines[-1]]

    def text(self, max_rows: int) -> str:
        return '\n'.join(s.text(max_rows) for s in self.sections)

    def html(self, max_rows: int) -> str:
        return ''.join(s.html(max_rows) for s in self.sections)


class Display:
    "Rows as plain lines, flushed one by one, and no bar: for files, pipes and logs."

    interval_s = inf  # least time between two drawings of the bar

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream, self.table = stream, Table()

    def write(self, names: Sequence[str], row: Sequence[Any]) -> None:
        "Add a row to the table."
        self._emit('\n'.join(self.table.add(names, row)))

    def draw(self, bar: Bar | None) -> None:
        "Bring what is shown up to date."

    def close(self, stopped_at: Bar | None = None) -> None:
        "Leave what is to stay: the bar only where it was stopped."

    def _emit(self, text: str) -> None:
        print(text, file=self.stream, flush=True)


class TerminalDisplay(Display):
    "A tqdm bar that is gone when the run ends, and the rows above it."

    interval_s = 0.1

    def __init__(self, stream: TextIO | None = None) -> None:
        from tqdm import tqdm

        super().__init__(stream)
        # without tqdm's watching thread, which would make every later fork of a loader worker a risk
        self.make_bar: Any = type('Bar', (tqdm,), {'monitor_interval': 0})
        self.bar: Any = None

    def draw(self, bar: Bar | None) -> None:
        if bar is None:
            return
        if self.bar is None:
            self.bar = self.make_bar(file=self.stream, leave=False, delay=1e-9)
        # a terminal that does not say its size counts as 80 x 24
        self.bar.ncols, self.bar.nrows = get_terminal_size()
        self.bar.total, self.bar.n, self.bar.desc, self.bar.postfix = (
            bar.total,
            bar.done,
            bar.label,
            bar.note,
        )
        self.bar.initial, self.bar.start_t = bar.first, time() - bar.elapsed_s
        self.bar.last_print_t = self.bar.start_t
        self.bar.refresh()

    def close(self, stopped_at: Bar | None = None) -> None:
        self.draw(stopped_at)
        if self.bar is None:
            return
        self.bar.leave, self.bar.delay = stopped_at is not None, 0
        self.bar.close()

    def _emit(self, text: str) -> None:
        self.make_bar.write(text, file=self.stream)


class NotebookDisplay(Display):
    "One output area with table and bar, updated in place; what it holds last is what is saved with the notebook."

    interval_s = 0.1
    max_rows = 200  # more are folded in the middle: the saved notebook stays small

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self.area = DisplayHandle()

    def draw(self, bar: Bar | None) -> None:
        self.area.show(
            {
                'text/html': self.table.html(self.max_rows) + (bar.html() if bar else ''),
                'text/plain': '\n'.join(
                    filter(None, (self.table.text(self.max_rows), bar.text() if bar else ''))
                ),
            }
        )

    def close(self, stopped_at: Bar | None = None) -> None:
        if self.area.handle or self.table.sections:
            self.draw(stopped_at)

    def _emit(self, text: str) -> None:
        "The next drawing shows the whole table."


def make_display(
    stream: TextIO | None = None,  # where text goes; None: `sys.stdout` as it is now
) -> Display:
    "Return the display for where this process's output goes: a notebook, a terminal, or anything else."
    stream = sys.stdout if stream is None else stream
    if in_notebook():
        return NotebookDisplay(stream)
    isatty = getattr(stream, 'isatty', None)
    return (
        TerminalDisplay(stream)
        if isatty and isatty() and os.environ.get('TERM') != 'dumb'
        else Display(stream)
    )


class Run:
    "What one run shows at the moment."

    def __init__(self, display: Display) -> None:
        self.display = display
        self.bar: Bar | None = None  # the one that is shown
        self.train: Bar | None = (
            None  # the training bar, to which an evaluation in its middle goes back
        )
        self.n_trained = 0  # batches of the epoch that were trained before the evaluation at hand
        self.due = inf if display.interval_s == inf else 0.0  # when the bar may be drawn again
        self.started = perf_counter()
        self.share: float | None = None  # of the fit, that was done before its first batch here
        self.stopped = False
        self.has_logger = False  # whether `learn.logger` was replaced for it

    def draw(self) -> None:
        self.display.draw(self.bar)
        self.due = perf_counter() + self.display.interval_s

    def close(self) -> None:
        "Show the final state, once."
        display, bar, self.display, self.due = (
            self.display,
            self.bar if self.stopped else None,
            Display(),
            inf,
        )
        self.bar = self.train = None
        if bar:
            bar.label = f'stopped at {bar.label}'
        display.close(bar)

    def left_s(self, share: float) -> float | None:
        "Return the seconds to the end of the fit, when this share of it is done."
        if self.share is None:
            self.share, self.started = share, perf_counter()  # after a resume: from here on
        done = share - self.share
        return (perf_counter() - self.started) * (1 - share) / done if done > 0 else None


class ProgressCallback(Callback):
    """Show a table of the epochs and a bar of the batches.

    The rows come through `learn.logger`: where that is `print`, this callback's own writer takes its place for the run.
    A logger of the user's own keeps its rows, and under `no_logging()` there are none: then only bars are shown.

    >>> from learnkit.testing import synth_learner
    >>> synth_learner().fit(1)  # doctest: +ELLIPSIS
    epoch  train_loss  valid_loss  time
        0  ...
    """

    order, first_process_only = 60, True
    _shown = Run(Display())  # outside a run nothing is ever due

    def before_fit(self) -> None:
        "Choose the display. A run inside another one (a validation that a callback starts) shows its bar there."
        if self._nested():
            return
        learn, self._shown = self.learn, Run(make_display())
        if not learn.fitting:
            self._shown.due += perf_counter() + PATIENCE_S
        # its own: after a `before_fit` called by hand
        self._shown.has_logger = learn.logger in (print, self._write)
        if self._shown.has_logger:
            learn.logger = self._write

    def before_train(self) -> None:
        "Start this epoch's bar, where the epoch is resumed at the batch that comes next."
        if self._shown.share is None and not self.learn.resumed:
            self._shown.share = self.learn.pct_train
        self._start('train', self.learn.run.resumes_at)
        self._shown.train = self._shown.bar

    def before_validate(self) -> None:
        "Start this loader's bar."
        self._start(self.learn.dl_name)

    def after_batch(self) -> None:
        "Look at the clock, and at nothing else while nothing is due."
        if perf_counter() >= self._shown.due:
            self._draw()

    def after_train(self) -> None:
        "Show the count at the end; a fit that is resumed behind it has not trained."
        if not self.learn.resumed:
            self.after_batch()
        self._shown.train = None

    def after_validate(self) -> None:
        "Go back to the training bar when this was an evaluation in the middle of it."
        # also where nothing is drawn: a run that breaks off behind it shows this
        self._count(self.learn.iter + 1)
        self.after_batch()
        self._shown.bar = self._shown.train or self._shown.bar

    def before_eval(self) -> None:
        "Remember how far the training is."
        if not self._nested():
            self._shown.n_trained = self.learn.iter + 1

    def after_eval(self) -> None:
        "Show a row for an evaluation in the middle of an epoch, with the part of the epoch that is done."
        learn, shown = self.learn, self._shown
        if not shown.train or not shown.has_logger or learn.logger != self._write or self._nested():
            return
        n, total = shown.n_trained, shown.train.total
        done = f'{learn.epoch + n / total:.2f}' if total else f'{learn.epoch}+{n}'
        values = {
            'epoch': done,
            'train_loss': learn.recorder.smooth_loss.latest,
            **learn.recorder.measured,
        }
        self._write([values.get(name) for name in learn.recorder.metric_names])

    def after_error(self) -> None:
        "Keep the bar where it stopped."
        if self._shown.bar is None:
            return  # this run has not come to showing one
        self._shown.stopped = True
        if self._shown.bar is self._shown.train:
            self._count(self.learn.iter)

    def after_fit(self) -> None:
        "Leave the final table, and the logger as it was."
        if not self._nested():
            self._end()

    def cleanup(self) -> None:
        "Do so whatever has happened."
        self._end()

    def _nested(self) -> bool:
        return bool(self.learn.run.depth > 1)

    def _start(self, name: str, first: int = 0) -> None:
        learn, shown = self.learn, self._shown
        of = f'/{learn.n_epoch}' if learn.n_epoch else ''
        epoch = f'epoch {learn.epoch + 1}{of} ' if learn.fitting and learn.create_mbar else ''
        shown.bar = Bar(epoch + name, epoch_length(learn.dls, learn.dl)[0], first, first=first)
        if perf_counter() >= shown.due:
            shown.draw()

    def _count(self, done: int) -> None:
        bar = self._shown.bar
        if bar:
            bar.done, bar.total, bar.note = done, self.learn.n_iter, self._note()

    def _draw(self) -> None:
        self._count(self.learn.iter + 1)
        self._shown.draw()

    def _note(self) -> str:
        "Say the smoothed loss as far as it has arrived, and when a fit of several epochs will be done."
        learn, parts = self.learn, []
        if learn.fitting and learn.training:
            loss = learn.recorder.smooth_loss.latest if hasattr(learn, 'recorder') else None
            if loss is not None:
                parts.append(f'loss {loss:.4f}')
        if learn.fitting and learn.create_mbar and learn.n_epoch != 1 and not self._shown.stopped:
            left = self._shown.left_s(learn.pct_train)
            if left is not None:
                parts.append(f'fit {format_seconds(left)} left')
        return ', '.join(parts)

    def _write(self, row: Sequence[Any]) -> None:
        "Show one row, as `learn.logger` gets it."
        self._shown.display.write(
            getattr(getattr(self.learn, 'recorder', None), 'metric_names', ()), row
        )
        if perf_counter() >= self._shown.due:
            self._shown.draw()

    def _end(self) -> None:
        if self._shown.has_logger:
            self.learn.logger = print
        self._shown.close()
