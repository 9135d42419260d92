"""Microseconds of a training step: hand-written, with learnkit bare and with its defaults, and with other libraries.

a          training only: the steady part of one epoch, without the costs of starting and ending a fit or an epoch.
b          each library's usual defaults: progress, recording, an accuracy, and in each epoch a validation pass over a
           fifth as many batches; the time of whole epochs per training step. `raw` does the same by hand, `raw-train`
           only the training.
cnn        a small convolutional network on images of 28 x 28, batches of 64, training alone: where arithmetic counts.
real       a perceptron 16-64-64-10, batches of 32, with bf16 autocast, clipping, fused AdamW, one cycle of the rate and
           an average of the weights, training alone.
real-gpt   the same for a transformer of 2 blocks of width 64, batches of 4 sequences of 32 tokens.
callbacks  a with 0, 10, 50, 200 and 1000 more callbacks that handle no event of a step, and with 50 that handle one.

    python -m benchmarks.step
    python -m benchmarks.step --workloads a --frameworks raw,learnkit-bare --rounds 11 --json step.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from benchmarks.cli import command_line
from benchmarks.environments import continue_in
from benchmarks.harness import Comparison, Workload
from benchmarks.peers import PEERS
from benchmarks.real import REAL, ClassTask, TokenTask
from benchmarks.subjects import SUBJECTS, ImageTask, Task

__all__ = ['WORKLOADS', 'build', 'main', 'library']

EPOCHS = 4
GROUPS = SUBJECTS | {'real': REAL}
# kind of task, batches to train and to validate on, batches before the steady part of an epoch, group of subjects
TASKS: dict[str, tuple[type[Task], int, int, int, str]] = {
    'a': (Task, 500, 0, 100, 'a'),
    'b': (Task, 500, 100, 100, 'b'),
    'cnn': (ImageTask, 60, 0, 10, 'a'),
    'real': (ClassTask, 500, 0, 100, 'real'),
    'real-gpt': (TokenTask, 100, 0, 20, 'real'),
    'callbacks': (Task, 500, 0, 100, 'a'),
}
LIBRARIES = {
    'raw': 'torch',
    'composer': 'composer',
    'ignite': 'ignite',
    'lightning': 'lightning',
    'skorch': 'skorch',
}


def library(subject: str) -> str:
    "Return the library that a subject needs."
    name = subject.partition('-')[0]
    return LIBRARIES.get(name, name)


def _workload(name: str, title: str, subjects: list[str], *comparisons: Comparison) -> Workload:
    return Workload(
        name,
        title,
        'benchmarks.step',
        {s: library(s) for s in subjects},
        comparisons=comparisons,
        never_run=frozenset({'composer'}),
    )


def _callback_costs(name: str, idle: int) -> tuple[Comparison, Comparison]:
    "Return the comparisons for the cost of another callback, idle or with a handler."
    return (
        Comparison(
            f'one idle callback, {name}', f'{name}-idle{idle}', name, 'ns a step', 1000 / idle
        ),
        Comparison(f'one handler call, {name}', f'{name}-handlers50', name, 'ns', 1000 / 50),
    )


WORKLOADS = {
    'a': _workload(
        'a',
        'perceptron 16-16-1, batch 8, SGD, training alone',
        [
            'raw',
            'learnkit-bare',
            'learnkit',
            'raw-compiled',
            'learnkit-bare-compiled',
            'learnkit-compiled',
            'fastai-bare',
            'fastai',
            *PEERS,
        ],
    ),
    'b': _workload(
        'b',
        'the same with progress, recording, accuracy and a validation pass each epoch',
        ['raw', 'raw-train', 'learnkit', 'fastai', *PEERS],
        Comparison('learnkit over training by hand', 'learnkit', 'raw-train', 'us a step'),
        Comparison('fastai over training by hand', 'fastai', 'raw-train', 'us a step'),
    ),
    'cnn': _workload(
        'cnn',
        'three convolutions on 28x28 images, batch 64, SGD, training alone',
        ['raw', 'learnkit-bare', 'learnkit', 'fastai-bare', 'fastai', *PEERS],
    ),
    'real': _workload(
        'real',
        'perceptron 16-64-64-10, batch 32, bf16, clipping, AdamW, one cycle, average of the weights',
        list(REAL),
    ),
    'real-gpt': _workload(
        'real-gpt',
        'GPT, 2 blocks of 64, batch 4 x 32, with the same features',
        list(REAL),
    ),
    'callbacks': _workload(
        'callbacks',
        'a with more callbacks',
        [
            'raw',
            'learnkit',
            'learnkit-idle10',
            'learnkit-idle50',
            'learnkit-idle200',
            'learnkit-idle1000',
            'learnkit-handlers50',
            'fastai',
            'fastai-idle50',
            'fastai-handlers50',
        ],
        *_callback_costs('learnkit', 1000),
        *_callback_costs('fastai', 50),
    ),
}


def build(workload: str, subject: str) -> Callable[[], float]:
    "Return a function that trains for `EPOCHS` epochs and returns the microseconds per step."
    kind, n_train, n_valid, skip, group = TASKS[workload]
    task = kind(n_train, n_valid, skip)
    fit = GROUPS[group][subject](task)
    began = task.train.began_s
    ended = task.train.ended_s

    def once() -> float:
        began.clear()
        ended.clear()
        fit(EPOCHS)
        if n_valid:
            return (began[-1] - began[0]) / ((EPOCHS - 1) * n_train) * 1e6
        return (
            sum(b - a for a, b in zip(began, ended, strict=True))
            / (EPOCHS * (n_train - skip - 1))
            * 1e6
        )

    return once


def main(argv: list[str] | None = None) -> int:
    "Measure what the command line asks for, print the tables, and return the exit status."
    argv = sys.argv[1:] if argv is None else argv
    continue_in('tasks', 'benchmarks.step', argv)
    return command_line('step', __doc__, WORKLOADS, argv, rounds=7)


if __name__ == '__main__':
    sys.exit(main())
