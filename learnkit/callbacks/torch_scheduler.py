# SPDX-License-Identifier: Apache-2.0
"""Callback that steps a learning rate scheduler of torch or timm during a fit."""

from __future__ import annotations

import inspect
from copy import deepcopy
from math import inf
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from learnkit.callbacks.recorder import check_monitor, read_monitor
from learnkit.core.errors import OptimizerError, OptionError
from learnkit.core.plain import to_storable
from learnkit.core.validation import warn_user
from learnkit.core.watched import as_number
from learnkit.engine.callback import Callback
from learnkit.engine.pause import resumes_in_memory
from learnkit.optim.hyperparams import OPTIONS, list_values

_STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class LRScheduler(Callback):
    """Run a scheduler of torch or timm after each epoch, or after each batch with an optimizer step.

    A factory, such as `partial(StepLR, step_size=3)`, makes a new scheduler for every fit, which
    starts from the rates of that fit and has one param group per group of the learner's splitter. A
    scheduler that needs a value (`ReduceLROnPlateau`) gets the value of `monitor` in the epoch's
    row of the history, also NaN; an epoch without a value does not advance it. By default torch
    compares relative to the best value, which is wrong for negative values: a warning recommends
    `threshold_mode='abs'`. A scheduler of timm gets the number of epochs, or of steps of the optimizer, of this
    fit: `step(epoch, metric)` or `step_update(num_updates)`, as its `t_in_epochs` says.

    With `only`, the scheduler has the param groups of one of several optimizers; by batch, it advances
    after a batch in which that optimizer has stepped. Each optimizer may have its own callback.

    The epochs that `fit(start_epoch=)` skips advance a scheduler by epoch, not by batch. After
    `learn.resume(lr_scale=0.5)` the optimizer gets half of the scheduler's rates. Checkpointed: the
    scheduler's state and this factor. Raises before training `MetricError` for a `monitor` that
    resembles a column, `OptimizerError` for an unknown optimizer, and `OptionError` for a scheduler
    whose `step` requires other arguments, for one by batch that needs a value, and for one of timm that counts in
    the other unit.

    >>> from functools import partial
    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(n_train=1, lr=0.5)
    >>> halve = LRScheduler(partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5))
    >>> with learn.no_bar(): learn.fit(3, cbs=halve)
    >>> learn.recorder.lrs
    [0.5, 0.25, 0.125]
    """

    order = 60
    runs_last = ('after_batch',)  # others see the rate of the batch's step there
    run_valid = False
    remove_on_find = True
    sets_lr = True
    run_in = 'fit'

    def __init__(
        self,
        scheduler: Any,  # f(optimizer) -> scheduler, such as partial(StepLR, step_size=3)
        by: str = 'epoch',  # unit of a scheduler step: 'epoch' or 'batch'
        monitor: str | None = None,  # history column to pass; None: `valid_loss`, if it needs one
        only: str | int | None = None,  # name or index of one of several optimizers; None: all
    ) -> None:
        super().__init__()
        if by not in ('batch', 'epoch'):
            raise OptionError(f"LRScheduler(by={by!r}): pass 'batch' or 'epoch'.")
        if not callable(scheduler):
            raise OptionError(
                f'LRScheduler({scheduler!r}): pass f(optimizer) -> scheduler, such as partial(StepLR, step_size=3).'
            )
        self.by = by
        self.monitor = monitor
        self.only = only
        self.scheduler: Any = None  # scheduler of the last fit
        self._factory = scheduler
        self._view: Any = None  # param groups as the scheduler sees them
        self.lr_scale: list[float] | None = None  # factors of the rates by group; None: 1
        self._is_kept = False  # whether the fit continues a paused one
        # loaded state, until a fit has a scheduler that can load it
        self._loaded: dict[str, Any] | None = None
        # number of optimizer steps at the last check; None: unknown until the next batch
        self._n_steps: int | None = 0
        self._wants_value = False
        self._n_advanced = 0  # number of times that the scheduler has advanced in this fit
        self._has_begun = False  # whether the running fit has a scheduler
        self._has_warned = False  # whether this fit has warned of a negative value

    def before_fit(self) -> None:
        "Make the scheduler; restore a loaded state."
        self._is_kept = resumes_in_memory(self.learn)
        if not self._is_kept:
            self.lr_scale = None  # of an earlier fit
        self._view = _GroupView(self.learn.opt, self.only)
        self.scheduler = self._factory(self._view)
        check_scheduler(self.scheduler, self.by)
        self._n_advanced = 0
        self._view.step()  # or torch warns of a scheduler that is ahead of its optimizer
        self._n_steps = self.learn.opt.count_steps(self.only)
        self._has_begun = True
        self._has_warned = False
        self._wants_value = (
            'metrics' in inspect.signature(self.scheduler.step).parameters
            or find_plateau(self.scheduler) is not None
        )
        if self._wants_value and self.by == 'batch':
            raise OptionError(
                f"LRScheduler({type(self.scheduler).__name__}, by='batch'): it needs the value of an epoch. "
                'Leave out `by`.'
            )
        if self._wants_value:
            check_monitor(self, self.monitor or 'valid_loss')
        self._view.write()
        self._view.check()
        if self._loaded is not None:
            self._load(self._loaded)
        self._warn_of_steps()

    def find_highest_lrs(self) -> list[float | None]:
        """Return the highest rate of each group: of the scheduler, or else the rate that it started from.

        The groups of other optimizers than `only` have None."""
        groups = self._view.param_groups
        own = getattr(self.scheduler, 'max_lrs', None)  # CyclicLR
        if own is None:
            own = [g.get('max_lr', g.get('initial_lr', g['lr'])) for g in groups]
        factors = self.lr_scale or [1.0] * len(groups)
        highest: list[float | None] = [None] * len(self.learn.opt.hypers)
        for i, rate, factor in zip(self._list_indices(), own, factors, strict=True):
            highest[i] = float(rate) * factor
        return highest

    def _list_indices(self) -> list[int]:
        "Return the indices of the groups that the scheduler sets."
        return list(self.learn.opt.find_indices(self.only))

    def scale_lr(
        self,
        factors: list[float],  # one of each group of all optimizers
    ) -> None:
        "Multiply the learning rates of the rest of the fit."
        own = [factors[i] for i in self._list_indices()]
        before = self.lr_scale or [1.0] * len(own)
        self.lr_scale = [a * b for a, b in zip(before, own, strict=True)]

    def _warn_of_steps(self) -> None:
        "Warn of a one-cycle schedule of batches that takes a step for each epoch."
        if self.by == 'batch':
            return
        total = getattr(self.scheduler, 'total_steps', None)
        n_epoch = self.learn.n_epoch
        if total is not None and n_epoch and total > n_epoch:
            warn_user(
                f'{type(self.scheduler).__name__} has {total} steps, and this fit takes {n_epoch} of them, one after '
                "each epoch. For a step after each batch: `LRScheduler(..., by='batch')`."
            )

    def before_batch(self) -> None:
        self._view.check()
        if self._n_steps is None:
            self._n_steps = self.learn.opt.count_steps(self.only)

    def after_batch(self) -> None:
        if self.by != 'batch':
            return
        before = self._n_steps
        self._n_steps = self.learn.opt.count_steps(self.only)
        if before is not None and self._n_steps != before:
            self._advance()

    def after_train(self) -> None:
        self.after_batch()  # accumulated samples that were left over are stepped with by now

    def after_epoch(self) -> None:
        if self.by != 'epoch':
            return
        if not self._wants_value:
            self._advance()
            return
        column = self.monitor or 'valid_loss'
        value = as_number(self, column, read_monitor(self, column))
        if value is not None:
            self._advance(value)
            self._warn_of_negative_best()

    def _warn_of_negative_best(self) -> None:
        "Warn once per fit if the best value is below 0: with a relative threshold, an equal value counts as better."
        scheduler = find_plateau(self.scheduler)
        if self._has_warned or scheduler is None or not -inf < scheduler.best < 0:
            return
        if scheduler.threshold_mode != 'rel' or not scheduler.threshold:
            return
        self._has_warned = True
        margin = scheduler.threshold if scheduler.mode == 'max' else -scheduler.threshold
        limit, sign = scheduler.best * (1 + margin), '>' if scheduler.mode == 'max' else '<'
        warn_user(
            f"ReduceLROnPlateau(threshold_mode='rel'): after the best value {scheduler.best:.6g}, every value "
            f'{sign} {limit:.6g} counts as better, also an equal one, and the rate may never be lowered. For values '
            "below 0, pass `threshold_mode='abs'`."
        )

    def _advance(self, *value: float) -> None:
        self._view.read()
        self._n_advanced += 1
        if not takes_number(self.scheduler):
            self.scheduler.step(*value)
        elif self.by == 'epoch':
            self.scheduler.step(self._n_advanced, *value)
        else:
            self.scheduler.step_update(self._n_advanced)
        self._view.write()

    def cleanup(self) -> None:
        self._has_begun = self._is_kept = False

    @override
    def state_dict(self) -> dict[str, Any] | None:
        "Return the scheduler's state, and its entries in the param groups."
        if self._loaded is not None or self._view is None:
            return self._loaded
        if self._has_begun:
            self._view.read()  # other callbacks may have set rates
        groups = [{**group, 'params': None} for group in self._view.param_groups]
        return {
            'scheduler': keep_storable(read_scheduler(self.scheduler)),
            'groups': deepcopy(groups),
            'lr_scale': self.lr_scale,
            'n_advanced': self._n_advanced,
        }

    @override
    def load_state_dict(self, sd: dict[str, Any] | None) -> None:
        "Restore the state: in the running fit, or else in the next one."
        self._loaded = sd
        if sd is not None and self._view is not None and getattr(self.learn, 'fitting', False):
            self._load(sd)

    def _load(self, sd: dict[str, Any]) -> None:
        # the optimizer's count of steps may be restored after this
        self._loaded = None
        self._n_steps = None
        sd = deepcopy(sd)  # some schedulers change the state that they load
        load_scheduler(self.scheduler, sd['scheduler'])
        self._n_advanced = sd['n_advanced']
        if not self._is_kept:
            self.lr_scale = sd['lr_scale']
        self._view.lr_scale = self.lr_scale
        for group, values in zip(self._view.param_groups, sd['groups'], strict=True):
            names = [name for name in values if not (self._is_kept and name in OPTIONS)]
            group.update({name: values[name] for name in names}, params=group['params'])
        if self._is_kept:
            self._view.read()  # options may have been changed since the state was taken
        else:
            self._view.write()


