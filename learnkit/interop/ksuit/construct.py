# SPDX-License-Identifier: Apache-2.0
"""Construct ksuit callbacks from their classes, with the services that their constructors accept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, get_type_hints

from learnkit.interop.common.hooks import parameters_of, takes_any


class Options(SimpleNamespace):
    "Configuration of a callback; a missing option is None."

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(name)


def extend(o: Any, attributes: Mapping[str, Callable[[Any], Any]]) -> Any:
    """Return a view of an object with additional attributes, which are computed when they are read.

    The view is an instance of a subclass of the object's class and shares the object's attributes.
    An attribute of the object takes precedence unless it is None.

    >>> class Model: n = 1
    >>> view = extend(Model(), {'n': lambda model: 2, 'twice': lambda model: 2 * model.n})
    >>> view.n, view.twice, isinstance(view, Model)
    (1, 2, True)
    """
    missing = [name for name in attributes if getattr(o, name, None) is None]
    added = {name: property(attributes[name]) for name in missing}
    cls = type(type(o).__name__, (type(o),), added)
    view: Any = object.__new__(cls)
    object.__setattr__(view, '__dict__', vars(o))
    return view


def construct(
    cls: type,
    services: Mapping[str, Any],  # trainer, model, tracker and so on, by parameter name
    config: Mapping[str, Any],  # options of the callback
) -> Any:
    """Construct a callback with its options and with the services that its constructor accepts.

    Constructors with `**kwargs` are assumed to pass keywords on to the bases of the class. For a
    constructor with a parameter `callback_config`, the options that are not parameters are passed
    as an instance of the annotated class, or, without an annotation, as an object whose missing
    options are None.

    >>> class Best:
    ...     def __init__(self, callback_config, writer, **kwargs):
    ...         self.key, self.name, self.writer = callback_config.key, callback_config.name, writer
    >>> best = construct(Best, {'writer': 'log', 'model': None}, {'key': 'valid_loss'})
    >>> best.key, best.name, best.writer
    ('valid_loss', None, 'log')
    """
    accepted = {name for init in _find_constructors(cls) for name in parameters_of(init)}
    arguments = {name: value for name, value in services.items() if name in accepted}
    if 'callback_config' in accepted and 'callback_config' not in config:
        own = {name: value for name, value in config.items() if name in accepted}
        options = {name: value for name, value in config.items() if name not in accepted}
        config = {**own, 'callback_config': find_config_class(cls)(**options)}
    return cls(**{**arguments, **config})


def _find_constructors(cls: type) -> list[Callable[..., Any]]:
    "Return the constructors of a class and its bases, up to the first one that does not accept any keyword."
    found = []
    for base in cls.__mro__:
        init = vars(base).get('__init__')
        if init is None or base is object:
            continue
        found.append(init)
        if not takes_any(init):
            break
    return found


def find_config_class(cls: type) -> Callable[..., Any]:
    "Return the annotated class of `callback_config`, or `Options` if no annotation can be resolved."
    for init in _find_constructors(cls):
        try:
            annotated = get_type_hints(init).get('callback_config')
        except NameError:  # imported for type checkers only
            continue
        if isinstance(annotated, type) and annotated is not Any:
            return annotated
    return Options
