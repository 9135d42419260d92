"""Metrics of a function of all predictions and targets at once, as scikit-learn's are; and of parts of the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch  # noqa: F401  # the examples use it
from torch import Tensor

from learnkit.core.batch import to_detach
from learnkit.core.errors import MetricError, did_you_mean
from learnkit.metrics.averages import TorchMetric, batch_weight, check_on
from learnkit.metrics.base import Mean, Metric, is_number, paired
from learnkit.metrics.merge import merged_pairs
from learnkit.metrics.state import Pairs, accumulated, joined, put_back

__all__ = ['AccumMetric', 'LossMetric', 'LossMetrics', 'skm_to_fastai']

ACTIVATIONS = ('no', 'sigmoid', 'softmax', 'binarysoftmax')


class AccumMetric(TorchMetric):
    """Compute `func(preds, targs)` once, of the whole set: for what no mean over batches gives.

    Predictions and targets wait where they are until the value is read, and take memory there: argmax is taken, and
    `thresh` applied, batch by batch. Called, it gives the value of what it is called with. Raises `MetricError` for
    what is no function, for an unknown activation and, before training, for targets of another size than the
    predictions.

    >>> def median_error(preds, targs): return (preds - targs).abs().median()
    >>> AccumMetric(median_error)(torch.tensor([[1.], [2.], [5.]]), torch.tensor([1., 1., 1.]))
    1.0
    """

    metric: _WholeSet

    def __init__(
        self,
        func: Callable[..., Any],  # f(preds, targs, **kwargs)
        dim_argmax: int | None = None,  # where the classes are, of which the likeliest is taken
        activation: str = 'no',  # 'sigmoid', 'softmax', or 'binarysoftmax' (of the last class)
        thresh: float | None = None,  # predictions become whether they reach it
        to_np: bool = False,  # give `func` NumPy arrays, on the CPU
        invert_arg: bool = False,  # call f(targs, preds)
        flatten: bool = True,  # flatten both, which have to be of one size
        name: str | None = None,  # default: the function's name
        on: str | None = None,  # 'train', 'valid' or 'both'
        **kwargs: Any,  # more for `func`
    ) -> None:
        if not callable(func):
            raise MetricError(f'AccumMetric computes a function f(preds, targs), got {func!r}.')
        if str(activation) not in ACTIVATIONS:
            raise MetricError(
                f'activation={activation!r}: use one of {", ".join(map(repr, ACTIVATIONS))}.'
                f'{did_you_mean(str(activation), ACTIVATIONS)}'
            )
        self.func, maker = func, func.func if isinstance(func, partial) else func
        called = name or getattr(maker, '__name__', None) or type(maker).__name__
        prepare = partial(_prepared, called, dim_argmax, str(activation), thresh, flatten)
        super().__init__(_WholeSet(partial(func, **kwargs), prepare, to_np, invert_arg), called, on)

    def __call__(self, pred: Tensor, targ: Tensor) -> Any:
        alone = self.metric.anew()
        alone.update(pred, targ)
        value = alone.compute()
        return float(value) if is_number(value) else to_detach(value)


class _WholeSet:
    "Predictions and targets that wait for a function of all of them."

    def __init__(
        self, func: Callable[..., Any], prepare: Callable[..., Any], to_np: bool, invert_arg: bool
    ) -> None:
        self.func, self.prepare, self.to_np, self.invert_arg = func, prepare, to_np, invert_arg
        self.reset()

    def anew(self) -> _WholeSet:
        return _WholeSet(self.func, self.prepare, self.to_np, self.invert_arg)

    def reset(self) -> None:
        self.waiting: Pairs = []
        self.lengths: list[tuple[int, int]] = []  # of the predictions and targets of each batch

    def update(self, pred: Tensor, targ: Tensor) -> None:
        pred, targ = self.prepare(pred, targ)
        self.waiting.append((pred, targ))
        self.lengths.append((len(pred), len(targ)))

    def compute(self) -> Any:
        both: Any = joined(self.waiting)[0]
        if self.to_np:
            both = [t.cpu().numpy() for t in both]
        return self.func(*(reversed(both) if self.invert_arg else both))

    def state_dict(self) -> dict[str, Any]:
        self.waiting = joined(self.waiting)  # two tensors are saved faster than two a batch
        return accumulated(self)

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        put_back(self, sd)

    def merge(self, states: list[dict[str, Any]]) -> None:
        self.waiting, self.lengths = merged_pairs(states)


def _prepared(
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
        pred = pred.argmax(dim_argmax)
    if activation == 'binarysoftmax':
        pred = pred[:, -1]
    if thresh is not None:
        pred = pred >= thresh
    return paired(name, pred, targ) if flatten else (pred, targ)


def skm_to_fastai(
    func: Callable[..., Any],  # f(y_true, y_pred, **kwargs), of scikit-learn for one
    is_class: bool = True,  # it takes classes: the likeliest, or with `thresh` what reaches it
    thresh: float | None = None,  # for labels: a label is predicted from this probability on
    axis: int = -1,  # where the classes are
    activation: str | None = None,  # as for `AccumMetric`; None: 'sigmoid' for labels, else 'no'
    **kwargs: Any,  # more for `AccumMetric` and `func`
) -> AccumMetric:
    """Make a metric of a function of scikit-learn's kind, which is computed on the CPU, once, of the whole set.

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
        True,
        True,
        **kwargs,
    )


class LossMetric(Mean, Metric):
    """Average a part of the loss, which the loss function leaves in its attribute `attr`, over the samples.

    A loss that returns a dict of named parts needs no such metric: they are recorded. Raises `MetricError` when the
    loss function has no such attribute."""

    def __init__(
        self,
        attr: str,  # where the loss function leaves the part
        nm: str | None = None,  # the column's name; default: `attr`
        on: str | None = None,  # 'train', 'valid' or 'both'; None: as the Recorder says
    ) -> None:
        self.attr, self._nm, self.on = attr, nm, check_on(on)

    def accumulate(self, learn: Any) -> None:
        try:
            value = getattr(learn.loss_func, self.attr)
        except AttributeError:
            hint = did_you_mean(self.attr, getattr(learn.loss_func, '__dict__', ()))
            raise MetricError(
                f'LossMetric: {learn.loss_func!r} has no attribute `{self.attr}`.{hint}'
            ) from None
        self.add(value, batch_weight(learn))

    @property
    def name(self) -> str:
        return self._nm or self.attr


def LossMetrics(
    attrs: str | Sequence[str],  # attributes of the loss function: a list, or a string with commas
    nms: str | Sequence[str] | None = None,  # their columns, likewise; default: `attrs`
    on: str | None = None,  # 'train', 'valid' or 'both'; None: as the Recorder says
) -> list[LossMetric]:
    """Return a `LossMetric` for each of `attrs`. Raises `MetricError` for another number of names.

    >>> [m.name for m in LossMetrics('kl,reconstruction', ['kl', 'rec'])]
    ['kl', 'rec']
    """
    attrs, nms = (
        s.split(',') if isinstance(s, str) else s for s in (attrs, attrs if nms is None else nms)
    )
    if len(attrs) != len(nms):
        raise MetricError(
            f'LossMetrics: {len(attrs)} attributes, but {len(nms)} names: give each attribute one.'
        )
    return [LossMetric(attr, nm, on) for attr, nm in zip(attrs, nms, strict=True)]
