"""The package as a whole: imported modules, import order, public names, README and metadata."""

import ast
import importlib
import inspect
import os
import re
import sys
from configparser import ConfigParser
from functools import cache
from graphlib import TopologicalSorter
from importlib import metadata
from importlib.util import resolve_name
from pathlib import Path

import pytest
import torch

import learnkit
from benchmarks.subjects import SUBJECTS, Task
from learnkit import Learner
from tests.helpers.fresh import OPTIMIZER_MODULES, output_of
from tests.readme import is_close, read_blocks, read_proofs, read_set_up

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / 'learnkit'
NAMES = Path(__file__).with_name('public_names.txt')

# A package imports only from those before it, in functions and for type checkers as well; `learnkit` is the package's
# own `__init__`.
PACKAGES = (
    'core comm optim losses data metrics engine checkpoint distributed inference callbacks '
    'monitors loggers debug learner sklearn interop learnkit testing demo all __main__'
).split()


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
    return module.split('.')[0]


# --------------------------------------------------------------- methods and their implementations


def implementations() -> dict[str, tuple[str, str]]:
    "Return module and function of each method of the Learner that is implemented elsewhere."
    [learner] = [
        node
        for node in ast.parse((PACKAGE / 'learner.py').read_text('utf-8')).body
        if isinstance(node, ast.ClassDef) and node.name == 'Learner'
    ]
    found = {}
    for method in (node for node in learner.body if isinstance(node, ast.FunctionDef)):
        for call in method.decorator_list:
            if isinstance(call, ast.Call) and ast.unparse(call.func) == 'implemented_in':
                module, *name = [ast.literal_eval(argument) for argument in call.args]
                found[method.name] = module, *(name or [method.name])
    return found


def parameters(function) -> dict[str, str]:
    "Return names and kinds of the parameters of a function or a method, without the Learner."
    _, *found = inspect.signature(function).parameters.values()
    return {p.name: p.kind.name for p in found}


@pytest.mark.parametrize(('method', 'place'), implementations().items())
def test_a_method_and_its_function_have_the_same_parameters(method, place):
    "They are passed by name, so that a parameter added to one of them cannot become another one."
    function = parameters(getattr(importlib.import_module(place[0]), place[1]))
    expected = parameters(getattr(Learner, method))
    if function.get('fit') == 'VAR_KEYWORD':  # passed on to `Learner.fit`
        del function['fit']
        function |= {name: 'KEYWORD_ONLY' for name in expected if name in parameters(Learner.fit)}
    assert set(function) == set(expected)
    by_position = {name for name, kind in function.items() if kind.startswith('POSITIONAL')}
    assert by_position == {name for name, kind in expected.items() if kind == 'POSITIONAL_ONLY'}


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


def test_import_touches_no_gpu_no_signal_handler_and_no_random_number() -> None:
    output_of(
        'import random, signal, numpy, torch\n'
        'def handlers(): return signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)\n'
        'def numbers(): return random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()\n'
        'before = handlers(), numbers()\n'
        'import learnkit\n'
        'assert not torch.cuda.is_initialized()\n'
        'assert (handlers(), numbers()) == before'
    )


# ------------------------------------------------------------------------------------------- layers


@cache
def imports() -> set[tuple[str, str]]:
    "Return every import between modules of the package, in functions and for type checkers as well."
    known = modules()
    found = set()
    for name, path in known.items():
        full = 'learnkit' if name == 'learnkit' else f'learnkit.{name}'
        package = full if path.name == '__init__.py' else full.rpartition('.')[0]
        nodes = [*ast.walk(ast.parse(path.read_text('utf-8')))]
        blocks = [node for node in nodes if isinstance(node, ast.If)]
        typing = [block for block in blocks if ast.unparse(block.test) == 'TYPE_CHECKING']
        for_annotations = [node for block in typing for node in block.body]
        for node in nodes:
            for target in targets(node, package):
                if target == 'learner.Learner' and node in for_annotations:
                    continue
                # `from .callbacks import mixup` names a module, `from .loop import Loop` a thing in one
                parent = target.rpartition('.')[0]
                found.add((name, target if target in known else parent or 'learnkit'))
    return {(importer, imported) for importer, imported in found if importer != imported}


