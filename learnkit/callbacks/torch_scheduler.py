"""Callback that steps a learning rate scheduler of torch during a fit."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from learnkit.callbacks.recorder import as_number, epoch_row, find_column
from learnkit.core.errors import OptionError
from learnkit.core.validation import warn_user
from learnkit.data.dataloaders import epoch_length
from learnkit.engine.callback import Callback
from learnkit.engine.train_eval import SkipToEpoch
from learnkit.optim.hyperparams import OPTIONS, Hypers

__all__ = ['LRScheduler']


class LRScheduler(Callback):
    """Run one of torch's schedulers after each epoch, or after each batch with an optimizer step.

    A factory, such as `partial(StepLR, step_size=3)`, makes a new scheduler for every fit, which
    starts from the rates of that fit and has one param group per group of the learner's splitter. A
    ready scheduler, made with `learn.opt`, continues from fit to fit, and its rates override those
    of `fit`. A scheduler that needs a value (`ReduceLROnPlateau`) gets the value of `monitor` in
    the epoch's row of the history; an epoch without a value does not advance it.

    With `fit(start_epoch=)` a new scheduler is advanced to that epoch (by batch: as if each batch
    had been a step). Checkpointed: the scheduler's state. Raises before training `OptionError` for
    an invalid scheduler or factory and for a `start_epoch` by batch if the length of an epoch is
    unknown, and `MetricError` for a `monitor` that is not recorded.

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
        scheduler: Any,  # f(optimizer) -> scheduler, or a ready one of the learner's optimizer
        by: str = 'epoch',  # unit of a scheduler step: 'epoch' or 'batch'
        monitor: str | None = None,  # history column to pass; None: `valid_loss`, if it needs one
    ) -> None:
        super().__init__()
        if by not in ('batch', 'epoch'):
            raise OptionError(f"LRScheduler(by={by!r}): give 'batch' or 'epoch'.")
        is_ready = hasattr(scheduler, 'step') and not isinstance(scheduler, type)
        if is_ready:
            _check_scheduler('LRScheduler got', scheduler)
        else:
            _check_factory(scheduler)
        if monitor is not None and not isinstance(monitor, str):
            raise OptionError(
                f'LRScheduler(monitor={monitor!r}): give the name of a column of the history.'
            )
        self.by = by
        self.monitor = monitor
        self.scheduler: Any = scheduler if is_ready else None
        self._factory = None if is_ready else scheduler
        self._view: Any = None  # param groups as the scheduler sees them
        # loaded state, until a fit has a scheduler that can load it
        self._loaded: dict[str, Any] | None = None
        # number of optimizer steps at the last check; None: unknown until the next batch
        self._n_steps: int | None = 0
        self._first_epoch = 0
        self._wants_value = False
        self._has_begun = False  # whether the running fit has a scheduler

    def before_fit(self) -> None:
        self._first_epoch = max(
            (cb.first_epoch for cb in self.learn.cbs if isinstance(cb, SkipToEpoch)), default=0
        )
        self._begin()
        self._warn_of_steps()

    def _begin(self) -> None:
        "Make the scheduler, or connect a ready one to its groups; restore a loaded state."
        if self._factory is None:
            self._bind()
        else:
            view = _GroupView(self.learn.opt)
            scheduler = self._factory(view)
            _check_scheduler('LRScheduler: the factory gave', scheduler)
            self.scheduler = scheduler
            self._view = view
        self._n_steps = self.learn.opt.n_steps
        self._has_begun = True
        self._wants_value = 'metrics' in inspect.signature(self.scheduler.step).parameters
        if self._wants_value or self.monitor is not None:
            self._check_monitor()
        if self._factory is not None and not self._wants_value:
            self._skip(self._first_epoch)
        self._view.write()
        if self._loaded is not None:
            self._load(self._loaded)

    def _warn_of_steps(self) -> None:
        "Warn of a one-cycle schedule of batches that takes a step for each epoch."
        if self.by == 'batch' or self._factory is None:
            return
        total = getattr(self.scheduler, 'total_steps', None)
        n_epoch = self.learn.n_epoch
        if total is not None and n_epoch and total > n_epoch:
            warn_user(
                f'{type(self.scheduler).__name__} has {total} steps, and this fit takes {n_epoch} of them, one after '
                "each epoch. For a step after each batch: `LRScheduler(..., by='batch')`."
            )

    def _catch_up(self) -> None:
        "Begin with the current rates, if the callback was added during a fit."
        if not self._has_begun:
            self._first_epoch = 0
            self._begin()

    def _bind(self) -> None:
        "Connect a ready scheduler to the groups that it was made for, and restore its rates."
        opt = self.learn.opt
        own = self.scheduler.optimizer
        rates = self.scheduler.get_last_lr()
        if own is not opt and own not in opt.optimizers.values():
            raise OptionError(
                f'LRScheduler: this {type(self.scheduler).__name__} was made of another optimizer than '
                '`learn.opt`. Give a factory, such as partial(StepLR, step_size=3).'
            )
        if self._view is None or self._view.opt is not opt:
            self._view = _GroupView(opt, own, len(rates))
        for s in _with_parts(self.scheduler):
            s.optimizer = self._view
        for group, rate in zip(self._view.param_groups, rates, strict=True):
            group['lr'] = rate

    def _skip(self, n_epoch: int) -> None:
        dls = self.learn.dls
        per_epoch = 1 if self.by == 'epoch' or not n_epoch else epoch_length(dls, dls.train)[0]
        if per_epoch is None:
            raise OptionError(
                f"LRScheduler(by='batch') with start_epoch={n_epoch}: the training loader has no length. "
                'Give it a `__len__`, or DataLoaders an `n_iter`.'
            )
        for _ in range(n_epoch * per_epoch):
            self.scheduler.step()

    def _check_monitor(self) -> None:
        name = self._column()
        kind = type(self.scheduler).__name__
        if not self._wants_value:
            raise OptionError(f'LRScheduler(monitor={name!r}): {kind} takes no value.')
        if self.by == 'batch':
            raise OptionError(
                f"LRScheduler(by='batch'): {kind} needs a value, which is by 'epoch'."
            )
        find_column(self, name)

    def _column(self) -> str:
        return self.monitor or 'valid_loss'

    def before_batch(self) -> None:
        self._catch_up()
        if self._n_steps is None:
            self._n_steps = self.learn.opt.n_steps

    def after_batch(self) -> None:
        if self.by != 'batch':
            return
        self._catch_up()
        before = self._n_steps
        self._n_steps = self.learn.opt.n_steps
        if before is not None and self._n_steps != before:
            self._advance()

    def after_train(self) -> None:
        self.after_batch()  # accumulated samples that were left over are stepped with by now

    def after_epoch(self) -> None:
        self._catch_up()
        if self.by != 'epoch' or self.learn.epoch < self._first_epoch:
            return
        if not self._wants_value:
            self._advance()
            return
        row = epoch_row(self)
        column = self._column()
        value = None if row is None else as_number(self, column, row.get(column))
        if value is not None:
            self._advance(value)

    def _advance(self, *value: float) -> None:
        self._view.read()
        self.scheduler.step(*value)
        self._view.write()

    def cleanup(self) -> None:
        "Restore the optimizer of a ready scheduler."
        self._has_begun = False
        if self._factory is not None or self._view is None:
            return
        for s in _with_parts(self.scheduler):
            s.optimizer = self._view.own

    @override
    def state_dict(self) -> dict[str, Any] | None:
        "Return the scheduler's state, and its entries in the param groups."
        if self._loaded is not None or self._view is None:
            return self._loaded
        if self._has_begun:
            self._view.read()  # other callbacks may have set rates
        groups = [dict(group) for group in self._view.param_groups]
        for group in groups:
            del group['params']
        return {'scheduler': _plain(self.scheduler.state_dict()), 'groups': _plain(groups)}

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
        # a copy: some schedulers change the state that they load
        self.scheduler.load_state_dict(_plain(sd['scheduler']))
        for group, values in zip(self._view.param_groups, sd['groups'], strict=True):
            group.update(_plain(values))
        self._view.write()


