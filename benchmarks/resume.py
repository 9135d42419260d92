"""Kill the same training in learnkit and in other packages, resume it, and compare it with its own unbroken run.

Each package trains the same network on the same rows, with a loader that shuffles and has two workers, dropout, batch
normalization, AdamW, a schedule by steps, accumulated gradients, averaged weights where the package has them, and
early stopping. `benchmarks/programs/resume_<package>.py` saves and resumes as the package's documentation says.

A run is killed by SIGKILL, with its workers, at a random batch, and resumed in a new process of the same program. The
processes are forks of one that has imported the package. What is compared: the weights at the end, bit for bit; the
losses of the validations, as the package keeps them; and the samples of the training batches, which the network logs.

    python -m benchmarks.resume --install                 # the other packages, into .peers/resume
    python -m benchmarks.resume --kills 20 --write        # and the table into docs/checkpoints.md
    python -m benchmarks.resume --packages learnkit,keras
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks import environments
from benchmarks.cli import names_of
from benchmarks.environments import ROOT
from benchmarks.programs import resume_task as task
from tests.peers.rows import import_torchvision

__all__ = ['PACKAGES', 'Outcome', 'judge_kill', 'main']

RESULTS = environments.FOLDER / 'resume.json'  # the last outcomes of each package
PAGE = ROOT / 'docs' / 'checkpoints.md'
START, END = '<!-- resume table -->', '<!-- end of resume table -->'
LONGEST = 120  # seconds of a process, after which it counts as hanging

# what the programs' names end in: name in the table, distribution
PACKAGES = {
    'learnkit': ('learnkit', 'learnkit-torch'),
    'lightning': ('Lightning', 'lightning'),
    'hf': ('HF Trainer', 'transformers'),
    'accelerate': ('Accelerate', 'accelerate'),
    'keras': ('Keras', 'keras'),
    'fastai': ('fastai', 'fastai'),
    'composer': ('Composer', 'mosaicml'),
    'ignite': ('Ignite', 'pytorch-ignite'),
    'skorch': ('skorch', 'skorch'),
}
# found by running the programs with less: without dropout, for example
REASONS = {
    'learnkit': 'nothing',
    'lightning': 'the random numbers of dropout; after an epoch, `EarlyStopping` finds no loss and raises',
    'hf': 'after an epoch, the random numbers; a folder that the kill left half written',
    'accelerate': 'the random numbers of dropout; a folder that the kill left half written',
    'keras': 'the order of the data, and the counts of early stopping; within an epoch, it starts the epoch '
    'again; a file that the kill left half written',
    'fastai': 'saves after epochs; the order of the data, random numbers. Trained without early stopping, whose '
    'callback raises with `start_epoch=`',
    'composer': 'within an epoch, the order of the data; the counts of early stopping',
    'ignite': 'after the last batch of an epoch, its evaluation is left out',
    'skorch': 'saves after epochs; the order of the data, the schedule, the counts of early stopping; a file that '
    'the kill left half written',
}
BY_EPOCH = ('fastai', 'skorch')  # save at the end of an epoch alone


@dataclass(frozen=True)
class Outcome:
    "What became of a run that was killed once."

    at: int  # training batches before the kill
    resumed: bool  # the second process ended without an error
    weights: bool = False  # the same bits as the unbroken run's
    history: bool | None = None  # the same losses; None: the package keeps none
    twice: int = 0  # samples seen more than once in an epoch, over all epochs
    never: int = 0  # samples never seen in an epoch, over all epochs
    batches: int = 0  # training batches of the whole run, without those that were trained again
    error: str = ''


# -- in the process of a package -------------------------------------------------------------------


def serve(name: str, kills: int, folder: Path) -> dict[str, Any]:
    "Run a package's program unbroken, twice, and then killed and resumed `kills` times."
    os.environ['KERAS_BACKEND'] = 'torch'
    torch.set_num_threads(1)
    if name != 'learnkit':
        import_torchvision()  # for packages that import torchvision
    train = importlib.import_module(f'benchmarks.programs.resume_{name}').train
    straight, again = (Life(train, folder / f'unbroken{i}').end() for i in range(2))
    interval = task.BATCHES if name in BY_EPOCH else task.SAVE_EVERY
    rng = random.Random(0)
    outcomes = []
    for i in range(kills):
        at = rng.randrange(2, straight.n_batches - 1)
        outcome = judge_kill(train, folder / f'{i}', at, rng.random(), straight, interval)
        print(name, outcome, file=sys.stderr, flush=True)
        outcomes.append(asdict(outcome))
    return {
        'version': version(PACKAGES[name][1]),
        'repeats': straight.has_weights_of(again),
        'batches': straight.n_batches,
        'outcomes': outcomes,
    }


class Life:
    "A process that trains in a folder, until it ends or is killed."

    def __init__(self, train: Callable[[Path], tuple[Any, Any]], folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.number = len(list(folder.glob('*.samples')))
        self.log = folder / f'{self.number}.samples'
        self.log.touch()
        self.result = folder / f'{self.number}.pt'
        self.pid = os.fork()
        if not self.pid:
            self._train(train)

    def _train(self, train: Callable[[Path], tuple[Any, Any]]) -> None:
        "Train in the forked process, which never returns."
        os.setsid()
        os.environ[task.LOG] = str(self.log)
        output = os.open(self.folder / f'{self.number}.txt', os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        status = 1
        try:
            run = self.folder / 'run'
            run.mkdir(exist_ok=True)
            os.chdir(self.folder)
            weights, losses = train(run)
            torch.save((weights, losses), self.result)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def end(self) -> Life:
        "Wait for the end of the process, and kill it if it hangs."
        limit = time.monotonic() + LONGEST
        while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > limit:
                self.kill()
                break
            time.sleep(0.01)
        return self

    def kill_at(self, n: int, fraction: float) -> bool:
        "Kill the process after `n` batches and a fraction of the time of a batch; return False if it ended before."
        began, n_first = 0.0, 0
        while self.n_batches < n:
            if os.waitpid(self.pid, os.WNOHANG) != (0, 0):
                return False
            if not began and self.n_batches:
                began, n_first = time.monotonic(), self.n_batches
            time.sleep(0.0005)
        per_batch = (time.monotonic() - began) / max(1, n - n_first) if began else 0.0
        time.sleep(min(1.0, fraction * per_batch))
        self.kill()
        return True

    def kill(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    @property
    def n_batches(self) -> int:
        return self.log.stat().st_size // (2 * task.BATCH)

    @property
    def has_ended(self) -> bool:
        return self.result.exists()

    def load(self) -> tuple[dict[str, Any], list[float] | None]:
        loaded: tuple[dict[str, Any], list[float] | None] = torch.load(
            self.result, weights_only=False
        )
        return loaded

    def has_weights_of(self, other: Life) -> bool:
        ours, theirs = self.load()[0], other.load()[0]
        return ours.keys() == theirs.keys() and all(
            torch.equal(t, theirs[k]) for k, t in ours.items()
        )

    def batches(self) -> list[tuple[int, ...]]:
        "Return the sample numbers of each training batch."
        numbers = np.fromfile(self.log, np.int16, self.n_batches * task.BATCH)
        return list(map(tuple, numbers.reshape(-1, task.BATCH).tolist()))

    def find_error(self) -> str:
        lines = (self.folder / f'{self.number}.txt').read_text('utf-8', 'replace').splitlines()
        return next((line for line in reversed(lines) if line.strip()), '')


def judge_kill(
    train: Callable[[Path], tuple[Any, Any]],  # trains in a folder; returns weights and losses
    folder: Path,
    at: int,  # batches before the kill
    fraction: float,  # of a batch's time after it
    straight: Life,  # the unbroken run
    interval: int = task.SAVE_EVERY,  # batches between two checkpoints
) -> Outcome:
    "Kill a run, resume it, and compare it with the unbroken run."
    first = Life(train, folder)
    if not first.kill_at(at, fraction):
        raise RuntimeError(f'The run ended before the kill: {first.find_error()}')
    second = Life(train, folder).end()
    if not second.has_ended:
        return Outcome(first.n_batches, False, error=second.find_error())
    before, after = first.batches(), second.batches()
    n_kept = find_start(straight.batches(), before, after, interval)
    seen = before[:n_kept] + after
    twice, never = count_samples(seen)
    expected, found = straight.load()[1], second.load()[1]
    return Outcome(
        at=len(before),
        resumed=True,
        weights=second.has_weights_of(straight),
        history=None if expected is None else expected == found,
        twice=twice,
        never=never,
        batches=len(seen),
    )


def find_start(
    straight: Sequence[tuple[int, ...]],
    before: Sequence[tuple[int, ...]],
    after: Sequence[tuple[int, ...]],
    interval: int,  # batches between two checkpoints
) -> int:
    """Return the number of batches that the resumed run had behind it: a multiple of the interval.

    It is where the batches continue as in the unbroken run, or else the one of the last two checkpoints, the last of
    which the kill may have hit, that leaves the fewest samples seen twice or never."""
    last = len(before) // interval * interval
    candidates = [n for n in (last, last - interval) if n >= 0]
    for n in candidates:
        expected = straight[n : n + len(after)]
        if expected and list(expected) == list(after[: len(expected)]):
            return n
    return min(candidates, key=lambda n: sum(count_samples([*before[:n], *after])))


def count_samples(batches: Sequence[tuple[int, ...]]) -> tuple[int, int]:
    "Return how many samples come more than once in an epoch, and how many do not come, over all whole epochs."
    twice = never = 0
    for i in range(0, len(batches) - task.BATCHES + 1, task.BATCHES):
        counts = Counter(number for batch in batches[i : i + task.BATCHES] for number in batch)
        twice += sum(n > 1 for n in counts.values())
        never += task.N - len(counts)
    return twice, never


# -- the table -------------------------------------------------------------------------------------


def measure(name: str, kills: int) -> dict[str, Any]:
    "Return a package's outcomes, measured in the environment that has it."
    python = environments.FOLDER / 'resume' / 'bin' / 'python'
    if name == 'learnkit' or not python.exists():
        python = Path(sys.executable)
    with TemporaryDirectory() as folder:
        command = [str(python), '-m', 'benchmarks.resume', '--serve', name, '--kills', str(kills)]
        environment = {'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': ''}
        subprocess.run(
            [*command, '--folder', folder],
            env=os.environ | environment,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        measured: dict[str, Any] = json.loads((Path(folder) / 'outcomes.json').read_text('utf-8'))
        return measured


def make_row(name: str, measured: dict[str, Any]) -> str:
    outcomes = [Outcome(**outcome) for outcome in measured['outcomes']]
    n = len(outcomes)
    resumed = [outcome for outcome in outcomes if outcome.resumed]
    kept = [o.history for o in resumed if o.history is not None]
    history = f'{sum(kept)} of {n}' if kept else 'keeps none'
    samples = sum(not o.twice and not o.never for o in resumed)
    weights = sum(o.weights for o in resumed)
    title = f'{PACKAGES[name][0]} {measured["version"]}'
    counts = [f'{k} of {n}' for k in (len(resumed), weights, samples)]
    cells = [title, *counts[:2], history, counts[2], REASONS[name]]
    return f'| {" | ".join(cells)} |'


def make_table(results: dict[str, dict[str, Any]]) -> str:
    names = ['', 'resumes', 'same weights', 'same history', 'each sample once an epoch']
    head = f'|{" | ".join(names)} | what differs |\n|---|--:|--:|--:|--:|---|'
    rows = [make_row(name, results[name]) for name in PACKAGES if name in results]
    return '\n'.join([head, *rows])


def write_table(results: dict[str, dict[str, Any]]) -> None:
    text = PAGE.read_text('utf-8')
    before, _, rest = text.partition(START)
    after = rest.partition(END)[2]
    PAGE.write_text(f'{before}{START}\n{make_table(results)}\n{END}{after}', 'utf-8')


def install() -> str | None:
    "Install the other packages; return pip's last line if it fails."
    from benchmarks.tasks import REQUIREMENTS
    from tests.peers.environments import PEERS

    peers = {requirement for peer in PEERS for requirement in peer.requirements}
    folder = environments.FOLDER / 'resume'
    environments.create_empty(folder)
    return environments.install(folder, *sorted(peers | set(REQUIREMENTS) | {LIGHTNING}))


LIGHTNING = 'pytorch-lightning==2.6.*'  # which `lightning` imports


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        'python -m benchmarks.resume', description=str(__doc__).split('\n')[0]
    )
    parser.add_argument('--packages', type=names_of(list(PACKAGES)), default=list(PACKAGES))
    parser.add_argument('--kills', type=int, default=20)
    parser.add_argument('--install', action='store_true')
    parser.add_argument('--write', action='store_true', help='write the table into the page')
    parser.add_argument('--serve', help=argparse.SUPPRESS)
    parser.add_argument('--folder', type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        measured = serve(args.serve, args.kills, args.folder)
        (args.folder / 'outcomes.json').write_text(json.dumps(measured), 'utf-8')
        return
    if args.install:
        error = install()
        sys.exit(error)
    results = json.loads(RESULTS.read_text('utf-8')) if RESULTS.exists() else {}
    for name in args.packages:
        results[name] = measure(name, args.kills)
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1), 'utf-8')
    print(make_table(results))
    if args.write:
        write_table(results)


if __name__ == '__main__':
    main()
