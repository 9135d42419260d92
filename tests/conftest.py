"""Settings of every test: one thread, fixed seeds, no display."""

import doctest
import gc
import os
import random
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

# Before matplotlib and torch are imported, here and in child processes.
os.environ.setdefault('MPLBACKEND', 'Agg')
os.environ.setdefault('OMP_NUM_THREADS', '1')

import numpy as np
import pytest
import torch
from hypothesis import settings

# Write bytecode even if the environment forbids it: else every process that a test starts compiles the package.
sys.dont_write_bytecode = False
os.environ.pop('PYTHONDONTWRITEBYTECODE', None)

# Who runs the tests in the background of a shell ignores Ctrl-C, which is passed on: tests of it would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# show the values in the assertions of shared helpers, too
pytest.register_assert_rewrite('tests.helpers', 'tests.faults.fault_helpers')

from tests.helpers.libraries import import_or_skip, skip_if_absent  # noqa: E402  # after the line above

# skips where a listed library is absent, and nowhere else: not for a module that a library lacks
pytest.importorskip = import_or_skip

# no doctests there
collect_ignore_glob = ['conftest.py', '*/conftest.py']

# the same sums in the same order on every machine, and no fight for two cores
torch.set_num_threads(1)

settings.register_profile('quick', deadline=None, max_examples=50, derandomize=True, database=None)
settings.register_profile('full', deadline=None, max_examples=1000, database=None, print_blob=True)
settings.load_profile(os.environ.get('HYPOTHESIS_PROFILE', 'quick'))


gc.disable()  # while tests are collected, which makes many objects and no garbage: until `pytest_collection_finish`

ASKED_FOR = {'notebook', 'browser', 'site', 'dist'}  # what runs with `-m` alone


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    "Skip files without a test that `-m` selects; collecting all files takes as long as some of these tests."
    if collection_path.suffix != '.py':
        return None
    source, expression = collection_path.read_text('utf-8'), config.option.markexpr
    markers = {*re.findall(r'(?<!not )\b\w+', expression)} - {'and', 'or', 'not'}
    if not markers:
        unwanted = re.findall(r'not (\w+)', expression)
        skips = any(f'\npytestmark = pytest.mark.{marker}\n' in source for marker in unwanted)
    else:
        skips = markers <= ASKED_FOR and not any(f'mark.{m}' in source for m in markers)
    return skips or None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Iterator[None]:
    "Collect doctests of the package only; docstrings of tests have no examples."
    collectors = yield
    if TESTS not in file_path.parents:
        return collectors
    return [collector for collector in collectors if type(collector) is pytest.Module]


TESTS = Path(__file__).parent
SLOW = TESTS / 'slow.txt'  # seconds and name of what takes a twentieth of a second or more
LONG = {'full', *ASKED_FOR}  # what is long by itself, and runs only with `-m`


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        '--quick',
        action='store_true',
        help='each test once, with its first arguments; none of slow.txt',
    )
    parser.addoption(
        '--slow',
        choices=('some', 'others', 'all'),
        default='some',
        help='arguments of the tests of slow.txt: each tenth in a run of all tests, the others, or all of them',
    )
    parser.addoption(
        '--write-slow', action='store_true', help='write slow.txt from the times of this run'
    )


def function_of(nodeid: str) -> str:
    return nodeid.partition('[')[0]


def slow_functions() -> dict[str, float]:
    "Return the seconds of each test in slow.txt, with its slowest arguments."
    lines = [line.split() for line in SLOW.read_text('utf-8').splitlines()]
    return {name: float(seconds) for seconds, name in lines}


def order_and_select(config: pytest.Config, items: list[pytest.Item]) -> None:
    "Order files by the time of their slow tests, so that all workers end together; select quick tests."
    slow = slow_functions()
    of_file: Counter[str] = Counter()
    for name, seconds in slow.items():
        of_file[name.partition('::')[0]] += seconds
    items.sort(key=lambda item: -of_file[item.nodeid.partition('::')[0]])
    if config.option.slow != 'all':
        others, wants_others = others_of_slow(items, slow), config.option.slow == 'others'
        select(config, items, [item for item in items if (id(item) in others) is wants_others])
    if config.option.quick:
        first = {function_of(item.nodeid): item for item in reversed(items)}
        select(config, items, [item for name, item in first.items() if name not in slow])


