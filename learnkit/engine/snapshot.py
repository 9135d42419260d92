# SPDX-License-Identifier: Apache-2.0
"""Copy the contents of objects, and write the copies back into the same objects later.

No object is replaced by its copy, so all references to a list, a tensor or a parameter stay valid."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from fastcore.foundation import L
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from learnkit.comm.dtensor import reshard
from learnkit.core.errors import CancelBatchException
from learnkit.core.interrupts import run_all
from learnkit.core.model import copy_extra_state, has_extra_state, has_lazy_tensors
from learnkit.core.plain import has_parts
from learnkit.core.random import preserved_rng, state_setter
from learnkit.data.dataloaders import evaluation_loaders
from learnkit.data.preserve import preserve_loaders, refill_dict
from learnkit.data.show import first_batch
from learnkit.engine.callback import Callback
from learnkit.metrics.base import Mean, Metric

if TYPE_CHECKING:
    from learnkit.learner import Learner

TRAINING_TYPES = (
    nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
)
# classes whose attributes belong to the object alone
OWNER_TYPES = (
    *TRAINING_TYPES,
    Callback,
    Metric,
    Mean,
    L,
)
_ATOMS = frozenset([type(None), bool, int, float, str])  # immutable types, which need no copy


class Snapshot:
    """Copy of the contents of all objects that are reachable from `roots`, which `undo()` writes back.

    `undo()` modifies lists, dicts, sets, tensors, arrays and random generators in-place, and also the attributes of
    modules, optimizers, torch's schedulers and scalers, callbacks and metrics, recursively. Objects of all other
    types are left unchanged, with their contents, which may depend on something outside (a file, a connection, a
    thread). The extra state of a module is restored, whatever object holds it. A tensor is copied on its device, or
    with `on_host` to the memory of the CPU. A lazy module that has not run yet is left unchanged; see
    `initialize_lazy`.

    >>> log = [1, {'a': torch.zeros(2)}]
    >>> snapshot = Snapshot([log])
    >>> log.append(2); log[1]['a'].add_(1); log[1]['b'] = 3
    tensor([1., 1.])
    >>> snapshot.undo()
    >>> log
    [1, {'a': tensor([0., 0.])}]
    """

    def __init__(
        self,
        roots: Iterable[Any],  # objects, or containers of them
        excluded: Iterable[
            Any
        ] = (),  # objects that are not copied, with everything reachable only through them
        on_host: bool = False,  # whether copies of tensors are on the CPU
        skip_equal: bool = False,  # compare values on the host, and write changed tensors only
    ) -> None:
        self._on_host = on_host
        self._skip_equal = skip_equal
        # holds references, so that no new object gets the id of a visited one
        self._visited = {id(o): o for o in excluded}
        self._undo_steps: list[Callable[[], object]] = []
        self._queue = list(roots)  # not by recursion: objects may form long chains
        while self._queue:
            self._copy(self._queue.pop())

    def undo(self) -> None:
        "Write all contents back, also if Ctrl-C interrupts it."
        has_grad = torch.is_grad_enabled()
        try:
            run_all(self._undo_steps)
        finally:
            torch.set_grad_enabled(has_grad)  # an interrupted `no_grad` leaves it off

    def _copy(self, o: Any) -> None:
        if type(o) in _ATOMS or id(o) in self._visited:
            return
        self._visited[id(o)] = o
        if isinstance(o, nn.Module) and has_lazy_tensors(o, recurse=False):
            self._enqueue(o.children())  # its first forward pass changes its class
        elif isinstance(o, OWNER_TYPES):
            if isinstance(o, nn.Module) and has_extra_state(o):
                self._undo_steps.append(copy_extra_state(o))
            self._enqueue([vars(o)])
        elif isinstance(o, Tensor):
            self._copy_tensor(o)
        elif isinstance(o, dict):
            self._undo_steps.append(partial(refill_dict, o, dict(o)))
            self._enqueue(o.values())
        elif isinstance(o, (list, deque, set)):
            self._undo_steps.append(partial(_refill, o, list(o)))
            self._enqueue(o)
        elif isinstance(o, (tuple, frozenset)):
            self._enqueue(o)
        elif isinstance(o, np.ndarray) and o.flags.writeable:
            self._undo_steps.append(partial(np.copyto, o, o.copy()))
        else:
            setter = state_setter(o)
            if setter is not None:
                self._undo_steps.append(setter)

    def _enqueue(self, items: Iterable[Any]) -> None:
        self._queue += [v for v in items if type(v) not in _ATOMS]

    def _copy_tensor(self, t: Tensor) -> None:
        if is_lazy(t):
            return  # it has no values yet
        grad = t.grad if t.is_leaf else None
        self._enqueue([grad, *vars(t).values()])
        if has_parts(t):
            return  # its parts, which are attributes, are written back
        value = t.detach()
        copy = value.to('cpu', copy=True) if self._on_host else value.clone()
        step = partial(_rewrite_tensor, t, copy, t.device, t.requires_grad, grad, self._skip_equal)
        self._undo_steps.append(step)


@torch.no_grad()
def _rewrite_tensor(
    t: Tensor,
    value: Tensor,
    device: torch.device,
    requires_grad: bool,
    grad: Tensor | None,
    skip_equal: bool,
) -> None:
    "Restore a tensor's values, `requires_grad` and gradient; another shape, dtype or device gets a new storage."
    if (t.shape, t.dtype, t.device) == (value.shape, value.dtype, device):
        # a tensor that is written invalidates a graph that has saved it
        if not skip_equal or t.is_meta or not torch.equal(t, value):
            t.copy_(value)
    else:
        t.data = value.to(device)
    if not t.is_leaf:
        return
    t.requires_grad_(requires_grad)
    t.grad = grad


def _refill(o: Any, items: list[Any]) -> None:
    if len(o) == len(items) and all(map(is_, o, items)):
        return  # a set that is filled again may have another order
    o.clear()
    if isinstance(o, set):
        o.update(items)
    else:
        o.extend(items)


def pass_forward(learn: Learner, batch: Any) -> None:
    "Pass a batch through the model and its callbacks as a prediction does, without computing its loss."

    def skip_loss(cb: Callback) -> None:
        raise CancelBatchException

    options: dict[str, Any] = {
        'with_preds': False,
        'with_targs': False,
        'cbs': Callback(after_pred=skip_loss),
    }
    with learn.no_bar():
        learn.get_preds(dl=[batch], reorder=False, **options)


def initialize_lazy(learn: Learner) -> None:
    """Initialize lazy modules that have not run yet, by a prediction of the first training batch.

    A training that is undone would otherwise have no weights to restore. Raises `LoaderError` for an iterator, which
    would lose the batch."""
    if has_lazy_tensors(learn.model):
        pass_forward(learn, first_batch(learn.dls.train))


@contextmanager
def preserved_forward(model: nn.Module) -> Iterator[None]:
    """Restore at the end of a context what forward passes of a model can change.

    These are buffers, extra state, modes, attributes and random generators of all modules, the global generators, and
    the weights of embeddings with `max_norm`, which a forward pass scales; no other parameter is copied.
    Every forward pass that the package adds to training runs in this context.

    >>> norm = nn.BatchNorm1d(1)
    >>> with preserved_forward(norm): _ = norm(torch.rand(2, 1))
    >>> norm.running_mean
    tensor([0.])
    """
    # buffers are listed because the attributes of a scripted model do not contain its tensors
    roots = [model, [*model.buffers()]]
    scaled = {id(m.weight) for m in model.modules() if getattr(m, 'max_norm', None) is not None}
    constant = [p for p in model.parameters() if id(p) not in scaled]
    snapshot = Snapshot(roots, excluded=constant, skip_equal=True)
    with preserved_rng():
        try:
            yield
        finally:
            snapshot.undo()


def preserve_dataloaders(dls: Any) -> ExitStack:
    """Restore loaders and all random generators at the end of a context, so that the order of the next epoch is kept.

    >>> from learnkit.data.dataloaders import DataLoaders
    >>> dls = DataLoaders.from_tensors((torch.arange(9.), torch.arange(9.)), bs=9)
    >>> with preserve_dataloaders(dls): order = dls.one_batch()[0]
    >>> torch.equal(order, dls.one_batch()[0])
    True
    """
    return preserve_loaders([dls, dls.train, *(dl for _, dl in evaluation_loaders(dls))])


def restored_objects(
    learn: Learner,  # Learner whose model and loaders are restored
    roots: list[Any],  # further objects to restore
    excluded: list[Any] | None = None,  # objects that are not restored
    on_host: bool = False,  # whether copies of tensors are on the CPU
) -> ExitStack:
    "Return a context that restores the model, these objects, the loaders and the random generators at its end."
    # listed here because the attributes of a scripted model do not contain its tensors
    tensors = [*learn.model.parameters(), *learn.model.buffers()]
    loaders = learn.dls.train, *(dl for _, dl in evaluation_loaders(learn.dls))
    datasets = [getattr(dl, 'dataset', None) for dl in loaders]
    excluded = [learn, learn.dls, *loaders, *datasets, *(excluded or [])]
    stack = preserve_dataloaders(learn.dls)
    stack.callback(Snapshot([tensors, *roots], excluded, on_host).undo)
    return stack


def restored(
    learn: Learner,
    on_host: bool = False,  # whether copies of tensors are on the CPU
) -> ExitStack:
    """Return a context that restores a Learner at its end, with its counters, its callbacks and their attributes.

    `pop_all()` of the context keeps what has changed.
    """
    cbs = list(learn.cbs)
    callbacks = learn.parts.callbacks
    parts = [learn.run, learn.seams, *learn.parts.list_undone()]
    reshard(learn.model)
    stack = ExitStack()
    stack.callback(_refresh, learn, cbs)
    stack.enter_context(
        restored_objects(
            learn,
            [vars(learn), vars(learn.parts), *map(vars, cbs), *map(vars, parts)],
            excluded=[callbacks, callbacks.tables, *learn.seams.features],
            on_host=on_host,
        )
    )
    stack.callback(_restore_cbs, learn, cbs)
    learn.parts.positions.forget()  # the batches of an open pass belong to the training
    return stack


def _restore_cbs(learn: Learner, cbs: list[Any]) -> None:
    reshard(learn.model)
    if list(map(id, learn.cbs)) != list(map(id, cbs)):
        learn.cbs = cbs


def _refresh(learn: Learner, cbs: list[Any]) -> None:
    callbacks = learn.parts.callbacks
    for cb in cbs:
        callbacks.changed(cb, 'run')
    callbacks.refresh()
