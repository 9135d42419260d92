"""Run the quick set of every benchmark: `python -m benchmarks`, in less than 3 minutes on two cores.

It measures few subjects in few rounds. Each module (`python -m benchmarks.step --help`) measures every installed
library."""

from __future__ import annotations

import sys

from benchmarks import checkpoint, cli, imports, loader, memory, step

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
    args = cli.options('python -m benchmarks', __doc__, rounds=3).parse_args(argv)
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
