"""Train on handwritten digits with Ray Train, in two workers on CPUs: `python examples/ray_train.py`.

Ray starts the workers and makes their process group; the Learner finds it.
pip install "ray[train]" scikit-learn."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig, report
from ray.train.torch import TorchTrainer
from torch.nn import functional as F

from learnkit import Adam, Callback, Learner, accuracy
from learnkit.demo import digits, small_cnn


class Report(Callback):
    "Tell Ray of each epoch, and give it the weights; every worker has to."

    order, run_train = 70, False  # after the Recorder

    def after_epoch(self) -> None:
        row = {k: v for k, v in self.history[-1].items() if isinstance(v, (int, float))}
        with tempfile.TemporaryDirectory() as folder:
            self.learn.save(Path(folder, 'digits').absolute())
            report(
                row, checkpoint=Checkpoint.from_directory(folder) if self.world.is_first else None
            )


def train(config: dict[str, Any]) -> None:
    "Be one of the workers."
    torch.manual_seed(0)
    learn = Learner(
        digits(config['bs']), small_cnn(), F.cross_entropy, opt_func=Adam, lr=1e-3, metrics=accuracy
    )
    with learn.distributed('ddp'):
        learn.fit(config['epochs'], cbs=Report())


def main() -> None:
    parser = argparse.ArgumentParser(description='Train on handwritten digits with Ray Train.')
    parser.add_argument('--epochs', type=int, default=3)
    parser.add_argument('--workers', type=int, default=2)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train,
            train_loop_config={'epochs': args.epochs, 'bs': 32},
            scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=False),
            run_config=RunConfig(storage_path=folder, name='digits'),
        )
        result = trainer.fit()
        print(
            {
                name: round(result.metrics[name], 4)
                for name in ('epoch', 'train_loss', 'valid_loss', 'accuracy')
            }
        )
        print(sorted(path.name for path in Path(result.checkpoint.path).iterdir()))
    ray.shutdown()


if __name__ == '__main__':
    main()
