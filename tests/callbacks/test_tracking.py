"""Callbacks that track a value. Expected numbers that are not computed here are from fastai 2.8."""

import math
import operator
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastcore.basics import noop
from torch import Tensor

from learnkit import Callback, Checkpoint, Learner
from learnkit.callbacks.early_stopping import EarlyStoppingCallback
from learnkit.callbacks.ema import EMA
from learnkit.callbacks.reduce_lr_on_plateau import ReduceLROnPlateau
from learnkit.callbacks.save_model import SaveModelCallback
from learnkit.callbacks.tracking import TrackerCallback
from learnkit.core.errors import (
    CancelFitException,
    MetricError,
    OptionError,
    TimeError,
)
from learnkit.metrics import ValueMetric, mae
from learnkit.testing import synth_learner
from tests.helpers.learners import quiet_synth_learner

NAN = math.nan
VALUES = [5.0, 3.0, 4.0, 2.5, 2.45, 7.0, NAN, 1.0, 1.0, 2.0, 2.0, 2.0]


class Overwrite(Callback):
    "Replace the validation loss by given values before trackers read it."

    order = 51

    def __init__(self, values: list[Any]) -> None:
        self._given = values

    def after_epoch(self) -> None:
        values = self.learn.recorder.values
        if self.learn.fitting and values:
            values[-1] = [values[-1][0], self._given[self.learn.epoch], *values[-1][2:]]


class Look(Callback):
    "Record the tracker's result after each epoch, and mark the weights with the epoch's number."

    order = 62

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def after_train(self) -> None:
        self.learn.model.a.data.fill_(self.learn.epoch)

    def after_epoch(self) -> None:
        cb = next(c for c in self.learn.cbs if isinstance(c, TrackerCallback))
        self.seen.append((cb.best, cb.new_best))


def run(
    cb: TrackerCallback,
    values: list[Any] = VALUES,
    path: Path | str = '.',
    cbs: Any = (),
    **fit: Any,
) -> Learner:
    learn = quiet_synth_learner(
        n_train=1, n_valid=1, path=path, cbs=[cb, Overwrite(values), Look(), *cbs]
    )
    learn.fit(len(values), **fit)
    return learn


# ------------------------------------------------------------------------------------------ tracker


@pytest.mark.parametrize(
    ('options', 'best', 'new'),
    [
        ({}, [5, 3, 3, 2.5, 2.45, 2.45, 2.45, 1, 1, 1, 1, 1], {0, 1, 3, 4, 7}),
        ({'min_delta': 0.1}, [5, 3, 3, 2.5, 2.5, 2.5, 2.5, 1, 1, 1, 1, 1], {0, 1, 3, 7}),
        ({'comp': np.greater, 'min_delta': 0.5}, [5, 5, 5, 5, 5, 7, 7, 7, 7, 7, 7, 7], {0, 5}),
        ({'comp': operator.lt}, [5, 3, 3, 2.5, 2.45, 2.45, 2.45, 1, 1, 1, 1, 1], {0, 1, 3, 4, 7}),
        (
            {'comp': lambda new, old: not new > old},
            [5, 3, 3, 2.5, 2.45, 2.45, 2.45, 1, 1, 1, 1, 1],
            {0, 1, 3, 4, 7, 8},
        ),
    ],
)
def test_best_and_new_best_after_every_epoch(
    options: Any, best: list[float], new: set[int]
) -> None:
    learn = run(TrackerCallback(**options))
    assert learn.look.seen == [(b, i in new) for i, b in enumerate(best)]
    assert learn.tracker.idx == 1


def test_a_value_may_be_a_tensor_or_missing_and_must_be_a_number() -> None:
    learn = run(TrackerCallback(), [torch.tensor(2.0), np.float32(1.0), None, torch.tensor([3.0])])
    assert learn.look.seen == [(2.0, True), (1.0, True), (1.0, False), (1.0, False)]
    with pytest.raises(MetricError, match=r"'valid_loss': it is 'low'"):
        run(TrackerCallback(), ['low'])


def test_which_way_is_better_follows_the_name() -> None:
    def accuracy(pred: Tensor, targ: Tensor) -> Tensor:
        return -(pred - targ).abs().mean()

    def error_rate(pred: Tensor, targ: Tensor) -> Tensor:
        return (pred - targ).abs().mean()

    for metric, better in ((accuracy, max), (error_rate, min)):
        learn = quiet_synth_learner(lr=0.1, metrics=metric, cbs=TrackerCallback(metric.__name__))
        learn.fit(4)
        assert learn.tracker.best == better(row[metric.__name__] for row in learn.history)
    with pytest.warns(UserWarning, match='higher counts as better'):
        synth_learner(metrics=mae, cbs=TrackerCallback('mae')).fit(1)


