# SPDX-License-Identifier: Apache-2.0
"""Estimators of scikit-learn that train a PyTorch model with a Learner: `Classifier` and `Regressor`.

    from learnkit.sklearn import Classifier
    search = GridSearchCV(make_pipeline(StandardScaler(), Classifier()), {'classifier__lr': [1e-3, 1e-2]})

They work in pipelines, in searches, and in `cross_val_score`. `learner_` is the Learner of the last fit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from fastcore.basics import noop
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import LabelEncoder
from sklearn.utils import check_random_state
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from learnkit.callbacks.tracking import EarlyStoppingCallback, SaveModelCallback
from learnkit.core.errors import OptionError
from learnkit.core.random import preserved_rng
from learnkit.data.dataloaders import DataLoaders, TensorLoader
from learnkit.learner import Learner
from learnkit.optim.optimizers import Adam

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

__all__ = ['Classifier', 'Regressor']


def make_network(n_inputs: int, n_outputs: int, hidden: int = 100) -> nn.Module:
    """Return a network with one hidden layer, the default `module`.

    >>> make_network(4, 3)(torch.ones(2, 4)).shape
    torch.Size([2, 3])
    """
    return nn.Sequential(
        nn.Flatten(), nn.Linear(n_inputs, hidden), nn.ReLU(), nn.Linear(hidden, n_outputs)
    )


class _Estimator(BaseEstimator):
    "What `Classifier` and `Regressor` share: parameters, fit, and the outputs of the model."

    def __init__(
        self,
        module: Callable[..., nn.Module] | nn.Module = make_network,  # f(n_inputs, n_outputs)
        module_params: Mapping[str, Any] | None = None,  # further arguments of `module`
        loss_func: Callable[..., Any] | None = None,  # f(pred, target); None: the usual one
        opt_func: Any = Adam,  # as for `Learner`
        lr: float = 1e-2,  # learning rate
        wd: float | None = None,  # weight decay; None: the default of `opt_func`
        epochs: int = 30,  # passes over the training data
        batch_size: int = 32,  # samples per batch
        early_stopping: bool = False,  # stop by `valid_loss`, and load the best weights
        validation_fraction: float = 0.1,  # share of the samples for `valid_loss`
        patience: int = 5,  # epochs without improvement before an early stop
        metrics: Any = None,  # as for `Learner`; used with `early_stopping`
        cbs: Any = None,  # callbacks, copied for each fit
        random_state: Any = None,  # seed, or `numpy.random.RandomState`; None: numpy's generator
        device: Any = None,  # device; None: a GPU if available
        verbose: bool = False,  # show the progress bar and the table
        class_weight: Mapping[Any, float]
        | str
        | None = None,  # of a Classifier, as in scikit-learn
    ) -> None:
        self.module = module
        self.module_params = module_params
        self.loss_func = loss_func
        self.opt_func = opt_func
        self.lr = lr
        self.wd = wd
        self.epochs = epochs
        self.batch_size = batch_size
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.metrics = metrics
        self.cbs = cbs
        self.random_state = random_state
        self.device = device
        self.verbose = verbose
        self.class_weight = class_weight

    @property
    def history_(self) -> list[dict[str, Any]]:
        "Rows of the Learner's history."
        check_is_fitted(self)
        return [dict(row) for row in self.learner_.history]

    def _fit(
        self,
        x: NDArray[Any],
        y: Tensor,
        n_outputs: int,
        loss_func: Any,
        is_partial: bool = False,  # train one epoch, and keep the model if there is one
    ) -> Self:
        "Train a new model, or one epoch more."
        seed = check_random_state(self.random_state).randint(2**31 - 1)
        with preserved_rng():
            torch.manual_seed(seed)
            if not (is_partial and hasattr(self, 'learner_')):
                self.learner_ = self._make_learner(x, n_outputs, loss_func)
            if is_partial:
                self._train(x, y, epochs=1)
            else:
                self._train(x, y, self.epochs, seed if self.early_stopping else None)
        return self

    def _make_learner(self, x: NDArray[Any], n_outputs: int, loss_func: Any) -> Learner:
        params = dict(self.module_params or {})
        if not isinstance(self.module, nn.Module):
            model = self.module(int(np.prod(x.shape[1:])), n_outputs, **params)
        elif params:
            raise OptionError(
                f'module_params={params!r}: `module` is a model already. Give its class.'
            )
        else:
            model = copy.deepcopy(self.module)
        return Learner(
            self._load((x[:1],)),
            model,
            loss_func,
            opt_func=self.opt_func,
            lr=self.lr,
            wd=self.wd,
            cbs=copy.deepcopy(self.cbs),
            metrics=self.metrics if self.early_stopping else None,
        )

    def _load(self, train: Any, valid: Any = None) -> DataLoaders:
        return DataLoaders.from_tensors(train, valid, bs=self.batch_size, device=self.device)

    def _train(
        self,
        x: NDArray[Any],
        y: Tensor,
        epochs: int,
        split_seed: int | None = None,  # seed of the held out part; None: train on all samples
    ) -> None:
        "Train the Learner on samples, and forget them."
        learn = self.learner_
        samples = torch.from_numpy(x)
        train: Any = samples, y
        valid = None
        cbs: list[Any] = []
        with TemporaryDirectory(prefix='learnkit-best-') as folder:
            if split_seed is not None:
                train, valid = self._split(samples, y, split_seed)
                best = SaveModelCallback('valid_loss', fname=f'{folder}/best')
                cbs = [EarlyStoppingCallback('valid_loss', patience=self.patience), best]
            without_data = learn.dls
            learn.dls = self._load(train, valid)
            try:
                with nullcontext() if self.verbose else learn.no_bar():
                    learn.fit(epochs, cbs=cbs)
            finally:
                learn.dls = without_data

    def _split(self, x: Tensor, y: Tensor, seed: int) -> tuple[Any, Any]:
        "Return samples to train on, and samples to validate on."
        rows = np.arange(len(x))
        classes = y.numpy() if isinstance(self, ClassifierMixin) else None
        train, valid = train_test_split(
            rows, test_size=self.validation_fraction, stratify=classes, random_state=seed
        )
        return (x[train], y[train]), (x[valid], y[valid])

    def _outputs(self, x: ArrayLike, act: Any = None) -> NDArray[Any]:
        "Return the outputs of the model for samples."
        check_is_fitted(self)
        x = validate_data(self, x, reset=False, dtype=np.float32, allow_nd=True)
        loader = TensorLoader(torch.from_numpy(x), bs=max(self.batch_size, 256))
        with self.learner_.no_bar():
            outputs, _ = self.learner_.get_preds(dl=loader, act=act)
        return outputs.float().numpy()


class Classifier(ClassifierMixin, _Estimator):
    """Train a network that classifies samples, with scikit-learn's interface.

    `module` is a function or class that is called with the number of features and of classes, and
    returns a model with scores of shape [samples, classes]; or a model, which is copied for each
    fit. The default loss is `CrossEntropyLoss`, weighted by `class_weight` as in scikit-learn: a
    dict from class to weight, or 'balanced'. Samples are an array or a data frame with rows of any
    shape, converted to float32.

    With `early_stopping`, a part of the samples is held out. Training stops once their loss has not
    improved for `patience` epochs, and the best weights are loaded.

    Raises what scikit-learn's estimators raise for unusable data, and what `Learner` and `fit` raise.

    >>> from sklearn.datasets import load_iris
    >>> x, y = load_iris(return_X_y=True)
    >>> model = Classifier(random_state=0).fit(x, y)
    >>> model.predict(x[:2]), model.score(x, y) > 0.9, len(model.history_)
    (array([0, 0]), True, 30)
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        "Train a new model."
        x, labels = validate_data(self, X, y, dtype=np.float32, allow_nd=True)
        check_classification_targets(labels)
        self._encoder = LabelEncoder().fit(labels)
        self.classes_ = self._encoder.classes_
        return self._fit(x, self._encode(labels), len(self.classes_), self._make_loss(labels))

    def partial_fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        classes: ArrayLike | None = None,  # all classes; needed in the first call
    ) -> Self:
        "Train one more epoch on samples. The first call makes the model."
        is_first = not hasattr(self, 'learner_')
        x, labels = validate_data(self, X, y, reset=is_first, dtype=np.float32, allow_nd=True)
        check_classification_targets(labels)
        if is_first:
            if classes is None:
                raise ValueError('classes must be passed on the first call to partial_fit.')
            self._encoder = LabelEncoder().fit(classes)
            self.classes_ = self._encoder.classes_
        loss_func = self._make_loss(labels)
        n_classes = len(self.classes_)
        return self._fit(x, self._encode(labels), n_classes, loss_func, is_partial=True)

    def predict_proba(self, X: ArrayLike) -> NDArray[Any]:
        "Return the probability of each class, an array [samples, classes], in the order of `classes_`."
        return self._outputs(X)

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        "Return the most probable class of each sample."
        most_probable = self.predict_proba(X).argmax(1)
        return self.classes_[most_probable]

    def _encode(self, y: NDArray[Any]) -> Tensor:
        return torch.from_numpy(self._encoder.transform(y)).long()

    def _make_loss(self, y: NDArray[Any]) -> Any:
        if self.loss_func is not None:
            return copy.deepcopy(self.loss_func)
        if self.class_weight is None:
            return nn.CrossEntropyLoss()
        weight = compute_class_weight(self.class_weight, classes=self.classes_, y=y)
        return nn.CrossEntropyLoss(weight=torch.tensor(weight, dtype=torch.float32))


