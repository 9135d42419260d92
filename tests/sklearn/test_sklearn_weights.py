"""Sample weights and class weights of estimators, compared with loops by hand and with repeated samples."""

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import config_context
from sklearn.base import clone
from sklearn.datasets import load_iris, make_regression
from sklearn.metrics import accuracy_score, r2_score
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.estimator_checks import check_sample_weight_equivalence_on_dense_data
from torch import Tensor, nn
from torch.nn import functional as F

from learnkit import AccumMetric, GradientAccumulation, LossError, MixUp, OptionError, accuracy
from learnkit.core.denominator import denominator_of
from learnkit.losses import (
    CrossEntropyLossFlat,
    FocalLossFlat,
    LabelSmoothingCrossEntropyFlat,
    MSELossFlat,
)
from learnkit.sklearn import Classifier, Regressor, WeightedLoss, make_network

IRIS = load_iris(return_X_y=True)
WEIGHTS = np.random.RandomState(0).randint(0, 4, 150)
WHOLE: dict[str, Any] = {'opt_func': torch.optim.SGD, 'lr': 0.1, 'batch_size': 150, 'epochs': 3}


def train(plain: nn.Module, x: Any, compute_loss: Any, epochs: int = 3) -> nn.Module:
    "Return a copy of a model, trained by plain gradient descent on all samples at once."
    plain = copy.deepcopy(plain)
    for _ in range(epochs):
        plain.zero_grad()
        compute_loss(plain(torch.tensor(x))).backward()
        with torch.no_grad():
            for p in plain.parameters():
                p -= 0.1 * p.grad
    return plain


