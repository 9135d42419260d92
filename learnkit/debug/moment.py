# SPDX-License-Identifier: Apache-2.0
"""A moment of an earlier run, before one of its batches: look at the batch, take the step, or take another one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from learnkit.checkpoint.host import copy_to_host
from learnkit.checkpoint.resume_check import silenced
from learnkit.checkpoint.state import collect_state
from learnkit.core.batch import find_bs, map_tensors, take_rows
from learnkit.core.errors import CancelFitException, CheckpointError, OptionError
from learnkit.core.time import Time
from learnkit.data.show import show_samples
from learnkit.debug.samples import LayerNorms, Rows, Samples, measure_samples
from learnkit.distributed.dtensor import gather_full_state
from learnkit.engine.callback import Callback
from learnkit.engine.own_loop import list_overrides
from learnkit.engine.snapshot import restored

if TYPE_CHECKING:
    from learnkit.learner import Learner


Fit = Callable[..., Any]  # f(learn, resume=...)


class StopBefore(Callback):
    """End a fit silently before the first training batch at or after a time; keep the state and the batch there.

    >>> from learnkit.testing import synth_learner
    >>> stop = StopBefore(Time('15ba'))
    >>> with synth_learner(n_train=10).no_bar() as learn: travel(learn, stop, lambda learn, resume: learn.fit(3))
    >>> stop.state['loop']['epoch'], stop.state['loop']['n_drawn'], sorted(stop.losses)[-1]
    (1, 5, 14)
    """

    order = 10_000  # after all callbacks whose changes the state must hold
    runs_first: tuple[str, ...] = ('before_batch',)  # before any callback changes the batch
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
        self.losses: dict[int, float] = {}  # by the number of the batch
        self.drawn: dict[str, Any] = {}  # the next batch; empty at the end of the run
        self.held: list[Any] = []  # callbacks that are switched off from the time on

    def before_fit(self) -> None:
        "Check that the fit has the callbacks of the run; without a checkpoint, keep the state before the first batch."
        learn = self.learn
        missing = sorted(self._needed.difference(learn.parts.callbacks.keys.values()))
        if missing:
            raise CheckpointError(
                f'The run had the callbacks {", ".join(missing)}, and this one has not. Give the function that '
                'trained: `fit=lambda learn, **kw: learn.fit_one_cycle(5, 0.1, **kw)`.'
            )
        if self.state is None:
            state = copy_to_host(gather_full_state(collect_state(learn, 'epoch')))
            # as after an epoch before the first
            self.state = self.first = {**state, 'loop': {**state['loop'], 'epoch': -1}}

    def before_batch(self) -> None:
        "End the fit at the time."
        learn = self.learn
        if learn.time < self._until:
            return
        indices = learn.parts.passes.indices(learn)
        self.drawn = {'batch': learn.batch, 'xb': learn.xb, 'yb': learn.yb, 'indices': indices}
        self._leave()

    def after_batch(self) -> None:
        "Keep the loss as the Recorder keeps it."
        learn = self.learn
        if 'loss_grad' in learn.__dict__:
            loss = learn.loss.mean() if learn.loss.dim() else learn.loss
            self.losses[learn.parts.counters.batches - 1] = loss.item()

    def batch_checkpoint(self) -> None:
        self._keep()

    def epoch_checkpoint(self) -> None:
        self._keep()
        if self.learn.run.stopping or self.learn.epoch + 1 == self.learn.n_epoch:
            self._leave()

    def _keep(self) -> None:
        if self.learn.time >= self._until:
            self.state = self.learn.checkpoint_state()

    def _leave(self) -> None:
        "End the fit without any further event but `cleanup`."
        self.held = self.learn.parts.callbacks.hold(self.learn.cbs)
        raise CancelFitException


def travel(
    learn: Learner,
    stop: StopBefore,
    fit: Fit,
    resume: Any = False,  # checkpoint or state; False: from the start of the run
    cbs: Iterable[Callback] = (),
) -> None:
    "Train silently until a callback ends the fit."
    loss_func = learn.loss_func
    with silenced(learn), learn.added_cbs([*cbs, stop]):
        try:
            fit(learn, resume=resume)
        finally:
            learn.parts.callbacks.release(stop.held)
            # callbacks such as fastai's MixUp restore it in `after_train`, which does not come
            learn.loss_func = loss_func


class Moment:
    """The Learner as it was before a batch of an earlier run; `learn.rewind` returns it.

    `batch`, `xb`, `yb` are the batch as the loader gave it, before callbacks change it; `indices` are the positions of
    its samples in the data set, or None if they are unknown. Each of `step` and `play` starts from this moment again.
    """

    def __init__(
        self,
        learn: Learner,
        fit: Fit,  # f(learn, resume=...), which trained
        stop: StopBefore,  # what was kept before the batch
        outside: Mapping[str, Any],  # states of callbacks that write files, when the run was there
        find_before: Callable[[int], Any],  # f(ba): where to resume to come to a batch, or None
    ) -> None:
        self.learn = learn
        self.ba = learn.time.ba  # number of the batch, over all fits
        self.losses = stop.losses  # of the batches on the way, by number
        self.batch, self.xb, self.yb = (stop.drawn[name] for name in ('batch', 'xb', 'yb'))
        self.indices: list[Any] | None = stop.drawn['indices']
        self._fit = fit
        self._state = stop.state
        self._outside = outside
        self._find_before = find_before

    def __repr__(self) -> str:
        return f'Moment(before batch {self.ba}, epoch {self.learn.epoch}, indices={self.indices})'

    def step(
        self,
        lr: float | None = None,  # rate of this step
        without: Iterable[int] = (),  # positions in the batch of samples to leave out
        cbs: Iterable[Callback] = (),  # more callbacks
    ) -> float:
        """Take the step, and return its loss; NaN if the batch was skipped before its loss.

        Without arguments, it is the loss that the run has recorded, bit for bit. The Learner stands after the step.

        Raises `OptionError` if no sample is left.
        """
        changes = [*cbs]
        if lr is not None:
            changes.append(_rate_callback(lr))
        left_out = set(without)
        if left_out:
            changes.append(_without_callback(left_out))
        return self._travel(1, changes).get(self.ba, math.nan)

    def play(
        self,
        n: str | int | Time,  # batches: 20, '20ba'
        cbs: Iterable[Callback] = (),  # more callbacks
    ) -> list[float]:
        "Train on silently for some batches, and return their losses."
        batches = Time(n, 'ba') if isinstance(n, int) else Time(n)
        if batches.unit != 'ba':
            raise OptionError(f'play({n!r}): give a number of batches, such as "20ba".')
        losses = self._travel(int(batches.value), cbs)
        return [losses[ba] for ba in sorted(losses) if ba >= self.ba]

    def _travel(self, n: int, cbs: Iterable[Callback]) -> dict[int, float]:
        stop = StopBefore(Time(self.ba + n, 'ba'), self._state)
        travel(self.learn, stop, self._fit, self._state, cbs)
        return stop.losses

    def begin_branch(self, learn: Learner) -> dict[str, Any]:
        """Give the Learner its own folder, and return the state; `learn.fit(n, resume=moment)` calls it.

        The folder is `branch-1234ba` below `learn.path`, or with a number behind it. The old run's files stay as they
        are. Raises `CheckpointError` for a Checkpoint whose folder does not follow `learn.path`."""
        fixed = [cb for cb in learn.cbs if getattr(cb, 'has_own_folder', False)]
        if fixed:
            raise CheckpointError(
                f'{fixed[0]} has a folder of its own, where a branch would mix with the run: leave out `folder=`, and '
                'set `Learner(path=)`.'
            )
        names = [f'branch-{self.ba}ba', *(f'branch-{self.ba}ba-{i}' for i in range(2, 1000))]
        learn.path = next(
            Path(learn.path) / n for n in names if not (Path(learn.path) / n).exists()
        )
        assert self._state is not None
        return {**self._state, 'callbacks': {**self._state['callbacks'], **self._outside}}

    # -- the batch ---------------------------------------------------------------------------------

    def samples(self) -> Samples:
        """Return the samples of the batch, largest loss first: position, loss, share of the gradient, index.

        The share is the norm of a sample's gradient over the sum of these norms. The samples are as the callbacks have
        made them before the forward pass. Each goes through the model alone, in evaluation mode: by `torch.func` where
        the model allows it, otherwise one after the other. The Learner is not changed. Raises `LossError` for a batch
        without a loss, and `OptionError` for a Learner with its own `train_batch`."""
        if {'train_batch', '_do_one_batch'} & {*list_overrides(self.learn)}:
            raise OptionError(
                f'samples(): {type(self.learn).__name__} trains on batches in its own way, which has no loss of one '
                'sample. `moment.step(without=[i])` leaves samples out.'
            )
        stop = _MeasureSamples(Time(self.ba, 'ba'), self._state)
        self._look(stop, self._state)
        for row in stop.rows:
            row['index'] = None if self.indices is None else self.indices[row['position']]
        return Samples(stop.rows, self.xb)

    def layers(self) -> Rows:
        """Return the norms of output and gradient of each layer in this step and, as `*_before`, in the step before.

        The gradient is that of the layer's parameters, and None without any.
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
        n = find_bs(self.xb, self.yb, self.learn.size_func)
        rows = list(range(min(n, max_n)))
        details = {} if self.indices is None else {'index': self.indices[:max_n]}
        xb, yb = take_rows((self.xb, self.yb), n, rows)
        return show_samples(xb, {**details, 'target': yb}, getattr(self.learn.dls, 'vocab', None))

    def _look(self, stop: StopBefore, resume: Any, cbs: Iterable[Callback] = ()) -> None:
        "Train up to a batch, and restore the Learner."
        with restored(self.learn):
            travel(self.learn, stop, self._fit, resume, cbs)


class _MeasureSamples(StopBefore):
    "End a fit before the forward pass of a batch, and measure its samples as callbacks have made them."

    runs_first = ()  # after the other callbacks

    def before_batch(self) -> None:
        self.rows = measure_samples(self.learn)
        super().before_batch()


def _rate_callback(lr: float) -> Callback:
    "Return a callback that sets the rate, after the schedules."

    def before_step(cb: Any) -> None:
        cb.opt.set_hypers(lr=lr)

    return Callback(before_step=before_step, order=1000)


def _without_callback(left_out: set[int]) -> Callback:
    "Return a callback that leaves out samples, before the others."

    def before_batch(cb: Any) -> None:
        n = find_bs(cb.xb, cb.yb, cb.learn.size_func)
        kept: Sequence[int] = [i for i in range(n) if i not in left_out]
        if not kept:
            raise OptionError(f'without={sorted(left_out)}: no sample of the batch is left.')
        cb.learn.xb = map_tensors(tuple(cb.xb), lambda t: t[kept])
        cb.learn.yb = map_tensors(tuple(cb.yb), lambda t: t[kept])

    return Callback(before_batch=before_batch, order=-9)
