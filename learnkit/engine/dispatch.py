# SPDX-License-Identifier: Apache-2.0
"""Dispatch of events to the handlers of callbacks, in the order in which the callbacks run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from fastcore.foundation import L

from learnkit.core.batch import short_repr
from learnkit.core.errors import CallbackError, CancelException, OrderError
from learnkit.core.kinds import explain_kind
from learnkit.core.time import Time
from learnkit.core.validation import warn_user
from learnkit.engine.callback import (
    SET_BY_BASE,
    Callback,
    check_handlers,
    defined_on_class,
)
from learnkit.engine.callback_state import keeps_attributes, note_attributes
from learnkit.engine.events import (
    CONTEXTS,
    EVENTS,
    INNER_EVENTS,
    LEVELS,
    METHODS,
    WILL_STEP,
    canonical_event,
)
from learnkit.engine.traits import own_attribute, trait_of

if TYPE_CHECKING:
    from learnkit.comm.ranks import Comm
    from learnkit.learner import Learner

_HANDLED = frozenset([*EVENTS, *METHODS])
_DEFAULT_NAMES = 'TrainEvalCallback', 'Recorder', 'ProgressCallback'
_CANCEL_EXCEPTIONS = {level.exception.__name__: level.exception for level in LEVELS.values()}
# attributes of fastai's callbacks
_FASTAI_PROTOCOL = ('order', 'learn', 'run', 'run_train', 'run_valid', 'name')

Entry = tuple[Callable[[], Any], list[Any], Any]  # handler, its switch (empty: off), its callback
_PLAIN = (bool, int, float, str, tuple, list, Path, Time)  # types of options that are compared


class CallbackSet:
    """Callbacks of one Learner, in the order of adding, with their switches, their keys and the handler tables.

    A switch is a list that holds one element while its callback is on. Emptying the list acts at once, also on an
    event that is being dispatched, and the truth value of a list is fast to test.
    """

    def __init__(self, learn: Learner) -> None:
        self.learn = learn
        self.items: list[Any] = []
        self.switches: dict[int, list[Any]] = {}
        # callbacks that are off, whatever `run` is, during an evaluation that they started
        self.held: list[Any] = []
        self.keys: dict[int, str] = {}
        # indexed by `learn.training`
        self.plain_tables = HandlerTable(self, False), HandlerTable(self, True)
        self.tables: tuple[HandlerTable, ...] = self.plain_tables  # tables that the loop uses
        self.more_tables: list[HandlerTable] = []  # tables that may be in `tables`
        # callback and event of the handler that runs, and the entry of the outer one
        self.running: tuple[Any, str, Any] | None = None
        # callbacks with their functions of the current run, by id of the callback and event
        self.run_handlers: dict[tuple[int, str], tuple[Any, Callable[[], Any]]] = {}

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __contains__(self, cb: object) -> bool:
        return id(cb) in self.switches

    def refresh(
        self,
        classes: bool = False,  # forget what is known of classes, which may have new handlers
    ) -> None:
        "Clear the handler tables. The handlers of an event are collected again on its next access."
        if classes:
            list_handled.cache_clear()
        for table in (*self.plain_tables, *self.more_tables):
            table.clear()

    def changed(self, cb: Any, name: str) -> None:
        "Update switches and tables after a change of `run`, `order`, `run_train`, `run_valid` or a handler of `cb`."
        if cb not in self:
            return
        if name == 'run':
            self._switch(cb, bool(cb.run))
        else:
            self.refresh()

    def _switch(self, cb: Any, on: bool) -> None:
        is_held = contains_object(self.held, cb)
        self.switches[id(cb)][:] = [True] if on and not is_held else []

    def hold(self, cbs: Iterable[Any]) -> list[Any]:
        "Switch callbacks off until `release`, and return the callbacks that were not held before."
        new = [cb for cb in cbs if not contains_object(self.held, cb)]
        self.held += new
        for cb in new:
            if cb in self:
                self._switch(cb, False)
        return new

    def release(self, cbs: list[Any]) -> None:
        "Switch callbacks that `hold` returned on again, if their `run` is true."
        self.held = [cb for cb in self.held if not contains_object(cbs, cb)]
        for cb in cbs:
            if cb in self:
                self._switch(cb, bool(cb.run))

    def insert(self, cb: Any, at: int | None = None, switch: list[Any] | None = None) -> None:
        """Insert a callback that `check_new` accepted at an index.

        With its earlier switch, the callback still gets an event that is being dispatched.
        """
        self.keys[id(cb)] = self._make_unique_key(cb)
        # added before the item, so that after Ctrl-C here `discard` works
        self.switches[id(cb)] = [] if switch is None else switch
        self._switch(cb, bool(cb.run))
        self.items.insert(len(self.items) if at is None else at, cb)
        self.refresh()

    def discard(self, cb: Any) -> None:
        "Remove a callback, which gets no further event, including the event that is being dispatched."
        self._switch(cb, False)
        self.items[:] = [o for o in self.items if o is not cb]
        self.keys.pop(id(cb), None)
        del self.switches[id(cb)]
        self.refresh()

    def _make_unique_key(self, cb: Any) -> str:
        taken = set(self.keys.values())
        key = unique = getattr(cb, 'state_key', None) or cb.name
        n = 1
        while unique in taken:
            n += 1
            unique = f'{key}_{n}'
        return unique

    def check_new(
        self,
        cbs: list[Any],  # callbacks to be added
        without: Iterable[Any] = (),  # callbacks to be removed
    ) -> None:
        "Check the handlers of new callbacks; raise `OrderError` for an impossible order."
        removed = {id(cb) for cb in without}
        for cb in cbs:
            check_handlers(cb)
        sort_callbacks([*(cb for cb in self.items if id(cb) not in removed), *cbs])

    def add_run_handler(self, cb: Any, event: str, handler: Callable[[], Any]) -> None:
        """Call a function at an event of training batches, in the turn of a callback, until the outermost run ends.

        It replaces an earlier function of the same callback at this event.
        """
        self.run_handlers[id(cb), event] = cb, handler
        self.refresh()

    def check_once(
        self,
        cb: Any,
        event: str,
        check: Callable[[], Any],  # returns False if the batch has decided nothing
    ) -> None:
        "Call a check at an event of the first training batch that decides it; later batches have no cost."

        def call() -> None:
            if check() is not False:
                self.run_handlers.pop((id(cb), event), None)
                self.refresh()

        self.add_run_handler(cb, event, call)

    def end_run(self) -> None:
        "Drop the functions of the run that ends."
        if self.run_handlers:
            self.run_handlers = {}
            self.refresh()

    def call_one(self, cb: Any, name: str) -> None:
        "Run one callback's handler of an event, also if the callback is switched off."
        for handler, _, owner in self.plain_tables[bool(self.learn.training)][name]:
            if owner is cb:
                handler()

    def notify(
        self,
        name: str,  # trait that is a method: 'on_added', 'on_run_failed' ...
        *args: Any,  # arguments of the method
        to: Any = None,  # the callback; None: every callback
    ) -> None:
        "Call a method of the callbacks that have it, in the order of adding, also if they are switched off."
        for cb in list(self.items) if to is None else [to]:
            method = trait_of(cb, name)
            if method is not None:
                method(*args)

    def is_step_due(self) -> bool:
        "Return True unless the method `will_step` of a callback postpones the step of the training batch."
        entries = self.plain_tables[True][WILL_STEP]
        return not entries or all(will_step() for will_step, switch, _ in entries if switch)

    def has_handler(self, event: str) -> bool:
        "Return True if a callback may have a handler of an event, without filling the tables."
        return any(own_attribute(cb, event) or takes_every_event(type(cb)) for cb in self.items)

    def fill_tables(self) -> None:
        "List the handlers of each event, in evaluation and in training."
        for table in self.plain_tables:
            table.update({event: [] for event in _HANDLED})
        moved: set[str] = set()  # events that some callback takes first or last
        for cb in self.list_ordered():
            cls, switch = type(cb), self.switches[id(cb)]
            if isinstance(cb, Callback):
                moved.update(cb.runs_first, cb.runs_last)
            # a callback that takes every event, or is of fastai, has its own condition
            is_plain = isinstance(cb, Callback) and not takes_every_event(cls)
            runs_outer = not is_plain or cb.runs_at('before_fit', None)
            runs_inner = [not is_plain or cb.runs_at('before_batch', t) for t in (False, True)]
            for event, handler in list_handlers(cb, self.learn.world):
                is_inner = event in INNER_EVENTS
                for table in self.plain_tables:
                    if runs_inner[table.training] if is_inner else runs_outer:
                        table[event].append((handler, switch, cb))
            for (_, event), (owner, handler) in self.run_handlers.items():
                if owner is cb and runs_inner[True]:
                    self.plain_tables[True][event].append((handler, switch, cb))
        for event in moved:
            for table in self.plain_tables:
                table[event].sort(key=lambda entry: place_in_event(entry[2], event))

    def list_ordered(self) -> list[Any]:
        "Return the callbacks in the order in which they run."
        return sort_callbacks(self.items)


class CallbackHost:
    "Part of the Learner to which callbacks are added and from which they are removed."

    training: bool
    run: Any  # `Run`
    parts: Any  # Parts

    def __init__(self) -> None:
        self.parts.callbacks = CallbackSet(cast('Learner', self))

    def __call__(self, event_name: str | list[str]) -> None:
        "Run the handlers of one event, or of several in turn."
        if event_name.__class__ is not str:
            return self._call_all(event_name)
        callbacks = self.parts.callbacks
        entries = callbacks.tables[self.training][event_name]
        if not entries:
            return
        outer = callbacks.running
        try:
            for handler, switch, cb in entries:
                if switch:
                    callbacks.running = cb, event_name, outer
                    handler()
        except BaseException as e:
            __tracebackhide__ = True  # set only here, so that it takes no time without an error
            self._note_error(e, cb, event_name)
            raise
        finally:
            callbacks.running = outer

    def _note_error(self, e: BaseException, cb: Any, event_name: str) -> None:
        "Add the callback and the event to an exception of a handler."

    def _open_for_use(self) -> None:
        "Register that `close` has to be called: callbacks were added, or a run began."

    def _call_all(self, event_names: Any) -> None:
        for name in as_list(event_names):
            self(canonical_event(name))

    def contexts(self, part: str) -> AbstractContextManager[Any]:
        """Return the contexts of callbacks around a part of a batch, as one context.

        `part` is 'forward' (from the model to the loss) or 'backward'.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner().to_bf16()
        >>> with learn.contexts('forward'): print((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        torch.bfloat16
        """
        entries = self.parts.callbacks.tables[self.training][CONTEXTS[part]]
        if not entries:
            return NO_CONTEXT
        if len(entries) > 1:
            return enter_all(make for make, switch, _ in entries if switch)
        make, switch, _ = entries[0]
        context = make() if switch else None
        return NO_CONTEXT if context is None else context

    def __getstate__(self) -> dict[str, Any]:
        "Return the attributes, and the list of the callbacks."
        return {**self.__dict__, '_cbs': list(self.parts.callbacks)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        cbs = state.pop('_cbs')
        self.__dict__.update(state)
        CallbackHost.__init__(self)
        for cb in cbs:
            object.__setattr__(cb, 'learn', self)
            self.parts.callbacks.insert(cb)

    @property
    def cbs(self) -> L:
        "Callbacks in the order of adding. Assign a list to replace them."
        return L(self.parts.callbacks.items)

    @cbs.setter
    def cbs(self, cbs: Any) -> None:
        callbacks = self.parts.callbacks
        new = [as_callback(cb) for cb in as_list(cbs)]
        removed = [cb for cb in self.cbs if not contains_object(new, cb)]
        added = [cb for cb in new if cb not in callbacks]
        callbacks.check_new(added, removed)
        self.remove_cbs(removed)
        self.add_cbs(added)

    def add_cbs(self, cbs: Any) -> Self:
        """Add callbacks, given as instances or classes. If one of them is refused, none is added.

        If a class was defined again (a notebook cell run again), its instance replaces the instances of the old
        definition. If the Learner has an attribute with the name of a callback, it keeps the attribute.
        Raises `CallbackError`.

        >>> from learnkit import EMA, GradientClip
        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner(default_cbs=False).add_cbs([EMA, GradientClip(1.0)])
        >>> learn.ordered_cbs('before_step', training=True)
        [EMA, GradientClip]
        >>> learn.remove_cbs([EMA, GradientClip]).cbs
        []
        """
        callbacks = self.parts.callbacks
        new = [as_callback(cb) for cb in as_list(cbs)]
        if not new:
            return self
        outdated = [[old for old in callbacks if _is_redefined(old, cb)] for cb in new]
        for i, cb in enumerate(new):
            if cb in callbacks or contains_object(new[:i], cb):
                raise CallbackError(f'{cb!r} is already part of this Learner.')
        callbacks.check_new(new, [old for olds in outdated for old in olds])
        for cb, olds in zip(new, outdated, strict=True):
            places = [i for i, o in enumerate(callbacks) if contains_object(olds, o)]
            self.remove_cbs(olds)
            self._insert_cb(cb, places[0] if places else None)
        return self

    def add_cb(self, cb: Any) -> Self:
        """Add one callback, given as an instance or a class.

        It replaces a callback of the same class with the same arguments, with a warning: a notebook cell that adds a
        callback may run again. `add_cbs` adds another one.

        >>> from learnkit import GradientClip
        >>> from learnkit.testing import synth_learner
        >>> synth_learner().add_cb(GradientClip(0.5)).gradient_clip
        GradientClip(max_norm=0.5)
        """
        new = as_callback(cb)
        repeated = [old for old in self.parts.callbacks if _is_repeated(old, new)]
        if repeated:
            warn_user(
                f'{new!r} replaces the one that was added before, with the same arguments. To have both, use '
                '`learn.add_cbs([...])`.'
            )
            self.remove_cbs(repeated)
        return self.add_cbs([new])

    def _has_own_attribute(self, name: str) -> bool:
        "Return True if the Learner has an attribute that a callback of this name would hide."
        is_attribute = name in self.__dict__ and self.__dict__[name] not in self.parts.callbacks
        return is_attribute or defined_on_class(self, name)

    def _insert_cb(
        self, cb: Callback, at: int | None = None, switch: list[Any] | None = None
    ) -> None:
        callbacks = self.parts.callbacks
        complete_attributes(cb)
        if keeps_attributes(cb):
            note_attributes(cb)
        if isinstance(cb.learn, CallbackHost) and cb.learn is not self:
            cb.learn.remove_cb(cb)
        cb.learn = cast('Learner', self)
        callbacks.insert(cb, at, switch)
        if not self._has_own_attribute(cb.name):
            setattr(self, cb.name, cb)
        self._open_for_use()
        callbacks.notify('on_added', to=cb)

    def remove_cbs(self, cbs: Any) -> Self:
        "Remove callbacks, or all instances of classes."
        for cb in as_list(cbs):
            self.remove_cb(cb)
        return self

    def remove_cb(self, cb: Any) -> Self:
        """Remove a callback, or all instances of a class; it gets no further event.

        A callback or class that the Learner does not have is ignored. For `Callback` itself, the base of all, only
        callbacks made from functions are removed.

        >>> from learnkit import ProgressCallback
        >>> from learnkit.testing import synth_learner
        >>> synth_learner().remove_cb(ProgressCallback).cbs
        [TrainEvalCallback, Recorder]
        """
        callbacks = self.parts.callbacks
        if isinstance(cb, type):
            return self.remove_cbs(self._select_cbs([cb]))
        if isinstance(cb, str):
            raise CallbackError(f'{cb!r} is a string: pass a callback or its class.')
        if cb not in callbacks:
            return self
        try:
            if self.run.is_active:
                # the callback is not part of the Learner when the run ends
                callbacks.call_one(cb, 'cleanup')
        finally:
            self._detach_cb(cb)
        return self

    def _select_cbs(self, selectors: list[Any]) -> list[Any]:
        "Return the callbacks that are given as instances or classes; warn of default callbacks given by a base class."
        classes = tuple(cb for cb in selectors if isinstance(cb, type) and cb is not Callback)
        found = []
        for cb in self.parts.callbacks:
            is_named = type(cb) in selectors or contains_object(selectors, cb)
            if is_named or isinstance(cb, classes):
                found.append(cb)
            if not is_named and isinstance(cb, classes) and type(cb).__name__ in _DEFAULT_NAMES:
                warn_user(
                    f'{type(cb).__name__}, which every Learner has, is removed with its base class: '
                    'pass the class of the callback to remove.'
                )
        return found

    def _detach_cb(self, cb: Any) -> None:
        callbacks = self.parts.callbacks
        callbacks.notify('on_removed', to=cb)
        callbacks.discard(cb)
        cb.learn = None
        name = str(cb.name)
        if self.__dict__.get(name) is cb:
            del self.__dict__[name]
            for other in callbacks:
                if other.name == name:
                    setattr(self, name, other)  # the removed callback has hidden it

    @contextmanager
    def added_cbs(self, cbs: Any) -> Iterator[Self]:
        """Add callbacks within a context, and remove them at its end.

        >>> from learnkit import GradientClip, Recorder
        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner()
        >>> with learn.added_cbs(GradientClip(1.0)): print(learn.cbs)
        [TrainEvalCallback, Recorder, ProgressCallback, GradientClip]
        >>> with learn.removed_cbs(Recorder): print(learn.cbs)
        [TrainEvalCallback, ProgressCallback]
        """
        new = [as_callback(cb) for cb in as_list(cbs)]
        before = list(self.parts.callbacks.items)
        try:
            self.add_cbs(new)
            yield self
        finally:
            self.remove_cbs([cb for cb in new if not contains_object(before, cb)])

    @contextmanager
    def removed_cbs(self, cbs: Any) -> Iterator[Self]:
        "Remove callbacks, given as instances or classes, within a context, and insert them again at its end."
        callbacks = self.parts.callbacks
        selected = self._select_cbs(as_list(cbs))
        switches = callbacks.switches
        removed = [
            (i, cb, switches[id(cb)])
            for i, cb in enumerate(callbacks)
            if contains_object(selected, cb)
        ]
        for _, cb, _ in removed:
            self._detach_cb(cb)
        try:
            yield self
        finally:
            for i, cb, switch in removed:
                self._insert_cb(cb, min(i, len(callbacks)), switch)

    def _grab_cbs(self, cb_cls: type) -> L:
        "Return the callbacks of a class, as fastai's method does."
        return self.cbs.filter(lambda cb: isinstance(cb, cb_cls))

    def ordered_cbs(
        self,
        event_name: str,
        training: bool | None = None,  # mode, training or evaluation; None: the current mode
    ) -> list[Callback]:
        "Return the callbacks that have a handler for an event, in the order in which they run."
        training = self.training if training is None else training
        return [
            cb for _, _, cb in self.parts.callbacks.tables[training][canonical_event(event_name)]
        ]

    def callback_changed(self, cb: Callback, name: str) -> None:
        "Update the handler tables after an attribute of a callback has changed."
        self.parts.callbacks.changed(cb, name)


NO_CONTEXT = nullcontext()


@contextmanager
def enter_all(factories: Iterable[Callable[[], Any]]) -> Iterator[None]:
    "Create and enter several contexts in order; a factory may return None for no context."
    with ExitStack() as entered:
        for create in factories:
            context = create()
            if context is not None:
                entered.enter_context(context)
        yield


class HandlerTable(dict[str, list[Entry]]):
    "Handlers of each event, in order, for one value of `learn.training`. All are listed at the first access."

    def __init__(self, callbacks: CallbackSet, training: bool) -> None:
        super().__init__()
        self.callbacks = callbacks
        self.training = training

    def __missing__(self, name: str) -> list[Entry]:
        if name not in _HANDLED:
            canonical_event(name)  # raises the error for an unknown event
        self.callbacks.fill_tables()
        return self[name]


def place_in_event(cb: Any, event: str) -> int:
    "Return -1 for a callback whose class takes an event before the other callbacks, 1 after them, else 0."
    if not isinstance(cb, Callback):
        return 0
    return (event in cb.runs_last) - (event in cb.runs_first)


def list_handlers(cb: Any, world: Comm) -> list[tuple[str, Callable[[], Any]]]:
    "Return the events and methods of the loop that a callback has on this rank, with the handlers."
    cls: Any = type(cb)
    names = list_handled(cls) | (_HANDLED & vars(cb).keys())
    if not isinstance(cb, Callback):  # a callback of fastai: `as_callback` accepts no other
        events = names.difference(METHODS)
        return [(name, partial(run_fastai_handler, cb, name)) for name in events]
    if cb.first_process_only and not world.is_first:
        names = frozenset()
    found: dict[str, Callable[[], Any]] = {name: getattr(cb, name) for name in names}
    if takes_every_event(cls):
        found |= {name: partial(cb, name) for name in EVENTS}
    if cb.observer:
        found = {name: torch.no_grad()(handler) for name, handler in found.items()}
    return [*found.items()]


@cache
def list_handled(cls: type) -> frozenset[str]:
    "Return the events and methods of the loop that callbacks of a class may have, by their own names."
    return _HANDLED & {name for base in cls.__mro__ for name in vars(base)}


def log_to_callbacks(
    learn: Learner,
    name: str,  # name of the column, which gets no prefix in an evaluation
    value: Any,
    weight: Any = 1,  # weight in the mean of the epoch; None: the latest value counts
    shown: bool = True,  # whether the printed table has the column
    to: Iterable[Any] | None = None,  # callbacks that receive it; None: all of the Learner's
) -> None:
    """Pass a value to the `receive_log` of callbacks, under exactly this name.

    >>> from learnkit.testing import synth_learner
    >>> class Show(Callback):
    ...     def receive_log(self, name, value, weight, shown): print(name, value)
    >>> log_to_callbacks(synth_learner(cbs=Show), 'valid_lr', 0.1)
    valid_lr 0.1
    """
    for cb in (None,) if to is None else to:  # None stands for all of them
        learn.parts.callbacks.notify('receive_log', name, value, weight, shown, to=cb)


def is_fastai_callback(cb: object) -> bool:
    "Return True for a callback or class that follows fastai's protocol and does not inherit from `Callback`."
    cls = cb if isinstance(cb, type) else type(cb)
    if issubclass(cls, Callback) or '__call__' not in dir(cls):
        return False
    return all(hasattr(cls, name) for name in _FASTAI_PROTOCOL)


def run_fastai_handler(cb: Any, event_name: str) -> Any:
    "Run an event on a callback of fastai, and convert its Cancel exceptions to those of this package."
    try:
        return cb(event_name)
    except Exception as e:
        name = type(e).__name__
        if name in _CANCEL_EXCEPTIONS and not isinstance(e, CancelException):
            raise _CANCEL_EXCEPTIONS[name] from e
        raise


@contextmanager
def without_callbacks(learn: Any, cbs: Iterable[Any]) -> Iterator[None]:
    "Switch callbacks off within a context."
    callbacks = learn.parts.callbacks
    held = callbacks.hold(cbs)
    try:
        yield
    finally:
        callbacks.release(held)


def list_running(learn: Learner) -> list[tuple[Any, str]]:
    "Return the callbacks whose handlers are running, with their events, innermost first."
    found = []
    entry = learn.parts.callbacks.running
    while entry is not None:
        cb, event_name, entry = entry
        found.append((cb, event_name))
    return found


def contains_object(items: Iterable[Any], o: object) -> bool:
    "Return True if one of the items is `o`; objects that only compare equal do not count."
    return any(item is o for item in items)


def takes_every_event(
    cls: Any,  # class of a callback
) -> bool:
    "Return True if a class of callbacks overrides `run_event` or `__call__`."
    return cls.__call__ is not Callback.__call__ or cls.run_event is not Callback.run_event


def complete_attributes(cb: Any) -> None:
    """Set what a constructor of this package sets by default, if a subclass has not called it.

    Raises `CallbackError` if the constructor has no default for an argument.
    """
    cls = type(cb)
    base: Any = next((c for c in cls.__mro__ if c.__module__.startswith('learnkit.')), cls)
    if base in (cls, Callback) or '__init__' not in vars(cls) or SET_BY_BASE in vars(cb):
        return
    if base.__init__ is Callback.__init__:
        return
    own = dict(vars(cb))
    try:
        base.__init__(cb)
    except TypeError as e:
        raise CallbackError(
            f'{cls.__name__}.__init__ has to call `super().__init__(...)` with the arguments of {base.__name__}: {e}.'
        ) from e
    vars(cb).update(own)


def as_callback(cb: Any) -> Callback:
    """Return a callback unchanged, or an instance of a callback class.

    Raises `CallbackError` for anything else.
    """
    if isinstance(cb, type) and (issubclass(cb, Callback) or is_fastai_callback(cb)):
        try:
            return cb()
        except TypeError as e:
            raise CallbackError(
                f'{cb.__name__} cannot be made without arguments ({e}): pass an instance.'
            ) from e
    if isinstance(cb, Callback) or is_fastai_callback(cb):
        return cb
    raise CallbackError(
        explain_kind(cb, 'a learnkit callback')
        or f'{short_repr(cb)} ({type(cb).__name__}) is not a callback: pass a Callback, its class, or '
        '`Callback(event=function)`.'
    )


def sort_callbacks(cbs: list[Any]) -> list[Any]:
    """Sort callbacks by `order`; with equal `order`, by index. One that has to wait for others comes right after them.

    An `order` that neither the class nor the instance sets follows from `run_before` and `run_after`. Raises
    `OrderError` if these contradict `order` or form a cycle.
    """
    if not any(getattr(cb, 'run_before', ()) or getattr(cb, 'run_after', ()) for cb in cbs):
        return sorted(cbs, key=attrgetter('order'))
    predecessors = _find_predecessors(cbs)
    orders = [_find_order(i, cbs, predecessors) for i in range(len(cbs))]
    waiting = sorted(range(len(cbs)), key=orders.__getitem__)
    res: list[Any] = []
    while waiting:
        free = [i for i in waiting if predecessors[i].isdisjoint(waiting)]
        if not free:
            raise OrderError(
                f'{", ".join(repr(cbs[i]) for i in sorted(waiting))} wait for each other by run_before and run_after. '
                'Take one of the constraints away.'
            )
        waiting.remove(free[0])
        res.append(cbs[free[0]])
    _check_written_orders(res)
    return res


def _find_predecessors(cbs: list[Any]) -> list[set[int]]:
    "Return, for each callback, the indices of callbacks that `run_before` or `run_after` puts before it."
    predecessors: list[set[int]] = [set() for _ in cbs]
    for i, cb in enumerate(cbs):
        before = as_list(getattr(cb, 'run_before', ()))
        after = as_list(getattr(cb, 'run_after', ()))
        for j, other in enumerate(cbs):
            if other is not cb and any(_is_selected(other, selector) for selector in before):
                predecessors[j].add(i)
            if other is not cb and any(_is_selected(other, selector) for selector in after):
                predecessors[i].add(j)
    return predecessors


def _is_selected(cb: Any, selector: Any) -> bool:
    "Return True if `run_before` or `run_after` selects a callback, by class or by name."
    if isinstance(selector, type):
        return isinstance(cb, selector)
    return selector in (cb.name, type(cb).__name__)


def _find_order(i: int, cbs: list[Any], predecessors: list[set[int]]) -> float:
    "Return the `order` of a callback; an implicit one is moved by its neighbors' order."
    order = cbs[i].order
    if not _has_written_order(cbs[i]):
        order = max([order, *(cbs[j].order for j in predecessors[i])])
        order = min([order, *(cb.order for j, cb in enumerate(cbs) if i in predecessors[j])])
    return order


def _has_written_order(cb: Any) -> bool:
    "Return True if an instance or a class other than `Callback` sets `order`."
    classes = [cls for cls in type(cb).__mro__ if cls.__name__ != 'Callback']
    return 'order' in getattr(cb, '__dict__', {}) or any('order' in vars(cls) for cls in classes)


def _check_written_orders(cbs: list[Any]) -> None:
    "Raise `OrderError` if sorted callbacks are not sorted by the `order` that they set."
    written = [cb for cb in cbs if _has_written_order(cb)]
    for cb, later in pairwise(written):
        if cb.order > later.order:
            raise OrderError(
                f'{cb!r} (order {cb.order}) must run before {later!r} (order {later.order}) '
                'by run_before or run_after, but after it by `order`. Change one of the two.'
            )


def as_list(o: Any) -> list[Any]:
    "Return None, one object or a collection of objects as a list."
    if o is None:
        return []
    is_many = isinstance(o, (list, tuple, set, Iterator, L, Sequence)) and not isinstance(o, str)
    return list(o) if is_many else [o]


def _is_redefined(old: Any, new: Any) -> bool:
    """Return True if the class of `new` is a later definition of the class of `old`, as in a notebook cell run again.

    Classes that a function defines may be several of one name.
    """
    before, after = type(old), type(new)
    is_same_name = (
        before.__module__ == after.__module__ and before.__qualname__ == after.__qualname__
    )
    return before is not after and is_same_name and '<locals>' not in after.__qualname__


def _is_repeated(old: Any, new: Any) -> bool:
    "Return True for another callback of the same class with the same arguments, as far as attributes show them."
    if type(old) is not type(new) or old is new or not isinstance(new, Callback):
        return False
    has_own_init = type(new).__init__ is not Callback.__init__
    for name, option in inspect.signature(type(new).__init__).parameters.items():
        if name == 'self' or option.kind is option.VAR_KEYWORD:
            continue
        if has_own_init and name not in vars(new):
            return False
        if not _is_same_value(vars(old).get(name), vars(new).get(name)):
            return False
    return True


def _is_same_value(a: Any, b: Any) -> bool:
    "Return True for equal plain values, and for functions of one name, which a cell defines again."
    if a is b:
        return True
    names = [getattr(f, '__qualname__', '<') for f in (a, b)]
    is_named = names[0] == names[1] and '<' not in names[0]
    return is_named if callable(a) else isinstance(a, _PLAIN) and type(a) is type(b) and a == b


def format_place(learn: Learner) -> str:
    "Return the current epoch and batch as a string: `epoch 3, batch 17`."
    return f'epoch {getattr(learn, "epoch", None)}, batch {getattr(learn, "iter", None)}'
