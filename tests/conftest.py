"""What every test starts from: one thread, fixed seeds, no display."""
import os
import random
import sys
from collections.abc import Iterator

os.environ.setdefault('MPLBACKEND', 'Agg')  # before matplotlib is imported, here and in child processes

import numpy as np
import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)  # the same sums in the same order on every machine, and no fight for two cores

settings.register_profile('quick', deadline=None, max_examples=50, derandomize=True, database=None)
settings.register_profile('full', deadline=None, max_examples=1000, database=None, print_blob=True)
settings.load_profile(os.environ.get('HYPOTHESIS_PROFILE', 'quick'))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    "Skip what is marked `cuda` where there is no GPU."
    if torch.cuda.is_available(): return
    for item in items:
        if item.get_closest_marker('cuda'): item.add_marker(pytest.mark.skip(reason='needs a CUDA device'))


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    "Seed torch, numpy and python alike before each test."
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_figures_left() -> Iterator[None]:
    "Close the figures that a test drew."
    yield
    if 'matplotlib.pyplot' in sys.modules: sys.modules['matplotlib.pyplot'].close('all')