def takes_number(scheduler: Any) -> bool:
    "Return True for a scheduler of timm, which is called with the number of epochs or steps so far."
    return callable(getattr(scheduler, 'step_update', None))


def find_plateau(scheduler: Any) -> torch.optim.lr_scheduler.ReduceLROnPlateau | None:
    "Return torch's `ReduceLROnPlateau`, which timm's `PlateauLRScheduler` holds; None for other schedulers."
    inner = getattr(scheduler, 'lr_scheduler', None) if takes_number(scheduler) else scheduler
    return inner if isinstance(inner, torch.optim.lr_scheduler.ReduceLROnPlateau) else None


def read_scheduler(scheduler: Any) -> dict[str, Any]:
    """Return the state of a scheduler; one without `state_dict` has its attributes, as torch's schedulers do.

    So has a scheduler of timm, whose `state_dict` may lack the count of epochs that were not better."""
    if callable(getattr(scheduler, 'state_dict', None)) and not takes_number(scheduler):
        state: dict[str, Any] = scheduler.state_dict()
        return state
    plateau = find_plateau(scheduler)
    attributes = {name: value for name, value in vars(scheduler).items() if name != 'optimizer'}
    return attributes if plateau is None else {**attributes, 'lr_scheduler': plateau.state_dict()}


