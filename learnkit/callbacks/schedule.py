# SPDX-License-Identifier: Apache-2.0
"""Schedules: hyperparameters as functions of the progress of a fit.

A schedule is a function of one number, the fraction of the fit that is done (0 to 1). A schedule
has no state except what `learn.resume` has changed: a resumed fit continues it exactly, and it
stretches over the length of any fit.
`learnkit.optim.annealing` holds the functions that schedules are made of.
`learnkit.callbacks.torch_scheduler` runs torch's own schedulers, which count steps instead."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from operator import is_
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from learnkit.callbacks.torch_scheduler import LRScheduler
from learnkit.checkpoint.resume import find_checkpoint
from learnkit.core.contexts import replacing_yield
from learnkit.core.errors import ScheduleError
from learnkit.core.time import Time, as_time
from learnkit.core.validation import warn_user
from learnkit.engine.budget import parse_length
from learnkit.engine.callback import Callback
from learnkit.engine.dispatch import as_list
from learnkit.engine.lengths import epoch_length
from learnkit.engine.optimizer import prepare_opt
from learnkit.engine.pause import resumes_in_memory
from learnkit.engine.resumed_run import check_rewound
from learnkit.engine.traits import trait_of
from learnkit.optim.annealing import (
    SchedCos,
    SchedExp,
    SchedLin,
    SchedNo,
    SchedPoly,
    Schedule,
    annealer,
    combine_scheds,
    combined_cos,
)
from learnkit.optim.hyperparams import HYPERS, OPTIONS, UPPER_BOUNDS, set_value

if TYPE_CHECKING:
    from learnkit.learner import Learner

__all__ = [
    'annealer',
    'SchedLin',
    'SchedCos',
    'SchedNo',
    'SchedExp',
    'SchedPoly',
    'combine_scheds',
    'combined_cos',
    'ParamScheduler',
    'LRScheduler',
]


# param group of torch, key, index in a pair (`betas`), index of the group in `opt.hypers`
Location = tuple[dict[str, Any], str, int | None, int]


class ParamScheduler(Callback):
    """Set hyperparameters before every training batch, each by a function of `pct_train`.

    A schedule returns one value, or a list, array or tensor with one value per param group.
    Checkpointed: the factor and the length that `learn.resume` has given to the schedules; they
    have no other state. Raises `ScheduleError` for a schedule that
    is not callable; before training, `OptimizerError` for a name that the optimizer does not have
    and for a wrong number of values.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(n_train=4)
    >>> with learn.no_bar(): learn.fit(1, cbs=ParamScheduler({'lr': SchedLin(0.5, 0.)}))
    >>> learn.recorder.lrs
    [0.5, 0.375, 0.25, 0.125]
    """

    order = 60
    run_valid = False
    remove_on_find = True
    run_in = 'fit'

    def __init__(
        self,
        scheds: Mapping[str, Schedule],  # hyperparameter: schedule
    ) -> None:
        super().__init__()
        if not isinstance(scheds, Mapping):
            raise ScheduleError(
                f'ParamScheduler({scheds!r}): pass a dict, such as `{{"lr": SchedCos(1, 0)}}`.'
            )
        self.scheds = dict(scheds)
        for name, f in self.scheds.items():
            if not callable(f):
                raise ScheduleError(
                    f'The schedule of {name} is {f!r}: pass a function of the position, such as SchedCos(1, 0).'
                )
        # highest learning rates, a number or an array by group; None: unknown
        self.highest: Any = None
        self.lr_scale: Any = None  # factor of the learning rate, a number or an array by group
        self.length: float | None = None  # length of the schedules in epochs; None: of the fit
        self._is_kept = False  # whether the fit continues a paused one
        self._opt: Any = None  # optimizer that `_plan` was made for
        # torch optimizers of `_opt`, with their param groups at that time
        self._known: list[tuple[Any, list[dict[str, Any]]]] = []
        # name, schedule, least value and locations of each hyperparameter
        self._plan: list[tuple[str, Schedule, float, list[Location]]] = []
        self._n_groups = 0

    def __repr__(self) -> str:
        return f'{type(self).__name__}({self.scheds})'

    def before_fit(self) -> None:
        self._is_kept = resumes_in_memory(self.learn)
        if not self._is_kept:
            self.lr_scale = self.length = None  # of an earlier fit
        for name in self.scheds:
            self._list_values(name, self._find_schedule(name)(min(self.learn.pct_train, 1.0)))
        others = [type(cb).__name__ for cb in self.learn.cbs if trait_of(cb, 'sets_lr')]
        if 'lr' in self.scheds and others:
            warn_user(
                f'Both {type(self).__name__} and {", ".join(others)} set the learning rate: the schedule sets it '
                'before each batch, whatever the other one has made of it. Leave one of them out.'
            )

    def before_batch(self) -> None:
        self._update_val(self.learn.pct_train)

    def find_highest_lrs(self) -> list[float] | None:
        "Return the highest learning rate of each group, or of all groups; None: unknown."
        if self.highest is None:
            return None
        scale = 1.0 if self.lr_scale is None else self.lr_scale
        return [float(rate) for rate in np.atleast_1d(self.highest * scale)]

    def scale_lr(
        self,
        factors: list[float],  # one of each group
    ) -> None:
        "Multiply the learning rates of the rest of the fit."
        scale: Any = factors[0] if len(set(factors)) == 1 else np.array(factors)
        self.lr_scale = scale if self.lr_scale is None else self.lr_scale * scale

    def change_length(
        self,
        old: int,  # number of epochs of the fit
        new: int,  # number of epochs from now on
        stretch: bool,  # whether the schedules become as much longer as the fit
    ) -> None:
        "Keep or stretch the schedules of a fit whose number of epochs changes."
        if not stretch and self.length is None:
            self.length = old
        elif stretch and self.length is not None:
            self.length *= new / old

    def _find_schedule(self, name: str) -> Schedule:
        "Return the schedule of a hyperparameter, with what `learn.resume` has changed."
        f = self.scheds[name]
        scale = self.lr_scale if name == 'lr' else None
        if scale is None and self.length is None:
            return f
        n_epoch = self.learn.n_epoch
        share = 1.0 if self.length is None or n_epoch is None else n_epoch / self.length
        return _ChangedSchedule(f, scale, share)

    def _update_val(self, pct: float) -> None:
        "Set every hyperparameter to its value at a position of the fit."
        if self._is_outdated():
            self._make_plan()
        if pct > 1:
            pct = 1.0  # rounding errors, or a loader longer than its reported length
        for name, f, least, locations in self._plan:
            value = f(pct)
            if value.__class__ is float and least <= value < UPPER_BOUNDS.get(name, math.inf):
                for group, key, index, _ in locations:
                    set_value(group, key, index, value)
            else:
                values = self._list_values(name, value, least)
                for group, key, index, i in locations:
                    set_value(group, key, index, values[i])

    def _is_outdated(self) -> bool:
        "Return True if the optimizer or a param group was replaced, as by loading a state."
        if self.learn.opt is not self._opt:
            return True
        for opt, before in self._known:
            groups = opt.param_groups
            if len(groups) != len(before) or not all(map(is_, groups, before)):
                return True
        return False

    def _make_plan(self) -> None:
        "Find the locations of all hyperparameters, once for many batches."
        opt = self.learn.opt
        if not {'wd', 'weight_decay'}.isdisjoint(self.scheds):
            opt.split_groups()
        hypers = opt.hypers
        self._plan = []
        for name in self.scheds:
            least = 0.0 if name in (*HYPERS, *OPTIONS) else -math.inf
            locations = [(*found, i) for i, h in enumerate(hypers) for found in h.find(name)]
            self._plan.append((name, self._find_schedule(name), least, locations))
        self._known = [(o, list(o.param_groups)) for o in opt.optimizers.values()]
        self._n_groups = len(hypers)
        self._opt = opt

    def _list_values(self, name: str, value: Any, least: float = math.inf) -> list[Any]:
        "Return a schedule's value as one Python number per group, without NumPy types."
        # the usual case, an array in the allowed range, is checked faster here
        if value.__class__ is np.ndarray and value.shape == (self._n_groups,):
            values = value.tolist()
            bound = UPPER_BOUNDS.get(name, math.inf)
            if min(values) >= least and sum(values) < math.inf and max(values) < bound:
                return values
        if hasattr(value, 'tolist'):
            value = value.tolist()
        return self.learn.opt.list_values(name, value)

    def cleanup(self) -> None:
        # the optimizer and the param groups hold the parameters
        self._is_kept = False
        self._opt = None
        self._known = []
        self._plan = []

    @override
    def state_dict(self) -> dict[str, Any] | None:
        "Return what `learn.resume` has changed; None if it has changed nothing."
        if self.lr_scale is None and self.length is None:
            return None
        scale = self.lr_scale.tolist() if isinstance(self.lr_scale, np.ndarray) else self.lr_scale
        return {'lr_scale': scale, 'length': self.length}

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore what `learn.resume` had changed in the run of a checkpoint."
        if self._is_kept:
            return  # `learn.resume` may have changed it since the state was taken
        scale = sd['lr_scale']
        self.lr_scale = np.array(scale) if isinstance(scale, list) else scale
        self.length = sd['length']
        self._opt = None  # make the plan again


class _ChangedSchedule:
    "Schedule with its value scaled, and its positions those of a fit of another length."

    def __init__(
        self,
        f: Schedule,
        scale: Any,  # factor of the value, a number or an array by group; None: 1
        share: float,  # length of the fit, relative to the length of the schedule
    ) -> None:
        self.f = f
        self.scale = scale
        self.share = share

    def __call__(self, pct: float) -> Any:
        value = self.f(min(1.0, pct * self.share))
        return value if self.scale is None else value * self.scale


def fit_one_cycle(
    learn: Learner,
    *,
    n_epoch: int,
    lr_max: Any,
    div: float,
    div_final: float,
    pct_start: float,
    moms: tuple[float, ...] | None,
    **fit: Any,  # further arguments of `Learner.fit`
) -> None:
    "Train with a learning rate that rises and falls once."
    __tracebackhide__ = True
    momentum = combined_cos(pct_start, *(learn.moms if moms is None else moms))

    def make_scheds(peak: Any) -> dict[str, Schedule]:
        scheds = {'lr': combined_cos(pct_start, peak / div, peak, peak / div_final)}
        if moms is not None or all(float(h.get('mom', 0)) for h in learn.opt.hypers):
            scheds['mom'] = momentum
        return scheds

    _fit_with_schedules(learn, make_scheds, n_epoch, lr_max, **fit)


def fit_flat_cos(
    learn: Learner,
    *,
    n_epoch: int,
    lr: Any,
    div_final: float,
    pct_start: float,
    **fit: Any,  # further arguments of `Learner.fit`
) -> None:
    "Train at a constant learning rate that falls along half a cosine at the end."
    __tracebackhide__ = True

    def make_scheds(flat: Any) -> dict[str, Schedule]:
        return {'lr': combined_cos(pct_start, flat, flat, flat / div_final)}

    _fit_with_schedules(learn, make_scheds, n_epoch, lr, **fit)


def fit_sgdr(
    learn: Learner,
    *,
    n_cycles: int,
    cycle_len: int | str | Time,
    lr_max: Any,
    cycle_mult: int,
    **fit: Any,  # further arguments of `Learner.fit`
) -> None:
    "Train in cycles; in each cycle the learning rate falls to 0 along half a cosine."
    __tracebackhide__ = True
    length = as_time(cycle_len, 'ep')
    lengths = [length.value * cycle_mult**i for i in range(n_cycles)]
    total = Time(sum(lengths), length.unit)
    n_epoch = int(total.value) if total.unit == 'ep' else total

    def make_scheds(peak: Any) -> dict[str, Schedule]:
        shares = [n / total.value for n in lengths]
        return {'lr': combine_scheds(shares, [SchedCos(peak, 0.0)] * n_cycles)}

    _fit_with_schedules(learn, make_scheds, n_epoch, lr_max, **fit)


def fine_tune(
    learn: Learner,
    *,
    epochs: Any,
    base_lr: float,
    freeze_epochs: int,
    lr_mult: float,
    pct_start: float,
    div: float,
    div_final: float,
    wd: float | None,
    moms: tuple[float, ...] | None,
    cbs: Any,
    reset_opt: bool,
    start_epoch: int,
    resume: Any,
    pause_at: Any,
) -> None:
    "Train the last group alone, then all groups with graded learning rates, in one cycle each."
    __tracebackhide__ = True
    shared = {'div_final': div_final, 'wd': wd, 'moms': moms, 'cbs': cbs, 'reset_opt': reset_opt}
    check_rewound(learn, resume)
    with learn.added_cbs(cbs):
        found = find_checkpoint(learn, resume)
    stage = 0 if found is None else found.stage
    learn.freeze()

    def fit_all(resume: Any = False, pause_at: Any = None) -> None:
        learn.unfreeze()
        with replacing_yield(learn, 'stage', 1):
            learn.fit_one_cycle(
                epochs,
                slice(base_lr / 2 / lr_mult, base_lr / 2),
                pct_start=pct_start,
                div=div,
                start_epoch=start_epoch,
                resume=resume,
                pause_at=pause_at,
                **shared,
            )

    if stage == 1:
        return fit_all(found, pause_at)
    with replacing_yield(learn, 'stage', 0), replacing_yield(learn.run, 'then', fit_all):
        learn.fit_one_cycle(
            freeze_epochs,
            slice(base_lr),
            pct_start=0.99,
            start_epoch=freeze_epochs if start_epoch else 0,
            resume=found,
            pause_at=pause_at,
            **shared,
        )
    if learn.run.pause is None:  # otherwise `learn.resume()` calls it
        fit_all(pause_at=pause_at)


def _fit_with_schedules(
    learn: Learner,
    make_scheds: Callable[[Any], dict[str, Schedule]],  # f(rates), a number or an array by group
    n_epoch: int | Time,
    lr: Any,
    *,
    wd: float | None,
    cbs: Any,
    reset_opt: bool,
    start_epoch: int,
    resume: Any,
    pause_at: Any,
) -> None:
    "Prepare the optimizer for `fit`, make the schedules of its rates, and train."
    __tracebackhide__ = True
    check_rewound(learn, resume)
    epochs, budget = parse_length(learn, n_epoch, start_epoch)
    if epochs and budget is None and epoch_length(learn, learn.dls.train)[0] is None:
        warn_user(
            f'The training loader ({type(learn.dls.train).__name__}) has no length, so the progress within an '
            'epoch is unknown: the schedule changes only from epoch to epoch. Pass its length by '
            "`DataLoaders(..., n_iter=...)`, or fit for a budget: '5000ba'."
        )
    prepare_opt(learn, lr, wd, reset_opt)
    found = [float(h['lr']) for h in learn.opt.hypers]
    rates: Any = found[0] if len(found) == 1 else np.array(found)
    scheduler = ParamScheduler(make_scheds(rates))
    scheduler.highest = rates
    learn.fit(
        n_epoch,
        rates,
        wd=wd,
        cbs=[scheduler, *as_list(cbs)],
        start_epoch=start_epoch,
        resume=resume,
        pause_at=pause_at,
    )
