"""Try learnkit with everything of a kind that the installed libraries have, and write what was found into docs/.

    python -m tests.sweeps                                 # every family, of the libraries that are installed
    python -m tests.sweeps --families data,optimizers      # of some
    python -m tests.sweeps --libraries webdataset,litdata  # of some; '' stands for code without any library
    python -m tests.sweeps --only shuffled                 # those with this word in their name
    python -m tests.sweeps --write                         # and the tables into docs/

Verdicts are kept in .peers/sweeps; the tables have the last verdict of each. `--write` refuses to start if a table
would lose rows."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tests.helpers.forks import start
from tests.peers.rows import import_torchvision
from tests.sweeps.families import FAMILIES, Family
from tests.sweeps.verdicts import (
    Verdict,
    find_lost,
    find_version,
    forget_others,
    load_verdicts,
    read_between,
    save_verdicts,
    write_between,
)

TIMEOUT_S = 3600  # of a library


def judge_library(family: Family, library: str, only: str) -> list[Verdict]:
    "Judge what a library has in a process that has imported it, from which all runs are forked."

    def judge_all() -> list[dict[str, str]]:
        if module := family.modules.get(library):
            import_module(module)
        found: list[Verdict] = []
        for subject in family.load(library):
            if only not in subject.name:
                continue
            # a folder for each, since a kill leaves the files of a library behind
            with TemporaryDirectory(prefix='sweep-', ignore_cleanup_errors=True) as folder:
                verdicts = family.judge(subject, Path(folder))
            save_verdicts(family.name, verdicts)
            found += verdicts
        if not only:
            forget_others(family.name, library, (verdict.title for verdict in found))
        return [asdict(verdict) for verdict in found]

    return _run_apart(judge_all)


def _run_apart(judge_all: Callable[[], list[dict[str, str]]]) -> list[Verdict]:
    with start(judge_all) as child:
        if child.wait(TIMEOUT_S):
            raise child.error(f'ended with {child.code}')
        print(child.stdout, end='', flush=True)
        return [Verdict(**values) for values in child.result]


def choose_libraries(family: Family, args: Any) -> list[str]:
    "Return the libraries of a family that are chosen and installed."
    names = None if args.libraries is None else args.libraries.split(',')
    chosen = [library for library in family.libraries if names is None or library in names]
    return [library for library in chosen if find_version(library) is not None]


def describe_family(family: Family) -> tuple[str, str]:
    "Return the counts and the table of the last verdicts of a family."
    verdicts = [v for v in load_verdicts(family.name) if v.library in family.libraries]
    verdicts.sort(key=lambda verdict: family.libraries.index(verdict.library))
    return family.describe(verdicts)


def find_lost_rows(family: Family, args: Any) -> list[str]:
    "Return the libraries with subjects in the table of a page that are neither run nor among the kept verdicts."
    renewed = [] if args.only else choose_libraries(family, args)
    written = read_between(family.page, *family.find_lines())
    lost = find_lost(written, describe_family(family)[1], renewed)
    return [library or 'no library' for library in lost if library in family.libraries]


def check_nothing_is_lost(families: Sequence[Family], args: Any) -> None:
    "Exit if a table would lose rows."
    lost = {family.name: find_lost_rows(family, args) for family in families}
    lines = [f'{name}: {", ".join(libraries)}' for name, libraries in lost.items() if libraries]
    if not lines:
        return
    others = ','.join(name for name, libraries in lost.items() if not libraries)
    fix = f', or pass `--families {others}`' if others else ''
    summary = f'--write would lose rows. Install these libraries and run them whole{fix}.'
    raise SystemExit('\n  '.join([summary, *lines]))


def run_family(family: Family, args: Any) -> int:
    "Run the sweep of a family and print its table; return the number of verdicts that are wrong."
    began = time.monotonic()
    for library in choose_libraries(family, args):
        judge_library(family, library, args.only)
    counts, table = describe_family(family)
    print(f'{table}\n{counts} {(time.monotonic() - began) / 60:.1f} minutes')
    if args.write:
        start_line, end_line = family.find_lines()
        write_between(family.page, start_line, end_line, f'{counts}\n\n{table}')
    verdicts = load_verdicts(family.name)
    return sum(v.verdict == 'WRONG' for v in verdicts if v.library in family.libraries)


def main() -> int:
    "Run the chosen families; return the number of verdicts that are wrong."
    parser = argparse.ArgumentParser('python -m tests.sweeps')
    parser.add_argument('--families', default=','.join(FAMILIES), help='with commas')
    parser.add_argument('--libraries', help='names of distributions, with commas')
    parser.add_argument('--only', default='', help='part of the names of what is tried')
    parser.add_argument('--write', action='store_true', help='write the tables into the pages')
    args = parser.parse_args()
    families = [FAMILIES[name] for name in args.families.split(',')]
    if args.write:
        check_nothing_is_lost(families, args)
    torch.set_num_threads(1)
    if find_version('torchvision') is not None:
        import_torchvision()  # for libraries that import torchvision
    return sum(run_family(family, args) for family in families)


if __name__ == '__main__':
    sys.exit(1 if main() else 0)
