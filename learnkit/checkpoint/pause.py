# SPDX-License-Identifier: Apache-2.0
"""What the Learner keeps of a fit that has left the loop, and how the fit continues in memory.

Weights and optimizer stay in the Learner. The pause keeps copies of everything else that an evaluation, a search or a
prediction may move, and the iterator of the open pass over the training data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from learnkit.checkpoint.fingerprint import UNREADABLE
from learnkit.checkpoint.host import copy_to_host
from learnkit.checkpoint.rehearsal import list_data
from learnkit.checkpoint.resume import fit_position, restore_state
from learnkit.checkpoint.state import collect_frozen, collect_state, collect_trained
from learnkit.comm.dtensor import gather_full_state, local_shards
from learnkit.core.batch import are_equal
from learnkit.core.model import bare_model, has_weights
from learnkit.core.random import capture_rng, preserved_rng, restore_rng
from learnkit.core.time import Timestamp
from learnkit.data.dataloaders import TensorLoader
from learnkit.data.loader_state import capture_loader_state, restore_loader_state
from learnkit.data.shard import unshard
from learnkit.data.torch_loader import workers_live
from learnkit.engine.callback_state import callback_names, keeps_attributes
from learnkit.engine.dispatch import contains_object
from learnkit.engine.microbatch import is_out_of_memory
from learnkit.engine.optimizer import cover_params
from learnkit.engine.pause import FitCall, OpenPass, PausedState
from learnkit.engine.resumed_run import list_checkpoint_writers
from learnkit.engine.snapshot import TRAINING_TYPES

if TYPE_CHECKING:
    from learnkit.checkpoint.rehearsal import Inventory
    from learnkit.core.random import RNGState
    from learnkit.learner import Learner

TRAINED = ('model', 'loss_func', 'optimizer')
_END = object()  # marks the end of a pass, as the default of `next`


Part = tuple[Any, str]  # weak reference to an object, and its description


@dataclass
class Settings:
    "Parts of a Learner that may be changed before a paused fit continues."

    loss_func: Any
    metrics: list[Any]
    cbs: list[Any]
    frozen: list[str]
    train: Any
    hypers: list[dict[str, Any]]
    model: Part
    optimizers: list[Part]  # of torch
    layers: dict[str, Part]  # modules of the model that have weights, by name
    lr: Any  # `learn.lr` and `learn.wd`, from which a fit takes what it is not given
    wd: Any


@dataclass
class Pause:
    "A fit that has left the loop, and can continue there."

    call: FitCall
    point: str  # 'batch' or 'epoch', as in `SAVE_POINTS`; 'start': before the first epoch
    time: Timestamp
    state: dict[str, Any] = field(repr=False)  # without weights and optimizer
    buffers: dict[str, Any] = field(repr=False)  # of the model
    loss_state: Any = field(repr=False)  # of the loss function
    weights: list[complex]  # sum of each weight
    trained: dict[str, Any] | None = field(repr=False)  # weights and optimizer, if a copy is needed
    grads: list[tuple[Tensor, Tensor]] = field(repr=False)  # parameters with pending gradients
    open_pass: OpenPass = field(repr=False)
    settings: Settings = field(repr=False)
    options: list[dict[str, Any]] = field(repr=False)  # of the optimizer's param groups
    attributes: list[tuple[Any, dict[str, Any]]] = field(repr=False)  # of callbacks
    last_batch: Any = field(repr=False)
    info: dict[str, Any] = field(repr=False)
    loader: Inventory = field(repr=False)  # attributes of the loader that no state holds
    is_trained: bool = False  # whether the epoch was trained
    # events whose rest is fired, with the callbacks whose handlers have run; None: all have
    handled: dict[str, list[Any] | None] = field(default_factory=dict, repr=False)
    batch_fields: dict[str, Any] = field(default_factory=dict, repr=False)  # results for these
    caveat: str = ''  # what is not exact if the fit continues; '': nothing
    peeked: Any = field(default=None, repr=False)  # the next batch, and the generators after it

    @property
    def epoch(self) -> int:
        "Number of the epoch in which the fit was paused."
        return int(self.state['loop']['epoch'])

    @property
    def n_drawn(self) -> int:
        "Number of batches of this epoch that were trained."
        return int(self.state['loop']['n_drawn'])

    def describe(self) -> str:
        "Describe the place of the pause."
        if self.point == 'start':
            return f'before the first epoch, {self.time.ba}ba'
        if self.point == 'epoch':
            return f'after epoch {self.epoch}, {self.time.ba}ba'
        n_iter = self.state['loop']['n_iter']
        if not self.n_drawn:
            return f'before the first batch of epoch {self.epoch}, {self.time.ba}ba'
        total = f' of {n_iter}' if n_iter else ''
        return f'after batch {self.n_drawn}{total} of epoch {self.epoch}, {self.time.ba}ba'

    def keeps_loader(self, dl: Any) -> bool:
        "Return True for the loader of an open pass, whose workers are still needed."
        is_ended = self.open_pass.batches is None and not self.is_trained
        is_lost = is_ended or not workers_live(self.open_pass.iterator)
        return self.open_pass.dl is dl and not (self.point == 'batch' and is_lost)

    def note_options(self, learn: Learner) -> Callable[[], None]:
        "Return a function that restores hyperparameters and frozen layers, which callbacks of an evaluation may set."
        options = read_options(learn)
        flags = [(p, p.requires_grad) for p in learn.model.parameters()]

        def undo() -> None:
            for group, own in zip(learn.opt.param_groups, options, strict=False):
                group.update(own)
            for p, flag in flags:
                p.requires_grad_(flag)

        return undo

    def peek(self) -> Any:
        "Return the next batch, which stays the next batch; None at the end of the pass."
        if self.peeked is None:
            own_pass = self.open_pass
            if self.point != 'batch' or own_pass.batches is None:
                return None
            with preserved_rng():
                restore_rng(self.state['rng'])
                restore_loader_state(unshard(own_pass.dl), own_pass.mark)
                batch = next(own_pass.batches, _END)
                self.peeked = batch, capture_rng()
            own_pass.mark = mark_loader(own_pass.dl)
        batch = self.peeked[0]
        return None if batch is _END else batch

    def list_rest(self) -> Iterator[Any]:
        "Return the batches that remain of the open pass; the generators move as if none had been looked at."
        batches = self.open_pass.batches
        assert batches is not None
        return batches if self.peeked is None else _begin_with(batches, *self.peeked)


def _begin_with(batches: Iterator[Any], batch: Any, rng: RNGState) -> Iterator[Any]:
    "Yield a batch that was drawn before, with the generators after it, and the batches that follow."
    restore_rng(rng)
    if batch is not _END:
        yield batch
        yield from batches


# -- keeping ------------------------------------------------------------------------------------------


class NotPaused(Exception):
    "A fit cannot continue; the message says why."


def _capture(learn: Learner, point: str) -> dict[str, Any]:
    "Return the state of a checkpoint; raise `NotPaused` if a callback or the loader cannot return its state."
    try:
        return gather_full_state(collect_state(learn, point))
    except Exception as e:
        raise NotPaused(f'its state cannot be copied ({type(e).__name__}: {e})') from e


def make_pause(
    learn: Learner,
    call: FitCall,
    point: str,  # 'batch', 'epoch' or 'iteration', as in `SAVE_POINTS`; '': before the first epoch
    is_intact: bool = True,  # False if the iterator of the pass may have failed
) -> Pause:
    """Return the pause of a fit that has just left the loop at a point where it can continue.

    Raises `NotPaused` if a state cannot be collected, or memory is too small for its copy."""
    state = _capture(learn, point)
    trained = {name: state.pop(name) for name in TRAINED}
    state.pop('grads')
    try:
        return _copy_state(learn, call, point, state, trained, is_intact)
    except (RuntimeError, MemoryError) as e:
        if isinstance(e, RuntimeError) and not is_out_of_memory(e):
            raise
        raise NotPaused('the memory is too small for a copy of its state') from e


def _copy_state(
    learn: Learner,
    call: FitCall,
    point: str,
    state: dict[str, Any],  # of a checkpoint, without weights, optimizer and gradients
    trained: dict[str, Any],  # states of model, loss function and optimizer
    is_intact: bool,
) -> Pause:
    params = {name for name, _ in bare_model(learn.model).named_parameters()}
    buffers = {k: v for k, v in trained['model'].items() if k not in params}
    grads = [(p, p.grad.clone()) for p in learn.opt.parameters() if p.grad is not None]
    return Pause(
        call=call,
        point=point,
        time=learn.time,
        state=copy_to_host(state),
        buffers=copy_to_host(buffers),
        loss_state=copy_to_host(trained['loss_func']),
        weights=_sum_weights(learn),
        trained=copy_to_host(trained) if learn.opt.has_modes else None,
        grads=grads,
        open_pass=_take_pass(learn, point, is_intact),
        settings=read_settings(learn, call),
        options=read_options(learn),
        attributes=_list_attributes(learn),
        last_batch=learn.batch,
        info=_describe_run(learn),
        loader=list_data(learn),
    )


def _list_attributes(learn: Learner) -> list[tuple[Any, dict[str, Any]]]:
    """Return the attributes of callbacks that no state holds, and that `before_fit` may make again.

    These are modules, optimizers and schedulers. Files and threads, which `cleanup` ends, are made again."""
    found = []
    for cb in learn.cbs:
        if keeps_attributes(cb):
            owned = {k: v for k, v in vars(cb).items() if isinstance(v, TRAINING_TYPES)}
            found.append((cb, owned))
    return found


def _sum_weights(learn: Learner) -> list[complex]:
    "Return the sum of each weight on its device, by which weights that were changed are recognized."
    params = [p for p in learn.model.parameters() if not is_lazy(p)]
    return [t.detach().sum(dtype=_find_precision(t)).item() for t in local_shards(params)]


def _find_precision(t: Tensor) -> torch.dtype | None:
    "Return the dtype in which a tensor is summed; None: its own."
    return None if t.is_complex() or t.device.type == 'mps' else torch.float64


def _describe_run(learn: Learner) -> dict[str, Any]:
    "Return the metadata that a checkpoint of this run would have."
    runs = [cb.run_id for cb in list_checkpoint_writers(learn) if cb.run_id]
    return {'run': runs[0]} if runs else {}


def _take_pass(learn: Learner, point: str, is_intact: bool) -> OpenPass:
    positions = learn.parts.positions
    dl = learn.run.request.dl if point == 'batch' else learn.dls.train
    batches = positions.left if point == 'batch' and is_intact else None
    iterator = positions.iterator if batches is not None else None
    mark = mark_loader(dl)
    return OpenPass(dl, batches, positions.position, positions.stream, mark, iterator)


def mark_loader(dl: Any) -> dict[str, Any]:
    "Return what shows whether a loader was iterated: its generators and its own state."
    mark: dict[str, Any] = capture_loader_state(unshard(dl))
    iterator = getattr(dl, '_iterator', None)
    if iterator is not None and hasattr(iterator, '_send_idx'):  # of persistent workers
        mark['sent'] = [id(iterator), iterator._send_idx, iterator._rcvd_idx]
    if callable(getattr(dl, 'state_dict', None)):
        with suppress(Exception):  # accelerate's loaders raise
            mark['loader'] = deepcopy(dl.state_dict())
    return mark


def is_untouched(open_pass: OpenPass) -> bool:
    "Return True if the iterator of a pass is where the pause has left it."
    dl = open_pass.dl
    if type(dl) in (list, tuple) or isinstance(dl, (TensorLoader, Iterator)):
        return True
    if not workers_live(open_pass.iterator):
        return False
    now = mark_loader(dl)
    if type(dl) is DataLoader or 'loader' not in now:
        return bool(now.get('sent') == open_pass.mark.get('sent'))
    return are_equal(now, open_pass.mark)


def list_caveats(learn: Learner, pause: Pause) -> list[str]:
    "Return what is not exact if a paused fit continues."
    found = [pause.caveat] if pause.caveat else []
    dl = pause.open_pass.dl
    if dl is not learn.dls.train:
        return found
    if isinstance(dl, Iterator):
        return [
            *found,
            'batches that were read meanwhile from the loader, an iterator, are missing',
        ]
    before, now = pause.loader, list_data(learn)
    unread = [name for name, (mark, _) in now.items() if mark == UNREADABLE]
    changed = [name for name in now if now[name][0] != before.get(name, (None, ''))[0]]
    if changed:
        found.append(f'{", ".join(changed)} was changed meanwhile')
    if unread:
        found.append(f'{", ".join(unread)} cannot be compared, if the loader was read meanwhile')
    return found


def read_settings(learn: Learner, call: FitCall) -> Settings:
    "Return the parts of a Learner that may be changed."
    frozen = [n for n, p in bare_model(learn.model).named_parameters() if not p.requires_grad]
    hypers = [dict(h) for h in learn.opt.hypers]
    cbs = [cb for cb in learn.cbs if not contains_object(call.added, cb)]
    return Settings(
        loss_func=learn.loss_func,
        metrics=list(learn.metrics),
        cbs=cbs,
        frozen=frozen,
        train=learn.dls.train,
        hypers=hypers,
        model=_refer_to(bare_model(learn.model)),
        optimizers=[_refer_to(opt) for opt in learn.opt.optimizers.values()],
        layers=_list_layers(learn),
        lr=learn.lr,
        wd=learn.wd,
    )


def _refer_to(part: Any) -> Part:
    return ref(part), type(part).__name__


def _list_layers(learn: Learner) -> dict[str, Part]:
    "Return the modules of the model that have their own weights."
    found = {}
    for name, module in bare_model(learn.model).named_modules():
        if name and any(True for _ in module.parameters(recurse=False)):
            found[name] = ref(module), f'{type(module).__name__}({module.extra_repr()})'
    return found


def read_options(learn: Learner) -> list[dict[str, Any]]:
    "Return the options of the optimizer's param groups."
    return [{k: v for k, v in g.items() if k != 'params'} for g in learn.opt.param_groups]


# -- continuing ---------------------------------------------------------------------------------------


def make_state(learn: Learner, pause: Pause) -> PausedState | None:
    "Return the state from which `fit` continues a pause; None if the fit begins again, with its generators."
    if pause.point == 'start':
        restore_rng(pause.state['rng'])
        return None
    info = dict(pause.info)
    state = PausedState(dict(pause.state), restore, info=info, pause=pause, begin=begin)
    own_pass = pause.open_pass
    is_kept = is_untouched(own_pass) if pause.point == 'batch' else True
    if pause.point == 'batch' and own_pass.batches is None:
        is_kept = pause.is_trained
    if is_kept:
        batches = (
            pause.list_rest() if pause.point == 'batch' and own_pass.batches is not None else None
        )
        if pause.is_trained:
            batches = iter(())
        position, stream = own_pass.position, own_pass.stream
        state.open_pass = OpenPass(
            own_pass.dl, batches, position, stream, iterator=own_pass.iterator
        )
    return state


def begin(learn: Learner, r: PausedState) -> None:
    "Begin to continue a paused fit, after its optimizer was prepared and before `before_fit`."
    pause = r.pause
    learn.run.resuming = r
    r.state = {**r.state, **_collect_weights(learn, pause)}
    if r.open_pass is None and learn.dls.train is not pause.open_pass.dl:
        fit_position(learn, r)
    elif r.open_pass is not None and pause.point == 'batch':
        restore_loader_state(unshard(r.open_pass.dl), pause.open_pass.mark)
    learn.resumed = True
    if r.point == 'batch':
        r.next_batch = r.loop['n_drawn']


def _collect_weights(learn: Learner, pause: Pause) -> dict[str, Any]:
    "Return the Learner's weights and optimizer with the buffers, modes and gradients of the pause."
    cover_params(learn)
    for group, options in zip(learn.opt.param_groups, pause.options, strict=False):
        group.update(options)
    trained = collect_trained(learn) if pause.trained is None else dict(pause.trained)
    if pause.weights == _sum_weights(learn):
        trained['model'] = {**trained['model'], **pause.buffers}
    if learn.loss_func is pause.settings.loss_func and not has_weights(learn.loss_func):
        trained['loss_func'] = pause.loss_state
    params = list(learn.opt.parameters())
    numbers = {id(p): str(i) for i, p in enumerate(params)}
    grads = {numbers[id(p)]: grad for p, grad in pause.grads if id(p) in numbers}
    return {**trained, 'grads': grads, 'frozen': collect_frozen(learn, params)}


def restore(learn: Learner, r: Any) -> None:
    "Restore a pause; callbacks may have been added or removed."
    request = learn.run.request
    request.restored = r.pause
    for cb, owned in r.pause.attributes:
        if cb in learn.parts.callbacks:
            vars(cb).update(owned)
    r.info = {**r.info, 'callback_names': callback_names(learn)}
    restore_state(learn, r)
    request.restored = None
