"""What a Learner says of itself: a line of text, and a table in a notebook. Nothing is drawn, moved or waited for."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.nn.parameter import is_lazy

from learnkit.callbacks.recorder import recorder_of
from learnkit.core.html import definitions, format_cell, safe_call
from learnkit.core.model import name_of
from learnkit.core.time import in_words
from learnkit.data.checks import describe_loader
from learnkit.data.dataloaders import evaluation_loaders

__all__ = ['learner_html', 'learner_text']


def learner_text(learn: Any) -> str:
    "Return a Learner's model, loss, validation loaders and callbacks on one line."
    model, loss = (safe_call(partial(f, learn)) for f in (_model_name, _loss))
    valid = safe_call(lambda: [name for name, _ in evaluation_loaders(learn.dls)])
    return f'Learner({model}, loss_func={loss}, valid={valid}, cbs=[{", ".join(_listed(learn, "cbs"))}])'


def learner_html(learn: Any) -> str:
    "Return what a Learner is made of and how far it has come, as a table."
    entries = {
        'model': _model,
        'data': _data,
        'loss': _loss,
        'optimizer': _optimizer,
        'metrics': _metrics,
        'callbacks': _callbacks,
        'trained': _trained,
        'last epoch': _last_epoch,
    }
    return definitions(
        {name: partial(f, learn) for name, f in entries.items()}, type(learn).__name__
    )


def _model_name(learn: Any) -> str:
    return type(learn.model).__name__


def _loss(learn: Any) -> str | None:
    return name_of(learn.loss_func) if learn.loss_func else None


def _model(learn: Any) -> str:
    params = list(learn.model.parameters())
    known = [p for p in params if not is_lazy(p)]
    n, n_trained = (
        sum(p.numel() for p in ps) for ps in (known, [p for p in known if p.requires_grad])
    )
    count = f'{n:,} parameters' + (f', {n_trained:,} of them trained' if n_trained != n else '')
    devices = ' and '.join(dict.fromkeys(str(p.device) for p in params))
    return f'{_model_name(learn)}, {count}{" so far" * (len(known) < len(params))}{f", on {devices}" * bool(devices)}'


def _data(learn: Any) -> list[str]:
    named = [('train', learn.dls.train), *evaluation_loaders(learn.dls)]
    return [f'{name}: {describe_loader(dl)}' for name, dl in named]


def _optimizer(learn: Any) -> str:
    "Say what the optimizer is, or will be, with its rates."
    opt, asked = learn.opt, name_of(getattr(learn.opt_func, 'func', learn.opt_func))
    if opt is None:
        return f'{asked}, lr {learn.lr}, not made yet'
    made = ' and '.join(type(o).__name__ for o in opt.optimizers.values())
    rates = ', '.join(dict.fromkeys(f'{float(h["lr"]):.3g}' for h in opt.hypers if 'lr' in h))
    n = len(opt.hypers)
    return f'{asked}{f" ({made})" * (made != asked)}, lr {rates}' + (
        f', {n} param groups' if n > 1 else ''
    )


def _metrics(learn: Any) -> str:
    return ', '.join(m.name for m in learn.metrics) or 'none'


def _callbacks(learn: Any) -> list[str]:
    return _listed(learn.callbacks, 'ordered')


def _listed(o: Any, name: str) -> list[str]:
    "Return the looks of the callbacks, each for itself."
    found = safe_call(lambda: f() if callable(f := getattr(o, name)) else list(f))
    return [safe_call(partial(repr, cb)) for cb in found] if isinstance(found, list) else [found]


def _trained(learn: Any) -> str:
    now = learn.time
    if not now.ba:
        return 'not yet'
    counts = [
        in_words(getattr(now, unit), unit)
        for unit in ('ep', 'ba', 'st', 'sp', 'tok')
        if getattr(now, unit)
    ]
    return f'{", ".join(counts)} in {in_words(now.sec, "sec")}'


def _last_epoch(learn: Any) -> str:
    recorder = recorder_of(learn)
    row = dict(recorder.history[-1]) if recorder is not None and recorder.history else {}
    return (
        ', '.join(
            f'{name} {format_cell(value)}'
            for name, value in row.items()
            if name not in ('fit', 'time') and value is not None
        )
        or 'none'
    )
