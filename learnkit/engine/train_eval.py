"""Training and evaluation mode of the modules, the start of a run, and the callbacks that begin and skip epochs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from learnkit.core.errors import CancelEpochException
from learnkit.core.learner_type import LearnerLike
from learnkit.core.model import bare_model, move_to_device, wrappers_of
from learnkit.core.validation import warn_user
from learnkit.engine.callback import Callback

__all__ = ['Modes', 'TrainEvalCallback', 'SkipToEpoch', 'missing_train_eval']


class Modes:
    """Training or evaluation mode of each module, which an evaluation restores for the next training.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(model=nn.Sequential(nn.Linear(1, 1), nn.Dropout().eval()))
    >>> learn.modes.is_starting = False  # otherwise a fit trains all modules
    >>> learn.modes.evaluate(learn); learn.modes.train(learn)
    >>> [m.training for m in learn.model]
    [True, False]
    """

    def __init__(self) -> None:
        self.saved: list[tuple[nn.Module, bool]] = []  # modes in training, during an evaluation
        self.is_starting = True  # True before the first epoch of a fit

    def begin_fit(self) -> None:
        "Set all modules to training mode at the next training."
        self.is_starting = True
        self.saved = []

    def train(self, learn: LearnerLike) -> None:
        "Set training mode, with the modules that were in evaluation mode in the last training."
        learn.training = True
        learn.counters.has_trained = True
        if learn.n_epoch:
            learn.pct_train = learn.epoch / learn.n_epoch
        model = learn.model
        # in later epochs the modes are set already, or a callback has changed them
        if self.is_starting or not model.training:
            model.train()
            for module, mode in self.saved:
                module.training = mode
        self.is_starting = False
        self.saved = []

    def evaluate(self, learn: LearnerLike) -> None:
        "Set evaluation mode."
        learn.training = False
        model = learn.model
        if model.training:
            self.saved = [(m, m.training) for m in model.modules()]
        model.eval()

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        "Return the names of modules in evaluation mode, now and in training."
        named = list(bare_model(model).named_modules())
        training = {} if model.training else {id(m): mode for m, mode in self.saved}
        return {
            'eval_now': [n for n, m in named if not m.training],
            'eval_in_training': [n for n, m in named if not training.get(id(m), m.training)],
            'starting': self.is_starting,
        }

    def load_state_dict(self, model: nn.Module, sd: dict[str, Any]) -> None:
        "Set the mode of each module."
        eval_now = set(sd['eval_now'])
        eval_in_training = set(sd['eval_in_training'])
        named = list(bare_model(model).named_modules())
        self.saved = [(m, name not in eval_in_training) for name, m in named]
        self.is_starting = sd['starting']
        for name, module in named:
            module.training = name not in eval_now
        for wrapper in wrappers_of(model):
            wrapper.training = '' not in eval_now


def _begin_run(learn: LearnerLike) -> None:
    "Set the counters of a fit, or of an evaluation outside a fit, to its start, and move the model to its device."
    learn.loss = torch.tensor(0.0)
    if learn.fitting or not learn.run.depth:
        learn.epoch = 0
        learn.train_iter = 0
        learn.pct_train = 0.0
        learn.modes.begin_fit()
    move_to_device(learn)
    reset: Any = getattr(learn.model, 'reset', None)
    if reset is not None:
        reset()


WATCHED_CHECKS = 8  # checks of a fit's first batches: one or two in each batch, or microbatch


class TrainEvalCallback(Callback):
    """Update the counters, and set the model's device and its training or evaluation mode.

    Every fit and evaluation has one: a Learner with `default_cbs=False` adds it for the run. Its `order` is -10, as in
    fastai, so the counters are up to date for all other callbacks.

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
    runs_last = ('before_backward',)
    _has_warned = False  # the warning about `learn.loss` was issued
    _checks_left = 0  # number of checks until the end of the watch
    _loss_before: Any = None  # `loss` and `loss_grad` with their versions

    def before_fit(self) -> None:
        learn = self.learn
        _begin_run(learn)
        if learn.fitting and not self._has_warned:
            self._watch_loss()

    def before_train(self) -> None:
        self.learn.modes.train(self.learn)

    def before_validate(self) -> None:
        self.learn.modes.evaluate(self.learn)

    def after_batch(self) -> None:
        self.learn.counters.count_batch(self.learn)

    def after_epoch(self) -> None:
        if self.learn.fitting:
            self.learn.counters.count_epoch()

    def cleanup(self) -> None:
        self.learn.modes.saved = []
        self._stop_watching()

    def state_dict(self) -> dict[str, Any] | None:
        "Return the names of modules in evaluation mode, now and in training."
        return None if self.learn is None else self.learn.modes.state_dict(self.learn.model)

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Set the mode of each module."
        if self.learn is not None:
            self.learn.modes.load_state_dict(self.learn.model, sd)

    # -- warning about callbacks that set `learn.loss` without effect ------------------------------

    def _watch_loss(self) -> None:
        "In the first batches, check the loss before and after the handlers of users' callbacks, if there are any."
        if self._list_user_callbacks():
            self._checks_left = WATCHED_CHECKS
            self.after_loss = self._record_loss  # type: ignore[method-assign]
            self.before_backward = self._check_loss  # type: ignore[method-assign]

    def _list_user_callbacks(self) -> list[str]:
        "Return the class names of users' callbacks that may change the loss in training."
        table = self.learn.callbacks.tables[True]
        cbs = [cb for event in ('after_loss', 'before_backward') for _, _, cb in table[event]]
        return list(dict.fromkeys(type(cb).__name__ for cb in cbs if is_user_callback(cb)))

    def _record_loss(self) -> None:
        values = (vars(self.learn).get(name) for name in ('loss', 'loss_grad'))
        # the version of a tensor counts its in-place changes
        self._loss_before = [(value, getattr(value, '_version', 0)) for value in values]

    def _check_loss(self) -> None:
        "Warn if a callback has replaced `loss` but not `loss_grad`."
        before = self._loss_before
        self._record_loss()
        now = self._loss_before
        self._loss_before = None
        self._checks_left -= 1
        changed = [
            a[0] is not b[0] or a[1] != b[1] for a, b in zip(before or now, now, strict=True)
        ]
        has_no_effect = changed == [True, False]
        if has_no_effect or not self._checks_left:
            self._stop_watching()
        if not has_no_effect:
            return
        self._has_warned = True
        warn_user(
            f'{" or ".join(self._list_user_callbacks())} has set `learn.loss`, which is only what is recorded. '
            'Gradients are of `loss_grad`, which was left as it was: to train on another loss set '
            '`self.learn.loss_grad`, and to record it, `self.learn.loss = self.loss_grad.detach()`.'
        )

    def _stop_watching(self) -> None:
        for name in ('after_loss', 'before_backward'):
            if name in self.__dict__:
                delattr(self, name)
        self._loss_before = None


def missing_train_eval(learn: LearnerLike) -> list[Callback]:
    "Return a TrainEvalCallback for a run of a Learner that has none."
    has_one = any(isinstance(cb, TrainEvalCallback) for cb in learn.callbacks)
    return [] if has_one else [TrainEvalCallback()]


def is_user_callback(cb: Any) -> bool:
    "Return True for a callback whose handlers are from outside the package."
    return type(cb) is Callback or type(cb).__module__.partition('.')[0] != 'learnkit'


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
