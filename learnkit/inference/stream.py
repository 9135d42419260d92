"""Predict on a loader as an iterator over batches, in constant memory.

A stream is a run that pauses between batches. At each pause, the state that the Learner had outside of the run is
restored (module modes, random generators, loop state, gradient mode, lock, weights that callbacks changed). When the
run resumes, the state of the run is restored.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from fastcore.basics import noop

from learnkit.core.errors import CancelValidException, FitError
from learnkit.core.learner_type import LearnerLike
from learnkit.core.random import capture_rng, preserved_generators, restore_rng
from learnkit.engine.callback import Callback
from learnkit.engine.dispatch import as_list
from learnkit.engine.events import EVENTS
from learnkit.engine.run import STATE, open_level
from learnkit.engine.train_eval import missing_train_eval
from learnkit.optim.wrapper import evaluation_weights

__all__ = ['PredictionStream', 'end_streams', 'stream_predictions']

# attributes that a run sets on the Learner
_RUN_ATTRIBUTES = (*STATE, 'fitting', 'error', 'logger', 'create_mbar')


class PredictionStream(Iterator[tuple[Any, ...]]):
    """Iterator over the predictions of each batch, computed on demand; the result of `learn.predict_iter`.

    `close`, or deleting the stream, ends the run early. A `with` block closes the stream at its end.
    """

    def __init__(
        self,
        learn: LearnerLike,
        run: Callable[[Any], Iterator[None]],  # f(callback) -> iterator over batches
        batch: list[tuple[Any, ...]],  # list to which a step appends the batch's entries
        context: Callable[[], Any],  # f() -> context of each step
    ) -> None:
        self._learn = learn
        self._batch = batch
        self._context = context
        self._state: Any = None  # state of the paused run
        self._running = False
        self._is_invalid = False
        stream_ref = weakref.ref(self)  # weak, so that deleting the stream ends the run

        def on_event(cb: Callback) -> None:
            stream = stream_ref()
            if stream is None or cb.learn is not stream._learn:
                return
            if not stream._running and stream._state is not None:
                stream._invalidate()  # another run has started

        handlers: dict[str, Any] = dict.fromkeys(EVENTS, on_event)
        watch = Callback(order=float('-inf'), **handlers)
        self._steps = run(watch)

    def __next__(self) -> tuple[Any, ...]:
        if self._is_invalid:
            raise FitError(
                'This stream of predictions was ended when its Learner started something else (a fit, a '
                'validation, the rest of the fit it was in). Use it up before, or write the predictions '
                'with get_preds(sink=...).'
            )
        while not self._batch:
            self._advance(partial(next, self._steps))  # a cancelled batch appends nothing
        return self._batch.pop()

    def close(self) -> None:
        "End the run as a `CancelValidException` does, and restore the Learner; further calls have no effect."
        if self._state is None:
            return self._steps.close()  # type: ignore[attr-defined]  # it is a generator
        try:
            self._advance(partial(self._steps.throw, CancelValidException()))  # type: ignore[attr-defined]
        except StopIteration:
            pass

    def _invalidate(self) -> None:
        self._is_invalid = True
        self.close()

    def _advance(self, step: Callable[[], Any]) -> None:
        "Run until the next pause or the end, in the run's state, and restore the Learner's outer state."
        learn = self._learn
        with learn.lock:
            outer_state = _capture_paused_state(learn)
            self._running = True
            if self._state is not None:
                _restore_paused_state(learn, self._state)
                learn.lock.acquire()  # the run holds the lock, and has released it for the pause
            try:
                if self._state is not None:
                    learn.callbacks.notify('on_run_resumed')
                with self._context(), evaluation_weights(learn):
                    step()
                learn.callbacks.notify('on_run_paused')
                self._state = _capture_paused_state(learn)
                _PAUSED.add(self)
                learn.lock.release()
            except BaseException:
                self._state = None
                _PAUSED.discard(self)
                self._batch.clear()
                raise
            finally:
                self._running = False
                _restore_paused_state(learn, outer_state)

    def __repr__(self) -> str:
        if self._is_invalid:
            state = 'ended by its Learner'
        else:
            state = 'not running' if self._state is None else 'paused'
        return f'PredictionStream({type(self._learn.model).__name__}, {state})'

    def __enter__(self) -> PredictionStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if '_steps' in self.__dict__ and not sys.is_finalizing():
            self.close()


_PAUSED: weakref.WeakSet[PredictionStream] = weakref.WeakSet()  # paused streams of all Learners


def _capture_paused_state(learn: LearnerLike) -> tuple[Any, ...]:
    "Return the state of the Learner that a stream captures and restores when it pauses or resumes."
    attributes = {name: learn.__dict__[name] for name in _RUN_ATTRIBUTES if name in learn.__dict__}
    return (
        attributes,
        dict(vars(learn.run)),
        [(m, m.training) for m in learn.model.modules()],
        capture_rng(),
        torch.is_grad_enabled(),
    )


def _restore_paused_state(learn: LearnerLike, state: tuple[Any, ...]) -> None:
    attributes, run, modes, rng, grad = state
    vars(learn.run).update(run)
    for name in _RUN_ATTRIBUTES:
        learn.__dict__.pop(name, None)
    learn.__dict__.update(attributes)
    for module, mode in modes:
        if module.training is not mode:
            module.training = mode
    restore_rng(rng)
    torch.set_grad_enabled(grad)


def end_streams(learn: LearnerLike) -> None:
    "Close the paused streams of a Learner before its callbacks are removed or copied."
    for stream in list(_PAUSED):
        if stream._learn is learn and not stream._running:
            stream._invalidate()


def stream_predictions(
    learn: LearnerLike, dl: Any, cbs: Any, inner: bool, loader_name: str | None
) -> Iterator[None]:
    "Predict on a loader and yield after each batch, with the events and levels of the loop."
    levels = () if inner else ('fit', 'epoch')
    added = [*missing_train_eval(learn), *as_list(cbs)]
    with learn.added_cbs(added), learn.strategy.run(learn, 'prediction'), ExitStack() as stack:
        learn.logger = noop
        learn.create_mbar = False
        learn.phase = 'predict'
        learn.dl_name = 'valid'
        learn.loader_name = loader_name
        for level in levels:
            stack.enter_context(open_level(learn, level))
            learn(f'before_{level}')
        learn.dl = dl
        learn('before_predict')
        learn.set_loader(dl)
        with preserved_generators(dl), torch.no_grad(), open_level(learn, 'validate'):
            learn('before_validate')
            for i, batch in learn.draw_batches():
                learn.one_batch(i, batch)
                yield
        learn('after_predict')
