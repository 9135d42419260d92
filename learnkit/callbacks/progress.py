# SPDX-License-Identifier: Apache-2.0
"""Progress display of a run: a table with one row per epoch, and a bar that counts batches.

`make_display` chooses the display once per run by where the output goes: a notebook (one output
area, updated in its cell), a terminal (tqdm below the rows), or anything else (plain lines, no
bar).
"""

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

from typing_extensions import override

from learnkit.callbacks.live_plot import MasterBar
from learnkit.callbacks.recorder import recorder_of
from learnkit.core.html import DisplayHandle, format_cell, html_row, in_notebook, truncate_rows
from learnkit.core.time import format_seconds
from learnkit.engine.budget import find_budget
from learnkit.engine.callback import Callback
from learnkit.engine.lengths import epoch_length

FOLDED = '... {} more, in learn.history ...'
# a separate evaluation that ends sooner shows nothing, so that many of them leave no blank outputs
PATIENCE_S = 0.5


@dataclass(slots=True)
class Bar:
    "Progress of one pass over one loader."

    label: str  # what is counted, such as 'epoch 1/5 train'
    total: int | None = None  # expected number of batches; None: unknown
    done: int = 0  # number of batches finished
    note: str = ''  # text after the numbers: the loss
    first: int = 0  # number of batches finished before this run resumed from a checkpoint
    started: float = field(default_factory=perf_counter)

    @property
    def elapsed_s(self) -> float:
        return perf_counter() - self.started

    def text(self) -> str:
        """Return label, count, share, elapsed<remaining and note on one line.

        >>> Bar('train', 500, 320, 'loss 0.4312', started=perf_counter() - 12.5).text()
        'train 320/500 64% 00:12<00:07 loss 0.4312'
        """
        elapsed = self.elapsed_s
        n = self.done - self.first
        if self.total and self.done <= self.total:
            remaining = '?'
            if n > 0:
                remaining = format_seconds(elapsed * (self.total - self.done) / n)
            share = f'{self.done / self.total:.0%}'
            count = f'{self.done}/{self.total} {share} {format_seconds(elapsed)}<{remaining}'
        else:
            count = f'{self.done} batches {format_seconds(elapsed)} {n / max(elapsed, 1e-9):.1f}/s'
        return ' '.join(part for part in (self.label, count, self.note) if part)

    def html(self) -> str:
        "Return the text with the browser's own progress bar, which follows the browser's theme."
        element = ''
        if self.total and self.done <= self.total:
            element = f'<progress value="{self.done}" max="{self.total}"></progress> '
        return f'<div style="font-size:small;font-variant-numeric:tabular-nums">{element}{escape(self.text())}</div>'


class Table:
    "Rows of a run as text and as HTML; a row with other columns than the row before gets a header."

    def __init__(self) -> None:
        self.names: list[str] = []  # header of the last row
        self.widths: list[int] = []  # characters of each column
        self.lines: list[str] = []  # headers and rows as text
        self.rows: list[tuple[str, Sequence[str]]] = []  # tag and cells of headers and rows
        self.html_rows: list[str] = []  # as HTML, up to the last use of `html`

    def add(
        self,
        names: Sequence[str],  # current header; may be empty
        row: Sequence[Any],  # one value per column
    ) -> list[str]:
        "Add a row and return the new lines of text: the row, and the header before it if it changes."
        cells = [format_cell(value) for value in row]
        header = [*names, *[''] * (len(cells) - len(names))]
        new_rows: list[tuple[str, Sequence[str]]] = [('td', cells)]
        if header != self.names[: len(header)] or len(cells) > len(self.names):
            self.names = header
            self.widths = [max(map(len, pair)) for pair in zip_longest(header, cells, fillvalue='')]
            if any(header):
                new_rows.insert(0, ('th', header))
        lines = [self._format_line(new) for _, new in new_rows]
        self.lines += lines
        self.rows += new_rows
        return lines

    def _format_line(self, cells: Sequence[str]) -> str:
        aligned = [cell.rjust(width) for cell, width in zip(cells, self.widths, strict=False)]
        return '  '.join(aligned).rstrip()

    def text(self, max_rows: int) -> str:
        "Return aligned lines of text."
        return '\n'.join(truncate_rows(self.lines, max_rows, FOLDED))

    def html(self, max_rows: int) -> str:
        "Return an HTML table; colors and borders are left to the page's theme."
        self.html_rows += [html_row(*row) for row in self.rows[len(self.html_rows) :]]
        note = f'<tr><td colspan="{len(self.names)}">{FOLDED}</td></tr>'
        rows = truncate_rows(self.html_rows, max_rows, note)
        if not rows:
            return ''
        head, *body = rows  # a page's theme colors every second row of the body
        return (
            f'<table style="text-align:right"><thead>{head}</thead>'
            f'<tbody>{"".join(body)}</tbody></table>'
        )


