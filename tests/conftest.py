"""What every test starts from: one thread, fixed seeds, no display."""
import doctest
import gc
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial

# Before matplotlib and torch are imported, here and in child processes.
os.environ.setdefault('MPLBACKEND', 'Agg')
os.environ.setdefault('OMP_NUM_THREADS', '1')

import numpy as np
import pytest
import torch
from hypothesis import settings

# Who runs the tests in the background of a shell ignores Ctrl-C, which is passed on: tests of it would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN: signal.signal(signal.SIGINT, signal.default_int_handler)

collect_ignore_glob = ['conftest.py', '*/conftest.py']  # no doctests there, and one module name for all of them

torch.set_num_threads(1)  # the same sums in the same order on every machine, and no fight for two cores

settings.register_profile('quick', deadline=None, max_examples=50, derandomize=True, database=None)
settings.register_profile('full', deadline=None, max_examples=1000, database=None, print_blob=True)
settings.load_profile(os.environ.get('HYPOTHESIS_PROFILE', 'quick'))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    "Skip what is marked `cuda` where there is no GPU, and examples in docstrings whose library is not installed."
    for item in items:
        if item.get_closest_marker('cuda') and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason='needs a CUDA device'))
        if isinstance(item, pytest.DoctestItem): item.runtest = partial(run_or_skip, item.runtest)


def pytest_collection_finish() -> None:
    "Spare collections of garbage, in tests and in processes forked from this one, what is there before the first test."
    gc.collect()
    gc.freeze()


def run_or_skip(runtest: Callable[[], None]) -> None:
    try: runtest()
    except doctest.UnexpectedException as e:
        from learnkit.errors import MissingExtraError  # not before torch has one thread
        if isinstance(e.exc_info[1], MissingExtraError): pytest.skip(str(e.exc_info[1]))
        raise


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    "Seed torch, numpy and python alike before each test."
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` walks the stack where CUDA is not in use yet: 1 ms
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def no_figures_left() -> Iterator[None]:
    "Close the figures that a test drew."
    yield
    if 'matplotlib.pyplot' in sys.modules: sys.modules['matplotlib.pyplot'].close('all')