def load_scheduler(scheduler: Any, state: dict[str, Any]) -> None:
    "Load a state that `read_scheduler` has returned."
    if callable(getattr(scheduler, 'load_state_dict', None)) and not takes_number(scheduler):
        scheduler.load_state_dict(state)
        return
    plateau = find_plateau(scheduler)
    if plateau is not None:
        plateau.load_state_dict(state['lr_scheduler'])
    vars(scheduler).update({k: v for k, v in state.items() if k != 'lr_scheduler'})


class _GroupView(torch.optim.Optimizer):
    """Param groups as a scheduler sees them: one per group of the learner's splitter.

    Parameters without weight decay have separate param groups in the optimizer; this view joins
    them with the group that they were split from. Entries that a scheduler adds to a group stay in
    the view; options that it changes are written to the real groups. A value that no batch can use is
    not written, and is an error only if another batch follows: `OneCycleLR` with linear annealing
    steps to a negative rate after its last batch.
    """

    def __init__(
        self,
        opt: Any,  # OptimWrapper of the learner
        only: str | int | None = None,  # name or index of one of several optimizers; None: all
    ) -> None:
        self.opt = opt
        self.only = only
        hypers = opt.select_hypers(only)
        self.defaults = dict(opt[0 if only is None else only].defaults)
        self.param_groups = [join_groups(own.groups) for own in hypers]
        self.error: OptimizerError | None = None  # of a value that was not written
        # factors of the real rates, by group; None: 1
        self.lr_scale: list[float] | None = None
        self.read()

    # torch's version would copy its own attributes only
    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def _list_groups(self) -> list[tuple[dict[str, Any], Any]]:
        "Return each group of the view with the hyperparameters of the real groups."
        return list(zip(self.param_groups, self.opt.select_hypers(self.only), strict=True))

    def read(self) -> None:
        "Copy the current options into the view."
        for i, (group, hypers) in enumerate(self._list_groups()):
            for name in OPTIONS:
                if name not in hypers or self._is_scaled(i, name, group, hypers):
                    continue
                value = hypers[name]
                if name == 'lr' and self.lr_scale is not None:
                    value = value / self.lr_scale[i]
                group[name] = value.clone() if isinstance(value, Tensor) else value

    def _is_scaled(self, i: int, name: str, group: dict[str, Any], hypers: Any) -> bool:
        "Return True for a rate that was written here, which a division might round."
        if name != 'lr' or self.lr_scale is None:
            return False
        return bool(hypers[name] == group[name] * self.lr_scale[i])

    def write(self) -> None:
        "Write the changed options to the optimizer, except for values that no batch can use."
        self.error = None
        for i, (group, hypers) in enumerate(self._list_groups()):
            for name in OPTIONS:
                if name in hypers and group[name] is not hypers[name]:
                    value = group[name]
                    if name == 'lr' and self.lr_scale is not None:
                        value = value * self.lr_scale[i]
                    try:
                        check_betas(value)
                        hypers[name] = value
                    except OptimizerError as e:
                        self.error = self.error or e

    def check(self) -> None:
        "Raise `OptimizerError` if a value was not written."
        if self.error is not None:
            raise self.error

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # without a result
        "Do nothing, since the learner steps the optimizer; torch warns of a scheduler without it."


