"""Compare fastai's functional metrics and the small classes with numpy and scikit-learn."""

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from learnkit.core.errors import MetricError
from learnkit.metrics import (
    RMSE,
    BrierScore,
    BrierScoreMulti,
    ExplainedVariance,
    ExpRMSPE,
    LossMetric,
    LossMetrics,
    PearsonCorrCoef,
    Perplexity,
    R2Score,
    accuracy,
    accuracy_multi,
    error_rate,
    exp_rmspe,
    foreground_acc,
    mae,
    mse,
    msle,
    perplexity,
    rmse,
    top_k_accuracy,
)
from learnkit.metrics.averages import AvgMetric, as_metrics, dry_run
from tests.helpers.measuring import Watched, batch, feed, scores, watch_reads


def pairs(n: int = 30) -> Any:
    return torch.randn(2, n, dtype=torch.float64)


# ---------------------------------------------------------------- classes


def test_accuracy_and_error_rate() -> None:
    pred, targ = scores(50)
    right = [p.index(max(p)) == t for p, t in zip(pred.tolist(), targ.tolist(), strict=True)]
    expected = sum(right) / 50
    assert float(accuracy(pred, targ)) == pytest.approx(expected)
    assert float(accuracy(pred, targ[:, None])) == pytest.approx(expected)
    assert float(error_rate(pred, targ)) == pytest.approx(1 - expected)
    image = pred.reshape(2, 5, 5, 3).permute(0, 3, 1, 2)
    assert float(accuracy(image, targ.reshape(2, 5, 5), axis=1)) == pytest.approx(expected)
    assert float(error_rate(image, targ.reshape(2, 5, 5), axis=1)) == pytest.approx(1 - expected)


@pytest.mark.parametrize('k', [1, 2, 3, 6])
def test_top_k_accuracy(k: int) -> None:
    pred, targ = scores(48, 6)
    ranked = np.argsort(-pred.numpy(), 1)[:, :k]
    expected = np.mean([t in row for t, row in zip(targ.tolist(), ranked.tolist(), strict=True)])
    image = pred.reshape(3, 4, 4, 6).permute(0, 3, 1, 2)
    assert float(top_k_accuracy(pred, targ, k)) == pytest.approx(expected)
    assert float(top_k_accuracy(pred, targ[:, None], k=k)) == pytest.approx(expected)
    found = float(top_k_accuracy(image, targ.reshape(3, 4, 4), k=k, axis=1))
    assert found == pytest.approx(expected)
    assert feed(AvgMetric(partial(top_k_accuracy, k=k)), pred, targ, bs=10).value == pytest.approx(
        expected
    )


def test_accuracy_multi() -> None:
    pred, targ = torch.randn(20, 4), torch.randint(2, (20, 4))
    p, t = pred.numpy(), targ.numpy()
    for thresh in (0.2, 0.5, 0.9):
        expected = np.mean((1 / (1 + np.exp(-p)) > thresh) == t)
        assert float(accuracy_multi(pred, targ, thresh)) == pytest.approx(expected)
        raw = accuracy_multi(pred, targ.float(), thresh=thresh, sigmoid=False)
        assert float(raw) == pytest.approx(np.mean((p > thresh) == t))


# ---------------------------------------------------------------- regression


def test_regression_metrics() -> None:
    pred, targ = pairs()
    p, t = pred.numpy(), targ.numpy()
    assert float(mse(pred[:, None], targ)) == pytest.approx(np.mean((p - t) ** 2))
    assert float(mae(pred, targ)) == pytest.approx(np.mean(np.abs(p - t)))
    assert float(rmse(pred, targ)) == pytest.approx(np.mean((p - t) ** 2) ** 0.5)
    expected = np.mean(((np.exp(t) - np.exp(p)) / np.exp(t)) ** 2) ** 0.5
    assert float(exp_rmspe(pred, targ)) == pytest.approx(expected)
    p, t = np.abs(p), np.abs(t)
    expected = np.mean((np.log(1 + p) - np.log(1 + t)) ** 2)
    assert float(msle(pred.abs(), targ.abs())) == pytest.approx(expected)


