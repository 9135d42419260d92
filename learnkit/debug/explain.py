"""Look inside a training: who runs at an event, where the time goes, and which callback changed what.

All of it works by other handler tables, which the loop reads in the place of its own; it has no part in the loop."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple
from warnings import warn

import torch
from torch import Tensor

from learnkit.callbacks.recorder import recorder_of
from learnkit.core.batch import describe, map_tensors
from learnkit.core.html import never_raising, table
from learnkit.core.random import capture_rng
from learnkit.engine.callback import Callback
from learnkit.engine.dispatch import Entry, HandlerTable, takes_every_event
from learnkit.engine.events import CONTEXTS, canonical_event
from learnkit.engine.fastai_callbacks import is_foreign

__all__ = ['explain', 'list_metric_names', 'trace', 'Handler', 'Handlers', 'Change', 'Trace']

WATCHED = ('xb', 'yb', 'pred', 'loss', 'loss_grad')


class Handler(NamedTuple):
    "Who runs at an event."

    order: float
    callback: str
    function: str
    file: str  # where the function is, '' for what has no source
    line: int
    when: str  # 'training', 'evaluation', or 'always'
    is_on: bool

    def __str__(self) -> str:
        off = '' if self.is_on else ', switched off'
        when = '' if self.when == 'always' else f' (in {self.when})'
        return f'{self.order:>5g}  {self.function}{when}{off}  {self.file}:{self.line}'


class Handlers(list[Handler]):
    "Handlers in the order in which they run; shown one a line."

    def __repr__(self) -> str:
        return '\n'.join(map(str, self)) or 'nothing runs there'

    @never_raising
    def _repr_html_(self) -> str:
        if not self:
            return repr(self)
        rows = [
            (f'{h.order:g}', h.function, h.when, 'on' if h.is_on else 'off', f'{h.file}:{h.line}')
            for h in self
        ]
        return table(['order', 'runs', 'in', 'switched', 'where'], rows)


class Change(NamedTuple):
    "What one callback changed at one event."

    event: str
    epoch: int
    batch: int
    callback: str
    what: str  # 'xb', 'pred', 'loss', 'hyper lr', 'weight 0.bias', 'random numbers' ...
    is_observer: bool

    def __str__(self) -> str:
        return f'epoch {self.epoch}, batch {self.batch}, {self.event}: {self.callback} changed {self.what}'


class Trace(list[Change]):
    "The changes, in the order in which they were made."

    @property
    def by_observers(self) -> list[Change]:
        "The changes of callbacks that say `observer = True`, and should make none."
        return [c for c in self if c.is_observer]

    def __repr__(self) -> str:
        return '\n'.join(map(str, self)) or 'nothing was changed'

    @never_raising
    def _repr_html_(self) -> str:
        rows = [(c.epoch, c.batch, c.event, c.callback, c.what) for c in self]
        return (
            table(['epoch', 'batch', 'event', 'callback', 'changed'], rows) if rows else repr(self)
        )


def explain(learn: Any, event_name: str) -> Handlers:
    "List who runs at an event, in order, each with the file and line of its function."
    name = canonical_event(event_name, where='explain')
    tables = learn.callbacks.tables
    found = [[id(entry[2]) for entry in table[name]] for table in tables]
    seen: dict[int, Entry] = {id(entry[2]): entry for table in tables for entry in table[name]}
    cbs = [cb for cb in learn.callbacks.ordered() if id(cb) in seen]

    def when(cb: Any) -> str:
        in_evaluation, in_training = (id(cb) in ids for ids in found)
        if in_evaluation and in_training:
            return 'always'
        return 'training' if in_training else 'evaluation'

    return Handlers(handler_of(seen[id(cb)], when(cb), name) for cb in cbs)


def list_metric_names(learn: Any) -> dict[str, str]:
    "Return every name that is recorded or logged, with what it means."
    recorder = recorder_of(learn)
    columns = [n for n in recorder._columns() if n != 'epoch'] if recorder is not None else []
    declared: dict[str, str] = {}
    for cb in learn.cbs:
        own = getattr(type(cb), 'metric_names', None)
        if isinstance(own, Mapping):
            declared.update(own)
    patterns = [_pattern_of(name) for name in declared]
    columns = [n for n in columns if not any(p.fullmatch(n) for p in patterns)]
    smooth = recorder is not None and recorder.train_loss == 'smooth'
    loss = 'training loss, smoothed' if smooth else 'training loss, mean of the epoch'
    meanings = {'train_loss': loss}
    return {n: meanings.get(n, 'a column of the history') for n in columns} | declared


def _pattern_of(name: str) -> re.Pattern[str]:
    "Return the pattern of a declared name, in which a `{parameter}` stands for any text."
    return re.compile(re.sub(r'\\{.*?\\}', '.+', re.escape(name)))


@contextmanager
def trace(learn: Any) -> Iterator[Trace]:
    "Record, for the length of a context, which callback changed what."
    changes = Trace()
    with _replaced_tables(learn, lambda table: TracedTable(learn, table, changes)):
        yield changes
    for name in dict.fromkeys(c.callback for c in changes.by_observers):
        changed = [c.what for c in changes.by_observers if c.callback == name]
        what = ', '.join(dict.fromkeys(changed))
        warn(f'{name} says that it is an observer, and changed {what}.', stacklevel=3)


@contextmanager
def _replaced_tables(learn: Any, make: Callable[[HandlerTable], HandlerTable]) -> Iterator[None]:
    "Let the loop read other tables for the length of a context."
    learn.timings.stop(learn)
    before, callbacks = learn.tables, learn.callbacks
    tables = tuple(make(table) for table in before)
    callbacks.more_tables.extend(tables)
    learn.tables = tables
    try:
        yield
    finally:
        learn.tables = before
        ours = {id(table) for table in tables}
        callbacks.more_tables[:] = [t for t in callbacks.more_tables if id(t) not in ours]


def handler_of(entry: Entry, when: str, event_name: str) -> Handler:
    "Say what is known about one entry of a handler table."
    handler, switch, cb = entry
    f: Any = users_function(cb, event_name) or handler
    while not inspect.isfunction(f):
        inner = (
            getattr(f, '__wrapped__', None)
            or getattr(f, '__func__', None)
            or getattr(f, 'func', None)
        )
        if inner is None:
            break
        f = inner
    f = inspect.unwrap(f)
    code = getattr(f, '__code__', None)
    name = getattr(f, '__name__', event_name)
    file, line = (code.co_filename, code.co_firstlineno) if code else ('', 0)
    return Handler(
        getattr(cb, 'order', 0),
        type(cb).__name__,
        f'{type(cb).__name__}.{name}',
        file,
        line,
        when,
        bool(switch),
    )


def users_function(cb: Any, event_name: str) -> Any:
    "Return the function of a callback that is not called by its event's name alone; None for any other."
    if is_foreign(cb):
        return getattr(cb, event_name, None)
    if not takes_every_event(cb):
        return None
    return type(cb).run_event if type(cb).run_event is not Callback.run_event else type(cb).__call__


class TracedTable(HandlerTable):
    "Handlers that are each followed by a comparison of everything with before."

    def __init__(self, learn: Any, own: HandlerTable, trace: Trace) -> None:
        super().__init__(own.callbacks, own.training)
        self.learn, self.own, self.trace = learn, own, trace

    def __missing__(self, name: str) -> list[Entry]:
        if name in CONTEXTS.values():
            return self.own[name]
        entries: list[Entry] = [
            (partial(self._watch, f, cb, name), switch, cb) for f, switch, cb in self.own[name]
        ]
        self[name] = entries
        return entries

    def _watch(self, handler: Callable[[], Any], cb: Any, name: str) -> None:
        __tracebackhide__ = True
        before = fingerprints(self.learn)
        try:
            handler()
        finally:
            after = fingerprints(self.learn)
            who, is_observer = type(cb).__name__, bool(getattr(cb, 'observer', False))
            changed = [
                what
                for what in dict.fromkeys([*before, *after])
                if before.get(what) != after.get(what)
            ]
            self.trace += [
                Change(name, self.learn.epoch, self.learn.iter, who, what, is_observer)
                for what in changed
            ]


def fingerprints(learn: Any) -> dict[str, Any]:
    "Return a digest of everything a callback may change, by name."
    found: dict[str, Any] = {
        name: digest(learn.__dict__[name]) for name in WATCHED if name in learn.__dict__
    }
    found |= {f'weight {name}': digest(p) for name, p in learn.model.named_parameters()}
    found |= {f'buffer {name}': digest(b) for name, b in learn.model.named_buffers()}
    found |= {
        f'gradient of {n}': digest(p.grad)
        for n, p in learn.model.named_parameters()
        if p.grad is not None
    }
    if learn.opt is not None:
        groups = learn.opt.hypers
        for i, h in enumerate(groups):
            where = f' of group {i}' if len(groups) > 1 else ''
            found |= {f'hyper {name}{where}': float(v) for name, v in h.items()}
    rng = capture_rng()
    return {
        **found,
        'random numbers': (digest(rng), hash(str(map_tensors(rng, torch.numel)))),
    }  # and its numbers


def digest(o: Any) -> str:
    "Return a digest of the tensors in a nested structure; one without any is told by what it looks like."
    h, n = blake2b(digest_size=16), 0

    def add(t: Tensor) -> Tensor:
        nonlocal n
        n += 1
        h.update(f'{tuple(t.shape)}{t.dtype}'.encode())
        t = t.detach().to_dense() if t.layout is not torch.strided else t.detach()
        h.update(
            t.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() if t.numel() else b''
        )
        return t

    map_tensors(o, add)
    return h.hexdigest() if n else describe(o)
