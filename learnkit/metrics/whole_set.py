"""Metrics computed once from all predictions and targets, such as scikit-learn's, and metrics of parts of the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from learnkit.core.errors import MetricError
from learnkit.core.model import name_of, unwrap_partial
from learnkit.core.validation import check_choice
from learnkit.metrics.averages import TorchMetric, as_plain_value, batch_weight, check_on
from learnkit.metrics.base import Mean, Metric, flatten_pair
from learnkit.metrics.merge import Accumulates, interleave

if TYPE_CHECKING:
    from learnkit.learner import Learner

ACTIVATIONS = ('no', 'sigmoid', 'softmax', 'binarysoftmax')


class KeptMetric(TorchMetric):
    "Base class of metrics that keep predictions and targets; a call returns the value of one batch."

    def __call__(self, pred: Tensor, *targs: Tensor) -> Any:
        return as_plain_value(self._try(pred, targs).compute())

    @override
    def _try(self, pred: Any, yb: tuple[Any, ...]) -> Any:
        "Return a copy of the metric that has seen this batch alone."
        metric = copy(self.metric)
        metric.reset()
        self._update(metric, pred, yb)
        return metric


class AccumMetric(KeptMetric):
    """Compute `func(preds, targs)` once over the whole data set, for values that are not a mean over batches.

    Predictions and targets are kept on their device until the value is read. Argmax and `thresh` are applied to each
    batch. A call with predictions and targets returns their value. Raises `MetricError` for an unknown activation
    and, before training, for predictions and targets of different sizes.

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
        self.func = func
        name = name or name_of(unwrap_partial(func))
        prepare = partial(_prepare, name, dim_argmax, str(activation), thresh, flatten)
        super().__init__(WholeSet(partial(func, **kwargs), prepare, to_np, invert_arg), name, on)


class WholeSet(Accumulates):
    "Predictions and targets of the batches, kept for a function of the whole data set."

    def __init__(
        self,
        func: Callable[..., Any],  # f(predictions, targets) of the data set
        prepare: Callable[..., Any],  # f(predictions, targets) of a batch that returns what is kept
        to_np: bool = False,
        invert_arg: bool = False,
    ) -> None:
        self.func = func
        self.prepare = prepare
        self.to_np = to_np
        self.invert_arg = invert_arg
        self.reset()

    @override
    def reset(self) -> None:
        self.waiting: list[tuple[Tensor, Tensor]] = []  # predictions and targets of each batch

    def update(self, pred: Tensor, targ: Tensor) -> None:
        self.waiting.append(self.prepare(pred, targ))

    def compute(self) -> Any:
        device = self.waiting[-1][0].device
        both: Any = [
            torch.cat([t.to(device) for t in batches])
            for batches in zip(*self.waiting, strict=True)
        ]
        if self.to_np:
            both = [t.cpu().numpy() for t in both]
        return self.func(*(reversed(both) if self.invert_arg else both))

    @override
    def merge(self, states: list[dict[str, Any]]) -> None:
        self.waiting = interleave(sd['waiting'] for sd in states)


def _prepare(
    name: str,
    dim_argmax: int | None,
    activation: str,
    thresh: float | None,
    flatten: bool,
    pred: Tensor,
    targ: Tensor,
) -> tuple[Tensor, Tensor]:
    if activation == 'sigmoid':
        pred = pred.sigmoid()
    elif activation != 'no':
        pred = pred.softmax(-1 if dim_argmax is None else dim_argmax)
    elif dim_argmax is not None:
        check_choice(name, pred, dim_argmax)
        pred = pred.argmax(dim_argmax)
    if activation == 'binarysoftmax':
        pred = pred[:, -1]
    if thresh is not None:
        pred = pred >= thresh
    return flatten_pair(name, pred, targ) if flatten else (pred, targ)


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
        self._nm = nm
        self.on = check_on(on)

    @override
    def accumulate(self, learn: Learner) -> None:
        self.add(getattr(learn.loss_func, self.attr), batch_weight(learn))

    @property
    @override
    def name(self) -> str:
        return self._nm or self.attr


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