@pytest.mark.parametrize(('func', 'metric'), [(rmse, RMSE), (exp_rmspe, ExpRMSPE)])
def test_roots_are_of_the_whole_set(func: Any, metric: Any) -> None:
    pred, targ = pairs()
    whole = float(func(pred, targ))
    for m in (as_metrics(func)[0], as_metrics(partial(func))[0], as_metrics(metric)[0]):
        assert feed(m, pred, targ, bs=8).value == pytest.approx(whole, rel=1e-14)
        assert m.name == func.__name__
    assert feed(AvgMetric(func), pred, targ, bs=8).value != pytest.approx(whole, rel=1e-3)
    assert metric().value is None


REGRESSION = {R2Score: 'r2_score', ExplainedVariance: 'explained_variance_score'}


@pytest.mark.parametrize('offset', [0.0, 3e7])
@pytest.mark.parametrize('scale', [1.0, 1e-3, 1e5])
def test_r2_variance_and_correlation_equal_sklearn_and_numpy(offset: float, scale: float) -> None:
    from sklearn import metrics as skm

    targ = (torch.randn(101, dtype=torch.float64) + offset) * scale
    pred = 0.8 * targ + torch.randn(101) * scale / 3
    for metric, name in REGRESSION.items():
        m = feed(metric(), pred[:, None], targ, bs=32)
        assert m.value == pytest.approx(getattr(skm, name)(targ, pred), rel=1e-6) and m.name == name
    m = feed(PearsonCorrCoef(), pred, targ, bs=32)
    assert m.value == pytest.approx(np.corrcoef(pred, targ)[0, 1], rel=1e-6)
    assert m.name == 'pearsonr'


def test_regression_scores_of_the_best_and_of_what_is_not_defined() -> None:
    targ, ones = torch.tensor([1.0, 2.0, 4.0]), torch.full((3,), 0.1)
    assert [m(targ, targ) for m in (R2Score(), ExplainedVariance())] == [1.0, 1.0]
    assert PearsonCorrCoef()(-targ, targ) == pytest.approx(-1.0)
    assert R2Score()(targ + 1, targ) < ExplainedVariance()(targ + 1, targ) == 1.0
    # targets that are all equal: 1 when met, otherwise 0, as in scikit-learn
    assert (R2Score()(ones, ones), R2Score()(targ, ones)) == (1.0, 0.0)
    assert (ExplainedVariance()(ones + 1, ones), ExplainedVariance()(targ, ones)) == (1.0, 0.0)
    assert math.isnan(PearsonCorrCoef()(targ, ones))
    assert math.isnan(PearsonCorrCoef()(0.1 * ones, targ))  # whose mean is rounded
    for scale in (1e-200, 1e200):
        assert PearsonCorrCoef()(scale * targ.double(), targ) == pytest.approx(1.0)
    assert math.isnan(R2Score()(targ[:1], targ[:1]))


def test_shapes_are_never_broadcast() -> None:
    cases = (
        (accuracy, (4, 3), (4, 3)),
        (mse, (4, 2), (4,)),
        (msle, (4, 1), (1, 2)),
        (exp_rmspe, (4,), (2,)),
        (accuracy_multi, (4, 3), (4,)),
        (top_k_accuracy, (4, 6), (3,)),
        (foreground_acc, (2, 3, 4), (2, 3)),
        (R2Score(), (4, 2), (4,)),
        (BrierScore(), (4, 2), (3,)),
        (BrierScoreMulti(), (4, 2), (4,)),
    )
    for func, pred, targ in cases:
        with pytest.raises(MetricError, match='do not fit targets'):
            func(torch.zeros(pred), torch.zeros(targ))


# ---------------------------------------------------------------- probabilities and losses


