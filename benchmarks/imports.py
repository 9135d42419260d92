"""CPU milliseconds of a fresh Python process that imports a library and makes its first optimizer.

The first optimizer is part of it because torch loads its compiler's front end only then.

    python -m benchmarks.imports
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from benchmarks.cli import command_line
from benchmarks.harness import Workload
from benchmarks.step import library

__all__ = ['WORKLOADS', 'build', 'main']

BATCHES = '[(torch.zeros(1, 1), torch.zeros(1, 1))]'
TORCH = 'import torch\nmodel = torch.nn.Linear(1, 1)\n'
SGD = 'torch.optim.SGD(model.parameters(), lr=0.1)\n'

PROGRAMS = {
    'raw-import': 'import torch\n',
    'raw': TORCH + SGD,
    'learnkit-import': 'from learnkit import Learner\n',
    'learnkit': 'from learnkit import Learner\n'
    + TORCH
    + f'Learner({BATCHES}, model, torch.nn.functional.mse_loss, opt_func=torch.optim.SGD).create_opt()\n',
    'fastai': 'from fastai.learner import DataLoaders, Learner\nfrom fastai.optimizer import SGD\n'
    + TORCH
    + f'Learner(DataLoaders({BATCHES}), model, torch.nn.functional.mse_loss, opt_func=SGD).create_opt()\n',
    'ignite': 'from ignite.engine import create_supervised_trainer\n'
    + TORCH
    + f'create_supervised_trainer(model, {SGD.strip()}, torch.nn.functional.mse_loss)\n',
    'lightning': 'from lightning.pytorch import LightningModule, Trainer\n' + TORCH + SGD,
    'skorch': 'from skorch import NeuralNet\n'
    + TORCH
    + 'NeuralNet(model, torch.nn.MSELoss).initialize()\n',
    'composer': 'from composer import Trainer\n' + TORCH + SGD,
}
TELL = 'import os, time\nos.write(1, str(time.process_time()).encode())\n'

WORKLOADS = {
    'imports': Workload(
        'imports',
        'import and the first optimizer, in a fresh process',
        'benchmarks.imports',
        {s: library(s) for s in PROGRAMS},
        unit='CPU ms',
        never_run=frozenset({'composer'}),
    )
}


def build(workload: str, subject: str) -> Callable[[], float]:
    "Return a function that runs a fresh process and returns the CPU milliseconds it took."

    def once() -> float:
        done = subprocess.run(
            [sys.executable, '-c', PROGRAMS[subject] + TELL], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        return float(done.stdout.split()[-1]) * 1000

    return once


def main(argv: list[str] | None = None) -> int:
    "Measure what the command line asks for, print the table, and return the exit status."
    return command_line('imports', __doc__, WORKLOADS, argv, rounds=7)


if __name__ == '__main__':
    sys.exit(main())
