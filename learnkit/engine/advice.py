# SPDX-License-Identifier: Apache-2.0
"""Checks of the first batches: predictions, targets, the loss, metrics, and what callbacks made of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from learnkit.core.activation import outputs_of
from learnkit.core.batch import apply_model, describe, form_of, map_tensors, unpack_output
from learnkit.core.errors import LossError, MetricError, TimeError
from learnkit.core.model import name_of
from learnkit.core.random import preserved_generators, preserved_rng
from learnkit.core.validation import (
    check_class_scores,
    check_pairing,
    warn_of_order,
    warn_user,
)
from learnkit.data.dataloaders import evaluation_loaders, n_batches
from learnkit.engine.callback import Callback
from learnkit.engine.counters import sample_count, token_count
from learnkit.engine.loss_weights import check_is_mean
from learnkit.engine.run import preserved_state
from learnkit.engine.snapshot import preserved_forward
from learnkit.metrics.averages import AvgMetric, dry_run, warn_unless_mean
from learnkit.metrics.base import Metric, measured_pred

if TYPE_CHECKING:
    from learnkit.learner import Learner


class Advice:
    "Checks of predictions, targets and the loss function at the first loss of each pass."

    def __init__(self) -> None:
        self.is_watching = False  # True until the first loss of a pass is checked
        self._has_checked_loss = True  # False until a fit has checked the loss function
        self._checked: list[Any] | None = None  # loss function and sample shapes of the last check
        self.has_checked_size = False  # whether a warning about the number of samples was issued

    def begin_fit(self) -> None:
        "Check the loss function at the first loss of this fit."
        self._has_checked_loss = False
        self._checked = None

    def check_loss(self, learn: Learner, pred: Any) -> None:
        "Check the shapes at the first loss of a pass, and the loss function at the first loss of a fit."
        # a single prediction fits any shape, so that the next loss is checked too
        has_checked = not isinstance(pred, Tensor) or pred.numel() > 1
        shapes = [t.shape[1:] for t in (pred, *learn.yb) if isinstance(t, Tensor)]
        pairing = [id(learn.loss_func), *shapes]
        if pairing != self._checked:
            check_pairing(learn.loss_func, pred, learn.yb)
            self._checked = pairing if has_checked else None
        self.is_watching = not has_checked
        if self._has_checked_loss:
            return
        self._has_checked_loss = True
        check_class_scores(learn.loss_func, pred, learn.yb)
        warn_of_order(learn.loss_func)
        if learn.training and (learn.microbatch or learn.world.size > 1):
            check_is_mean(learn, pred)


# -- counters and the loss ---------------------------------------------------------------------------


def check_counted(learn: Learner) -> None:
    "Raise `TimeError` if the fit counts samples or tokens that the first batch lacks."
    counters = learn.parts.counters
    needed, counters.needed = counters.needed, []
    for time in needed:
        is_tokens = time.unit == 'tok'
        if not (token_count(learn) if is_tokens else sample_count(learn)):
            what, option = ('tokens', 'token_func') if is_tokens else ('samples', 'size_func')
            raise TimeError(
                f'{str(time)!r}: no {what} are counted in the batch {describe(learn.xb)}. Pass '
                f'`Learner({option}=f)`, where f(xb, yb) returns their number.'
            )


class LossCheck:
    "Check that callbacks change `loss_grad`, which is minimized, and not only its copy `loss`."

    def __init__(self, learn: Learner) -> None:
        self.learn = learn
        self._before: list[Any] = []  # graph nodes before the callbacks changed the losses

    def note(self) -> None:
        "Note the losses of the batch."
        self._before = self._list_nodes()

    def check(self) -> None:
        "Warn if a callback has changed `loss` but not `loss_grad` since."
        before, now = self._before, self._list_nodes()
        self._before = []
        if before and before[0] is not now[0] and before[1] is now[1]:
            warn_user(
                'A callback has set `learn.loss`, which is only what is recorded. Gradients are of `loss_grad`: to '
                'train on another loss, set `self.learn.loss_grad`, and then `self.learn.loss` to record it.'
            )

    def _list_nodes(self) -> list[Any]:
        "Return the nodes of `loss` and `loss_grad` in the graph, which any operation replaces, also in-place."
        values = (vars(self.learn).get(name) for name in ('loss', 'loss_grad'))
        return [getattr(value, 'grad_fn', None) for value in values]


def may_change_loss(learn: Learner) -> bool:
    "Return True if callbacks from outside the package run between the loss and the backward pass."
    table = learn.parts.callbacks.plain_tables[True]
    handlers = [*table['after_loss'], *table['before_backward']]
    return any(_is_of_user(cb) for _, _, cb in handlers)


def _is_of_user(cb: Any) -> bool:
    "Return True for a callback whose handlers are from outside the package."
    return type(cb) is Callback or not type(cb).__module__.startswith('learnkit.')


def warn_of_plain_loss(
    learn: Learner,
    cb: Callback,  # callback that has blended the inputs
) -> None:
    "Warn of a custom loop that computes the loss of blended inputs without `compute_loss`."
    warn_user(
        f'{type(cb).__name__} has blended the inputs of the batch, and the loss was not blended: '
        f'compute it in {type(learn).__name__} by `self.compute_loss(pred)`.'
    )


# -- metrics -----------------------------------------------------------------------------------------


def contains_activation(loss_func: Any) -> str:
    "Return 'softmax' or 'sigmoid' if a loss function of logits contains one, else an empty string."
    return outputs_of(loss_func).contains


def warn_of_activation(learn: Learner) -> None:
    """Warn of a model that ends with the softmax or sigmoid that its loss function contains.

    Checks the last layer and, on the CPU, where reading values needs no sync, whether the predictions sum to 1.
    """
    kind = contains_activation(learn.loss_func)
    *_, last = learn.model.modules()
    layers = {'softmax': torch.nn.Softmax, 'sigmoid': torch.nn.Sigmoid}
    if not kind:
        return
    is_last = isinstance(last, layers[kind])
    if is_last or (kind == 'softmax' and _are_probabilities(vars(learn).get('pred'))):
        warn_user(
            f'The model ends with a {kind}, and the loss function {name_of(learn.loss_func)} contains another one, '
            f'which makes gradients far too small. Leave the {kind} out of the model: `get_preds` returns '
            'probabilities in any case.'
        )


def _are_probabilities(pred: Any) -> bool:
    "Return True for scores (B, C, ...) of two classes or more on the CPU that are positive and sum to 1."
    if not isinstance(pred, Tensor) or not pred.is_cpu or not pred.is_floating_point():
        return False
    if pred.ndim < 2 or pred.shape[1] < 2 or not pred.numel():
        return False
    scores = pred.detach().float()
    return bool((scores >= 0).all() and ((scores.sum(1) - 1).abs() < 1e-2).all())


def check_metrics(learn: Learner, train: list[Metric], valid: list[Metric]) -> dict[str, Any]:
    """Try the metrics on the current training batch; return the values of metric functions by name.

    Validation may have another kind of targets (soft labels in training, classes in validation). A validation metric
    that fails is therefore tried again on a validation batch, and accepted if no batch is available. A custom
    training loop may have no predictions yet; then no metric is tried. Raises `MetricError`.
    """
    values: dict[str, Any] = {}
    if 'pred' not in vars(learn):
        return values
    with preserved_rng():
        for m in train:
            values[m.name] = _try_metric(m, learn)
        n_batches_of_each = [n_batches(dl) for _, dl in evaluation_loaders(learn.dls)]
        for m in valid:
            if isinstance(m, AvgMetric) and any(n != 1 for n in n_batches_of_each):
                warn_unless_mean(m, learn)
            try:
                values[m.name] = _try_metric(m, learn)
            except MetricError:
                for _ in first_validation_batches(learn):
                    values[m.name] = _try_metric(m, learn)
    return values


def _try_metric(m: Metric, learn: Learner) -> Any:
    "Check a metric on copies of the batch; return the value of a metric function."
    pred, yb = map_tensors((measured_pred(learn), learn.yb), lambda t: t.detach().clone())
    if isinstance(m, AvgMetric):
        warn_of_order(m.func)
        try:
            check_pairing(m.func, pred, yb)
        except LossError as e:
            warn_user(str(e))
    return dry_run(m, pred, yb)


def first_validation_batches(learn: Learner) -> Iterator[str]:
    """Predict on the first batch of each validation loader, and yield the loader's name; restore the state afterwards.

    Yields nothing if callbacks change the batches.
    """
    events = ('after_draw', 'before_batch', 'before_pred', 'after_pred')
    if any(learn.ordered_cbs(name, False) for name in events):
        return
    with preserved_state(learn), preserved_forward(learn.model), torch.no_grad():
        learn.model.eval()
        for name, dl in evaluation_loaders(learn.dls):
            with preserved_generators(dl):
                batches = iter(dl)
                # a batch drawn from an iterator would be missing later
                batch = None if batches is dl else next(batches, None)
            if batch is None:
                continue
            learn.batch_form = form_of(learn.dls, name)
            learn._split(learn._set_device(batch))
            learn.pred = unpack_output(apply_model(learn.model, learn.xb))[0]
            yield name