class _GroupView(torch.optim.Optimizer):
    """Param groups as a scheduler sees them: one per group of the learner's splitter.

    Parameters without weight decay have param groups of their own in the optimizer; this view joins
    them with the group that they were split from. Entries that a scheduler adds to a group stay in
    the view; options that it changes are written to the real groups.
    """

    def __init__(
        self,
        opt: Any,  # OptimWrapper of the learner
        own: Any = None,  # optimizer that a ready scheduler was made with
        n: int | None = None,  # number of param groups of that optimizer
    ) -> None:
        self.opt = opt
        self.own = own
        self._by_split = True
        self.defaults = dict((opt[0] if own is None else own).defaults)
        # torch warns of a scheduler step before the first optimizer step: the callback prevents it
        self._opt_called = True
        self._by_split = n is None or n == len(self._hypers())
        found = self._hypers()
        if n not in (None, len(found)):
            raise OptionError(
                f'LRScheduler: the scheduler is made for {n} param groups, `learn.opt` has {len(found)}. '
                'Make it after the last group was added, or give a factory.'
            )
        self.param_groups = [self._join_groups(h.groups) for h in found]
        self.read()

    # torch's version would copy its own attributes only
    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def _hypers(self) -> list[Hypers]:
        "Return the optimizer's current groups, one for each group of the view."
        opt = self.opt
        own = None if self.own is self.opt else self.own
        if not self._by_split:
            return [Hypers([g], opt.exempt) for g in (opt if own is None else own).param_groups]
        return [
            h
            for h, slots in zip(opt.hypers, opt.positions, strict=True)
            if own is None or slots[0][0] is own
        ]

    def _join_groups(self, groups: list[dict[str, Any]]) -> dict[str, Any]:
        "Return param groups as one group; entries of another scheduler are left out."
        joined = groups[0]
        if self.own is None:
            joined = {k: v for k, v in joined.items() if k in OPTIONS}
        return {**joined, 'params': [p for g in groups for p in g['params']]}

    def read(self) -> None:
        "Copy the current options into the view."
        for group, hypers in zip(self.param_groups, self._hypers(), strict=True):
            for name in OPTIONS:
                if name in hypers:
                    group[name] = _copy_tensor(hypers[name])

    def write(self) -> None:
        "Write the changed options to the optimizer."
        for group, hypers in zip(self.param_groups, self._hypers(), strict=True):
            for name in OPTIONS:
                if name not in hypers:
                    continue
                if isinstance(group[name], Tensor) or group[name] is not hypers[name]:
                    hypers[name] = group[name]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # without a result
        "Do nothing: the learner steps the optimizer."

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # torch would wrap it otherwise