def test_what_is_logged_can_be_watched_by_a_function() -> None:
    def part(learn: Learner) -> Any:
        return learn.history[-1]['part']

    cbs = [
        TrackerCallback(part, comp=np.less),
        Callback(after_loss=lambda cb: cb.training and cb.learn.log('part', 5 - cb.epoch)),
    ]
    learn = quiet_synth_learner(cbs=cbs)
    learn.fit(3)
    assert learn.tracker.best == 3.0


def test_best_is_kept_over_fits_when_asked() -> None:
    for reset, best in ((True, 4.0), (False, 1.0)):
        learn = run(TrackerCallback(reset_on_fit=reset), [1.0, 2.0])
        learn.overwrite._given = [4.0, 5.0]
        learn.fit(2)
        assert learn.tracker.best == best


@pytest.mark.parametrize(
    'cls', [TrackerCallback, EarlyStoppingCallback, SaveModelCallback, ReduceLROnPlateau]
)
def test_an_unknown_monitor_raises_before_anything_has_changed(
    cls: type[TrackerCallback], tmp_path: Path
) -> None:
    learn = synth_learner(cbs=cls('valid_los'), path=tmp_path)
    before = [p.detach().clone() for p in learn.model.parameters()]
    with pytest.raises(MetricError, match=r'train_loss, valid_loss\. .*`valid_loss`'):
        learn.fit(1)
    assert all(map(torch.equal, before, learn.model.parameters()))
    assert learn.opt.n_steps == 0
    assert not learn.history
    assert not list(tmp_path.iterdir())
    for monitor in ('time', 'epoch'):
        with pytest.raises(MetricError):
            synth_learner(cbs=TrackerCallback(monitor)).fit(1)
    with pytest.raises(MetricError, match='reads the Recorder'):
        synth_learner(default_cbs=False, cbs=[TrackerCallback()]).fit(1)


def test_skipped_epochs_and_evaluations_between_count_for_nothing() -> None:
    cb = EarlyStoppingCallback(patience=2)
    learn = run(cb, [NAN, NAN, NAN, 3.0, 2.0, 1.0], start_epoch=3)
    assert (cb.best, cb.wait, len(learn.history)) == (1.0, 0, 3)
    learn.validate()
    learn.get_preds()
    assert (cb.best, cb.wait) == (1.0, 0)


