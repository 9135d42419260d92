"""A virtual environment for packages to compare with, over the one that runs this.

A package is installed without its dependencies. Those that are installed here are seen through a `.pth` file; name the
others among the requirements."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import venv
from collections.abc import Iterable
from pathlib import Path

__all__ = ['FOLDER', 'continue_in', 'make_environment']

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / '.peers'


def make_environment(name: str, requirements: Iterable[str]) -> list[str]:
    "Make the environment `name` with these packages; return pip's last line for each that cannot be installed."
    folder = FOLDER / name
    venv.create(folder, clear=True, with_pip=False)
    packages = next(folder.glob('lib/python*/site-packages'))
    lines = [f'import site; site.addsitedir({path!r})\n' for path in site.getsitepackages()]
    (packages / 'project.pth').write_text(''.join(lines), 'utf-8')
    pip = [sys.executable, '-m', 'pip', '--python', str(folder / 'bin' / 'python')]
    install = ['install', '-q', '--no-deps', '--retries', '1', '--disable-pip-version-check']
    failed = []
    for requirement in requirements:
        done = subprocess.run([*pip, *install, requirement], capture_output=True, text=True)
        if done.returncode:
            failed.append(f'{requirement}: {done.stderr.strip().splitlines()[-1]}')
    return failed


def continue_in(name: str, module: str, argv: list[str]) -> None:
    "Replace this process by the same module in the environment `name`, if there is one."
    folder = FOLDER / name
    python = folder / 'bin' / 'python'
    if python.exists() and Path(sys.prefix) != folder:
        os.environ['PYTHONPATH'] = str(ROOT)
        os.execv(python, [str(python), '-m', module, *argv])
