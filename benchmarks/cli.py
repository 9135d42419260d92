"""Command line of every benchmark: workloads, subjects, rounds, and a file for the results."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from benchmarks.harness import Result, Workload, machine, measure, report, write_json

__all__ = ['command_line', 'names_of', 'run', 'options']


def command_line(
    name: str,  # name of the module in `benchmarks`
    description: str | None,
    workloads: Mapping[str, Workload],
    argv: list[str] | None,  # None: the arguments of the process
    rounds: int,  # default number of rounds
    measure_more: Callable[[int], str] | None = None,  # f(rounds): tables apart from the workloads
) -> int:
    """Measure what the command line asks for, print the tables, and return the exit status.

    `measure_more` is called unless the command line selects workloads or subjects.
    """
    known = list(
        dict.fromkeys(subject for workload in workloads.values() for subject in workload.subjects)
    )
    parser = options(f'python -m benchmarks.{name}', description, rounds)
    parser.add_argument(
        '--workloads',
        type=names_of(list(workloads)),
        default=list(workloads),
        metavar=','.join(workloads),
    )
    parser.add_argument(
        '--frameworks',
        type=names_of(known),
        metavar='NAME,...',
        help=f'of {", ".join(known)}; all that are installed if not given',
    )
    args = parser.parse_args(argv)
    chosen = [(workloads[name], args.frameworks) for name in args.workloads]
    status = run(chosen, args.rounds, args.json)
    if measure_more is not None and len(chosen) == len(workloads) and args.frameworks is None:
        print(f'\n{measure_more(args.rounds)}', flush=True)
    return status


def run(
    chosen: Iterable[tuple[Workload, Iterable[str] | None]],  # each with subjects; None: all
    rounds: int,
    json: Path | None = None,  # file for all results
) -> int:
    "Measure every workload, print each table when it is complete, and return the exit status."
    print(', '.join(f'{key} {value}' for key, value in machine().items()), flush=True)
    results: list[Result] = []
    for workload, subjects in chosen:
        here = workload.installed()
        names = here if subjects is None else [name for name in here if name in set(subjects)]
        results.append(measure(workload, names, rounds))
        print(f'\n{report(results[-1])}', flush=True)
    if json:
        write_json(json, results)
    return 1 if any(result.errors for result in results) else 0


def options(prog: str, description: str | None, rounds: int) -> argparse.ArgumentParser:
    "Return a parser of the options that all benchmarks have."
    parser = argparse.ArgumentParser(
        prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        '--rounds',
        type=_positive,
        default=rounds,
        metavar='N',
        help=f'interleaved rounds (default {rounds})',
    )
    parser.add_argument('--json', type=_file, metavar='FILE', help='write all numbers to FILE')
    return parser


def names_of(known: list[str]) -> Callable[[str], list[str]]:
    "Return an argument type: names from `known`, separated by commas."

    def parse(text: str) -> list[str]:
        names = text.split(',')
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(
                f'there is no {", ".join(unknown)}; there are {", ".join(known)}'
            )
        return names

    return parse


def _positive(text: str) -> int:
    "Convert an argument to an integer of at least 1."
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f'{text} is not a whole number of at least 1')


def _file(text: str) -> Path:
    "Convert an argument to the path of a file in an existing folder."
    path = Path(text)
    if path.parent.is_dir() and not path.is_dir():
        return path
    raise argparse.ArgumentTypeError(f'{text} is a folder, or in a folder that does not exist')
