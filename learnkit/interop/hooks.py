"""What callbacks of other libraries define, which they meant to have, how to call them, and where their texts go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from inspect import isfunction, signature
from typing import Any
from warnings import warn

from learnkit.core.errors import CallbackError, did_you_mean
from learnkit.engine.attributes import changed_attributes, put_attributes
from learnkit.engine.callback import Callback, defined_on_class
from learnkit.loggers import Logger, log_images, log_params, log_text

__all__ = [
    'own_hooks',
    'check_style',
    'state_of',
    'load_state',
    'parameters_of',
    'takes_any',
    'is_of',
    'hand_on',
]


def is_of(
    cb: object,
    package: str,  # 'composer': that package or a part of it
) -> bool:
    "Tell whether a class of `cb` is defined in a package."
    return any(_within(cls.__module__, package) for cls in type(cb).__mro__)


def own_hooks(
    cb: object,
    names: Iterable[str],
    bases: str = '',  # package whose methods do nothing: they are no hooks
) -> dict[str, Callable[..., Any]]:
    "Return the methods of `cb` under these names, without those of the library's base class."
    found = {name: getattr(cb, name, None) for name in names}
    return {
        name: f
        for name, f in found.items()
        if callable(f) and not (bases and _within(_home(f), bases))
    }


def check_style(
    cb: object,
    names: Iterable[str],  # the hooks looked for
    found: Mapping[str, Any],
    style: str,  # 'Composer'
    maker: str,  # 'from_composer'
) -> None:
    """Raise `CallbackError` for an object without any of the hooks; warn of a method that is nearly one of them."""
    names = list(names)
    # libraries have methods much like those
    likely = [name for name in names if not name.startswith('should_')]
    if isinstance(cb, Callback):
        raise CallbackError(f'{cb!r} is a callback already: it needs no {maker}.')
    if isinstance(cb, type):
        raise CallbackError(f'{cb.__name__} is a class: write {maker}({cb.__name__}(...)).')
    close = {
        name: match[0]
        for name in _own_methods(cb) - set(names)
        if (match := get_close_matches(name, likely, n=1, cutoff=0.85))
        and name.startswith('_') == match[0].startswith('_')
    }
    for name, meant in sorted(close.items()):
        warn(
            f'{type(cb).__name__}.{name} is no hook of a {style} callback and will not run. Did you mean `{meant}`?',
            stacklevel=4,
        )
    if not found and not close:
        methods = sorted(_own_methods(cb))
        hint = next((h for m in methods if (h := did_you_mean(m, names))), '')
        raise CallbackError(
            f'{cb!r} ({type(cb).__name__}) is no {style} callback: it has none of the hooks '
            f'{", ".join(names)}.{hint}'
        )


def state_of(cb: Any) -> Any:
    "Return the state of a foreign callback: what it says itself, or else what has changed in it and is data."
    own = _own_state(cb, 'state_dict')
    return {'attributes': changed_attributes(cb)} if own is None else own()


def load_state(cb: Any, sd: Any) -> None:
    "Hand a foreign callback what `state_of` returned."
    own = _own_state(cb, 'load_state_dict')
    if own is None:
        put_attributes(cb, sd['attributes'] or {})
    elif sd is not None:
        own(sd)


def _own_state(cb: Any, name: str) -> Any:
    "Return a method of a callback that its library's base class does not only have for others to define."
    f = getattr(cb, name, None)
    return None if f is None or _within(_home(f), 'composer.core') else f


def parameters_of(f: Callable[..., Any]) -> set[str]:
    "Return the names of the parameters that `f` takes as keywords."
    return {
        p.name
        for p in signature(f).parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }


def takes_any(f: Callable[..., Any]) -> bool:
    "Tell whether `f` takes any keyword."
    return any(p.kind is p.VAR_KEYWORD for p in signature(f).parameters.values())


def hand_on(learn: Any, method: str, *content: Any) -> None:
    "Give parameters, a text or images to learnkit's loggers, and to what else has this method of their protocol."
    send: dict[str, Callable[..., None]] = {
        'log_params': log_params,
        'log_text': log_text,
        'log_images': log_images,
    }
    send[method](learn, *content)
    at = () if method == 'log_params' else (learn.time.ba,)
    for cb in learn.cbs:
        if not isinstance(cb, Logger) and defined_on_class(cb, method):
            getattr(cb, method)(*at, *content)


def _own_methods(cb: object) -> set[str]:
    return {
        name
        for cls in type(cb).__mro__
        if cls is not object
        for name, f in vars(cls).items()
        if isfunction(f) and not name.startswith('__')
    }


def _home(f: Callable[..., Any]) -> str:
    return getattr(f, '__module__', '') or ''


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(f'{package}.')
