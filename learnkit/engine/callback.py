"""The callback: reads the learner by proxy, writes to it through `self.learn`, and runs at the events it handles."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from enum import Enum
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any
from warnings import warn

from fastcore.basics import camel2snake

from learnkit.core.errors import CallbackError
from learnkit.core.learner_type import LearnerLike
from learnkit.core.time import Time, Timestamp, as_time, crossings
from learnkit.engine.countable import check_countable
from learnkit.engine.events import ALIASES, CONTEXTS, EVENTS, INNER_EVENTS, canonical_event

__all__ = ['Callback', 'Periodic', 'MissingAttribute']

SHOWN_ELSEWHERE = (
    '_repr_',
    '_ipython_',
)  # what a notebook asks of every object: the learner's answer would be wrong
# in fastai's words
SHADOWING = 'You are shadowing an attribute ({0}) that exists in the learner. Use `self.learn.{0}` to avoid this'
_PLAIN = (bool, int, float, str, Path, Time)  # options whose values a repr shows
# what other libraries, and people, call what is there under another name
ELSEWHERE = {
    name: here
    for here, names in {
        'x` or `xb': 'input inputs',
        'y` or `yb': 'label labels target targets',
        'x.device': 'device',
        'pred': 'logits output outputs preds y_pred',
        'opt': 'optim optimizer',
        "opt.hypers[-1]['lr']": 'learning_rate',
        'loss_func': 'criterion loss_fn',
        'learn': 'learner trainer',
        'epoch': 'current_epoch epoch_idx',
        'iter': 'batch_idx step',
        'train_iter': 'global_step',
        'n_epoch': 'epochs max_epochs n_epochs num_epochs',
        'dls.train': 'train_dl train_loader',
        'dls.valid': 'val_dl val_loader valid_dl valid_loader',
    }.items()
    for name in names.split()
}
# changes the learner must hear of
_WATCHED = frozenset(
    {'run', 'run_train', 'run_valid', 'order', *EVENTS, *CONTEXTS.values(), *ALIASES}
)


class MissingAttribute(AttributeError):
    "No owner has the attribute. The message, with the closest names, is made only when it is read."

    def __init__(
        self,
        name: str,  # the attribute that was asked for
        *owners: object,  # who was asked, in order
        why: str = '',  # what is known about this name
    ) -> None:
        super().__init__(name, name=name, obj=owners[0])
        self.owners, self.why = owners, why

    def __str__(self) -> str:
        who = ' nor '.join(f'`{type(o).__name__}`' for o in self.owners)
        text = f'Neither {who} has' if len(self.owners) > 1 else f'{who} does not have'
        hidden = '__' if str(self.name).startswith('_') else '_'
        known = {n for o in self.owners for n in dir(o) if not n.startswith(hidden)} - {self.name}
        close = get_close_matches(str(self.name), known, n=3, cutoff=0.6)
        hint = f' Closest: {", ".join(f"`{n}`" for n in close)}.' if close else ''
        hint = f' Here it is `{here}`.' if (here := ELSEWHERE.get(str(self.name))) else hint
        return f'{text} an attribute `{self.name}`.{" " + self.why if self.why else ""}{hint}'


def defined_on_class(obj: object, name: str) -> bool:
    "Tell whether a class of `obj` defines `name`, without running it."
    return any(name in vars(cls) for cls in type(obj).__mro__)


def _is_miss(e: AttributeError, obj: object, name: str) -> bool:
    "Tell a name that `obj` does not have from an AttributeError raised inside one of its properties."
    if isinstance(e, MissingAttribute):
        return e.name == name
    return (
        not getattr(obj, '_marks_misses', False)
        and not defined_on_class(obj, name)
        and e.name in (None, name)
    )


class Callback:
    """Change the training loop at its events: a method named after an event runs there.

    The events are in `learnkit.EVENTS`; `learn.show_training_loop()` prints them in their order. Any attribute that the
    callback does not have is read from `self.learn` (`self.loss` is `self.learn.loss`); writing goes through
    `self.learn` explicitly. `Callback(before_fit=f, ...)` makes a callback from plain functions, each of which is
    called with the callback.

    Callbacks run by `order`, then as they were added: to see the epoch's row in `self.history`, an `after_epoch` needs
    an `order` above the Recorder's 50. `run_train = False` or `run_valid = False` leaves out the
    events of training or of evaluation batches, `run_in = 'fit'` all events of `validate()` and
    `get_preds()`. Raising a Cancel exception skips the rest of its level.

    A callback may start an evaluation from any of its events: `learn.validate(dl=...)`, `get_preds`, `show_results`.
    The callback itself is not called in that evaluation, all other callbacks are; what changes the batches belongs
    into a callback of its own then.

    What events cannot give is a context around a part of each batch: a method `forward_context` (from the model to the
    loss) or `backward_context` returns one, autocast for example, or None where there is none now.

    A subclass that overrides `run_event` (or `__call__`) gets every event there and none of its named ones, unless it
    calls super. `state_dict` and `load_state_dict` carry what must survive a checkpoint.

    Raises `UnknownEventError` for a keyword that is no event and `CallbackError` for a function that cannot be called
    with the callback.

    >>> class Shout(Callback):
    ...     def before_fit(self): return 'go!'
    >>> Shout()('before_fit')
    'go!'
    >>> Callback(before_fit=lambda cb: f'hello from {cb.name}')('before_fit')
    'hello from callback'
    """

    order: float = 0  # callbacks run in this order, then in the order of adding
    run: bool = True  # False switches it off until the end of the fit
    run_in: str = 'any'  # 'fit': not in validate() and get_preds(); 'evaluation': only in those
    run_train: bool = True  # whether events of a batch run in training
    run_valid: bool = True  # whether events of a batch run in evaluation
    run_before: Any = ()  # classes (or names) of callbacks that must run after this one
    run_after: Any = ()  # classes (or names) of callbacks that must run before this one
    runs_last: tuple[str, ...] = ()  # events in which it runs after all others, at any `order`
    remove_on_fetch: bool = False  # leave it out while FetchPredsCallback predicts
    remove_on_find: bool = False  # leave it out while lr_find looks for a learning rate
    writes_files: bool = False  # leave it out while `check_resume` tries something
    first_process_only: bool = False  # run its handlers in rank 0 only
    observer: bool = False  # it changes nothing: its handlers run under `torch.no_grad()`
    state_key: str | None = None  # its key in checkpoints; None: its name, made unique
    needs_whole_weights: bool = False  # refuse a fit in which the weights are sharded
    follows_weights: bool = False  # roll its state back with the weights (`GuardNonFinite`)
    needs_events: bool = True  # warn if a loop of your own never fires an event that it handles
    wall_clock: tuple[str, ...] = ()  # entries of its state that differ from run to run: times
    learn: LearnerLike = None  # type: ignore[assignment]  # the Learner, once added

    def __init__(
        self,
        **handlers: Callable[..., Any],  # event=function; each is called with the callback
    ) -> None:
        for name, f in handlers.items():
            canonical_event(name, where=type(self).__name__)
            _check_takes_callback(name, f, self)
        for name, f in handlers.items():
            setattr(self, name, MethodType(f, self))

    def __call__(self, event_name: str) -> Any:
        "Run the handler of `event_name` and return its value; an event without one gives None."
        return self.run_event(event_name)

    def run_event(self, event_name: str) -> Any:
        "Run the handler of `event_name`, when the callback is switched on for it, and return its value."
        if not self.run or not self._runs_when(event_name, getattr(self.learn, 'training', None)):
            return None
        handler = own_handler(self, event_name)
        return handler() if handler else None

    def _runs_when(self, event_name: str, training: bool | None) -> bool:
        "Tell whether `run_train` and `run_valid` let this event through; outside a learner both may."
        if event_name not in INNER_EVENTS:
            return True
        return (self.run_train and training is not False) or (self.run_valid and not training)

    def state_dict(self) -> dict[str, Any] | None:
        "Return what must survive a checkpoint (tensors, numbers, strings, containers of them), or None."
        return None

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Put back what `state_dict` returned."

    def save_to_checkpoint(self, folder: Path) -> None:
        """Write files that belong to the checkpoint into `folder`, which exists and is empty.

        `Checkpoint` calls it whenever it writes a checkpoint, in the first process. The files are
        listed in the checkpoint with their SHA-256: a checkpoint whose files are missing or changed
        is damaged. They are removed with the checkpoint. For tensors that fit into memory
        `state_dict` is simpler.

        >>> class Notes(Callback):
        ...     def save_to_checkpoint(self, folder):
        ...         (folder / 'notes.txt').write_text('after batch 10')
        ...     def resume_from_checkpoint(self, folder, model):
        ...         self.notes = (folder / 'notes.txt').read_text()
        """

    def resume_from_checkpoint(self, folder: Path, model: Any) -> None:
        """Read the files that `save_to_checkpoint` wrote into `folder`.

        A callback without `save_to_checkpoint` gets the folder of the checkpoints. Called when a
        fit is resumed from a file, after `load_state_dict`.
        """

    # -- called by name, and no events: also of callbacks that are switched off --------------------

    def on_added(self) -> None:
        "Called when the callback has been added to a Learner."

    def on_removed(self) -> None:
        "Called before the callback is removed from its Learner."

    def on_evaluation(self) -> None:
        "Called before `before_eval`, before any callback has acted on the evaluation."

    def on_draw_failed(self) -> None:
        "Called when a loader has raised."

    def on_reevaluation(self) -> None:
        "Called when an optimizer evaluates the loss again; raise here if that cannot be."

    def on_run_failed(self) -> None:
        "Called when an inner run has failed: undo what was changed for it, as the outer run may continue."

    def on_run_paused(self) -> None:
        "Called when a prediction stream pauses between two batches: leave the Learner as it was before."

    def on_run_resumed(self) -> None:
        "Called when a paused prediction stream continues."

    @property
    def name(self) -> str:
        "The class's name in snake_case, without a trailing `Callback`: the learner has the callback under it."
        cls = type(self).__name__
        return camel2snake(cls.removesuffix('Callback') or cls)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(('__', *SHOWN_ELSEWHERE)):
            raise AttributeError(name, name=name, obj=self)
        if defined_on_class(self, name):
            return object.__getattribute__(self, name)  # raises its own error again
        learn = self.learn
        if learn is None:
            raise MissingAttribute(name, self, why='It is not part of a Learner yet.')
        try:
            return getattr(learn, name)
        except AttributeError as e:
            if not _is_miss(e, learn, name):
                raise
            why = getattr(e, 'why', '')
        raise MissingAttribute(name, self, learn, why=why)

    def __setattr__(self, name: str, value: object) -> None:
        if name not in self.__dict__ and name not in ('learn', 'run') and _has(self.learn, name):
            warn(SHADOWING.format(name), stacklevel=2)
        object.__setattr__(self, name, value)
        if name in _WATCHED and hasattr(self.learn, 'callback_changed'):
            self.learn.callback_changed(self, name)

    def __delattr__(self, name: str) -> None:
        object.__delattr__(self, name)
        if name in _WATCHED and hasattr(self.learn, 'callback_changed'):
            self.learn.callback_changed(self, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(dir(self.learn) if self.learn is not None else ())})

    def __repr__(self) -> str:
        handlers = [
            f'{e}={_func_name(f.__func__)}'
            for e, f in self.__dict__.items()
            if e in _WATCHED and isinstance(f, MethodType)
        ]
        shown = ', '.join([*_changed_options(self), *handlers])
        return f'{type(self).__name__}({shown})' if shown else type(self).__name__


def _changed_options(cb: Callback) -> Iterator[str]:
    "Yield `name=value` of the constructor's options that differ from their defaults, as far as attributes tell."
    try:
        options = inspect.signature(type(cb).__init__).parameters
    except (TypeError, ValueError):
        return
    for name, option in options.items():
        value = vars(cb).get(name)
        if isinstance(value, _PLAIN):
            shown, default = (
                str(value) if isinstance(value, (Enum, Time)) else value,
                option.default,
            )
            is_default = isinstance(default, _PLAIN) and shown in (
                default,
                f'{default}{getattr(value, "unit", "")}',
            )
            if not is_default:
                yield f'{name}={shown!r}'
        elif callable(value) and option.default is not None:
            yield f'{name}={_func_name(value)}'


def _func_name(f: Any) -> Any:
    return getattr(f, '__name__', f)


def _has(learn: object, name: str) -> bool:
    "Tell whether the learner has `name`: an attribute of its own or of its model, however it is computed."
    if learn is None:
        return False
    return defined_on_class(learn, name) or hasattr(learn, name)


def _check_takes_callback(event_name: str, f: object, cb: Callback) -> None:
    "Refuse what is no function of one argument, the callback."
    if not callable(f):
        raise CallbackError(f'{event_name}={f!r}: give a function that takes the callback.')
    try:
        signature = inspect.signature(f)
    except (TypeError, ValueError):
        return  # some builtins have none: calling it will tell
    try:
        signature.bind(cb)
    except TypeError as e:
        raise CallbackError(
            f'{event_name}={getattr(f, "__name__", f)}{signature} cannot be called with the callback '
            f'alone ({e}). Write it as `def {getattr(f, "__name__", "f")}(cb): ...`.'
        ) from None


def own_handler(cb: object, event_name: str) -> Callable[[], Any] | None:
    "Return the handler that `cb` itself has for an event, never one of the learner's attributes."
    spellings = (event_name, *(other for other, name in ALIASES.items() if name == event_name))
    for spelling in spellings:
        try:
            handler = object.__getattribute__(cb, spelling)
        except AttributeError:
            continue
        if not callable(handler):
            raise CallbackError(
                f'{type(cb).__name__}.{spelling} is {handler!r}: an event needs a method or function.'
            )
        return handler
    return None


class Periodic(Callback):
    """Call `on_every` each time the run crosses a multiple of `every`.

    `every` counts from the Learner's start, in any unit of `learnkit.core.time.Time`:
    `Periodic(every='500ba')` runs after batches 500, 1000, ...; epochs run in `after_epoch`,
    iterations in `after_iteration`, all others in `after_batch` of training. As a function:
    `Periodic(every='2ep', on_every=f)`, called with the callback. With `at_eval = True` it is also
    called at the end of each `learn.validate()`.

    Between the periods any event tracks: `after_backward` comes once for each microbatch (what ksuit calls
    `track_after_accumulation_step`), `after_batch` once a batch, `after_step` once an optimizer step
    (`track_after_update_step`).

    Raises `TimeError` for an interval that is not positive or cannot be read and, before training, for one in tokens
    where nothing counts them.

    >>> Periodic(every='2ep', on_every=lambda cb: print(cb.epoch)).every
    Time('2ep')
    """

    run_valid = False
    # whether `on_every` is also called when an evaluation outside a fit is over
    at_eval: bool = False

    def __init__(
        self,
        every: str | int | Time,  # the interval; a plain number counts epochs
        on_every: Callable[[Any], Any] | None = None,  # called with the callback; None: the method
        **handlers: Callable[..., Any],  # further event=function pairs
    ) -> None:
        super().__init__(**handlers)
        self.every = as_time(every, 'ep')
        self._before = Timestamp()
        if on_every is not None:
            _check_takes_callback('on_every', on_every, self)
            self.__dict__['on_every'] = MethodType(on_every, self)
        elif type(self).on_every is Periodic.on_every:
            raise CallbackError(
                f'{type(self).__name__} does nothing: give `on_every=` or define `on_every(self)`.'
            )
        when = {'ep': 'after_epoch', 'iter': 'after_iteration'}.get(self.every.unit, 'after_batch')
        self.__dict__[when] = partial(self._track, own_handler(self, when))

    def on_every(self) -> None:
        "Do what is to be done each time the interval is over."

    def before_fit(self) -> None:
        "Start counting from where the Learner is."
        if not self.learn.fitting:
            return
        check_countable(self.learn, self.every)
        self._before = self.learn.time

    def after_eval(self) -> None:
        "Run at the end of an evaluation of its own, when that is wanted."
        if self.at_eval and not self.learn.fitting:
            self.on_every()

    def _track(self, track: Callable[[], Any] | None) -> None:
        "Run what a subclass does at this event, then `on_every` when it is due."
        if track:
            track()
        self._run_if_due()

    def _run_if_due(self) -> None:
        now = self.learn.time
        before, self._before = self._before, now
        if crossings(before, now, self.every):
            self.on_every()

    def state_dict(self) -> dict[str, Any]:
        "Return the time of the last look."
        return {'before': self._before.state_dict()}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Go on from the time of the last look."
        self._before = Timestamp.from_state_dict(sd['before'])
