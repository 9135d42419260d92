# SPDX-License-Identifier: Apache-2.0
"""Commands of the package: `python -m learnkit runs FOLDER`, `compare A B`, `plot FOLDER`, `env`, `demo`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from learnkit.core.environment import describe_environment
from learnkit.core.errors import LearnkitError
from learnkit.core.version import VERSION

_FUNCTION = 'package.module:function, or file.py:function'


def main(argv: Sequence[str] | None = None) -> int:
    "Run a command and return the process's exit code."
    parser = _make_parser()
    options, rest = parser.parse_known_args(argv)
    if rest and options.command != 'demo':
        parser.error(f'unrecognized arguments: {" ".join(rest)}')
    try:
        return _run(options, rest)
    except LearnkitError as e:
        print(f'{type(e).__name__}: {e}', file=sys.stderr)
        return 1


def _make_parser() -> argparse.ArgumentParser:
    "Return the parser of the commands; the demo has its own."
    parser = argparse.ArgumentParser(
        prog='python -m learnkit', description='A training loop for PyTorch.', allow_abbrev=False
    )
    parser.add_argument('--version', action='version', version=f'learnkit {VERSION}')
    commands = parser.add_subparsers(dest='command', required=True, metavar='COMMAND')
    runs = commands.add_parser('runs', help='print the checkpoints, history and end of runs')
    runs.add_argument('folder', help='folder of a run, or of several')
    compare = commands.add_parser('compare', help='print the histories of two runs side by side')
    compare.add_argument('a', help='folder of a run')
    compare.add_argument('b', help='folder of the other run')
    compare.add_argument(
        '--make',
        metavar='NAME',
        help=f'f(folder) -> Learner: find the first difference; {_FUNCTION}',
    )
    compare.add_argument(
        '--fit',
        metavar='NAME',
        help=f'f(learn, resume=...) that trained, if not fit(n); {_FUNCTION}',
    )
    plot = commands.add_parser('plot', help='draw the losses and the history of a run')
    plot.add_argument('folder', help='folder of a run')
    plot.add_argument('--output', metavar='FILE', help='default: history.png in the folder')
    commands.add_parser('env', help='print versions and devices, for bug reports')
    commands.add_parser('demo', help='train on handwritten digits; demo --help', add_help=False)
    return parser


def _run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    "Run the command, and return the exit code."
    if options.command == 'demo':
        return _run_demo(rest)
    if options.command == 'env':
        print(describe_environment())
    elif options.command == 'compare':
        _compare(options)
    else:
        _show(options)
    return 0


def _run_demo(arguments: Sequence[str]) -> int:
    import torch

    from learnkit import demo

    torch.set_num_threads(1)  # a second thread does not speed up images this small
    return demo.main(arguments)


def _show(options: argparse.Namespace) -> None:
    "Print the runs of a folder, or draw one."
    from learnkit.debug.runs import describe_run, find_run, find_runs, plot_run

    if options.command == 'plot':
        output = options.output or Path(options.folder, 'history.png')
        print(plot_run(find_run(options.folder), output))
    else:
        print('\n\n\n'.join(map(describe_run, find_runs(options.folder))))


def _compare(options: argparse.Namespace) -> None:
    "Print two histories, and with `--make` the first difference of the runs."
    from learnkit.debug.difference import first_difference
    from learnkit.debug.runs import compare_histories, find_run, load_function

    make, fit = (name and load_function(name) for name in (options.make, options.fit))
    print(compare_histories(find_run(options.a), find_run(options.b)))
    if make:
        found = first_difference(options.a, options.b, make=make, fit=fit)
        print(f'\n{found or "The records of both runs are equal."}')


if __name__ == '__main__':
    sys.exit(main())
