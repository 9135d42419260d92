# SPDX-License-Identifier: Apache-2.0
"""Log to the console or to `logging`, with one line per interval."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typing_extensions import override

from learnkit.core.time import Time
from learnkit.loggers.base import Logger, Rows


class ConsoleLogger(Logger):
    """Print a line with the latest values at an interval, and after each evaluation.

    A line is printed after its step. `out` receives the line: `print`, or
    `logging.getLogger('train').info`. Text is printed too, images are not.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(lr=0., default_cbs=True, cbs=ConsoleLogger(every='5ba'))
    >>> with learn.no_bar(), learn: learn.fit(1)
    step 5: loss=..., lr=0, mom=0.9
    step 10: loss=..., lr=0, mom=0.9, valid_loss=..., epoch/epoch=0, epoch/train_loss=..., epoch/time=...
    """

    def __init__(
        self,
        every: str | Time = '50ba',  # interval, as in `Logger`
        out: Callable[[str], Any] = print,  # function that receives each line
    ) -> None:
        super().__init__(every)
        self.out = out

    @override
    def log_metrics(self, step: int, values: dict[str, float]) -> None:
        shown = ', '.join(f'{name}={value:.4g}' for name, value in values.items())
        self.out(f'step {step}: {shown}')

    @override
    def write(self, rows: Rows) -> None:
        "Print one line with the last value of each name."
        latest = {name: value for _, values in rows for name, value in values.items()}
        self.log_metrics(rows[-1][0], latest)

    @override
    def _send(self, log: Any, name: str, content: Any) -> None:
        log(self._step + self._step_offset, name, content)

    @override
    def log_text(self, step: int, name: str, text: str) -> None:
        self.out(f'step {step}: {name}: {text}')
