"""End of a script that Ctrl-C has stopped: one line in place of a traceback through torch."""

from __future__ import annotations

import sys
from types import TracebackType

__all__ = ['end_in_one_line']

_NAME = 'learnkit_line'  # attribute of an interrupt: the line to print


def end_in_one_line(
    error: KeyboardInterrupt,  # interrupt that ends a run
    line: str,  # what to print if the script does not catch the interrupt
) -> None:
    """Print `line` instead of a traceback if the interrupt ends a script.

    Does nothing in an interactive session, or if another excepthook is installed. The exit code is as ever.
    """
    if sys.excepthook not in (sys.__excepthook__, _show) or hasattr(sys, 'ps1'):
        return
    setattr(error, _NAME, line)
    sys.excepthook = _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    line = getattr(error, _NAME, None)
    if line is None:
        sys.__excepthook__(kind, error, trace)
    else:
        print(line, file=sys.stderr)
