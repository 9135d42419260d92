# SPDX-License-Identifier: Apache-2.0
"""A paused fit: where it is, its next batch and its last one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from learnkit.checkpoint.pause import make_state
from learnkit.core.errors import FitError
from learnkit.core.time import Time
from learnkit.debug.moment import MeasureSamples, StopBefore, seek, show_batch
from learnkit.debug.samples import LayerNorms, Rows, Samples
from learnkit.engine.callback import Callback
from learnkit.engine.pause import OpenPass
from learnkit.engine.snapshot import restored

if TYPE_CHECKING:
    from learnkit.checkpoint.pause import Pause
    from learnkit.core.time import Timestamp
    from learnkit.learner import Learner


class Paused:
    "A fit that is paused; `learn.paused` returns it."

    def __init__(self, learn: Learner, pause: Pause) -> None:
        self.learn = learn
        self._pause = pause

    def __repr__(self) -> str:
        return f'Paused({self._pause.describe()})'

    @property
    def time(self) -> Timestamp:
        "Time of the pause, over all fits."
        return self._pause.time

    @property
    def cbs(self) -> list[Any]:
        "Callbacks that were given to the fit. Change the list to add or remove some."
        return self._pause.call.cbs

    @property
    def batch(self) -> Any:
        "The next batch as its loader returns it; None at the end of an epoch, or if the pass has to start again."
        return self._pause.peek()

    @property
    def last_batch(self) -> Any:
        "The batch that was trained last, as its loader returned it; None if it is unknown."
        return self._pause.last_batch

    def samples(
        self,
        last: bool = False,  # of the batch that was trained last, with the weights of now
    ) -> Samples:
        """Return the samples of the next batch, largest loss first, as `Moment.samples` does.

        The samples of the last batch are measured with the weights of now, not with those that it was trained with."""
        stop = MeasureSamples(self._at(0), None)
        self._look(stop, last)
        indices = self._find_indices(last)
        for row in stop.rows:
            row['index'] = None if indices is None else indices[row['position']]
        return Samples(stop.rows, stop.drawn['xb'])

    def layers(self) -> Rows:
        """Return the norms of output and gradient of each layer for the next batch and, as `*_before`, the last one.

        Both batches are measured with the weights of now; the norms of a batch that is unknown are None."""
        found = []
        for last in (False, True):
            norms = LayerNorms(self.time.ba)
            if (self.last_batch if last else self.batch) is not None:
                self._look(StopBefore(self._at(1)), last, [norms])
            found.append(norms.norms)
        now, before = found
        rows = Rows()
        for name in {**now, **before}:
            empty = dict.fromkeys(('activation', 'gradient'))
            own = {f'{k}_before': v for k, v in before.get(name, empty).items()}
            rows.append({'layer': name, **now.get(name, empty), **own})
        return rows

    def show(
        self,
        max_n: int = 9,
        last: bool = False,  # show the batch that was trained last
    ) -> Any:
        "Show samples of the next batch with their targets: images in a grid, other data as a table."
        stop = StopBefore(self._at(0))
        self._look(stop, last)
        return show_batch(
            self.learn, stop.drawn['xb'], stop.drawn['yb'], self._find_indices(last), max_n
        )

    def _find_indices(self, last: bool) -> list[Any] | None:
        "Return the indices in the data set of the next or the last batch, or None if they are unknown."
        position = self._pause.open_pass.position
        if position is None or self._pause.point != 'batch':
            return None
        found: list[Any] | None = position.indices(self._pause.n_drawn - last)
        return found

    def _at(self, n: int) -> Time:
        return Time(self.time.ba + n, 'ba')

    def _look(self, stop: StopBefore, last: bool, cbs: Iterable[Callback] = ()) -> None:
        "Take the paused fit to a batch, silently, and restore the Learner."
        batch = self.last_batch if last else self.batch
        if batch is None:
            which = 'last' if last else 'next'
            raise FitError(
                f'learn.paused: the {which} batch is not known {self._pause.describe()}.'
            )
        pause, learn = self._pause, self.learn
        state = make_state(learn, pause)
        assert state is not None  # there is a batch
        own = pause.open_pass
        # twice, because the replay ends before the next batch
        batches = iter([batch, batch])
        state.open_pass = OpenPass(own.dl, batches, own.position, own.stream)
        arguments = pause.call.arguments()

        def fit(learn: Learner, resume: Any) -> None:
            learn.fit(**arguments, resume=resume)

        stop.state = pause.state
        with restored(learn):
            seek(learn, stop, fit, state, cbs)
