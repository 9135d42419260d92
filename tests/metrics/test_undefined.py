"""Metrics that cannot be computed from their data are NaN, and mistakes are errors."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learnkit import Callback, DataLoaders
from learnkit.core.errors import MetricError
from learnkit.metrics import (
    AccumMetric,
    APScoreBinary,
    APScoreMulti,
    ExplainedVariance,
    PearsonCorrCoef,
    R2Score,
    RocAuc,
    RocAucBinary,
    RocAucMulti,
    SpearmanCorrCoef,
    skm_to_fastai,
)
from learnkit.metrics.undefined import compute_or_nan
from tests.helpers.learners import quiet_learner
from tests.helpers.libraries import require

skm = require('sklearn.metrics')

NAN, INF = math.nan, math.inf
NUMBERS = [R2Score, ExplainedVariance, PearsonCorrCoef, SpearmanCorrCoef]
CLASSES = [RocAuc, RocAucBinary, APScoreBinary]
LABELS = [RocAucMulti, APScoreMulti]


@pytest.mark.parametrize('bad', [NAN, INF, -INF])
def test_scores_of_a_diverged_model_are_nan(bad: float) -> None:
    numbers, classes = torch.tensor([1.0, bad, 3.0]), torch.tensor([[1.0, 2], [bad, 0], [0, 3]])
    targ, labels = torch.tensor([0, 1, 1]), torch.tensor([[0, 1], [1, 0], [1, 1]])
    # infinity has a rank, and sigmoid(inf) is 1
    is_ranked = math.isinf(bad)
    for metric in NUMBERS:
        value = metric()(numbers, torch.tensor([1.0, 2.0, 4.0]))
        assert math.isnan(value) != (is_ranked and metric is SpearmanCorrCoef)
    for metric in CLASSES:
        assert math.isnan(metric()(classes, targ)) or bad == -INF
    for metric in LABELS:
        assert math.isnan(metric()(classes, labels)) != is_ranked


def test_a_label_without_ranks_leaves_the_others() -> None:
    pred = torch.tensor([[1.0, NAN], [2.0, 0.0], [0.0, 1.0]])
    labels = torch.tensor([[0, 1], [1, 0], [0, 1]])
    first, second = RocAucMulti(average=None)(pred, labels).tolist()
    assert first == skm.roc_auc_score([0, 1, 0], [1.0, 2.0, 0.0]) and math.isnan(second)
    assert math.isnan(RocAucMulti()(pred, labels))


def test_one_class_and_too_few_samples() -> None:
    one = torch.zeros(4).long()
    for metric in CLASSES:
        assert math.isnan(metric()(torch.randn(4, 2), one))
    for metric in LABELS:
        assert math.isnan(metric()(torch.randn(4, 2), torch.zeros(4, 2)))
    for metric in (R2Score, PearsonCorrCoef, SpearmanCorrCoef):
        assert math.isnan(metric()(torch.ones(1), torch.ones(1)))


def refuse(pred: Any, targ: Any) -> float:
    raise ValueError('no score')


@pytest.mark.parametrize('wrap', [AccumMetric, lambda f: skm_to_fastai(f, is_class=False)])
def test_functions_of_a_user(wrap: Callable[[Any], Any]) -> None:
    metric = wrap(refuse)
    different, equal = torch.tensor([1.0, 2.0]), torch.ones(2)
    assert math.isnan(metric(torch.tensor([1.0, NAN]), different))
    assert math.isnan(metric(equal, torch.tensor([1.0, NAN])))
    with pytest.warns(UserWarning, match=r'refuse.*targets are equal. ValueError: no score'):
        assert math.isnan(metric(different, equal))
    with pytest.raises(ValueError, match='no score'):
        metric(equal, different)


def fail_with(error: Exception) -> Callable[..., Any]:
    def fail(*data: Any) -> Any:
        raise error

    return fail


def test_mistakes_are_errors_also_with_nan() -> None:
    nans = torch.full((3,), NAN)
    invalid_option = type('InvalidParameterError', (ValueError, TypeError), {})('average')
    for error in (MetricError('x'), TypeError('x'), RuntimeError('x'), invalid_option):
        with pytest.raises(type(error)):
            compute_or_nan('m', fail_with(error), nans, nans)
    with pytest.raises(ValueError, match='lengths'):
        compute_or_nan('m', fail_with(ValueError('lengths')), nans, torch.ones(2))
    with pytest.raises(ValueError, match='no targets'):
        compute_or_nan('m', fail_with(ValueError('no targets')), torch.ones(2))
    for metric in (*NUMBERS, *CLASSES, *LABELS):
        with pytest.raises(MetricError):
            metric()(torch.full((3, 2), NAN), torch.ones(5).long())


def test_a_metric_of_torchmetrics_without_a_value() -> None:
    torchmetrics = require('torchmetrics')
    one = torch.ones(1, 1)
    learn = quiet_learner(([(one, one)], [(one, one)]), nn.Linear(1, 1), nn.MSELoss())
    learn.metrics = torchmetrics.R2Score()  # of a single sample
    with pytest.warns(UserWarning, match='`r2_score` is NaN.*two samples'), learn.no_bar():
        learn.fit(1)
    assert math.isnan(learn.history[-1]['r2_score'])


class Diverge(Callback):
    "Make the weights NaN before the second evaluation, which leaves the training loss finite."

    def after_train(self) -> None:
        if self.epoch == 1:
            nn.init.constant_(self.learn.model.weight, NAN)


def r2_of_a_batch(pred: Tensor, targ: Tensor) -> float:
    return float(skm.r2_score(targ, pred))


def test_a_diverged_fit_ends_with_nan_in_its_rows() -> None:
    x = torch.randn(16, 2)
    y = x.sum(1, keepdim=True)
    report = AccumMetric(
        lambda p, t: {'low': skm.r2_score(t, p), 'high': skm.r2_score(t, p)}, name='report'
    )
    dls = DataLoaders.from_tensors((x, y), (x, y), bs=8, shuffle=False)
    metrics = [*NUMBERS, skm_to_fastai(skm.r2_score, is_class=False, name='own'), report]
    metrics.append(r2_of_a_batch)
    learn = quiet_learner(
        dls, nn.Linear(2, 1), nn.MSELoss(), lr=0.0, metrics=metrics, cbs=Diverge()
    )
    with pytest.warns(UserWarning, match='r2_of_a_batch of a batch is'):
        learn.fit(2)
    first, second = learn.history
    names = ['r2_score', 'explained_variance_score', 'pearsonr', 'spearmanr', 'own', 'low', 'high']
    assert all(math.isfinite(first[name]) for name in [*names, 'r2_of_a_batch'])
    assert all(math.isnan(second[name]) for name in [*names, 'r2_of_a_batch'])
    assert first['own'] == pytest.approx(first['r2_score'])
