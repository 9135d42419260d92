"""Passes of a fit over its training loader, with the position in the current pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch

from learnkit.core.learner_type import LoopLike
from learnkit.data.dataloaders import n_batches
from learnkit.data.position import LoaderPosition
from learnkit.data.prefetch import read_ahead

__all__ = ['TrainingPasses', 'Stream']

_END = object()  # marks the end of a loader, as the default of `next`


class TrainingPasses:
    """Passes over a training loader, and the position in the current pass for checkpoints.

    Each epoch is a pass, except when `n_iter` cuts a loader without a length into epochs: these
    epochs share one pass, a `Stream`. A fit with a budget that ends within a pass leaves the rest of
    the batches to the next fit with a budget.
    """

    def __init__(self) -> None:
        self.position: LoaderPosition | None = None  # position in the current pass
        self.stream: Stream | None = None  # pass that all epochs share
        self.n_drawn = 0  # number of batches that the last pass has drawn
        self.is_cut = False  # True if the fit was stopped within the last pass
        self.rest: Iterator[Any] | None = None  # batches of a pass that a budget has cut

    def __getstate__(self) -> dict[str, Any]:
        "Return the attributes without the current pass, whose iterator cannot be copied."
        return {**self.__dict__, 'position': None, 'stream': None, 'rest': None}

    def begin(self, learn: LoopLike) -> tuple[int, Iterator[Any]]:
        "Return the number of the next batch, and the batches of the next epoch or of the pass that a budget has cut."
        rest = self._take_rest(learn)
        if rest is not None:
            return self.n_drawn, rest
        return 0, self.open(learn)

    def _take_rest(self, learn: LoopLike) -> Iterator[Any] | None:
        "Return the rest of a pass that a budget has cut, if this fit has a budget too and a batch is left."
        rest = self.rest
        self.rest = None
        if rest is None or self.position is None:
            return None
        dl = learn.dl
        if learn.n_epoch is not None or self.position.dl is not dl:
            self.position = None
            return None
        if getattr(dl, 'persistent_workers', False):
            # the workers may have served another pass in between
            self.resume(learn.dls, self.position.state_dict(self.n_drawn))
            rest = self.open(learn, continued=True)
        first = next(rest, _END)
        return None if first is _END else chain([first], rest)

    def end(self, learn: LoopLike, batches: Iterator[Any]) -> None:
        "Record the end of an epoch's pass, and keep the rest of the batches if a budget has cut it."
        self.n_drawn = learn.iter + 1
        stopping = learn.run.stopping
        self.is_cut = stopping and self.n_drawn != learn.n_iter
        self.rest = batches if stopping and learn.n_epoch is None else None

    def close(self) -> None:
        "Release the position of the last pass, unless a budget has cut the pass."
        self.is_cut = False
        if self.rest is None:
            self.position = None

    def forget(self) -> None:
        "Release all iterators, which an error may have ended."
        self.stream = self.rest = self.position = None

    def open(self, learn: LoopLike, continued: bool = False) -> Iterator[Any]:
        "Return the batches of the next epoch, or, if `continued`, the rest of a resumed epoch."
        dl = learn.dl
        device = learn.run.device
        if is_stream(learn.dls):
            if self.stream is None or self.stream.dl is not dl:
                self.stream = Stream(dl)
            self.stream.device = device
            return self.stream
        if self.position is None or not continued:
            self.position = self._next_position(dl)
        # only handlers of this event run between the start of the pass and its first batch
        begin = partial(self.position.begin, bool(learn.tables[True]['before_draw']))
        return read_ahead(dl, device, begin) if device.type == 'cuda' else begin()

    def _next_position(self, dl: Any) -> LoaderPosition:
        "Return the position of the start of the next epoch."
        last = self.position
        if last is None:
            return LoaderPosition(dl)
        if last.start is None:
            return last  # restored from a checkpoint between two epochs
        return LoaderPosition(dl, n_before=last.n_before + self.n_drawn)

    def resume(self, dls: Any, position: Mapping[str, Any] | None) -> None:
        "Start the next pass at the position of a checkpoint."
        self.rest = None
        if position is None:
            return
        resumed = LoaderPosition.resume(dls.train, position)
        if is_stream(dls):
            self.stream = Stream(dls.train, position=resumed, n=position['n'])
        else:
            self.position = resumed

    def indices(self, learn: LoopLike) -> list[Any] | None:
        "Return the data set's indices of the current training batch, or None if they are unknown."
        if not learn.training:
            return None
        if is_stream(learn.dls):
            stream = self.stream
            return None if stream is None else stream.position.indices(stream.n - 1)
        return None if self.position is None else self.position.indices(learn.iter)

    def state_dict(
        self,
        learn: LoopLike,
        within_epoch: bool,  # the checkpoint follows a batch of the epoch, not its end
    ) -> dict[str, Any] | None:
        "Return the position for a checkpoint, or None if an overridden loop has drawn the batches itself."
        train = learn.dls.train
        if is_stream(learn.dls):
            stream = self.stream
            if stream is None or stream.dl is not train:
                return LoaderPosition(train).state_dict(0)
            return stream.position.state_dict(stream.n)
        if not within_epoch:
            return self._next_position(train).state_dict(0)
        return None if self.position is None else self.position.state_dict(learn.iter + 1)

    def warn_of_lost_state(
        self,
        learn: LoopLike,
        within_epoch: bool,  # the checkpoint follows a batch of the epoch, not its end
    ) -> None:
        "Warn of state of the current pass that a checkpoint cannot hold."
        if self.stream is not None:
            self.stream.position.warn_of_lost_state(self.stream.n)
        elif self.position is not None:
            self.position.warn_of_lost_state(learn.iter + 1 if within_epoch else self.n_drawn)


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
        self.position = LoaderPosition(dl) if position is None else position
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
        self.position = LoaderPosition(self.dl)
        self.n = 0
        self._batches = None


def is_stream(dls: Any) -> bool:
    "Return True if `n_iter` cuts epochs out of a loader that can be iterated again."
    if getattr(dls, 'n_iter', None) is None:
        return False
    return n_batches(dls.train) is None and not isinstance(dls.train, Iterator)
