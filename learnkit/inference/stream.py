"""Predictions as an iterator over batches, in constant memory.

A stream is a run that pauses between batches. While it pauses the Learner is as it was before it (modes, RNGs, loop
state, gradient mode, lock, weights that callbacks changed); when it goes on, its own state is put in place again."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from fastcore.basics import noop

from learnkit.core.errors import CancelValidException, FitError
from learnkit.core.random import capture_rng, preserved_generators, restore_rng
from learnkit.engine.callback import Callback
from learnkit.engine.events import EVENTS, LEVELS
from learnkit.engine.run import STATE

__all__ = ['PredictionStream', 'end_streams', 'stream_predictions']

# what a run has in the Learner, besides `STATE`
_RUN = ('fitting', 'error', 'logger', 'create_mbar')


class PredictionStream(Iterator[tuple[Any, ...]]):
    """Predictions batch by batch, each computed when it is asked for: what `learn.predict_iter` returns.

    `close` ends the run early, as does dropping the stream; a `with` block closes it at its end.
    """

    def __init__(
        self,
        learn: Any,
        run: Callable[[Any], Iterator[None]],  # makes the run's steps, with one more callback
        batch: list[tuple[Any, ...]],  # where a step leaves the batch's entries
        context: Callable[[], Any],  # makes what surrounds each step
    ) -> None:
        self._learn, self._batch, self._context = learn, batch, context
        self._state: Any = None  # of the paused run
        self._running, self._lost = False, False
        me = weakref.ref(self)  # whoever drops the stream ends it

        def on_event(cb: Callback) -> None:
            if (stream := me()) is not None and cb.learn is stream._learn:
                stream._learn_goes_on()

        watch = Callback(**dict.fromkeys(EVENTS, on_event))
        watch.order = float('-inf')
        self._steps = run(watch)

    def __next__(self) -> tuple[Any, ...]:
        if self._lost:
            raise FitError(
                'This stream of predictions was ended when its Learner went on to something else (a fit, a '
                'validation, the rest of the fit it was in). Use it up before, or write the predictions '
                'with get_preds(sink=...).'
            )
        while not self._batch:
            self._advance(partial(next, self._steps))  # a cancelled batch has left nothing
        return self._batch.pop()

    def close(self) -> None:
        "End the run as a CancelValidException would, and put everything back; further calls do nothing."
        if self._state is None:
            return self._steps.close()  # type: ignore[attr-defined]  # it is a generator
        try:
            self._advance(partial(self._steps.throw, CancelValidException()))  # type: ignore[attr-defined]
        except StopIteration:
            pass

    def _learn_goes_on(self) -> None:
        "Hear that an event fired; when it is not one of this run, which pauses, the run is over."
        if self._running or self._state is None:
            return
        self._lose()

    def _lose(self) -> None:
        self._lost = True
        self.close()

    def _advance(self, step: Callable[[], Any]) -> None:
        "Let the run go on until it pauses or ends; the Learner is before and after as it is outside."
        learn = self._learn
        with learn.lock:
            outside, self._running = _snapshot(learn), True
            if self._state is not None:
                _install(learn, self._state)
                learn.lock.acquire()  # the run holds it once, and gave it up to pause
            try:
                if self._state is not None:
                    learn.callbacks.notify('on_run_resumed')
                with self._context(), learn.evaluated_weights():
                    step()
                learn.callbacks.notify('on_run_paused')
                self._state = _snapshot(learn)
                _PAUSED.add(self)
                learn.lock.release()
            except BaseException:
                self._state = None
                _PAUSED.discard(self)
                self._batch.clear()
                raise
            finally:
                self._running = False
                _install(learn, outside)

    def __repr__(self) -> str:
        state = (
            'ended by its Learner'
            if self._lost
            else 'paused'
            if self._state is not None
            else 'not running'
        )
        return f'PredictionStream({type(self._learn.model).__name__}, {state})'

    def __enter__(self) -> PredictionStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if '_steps' in self.__dict__ and not sys.is_finalizing():
            self.close()


_PAUSED: weakref.WeakSet[PredictionStream] = weakref.WeakSet()  # of all Learners


def _snapshot(learn: Any) -> tuple[Any, ...]:
    "Return what a pausing run must leave as it was."
    attributes = {name: learn.__dict__[name] for name in (*STATE, *_RUN) if name in learn.__dict__}
    return (
        attributes,
        dict(vars(learn.run)),
        [(m, m.training) for m in learn.model.modules()],
        capture_rng(),
        torch.is_grad_enabled(),
    )


def _install(learn: Any, state: tuple[Any, ...]) -> None:
    attributes, run, modes, rng, grad = state
    vars(learn.run).update(run)
    for name in (*STATE, *_RUN):
        learn.__dict__.pop(name, None)
    learn.__dict__.update(attributes)
    for module, mode in modes:
        if module.training is not mode:
            module.training = mode
    restore_rng(rng)
    torch.set_grad_enabled(grad)


def end_streams(learn: Any) -> None:
    "End the paused streams of a Learner before its callbacks are removed or copied."
    for stream in list(_PAUSED):
        if stream._learn is learn and not stream._running:
            stream._lose()


def stream_predictions(
    learn: Any, dl: Any, cbs: Any, inner: bool, source: str | None
) -> Iterator[None]:
    "Predict on a loader, and pause after each batch: the levels of the loop as generators."
    with learn.added_cbs(cbs), learn.strategy.run(learn, 'evaluation'):
        learn.logger, learn.create_mbar = noop, False
        learn.phase, learn.dl_name, learn.loader_name = 'predict', 'valid', source
        steps = _stream_loader(learn, dl)
        if not inner:
            steps = _wrap_level(learn, _wrap_level(learn, steps, 'epoch'), 'fit')
        yield from steps


def _stream_loader(learn: Any, dl: Any) -> Iterator[None]:
    "Predict on a loader, between the events around it."
    learn('before_predict')
    learn.set_loader(dl)
    with preserved_generators(dl), torch.no_grad():
        yield from _wrap_level(learn, _stream_batches(learn), 'validate')
    learn('after_predict')


def _stream_batches(learn: Any) -> Iterator[None]:
    "Predict on each batch of `learn.dl`."
    for i, batch in learn.draw_batches():
        learn.one_batch(i, batch)
        yield


def _wrap_level(learn: Any, body: Iterator[None], event_type: str) -> Iterator[None]:
    "Do for a generator what `_with_events` does for a function."
    level, outer, cancelled = LEVELS[event_type], learn.run.levels, False
    learn.run.levels = (*outer, event_type)
    try:
        learn(level.before)
        yield from body
    except level.exception:
        cancelled = True
    finally:
        learn.run.levels = outer
    if cancelled:
        learn(level.after_cancel)
    learn(level.after)
