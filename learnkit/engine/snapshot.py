"""Undo what a piece of code does to objects: note what they hold, and write it back into the same objects.

Nothing is replaced by a copy, so whoever else refers to a list, a tensor or a parameter still has the right one."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import is_
from typing import Any

import numpy as np
import torch
from fastcore.foundation import L
from torch import Tensor, nn

from learnkit.core.dtensor import cut_again
from learnkit.core.learner_type import LearnerLike
from learnkit.core.random import state_setter
from learnkit.data.dataloaders import evaluation_loaders
from learnkit.data.preserve import preserve_loaders, refill_dict
from learnkit.engine.callback import Callback
from learnkit.metrics.base import Mean, Metric

__all__ = ['Snapshot', 'unchanged_loaders', 'undoing', 'restored']

# objects whose attributes are theirs alone
OWNERS = (
    nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
    Callback,
    Metric,
    Mean,
    L,
)
_atoms = frozenset([type(None), bool, int, float, str])  # not worth a look


class Snapshot:
    """Note the contents of everything that is reachable from `roots`; `undo()` writes them back.

    Lists, dicts, sets, tensors, arrays and random generators are written back in place, and so are the attributes of
    modules, optimizers, torch's schedulers and scalers, callbacks and metrics, with all that these hold. Every other
    object stays as it is, whole: what it holds may belong together with something outside (a file, a connection, a
    thread). A tensor is copied on its device.

    >>> log = [1, {'a': torch.zeros(2)}]
    >>> noted = Snapshot([log])
    >>> log.append(2); log[1]['a'].add_(1); log[1]['b'] = 3
    tensor([1., 1.])
    >>> noted.undo()
    >>> log
    [1, {'a': tensor([0., 0.])}]
    """

    def __init__(
        self,
        roots: Iterable[Any],  # objects, or containers of them
        but: Iterable[Any] = (),  # not these, nor what only they lead to
    ) -> None:
        self._seen = {
            id(o): o for o in but
        }  # keeps them, so that no other object gets the number of one of them
        self._steps: list[Callable[[], object]] = []
        self._to_note = list(roots)  # not by recursion: objects may form long chains
        while self._to_note:
            self._note(self._to_note.pop())

    def undo(self) -> None:
        "Write everything back."
        for step in self._steps:
            step()

    def _note(self, o: Any) -> None:
        if type(o) in _atoms or id(o) in self._seen:
            return
        self._seen[id(o)] = o
        if isinstance(o, OWNERS):
            self._go_on_to([vars(o)])
        elif isinstance(o, Tensor):
            self._note_tensor(o)
        elif isinstance(o, dict):
            self._note_items(o, dict(o), refill_dict)
        elif isinstance(o, (list, deque, set)):
            self._note_items(o, list(o), _refill)
        elif isinstance(o, (tuple, frozenset)):
            self._go_on_to(o)
        elif isinstance(o, np.ndarray):
            self._steps.append(partial(_rewrite_array, o, o.copy()))
        elif isinstance(o, (bytearray, array)):
            self._steps.append(partial(o.__setitem__, slice(None), o[:]))
        elif (setter := state_setter(o)) is not None:
            self._steps.append(setter)

    def _go_on_to(self, items: Iterable[Any]) -> None:
        self._to_note += [v for v in items if type(v) not in _atoms]

    def _note_items(self, o: Any, items: Any, refill: Callable[[Any, Any], None]) -> None:
        self._steps.append(partial(refill, o, items))
        self._go_on_to(items.values() if isinstance(items, dict) else items)

    def _note_tensor(self, t: Tensor) -> None:
        if torch.nn.parameter.is_lazy(t):
            return
        grad = t.grad if t.is_leaf else None
        self._go_on_to([grad, *vars(t).values()])
        self._steps.append(partial(_rewrite, t, t.detach().clone(), t.requires_grad, grad))


@torch.no_grad()
def _rewrite(t: Tensor, value: Tensor, requires_grad: bool, grad: Tensor | None) -> None:
    "Give a tensor back its values and flags; one that has moved, or has another form, gets the storage of the copy."
    is_as_before = (t.shape, t.dtype, t.device) == (value.shape, value.dtype, value.device)
    if is_as_before and (t.layout is not torch.strided or 0 not in t.stride()):
        t.copy_(value)
    elif not (is_as_before and torch.equal(t, value)):
        t.data = value
    if not t.is_leaf:
        return
    t.requires_grad_(requires_grad)
    t.grad = grad


def _rewrite_array(o: np.ndarray[Any, Any], value: np.ndarray[Any, Any]) -> None:
    if o.flags.writeable and o.shape == value.shape:
        o[...] = value


def _refill(o: Any, items: list[Any]) -> None:
    if len(o) == len(items) and all(map(is_, o, items)):
        return
    o.clear()
    for item in items:
        o.add(item) if isinstance(o, set) else o.append(item)


def unchanged_loaders(dls: Any) -> AbstractContextManager[None]:
    """Leave loaders, and all random generators, as they were: the next epoch has the order that it would have had.

    >>> from learnkit.data.dataloaders import DataLoaders
    >>> dls = DataLoaders.from_tensors((torch.arange(9.), torch.arange(9.)), bs=9)
    >>> with unchanged_loaders(dls): order = dls.one_batch()[0]
    >>> torch.equal(order, dls.one_batch()[0])
    True
    """
    return preserve_loaders([dls, dls.train, *(dl for _, dl in evaluation_loaders(dls))])


@contextmanager
def undoing(learn: LearnerLike, roots: list[Any], but: list[Any] | None = None) -> Iterator[None]:
    "Undo what happens to these objects, to the loaders and to random generators."
    tensors = [
        *learn.model.parameters(),
        *learn.model.buffers(),
    ]  # also those that a scripted model hides
    loaders = learn.dls.train, *(dl for _, dl in evaluation_loaders(learn.dls))
    data = [learn.dls, *loaders, *(getattr(dl, 'dataset', None) for dl in loaders)]
    noted = Snapshot([tensors, *roots], but=[learn, *data, *(but or [])])
    with unchanged_loaders(learn.dls):
        try:
            yield
        finally:
            noted.undo()


@contextmanager
def restored(learn: LearnerLike) -> Iterator[None]:
    "Undo what happens to a Learner: also to its counters, its callbacks and their attributes."
    cbs, registry = list(learn.cbs), learn.callbacks
    parts = learn.run, learn.counters, learn.evaluations, learn.passes
    cut_again(learn.model)
    try:
        with undoing(
            learn,
            [vars(learn), *map(vars, cbs), *map(vars, parts)],
            but=[registry, learn.tables, learn.whole_step],
        ):
            learn.passes.stream = None  # the batches of an open pass are for the training
            try:
                yield
            finally:
                cut_again(learn.model)
                if any(a is not b for a, b in zip(learn.cbs, cbs, strict=False)) or len(
                    learn.cbs
                ) != len(cbs):
                    learn.cbs = cbs
    finally:
        for cb in cbs:
            registry.changed(cb, 'run')
        registry.refresh()
