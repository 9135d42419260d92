"""Microseconds of a fit of one batch: create the objects, train one batch, and release everything.

Searches and cross-validations of small models repeat this. `raw` creates the optimizer and takes one step by hand.

    python -m benchmarks.fit
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from benchmarks.cli import command_line
from benchmarks.environments import continue_in
from benchmarks.harness import Workload
from benchmarks.peers import PEERS
from benchmarks.step import library
from benchmarks.subjects import SUBJECTS, Task

__all__ = ['WORKLOADS', 'build', 'main']

FITS = 20  # per measurement, which is their mean

WORKLOADS = {
    'fit': Workload(
        'fit',
        'perceptron 16-16-1, batch 8, SGD: made and trained on one batch',
        'benchmarks.fit',
        {s: library(s) for s in ['raw', 'learnkit-bare', 'learnkit', 'fastai', *PEERS]},
        unit='us a fit',
        never_run=frozenset({'composer'}),
    )
}


def build(workload: str, subject: str) -> Callable[[], float]:
    "Return a function that creates and trains a Learner `FITS` times and returns the microseconds per fit."
    task = Task(n_train=1, n_valid=0, skip=0)
    task.train = [task.batch()]  # type: ignore[assignment]  # its own loader grows with each fit
    make = SUBJECTS['a'][subject]

    def once() -> float:
        began = time.process_time()
        for _ in range(FITS):
            make(task)(1)
        return (time.process_time() - began) / FITS * 1e6

    return once


def main(argv: list[str] | None = None) -> int:
    "Measure what the command line asks for, print the table, and return the exit status."
    argv = sys.argv[1:] if argv is None else argv
    continue_in('tasks', 'benchmarks.fit', argv)
    return command_line('fit', __doc__, WORKLOADS, argv, rounds=7)


if __name__ == '__main__':
    sys.exit(main())
