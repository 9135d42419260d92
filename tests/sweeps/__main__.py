"""Try learnkit with everything of a kind that the installed libraries have, and write what was found into docs/.

    python -m tests.sweeps                                 # every loader of the libraries that are installed
    python -m tests.sweeps --libraries webdataset,litdata  # of some; '' stands for code without any library
    python -m tests.sweeps --only shuffled                 # those with this word in their name
    python -m tests.sweeps --write                         # and the table into docs/checkpoints.md

Verdicts are kept in .peers/sweeps; the table has the last verdict of each."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tests.helpers.forks import start
from tests.peers.rows import define_torchvision_operators
from tests.sweeps.data import judge
from tests.sweeps.loaders import load_loaders
from tests.sweeps.verdicts import (
    ROOT,
    WRONG,
    Subject,
    Verdict,
    count_verdicts,
    find_version,
    load_verdicts,
    make_table,
    save_verdicts,
    select_installed,
    write_between,
)

PAGE = ROOT / 'docs' / 'checkpoints.md'
# what takes seconds to import
MODULES = {
    'accelerate': 'accelerate',
    'datasets': 'datasets',
    'fastai': 'fastai.data.all',
    'lightning': 'lightning',
    'litdata': 'litdata',
    'monai': 'monai.data',
    'mosaicml-streaming': 'streaming',
    'pytorch-forecasting': 'pytorch_forecasting',
    'skorch': 'skorch.dataset',
    'tensordict': 'tensordict',
    'torch-geometric': 'torch_geometric.loader',
    'torchdata': 'torchdata.nodes',
    'torchrl': 'torchrl.data',
    'webdataset': 'webdataset',
}
START, END = '<!-- loaders table -->', '<!-- end of loaders table -->'


def judge_library(loaders: list[Subject]) -> list[Verdict]:
    "Judge the loaders of a library in a process that has imported it, from which all runs are forked."

    def judge_all() -> list[dict[str, str]]:
        if module := MODULES.get(loaders[0].library):
            import_module(module)
        verdicts = []
        for loader in loaders:
            # a folder for each, since a kill leaves the files of a library behind
            with TemporaryDirectory(prefix='sweep-', ignore_cleanup_errors=True) as folder:
                verdicts.append(asdict(judge(loader, Path(folder))))
        return verdicts

    with start(judge_all) as child:
        if child.wait(3600):
            raise child.error(f'ended with {child.code}')
        print(child.stdout, end='', flush=True)
        return [Verdict(**values) for values in child.result]


def main() -> int:
    "Run the sweep and print the table; return the number of loaders that differ in silence."
    parser = argparse.ArgumentParser('python -m tests.sweeps')
    parser.add_argument('--libraries', help='names of distributions, with commas')
    parser.add_argument('--only', default='', help='part of the names of loaders')
    parser.add_argument('--write', action='store_true', help='write the table into the page')
    args = parser.parse_args()
    torch.set_num_threads(1)
    if find_version('torchvision') is not None:
        define_torchvision_operators()  # for libraries that import torchvision
    loaders = load_loaders()
    chosen = [loader for loader in select_installed(loaders) if args.only in loader.name]
    if args.libraries is not None:
        chosen = [loader for loader in chosen if loader.library in args.libraries.split(',')]
    began = time.monotonic()
    for library in dict.fromkeys(loader.library for loader in chosen):
        of_library = [loader for loader in chosen if loader.library == library]
        save_verdicts('data', judge_library(of_library))
    known = {(loader.library, loader.title) for loader in loaders}
    verdicts = [v for v in load_verdicts('data') if (v.library, v.title) in known]
    counts = count_verdicts(verdicts, 'loaders')
    table = make_table(loaders, verdicts, 'loaders')
    print(f'{table}\n{counts} {(time.monotonic() - began) / 60:.1f} minutes')
    if args.write:
        write_between(PAGE, START, END, f'{counts}\n\n{table}')
    return sum(verdict.verdict == WRONG for verdict in verdicts)


if __name__ == '__main__':
    sys.exit(1 if main() else 0)
