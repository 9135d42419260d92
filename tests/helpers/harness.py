"""Start a job, kill it and start it again until it ends by itself."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from tests.helpers.forks import HarnessError, Planned, reached, start

__all__ = ['HarnessError', 'Lives', 'reached', 'run_until_done']

# seconds; path of a file to appear; name of a `reached` call, or (name, n-th call)
Instant = float | Path | str | tuple[str, int]


@dataclass
class Lives:
    "Result of `run_until_done`. A life is a process, from its start to its kill or end."

    result: Any = None  # result of the last life
    codes: list[int] = field(default_factory=list)  # exit code of each life
    seconds: list[float] = field(default_factory=list)  # duration of each life
    stdout: list[str] = field(default_factory=list)  # output of each life
    stderr: list[str] = field(default_factory=list)  # error output of each life

    @property
    def kills(self) -> int:
        "Number of lives that the signal has ended."
        return len(self.codes) - 1


def run_until_done(
    job: Callable[[], Any],  # f() -> plain values; must resume its work when started again
    kill: Sequence[Instant | None] | Callable[[int], Instant | None] = (),  # instants by life
    sig: int = signal.SIGKILL,  # signal to send
    group: bool = True,  # whether the job's child processes, such as workers, also get the signal
    timeout_s: float = 600.0,  # seconds to wait for each life, and for its end after the signal
    max_lives: int = 10_000,  # maximum number of lives
) -> Lives:
    """Start a job, kill it, and restart it, until it ends by itself.

    An instant of `kill` is a number of seconds after the start, a path (when the file appears), or a call of
    `reached(name)` in the job: `'name'` for the first call, `('name', 3)` for the third. A function `kill` is called
    with the index of the life. Lives after the last entry of `kill` are not killed. A job that handles the signal, as
    training handles SIGTERM, exits with 128 plus the signal's number.

    Raises `HarnessError`, with the child's traceback, for a job that fails, and for a job that does not end in time,
    whose processes are all killed.

    """
    lives = Lives()
    for n in range(max_lives):
        if callable(kill):
            instant = kill(n)
        else:
            instant = kill[n] if n < len(kill) else None
        if _run_life(job, instant, sig, group, timeout_s, lives):
            return lives
    raise HarnessError(f'The job was killed {max_lives} times and has not ended.')


def _run_life(
    job: Callable[[], Any],
    instant: Instant | None,
    sig: int,
    group: bool,
    timeout_s: float,
    lives: Lives,
) -> bool:
    "Run a job for one life, and return True if it has ended by itself."
    planned = _plan_kill(instant, sig, group)
    with start(job, planned) as child:
        start_time = monotonic()
        is_killed = planned is not None
        if instant is not None and not is_killed:
            code = child.wait(timeout_s, lambda: _is_due(instant, start_time))
            if code is None:
                child.send(sig, group)
                is_killed = True
        code = child.wait(timeout_s)
        lives.seconds.append(monotonic() - start_time)
        lives.codes.append(code or 0)
        lives.stdout.append(child.stdout)
        lives.stderr.append(child.stderr)
        if code and not (is_killed and code in (-sig, 128 + sig)):
            raise child.error(f'ended with {_describe_code(code)}')
        if code == 0:
            lives.result = child.result if (child._folder / 'result.pt').exists() else None
    return code == 0


def _plan_kill(instant: Instant | None, sig: int, group: bool) -> Planned | None:
    if isinstance(instant, str):
        return Planned(instant, 1, sig, group)
    if isinstance(instant, tuple):
        return Planned(*instant, sig, group)
    if instant is None or isinstance(instant, (int, float, Path)):
        return None
    raise TypeError(f'kill={instant!r}')


def _is_due(instant: Instant, start_time: float) -> bool:
    if isinstance(instant, Path):
        return instant.exists()
    return monotonic() - start_time >= instant  # type: ignore[operator]


def _describe_code(code: int) -> str:
    if code > 0:
        return f'exit code {code}'
    return f'{signal.Signals(-code).name}, which the harness did not send'
