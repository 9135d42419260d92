# SPDX-License-Identifier: Apache-2.0
"""Continue a paused fit, with what was changed meanwhile; each change is printed and recorded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from fastcore.basics import noop

from learnkit.callbacks.recorder import recorder_of
from learnkit.callbacks.schedule import ParamScheduler
from learnkit.checkpoint.pause import (
    Pause,
    list_caveats,
    make_state,
    read_options,
    read_settings,
)
from learnkit.core.contexts import replacing_yield
from learnkit.core.errors import FitError, OptionError
from learnkit.core.model import name_of
from learnkit.core.validation import check_count, warn_user
from learnkit.data.dataloaders import batch_size_of
from learnkit.engine.dispatch import contains_object
from learnkit.engine.optimizer import cover_params
from learnkit.engine.pause import parse_pause

if TYPE_CHECKING:
    from learnkit.learner import Learner

Change = dict[str, Any]  # what, old, new


def resume(
    learn: Learner,
    *,
    lr: Any,
    lr_scale: float | None,
    n_epoch: int | None,
    stretch: bool,
    pause_at: Any,
) -> None:
    "Continue the paused fit; see `Learner.resume`."
    pause = learn.run.pause
    if learn.run.depth:
        raise FitError('learn.resume(): a run is under way.')
    if pause is None:
        why = learn.run.not_paused
        reason = f'The last fit cannot continue: {why}.' if why else 'no fit is paused.'
        raise FitError(
            f'learn.resume(): {reason} `fit(..., resume=True)` continues from a checkpoint of a folder.'
        )
    if lr is not None and lr_scale is not None:
        raise OptionError('learn.resume(lr=, lr_scale=): give one of the two.')
    parse_pause(learn, pause_at)
    _check_length(pause, n_epoch)
    _renew_classes([*learn.cbs, *pause.call.cbs])
    cover_params(learn)
    changes = [
        *_change_rates(learn, pause, lr, lr_scale),
        *_change_length(learn, pause, n_epoch, stretch),
        *_find_changes(learn, pause),
    ]
    pause.options = read_options(learn)
    state = make_state(learn, pause)
    _report(learn, pause, changes)
    if pause.point == 'batch' and state is not None and state.open_pass is None:
        warn_user(
            f'The open pass over the training loader ({type(pause.open_pass.dl).__name__}) has ended: its first '
            f'{pause.n_drawn} batches are skipped in a new one, as by a resume from a checkpoint.'
        )
    call = pause.call
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


# -- changes by the arguments -------------------------------------------------------------------------


def list_schedulers(learn: Learner, pause: Pause) -> list[ParamScheduler]:
    "Return the schedules of a paused fit."
    return [cb for cb in [*learn.cbs, *pause.call.cbs] if isinstance(cb, ParamScheduler)]


def _read_rates(learn: Learner) -> list[float]:
    return [float(h['lr']) for h in learn.opt.hypers]


def _change_rates(
    learn: Learner, pause: Pause, lr: Any, lr_scale: float | None
) -> Iterator[Change]:
    "Set the rates of the rest of the fit."
    if lr is None and lr_scale is None:
        return
    schedulers = [cb for cb in list_schedulers(learn, pause) if 'lr' in cb.scheds]
    now = _read_rates(learn)
    peaks = now
    if schedulers and pause.call.lr is not None:
        learn.opt.set_hypers(lr=pause.call.lr)
        peaks = _read_rates(learn)
    if lr_scale is not None:
        new = [rate * lr_scale for rate in peaks]
    else:
        learn.opt.set_hypers(lr=lr)
        new = _read_rates(learn)
    factors = [b / a if a else 1.0 for a, b in zip(peaks, new, strict=True)]
    scale: Any = factors[0] if len(set(factors)) == 1 else np.array(factors)
    for cb in schedulers:
        cb.change(scale)
    learn.opt.set_hypers(lr=[a * f for a, f in zip(now, factors, strict=True)])
    if pause.call.lr is not None:
        pause.call.lr = new if len(new) > 1 else new[0]
    pause.settings.hypers = [dict(h) for h in learn.opt.hypers]
    yield {'what': 'lr', 'old': _format_rates(peaks), 'new': _format_rates(new)}


def _format_rates(rates: list[float]) -> str:
    return ', '.join(f'{rate:.6g}' for rate in dict.fromkeys(rates))


def _change_length(
    learn: Learner, pause: Pause, n_epoch: int | None, stretch: bool
) -> Iterator[Change]:
    "Set the number of epochs of the fit."
    old = pause.call.n_epoch
    if n_epoch is None or n_epoch == old:
        return
    if not stretch:
        for cb in list_schedulers(learn, pause):
            cb.change(share=n_epoch / old)
    pause.call.n_epoch = n_epoch
    yield {'what': 'n_epoch', 'old': str(old), 'new': str(n_epoch)}


# -- other changes ------------------------------------------------------------------------------------


def _find_changes(learn: Learner, pause: Pause) -> Iterator[Change]:
    "Return what was changed in the Learner since the pause."
    before = pause.settings
    now = read_settings(learn, pause.call)
    now.cbs += pause.call.cbs
    if now.loss_func is not before.loss_func:
        yield _describe('loss', name_of(before.loss_func), name_of(now.loss_func))
    if list(map(id, now.metrics)) != list(map(id, before.metrics)):
        yield _describe('metrics', *(_join(m.name for m in s.metrics) for s in (before, now)))
    for sign, cbs, others in (('-', before.cbs, now.cbs), ('+', now.cbs, before.cbs)):
        for cb in cbs:
            if not contains_object(others, cb):
                yield _describe('callback', *sorted(['', repr(cb)], reverse=sign == '-'))
    if now.frozen != before.frozen:
        yield _describe('frozen', _join(before.frozen), _join(now.frozen))
    if now.train is not before.train:
        yield _describe('train loader', *(_describe_loader(s.train) for s in (before, now)))
    for name in {name for h in (*before.hypers, *now.hypers) for name in h}:
        old, new = ([h.get(name) for h in s.hypers] for s in (before, now))
        if old != new and len(old) == len(new):
            yield _describe(name, _join(map(str, old)), _join(map(str, new)))


def _describe(what: str, old: str | None, new: str | None) -> Change:
    return {'what': what, 'old': old or 'none', 'new': new or 'none'}


def _join(names: Any) -> str:
    return ', '.join(dict.fromkeys(names))


def _describe_loader(dl: Any) -> str:
    bs = batch_size_of(dl)
    return type(dl).__name__ if bs is None else f'{type(dl).__name__} of {bs}'


def _report(learn: Learner, pause: Pause, changes: list[Change]) -> None:
    "Print and record the changes, and what is not exact."
    recorder = recorder_of(learn)
    lines = [f'{c["what"]} {c["old"]} -> {c["new"]}' for c in changes]
    rows = [{'ba': pause.time.ba, **c} for c in changes]
    history = pause.state['callbacks'].get('recorder')
    if history is not None and rows:
        history['changes'] = [*history.get('changes', []), *rows]
    if recorder is not None:
        recorder.history.changes += rows
    lines += [f'not exact: {caveat}' for caveat in list_caveats(learn, pause)]
    for line in lines:
        learn.logger is noop or print(f'{pause.time.ba}ba: {line}')
