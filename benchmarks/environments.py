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

__all__ = ['FOLDER', 'continue_in', 'create_empty', 'install', 'make_environment']

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / '.peers'


def make_environment(name: str, requirements: Iterable[str]) -> list[str]:
    "Make the environment `name` with these packages; return pip's last line for each that cannot be installed."
    create_empty(FOLDER / name)
    failed = []
    for requirement in requirements:
        error = install(FOLDER / name, requirement)
        if error is not None:
            failed.append(f'{requirement}: {error}')
    return failed


def create_empty(folder: Path) -> None:
    "Make an environment, or empty one that exists, which sees the packages of the one that runs this."
    venv.create(folder, clear=True, with_pip=False)
    packages = next(folder.glob('lib/python*/site-packages'))
    lines = [f'import site; site.addsitedir({path!r})\n' for path in site.getsitepackages()]
    (packages / 'project.pth').write_text(''.join(lines), 'utf-8')


def install(
    folder: Path,  # of the environment
    *requirements: str,  # installed without their dependencies
) -> str | None:
    "Install packages into an environment; return pip's last line if pip fails, else None."
    pip = [sys.executable, '-m', 'pip', '--python', str(folder / 'bin' / 'python')]
    options = ['install', '-q', '--no-deps', '--retries', '1', '--disable-pip-version-check']
    done = subprocess.run(
        [*pip, *options, *requirements], capture_output=True, text=True, check=False
    )
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


def continue_in(name: str, module: str, argv: list[str]) -> None:
    "Replace this process by the same module in the environment `name`, if there is one."
    folder = FOLDER / name
    python = folder / 'bin' / 'python'
    if python.exists() and Path(sys.prefix) != folder:
        os.environ['PYTHONPATH'] = str(ROOT)
        os.execv(python, [str(python), '-m', module, *argv])
