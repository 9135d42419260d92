# SPDX-License-Identifier: Apache-2.0
"""Helpers for models: unwrapping, devices, training modes, and calls of models with Composer's interface.

A model with Composer's interface receives a whole batch, inputs and targets, and computes the loss from it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from fastcore.basics import camel2snake
from torch import nn
from torch.nn.parameter import is_lazy

from learnkit.core.errors import ModelError

if TYPE_CHECKING:
    from learnkit.learner import Learner

# methods that Composer's `ComposerModel` has in addition to `forward(batch)`, such as `loss(outputs, batch)`
_BATCH_METHODS = ('loss', 'eval_forward', 'update_metric', 'get_metrics')


def bare_model(model: nn.Module) -> nn.Module:
    "Return the model inside of wrappers that add a prefix to parameter names: torch.compile, DataParallel and DDP."
    while (inner := _unwrap_once(model)) is not None:
        model = inner
    return model


def wrappers_of(model: nn.Module) -> list[nn.Module]:
    "Return the wrappers around the bare model, outermost first."
    wrappers = []
    while (inner := _unwrap_once(model)) is not None:
        wrappers.append(model)
        model = inner
    return wrappers


def _unwrap_once(model: nn.Module) -> nn.Module | None:
    "Return the module inside of a wrapper, or None for a module that is not a wrapper."
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return model.module
    return getattr(model, '_orig_mod', None)


def has_weights(o: Any) -> bool:
    "Return True for a module with parameters; False for any other module or object, such as a loss function."
    return isinstance(o, nn.Module) and next(o.parameters(), None) is not None


def model_device(model: nn.Module, dls: Any) -> torch.device:
    "Return the device of the model's first parameter, or of the data for a model without parameters."
    for p in model.parameters():
        return p.device
    return torch.device(getattr(dls, 'device', None) or 'cpu')


def has_lazy_tensors(
    model: nn.Module,
    recurse: bool = True,  # include the modules within the model
) -> bool:
    """Return True if a module is lazy and has not been called yet.

    >>> has_lazy_tensors(nn.LazyLinear(2)), has_lazy_tensors(nn.Linear(2, 2))
    (True, False)
    """
    return any(map(is_lazy, chain(model.parameters(recurse), model.buffers(recurse))))


def is_on_meta(model: nn.Module) -> bool:
    """Return True if parameters or buffers of a model are on the meta device, without values.

    >>> is_on_meta(nn.Linear(1, 1, device='meta')), is_on_meta(nn.Linear(1, 1))
    (True, False)
    """
    return any(t.is_meta for t in chain(model.parameters(), model.buffers()))


def check_has_values(model: nn.Module) -> None:
    "Raise `ModelError` for a model on the meta device."
    if is_on_meta(model):
        raise ModelError(
            f'{type(model).__name__} is on the meta device, without values: fit, load and save it within '
            "`learn.distributed('fsdp')` in several processes, or make it again on a device."
        )


def check_can_run(learn: Learner) -> None:
    "Raise `ModelError` for a model on the meta device, unless the batches are there, too."
    if torch.device(getattr(learn.dls, 'device', None) or 'cpu').type != 'meta':
        check_has_values(learn.model)


def move_to_device(learn: Learner) -> None:
    "Move the model, and a loss function that is a module, to the device of `learn.dls`; do nothing without a device."
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


def has_extra_state(m: nn.Module) -> bool:
    "Return True if a module's class defines how its extra state is saved and loaded."
    cls = type(m)
    saves = cls.get_extra_state is not nn.Module.get_extra_state
    return saves and cls.set_extra_state is not nn.Module.set_extra_state


def copy_extra_state(m: nn.Module) -> Callable[[], object]:
    "Copy the extra state of a module that has one, and return a function that loads the copy."
    state = deepcopy(m.get_extra_state())
    return lambda: m.set_extra_state(deepcopy(state))


class BufferCopy:
    """Copy of the buffers and the extra state of one module.

    A forward pass may write into a buffer, replace its tensor, or register another buffer.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        # a lazy module has no values before its first forward pass
        self.buffers = {
            key: buffer
            for key, buffer in module._buffers.items()
            if buffer is None or not is_lazy(buffer)
        }
        self.values = {
            key: buffer.detach().clone()
            for key, buffer in self.buffers.items()
            if buffer is not None
        }
        self.names = set(module._buffers.keys())
        self.load_extra = copy_extra_state(module) if has_extra_state(module) else None

    @torch.no_grad()
    def restore(self, skip_equal: bool = False) -> None:
        "Restore the buffers, their values and the extra state."
        module = self.module
        if self.load_extra is not None:
            self.load_extra()
        self.drop_new()
        for key, buffer in self.buffers.items():
            current = getattr(module, key, None)
            if buffer is None or current is None:
                setattr(module, key, buffer)
            if buffer is None:
                continue
            value = self.values[key]
            if current is not None and current.device != buffer.device:
                setattr(module, key, value.to(current.device))
                continue
            if not skip_equal or buffer.is_meta or not torch.equal(buffer, value):
                buffer.copy_(value)
            setattr(module, key, buffer)

    def drop_new(self) -> None:
        "Delete the buffers that were registered since the copy was made."
        for key in [key for key, _ in self.module._buffers.items() if key not in self.names]:
            delattr(self.module, key)


