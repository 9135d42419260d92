# SPDX-License-Identifier: Apache-2.0
"""Base class of callbacks, which handle events and read the Learner's attributes like their own."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from enum import Enum
from functools import cache, partial, wraps
from pathlib import Path
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any
from warnings import warn

from typing_extensions import override

from learnkit.core.errors import CallbackError
from learnkit.core.hints import check_keywords
from learnkit.core.model import name_of, snake_case, unwrap_partial
from learnkit.core.time import Time, as_time
from learnkit.core.validation import warn_user
from learnkit.engine.counters import Every
from learnkit.engine.events import (
    EVENTS,
    INNER_EVENTS,
    METHODS,
    canonical_event,
    event_like,
)
from learnkit.engine.traits import own_attribute, trait_like

if TYPE_CHECKING:
    from torch import Tensor, nn

    from learnkit.comm.ranks import Comm
    from learnkit.core.time import Timestamp
    from learnkit.learner import Learner
    from learnkit.optim.wrapper import OptimWrapper

# attributes of the base class whose slightly different names are reported
_OPTIONS = ('runs_first', 'runs_last', 'first_process_only')
# prefixes of methods that display an object in a notebook; a callback does not take them from the Learner
SHOWN_ELSEWHERE = ('_repr_', '_ipython_')
# worded as in fastai
SHADOWING = 'You are shadowing an attribute ({0}) that exists in the learner. Use `self.learn.{0}` to avoid this'
_REPR_TYPES = (bool, int, float, str, Path, Time)  # types of options in a repr
# names in this package, and the names that other libraries have for the same value
_FOREIGN_NAMES = {
    'x` or `xb': 'input inputs',
    'y` or `yb': 'label labels target targets',
    'x.device': 'device',
    'pred': 'logits output outputs preds y_pred',
    'opt': 'optim optimizer',
    "opt.hypers[-1]['lr']": 'learning_rate',
    'loss_func': 'criterion loss_fn',
    'epoch': 'current_epoch epoch_idx',
    'iter': 'batch_idx step',
    'train_iter': 'global_step',
    'n_epoch': 'epochs max_epochs n_epochs num_epochs',
    'dls.train': 'train_dl train_loader',
    "history[-1]['valid_loss']": 'valid_loss val_loss',
}
_SYNONYMS = {name: here for here, names in _FOREIGN_NAMES.items() for name in names.split()}
# attribute with the names of the attributes that a constructor of this package has set
SET_BY_BASE = '_set_by_base'
_HANDLER_NAMES = frozenset([*EVENTS, *METHODS])
# attributes that the Learner's handler tables depend on
_DISPATCH_ATTRIBUTES = _HANDLER_NAMES | {'run', 'run_train', 'run_valid', 'order'}


class MissingAttribute(AttributeError):
    "Error for an attribute that no owner has. The message, with the closest names, is built when it is read."

    def __init__(
        self,
        name: str,  # name of the missing attribute
        *owners: object,  # objects that were searched, in order
        why: str = '',  # explanation added to the message
    ) -> None:
        super().__init__(name, name=name, obj=owners[0])
        self.owners = owners
        self.why = why

    def __str__(self) -> str:
        owners = ' nor '.join(f'`{type(o).__name__}`' for o in self.owners)
        start = f'Neither {owners} has' if len(self.owners) > 1 else f'{owners} does not have'
        why = f' {self.why}' if self.why else ''
        return f'{start} an attribute `{self.name}`.{why}{self._suggest()}'

    def _suggest(self) -> str:
        "Return the sentence that names this package's word for the attribute, or else the closest names."
        name = str(self.name)
        if name in _SYNONYMS:
            return f' Here it is `{_SYNONYMS[name]}`.'
        if hasattr(getattr(sys.modules.get('fastai.learner'), 'Learner', None), name):
            return f" fastai's Learner has it, perhaps by `@patch`: patch `learnkit.Learner` with `{name}`, too."
        hidden_prefix = '__' if name.startswith('_') else '_'
        known = {n for o in self.owners for n in dir(o) if not n.startswith(hidden_prefix)}
        close = get_close_matches(name, known - {name}, n=3, cutoff=0.6)
        quoted = ', '.join(f'`{n}`' for n in close)
        return f' Closest: {quoted}.' if close else ''


def defined_on_class(obj: object, name: str) -> bool:
    "Return True if the class of `obj`, or a base class, defines `name`; no property is evaluated."
    return any(name in vars(cls) for cls in type(obj).__mro__)


class Callback:
    """Change the training loop at its events: a method named after an event runs when the event fires.

    The events are listed in `learnkit.EVENTS`; `learn.show_training_loop()` prints them in order. An attribute that
    the callback does not have is read from `self.learn` (`self.loss` is `self.learn.loss`). Attributes of the Learner
    are set through `self.learn`. Return values of handlers are ignored.

    `Callback(before_fit=f, ...)` makes a callback from plain functions, each of which is called with the callback;
    `order`, `run_in`, `run_train` and `run_valid` may be given next to them.

    Callbacks run by `order`, then in the order of adding: to see the epoch's row in `self.history`, an `after_epoch`
    needs an `order` above the Recorder's 50, as in `Callback(after_epoch=f, order=60)`. `run_train = False` or
    `run_valid = False` skips the events of training or of evaluation batches. `run_in = 'fit'` skips all events of
    `validate()` and `get_preds()`. Raising a Cancel exception skips the rest of its level. `runs_first` and
    `runs_last` name events in which it runs before or after all other callbacks; with `first_process_only = True`
    its handlers run in rank 0 only.

    A callback may start an evaluation from any of its events: `learn.validate(dl=...)`, `get_preds`, `show_results`.
    That evaluation calls all other callbacks, but not the callback itself: put code that changes the batches into a
    separate callback.

    A method `forward_context` (around model and loss) or `backward_context` returns a context manager that is entered
    for each batch, for example autocast, or None for no context.

    A subclass that overrides `run_event` (or `__call__`) gets every event there; its methods named after events run
    only if it calls super. `state_dict` and `load_state_dict` hold the state that must survive a checkpoint.

    Raises `UnknownEventError` for a keyword that is not an event and `CallbackError` for an unknown `run_in`.

    >>> class Shout(Callback):
    ...     def before_fit(self): return 'go!'
    >>> Shout()('before_fit')
    'go!'
    >>> Callback(before_fit=lambda cb: f'hello from {cb.name}')('before_fit')
    'hello from callback'
    """

    order: float = 0  # callbacks run in this order, then in the order of adding
    run: bool = True  # False: switched off until the end of the fit
    run_in: str = 'any'  # 'fit': not in validate() or get_preds(); 'evaluation': only in these
    run_train: bool = True  # whether the events of a batch run in training
    run_valid: bool = True  # whether the events of a batch run in evaluation
    run_before: Any = ()  # classes (or names) of callbacks that must run after this one
    run_after: Any = ()  # classes (or names) of callbacks that must run before this one
    runs_first: Sequence[str] = ()  # events in which it runs before all other callbacks
    runs_last: Sequence[str] = ()  # events in which it runs after all other callbacks
    first_process_only: bool = False  # whether its handlers run in rank 0 only
    observer: bool = False  # changes nothing: its handlers run under `torch.no_grad()`
    state_key: str | None = None  # key in checkpoints; None: the callback's name, made unique
    learn: Learner = None  # type: ignore[assignment]  # the Learner, once added

    # attributes that are read from the Learner, which `dir` lists
    x: Any  # inputs of the batch: a tensor, or a tuple of several
    y: Any  # targets of the batch: a tensor, or a tuple of several
    xb: tuple[Any, ...]
    yb: tuple[Any, ...]
    pred: Any  # predictions, from after_pred on
    loss: Tensor  # copy of the loss, with its graph until the batch ends
    loss_grad: Tensor  # loss that backward runs from
    epoch: int
    n_epoch: int | None
    iter: int  # number of the batch in its loader
    n_iter: int | None
    train_iter: int  # number of training batches of the fit so far
    pct_train: float  # share of the fit that is done
    training: bool  # False in an evaluation
    fitting: bool  # False in validate() and get_preds()
    time: Timestamp  # amounts finished so far, over all fits
    world: Comm  # rank, size and collectives of the processes
    model: nn.Module
    opt: OptimWrapper
    dls: Any
    dl: Any
    dl_name: str
    loss_func: Callable[..., Any]
    recorder: Any
    history: list[dict[str, Any]]  # a row an epoch
    smooth_loss: Tensor

    if TYPE_CHECKING:  # the events, for editors and type checkers

        def after_create(self) -> Any: ...
        def before_load(self) -> Any: ...
        def after_load(self) -> Any: ...
        def before_fit(self) -> Any: ...
        def before_iteration(self) -> Any: ...
        def before_epoch(self) -> Any: ...
        def before_train(self) -> Any: ...
        def before_draw(self) -> Any: ...
        def after_draw(self) -> Any: ...
        def before_batch(self) -> Any: ...
        def before_pred(self) -> Any: ...
        def after_pred(self) -> Any: ...
        def after_loss(self) -> Any: ...
        def before_backward(self) -> Any: ...
        def after_cancel_backward(self) -> Any: ...
        def after_backward(self) -> Any: ...
        def before_step(self) -> Any: ...
        def after_cancel_step(self) -> Any: ...
        def after_step(self) -> Any: ...
        def after_cancel_batch(self) -> Any: ...
        def after_batch(self) -> Any: ...
        def batch_checkpoint(self) -> Any: ...
        def after_cancel_train(self) -> Any: ...
        def after_train(self) -> Any: ...
        def before_eval(self) -> Any: ...
        def before_validate(self) -> Any: ...
        def after_cancel_validate(self) -> Any: ...
        def after_validate(self) -> Any: ...
        def after_eval(self) -> Any: ...
        def after_cancel_epoch(self) -> Any: ...
        def after_epoch(self) -> Any: ...
        def epoch_checkpoint(self) -> Any: ...
        def after_iteration(self) -> Any: ...
        def iteration_checkpoint(self) -> Any: ...
        def after_cancel_fit(self) -> Any: ...
        def after_fit(self) -> Any: ...
        def before_predict(self) -> Any: ...
        def after_predict(self) -> Any: ...
        def after_error(self) -> Any: ...
        def cleanup(self) -> Any: ...
        def close(self) -> Any: ...
        def post_close(self) -> Any: ...

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if '__init__' in vars(cls) and cls.__module__.startswith('learnkit.'):
            cls.__init__ = check_keywords(_record_attributes(cls.__init__))  # type: ignore[method-assign]

    def __init__(
        self,
        *,
        order: float | None = None,  # place among the callbacks; None: the class's
        run_in: str | None = None,  # 'fit', 'evaluation' or 'any'; None: the class's
        run_train: bool | None = None,  # False: no batch events in training; None: the class's
        run_valid: bool | None = None,  # False: no batch events in evaluation; None: the class's
        **handlers: Callable[..., Any] | None,  # event=function, called with the callback
    ) -> None:
        if run_in not in (None, 'any', 'fit', 'evaluation'):
            raise CallbackError(f"run_in={run_in!r}: pass 'any', 'fit' or 'evaluation'.")
        options = {'order': order, 'run_in': run_in, 'run_train': run_train, 'run_valid': run_valid}
        for name, value in options.items():
            if value is not None:
                setattr(self, name, value)
        for name, f in handlers.items():
            canonical_event(name, where=type(self).__name__)
            if f is not None:
                setattr(self, name, MethodType(f, self))

    def __call__(self, event_name: str) -> Any:
        "Run the handler of `event_name` and return its value, or None for an event without a handler."
        return self.run_event(event_name)

    def run_event(self, event_name: str) -> Any:
        "Run the handler of `event_name` if the callback is switched on for this event, and return its value."
        if not self.run or not self.runs_at(event_name, getattr(self.learn, 'training', None)):
            return None
        handler = own_attribute(self, event_name)
        return handler() if handler else None

    def runs_at(self, event_name: str, training: bool | None) -> bool:
        "Return True if `run_train` or `run_valid` allows this event. Outside of a Learner (None), either is enough."
        if event_name not in INNER_EVENTS:
            return True
        return (self.run_train and training is not False) or (self.run_valid and not training)

    def state_dict(self) -> dict[str, Any] | None:
        "Return the state that must survive a checkpoint (tensors, numbers, strings, containers of them), or None."
        return None

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the state that `state_dict` returned."

    def save_to_checkpoint(self, folder: Path) -> None:
        """Write files that belong to the checkpoint into `folder`, which exists and is empty.

        `Checkpoint` calls this method in rank 0 whenever it writes a checkpoint. The checkpoint
        lists the files with their SHA-256: if one is missing or changed, the checkpoint is damaged.
        The files are removed with the checkpoint. For tensors that fit into memory `state_dict` is
        simpler.

        >>> class Notes(Callback):
        ...     def save_to_checkpoint(self, folder):
        ...         (folder / 'notes.txt').write_text('after batch 10')
        ...     def resume_from_checkpoint(self, folder, model):
        ...         self.notes = (folder / 'notes.txt').read_text()
        """

    def resume_from_checkpoint(self, folder: Path, model: Any) -> None:
        """Read the files that `save_to_checkpoint` wrote into `folder`.

        Called after `load_state_dict` when a fit is resumed from a file. A callback without
        `save_to_checkpoint` gets the folder of the checkpoints.
        """

    @property
    def name(self) -> str:
        "Name of the class in snake_case without a trailing `Callback`, under which the Learner has the callback."
        return _shorten_class_name(type(self).__name__)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(('__', *SHOWN_ELSEWHERE)):
            raise AttributeError(name, name=name, obj=self)
        if defined_on_class(self, name):
            return object.__getattribute__(self, name)  # raises the error of the property again
        learn = self.learn
        if learn is None:
            raise MissingAttribute(name, self, why='It is not part of a Learner yet.')
        try:
            return getattr(learn, name)
        except MissingAttribute as e:
            if e.name != name:  # raised inside a property
                raise
            why = e.why
        raise MissingAttribute(name, self, learn, why=why)

    def __setattr__(self, name: str, value: object) -> None:
        is_new = name not in self.__dict__ and name not in ('learn', 'run')
        if is_new and not name.startswith('_') and _has_attribute(self.learn, name):
            warn(SHADOWING.format(name), stacklevel=2)
        object.__setattr__(self, name, value)
        if name in _DISPATCH_ATTRIBUTES and hasattr(self.learn, 'callback_changed'):
            self.learn.callback_changed(self, name)

    def __delattr__(self, name: str) -> None:
        object.__delattr__(self, name)
        if name in _DISPATCH_ATTRIBUTES and hasattr(self.learn, 'callback_changed'):
            self.learn.callback_changed(self, name)

    def __dir__(self) -> list[str]:
        of_batch = [] if self.learn is None else Callback.__annotations__
        return sorted({*super().__dir__(), *of_batch})

    def __repr__(self) -> str:
        handlers = [
            f'{event}={name_of(unwrap_partial(f.__func__))}'
            for event, f in self.__dict__.items()
            if event in _DISPATCH_ATTRIBUTES and isinstance(f, MethodType)
        ]
        arguments = ', '.join([*_list_changed_options(self), *handlers])
        return f'{type(self).__name__}({arguments})' if arguments else type(self).__name__


def has_user_code(
    cb: object,  # callback of this package, of a user or of another package
) -> bool:
    """Return True if the class of a callback is not from this package, or a handler is a function from elsewhere.

    >>> has_user_code(Callback()), has_user_code(Callback(before_fit=print))
    (False, True)
    """
    if not is_from_learnkit(type(cb)):
        return True
    own = vars(cb)
    functions: list[Any] = [own[name] for name in EVENTS if isinstance(own.get(name), FunctionType)]
    functions += [
        f.__func__ for f in own.values() if isinstance(f, MethodType) and f.__self__ is cb
    ]
    return not all(map(is_from_learnkit, functions))


def is_from_learnkit(
    o: Any,  # class or function
) -> bool:
    "Return True if a class or function is defined in this package."
    return str(getattr(o, '__module__', '')).partition('.')[0] == 'learnkit'


def _record_attributes(init: Callable[..., None]) -> Callable[..., None]:
    "Wrap a constructor of this package: a callback with a user's code notes the names of the attributes set by it."

    @wraps(init)
    def call(self: Callback, *args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        own = self.__dict__
        before = set(own)
        init(self, *args, **kwargs)
        if has_user_code(self):
            own[SET_BY_BASE] = own.get(SET_BY_BASE, frozenset()) | (own.keys() - before)

    return call


def _make_signature() -> inspect.Signature:
    "Return the constructor's signature with a keyword for each event, so that editors complete the names."
    instance, *options, handlers = inspect.signature(Callback.__init__).parameters.values()
    keyword = inspect.Parameter.KEYWORD_ONLY
    events = [inspect.Parameter(name, keyword, default=None) for name in EVENTS]
    return inspect.Signature([instance, *events, *options, handlers], return_annotation='None')


Callback.__init__.__signature__ = _make_signature()  # type: ignore[attr-defined]


def _list_changed_options(cb: Callback) -> Iterator[str]:
    "Yield `name=value` for each constructor option whose attribute of the same name is not the default."
    for name, option in inspect.signature(type(cb).__init__).parameters.items():
        value = vars(cb).get(name)
        default = option.default
        if isinstance(value, _REPR_TYPES):
            displayed = str(value) if isinstance(value, (Enum, Time)) else value
            if displayed not in (default, f'{default}{getattr(value, "unit", "")}'):
                yield f'{name}={displayed!r}'
        elif callable(value) and default is not None:
            yield f'{name}={getattr(value, "__name__", value)}'


def _has_attribute(learn: object, name: str) -> bool:
    "Return True if the Learner or its model has an attribute or property `name`."
    if learn is None:
        return False
    return defined_on_class(learn, name) or hasattr(learn, name)


@cache
def _shorten_class_name(cls: str) -> str:
    return snake_case(cls, 'Callback')


def name_callback(
    cb: object,  # callback of this package, of a user or of another package
    event: str,  # event at which it runs
) -> str:
    """Return the class name of a callback; for a `Callback` that was made from functions, with that of the event.

    >>> name_callback(Callback(), 'after_fit'), name_callback(Callback(after_fit=print), 'after_fit')
    ('Callback', 'Callback(after_fit=print)')
    """
    cls = type(cb).__name__
    handler = getattr(cb, '__dict__', {}).get(event)
    if type(cb) is not Callback or not isinstance(handler, MethodType):
        return cls
    return f'{cls}({event}={name_of(unwrap_partial(handler.__func__))})'


def name_handler(cb: object, event: str) -> str:
    "Return the name of the handler of an event, as `Recorder.after_batch` or `Callback(after_batch=f)`."
    name = name_callback(cb, event)
    return name if '(' in name else f'{name}.{event}'


def check_handlers(cb: Callback) -> None:
    """Warn of a user's methods that look like handlers, and that no event calls.

    Raises `CallbackError` for a handler with a parameter that no event passes."""
    for cls in type(cb).__mro__[:-1]:  # without `object`
        if cls.__module__.startswith('learnkit.'):
            continue
        for name, member in vars(cls).items():
            if trait := trait_like(name, _OPTIONS):
                warn_user(
                    f'{type(cb).__name__}.{name} is not an attribute that learnkit asks for. Did you mean `{trait}`?'
                )
            if not isinstance(member, FunctionType):
                continue
            if name in _HANDLER_NAMES:
                _check_parameters(cls, name, member)
            elif meant := event_like(name):
                warn_user(
                    f'{type(cb).__name__}.{name} is not an event, and no event calls it. Did you mean `{meant}`?'
                )


def _check_parameters(cls: type, name: str, handler: FunctionType) -> None:
    "Raise `CallbackError` for a parameter without default after `self`, such as `learn`."
    others = [*inspect.signature(handler).parameters.values()][1:]
    required = [p.name for p in others if p.default is p.empty and p.kind < p.VAR_POSITIONAL]
    if required:
        raise CallbackError(
            f'{cls.__name__}.{name} takes {", ".join(required)}, but events pass no arguments: write '
            f'`def {name}(self):`, and `self.learn` in it.'
        )


class IntervalCallback(Callback):
    """Count an interval from the Learner's start; base of `Periodic` and of monitors.

    Raises `TimeError` for an interval that is not positive or cannot be parsed and, before training, for an interval
    in tokens if tokens are not counted. Checkpointed: the number of intervals passed.

    >>> IntervalCallback(2, 'ep').every
    Time('2ep')
    """

    run_valid = False

    def __init__(
        self,
        every: str | int | Time,  # interval
        unit: str,  # unit of a plain number
        **handlers: Any,  # event=function pairs, `order`, `run_in`
    ) -> None:
        super().__init__(**handlers)
        self.every = as_time(every, unit)
        self._interval = Every(self.every)

    def before_fit(self) -> None:
        "Count from the Learner's current time."
        if self.learn.fitting:
            self._interval.start(self.learn)

    @override
    def state_dict(self) -> dict[str, Any]:
        "Return the number of intervals passed."
        return self._interval.state_dict()

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the number of intervals passed."
        self._interval.load_state_dict(sd)


class Periodic(IntervalCallback):
    """Call `on_every` each time the run crosses a multiple of `every`.

    `every` counts from the Learner's start, in any unit of `learnkit.core.time.Time`:
    `Periodic(every='500ba')` runs after batches 500, 1000, ...; epochs run in `after_epoch`,
    iterations in `after_iteration`, all other units in `after_batch` of training.
    `Periodic(every='2ep', on_every=f)` calls the function `f` with the callback. With
    `at_eval = True`, `on_every` is also called at the end of each `learn.validate()`.

    Values can be tracked at any event between two calls: `after_backward` fires once a microbatch (ksuit's
    `track_after_accumulation_step`), `after_batch` once a batch, `after_step` once an optimizer step
    (`track_after_update_step`).

    >>> Periodic(every='2ep', on_every=lambda cb: print(cb.epoch)).every
    Time('2ep')
    """

    at_eval: bool = False  # whether `on_every` is also called after an evaluation outside a fit

    def __init__(
        self,
        every: str | int | Time,  # interval; a plain number counts epochs
        on_every: Callable[[Any], Any] | None = None,  # function of the callback; None: the method
        **handlers: Any,  # further event=function pairs, `order`, `run_in`
    ) -> None:
        super().__init__(every, 'ep', **handlers)
        if on_every is not None:
            self.__dict__['on_every'] = MethodType(on_every, self)
        event = {'ep': 'after_epoch', 'iter': 'after_iteration'}.get(self.every.unit, 'after_batch')
        self.__dict__[event] = partial(self._handle_event, own_attribute(self, event))

    def on_every(self) -> None:
        "Run at the end of each interval."

    def after_eval(self) -> None:
        "Call `on_every` after an evaluation outside a fit if `at_eval` is set."
        if self.at_eval and not self.learn.fitting:
            self.on_every()

    def _handle_event(self, handler: Callable[[], Any] | None) -> None:
        "Run the subclass's handler of this event, and then `on_every` if it is due."
        if handler:
            handler()
        if self._interval.is_due(self.learn):
            self.on_every()
