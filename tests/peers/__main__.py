"""Run callbacks of other packages in learnkit and in their own trainers, and compare with docs/compatibility.md.

    python -m tests.peers                  # every package; fails where the page says something else
    python -m tests.peers fastai --write   # one package, and write its part of the page
    python -m tests.peers wild --sources FOLDER   # callbacks of users, from copies of their repositories
    python -m tests.peers scripts --sources FOLDER   # programs of Lightning's users, likewise

A package that cannot be installed is skipped and named in the last line, and the exit code is 1 unless
`--allow-skipped` is given. Users' callbacks are left out without their sources."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.environments import ROOT
from tests.peers.environments import (
    NOETHER,
    PEERS,
    SCRIPTS,
    InstallError,
    Peer,
    make_environment,
)
from tests.peers.rows import EQUAL, TOO_FAR, Row
from tests.peers.wild_bench import SOURCES, read_table

PAGE = ROOT / 'docs' / 'compatibility.md'
END = '<!-- end -->'
HEAD = (
    '| | runs unchanged | same keys | same numbers | what differs, and why |\n|---|---|---|---|---|'
)


WILD = Peer('wild')  # users' callbacks have a part of the page, too


class BenchError(Exception):
    "A bench ended with an error; the message is its output."


def run_bench(peer: Peer, bench: str) -> list[Row]:
    "Run a bench in a peer's environment and return its rows."
    python = make_environment(peer)
    with TemporaryDirectory() as folder:
        file = Path(folder) / 'rows.json'
        environment = os.environ | {
            'PYTHONPATH': str(ROOT),
            'MPLBACKEND': 'Agg',
            'OMP_NUM_THREADS': '1',
        }
        done = subprocess.run(
            [python, '-m', 'tests.peers.rows', bench, file],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise make_error(done.stdout)
        return [Row(**row) for row in json.loads(file.read_text('utf-8'))]


def make_error(output: str) -> Exception:
    "Return the error of a bench: a library that the project's environment lacks, or the whole output."
    last = (output.strip().splitlines() or [''])[-1]
    if last.startswith('ModuleNotFoundError: '):
        return InstallError(
            f'{last}. The bench needs the environment of the second set-up command.'
        )
    return BenchError(output)


def table(rows: Sequence[Row]) -> str:
    "Return rows as Markdown: a line that counts them, then a table, for each part."
    blocks = []
    for part in dict.fromkeys(row.part for row in rows):
        shown = [row for row in rows if row.part == part]
        own = [row for row in shown if row.runs is not None]
        count = f'{part}: of {len(own)}, {sum(row.runs for row in own)} run unchanged'
        if any(row.keys is not None for row in own):
            n_keys = sum(bool(row.keys) for row in own)
            n_equal = sum(row.numbers == EQUAL for row in own)
            count += f', {n_keys} have the same keys, {n_equal} equal numbers'
        count += '.'
        lines = [f'| {" | ".join(cells(row))} |' for row in shown]
        blocks.append('\n'.join([count, '', HEAD, *lines]))
    return '\n\n'.join(blocks)


def cells(row: Row) -> list[str]:
    "Return what stands in a line of the table."
    why = row.why.replace('|', r'\|').replace('\n', ' ')
    runs = 'not run' if row.runs is None else yes(row.runs)
    return [f'`{row.callback}`', runs, yes(row.keys), row.numbers, why]


def yes(value: bool | None) -> str:
    if value is None:
        return ''
    return 'yes' if value else '**no**'


def run_wild() -> list[Row]:
    "Return a row for each class of users, and of Noether, from all environments."
    peers = {peer.name: peer for peer in [*PEERS, NOETHER]}
    libraries = dict.fromkeys(case.library for case in read_table()[1])
    return [row for name in libraries for row in run_bench(peers[name], f'wild:{name}')]


def wild_table(rows: Sequence[Row]) -> str:
    "Return counts, the behaviors that users' code relies on, and the classes that differ."
    lines = []
    for part in dict.fromkeys(row.part for row in rows):
        own = [row for row in rows if row.part == part]
        repositories = {row.callback.partition(':')[0] for row in own}
        count = f' from {len(repositories)} repositories' if len(repositories) > 1 else ''
        lines.append(
            f'{part}: of {len(own)}{count}, '
            f'{sum(bool(row.runs) for row in own)} run unchanged, {sum(map(is_equal, own))} have equal numbers.'
        )
    lines += [
        '',
        '| behavior that such code relies on | seen in | classes with equal numbers |',
        '|---|---|---|',
    ]
    lines += [behavior_line(name, text, rows) for name, text in read_table()[0].items()]
    lines += ['', '| not equal | runs | why |', '|---|---|---|']
    lines += [
        f'| `{row.callback}` | {yes(row.runs)} | {row.why} |' for row in rows if not is_equal(row)
    ]
    return '\n'.join(lines)


def is_equal(row: Row) -> bool:
    return row.numbers == EQUAL and bool(row.keys)


def behavior_line(name: str, text: str, rows: Sequence[Row]) -> str:
    own = [row for row in rows if name in row.behaviors]
    packages = dict.fromkeys(row.callback.partition(':')[0].partition('/')[2] for row in own)
    return f'| {text} | {", ".join(packages)} | {sum(map(is_equal, own))} of {len(own)} |'


def begin(peer: Peer) -> str:
    return f'<!-- {peer.name}: written by python -m tests.peers -->'


def replace_part(page: str, peer: Peer, text: str) -> str:
    "Return the page with `text` as a peer's part."
    head, _, rest = page.partition(begin(peer))
    if not rest:
        raise ValueError(f'{PAGE.name} has no line {begin(peer)!r}')
    tail = rest.partition(END)[2]
    return f'{head}{begin(peer)}\n\n{text}\n\n{END}{tail}'


def main(arguments: Sequence[str] | None = None) -> int:
    "Run benches, print their tables, and return 1 if the page does not show them."
    parser = argparse.ArgumentParser('python -m tests.peers', description=__doc__)
    parser.add_argument('names', nargs='*', help='packages; all when left out')
    parser.add_argument('--write', action='store_true', help='write the page')
    parser.add_argument(
        '--allow-skipped', action='store_true', help='accept packages that cannot be installed'
    )
    parser.add_argument('--sources', help="folder with the repositories of users' callbacks")
    options = parser.parse_args(arguments)
    status = 0
    skipped = []
    if options.sources:
        os.environ[SOURCES] = str(Path(options.sources).resolve())
    for peer in [*PEERS, WILD, SCRIPTS]:
        if options.names and peer.name not in options.names:
            continue
        if peer in (WILD, SCRIPTS) and not options.sources:
            print(f'skipped: {peer.name} needs --sources FOLDER, with <owner>+<name> of its table')
            continue
        try:
            rows = run_wild() if peer is WILD else run_bench(peer, peer.name)
        except InstallError as error:
            print(f'skipped: {peer.name} cannot be installed: {error}')
            skipped.append(peer.name)
            continue
        except BenchError as error:
            print(f'{peer.name}: the bench failed\n{error}')
            status = 1
            continue
        text = wild_table(rows) if peer is WILD else table(rows)
        print(f'== {peer.name}\n{text}\n')
        page = PAGE.read_text('utf-8')
        expected = replace_part(page, peer, text)
        if options.write:
            PAGE.write_text(expected, 'utf-8')
        elif page != expected:
            print(f'{PAGE.name} shows something else: python -m tests.peers {peer.name} --write')
            status = 1
        if any(not row.runs or row.numbers == TOO_FAR for row in rows if not row.why):
            print(f'{peer.name}: a row that fails says no reason')
            status = 1
    if skipped:
        print(f'not compared, because they could not be installed: {", ".join(skipped)}')
    return status or int(bool(skipped) and not options.allow_skipped)


if __name__ == '__main__':
    sys.exit(main())
