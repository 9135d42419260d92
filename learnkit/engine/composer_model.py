# SPDX-License-Identifier: Apache-2.0
"""Models that are called with whole batches and compute their own loss: the interface of a `ComposerModel`.

In a run of such a model, its call and its loss are at the seams `model` and `loss`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from learnkit.core.model import bare_model, takes_batches, whole_batch
from learnkit.engine.loss import called_module, compute_batch_loss

if TYPE_CHECKING:
    from learnkit.learner import Learner

HOLDER = 'a model of whole batches'


def composer_seams(learn: Learner) -> dict[str, Any]:
    "Return the functions at the seams `model` and `loss` for a model of whole batches; empty for other models."
    if not takes_batches(learn.model):
        return {}
    calls = ComposerCalls()
    return {'model': calls.call, 'loss': calls.compute_loss}


class ComposerCalls:
    "Call of a model with Composer's interface, and its own loss of the outputs."

    def __init__(self) -> None:
        self._own_loss: Any = None  # loss of the outputs of a validation batch

    def call(self, learn: Learner) -> Any:
        "Call the model with the whole batch, and return the prediction; in validation, keep the loss of its outputs."
        batch = whole_batch(learn)
        self._own_loss = None
        if learn.training:
            return called_module(learn)(batch)
        bare: Any = bare_model(learn.model)
        if learn.phase == 'predict':
            return bare.eval_forward(batch)
        outputs = learn.model(batch)
        self._own_loss = _reduce_losses(bare.loss(outputs, batch))
        return bare.eval_forward(batch, outputs)

    def compute_loss(self, learn: Learner, output: Any) -> Any:
        "Return the loss of the prediction: of the loss function if there is one, otherwise the model's own."
        own_loss = self._own_loss
        if learn.training:
            model: Any = bare_model(learn.model)
            own_loss = _reduce_losses(model.loss(learn.pred, whole_batch(learn)))
        return compute_batch_loss(learn, output, own_loss)


def _reduce_losses(loss: Any) -> Any:
    "Return the losses of a model as one loss; in a dict of losses, rename the entry `total` to `loss`."
    if isinstance(loss, Mapping) and 'total' in loss:
        return {'loss' if name == 'total' else name: part for name, part in loss.items()}
    if isinstance(loss, (tuple, list)):
        return sum(part.mean() for part in loss)
    return loss.mean() if isinstance(loss, Tensor) and loss.ndim else loss
