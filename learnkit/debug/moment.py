# SPDX-License-Identifier: Apache-2.0
"""A moment of an earlier run, before one of its batches: look at the batch, take the step, or take another one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from learnkit.checkpoint.host import copy_to_host
from learnkit.checkpoint.resume_check import silenced
from learnkit.checkpoint.state import collect_state
from learnkit.comm.dtensor import gather_full_state
from learnkit.core.batch import count_samples, find_bs, map_tensors, size_func_of, take_rows
from learnkit.core.errors import CancelFitException, CheckpointError, OptionError
from learnkit.core.time import Time
from learnkit.data.show import show_samples
from learnkit.debug.record import Jump, Record, measure_jumps, refuse
from learnkit.debug.samples import LayerNorms, Rows, Samples, measure_samples
from learnkit.debug.trace import digest_tensors
from learnkit.engine.callback import Callback
from learnkit.engine.callback_state import keeps_attributes
from learnkit.engine.custom_batch import list_overrides
from learnkit.engine.dispatch import as_callback, as_list
from learnkit.engine.resumed_run import ResumeState, list_checkpoint_writers
from learnkit.engine.snapshot import restored
from learnkit.engine.traits import trait_of

if TYPE_CHECKING:
    from learnkit.learner import Learner


Fit = Callable[..., Any]  # f(learn, resume=...)


class StopBefore(Callback):
    """End a fit silently before the first training batch at or after a time; keep the state and the batch there.

    >>> from learnkit.testing import synth_learner
    >>> stop = StopBefore(Time('15ba'))
    >>> with synth_learner(n_train=10).no_bar() as learn: seek(learn, stop, lambda learn, resume: learn.fit(3))
    >>> stop.state['loop']['epoch'], stop.state['loop']['n_drawn'], sorted(stop.losses)[-1]
    (1, 5, 14)
    """

    order = 10_000  # after all callbacks whose changes the state must hold
    # before any callback changes the batch, or ends a pass after it
    runs_first: tuple[str, ...] = ('before_batch', 'after_batch')
    run_in = 'fit'
    run_valid = False

    def __init__(
        self,
        until: Time,
        state: Mapping[str, Any] | None = None,  # state that the fit resumes from
        needed: Iterable[str] = (),  # keys of the callbacks that the run had
    ) -> None:
        self._until = until
        self._needed = set(needed)
        self.state = state
        self.first: Mapping[str, Any] | None = None  # state before the first batch of the run
        self.reached: Mapping[str, Any] | None = None  # first state at the time, after a batch
        self.first_batch: str | None = None  # digest of the first batch of this fit
        self._batch = 0  # number of the current batch; the counter counts it in `after_batch`
        self.ended_at = 0  # number of the batch before which the fit has ended
        self.n_epoch: int | None = None  # number of epochs of the fit
        self.loss_funcs: tuple[Any, Any] = None, None  # at the start and at the end of the fit
        self.losses: dict[int, float] = {}  # by the number of the batch
        self.drawn: dict[str, Any] = {}  # the next batch; empty at the end of the run
        self.held: list[Any] = []  # callbacks that are switched off from the time on

    def before_fit(self) -> None:
        "Check that the fit has the callbacks of the run; without a checkpoint, keep the state before the first batch."
        learn = self.learn
        missing = sorted(self._needed.difference(learn.parts.callbacks.keys.values()))
        if missing:
            raise CheckpointError(
                f'The run had the callbacks {", ".join(missing)}, which this Learner lacks. Pass the function that '
                'trained: `fit=lambda learn, **kw: learn.fit_one_cycle(5, 0.1, **kw)`.'
            )
        self.n_epoch = learn.n_epoch
        if self.state is None:
            state = copy_to_host(gather_full_state(collect_state(learn, 'epoch')))
            # as after an epoch before the first
            self.state = self.first = {**state, 'loop': {**state['loop'], 'epoch': -1}}

    def before_batch(self) -> None:
        "End the fit at the time."
        learn = self.learn
        self._batch = learn.parts.counters.batches
        if self.first_batch is None:
            self.first_batch = digest_tensors(learn.batch)
        if learn.time < self._until:
            return
        indices = learn.parts.positions.indices(learn)
        self.drawn = {'batch': learn.batch, 'xb': learn.xb, 'yb': learn.yb, 'indices': indices}
        self._leave()

    def after_batch(self) -> None:
        "Keep the loss as the Recorder keeps it."
        learn = self.learn
        if 'loss_grad' in learn.__dict__:
            loss = learn.loss.mean() if learn.loss.dim() else learn.loss
            self.losses[self._batch] = loss.item()

    def batch_checkpoint(self) -> None:
        self._keep()

    def epoch_checkpoint(self) -> None:
        self._keep()
        if self.learn.run.stopping or self.learn.epoch + 1 == self.learn.n_epoch:
            self._leave()

    def _keep(self) -> None:
        if self.learn.time >= self._until:
            self.state = self.learn.checkpoint_state()
            self.reached = self.reached or self.state

    def _leave(self) -> None:
        "End the fit without any further event but `cleanup`."
        self.ended_at = self.learn.parts.counters.batches
        self.loss_funcs = self.loss_funcs[0], self.learn.loss_func
        self.held = self.learn.parts.callbacks.hold(self.learn.cbs)
        raise CancelFitException


class _Arrived(Exception):
    "Leave the function that trains: its fit has reached the batch and ended."


def seek(
    learn: Learner,
    stop: StopBefore,
    fit: Fit,
    resume: Any = False,  # checkpoint or state; False: from the start of the run
    cbs: Iterable[Callback] = (),
) -> None:
    """Train silently until a callback ends the fit, then leave the function that trains.

    The function may run several fits: `fine_tune` would otherwise unfreeze the model and begin the second one.
    Callbacks with `writes_files` that it adds, such as a `Checkpoint` of the fit, are left out."""
    own_fit, own_add = learn.fit, learn.add_cbs

    def fit_and_leave(*args: Any, **kwargs: Any) -> None:
        own_fit(*args, **kwargs)
        if stop.held:
            raise _Arrived

    def add_silent(added: Any) -> Any:
        new = [as_callback(cb) for cb in as_list(added)]
        return own_add([cb for cb in new if not trait_of(cb, 'writes_files')])

    stop.loss_funcs = learn.loss_func, None
    with silenced(learn), learn.added_cbs([*cbs, stop]), suppress(_Arrived):
        try:
            fit_patch = patch.object(learn, 'fit', fit_and_leave)
            with fit_patch, patch.object(learn, 'add_cbs', add_silent):
                fit(learn, resume=resume)
        finally:
            learn.parts.callbacks.release(stop.held)
            # a callback with its own loss function, such as fastai's MixUp, sets it again in each fit
            before, now = stop.loss_funcs
            owner = getattr(now, '__self__', None)
            is_kept = stop.held and all(owner is not cb for cb in learn.cbs)
            learn.loss_func = now if is_kept else before


class Moment:
    """The Learner as it was before a batch of an earlier run; `learn.rewind` returns it.

    `batch`, `xb`, `yb` are the batch as the loader returned it, before callbacks change it; `indices` are the positions
    of its samples in the data set, or None if they are unknown. `jump` is the change of the recorded loss. Each look
    (`step`, `play`, `samples`, `layers`) starts from this moment again, and must find the same batch and its recorded
    loss. Otherwise it raises `CheckpointError`, or warns if the moment was made with `rewind(exact=False)`. Changes are
    passed as arguments: `step(cbs=...)`.
    """

    def __init__(
        self,
        learn: Learner,
        fit: Fit,  # f(learn, resume=...), which trained
        stop: StopBefore,  # what was kept before the batch
        outside: Mapping[str, Any],  # states of callbacks that write files, when the run was there
        find_before: Callable[[int], Any],  # f(ba): where to resume to come to a batch, or None
        made: Mapping[int, set[str]],  # result of `list_attributes` before the run was repeated
        record: Record | None = None,  # recorded losses; None: not comparable
        exact: bool = True,  # whether a different loss is an error
    ) -> None:
        self.learn = learn
        self.ba = learn.time.ba  # number of the batch, over all fits
        self.losses = stop.losses  # of the batches on the way, by number
        self.n_epoch = stop.n_epoch
        self.batch, self.xb, self.yb = (stop.drawn[name] for name in ('batch', 'xb', 'yb'))
        self.indices: list[Any] | None = stop.drawn['indices']
        self._digest = digest_tensors(self.batch)
        self._first_loss_func = stop.loss_funcs[0]
        self._fit = fit
        self._state = stop.state
        self._outside = outside
        self._find_before = find_before
        self._made = made
        self._record = record
        self._exact = exact
        self._is_checked = False  # whether the step had the recorded loss

    def __repr__(self) -> str:
        place = f'before batch {self.ba}, epoch {self.learn.epoch}'
        jump = '' if self.jump is None else f'; {self.jump}'
        return f'Moment({place}{jump}; indices={self.indices})'

    @property
    def jump(self) -> Jump | None:
        "Recorded change of the loss at this batch, or None if it is not known."
        losses = {} if self._record is None else self._record.losses
        return next((jump for jump in measure_jumps(losses) if jump.ba == self.ba), None)

    def step(
        self,
        lr: float | None = None,  # rate of this step
        without: Iterable[int] = (),  # positions in the batch of samples to leave out
        cbs: Iterable[Callback] = (),  # more callbacks
        without_indices: Iterable[Any] = (),  # indices in the data set of samples to leave out
    ) -> float:
        """Take the step, and return its loss; NaN if the batch was skipped before its loss.

        Without arguments, it is the loss that the run has recorded, bit for bit. With arguments, the step is first
        taken as in the run, compared, and undone. Afterwards, weights, optimizer and counters have their new values.

        Raises `OptionError` for a position or an index that is not in the batch, and if no sample is left.
        """
        changes = [*cbs]
        if lr is not None:
            changes.append(_rate_callback(lr))
        left_out = self._find_positions(without, without_indices)
        if left_out:
            changes.append(_without_callback(left_out))
        return self._play(1, changes).get(self.ba, math.nan)

    def play(
        self,
        n: str | int | Time,  # batches: 20, '20ba'
        cbs: Iterable[Callback] = (),  # more callbacks
    ) -> list[float]:
        """Continue training without output for some batches, at most to the end of the fit, and return their losses.

        Without callbacks, these are the recorded losses, as far as the run recorded them."""
        batches = Time(n, 'ba') if isinstance(n, int) else Time(n)
        if batches.unit != 'ba':
            raise OptionError(f'play({n!r}): pass a number of batches, such as "20ba".')
        losses = self._play(int(batches.value), [*cbs]) if batches else {}
        return [losses[ba] for ba in sorted(losses) if ba >= self.ba]

    def observe(self, n: int, cbs: Iterable[Callback] = ()) -> None:
        "Train some batches with callbacks that only observe, and restore the Learner."
        self._look(StopBefore(Time(self.ba + n, 'ba'), self._state), self._state, cbs)

    def _find_positions(self, positions: Iterable[int], indices: Iterable[Any]) -> set[int]:
        "Return the positions of samples in the batch; raise `OptionError` for a sample that is not there."
        given, indices = [*positions], [*indices]
        if not given and not indices:
            return set()
        n = find_bs(self.xb, self.yb, size_func_of(self.learn))
        odd = [i for i in given if not _is_position(i, n)]
        if odd:
            raise OptionError(
                f'without={odd}: pass positions in the batch, from 0 to {n - 1}. For indices in the data set, use '
                '`without_indices=`.'
            )
        found = set(map(index, given))
        if indices and self.indices is None:
            raise OptionError(
                'without_indices=: the indices of this batch are unknown. Pass positions as `without=`.'
            )
        own = self.indices or []
        missing = [i for i in indices if i not in own]
        if missing:
            raise OptionError(
                f'without_indices={missing}: these samples are not in the batch. `moment.indices` lists its samples.'
            )
        return found | {position for position, i in enumerate(own) if i in indices}

    def _play(self, n: int, changes: list[Callback]) -> dict[int, float]:
        "Train some batches, and return their losses; compare them if nothing is changed."
        if changes:
            self._check()
        stop = StopBefore(Time(self.ba + n, 'ba'), self._state)
        self._look(stop, self._state, changes, is_same=not changes)
        self._load(stop.reached or stop.state)
        return stop.losses

    def _load(self, state: Any) -> None:
        "Load the state at the end of a look, without the states of callbacks that were added for the look."
        learn = self.learn
        with silenced(learn):
            keys = {*learn.parts.callbacks.keys.values()}
            states = {key: sd for key, sd in state['callbacks'].items() if key in keys}
            learn.load_checkpoint_state({**state, 'callbacks': states})

    def _check(self) -> None:
        "Take the step as in the run once, compare its loss with the recorded one, and undo it."
        if not self._is_checked:
            self._look(StopBefore(Time(self.ba + 1, 'ba'), self._state), self._state)

    def _compare(self, stop: StopBefore, begin: int) -> None:
        "Raise `CheckpointError` unless the losses of a look are the recorded ones."
        if self._record is None:
            return
        known = [ba for ba in range(begin, stop.ended_at) if ba in self._record.batches]
        # the first must be known; a run that was killed lacks the last ones
        refuse(self._record.find_other(stop.losses, known or [begin]), self._exact)

    def begin_branch(self, learn: Learner) -> dict[str, Any]:
        """Give the Learner its own folder, and return the state; `learn.fit(n, resume=moment)` calls it.

        The folder is `branch-1234ba` below `learn.path`, or with a number after it. The old run's files stay as they
        are. Raises `CheckpointError` for a Checkpoint whose folder does not follow `learn.path`."""
        fixed = [cb for cb in list_checkpoint_writers(learn) if cb.has_own_folder]
        if fixed:
            raise CheckpointError(
                f'{fixed[0]} has its own folder, where a branch would mix with the run: leave out `folder=`, and '
                'set `Learner(path=)`.'
            )
        names = [f'branch-{self.ba}ba', *(f'branch-{self.ba}ba-{i}' for i in range(2, 1000))]
        learn.path = next(
            Path(learn.path) / n for n in names if not (Path(learn.path) / n).exists()
        )
        assert self._state is not None
        self._remove_new_attributes()
        return {**self._state, 'callbacks': {**self._state['callbacks'], **self._outside}}

    # -- the batch ---------------------------------------------------------------------------------

    def samples(self) -> Samples:
        """Return the samples of the batch, largest loss first: position, loss, share of the gradient, index.

        The share is the norm of a sample's gradient over the sum of these norms. The samples are as the callbacks have
        made them before the forward pass. Each goes through the model alone, in evaluation mode: by `torch.func` where
        the model allows it, otherwise one after the other. The Learner is not changed. Raises `LossError` for a batch
        without a loss of single samples, and `OptionError` for a Learner with its own `train_batch`."""
        if {'train_batch', '_do_one_batch'} & {*list_overrides(self.learn)}:
            raise OptionError(
                f'samples(): {type(self.learn).__name__} trains on batches in its own way, which has no loss of one '
                'sample. `moment.step(without=[i])` leaves samples out.'
            )
        stop = MeasureSamples(Time(self.ba, 'ba'), self._state)
        self._check()
        self._look(stop, self._state, is_same=False)
        for row in stop.rows:
            row['index'] = None if self.indices is None else self.indices[row['position']]
        return Samples(stop.rows, self.xb)

    def layers(self) -> Rows:
        """Return the norms of output and gradient of each layer in this step and, as `*_before`, in the step before.

        The gradient is the norm over the layer's parameters, or None without parameters.
        The step before is repeated from its nearest checkpoint; its norms are None for the first batch of a run."""
        now = LayerNorms(self.ba)
        self._look(StopBefore(Time(self.ba + 1, 'ba'), self._state), self._state, [now])
        last = LayerNorms(self.ba - 1)
        earlier = self._find_before(self.ba - 1)
        if earlier is not None:
            self._look(StopBefore(Time(self.ba, 'ba'), self._state), earlier, [last])
        rows = Rows()
        for name, norms in now.norms.items():
            before = {f'{k}_before': last.norms.get(name, {}).get(k) for k in norms}
            rows.append({'layer': name, **norms, **before})
        return rows

    def show(self, max_n: int = 9) -> Any:
        "Show samples of the batch with their targets: images in a grid, other data as a table."
        return show_batch(self.learn, self.xb, self.yb, self.indices, max_n)

    def _look(
        self,
        stop: StopBefore,
        resume: Any,  # where to resume
        cbs: Iterable[Callback] = (),
        is_same: bool = True,  # whether the batches are trained as in the run
    ) -> None:
        """Train up to a batch, compare it with the run, and restore the Learner.

        This includes what no checkpoint contains: attributes of the model and of callbacks."""
        with restored(self.learn):
            if resume is not self._state:  # a callback may have changed it on the way
                self.learn.loss_func = self._first_loss_func
            self._remove_new_attributes()
            seek(self.learn, stop, self._fit, resume, cbs)
        if resume is self._state and stop.first_batch != self._digest:
            refuse([f'batch {self.ba} is not the same batch again'], self._exact)
        if is_same:
            state = resume.state if isinstance(resume, ResumeState) else resume
            self._compare(stop, state['loop']['done']['ba'])
            self._is_checked = True

    def _remove_new_attributes(self) -> None:
        "Remove the attributes that callbacks lacked when they were made; a state that is loaded may lack them, too."
        for cb in self.learn.cbs:
            for name in vars(cb).keys() - self._made.get(id(cb), vars(cb).keys()):
                del vars(cb)[name]


def show_batch(
    learn: Learner,
    xb: tuple[Any, ...],
    yb: tuple[Any, ...],
    indices: list[Any] | None,  # of the samples in the data set, if they are known
    max_n: int,  # maximum number of samples
) -> Any:
    "Show samples of a batch with their targets: images in a grid, other data as a table."
    n = find_bs(xb, yb, size_func_of(learn))
    rows = list(range(min(n, max_n)))
    details = {} if indices is None else {'index': indices[:max_n]}
    xb, yb = take_rows((xb, yb), n, rows)
    return show_samples(xb, {**details, 'target': yb}, getattr(learn.dls, 'vocab', None))


def list_attributes(learn: Learner) -> dict[int, set[str]]:
    "Return the names of the attributes of each callback whose attributes are its state, by the callback's id."
    return {id(cb): set(vars(cb)) for cb in learn.cbs if keeps_attributes(cb)}


class MeasureSamples(StopBefore):
    "End a fit before the forward pass of a batch, and measure its samples as callbacks have made them."

    runs_first = ('after_batch',)  # `before_batch` after the other callbacks

    def before_batch(self) -> None:
        self.rows = measure_samples(self.learn)
        super().before_batch()


def _is_position(i: Any, n: int) -> bool:
    "Return True for an integer of Python, NumPy or torch from 0 to n - 1."
    with suppress(TypeError):
        return not isinstance(i, bool) and 0 <= index(i) < n
    return False


def _rate_callback(lr: float) -> Callback:
    "Return a callback that sets the rate, after the schedules."

    def before_step(cb: Any) -> None:
        cb.opt.set_hypers(lr=lr)

    return Callback(before_step=before_step, order=1000)


def _without_callback(left_out: set[int]) -> Callback:
    "Return a callback that leaves out samples, before the others."

    def before_batch(cb: Any) -> None:
        n = count_samples(cb.learn)
        kept: Sequence[int] = [i for i in range(n) if i not in left_out]
        if not kept:
            raise OptionError(f'without={sorted(left_out)}: no sample of the batch is left.')
        cb.learn.xb = map_tensors(tuple(cb.xb), lambda t: t[kept])
        cb.learn.yb = map_tensors(tuple(cb.yb), lambda t: t[kept])

    return Callback(before_batch=before_batch, order=-9)
