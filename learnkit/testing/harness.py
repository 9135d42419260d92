"""Kill and restart jobs, to verify that resumed training ends in the same state as uninterrupted training."""

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
from learnkit.checkpoint.compare import differences, digest
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

# seconds; path of a file to appear; name of a `reached` call, or (name, n-th call)
Instant = float | Path | str | tuple[str, int]
RESUMED = 'There is a checkpoint to resume.'


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
    timeout_s: float = 60.0,  # seconds to wait for each life, and for its end after the signal
    max_lives: int = 10_000,  # maximum number of lives
) -> Lives:
    """Start a job, kill it, and restart it, until it ends by itself.

    An instant of `kill` is a number of seconds after the start, a path (when the file appears), or a call of
    `reached(name)` in the job: `'name'` for the first call, `('name', 3)` for the third. A function `kill` is called
    with the index of the life. Lives after the last entry of `kill` are not killed. A job that handles the signal, as
    training handles SIGTERM, exits with 128 plus the signal's number.

    Raises `HarnessError`, with the child's traceback, for a job that fails, and for a job that does not end in time,
    whose processes are all killed.

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
    raise OptionError(
        f'kill={instant!r}: give seconds, a path, the name of a place, or (name, n-th time).'
    )


def _is_due(instant: Instant, start_time: float) -> bool:
    if isinstance(instant, Path):
        return instant.exists()
    return monotonic() - start_time >= instant  # type: ignore[operator]


def _describe_code(code: int) -> str:
    if code > 0:
        return f'exit code {code}'
    return f'{signal.Signals(-code).name}, which the harness did not send'


def random_instants(
    n: int,  # number of instants
    upto_s: float,  # maximum, in seconds
    seed: int = 0,  # seed of the random generator
) -> list[float]:
    """Return random instants for `run_until_done`, each from 0 to `upto_s`.

    >>> [round(t, 2) for t in random_instants(3, 0.5)]
    [0.42, 0.38, 0.21]
    """
    rng = random.Random(seed)
    return [rng.uniform(0, upto_s) for _ in range(n)]


@dataclass
class KillReport:
    "Result of `kill_and_resume`; true if every killed run ended in the state of the uninterrupted run."

    kills: int = 0  # number of kills over all runs
    resumes: int = 0  # number of kills that left a checkpoint to resume
    runs: int = 0  # number of runs that were killed and resumed until their end
    wall_s: float = 0.0  # total time in seconds
    digest: str = ''  # digest of the uninterrupted run's state
    differences: list[str] = field(
        default_factory=list
    )  # differences of the first run that differs

    @property
    def exact(self) -> bool:
        "True if no killed run differs from the uninterrupted run."
        return not self.differences

    def __bool__(self) -> bool:
        return self.exact


def kill_and_resume(
    make_learner: Callable[[], Any],  # f() -> the same Learner each time: data, model, callbacks
    n_epoch: int,  # number of epochs, as for `fit`
    kills: int = 5,  # minimum number of kills, at random instants, that leave a checkpoint
    seed: int = 0,  # seed of the instants
    folder: str | Path | None = None,  # folder for checkpoints; None: a temporary folder
    every: str | int | Time = '1ba',  # checkpoint interval
    timeout_s: float = 120.0,  # seconds to wait for each life
) -> KillReport:
    """Compare training in an uninterrupted process with training in processes that are killed and resumed, bit by bit.

    Weights, buffers, optimizer, every random generator, callbacks' states and history are compared; times are not. A
    resumed process seeds its random generators differently before it resumes, to exclude equality by chance. Do not use
    CUDA before the call, and let `make_learner` do what the training script does. Raises `HarnessError` for training
    that fails, and for training that is not deterministic without kills.

    >>> from learnkit.testing import synth_learner
    >>> bool(kill_and_resume(lambda: synth_learner(n_train=4, n_valid=1), n_epoch=2, kills=1))
    True
    """
    start_time = monotonic()
    with TemporaryDirectory(prefix='learnkit-', ignore_cleanup_errors=True) as temporary:
        root = Path(folder or temporary)
        report = KillReport()
        rng = random.Random(seed)
        n_idle = 0  # consecutive runs without a resume
        make_job = partial(_make_job, make_learner, n_epoch, every)
        first, second = (
            run_until_done(make_job(root / f'straight-{i}'), timeout_s=timeout_s) for i in range(2)
        )
        if found := differences(first.result, second.result):
            raise HarnessError(
                'Two trainings that nothing has killed differ: does `make_learner` seed what it draws?'
                + ''.join(f'\n  {line}' for line in found)
            )
        report.digest = digest(first.result)
        upto_s = 1.25 * second.seconds[0]  # the first run is slower
        while report.resumes < kills and report.exact:
            instants = [rng.uniform(0, upto_s) for _ in range(kills - report.resumes)]
            job = make_job(root / f'killed-{report.runs}')
            lives = run_until_done(job, instants, timeout_s=timeout_s)
            resumes = sum(output.startswith(RESUMED) for output in lives.stdout)
            report.runs += 1
            report.kills += lives.kills
            report.resumes += resumes
            report.differences = differences(first.result, lives.result)
            n_idle = 0 if resumes else n_idle + 1
            if n_idle == 50:
                raise HarnessError(f'50 runs of {upto_s:.2g} s ended before they had a checkpoint.')
    report.wall_s = monotonic() - start_time
    return report


def _make_job(
    make_learner: Callable[[], Any], n_epoch: int, every: Any, folder: Path
) -> Callable[[], Any]:
    "Return a job that starts or resumes training, and returns the training state."

    def train() -> Any:
        learn = make_learner()
        # the Learner's own `Checkpoint` would resume from its own files
        learn.remove_cbs([cb for cb in learn.cbs if isinstance(cb, Checkpoint)])
        if any(folder.glob('*.ckpt')):
            print(RESUMED, flush=True)
            for seed_generator in (random.seed, np.random.seed, torch.manual_seed):
                seed_generator(os.getpid())
        with learn.no_bar():
            learn.fit(n_epoch, resume=True, cbs=Checkpoint(every=every, folder=folder))
        return learn.checkpoint_state()

    return train
