"""Compare metrics of the whole set with scikit-learn and with direct computation."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from learnkit import DataLoaders, Learner
from learnkit.core.errors import MetricError
from learnkit.metrics import AccumMetric, skm_to_fastai
from tests.helpers.libraries import require

sklearn = require('sklearn.metrics')
G = torch.Generator().manual_seed(0)
X, Y = torch.randn(50, 4, generator=G), torch.randint(3, (50,), generator=G)
LABELS = torch.randint(2, (50, 3), generator=G)


def learner(metrics: Any, targ: Tensor = Y, loss: Any = nn.functional.cross_entropy) -> Learner:
    dls = DataLoaders.from_tensors((X, targ), (X, targ), bs=16, device='cpu')
    return Learner(dls, nn.Linear(4, 3), loss, metrics=metrics)


def test_scores_of_scikit_learn_on_the_whole_set() -> None:
    metrics = [
        skm_to_fastai(sklearn.f1_score, average='macro'),
        skm_to_fastai(sklearn.cohen_kappa_score),
    ]
    learn = learner(metrics)
    _, f1, kappa = learn.validate()
    pred = learn.model(X).argmax(1)
    assert f1 == pytest.approx(sklearn.f1_score(Y, pred, average='macro'))
    assert kappa == pytest.approx(sklearn.cohen_kappa_score(Y, pred))
    assert [m.name for m in learn.metrics] == ['f1_score', 'cohen_kappa_score']
    assert learn.validate()[1] == f1  # each pass starts from zero


def test_labels_and_probabilities() -> None:
    def bce(p: Tensor, t: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(p, t.float())

    score = skm_to_fastai(sklearn.hamming_loss, thresh=0.3)
    learn = learner(score, LABELS, bce)
    chosen = learn.model(X).sigmoid() >= 0.3
    assert learn.validate()[1] == pytest.approx(float((chosen != LABELS).float().mean()))
    two = AccumMetric(
        sklearn.roc_auc_score, activation='binarysoftmax', to_np=True, invert_arg=True
    )
    scores, targ = torch.randn(20, 2, generator=G), torch.arange(20) % 2
    assert two(scores, targ) == pytest.approx(sklearn.roc_auc_score(targ, scores.softmax(1)[:, 1]))


def test_a_function_of_tensors_of_the_whole_set() -> None:
    def median(pred: Tensor, targ: Tensor, scale: float = 1.0) -> Tensor:
        return scale * (pred - targ).abs().median()

    learn = Learner(
        DataLoaders.from_tensors((X, X[:, :1]), (X, X[:, :1]), bs=16, device='cpu'),
        nn.Linear(4, 1),
        nn.functional.mse_loss,
        metrics=AccumMetric(median, name='med', scale=2.0),
    )
    learn.fit(1)
    expected = (learn.model(X) - X[:, :1]).abs().median().detach()
    assert learn.history[0]['med'] == pytest.approx(2 * expected.item(), rel=1e-6)


def test_what_does_not_fit_is_reported_before_training() -> None:
    learn = learner(AccumMetric(lambda p, t: 0.0))
    before = learn.model.weight.clone()
    with pytest.raises(MetricError, match=r'targets of shape \(16,\)'):
        learn.fit(1)
    assert torch.equal(learn.model.weight, before)
    with pytest.raises(MetricError, match=r"activation='sigmod'.*sigmoid"):
        AccumMetric(np.mean, activation='sigmod')


def test_scores_of_scikit_learn_given_as_they_are_are_refused() -> None:
    for f, name in (
        (sklearn.f1_score, 'f1_score'),
        (partial(sklearn.f1_score, average='macro'), 'f1_score'),
        (sklearn.hinge_loss, 'hinge_loss'),
    ):
        with pytest.raises(MetricError, match=rf'skm_to_fastai\({name}\).*`is_class=False`'):
            learner(f)
