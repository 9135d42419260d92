# SPDX-License-Identifier: Apache-2.0
"""Repeat a failed batch with the same data, random numbers, modes and events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from fastcore.basics import noop
from torch import Tensor, nn
from typing_extensions import override

from learnkit.callbacks.accumulation import GradientAccumulation
from learnkit.callbacks.ema import EMA
from learnkit.callbacks.nan_diagnosis import format_few
from learnkit.callbacks.progress import ProgressCallback
from learnkit.checkpoint.state import list_owners
from learnkit.core.errors import CancelException, FitError, list_places
from learnkit.core.interrupts import deferred_interrupts
from learnkit.core.model import BufferCopy, EarlierBuffers, copy_buffers
from learnkit.core.random import (
    RNGState,
    capture_own,
    capture_rng,
    preserved_rng,
    restore_own,
    restore_rng,
)
from learnkit.engine.callback import Callback
from learnkit.engine.fields import SAVED
from learnkit.engine.microbatch import restore_gradients
from learnkit.engine.optimizer import has_foreign_opt
from learnkit.engine.positions import TrainingPositions
from learnkit.engine.seams import fit_seams
from learnkit.engine.snapshot import restored
from learnkit.engine.traits import trait_of

if TYPE_CHECKING:
    from learnkit.learner import Learner

# attributes of a Learner that describe the position of a batch in the loop
STATE = (*SAVED, 'n_iter', 'n_epoch', 'epochs_per_iteration', 'dl', 'fitting')


class Drawn(NamedTuple):
    "Batch as the loader returned it, and the state of the run at that time."

    batch: Any
    rng: RNGState
    state: dict[str, Any]
    done: dict[str, int]
    sums: list[tuple[Any, dict[str, Any]]]  # states of the callbacks that accumulate batches
    # of a training batch: buffers of model and loss function, own generators, accumulated gradients
    buffers: list[BufferCopy]
    generators: list[tuple[Any, Any]]
    grads: list[tuple[Tensor, Tensor]]

    @contextmanager
    def restored(self, learn: Learner) -> Iterator[None]:
        "Return a context in which buffers, generators, sums and gradients are as they were before the batch."
        sums = [(cb, cb.state_dict()) for cb, _ in self.sums]
        generators = [(owner, capture_own(owner)) for owner, _ in self.generators]
        with preserved_rng(), EarlierBuffers(self.buffers):
            restore_gradients(learn, self.grads)
            _load_states(self.sums)
            restore_rng(self.rng)
            _restore_generators(self.generators)
            try:
                yield
            finally:
                _load_states(sums)
                _restore_generators(generators)


def _load_states(states: list[tuple[Any, dict[str, Any]]]) -> None:
    for cb, state in states:
        cb.load_state_dict(state)


def _restore_generators(states: list[tuple[Any, Any]]) -> None:
    for owner, state in states:
        restore_own(owner, state)


class Replay(Callback):
    """Keep each batch and the random state before it, so that `learn.replay()` can repeat the batch.

    After an exception has ended a run, `learn.replay()` repeats the batch that raised it, in
    training or in evaluation. Without a failure it repeats the last training batch.

    After an exception before the step of a training batch, `learn.resume()` repeats the batch with
    the buffers, the random generators and the accumulated gradients from before it.

    Kept is the last batch of training as the loader returned it, by reference, and one that failed, with
    copies of the buffers and of the accumulated gradients. On a GPU this takes the memory of one more
    batch, and in-place changes of a batch change the repeated batch too. Weights and the counters of
    other callbacks are not kept. The next fit and `learn.close()` drop the batches. Checkpointed:
    nothing.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(cbs=Replay())
    >>> with learn.no_bar(), learn.no_logging(): learn.fit(1)
    >>> with learn.no_logging(): bool(learn.replay() == learn.replay())
    True
    """

    order = 10_000  # after all other callbacks
    remove_on_find = True
    remove_on_fetch = True
    name = 'replay_callback'  # `learn.replay` is a method

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._trained: Drawn | None = None  # last batch of training
        self._current: Drawn | None = None  # batch that is under way
        self._failed: Drawn | None = None  # batch in which the run failed
        self._error_places: tuple[str, ...] = ()  # places of the exception that ended the run
        self._modes: list[tuple[nn.Module, bool]] = []  # modules, with True for training mode
        self._run_callbacks: list[Any] = []  # callbacks of the run
        self._indices: list[Any] | None = None  # data-set indices of the failed batch

    def before_fit(self) -> None:
        "Drop the batches of the previous fit."
        if self.learn.run.depth > 1:
            return  # a nested run
        if self.learn.fitting:
            self._reset()
        self._current = self._failed = self._indices = None
        self._error_places = ()
        self.learn.run.replay_source = self

    def before_train(self) -> None:
        self._record_run()

    def after_draw(self) -> None:
        "Keep the batch."
        learn = self.learn
        self._current = Drawn(
            learn.batch,
            capture_rng(),
            {name: getattr(learn, name, None) for name in STATE},
            learn.parts.counters.by_unit(),
            [(cb, cb.state_dict()) for cb in learn.cbs if isinstance(cb, GradientAccumulation)],
            *_copy_before_training(learn),
        )
        if learn.training:
            self._trained = self._current

    def find_drawn(self, batch: Any) -> Drawn | None:
        "Return a training batch that is under way, with the state before it; None if it is another one."
        drawn = self._current
        if drawn is None or drawn.batch is not batch or not drawn.state['training']:
            return None
        return drawn

    def after_batch(self) -> None:
        self._current = None

    def after_error(self) -> None:
        "Keep the state that the end of the run resets."
        self._record_run()
        self._failed = self._current
        error = self.learn.error
        self._error_places = () if error is None else list_places(error)
        if self._current is not None and self._current.state['training']:
            self._indices = self.learn.parts.positions.indices(self.learn)

    def _record_run(self) -> None:
        "Keep the training modes of the modules, and the callbacks."
        self._modes = [(m, m.training) for m in self.learn.model.modules()]
        self._run_callbacks = list(self.learn.cbs)

    def close(self) -> None:
        "Drop all batches."
        self._reset()


def _copy_before_training(learn: Learner) -> tuple[list[Any], list[Any], list[Any]]:
    "Return copies of buffers, generators and accumulated gradients before a training batch."
    if not (learn.training and learn.fitting):
        return [], [], []
    loss = learn.loss_func
    buffers = copy_buffers(learn.model)
    if isinstance(loss, nn.Module):
        buffers += copy_buffers(loss)
    generators = [(owner, capture_own(owner)) for _, owner in list_owners(learn)]
    grads = [(p, p.grad.clone()) for p in learn.opt.parameters() if p.grad is not None]
    return buffers, generators, grads


def replay(
    learn: Learner,
    *,
    detect_anomaly: bool,  # whether autograd names the operation with a NaN gradient
) -> Tensor | None:
    "Repeat a batch; see `Learner.replay`."
    source = learn.run.replay_source
    if learn.run.depth:
        raise FitError('A run is under way. Replay a batch when it is over.')
    drawn = None if source is None else source._failed or source._trained
    if source is None or drawn is None:
        raise FitError('There is no batch to repeat. Call `learn.add_cb(Replay())`, and fit again.')
    if learn.logger is not noop:
        at = drawn.state
        few = format_few(source._indices) if source._indices else ''
        samples = f', samples {few} of the data set' if few else ''
        print(f'Repeating batch {at["iter"]} of epoch {at["epoch"]} ({at["dl_name"]}){samples}.')
    with (
        deferred_interrupts() as deferred,
        restored(learn),
        with_callbacks(learn, source),
        learn.no_logging(),
        learn.no_mbar(),
        deferred.paused(),
    ):
        return repeat(learn, source, drawn, detect_anomaly)


@contextmanager
def with_callbacks(learn: Learner, source: Replay) -> Iterator[None]:
    "Use the callbacks of the run; leave out those that only track, save or stop and did not fail."

    def takes_part(cb: Any) -> bool:
        if cb is source or isinstance(cb, ProgressCallback):
            return False
        if not trait_of(cb, 'remove_on_find') or isinstance(cb, EMA):
            return True
        return any(p.startswith(f'{type(cb).__name__}.') for p in source._error_places)

    removed = [cb for cb in source._run_callbacks if takes_part(cb) and cb not in learn.cbs]
    with learn.added_cbs(removed), ExitStack() as stack:
        for cb in [cb for cb in learn.cbs if not takes_part(cb)]:
            stack.enter_context(learn.removed_cbs(cb))
        yield


def repeat(learn: Learner, source: Replay, drawn: Drawn, detect_anomaly: bool) -> Tensor | None:
    "Open the levels of the loop, run the batch, and clean up as after an interrupted run."
    training = drawn.state['training']
    levels = ('fit', 'epoch', 'train' if training else 'validate')
    learn.seams.features = []  # a compiled step has no events inside
    learn.parts.positions = KnownPass(source._indices)
    if learn.opt is None or has_foreign_opt(learn):
        learn.create_opt()

    with (
        learn.parts.processes.run(learn, 'fit' if drawn.state['fitting'] else 'evaluation'),
        fit_seams(learn),
        torch.set_grad_enabled(training),
    ):
        try:
            for i, level in enumerate(levels):
                learn.run.levels = levels[: i + 1]
                restore_position(learn, drawn)
                learn(f'before_{level}')
            restore_position(learn, drawn)
            for module, mode in source._modes:
                module.training = mode
            for cb, sums in drawn.sums:
                cb.load_state_dict(sums)
            restore_rng(drawn.rng)
            with torch.autograd.set_detect_anomaly(detect_anomaly or torch.is_anomaly_enabled()):
                learn.one_batch(drawn.state['iter'], drawn.batch)
        except CancelException:
            pass  # the batch ended this way before
        loss = learn.loss
        learn._end_cleanup()
    return loss


class KnownPass(TrainingPositions):
    "Pass over the data whose indices are known: the indices of the repeated batch."

    def __init__(self, known: list[Any] | None) -> None:
        super().__init__()
        self.known = known

    @override
    def indices(self, learn: Learner) -> list[Any] | None:
        "Return the indices of the repeated batch."
        return self.known


def restore_position(learn: Learner, drawn: Drawn) -> None:
    "Restore the Learner's position in the loop at which the batch was drawn."
    vars(learn).update(drawn.state, batch=drawn.batch)
    learn.parts.counters.load_units(drawn.done)
