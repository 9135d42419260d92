"""Dispatch of events to the handlers of callbacks, in the order in which the callbacks run."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from graphlib import CycleError, TopologicalSorter
from operator import attrgetter, itemgetter
from threading import RLock
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from fastcore.foundation import L

from learnkit.core.errors import CallbackError, OrderError
from learnkit.core.learner_type import LearnerLike
from learnkit.core.validation import warn_user
from learnkit.engine.callback import (
    SET_BY_BASE,
    Callback,
    declared,
    defined_on_class,
    get_own_handler,
    list_defined_events,
    list_events,
)
from learnkit.engine.callback_state import keeps_attributes, note_attributes
from learnkit.engine.events import ALIASES, CONTEXTS, EVENTS, canonical_event
from learnkit.engine.fastai_callbacks import get_fastai_handler, is_fastai_callback
from learnkit.engine.lint import lint

__all__ = [
    'CallbackSet',
    'CallbackHost',
    'ContextStack',
    'HandlerTable',
    'Entry',
    'as_callback',
    'as_list',
    'list_running',
]

_HANDLED = frozenset([*EVENTS, *CONTEXTS.values()])
_HANDLER_NAMES = _HANDLED | ALIASES.keys()
# callbacks that a Learner has by default
_DEFAULT_NAMES = 'TrainEvalCallback', 'Recorder', 'ProgressCallback'

Entry = tuple[Callable[[], Any], list[Any], Any]  # handler, its switch (empty: off), its callback


@dataclass(frozen=True, slots=True)
class Kind:
    "What the handler tables know of a class of callbacks."

    events: frozenset[str] | None  # events that it handles; None: to be asked for each
    runs_first: tuple[str, ...]  # events in which it runs before all other callbacks
    runs_last: tuple[str, ...]  # events in which it runs after all others


class CallbackSet:
    """Callbacks of one Learner, in the order of adding, with their switches, their keys and the handler tables.

    A switch is a list that holds one element while its callback is on. Emptying the list acts at once, also on an
    event that is being dispatched, and the truth value of a list is fast to test.
    """

    def __init__(self, learn: LearnerLike) -> None:
        self.learn = learn
        self.items: list[Any] = []
        self.switches: dict[int, list[Any]] = {}
        # callbacks that are off, whatever `run` is, during an evaluation that they started
        self.held: list[Any] = []
        self.keys: dict[int, str] = {}
        self._order: list[Any] | None = None  # sorted callbacks; None: to be sorted
        # callbacks that make the loss a mean over samples; None: to be searched
        self.averaging: list[Any] | None = None
        self.kinds: dict[type, Kind] = {}  # what is known of each class of callbacks
        # indexed by `learn.training`
        self.tables = HandlerTable(self, False), HandlerTable(self, True)
        self.more_tables: list[HandlerTable] = []  # tables that may replace `tables` in the loop

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
        self._order = self.averaging = None
        if classes:
            self.kinds.clear()
        for table in (*self.tables, *self.more_tables):
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
        cbs: Iterable[Any],  # callbacks to be added
        without: Iterable[Any] = (),  # callbacks to be removed
    ) -> None:
        """Check the handlers, keys and order of new callbacks.

        Raises `CallbackError` for a handler that cannot be called and for a `state_key` that is taken, `OrderError` for
        an impossible order.
        """
        cbs = list(cbs)
        removed = {id(cb) for cb in without}
        remaining = [cb for cb in self.items if id(cb) not in removed]
        for cb in cbs:
            for name in list_defined_events(cb):
                get_own_handler(cb, name)  # raises for an attribute that is not callable
            if not is_fastai_callback(cb):
                lint(cb)
        explicit: dict[str, Any] = {}
        for cb in [*remaining, *cbs]:
            key = getattr(cb, 'state_key', None)
            if key is None:
                continue
            if key in explicit:
                raise CallbackError(
                    f'{explicit[key]!r} and {cb!r} both have state_key={key!r}: '
                    'a checkpoint could not hold both states. Give one of them another key.'
                )
            explicit[key] = cb
        sort_callbacks([*remaining, *cbs])

    def call_one(self, cb: Any, name: str) -> None:
        "Run one callback's handler of an event, also if the callback is switched off."
        for handler, _, owner in self.tables[bool(self.learn.training)][name]:
            if owner is cb:
                handler()

    def notify(
        self,
        name: str,  # name of an optional method: 'on_added', 'on_evaluation' ...
        *args: Any,  # arguments of the method
        to: Any = None,  # the callback; None: every callback
    ) -> None:
        "Call a method of the callbacks that have it, in the order of adding, also if they are switched off."
        for cb in list(self.items) if to is None else [to]:
            method = declared(cb, name)
            if method is not None:
                method(*args)

    def average_samples(self) -> bool:
        "Return True while a callback makes the training loss a mean over samples, whatever the loss function returns."
        if self.averaging is None:
            self.averaging = [cb for cb in self.items if declared(cb, 'averages_samples')]
        return bool(self.averaging) and any(cb.run for cb in self.averaging)

    def describe(self, cls: type) -> Kind:
        "Find the events that a class of callbacks handles."
        kind = self.kinds[cls] = Kind(
            None if not issubclass(cls, Callback) or takes_every_event(cls) else list_events(cls),
            getattr(cls, 'runs_first', ()),
            getattr(cls, 'runs_last', ()),
        )
        return kind

    def list_ordered(self) -> list[Any]:
        "Return the callbacks in the order in which they run."
        if self._order is None:
            self._order = sort_callbacks(self.items)
        return self._order


if TYPE_CHECKING:
    Declared = LearnerLike  # the attributes of a Learner are declared there, once
else:
    Declared = object


class CallbackHost(Declared):
    "Part of the Learner to which callbacks are added and from which they are removed."

    training: bool

    def __init__(self) -> None:
        self.lock = RLock()  # one run at a time
        # callback and event of the handler that is running, and the same of the handler around it
        self.running: tuple[Any, str, Any] | None = None
        self.callbacks = CallbackSet(cast(LearnerLike, self))
        self.tables: tuple[HandlerTable, ...] = self.callbacks.tables

    def __call__(self, event_name: str | list[str]) -> None:
        "Run the handlers of one event, or of several in turn."
        if event_name.__class__ is not str:
            return self._call_all(event_name)
        entries = self.tables[self.training][event_name]
        if not entries:
            return
        outer = self.running
        try:
            for handler, switch, cb in entries:
                if switch:
                    self.running = cb, event_name, outer
                    handler()
        except BaseException as e:
            __tracebackhide__ = True  # set only here, so that it takes no time without an error
            self.note_error(e, cb, event_name)
            raise
        finally:
            self.running = outer

    def _call_all(self, event_names: Any) -> None:
        names = [None] if event_names is None else as_list(event_names)
        for name in names:
            self(str.__str__(canonical_event(name)))  # a member of a StrEnum is not exactly a str

    def contexts(self, part: str) -> AbstractContextManager[Any]:
        """Return the contexts of callbacks around a part of a batch, as one context.

        `part` is 'forward' (from the model to the loss) or 'backward'.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner().to_bf16()
        >>> with learn.contexts('forward'): print((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        torch.bfloat16
        """
        entries = self.tables[self.training][CONTEXTS[part]]
        if not entries:
            return NO_CONTEXT
        if len(entries) > 1:
            return ContextStack([make for make, switch, _ in entries if switch])
        make, switch, _ = entries[0]
        context = make() if switch else None
        return NO_CONTEXT if context is None else context

    def note_error(self, e: BaseException, cb: Any, event_name: str) -> None:
        "Add a note to an exception: the callback, the event, epoch and batch."

    def __getstate__(self) -> dict[str, Any]:
        "Return the attributes without the lock, and with a list of the callbacks instead of their tables."
        excluded = ('lock', 'callbacks', 'tables', '_is_open_for_use', '_owner_pid')
        state = {k: v for k, v in self.__dict__.items() if k not in excluded}
        state['_cbs'] = list(self.callbacks)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        cbs = state.pop('_cbs')
        self.__dict__.update(state)
        CallbackHost.__init__(self)
        for cb in cbs:
            object.__setattr__(cb, 'learn', self)
            self.callbacks.insert(cb)

    def _is_in_use(self) -> bool:
        "Return True during a run."
        return False

    def _open_for_use(self) -> None:
        "Register that `close` has to be called: callbacks were added or a run began."

    @property
    def cbs(self) -> L:
        "Callbacks in the order of adding. Assign a list to replace them."
        return L(self.callbacks.items)

    @cbs.setter
    def cbs(self, cbs: Any) -> None:
        new = [as_callback(cb) for cb in as_list(cbs)]
        removed = [cb for cb in self.cbs if not contains_object(new, cb)]
        added = [cb for cb in new if cb not in self.callbacks]
        self.callbacks.check_new(added, removed)
        self.remove_cbs(removed)
        self.add_cbs(added)

    def add_cbs(self, cbs: Any) -> Self:
        """Add callbacks, given as instances or classes. If one of them is refused, none is added.

        If a class was defined again (a notebook cell run again), its instance replaces the instances of the old
        definition. If the Learner has an attribute with the name of a callback, it keeps the attribute, with a warning.
        Raises `CallbackError`.

        >>> from learnkit import EMA, GradientClip
        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner(default_cbs=False).add_cbs([EMA, GradientClip(1.0)])
        >>> learn.ordered_cbs('before_step', training=True)
        [EMA, GradientClip]
        >>> learn.remove_cbs([EMA, GradientClip]).cbs
        []
        """
        new = [as_callback(cb) for cb in as_list(cbs)]
        if not new:
            return self
        outdated = [self._find_outdated(type(cb)) for cb in new]
        for i, cb in enumerate(new):
            self._check_new_cb(cb, new[:i])
        self.callbacks.check_new(new, [old for olds in outdated for old in olds])
        for cb, olds in zip(new, outdated, strict=True):
            places = [i for i, o in enumerate(self.callbacks) if contains_object(olds, o)]
            self.remove_cbs(olds)
            self._insert_cb(cb, places[0] if places else None)
            if self._has_own_attribute(cb.name):
                warn_user(
                    f'`learn.{cb.name}` is not the callback {type(cb).__name__}, but the attribute of the Learner. '
                    f'Find the callback in `learn.cbs`.'
                )
        return self

    def _find_outdated(self, cls: type) -> list[Callback]:
        return [cb for cb in self.callbacks if _is_redefined(type(cb), cls)]

    def add_cb(self, cb: Any) -> Self:
        """Add one callback, given as an instance or a class.

        >>> from learnkit import GradientClip
        >>> from learnkit.testing import synth_learner
        >>> synth_learner().add_cb(GradientClip(0.5)).gradient_clip
        GradientClip(max_norm=0.5)
        """
        return self.add_cbs([cb])

    def _check_new_cb(self, cb: Callback, before: list[Callback]) -> None:
        if cb in self.callbacks or contains_object(before, cb):
            raise CallbackError(f'{cb!r} is already part of this Learner.')

    def _has_own_attribute(self, name: str) -> bool:
        "Return True if the Learner has an attribute that a callback of this name would hide."
        is_attribute = name in self.__dict__ and self.__dict__[name] not in self.callbacks
        return is_attribute or defined_on_class(self, name)

    def _insert_cb(
        self, cb: Callback, at: int | None = None, switch: list[Any] | None = None
    ) -> None:
        complete_attributes(cb)
        if keeps_attributes(cb):
            note_attributes(cb)
        if isinstance(cb.learn, CallbackHost) and cb.learn is not self:
            cb.learn.remove_cb(cb)
        cb.learn = cast(LearnerLike, self)
        self.callbacks.insert(cb, at, switch)
        if not self._has_own_attribute(cb.name):
            setattr(self, cb.name, cb)
        self._open_for_use()
        self.callbacks.notify('on_added', to=cb)

    def remove_cbs(self, cbs: Any) -> Self:
        "Remove callbacks, or all instances of classes."
        for cb in as_list(cbs):
            self.remove_cb(cb)
        return self

    def remove_cb(self, cb: Any) -> Self:
        """Remove a callback, or all instances of a class; it gets no further event.

        A callback or class that the Learner does not have is ignored. For `Callback` itself, the base of all, only
        callbacks made from functions are removed. Warns if a callback of every Learner goes with its base class. Raises
        `CallbackError` for a name.

        >>> from learnkit import ProgressCallback
        >>> from learnkit.testing import synth_learner
        >>> synth_learner().remove_cb(ProgressCallback).cbs
        [TrainEvalCallback, Recorder]
        """
        if isinstance(cb, type):
            return self.remove_cbs(self._select_cbs([cb]))
        if isinstance(cb, str):
            raise CallbackError(
                f'{cb!r} is a string: give a callback or its class, of those that are there: '
                f'{", ".join(type(o).__name__ for o in self.callbacks)}.'
            )
        if cb not in self.callbacks:
            return self
        try:
            if self._is_in_use():
                self.callbacks.call_one(
                    cb, 'cleanup'
                )  # the callback is not part of the Learner when the run ends
        finally:
            self._detach_cb(cb)
        return self

    def _select_cbs(self, selectors: list[Any]) -> list[Any]:
        "Return the callbacks that are given as instances or classes; warn of default callbacks given by a base class."
        classes = tuple(cb for cb in selectors if isinstance(cb, type) and cb is not Callback)
        instances = [cb for cb in selectors if not isinstance(cb, type)]
        found = []
        for cb in self.callbacks:
            is_given = type(cb) in selectors or contains_object(instances, cb)
            if not is_given and isinstance(cb, classes):
                if type(cb).__name__ in _DEFAULT_NAMES:
                    warn_user(
                        f'{type(cb).__name__}, which every Learner has, is removed with its base class: '
                        'give the class of the callback that is to go.'
                    )
                is_given = True
            if is_given:
                found.append(cb)
        return found

    def _detach_cb(self, cb: Any) -> None:
        self.callbacks.notify('on_removed', to=cb)
        self.callbacks.discard(cb)
        cb.learn = None
        name = str(cb.name)
        if self.__dict__.get(name) is cb:
            del self.__dict__[name]
            for other in self.callbacks:
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
        before = list(self.callbacks.items)
        try:
            self.add_cbs(new)
            yield self
        finally:
            self.remove_cbs([cb for cb in new if not contains_object(before, cb)])

    @contextmanager
    def removed_cbs(self, cbs: Any) -> Iterator[Self]:
        "Remove callbacks, given as instances or classes, within a context, and insert them again at its end."
        selected = self._select_cbs(as_list(cbs))
        switches = self.callbacks.switches
        removed = [
            (i, cb, switches[id(cb)])
            for i, cb in enumerate(self.callbacks)
            if contains_object(selected, cb)
        ]
        for _, cb, _ in removed:
            self._detach_cb(cb)
        try:
            yield self
        finally:
            for i, cb, switch in removed:
                self._insert_cb(cb, min(i, len(self.callbacks)), switch)

    def ordered_cbs(
        self,
        event_name: str,
        training: bool | None = None,  # mode, training or evaluation; None: the current mode
    ) -> list[Callback]:
        "Return the callbacks that have a handler for an event, in the order in which they run."
        training = self.training if training is None else training
        return [cb for _, _, cb in self.callbacks.tables[training][canonical_event(event_name)]]

    def callback_changed(self, cb: Callback, name: str) -> None:
        "Update the handler tables after an attribute of a callback has changed."
        self.callbacks.changed(cb, name)


NO_CONTEXT = nullcontext()


class ContextStack(ExitStack):
    "Context manager that creates and enters several contexts in order."

    def __init__(self, factories: list[Callable[[], Any]]) -> None:
        super().__init__()
        self._factories = factories

    def __enter__(self) -> Self:
        with ExitStack() as entered:
            for create in self._factories:
                context = create()
                if context is not None:
                    entered.enter_context(context)
            self.push(entered.pop_all())
        return self


class HandlerTable(dict[str, list[Entry]]):
    "Handlers of each event, in order, for one value of `learn.training`. Each list is built on first access."

    def __init__(self, callbacks: CallbackSet, training: bool) -> None:
        super().__init__()
        self.callbacks = callbacks
        self.training = training
        self._receivers: dict[str, list[Any]] = {}  # callbacks that may have a handler, by event

    def __missing__(self, name: str) -> list[Entry]:
        event = name if name in _HANDLED else canonical_event(name)
        if not self._receivers:
            self._find_receivers()
        callbacks = self.callbacks
        found: list[tuple[int, Entry]] = []
        for cb in self._receivers.get(event, ()):
            handler = self._get_handler(cb, event)
            if handler:
                kind = callbacks.kinds[type(cb)]
                place = (event in kind.runs_last) - (event in kind.runs_first)
                found.append((place, (handler, callbacks.switches[id(cb)], cb)))
        if any(place for place, _ in found):
            found.sort(key=itemgetter(0))
        self[name] = [entry for _, entry in found]
        return self[name]

    def clear(self) -> None:
        "Forget all handlers."
        super().clear()
        self._receivers.clear()

    def _find_receivers(self) -> None:
        "Find the callbacks that may have a handler of each event, in order."
        kinds = self.callbacks.kinds
        for cb in self.callbacks.list_ordered():
            kind = kinds.get(type(cb)) or self.callbacks.describe(type(cb))
            own = (ALIASES.get(name, name) for name in vars(cb).keys() & _HANDLER_NAMES)
            for event in _HANDLED if kind.events is None else {*kind.events, *own}:
                self._receivers.setdefault(event, []).append(cb)

    def _get_handler(self, cb: Any, name: str) -> Callable[[], Any] | None:
        is_event = name not in CONTEXTS.values()
        if not isinstance(cb, Callback):  # a callback of fastai: `as_callback` accepts no other
            return get_fastai_handler(cb, name) if is_event else None
        handler: Callable[[], Any] | None
        if is_event and takes_every_event(type(cb)):
            handler = partial(cb, name)
        else:
            handler = get_own_handler(cb, name)
            skips_rank = (
                declared(cb, 'first_process_only') and not self.callbacks.learn.world.is_first
            )
            if handler is None or skips_rank or not cb.runs_at(name, self.training):
                return None
        return torch.no_grad()(handler) if cb.observer else handler


def list_running(learn: LearnerLike) -> list[tuple[Any, str]]:
    "Return the callbacks whose handlers are running, with their events, innermost first."
    found = []
    entry = learn.running
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
                f'{cb.__name__} cannot be made without arguments ({e}): give an instance.'
            ) from e
    if isinstance(cb, Callback) or is_fastai_callback(cb):
        return cb
    hint = 'give a Callback, its class, or `Callback(event=function)`'
    cls = cb if isinstance(cb, type) else type(cb)
    if cls.__module__ == 'torch.optim.lr_scheduler':
        given = f'partial({cls.__name__}, ...)' if cb is cls else 'scheduler'
        raise CallbackError(
            f'{cls.__name__} is not a callback, but a scheduler of torch: write `LRScheduler({given})`.'
        )
    if callable(cb) and hasattr(cb, '__name__'):
        hint = f'write `Callback(before_fit={cb.__name__})`, with its event'
    raise CallbackError(f'{cb!r} ({type(cb).__name__}) is not a callback: {hint}.')


def sort_callbacks(cbs: list[Any]) -> list[Any]:
    """Sort callbacks by `order`; with equal `order`, by `run_before` and `run_after`, then by index.

    An `order` that neither the class nor the instance sets follows from `run_before` and `run_after`. Raises
    `OrderError` if these contradict `order` or form a cycle.
    """
    if not any(getattr(cb, 'run_before', ()) or getattr(cb, 'run_after', ()) for cb in cbs):
        return sorted(cbs, key=attrgetter('order'))
    predecessors = _find_predecessors(cbs)
    orders = _find_orders(cbs, predecessors)
    for i, indices in predecessors.items():
        for j in indices:
            if orders[j] > orders[i]:
                raise OrderError(
                    f'{cbs[j]!r} (order {orders[j]}) must run before {cbs[i]!r} (order {orders[i]}) '
                    'by run_before or run_after, but after it by `order`. Change one of the two.'
                )
    sorter = TopologicalSorter(predecessors)
    sorter.prepare()
    ready: list[tuple[int, int]] = []  # order and index of callbacks whose predecessors are sorted
    res = []
    while sorter.is_active():
        for i in sorter.get_ready():
            heapq.heappush(ready, (orders[i], i))
        _, first = heapq.heappop(ready)
        res.append(cbs[first])
        sorter.done(first)
    return res


def _find_orders(cbs: list[Any], predecessors: dict[int, set[int]]) -> list[int]:
    "Return the `order` of each callback; one that nobody wrote is moved by its neighbors' order."
    try:
        indices = list(TopologicalSorter(predecessors).static_order())
    except CycleError as e:
        cycle = ', '.join(repr(cbs[i]) for i in sorted(set(e.args[1])))
        raise OrderError(
            f'{cycle} wait for each other by run_before and run_after. Take one of the constraints away.'
        ) from None
    orders = [cb.order for cb in cbs]
    movable = [i for i in indices if not _has_written_order(cbs[i])]
    for i in movable:
        orders[i] = max([orders[i], *(orders[j] for j in predecessors[i])])
    for i in reversed(movable):
        orders[i] = min([orders[i], *(orders[j] for j in indices if i in predecessors[j])])
    return orders


def _has_written_order(cb: Any) -> bool:
    "Return True if an instance or a class other than `Callback` sets `order`."
    classes = [cls for cls in type(cb).__mro__ if cls.__name__ != 'Callback']
    return 'order' in getattr(cb, '__dict__', {}) or any('order' in vars(cls) for cls in classes)


def _find_predecessors(cbs: list[Any]) -> dict[int, set[int]]:
    "Return, by the index of each callback, the indices of callbacks that `run_before` or `run_after` puts before it."
    predecessors: dict[int, set[int]] = {i: set() for i in range(len(cbs))}
    for i, cb in enumerate(cbs):
        for j in _find_indices(getattr(cb, 'run_before', ()), cbs, i):
            predecessors[j].add(i)
        for j in _find_indices(getattr(cb, 'run_after', ()), cbs, i):
            predecessors[i].add(j)
    return predecessors


def _find_indices(selectors: Any, cbs: list[Any], own_index: int) -> Iterator[int]:
    "Yield the indices of the other callbacks that `run_before` or `run_after` selects, by class or by name."
    selectors = selectors if isinstance(selectors, (list, tuple, set)) else [selectors]

    def matches(cb: Any, selector: Any) -> bool:
        if isinstance(selector, type):
            return isinstance(cb, selector)
        return selector in (cb.name, type(cb).__name__)

    for i, cb in enumerate(cbs):
        if i != own_index and any(matches(cb, selector) for selector in selectors):
            yield i


def as_list(o: Any) -> list[Any]:
    "Return None, one object or a collection of objects as a list."
    if o is None:
        return []
    is_many = isinstance(o, (list, tuple, set, Iterator, L, Sequence)) and not isinstance(o, str)
    return list(o) if is_many else [o]


def _is_redefined(old: type, new: type) -> bool:
    """Return True if `new` is a later definition of the class `old`, as in a notebook cell that runs again.

    Classes that a function defines may be several of one name.
    """
    is_local = '<locals>' in new.__qualname__
    is_same_name = (old.__module__, old.__qualname__) == (new.__module__, new.__qualname__)
    return old is not new and is_same_name and not is_local


def format_place(learn: LearnerLike) -> str:
    "Return the current epoch and batch as a string: `epoch 3, batch 17`."
    return f'epoch {getattr(learn, "epoch", None)}, batch {getattr(learn, "iter", None)}'