class Regressor(RegressorMixin, _Estimator):
    """Train a network that predicts numbers, with scikit-learn's interface.

    The parameters are those of `Classifier`, without `class_weight`. `module` is called with the
    number of features and of targets. The default loss is `MSELoss`. Targets are an array [samples]
    or [samples, targets], and predictions have the same form. Scale the targets if they are far
    from 0, as with `TransformedTargetRegressor`.

    Raises what scikit-learn's estimators raise for unusable data, and what `Learner` and `fit` raise.

    >>> from sklearn.datasets import make_regression
    >>> x, y = make_regression(200, 3, random_state=0)
    >>> model = Regressor(random_state=0).fit(x, y / y.std())
    >>> model.predict(x[:2]).shape, model.score(x, y / y.std()) > 0.9
    ((2,), True)
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        "Train a new model."
        return self._fit(*self._read(X, y, reset=True))

    def partial_fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        "Train one more epoch on samples. The first call makes the model."
        samples = self._read(X, y, reset=not hasattr(self, 'learner_'))
        return self._fit(*samples, is_partial=True)

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        "Return the predictions in float64, an array [samples] or [samples, targets]."
        outputs = self._outputs(X, act=noop).astype(np.float64)
        return outputs[:, 0] if self._is_flat else outputs

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _read(self, X: ArrayLike, y: ArrayLike, reset: bool) -> tuple[Any, Tensor, int, Any]:
        "Return the samples, their targets, the number of targets, and the loss function."
        if self.class_weight is not None:
            raise OptionError('class_weight: a Regressor has no classes. Leave it out.')
        options = {'dtype': np.float32, 'allow_nd': True, 'multi_output': True, 'y_numeric': True}
        x, numbers = validate_data(self, X, y, reset=reset, **options)
        targets = torch.from_numpy(np.asarray(numbers, dtype=np.float32))
        self._is_flat = targets.ndim == 1
        targets = targets.reshape(len(targets), -1)
        loss_func = nn.MSELoss() if self.loss_func is None else copy.deepcopy(self.loss_func)
        return x, targets, targets.shape[1], loss_func
