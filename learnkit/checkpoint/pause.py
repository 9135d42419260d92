# SPDX-License-Identifier: Apache-2.0
"""What the Learner keeps of a fit that has left the loop, and how the fit continues in memory.

Weights and optimizer stay in the Learner. The pause keeps copies of everything else that an evaluation, a search or a
prediction may move, and the iterator of the open pass over the training data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from learnkit.checkpoint.host import copy_to_host
from learnkit.checkpoint.resume import fit_position, restore_state
from learnkit.checkpoint.state import collect_frozen, collect_state, collect_trained
from learnkit.comm.dtensor import gather_full_state, local_shards
from learnkit.core.batch import are_equal
from learnkit.core.errors import CancelException
from learnkit.core.model import bare_model, has_weights, preserved_modes
from learnkit.core.random import capture_rng, preserved_rng, restore_rng
from learnkit.core.time import Timestamp
from learnkit.data.dataloaders import TensorLoader
from learnkit.data.loader_state import capture_loader_state, restore_loader_state
from learnkit.data.shard import unshard
from learnkit.engine.callback_state import callback_names, keeps_attributes
from learnkit.engine.dispatch import contains_object
from learnkit.engine.lengths import epoch_length
from learnkit.engine.optimizer import cover_params
from learnkit.engine.pause import FitCall, FitPaused, OpenPass, PausedState
from learnkit.engine.resumed_run import list_checkpoint_writers
from learnkit.engine.snapshot import TRAINING_TYPES

if TYPE_CHECKING:
    from learnkit.learner import Learner

TRAINED = ('model', 'loss_func', 'optimizer')
# attributes of the Learner that say where an error was raised
_PLACE = ('training', 'phase', 'dl_name', 'dl', 'iter', 'n_iter')
_END = object()  # marks the end of a pass, as the default of `next`
# events of a batch before its forward pass, behind the optimizer's step, and behind the batch
_BEFORE_FORWARD = ('before_batch', 'before_pred')
_BEHIND_STEP = ('after_cancel_step', 'after_step', 'after_cancel_batch')
_BEHIND_BATCH = ('after_batch', 'batch_checkpoint')
_EVALUATION = ('after_cancel_train', 'after_train', 'before_eval', 'after_eval')


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
    point: str  # 'batch' or 'epoch', as in `SAVE_POINTS`
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
    is_trained: bool = False  # whether the epoch was trained, with its `after_train`
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
        if self.point == 'epoch':
            return f'after epoch {self.epoch}, {self.time.ba}ba'
        n_iter = self.state['loop']['n_iter']
        total = f' of {n_iter}' if n_iter else ''
        return f'after batch {self.n_drawn}{total} of epoch {self.epoch}, {self.time.ba}ba'

    def keeps_loader(self, dl: Any) -> bool:
        "Return True for the loader of an open pass, whose workers are still needed."
        is_lost = self.point == 'batch' and self.open_pass.batches is None and not self.is_trained
        return self.open_pass.dl is dl and not is_lost

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
            if self.point == 'epoch' or own_pass.batches is None:
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
        "Yield the batches that remain of the open pass; the generators move as if none had been looked at."
        assert self.open_pass.batches is not None
        if self.peeked is not None:
            batch, rng = self.peeked
            restore_rng(rng)
            if batch is _END:
                return
            yield batch
        yield from self.open_pass.batches


# -- keeping ------------------------------------------------------------------------------------------


def keep_pause(learn: Learner, call: FitCall, error: BaseException) -> None:
    "Keep the fit that this exception has ended, if it can continue; called before the end of the run."
    if isinstance(error, FitPaused):
        learn.run.pause = make_pause(learn, call, error.point)
        for writer in list_checkpoint_writers(learn):
            writer.save_pause(error.point)
        learn._end_cleanup()
        learn.opt.zero_grad()
        return
    resuming = learn.run.resuming
    if isinstance(resuming, PausedState):
        learn.run.pause = resuming.pause  # it was not restored yet
        return
    if isinstance(error, CancelException) or learn.world.size > 1:
        return
    place, event = find_place(error)
    before = {name: getattr(learn, name) for name in _PLACE}
    modes = vars(learn.parts.modes)
    modes_before = dict(modes)
    try:
        # the error is the user's, also if the Learner cannot be kept
        with preserved_modes(learn.model), suppress(Exception):
            learn.run.pause = _make_pause_of_error(learn, call, place, event)
    finally:
        # the end of the run reports where the error was raised
        vars(learn).update(before)
        modes.update(modes_before)


def find_place(error: BaseException) -> tuple[str, str]:
    """Return where in the loop an exception was raised, and the event, from its traceback.

    The place is 'draw', 'batch', 'cut' (in the optimizer's step), 'evaluation', 'epoch', or '' elsewhere."""
    names = []
    tb = error.__traceback__
    while tb is not None:
        code, module = tb.tb_frame.f_code, tb.tb_frame.f_globals.get('__name__')
        if module == 'learnkit.engine.loop':
            names.append(code.co_name)
            if code.co_name == 'draw_batches':
                return 'draw' if 'do_evaluation' not in names else 'evaluation', ''
        elif module == 'learnkit.engine.dispatch' and code.co_name == '__call__':
            return _find_place_of_event(names, tb.tb_frame.f_locals['event_name'])
        tb = tb.tb_next
    if 'do_evaluation' in names:
        return 'evaluation', ''
    if '_step' in names:
        return 'cut', ''
    return ('batch' if 'one_batch' in names else ''), ''


def _find_place_of_event(names: list[str], event: str) -> tuple[str, str]:
    if 'do_evaluation' in names or event in _EVALUATION:
        return 'evaluation', event
    if 'one_batch' in names or event == 'batch_checkpoint':
        return 'batch', event
    return ('epoch' if event == 'epoch_checkpoint' else ''), event


def _make_pause_of_error(learn: Learner, call: FitCall, place: str, event: str) -> Pause | None:
    "Return the pause at which a fit can continue after an exception, or None."
    if place == 'draw' and learn.run.request.has_begun:
        return _make_pause_in_draw(learn, call)
    if place == 'epoch':
        return make_pause(learn, call, 'epoch')
    if place == 'evaluation':
        return _make_pause_in_evaluation(learn, call, event)
    if place == 'batch':
        return _make_pause_in_batch(learn, call, event)
    return None


def _make_pause_in_draw(learn: Learner, call: FitCall) -> Pause:
    "Return the pause before a batch that was being drawn, which is drawn again from the position in the data."
    learn.iter = learn.run.request.count_drawn(learn) - 1
    position = learn.parts.positions.position
    pause = make_pause(learn, call, 'batch', is_intact=False)
    pause.last_batch = None
    saved = pause.state['position']
    if saved is None or position is None:
        return pause
    start = saved['start']
    if not pause.n_drawn and start is not None:  # begin the pass again
        pause.state['rng'] = {**pause.state['rng'], **start.get('rng', {})}
        pause.state['position'] = {**saved, 'start': None, 'now': start}
    elif pause.n_drawn and position.before_draw is not None:
        pause.state['rng'] = {**pause.state['rng'], **position.before_draw}
    elif position.draws or position.draws is None:
        pause.caveat = 'the batch that was being drawn has moved random generators'
    return pause


def _make_pause_in_evaluation(learn: Learner, call: FitCall, event: str) -> Pause | None:
    "Return the pause behind the training of an epoch, whose evaluation begins again."
    positions = learn.parts.positions
    if learn.run.depth > 1 or positions.left is not None:
        return None  # an evaluation within a training batch, which was cut
    evaluated = learn.parts.evaluations.evaluated
    for name in [name for name, time in evaluated.items() if time.ba == learn.time.ba]:
        del evaluated[name]
    pct_train = learn.pct_train
    learn.phase = learn.dl_name = 'train'
    learn.dl = learn.dls.train
    learn.iter = positions.n_drawn - 1
    learn.n_iter = epoch_length(learn, learn.dl)[0]
    learn.parts.modes.train(learn)
    learn.pct_train = pct_train
    pause = make_pause(learn, call, 'batch')
    pause.last_batch = None
    pause.is_trained = event not in ('after_train', 'after_cancel_train')
    if not pause.is_trained:
        pause.caveat = 'the handlers of `after_train` run again'
    elif any(keeps_attributes(cb) for cb in learn.cbs):
        pause.caveat = 'callbacks have seen a part of the evaluation, which begins again'
    return pause


def _make_pause_in_batch(learn: Learner, call: FitCall, event: str) -> Pause | None:
    "Return the pause before a batch that has failed, or behind it if the optimizer has stepped."
    if event in (*_BEHIND_STEP, *_BEHIND_BATCH):
        if event in _BEHIND_STEP:
            learn.parts.callbacks.call_one(learn.train_eval, 'after_batch')
        learn.opt.zero_grad()
        pause = make_pause(learn, call, 'batch')
        if event != 'batch_checkpoint':
            pause.caveat = 'the rest of the failed batch is left out: its later handlers and events'
        return pause
    has_forward = event not in _BEFORE_FORWARD
    if has_forward and not learn.parts.callbacks.is_step_due():
        return None  # gradients of earlier batches are mixed with those of this one
    if event in ('before_step', 'after_backward', '') and learn.parts.callbacks.has_handler(
        'will_step'
    ):
        return None
    batch = learn.batch
    if has_forward:
        learn.opt.zero_grad()
    learn.iter -= 1
    pause = make_pause(learn, call, 'batch')
    rest = pause.open_pass.batches
    if rest is None:
        return None
    pause.open_pass.batches = chain([batch], rest)
    pause.last_batch = None
    if has_forward:
        pause.caveat = (
            'the batch is repeated with buffers and random generators as it has left them'
        )
    return pause


def make_pause(
    learn: Learner,
    call: FitCall,
    point: str,  # 'batch' or 'epoch', as in `SAVE_POINTS`
    is_intact: bool = True,  # False if the iterator of the pass may have failed
) -> Pause:
    "Return the pause of a fit that has just left the loop at a point where it can continue."
    state = gather_full_state(collect_state(learn, point))
    trained = {name: state.pop(name) for name in TRAINED}
    state.pop('grads')
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
    dl = learn.dls.train
    batches = positions.left if point == 'batch' and is_intact else None
    return OpenPass(dl, batches, positions.position, positions.stream, mark_loader(dl))


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
    "Return True if the iterator of a pass still gives the batches that it would have given."
    dl = open_pass.dl
    if type(dl) in (list, tuple) or isinstance(dl, (TensorLoader, Iterator)):
        return True
    now = mark_loader(dl)
    if type(dl) is DataLoader or 'loader' not in now:
        return bool(now.get('sent') == open_pass.mark.get('sent'))
    return are_equal(now, open_pass.mark)


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
    "Return the modules of the model that have weights of their own."
    found = {}
    for name, module in bare_model(learn.model).named_modules():
        if name and any(True for _ in module.parameters(recurse=False)):
            found[name] = ref(module), f'{type(module).__name__}({module.extra_repr()})'
    return found


def read_options(learn: Learner) -> list[dict[str, Any]]:
    "Return the options of the optimizer's param groups."
    return [{k: v for k, v in g.items() if k != 'params'} for g in learn.opt.param_groups]


# -- continuing ---------------------------------------------------------------------------------------


def make_state(learn: Learner, pause: Pause) -> PausedState:
    "Return the state from which `fit` continues a pause."
    info = dict(pause.info)
    state = PausedState(dict(pause.state), restore, info=info, pause=pause, begin=begin)
    own_pass = pause.open_pass
    is_kept = is_untouched(own_pass) if pause.point == 'batch' else True
    if pause.point == 'batch' and own_pass.batches is None:
        is_kept = pause.is_trained
    if is_kept:
        batches = pause.list_rest() if pause.point == 'batch' else None
        if pause.is_trained:
            batches = iter(())
        state.open_pass = OpenPass(own_pass.dl, batches, own_pass.position, own_pass.stream)
    return state


def begin(learn: Learner, r: PausedState) -> None:
    "Begin to continue a paused fit, after its optimizer was prepared and before `before_fit`."
    pause = r.pause
    learn.run.resuming = r
    r.state = {**r.state, **_collect_weights(learn, pause)}
    if r.open_pass is None:
        fit_position(learn, r)
    elif pause.point == 'batch':
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
    for cb, owned in r.pause.attributes:
        if cb in learn.parts.callbacks:
            vars(cb).update(owned)
    r.info = {**r.info, 'callback_names': callback_names(learn)}
    restore_state(learn, r)
