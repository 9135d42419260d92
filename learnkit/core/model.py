"""The model inside of wrappers, its device and its modes; models that take whole batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from learnkit.core.learner_type import LearnerLike, LoopLike

__all__ = [
    'bare_model',
    'wrappers_of',
    'has_weights',
    'model_device',
    'move_to_device',
    'preserved_modes',
    'name_of',
    'unwrap_partial',
    'takes_batches',
    'whole_batch',
    'predict_batch',
    'loss_of_batch',
]

# methods of a model that takes whole batches: `forward(batch)` and `loss(outputs, batch)`
_BATCH_METHODS = ('loss', 'eval_forward', 'update_metric', 'get_metrics')


def bare_model(model: nn.Module) -> nn.Module:
    "Return the model inside of wrappers that prefix parameter names: torch.compile, DataParallel and DDP."
    while (inner := _inner(model)) is not None:
        model = inner
    return model


def wrappers_of(model: nn.Module) -> list[nn.Module]:
    "Return the wrappers around the bare model, outermost first."
    wrappers = []
    while (inner := _inner(model)) is not None:
        wrappers.append(model)
        model = inner
    return wrappers


def _inner(model: nn.Module) -> nn.Module | None:
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return model.module
    return getattr(model, '_orig_mod', None)


def has_weights(o: Any) -> bool:
    "Return True for a module with parameters, and False for a function, such as a loss function."
    return isinstance(o, nn.Module) and next(o.parameters(), None) is not None


def model_device(model: nn.Module, dls: Any) -> torch.device:
    "Return the device of the model's first parameter, or the device of the data for a model without parameters."
    for p in model.parameters():
        return p.device
    return torch.device(getattr(dls, 'device', None) or 'cpu')


def move_to_device(learn: LearnerLike) -> None:
    "Move the model, and a loss function that is a module, to the device of the data, if it has one."
    device = getattr(learn.dls, 'device', None)
    if device is None:
        return
    for module in (learn.model, learn.loss_func):
        if isinstance(module, nn.Module):
            module.to(device)


@contextmanager
def preserved_modes(model: nn.Module) -> Iterator[None]:
    """Restore the training or evaluation mode of each module at the end of a context.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.ReLU().eval())
    >>> with preserved_modes(model): _ = model.eval()
    >>> [m.training for m in model.modules()]
    [True, True, False]
    """
    modes = [(m, m.training) for m in model.modules()]
    try:
        yield
    finally:
        for m, mode in modes:
            m.training = mode


def name_of(f: Any) -> str:
    "Return the name of a function, or the class name of another object."
    return getattr(f, '__name__', None) or type(f).__name__


def unwrap_partial(f: Any) -> Any:
    """Return the function inside of nested `functools.partial` objects.

    >>> unwrap_partial(partial(partial(print, 1), 2))
    <built-in function print>
    """
    while isinstance(f, partial):
        f = f.func
    return f


# -- models that take whole batches, such as Composer's `ComposerModel` ----------------------------


def takes_batches(
    model: nn.Module,  # model, or a wrapper around one
) -> bool:
    """Return True for a model with the methods of a `ComposerModel`, which takes whole batches.

    >>> takes_batches(nn.Linear(1, 1))
    False
    """
    cls = type(bare_model(model))
    return all(callable(getattr(cls, name, None)) for name in _BATCH_METHODS)


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
