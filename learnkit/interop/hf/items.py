# SPDX-License-Identifier: Apache-2.0
"""Loss of a causal language model as Hugging Face's Trainer computes it: the sum over `num_items_in_batch`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

from torch import Tensor

from learnkit.core.batch import find_bs, size_func_of
from learnkit.core.denominator import Tokens, find_model_denominator
from learnkit.core.model import bare_model

if TYPE_CHECKING:
    from learnkit.learner import Learner


class ItemLoss:
    """Pass a model the number of items of its batch, by which it divides its loss, and weight batches by it.

    The Trainer divides the sum over the tokens by the number of labels that are not -100. It leaves out the first label
    of each row, as the model does, if the model's `loss_type` says that the model predicts the next token. From other
    models, such as a GPT-2 made from a config, it counts the first labels as well: its loss is smaller than the mean.
    """

    def __init__(self, learn: Learner) -> None:
        self.learn = learn
        self.items = Tokens(is_shifted=_is_shifted_in_trainer(learn.model))
        self._weight_func = learn.weight_func
        self._hook = bare_model(learn.model).register_forward_pre_hook(
            partial(pass_items, self.items), with_kwargs=True
        )
        learn.weight_func = self.weigh

    def restore(self) -> None:
        "Give the weights of the Learner back, and pass nothing."
        self.learn.weight_func = self._weight_func
        self._hook.remove()

    def weigh(self, xb: Any, yb: Any) -> Any:
        "Return the weight of a batch: its items in training, its samples in an evaluation."
        n = self.items.count(yb) if self.learn.training else None
        return find_bs(xb, yb, size_func_of(self.learn)) if n is None else n


def pass_items(
    items: Tokens,
    model: Any,
    args: Any,
    kwargs: dict[str, Any],  # arguments of the model by name
) -> tuple[Any, dict[str, Any]]:
    "Add the number of items of labels to the arguments of a model."
    n = None if kwargs.get('labels') is None else items.count((kwargs['labels'],))
    return args, kwargs if n is None else {'num_items_in_batch': n, **kwargs}


def counts_items(learn: Learner) -> bool:
    "Return True if the Trainer would divide the loss of this Learner's model by the number of items."
    denominator = find_model_denominator(learn.model)
    is_causal = isinstance(denominator, Tokens) and denominator.is_shifted
    has_own_loss = learn.loss_func is None and learn.weight_func is None
    return has_own_loss and is_causal and _accepts_items(bare_model(learn.model))


def _accepts_items(model: Any) -> bool:
    "Return True if the Trainer passes `num_items_in_batch` to a model."
    accepts = getattr(model, 'accepts_loss_kwargs', None)
    if accepts is not None:
        return bool(accepts)
    parameters = signature(model.forward).parameters.values()
    return any(p.kind is Parameter.VAR_KEYWORD for p in parameters)


def _is_shifted_in_trainer(model: Any) -> bool:
    "Return True if the Trainer leaves out the first label of each row when it counts items."
    module = sys.modules.get('transformers.loss.loss_utils')
    mapping: Mapping[str, Any] = getattr(module, 'LOSS_MAPPING', {})
    found = mapping.get(getattr(bare_model(model), 'loss_type', None) or '')
    return found is not None and found is getattr(module, 'ForCausalLMLoss', None)


def add_weighted(
    total: tuple[Any, Any],  # weighted sum, and sum of the weights
    loss: Tensor,
    weight: Any,
) -> tuple[Any, Any]:
    """Add a loss to a weighted sum.

    >>> add_weighted((2.0, 1), 5.0, 2)
    (12.0, 3)
    """
    return total[0] + loss * weight, total[1] + weight
