"""Models that take whole batches: `forward(batch)` and `loss(outputs, batch)`, as Composer's `ComposerModel`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from learnkit.core.learner_type import LoopLike
from learnkit.core.model import bare_model

__all__ = ['loss_of_batch', 'predict_batch', 'takes_batches', 'whole_batch']

_METHODS = ('loss', 'eval_forward', 'update_metric', 'get_metrics')


def takes_batches(
    model: nn.Module,  # model, or a wrapper around one
) -> bool:
    """Return True for a model with the methods of a `ComposerModel`, which takes whole batches.

    >>> takes_batches(nn.Linear(1, 1))
    False
    """
    cls = type(bare_model(model))
    return all(callable(getattr(cls, name, None)) for name in _METHODS)


def whole_batch(
    learn: LoopLike,  # Learner with a current batch
) -> Any:
    "Return the batch, or the microbatch, as one object: inputs and targets of a tuple, else the input."
    if isinstance(learn.batch, (tuple, list)):
        return (*learn.xb, *learn.yb)
    return learn.xb[0]


def predict_batch(
    learn: LoopLike,  # Learner with a current batch
    model: nn.Module,  # its model, or the wrapper that is called in training
) -> tuple[Any, Any]:  # prediction, and loss or None
    "Call a model with the whole batch; in validation its loss is computed with the same outputs."
    batch = whole_batch(learn)
    if learn.training:
        return model(batch), None
    bare: Any = bare_model(model)
    if learn.phase == 'predict':
        return bare.eval_forward(batch), None
    outputs = model(batch)
    loss = _total(bare.loss(outputs, batch))
    return bare.eval_forward(batch, outputs), loss


def loss_of_batch(
    learn: LoopLike,  # Learner with a current batch and its prediction
) -> Any:
    "Return the model's loss of the prediction and the whole batch."
    model: Any = bare_model(learn.model)
    return _total(model.loss(learn.pred, whole_batch(learn)))


def _total(loss: Any) -> Any:
    "Return a loss as one tensor, or as a dict whose total has the name `loss`."
    if isinstance(loss, Mapping) and 'total' in loss:
        return {'loss' if name == 'total' else name: part for name, part in loss.items()}
    if isinstance(loss, (tuple, list)):
        return sum(part.mean() for part in loss)
    return loss.mean() if isinstance(loss, Tensor) and loss.ndim else loss
