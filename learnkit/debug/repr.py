# SPDX-License-Identifier: Apache-2.0
"""Text and HTML representations of a Learner, made without drawing a batch, moving a tensor or waiting for a device."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch.nn.parameter import is_lazy

from learnkit.callbacks.recorder import recorder_of
from learnkit.core.html import definitions, format_cell, safe_call
from learnkit.core.model import name_of
from learnkit.core.time import format_time
from learnkit.data.dataloaders import describe_loader, evaluation_loaders

if TYPE_CHECKING:
    from learnkit.learner import Learner


def learner_text(learn: Learner) -> str:
    "Return a Learner's model, loss, validation loaders and callbacks on one line."
    model, loss = (safe_call(partial(f, learn)) for f in (_get_model_name, _get_loss_name))
    valid = safe_call(lambda: [name for name, _ in evaluation_loaders(learn.dls)])
    cbs = safe_call(lambda: ', '.join(map(repr, learn.cbs)))
    pause = _find_pause(learn)
    paused = '' if pause is None else f', paused {pause.describe()}'
    return f'Learner({model}, loss_func={loss}, valid={valid}, cbs=[{cbs}]{paused})'


def learner_html(learn: Learner) -> str:
    "Return the parts of a Learner and its training progress, as an HTML table."
    entries = {
        'model': _describe_model,
        'data': _list_loaders,
        'loss': _get_loss_name,
        'optimizer': _describe_optimizer,
        'metrics': _list_metrics,
        'callbacks': _list_callbacks,
        'trained': _describe_progress,
        'last epoch': _describe_last_epoch,
    }
    if _find_pause(learn) is not None:
        entries['paused'] = _describe_pause
    return definitions(
        {name: partial(f, learn) for name, f in entries.items()}, type(learn).__name__
    )


def _find_pause(learn: Learner) -> Any:
    "Return the pause of a Learner, which may be half made."
    run = vars(learn).get('_run')
    return None if run is None else run.pause


def _describe_pause(learn: Learner) -> str:
    return f'{_find_pause(learn).describe()}: `learn.resume()` continues there'


def _get_model_name(learn: Learner) -> str:
    return type(learn.model).__name__


def _get_loss_name(learn: Learner) -> str | None:
    return name_of(learn.loss_func) if learn.loss_func else None


def _describe_model(learn: Learner) -> str:
    params = list(learn.model.parameters())
    known = [p for p in params if not is_lazy(p)]
    n = sum(p.numel() for p in known)
    n_trained = sum(p.numel() for p in known if p.requires_grad)
    description = f'{_get_model_name(learn)}, {n:,} parameters'
    if n_trained != n:
        description += f', {n_trained:,} of them trained'
    devices = ' and '.join(dict.fromkeys(str(p.device) for p in params))
    if devices:
        description += f', on {devices}'
    return description


def _list_loaders(learn: Learner) -> list[str]:
    named = [('train', learn.dls.train), *evaluation_loaders(learn.dls)]
    return [f'{name}: {describe_loader(dl)}' for name, dl in named]


def _describe_optimizer(learn: Learner) -> str:
    "Describe the optimizer and its learning rates; before it is made, describe the `opt_func`."
    opt = learn.opt
    name = name_of(getattr(learn.opt_func, 'func', learn.opt_func))
    if opt is None:
        return f'{name}, lr {learn.lr}, not made yet'
    classes = ' and '.join(type(o).__name__ for o in opt.optimizers.values())
    rates = ', '.join(dict.fromkeys(f'{float(h["lr"]):.3g}' for h in opt.hypers if 'lr' in h))
    description = name if classes == name else f'{name} ({classes})'
    description += f', lr {rates}'
    n = len(opt.hypers)
    if n > 1:
        description += f', {n} param groups'
    return description


def _list_metrics(learn: Learner) -> str:
    return ', '.join(m.name for m in learn.metrics) or 'none'


def _list_callbacks(learn: Learner) -> list[str]:
    return [repr(cb) for cb in learn.parts.callbacks.list_ordered()]


def _describe_progress(learn: Learner) -> str:
    now = learn.time
    if not now.ba:
        return 'not yet'
    counts = [
        format_time(getattr(now, unit), unit)
        for unit in ('ep', 'ba', 'st', 'sp', 'tok')
        if getattr(now, unit)
    ]
    return f'{", ".join(counts)} in {format_time(now.sec, "sec")}'


def _describe_last_epoch(learn: Learner) -> str:
    recorder = recorder_of(learn)
    row = dict(recorder.history[-1]) if recorder is not None and recorder.history else {}
    cells = [
        f'{name} {format_cell(value)}'
        for name, value in row.items()
        if name not in ('fit', 'time') and value is not None
    ]
    return ', '.join(cells) or 'none'