def others_of_slow(items: list[pytest.Item], slow: dict[str, float]) -> set[int]:
    "Return the tests, by identity, of slow functions with arguments that a run of all tests leaves out."
    seen: Counter[str] = Counter()
    found = set[int]()
    for item in items:
        name = function_of(item.nodeid)
        if name not in slow or any(map(item.get_closest_marker, LONG)):
            continue
        if seen[name] % 10:
            found.add(id(item))
        seen[name] += 1
    return found


def pytest_configure(config: pytest.Config) -> None:
    "Select all arguments if files or names are given; a worker has the options of the process that started it."
    is_chosen = config.args_source is pytest.Config.ArgsSource.ARGS or config.option.keyword
    if not hasattr(config, 'workerinput') and config.option.slow == 'some':
        if is_chosen or config.option.write_slow:
            config.option.slow = 'all'


def select(config: pytest.Config, items: list[pytest.Item], wanted: list[pytest.Item]) -> None:
    ids = {id(item) for item in wanted}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in ids])
    items[:] = [item for item in items if id(item) in ids]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    "Write slow.txt where `--write-slow` asks for it."
    if not config.option.write_slow:
        return
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            seconds[report.nodeid] += getattr(report, 'duration', 0.0)
    longest: dict[str, float] = {}
    for nodeid, duration in seconds.items():
        longest[function_of(nodeid)] = max(duration, longest.get(function_of(nodeid), 0.0))
    lines = [f'{s:.2f} {name}' for name, s in sorted(longest.items()) if s >= 0.05]
    SLOW.write_text('\n'.join([*lines, '']), 'utf-8')


@pytest.hookimpl(trylast=True)  # after `-m` and `-k`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    "Skip tests marked `cuda` without a GPU, and tests whose library is not installed."
    order_and_select(config, items)
    for item in items:
        if item.get_closest_marker('cuda') and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason='needs a CUDA device'))
        item.runtest = partial(run_or_skip, item.runtest)


def pytest_collection_finish() -> None:
    gc.enable()
    freeze_modules()


n_frozen = 0  # modules that were imported at the last freeze


def freeze_modules() -> None:
    "Exclude existing objects from garbage collection, in tests and in forked processes."
    global n_frozen
    gc.collect()
    gc.freeze()
    n_frozen = len(sys.modules)


@pytest.fixture(autouse=True, scope='module')
def frozen_modules() -> None:
    "Freeze libraries imported by tests of other files, which would cost half a second per collection."
    if len(sys.modules) > n_frozen + 200:
        freeze_modules()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    "Skip a test whose fixtures need a library that is not installed."
    try:
        return (yield)
    except ImportError as e:
        skip_if_absent(e.name)
        raise


def run_or_skip(runtest: Callable[[], None]) -> None:
    try:
        runtest()
    except ImportError as e:
        skip_if_absent(e.name)
        raise
    except doctest.UnexpectedException as e:
        if isinstance(e.exc_info[1], ImportError):
            skip_if_absent(e.exc_info[1].name)
        raise


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    "Seed torch, numpy and python alike before each test."
    random.seed(0)
    np.random.seed(0)
    # `torch.manual_seed` walks the stack where CUDA is not in use yet: 1 ms
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def disk_without_flushing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    "Skip flushing to disk, here and in forked processes; no test cuts the power, and row 20 counts the calls."
    if not request.node.get_closest_marker('full'):
        monkeypatch.setattr(os, 'fsync', lambda fd: None)


@pytest.fixture(autouse=True, scope='session')
def no_service_left() -> Iterator[None]:
    "End W&B's thread and process, which could print after the summary while this process exits."
    yield
    if wandb := sys.modules.get('wandb'):
        wandb.teardown()


@pytest.fixture(autouse=True)
def no_figures_left() -> Iterator[None]:
    "Close the figures that a test drew."
    yield
    if 'matplotlib.pyplot' in sys.modules:
        sys.modules['matplotlib.pyplot'].close('all')