def check_betas(value: Any) -> None:
    "Raise `OptimizerError` for a tuple with a number that is not the decay of an average."
    if isinstance(value, tuple):
        for beta in value:
            if isinstance(beta, (float, Tensor)):
                list_values('mom', [beta], 1)


def check_scheduler(
    scheduler: Any,
    by: str,  # unit of its steps
) -> None:
    "Raise `OptionError` for an object that cannot be stepped as a scheduler of torch or timm."
    name = type(scheduler).__name__
    step = getattr(scheduler, 'step', None)
    if not callable(step):
        raise OptionError(f'LRScheduler: {name} has no `step()`. Pass f(optimizer) -> scheduler.')
    parameters = inspect.signature(step).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in _STARRED]
    if takes_number(scheduler) and required == ['epoch']:
        _check_unit(scheduler, by)
        return
    unknown = [parameter for parameter in required if parameter != 'metrics']
    if unknown:
        raise OptionError(
            f'{name}.step() requires {" and ".join(unknown)}, and LRScheduler calls `step()`, as torch does. Pass a '
            'scheduler of torch.optim.lr_scheduler, use a schedule of learnkit (`fit_one_cycle`, `ParamScheduler`), or '
            f'call {name} in a callback, such as `Callback(before_epoch=lambda cb: scheduler.step(cb.epoch))`.'
        )


def _check_unit(scheduler: Any, by: str) -> None:
    "Raise `OptionError` for a scheduler of timm that would not advance, because it counts in the other unit."
    unit = 'epoch' if getattr(scheduler, 't_in_epochs', True) else 'batch'
    if unit != by:
        raise OptionError(
            f'{type(scheduler).__name__} has t_in_epochs={unit == "epoch"}: pass `LRScheduler(..., by={unit!r})`.'
        )


def join_groups(groups: list[dict[str, Any]]) -> dict[str, Any]:
    "Return param groups as one group, without the entries of other schedulers."
    options = {name: value for name, value in groups[0].items() if name in OPTIONS}
    return {**options, 'params': [p for group in groups for p in group['params']]}


def keep_storable(sd: dict[str, Any]) -> dict[str, Any]:
    "Copy the entries of a state dict that are plain data; others stay as the scheduler was made."
    plain = to_storable(sd)
    return deepcopy({k: v for k, v in plain.items() if v is not None or sd[k] is None})
