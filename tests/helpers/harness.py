"""Start a job, kill it and start it again until it ends by itself."""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from tests.helpers.forks import HarnessError, Planned, start

# seconds; name of a `reached` call, or (name, n-th call)
Instant = float | str | tuple[str, int]


@dataclass
class Lives:
    "Result of `run_until_done`. A life is a process, from its start to its kill or end."

    result: Any = None  # result of the last life
    codes: list[int] = field(default_factory=list)  # exit code of each life
    stderr: list[str] = field(default_factory=list)  # error output of each life

    @property
    def kills(self) -> int:
        "Number of lives that the signal has ended."
        return len(self.codes) - 1


def run_until_done(
    job: Callable[[], Any],  # f() -> plain values; must resume its work when started again
    kill: Sequence[Instant] = (),  # instants by life; later lives are not killed
    sig: int = signal.SIGKILL,  # signal to send
    group: bool = True,  # whether the job's child processes, such as workers, also get the signal
) -> Lives:
    """Start a job, kill it, and restart it, until it ends by itself.

    An instant of `kill` is a number of seconds after the start, or a call of `reached(name)` in the job: `'name'` for
    the first call, `('name', 3)` for the third. A job that handles the signal, as training handles SIGTERM, exits with
    128 plus the signal's number. Raises `HarnessError`, with the child's traceback, for a job that fails."""
    lives = Lives()
    for instant in [*kill, *[None] * 1000]:
        if _run_life(job, instant, sig, group, lives):
            return lives
    raise HarnessError('The job does not end.')


def _run_life(
    job: Callable[[], Any], instant: Instant | None, sig: int, group: bool, lives: Lives
) -> bool:
    "Run a job for one life, and return True if it has ended by itself."
    planned = None
    if isinstance(instant, (str, tuple)):
        place = (instant, 1) if isinstance(instant, str) else instant
        planned = Planned(*place, sig, group)
    with start(job, planned) as child:
        is_killed = planned is not None
        if isinstance(instant, float):
            until = monotonic() + instant
            if child.wait(until=lambda: monotonic() >= until) is None:
                child.send(sig, group)
                is_killed = True
        code = child.wait()
        lives.codes.append(code or 0)
        lives.stderr.append(child.stderr)
        if code and not (is_killed and code in (-sig, 128 + sig)):
            raise child.error(f'ended with {code}')
        if code == 0:
            lives.result = child.result
    return code == 0
