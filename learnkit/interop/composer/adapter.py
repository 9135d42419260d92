# SPDX-License-Identifier: Apache-2.0
"""Adapters that run Composer callbacks, algorithms and logger destinations in a Learner: `from_composer(cb)`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

from typing_extensions import override

from learnkit.core.errors import add_place
from learnkit.core.model import bare_model, takes_batches
from learnkit.engine.callback import Callback
from learnkit.engine.events import EVENTS
from learnkit.interop.common.adapter import CallbackAdapter, find_or_add
from learnkit.interop.common.hooks import check_kind, own_hooks
from learnkit.interop.composer.run import ComposerRun
from learnkit.interop.composer.state import ComposerState
from learnkit.interop.composer.time import (
    ALWAYS,
    EVAL,
    FIT,
    FIT_EVAL,
    PREDICT,
    STANDALONE_EVAL,
    TABLES,
    TRAIN,
    Event,
    types_for,
)
from learnkit.interop.composer.trainer import ComposerTrainer, add_trainer

if TYPE_CHECKING:
    from learnkit.learner import Learner

CLOSING_HOOKS = ('close', 'post_close')
HOOKS = (*(e.value for e in Event), *CLOSING_HOOKS)
# Composer events that `_find_composer_events` moves to another learnkit event
_MOVED = {'after_train': 'fit_end', 'before_epoch': 'iteration_start'}
# events during which `xb` and `yb` exist
BATCH_EVENTS = frozenset(
    EVENTS[EVENTS.index('before_batch') : EVENTS.index('batch_checkpoint') + 1]
)


def composer_events(
    event: str,  # name of a learnkit event
    learn: Learner,  # Learner whose phase selects the events
) -> tuple[str, ...]:
    """Return the Composer events that correspond to a learnkit event, in order.

    >>> from types import SimpleNamespace
    >>> composer_events('before_batch', SimpleNamespace(training=True, fitting=True, phase='train'))
    ('batch_start', 'before_train_batch')
    """
    if event in ALWAYS:
        names = ALWAYS[event]
    elif event in FIT:
        names = FIT[event] if learn.fitting else ''
    elif learn.phase == 'predict':
        names = PREDICT.get(event, '')
    elif event in FIT_EVAL:
        names = (FIT_EVAL if learn.fitting else STANDALONE_EVAL)[event]
    else:
        names = (TRAIN if learn.training else EVAL).get(event, '')
    return tuple(names.split())


def kind_of_loader(
    event: str,  # name of a learnkit event
    learn: Learner,
) -> str:
    "Return which loader Composer's state has at an event: 'train', 'eval' or 'predict'."
    is_pass = event in EVAL
    if event in ('before_predict', 'after_predict') or (is_pass and learn.phase == 'predict'):
        return 'predict'
    return 'eval' if is_pass and not learn.training else 'train'


def from_composer(
    cb: Any,  # callback, algorithm or logger destination with Composer's interface
) -> Callback:
    """Return a callback that runs a Composer callback, algorithm or logger destination.

    The methods of a callback (`epoch_start(state, logger)` ..., or `run_event`) run at the events
    in the table of docs/lifecycle.md, with a `state` that reads the Learner and a `logger` that
    writes to `learn.log`: one of each for all callbacks of a Learner. The events from
    `before_forward` to `after_backward` fire for each microbatch. `init` runs before any other
    event, including for a callback that is added later; `before_load` and `after_load` run before
    the first fit or evaluation. The gradients of a step can be read until the next
    `before_forward`. A fit that ends within an epoch has no `epoch_end`, as in Composer.

    An algorithm has `match(event, state)` and `apply(event, state, logger)`, and runs before
    callbacks. A logger destination receives the values that `learn.log`, other callbacks and
    Composer's Trainer log; `log_metrics` alone is enough. Composer need not be installed; if it is
    imported, callbacks of its package receive Composer's event and time classes.

    Checkpointed: the callback's `state_dict` (without one, its attributes with plain data), and
    once for all callbacks the position in the epoch and the last metric values.

    Raises `CallbackError` for an object without hooks that is not of Composer, and warns of
    attributes that cannot be saved.

    >>> from learnkit.testing import synth_learner
    >>> class Shout:
    ...     def epoch_end(self, state, logger): print(state.timestamp.epoch, state.timestamp.batch)
    >>> learn = synth_learner(n_train=3, cbs=from_composer(Shout()))
    >>> with learn.no_bar(): learn.fit(2)
    1ep 3ba
    2ep 6ba
    """
    if all(callable(getattr(cb, name, None)) for name in ('match', 'apply')):
        return _FromAlgorithm(cb)
    if callable(getattr(cb, 'log_metrics', None)) and not isinstance(cb, type):
        if hasattr(cb, 'can_upload_files') or not own_hooks(cb, ('run_event', *HOOKS)):
            return _FromDestination(cb)
    return _FromComposer(cb)


class _FromComposer(CallbackAdapter):
    "Run a Composer callback at the Composer events of the Learner's events."

    order = 60
    library = 'composer'
    style = 'Composer'
    is_algorithm = False
    is_destination = False
    host: ComposerRun  # the Learner's, set when the adapter is added

    def __init__(self, cb: Any) -> None:
        run_event, hooks = self._find_hooks(cb)
        if self.is_destination:
            check_kind(cb, self.style, 'from_composer')
            self.hold(cb)
        else:
            # other objects have a method `close`, too
            own = {name: hook for name, hook in hooks.items() if name not in CLOSING_HOOKS}
            self.wrap(cb, HOOKS, {**run_event, **own})
        self.types = types_for(cb)
        self._hooks = hooks
        self._run_event_hook = run_event.get('run_event')
        self._known_learner: Any = None  # weak reference to the Learner that `init` ran for
        self._trainer: ComposerTrainer | None = None
        self._has_loaded = False  # whether `before_load` and `after_load` ran
        for event in EVENTS:
            # every adapter has `init` run before the first event
            if self._has_hook_for(event) or event == 'before_fit':
                self.__dict__[event] = partial(self._process_event, event)

    def on_added(self) -> None:
        "Take part in the counts of the Learner's Composer callbacks."
        self.host = find_or_add(self.learn, ComposerRun)

    @property
    def view(self) -> ComposerState:
        "State that all Composer callbacks of the Learner share."
        return self.host.view

    def _find_hooks(self, cb: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        "Return the callback's `run_event`, and its methods named after events, by name."
        base = 'composer.core.callback'  # module of the base class, whose methods do nothing
        return own_hooks(cb, ['run_event'], base), own_hooks(cb, HOOKS, base)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, '_known_learner': None}

    def _has_hook_for(self, event: str) -> bool:
        "Return True if the callback has a hook for an event."
        names = {name for table in (*TABLES, _MOVED) for name in table.get(event, '').split()}
        return bool((self._run_event_hook and names) or names & {*self._hooks})

    # -- events ------------------------------------------------------------------------------------

    def _process_event(self, event: str) -> None:
        "Update the counts, and run the hooks for the Composer events of a learnkit event."
        if event not in ('close', 'post_close'):
            self.begin()
        if event in ('before_load', 'after_load'):
            self._has_loaded = True
        elif event == 'before_fit' and not self._has_loaded:
            self._has_loaded = True
            self._fire('before_load')
            self._fire('after_load')
        self.host.is_split = event in BATCH_EVENTS
        self.host.has_graph = event in ('after_loss', 'before_backward')
        for name in self._find_composer_events(event):
            starts = name == 'before_train_batch'
            if starts and self._trainer is not None and self._find_hook(name) is not None:
                self._trainer.begin_batch()
            self._fire(name, kind_of_loader(event, self.learn))

    def begin(self) -> None:
        "Run `init` before the first event of a Learner."
        if self._known_learner is None or self._known_learner() is not self.learn:
            self._known_learner = ref(self.learn)
            self._has_loaded = False
            self._trainer = add_trainer(self.learn, self.is_destination)
            model: Any = bare_model(self.learn.model)
            if takes_batches(model) and hasattr(model, 'logger'):
                model.logger = self.host.logs
            self._fire('init', '')
            self.host.loader_kind = 'train'

    def _find_composer_events(self, event: str) -> list[str]:
        "Return the Composer events of a learnkit event, corrected where Composer fires them at other times."
        learn = self.learn
        names = [name for name in composer_events(event, learn) if name != 'init']
        if event == 'before_epoch' and learn.fitting and self._starts_training():
            names = ['iteration_start', *names]
        elif event == 'after_train' and self.host.unfinished_counts is not None:
            names = ['fit_end']  # in Composer the last evaluation follows `fit_end` in this case
        elif event in ('epoch_checkpoint', 'after_fit') and self.host.unfinished_counts is not None:
            names = []
        return names

    def _starts_training(self) -> bool:
        "Return True in the first epoch of a training without iterations."
        learn = self.learn
        return learn.epochs_per_iteration is None and not learn.time.ba and not learn.resumed

    def _fire(
        self,
        name: str,  # name of a Composer event
        kind: str = 'train',  # loader in the state: 'train', 'eval' or 'predict'; '': none yet
    ) -> None:
        "Run the callback's hook for a Composer event, if there is one."
        hook = self._find_hook(name)
        if hook is None:
            return
        self.host.types, self.host.loader_kind = self.types, kind
        try:
            with self.host.composer_modes():
                hook()
        except Exception as e:
            add_place(e, f'{type(self.wrapped).__name__}.{name}, a Composer-style callback')
            raise

    def _find_hook(self, name: str) -> Callable[[], Any] | None:
        "Return a function that runs the hook for a Composer event, or None without a hook."
        hook = self._hooks.get(name)
        if name == 'post_close':
            return hook
        if self._run_event_hook and name != 'close':  # Composer has no event for `close`
            return partial(self._run_event_hook, self.types.Event(name), self.view, self.host.logs)
        return None if hook is None else partial(hook, self.view, self.host.logs)


class _FromAlgorithm(_FromComposer):
    "Run a Composer algorithm, before callbacks: `apply` at each event for which `match` returns True."

    order = 59
    is_algorithm = True

    @override
    def _find_hooks(self, cb: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return {'run_event': self._apply}, own_hooks(cb, ['close', 'post_close'])

    @override
    def begin(self) -> None:
        "Run `init` after the `init` of callbacks, as Composer does."
        for cb in self.learn.cbs:
            if isinstance(cb, _FromComposer) and not cb.is_algorithm:
                cb.begin()
        super().begin()

    def _apply(self, event: Any, state: Any, logger: Any) -> None:
        if self.wrapped.match(event, state):
            self.wrapped.apply(event, state, logger)


class _FromDestination(_FromComposer):
    "Run a logger destination of Composer, after callbacks, and pass the values of `learn.log` to it."

    order = 61
    is_destination = True

    def receive_log(
        self,
        name: str,
        value: Any,
        weight: Any = 1,  # unused
        shown: bool = True,  # unused
    ) -> None:
        "Pass a value to the destination, at the current batch."
        self.wrapped.log_metrics({name: value}, self.host.collect_counts()['batch'])
