"""Train on handwritten digits with Ray Train, in two workers on CPUs.

    python examples/ray_train.py                  # without a kill
    python examples/ray_train.py --kill 34 61     # each worker is killed once; the digest is the same

Ray starts the workers and makes their process group; the Learner finds it. When a worker dies, Ray starts all workers
again, and they resume at the batch of the newest checkpoint in the run's storage. Instead of `--kill`, run
`kill -9 PID` in another terminal for any worker; Ray prints the PIDs.

On several machines, the storage is a folder that all of them share. pip install "ray[train]" scikit-learn."""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import Checkpoint as RayCheckpoint, FailureConfig, RunConfig, ScalingConfig, report
from ray.train.torch import TorchTrainer
from torch.nn import functional as F

from learnkit import Adam, Callback, Checkpoint, Learner, accuracy
from learnkit.demo import digits, small_cnn
from learnkit.testing import digest

RUN = 'digits'  # name of the run, and of the weights


def find_numbers(learn: Learner) -> dict[str, float]:
    "Return the numbers of the last row, which are those of all workers."
    return {k: v for k, v in learn.history[-1].items() if isinstance(v, (int, float))}


class Report(Callback):
    "Report each epoch to Ray; every worker has to."

    order, run_train = 70, False  # after the Recorder, and before the Checkpoint

    def after_epoch(self) -> None:
        report(find_numbers(self.learn))


class KillWorker(Callback):
    "End one worker by SIGKILL before each of some batches, the first time that the run reaches the batch."

    run_valid = False

    def __init__(
        self,
        batches: list[int],  # before the first of them ends the first worker, and so on in turn
        folder: Path,  # for the marks of what has happened, which a restarted worker reads
    ) -> None:
        self.batches = batches
        self.folder = folder

    def before_batch(self) -> None:
        batch = self.learn.time.ba
        if batch not in self.batches:
            return
        rank = self.batches.index(batch) % self.world.size
        mark = self.folder / f'killed-{batch}'
        if rank == self.world.rank and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def report_weights(learn: Learner) -> None:
    "Report the trained weights to Ray: all workers report, and the first has the file."
    with tempfile.TemporaryDirectory() as folder:
        learn.save(Path(folder, RUN).absolute())
        is_first = learn.world.is_first
        weights = RayCheckpoint.from_directory(folder) if is_first else None
        report(find_numbers(learn), checkpoint=weights)


def train(config: dict[str, Any]) -> None:
    "Be one of the workers, also of those that Ray starts after a failure."
    torch.manual_seed(0)
    folder = Path(config['folder'])
    learn = Learner(
        digits(config['bs']),
        small_cnn(),
        F.cross_entropy,
        opt_func=Adam,
        lr=1e-3,
        metrics=accuracy,
        path=folder,
        cbs=[Checkpoint(config['every']), Report(), KillWorker(config['kill'], folder)],
    )
    with learn.distributed('ddp'):
        learn.fit(config['epochs'], resume=True)
        report_weights(learn)  # after a kill at the very end, too


def parse_options() -> argparse.Namespace:
    "Read the options of the command line."
    parser = argparse.ArgumentParser(
        description='Train on handwritten digits with Ray Train, and resume when a worker is killed.'
    )
    parser.add_argument('--epochs', type=int, default=3)
    parser.add_argument('--workers', type=int, default=2)
    parser.add_argument(
        '--every', default='5ba', help="how often a checkpoint is written: '500ba', '10m'"
    )
    parser.add_argument(
        '--kill',
        type=int,
        nargs='+',
        default=[],
        metavar='BATCH',
        help='up to two batches, such as 34 61: before each, one worker is ended by SIGKILL',
    )
    return parser.parse_args()


def fit(options: argparse.Namespace, storage: str) -> ray.train.Result:
    "Train in the workers, and return the result; Ray starts them again at most twice."
    folder = Path(storage, RUN)  # the run's folder in the storage, in which Ray has its own files
    config = {
        'folder': str(folder),
        'bs': 32,
        'epochs': options.epochs,
        'every': options.every,
        'kill': options.kill,
    }
    trainer = TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=False),
        run_config=RunConfig(
            name=RUN,
            storage_path=storage,
            failure_config=FailureConfig(max_failures=2),
        ),
    )
    return trainer.fit()


def print_result(result: ray.train.Result) -> None:
    "Print the last numbers, and a digest of the weights that is equal for bit-identical weights only."
    names = 'epoch', 'train_loss', 'valid_loss', 'accuracy'
    print({name: round(result.metrics[name], 4) for name in names})
    weights = torch.load(Path(result.checkpoint.path, f'{RUN}.pth'), weights_only=True)
    print('digest of the weights:', digest(weights['model']))


def main() -> None:
    options = parse_options()
    # Ray 2.60 shows twice what a worker prints, unless this variable is set where the workers are started
    os.environ.setdefault('RAY_TRAIN_ENABLE_PRINT_PATCH', '0')
    with tempfile.TemporaryDirectory() as storage:
        print_result(fit(options, storage))
    ray.shutdown()


if __name__ == '__main__':
    main()