def _copy_tensor(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _with_parts(scheduler: Any) -> Iterator[Any]:
    "Yield a scheduler and the schedulers that it is made of."
    yield scheduler
    for part in getattr(scheduler, '_schedulers', ()):
        yield from _with_parts(part)


def _check_scheduler(what: str, scheduler: Any) -> None:
    if hasattr(scheduler, 'step') and hasattr(scheduler, 'get_last_lr'):
        return
    raise OptionError(f"{what} {scheduler!r}, which is none of torch's schedulers.")


def _check_factory(factory: Any) -> None:
    "Raise `OptionError` if a factory cannot be called with an optimizer alone."
    if not callable(factory):
        raise OptionError(f'LRScheduler({factory!r}): give a scheduler, or f(optimizer) -> one.')
    try:
        inspect.signature(factory).bind(None)
    except TypeError as e:
        name = getattr(factory, '__name__', repr(factory))
        raise OptionError(
            f'LRScheduler: {name} cannot be called with an optimizer alone ({e}). Write '
            f'partial({name}, ...) with its options.'
        ) from None
    except ValueError:
        return  # no signature is known: the call itself raises


_MISSING = object()


def _plain(value: Any) -> Any:
    "Copy tensors, numbers, strings and containers; leave out other values (None in a list)."
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(None if v is _MISSING else v for v in map(_plain, value))
    if type(value) is dict:
        copied = {k: _plain(v) for k, v in value.items() if isinstance(k, (str, int, float))}
        return {k: v for k, v in copied.items() if v is not _MISSING}
    return value if value is None or type(value) in (bool, int, float, str) else _MISSING
