# SPDX-License-Identifier: Apache-2.0
"""Estimators of scikit-learn that train a PyTorch model with a Learner: `Classifier` and `Regressor`.

    from learnkit.sklearn import Classifier
    search = GridSearchCV(make_pipeline(StandardScaler(), Classifier()), {'classifier__lr': [1e-3, 1e-2]})

They work in pipelines, in searches, and in `cross_val_score`. `learner_` is the Learner of the last fit. With sample
weights, its batches are (samples, targets, weights).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from math import isclose
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from fastcore.basics import noop
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import LabelEncoder
from sklearn.utils import check_array, check_random_state, column_or_1d
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn
from typing_extensions import override

from learnkit.callbacks.early_stopping import EarlyStoppingCallback
from learnkit.callbacks.mixup import compute_unreduced
from learnkit.callbacks.save_model import SaveModelCallback
from learnkit.core.activation import Outputs, find_activation, find_decoder, outputs_of
from learnkit.core.contexts import replacing_yield
from learnkit.core.denominator import ClassTargets, Denominator, Unknown, denominator_of
from learnkit.core.errors import LossError, OptionError
from learnkit.core.model import name_of, unwrap_partial
from learnkit.core.random import preserved_rng
from learnkit.core.validation import takes
from learnkit.data.dataloaders import DataLoaders, TensorLoader
from learnkit.engine.callback import Callback
from learnkit.engine.checks import check_loss
from learnkit.learner import Learner
from learnkit.metrics.averages import dry_run
from learnkit.metrics.base import Metric
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


FLOATS = (np.float32, np.float64)  # dtypes of samples; others are converted to the first one


class _Estimator(BaseEstimator):
    "What `Classifier` and `Regressor` share: parameters, fit, and the outputs of the model."

    learner_: Learner

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

    def _read(
        self, X: ArrayLike, y: ArrayLike, sample_weight: Any, reset: bool, **options: Any
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]:
        "Return checked samples, targets and weights, without the samples of weight 0."
        options = {'dtype': FLOATS, 'allow_nd': True, 'multi_output': True, **options}
        x, targets = validate_data(self, X, y, reset=reset, **options)
        if hasattr(targets, 'toarray'):  # labels in a sparse matrix
            targets = targets.toarray()
        if sample_weight is None:
            return x, targets, None
        weights = check_weights(sample_weight, len(x))
        x, targets, weights = leave_out_unweighted(weights, x, targets, weights)
        return x, targets, weights

    def _fit(
        self,
        x: NDArray[Any],
        y: Tensor,
        weights: NDArray[Any] | None,
        loss_func: Any,
        n_outputs: int,
        is_partial: bool = False,  # train one epoch, and keep the model if there is one
        strata: NDArray[Any] | None = None,  # groups that the held out part represents equally
    ) -> Self:
        "Train a new model, or continue for one epoch."
        if weights is not None:
            check_weightable(loss_func)
        seed = check_random_state(self.random_state).randint(2**31 - 1)
        with preserved_rng():
            torch.manual_seed(seed)
            learn = self.learner_ if is_partial and hasattr(self, 'learner_') else None
            if learn is None:
                learn = self._make_learner(x, n_outputs, loss_func)
                if y.ndim > 1:
                    learn.add_cb(ColumnOutputs())
            samples = convert_samples(x, learn.model)
            if self.loss_func is None:
                learn.loss_func.to(samples.dtype)  # its class weights
            columns = [samples, y.to(samples.dtype) if y.is_floating_point() else y]
            if weights is not None:
                columns.append(torch.from_numpy(weights).to(samples.dtype))
                weigh_samples(learn)
            self.learner_ = learn
            if is_partial:
                self._train(columns, epochs=1)
            else:
                self._train(columns, self.epochs, seed if self.early_stopping else None, strata)
        return self

    def _make_learner(self, x: NDArray[Any], n_outputs: int, loss_func: Any) -> Learner:
        params = dict(self.module_params or {})
        if not isinstance(self.module, nn.Module):
            model = self.module(int(np.prod(x.shape[1:])), n_outputs, **params)
        elif params:
            raise OptionError(
                f'module_params={params!r}: `module` is a model already. Pass its class.'
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
        options = {'bs': self.batch_size, 'device': self.device, 'n_inp': 1}
        return DataLoaders.from_tensors(train, valid, **options)

    def _train(
        self,
        columns: list[Tensor],  # samples, targets, and weights if there are any
        epochs: int,
        split_seed: int | None = None,  # seed of the held out part; None: train on all samples
        strata: NDArray[Any] | None = None,
    ) -> None:
        "Train the Learner on samples, and forget them."
        learn = self.learner_
        train: Any = tuple(columns)
        valid = None
        cbs: list[Any] = []
        with TemporaryDirectory(prefix='learnkit-best-') as folder:
            if split_seed is not None:
                train, valid = self._split(columns, strata, split_seed)
                best = SaveModelCallback('valid_loss', fname=f'{folder}/best')
                cbs = [EarlyStoppingCallback('valid_loss', patience=self.patience), best]
            without_data = learn.dls
            learn.dls = self._load(train, valid)
            try:
                with nullcontext() if self.verbose else learn.no_bar():
                    learn.fit(epochs, cbs=cbs)
            finally:
                learn.dls = without_data

    def _split(
        self, columns: list[Tensor], strata: NDArray[Any] | None, seed: int
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        "Return the columns of samples to train on, and of samples to validate on."
        rows = np.arange(len(columns[0]))
        train, valid = train_test_split(
            rows, test_size=self.validation_fraction, stratify=strata, random_state=seed
        )
        return tuple(t[train] for t in columns), tuple(t[valid] for t in columns)

    def _outputs(self, X: ArrayLike) -> Tensor:
        "Return the outputs of the model for samples, of shape [samples, outputs]."
        check_is_fitted(self)
        x = validate_data(self, X, reset=False, dtype=FLOATS, allow_nd=True)
        samples = convert_samples(x, self.learner_.model)
        loader = TensorLoader(samples, bs=max(self.batch_size, 256))
        with self.learner_.no_bar():
            outputs, _ = self.learner_.get_preds(dl=loader, act=noop)
        outputs = outputs.reshape(len(x), -1)
        return outputs if outputs.dtype == torch.float64 else outputs.float()


def convert_samples(x: NDArray[Any], model: nn.Module) -> Tensor:
    "Return samples in float64 for a model in float64, in float32 for any other."
    dtypes = (p.dtype for p in model.parameters() if p.is_floating_point())
    dtype = np.float64 if next(dtypes, None) == torch.float64 else np.float32
    return torch.from_numpy(check_array(x, dtype=dtype, allow_nd=True, input_name='X'))


class ColumnOutputs(Callback):
    "Reshape outputs [samples] to [samples, 1], the shape of their targets."

    def after_pred(self) -> None:
        pred = self.learn.pred
        if isinstance(pred, Tensor) and pred.ndim < 2:
            self.learn.pred = pred.reshape(-1, 1)


# -- sample weights --------------------------------------------------------------------------------


def check_weights(
    sample_weight: Any,  # one weight per sample, or a number
    n: int,  # number of samples
) -> NDArray[Any]:
    """Return sample weights as an array of float64; raise `ValueError` unless they are `n` numbers of at least 0.

    >>> check_weights([1, 0, 2], 3)
    array([1., 0., 2.])
    """
    if np.isscalar(sample_weight):
        sample_weight = np.full(n, sample_weight)
    weights = check_array(
        sample_weight, ensure_2d=False, dtype=np.float64, input_name='sample_weight'
    )
    if weights.shape != (n,):
        raise ValueError(
            f'sample_weight has the shape {weights.shape}, and there are {n} samples: pass one weight '
            'for each.'
        )
    if (weights < 0).any():
        raise ValueError(f'sample_weight has negative numbers, such as {weights.min()}.')
    return weights


def leave_out_unweighted(weights: NDArray[Any], *arrays: Any) -> list[Any]:
    "Return arrays without the samples of weight 0; raise `ValueError` if there are no others."
    is_kept = weights > 0
    if not is_kept.any():
        raise ValueError('Sample weights must contain at least one non-zero number.')
    return [None if array is None else array[is_kept] for array in arrays]


def check_weightable(loss_func: Any) -> None:
    "Raise `LossError` for a loss function that cannot return the loss of each sample."
    call = getattr(loss_func, 'forward', loss_func)
    if not hasattr(loss_func, 'reduction') and not takes(call, 'reduction'):
        raise LossError(
            f'{name_of(loss_func)}: weights need the loss of each sample. Add a keyword `reduction` '
            "to the loss function; with 'none' it returns one number per sample."
        )


class WeightedLoss(nn.Module):
    """Compute the weighted mean of the losses of samples: the loss of a batch that repeats each sample by its weight.

    Classes that the loss function weights, and targets that it ignores, count as in its own mean.

    >>> loss = WeightedLoss(nn.MSELoss())
    >>> loss(torch.tensor([[1.], [3.]]), torch.zeros(2, 1), torch.tensor([1., 3.]))
    tensor(7.)
    """

    def __init__(
        self,
        func: Any,  # loss function that takes `reduction`
    ) -> None:
        super().__init__()
        self.func = func
        keywords = getattr(func, 'keywords', {})
        self.reduction = getattr(func, 'reduction', keywords.get('reduction', 'mean'))
        self.denominator = denominator_of(func)
        self._is_checked = not isinstance(self.denominator, Unknown)

    def forward(self, pred: Tensor, targ: Tensor, weights: Tensor | None = None) -> Tensor:
        if weights is None:
            return self._reduce(pred, targ, torch.ones(len(targ), device=targ.device))
        if not self._is_checked:
            self._is_checked = True
            self._check_mean(pred, targ)
        return self._reduce(pred, targ, weights)

    def _reduce(self, pred: Tensor, targ: Tensor, weights: Tensor) -> Tensor:
        losses = compute_unreduced(self.func, pred, (targ,))
        n = len(targ)
        if losses.numel() % n:
            raise LossError(
                f"{name_of(self.func)} with reduction='none' returned {losses.numel()} losses for {n} "
                'samples: return one or more for each sample.'
            )
        rows = losses.reshape(n, -1)
        weighted = weights[:, None] * rows
        if self.reduction == 'none':
            return weighted.reshape(losses.shape)
        if self.reduction == 'sum':
            return weighted.sum()
        n_elements = 1 if self.reduction == 'batchmean' else rows.shape[1]
        return weighted.sum() / (weights * self.count_each(targ, n_elements)).sum()

    def _check_mean(self, pred: Tensor, targ: Tensor) -> None:
        "Raise `LossError` if equal weights change the loss, whose denominator is unknown."
        with torch.no_grad(), preserved_rng():
            mean = self.func(pred, targ).item()
            ours = self(pred, targ).item()
        if not isclose(mean, ours, rel_tol=1e-3, abs_tol=1e-6):
            raise LossError(
                f'{name_of(self.func)} is {mean:.6g}, and the losses of the samples average to {ours:.6g}. '
                'Weights need a loss that is a mean over samples.'
            )

    def count_each(
        self,
        targ: Tensor,
        n_elements: int,  # number of losses per sample
    ) -> Tensor | int:
        "Return what each sample adds to the denominator of the mean."
        denominator = self.denominator
        if not isinstance(denominator, ClassTargets) or targ.is_floating_point():
            return n_elements
        is_counted = targ != denominator.ignore_index
        weight = getattr(denominator.options, 'weight', None)
        if weight is None:
            return is_counted
        return torch.where(is_counted, weight[torch.where(is_counted, targ, 0)], 0)

    def activation(self, x: Any) -> Any:
        "Apply the activation of the wrapped loss."
        return find_activation(self.func)(x)

    def decodes(self, x: Any) -> Any:
        "Return the predicted targets of the wrapped loss."
        return find_decoder(self.func)(x)

    def loss_outputs(self) -> Outputs:
        "Return the meaning of the outputs for the wrapped loss."
        return outputs_of(self.func)

    def loss_denominator(self) -> Denominator:
        "Return the denominator of the weighted mean."
        return WeightedSamples(self)


class WeightedSamples(Denominator):
    "Denominator of a `WeightedLoss`; without weights in the batch, of the wrapped loss."

    varies = True

    def __init__(self, loss: WeightedLoss) -> None:
        self.loss = loss

    @override
    def count(self, yb: tuple[Any, ...]) -> Any:
        if len(yb) < 2:
            return self.loss.denominator.count(yb)
        if self.loss.reduction == 'sum':
            return None
        targ, weights = yb
        total = (weights * self.loss.count_each(targ, 1)).sum()
        return total.item() if total.is_cpu else total


class UnweightedMetric(Metric):
    "Metric of predictions and targets, without the weights of the samples."

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.on = metric.on
        self._name = metric.name

    @override
    def reset(self) -> None:
        self.metric.reset()

    @override
    def accumulate(self, learn: Any) -> None:
        with replacing_yield(learn, 'yb', learn.yb[:1]):
            self.metric.accumulate(learn)

    def try_batch(self, pred: Any, yb: tuple[Any, ...]) -> Any:
        "Compute the metric of one batch, to find errors."
        return dry_run(self.metric, pred, yb[:1])

    @property
    @override
    def value(self) -> Any:
        return self.metric.value


def weigh_samples(learn: Learner) -> None:
    "Let a Learner train on batches of samples, targets and weights, unless it already does."
    if isinstance(learn.loss_func, WeightedLoss):
        return
    learn.loss_func = WeightedLoss(learn.loss_func)
    learn.metrics = [UnweightedMetric(metric) for metric in learn.metrics]


# -- estimators ------------------------------------------------------------------------------------


def get_loss(estimator: Any) -> Any:
    "Return the loss function of the last fit, or of the next one."
    if not hasattr(estimator, 'learner_'):
        return estimator.loss_func
    loss_func = estimator.learner_.loss_func
    return loss_func.func if isinstance(loss_func, WeightedLoss) else loss_func


def _has_probabilities(estimator: Any) -> bool:
    "Return True if the outputs of an estimator's model become probabilities; raise `AttributeError` if not."
    loss_func = get_loss(estimator)
    if loss_func is None or outputs_of(loss_func).are_probabilities:
        return True
    raise AttributeError(
        f'The outputs of {name_of(unwrap_partial(loss_func))} are not probabilities: use '
        '`decision_function`, or a loss with a method `activation` that returns probabilities.'
    )


def _has_decisions(estimator: Any) -> bool:
    "Return True if the outputs of an estimator's model do not become probabilities."
    loss_func = get_loss(estimator)
    return loss_func is not None and not outputs_of(loss_func).are_probabilities


def can_score_labels(loss_func: Any) -> bool:
    "Return True if the outputs of a model may be scores of several labels per sample."
    outputs = outputs_of(loss_func)
    return outputs.targets in ('labels', 'signs', 'distances') or (
        not outputs.targets and outputs.are_probabilities
    )


def find_margin(loss_func: Any) -> float:
    "Return the margin of a hinge loss: of a module, or of a `partial` of torch's function."
    keywords = getattr(loss_func, 'keywords', {})
    return float(getattr(loss_func, 'margin', keywords.get('margin', 1.0)))


class Classifier(ClassifierMixin, _Estimator):
    """Train a network that classifies samples, with scikit-learn's interface.

    `module` is a function or class that is called with the number of features and of outputs, and
    returns a model with outputs of shape [samples, outputs]; or a model, which is copied for each
    fit. Samples are an array or a data frame with rows of any shape, converted to float32, or to
    float64 for a model in float64. Targets are one class per sample, or several labels: an array
    [samples, labels] of 0 and 1.

    The loss decides what the outputs are. With `CrossEntropyLoss`, the default, they are one score
    per class. With `BCEWithLogitsLoss`, the default for several labels, they are one score per
    label, one score for two classes, and one score per class for more classes, whose probabilities
    are scaled to a sum of 1. `predict_proba` exists for losses whose outputs become probabilities,
    `decision_function` for all others, such as `MultiMarginLoss` and `SoftMarginLoss`.

    The loss of a batch is the mean of its samples weighted by `sample_weight`, and by
    `class_weight` as in scikit-learn: a dict from class to weight, or 'balanced'. A sample of
    weight 0 is left out. Metrics are not weighted.

    With `early_stopping`, a part of the samples is held out. Training stops once their loss has not
    improved for `patience` epochs, and the best weights are loaded.

    Raises what scikit-learn's estimators raise for unusable data, and what `Learner` and `fit` raise.
    Raises `OptionError` for a loss function that cannot classify these targets.

    >>> from sklearn.datasets import load_iris
    >>> x, y = load_iris(return_X_y=True)
    >>> model = Classifier(random_state=0).fit(x, y)
    >>> model.predict(x[:2]), model.score(x, y) > 0.9, len(model.history_)
    (array([0, 0]), True, 30)
    """

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        "Train a new model."
        x, labels, weights = self._read(X, y, sample_weight, reset=True)
        labels = self._check_labels(labels)
        self._learn_classes(labels)
        return self._fit_labels(x, labels, weights)

    def partial_fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        classes: ArrayLike
        | None = None,  # all classes; needed in the first call, unless y is labels
        sample_weight: ArrayLike | None = None,
    ) -> Self:
        "Train one more epoch on samples. The first call makes the model."
        is_first = not hasattr(self, 'learner_')
        if self.class_weight == 'balanced':
            raise OptionError(
                "class_weight='balanced' needs all samples, which partial_fit does not get. Pass a dict, "
                'for example of `compute_class_weight`.'
            )
        x, labels, weights = self._read(X, y, sample_weight, reset=is_first)
        labels = self._check_labels(labels)
        if is_first:
            if classes is None and labels.ndim == 1:
                raise ValueError('classes must be passed on the first call to partial_fit.')
            self._learn_classes(labels if classes is None or labels.ndim > 1 else classes)
        return self._fit_labels(x, labels, weights, is_partial=True)

    @available_if(_has_probabilities)
    def predict_proba(self, X: ArrayLike) -> NDArray[Any]:
        """Return the probability of each class in the order of `classes_`, an array [samples, classes].

        For several labels, it is the probability of each label. A loss whose outputs are not probabilities has no
        such method.
        """
        scores = self._outputs(X)
        probs: Tensor = find_activation(get_loss(self))(scores).detach()
        if self._is_multilabel:
            return probs.numpy()
        if probs.shape[1] == 1:
            probs = torch.cat([1 - probs, probs], 1)
        elif self._kind_of_targets() == 'labels':
            total = probs.sum(1, keepdim=True)
            probs = torch.where(total > 0, probs / total, 1 / len(self.classes_))
        return probs.numpy()

    @available_if(_has_decisions)
    def decision_function(self, X: ArrayLike) -> NDArray[Any]:
        """Return a score of each class or label, an array [samples, classes].

        For two classes it is one number per sample, above 0 for the second class. A loss whose outputs are
        probabilities has no such method.
        """
        scores = self._outputs(X)
        kind = self._kind_of_targets()
        if kind == 'distances':
            scores = find_margin(get_loss(self)) / 2 - scores
        if self._is_multilabel or len(self.classes_) > 2:
            return scores.numpy()
        if scores.shape[1] > 1:
            return (scores[:, 1] - scores[:, 0]).numpy()
        if not kind:
            name = name_of(get_loss(self))
            raise OptionError(
                f'{name}: it is unknown which outputs mean the second class. Add a method `activation` '
                'that returns probabilities to the loss function.'
            )
        return scores[:, 0].numpy()

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        "Return the most probable class of each sample; for several labels, an array of 0 and 1."
        if _has_decisions(self):
            scores = self.decision_function(X)
            is_chosen = scores > 0
        else:
            scores = self.predict_proba(X)
            is_chosen = scores > getattr(get_loss(self), 'thresh', 0.5)
        if self._is_multilabel:
            return is_chosen.astype(int)
        if scores.ndim == 1:
            return self.classes_[is_chosen.astype(int)]
        if len(self.classes_) == 2 and self._kind_of_targets() == 'labels':
            return self.classes_[is_chosen[:, 1].astype(int)]
        return self.classes_[scores.argmax(1)]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        is_of_labels = self.loss_func is None or can_score_labels(self.loss_func)
        tags.classifier_tags.multi_label = is_of_labels and self.class_weight is None
        return tags

    def _check_labels(self, labels: NDArray[Any]) -> NDArray[Any]:
        "Return classes [samples], or labels [samples, labels]; raise `ValueError` for other targets."
        check_classification_targets(labels)
        kind = type_of_target(labels)
        if kind != 'multilabel-indicator':
            if kind.endswith('multioutput'):
                raise ValueError('y has several classes per sample: pass one column of classes.')
            return column_or_1d(labels, warn=True)
        if not np.isin(labels, (0, 1)).all():
            raise ValueError('y has several columns: labels are 0 or 1.')
        return labels

    def _learn_classes(self, labels: ArrayLike) -> None:
        "Set `classes_`; raise `ValueError` for one class."
        labels = np.asarray(labels)
        is_multilabel = labels.ndim > 1
        encoder = LabelEncoder().fit(np.arange(labels.shape[1]) if is_multilabel else labels)
        if len(encoder.classes_) < 2:
            raise ValueError('The number of classes has to be greater than one; got 1 class')
        self._is_multilabel = is_multilabel
        self._encoder = encoder
        self.classes_ = encoder.classes_

    def _fit_labels(
        self,
        x: NDArray[Any],
        labels: NDArray[Any],
        weights: NDArray[Any] | None,
        is_partial: bool = False,
    ) -> Self:
        n_classes = len(self.classes_)
        if labels.shape[1:] != ((n_classes,) if self._is_multilabel else ()):
            made_for = f'{n_classes} labels' if self._is_multilabel else 'one class'
            raise ValueError(
                f'y has the shape {labels.shape}, and this model was made for {made_for} per sample.'
            )
        class_weights = self._weigh_classes(labels, weights)
        loss_func = self._make_loss(class_weights)
        if class_weights is not None:
            of_samples = class_weights[self._encoder.transform(labels)]
            x, labels, weights, of_samples = leave_out_unweighted(
                of_samples, x, labels, weights, of_samples
            )
            if self.loss_func is not None:  # the default loss weights its classes itself
                weights = of_samples if weights is None else weights * of_samples
        strata = None if self._is_multilabel else self._encoder.transform(labels)
        y = self._encode(labels if strata is None else strata, loss_func)
        n_outputs = y.shape[1] if y.ndim > 1 else n_classes
        return self._fit(x, y, weights, loss_func, n_outputs, is_partial, strata)

    def _weigh_classes(
        self, labels: NDArray[Any], weights: NDArray[Any] | None
    ) -> NDArray[Any] | None:
        "Return the weight of each class, or None without `class_weight`."
        if self.class_weight is None:
            return None
        if self._is_multilabel:
            raise OptionError(
                'class_weight: y has several labels per sample. Leave it out, and weight the labels with '
                '`loss_func=BCEWithLogitsLoss(pos_weight=...)`.'
            )
        if self.class_weight == 'balanced' and weights is not None:
            totals = np.bincount(self._encoder.transform(labels), weights, len(self.classes_))
            return totals.sum() / (len(totals) * totals)
        return compute_class_weight(self.class_weight, classes=self.classes_, y=labels)

    def _make_loss(self, class_weights: NDArray[Any] | None) -> Any:
        "Return a copy of `loss_func`, or the default loss; raise `OptionError` for one that cannot classify."
        if self.loss_func is None:
            if self._is_multilabel:
                return nn.BCEWithLogitsLoss()
            return nn.CrossEntropyLoss(
                None if class_weights is None else torch.from_numpy(class_weights)
            )
        check_loss(self.loss_func)
        name = name_of(unwrap_partial(self.loss_func))
        if outputs_of(self.loss_func).targets == 'numbers':
            raise OptionError(
                f'loss_func={name}: a Classifier cannot predict classes with it. Pass a loss such as '
                'CrossEntropyLoss or BCEWithLogitsLoss, or use a Regressor.'
            )
        if self._is_multilabel and not can_score_labels(self.loss_func):
            raise OptionError(
                f'loss_func={name}: y has several labels per sample. Pass a loss such as '
                'BCEWithLogitsLoss, or a loss with a method `activation` that returns the probability of '
                'each label.'
            )
        return copy.deepcopy(self.loss_func)

    def _encode(
        self,
        labels: NDArray[Any],  # numbers of classes [samples], or labels [samples, labels]
        loss_func: Any,
    ) -> Tensor:
        "Return the targets that the loss function compares with the outputs."
        kind = outputs_of(loss_func).targets
        if self._is_multilabel:
            targets = torch.from_numpy(np.asarray(labels, dtype=np.float32))
        else:
            numbers = torch.from_numpy(labels).long()
            if kind in ('classes', ''):
                return numbers
            targets = nn.functional.one_hot(numbers, len(self.classes_)).float()
            if len(self.classes_) == 2:
                targets = targets[:, 1:]
        return targets if kind in ('labels', '') else 2 * targets - 1

    def _kind_of_targets(self) -> str:
        return outputs_of(get_loss(self)).targets


class Regressor(RegressorMixin, _Estimator):
    """Train a network that predicts numbers, with scikit-learn's interface.

    The parameters are those of `Classifier`, without `class_weight`. `module` is called with the
    number of features and of targets. The default loss is `MSELoss`. Targets are an array [samples]
    or [samples, targets], and predictions have the same form. Scale the targets if they are far
    from 0, as with `TransformedTargetRegressor`. The loss of a batch is the mean of its samples
    weighted by `sample_weight`.

    Raises what scikit-learn's estimators raise for unusable data, and what `Learner` and `fit` raise.

    >>> from sklearn.datasets import make_regression
    >>> x, y = make_regression(200, 3, random_state=0)
    >>> model = Regressor(random_state=0).fit(x, y / y.std())
    >>> model.predict(x[:2]).shape, model.score(x, y / y.std()) > 0.9
    ((2,), True)
    """

    _target_shape: tuple[int, ...]  # shape of the targets of one sample

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        "Train a new model."
        return self._fit_numbers(X, y, sample_weight, reset=True)

    def partial_fit(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> Self:
        "Train one more epoch on samples. The first call makes the model."
        is_first = not hasattr(self, 'learner_')
        return self._fit_numbers(X, y, sample_weight, reset=is_first, is_partial=True)

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        "Return the predictions in float64, an array [samples] or [samples, targets]."
        outputs = self._outputs(X).double().numpy()
        return outputs.reshape(-1, *self._target_shape)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _fit_numbers(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None,
        reset: bool,
        is_partial: bool = False,
    ) -> Self:
        if self.class_weight is not None:
            raise OptionError('class_weight: a Regressor has no classes. Leave it out.')
        x, numbers, weights = self._read(X, y, sample_weight, reset, y_numeric=True)
        if not reset and numbers.shape[1:] != self._target_shape:
            raise ValueError(
                f'y has the shape {numbers.shape}, and this model was made for targets of the shape '
                f'{self._target_shape} per sample.'
            )
        self._target_shape = numbers.shape[1:]
        targets = torch.from_numpy(np.asarray(numbers, dtype=np.float64)).reshape(len(numbers), -1)
        loss_func = nn.MSELoss() if self.loss_func is None else copy.deepcopy(self.loss_func)
        return self._fit(x, targets, weights, loss_func, targets.shape[1], is_partial)
