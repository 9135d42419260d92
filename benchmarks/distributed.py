"""Throughput of a Learner in two processes, compared with a hand-written loop around torch's wrapper.

linears, million  three linear layers with 7 thousand and with one million weights, batches of 64, momentum,
                  DistributedDataParallel (gloo). Steps per second over whole epochs, and CPU time of the training
                  thread, which is the cost of the loop itself, and is less noisy than the clock.
shards            the small layers, sharded by `fully_shard`.
costs             costs of single parts: the flag that ranks exchange after each batch, sharded loaders, gathering,
                  checkpoints, joining and leaving.

`raw` is the hand-written loop. `raw-again` is the same loop once more; its ratio shows the error of measurement.
`learnkit-no-flag` exchanges nothing between batches. Subjects take turns in the same processes, on the same data in the
same order. At the end their weights must be equal to the last bit, otherwise the exit status is 1.

    python -m benchmarks.distributed
    python -m benchmarks.distributed --workloads linears --rounds 21
    python -m benchmarks.distributed --scale --parameters 7e9     # computes the scaling, see docs/scaling.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from statistics import fmean
from typing import Any

import torch

from benchmarks import parts, scaling
from benchmarks.cli import names_of, options
from benchmarks.harness import Result, Workload, machine, report, write_json
from benchmarks.teams import SUBJECTS, in_a_team, in_turns

__all__ = ['WORKLOADS', 'best', 'compare', 'main', 'unequal']

N = 2  # processes
TITLES = {
    'linears': 'three linear layers, 7 thousand weights',
    'million': 'three linear layers, a million weights',
    'shards': 'three linear layers cut over the processes (FSDP2)',
}


def _workload(name: str, title: str, unit: str) -> Workload:
    return Workload(
        name,
        f'{title}, {N} processes, batches of 64',
        'benchmarks.distributed',
        dict.fromkeys(SUBJECTS, 'torch'),
        unit=unit,
    )


WORKLOADS = {name: _workload(name, title, 'steps/s') for name, title in TITLES.items()}


def compare(
    name: str, rounds: int, names: Iterable[str] | None = None
) -> tuple[Result, Result, list[str]]:
    """Let subjects train in turns, in two processes.

    Returns throughput by the clock, CPU time of a training thread, and the subjects with unequal weights."""
    subjects = list(dict.fromkeys(['raw', *(names or SUBJECTS)]))
    ranks = in_a_team(N, in_turns, name, subjects, rounds)
    wall = {s: [1 / wall_s for wall_s, _ in ranks[0]['values'][s]] for s in subjects}
    cpu = {
        s: [fmean(rank['values'][s][i][1] for rank in ranks) * 1e6 for i in range(rounds)]
        for s in subjects
    }
    in_cpu = _workload(f'{name}, CPU', TITLES[name], 'CPU us/step')
    return (
        Result(WORKLOADS[name], wall),
        Result(in_cpu, cpu),
        unequal([rank['weights'] for rank in ranks]),
    )


def best(result: Result) -> str:
    "Return the ratios of the best rounds, which other processes disturbed least."
    top = {name: max(values) for name, values in result.values.items()}
    return '  best rounds, relative to raw: ' + ', '.join(
        f'{name} {value / top["raw"]:.2f}' for name, value in top.items() if name != 'raw'
    )


def unequal(ranks: list[dict[str, Any]]) -> list[str]:
    "Return the subjects whose weights, in any process, differ from the weights of the hand-written loop in any bit."
    return [
        name for name in ranks[0] if not all(torch.equal(w[name], ranks[0]['raw']) for w in ranks)
    ]


def main(argv: list[str] | None = None) -> int:
    "Measure what the command line asks for, print the tables, and return the exit status."
    parser = options('python -m benchmarks.distributed', __doc__, rounds=15)
    parser.add_argument(
        '--workloads',
        type=names_of([*WORKLOADS, 'costs']),
        default=[*WORKLOADS, 'costs'],
        metavar=','.join([*WORKLOADS, 'costs']),
    )
    parser.add_argument('--subjects', type=names_of(list(SUBJECTS)), metavar=','.join(SUBJECTS))
    parser.add_argument(
        '--scale', action='store_true', help='print how costs grow with the number of GPUs'
    )
    scaling.add_options(parser)
    args = parser.parse_args(argv)
    if args.scale:
        print(scaling.table(scaling.chosen(args)))
        return 0

    print(', '.join(f'{key} {value}' for key, value in machine().items()), flush=True)
    results = []
    failed = []
    for name in args.workloads:
        if name == 'costs':
            values = parts.measure_parts(args.rounds)
            print(f'\n{parts.table(values)}', flush=True)
            continue
        wall, cpu, differ = compare(name, args.rounds, args.subjects)
        failed += differ
        results += [wall, cpu]
        said = (
            f'DIFFERENT from the hand-written loop: {", ".join(differ)}'
            if differ
            else 'equal to the last bit in all'
        )
        print(
            f'\n{report(wall)}\n{best(wall)}\n\n{report(cpu)}\n  weights at the end: {said}',
            flush=True,
        )
    if args.json:
        write_json(args.json, results)
    return 1 if failed else 0


if __name__ == '__main__':
    sys.exit(main())
