"""Compare fastai's classification scores with scikit-learn, and ranking scores where they share behavior."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from learnkit.core.errors import MetricError
from learnkit.data.dataloaders import DataLoaders, TensorLoader
from learnkit.learner import Learner
from learnkit.metrics import (
    APScoreBinary,
    APScoreMulti,
    BalancedAccuracy,
    CohenKappa,
    F1Score,
    F1ScoreMulti,
    FBeta,
    FBetaMulti,
    HammingLoss,
    HammingLossMulti,
    Jaccard,
    JaccardMulti,
    MatthewsCorrCoef,
    MatthewsCorrCoefMulti,
    Precision,
    PrecisionMulti,
    Recall,
    RecallMulti,
    RocAuc,
    RocAucBinary,
    RocAucMulti,
    SpearmanCorrCoef,
)
from learnkit.metrics.averages import as_metrics, dry_run
from tests.helpers.libraries import require
from tests.helpers.measuring import (
    Watched,
    batch,
    class_scores,
    close,
    feed,
    label_scores,
    watch_reads,
)

require('torchmetrics')
skm = require('sklearn.metrics')
# the names of scikit-learn's functions
OF_CLASSES = {
    F1Score: 'f1_score',
    Precision: 'precision_score',
    Recall: 'recall_score',
    Jaccard: 'jaccard_score',
}
OF_LABELS = {
    F1ScoreMulti: 'f1_score',
    PrecisionMulti: 'precision_score',
    RecallMulti: 'recall_score',
    JaccardMulti: 'jaccard_score',
}
RATIOS = {
    HammingLoss: 'hamming_loss',
    BalancedAccuracy: 'balanced_accuracy_score',
    CohenKappa: 'cohen_kappa_score',
    MatthewsCorrCoef: 'matthews_corrcoef',
}


def value(metric: Any, pred: torch.Tensor, targ: torch.Tensor) -> Any:
    return feed(metric, pred, targ, bs=64).value


# ---------------------------------------------------------------- single labels


@pytest.mark.parametrize('metric', OF_CLASSES)
@pytest.mark.parametrize('pos_label', [0, 1])
def test_scores_of_two_classes(metric: Any, pos_label: int) -> None:
    pred, targ, t, p = class_scores(2)
    expected = close(getattr(skm, OF_CLASSES[metric])(t, p, pos_label=pos_label))
    assert value(metric(pos_label=pos_label), pred, targ) == expected
    expected = skm.fbeta_score(t, p, beta=0.5, pos_label=pos_label)
    assert value(FBeta(0.5, pos_label=pos_label), pred, targ) == close(expected)


@pytest.mark.parametrize('metric', OF_CLASSES)
@pytest.mark.parametrize('average', ['macro', 'micro', 'weighted', None])
@pytest.mark.parametrize('seen', [4, 3])
def test_scores_of_many_classes(metric: Any, average: str | None, seen: int) -> None:
    "A class that never occurs is not part of an average."
    pred, targ, t, p = class_scores(4, seen)
    for m, expected in (
        (metric(average=average), getattr(skm, OF_CLASSES[metric])(t, p, average=average)),
        (FBeta(2, average=average), skm.fbeta_score(t, p, beta=2, average=average)),
    ):
        got = value(m, pred, targ)
        assert (got if average else got[:seen].tolist()) == close(expected)


@pytest.mark.parametrize('metric', OF_CLASSES)
def test_scores_of_some_classes(metric: Any) -> None:
    pred, targ, t, p = class_scores(4)
    expected = getattr(skm, OF_CLASSES[metric])(t, p, labels=[2, 0], average=None)
    assert value(metric(labels=[2, 0], average='macro'), pred, targ) == close(expected.mean())
    assert value(metric(labels=[2, 0], average=None), pred, targ).tolist() == close(expected)


@pytest.mark.parametrize('metric', RATIOS)
@pytest.mark.parametrize(('n', 'seen'), [(2, 2), (4, 4), (4, 3)])
def test_ratios(metric: Any, n: int, seen: int) -> None:
    pred, targ, t, p = class_scores(n, seen)
    assert value(metric(), pred, targ) == close(getattr(skm, RATIOS[metric])(t, p))
    image = pred.reshape(15, 10, n).movedim(-1, 1)
    m = feed(metric(axis=1), image, targ.reshape(15, 10), bs=4)
    assert m.value == close(getattr(skm, RATIOS[metric])(t, p)) and m.name == RATIOS[metric]


def test_balanced_accuracy_leaves_out_what_is_only_predicted() -> None:
    pred, targ, _, _ = class_scores(3)
    targ[targ == 2] = 0
    recalls = [float((pred.argmax(1) == targ)[targ == c].float().mean()) for c in (0, 1)]
    assert value(BalancedAccuracy(), pred, targ) == close(np.mean(recalls))
    expected = close((np.mean(recalls) - 0.5) / 0.5)
    assert value(BalancedAccuracy(adjusted=True), pred, targ) == expected


@pytest.mark.parametrize('weights', ['linear', 'quadratic'])
def test_weighted_kappa(weights: str) -> None:
    pred, targ, t, p = class_scores(5)
    expected = close(skm.cohen_kappa_score(t, p, weights=weights))
    assert value(CohenKappa(weights=weights), pred, targ) == expected


# ---------------------------------------------------------------- any number of labels


@pytest.mark.parametrize('metric', OF_LABELS)
@pytest.mark.parametrize('thresh', [0.5, 0.3])
def test_scores_of_labels(metric: Any, thresh: float) -> None:
    pred, targ, t, probs = label_scores()
    p, score = probs >= thresh, getattr(skm, OF_LABELS[metric])
    for average in ('macro', 'micro', 'weighted'):
        expected = close(score(t, p, average=average))
        assert value(metric(thresh, average=average), pred, targ) == expected
        found = value(metric(thresh, sigmoid=False, average=average), pred.sigmoid(), targ.float())
        assert found == expected
    per_label = score(t, p, average=None)
    assert value(metric(thresh, average=None), pred, targ).tolist() == close(per_label)
    assert value(metric(thresh, labels=[3, 1]), pred, targ) == close(per_label[[3, 1]].mean())
    expected = close(skm.fbeta_score(t, p, beta=2, average='macro'))
    assert value(FBetaMulti(2, thresh), pred, targ) == expected


def test_ratios_of_labels() -> None:
    pred, targ, t, probs = label_scores()
    p = probs >= 0.5
    assert value(HammingLossMulti(), pred, targ) == close(skm.hamming_loss(t, p))
    expected = close(skm.matthews_corrcoef(t.ravel(), p.ravel()))
    assert value(MatthewsCorrCoefMulti(), pred, targ) == expected


def test_labels_that_never_or_always_occur() -> None:
    pred, targ, t, probs = label_scores()
    targ[:, 0], targ[:, 1] = 0, 1
    auc = [skm.roc_auc_score(t[:, i], probs[:, i]) for i in (2, 3)]
    ap = [1.0] + [skm.average_precision_score(t[:, i], probs[:, i]) for i in (2, 3)]
    assert value(RocAucMulti(), pred, targ) == close(np.mean(auc))
    assert value(APScoreMulti(), pred, targ) == close(np.mean(ap))
    assert value(F1ScoreMulti(average=None), pred, targ)[0] == 0.0
    assert math.isnan(value(RocAucMulti(), pred, targ * 0))


def test_one_label_of_any_shape() -> None:
    pred, targ, t, probs = label_scores(1)
    expected = close(skm.f1_score(t[:, 0], probs[:, 0] >= 0.5))
    for p, y in ((pred, targ), (pred, targ[:, 0]), (pred[:, 0], targ[:, 0])):
        assert value(F1ScoreMulti(), p, y) == expected


# ---------------------------------------------------------------- best, worst, others

SINGLE = [*OF_CLASSES, *RATIOS, RocAuc, RocAucBinary, APScoreBinary]
MULTI = [*OF_LABELS, HammingLossMulti, MatthewsCorrCoefMulti, RocAucMulti, APScoreMulti]


@pytest.mark.parametrize('metric', [*SINGLE, *MULTI])
def test_best_and_worst(metric: Any) -> None:
    targ = torch.tensor([0, 1, 1, 0, 1])
    pred = torch.eye(2)[targ] * 8
    if metric in MULTI:
        targ, pred = torch.eye(2, dtype=torch.long)[targ], pred - 4
    best = metric()(pred, targ)
    worst = metric()(pred.flip(1), targ)
    assert best == close(0.0 if metric in (HammingLoss, HammingLossMulti) else 1.0)
    assert worst < 0.61 if metric in (APScoreBinary, APScoreMulti) else worst <= 0.0 or worst == 1.0
    assert worst != close(best)


def test_matthews_that_is_not_defined_is_0_as_in_sklearn() -> None:
    targ = torch.ones(5, dtype=torch.long)
    assert MatthewsCorrCoef()(torch.eye(2)[targ], targ) == 0.0  # of torchmetrics it would be 1


# ---------------------------------------------------------------- what can go wrong


def test_wrong_shapes_are_reported_before_training() -> None:
    pred, targ, _, _ = class_scores(3)
    for metric in (F1Score(average='macro'), *(m() for m in (*RATIOS, RocAuc))):
        with pytest.raises(MetricError, match='do not fit targets'):
            dry_run(metric, pred, (targ[:10],))
        assert metric.value is None
    for metric in (m() for m in MULTI):
        with pytest.raises(MetricError, match='do not fit targets'):
            dry_run(metric, pred, (targ,))
    with pytest.raises(MetricError, match='do not fit targets'):
        dry_run(SpearmanCorrCoef(), pred, (targ,))


def test_scores_of_two_classes_on_three() -> None:
    pred, targ, _, _ = class_scores(3)
    for metric in (F1Score(), Jaccard(), RocAucBinary(), APScoreBinary()):
        with pytest.raises(MetricError, match=r'two classes, .* 3 along axis -1'):
            dry_run(metric, pred, (targ,))
    with pytest.raises(MetricError, match='F1ScoreMulti'):
        dry_run(F1Score(), pred[:, :1], (targ,))


def test_targets_that_are_not_a_class() -> None:
    pred, targ, _, _ = class_scores(3)
    targ[3] = 255
    for metric in (F1Score(average='macro'), CohenKappa(), RocAuc()):
        with pytest.raises(MetricError, match='1 targets are not class numbers'):
            metric(pred, targ)


def test_options_that_cannot_be() -> None:
    pred, targ, _, _ = class_scores(2)
    for metric in (
        F1Score(average='mean'),
        F1Score(pos_label=2),
        FBeta(-1),
        CohenKappa(weights='cubic'),
    ):
        with pytest.raises(MetricError, match=f'Metric `{metric.name}` cannot be computed'):
            dry_run(metric, pred, (targ,))
    for ranking, average in ((RocAuc, 'micro'), (RocAucMulti, 'samples')):
        with pytest.raises(MetricError, match=f"average='{average}': use one of"):
            ranking(average=average)
    with pytest.raises(MetricError, match='Did you mean `train`'):
        Recall(on='trian')


# ---------------------------------------------------------------- how they are computed


def test_nothing_is_read_from_the_device_per_batch() -> None:
    single, multi = class_scores(2), label_scores(2)
    for metric, (pred, targ, _, _) in [
        *((m, single) for m in SINGLE),
        *((m, multi) for m in MULTI),
    ]:
        m, learn = metric(), batch(watch_reads(pred), targ)
        m.accumulate(learn)
        m.accumulate(learn)
        assert Watched.reads == 0, m


def test_names_are_fastais() -> None:
    for m, name in (OF_CLASSES | OF_LABELS | RATIOS).items():
        assert m().name == name
    ms = as_metrics(
        [
            F1Score,
            {'f1': F1Score(average='macro')},
            F1Score(average='micro'),
            RocAuc(),
            RocAucBinary,
        ]
    )
    assert [m.name for m in ms] == 'f1_score f1 f1_score_2 roc_auc_score roc_auc_score_2'.split()
    assert [FBeta(1).name, APScoreBinary().name] == ['fbeta_score', 'average_precision_score']


def test_in_a_learner_in_training_and_validation() -> None:
    x = torch.randn(90, 4)
    y = (x[:, 0] + torch.randn(90) / 2 > 0).long() + (x[:, 1] > 1).long()
    dls = DataLoaders(TensorLoader(x, y, bs=20), TensorLoader(x, y, bs=32))
    model = nn.Linear(4, 3)
    metrics = [F1Score(average='macro', on='both'), RocAuc(), CohenKappa]
    learn = Learner(dls, model, nn.CrossEntropyLoss(), lr=0.1, metrics=metrics)
    learn.logger = lambda row: None
    learn.fit(2)
    with torch.no_grad():
        pred = learn.model(x)
    row, p = learn.history[-1], pred.argmax(1)
    assert row['f1_score'] == close(skm.f1_score(y, p, average='macro'))
    expected = close(skm.roc_auc_score(y, pred.double().softmax(1), multi_class='ovr'))
    assert row['roc_auc_score'] == expected
    assert row['cohen_kappa_score'] == close(skm.cohen_kappa_score(y, p))
    assert learn.validate()[1] == row['f1_score']
    assert copy.deepcopy(learn.metrics[0]).name == 'f1_score'
