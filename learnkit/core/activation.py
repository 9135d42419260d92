"""Activations of loss functions: functions that turn the outputs of a model into probabilities."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fastcore.basics import noop
from torch import Tensor, nn
from torch.nn import functional as F

from learnkit.core.model import unwrap_partial

__all__ = ['find_activation', 'find_decoder']


def find_activation(
    loss_func: Any,  # loss function of learnkit, of torch, or any other
) -> Callable[[Any], Any]:
    """Return the function that turns predictions into probabilities, or `noop` if the loss has no such function.

    An attribute `loss_func.activation` takes precedence. The activation of torch's cross-entropy is the softmax over
    dimension 1, of its negative log-likelihood the exponential, and of its binary cross-entropy with logits the
    sigmoid. These functions return predictions that are not tensors unchanged.

    >>> find_activation(nn.BCEWithLogitsLoss())(torch.zeros(2))
    tensor([0.5000, 0.5000])
    """
    if hasattr(loss_func, 'activation'):
        activation: Callable[[Any], Any] = loss_func.activation
        return activation
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


# losses of torch for classification: module, functions, activation
_ACTIVATIONS: list[tuple[Any, Any, Callable[[Tensor], Tensor]]] = [
    (nn.CrossEntropyLoss, (F.cross_entropy,), _softmax),
    (nn.NLLLoss, (F.nll_loss,), torch.exp),
    (nn.BCEWithLogitsLoss, (F.binary_cross_entropy_with_logits,), torch.sigmoid),
    (nn.MultiLabelSoftMarginLoss, (F.multilabel_soft_margin_loss,), torch.sigmoid),
]
