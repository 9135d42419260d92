"""Virtual environments for other packages, on top of the current environment.

A package is installed without its dependencies. Packages of the current environment are visible through a `.pth` file;
list other dependencies among the requirements."""

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
    "Create the environment `name` with these packages; return pip's last line for each package that fails."
    create_empty(FOLDER / name)
    failed = []
    for requirement in requirements:
        error = install(FOLDER / name, requirement)
        if error is not None:
            failed.append(f'{requirement}: {error}')
    return failed


def create_empty(folder: Path) -> None:
    "Create an environment, or empty an existing one; the packages of the current environment are visible in it."
    venv.create(folder, clear=True, with_pip=False)
    packages = next(folder.glob('lib/python*/site-packages'))
    lines = [f'import site; site.addsitedir({path!r})\n' for path in site.getsitepackages()]
    (packages / 'project.pth').write_text(''.join(lines), 'utf-8')


def install(
    folder: Path,  # folder of the environment
    *requirements: str,  # packages to install, without their dependencies
) -> str | None:
    "Install packages into an environment; return pip's last line if pip fails, else None."
    pip = [sys.executable, '-m', 'pip', '--python', str(folder / 'bin' / 'python')]
    options = ['install', '-q', '--no-deps', '--retries', '1', '--disable-pip-version-check']
    done = subprocess.run(
        [*pip, *options, *requirements], capture_output=True, text=True, check=False
    )
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


def continue_in(name: str, module: str, argv: list[str]) -> None:
    "Replace this process by the same module in the environment `name`, if it exists."
    folder = FOLDER / name
    python = folder / 'bin' / 'python'
    if python.exists() and Path(sys.prefix) != folder:
        os.environ['PYTHONPATH'] = str(ROOT)
        os.execv(python, [str(python), '-m', module, *argv])