@pytest.mark.parametrize('n_classes', [2, 4])
def test_brier_score_equals_sklearn(n_classes: int) -> None:
    skm = pytest.importorskip('sklearn.metrics')
    pred, targ = scores(70, n_classes)
    p = pred.double().softmax(1).numpy()
    p = p / p.sum(1, keepdims=True)
    expected = (((p - np.eye(n_classes)[targ]) ** 2).sum(1) / (2 if n_classes == 2 else 1)).mean()
    if n_classes == 2:
        assert expected == pytest.approx(skm.brier_score_loss(targ, p[:, 1]))
    image = pred.reshape(7, 10, n_classes).movedim(-1, 1)
    assert feed(BrierScore(), pred, targ, bs=32).value == pytest.approx(expected)
    assert feed(BrierScore(axis=1), image, targ.reshape(7, 10), bs=2).value == pytest.approx(
        expected
    )
    assert BrierScore()(torch.eye(n_classes) * 100, torch.arange(n_classes)) == 0.0
    worst = BrierScore()(torch.eye(n_classes) * 100, (torch.arange(n_classes) + 1) % n_classes)
    assert worst == (1.0 if n_classes == 2 else 2.0)


def test_brier_score_of_labels() -> None:
    pred, targ = torch.randn(20, 3), torch.randint(2, (20, 3))
    p, t = pred.double().sigmoid().numpy(), targ.numpy()
    assert feed(BrierScoreMulti(), pred, targ, bs=8).value == pytest.approx(np.mean((p - t) ** 2))
    expected = np.mean((p - t) ** 2)
    assert BrierScoreMulti(sigmoid=False)(torch.from_numpy(p), targ) == pytest.approx(expected)
    assert BrierScore().name == BrierScoreMulti().name == 'brier_score_loss'


def test_perplexity_is_of_the_mean_loss() -> None:
    pred, targ = scores(70, 5)
    (m,) = as_metrics(perplexity)
    assert m.value is None and m.name == 'perplexity' and isinstance(m, Perplexity)
    for p, t in zip(pred.split(32), targ.split(32), strict=True):
        m.accumulate(batch(p, t, loss=F.cross_entropy(p, t)))
    assert m.value == pytest.approx(float(F.cross_entropy(pred, targ).exp()))
    assert as_metrics(perplexity)[0] is not m
    m.reset()
    m.accumulate(batch(None, targ, loss=torch.tensor(1000.0)))
    assert m.value == math.inf


class TwoParts(nn.Module):
    "A loss that stores its parts in attributes."

    def forward(self, pred: torch.Tensor, targ: torch.Tensor) -> torch.Tensor:
        self.square, self.size = (pred - targ).square().mean(), pred.abs().mean()
        return self.square + self.size


def test_loss_metrics_average_parts_of_the_loss() -> None:
    pred, targ = pairs()
    loss, ms = TwoParts(), LossMetrics('square,size', nms=['l2', 'l1'])
    for m in ms:
        m.reset()
    for p, t in zip(pred.split(8), targ.split(8), strict=True):
        loss(p, t)
        for m in ms:
            m.accumulate(batch(p, t, loss_func=loss))
    assert [m.name for m in ms] == ['l2', 'l1'] and LossMetric('size').name == 'size'
    assert ms[0].value == pytest.approx(float((pred - targ).square().mean()))
    assert ms[1].value == pytest.approx(float(pred.abs().mean()))


# ---------------------------------------------------------------- in a Learner


def test_nothing_is_read_from_the_device_per_batch() -> None:
    pred, targ = torch.rand(8, 3), torch.randint(3, (8,))
    learn = SimpleNamespace(
        pred=watch_reads(pred), yb=(targ,), xb=(), loss=watch_reads(torch.tensor(1.0))
    )
    regression = SimpleNamespace(pred=watch_reads(pred), yb=(pred + 1,), xb=())
    top_2, foreground = partial(top_k_accuracy, k=2), partial(foreground_acc, axis=1)
    of_classes = as_metrics([accuracy, error_rate, top_2, foreground, BrierScore, perplexity])
    of_numbers = as_metrics([mse, mae, msle, rmse, exp_rmspe, accuracy_multi])
    of_numbers += as_metrics([R2Score, ExplainedVariance, PearsonCorrCoef, BrierScoreMulti])
    for ms, at in ((of_classes, learn), (of_numbers, regression)):
        for m in ms:
            m.reset()
            m.accumulate(at)
            m.accumulate(at)
            assert Watched.reads == 0, m
            dry_run(m, pred, at.yb)
    assert all(m.value is not None for ms in (of_classes, of_numbers) for m in ms)