def targets(node: ast.AST, package: str) -> list[str]:
    "Return what an import statement names, as dotted names below the package."
    if not isinstance(node, ast.ImportFrom):
        return []
    base = resolve_name('.' * node.level + (node.module or ''), package)
    if base.split('.')[0] != 'learnkit':
        return []
    return [f'{base}.{alias.name}'.partition('.')[2] for alias in node.names]


def test_every_module_is_in_a_package_of_the_list() -> None:
    assert {layer(name) for name in modules()} == set(PACKAGES)


def test_imports_go_leftwards_only() -> None:
    def place(module: str) -> int:
        return PACKAGES.index(layer(module))

    assert not [f'{a} imports {b}' for a, b in imports() if place(b) > place(a)]


def test_no_import_cycle() -> None:
    graph: dict[str, set[str]] = {name: set() for name in modules()}
    for importer, imported in imports():
        graph[importer].add(imported)
    TopologicalSorter(graph).prepare()  # raises CycleError, which shows the cycle


def test_the_map_shows_the_packages_in_their_order() -> None:
    drawn = (ROOT / 'docs' / 'architecture.svg').read_text('utf-8')
    boxes = re.findall(r'class="package" x="([\d.]+)" y="([\d.]+)">(\w+)<', drawn)
    order = sorted(boxes, key=lambda box: (-float(box[1]), float(box[0])))
    assert [*(name for _, _, name in order), '__main__'] == PACKAGES


# ------------------------------------------------------------------------------------- files, names


def test_types_ship() -> None:
    assert (PACKAGE / 'py.typed').exists()


PUBLIC = (
    '. .callbacks .monitors .metrics .losses .loggers .optim .data .testing .distributed '
    '.interop .sklearn'
).split()


def test_public_names() -> None:
    modules = [importlib.import_module(f'learnkit{path}'.rstrip('.')) for path in PUBLIC]
    names = [f'{module.__name__}.{name}' for module in modules for name in sorted(module.__all__)]
    # names are lazy
    assert all(getattr(module, name) is not None for module in modules for name in module.__all__)
    with pytest.raises(AttributeError, match='nothing_of_the_kind'):
        _ = learnkit.nothing_of_the_kind
    if os.environ.get('LEARNKIT_UPDATE_NAMES'):
        NAMES.write_text('\n'.join(names) + '\n', 'utf-8')

    assert NAMES.exists(), 'write it with LEARNKIT_UPDATE_NAMES=1 in the environment'
    assert names == NAMES.read_text('utf-8').split(), (
        'meant? then write it again, with LEARNKIT_UPDATE_NAMES=1'
    )
    assert len(names) == len(set(names))


COMPLETIONS = """
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell()
line = 'from learnkit.interop import '
for uses_jedi in (False, True):
    shell.Completer.use_jedi = uses_jedi
    with provisionalcompleter():
        print(*(found.text for found in shell.Completer.completions(line, len(line))))
"""


def test_a_notebook_completes_libraries_and_functions_of_interop(tmp_path: Path) -> None:
    "IPython adds the files and folders of a package, and Jedi the names of its source code."
    pytest.importorskip('IPython')
    expected = set('common composer hf hub keras ksuit lightning'.split())
    expected.update(importlib.import_module('learnkit.interop').__all__)
    found, found_by_jedi = map(str.split, output_of(COMPLETIONS, cwd=tmp_path).splitlines())
    assert set(found) == expected
    assert {name for name in found_by_jedi if name[0] != '_'} == expected | {'lazy_loader'}


# public names of metrics and losses that few users need, and that `learnkit` leaves out
FOR_FEW = set('BaseLoss Mean as_metrics check_column dry_run measures_batches'.split())


