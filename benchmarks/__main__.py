"""Run the quick set of every benchmark: `python -m benchmarks`, in less than 3 minutes on two cores.

It measures few subjects in few rounds. Each module (`python -m benchmarks.step --help`) measures every installed
library. With `--write`, the tables of `docs/performance.md` are measured in full, and written
(`benchmarks/page.py`)."""

from __future__ import annotations

import sys

from benchmarks import checkpoint, cli, imports, loader, memory, page, step
from benchmarks.environments import continue_in

QUICK = {
    'a': ['raw', 'learnkit-bare', 'learnkit', 'learnkit-compiled', 'fastai'],
    'b': ['raw', 'raw-train', 'learnkit', 'fastai'],
    'cnn': ['raw', 'learnkit', 'fastai'],
    'callbacks': ['raw', 'learnkit', 'learnkit-idle1000', 'learnkit-handlers50'],
    'memory': ['raw-freed', 'raw', 'learnkit', 'fastai'],
    'imports': ['raw', 'raw-import', 'learnkit', 'fastai'],
    'rows': ['torch', 'learnkit', 'fastai'],
    'save-stall': ['learnkit-blocking', 'learnkit-background', 'safe', 'copy'],
    'save-lost': ['learnkit-blocking', 'learnkit-background'],
}


def main(argv: list[str] | None = None) -> int:
    "Measure the quick set, print its tables, and return the exit status."
    argv = sys.argv[1:] if argv is None else argv
    parser = cli.options('python -m benchmarks', __doc__, rounds=3)
    parser.add_argument('--write', action='store_true', help='write the tables of the page')
    parser.add_argument('--quick', action='store_true', help='with --write: one round of each')
    parser.add_argument(
        '--tables',
        type=cli.names_of(list(page.TABLES)),
        default=list(page.TABLES),
        metavar='NAME,...',
        help=f'with --write: of {", ".join(page.TABLES)}',
    )
    args = parser.parse_args(argv)
    if args.write:
        continue_in('tasks', 'benchmarks', argv)
        page.write_tables(args.tables, rounds=1 if args.quick else page.ROUNDS)
        return 0
    known = {
        **step.WORKLOADS,
        **memory.WORKLOADS,
        **imports.WORKLOADS,
        **loader.WORKLOADS,
        **checkpoint.WORKLOADS,
    }
    return cli.run(
        [(known[name], subjects) for name, subjects in QUICK.items()], args.rounds, args.json
    )


if __name__ == '__main__':
    sys.exit(main())
