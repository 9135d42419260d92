"""Seconds that compiling a whole step takes first, and the number of steps after which it pays.

Each workload of `benchmarks.step` is compiled in a fresh process without torch's caches of compiled code. The time of
as many epochs as the compiled Learner needs to compile is subtracted.

    python -m benchmarks.compiling
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from statistics import median

from benchmarks import step
from benchmarks.cli import options
from benchmarks.harness import measure

__all__ = ['main', 'make_table']

# workload: its title, and the epochs that its compiled Learner trains before it is measured
COMPILED = {
    'a': ('perceptron 16-16-1, batch 8, SGD', 4),
    'real': ('perceptron 16-64-64-10, batch 32, with the features above', 2),
    'real-gpt': ('GPT, batch 4 x 32, with the features above', 2),
}


def time_compiling(workload: str) -> float:
    "Return the seconds that a fresh process needs to compile the step of a workload."
    context = multiprocessing.get_context('spawn')
    with context.Pool(1, initializer=disable_caches) as pool:
        return pool.apply(compile_once, (workload,))


def disable_caches() -> None:
    "Have torch compile again what it has compiled before, and print nothing."
    os.environ['TORCHINDUCTOR_FORCE_DISABLE_CACHES'] = '1'
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)


def compile_once(workload: str) -> float:
    import torch

    import learnkit  # noqa: F401  its import is not part of compiling

    torch.set_num_threads(1)
    began = time.perf_counter()
    once = step.build(workload, 'learnkit-compiled')
    compiled = time.perf_counter()
    once()
    trained = time.perf_counter()
    epoch = (trained - compiled) / step.EPOCHS
    return compiled - began - COMPILED[workload][1] * epoch


def make_table(rounds: int) -> str:
    "Return a Markdown table with a row for each workload."
    lines = [
        '| | compiling first, s | ordinary step, us | compiled step, us | pays after steps |',
        '|---|--:|--:|--:|--:|',
    ]
    for name, (title, _) in COMPILED.items():
        seconds = time_compiling(name)
        workload = step.WORKLOADS[name]
        values = measure(workload, ['learnkit', 'learnkit-compiled'], rounds).values
        plain = median(values['learnkit'])
        compiled = median(values['learnkit-compiled'])
        steps = seconds * 1e6 / (plain - compiled) if plain > compiled else float('inf')
        rounded = f'{float(f"{steps:.2g}"):,.0f}'
        cells = [title, f'{seconds:.0f}', f'{plain:,.0f}', f'{compiled:,.0f}', rounded]
        lines.append(f'| {" | ".join(cells)} |')
    return '\n'.join(lines)


def main(argv: list[str] | None = None) -> int:
    "Measure, and print the table."
    args = options('python -m benchmarks.compiling', __doc__, rounds=3).parse_args(argv)
    print(make_table(args.rounds))
    return 0


if __name__ == '__main__':
    sys.exit(main())
