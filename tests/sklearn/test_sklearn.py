"""Estimators of scikit-learn: its own checks, and weights compared with a Learner and a plain loop."""

import pickle
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits, load_iris, make_regression
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator
from torch import nn

from learnkit import Callback, OptionError, accuracy
from learnkit.sklearn import Classifier, Regressor, make_network


@pytest.fixture
def iris() -> tuple[Any, Any]:
    x, y = load_iris(return_X_y=True)
    return x, y


def make_double(n_inputs: int, n_outputs: int) -> nn.Module:
    return make_network(n_inputs, n_outputs).double()


WHOLE: dict[str, Any] = {'module': make_double, 'batch_size': 1000}  # all samples in one batch
EXPECTED = {
    'check_sample_weight_equivalence_on_dense_data': (
        'a sample that is repeated is drawn into several minibatches, a sample with a weight into one; '
        'float32 is less exact than the check demands'
    ),
    'check_methods_subset_invariance': 'float32: other sums for other numbers of rows',
}


# scikit-learn's checks of an estimator: 1 to 2 seconds with all samples in one batch, and few epochs
CHECKED = [
    (Classifier(**WHOLE, epochs=6), {}),
    (Regressor(**WHOLE, epochs=6), {}),
]
CHECKED_LONG = [
    (Classifier(**WHOLE), {}),
    (Regressor(**WHOLE), {}),
    (Classifier(), EXPECTED),
    (Regressor(), EXPECTED),
    (Classifier(loss_func=nn.BCEWithLogitsLoss()), EXPECTED),
    (Classifier(loss_func=nn.MultiMarginLoss()), EXPECTED),
    (Classifier(loss_func=nn.SoftMarginLoss()), EXPECTED),
    (Classifier(loss_func=nn.BCEWithLogitsLoss(), **WHOLE), {}),
    (Classifier(loss_func=nn.SoftMarginLoss(), **WHOLE), {}),
]


@pytest.mark.filterwarnings('ignore:The given NumPy array is not writable')  # torch warns once
@pytest.mark.parametrize(
    ('estimator', 'expected'),
    [*CHECKED, *(pytest.param(*case, marks=pytest.mark.full) for case in CHECKED_LONG)],
)
def test_checks_of_scikit_learn_pass(estimator: Any, expected: dict[str, str]) -> None:
    found = check_estimator(estimator, on_fail=None, on_skip=None, expected_failed_checks=expected)
    assert [r['check_name'] for r in found if r['status'] == 'failed'] == []
    assert len(found) > 45


def test_weights_are_those_of_a_plain_loop() -> None:
    x, y = make_regression(12, 3, random_state=1)
    y = y / y.std()
    options: dict[str, Any] = {
        'opt_func': torch.optim.SGD,
        'lr': 0.1,
        'batch_size': 12,
        'epochs': 3,
    }
    plain = nn.Linear(3, 1)
    model = Regressor(plain, **options).fit(x, y)  # trains a copy

    opt = torch.optim.SGD(plain.parameters(), lr=0.1)
    xb, yb = (torch.tensor(a, dtype=torch.float32) for a in (x, y))
    for _ in range(3):
        nn.functional.mse_loss(plain(xb)[:, 0], yb).backward()
        opt.step()
        opt.zero_grad()
    torch.testing.assert_close(model.learner_.model.weight, plain.weight)
    np.testing.assert_allclose(model.predict(x), plain(xb)[:, 0].detach().numpy(), rtol=1e-5)


def test_partial_fit_of_numbers_is_a_plain_loop() -> None:
    x, y = make_regression(12, 3, random_state=1)
    y = y / y.std()
    plain = nn.Linear(3, 1)
    model = Regressor(plain, opt_func=partial(torch.optim.SGD, momentum=0.9), lr=0.1, epochs=50)
    opt = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for rows in (slice(0, 6), slice(6, 12), slice(0, 12)):  # each a batch of one more epoch
        model.partial_fit(x[rows], y[rows])
        xb, yb = (torch.tensor(a[rows], dtype=torch.float32) for a in (x, y))
        opt.zero_grad()
        nn.functional.mse_loss(plain(xb)[:, 0], yb).backward()
        opt.step()
    torch.testing.assert_close(model.learner_.model.weight, plain.weight)
    assert len(model.history_) == 3


def test_a_seed_decides_and_the_global_generator_is_left_alone(iris: Any) -> None:
    before = torch.get_rng_state()
    one, two = (
        Classifier(epochs=2, random_state=3).fit(*iris).predict_proba(iris[0]) for _ in 'ab'
    )
    np.testing.assert_array_equal(one, two)
    assert torch.equal(before, torch.get_rng_state())
    other = Classifier(epochs=2, random_state=4).fit(*iris).predict_proba(iris[0])
    assert not np.array_equal(one, other)


def test_pipeline_and_search(iris: Any) -> None:
    line = make_pipeline(StandardScaler(), Classifier(epochs=10, random_state=0))
    grid = {'classifier__lr': [1e-5, 3e-2], 'classifier__module_params': [{'hidden': 8}]}
    search = GridSearchCV(line, grid, cv=3).fit(*iris)
    assert search.best_params_['classifier__lr'] == 3e-2 and search.best_score_ > 0.9
    hidden = search.best_estimator_[-1].learner_.model[1]
    assert hidden.out_features == 8
    assert cross_val_score(line, *iris, cv=3).mean() > 0.9


