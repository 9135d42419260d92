"""From events to handlers: who is there, in which order they run, and what is said when one of them fails."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import RLock
from types import FunctionType
from typing import Any, Self, cast

import torch
from fastcore.foundation import L

from learnkit.core.errors import CallbackError, OrderError
from learnkit.core.learner_type import LearnerLike, LoopLike
from learnkit.engine.attributes import keeps_attributes, note_attributes
from learnkit.engine.callback import Callback, defined_on_class, own_handler
from learnkit.engine.events import CONTEXTS, EVENTS, canonical_event
from learnkit.engine.fastai_callbacks import foreign_handler, is_foreign
from learnkit.engine.lint import warn_of_slips

__all__ = ['CallbackSet', 'CallbackHost', 'HandlerTable', 'Entry', 'as_callback', 'as_list']

Entry = tuple[Callable[[], Any], list[Any], Any]  # handler, its switch (empty: off), its callback


class CallbackSet:
    """The callbacks of one learner, in the order of adding, with their switches, their keys and the handler tables.

    A switch is a list that holds one element while its callback is on: emptying it acts at once, also on an event that
    is being dispatched, and testing it is the cheapest test there is.
    """

    def __init__(self, learn: LoopLike) -> None:
        self.learn = learn
        self.items: list[Any] = []
        self.switches: dict[int, list[Any]] = {}
        # switched off, whatever `run` is: in evaluations that they started
        self.held: list[Any] = []
        self.keys: dict[int, str] = {}
        self._order: list[Any] | None = None  # the sorted callbacks, until something changes
        # those that make the loss a mean over samples, until then
        self.averaging: list[Any] | None = None
        # indexed by `learn.training`
        self.tables = HandlerTable(self, False), HandlerTable(self, True)
        self.more_tables: list[HandlerTable] = []  # that the loop reads in their place for a while

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __contains__(self, cb: object) -> bool:
        return id(cb) in self.switches

    def refresh(self) -> None:
        "Forget the handler tables: they are built again, event by event, when next needed."
        self._order = self.averaging = None
        for table in (*self.tables, *self.more_tables):
            table.clear()

    def changed(self, cb: Any, name: str) -> None:
        "Hear of a change of `run`, `order`, `run_train`, `run_valid` or a handler of `cb`."
        if cb not in self:
            return
        if name == 'run':
            self._switch(cb, bool(cb.run))
        else:
            self.refresh()

    def _switch(self, cb: Any, on: bool) -> None:
        is_held = any(cb is held for held in self.held)
        self.switches[id(cb)][:] = [True] if on and not is_held else []

    def hold(self, cbs: Iterable[Any]) -> list[Any]:
        "Switch callbacks off until `release`; return the callbacks that were not held before."
        new = [cb for cb in cbs if not any(cb is held for held in self.held)]
        self.held += new
        for cb in new:
            if cb in self:
                self._switch(cb, False)
        return new

    def release(self, cbs: list[Any]) -> None:
        "End what `hold` began: each callback is as its `run` says."
        self.held = [cb for cb in self.held if not any(cb is o for o in cbs)]
        for cb in cbs:
            if cb in self:
                self._switch(cb, bool(cb.run))

    def insert(self, cb: Any, at: int | None = None, switch: list[Any] | None = None) -> None:
        "Add one callback, checked by `check_new`, at its place; with the switch it had, an event under way reaches it."
        self.keys[id(cb)] = self._unique_key(cb)
        # before the item: Ctrl-C here leaves it discardable
        self.switches[id(cb)] = [] if switch is None else switch
        self._switch(cb, bool(cb.run))
        self.items.insert(len(self.items) if at is None else at, cb)
        self.refresh()

    def discard(self, cb: Any) -> None:
        "Take one callback out; it gets no further event, not even the rest of the current one."
        self._switch(cb, False)
        self.items[:] = [o for o in self.items if o is not cb]
        self.keys.pop(id(cb), None)
        del self.switches[id(cb)]
        self.refresh()

    def _unique_key(self, cb: Any) -> str:
        taken, key, n = set(self.keys.values()), getattr(cb, 'state_key', None) or cb.name, 1
        while (unique := key if n == 1 else f'{key}_{n}') in taken:
            n += 1
        return unique

    def check_new(self, cbs: Iterable[Any], without: Iterable[Any] = ()) -> None:
        "Refuse callbacks whose keys or order cannot stand beside those that stay."
        cbs, gone = list(cbs), {id(cb) for cb in without}
        stay = [cb for cb in self.items if id(cb) not in gone]
        for cb in cbs:
            for name in (*EVENTS, *CONTEXTS.values()):
                own_handler(cb, name)  # raises for what is no method
            if not is_foreign(cb):
                warn_of_slips(cb)
        explicit: dict[str, Any] = {}
        for cb in [*stay, *cbs]:
            key = getattr(cb, 'state_key', None)
            if key is None:
                continue
            if key in explicit:
                raise CallbackError(
                    f'{explicit[key]!r} and {cb!r} both have state_key={key!r}: '
                    'their states could not be told apart. Give one of them another key.'
                )
            explicit[key] = cb
        in_order([*stay, *cbs])

    def call_one(self, cb: Any, name: str) -> None:
        "Run one callback's handler of an event, whether or not it is switched on."
        for handler, _, owner in self.tables[bool(self.learn.training)][name]:
            if owner is cb:
                handler()

    def notify(
        self,
        name: str,  # 'on_added', 'on_evaluation' ...: a method of `Callback`
        cb: Any = None,  # whose method is called; None: that of every callback
    ) -> None:
        "Call a method of callbacks that is no event: also of those that are switched off, in the order of adding."
        for one in list(self.items) if cb is None else [cb]:
            if isinstance(one, Callback):
                getattr(one, name)()

    def average_samples(self) -> bool:
        "Return True while a callback makes the training loss a mean over samples, whatever the loss function says."
        if self.averaging is None:
            self.averaging = [
                cb for cb in self.items if getattr(type(cb), 'averages_samples', False)
            ]
        return bool(self.averaging) and any(cb.run for cb in self.averaging)

    def ordered(self) -> list[Any]:
        "Return the callbacks in the order in which they run."
        if self._order is None:
            self._order = in_order(self.items)
        return self._order


class CallbackHost:
    "The part of the Learner that its callbacks are added to and removed from."

    training: bool

    def __init__(self) -> None:
        self.lock = RLock()  # one run at a time
        self.callbacks = CallbackSet(cast(LoopLike, self))
        self.tables: tuple[HandlerTable, ...] = self.callbacks.tables

    def __call__(self, event_name: str | list[str]) -> None:
        "Run the handlers of one event, or of several in turn."
        if event_name.__class__ is not str:
            return self._call_all(event_name)
        for handler, switch, cb in self.tables[self.training][event_name]:
            if not switch:
                continue
            try:
                handler()
            except BaseException as e:
                __tracebackhide__ = True  # here it costs nothing
                self._note(e, cb, event_name)
                raise

    def _call_all(self, event_names: Any) -> None:
        names = [None] if event_names is None else as_list(event_names)
        for name in names:
            self(str.__str__(canonical_event(name)))  # also a StrEnum's

    def _note(self, e: BaseException, cb: Any, event_name: str) -> None:
        "Add to an exception where it was raised."

    def __getstate__(self) -> dict[str, Any]:
        "Leave out what belongs to this object alone: its lock and its tables, which are made from the callbacks."
        own = ('lock', 'callbacks', 'tables', '_is_open_for_use', '_ran_in')
        self._end_streams()
        return {**{k: v for k, v in self.__dict__.items() if k not in own}, '_cbs': list(self.cbs)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        cbs = state.pop('_cbs')
        self.__dict__.update(state)
        CallbackHost.__init__(self)
        for cb in cbs:
            object.__setattr__(cb, 'learn', self)
            self.callbacks.insert(cb)

    def _in_use(self) -> bool:
        "Tell whether a run is under way."
        return False

    def _end_streams(self) -> None:
        "Hear that callbacks go, or are copied: no run may be under way that only pauses."

    def _open_for_use(self) -> None:
        "Hear that callbacks are there, or in use, that are to be closed some time."

    @property
    def cbs(self) -> L:
        "The callbacks, in the order of adding; assign to replace them."
        return L(self.callbacks.items)

    @cbs.setter
    def cbs(self, cbs: Any) -> None:
        new = [as_callback(cb) for cb in as_list(cbs)]
        gone = [old for old in self.cbs if not any(old is cb for cb in new)]
        added = [cb for cb in new if cb not in self.callbacks]
        self.callbacks.check_new(added, gone)
        self.remove_cbs(gone)
        self.add_cbs(added)

    def add_cbs(self, cbs: Any) -> Self:
        """Add callbacks, or classes of them, all or none.

        A class that was defined again (a notebook cell run again) replaces the instances of its old definition.
        Raises `CallbackError`.
        """
        new = [as_callback(cb) for cb in as_list(cbs)]
        stale = [[old for old in self.cbs if _defined_again(type(old), type(cb))] for cb in new]
        for i, cb in enumerate(new):
            self._check_new_cb(cb, new[:i])
        self.callbacks.check_new(new, [old for olds in stale for old in olds])
        for cb, olds in zip(new, stale, strict=True):
            at = next((i for i, o in enumerate(self.cbs) if any(o is old for old in olds)), None)
            self.remove_cbs(olds)
            self._insert_cb(cb, at)
        return self

    def add_cb(self, cb: Any) -> Self:
        """Add one callback, or an instance of its class.

        >>> from learnkit import GradientClip
        >>> from learnkit.testing import synth_learner
        >>> synth_learner().add_cb(GradientClip(0.5)).gradient_clip
        GradientClip(max_norm=0.5)
        """
        return self.add_cbs([cb])

    def _check_new_cb(self, cb: Callback, before: list[Callback]) -> None:
        if cb in self.callbacks or any(cb is o for o in before):
            raise CallbackError(f'{cb!r} is already part of this Learner.')
        there = self.__dict__.get(cb.name)
        if defined_on_class(self, cb.name) or (
            cb.name in self.__dict__ and there not in self.callbacks
        ):
            raise CallbackError(
                f'A callback named `{cb.name}` ({type(cb).__name__}) would hide `learn.{cb.name}`: '
                'give its class another name.'
            )

    def _insert_cb(
        self, cb: Callback, at: int | None = None, switch: list[Any] | None = None
    ) -> None:
        if keeps_attributes(cb):
            note_attributes(cb)
        if isinstance(cb.learn, CallbackHost) and cb.learn is not self:
            cb.learn.remove_cb(cb)
        cb.learn = cast(LearnerLike, self)
        self.callbacks.insert(cb, at, switch)
        setattr(self, cb.name, cb)
        self._open_for_use()
        self.callbacks.notify('on_added', cb)

    def remove_cbs(self, cbs: Any) -> Self:
        "Remove callbacks, or all instances of classes."
        for cb in as_list(cbs):
            self.remove_cb(cb)
        return self

    def remove_cb(self, cb: Any) -> Self:
        """Remove a callback, or all instances of a class; it gets no further event.

        >>> from learnkit import ProgressCallback
        >>> from learnkit.testing import synth_learner
        >>> synth_learner().remove_cb(ProgressCallback).cbs
        [TrainEvalCallback, Recorder]
        """
        if isinstance(cb, type):
            return self.remove_cbs([o for o in self.cbs if isinstance(o, cb)])
        if cb not in self.callbacks:
            return self
        self._end_streams()
        try:
            if self._in_use():
                self.callbacks.call_one(cb, 'cleanup')  # it will not be there when the run ends
        finally:
            self._take_out(cb)
        return self

    def _take_out(self, cb: Any) -> None:
        self.callbacks.notify('on_removed', cb)
        self.callbacks.discard(cb)
        cb.learn, name = None, str(cb.name)
        if self.__dict__.get(name) is cb:
            del self.__dict__[name]
            for other in self.cbs:
                if other.name == name:
                    setattr(self, name, other)  # another one of this name was hidden by it

    @contextmanager
    def added_cbs(self, cbs: Any) -> Iterator[Self]:
        "Add callbacks for the length of a context."
        new, before = [as_callback(cb) for cb in as_list(cbs)], list(self.cbs)
        try:
            self.add_cbs(new)
            yield self
        finally:
            self.remove_cbs([cb for cb in new if not any(cb is old for old in before)])

    @contextmanager
    def removed_cbs(self, cbs: Any) -> Iterator[Self]:
        "Take callbacks out for the length of a context, and put them back in their places."

        def is_meant(o: Callback) -> bool:
            return any(
                isinstance(o, cb) if isinstance(cb, type) else o is cb for cb in as_list(cbs)
            )

        self._end_streams()
        switches = self.callbacks.switches
        out = [(i, o, switches[id(o)]) for i, o in enumerate(self.cbs) if is_meant(o)]
        for _, cb, _ in out:
            self._take_out(cb)
        try:
            yield self
        finally:
            for i, cb, switch in out:
                self._insert_cb(cb, min(i, len(self.callbacks)), switch)

    def ordered_cbs(
        self,
        event_name: str,
        training: bool | None = None,  # in training or in evaluation; None: as the Learner is now
    ) -> list[Callback]:
        "Return the callbacks that have a handler for an event, in the order in which they run."
        training = self.training if training is None else training
        return [cb for _, _, cb in self.callbacks.tables[training][canonical_event(event_name)]]

    def callback_changed(self, cb: Callback, name: str) -> None:
        "Update the handler tables after a change of a callback's attribute."
        self.callbacks.changed(cb, name)


class HandlerTable(dict[str, list[Entry]]):
    "The handlers of each event, in order, for one value of `learn.training`; made when an event is first looked up."

    def __init__(self, callbacks: CallbackSet, training: bool) -> None:
        super().__init__()
        self.callbacks, self.training = callbacks, training

    def __missing__(self, name: str) -> list[Entry]:
        known = name if name in CONTEXTS.values() else canonical_event(name)
        cbs = sorted(self.callbacks.ordered(), key=lambda cb: known in getattr(cb, 'runs_last', ()))
        handlers = [(self._handler(cb, known), cb) for cb in cbs]
        entries = [
            (handler, self.callbacks.switches[id(cb)], cb) for handler, cb in handlers if handler
        ]
        self[name] = entries
        return entries

    def _handler(self, cb: Any, name: str) -> Callable[[], Any] | None:
        is_event = name not in CONTEXTS.values()
        if is_foreign(cb):
            return foreign_handler(cb, name) if is_event else None
        if is_event and takes_every_event(cb):
            handler: Callable[[], Any] | None = partial(cb, name)
        elif not cb._runs_when(name, self.training) or self._leaves_out(cb):
            return None
        else:
            handler = own_handler(cb, name)
        return torch.no_grad()(handler) if handler and cb.observer else handler

    def _leaves_out(self, cb: Any) -> bool:
        return cb.first_process_only and not self.callbacks.learn.world.is_first


def takes_every_event(cb: Any) -> bool:
    "Tell whether a callback overrides `run_event` or `__call__`."
    cls = type(cb)
    return cls.__call__ is not Callback.__call__ or cls.run_event is not Callback.run_event


def as_callback(cb: Any) -> Callback:
    """Return a callback as it is, or an instance of a callback class.

    Raises `CallbackError` for anything else.
    """
    if isinstance(cb, type) and (issubclass(cb, Callback) or is_foreign(cb)):
        try:
            return cb()
        except TypeError as e:
            raise CallbackError(
                f'{cb.__name__} cannot be made without arguments ({e}): give an instance.'
            ) from e
    if isinstance(cb, Callback) or is_foreign(cb):
        return cb
    hint = 'give a Callback, its class, or `Callback(event=function)`'
    cls = cb if isinstance(cb, type) else type(cb)
    if cls.__module__ == 'torch.optim.lr_scheduler':
        given = f'partial({cls.__name__}, ...)' if cb is cls else 'scheduler'
        raise CallbackError(
            f'{cls.__name__} is no callback, but a scheduler of torch: write `LRScheduler({given})`.'
        )
    if callable(cb) and hasattr(cb, '__name__'):
        hint = f'write `Callback(before_fit={cb.__name__})`, with its event'
    raise CallbackError(f'{cb!r} ({type(cb).__name__}) is no callback: {hint}.')


def in_order(cbs: list[Any]) -> list[Any]:
    """Sort by `order`, then by place, with `run_before` and `run_after` among those of one order.

    Raises `OrderError` when they contradict `order` or make a cycle.
    """
    befores, afters = (
        [getattr(cb, name, ()) for cb in cbs] for name in ('run_before', 'run_after')
    )
    if not any(befores) and not any(afters):
        return sorted(cbs, key=lambda cb: cb.order)
    later: list[set[int]] = [set() for _ in cbs]  # for each callback, those that must come after it
    for i, (before, after) in enumerate(zip(befores, afters, strict=True)):
        for j in _named(before, cbs, i):
            later[i].add(j)
        for j in _named(after, cbs, i):
            later[j].add(i)
    for i, successors in enumerate(later):
        for j in successors:
            if cbs[i].order > cbs[j].order:
                raise OrderError(
                    f'{cbs[i]!r} (order {cbs[i].order}) must run before {cbs[j]!r} (order {cbs[j].order}) '
                    'by run_before or run_after, but after it by `order`. Change one of the two.'
                )
    waiting = [0] * len(cbs)
    for successors in later:
        for j in successors:
            waiting[j] += 1
    ready = [(cbs[i].order, i) for i in range(len(cbs)) if not waiting[i]]
    heapq.heapify(ready)
    done: list[int] = []
    while ready:
        _, i = heapq.heappop(ready)
        done.append(i)
        for j in later[i]:
            waiting[j] -= 1
            if not waiting[j]:
                heapq.heappush(ready, (cbs[j].order, j))
    if len(done) < len(cbs):
        cycle = ', '.join(repr(cbs[i]) for i in range(len(cbs)) if i not in done)
        raise OrderError(
            f'{cycle} wait for each other by run_before and run_after. Take one of the constraints away.'
        )
    return [cbs[i] for i in done]


def _named(wanted: Any, cbs: list[Any], me: int) -> Iterator[int]:
    "Yield the places of the callbacks that a `run_before` or `run_after` names, by class or by name."
    wanted = wanted if isinstance(wanted, (list, tuple, set)) else [wanted]

    def is_meant(cb: Any, w: Any) -> bool:
        return isinstance(cb, w) if isinstance(w, type) else w in (cb.name, type(cb).__name__)

    for j, cb in enumerate(cbs):
        if j != me and any(is_meant(cb, w) for w in wanted):
            yield j


def as_list(o: Any) -> list[Any]:
    "Return None, one or several as a list."
    if o is None:
        return []
    return list(o) if isinstance(o, (list, tuple, set, Iterator, L)) else [o]


def _defined_again(old: type, new: type) -> bool:
    "Tell whether `new` is a later definition of `old`; a function that makes classes makes them from the same code."
    if old is new or (old.__module__, old.__qualname__) != (new.__module__, new.__qualname__):
        return False
    codes = [
        {id(f.__code__) for f in vars(cls).values() if isinstance(f, FunctionType)}
        for cls in (old, new)
    ]
    return not (codes[0] & codes[1])


def place(learn: LoopLike) -> str:
    "Say where a run is, for a note: `epoch 3, batch 17`."
    return f'epoch {getattr(learn, "epoch", None)}, batch {getattr(learn, "iter", None)}'
