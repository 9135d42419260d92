# SPDX-License-Identifier: Apache-2.0
"""Denominators of mean losses: the number that a loss function divides the sum of its terms by.

The denominator is the number of samples, of elements of the targets, of targets that are not ignored, or the sum of
their class weights. It is the weight of a batch in the loss of an epoch, and in the gradients of microbatches,
accumulated batches and ranks. Only with these weights does the mean over batches equal the loss of all batches
together."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from learnkit.core.errors import OptionError, did_you_mean
from learnkit.core.model import bare_model, takes_batches
from learnkit.core.validation import warn_user

IGNORED = -100  # torch's default `ignore_index`
FEW = 256  # numbers that are counted faster in a list than by NumPy
WEIGHT_FUNCS = ('tokens', 'samples')  # names that `Learner(weight_func=)` accepts
# losses of torch by what they divide by: functions, and the `forward` of modules
CLASS_LOSSES = [F.cross_entropy, F.nll_loss, nn.CrossEntropyLoss.forward, nn.NLLLoss.forward]
if hasattr(nn, 'LinearCrossEntropyLoss'):  # torch 2.13
    CLASS_LOSSES.append(nn.LinearCrossEntropyLoss.forward)
# means over the elements, or over vectors of one length
ELEMENT_LOSSES = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits, F.poisson_nll_loss, F.gaussian_nll_loss, F.kl_div,
    F.soft_margin_loss, F.multilabel_soft_margin_loss, F.hinge_embedding_loss,
    F.margin_ranking_loss, F.triplet_margin_loss, F.triplet_margin_with_distance_loss,
    nn.MSELoss.forward, nn.L1Loss.forward, nn.SmoothL1Loss.forward, nn.HuberLoss.forward,
    nn.BCELoss.forward, nn.BCEWithLogitsLoss.forward, nn.PoissonNLLLoss.forward,
    nn.GaussianNLLLoss.forward, nn.KLDivLoss.forward, nn.SoftMarginLoss.forward,
    nn.MultiLabelSoftMarginLoss.forward, nn.HingeEmbeddingLoss.forward,
    nn.MarginRankingLoss.forward, nn.TripletMarginLoss.forward,
    nn.TripletMarginWithDistanceLoss.forward,
)  # fmt: skip
SAMPLE_LOSSES = (
    F.multi_margin_loss, F.multilabel_margin_loss, F.cosine_embedding_loss, F.ctc_loss,
    nn.MultiMarginLoss.forward, nn.MultiLabelMarginLoss.forward, nn.CosineEmbeddingLoss.forward,
    nn.CTCLoss.forward, nn.AdaptiveLogSoftmaxWithLoss.forward,
)  # fmt: skip


class Denominator:
    "Base class of the denominators of a batch's mean loss."

    varies = False  # True if batches of equal size may have different denominators

    def count(self, yb: tuple[Any, ...]) -> Any:
        "Return the denominator, a number or a tensor on the device of the targets; None for the number of samples."
        return None


class Samples(Denominator):
    "Denominator of a mean over the samples."


class Elements(Denominator):
    "Denominator of a mean over all elements of the targets; of another reduction, the number of samples."

    def __init__(
        self,
        options: Any,  # module or namespace with `reduction`, read for each batch
    ) -> None:
        self.options = options

    @override
    def count(self, yb: tuple[Any, ...]) -> Any:
        reduction = getattr(self.options, 'reduction', 'mean')
        if reduction in ('sum', 'batchmean') or not (yb and isinstance(yb[0], Tensor)):
            return None
        return yb[0].numel()


class Tokens(Denominator):
    "Denominator of a mean over the targets that are not `ignore_index`."

    varies = True

    def __init__(
        self,
        ignore_index: int = IGNORED,
        is_shifted: bool = False,  # True if tokens predict the next token: the first label is unused
    ) -> None:
        self.ignore_index = ignore_index
        self.is_shifted = is_shifted

    @override
    def count(self, yb: tuple[Any, ...]) -> Any:
        if not (yb and isinstance(yb[0], Tensor)) or yb[0].is_floating_point():
            return None
        targ = yb[0][..., 1:] if self.is_shifted and yb[0].ndim > 1 else yb[0]
        return count_targets(targ, self.ignore_index)


class ClassTargets(Denominator):
    "Denominator of cross-entropy: the number of targets that are not ignored, or the sum of their class weights."

    varies = True

    def __init__(
        self,
        options: Any,  # module or namespace with `weight`, `ignore_index`, `reduction`, read for each batch
        axis: int = 1,  # class dimension of probabilities
    ) -> None:
        self.options = options
        self.axis = axis

    @property
    def ignore_index(self) -> int:
        index = getattr(self.options, 'ignore_index', None)
        return IGNORED if index is None else int(index)

    @override
    def count(self, yb: tuple[Any, ...]) -> Any:
        reduction = getattr(self.options, 'reduction', 'mean')
        if reduction == 'sum' or not (yb and isinstance(yb[0], Tensor)):
            return None
        targ = yb[0]
        if targ.is_floating_point():  # class probabilities over `axis`
            return targ.numel() // targ.shape[self.axis]
        if reduction == 'none':
            return targ.numel()
        weight = getattr(self.options, 'weight', None)
        if weight is None:
            return count_targets(targ, self.ignore_index)
        return sum_of_weights(targ, self.ignore_index, weight)


class Unknown(Denominator):
    "Unknown denominator: the number of samples is assumed, with a warning if that turns out wrong."

    def __init__(
        self,
        name: str,  # name of the loss function
    ) -> None:
        self.name = name
        self.has_warned = False
        # the first batch of an evaluation was compared with its parts
        self.has_compared_first = False
        self.has_compared = False  # the same for a batch, after one of another size
        self.sizes: set[int] = set()  # numbers of samples of the batches of evaluations

    def warn(self, why: str) -> None:
        "Warn once that the batches are not weighted as the loss would have it."
        if self.has_warned:
            return
        self.has_warned = True
        warn_user(
            f"{why}. Parts of batches are weighted by their samples: with weight_func='tokens' by the targets that "
            f"are not {IGNORED}, with weight_func=f by f(xb, yb); weight_func='samples' ends this warning."
        )

    def warn_of_ignored(self, yb: tuple[Any, ...]) -> None:
        "Warn if an integer target is -100. The check synchronizes with the device of the targets."
        tensors = [t for t in yb if isinstance(t, Tensor) and t.dtype.is_signed]
        if any(bool((t == IGNORED).any()) for t in tensors if not t.is_floating_point()):
            self.warn(f'There are targets of {IGNORED}, which {self.name} may leave out')


def denominator_of(loss_func: Any) -> Denominator:
    """Return the denominator of a loss function's mean.

    Losses of torch are recognized: modules, functions, and a `functools.partial` of a function with keywords. Any other
    loss may define a method `loss_denominator()`, which returns a `Denominator`.

    >>> denominator_of(nn.CrossEntropyLoss()).count((torch.tensor([[1, -100], [0, 2]]),))
    3
    >>> denominator_of(partial(F.cross_entropy, ignore_index=0)).count((torch.tensor([1, 0, 2]),))
    2
    >>> denominator_of(nn.MSELoss()).count((torch.zeros(3, 2),))
    6
    """
    loss_func = bare_model(loss_func)
    if hasattr(loss_func, 'loss_denominator'):
        denominator: Denominator = loss_func.loss_denominator()
        return denominator
    options = loss_func
    computes = getattr(type(loss_func), 'forward', loss_func)
    if isinstance(loss_func, partial) and not loss_func.args:
        options = SimpleNamespace(**loss_func.keywords)
        computes = loss_func.func
    if computes in CLASS_LOSSES:
        return ClassTargets(options)
    is_weighted = isinstance(options, SimpleNamespace) and hasattr(options, 'weight')
    if computes in ELEMENT_LOSSES and not is_weighted:
        return Elements(options)
    if computes in SAMPLE_LOSSES:
        return Samples()
    return Unknown(getattr(loss_func, '__name__', None) or type(loss_func).__name__)


def find_model_denominator(model: nn.Module) -> Denominator:
    "Return the denominator of a loss that the model computes."
    model = bare_model(model)
    name = type(model).__name__
    if takes_batches(model):
        return Samples()  # Composer weights microbatches by their number of samples
    if type(model).forward.__module__.partition('.')[0] not in ('transformers', 'peft'):
        return Unknown(f'the own loss of {name}')
    is_decoder = not getattr(getattr(model, 'config', None), 'is_encoder_decoder', False)
    predicts_next = name.endswith(('ForCausalLM', 'LMHeadModel', 'ForConditionalGeneration'))
    return Tokens(is_shifted=is_decoder and predicts_next)


def check_weight_func(weight_func: Any) -> Any:
    "Return `weight_func`; raise `OptionError` unless it is None, a function, or one of `WEIGHT_FUNCS`."
    if weight_func is None or callable(weight_func) or weight_func in WEIGHT_FUNCS:
        return weight_func
    raise OptionError(
        f'weight_func={weight_func!r}: pass {" or ".join(map(repr, WEIGHT_FUNCS))}, or a function f(xb, '
        f'yb) that returns what a batch weighs.{did_you_mean(str(weight_func), WEIGHT_FUNCS)}'
    )


def count_targets(
    targ: Tensor,  # class numbers of any shape
    ignore_index: int,
) -> int | Tensor:  # int on the CPU, else a tensor on the device
    """Return the number of targets that are not `ignore_index`.

    >>> count_targets(torch.tensor([[1, -100], [0, 2]]), -100)
    3
    """
    if type(targ) is not Tensor or not targ.is_cpu:
        return (targ.long() != ignore_index).sum()
    if targ.numel() <= FEW:
        numbers = targ.flatten().tolist()
        return len(numbers) - numbers.count(ignore_index)
    return int(np.count_nonzero(targ.numpy() != ignore_index))


def sum_of_weights(targ: Tensor, ignore_index: int, weight: Tensor) -> float | Tensor:
    "Return the sum of the class weights of the targets that are not `ignore_index`."
    targ = targ.detach().long()
    is_counted = targ != ignore_index
    dtype = torch.float32 if targ.device.type == 'mps' else torch.float64
    weights = weight.detach().to(targ.device, dtype)[torch.where(is_counted, targ, 0)]
    total = torch.where(is_counted, weights, 0).sum()
    return total.item() if total.is_cpu else total
