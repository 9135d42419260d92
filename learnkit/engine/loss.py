# SPDX-License-Identifier: Apache-2.0
"""Loss of a batch: of the loss function, of the model itself, or the sum of named parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from learnkit.core.batch import apply_model, unpack_output
from learnkit.core.errors import LossError
from learnkit.core.validation import takes_alone
from learnkit.engine.counters import sample_count

if TYPE_CHECKING:
    from learnkit.learner import Learner


def call_model(learn: Learner) -> Any:
    "Call the model on the batch, and return its output."
    __tracebackhide__ = True
    xb = learn.xb
    module = learn.model if learn.seams.wrapper is None else called_module(learn)
    if len(xb) != 1 or type(xb[0]) is Tensor:
        return module(*xb)
    return apply_model(module, xb)


def called_module(learn: Learner) -> Any:
    "Return the module that is called on a batch: the model, or its wrapper in training."
    wrapper = learn.seams.wrapper
    return learn.model if wrapper is None or not learn.training else wrapper


def compute_batch_loss(
    learn: Learner,
    output: Any,  # what the model returned; `learn.pred` is what callbacks made of it
    own_loss: Any = None,  # loss that the model has computed; None: in the output, if at all
) -> Tensor | None:
    "Take the prediction out of the output, and return its loss, or None for a batch without targets."
    __tracebackhide__ = True
    pred = learn.pred
    if own_loss is None and type(pred) is not Tensor:
        learn.pred, own_loss = unpack_output(pred)
        if not isinstance(learn.pred, Mapping):
            pred = learn.pred  # else the loss function gets the whole dict, with the model's losses
    if own_loss is None and pred is not output:
        own_loss = unpack_output(output)[1]  # a callback has taken the logits only
    if learn.loss_func is not None and bool(learn.yb):
        if learn.parts.advice.is_watching:
            learn.parts.advice.check_loss(learn, pred)
        loss = learn.loss_func(pred, *learn.yb)
    elif own_loss is not None:
        loss = own_loss
    elif learn.loss_func is not None and _needs_no_targets(learn):
        loss = loss_of(learn, pred)
    elif learn.loss_func is None and learn.training and are_losses(pred):
        loss = pred
    else:
        loss = None
    if loss is None:
        _accept_no_loss(learn)
        return None
    return loss if isinstance(loss, Tensor) else total_loss(learn, loss)


def are_losses(output: Any) -> bool:
    """Return True for a dict of named losses, which a detector of torchvision returns in training.

    >>> import torch
    >>> are_losses({'box': torch.tensor(1., requires_grad=True), 'count': torch.tensor(2.)})
    True
    """
    parts = list(output.values()) if isinstance(output, Mapping) else []
    are_scalars = all(isinstance(part, Tensor) and part.ndim == 0 for part in parts)
    return are_scalars and any(part.requires_grad for part in parts)


def _accept_no_loss(learn: Learner) -> None:
    "Set the loss to None for a batch of an evaluation; raise `LossError` if a loss function returned None in training."
    if not learn.training:
        learn.loss = None
    elif learn.loss_func is not None and (learn.yb or _needs_no_targets(learn)):
        total_loss(learn, None)


def loss_of(learn: Learner, pred: Any) -> Any:
    "Return the result of the loss function for predictions and the targets of the batch."
    if learn.parts.advice.is_watching:
        learn.parts.advice.check_loss(learn, pred)
    return learn.loss_func(pred, *learn.yb)


def _needs_no_targets(learn: Learner) -> bool:
    """Return True for a loss function of the predictions alone, as in self-supervised learning.

    While predicting, a loss function that could also take targets is not called: the samples may not
    have targets yet.
    """
    takes = takes_alone(learn.loss_func)
    return takes == 'only' or (takes == 'also' and learn.phase != 'predict')


def total_loss(
    learn: Learner,
    parts: Any,  # dict of named scalar tensors
) -> Tensor:
    "Log the named parts of a loss, and return the part `loss`, or else the sum of all parts."
    if isinstance(getattr(parts, 'loss', None), Tensor):  # of nn.AdaptiveLogSoftmaxWithLoss
        return parts.loss
    is_dict = isinstance(parts, Mapping) and bool(parts.keys())
    if not is_dict or not all(isinstance(part, Tensor) for part in parts.values()):
        name = getattr(learn.loss_func, '__name__', learn.loss_func)
        raise LossError(
            f'{name} returned {parts!r}: a loss is a tensor, or a dict of named tensors.'
        )
    has_func = learn.weight_func is not None
    weigh = learn.parts.loss_weights.weigh_batch
    weight = weigh(learn, learn.xb, learn.yb) if has_func else sample_count(learn)
    for name, value in parts.items():
        if name != 'loss' and not learn.run.repeating:
            learn.log(f'train_{name}' if learn.training else name, value, weight)
    loss = parts.get('loss')
    total: Tensor = sum(parts.values()) if loss is None else loss
    return total


def release_loss(learn: Any) -> None:
    "Detach `loss` from its graph, in place, so that a callback that has kept it keeps no graph."
    loss = learn.loss
    if isinstance(loss, Tensor) and loss.requires_grad:
        try:
            loss.detach_()
        except RuntimeError:  # a view cannot be detached in place
            learn.loss = loss.detach()