def assert_same(model: Any, plain: nn.Module) -> None:
    for ours, theirs in zip(model.learner_.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def make_double(n_inputs: int, n_outputs: int) -> nn.Module:
    return make_network(n_inputs, n_outputs).double()


CLASS_WEIGHT = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
# loss function, and -log p of each sample by hand, with the sum that the mean divides by
OF_CLASSES = [
    (nn.CrossEntropyLoss(), lambda logp, y: (-logp, torch.ones(150).double())),
    (CrossEntropyLossFlat(), lambda logp, y: (-logp, torch.ones(150).double())),
    (F.cross_entropy, lambda logp, y: (-logp, torch.ones(150).double())),
    (
        nn.CrossEntropyLoss(CLASS_WEIGHT),
        lambda logp, y: (-CLASS_WEIGHT[y] * logp, CLASS_WEIGHT[y]),
    ),
    (nn.CrossEntropyLoss(ignore_index=1), lambda logp, y: (-logp * (y != 1), (y != 1).double())),
    (
        FocalLossFlat(2.0),
        lambda logp, y: (-((1 - logp.exp()) ** 2) * logp, torch.ones(150).double()),
    ),
]


@pytest.mark.parametrize(('loss_func', 'compute'), OF_CLASSES)
def test_weighted_losses_of_classes_are_those_by_hand(loss_func: Any, compute: Any) -> None:
    x, y = IRIS
    net = nn.Linear(4, 3).double()
    model = Classifier(net, loss_func=loss_func, **WHOLE).fit(x, y, sample_weight=WEIGHTS)

    def loss(out: Tensor) -> Tensor:
        logp = (out - out.exp().sum(1, keepdim=True).log())[torch.arange(150), y]
        losses, counts = compute(logp, torch.tensor(y))
        return (torch.tensor(WEIGHTS) * losses).sum() / (torch.tensor(WEIGHTS) * counts).sum()

    plain = train(net, x, loss)
    assert_same(model, plain)
    first = loss(net(torch.tensor(x))).item()
    assert model.history_[0]['train_loss'] == pytest.approx(first, rel=1e-6)


@pytest.mark.parametrize(
    'loss_func', [None, nn.MSELoss(), MSELossFlat(), nn.MSELoss(reduction='sum')]
)
def test_weighted_losses_of_several_numbers_are_those_by_hand(loss_func: Any) -> None:
    x, y = make_regression(150, 4, n_targets=2, random_state=0)
    y = y / y.std(0) / 100
    net = nn.Linear(4, 2).double()
    model = Regressor(net, loss_func=loss_func, **WHOLE).fit(x, y, WEIGHTS)
    w = torch.tensor(WEIGHTS)[:, None]
    is_sum = getattr(loss_func, 'reduction', 'mean') == 'sum'
    divisor = 1 if is_sum else 2 * w.sum()
    assert_same(
        model, train(net, x, lambda out: (w * (out - torch.tensor(y)) ** 2).sum() / divisor)
    )


def test_weighted_losses_of_signs_and_labels_are_those_by_hand() -> None:
    x, y = IRIS[0], IRIS[1] > 0
    sign = torch.tensor(np.where(y, 1.0, -1.0))
    w = torch.tensor(WEIGHTS)
    net = nn.Linear(4, 1).double()
    expected = train(
        net, x, lambda out: (w * (1 + (-sign * out[:, 0]).exp()).log()).sum() / w.sum()
    )
    for loss_func in (nn.SoftMarginLoss(), nn.BCEWithLogitsLoss()):
        assert_same(Classifier(net, loss_func=loss_func, **WHOLE).fit(x, y, WEIGHTS), expected)


@pytest.mark.parametrize('batch_size', [7, 150])
def test_a_weight_of_zero_is_a_missing_sample(batch_size: int) -> None:
    x, y = IRIS
    options: dict[str, Any] = {'epochs': 3, 'batch_size': batch_size, 'random_state': 0}
    weights = (WEIGHTS > 0) * 2.5
    kept = weights > 0
    zeros = Classifier(**options).fit(x, y, sample_weight=weights)
    missing = Classifier(**options).fit(x[kept], y[kept])
    np.testing.assert_allclose(zeros.predict_proba(x), missing.predict_proba(x), rtol=1e-4)
    with pytest.raises(ValueError, match='greater than one; got 1 class'):
        Classifier().fit(x, y, sample_weight=y == 1)


@pytest.mark.parametrize(
    'estimator',
    [
        Classifier(make_double, batch_size=100),
        Classifier(make_double, batch_size=100, class_weight='balanced'),
        Classifier(make_double, batch_size=100, loss_func=nn.BCEWithLogitsLoss()),
        Classifier(
            make_double, batch_size=100, loss_func=nn.BCEWithLogitsLoss(), class_weight='balanced'
        ),
        Classifier(make_double, batch_size=100, loss_func=nn.MultiMarginLoss()),
        Regressor(make_double, batch_size=100),
    ],
)
def test_the_check_of_scikit_learn_passes_for_one_batch(estimator: Any) -> None:
    check = check_sample_weight_equivalence_on_dense_data
    check(type(estimator).__name__, estimator)
    with pytest.raises(AssertionError, match='not equivalent'):  # other batches, other steps
        check('', estimator.set_params(batch_size=4))


def test_the_validation_loss_is_weighted_and_metrics_are_not() -> None:
    x, y = IRIS
    weights = WEIGHTS + 0.5
    model = Classifier(
        make_double,
        early_stopping=True,
        epochs=1,
        batch_size=4,
        validation_fraction=0.3,
        metrics=[accuracy, partial(F.cross_entropy)],
        random_state=0,
    ).fit(x, y, sample_weight=weights)
    seed = np.random.RandomState(0).randint(2**31 - 1)
    _, held_out = train_test_split(np.arange(150), test_size=0.3, stratify=y, random_state=seed)
    probs, row = model.predict_proba(x[held_out]), model.history_[0]
    losses = -np.log(probs[np.arange(45), y[held_out]])
    assert row['valid_loss'] == pytest.approx(np.average(losses, weights=weights[held_out]))
    assert row['cross_entropy'] == pytest.approx(losses.mean())
    assert row['accuracy'] == pytest.approx((probs.argmax(1) == y[held_out]).mean())


def test_accumulated_batches_are_weighted_as_the_whole() -> None:
    x, y = IRIS
    w = torch.tensor(WEIGHTS)
    kept = int((WEIGHTS > 0).sum())
    net = nn.Linear(4, 3).double()
    options = {**WHOLE, 'batch_size': 10, 'epochs': 1, 'cbs': GradientAccumulation(kept)}
    model = Classifier(net, **options).fit(x, y, sample_weight=WEIGHTS)

    def loss(out: Tensor) -> Tensor:
        return (w * F.cross_entropy(out, torch.tensor(y), reduction='none')).sum() / w.sum()

    assert_same(model, train(net, x, loss, epochs=1))


def test_partial_fit_and_score_are_weighted() -> None:
    x, y = IRIS
    net = nn.Linear(4, 3).double()
    model = Classifier(net, **WHOLE)
    plain = net
    w = torch.tensor(WEIGHTS)
    for weights in (None, w, None):  # weights in one call do not remain in the next
        model.partial_fit(x, y, classes=[0, 1, 2], sample_weight=weights)
        used = torch.ones(150) if weights is None else w

        def loss(out: Tensor, used: Tensor = used) -> Tensor:
            return (
                used * F.cross_entropy(out, torch.tensor(y), reduction='none')
            ).sum() / used.sum()

        plain = train(plain, x, loss, epochs=1)
    assert_same(model, plain)
    expected = accuracy_score(y, model.predict(x), sample_weight=WEIGHTS)
    assert model.score(x, y, sample_weight=WEIGHTS) == expected
    numbers = Regressor(nn.Linear(4, 1).double(), **WHOLE).partial_fit(x, y, sample_weight=WEIGHTS)
    expected = r2_score(y, numbers.predict(x), sample_weight=WEIGHTS)
    assert numbers.score(x, y, WEIGHTS) == expected


@pytest.mark.parametrize('class_weight', ['balanced', {0: 1.0, 1: 3.0}, {0: 0, 1: 1, 2: 2}])
@pytest.mark.parametrize('loss_func', [None, FocalLossFlat(), nn.CrossEntropyLoss()])
def test_class_weights_are_weights_of_samples(loss_func: Any, class_weight: Any) -> None:
    x, y = IRIS[0][:130], IRIS[1][:130]
    net = nn.Linear(4, 3).double()
    by_class = Classifier(net, loss_func=loss_func, class_weight=class_weight, **WHOLE).fit(x, y)
    if isinstance(class_weight, dict):
        class_weight = {2: 1.0, **class_weight}
    weights = compute_sample_weight(class_weight, y)
    by_hand = train(
        net,
        x,
        lambda out: (
            (
                torch.tensor(weights)
                * (loss_func or nn.CrossEntropyLoss()).__class__(reduction='none')(
                    out, torch.tensor(y)
                )
            ).sum()
            / weights.sum()
        ),
    )
    assert_same(by_class, by_hand)
    if class_weight != 'balanced':
        partial_model = Classifier(net, loss_func=loss_func, class_weight=class_weight, **WHOLE)
        for _ in range(3):
            partial_model.partial_fit(x, y, classes=[0, 1, 2])
        assert_same(partial_model, by_hand)


def test_weights_are_routed_through_a_search_and_a_pipeline() -> None:
    x, y = IRIS
    model = Classifier(epochs=2, random_state=0)
    with config_context(enable_metadata_routing=True):
        model.set_fit_request(sample_weight=True).set_score_request(sample_weight=True)
        line = make_pipeline(StandardScaler().set_fit_request(sample_weight=False), model)
        search = GridSearchCV(line, {'classifier__lr': [1e-2]}, cv=2)
        search.fit(x, y, sample_weight=WEIGHTS)
    fitted = search.best_estimator_[-1]
    assert isinstance(fitted.learner_.loss_func, WeightedLoss)
    direct = Classifier(epochs=2, random_state=0, lr=1e-2)
    direct.fit(StandardScaler().fit_transform(x), y, sample_weight=WEIGHTS)
    np.testing.assert_allclose(
        search.predict_proba(x), direct.predict_proba(StandardScaler().fit_transform(x)), rtol=1e-5
    )


def test_losses_of_other_means_equal_repeated_samples() -> None:
    x, y = IRIS
    shares = np.abs(x) / np.abs(x).sum(1, keepdims=True)
    net = nn.Sequential(nn.Linear(4, 4), nn.LogSoftmax(1)).double()
    for estimator, targets in (
        (Regressor(net, loss_func=nn.KLDivLoss(reduction='batchmean')), shares),
        (Regressor(net, loss_func=nn.PoissonNLLLoss()), shares),
        (
            Classifier(
                nn.Linear(4, 3).double(), loss_func=nn.CrossEntropyLoss(label_smoothing=0.2)
            ),
            y,
        ),
        (Classifier(net, loss_func=nn.NLLLoss(torch.tensor([1.0, 2, 3, 4]).double())), y),
        (Regressor(nn.Linear(4, 4).double(), loss_func=nn.HuberLoss(delta=0.1)), shares),
        (Classifier(net[0], loss_func=own_focal), y),
    ):
        estimator.set_params(**WHOLE, metrics=None, random_state=0).set_params(batch_size=1000)
        weighted = estimator.fit(x, targets, sample_weight=WEIGHTS).learner_.model
        repeated = estimator.fit(np.repeat(x, WEIGHTS, 0), np.repeat(targets, WEIGHTS, 0))
        assert_same(repeated, weighted)


def own_focal(pred: Tensor, targ: Tensor, reduction: str = 'mean') -> Tensor:
    losses = F.cross_entropy(pred, targ, reduction='none')
    losses = (1 - (-losses).exp()) ** 2 * losses
    return losses if reduction == 'none' else losses.mean()


def test_equal_weights_change_nothing_with_mixup_and_metrics() -> None:
    x, y = IRIS
    metrics = [accuracy, AccumMetric(F.cross_entropy, name='whole', flatten=False)]
    options: dict[str, Any] = {'early_stopping': True, 'metrics': metrics, 'epochs': 5}
    model = Classifier(make_double, cbs=MixUp(0.2), random_state=0, **options).fit(x, y)
    weighted = clone(model).fit(x, y, sample_weight=np.full(150, 2.5))
    for row, other in zip(model.history_, weighted.history_, strict=True):
        assert {**row, 'time': 0} == pytest.approx({**other, 'time': 0}, rel=1e-6)


def test_a_loss_of_each_element_and_of_no_weights() -> None:
    pred, targ = torch.tensor([[1.0, 3.0], [2.0, 2.0]]), torch.zeros(2, 2)
    loss = WeightedLoss(partial(F.mse_loss, reduction='sum'))
    assert loss(pred, targ, torch.tensor([1.0, 2.0])).item() == 10 + 2 * 8
    loss.reduction = 'none'
    assert loss(pred, targ, torch.tensor([1.0, 2.0])).tolist() == [[1.0, 9.0], [8.0, 8.0]]
    loss.reduction = 'mean'
    assert loss(pred, targ).item() == 18 / 4
    weighted = Classifier(nn.Linear(4, 3), epochs=1).fit(*IRIS, sample_weight=WEIGHTS)
    loader = [(torch.tensor(IRIS[0], dtype=torch.float32),)]
    probs, _, decoded = weighted.learner_.get_preds(dl=loader, with_decoded=True)
    np.testing.assert_allclose(probs, weighted.predict_proba(IRIS[0]), rtol=1e-5)
    np.testing.assert_array_equal(decoded, weighted.predict(IRIS[0]))
    with pytest.warns(UserWarning, match='ends with a softmax'):
        Classifier(nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)), epochs=1).fit(*IRIS, WEIGHTS)
    loss = WeightedLoss(nn.CrossEntropyLoss(CLASS_WEIGHT, ignore_index=0))
    targets = torch.tensor([0, 1, 1, 2])
    count = denominator_of(loss).count
    assert count((targets,)) == 2 + 2 + 0.5
    assert count((targets, torch.tensor([9.0, 1.0, 0.0, 4.0]))) == 2 + 4 * 0.5


