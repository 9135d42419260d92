"""Callbacks that watch a name of `learn.log`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torch_lr

from learnkit import Callback, Checkpoint, EarlyStoppingCallback, Learner, LRScheduler
from learnkit.callbacks.reduce_lr_on_plateau import ReduceLROnPlateau
from learnkit.callbacks.save_model import SaveModelCallback
from learnkit.callbacks.stoppers import ThresholdStopper
from learnkit.checkpoint.folder import entries
from learnkit.core.errors import MetricError
from learnkit.testing import synth_learner

VALUES = [3.0, 2.0, 4.0, 1.0, 5.0, 6.0, 7.0, 8.0, 9.0]
EVENTS = ['before_train', 'after_batch', 'after_validate', 'after_epoch']


def log_values(event: str, name: str = 'drift', **options: Any) -> Callback:
    "Return a callback that logs one of `VALUES` in each epoch of a fit."

    def write(cb: Any) -> None:
        if event != 'after_batch' or cb.training:
            cb.learn.log(name, VALUES[cb.epoch])

    return Callback(**{event: write}, run_in='fit', **options)


def column_of(event: str) -> str:
    return 'valid_drift' if event == 'after_validate' else 'drift'


def fit(*cbs: Any, n_epoch: int = 6, **options: Any) -> Learner:
    learn = synth_learner(lr=0.1, cbs=list(cbs), **options)
    with learn.no_bar(), learn.no_logging():
        learn.fit(n_epoch)
    return learn


@pytest.mark.parametrize('event', EVENTS)
def test_early_stopping_ends_after_the_value_has_not_improved(event: str) -> None:
    stop = EarlyStoppingCallback(column_of(event), comp='less', patience=2)
    learn = fit(log_values(event), stop)
    assert len(learn.history) == 6
    assert (stop.best, stop.wait) == (1.0, 2)


def test_a_value_that_is_not_printed_is_watched() -> None:
    def write(cb: Any) -> None:
        cb.learn.log('drift', VALUES[cb.epoch], shown=False)

    stop = EarlyStoppingCallback('drift', comp='less', patience=2)
    learn = fit(Callback(before_train=write), stop)
    assert 'drift' not in learn.recorder.metric_names
    assert len(learn.history) == 6


def test_each_fit_watches_the_name_again() -> None:
    stop = EarlyStoppingCallback('drift', comp='less', patience=2)
    learn = fit(log_values('before_train'), stop)
    with learn.no_bar(), learn.no_logging():
        learn.fit(6)
    assert [row['fit'] for row in learn.history] == [0] * 6 + [1] * 6


def test_a_threshold_ends_the_fit() -> None:
    stop = ThresholdStopper('drift', 1.5, comp='less')
    learn = fit(log_values('after_batch'), stop)
    assert (len(learn.history), stop.value) == (4, 1.0)


def test_a_plateau_lowers_the_rate() -> None:
    plateau = ReduceLROnPlateau('drift', comp='less', patience=2, factor=10.0)
    learn = fit(log_values('after_batch'), plateau, n_epoch=8)
    # the best value is that of epoch 3: two epochs later the rate falls, and two epochs after that
    assert learn.opt.lrs == pytest.approx([0.1 / 100])


def test_the_best_weights_are_those_of_the_best_value(tmp_path: Path) -> None:
    seen = []
    note = Callback(after_train=lambda cb: seen.append(cb.model.a.detach().clone()))
    learn = fit(
        log_values('before_train'), SaveModelCallback('drift', comp='less'), note, path=tmp_path
    )
    assert torch.equal(learn.model.a, seen[3])
    assert not torch.equal(learn.model.a, seen[-1])


def test_the_best_checkpoint_is_that_of_the_best_value(tmp_path: Path) -> None:
    kept = Checkpoint('1ep', tmp_path, keep_last=1, keep_best=1, monitor='drift', mode='min')
    fit(log_values('before_train'), kept)
    values = sorted(entry.info['value'] for entry in entries(tmp_path))
    assert values == [1.0, 6.0]


def test_a_scheduler_of_torch_gets_the_value() -> None:
    make = partial(torch_lr.ReduceLROnPlateau, patience=1)
    learn = fit(log_values('before_train'), LRScheduler(make, monitor='drift'))
    parameter = torch.nn.Parameter(torch.zeros(1))
    opt = torch.optim.SGD([parameter], lr=0.1)
    scheduler = make(opt)
    for value in VALUES[:6]:
        scheduler.step(value)
    assert learn.opt.lrs == [opt.param_groups[0]['lr']]


def watchers() -> dict[str, Callable[[str, Path], Any]]:
    "Return every callback that watches a value, by name."
    return {
        'stop': lambda name, path: EarlyStoppingCallback(name, comp='less'),
        'plateau': lambda name, path: ReduceLROnPlateau(name, comp='less'),
        'save': lambda name, path: SaveModelCallback(name, comp='less'),
        'threshold': lambda name, path: ThresholdStopper(name, 0.0, comp='less'),
        'scheduler': lambda name, path: LRScheduler(torch_lr.ReduceLROnPlateau, monitor=name),
        'checkpoint': lambda name, path: Checkpoint(
            folder=path, monitor=name, mode='min', keep_best=1
        ),
    }


@pytest.mark.parametrize('kind', list(watchers()))
def test_a_name_that_nothing_logs_is_an_error_after_the_first_evaluation(
    kind: str, tmp_path: Path
) -> None:
    watcher = watchers()[kind]('gradient', tmp_path)
    learn = synth_learner(cbs=watcher, path=tmp_path)
    with learn.no_bar(), learn.no_logging(), pytest.raises(MetricError, match='gradient'):
        learn.fit(3)
    assert len(learn.history) == 1


@pytest.mark.parametrize('kind', list(watchers()))
def test_a_misspelled_column_is_an_error_before_training(kind: str, tmp_path: Path) -> None:
    watcher = watchers()[kind]('valid_los', tmp_path)
    learn = synth_learner(cbs=watcher, path=tmp_path)
    with learn.no_bar(), pytest.raises(MetricError, match='valid_loss'):
        learn.fit(3)
    assert learn.time.ba == 0


def test_a_name_of_evaluations_waits_for_the_first_one() -> None:
    stop = EarlyStoppingCallback('valid_drift', comp='less', patience=2)
    learn = synth_learner(cbs=[log_values('after_validate'), stop], eval_every='2ep')
    with learn.no_bar(), learn.no_logging():
        learn.fit(8)
    # values of epochs 1, 3, 5 and 7: 2, 1, 6, 8
    assert (stop.best, stop.wait, len(learn.history)) == (1.0, 2, 8)
