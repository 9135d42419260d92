"""Hints for keywords and names of other libraries."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import learnkit
from learnkit import (
    Checkpoint,
    DataLoaders,
    EarlyStoppingCallback,
    Learner,
    SaveModelCallback,
    accuracy,
)
from learnkit.testing import synth_learner

BATCH = torch.randn(8, 4), torch.arange(8) % 3


@pytest.mark.parametrize(
    ('call', 'expected_text'),
    [
        (lambda: synth_learner().fit(epochs=5), r"'epochs'. Write `n_epoch=`"),
        (lambda: synth_learner().fit_one_cycle(1, max_lr=0.1), r"'max_lr'. Write `lr_max=`"),
        (lambda: synth_learner(callbacks=[]), r"Learner.__init__\(\).*'callbacks'. Write `cbs=`"),
        (lambda: synth_learner(batch_size=8), r'DataLoaders.from_tensors\(..., bs=...\)'),
        (lambda: synth_learner(metrcs=accuracy), r'Did you mean `metrics`'),
        (lambda: DataLoaders.from_tensors(BATCH, batch_size=8), r'from_tensors\(..., bs=...\)'),
        (lambda: Learner(train_dataloaders=[], model=nn.Linear(4, 3)), r'Write `dls=`'),
        (lambda: Checkpoint(save_top_k=3), r"'save_top_k'. Write `keep_best=`"),
        (lambda: SaveModelCallback(save_top_k=3), r'`Checkpoint\(keep_best=3\)`'),
        (
            lambda: EarlyStoppingCallback(restore_best_weights=True),
            r'`SaveModelCallback\(\)`.*loads the best at the end',
        ),
        (lambda: EarlyStoppingCallback(patiense=3), r'Did you mean `patience`'),
    ],
)
def test_keywords_of_other_libraries(call: Callable[[], Any], expected_text: str) -> None:
    with pytest.raises(TypeError, match=expected_text):
        call()


def test_names_of_other_libraries() -> None:
    with pytest.raises(AttributeError, match=r'from learnkit\.callbacks import EarlyStopping'):
        _ = learnkit.EarlyStopping
    with pytest.raises(AttributeError, match='Did you mean `Learner`'):
        _ = learnkit.Lerner
    assert not hasattr(learnkit, 'EarlyStopping')
