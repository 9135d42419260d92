# SPDX-License-Identifier: Apache-2.0
"""Activations and decoders of loss functions: from a model's outputs to probabilities and to predicted targets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fastcore.basics import noop
from torch import Tensor, nn
from torch.nn import functional as F

from learnkit.core.model import unwrap_partial


def find_activation(
    loss_func: Any,  # loss function of learnkit, of torch, or any other
) -> Callable[[Any], Any]:
    """Return the function that turns predictions into probabilities, or `noop` if the loss has no such function.

    An attribute `loss_func.activation` takes precedence. The activation of torch's cross-entropy is the softmax over
    dimension 1, of a loss that contains the last layer the softmax of its scores, of its negative log-likelihood the
    exponential, and of its binary cross-entropy with logits the sigmoid. Predictions that are not tensors are returned
    unchanged.

    >>> find_activation(nn.BCEWithLogitsLoss())(torch.zeros(2))
    tensor([0.5000, 0.5000])
    """
    if hasattr(loss_func, 'activation'):
        own: Callable[[Any], Any] = loss_func.activation
        return own
    entry = _find_entry(loss_func)
    if entry is None:
        return noop
    if isinstance(loss_func, HEAD_LOSSES):
        return lambda x: _apply(entry[0], find_scores(loss_func, x))
    return partial(_apply, entry[0])


def find_decoder(
    loss_func: Any,  # loss function of learnkit, of torch, or any other
) -> Callable[[Any], Any]:
    """Return the function that turns probabilities into predicted targets, or `noop` if the loss has no such function.

    An attribute `loss_func.decodes` takes precedence. torch's cross-entropy and negative log-likelihood decode to the
    most probable class of dimension 1, its binary cross-entropies to True for each label with a probability above 0.5.

    >>> find_decoder(nn.CrossEntropyLoss())(torch.tensor([[0.2, 0.8], [0.7, 0.3]]))
    tensor([1, 0])
    """
    if hasattr(loss_func, 'decodes'):
        own: Callable[[Any], Any] = loss_func.decodes
        return own
    entry = _find_entry(loss_func)
    return noop if entry is None else partial(_apply, entry[1])


def find_scores(
    loss_func: Any,  # loss function of learnkit, of torch, or any other
    pred: Any,  # predictions (B, ...)
) -> Any:
    """Return what metrics and activations take: the predictions, or the scores that the loss computes from them.

    `nn.LinearCrossEntropyLoss` and `nn.AdaptiveLogSoftmaxWithLoss` get features (B, F), and contain the last layer of
    the model. Their scores are (B, C, ...).

    >>> find_scores(nn.CrossEntropyLoss(), torch.tensor([1.0]))
    tensor([1.])
    >>> find_scores(nn.AdaptiveLogSoftmaxWithLoss(8, 6, [2]), torch.zeros(3, 8)).shape
    torch.Size([3, 6])
    """
    if not isinstance(loss_func, HEAD_LOSSES) or not isinstance(pred, Tensor):
        return pred
    features = pred.to(next(loss_func.parameters()))  # its device and dtype
    with torch.no_grad():
        if isinstance(loss_func, nn.AdaptiveLogSoftmaxWithLoss):
            return loss_func.log_prob(features).to(pred.device)
        shape = (*pred.shape[:-1], loss_func.num_classes, *loss_func.out_features)
        return loss_func.linear(features).reshape(shape).to(pred.device)


# losses that contain the last layer of the model; the first one since torch 2.13
HEAD_LOSSES: tuple[Any, ...] = (
    *([nn.LinearCrossEntropyLoss] if hasattr(nn, 'LinearCrossEntropyLoss') else []),
    nn.AdaptiveLogSoftmaxWithLoss,
)
Function = Callable[[Tensor], Tensor]


def _find_entry(loss_func: Any) -> tuple[Function, Function] | None:
    "Return the activation and the decoder of one of torch's losses of classification, or None."
    loss_func = unwrap_partial(loss_func)
    for classes, functions, activate, decode in _TORCH_LOSSES:
        if isinstance(loss_func, classes) or loss_func in functions:
            return activate, decode
    return None


def _apply(f: Function, x: Any) -> Any:
    return f(x) if isinstance(x, Tensor) and x.ndim and x.is_floating_point() else x


def _softmax(x: Tensor) -> Tensor:
    return x.softmax(min(1, x.ndim - 1))


def _argmax(x: Tensor) -> Tensor:
    return x.argmax(min(1, x.ndim - 1))


def _exceeds_half(x: Tensor) -> Tensor:
    return x > 0.5


# torch's losses of classification, as modules and as functions, each with its activation and its decoder
_TORCH_LOSSES: list[tuple[Any, tuple[Any, ...], Function, Function]] = [
    ((nn.CrossEntropyLoss, *HEAD_LOSSES), (F.cross_entropy,), _softmax, _argmax),
    (nn.NLLLoss, (F.nll_loss,), torch.exp, _argmax),
    (nn.BCELoss, (F.binary_cross_entropy,), noop, _exceeds_half),
    (nn.BCEWithLogitsLoss, (F.binary_cross_entropy_with_logits,), torch.sigmoid, _exceeds_half),
    (nn.MultiLabelSoftMarginLoss, (F.multilabel_soft_margin_loss,), torch.sigmoid, _exceeds_half),
]
