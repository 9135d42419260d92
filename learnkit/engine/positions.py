# SPDX-License-Identifier: Apache-2.0
"""Epochs of a fit and batches of its loaders: from the start, or with the position that checkpoints need."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from learnkit.core.errors import EmptyLoaderError, add_place
from learnkit.data.combined_position import make_position, resume_position
from learnkit.data.dataloaders import n_batches
from learnkit.data.last_batch import hold_batch
from learnkit.data.position import LoaderPosition, describe_drawn, needs_digest
from learnkit.data.prefetch import read_ahead
from learnkit.data.torch_loader import end_workers, forget_workers
from learnkit.engine.dispatch import format_place
from learnkit.engine.lengths import epoch_length
from learnkit.engine.optimizer import cover_params, warn_of_late_params
from learnkit.engine.sizes import check_first_batch, set_size_func

if TYPE_CHECKING:
    from learnkit.learner import Learner

_END = object()  # marks the end of a loader, as the default of `next`


class Source:
    "Epochs of a fit, and batches of a loader from its first one on: the loop's own `source`."

    def epochs(self, learn: Learner, first: int = 0) -> Iterator[int]:
        "Yield the numbers of the epochs from `first` on, until the fit is stopped."
        epochs = count(first) if learn.n_epoch is None else range(first, learn.n_epoch)
        for epoch in epochs:
            yield epoch
            if learn.run.stopping:
                return

    def batches(self, learn: Learner) -> tuple[Iterable[int], Iterator[Any]]:
        "Begin a pass over `learn.dl`: set `n_iter`, and return the numbers of the batches and the batches."
        device = learn.run.batch_device
        assert device is not None  # `draw_batches` has set it
        return set_length(learn), draw(learn, read_ahead(learn.dl, device))

    def end(self, learn: Learner) -> None:
        "End the pass, whether or not its loader is exhausted."


def set_length(learn: Learner, first: int = 0) -> Iterable[int]:
    "Set `n_iter`, and return the numbers of the batches of a pass from `first` on."
    learn.n_iter, limit = epoch_length(learn, learn.dl)
    numbers = count(first) if limit is None else range(first, limit)
    request = learn.run.request
    if request is None or not (learn.training and learn.fitting):
        return numbers
    learn.iter = first - 1  # the last batch, if a pause ends the pass before the next one
    return request.watch(numbers, first)


def draw(learn: Learner, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches of a loader, and check the first one.

    Raises `EmptyLoaderError` for a loader without batches, and warns of a loader whose length is wrong.
    If the loader fails, its workers are ended.
    """
    positions = learn.parts.positions
    counters = learn.parts.counters
    is_trained = learn.training and learn.fitting
    is_held = is_trained and needs_digest(learn.dl)
    learn.parts.advice.is_watching = True
    is_known = False  # whether it is decided how samples are counted
    square = 0
    try:
        positions.is_drawing = is_trained
        for batch in batches:
            if not is_known:
                check_first_batch(learn, batch)
                square = set_size_func(learn, batch, square)
                is_known = not square
            if is_held:
                positions.last = hold_batch(batch)
            if is_trained:
                positions.is_drawing = False
                positions.n_trained = counters.batches
                positions.n_steps = learn.opt.n_steps
            yield batch
            positions.is_drawing = is_trained
    except Exception as e:
        add_place(e, f'{learn.phase} ({format_place(learn)})')
        end_workers(batches)
        forget_workers(learn.dl)
        raise
    finally:
        del batches  # or else a traceback keeps its worker processes running
    check_drawn(learn, learn.iter)


def check_drawn(learn: Learner, n: int) -> None:
    "Raise `EmptyLoaderError` if an exhausted loader yielded no batch; warn if its length is wrong."
    if not n:
        hint = ''
        if isinstance(learn.dl, Iterator):
            hint = ' It is an iterator, used up after one pass: pass a loader that starts again each time.'
        raise EmptyLoaderError(
            f'The {learn.dl_name} loader ({type(learn.dl).__name__}) returned no batch.{hint}'
        )
    learn.parts.lengths.check(learn, n)


# -- iterations ------------------------------------------------------------------------------------


def ends_iteration(learn: Learner) -> bool:
    "Return True if the current epoch is the last epoch of an iteration, and was not cut."
    per_iteration = learn.epochs_per_iteration
    if per_iteration is None or learn.parts.positions.is_cut:
        return False
    return (learn.epoch + 1) % per_iteration == 0


def end_iteration(learn: Learner) -> None:
    "Count an iteration, and fire the events at its end."
    learn.parts.counters.iterations += 1
    learn('after_iteration')
    learn('iteration_checkpoint')


# -- training --------------------------------------------------------------------------------------


