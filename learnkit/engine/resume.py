"""Where a run can be saved, and where a resumed one begins: the places of the loop that a checkpoint knows."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from learnkit.core.errors import CheckpointError
from learnkit.data.checks import n_batches
from learnkit.data.position import LoaderPosition, Stream
from learnkit.data.prefetch import read_ahead
from learnkit.engine.evaluation import EvaluateWithinEpochs
from learnkit.engine.microbatch import Pieces

__all__ = ['ResumeState', 'Resuming', 'PLACES']

# place of a checkpoint: the place of the loop at which it is put in place
PLACES = {'batch': 'batch',            # after a training batch
          'within': 'batch',           # the same, with an evaluation that is due
          'evaluation': 'evaluation',  # after an epoch's training, with an evaluation that is due
          'epoch': 'epoch',            # after an epoch
          'iteration': 'epoch'}        # after an epoch that ended an iteration
_EVENTS = {place: f'{place}_checkpoint' for place in ('batch', 'epoch', 'iteration')}  # where a run can be saved


@dataclass
class ResumeState:
    "A checkpoint that a fit goes on from, until all of it is in place."
    state: Mapping[str, Any]
    restorer: Callable[[Any, ResumeState], None]         # puts it in place in a Learner
    path: Path | None = None                             # its file
    info: dict[str, Any] = field(default_factory=dict)   # what its file says about itself
    before: dict[str, Any] | None = None                 # the weights and optimizers that it takes the place of

    @property
    def loop(self) -> Mapping[str, Any]: return self.state['loop']

    @property
    def at(self) -> str: return PLACES[self.loop['place']]

    @property
    def stage(self) -> int:
        "Which of the fits of `fine_tune` it is of."
        if (stage := self.loop['stage']) is not None: return stage
        raise CheckpointError(f'{self.path or "The checkpoint"} is of a fit of its own, and not of `fine_tune`.')

    def restore(self, learn: Any) -> None:
        "Put everything in place in a Learner."
        self.restorer(learn, self)


class Resuming(Pieces):
    """The part of the loop that knows where it is, and that begins where a checkpoint was taken.

    A resumed fit fires `before_fit`, and in the middle of an epoch also `before_epoch` and `before_train` (in that of
    an iteration `before_iteration`), with `resumed` True; only then is everything put in place, so that nothing that
    those handlers set up anew stays.
    """
    dls: Any

    def __init__(self) -> None:
        self.resumed = False                              # events are fired again, at which a resumed fit begins
        self._resumes_at = 0                              # the batch of the epoch that comes next then
        self._resumption: ResumeState | None = None        # what is still to be put in place
        self._drawing: LoaderPosition | None = None              # the pass over the training loader
        self._stream: Stream | None = None                # where `n_iter` cuts epochs: the pass over all of them
        self._n_drawn = 0                                 # how many batches the last one gave
        self._stage: int | None = None                    # which of the fits of `fine_tune` this is
        super().__init__()

    @contextmanager
    def _in_stage(self, stage: int) -> Iterator[None]:
        self._stage = stage
        try: yield
        finally: self._stage = None

    def _checkpoint(self, place: str) -> None:
        "Fire the event of a place at which the run can be saved."
        self._place = place
        self(_EVENTS[place])
        self._place = ''

    def _end_iteration(self) -> None:
        self('after_iteration')
        self._checkpoint('iteration')

    def _epochs(self) -> Iterable[int]:
        "Return the numbers of the epochs that are to be trained."
        r, first = self._resumption, 0
        if r is not None:
            first = self._first_epoch(r)
            if r.at == 'epoch' and self._stopping: return ()  # the checkpoint is of a fit that was stopped
        return count(first) if self.n_epoch is None else range(first, self.n_epoch)

    def _first_epoch(self, r: ResumeState) -> int:
        "Return the epoch that a resumed fit begins with: the one that was under way, or else the next."
        epoch, k = r.loop['epoch'], self.epochs_per_iteration
        if r.at != 'epoch': return epoch
        self.epoch = epoch
        if k is not None and (epoch + 1) % k: self('before_iteration')
        self._resume_at('epoch')
        self._resume_drawing(r.state['position'])
        if r.loop['place'] == 'epoch' and self._ends_iteration(): self._end_iteration()
        return epoch + 1

    def _starts_iteration(self) -> bool:
        k = self.epochs_per_iteration
        return k is not None and (self.epoch % k == 0 or self.resumed)

    def _resume_at(self, place: str) -> None:
        "Put a checkpoint that was taken at this place of the loop in place; raise where its own was passed over."
        r = self._resumption
        if r is None: return
        here = self.epoch == r.loop['epoch']
        if here and r.at == place:
            if place == 'evaluation':
                self._resume_drawing(r.state['position'])  # of the epoch that comes next
            return r.restore(self)
        if place == 'evaluation' or not here:
            raise CheckpointError(f'The checkpoint was taken after batch {r.loop["iter"]} of epoch {r.loop["epoch"]}, '
                                  'and this fit did not get there: the epoch, or its training, was cancelled, or '
                                  f'{type(self).__name__} trains epochs in a way of its own. Nothing was trained; '
                                  'resume from a checkpoint of an epoch\'s end.')

    def _open_loader(self) -> tuple[int, Iterator[Any] | None]:
        "Return the number of the next batch and the iterator that gives it, None when no batch is to come."
        assert self._device is not None  # whoever draws has set it
        if not (self.training and self.fitting): return 0, read_ahead(self.dl, self._device)
        r = self._resumption
        if r is not None and r.at == 'evaluation': return 0, None
        self._resume_at('batch')
        first = 0
        if r is not None:
            first = r.loop['n_drawn']
            self._resume_drawing(r.state['position'])
        elif not self._is_stream():
            self._drawing = self._next_drawing()
        if self._is_stream():
            batches: Iterator[Any] = self._open_stream()
        else:
            assert self._drawing is not None  # it was made above
            batches = read_ahead(self.dl, self._device, self._drawing.begin)
        if r is not None and r.loop['place'] == 'within': self._evaluate_as_due()
        return first, None if r is not None and self._stopping else batches

    def _is_stream(self) -> bool:
        "Return True where `n_iter` cuts epochs out of a loader that can be iterated again."
        dl = self.dls.train
        return getattr(self.dls, 'n_iter', None) is not None and n_batches(dl) is None and not isinstance(dl, Iterator)

    def _open_stream(self) -> Stream:
        "Return the pass that is open, from this fit or an earlier one, or else a new one."
        stream, dl = self._stream, self.dl
        if stream is None or stream.dl is not dl:
            stream = self._stream = Stream(dl)
        device = self._device
        assert device is not None  # whoever draws has set it
        stream.begin = lambda drawing: read_ahead(dl, device, drawing.begin)
        return stream

    def _resume_drawing(self, position: Mapping[str, Any] | None) -> None:
        "Let the training loader's pass begin at a checkpoint's position."
        if position is None:
            return
        drawing = LoaderPosition.resume(self.dls.train, position)
        if self._is_stream():
            self._stream = Stream(self.dls.train, drawing=drawing, n=position['n'])
        else:
            self._drawing = drawing

    def _next_drawing(self) -> LoaderPosition:
        "Return the pass over the training loader that comes next."
        last = self._drawing
        if last is not None and last.start is None: return last  # a checkpoint between two epochs left it here
        return LoaderPosition(self.dl, n_before=last.n_before + self._n_drawn if last is not None else 0)

    def _end_cleanup(self) -> None:
        super()._end_cleanup()
        if self._depth > 1: return
        self._drawing = None
        self._end_resume()

    def _end_resume(self) -> None: self._resumption, self.resumed, self._resumes_at = None, False, 0

    def _batch_indices(self) -> list[Any] | None:
        "Return the data set's indices of the training batch at hand, None where they cannot be known."
        if not self.training:
            return None
        if self._is_stream():
            return None if self._stream is None else self._stream.drawing.indices(self._stream.n - 1)
        return None if self._drawing is None else self._drawing.indices(self.iter)

    def _evaluate_as_due(self) -> None:
        "Do the evaluation that was broken off after a batch, and what comes after it."
        for cb in self.cbs:
            if isinstance(cb, EvaluateWithinEpochs): cb.after_batch()
        self._checkpoint('batch')
