"""What the outputs of a model mean to an estimator's loss: probabilities, decisions, labels and numbers."""

import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_iris, make_classification, make_multilabel_classification
from sklearn.metrics import get_scorer, label_ranking_average_precision_score, roc_auc_score
from sklearn.model_selection import cross_val_score
from torch import Tensor, nn
from torch.nn import functional as F

from learnkit import LossError, MixUp, OptionError
from learnkit.losses import (
    BaseLoss,
    BCELossFlat,
    BCEWithLogitsLossFlat,
    FocalLossFlat,
    MSELossFlat,
)
from learnkit.sklearn import Classifier, Regressor

X, Y = make_classification(120, 5, flip_y=0.02, class_sep=1.5, random_state=0)
WORDS = np.where(Y == 1, 'yes', 'no')
FEW: dict[str, Any] = {'epochs': 3, 'random_state': 0}


def flat(n_inputs: int, n_outputs: int) -> nn.Module:
    "Return a model with one output per sample, of shape [samples]."
    assert n_outputs == 1
    return nn.Sequential(nn.Linear(n_inputs, 1), nn.Flatten(0))


def logits_of(model: Classifier, x: Any = X) -> np.ndarray[Any, Any]:
    "Return the raw outputs of the trained model."
    with torch.no_grad():
        return model.learner_.model(torch.tensor(x, dtype=torch.float32)).numpy()