class Display:
    "Display for files, pipes and logs: rows as plain lines, flushed one by one, and no bar."

    interval_s = inf  # least number of seconds between two updates of the bar

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream
        self.table = Table()

    def write(self, names: Sequence[str], row: Sequence[Any]) -> None:
        "Add a row to the table."
        self._emit('\n'.join(self.table.add(names, row)))

    def draw(self, bar: Bar | None) -> None:
        "Update the display."

    def close(self, stopped_at: Bar | None = None) -> None:
        "Show the final state: the table, and the bar only if the run stopped early."

    def _emit(self, text: str) -> None:
        print(text, file=self.stream, flush=True)


class TerminalDisplay(Display):
    """Display for terminals: a tqdm bar that disappears when the run ends, and the rows above the bar.

    `tqdm.write` prints other lines above the bar."""

    interval_s = 0.1

    def __init__(self, stream: TextIO | None = None) -> None:
        from tqdm import tqdm

        super().__init__(stream)
        # tqdm's monitor thread would make every later fork of a loader worker a risk
        self.tqdm: Any = type('Bar', (tqdm,), {'monitor_interval': 0})
        self.bar: Any = None

    @override
    def draw(self, bar: Bar | None) -> None:
        if bar is None:
            return
        if self.bar is None:
            self.bar = self.tqdm(file=self.stream, leave=False, delay=1e-9)
        # the size falls back to 80 x 24 for a terminal that does not report one
        columns, self.bar.nrows = get_terminal_size()
        self.bar.ncols = columns - 1
        self.bar.total = bar.total
        self.bar.n = bar.done
        self.bar.desc = bar.label
        self.bar.postfix = bar.note
        self.bar.initial = bar.first
        self.bar.start_t = time() - bar.elapsed_s
        self.bar.last_print_t = self.bar.start_t
        self.bar.refresh()

    @override
    def close(self, stopped_at: Bar | None = None) -> None:
        self.draw(stopped_at)
        if self.bar is None:
            return
        self.bar.leave = stopped_at is not None
        self.bar.delay = 0
        self.bar.close()
        self.bar = None

    @override
    def _emit(self, text: str) -> None:
        self.tqdm.write(text, file=self.stream)


class NotebookDisplay(Display):
    "Display for notebooks: one output area with table and bar; its last state is saved."

    interval_s = 0.1
    max_rows = 200  # rows beyond are folded in the middle to keep the saved notebook small

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self.area = DisplayHandle()

    @override
    def draw(self, bar: Bar | None) -> None:
        html = self.table.html(self.max_rows)
        text = self.table.text(self.max_rows)
        if bar:
            html += bar.html()
            text = '\n'.join(filter(None, (text, bar.text())))
        self.area.show({'text/html': html, 'text/plain': text})

    @override
    def close(self, stopped_at: Bar | None = None) -> None:
        if self.area.handle or self.table.lines:
            self.draw(stopped_at)

    @override
    def _emit(self, text: str) -> None:
        "Do nothing: the next `draw` shows the whole table."


def make_display(
    stream: TextIO | None = None,  # stream for the text; None: the current `sys.stdout`
) -> Display:
    "Return the display for this process's output: a notebook, a terminal, or anything else."
    stream = sys.stdout if stream is None else stream
    if in_notebook():
        return NotebookDisplay(stream)
    is_terminal = getattr(stream, 'isatty', bool)() and os.environ.get('TERM') != 'dumb'
    return TerminalDisplay(stream) if is_terminal else Display(stream)


class RunProgress:
    "State of the display during one run."

    def __init__(self, display: Display) -> None:
        self.display = display
        self.bar: Bar | None = None  # visible bar
        # training bar, which is shown again after an evaluation within the epoch
        self.train: Bar | None = None
        self.n_trained = 0  # batches of the epoch trained before the current evaluation
        self.due = inf if display.interval_s == inf else 0.0  # time of the next update of the bar
        self.started = perf_counter()
        self.first_share: float | None = None  # share of the fit done when the clock was started
        self.stopped = False
        self.mbar = MasterBar()

    def draw(self) -> None:
        self.display.draw(self.bar)
        self.due = perf_counter() + self.display.interval_s

    def close(self) -> None:
        "Show the final state, once."
        bar = self.bar if self.stopped else None
        if bar:
            bar.label = f'stopped at {bar.label}'
        self.display.close(bar)

    def remaining_s(self, share: float) -> float | None:
        "Return the estimated seconds to the end of the fit after this share of the fit."
        if self.first_share is None:
            self.first_share = share
            self.started = perf_counter()
        done = share - self.first_share
        return (perf_counter() - self.started) * (1 - share) / done if done > 0 else None


