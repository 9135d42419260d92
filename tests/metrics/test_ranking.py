"""Compare ranking scores with scikit-learn and scipy."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from learnkit.core.errors import MetricError
from learnkit.metrics import (
    APScoreBinary,
    APScoreMulti,
    CorpusBLEUMetric,
    RocAuc,
    RocAucBinary,
    RocAucMulti,
    SpearmanCorrCoef,
)
from learnkit.metrics.averages import dry_run
from tests.helpers.libraries import require
from tests.helpers.measuring import class_scores, close, feed, label_scores

require('torchmetrics')
skm = require('sklearn.metrics')


def value(metric: Any, pred: torch.Tensor, targ: torch.Tensor) -> Any:
    return feed(metric, pred, targ, bs=64).value


@pytest.mark.parametrize(('n', 'average'), [(2, 'macro'), (4, 'macro'), (4, 'weighted')])
def test_area_under_the_curve_of_many_classes(n: int, average: str) -> None:
    pred, targ, t, _ = class_scores(n)
    probs = pred.double().softmax(1).numpy()
    per_class = [skm.roc_auc_score(t == c, probs[:, c]) for c in range(n)]
    expected = np.average(per_class, weights=np.bincount(t) if average == 'weighted' else None)
    if n > 2:
        assert expected == close(skm.roc_auc_score(t, probs, multi_class='ovr', average=average))
    assert value(RocAuc(average=average), pred, targ) == close(expected)
    assert value(RocAuc(average=None), pred, targ).tolist() == close(per_class)


def test_rankings_of_two_classes() -> None:
    pred, targ, t, _ = class_scores(2)
    probs = pred.double().softmax(1).numpy()
    assert value(RocAucBinary(), pred, targ) == close(skm.roc_auc_score(t, probs[:, 1]))
    found = value(RocAucBinary(max_fpr=0.3), pred, targ)
    assert found == close(skm.roc_auc_score(t, probs[:, 1], max_fpr=0.3))
    for c in (0, 1):
        expected = skm.average_precision_score(t, probs[:, c], pos_label=c)
        assert value(APScoreBinary(pos_label=c), pred, targ) == close(expected)


def test_classes_that_never_occur_in_rankings() -> None:
    pred, targ, t, _ = class_scores(4, 3)
    probs = pred.double().softmax(1).numpy()
    per_class = [skm.roc_auc_score(t == c, probs[:, c]) for c in range(3)]
    assert value(RocAuc(), pred, targ) == close(np.mean(per_class))
    assert value(RocAuc(average=None), pred, targ).isnan().tolist() == [False] * 3 + [True]
    pred, targ, _, _ = class_scores(2, 1)
    for m in (RocAuc(), RocAucBinary(), APScoreBinary()):
        assert math.isnan(value(m, pred, targ))
    assert value(APScoreBinary(pos_label=0), pred, targ) == 1.0


@pytest.mark.parametrize('average', ['macro', 'micro', 'weighted', None])
@pytest.mark.parametrize('metric', [RocAucMulti, APScoreMulti])
def test_rankings_of_labels(metric: Any, average: str | None) -> None:
    pred, targ, t, probs = label_scores()
    func = skm.roc_auc_score if metric is RocAucMulti else skm.average_precision_score
    expected = close(func(t, probs, average=average))
    for m, p in (
        (metric(average=average), pred),
        (metric(sigmoid=False, average=average), pred.sigmoid()),
    ):
        got = value(m, p, targ)
        assert (got if average else got.tolist()) == expected and m.name == func.__name__


def test_spearman_equals_scipy() -> None:
    stats = pytest.importorskip('scipy.stats')
    targ = torch.randn(150, dtype=torch.float64)
    pred = (targ + torch.randn(150)).round(decimals=1)  # with ties
    m = feed(SpearmanCorrCoef(), pred[:, None], targ, bs=64)
    assert m.value == pytest.approx(stats.spearmanr(pred, targ)[0], rel=1e-6)
    assert m.name == 'spearmanr'


@pytest.mark.parametrize(
    ('pred', 'targ'),
    [
        ([1, math.nan, 3], [1, 2, 3]),
        ([1, 2], [10, 30]),
        ([2, 1], [10, 30]),
        ([1, 2, 2, 3, 5], [2, 2, 1, 4, 9]),
        ([0.1, 0.1, 0.1], [1, 2, 3]),
        ([1, 2, 3], [7, 7, 7]),
        ([1, 2, 3], [1, 2, math.nan]),
        ([1, math.inf, 3], [1, 2, 3]),
        ([1e200, 3e200, 2e200], [1, 2, 3]),
        ([3], [4]),
    ],
)
@pytest.mark.filterwarnings('ignore:An input array is constant')
@pytest.mark.filterwarnings('ignore:invalid value encountered')
def test_spearman_of_few_values_equals_scipy(pred: list[float], targ: list[float]) -> None:
    stats = pytest.importorskip('scipy.stats')
    expected = stats.spearmanr(pred, targ)[0] if len(pred) > 1 else math.nan
    found = SpearmanCorrCoef()(*(torch.tensor(v, dtype=torch.float64) for v in (pred, targ)))
    assert found == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_spearman_of_equal_and_reversed_orders_is_exactly_one() -> None:
    for n in range(2, 60):
        order = torch.randperm(n)
        assert SpearmanCorrCoef()(order, 3.0 * order) == 1.0
        assert SpearmanCorrCoef()(order, -order) == -1.0


def test_corpus_bleu() -> None:
    "The first of 2 sentences of 5 tokens is right, the second has a wrong last token."
    targ = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
    predicted = targ.clone()
    predicted[1, 4] = 0
    m = feed(CorpusBLEUMetric(), torch.eye(11)[predicted], targ, bs=1)
    assert m.value == close((9 / 10 * 7 / 8 * 5 / 6 * 3 / 4) ** 0.25) and m.name == 'corpus_bleu'
    assert feed(CorpusBLEUMetric(axis=1), torch.eye(11)[targ].movedim(-1, 1), targ).value == 1.0
    with pytest.raises(MetricError, match=r'\(B, T, C\)'):
        dry_run(CorpusBLEUMetric(), torch.eye(11), (targ,))


def test_what_cannot_be_ranked() -> None:
    for options in ({'average': 'binary'}, {'multi_class': 'ovo'}):
        with pytest.raises(MetricError, match=next(iter(options))):
            RocAuc(**options)
    pred, targ, _, _ = class_scores(3)
    for metric in (RocAucBinary(), APScoreBinary()):
        with pytest.raises(MetricError, match=r'two classes, .* 3 along axis -1'):
            dry_run(metric, pred, (targ,))
    with pytest.raises(MetricError, match='do not fit targets'):
        dry_run(RocAuc(), pred, (targ[:10],))
    targ[3] = 255
    with pytest.raises(MetricError, match='1 targets are not class numbers'):
        RocAuc()(pred, targ)
    with pytest.raises(MetricError, match='samples'):
        dry_run(RocAucMulti(average='samples'), pred, (torch.zeros(150, 3).long(),))