def copy_buffers(model: nn.Module) -> list[BufferCopy]:
    """Copy the buffers of a model, such as running statistics, and its extra state, for `restore_buffers`.

    >>> norm = nn.BatchNorm1d(1)
    >>> copies = copy_buffers(norm)
    >>> _ = norm(torch.tensor([[0.], [2.]])); restore_buffers(copies)
    >>> norm.running_mean
    tensor([0.])
    """
    return [BufferCopy(m) for m in model.modules() if m._buffers or has_extra_state(m)]


def restore_buffers(
    copies: list[BufferCopy],  # return value of `copy_buffers`
    skip_equal: bool = False,  # compare values on the host, and write changed buffers only
) -> None:
    """Restore buffers, their tensors and values, and extra state, on the device to which the model was moved.

    A buffer that is written invalidates a graph that has saved it, also if the value is the same. The version of a
    tensor does not show a change, because batch norm updates its statistics without a new version.
    """
    for saved in copies:
        saved.restore(skip_equal)


class EarlierBuffers:
    """Context in which a model has the buffers and extra state of `copies`; changes within the context end with it.

    Current tensors are not written: copies replace the buffers. The context may be entered again.

    >>> norm = nn.BatchNorm1d(1)
    >>> with EarlierBuffers(copy_buffers(norm)): _ = norm(torch.tensor([[0.], [2.]]))
    >>> norm.running_mean
    tensor([0.])
    """

    def __init__(self, copies: list[BufferCopy]) -> None:
        self.copies = copies

    def __enter__(self) -> None:
        self.current = [
            (
                saved.module,
                dict(saved.module._buffers.items()),
                set(saved.module._non_persistent_buffers_set),
                None if saved.load_extra is None else copy_extra_state(saved.module),
            )
            for saved in self.copies
        ]
        for saved in self.copies:
            saved.drop_new()
            for key, buffer in saved.buffers.items():
                value = None if buffer is None else saved.values[key].clone()
                setattr(saved.module, key, value)
            if saved.load_extra is not None:
                saved.load_extra()

    def __exit__(self, *exc_info: object) -> None:
        for module, buffers, not_persistent, load_extra in self.current:
            for key in [key for key in module._buffers if key not in buffers]:
                delattr(module, key)
            for key, buffer in buffers.items():
                module.register_buffer(key, buffer, persistent=key not in not_persistent)
            if load_extra is not None:
                load_extra()
        self.current = []


def name_of(f: Any) -> str:
    "Return the name of a function, or the class name of another object."
    return getattr(f, '__name__', None) or type(f).__name__


def snake_case(
    name: str,  # name of a class
    suffix: str = '',  # end to leave out, unless it is the whole name
) -> str:
    """Return a name in snake_case; abbreviations such as IoU and mAP are one word.

    >>> [snake_case(name) for name in ('TopKAccuracy', 'F1Score', 'BoxIoU', 'mAP')]
    ['top_k_accuracy', 'f1_score', 'box_iou', 'map']
    >>> snake_case('IoUMetric', 'Metric'), snake_case('Metric', 'Metric')
    ('iou', 'metric')
    """
    bare = name.removesuffix(suffix) or name
    # an `o` ("of", "over") between capitals, and a small letter before the first capital
    bare = re.sub(r'(?<=[A-Z])o(?=[A-Z](?![a-z]))', 'O', bare)
    bare = re.sub(r'^[a-z](?=[A-Z])', lambda m: m[0].upper(), bare)
    snake: str = camel2snake(bare)
    return snake


def unwrap_partial(f: Any) -> Any:
    """Return the function inside of nested `functools.partial` objects.

    >>> unwrap_partial(partial(partial(print, 1), 2))
    <built-in function print>
    """
    while isinstance(f, partial):
        f = f.func
    return f


# -- models with Composer's interface --------------------------------------------------------------


def takes_batches(
    model: nn.Module,  # model, or a wrapper around one
) -> bool:
    """Return True for a model with the methods of a `ComposerModel`, which is called with whole batches.

    >>> takes_batches(nn.Linear(1, 1))
    False
    """
    cls = type(bare_model(model))
    return all(callable(getattr(cls, name, None)) for name in _BATCH_METHODS)


def whole_batch(
    learn: Learner,  # Learner with a current batch
) -> Any:
    "Return the batch or microbatch as one object: a tuple of inputs and targets, or the only input of another batch."
    if isinstance(learn.batch, (tuple, list)):
        return (*learn.xb, *learn.yb)
    return learn.xb[0]