class TrainingPositions(Source):
    """Epochs of a fit and passes over its training loader, with the position in the current pass for checkpoints.

    Takes the seam `source` in every fit of a Learner. Each epoch is a pass, except when `n_iter` cuts
    a loader without a length into epochs: these epochs share one pass, a `Stream`. A fit with a budget
    that ends within a pass leaves the rest of the batches to the next fit with a budget.
    """

    holder = 'checkpoints'

    def __init__(self) -> None:
        self.first: dict[str, Any] | None = None  # the loader at the start of the fit
        self.position: LoaderPosition | None = None  # position in the current pass
        self.stream: Stream | None = None  # pass that all epochs share
        self.n_drawn = 0  # number of batches that the last pass has drawn
        self.is_cut = False  # True if the fit was stopped within the last pass
        self.rest: Iterator[Any] | None = None  # batches of a pass that a budget has cut
        self.last: Any = (
            None  # the last batch of the open pass as its loader returned it; None: not needed
        )
        self._current: Iterator[Any] | None = None  # batches of the open pass
        self.iterator: Any = None  # the loader's iterator that yields them
        self.left: Iterator[Any] | None = None  # batches of a pass that an exception has left
        # True while the next batch is awaited; kept when an exception leaves the pass
        self.is_drawing = False
        self.is_ending = False  # True while the end of a pass is recorded
        # numbers of batches and steps over all fits when the last batch was drawn
        self.n_trained = self.n_steps = 0
        # folder of the run to which `rewind` has moved the Learner
        self.rewound: Path | None = None

    def seams(self, learn: Learner) -> dict[str, Any] | None:
        "Return the source of a fit: the remaining batches of a resumed fit, otherwise all batches."
        resume = learn.run.resuming
        if resume is not None:
            return {'source': resume.make_source(self)}
        if 'source' in learn.seams.holders:
            return None  # with another source, no fit resumes within an epoch
        return {'source': self}

    def __getstate__(self) -> dict[str, Any]:
        "Return the attributes without the current pass, whose iterator cannot be copied."
        open_pass = dict.fromkeys(
            ('position', 'stream', 'rest', 'last', '_current', 'iterator', 'left')
        )
        return {**self.__dict__, **open_pass}

    @override
    def epochs(self, learn: Learner, first: int = 0) -> Iterator[int]:
        "Yield the numbers of the epochs, and fire the events of iterations around them."
        per_iteration = learn.epochs_per_iteration
        for epoch in super().epochs(learn, first):
            learn.epoch = epoch
            if learn.run.request is not None:
                learn.run.request.begin_epoch()
            if per_iteration and (epoch % per_iteration == 0 or learn.resumed):
                learn('before_iteration')
            yield epoch
            if ends_iteration(learn):
                end_iteration(learn)
            if learn.run.request is not None:
                learn.run.request.leave_if_made('epoch')

    @override
    def batches(self, learn: Learner) -> tuple[Iterable[int], Iterator[Any]]:
        "Begin a pass over `learn.dl`, with its position if it is a pass of the training."
        if not (learn.training and learn.fitting):
            return super().batches(learn)
        self.prepare(learn)
        rest = self.rest
        self.rest = None
        batches = None if rest is None else self._continue(learn, rest)
        if batches is None:
            return set_length(learn), draw(learn, self.open(learn))
        self._current = batches
        return set_length(learn, self.n_drawn), draw(learn, batches)

    def _continue(self, learn: Learner, rest: Iterator[Any]) -> Iterator[Any] | None:
        "Return the rest of a pass that a budget has cut, if this fit has a budget too and a batch is left."
        dl = learn.dl
        if self.position is None:
            return None
        if learn.n_epoch is not None or self.position.dl is not dl:
            self.position = None
            return None
        if getattr(dl, 'persistent_workers', False):
            # the workers may have served another pass in between
            self.resume(learn.dls, self.position.state_dict(self.n_drawn))
            rest = self.open(learn, continued=True)
        first = next(rest, _END)
        return None if first is _END else chain([first], rest)

    def prepare(self, learn: Learner) -> None:
        "Prepare the optimizer: callbacks may have unfrozen or replaced parameters in `before_train`."
        cover_params(learn)
        learn.opt.train()

    @override
    def end(self, learn: Learner) -> None:
        "Record the end of an epoch's pass, and keep the rest of the batches if a budget has cut it."
        if not (learn.training and learn.fitting):
            return  # of an evaluation, possibly within a batch of the open pass
        batches = self._current
        self.is_ending = True
        self.n_drawn = learn.iter + 1
        self._current = None
        # a pass that an exception has left may be continued
        self.left = None if sys.exception() is None else batches
        if self.left is None:
            self.last = self.iterator = None
        stopping = learn.run.stopping
        self.is_cut = stopping and self.n_drawn != learn.n_iter
        self.rest = batches if stopping and learn.n_epoch is None else None
        warn_of_late_params(learn)
        self.is_ending = False

    def close(self) -> None:
        "Release the position of the last pass, unless a budget has cut the pass."
        self.is_cut = self.is_ending = False
        self.last = self.left = self.iterator = None
        if self.rest is None:
            self.position = None

    def forget(self) -> None:
        "Release all iterators, which an error may have ended."
        self.stream = self.rest = self.position = None
        self.last = self._current = self.left = self.iterator = None

    @property
    def is_open(self) -> bool:
        "True while a pass over the training data is open."
        return self._current is not None

    def continue_pass(self, batches: Iterator[Any], iterator: Any) -> Iterator[Any]:
        "Return the batches of a pass that a fit has left, as the open pass."
        self.rest = None
        self._current = batches
        self.iterator = iterator
        return batches

    def open(self, learn: Learner, continued: bool = False) -> Iterator[Any]:
        "Return the batches of the next epoch, or, if `continued`, the rest of a resumed epoch."
        dl = learn.dl
        device = learn.run.batch_device
        assert device is not None  # `draw_batches` has set it
        if is_stream(learn.dls):
            if self.stream is None or self.stream.dl is not dl:
                self.stream = Stream(dl)
            self.stream.device = device
            self._current = self.iterator = self.stream
            return self.stream
        if self.position is None or not continued:
            self.position = self._next_position(dl)
            self.position.number = learn.parts.counters.epochs  # of all fits
        begin = self.position.begin
        self._current = self.iterator = read_ahead(dl, device, begin)
        return self._current

    def _next_position(self, dl: Any) -> LoaderPosition:
        "Return the position of the start of the next epoch."
        last = self.position
        if last is None:
            return make_position(dl, first=self.first)
        if last.start is None:
            return last  # restored from a checkpoint between two epochs
        if last.dl is dl:
            return last.next_position(self.n_drawn, self.first)
        return make_position(dl, last.n_before + self.n_drawn, self.first)

    def begin_fit(self, learn: Learner) -> None:
        "Record the loader's description."
        self.first = describe_drawn(learn.dls.train)
        learn.parts.lengths.begin_fit()

    def resume(self, dls: Any, position: Mapping[str, Any] | None) -> None:
        "Start the next pass at the position of a checkpoint."
        self.rest = None
        if position is None:
            return
        resumed = resume_position(dls.train, position)
        if is_stream(dls):
            self.stream = Stream(dls.train, position=resumed, n=position['n'])
        else:
            self.position = resumed

    def indices(self, learn: Learner) -> list[Any] | None:
        "Return the data set's indices of the current training batch, or None if they are unknown."
        if not learn.training:
            return None
        if is_stream(learn.dls):
            stream = self.stream
            return None if stream is None else stream.position.indices(stream.n - 1)
        return None if self.position is None else self.position.indices(learn.iter)

    def state_dict(
        self,
        learn: Learner,
        within_epoch: bool,  # the checkpoint follows a batch of the epoch, not its end
    ) -> dict[str, Any] | None:
        "Return the position for a checkpoint, or None if an overridden loop has drawn the batches itself."
        train = learn.dls.train
        if is_stream(learn.dls):
            stream = self.stream
            if stream is None or stream.dl is not train:
                return make_position(train, first=self.first).state_dict(0)
            return stream.position.state_dict(stream.n, self.last)
        if not within_epoch:
            return self._next_position(train).state_dict(0)
        if self.position is None:
            return None
        n = learn.iter + 1
        return self.position.state_dict(n, self.last, n == learn.parts.lengths.find(train))

    def describe_lost_state(
        self,
        learn: Learner,
        within_epoch: bool,  # the checkpoint follows a batch of the epoch, not its end
    ) -> list[str]:
        "Return what a checkpoint cannot hold of the current pass."
        if self.stream is not None:
            position, n = self.stream.position, self.stream.n
        elif self.position is not None:
            position, n = self.position, learn.iter + 1 if within_epoch else self.n_drawn
        else:
            return []
        return position.describe_lost_state(n)


