# SPDX-License-Identifier: Apache-2.0
"""Metrics computed once from all predictions and targets, such as scikit-learn's, and metrics of parts of the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from learnkit.core.batch import to_detach
from learnkit.core.errors import MetricError
from learnkit.core.model import name_of, unwrap_partial
from learnkit.core.validation import check_choice
from learnkit.metrics.averages import as_plain_value, batch_weight, check_on, measuring
from learnkit.metrics.base import Mean, Metric, flatten_pair, measured_pred
from learnkit.metrics.merge import interleave
from learnkit.metrics.undefined import compute_or_nan

if TYPE_CHECKING:
    from learnkit.learner import Learner

ACTIVATIONS = ('no', 'sigmoid', 'softmax', 'binarysoftmax')


class KeptMetric(Metric):
    """Base class of metrics computed by `final` from the predictions and targets of the data set, which are kept.

    The value is NaN if `final` raises `ValueError` for values without a score (`compute_or_nan`)."""

    def __init__(self, name: str, on: str | None = None) -> None:
        self._name = name
        self.on = check_on(on)
        self.reset()

    def prepare(self, pred: Tensor, targ: Tensor) -> tuple[Tensor, Tensor]:
        "Return what is kept of a batch."
        raise NotImplementedError

    def final(self, pred: Tensor, targ: Tensor) -> Any:
        "Return the value from what was kept of all batches."
        raise NotImplementedError

    @override
    def reset(self) -> None:
        self.waiting: list[tuple[Tensor, Tensor]] = []  # predictions and targets of each batch

    @override
    def accumulate(self, learn: Learner) -> None:
        self.waiting.append(self._prepare(measured_pred(learn), learn.yb))

    def _prepare(self, pred: Any, yb: tuple[Any, ...]) -> Any:
        with torch.no_grad(), measuring(self.name, pred, yb):
            return self.prepare(*to_detach((pred, *yb), cpu=False))

    def try_batch(self, pred: Any, yb: tuple[Any, ...]) -> None:
        self._prepare(pred, yb)

    def __call__(self, pred: Tensor, *targs: Tensor) -> Any:
        return self._finish(*self._prepare(pred, targs))

    @property
    @override
    def value(self) -> Any:
        if not self.waiting:
            return None
        device = self.waiting[-1][0].device
        columns = zip(*self.waiting, strict=True)
        return self._finish(*(torch.cat([t.to(device) for t in ts]) for ts in columns))

    def _finish(self, pred: Tensor, targ: Tensor) -> Any:
        return as_plain_value(compute_or_nan(self.name, self.final, pred, targ))

    @override
    def merge(self, states: list[dict[str, Any]]) -> None:
        self.waiting = interleave(sd['waiting'] for sd in states)


class AccumMetric(KeptMetric):
    """Compute `func(preds, targs)` once over the whole data set, for values that are not a mean over batches.

    Predictions and targets are kept on their device until the value is read. Argmax and `thresh` are applied to each
    batch. A call with predictions and targets returns their value. A `ValueError` of `func` is NaN in the history if a
    value is not finite or all targets are equal. Raises `MetricError` for an unknown activation and, before training,
    for predictions and targets of different sizes.

    >>> def median_error(preds, targs): return (preds - targs).abs().median()
    >>> AccumMetric(median_error)(torch.tensor([[1.], [2.], [5.]]), torch.tensor([1., 1., 1.]))
    1.0
    """

    def __init__(
        self,
        func: Callable[..., Any],  # f(preds, targs, **kwargs)
        dim_argmax: int | None = None,  # class dimension for argmax; None: no argmax
        activation: str = 'no',  # 'sigmoid', 'softmax', or 'binarysoftmax' (of the last class)
        thresh: float | None = None,  # convert predictions to `pred >= thresh`
        to_np: bool = False,  # pass NumPy arrays to `func`
        invert_arg: bool = False,  # call f(targs, preds)
        flatten: bool = True,  # flatten predictions and targets, which need equal sizes
        name: str | None = None,  # default: the function's name
        on: str | None = None,  # 'train', 'valid' or 'both'
        **kwargs: Any,  # keyword arguments of `func`
    ) -> None:
        if str(activation) not in ACTIVATIONS:
            raise MetricError(f'activation={activation!r}: use one of {", ".join(ACTIVATIONS)}.')
        self.func = partial(func, **kwargs)
        self.dim_argmax = dim_argmax
        self.activation = str(activation)
        self.thresh = thresh
        self.to_np = to_np
        self.invert_arg = invert_arg
        self.flatten = flatten
        super().__init__(name or name_of(unwrap_partial(func)), on)

    @override
    def prepare(self, pred: Tensor, targ: Tensor) -> tuple[Tensor, Tensor]:
        if self.activation == 'sigmoid':
            pred = pred.sigmoid()
        elif self.activation != 'no':
            pred = pred.softmax(-1 if self.dim_argmax is None else self.dim_argmax)
        elif self.dim_argmax is not None:
            check_choice(self.name, pred, self.dim_argmax)
            pred = pred.argmax(self.dim_argmax)
        if self.activation == 'binarysoftmax':
            pred = pred[:, -1]
        if self.thresh is not None:
            pred = pred >= self.thresh
        return flatten_pair(self.name, pred, targ) if self.flatten else (pred, targ)

    @override
    def final(self, pred: Any, targ: Any) -> Any:
        if self.to_np:
            pred, targ = pred.cpu().numpy(), targ.cpu().numpy()
        return self.func(targ, pred) if self.invert_arg else self.func(pred, targ)


def skm_to_fastai(
    func: Callable[..., Any],  # f(y_true, y_pred, **kwargs), such as a score of scikit-learn
    is_class: bool = True,  # whether `func` takes classes (argmax) or labels (with `thresh`)
    thresh: float | None = None,  # probability from which a label is predicted
    axis: int = -1,  # class dimension
    activation: str | None = None,  # as for `AccumMetric`; None: 'sigmoid' for labels, else 'no'
    **kwargs: Any,  # further arguments of `AccumMetric` and `func`
) -> AccumMetric:
    """Make a metric of a scikit-learn score, computed once over the whole data set on the CPU.

    >>> def hits(y_true, y_pred): return float((y_true == y_pred).sum())
    >>> skm_to_fastai(hits)(torch.eye(3), torch.tensor([0, 1, 1]))
    2.0
    """
    of_labels = is_class and thresh is not None
    return AccumMetric(
        func,
        axis if is_class and not of_labels else None,
        activation or ('sigmoid' if of_labels else 'no'),
        thresh,
        to_np=True,
        invert_arg=True,
        **kwargs,
    )


class LossMetric(Mean, Metric):
    """Average a part of the loss, which the loss function stores in its attribute `attr`, over the samples.

    The parts of a loss that returns a dict are recorded without this metric."""

    def __init__(
        self,
        attr: str,  # attribute of the loss function
        nm: str | None = None,  # name of the column; None: `attr`
        on: str | None = None,  # 'train', 'valid' or 'both'; None: the Recorder's setting
    ) -> None:
        self.attr = attr
        self._name = nm or attr
        self.on = check_on(on)

    @override
    def accumulate(self, learn: Learner) -> None:
        self.add(getattr(learn.loss_func, self.attr), batch_weight(learn))


def LossMetrics(
    attrs: str | Sequence[str],  # attributes of the loss function, a list or comma-separated string
    nms: str | Sequence[str] | None = None,  # names of the columns, in the same form; None: `attrs`
    on: str | None = None,  # 'train', 'valid' or 'both'; None: the Recorder's setting
) -> list[LossMetric]:
    """Return a `LossMetric` for each attribute.

    >>> [m.name for m in LossMetrics('kl,reconstruction', ['kl', 'rec'])]
    ['kl', 'rec']
    """
    attrs = _split_names(attrs)
    nms = attrs if nms is None else _split_names(nms)
    return [LossMetric(attr, nm, on) for attr, nm in zip(attrs, nms, strict=True)]


def _split_names(names: str | Sequence[str]) -> Sequence[str]:
    return names.split(',') if isinstance(names, str) else names
