"""Callbacks that maintain the counters of a run and the mode of its model, and that skip epochs."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from learnkit.core.errors import CancelEpochException
from learnkit.core.model import bare_model, move_to_device, wrappers_of
from learnkit.core.validation import warn_user
from learnkit.engine.callback import Callback
from learnkit.engine.loop import sample_count, token_count
from learnkit.engine.optimizer import cover_params, warn_of_late_params

__all__ = ['TrainEvalCallback', 'SkipToEpoch']


WATCHED_CHECKS = 8  # checks of a fit's first batches: one or two in each batch, or microbatch


class TrainEvalCallback(Callback):
    """Update the counters, and set the model's device and its training or evaluation mode.

    Every Learner has one, unless created with `default_cbs=False`. Its `order` is -10, so the counters are up to date
    for all other callbacks.

    >>> from learnkit.testing import synth_learner
    >>> with synth_learner(n_train=10).no_bar() as learn: learn.fit(2)
    >>> learn.train_iter, learn.epoch, round(learn.pct_train, 6)
    (20, 1, 1.0)

    A warning is issued once if a callback sets `learn.loss` in training instead of `loss_grad`, which is minimized.
    Checkpointed: the modules in evaluation mode.
    """

    order = -10
    run_valid = False
    needs_events = False
    runs_last = 'after_pred', 'before_backward'
    _has_warned = False  # the warning about `learn.loss` was issued
    _checks_left = 0  # number of checks until the end of the watch
    _loss_before: Any = None  # weak references to `loss` and `loss_grad`, with their versions
    _modes: list[tuple[nn.Module, bool]] = []  # training modes of the modules, during an evaluation
    _is_starting = True  # True before the first epoch of a fit
    _has_trained = False  # True once this epoch's training has started

    def after_create(self) -> None:
        self.learn.n_epoch = 1

    def before_fit(self) -> None:
        learn = self.learn
        learn.loss = torch.tensor(0.0)
        if learn.fitting or not learn.run.depth:
            learn.epoch = 0
            learn.train_iter = 0
            learn.pct_train = 0.0
            self._is_starting = True
            self._modes = []
        move_to_device(learn)
        reset: Any = getattr(learn.model, 'reset', None)
        if reset is not None:
            reset()
        if learn.fitting and not self._has_warned:
            self._watch_loss()

    # -- warning about callbacks that set `learn.loss` without effect ------------------------------

    def _watch_loss(self) -> None:
        "In the first batches, check the loss before and after the handlers of users' callbacks, if there are any."
        self._checks_left = WATCHED_CHECKS
        if self._list_user_callbacks('after_pred'):
            self.before_pred = self._record_loss  # type: ignore[method-assign]
            self.after_pred = self._check_loss  # type: ignore[method-assign]
        if self._list_user_callbacks('after_loss', 'before_backward'):
            self.after_loss = self._record_loss  # type: ignore[method-assign]
            self.before_backward = self._check_loss  # type: ignore[method-assign]

    def _list_user_callbacks(self, *events: str) -> list[str]:
        "Return the class names of users' callbacks that handle one of these events in training."
        table = self.learn.callbacks.tables[True]
        cbs = [cb for event in events for _, _, cb in table[event] if is_user_callback(cb)]
        return list(dict.fromkeys(type(cb).__name__ for cb in cbs))

    def _record_loss(self) -> None:
        self._loss_before = [
            take_reference(vars(self.learn).get(name)) for name in ('loss', 'loss_grad')
        ]

    def _check_loss(self) -> None:
        "Warn if a callback has replaced `loss` but not `loss_grad`."
        before = self._loss_before
        self._loss_before = None
        self._checks_left -= 1
        loss, loss_grad = (vars(self.learn).get(name) for name in ('loss', 'loss_grad'))
        if (
            before is None
            or is_unchanged(loss, before[0])
            or not is_unchanged(loss_grad, before[1])
        ):
            if not self._checks_left:
                self._stop_watching()
            return
        self._has_warned = True
        self._stop_watching()
        names = ' or '.join(
            self._list_user_callbacks('after_pred', 'after_loss', 'before_backward')
        )
        warn_user(
            f'{names} has set `learn.loss`, which is only what is recorded. Gradients are of `loss_grad`, which '
            'was left as it was: to train on another loss set `self.learn.loss_grad`, and to record it, '
            '`self.learn.loss = self.loss_grad.detach()`.'
        )

    def _stop_watching(self) -> None:
        for name in ('before_pred', 'after_pred', 'after_loss', 'before_backward'):
            if name in self.__dict__:
                delattr(self, name)
        self._loss_before = None

    # -- counters and modes ------------------------------------------------------------------------

    def before_train(self) -> None:
        learn = self.learn
        learn.training = True
        if learn.n_epoch:
            learn.pct_train = learn.epoch / learn.n_epoch
        # in later epochs the modes are set already, or a callback has changed them
        if self._is_starting or not learn.model.training:
            learn.model.train()
            for module, mode in self._modes:
                module.training = mode
        self._is_starting = False
        self._modes = []
        self._has_trained = True
        if learn.fitting:
            cover_params(learn)
            learn.opt.train()

    def after_batch(self) -> None:
        learn = self.learn
        learn.train_iter += 1
        if learn.n_iter and learn.n_epoch:
            learn.pct_train += 1.0 / (learn.n_iter * learn.n_epoch)
        counters = learn.counters
        counters.batches += 1
        counters.samples += sample_count(learn)
        if learn.token_func or (learn.xb and type(learn.xb[0]) is not Tensor):
            counters.tokens += token_count(learn)

    def before_validate(self) -> None:
        learn = self.learn
        if learn.model.training:
            self._modes = [(m, m.training) for m in learn.model.modules()]
        learn.model.eval()
        learn.training = False

    def after_train(self) -> None:
        if self.learn.fitting:
            warn_of_late_params(self.learn)

    def after_epoch(self) -> None:
        if not self.learn.fitting:
            return
        self.learn.counters.epochs += self._has_trained  # skipped epochs do not count
        self._has_trained = False

    def after_iteration(self) -> None:
        self.learn.counters.iterations += 1

    def cleanup(self) -> None:
        self._modes = []
        self._stop_watching()

    def state_dict(self) -> dict[str, Any]:
        "Return the names of modules in evaluation mode, now and in training."
        named = list(bare_model(self.learn.model).named_modules()) if self.learn is not None else []
        training = {id(m): mode for m, mode in self._modes} if not self.learn.model.training else {}
        return {
            'eval_now': [n for n, m in named if not m.training],
            'eval_in_training': [n for n, m in named if not training.get(id(m), m.training)],
            'starting': self._is_starting,
        }

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Set the mode of each module."
        if self.learn is None:
            return
        eval_now = set(sd['eval_now'])
        eval_in_training = set(sd['eval_in_training'])
        named = list(bare_model(self.learn.model).named_modules())
        self._modes = [(m, name not in eval_in_training) for name, m in named]
        self._is_starting = sd['starting']
        for name, module in named:
            module.training = name not in eval_now
        for wrapper in wrappers_of(self.learn.model):
            wrapper.training = '' not in eval_now


def is_user_callback(cb: Any) -> bool:
    "Return True for a callback whose handlers are from outside the package."
    return type(cb) is Callback or type(cb).__module__.partition('.')[0] != 'learnkit'


def take_reference(t: Any) -> tuple[Any, int] | None:
    "Return a weak reference to a tensor, and its version (number of in-place changes); None for other objects."
    return (ref(t), t._version) if isinstance(t, Tensor) else None


def is_unchanged(t: Any, before: tuple[Any, int] | None) -> bool:
    "Return True if `t` is the referenced tensor and has not been modified, or if neither is a tensor."
    if before is None or not isinstance(t, Tensor):
        return before is None and not isinstance(t, Tensor)
    return before[0]() is t and before[1] == t._version


class SkipToEpoch(Callback):
    """Skip the epochs before `epoch`, as `fit(start_epoch=...)` does. The history has no row for skipped epochs.

    >>> SkipToEpoch(3)
    SkipToEpoch
    """

    order = 70

    def __init__(self, epoch: int) -> None:
        self.first_epoch = epoch

    def before_epoch(self) -> None:
        if self.epoch < self.first_epoch:
            raise CancelEpochException
