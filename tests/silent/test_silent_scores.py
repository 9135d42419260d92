"""Scores of values far from zero, and scores of a whole set that are given as functions of a batch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import sklearn.metrics
import torch
import torchmetrics.functional
from torch import Tensor, nn

from learnkit import SGD, APScoreBinary, DataLoaders, Learner, RocAucBinary
from learnkit.metrics import APScoreMulti, RocAuc, RocAucMulti


def confident() -> tuple[Tensor, Tensor]:
    "Logits from 18 to 30, whose sigmoid in single precision is 1, and which rank the targets well."
    gen = torch.Generator().manual_seed(0)
    targ = torch.arange(40) % 2
    return 18 + 12 * torch.rand(40, generator=gen).add(targ).div(2), targ


@pytest.mark.parametrize(
    'kind', ['RocAucBinary', 'APScoreBinary', 'RocAuc', 'RocAucMulti', 'APMulti']
)
def test_ranking_of_confident_scores(kind: str) -> None:
    score, targ = confident()
    of_classes = torch.stack([torch.zeros(40), score], 1)
    metrics: dict[str, tuple[Any, Tensor, Tensor]] = {
        'RocAucBinary': (RocAucBinary(), of_classes, targ),
        'APScoreBinary': (APScoreBinary(), of_classes, targ),
        'RocAuc': (RocAuc(), of_classes, targ),
        'RocAucMulti': (RocAucMulti(), score[:, None], targ[:, None]),
        'APMulti': (APScoreMulti(), score[:, None], targ[:, None]),
    }
    metric, pred, y = metrics[kind]
    reference = (
        sklearn.metrics.average_precision_score if 'AP' in kind else sklearn.metrics.roc_auc_score
    )
    expected = reference(targ, score)
    now = metric(pred, y)
    assert now == pytest.approx(expected, rel=1e-6)


# -- scores of a whole set, given as functions of a batch --------------------------------------------


def class_scores() -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(0)
    return torch.randn(21, 2, generator=gen), torch.randint(2, (21,), generator=gen)


def f1_by_hand(pred: Tensor, targ: Tensor) -> Tensor:
    chosen = pred.argmax(1)
    hits = ((chosen == 1) & (targ == 1)).sum()
    return 2 * hits / ((chosen == 1).sum() + (targ == 1).sum())


F1 = partial(torchmetrics.functional.f1_score, task='multiclass', num_classes=2, average='macro')


def learner_with(func: Callable[..., Any], n_batches: int) -> Learner:
    batches = [class_scores()] * n_batches
    dls = DataLoaders(batches, batches)
    model = nn.Linear(2, 2)
    model.weight.data, model.bias.data = torch.eye(2), torch.zeros(2)
    return Learner(dls, model, nn.CrossEntropyLoss(), SGD, lr=0.0, metrics=func)


@pytest.mark.parametrize('func', [F1, f1_by_hand])
def test_a_score_of_the_set_warns_in_a_fit(func: Callable[..., Any]) -> None:
    learn = learner_with(func, 2)
    with learn.no_bar(), learn.no_logging():
        with pytest.warns(
            UserWarning, match=r'the mean of its halves.*`AccumMetric\(f\)`'
        ) as caught:
            learn.fit(1)
        learn.validate()  # once
    assert len(caught) == 1
