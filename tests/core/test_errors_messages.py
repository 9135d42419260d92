"""Error messages name the fix where the cause alone would not be enough."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from learnkit import (
    SGD,
    Adam,
    BatchError,
    Callback,
    CancelBatchException,
    CSVLogger,
    DataLoaders,
    EmptyLoaderError,
    FitError,
    JSONLinesLogger,
    LearnkitError,
    LoaderError,
    MetricError,
    OptimizerError,
    OptimWrapper,
    OptionError,
    TensorLoader,
    Time,
    TimeError,
    find_bs,
    load_learner,
)
from learnkit.core.batch import split_batch
from learnkit.metrics import LossMetrics
from learnkit.testing import synth_learner


def cancelled() -> Any:
    def skip(cb: Any) -> None:
        raise CancelBatchException

    with synth_learner(cbs=Callback(before_batch=skip)).no_bar() as learn:
        learn.get_preds()


def fit_by(opt_func: Any) -> Callable[[], Any]:
    return lambda: synth_learner(opt_func=opt_func).fit(1)


def no_optimizers(params: Any, lr: float) -> list[Any]:
    return []


@pytest.mark.parametrize(
    ('do', 'error', 'expected_text'),
    [
        (lambda: Time('2 epochs'), TimeError, "Write '2ep'."),
        (
            fit_by(partial(SGD, momentum=0.9)),
            OptimizerError,
            'opt_func=SGD cannot be called with the parameters, `lr=` and momentum',
        ),
        (
            fit_by(partial(Adam, betas=(0.9, 0.99))),
            OptimizerError,
            'opt_func=Adam cannot be called',
        ),
        (fit_by(no_optimizers), OptimizerError, 'which has no optimizer'),
        (
            lambda: OptimWrapper([nn.Parameter(torch.zeros(1))]),
            OptimizerError,
            'opt=torch.optim.AdamW',
        ),
        (lambda: split_batch({}), BatchError, 'Look at what the collate function returns'),
        (lambda: split_batch(()), BatchError, 'it is (*inputs, target)'),
        (
            lambda: find_bs({'text': 'a b'}),
            BatchError,
            'size_func=f',
        ),
        (lambda: DataLoaders([]), EmptyLoaderError, 'are there samples in its data set?'),
        (
            lambda: DataLoaders(TensorLoader(torch.zeros(3), bs=4, drop_last=True)),
            EmptyLoaderError,
            'Lower the batch size',
        ),
        (lambda: DataLoaders(iter([])).one_batch(), EmptyLoaderError, 'Is it used up'),
        (
            lambda: TensorLoader(torch.zeros(3), torch.zeros(4)),
            LoaderError,
            'give one row a sample in each',
        ),
        (lambda: synth_learner().fit(2, start_epoch=3), FitError, '`fit(3 + epochs to train)`'),
        (
            lambda: synth_learner().fit('10m', start_epoch=3),
            FitError,
            'needs a fit of epochs, `fit(10)`',
        ),
        (lambda: LossMetrics('a,b', 'c'), MetricError, 'give each attribute one'),
        (cancelled, BatchError, 'Does a callback cancel them all?'),
    ],
)
def test_the_message_names_the_fix(
    do: Callable[[], Any], error: type[LearnkitError], expected_text: str
) -> None:
    with pytest.raises(error) as e:
        do()
    assert expected_text in str(e.value)


def test_what_a_file_cannot_be_used_for(tmp_path: Path) -> None:
    learn = synth_learner(path=tmp_path)
    file = learn.save_learner('net.pth')
    with pytest.raises(OptionError, match=r'nn\.Module itself'):
        load_learner(file, model=3)  # type: ignore[arg-type]

    for logger, text in (
        (CSVLogger, 'epoch,loss\n0,1\n'),
        (CSVLogger, 'step,loss\nx,1\n'),
        (JSONLinesLogger, '{}\n'),
    ):
        (tmp_path / 'log.csv').write_text(text)
        (tmp_path / 'log.jsonl').write_text(text)
        with pytest.raises(OptionError, match=r'`fname`'):
            synth_learner(
                path=tmp_path, cbs=logger('log.csv' if logger is CSVLogger else 'log.jsonl')
            ).fit(1)
