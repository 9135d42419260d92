# SPDX-License-Identifier: Apache-2.0
"""Meaning of a model's outputs for a loss function: probabilities, scores or numbers, and the kind of targets.

`outputs_of` describes the outputs, `find_activation` returns the function from outputs to probabilities, and
`find_decoder` the function from probabilities to predicted targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from fastcore.basics import noop
from torch import Tensor, nn
from torch.nn import functional as F

from learnkit.core.model import unwrap_partial

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Outputs:
    """Meaning of a model's outputs for a loss function.

    `targets` is the kind of targets that the loss function compares them with:

    - 'classes': numbers of classes; the outputs are one score per class
    - 'labels': 0 or 1 for each output
    - 'signs': -1 or 1 for each output
    - 'distances': -1 or 1 for each output, which is a distance: small for 1
    - 'numbers': any number for each output
    - '': unknown
    """

    targets: str
    activate: Function = noop  # from outputs to probabilities
    decode: Function = noop  # from probabilities to predicted targets
    are_probabilities: bool = False  # whether `activate` returns probabilities
    contains: str = ''  # 'softmax' or 'sigmoid', if the loss function applies one to the outputs


def outputs_of(
    loss_func: Any,  # loss function of learnkit, of torch, or any other
) -> Outputs:
    """Return the meaning of a model's outputs for a loss function.

    Losses of torch are recognized: modules, functions, and a `functools.partial` of a function. Any other loss may
    define a method `loss_outputs()`, which returns `Outputs`, or only a method `activation`, which returns
    probabilities.

    >>> outputs_of(nn.BCEWithLogitsLoss()).targets, outputs_of(nn.MultiMarginLoss()).are_probabilities
    ('labels', False)
    """
    loss_func = unwrap_partial(loss_func)
    if isinstance(loss_func, type):  # raises `LossError` when it is used
        return Outputs('')
    if hasattr(loss_func, 'loss_outputs'):
        outputs: Outputs = loss_func.loss_outputs()
        return outputs
    entry = _find_entry(loss_func)
    if entry is not None:
        return entry
    owner = type(loss_func) if isinstance(loss_func, nn.Module) else loss_func
    if str(getattr(owner, '__module__', '')).startswith('torch.'):
        return Outputs('numbers')
    activate = getattr(loss_func, 'activation', None)
    return Outputs('', activate or noop, are_probabilities=activate is not None)


def find_activation(
    loss_func: Any,  # loss function of learnkit, of torch, or any other
) -> Callable[[Any], Any]:
    """Return the function that turns predictions into probabilities, or `noop` if the loss has no such function.

    An attribute `loss_func.activation` takes precedence. torch's cross-entropy has the softmax over dimension 1, losses
    that contain the last layer have the softmax of their scores, the negative log-likelihood has the exponential, and
    the binary cross-entropy with logits has the sigmoid. Predictions that are not tensors are returned unchanged.

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
        return lambda x: _apply(entry.activate, find_scores(loss_func, x))
    return partial(_apply, entry.activate)


def find_decoder(
    loss_func: Any,  # loss function of learnkit, of torch, or any other
) -> Callable[[Any], Any]:
    """Return the function that turns probabilities into predicted targets, or `noop` if the loss has no such function.

    An attribute `loss_func.decodes` takes precedence. torch's losses of class numbers decode to the class of dimension
    1 with the highest score, its binary cross-entropies to True for each label with a probability above 0.5.

    >>> find_decoder(nn.CrossEntropyLoss())(torch.tensor([[0.2, 0.8], [0.7, 0.3]]))
    tensor([1, 0])
    """
    if hasattr(loss_func, 'decodes'):
        own: Callable[[Any], Any] = loss_func.decodes
        return own
    entry = _find_entry(loss_func)
    return noop if entry is None else partial(_apply, entry.decode)


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


def _find_entry(loss_func: Any) -> Outputs | None:
    "Return the outputs of one of torch's losses of classification, or None."
    loss_func = unwrap_partial(loss_func)
    for classes, functions, outputs in _TORCH_LOSSES:
        if isinstance(loss_func, classes) or loss_func in functions:
            return outputs
    return None


def _apply(f: Function, x: Any) -> Any:
    return f(x) if isinstance(x, Tensor) and x.ndim and x.is_floating_point() else x


def _softmax(x: Tensor) -> Tensor:
    return x.softmax(min(1, x.ndim - 1))


def _argmax(x: Tensor) -> Tensor:
    return x.argmax(min(1, x.ndim - 1))


def _exceeds_half(x: Tensor) -> Tensor:
    return x > 0.5


_SOFTMAX = Outputs('classes', _softmax, _argmax, are_probabilities=True, contains='softmax')
_SIGMOID = Outputs(
    'labels', torch.sigmoid, _exceeds_half, are_probabilities=True, contains='sigmoid'
)

# torch's losses of classification, as modules and as functions, and what outputs mean to each
_TORCH_LOSSES: list[tuple[Any, tuple[Any, ...], Outputs]] = [
    (nn.CrossEntropyLoss, (F.cross_entropy,), _SOFTMAX),
    (HEAD_LOSSES, (), Outputs('classes', _softmax, _argmax, True)),
    (nn.NLLLoss, (F.nll_loss,), Outputs('classes', torch.exp, _argmax, True)),
    (nn.MultiMarginLoss, (F.multi_margin_loss,), Outputs('classes', noop, _argmax)),
    (nn.BCELoss, (F.binary_cross_entropy,), Outputs('labels', noop, _exceeds_half, True)),
    (nn.BCEWithLogitsLoss, (F.binary_cross_entropy_with_logits,), _SIGMOID),
    (nn.MultiLabelSoftMarginLoss, (F.multilabel_soft_margin_loss,), _SIGMOID),
    (nn.SoftMarginLoss, (F.soft_margin_loss,), Outputs('signs')),
    (nn.HingeEmbeddingLoss, (F.hinge_embedding_loss,), Outputs('distances')),
]
