"""Repeat a batch that went wrong: the same data, random numbers, modes and events, as often as it takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from fastcore.basics import noop
from torch import Tensor, nn

from learnkit.callbacks.nan_diagnosis import listed_few, samples_of
from learnkit.callbacks.progress import ProgressCallback
from learnkit.core.errors import CancelException, FitError
from learnkit.core.random import RNGState, capture_rng, restore_rng
from learnkit.engine.callback import Callback
from learnkit.engine.passes import TrainingPasses
from learnkit.engine.snapshot import restored

__all__ = ['Replay', 'replay']

# where in the loop a batch was drawn
STATE = (
    'epoch',
    'iter',
    'n_iter',
    'train_iter',
    'pct_train',
    'n_epoch',
    'epochs_per_iteration',
    'training',
    'phase',
    'dl',
    'dl_name',
    'fitting',
)


SWITCHES = ('run', 'run_train', 'run_valid', 'order')  # of a callback: these are the user's
ATOMS = frozenset([bool, int, float, str, type(None)])


class Drawn(NamedTuple):
    "A batch as the loader gave it, and what was so when it did."

    batch: Any
    rng: RNGState
    state: dict[str, Any]
    done: dict[str, int]
    counts: list[tuple[Any, dict[str, Any]]]  # of each callback: numbers, flags and names


class Replay(Callback):
    """Keep each batch, and the state of the random numbers before it, so that `learn.replay()` can repeat it.

    After an exception has ended a run, `learn.replay()` does the batch again in which it was raised, in training or in
    evaluation. When nothing failed, it repeats the last training batch.

    It keeps the last batch of training and that of evaluation as the loader gave them, by reference (on a GPU the
    memory of one batch more; what changes a batch in place, changes what is repeated), with counters and flags of the
    callbacks; not weights, nor gradients that were accumulated before. The next fit lets go of it, and so does
    `learn.close()`. Each batch costs some 40 microseconds. Nothing is checkpointed.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(cbs=Replay())
    >>> with learn.no_bar(), learn.no_logging(): learn.fit(1)
    >>> with learn.no_logging(): bool(learn.replay() == learn.replay())
    True
    """

    order, remove_on_find, remove_on_fetch = 10_000, True, True  # the last to hear of a draw
    name = 'replay_callback'  # `learn.replay` is a method

    def __init__(self) -> None:
        self._let_go()

    def _let_go(self) -> None:
        self._drawn: dict[bool, Drawn] = {}  # the last batches, by whether they are of training
        self._within: bool | None = None  # which of them is under way
        self._failed: bool | None = None  # which of them was, when the run failed
        self._why = ''  # notes of the exception
        self._modes: list[tuple[nn.Module, bool]] = []
        self._present: list[Any] = []  # the callbacks of that run
        self._indices: list[Any] | None = None  # of the batch that failed, in the data set

    def before_fit(self) -> None:
        "Let go of the fit before."
        if self.learn.run.depth > 1:
            return  # within another run
        if self.learn.fitting:
            self._let_go()
        self._within, self._failed, self._why, self._indices = None, None, '', None
        self.learn.replay_source = self

    def before_train(self) -> None:
        self._look_around()

    def after_draw(self) -> None:
        "Keep the batch."
        learn, own = self.learn, vars(self.learn)
        self._within = learn.training
        others = [cb for cb in learn.callbacks if cb is not self]
        counts = [(cb, {k: v for k, v in vars(cb).items() if type(v) in ATOMS}) for cb in others]
        self._drawn[learn.training] = Drawn(
            learn.batch,
            capture_rng(),
            {name: own[name] for name in STATE},
            learn.counters.by_unit(),
            counts,
        )

    def after_batch(self) -> None:
        self._within = None

    def after_error(self) -> None:
        "Keep what the end of the run undoes."
        self._look_around()
        self._failed, self._why = self._within, ' '.join(getattr(self.learn.error, '__notes__', ()))
        self._indices = samples_of(self.learn) if self._within else None

    def _look_around(self) -> None:
        self._modes = [(m, m.training) for m in self.learn.model.modules()]
        self._present = list(self.learn.cbs)

    def close(self) -> None:
        "Let go of everything."
        self._let_go()


def replay(
    learn: Any,
    detect_anomaly: bool = False,  # let autograd name the operation whose gradient is NaN
) -> Tensor | None:
    "Repeat a batch: see `Learner.replay`."
    kept = learn.replay_source
    if learn.run.depth:
        raise FitError('A run is under way. Replay a batch when it is over.')
    if kept is None or not kept._drawn:
        raise FitError(
            'There is no batch to repeat. Add `Replay()` to the callbacks, `learn.add_cb(Replay())`, and '
            'fit again: it keeps the last batch until the next fit.'
        )
    drawn = kept._drawn[kept._failed if kept._failed is not None else max(kept._drawn)]
    if learn.logger is not noop:
        print(announcement(kept, drawn))
    with restored(learn), those_present(learn, kept), learn.no_logging(), learn.no_mbar():
        return repeat(learn, kept, drawn, detect_anomaly)


def announcement(kept: Replay, drawn: Drawn) -> str:
    "Say which batch is repeated."
    state, samples = (
        drawn.state,
        f', samples {listed_few(kept._indices)} of the data set' if kept._indices else '',
    )
    text = (
        f'Repeating batch {state["iter"]} of epoch {state["epoch"]} ({state["dl_name"]}){samples}.'
    )
    elsewhere = kept._why and kept._failed is None
    return f'{text} The run failed outside of a batch; this is the last one.' if elsewhere else text


@contextmanager
def those_present(learn: Any, kept: Replay) -> Iterator[None]:
    "Have the callbacks of the run, less those that only track, save or stop, unless it was they that failed."

    def takes_part(cb: Any) -> bool:
        if cb is kept or isinstance(cb, ProgressCallback):
            return False
        useful = not getattr(cb, 'remove_on_find', False) or getattr(cb, 'follows_weights', False)
        return useful or f'in {type(cb).__name__}.' in kept._why

    # a class may be defined anew by now
    names = {(type(cb).__module__, type(cb).__qualname__) for cb in learn.cbs}
    gone = [
        cb
        for cb in kept._present
        if all(cb is not o for o in learn.cbs)
        and takes_part(cb)
        and (type(cb).__module__, type(cb).__qualname__) not in names
    ]
    with learn.added_cbs(gone), ExitStack() as stack:
        for cb in [cb for cb in learn.cbs if not takes_part(cb)]:
            stack.enter_context(learn.removed_cbs(cb))
        yield


def repeat(learn: Any, kept: Replay, drawn: Drawn, detect_anomaly: bool) -> Tensor | None:
    "Enter the levels of the loop as far as the batch, do it, and leave as an interrupted run is left."
    training = drawn.state['training']
    levels = ('fit', 'epoch', 'train') if training else ('fit', 'epoch', 'validate')
    if learn.whole_step is not None:
        vars(learn).pop('_do_one_batch', None)  # one compiled step has no events inside
    learn.passes = KnownPass(kept._indices)
    if learn.opt is None or learn._has_foreign_opt():
        learn.create_opt()

    with (
        learn.strategy.run(learn, 'fit' if drawn.state['fitting'] else 'evaluation'),
        torch.set_grad_enabled(training),
    ):
        try:
            for i, level in enumerate(levels):
                learn.run.levels = levels[: i + 1]
                put_in_place(learn, drawn)
                learn(f'before_{level}')
            put_in_place(learn, drawn)
            for module, mode in kept._modes:
                module.training = mode
            for cb, counts in drawn.counts:
                vars(cb).update({k: v for k, v in counts.items() if k not in SWITCHES})
            restore_rng(drawn.rng)
            with torch.autograd.set_detect_anomaly(detect_anomaly or torch.is_anomaly_enabled()):
                learn.one_batch(drawn.state['iter'], drawn.batch)
        except CancelException:
            pass  # so it ended then
        loss = learn.loss
        learn._end_cleanup()
    return loss


class KnownPass(TrainingPasses):
    "The pass of a batch that is repeated: its indices are known."

    def __init__(self, known: list[Any] | None) -> None:
        super().__init__()
        self.known = known

    def indices(self, learn: Any) -> list[Any] | None:
        "Return the indices of the batch that is repeated."
        return self.known


def put_in_place(learn: Any, drawn: Drawn) -> None:
    "Let the Learner be where the batch was drawn."
    vars(learn).update(drawn.state, batch=drawn.batch)
    learn.counters.load_units(drawn.done)
