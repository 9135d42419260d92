"""Build the site, for tests of its files and for tests in a browser."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build() -> Path:
    "Build the site as `make docs` does, from changed files only; return the folder of its pages."
    for name in ('sphinx', 'myst_nb', 'furo'):
        pytest.importorskip(name)
    folder = ROOT / 'docs/_build'
    places = '-d', folder / 'doctrees', ROOT / 'docs', folder / 'html'
    command = map(str, [sys.executable, '-m', 'sphinx', '-W', '--keep-going', '-q', *places])
    done = subprocess.run(list(command), capture_output=True, text=True, timeout=600)
    output = done.stdout + done.stderr
    # else the next build would not warn again
    if output.strip():
        shutil.rmtree(folder / 'doctrees', ignore_errors=True)
    assert done.returncode == 0 and not output.strip(), output
    return folder / 'html'