def test_weights_that_cannot_be_used_are_refused() -> None:
    x, y = IRIS
    for weights, match in (
        (np.ones(7), r'\(7,\).*150'),
        (np.ones((150, 2)), r'\(150, 2\)'),
        (-WEIGHTS, 'negative'),
        (np.zeros(150), 'non-zero'),
        (np.full(150, np.nan), 'sample_weight contains NaN'),
    ):
        for model in (Classifier(), Regressor()):
            with pytest.raises(ValueError, match=match):
                model.fit(x, y, sample_weight=weights)
            assert not hasattr(model, 'learner_')

    def mean_only(pred: Tensor, targ: Tensor) -> Tensor:
        return F.cross_entropy(pred, targ)

    with pytest.raises(LossError, match=r'mean_only.*reduction'):
        Classifier(loss_func=mean_only).fit(x, y, sample_weight=WEIGHTS)

    def no_losses(pred: Tensor, targ: Tensor, reduction: str = 'mean') -> Tensor:
        return F.cross_entropy(pred, targ)

    with pytest.raises(LossError, match=r'no_losses.*1 losses for'):
        Classifier(loss_func=no_losses, epochs=1).fit(x, y, sample_weight=WEIGHTS)
    smooth = LabelSmoothingCrossEntropyFlat(weight=CLASS_WEIGHT)  # a sum of two means
    with pytest.raises(LossError, match=r'average to .* mean over samples'):
        Classifier(nn.Linear(4, 3).double(), loss_func=smooth).fit(x, y, sample_weight=WEIGHTS)
    labels = np.eye(150)[:, :2]
    with pytest.raises(OptionError, match=r'class_weight.*pos_weight'):
        Classifier(class_weight='balanced').fit(x, labels)
    with pytest.raises(OptionError, match=r'balanced.*partial_fit'):
        Classifier(class_weight='balanced').partial_fit(x, y, classes=[0, 1, 2])
