"""Train a small network on handwritten digits, in as many processes as this script is started in.

    python examples/train_ddp.py                                         # one
    torchrun --nproc-per-node=2 examples/train_ddp.py                    # two on this machine; a GPU each, if there are
    torchrun --nproc-per-node=2 --max-restarts=3 examples/train_ddp.py   # all are started again when one dies

It resumes from its newest checkpoint, if there is one. On several machines: `two_nodes.sh`, `slurm.sh`.
The digits come with scikit-learn: pip install scikit-learn."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.nn import functional as F

from learnkit import Adam, Checkpoint, Learner, accuracy
from learnkit.demo import digits, small_cnn


def make_learner(
    folder: str | Path,  # for checkpoints and weights
    bs: int = 32,  # images a batch, in each process
    every: str = '1ep',  # how often a checkpoint is written
) -> Learner:
    "Return the Learner, as for one process."
    torch.manual_seed(0)
    return Learner(
        digits(bs),
        small_cnn(),
        F.cross_entropy,
        opt_func=Adam,
        lr=1e-3,
        metrics=accuracy,
        path=folder,
        cbs=Checkpoint(every),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description='Train on handwritten digits, in one process or many.'
    )
    parser.add_argument('--epochs', type=int, default=3)
    parser.add_argument('--bs', type=int, default=32, help='images a batch, in each process')
    parser.add_argument(
        '--every', default='1ep', help="how often a checkpoint is written: '500ba', '10m'"
    )
    parser.add_argument('--folder', default='digits-ddp', help='for checkpoints and weights')
    args = parser.parse_args()

    learn = make_learner(args.folder, args.bs, args.every)
    with learn.distributed('ddp'):
        learn.fit(args.epochs, resume=True)  # from the newest checkpoint, where there is one
        path = learn.save('digits')  # called by all, written by the first
        if learn.world.is_first:
            print(f'{learn.world.size} processes, {path}')


if __name__ == '__main__':
    main()
