"""A training as in a notebook, on real data: a learning rate search, then a schedule."""

import pytest
import torch

from learnkit.all import CrossEntropyLossFlat, Learner, accuracy
from learnkit.demo import digits, small_cnn


@pytest.mark.parametrize('seed', [0, pytest.param(1, marks=pytest.mark.full)])
def test_lr_find_then_one_cycle_reaches_98_percent_of_the_digits(seed: int) -> None:
    torch.manual_seed(seed)
    learn = Learner(digits(bs=32, seed=seed), small_cnn(), CrossEntropyLossFlat(), metrics=accuracy)
    with learn.no_bar():
        found = learn.lr_find(show_plot=False)
        learn.fit_one_cycle(8, found.valley)
    assert learn.validate()[1] >= 0.98