@pytest.mark.parametrize('package', ['metrics', 'losses', 'optim'])
def test_every_metric_loss_and_optimizer_is_a_name_of_the_package(package: str) -> None:
    names = set(importlib.import_module(f'learnkit.{package}').__all__) - FOR_FEW
    assert not names - set(learnkit.__all__), 'add them to learnkit/__init__.pyi'


def test_one_name_is_one_thing() -> None:
    "In a notebook, `from learnkit.all import *` would take the last of two things with one name."
    things: dict[str, dict[int, str]] = {}
    in_notebook = importlib.import_module('learnkit.all')._MODULES
    public = [importlib.import_module(f'learnkit{path}'.rstrip('.')) for path in PUBLIC]
    of_package = [module for module in in_notebook if module.__name__.startswith('learnkit')]
    for module in {*public, *of_package}:
        for name in module.__all__:
            things.setdefault(name, {})[id(getattr(module, name))] = module.__name__
    twice = {name: sorted(of.values()) for name, of in things.items() if len(of) > 1}
    assert not twice, 'rename one of them'


# --------------------------------------------------------------------------------- README, metadata


def fenced(language: str, section: str = '') -> list[str]:
    "Return README's code blocks of a language, of one section or of all."
    text = (ROOT / 'README.md').read_text('utf-8')
    parts = [part for part in re.split(r'^## ', text, flags=re.M) if part.startswith(section)]
    return re.findall(rf'^```{language}\n(.*?)^```', '\n'.join(parts), flags=re.M | re.S)


def rows_of(table: str) -> list[list[float]]:
    "Return the numbers of a table of epochs, without the times."
    return [[float(cell) for cell in line.split()[:-1]] for line in table.splitlines()[1:]]


def test_readme_examples_run_and_print_what_it_shows(tmp_path: Path) -> None:
    pytest.importorskip('sklearn')
    (fit, trace), (table, change) = fenced('python'), fenced('text')
    printed = output_of(fit, cwd=tmp_path, has=OPTIMIZER_MODULES)
    assert printed.split()[:5] == table.split()[:5]
    for row, expected in zip(rows_of(printed), rows_of(table), strict=True):
        assert row == pytest.approx(expected, rel=0.05, abs=0.02)  # sums are rounded by the machine
    assert output_of(trace, cwd=tmp_path, has=OPTIMIZER_MODULES) == change


def test_the_script_that_runs_readme_finds_its_blocks_and_proofs() -> None:
    text = (ROOT / 'README.md').read_text('utf-8')
    assert read_blocks(text) == [*zip(fenced('python'), fenced('text'), strict=True)]
    assert len(read_set_up(text)) == 2
    proofs = read_proofs(text)
    assert [proof.split()[-1] for proof in proofs] == [
        'tests/faults/test_f01_sigkill_anywhere.py',
        'tests.peers',
    ]
    assert is_close('0.5', '0.51') and not is_close('0.5', '0.6') and not is_close('a', '0.5')


def settings() -> dict[str, str]:
    "Return the values of settings.ini."
    ini = ConfigParser(interpolation=None)
    ini.read_string((ROOT / 'settings.ini').read_text('utf-8'))
    return dict(ini['DEFAULT'])


def test_version_matches_settings() -> None:
    assert learnkit.__version__ == settings()['version']


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


# --------------------------------------------------------------------------------------- benchmarks


@pytest.mark.parametrize('subject', ['learnkit-bare', 'learnkit-handlers50'])
def test_benchmarks_train_alike(subject: str) -> None:
    def weights(name: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        task = Task(n_train=8, n_valid=0, skip=3)
        SUBJECTS['a'][name](task)(2)
        assert len(task.train.began_s) == len(task.train.ended_s) == 2
        return [p.detach() for p in task.model.parameters()]

    for expected, got in zip(weights('raw'), weights(subject), strict=True):
        assert torch.equal(expected, got)
