"""Microseconds a training step takes: by hand, with learnkit bare and with its defaults, with fastai where it is there.

a  training alone; the steady part of one epoch, without what a fit or an epoch does once.
b  the usual defaults: progress, recording, an accuracy, and each epoch a validation pass over a fifth as many batches;
   whole epochs, spread over their training steps. `raw` does the same by hand, `raw-train` the training alone.

    python -m benchmarks.step
    python -m benchmarks.step --workloads a --frameworks raw,learnkit-bare --rounds 11 --json step.json
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness import Comparison, Result, Workload, machine, measure, report, write_json
from benchmarks.subjects import SUBJECTS, Task

__all__ = ['WORKLOADS', 'build', 'main']

N_TRAIN, N_VALID = 500, 100     # batches an epoch
SKIP = 100                      # batches before the steady part of an epoch
EPOCHS = 4


def _library(subject: str) -> str:
    "What has to be installed for a subject."
    name = subject.partition('-')[0]
    return 'torch' if name == 'raw' else name


def _workload(name: str, title: str, *comparisons: Comparison) -> Workload:
    return Workload(name, title, 'benchmarks.step', {s: _library(s) for s in SUBJECTS[name]}, comparisons=comparisons)


WORKLOADS = {
    'a': _workload('a', 'perceptron 16-16-1, batch 8, SGD, training alone',
                   Comparison('one idle callback', 'learnkit-idle200', 'learnkit', 'ns a step', 1000 / 200),
                   Comparison('one handler call', 'learnkit-handlers50', 'learnkit', 'ns', 1000 / 50)),
    'b': _workload('b', 'the same with progress, recording, accuracy and a validation pass each epoch',
                   Comparison('learnkit over training by hand', 'learnkit', 'raw-train', 'us a step'),
                   Comparison('fastai over training by hand', 'fastai', 'raw-train', 'us a step')),
}


def build(workload: str, subject: str) -> Callable[[], float]:
    "Return a function that trains for `EPOCHS` epochs and returns the microseconds that a step took."
    task = Task(N_TRAIN, N_VALID if workload == 'b' else 0, SKIP)
    fit = SUBJECTS[workload][subject](task)
    began, ended = task.train.began_s, task.train.ended_s

    def once() -> float:
        began.clear(); ended.clear()
        fit(EPOCHS)
        if workload == 'b': return (began[-1] - began[0]) / ((EPOCHS - 1) * N_TRAIN) * 1e6
        return sum(b - a for a, b in zip(began, ended, strict=True)) / (EPOCHS * (N_TRAIN - SKIP)) * 1e6
    return once


def main(argv: list[str] | None = None) -> int:
    "Measure what the command line asks for, print the tables, and return the exit status."
    known = list(dict.fromkeys(name for workload in WORKLOADS.values() for name in workload.subjects))
    parser = argparse.ArgumentParser('python -m benchmarks.step', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--workloads', type=_names(list(WORKLOADS)), default=list(WORKLOADS), metavar='a,b')
    parser.add_argument('--frameworks', type=_names(known), metavar='NAME,...',
                        help=f"of {', '.join(known)}; all that are installed if not given")
    parser.add_argument('--rounds', type=_positive, default=7, metavar='N', help='interleaved rounds (default 7)')
    parser.add_argument('--json', type=_file, metavar='FILE', help='write all numbers to FILE')
    args = parser.parse_args(argv)

    print(', '.join(f'{key} {value}' for key, value in machine().items()))
    results = [_run(WORKLOADS[name], args.frameworks, args.rounds) for name in args.workloads]
    if args.json: write_json(args.json, results)
    return 1 if any(result.errors for result in results) else 0


def _run(workload: Workload, frameworks: list[str] | None, rounds: int) -> Result:
    "Measure one workload and print its table."
    here = workload.installed()
    result = measure(workload, [name for name in here if frameworks is None or name in frameworks], rounds)
    print(f'\n{report(result)}', flush=True)
    return result


def _names(known: list[str]) -> Callable[[str], list[str]]:
    "An argument type: names of `known`, with commas between."
    def parse(text: str) -> list[str]:
        names = text.split(',')
        unknown = [name for name in names if name not in known]
        if unknown: raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
        return names
    return parse


def _positive(text: str) -> int:
    "An argument type: a whole number of at least 1."
    if text.isdecimal() and int(text) > 0: return int(text)
    raise argparse.ArgumentTypeError(f'{text} is not a whole number of at least 1')


def _file(text: str) -> Path:
    "An argument type: a file in a folder that exists."
    path = Path(text)
    if path.parent.is_dir() and not path.is_dir(): return path
    raise argparse.ArgumentTypeError(f'{text} is a folder, or in a folder that does not exist')


if __name__ == '__main__': sys.exit(main())
