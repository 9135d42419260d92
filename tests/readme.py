"""Run README as it stands, in a fresh clone and a fresh environment: `python -m tests.readme`.

The first set-up command makes the environment, in which each block of Python has to print the block
of text behind it. Times of epochs may differ, and numbers by what a machine rounds. With `--proofs`
the second set-up command makes another environment, in which each command behind the word "Proof"
has to succeed; this takes half an hour. Only what is committed is tried.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import isclose
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(r'^```(\w+)\n(.*?)^```$', re.DOTALL | re.MULTILINE)
_PROOF = re.compile(r'Proof: `([^`]+)`')
_TIME = re.compile(r'\b\d\d:\d\d\b')


def read_blocks(text: str) -> list[tuple[str, str]]:
    "Return the blocks of Python of a page, each with the text that it has to print."
    blocks = _BLOCK.findall(text)
    pairs = pairwise(blocks)
    return [
        (code, printed)
        for (language, code), (following, printed) in pairs
        if (language, following) == ('python', 'text')
    ]


def read_set_up(text: str) -> list[str]:
    "Return the set-up commands of a page: the lines of its block of shell commands."
    (commands,) = [code for language, code in _BLOCK.findall(text) if language == 'sh']
    return commands.splitlines()


def read_proofs(text: str) -> list[str]:
    "Return the commands that prove claims of a page."
    return _PROOF.findall(text)


def make_clone(folder: Path, command: str) -> dict[str, str]:
    "Clone the repository, run a set-up command in the clone, and return variables with its environment first in PATH."
    subprocess.run(['git', 'clone', '-q', str(ROOT), str(folder)], check=True)
    if not run(command, folder, os.environ):
        raise SystemExit(f'failed: {command}')
    files = (path for path in (folder / '.venv').rglob('*') if not path.is_symlink())
    size = sum(path.stat().st_size for path in files if path.is_file())
    print(f'the environment has {size / 1e9:.1f} GB', flush=True)
    programs = f'{folder / ".venv" / "bin"}{os.pathsep}{os.environ["PATH"]}'
    own = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    return own | {'PATH': programs}


def run(command: str, folder: Path, environment: Mapping[str, str]) -> bool:
    "Run a command, print its time, and return True if it succeeded."
    start = perf_counter()
    done = subprocess.run(command, shell=True, cwd=folder, env=dict(environment), check=False)
    result = 'passed' if done.returncode == 0 else f'exit code {done.returncode}'
    print(f'{result}, {perf_counter() - start:.0f} s: {command}', flush=True)
    return done.returncode == 0


def prints(code: str, expected: str, environment: Mapping[str, str]) -> bool:
    "Run a program in an empty folder, and return True if it prints what is expected."
    start = perf_counter()
    with TemporaryDirectory() as folder:
        command = ['python', '-c', code]
        done = subprocess.run(
            command, cwd=folder, env=dict(environment), capture_output=True, text=True, check=False
        )
    words = [_TIME.sub('00:00', printed).split() for printed in (done.stdout, expected)]
    is_equal = len(words[0]) == len(words[1]) and all(map(is_close, *words))
    title = code.strip().splitlines()[-1]
    seconds = perf_counter() - start
    print(f'{"equal" if is_equal else "DIFFERENT"}, {seconds:.0f} s: {title}', flush=True)
    if not is_equal:
        print(f'--- expected\n{expected}--- printed\n{done.stdout}{done.stderr}', flush=True)
    return is_equal


def is_close(word: str, other: str) -> bool:
    "Return True for equal words, and for numbers that another machine may have rounded otherwise."
    try:
        return isclose(float(word), float(other), rel_tol=0.05, abs_tol=0.02)
    except ValueError:
        return word == other


def main(argv: Sequence[str] | None = None) -> int:
    "Run README, and return 1 if a part of it does not hold."
    parser = argparse.ArgumentParser('python -m tests.readme', description=__doc__)
    parser.add_argument('--proofs', action='store_true', help='run the proofs, too')
    options = parser.parse_args(argv)
    text = (ROOT / 'README.md').read_text('utf-8')
    demo, develop = read_set_up(text)
    with TemporaryDirectory() as folder:
        environment = make_clone(Path(folder, 'demo'), demo)
        held = [prints(code, expected, environment) for code, expected in read_blocks(text)]
        if options.proofs:
            install = develop.rpartition(' && ')[0]  # without the tests, which take long
            clone = Path(folder, 'develop')
            environment = make_clone(clone, install)
            held += [run(command, clone, environment) for command in read_proofs(text)]
    print(f'{sum(held)} of {len(held)} hold')
    return 0 if all(held) else 1


if __name__ == '__main__':
    sys.exit(main())
