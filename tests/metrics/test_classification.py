"""Compare fastai's classification scores on batches with scikit-learn on the whole data set."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from learnkit.core.errors import MetricError
from learnkit.data.dataloaders import DataLoaders, TensorLoader
from learnkit.metrics import (
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
)
from learnkit.metrics.averages import as_metrics, dry_run
from tests.helpers.learners import quiet_learner
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


@pytest.mark.parametrize('metric', OF_CLASSES)
def test_scores_of_classes(metric: Any) -> None:
    score = getattr(skm, OF_CLASSES[metric])
    pred, targ, t, p = class_scores(2)
    assert value(metric(pos_label=0), pred, targ) == close(score(t, p, pos_label=0))
    assert value(FBeta(0.5), pred, targ) == close(skm.fbeta_score(t, p, beta=0.5))
    pred, targ, t, p = class_scores(4, 3)  # the last class does not occur
    assert value(metric(average='macro'), pred, targ) == close(score(t, p, average='macro'))
    assert value(metric(labels=[2, 0], average=None), pred, targ).tolist() == close(
        score(t, p, labels=[2, 0], average=None)
    )


def test_a_value_for_each_class_up_to_the_highest() -> None:
    pred, targ = torch.eye(4)[[0, 2, 2, 0]], torch.tensor([0, 2, 0, 0])
    assert F1Score(average=None)(pred, targ).tolist() == close([0.8, 0.0, 2 / 3])
    assert F1Score(average='macro')(pred, targ) == close((0.8 + 2 / 3) / 2)


@pytest.mark.parametrize('metric', RATIOS)
def test_ratios(metric: Any) -> None:
    pred, targ, t, p = class_scores(4, 3)
    image = pred.reshape(15, 10, 4).movedim(-1, 1)
    m = feed(metric(axis=1), image, targ.reshape(15, 10), bs=4)
    assert m.value == close(getattr(skm, RATIOS[metric])(t, p)) and m.name == RATIOS[metric]
    if metric in (BalancedAccuracy, CohenKappa):
        option = {'adjusted': True} if metric is BalancedAccuracy else {'weights': 'quadratic'}
        expected = close(getattr(skm, RATIOS[metric])(t, p, **option))
        assert value(metric(**option), pred, targ) == expected


def test_ratios_by_hand() -> None:
    pred, targ, _, _ = class_scores(3)
    targ[targ == 2] = 0  # a class that is only predicted
    recalls = [float((pred.argmax(1) == targ)[targ == c].float().mean()) for c in (0, 1)]
    assert value(BalancedAccuracy(), pred, targ) == close(np.mean(recalls))
    ones = torch.ones(5, dtype=torch.long)
    assert MatthewsCorrCoef()(torch.eye(2)[ones], ones) == 0.0
    assert math.isnan(CohenKappa()(torch.eye(2)[ones], ones))


@pytest.mark.parametrize('metric', OF_LABELS)
def test_scores_of_labels(metric: Any) -> None:
    pred, targ, t, probs = label_scores()
    p, score = probs >= 0.3, getattr(skm, OF_LABELS[metric])
    for average in ('macro', 'weighted'):
        expected = close(score(t, p, average=average))
        assert value(metric(0.3, average=average), pred, targ) == expected
        found = value(metric(0.3, sigmoid=False, average=average), pred.sigmoid(), targ.float())
        assert found == expected
    per_label = score(t, p, average=None)
    assert value(metric(0.3, average=None), pred, targ).tolist() == close(per_label)
    assert value(metric(0.3, labels=[3, 1]), pred, targ) == close(per_label[[3, 1]].mean())
    expected = close(skm.fbeta_score(t, p, beta=2, average='macro'))
    assert value(FBetaMulti(2, 0.3), pred, targ) == expected


def test_all_labels_together() -> None:
    pred, targ, t, probs = label_scores()
    p = probs >= 0.5
    assert value(HammingLossMulti(), pred, targ) == close((p != t).mean())
    expected = close(np.corrcoef(t.ravel(), p.ravel())[0, 1])
    assert value(MatthewsCorrCoefMulti(), pred, targ) == expected


def test_one_label_of_any_shape() -> None:
    pred, targ, t, probs = label_scores(1)
    expected = close(skm.f1_score(t[:, 0], probs[:, 0] >= 0.5))
    for p, y in ((pred, targ), (pred, targ[:, 0]), (pred[:, 0], targ[:, 0])):
        assert value(F1ScoreMulti(), p, y) == expected


# -- what can go wrong -----------------------------------------------------------------------------


def test_wrong_shapes_and_classes_are_reported_before_training() -> None:
    pred, targ, _, _ = class_scores(3)
    for metric, targets in ((CohenKappa(), targ[:10]), (HammingLossMulti(), targ)):
        with pytest.raises(MetricError, match='do not fit targets'):
            dry_run(metric, pred, (targets,))
        assert metric.value is None
    with pytest.raises(MetricError, match=r'two classes, .* 3 along axis -1.*F1ScoreMulti'):
        dry_run(F1Score(), pred, (targ,))
    targ[3] = 255
    for metric in (F1Score(average='macro'), CohenKappa()):
        with pytest.raises(MetricError, match='1 targets are not class numbers'):
            metric(pred, targ)


def test_options_that_cannot_be() -> None:
    pred, targ, _, _ = class_scores(2)
    wrong = F1Score(average='mean'), F1Score(pos_label=2), FBeta(-1), CohenKappa(weights='cubic')
    for metric in wrong:
        with pytest.raises(MetricError, match=f'Metric `{metric.name}`'):
            dry_run(metric, pred, (targ,))


# -- in a list of metrics --------------------------------------------------------------------------


def test_nothing_is_read_from_the_device_per_batch() -> None:
    for metric, (pred, targ, _, _) in (
        (F1Score(), class_scores(2)),
        (F1ScoreMulti(), label_scores(2)),
    ):
        learn = batch(watch_reads(pred), targ)
        metric.accumulate(learn)
        metric.accumulate(learn)
        assert Watched.reads == 0


def test_names_and_values_in_a_learner() -> None:
    x = torch.randn(90, 4)
    y = (x[:, 0] + torch.randn(90) / 2 > 0).long() + (x[:, 1] > 1).long()
    dls = DataLoaders(TensorLoader(x, y, bs=20), TensorLoader(x, y, bs=32))
    metrics = [F1Score(average='macro', on='both'), F1Score(average='micro'), CohenKappa]
    learn = quiet_learner(dls, nn.Linear(4, 3), nn.CrossEntropyLoss(), lr=0.1, metrics=metrics)
    learn.fit(2)
    with torch.no_grad():
        p = learn.model(x).argmax(1)
    row = learn.history[-1]
    assert row['f1_score'] == close(skm.f1_score(y, p, average='macro'))
    assert row['f1_score_2'] == close(skm.f1_score(y, p, average='micro'))
    assert row['cohen_kappa_score'] == close(skm.cohen_kappa_score(y, p))
    assert learn.validate()[1] == row['f1_score']
    assert [m.name for m in as_metrics([{'f1': F1Score()}, FBeta(1)])] == ['f1', 'fbeta_score']