def test_classes_may_be_words_in_a_data_frame(iris: Any) -> None:
    frame = pd.DataFrame(iris[0], columns=list('abcd'))
    words = pd.Series(np.array(['setosa', 'versicolor', 'virginica'])[iris[1]])
    model = Classifier(random_state=0).fit(frame, words)
    assert list(model.classes_) == ['setosa', 'versicolor', 'virginica']
    assert list(model.feature_names_in_) == list('abcd')
    assert model.score(frame, words) > 0.9
    np.testing.assert_allclose(model.predict_proba(frame).sum(1), 1, rtol=1e-5)
    with pytest.raises(ValueError, match='feature names'):
        model.predict(frame[list('dcba')])


def test_class_weights_are_those_of_scikit_learn() -> None:
    x = np.zeros((10, 1))
    y = np.array([0] * 8 + [1] * 2)
    make: dict[str, Any] = {
        'module': nn.Linear(1, 2),
        'epochs': 200,
        'batch_size': 10,
        'random_state': 0,
    }
    even = Classifier(**make, class_weight='balanced').fit(x, y).predict_proba(x[:1])
    np.testing.assert_allclose(even, [[0.5, 0.5]], atol=0.01)
    plain = Classifier(**make).fit(x, y).predict_proba(x[:1])
    np.testing.assert_allclose(plain, [[0.8, 0.2]], atol=0.02)
    three = Classifier(**make, class_weight={0: 1, 1: 2}).fit(x, y).predict_proba(x[:1])
    np.testing.assert_allclose(three, [[8 / 12, 4 / 12]], atol=0.02)


def test_early_stopping_loads_the_best_weights(iris: Any) -> None:
    model = Classifier(
        epochs=200, lr=0.1, early_stopping=True, patience=3, metrics=accuracy, random_state=0
    ).fit(*iris)
    losses = [row['valid_loss'] for row in model.history_]
    assert len(losses) < 200 and len(losses) - 1 - int(np.argmin(losses)) == 3
    assert 'accuracy' in model.history_[0]
    seed = np.random.RandomState(0).randint(2**31 - 1)
    _, held_out = train_test_split(
        np.arange(150), test_size=0.1, stratify=iris[1], random_state=seed
    )
    x, y = torch.tensor(iris[0][held_out], dtype=torch.float32), torch.tensor(iris[1][held_out])
    loss = nn.functional.cross_entropy(model.learner_.model(x), y)
    assert loss.item() == pytest.approx(min(losses), rel=1e-5)


def test_partial_fit_goes_on_with_the_same_model(iris: Any) -> None:
    model = Classifier(random_state=0)
    with pytest.raises(ValueError, match='classes'):
        model.partial_fit(*iris)
    order = np.random.RandomState(0).permutation(150)
    for _ in range(15):
        for rows in np.split(order, 3):
            model.partial_fit(iris[0][rows], iris[1][rows], classes=[0, 1, 2])
    assert model.score(*iris) > 0.9 and len(model.history_) == 45


def test_images_are_rows_of_any_shape() -> None:
    images, y = load_digits(return_X_y=True)
    images = images.reshape(-1, 1, 8, 8)[:400] / 16

    def cnn(n_inputs: int, n_classes: int) -> nn.Module:
        assert n_inputs == 64
        body = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten())
        return nn.Sequential(body, nn.Linear(8 * 36, n_classes))

    assert (
        Classifier(cnn, epochs=8, random_state=0).fit(images, y[:400]).score(images, y[:400]) > 0.9
    )


def test_several_targets_keep_their_form() -> None:
    x, y = make_regression(80, 3, n_targets=2, random_state=0)
    y = y / y.std(0)
    model = Regressor(random_state=0).fit(x, y)
    assert model.predict(x).shape == (80, 2) and model.score(x, y) > 0.9


def test_a_model_is_copied_and_an_estimator_cloned_and_pickled(iris: Any) -> None:
    module = nn.Linear(4, 3)
    before = module.weight.clone()
    seen: list[int] = []
    model = Classifier(module, cbs=Callback(before_fit=lambda cb: seen.append(1)), epochs=1)
    again = clone(model)
    again.fit(*iris)
    assert torch.equal(module.weight, before)
    plain = Classifier(make_network, epochs=1).fit(*iris)
    loaded = pickle.loads(pickle.dumps(plain))
    np.testing.assert_array_equal(loaded.predict_proba(iris[0]), plain.predict_proba(iris[0]))
    assert len(pickle.dumps(plain)) < 100_000  # without the samples
    weighted = Classifier(loss_func=nn.BCEWithLogitsLoss(), epochs=1)
    weighted.fit(*iris, sample_weight=iris[1] + 1.0)
    loaded = pickle.loads(pickle.dumps(weighted))
    loaded.partial_fit(*iris, sample_weight=iris[1] + 1.0).partial_fit(*iris)
    assert len(loaded.history_) == 3


def test_errors(iris: Any) -> None:
    with pytest.raises(NotFittedError):
        Classifier().predict(iris[0])
    with pytest.raises(OptionError, match='module_params'):
        Classifier(nn.Linear(4, 3), module_params={'hidden': 3}).fit(*iris)
    with pytest.raises(OptionError, match='class_weight'):
        Regressor(class_weight='balanced').fit(*iris)
