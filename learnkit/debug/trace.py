# SPDX-License-Identifier: Apache-2.0
"""Inspect a training run: the callbacks that run at an event, the logged names, and the changes that callbacks make.

`trace` replaces the handler tables of the loop, so the loop needs no code for it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from warnings import warn

import torch
from torch.nn.parameter import is_lazy
from typing_extensions import override

from learnkit.callbacks.recorder import recorder_of
from learnkit.checkpoint.digest import digest
from learnkit.core.batch import describe, tensors_in
from learnkit.core.random import capture_rng
from learnkit.engine.callback import name_callback
from learnkit.engine.dispatch import Entry, HandlerTable
from learnkit.engine.events import METHODS, canonical_event

if TYPE_CHECKING:
    from learnkit.learner import Learner

WATCHED = ('xb', 'yb', 'pred', 'loss', 'loss_grad')  # attributes that `trace` compares


class Handler(NamedTuple):
    "Function of a callback that runs at an event."

    order: float
    callback: str
    function: str
    file: str  # file of the function, '' without source
    line: int
    when: str  # 'training', 'evaluation', or 'always'
    is_on: bool

    def __str__(self) -> str:
        off = '' if self.is_on else ', switched off'
        when = '' if self.when == 'always' else f' (in {self.when})'
        return f'{self.order:>5g}  {self.function}{when}{off}  {self.file}:{self.line}'


class Handlers(list[Handler]):
    "Handlers in the order in which they run; printed one per line."

    def __repr__(self) -> str:
        return '\n'.join(map(str, self)) or 'nothing runs there'


class Change(NamedTuple):
    "Change that one callback has made at one event."

    event: str
    epoch: int
    batch: int
    callback: str  # its class, as 'Mixup'; for functions 'Callback(after_batch=f)'
    what: str  # 'xb', 'pred', 'loss', 'hyper lr', 'weight 0.bias', 'random numbers' ...
    is_observer: bool

    def __str__(self) -> str:
        return f'epoch {self.epoch}, batch {self.batch}, {self.event}: {self.callback} changed {self.what}'


class Trace(list[Change]):
    "Changes in the order in which they were made."

    @property
    def by_observers(self) -> list[Change]:
        "Changes made by callbacks with `observer = True`, which should make none."
        return [c for c in self if c.is_observer]

    def __repr__(self) -> str:
        return '\n'.join(map(str, self)) or 'nothing was changed'


def explain(learn: Learner, *, event_name: str) -> Handlers:
    "List the callbacks that run at an event, in order, with the file and line of each function."
    callbacks = learn.parts.callbacks
    name = canonical_event(event_name, where='explain')
    evaluation, training = (table[name] for table in callbacks.tables)
    entries = {id(entry[2]): entry for entry in [*evaluation, *training]}
    in_training = {id(entry[2]) for entry in training}
    in_evaluation = {id(entry[2]) for entry in evaluation}
    handlers = Handlers()
    for cb in callbacks.list_ordered():
        key = id(cb)
        if key not in entries:
            continue
        when = 'training' if key in in_training else 'evaluation'
        if key in in_training and key in in_evaluation:
            when = 'always'
        handlers.append(describe_handler(entries[key], when, name))
    return handlers


def list_metric_names(learn: Learner) -> dict[str, str]:
    "Return every recorded or logged name, with its meaning."
    recorder = recorder_of(learn)
    columns = recorder.columns.list_names() if recorder is not None else []
    declared: dict[str, str] = {}
    for cb in learn.cbs:
        metric_names = getattr(type(cb), 'metric_names', None)
        if isinstance(metric_names, Mapping):
            declared.update(metric_names)
    meanings = {n: 'a column of the history' for n in columns if n != 'epoch'}
    if 'train_loss' in meanings:
        smooth = recorder is not None and recorder.train_loss == 'smooth'
        meanings['train_loss'] = f'training loss, {"smoothed" if smooth else "mean of the epoch"}'
    for name in declared:
        # `{parameter}` in a declared name matches any string
        pattern = re.sub(r'\\{.*?\\}', '.+', re.escape(name))
        meanings = {n: text for n, text in meanings.items() if not re.fullmatch(pattern, n)}
    return meanings | declared


@contextmanager
def trace(learn: Learner) -> Iterator[Trace]:
    "Return a context that records which callback changes what."
    changes = Trace()
    with replace_tables(learn, lambda table: TracedTable(learn, table, changes)):
        yield changes
    for name in dict.fromkeys(c.callback for c in changes.by_observers):
        names = [c.what for c in changes.by_observers if c.callback == name]
        changed = ', '.join(dict.fromkeys(names))
        warn(f'{name} is declared an observer, but changed {changed}.', stacklevel=3)


@contextmanager
def replace_tables(learn: Learner, make: Callable[[HandlerTable], HandlerTable]) -> Iterator[None]:
    "Return a context in which the loop uses the handler tables that `make` returns for its tables."
    callbacks = learn.parts.callbacks
    original_tables = callbacks.tables
    tables = tuple(make(table) for table in original_tables)
    callbacks.more_tables.extend(tables)
    callbacks.tables = tables
    try:
        yield
    finally:
        callbacks.tables = original_tables
        table_ids = {id(table) for table in tables}
        callbacks.more_tables[:] = [t for t in callbacks.more_tables if id(t) not in table_ids]


def describe_handler(entry: Entry, when: str, event_name: str) -> Handler:
    "Describe one entry of a handler table."
    handler, switch, cb = entry
    f = unwrap_handler(handler)
    file, line = find_place(f)
    name = type(cb).__name__
    function = f'{name}.{getattr(f, "__name__", event_name)}'
    return Handler(getattr(cb, 'order', 0), name, function, file, line, when, bool(switch))


def unwrap_handler(f: Any) -> Any:
    "Return the function in methods, partials and decorators."
    while not inspect.isfunction(f):
        inner = [getattr(f, name, None) for name in ('__wrapped__', '__func__', 'func')]
        if not any(inner):
            break
        f = next(filter(None, inner))
    return inspect.unwrap(f)


def find_place(f: Any) -> tuple[str, int]:
    "Return file and line of a function, or ('', 0) without source code."
    try:
        return inspect.getsourcefile(f) or '', inspect.getsourcelines(f)[1]
    except (OSError, TypeError):
        return '', 0


class WatchedTable(HandlerTable):
    "Handler table whose entries wrap the entries of another table."

    def __init__(self, learn: Learner, table: HandlerTable) -> None:
        super().__init__(table.callbacks, table.training)
        self.learn = learn
        self.table = table

    def __missing__(self, name: str) -> list[Entry]:
        if name in METHODS:
            return self.table[name]
        self[name] = entries = self.wrap(name, self.table[name])
        return entries

    def wrap(self, name: str, entries: list[Entry]) -> list[Entry]:
        "Return the entries of an event, which call the entries of the other table."
        raise NotImplementedError


class TracedTable(WatchedTable):
    "Handler table that compares the state before and after each handler."

    def __init__(self, learn: Learner, table: HandlerTable, trace: Trace) -> None:
        super().__init__(learn, table)
        self.trace = trace

    @override
    def wrap(self, name: str, entries: list[Entry]) -> list[Entry]:
        return [(partial(self._watch, f, cb, name), switch, cb) for f, switch, cb in entries]

    def _watch(self, handler: Callable[[], Any], cb: Any, name: str) -> None:
        __tracebackhide__ = True
        before = read_watched(self.learn)
        try:
            handler()
        finally:
            after = read_watched(self.learn)
            cb_name = name_callback(cb, name)
            is_observer = bool(getattr(cb, 'observer', False))
            self.trace += [
                Change(name, self.learn.epoch, self.learn.iter, cb_name, what, is_observer)
                for what in before | after
                if before.get(what) != after.get(what)
            ]


def digest_tensors(o: Any) -> str:
    "Return a digest of the tensors in a nested structure, or its description if there are none."
    tensors = [t if t.layout is torch.strided else t.to_dense() for t in tensors_in(o)]
    return digest(tensors, leave_out=()) if tensors else describe(o)


def read_watched(
    learn: Learner,
    read: Callable[[Any], Any] = digest_tensors,  # f(tensors): what is returned of each value
) -> dict[str, Any]:
    "Return a digest, or the result of `read`, of every value that a callback may change, by name."
    found: dict[str, Any] = {
        name: read(learn.__dict__[name]) for name in WATCHED if name in learn.__dict__
    }
    params = [(n, p) for n, p in learn.model.named_parameters() if not is_lazy(p)]
    buffers = [(n, b) for n, b in learn.model.named_buffers() if not is_lazy(b)]
    found |= {f'weight {n}': read(p) for n, p in params}
    found |= {f'buffer {n}': read(b) for n, b in buffers}
    found |= {f'gradient of {n}': read(p.grad) for n, p in params if p.grad is not None}
    if learn.opt is not None:
        groups = learn.opt.hypers
        for i, h in enumerate(groups):
            where = f' of group {i}' if len(groups) > 1 else ''
            found |= {f'hyper {name}{where}': float(v) for name, v in h.items()}
    found['random numbers'] = digest(capture_rng(), leave_out=())
    return found
