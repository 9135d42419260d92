# SPDX-License-Identifier: Apache-2.0
"""Base of the adapters that run a callback of another library, and the state of such a callback."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from fastcore.basics import camel2snake
from typing_extensions import override

from learnkit.core.validation import warn_user
from learnkit.engine.callback import Callback
from learnkit.engine.callback_state import (
    collect_attributes,
    decode,
    encode,
    note_attributes,
    put_attributes,
    replaced_attributes,
)
from learnkit.interop.common.hooks import LIGHTNING_BASES, NOT_PLAIN, check_style, is_defined_in

if TYPE_CHECKING:
    from learnkit.learner import Learner

# key of a callback's attributes in its state, without a `state_dict` or if it returned None
ATTRIBUTES_KEY = '__attributes__'
C = TypeVar('C', bound=Callback)


class CallbackAdapter(Callback):
    """Base of the callbacks that hold a callback of another library, `wrapped`.

    A subclass calls `wrap` in its constructor. It handles events, or leaves that to an object that all
    adapters of its library share. Checkpointed: the state of the wrapped callback.

    >>> class FromBell(CallbackAdapter):
    ...     library, style = 'bell', 'Bell'
    ...     def __init__(self, cb): self.wrap(cb, ['ring'], {'ring': cb.ring})
    ...     def after_epoch(self): self.wrapped.ring()
    >>> class SchoolBell:
    ...     def ring(self): print('ring')
    >>> cb = FromBell(SchoolBell())
    >>> cb, cb.name
    (from_bell(SchoolBell), 'bell_school_bell')
    """

    library = ''  # name of the library, as in that of its function: 'keras' for `from_keras`
    style = ''  # name of the library in messages
    saved_as = 'callback'  # key of the wrapped callback's state in the state of the adapter
    remove_on_find = True
    wrapped: Any = None

    def wrap(
        self,
        cb: Any,  # the callback
        names: Iterable[str],  # names of all hooks of the library
        found: Mapping[str, Any],  # hooks of the callback
    ) -> None:
        "Hold a callback; raise `CallbackError` if it is not of the library."
        check_style(cb, names, found, self.style, f'from_{self.library}')
        self.hold(cb)

    def hold(self, cb: Any) -> None:
        "Hold a callback, of which a checkpoint keeps what changes from now on."
        note_attributes(cb)
        self.wrapped = cb

    @property
    def wrapped_class(self) -> type:
        "Class of the wrapped callback."
        return type(self.wrapped)

    @property
    @override
    def name(self) -> str:
        return f'{self.library}_{camel2snake(self.wrapped_class.__name__)}'

    def __repr__(self) -> str:
        return f'from_{self.library}({self.wrapped_class.__name__})'

    @override
    def state_dict(self) -> dict[str, Any]:
        "Return the state of the wrapped callback."
        return {self.saved_as: state_of(self.wrapped)}

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the state of the wrapped callback."
        load_state(self.wrapped, sd[self.saved_as])


def list_adapters(
    learn: Learner,
    library: str,  # as in `CallbackAdapter.library`
) -> list[Any]:
    "Return the adapters of a library's callbacks in a Learner, in the order of adding."
    return [cb for cb in learn.cbs if isinstance(cb, CallbackAdapter) and cb.library == library]


def find_or_add(learn: Learner, cls: type[C]) -> C:
    "Return the Learner's callback of a class, which is made and added if it is missing."
    for cb in learn.cbs:
        if isinstance(cb, cls):
            return cb
    added = cls()
    learn.add_cbs(added)
    return added


# -- state of a callback of another library --------------------------------------------------------


def state_of(cb: Any) -> Any:
    """Return the state of a callback of another library: its `state_dict`, or else its attributes with plain data.

    The attributes are also saved if `state_dict` returns None, as in a base class without state. Warns of
    changed attributes that are not plain data.
    """
    get_state = _find_state_method(cb, 'state_dict')
    state = None if get_state is None else get_state()
    if state is not None:
        return _encode_state(state)
    for name, kind in replaced_attributes(cb).items():
        warn_user(
            f'{type(cb).__name__} has set `{name}` ({kind}), which is not saved in checkpoints: define '
            '`state_dict` and `load_state_dict` in it.'
        )
    return {ATTRIBUTES_KEY: collect_attributes(cb) or {}}


def load_state(
    cb: Any,
    sd: Any,  # result of `state_of`
) -> None:
    "Load the result of `state_of` into a callback."
    set_state = _find_state_method(cb, 'load_state_dict')
    if isinstance(sd, Mapping) and ATTRIBUTES_KEY in sd:
        put_attributes(cb, sd[ATTRIBUTES_KEY])
    elif set_state is not None:
        set_state(decode(sd, cb))


def _encode_state(state: Any) -> Any:
    "Encode a state as plain data, including times; return a state that holds other objects unchanged."
    try:
        return encode(state)
    except NOT_PLAIN:
        return state


def _find_state_method(cb: Any, name: str) -> Any:
    "Return a method of a callback, or None if it is missing or is the empty method of a library's base class."
    f = getattr(cb, name, None)
    return None if f is None or is_defined_in(f, ('composer.core', *LIGHTNING_BASES)) else f
