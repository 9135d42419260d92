"""Jobs that are killed and started again, to prove that what comes out in the end is what it would have been."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import numpy as np
import torch

from learnkit.callbacks.checkpoint import Checkpoint
from learnkit.checkpoint.digest import differences, digest
from learnkit.core.errors import OptionError
from learnkit.core.time import Time
from learnkit.testing.forks import HarnessError, Planned, reached, start

__all__ = [
    'HarnessError',
    'Lives',
    'KillReport',
    'kill_and_resume',
    'random_instants',
    'reached',
    'run_until_done',
]

# seconds; a file that appears; what `reached` names, or its n-th time
Instant = float | Path | str | tuple[str, int]
GOES_ON = 'There is a checkpoint to go on from.'


@dataclass
class Lives:
    "What `run_until_done` reports: a life is a process, from its start to its kill or end."

    result: Any = None  # of the last life
    codes: list[int] = field(default_factory=list)  # each life's exit code
    seconds: list[float] = field(default_factory=list)  # each life's length
    stdout: list[str] = field(default_factory=list)  # what each wrote
    stderr: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        "How many lives were ended by the signal."
        return len(self.codes) - 1


def run_until_done(
    job: Callable[[], Any],  # the work; resumes where it was killed, and returns plain values
    kill: Sequence[Instant | None] | Callable[[int], Instant | None] = (),  # how lives end
    sig: int = signal.SIGKILL,  # the signal
    group: bool = True,  # whether the job's own child processes get it too, loader workers for one
    timeout_s: float = 60.0,  # of each life, and of its end after the signal
    max_lives: int = 10_000,
) -> Lives:
    """Start a job, kill it, and start it again, until it ends by itself; return what happened.

    A life is killed so many seconds after its start, when a file appears (a path), or where the job calls
    `reached(name)`: `'name'` is the first time, `('name', 3)` the third. A function is called with the number of the
    life, from 0. Lives after the last entry of `kill` run freely. A job that catches the signal, as
    training catches SIGTERM, ends with 128 + the signal's number.

    Raises `HarnessError`, with the child's traceback, for a job that fails, and for one that does not end in time,
    which is killed with all its processes.

    >>> from tempfile import mkdtemp
    >>> folder = Path(mkdtemp())
    >>> def count_to_three():
    ...     while len(list(folder.iterdir())) < 3:
    ...         (folder/f'{len(list(folder.iterdir()))}').touch()
    ...         reached('step')
    ...     return 'done'
    >>> lives = run_until_done(count_to_three, kill=['step', 'step'])
    >>> lives.result, lives.codes
    ('done', [-9, -9, 0])
    """
    lives = Lives()
    for n in range(max_lives):
        instant = kill(n) if callable(kill) else kill[n] if n < len(kill) else None
        if _live_once(job, instant, sig, group, timeout_s, lives):
            return lives
    raise HarnessError(f'The job was killed {max_lives} times and has not ended.')


def _live_once(
    job: Callable[[], Any],
    instant: Instant | None,
    sig: int,
    group: bool,
    timeout_s: float,
    lives: Lives,
) -> bool:
    "Run a job for one life, and tell whether it has ended by itself."
    planned = _planned_of(instant, sig, group)
    with start(job, planned) as child:
        began, sent = monotonic(), planned is not None
        if (
            instant is not None
            and not sent
            and child.wait(timeout_s, lambda: _is_due(instant, began)) is None
        ):
            child.send(sig, group)
            sent = True
        code = child.wait(timeout_s)
        lives.seconds.append(monotonic() - began)
        lives.codes.append(code or 0)
        lives.stdout.append(child.stdout)
        lives.stderr.append(child.stderr)
        if code and not (sent and code in (-sig, 128 + sig)):
            raise child.error(f'ended with {_named(code)}')
        if code == 0:
            lives.result = child.result if (child._folder / 'result.pt').exists() else None
    return code == 0


def _planned_of(instant: Instant | None, sig: int, group: bool) -> Planned | None:
    if isinstance(instant, str):
        return Planned(instant, 1, sig, group)
    if isinstance(instant, tuple):
        return Planned(*instant, sig, group)
    if instant is None or isinstance(instant, (int, float, Path)):
        return None
    raise OptionError(
        f'kill={instant!r}: give seconds, a path, the name of a place, or (name, n-th time).'
    )


def _is_due(instant: Instant, began: float) -> bool:
    return instant.exists() if isinstance(instant, Path) else monotonic() - began >= instant  # type: ignore[operator]


def _named(code: int) -> str:
    return (
        f'exit code {code}'
        if code > 0
        else f'{signal.Signals(-code).name}, which the harness did not send'
    )


def random_instants(
    n: int,  # how many
    upto_s: float,  # the latest, in seconds
    seed: int = 0,
) -> list[float]:
    """Return random instants for `run_until_done`, each from 0 to `upto_s`.

    >>> [round(t, 2) for t in random_instants(3, 0.5)]
    [0.42, 0.38, 0.21]
    """
    draw = random.Random(seed)
    return [draw.uniform(0, upto_s) for _ in range(n)]


@dataclass
class KillReport:
    "What `kill_and_resume` reports; true if every run that was killed ended as the one that was not."

    kills: int = 0  # over all runs
    resumes: int = 0  # those after which a checkpoint was there to go on from
    runs: int = 0  # that were killed, and went on to their end
    wall_s: float = 0.0  # of everything
    digest: str = ''  # of the run that was not killed
    differences: list[str] = field(default_factory=list)  # from the first run that differs

    @property
    def exact(self) -> bool:
        "Whether nobody can tell a run that was killed from one that was not."
        return not self.differences

    def __bool__(self) -> bool:
        return self.exact


def kill_and_resume(
    make_learner: Callable[[], Any],  # builds the same Learner each time: data, model, callbacks
    n_epoch: int,  # as for `fit`
    kills: int = 5,  # at least so many that leave a checkpoint to go on from, at random instants
    seed: int = 0,  # of the instants
    folder: str | Path | None = None,  # where checkpoints are written; None: a temporary folder
    every: str | int | Time = '1ba',  # a checkpoint each so often
    timeout_s: float = 120.0,  # of each life
) -> KillReport:
    """Train in a child process, and again in others that are killed and resumed; compare what comes out, bit by bit.

    Weights, buffers, optimizer, every random generator, callbacks' states and history are compared; times are not. A
    process that goes on draws other random numbers before it does, so that nothing is right by chance. Do not use CUDA
    before, and see that `make_learner` does what your training script does. Raises `HarnessError` for a training that
    fails, and for one that differs from itself without being killed.

    >>> from learnkit.testing import synth_learner
    >>> bool(kill_and_resume(lambda: synth_learner(n_train=4, n_valid=1), n_epoch=2, kills=1))
    True
    """
    began = monotonic()
    with TemporaryDirectory(prefix='learnkit-', ignore_cleanup_errors=True) as own:
        root = Path(folder or own)
        report, draw, idle = KillReport(), random.Random(seed), 0
        train = partial(_training, make_learner, n_epoch, every)
        straight, again = (
            run_until_done(train(root / f'straight-{i}'), timeout_s=timeout_s) for i in range(2)
        )
        if found := differences(straight.result, again.result):
            raise HarnessError(
                'Two trainings that nothing has killed differ: does `make_learner` seed what it draws?'
                + ''.join(f'\n  {line}' for line in found)
            )
        # the first is slower than others
        report.digest, upto_s = digest(straight.result), 1.25 * again.seconds[0]
        while report.resumes < kills and report.exact:
            instants = [draw.uniform(0, upto_s) for _ in range(kills - report.resumes)]
            lives = run_until_done(
                train(root / f'killed-{report.runs}'), instants, timeout_s=timeout_s
            )
            resumes = sum(text.startswith(GOES_ON) for text in lives.stdout)
            report.runs, report.kills, report.resumes = (
                report.runs + 1,
                report.kills + lives.kills,
                report.resumes + resumes,
            )
            report.differences, idle = (
                differences(straight.result, lives.result),
                0 if resumes else idle + 1,
            )
            if idle == 50:
                raise HarnessError(f'50 runs of {upto_s:.2g} s ended before they had a checkpoint.')
    report.wall_s = monotonic() - began
    return report


def _training(
    make_learner: Callable[[], Any], n_epoch: int, every: Any, folder: Path
) -> Callable[[], Any]:
    "Return a job that trains, or goes on with training, and returns what training depends on."

    def train() -> Any:
        learn = make_learner()
        # it would go on from its own files
        learn.remove_cbs([cb for cb in learn.cbs if isinstance(cb, Checkpoint)])
        if any(folder.glob('*.ckpt')):
            print(GOES_ON, flush=True)
            for draw_others in (random.seed, np.random.seed, torch.manual_seed):
                draw_others(os.getpid())
        with learn.no_bar():
            learn.fit(n_epoch, resume=True, cbs=Checkpoint(every=every, folder=folder))
        return learn.checkpoint_state()

    return train
