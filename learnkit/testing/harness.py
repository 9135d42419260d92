# SPDX-License-Identifier: Apache-2.0
"""Kill training and resume it, to verify that it ends in the same state as uninterrupted training."""

from __future__ import annotations

import os
import random
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import numpy as np
import torch

from learnkit.callbacks.checkpoint import Checkpoint
from learnkit.checkpoint.digest import differences, digest
from learnkit.core.errors import LearnkitError
from learnkit.core.plain import to_plain
from learnkit.core.time import Time

MAX_IDLE = 50  # runs in a row that end before they have a checkpoint


class HarnessError(LearnkitError, RuntimeError):
    "Training failed without a kill, did not end, or cannot run in a forked process."


@dataclass
class KillReport:
    "Result of `kill_and_resume`; true if every killed run ended in the state of the uninterrupted run."

    kills: int = 0  # number of kills over all runs
    resumes: int = 0  # number of kills that left a checkpoint to resume
    runs: int = 0  # number of runs that were killed and resumed until their end
    wall_s: float = 0.0  # total time in seconds
    digest: str = ''  # digest of the uninterrupted run's state
    # differences of the first run that differs
    differences: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        "True if no killed run differs from the uninterrupted run."
        return not self.differences

    def __bool__(self) -> bool:
        return self.exact


class Run:
    "Training in a folder, by one process after the other."

    def __init__(
        self,
        make_learner: Callable[[], Any],
        n_epoch: int,
        every: Any,  # interval of checkpoints
        folder: Path,
        timeout_s: float,  # seconds to wait for each process
    ) -> None:
        self.make_learner = make_learner
        self.n_epoch = n_epoch
        self.every = every
        self.folder = folder
        self.timeout_s = timeout_s
        self.resumes = 0
        self.kills = 0
        folder.mkdir(parents=True, exist_ok=True)

    def live(self, kill_after_s: float | None = None) -> bool:
        "Train in a forked process, kill it after some seconds, and return True if it ended before the kill."
        self.resumes += self.has_checkpoint()
        process = get_context('fork').Process(target=self._train, args=(random.getstate(),))
        with warnings.catch_warnings():
            warnings.simplefilter('ignore', DeprecationWarning)  # of threads, from Python 3.12 on
            process.start()
        process.join(self.timeout_s if kill_after_s is None else kill_after_s)
        is_killed = process.is_alive()
        process.kill()
        process.join()
        if is_killed and kill_after_s is None:
            raise HarnessError(f'The training did not end within {self.timeout_s:g} s.')
        if not is_killed and process.exitcode:
            error = self.folder / 'error.txt'
            text = error.read_text('utf-8') if error.exists() else ''
            raise HarnessError(f'The training ended with exit code {process.exitcode}.\n{text}')
        self.kills += is_killed
        return not is_killed

    def has_checkpoint(self) -> bool:
        return any(self.folder.glob('*.ckpt'))

    def result(self) -> Any:
        "Return the state at the end of the training."
        return torch.load(self.folder / 'result.pt', weights_only=True)

    def _train(self, rng_state: Any) -> None:
        "Train in the forked process, which Python gives another random generator."
        random.setstate(rng_state)
        torch.set_num_threads(1)  # the threads of this process's parent do not exist here
        try:
            state = self._resume()
            torch.save(to_plain(state, 'The state'), self.folder / 'result.pt')
        except BaseException:
            (self.folder / 'error.txt').write_text(traceback.format_exc(), 'utf-8')
            os._exit(1)

    def _resume(self) -> Any:
        learn = self.make_learner()
        # the Learner's own `Checkpoint` would resume from its own files
        learn.remove_cbs([cb for cb in learn.cbs if isinstance(cb, Checkpoint)])
        if self.has_checkpoint():
            for seed_generator in (random.seed, np.random.seed, torch.manual_seed):
                seed_generator(os.getpid())
        with learn.no_bar():
            checkpoint = Checkpoint(every=self.every, folder=self.folder)
            learn.fit(self.n_epoch, resume=True, cbs=checkpoint)
        return learn.checkpoint_state()


def kill_and_resume(
    make_learner: Callable[[], Any],  # f() -> the same Learner each time: data, model, callbacks
    n_epoch: int,  # number of epochs, as for `fit`
    kills: int = 5,  # minimum number of kills, at random instants, that leave a checkpoint
    seed: int = 0,  # seed of the instants
    folder: str | Path | None = None,  # folder for checkpoints; None: a temporary folder
    every: str | int | Time = '1ba',  # checkpoint interval
    timeout_s: float = 120.0,  # seconds to wait for each process
) -> KillReport:
    """Compare training in an uninterrupted process with training in processes that are killed and resumed, bit by bit.

    Weights, buffers, optimizer, every random generator, callbacks' states and history are compared; times are not. A
    resumed process seeds its random generators differently before it resumes, to exclude equality by chance. Do not use
    CUDA before the call, and let `make_learner` do what the training script does. Raises `HarnessError` for training
    that fails, for training that is not deterministic without kills, and where processes cannot be forked.

    >>> from learnkit.testing import synth_learner
    >>> bool(kill_and_resume(lambda: synth_learner(n_train=4, n_valid=1), n_epoch=2, kills=1))
    True
    """
    if not hasattr(os, 'fork') or torch.cuda.is_initialized():
        raise HarnessError('No process can be forked here: on Windows, and after CUDA was used.')
    import_module('torch._dynamo')  # by the first step of an optimizer: a second in each process
    start_time = monotonic()
    report = KillReport()
    with TemporaryDirectory(prefix='learnkit-', ignore_cleanup_errors=True) as temporary:
        root = Path(folder or temporary)

        def make_run(name: str) -> Run:
            return Run(make_learner, n_epoch, every, root / name, timeout_s)

        expected, duration_s = _train_twice(make_run)
        report.digest = digest(expected)
        rng = random.Random(seed)
        while report.resumes < kills and report.exact:
            run = make_run(f'killed-{report.runs}')
            _kill_until_done(run, kills - report.resumes, 1.25 * duration_s, rng)
            report.runs += 1
            report.kills += run.kills
            report.resumes += run.resumes
            report.differences = differences(expected, run.result())
            if report.runs == MAX_IDLE and not report.resumes:
                raise HarnessError(f'{MAX_IDLE} runs ended before they had a checkpoint.')
    report.wall_s = monotonic() - start_time
    return report


def _train_twice(make_run: Callable[[str], Run]) -> tuple[Any, float]:
    "Return the state after uninterrupted training and its seconds; raise `HarnessError` if a second one differs."
    states = []
    duration_s = 0.0
    for i in range(2):
        began = monotonic()
        run = make_run(f'straight-{i}')
        run.live()
        duration_s = monotonic() - began  # the first run is slower
        states.append(run.result())
    found = differences(*states)
    if found:
        raise HarnessError(
            'Two trainings that nothing has killed differ: does `make_learner` seed what it draws?'
            + ''.join(f'\n  {line}' for line in found)
        )
    return states[0], duration_s


def _kill_until_done(run: Run, kills: int, upto_s: float, rng: random.Random) -> None:
    "Kill the processes of a run at most so many times, and let the last one end."
    for _ in range(kills):
        if run.live(rng.uniform(0, upto_s)):
            return
    run.live()