class Stream(Iterator[Any]):
    """Iterate over a loader without a length across epochs: a pass lasts until the loader is exhausted.

    An exhausted loader is iterated from its start again. The position counts all batches of the pass.

    >>> stream = Stream([1, 2, 3])
    >>> [next(stream) for _ in range(7)], stream.n
    ([1, 2, 3, 1, 2, 3, 1], 1)
    """

    def __init__(
        self,
        dl: Any,  # the training loader
        position: LoaderPosition | None = None,  # position of a resumed pass
        n: int = 0,  # batches drawn in the resumed pass
    ) -> None:
        self.dl = dl
        self.position = make_position(dl) if position is None else position
        if self.position.number is None:
            self.position.number = 0
        self.n = n
        self.device = torch.device('cpu')  # device that batches are prefetched to
        self._batches: Iterator[Any] | None = None

    def __next__(self) -> Any:
        batch = self._draw()
        if batch is _END and self.n:
            self._restart()
            batch = self._draw()
        if batch is _END:
            self._restart()
            raise StopIteration
        self.n += 1
        return batch

    def _draw(self) -> Any:
        if self._batches is None:
            self._batches = read_ahead(self.dl, self.device, self.position.begin)
        return next(self._batches, _END)

    def _restart(self) -> None:
        number = (self.position.number or 0) + 1
        self.position = make_position(self.dl)
        self.position.number = number
        self.n = 0
        self._batches = None


def is_stream(dls: Any) -> bool:
    "Return True if `n_iter` cuts epochs out of a loader that can be iterated again."
    if getattr(dls, 'n_iter', None) is None:
        return False
    return n_batches(dls.train) is None and not isinstance(dls.train, Iterator)