@pytest.mark.parametrize(
    'loss_func',
    [
        nn.BCEWithLogitsLoss(),
        BCEWithLogitsLossFlat(),
        partial(F.binary_cross_entropy_with_logits, pos_weight=torch.tensor([2.0])),
        nn.MultiLabelSoftMarginLoss(),
    ],
)
@pytest.mark.parametrize('module', [nn.Linear, flat, nn.Linear(5, 1)])
def test_one_logit_per_sample_gives_both_classes(loss_func: Any, module: Any) -> None:
    model = Classifier(module, loss_func=loss_func, epochs=20, lr=0.05, random_state=0)
    model.fit(X, WORDS)
    expected = 1 / (1 + np.exp(-logits_of(model).ravel()))
    found = model.predict_proba(X)
    np.testing.assert_allclose(found, np.stack([1 - expected, expected], 1), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(model.predict(X), np.where(expected > 0.5, 'yes', 'no'))
    assert list(model.classes_) == ['no', 'yes'] and not hasattr(model, 'decision_function')
    assert model.score(X, WORDS) > 0.9
    auc = get_scorer('roc_auc')(model, X, WORDS)
    assert auc == roc_auc_score(Y, expected) and auc > 0.95
    assert model.predict(X[:1]).shape == (1,) and model.predict_proba(X[:1]).shape == (1, 2)


def test_probabilities_of_a_sigmoid_and_an_own_threshold() -> None:
    net = nn.Sequential(nn.Linear(5, 1), nn.Sigmoid())
    for loss in (nn.BCELoss(), BCELossFlat()):
        model = Classifier(net, loss_func=loss, **FEW).fit(X, Y)
        np.testing.assert_allclose(model.predict_proba(X)[:, 1], logits_of(model)[:, 0], rtol=1e-6)
    rare = Classifier(nn.Linear, loss_func=BCEWithLogitsLossFlat(thresh=0.9), **FEW).fit(X, Y)
    np.testing.assert_array_equal(rare.predict(X), (rare.predict_proba(X)[:, 1] > 0.9).astype(int))


def test_one_score_per_class_of_three_classes() -> None:
    x, y = load_iris(return_X_y=True)
    model = Classifier(loss_func=nn.BCEWithLogitsLoss(), random_state=0).fit(x, y)
    shares = 1 / (1 + np.exp(-logits_of(model, x)))
    expected = shares / shares.sum(1, keepdims=True)
    np.testing.assert_allclose(model.predict_proba(x), expected, rtol=1e-5)
    assert model.score(x, y) > 0.9
    assert get_scorer('roc_auc_ovr')(model, x, y) > 0.98
    with torch.no_grad():
        model.learner_.model[-1].bias.fill_(-1000)  # every probability is 0 in float32
    np.testing.assert_allclose(model.predict_proba(x), 1 / 3)


@pytest.mark.parametrize(
    ('loss_func', 'decide'),
    [
        (nn.SoftMarginLoss(), lambda out: out[:, 0]),
        (BaseLoss(nn.SoftMarginLoss, is_2d=False), lambda out: out[:, 0]),
        (BaseLoss(nn.BCEWithLogitsLoss, is_2d=False, floatify=True), lambda out: out[:, 0]),
        (nn.MultiMarginLoss(), lambda out: out[:, 1] - out[:, 0]),
        (lambda pred, targ: F.cross_entropy(pred, targ), lambda out: out[:, 1] - out[:, 0]),
        (BaseLoss(nn.CrossEntropyLoss), lambda out: out[:, 1] - out[:, 0]),
    ],
)
def test_scores_that_are_not_probabilities_are_decisions(loss_func: Any, decide: Any) -> None:
    model = Classifier(nn.Linear, loss_func=loss_func, epochs=20, lr=0.05, random_state=0)
    model.fit(X, WORDS)
    expected = decide(logits_of(model))
    np.testing.assert_allclose(model.decision_function(X), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(model.predict(X), np.where(expected > 0, 'yes', 'no'))
    assert get_scorer('roc_auc')(model, X, WORDS) > 0.95
    assert not hasattr(model, 'predict_proba') and not hasattr(Classifier.fit, 'predict_proba')
    with pytest.raises(AttributeError, match='predict_proba') as refused:
        model.predict_proba(X)
    assert 'decision_function' in str(refused.value.__cause__)


def test_distances_are_small_for_the_second_class() -> None:
    class Distance(nn.Module):
        def __init__(self, n_inputs: int, n_outputs: int) -> None:
            super().__init__()
            self.center = nn.Parameter(torch.zeros(n_inputs))

        def forward(self, x: Tensor) -> Tensor:
            return (x - self.center).norm(dim=1)

    loss_func = partial(F.hinge_embedding_loss, margin=3.0)
    model = Classifier(Distance, loss_func=loss_func, epochs=20, lr=0.05, random_state=0)
    x = np.random.RandomState(0).randn(120, 5) / 4 + np.where(Y == 1, 0.0, 2.0)[:, None]
    model.fit(x, Y)
    expected = 1.5 - logits_of(model, x)
    np.testing.assert_allclose(model.decision_function(x), expected, rtol=1e-5, atol=1e-6)
    assert model.score(x, Y) > 0.95


def test_three_classes_by_margins_and_a_calibration_of_decisions() -> None:
    x, y = load_iris(return_X_y=True)
    for loss_func in (nn.MultiMarginLoss(), nn.SoftMarginLoss()):
        model = Classifier(loss_func=loss_func, epochs=15, lr=0.02, random_state=0)
        scores = clone(model).fit(x, y).decision_function(x)
        assert scores.shape == (150, 3)
        assert cross_val_score(model, x, y, cv=2).mean() > 0.9
        calibrated = CalibratedClassifierCV(model, cv=2).fit(x, y)
        probs = calibrated.predict_proba(x)
        np.testing.assert_allclose(probs.sum(1), 1)
        assert calibrated.score(x, y) > 0.9
    binary = Classifier(loss_func=nn.SoftMarginLoss(), random_state=0)
    assert CalibratedClassifierCV(binary, cv=2).fit(X, WORDS).score(X, WORDS) > 0.9


def test_focal_loss_has_probabilities_and_class_numbers() -> None:
    model = Classifier(loss_func=FocalLossFlat(), **FEW).fit(X, WORDS)
    outputs = logits_of(model).astype(np.float64)
    shares = np.exp(outputs)
    np.testing.assert_allclose(
        model.predict_proba(X), shares / shares.sum(1, keepdims=True), rtol=1e-5
    )


def test_an_own_loss_with_an_activation_may_have_one_output() -> None:
    class Binary(nn.Module):
        def forward(self, pred: Tensor, targ: Tensor) -> Tensor:
            return F.binary_cross_entropy_with_logits(pred[:, 0], targ.float())

    class BinaryProbability(Binary):
        def activation(self, x: Tensor) -> Tensor:
            return x.sigmoid()

    net = nn.Linear(5, 1)
    model = Classifier(net, loss_func=BinaryProbability(), epochs=20, lr=0.05, random_state=0)
    assert model.fit(X, Y).score(X, Y) > 0.9 and model.predict_proba(X).shape == (120, 2)
    unknown = Classifier(net, loss_func=Binary(), **FEW).fit(X, Y)
    for predict in (unknown.predict, unknown.decision_function):
        with pytest.raises(OptionError, match=r'Binary.*activation'):
            predict(X)


def test_methods_are_those_of_the_fitted_loss() -> None:
    class Scaled(nn.Module):
        "A loss with a trained parameter, which the probabilities depend on."

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, pred: Tensor, targ: Tensor) -> Tensor:
            return F.cross_entropy(pred * self.scale, targ)

        def activation(self, x: Tensor) -> Tensor:
            return (x * self.scale).softmax(1)

    model = Classifier(loss_func=Scaled(), **FEW).fit(X, Y)
    scale = model.learner_.loss_func.scale.item()
    expected = torch.tensor(logits_of(model)) * scale
    np.testing.assert_allclose(model.predict_proba(X), expected.softmax(1), rtol=1e-5)
    assert scale != 1
    model.set_params(loss_func=nn.MultiMarginLoss())
    assert hasattr(model, 'predict_proba') and not hasattr(clone(model), 'predict_proba')
    assert not hasattr(model.fit(X, Y), 'predict_proba')


def test_several_labels_per_sample_compared_with_a_plain_loop() -> None:
    x, y = make_multilabel_classification(40, 6, n_classes=4, random_state=0)
    net = nn.Linear(6, 4)
    options: dict[str, Any] = {'opt_func': torch.optim.SGD, 'lr': 0.1, 'batch_size': 40}
    for loss_func in (None, nn.BCEWithLogitsLoss(), nn.MultiLabelSoftMarginLoss()):
        plain = pickle.loads(pickle.dumps(net)).double()
        model = Classifier(net, loss_func=loss_func, epochs=3, **options).fit(x, y)
        opt = torch.optim.SGD(plain.parameters(), 0.1)
        xb, yb = torch.tensor(x), torch.tensor(y, dtype=torch.float64)
        for _ in range(3):
            opt.zero_grad()
            probs = plain(xb).sigmoid()
            (-(yb * probs.log() + (1 - yb) * (1 - probs).log()).mean()).backward()
            opt.step()
        expected = plain(xb).sigmoid().detach().numpy()
        found = model.predict_proba(x)
        np.testing.assert_allclose(found, expected, rtol=1e-4)
        predicted = model.predict(x)
        np.testing.assert_array_equal(predicted, expected > 0.5)
        assert predicted.dtype == y.dtype and list(model.classes_) == [0, 1, 2, 3]
        assert model.score(x, y) == ((expected > 0.5) == y).all(1).mean()
        again = model.partial_fit(x[:5], y[:5])
        assert again.predict(x[:1]).shape == (1, 4)
    early = Classifier(early_stopping=True, **FEW).fit(x, y)
    assert 'valid_loss' in early.history_[0]


def test_labels_by_margins() -> None:
    x, y = make_multilabel_classification(60, 6, n_classes=4, random_state=0)
    model = Classifier(loss_func=nn.SoftMarginLoss(), random_state=0).fit(x, y.tolist())
    scores = model.decision_function(x)
    np.testing.assert_array_equal(model.predict(x), scores > 0)
    assert label_ranking_average_precision_score(y, scores) > 0.85
    assert not hasattr(model, 'predict_proba')


def test_a_model_with_one_output_in_a_flat_shape() -> None:
    y = X @ np.arange(5.0) / 5
    net = nn.Sequential(nn.Linear(5, 1), nn.Flatten(0))
    model = Regressor(net, epochs=40, lr=0.05, random_state=0).fit(X, y)
    assert model.score(X, y) > 0.98 and model.predict(X[:1]).shape == (1,)
    mixed = Regressor(net, epochs=40, lr=0.05, cbs=MixUp(0.2), random_state=0).fit(X, y)
    assert mixed.score(X, y) > 0.95


@pytest.mark.parametrize(
    ('loss_func', 'y', 'match'),
    [
        (nn.MSELoss(), Y, 'MSELoss.*Regressor'),
        (MSELossFlat(), Y, 'MSELossFlat.*Regressor'),
        (F.l1_loss, Y, 'l1_loss.*Regressor'),
        (nn.MultiLabelMarginLoss(), Y, 'MultiLabelMarginLoss'),
        (nn.CrossEntropyLoss(), np.eye(120)[:, :3], 'CrossEntropyLoss.*BCEWithLogitsLoss'),
        (lambda pred, targ: pred.mean(), np.eye(120)[:, :3], 'activation'),
    ],
)
def test_losses_that_cannot_classify_are_refused(loss_func: Any, y: Any, match: str) -> None:
    model = Classifier(loss_func=loss_func, **FEW)
    with pytest.raises(OptionError, match=match):
        model.fit(X, y)
    assert not hasattr(model, 'learner_')


def test_a_class_of_a_loss_and_other_targets_than_before_are_refused() -> None:
    for loss in (nn.CrossEntropyLoss, BCELossFlat, 'cross_entropy'):
        with pytest.raises(LossError, match='loss_func='):
            Classifier(loss_func=loss).fit(X, Y)
    model = Regressor(**FEW).fit(X, Y)
    with pytest.raises(ValueError, match=r'\(120, 2\).*\(\)'):
        model.partial_fit(X, np.stack([Y, Y], 1))


def test_tags_name_what_an_estimator_can_do() -> None:
    for model, takes_labels in (
        (Classifier(), True),
        (Classifier(loss_func=nn.SoftMarginLoss()), True),
        (Classifier(loss_func=nn.MultiMarginLoss()), False),
        (Classifier(class_weight='balanced'), False),
    ):
        assert model.__sklearn_tags__().classifier_tags.multi_label == takes_labels


def test_targets_that_are_no_classes_are_refused() -> None:
    one_class = 'The number of classes has to be greater than one; got 1 class'
    for loss_func in (None, nn.BCEWithLogitsLoss(), nn.SoftMarginLoss()):
        with pytest.raises(ValueError, match=one_class):
            Classifier(loss_func=loss_func).fit(X, np.ones(120))
    with pytest.raises(ValueError, match=one_class):
        Classifier().partial_fit(X, np.ones(120), classes=[1])
    with pytest.raises(ValueError, match='several classes'):
        Classifier().fit(X, np.arange(240).reshape(120, 2) % 3)
    with pytest.raises(ValueError, match='0 or 1'):
        Classifier().fit(X, np.where(np.eye(120)[:, :3] > 0, 1, -1))
    model = Classifier(**FEW).fit(X, Y)
    with pytest.raises(ValueError, match=r'\(120, 3\).*one class'):
        model.partial_fit(X, np.eye(120)[:, :3])