class ProgressCallback(Callback):
    """Show a table of the epochs and a bar of the batches.

    If `learn.logger` is `print`, this callback's writer replaces it for the run and shows the rows.
    A user's own logger keeps its rows, and `no_logging()` drops them: then only bars are shown.

    >>> from learnkit.testing import synth_learner
    >>> synth_learner().fit(1)  # doctest: +ELLIPSIS
    epoch  train_loss  valid_loss  time
        0  ...
    """

    order = 60
    writes_files = True
    first_process_only = True
    _progress = RunProgress(Display())  # outside a run nothing is ever due

    def before_fit(self) -> None:
        "Choose the display. A nested run (a validation started by a callback) shares the display."
        if self._is_nested():
            return
        learn = self.learn
        self._progress = RunProgress(make_display())
        if not learn.fitting:
            self._progress.due += perf_counter() + PATIENCE_S
        if learn.logger is print:
            learn.logger = self._write

    @property
    def mbar(self) -> MasterBar:
        "The graph that fastai's own `ShowGraphCallback` updates."
        return self._progress.mbar

    def before_train(self) -> None:
        "Start this epoch's bar, at the batch that a resumed epoch continues with."
        resuming = self.learn.run.resuming
        self._start_bar('train', 0 if resuming is None else resuming.next_batch)
        self._progress.train = self._progress.bar

    def before_validate(self) -> None:
        "Start this loader's bar."
        self._start_bar(self.learn.dl_name)

    def after_batch(self) -> None:
        "Update the bar if it is due; otherwise only read the clock."
        if perf_counter() >= self._progress.due:
            self._draw()

    def after_train(self) -> None:
        "Show the final count, unless the fit was resumed after this epoch's training."
        if not self.learn.resumed:
            self.after_batch()
        self._progress.train = None

    def after_validate(self) -> None:
        "Show the training bar again after an evaluation within the epoch."
        # the count is set even if nothing is drawn: a run that stops next shows it
        self._set_count(self.learn.iter + 1)
        self.after_batch()
        self._progress.bar = self._progress.train or self._progress.bar

    def before_eval(self) -> None:
        "Record the number of trained batches."
        if not self._is_nested():
            self._progress.n_trained = self.learn.iter + 1

    def after_eval(self) -> None:
        "Show a row for an evaluation within an epoch, with the fraction of the epoch trained."
        learn = self.learn
        recorder = recorder_of(learn)
        train = self._progress.train
        if train is None or recorder is None or learn.logger != self._write or self._is_nested():
            return
        n = self._progress.n_trained
        total = train.total or 0
        epoch = f'{learn.epoch + n / total:.2f}' if n <= total else f'{learn.epoch}+{n}'
        values = {
            'epoch': epoch,
            'train_loss': recorder.smooth_loss.latest,
            **recorder.measured,
        }
        self._write([values.get(name) for name in recorder.metric_names])

    def after_error(self) -> None:
        "Keep the bar visible where the run stopped."
        if self._progress.bar is None:
            return  # the run stopped before its first bar
        self._progress.stopped = True
        if self._progress.bar is self._progress.train:
            self._set_count(self._count_trained())

    def _count_trained(self) -> int:
        "Return the number of batches of this epoch that were trained before the run stopped."
        pause = self.learn.run.pause
        return self.learn.iter if pause is None or pause.point != 'batch' else pause.n_drawn

    def cleanup(self) -> None:
        "Show the final table, and restore the logger, also after an error."
        if self.learn.logger == self._write:
            self.learn.logger = print
        self._progress.close()
        vars(self).pop('_progress', None)  # a stream cannot be copied with the Learner

    def _is_nested(self) -> bool:
        return bool(self.learn.run.depth > 1)

    def _start_bar(self, name: str, first: int = 0) -> None:
        learn = self.learn
        progress = self._progress
        n_epoch = f'/{learn.n_epoch}' if learn.n_epoch else ''
        has_epochs = learn.fitting and learn.create_mbar
        epoch = f'epoch {learn.epoch + 1}{n_epoch} ' if has_epochs else ''
        total = self._find_total(epoch_length(learn, learn.dl)[0], first)
        progress.bar = Bar(epoch + name, total, first, first=first)
        if perf_counter() >= progress.due:
            progress.draw()

    def _set_count(self, done: int) -> None:
        bar = self._progress.bar
        if bar:
            bar.done = done
            bar.total = self._find_total(self.learn.n_iter, done)
            bar.note = self._make_note()

    def _find_total(self, length: int | None, done: int) -> int | None:
        "Return the number of batches of a pass; a budget may end a pass over the training data."
        budget = find_budget(self.learn) if self.learn.training else None
        left = None if budget is None else budget.estimate_batches_left()
        if left is None:
            return length
        end = done + left
        return length if length is not None and done < length <= end else end

    def _draw(self) -> None:
        self._set_count(self.learn.iter + 1)
        self._progress.draw()

    def _make_note(self) -> str:
        "Return the latest smoothed loss, and the remaining time of a fit of several epochs."
        learn = self.learn
        if not learn.fitting:
            return ''
        recorder = recorder_of(learn) if learn.training else None
        loss = None if recorder is None else recorder.smooth_loss.latest
        parts = []
        if loss is not None:
            parts.append(f'loss {loss:.4f}')
        if learn.create_mbar and learn.n_epoch != 1 and not self._progress.stopped:
            remaining = self._progress.remaining_s(learn.pct_train)
            if remaining is not None:
                parts.append(f'fit {format_seconds(remaining)} left')
        return ', '.join(parts)

    def _write(self, row: Sequence[Any]) -> None:
        "Show one row of `learn.logger`."
        recorder = getattr(self.learn, 'recorder', None)
        self._progress.display.write(getattr(recorder, 'metric_names', ()), row)
        if perf_counter() >= self._progress.due:
            self._progress.draw()
