"""The package as a whole: imported modules, import order, public names, README and metadata."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from configparser import ConfigParser
from functools import cache
from graphlib import TopologicalSorter
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import learnkit
from benchmarks import step
from benchmarks.subjects import SUBJECTS, Task
from tests.helpers.fresh import OPTIMIZER_MODULES, output_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / 'learnkit'
NAMES = Path(__file__).with_name('public_names.txt')

# A package imports only from those before it, in functions and for type checkers as well; `learnkit` is the package's
# own `__init__`.
PACKAGES = [
    'core',
    'optim',
    'losses',
    'data',
    'metrics',
    'engine',
    'checkpoint',
    'distributed',
    'inference',
    'callbacks',
    'monitors',
    'loggers',
    'debug',
    'learner',
    'sklearn',
    'interop',
    'learnkit',
    'testing',
    'demo',
    'all',
    '__main__',
]


# modules that other packages build on: they import from `core` alone
BASICS = {'distributed.comm', 'distributed.dtensor', 'engine.denominator'}


class Import(NamedTuple):
    importer: str  # dotted name below the package, 'learnkit' for the package itself
    imported: str  # the same


def run(*arguments: str, cwd: Path = ROOT) -> str:
    "Run a fresh Python process with `arguments` in `cwd`, and return its output."
    env = os.environ | {'PYTHONPATH': str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def modules() -> dict[str, Path]:
    "Return every module of the package by its dotted name below the package, with its file."
    parts = {
        path: path.relative_to(PACKAGE).with_suffix('').parts
        for path in sorted(PACKAGE.rglob('*.py'))
    }
    return {
        '.'.join(part for part in of if part != '__init__') or 'learnkit': path
        for path, of in parts.items()
    }


def layer(module: str) -> str:
    return 'core' if module in BASICS else module.split('.')[0]


# ------------------------------------------------------------------------------------- importing it


def loaded_by(statement: str) -> set[str]:
    "Return the modules in memory after `statement`, in a fresh process in which a warning is an error."
    return set(output_of(f'{statement}; import sys; print(*sys.modules)').split())


def test_import_loads_nothing_heavy() -> None:
    added = loaded_by('import learnkit') - loaded_by('import torch')
    libraries = {name.split('.')[0] for name in added} - set(sys.stdlib_module_names)
    assert libraries <= {'learnkit', 'fastcore', 'numpy', 'lazy_loader'}

    heavy = {
        'learnkit.debug.doc',
        'torch._dynamo',
        'torch._inductor',
        'multiprocessing.pool',
        'asyncio',
        'unittest',
        'sqlite3',
    }
    assert not heavy & added


def test_import_touches_no_gpu_and_no_signal_handler() -> None:
    output_of(
        'import signal, torch\n'
        'def handlers(): return signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)\n'
        'before = handlers()\n'
        'import learnkit\n'
        'assert not torch.cuda.is_initialized()\n'
        'assert handlers() == before'
    )


def test_import_draws_no_random_number() -> None:
    output_of(
        'import random, numpy, torch\n'
        'def state(): return random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()\n'
        'before = state()\n'
        'import learnkit\n'
        'assert state() == before'
    )


# ------------------------------------------------------------------------------------------- layers


@cache
def imports() -> tuple[Import, ...]:
    "Return every import between modules of the package, including lazy imports and imports for type checkers."
    known = modules()
    return tuple(
        one
        for name, path in known.items()
        for one in imports_of(name, path.read_text('utf-8'), known)
    )


def imports_of(name: str, source: str, known: dict[str, Path]) -> list[Import]:
    "Return the `known` modules that the source of module `name` imports."
    is_package = name == 'learnkit' or any(other.startswith(f'{name}.') for other in known)
    package = [] if name == 'learnkit' else name.split('.') if is_package else name.split('.')[:-1]
    found = [
        target for node in ast.walk(ast.parse(source)) for target in targets(node, package, known)
    ]
    return [Import(name, target) for target in found if target != name]


def targets(node: ast.AST, package: list[str], known: dict[str, Path]) -> list[str]:
    "Return the modules of the package that an import statement names."
    if isinstance(node, ast.Import):
        names = [alias.name.split('.') for alias in node.names]
        return ['.'.join(parts[1:]) or 'learnkit' for parts in names if parts[0] == 'learnkit']
    if not isinstance(node, ast.ImportFrom):
        return []

    module = node.module.split('.') if node.module else []
    if node.level:
        base = package[: len(package) - node.level + 1] + module
    elif module[:1] == ['learnkit']:
        base = module[1:]
    else:
        return []
    # `from .callbacks import mixup` names a module, `from .loop import Loop` a thing in one
    named = ['.'.join([*base, alias.name]) for alias in node.names]
    return [one if one in known else '.'.join(base) or 'learnkit' for one in named]


def test_every_module_is_in_a_package_of_the_list() -> None:
    assert {layer(name) for name in modules()} == set(PACKAGES)


def test_imports_go_leftwards_only() -> None:
    def place(module: str) -> int:
        return PACKAGES.index(layer(module))

    assert not [f'{a} imports {b}' for a, b in imports() if place(b) > place(a)]


def test_no_import_cycle() -> None:
    graph: dict[str, set[str]] = {name: set() for name in modules()}
    for one in imports():
        graph[one.importer].add(one.imported)
    TopologicalSorter(graph).prepare()  # raises CycleError, which shows the cycle


def test_the_map_shows_the_packages_in_their_order() -> None:
    drawn = (ROOT / 'docs' / 'architecture.svg').read_text('utf-8')
    boxes = re.findall(r'class="package" x="([\d.]+)" y="([\d.]+)">(\w+)<', drawn)
    order = sorted(boxes, key=lambda box: (-float(box[1]), float(box[0])))
    assert [*(name for _, _, name in order), '__main__'] == PACKAGES


# ------------------------------------------------------------------------------------- files, names


def test_types_ship() -> None:
    assert (PACKAGE / 'py.typed').exists()


def test_every_module_declares_what_is_public() -> None:
    files = [name for name, path in modules().items() if path.name != '__init__.py']
    assert not [
        name
        for name in files
        if not hasattr(importlib.import_module(f'learnkit.{name}'), '__all__')
    ]


def test_the_notebook_line_brings_fastcore_as_fastai_does() -> None:
    exported = importlib.import_module('learnkit.all')
    names = 'L patch store_attr delegates noop first listify ifnone GetAttr AttrDict parallel'
    assert set(names.split()) <= set(exported.__all__)
    assert hasattr(Path, 'ls')
    assert exported.defaults is importlib.import_module('learnkit').defaults


def test_the_notebook_line_brings_what_users_call_and_no_inner_parts() -> None:
    names = set(importlib.import_module('learnkit.all').__all__)
    assert {
        'SpeedMonitor',
        'CSVLogger',
        'WandbLogger',
        'PeriodicData',
        'Evaluator',
        'MetricProperties',
        'from_composer',
        'from_ksuit',
        'log_images',
        'log_text',
        'ExportForInference',
        'BestMetric',
    } <= names
    assert not names & {
        'fit_one_cycle',
        'lr_find',
        'as_metrics',
        'check_column',
        'dry_run',
        'measures_batches',
        'hidden_matrices',
        'Budget',
    }


PUBLIC = [
    '',
    '.callbacks',
    '.monitors',
    '.metrics',
    '.losses',
    '.loggers',
    '.optim',
    '.data',
    '.testing',
    '.distributed',
    '.interop',
    '.sklearn',
]


def test_public_names() -> None:
    modules = [importlib.import_module(f'learnkit{path}') for path in PUBLIC]
    names = [f'{module.__name__}.{name}' for module in modules for name in sorted(module.__all__)]
    if os.environ.get('LEARNKIT_UPDATE_NAMES'):
        NAMES.write_text('\n'.join(names) + '\n', 'utf-8')

    assert NAMES.exists(), 'write it with LEARNKIT_UPDATE_NAMES=1 in the environment'
    assert names == NAMES.read_text('utf-8').split(), (
        'meant? then write it again, with LEARNKIT_UPDATE_NAMES=1'
    )
    assert len(names) == len(set(names))


# --------------------------------------------------------------------------------- README, metadata


def fenced(language: str, section: str = '') -> list[str]:
    "Return README's code blocks of a language, of one section or of all."
    text = (ROOT / 'README.md').read_text('utf-8')
    parts = [part for part in re.split(r'^## ', text, flags=re.M) if part.startswith(section)]
    return re.findall(rf'^```{language}\n(.*?)^```', '\n'.join(parts), flags=re.M | re.S)


def test_readme_has_two_setup_commands() -> None:
    commands = fenced('sh')
    assert commands == fenced('sh', 'Set-up\n')
    assert [command.count('\n') for command in commands] == [1, 1]
    ends = ['python -m learnkit demo', 'pytest -n 2 --dist worksteal']
    for command, extra, last in zip(commands, ['demo', 'dev'], ends, strict=True):
        assert (
            command
            == f"python3 -m venv .venv && .venv/bin/pip install -e '.[{extra}]' && .venv/bin/{last}\n"
        )


def rows_of(table: str) -> list[list[float]]:
    "Return the numbers of a table of epochs, without the times."
    return [[float(cell) for cell in line.split()[:-1]] for line in table.splitlines()[1:]]


def test_readme_examples_run_and_print_what_it_shows(tmp_path: Path) -> None:
    pytest.importorskip('sklearn')
    pytest.importorskip('matplotlib')
    examples, (table, change) = fenced('python'), fenced('text')
    assert len(examples) == 4
    printed = [output_of(code, cwd=tmp_path, has=OPTIMIZER_MODULES) for code in examples]
    assert (tmp_path / 'digits.png').stat().st_size > 5000
    assert printed[0].split()[:5] == table.split()[:5]
    for row, expected in zip(rows_of(printed[0]), rows_of(table), strict=True):
        assert row == pytest.approx(expected, rel=0.05, abs=0.02)  # sums are rounded by the machine
    assert printed[1] == change
    assert [len(rows_of(text)) for text in printed[2:]] == [3, 3]


def settings() -> dict[str, str]:
    "Return the values of settings.ini."
    ini = ConfigParser(interpolation=None)
    ini.read_string((ROOT / 'settings.ini').read_text('utf-8'))
    return dict(ini['DEFAULT'])


def test_version_matches_settings() -> None:
    assert learnkit.__version__ == settings()['version']


def test_setup_reads_settings() -> None:
    pytest.importorskip('setuptools')
    output_lines = run('setup.py', '--name', '--version', '--description').splitlines()
    assert output_lines == [settings()[key] for key in ('lib_name', 'version', 'description')]


def test_installed_metadata_matches_settings() -> None:
    try:
        installed = metadata.metadata(settings()['lib_name'])
    except metadata.PackageNotFoundError:
        pytest.skip('learnkit is not installed')
    cfg = settings()
    extras = {key.removesuffix('_requirements') for key in cfg if key.endswith('_requirements')}

    assert installed['Version'] == cfg['version'], 'settings.ini has changed: install again'
    assert installed['Requires-Python'] == f'>={cfg["min_python"]}'
    assert set(installed.get_all('Provides-Extra')) == extras


def test_torch_has_no_upper_pin() -> None:
    (torch_line,) = [
        line for line in settings()['requirements'].split() if line.startswith('torch')
    ]
    assert re.fullmatch(r'torch>=[\d.]+', torch_line)


# --------------------------------------------------------------------------------------- benchmarks


@pytest.mark.parametrize(
    'subject', ['learnkit-bare', 'learnkit', 'learnkit-idle200', 'learnkit-handlers50']
)
def test_benchmarks_train_alike(subject: str) -> None:
    def weights(name: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        task = Task(n_train=8, n_valid=0, skip=3)
        SUBJECTS['a'][name](task)(2)
        assert len(task.train.began_s) == len(task.train.ended_s) == 2
        return [p.detach() for p in task.model.parameters()]

    for expected, got in zip(weights('raw'), weights(subject), strict=True):
        assert torch.equal(expected, got)


@pytest.mark.full
def test_benchmark_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / 'step.json'
    options = [
        '--workloads',
        'a',
        '--frameworks',
        'learnkit-bare',
        '--rounds',
        '1',
        '--json',
        str(file),
    ]
    assert step.main(options) == 0
    (table,) = json.loads(file.read_text('utf-8'))['tables']
    assert [row['subject'] for row in table['rows']] == ['raw', 'learnkit-bare']
    assert all(row['median'] > 0 for row in table['rows'])
    assert 'learnkit-bare' in capsys.readouterr().out


def test_metrics_losses_and_optimizers_are_found_in_the_package_too() -> None:
    inner = {
        'Mean',
        'BaseLoss',
        'as_metrics',
        'check_column',
        'dry_run',
        'measures_batches',
        'hidden_matrices',
    }
    for module in map(
        importlib.import_module,
        ('learnkit.metrics', 'learnkit.losses', 'learnkit.optim.optimizers'),
    ):
        for name in {*module.__all__} - inner:
            assert getattr(learnkit, name) is getattr(module, name), name
    output_of('from learnkit import F1Score, Lamb, FocalLoss, Recall, accuracy_multi')


@pytest.mark.parametrize(
    'package',
    [
        'learnkit',
        'learnkit.callbacks',
        'learnkit.monitors',
        'learnkit.metrics',
        'learnkit.optim',
        'learnkit.data',
    ],
)
def test_every_lazy_name_exists(package: str) -> None:
    module = importlib.import_module(package)
    assert all(getattr(module, name) is not None for name in module.__all__)
    with pytest.raises(AttributeError, match='nothing_of_the_kind'):
        _ = module.nothing_of_the_kind
