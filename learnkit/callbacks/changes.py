# SPDX-License-Identifier: Apache-2.0
"""Continue a paused fit, with what was changed meanwhile; each change is printed and recorded."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from numbers import Real
from typing import TYPE_CHECKING, Any

from fastcore.basics import noop

from learnkit.callbacks.history import describe_change
from learnkit.callbacks.recorder import recorder_of
from learnkit.callbacks.schedule import ParamScheduler
from learnkit.callbacks.torch_scheduler import LRScheduler
from learnkit.checkpoint.next_loader import find_rest, move_to_loader
from learnkit.checkpoint.pause import (
    Part,
    Pause,
    Settings,
    list_caveats,
    make_state,
    read_options,
    read_settings,
)
from learnkit.core.batch import are_equal
from learnkit.core.contexts import replacing_yield
from learnkit.core.errors import FitError, OptionError
from learnkit.core.model import name_of
from learnkit.core.validation import check_count, warn_user
from learnkit.data.dataloaders import batch_size_of
from learnkit.engine.dispatch import contains_object
from learnkit.engine.optimizer import MAX_NAMES, cover_params
from learnkit.engine.pause import parse_pause

if TYPE_CHECKING:
    from learnkit.engine.pause import FitCall, PausedState
    from learnkit.learner import Learner

Change = dict[str, Any]  # what, old, new
_ABSENT: Part = (noop, '')  # a layer that the model lacks


def resume(
    learn: Learner,
    *,
    lr: Any,
    lr_scale: float | None,
    n_epoch: int | None,
    stretch: bool,
    at_once: bool,
    pause_at: Any,
) -> None:
    "Continue the paused fit; see `Learner.resume`."
    __tracebackhide__ = True
    pause = _require_pause(learn)
    parse_pause(learn, pause_at)
    _check_length(pause, n_epoch)
    rest = find_rest(learn, pause) if at_once else None
    rates = _find_rates(learn, pause, lr, lr_scale)
    _renew_classes([*learn.cbs, *pause.call.cbs])
    cover_params(learn)
    _change_decay(learn, pause)
    if rest is not None:
        # a loader that was to be used from the next epoch on is used now
        pause.settings.train = pause.open_pass.dl
    changes = [
        *_change_rates(learn, pause, rates),
        *_change_length(learn, pause, n_epoch, stretch),
        *_find_changes(learn, pause),
    ]
    pause.options = read_options(learn)
    state = make_state(learn, pause)
    if rest is not None and state is not None:
        move_to_loader(state, rest)
    _report(learn, pause, changes)
    if rest is None and pause.point == 'batch' and state is not None:
        _warn_of_new_pass(pause, state)
    _continue_fit(learn, pause.call, state, pause_at)


def _require_pause(learn: Learner) -> Pause:
    "Return the paused fit; raise `FitError` if there is none."
    if learn.run.depth:
        raise FitError('learn.resume(): a run is under way.')
    pause: Pause | None = learn.run.pause
    if pause is not None:
        return pause
    why = learn.run.not_paused
    reason = f'the last fit cannot continue, because {why}' if why else 'no fit is paused'
    raise FitError(
        f'learn.resume(): {reason}. To continue from a checkpoint in a folder, call `fit(..., resume=True)`.'
    )


def _warn_of_new_pass(pause: Pause, state: PausedState) -> None:
    "Warn if the open pass has ended, so that a new one skips the batches that were trained."
    if state.open_pass is None:
        warn_user(
            f'The open pass over the training loader ({type(pause.open_pass.dl).__name__}) has ended: its first '
            f'{pause.n_drawn} batches are skipped in a new one, as by a resume from a checkpoint.'
        )


def _continue_fit(
    learn: Learner,
    call: FitCall,
    state: PausedState | None,  # None: the fit begins again
    pause_at: Any,
) -> None:
    "Continue the fit, and call what follows it in the method that was called."
    learn.run.then = call.then
    try:
        with replacing_yield(learn, 'stage', call.stage):
            learn.fit(**call.arguments(), resume=state, pause_at=pause_at)
    finally:
        learn.run.then = None
    if call.then is not None and learn.run.pause is None:
        call.then(pause_at=pause_at)


def _check_length(pause: Pause, n_epoch: int | None) -> None:
    "Raise `OptionError` for a number of epochs that cannot be the fit's."
    if n_epoch is None:
        return
    check_count('n_epoch', n_epoch)
    if not isinstance(pause.call.n_epoch, int):
        raise OptionError('learn.resume(n_epoch=): the fit has a budget, and no number of epochs.')
    if n_epoch <= pause.epoch:
        raise OptionError(
            f'learn.resume(n_epoch={n_epoch}): the fit is {pause.describe()}. Epochs that were trained count.'
        )


def _renew_classes(cbs: list[Any]) -> None:
    "Give callbacks whose class was defined again, as in a notebook cell that was run again, the new class."
    for cb in cbs:
        cls = type(cb)
        new = getattr(sys.modules.get(cls.__module__), cls.__qualname__, cls)
        if new is not cls and isinstance(new, type):
            cb.__class__ = new
            cb.learn and cb.learn.parts.callbacks.refresh(classes=True)


# -- rates and length ---------------------------------------------------------------------------------


@dataclass
class Rates:
    "New rates of a paused fit, by group of parameters."

    schedulers: list[ParamScheduler | LRScheduler]  # callbacks that set the rates
    old: list[float]  # highest rates of the schedule, or the rates of now
    new: list[float]


def list_schedulers(learn: Learner, pause: Pause) -> list[ParamScheduler]:
    "Return the schedules of a paused fit."
    return [cb for cb in [*learn.cbs, *pause.call.cbs] if isinstance(cb, ParamScheduler)]


def _list_rate_setters(learn: Learner, pause: Pause) -> list[ParamScheduler | LRScheduler]:
    "Return the callbacks that set the learning rates of a paused fit."
    schedules: list[ParamScheduler | LRScheduler] = [
        cb for cb in list_schedulers(learn, pause) if 'lr' in cb.scheds
    ]
    torch_schedulers = [cb for cb in [*learn.cbs, *pause.call.cbs] if isinstance(cb, LRScheduler)]
    return schedules + torch_schedulers


def _read_rates(learn: Learner) -> list[float]:
    return [float(h['lr']) for h in learn.opt.hypers]


def _find_rates(learn: Learner, pause: Pause, lr: Any, lr_scale: float | None) -> Rates | None:
    "Return the new rates, or None if they stay; raise `OptionError` for rates that no schedule can have."
    if lr is not None and lr_scale is not None:
        raise OptionError('learn.resume(lr=, lr_scale=): pass one of the two.')
    if lr is None and lr_scale is None:
        if are_equal(learn.lr, pause.settings.lr):
            return None
        lr = learn.lr
    schedulers = _list_rate_setters(learn, pause)
    old = _read_rates(learn)
    for cb in schedulers:
        highest = cb.find_highest_lrs()
        if highest is not None:
            highest = highest * len(old) if len(highest) == 1 else highest
            old = [b if a is None else a for a, b in zip(highest, old, strict=True)]
        elif lr is not None:
            raise OptionError(
                f'learn.resume(lr=): the highest rate of {cb!r} is unknown. Pass `lr_scale=`, a factor of its rates.'
            )
    if lr_scale is None:
        new = [float(rate) for rate in learn.opt.list_values('lr', lr)]
    else:
        new = [rate * _check_factor(lr_scale) for rate in old]
    if schedulers and any(b and not a for a, b in zip(old, new, strict=True)):
        raise OptionError(
            f'learn.resume(lr=): the schedule of {_format(old)} cannot be scaled to {_format(new)}. '
            'Keep the rate 0 of a group, or replace the schedule in `learn.paused.cbs`.'
        )
    return Rates(schedulers, old, new)


def _check_factor(lr_scale: Any) -> float:
    "Return a factor of the rates; raise `OptionError` unless it is a number above 0."
    if not isinstance(lr_scale, Real) or not 0 < float(lr_scale) < inf:
        raise OptionError(f'learn.resume(lr_scale={lr_scale!r}): pass a number above 0.')
    return float(lr_scale)


def _change_rates(learn: Learner, pause: Pause, rates: Rates | None) -> Iterator[Change]:
    "Set the rates of the rest of the fit."
    if rates is None or rates.old == rates.new:
        return
    now = rates.new
    if rates.schedulers:
        factors = [b / a if a else 1.0 for a, b in zip(rates.old, rates.new, strict=True)]
        for cb in rates.schedulers:
            cb.scale_lr(factors)
        now = [rate * f for rate, f in zip(_read_rates(learn), factors, strict=True)]
    learn.opt.set_hypers(lr=now)
    for own, hypers in zip(pause.settings.hypers, learn.opt.hypers, strict=False):
        own['lr'] = hypers['lr']
    yield _describe('lr', _format(rates.old), _format(rates.new))


def _change_decay(learn: Learner, pause: Pause) -> None:
    "Set the weight decay that was assigned to `learn.wd`, which the fit would take from there."
    if learn.wd is not None and not are_equal(learn.wd, pause.settings.wd):
        learn.opt.set_hypers(wd=learn.wd)


def _change_length(
    learn: Learner, pause: Pause, n_epoch: int | None, stretch: bool
) -> Iterator[Change]:
    "Set the number of epochs of the fit."
    old = pause.call.n_epoch
    if n_epoch is None or n_epoch == old:
        return
    for cb in list_schedulers(learn, pause):
        cb.change_length(old, n_epoch, stretch)
    pause.call.n_epoch = n_epoch
    yield _describe('n_epoch', str(old), str(n_epoch))


# -- other changes ------------------------------------------------------------------------------------


def _find_changes(learn: Learner, pause: Pause) -> Iterator[Change]:
    "Return what was changed in the Learner since the pause, and note it as known."
    before = pause.settings
    now = read_settings(learn, pause.call)
    now.cbs += pause.call.cbs
    pause.settings = now
    if now.loss_func is not before.loss_func:
        yield _describe('loss', name_of(before.loss_func), name_of(now.loss_func))
    if list(map(id, now.metrics)) != list(map(id, before.metrics)):
        yield _describe('metrics', *(_join([m.name for m in s.metrics]) for s in (before, now)))
    for cb in before.cbs:
        if not contains_object(now.cbs, cb):
            yield _describe('callback', repr(cb), '')
    for cb in now.cbs:
        if not contains_object(before.cbs, cb):
            yield _describe('callback', '', repr(cb))
    yield from _find_changes_of_model(before, now)
    if now.frozen != before.frozen:
        yield _describe('frozen', _join(before.frozen), _join(now.frozen))
    if now.train is not before.train:
        yield _describe('train loader', *(_describe_loader(s.train) for s in (before, now)))
    yield from _find_changes_of_optimizer(learn, pause, before, now)


def _find_changes_of_model(before: Settings, now: Settings) -> Iterator[Change]:
    "Return the layers that were added, removed or replaced; one change if the whole model was replaced."
    if not _is_same(before.model, now.model):
        yield _describe('model', before.model[1], now.model[1])
        return
    for name in {**before.layers, **now.layers}:
        old = before.layers.get(name, _ABSENT)
        new = now.layers.get(name, _ABSENT)
        if not _is_same(old, new):
            yield _describe(f'layer {name}', old[1], new[1])


def _is_same(old: Part, new: Part) -> bool:
    "Return True if a part of the Learner was not replaced."
    return new[0]() is not None and old[0]() is new[0]()


def _find_changes_of_optimizer(
    learn: Learner, pause: Pause, before: Settings, now: Settings
) -> Iterator[Change]:
    "Return the hyperparameters that were set by hand, or a new optimizer."
    if len(before.optimizers) != len(now.optimizers) or not all(
        map(_is_same, before.optimizers, now.optimizers)
    ):
        yield _describe('optimizer', *(_join(o[1] for o in s.optimizers) for s in (before, now)))
        return
    set_by: dict[str, Any] = dict.fromkeys(
        ['lr'], next(iter(_list_rate_setters(learn, pause)), None)
    )
    for cb in list_schedulers(learn, pause):
        set_by |= dict.fromkeys(cb.scheds, cb)
    for name in dict.fromkeys(name for h in (*before.hypers, *now.hypers) for name in h):
        values, before_values = ([h.get(name) for h in s.hypers] for s in (now, before))
        if are_equal(values, before_values) or len(values) != len(before_values):
            continue
        if set_by.get(name) is not None:
            warn_user(
                f'{name} was set to {_format(values)} by hand, and {type(set_by[name]).__name__} sets it again: this '
                'changes nothing. Pass `learn.resume(lr=)` for the rate; change other schedules in `learn.paused.cbs`.'
            )
            continue
        yield _describe(name, _format(before_values), _format(values))


def _describe(what: str, old: str, new: str) -> Change:
    return {'what': what, 'old': old or 'none', 'new': new or 'none'}


def _join(names: Iterable[str]) -> str:
    "Return names as text, at most `MAX_NAMES` of them."
    known = list(dict.fromkeys(names))
    rest = f' and {len(known) - MAX_NAMES} more' if len(known) > MAX_NAMES else ''
    return ', '.join(known[:MAX_NAMES]) + rest


def _format(values: Iterable[Any]) -> str:
    "Return the values of a hyperparameter as text, each one once."
    return _join(f'{v:.6g}' if isinstance(v, float) else str(v) for v in values)


def _describe_loader(dl: Any) -> str:
    bs = batch_size_of(dl)
    return type(dl).__name__ if bs is None else f'{type(dl).__name__} of {bs}'


def _report(learn: Learner, pause: Pause, changes: list[Change]) -> None:
    "Print and record the changes, and what is not exact."
    recorder = recorder_of(learn)
    rows = [{'ba': pause.time.ba, 'ep': pause.time.ep, **c} for c in changes]
    history = pause.state['callbacks'].get('recorder')
    if history is not None and rows:
        history['changes'] = [*history.get('changes', []), *rows]
    if recorder is not None:
        recorder.history.changes += rows
    lines = [describe_change(row) for row in rows]
    lines += [f'not exact: {caveat}' for caveat in list_caveats(learn, pause)]
    for line in lines:
        learn.logger is noop or print(f'{pause.time.ba}ba: {line}')