@pytest.mark.parametrize(
    ('make', 'match'),
    [
        (lambda: ReduceLROnPlateau(factor=0.1), 'factor=0.1'),
        (lambda: SaveModelCallback(every_epoch=True, at_end=True), 'contradict'),
    ],
)
def test_options_that_cannot_work_are_refused_at_once(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        make()
    with pytest.raises(TimeError):
        EarlyStoppingCallback(patience=0)


# ---------------------------------------------------------------------------- stopping and the rate


@pytest.mark.parametrize(
    ('options', 'epochs'),
    [
        ({'patience': 2}, 7),
        ({}, 3),
        ({'patience': 3, 'min_delta': 0.1}, 7),
        ({'patience': '1ep'}, 7),
        ({'patience': 9}, 12),
        ({'patience': '2ba'}, 11),
    ],
)
def test_early_stopping_records_as_many_epochs_as_fastai(options: Any, epochs: int) -> None:
    learn = run(EarlyStoppingCallback(**options))
    assert len(learn.history) == len(learn.recorder.values) == epochs
    learn.validate()


@pytest.mark.parametrize(
    ('options', 'rates'),
    [
        (
            {'patience': 1, 'factor': 4.0, 'min_lr': 0.01},
            [0.1, 0.1, 0.025, 0.025, 0.025, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01],
        ),
        (
            {'patience': 2, 'min_delta': 0.1},
            [0.1, 0.1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01, 0.01, 0.001, 0.001, 0.0001],
        ),
        ({'min_lr': 0.5}, [0.1] * 12),
    ],
)
def test_the_rate_on_a_plateau(options: Any, rates: list[float]) -> None:
    seen: list[float] = []
    note = Callback(after_epoch=lambda cb: seen.append(cb.opt.hypers[-1]['lr']))
    note.order = 63
    run(ReduceLROnPlateau(**options), cbs=[note], lr=0.1)
    assert seen == pytest.approx(rates)


# ------------------------------------------------------------------------------- absent evaluations


def evaluated(
    values: list[float], every: str, *cbs: Any, n_train: int = 2, **options: Any
) -> Learner:
    "Train an epoch for each value of the metric `score`, evaluated at an interval; return the Learner."
    at: dict[str, Learner] = {}
    score = ValueMetric(lambda: values[at['learn'].epoch], 'score')
    at['learn'] = learn = synth_learner(
        n_train=n_train, n_valid=1, metrics=score, eval_every=every, cbs=[*cbs], **options
    )
    learn.logger = lambda row: None
    learn.fit(len(values))
    return learn


FALLING = [12.0 - i for i in range(12)]


@pytest.mark.parametrize('every', ['1ep', '2ep', '3ep', '5ep', '3ba', '5st', '40sp'])
@pytest.mark.parametrize('patience', [1, 2, '1ep', '3ba', '3st', '33sp', '0.1dur'])
def test_a_value_that_always_improves_stops_nothing(every: str, patience: Any) -> None:
    stopper = EarlyStoppingCallback('score', 'less', patience=patience)
    learn = evaluated(FALLING, every, stopper)
    assert len(learn.history) == 12 and stopper.best == 1.0


@pytest.mark.parametrize(
    ('every', 'patience', 'epochs'),
    [
        # the first evaluation is the best; a time is exceeded at an evaluation
        ('2ep', '2ep', 6),
        ('2ep', '1ep', 4),
        ('3ep', '4ep', 9),
        ('3ep', '5ba', 6),
        ('3ep', '6ba', 9),
        ('3ep', '6st', 9),
        ('2ep', '127sp', 6),
        ('2ep', '129sp', 8),
        # a number counts evaluations
        ('2ep', 1, 4),
        ('2ep', 3, 8),
        ('3ep', 2, 9),
    ],
)
def test_patience_between_evaluations(every: str, patience: Any, epochs: int) -> None:
    stopper = EarlyStoppingCallback('score', 'less', patience=patience)
    assert len(evaluated([1.0] * 12, every, stopper).history) == epochs


def test_the_message_names_the_epoch_of_the_best_value(capsys: pytest.CaptureFixture[str]) -> None:
    evaluated([5.0, 4.0] + [6.0] * 10, '2ep', EarlyStoppingCallback('score', 'less', patience=2))
    assert 'No improvement since epoch 1' in capsys.readouterr().out


def test_nan_is_an_evaluation_and_an_absent_value_is_not() -> None:
    stopper = EarlyStoppingCallback('score', 'less', patience=2)
    assert len(evaluated([NAN] * 12, '3ep', stopper).history) == 6
    stopper = EarlyStoppingCallback('score', 'less', patience=2)
    learn = evaluated([NAN, NAN, 3.0, NAN, NAN, NAN, 2.0, 2.0], '1ep', stopper)
    assert len(learn.history) == 2  # both were NaN
    stopper = EarlyStoppingCallback('score', 'less', patience=2)
    assert len(evaluated([NAN, 3.0, NAN, 2.0, NAN, NAN, 1.0], '1ep', stopper).history) == 6
    assert stopper.best == 2.0


@pytest.mark.parametrize(
    ('values', 'every', 'rate'),
    [
        (FALLING, '3ep', 0.01),
        (FALLING, '5ba', 0.01),
        ([1.0] * 12, '3ep', 0.001),  # evaluations 1 to 4: the best, then three that are not
        ([NAN] * 12, '3ep', 0.0001),
    ],
)
def test_a_rate_on_a_plateau_between_evaluations(
    values: list[float], every: str, rate: float
) -> None:
    learn = evaluated(values, every, ReduceLROnPlateau('score', 'less', patience=2), lr=0.01)
    assert learn.opt.hypers[-1]['lr'] == pytest.approx(rate)


def test_patience_continues_over_a_resume(tmp_path: Path) -> None:
    def train(folder: Path, *cbs: Any) -> int:
        stopper = EarlyStoppingCallback('score', 'less', patience=2)
        at: dict[str, Learner] = {}
        score = ValueMetric(lambda: [9.0, 5.0, *[6.0] * 6][at['learn'].epoch], 'score')
        saved = [stopper, Checkpoint('1ep', folder), *cbs]
        at['learn'] = synth_learner(n_train=1, metrics=score, eval_every='2ep', cbs=saved)
        at['learn'].logger = noop
        at['learn'].fit(8, resume=True)
        return len(at['learn'].history)

    def end_epoch_5(cb: Any) -> None:
        if cb.epoch == 5:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        train(tmp_path, Callback(before_epoch=end_epoch_5))
    assert train(tmp_path) == train(tmp_path / 'whole') == 6


def test_only_an_evaluated_epoch_is_saved(tmp_path: Path) -> None:
    saver = SaveModelCallback('score', 'less')
    mark = Callback(after_train=lambda cb: cb.learn.model.a.data.fill_(cb.epoch))
    learn = evaluated([NAN, 3.0, 0.0, NAN, 0.0, 2.0, 0.0, 4.0], '2ep', saver, mark, path=tmp_path)
    assert weight(learn) == 5.0 and saver.best == 2.0


@pytest.mark.parametrize('every', ['7ba', '5ba', '3ba'])
def test_weights_evaluated_within_an_epoch_are_saved_there(every: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    seen: list[float] = []

    def note(cb: Any) -> None:
        seen.append(cb.recorder.measured['valid_loss'])

    learn = quiet_synth_learner(lr=0.01, path=tmp_path, cbs=SaveModelCallback(), eval_every=every)
    learn.fit(3, cbs=Callback(after_eval=note))
    assert learn.save_model.best == min(seen) == learn.validate()[0]
    assert seen.index(min(seen)) + 1 < len(seen)


def test_a_fit_without_any_evaluation_has_nothing_to_load(tmp_path: Path) -> None:
    stop = Callback(after_epoch=fail(CancelFitException()))
    evaluated([1.0] * 8, '5ep', SaveModelCallback('score', 'less'), stop, path=tmp_path)
    assert not list(tmp_path.rglob('*.pth'))
    with pytest.warns(UserWarning, match='No epoch had a score that could be the best'):
        evaluated([NAN] * 2, '2ep', SaveModelCallback('score', 'less'), path=tmp_path)


# ------------------------------------------------------------------------------------------- saving


def weight(learn: Learner) -> float:
    return learn.model.a.item()


def test_the_best_weights_are_saved_and_loaded_at_the_end(tmp_path: Path) -> None:
    learn = run(SaveModelCallback(), path=tmp_path, lr=0.0)
    assert weight(learn) == 7.0 and os.listdir(tmp_path / 'models') == ['model.pth']
    assert learn.save_model.last_saved_path == tmp_path / 'models' / 'model.pth'
    assert set(torch.load(learn.save_model.last_saved_path, weights_only=True)) == {'a', 'b'}


def test_every_epoch_at_end_and_the_optimizer(tmp_path: Path) -> None:
    run(SaveModelCallback(every_epoch=True, fname='m'), [1.0, 2.0], tmp_path)
    run(SaveModelCallback(every_epoch=2, fname='sub/n'), [1.0, 2.0, 3.0, 4.0], tmp_path)
    learn = run(
        SaveModelCallback(at_end=True, fname='last', with_opt=True), [1.0, 2.0], tmp_path, lr=0.0
    )
    names = sorted(
        str(p.relative_to(tmp_path / 'models')) for p in (tmp_path / 'models').rglob('*.pth')
    )
    assert names == ['last.pth', 'm_0.pth', 'm_1.pth', 'sub/n_0.pth', 'sub/n_2.pth']
    state = torch.load(tmp_path / 'models' / 'last.pth', weights_only=True)
    assert weight(learn) == 1.0 == state['model']['a'] and set(state) == {'model', 'opt'}


def fail(error: BaseException) -> Callable[[Any], None]:
    def at_epoch_3(cb: Any) -> None:
        if cb.fitting and cb.epoch == 3:
            raise error

    return at_epoch_3


@pytest.mark.parametrize(
    'error', [ValueError('no'), KeyboardInterrupt(), CancelFitException()], ids=repr
)
def test_the_best_weights_are_loaded_whatever_ended_the_fit(
    tmp_path: Path, error: BaseException
) -> None:
    breaks = Callback(after_epoch=fail(error), order=61.5)
    cbs = [SaveModelCallback(), Overwrite([3.0, 1.0, 2.0, 4.0, 5.0]), Look(), breaks]
    learn = quiet_synth_learner(n_train=1, path=tmp_path, cbs=cbs)
    if isinstance(error, CancelFitException):
        learn.fit(5, lr=0.0)
    else:
        with pytest.raises(type(error)) as e:
            learn.fit(5, lr=0.0)
        assert e.value is error
    assert weight(learn) == 1.0
    learn.model.a.data.fill_(9.0)
    learn.validate()  # its cleanup is no reason to load
    assert weight(learn) == 9.0


def test_a_folder_that_cannot_be_written_fails_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / 'models').touch()
    learn = synth_learner(path=tmp_path, cbs=SaveModelCallback())
    with pytest.raises(OptionError, match='cannot be written'):
        learn.fit(1)
    assert learn.opt.n_steps == 0


def test_the_best_weights_are_those_that_were_evaluated(tmp_path: Path) -> None:
    "With EMA the averaged weights are saved, which evaluation after the fit also uses."
    torch.manual_seed(0)
    learn = synth_learner(lr=0.05, path=tmp_path, cbs=[EMA(0.9), SaveModelCallback()])
    with learn.no_bar():
        learn.fit(4)
    best = min(row['valid_loss'] for row in learn.history)
    assert learn.validate()[0] == pytest.approx(best, rel=1e-6)

    bare = synth_learner(dls=learn.dls, path=tmp_path).load('model')
    assert bare.validate()[0] == pytest.approx(best, rel=1e-6)
