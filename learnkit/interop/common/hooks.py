# SPDX-License-Identifier: Apache-2.0
"""Helpers for callbacks of other libraries: find and check hooks, pass logged content to loggers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

from learnkit.callbacks.accumulation import GradientAccumulation
from learnkit.callbacks.recorder import recorder_of
from learnkit.core.batch import short_repr
from learnkit.core.errors import CallbackError, OptionError
from learnkit.core.kinds import explain_kind, find_kind
from learnkit.engine.callback import Callback, defined_on_class
from learnkit.engine.callback_state import encode
from learnkit.loggers import Logger, log_images, log_params, log_text

if TYPE_CHECKING:
    from learnkit.learner import Learner

# errors for values that are more than data
NOT_PLAIN = (OptionError, RecursionError, TypeError, ValueError)
# packages of Lightning's base classes, under both of its names
LIGHTNING_BASES = tuple(
    f'{package}.{module}'
    for package in ('lightning.pytorch', 'pytorch_lightning')
    for module in ('core', 'callbacks.callback')
)


def is_of(
    cb: object,
    package: str,  # name of a package, such as 'composer'
) -> bool:
    "Return True if the class of `cb` or one of its bases is defined in a package or in its submodules."
    return any(is_defined_in(cls, package) for cls in type(cb).__mro__)


def own_hooks(
    cb: object,
    names: Iterable[str],
    bases: str | tuple[str, ...] = (),  # packages of base classes, whose methods are not hooks
) -> dict[str, Callable[..., Any]]:
    "Return the methods of `cb` with these names, by name, except methods of the library's base classes."
    hooks = {}
    for name in names:
        f = getattr(cb, name, None)
        if callable(f) and not is_defined_in(f, bases):
            hooks[name] = f
    return hooks


def check_style(
    cb: object,
    names: Iterable[str],  # names of all hooks
    found: Mapping[str, Any],  # hooks of the callback
    style: str,  # name of the library, such as 'Composer'
    maker: str,  # name of the function, such as 'from_composer'
) -> None:
    """Raise `CallbackError` for an object that is not a callback of a library.

    An instance of the library's base class may be without hooks.
    """
    check_kind(cb, style, maker)
    if isinstance(cb, type):
        raise CallbackError(f'{cb.__name__} is a class: write {maker}({cb.__name__}(...)).')
    if not found and find_kind(cb) is None:
        few = ', '.join(list(names)[:3])
        raise CallbackError(
            f'{short_repr(cb)} ({type(cb).__name__}) is not a callback of {style}: it has no method such as {few}.'
        )


def check_kind(cb: object, style: str, maker: str) -> None:
    "Raise `CallbackError` for an object of a known kind, such as a model, or a callback of another library."
    if isinstance(cb, Callback):
        raise CallbackError(f'{cb!r} is a callback already: it needs no {maker}.')
    kind = find_kind(cb)
    if kind is not None and kind.maker != maker:
        raise CallbackError(explain_kind(cb, f'a callback of {style}'))


def parameters_of(f: Callable[..., Any]) -> set[str]:
    "Return the names of the parameters of `f` that can be passed as keywords."
    return {
        p.name
        for p in signature(f).parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }


def takes_any(f: Callable[..., Any]) -> bool:
    "Return True if `f` accepts arbitrary keyword arguments."
    return any(p.kind is p.VAR_KEYWORD for p in signature(f).parameters.values())


def takes_several(f: Callable[..., Any]) -> bool:
    "Return True if `f` accepts more than one positional argument."
    kinds = [p.kind for p in signature(f).parameters.values()]
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return Parameter.VAR_POSITIONAL in kinds or sum(kind in positional for kind in kinds) > 1


def keep_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    "Return the entries that are plain data, encoded for a checkpoint."
    plain = {}
    for name, value in values.items():
        with suppress(*NOT_PLAIN):
            plain[name] = encode(value)
    return plain


def batches_per_step(
    learn: Learner,
    bs: int | None,  # samples of a batch; None: unknown
) -> int | None:
    "Return the number of batches per optimizer step, or None if it is unknown."
    accumulations = [cb for cb in learn.cbs if isinstance(cb, GradientAccumulation)]
    if any(cb.batches for cb in accumulations):
        return max(cb.batches or 1 for cb in accumulations)
    n_samples = max((cb.n_acc for cb in accumulations), default=1)
    if n_samples == 1:
        return 1
    return -(-n_samples // bs) if bs else None


class StandIn:
    """Object with the fields that a Learner has of another library's object; an error names any other.

    >>> StandIn('state', 'Read `learn.time`.', epoch=1).step
    Traceback (most recent call last):
        ...
    AttributeError: `state.step` does not exist in a Learner, only epoch. Read `learn.time`.
    """

    def __init__(self, _name: str, _advice: str = '', **fields: Any) -> None:
        self.__dict__.update(fields, _name=_name, _advice=_advice)

    def __getattr__(self, name: str) -> Any:
        own = vars(self)
        if name.startswith('__') or '_name' not in own:
            raise AttributeError(name)
        fields = ', '.join(field for field in own if not field.startswith('_'))
        raise AttributeError(
            f'`{own["_name"]}.{name}` does not exist in a Learner, only {fields}. {own["_advice"]}'
        )


def collect_measured(learn: Learner) -> dict[str, Any]:
    "Return what the last evaluation has measured, by column; nothing without a Recorder."
    recorder = recorder_of(learn)
    measured = {} if recorder is None else recorder.measured
    return {name: value for name, value in measured.items() if value is not None}


def collect_epoch_values(learn: Learner) -> dict[str, Any]:
    "Return the values of the current epoch by column; nothing without a Recorder."
    recorder = recorder_of(learn)
    return {} if recorder is None else recorder.epoch_metrics.values


def send_to_loggers(learn: Learner, method: str, *content: Any) -> None:
    "Pass parameters, a string or images to learnkit's loggers, and to other callbacks with this method."
    send: dict[str, Callable[..., None]] = {
        'log_params': log_params,
        'log_text': log_text,
        'log_images': log_images,
    }
    send[method](learn, *content)
    step = () if method == 'log_params' else (learn.time.ba,)
    for cb in learn.cbs:
        if not isinstance(cb, Logger) and defined_on_class(cb, method):
            getattr(cb, method)(*step, *content)


def is_defined_in(o: Any, packages: str | tuple[str, ...]) -> bool:
    "Return True if a class or function is defined in a package, or in one of several, or in its submodules."
    module = getattr(o, '__module__', '') or ''
    names = (packages,) if isinstance(packages, str) else packages
    return any(module == name or module.startswith(f'{name}.') for name in names)
