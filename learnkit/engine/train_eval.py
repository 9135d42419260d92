# SPDX-License-Identifier: Apache-2.0
"""Training and evaluation mode of the modules, and the callbacks that begin a run and skip epochs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from learnkit.core.batch import find_bs, size_func_of
from learnkit.core.errors import BatchError, CancelEpochException
from learnkit.core.model import bare_model, move_to_device, wrappers_of
from learnkit.engine.advice import LossCheck, check_counted, may_change_loss
from learnkit.engine.callback import Callback
from learnkit.engine.counters import token_count

if TYPE_CHECKING:
    from learnkit.learner import Learner


class Modes:
    """Training or evaluation mode of each module, which an evaluation restores for the next training.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(model=nn.Sequential(nn.Linear(1, 1), nn.Dropout().eval()))
    >>> learn.parts.modes.is_starting = False  # otherwise a fit trains all modules
    >>> learn.parts.modes.evaluate(learn); learn.parts.modes.train(learn)
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

    def train(self, learn: Learner) -> None:
        "Set training mode, with the modules that were in evaluation mode in the last training."
        learn.training = True
        learn.parts.counters.has_trained = True
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

    def evaluate(self, learn: Learner) -> None:
        "Set evaluation mode."
        learn.training = False
        model = learn.model
        if model.training:
            self.keep(model)
        model.eval()

    def keep(self, model: nn.Module) -> None:
        "Have the next training begin with the modes that the modules have now."
        self.saved = [(m, m.training) for m in model.modules()]

    def restore(self) -> None:
        "Set the modes that the modules had before the evaluation, which the next training finds."
        for module, mode in self.saved:
            module.training = mode

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


def keep_modes(learn: Learner) -> None:
    """Keep the mode of each module in a fit that begins, which otherwise trains all modules.

    To be called in `before_fit`.

    >>> from learnkit import Callback
    >>> from learnkit.testing import synth_learner
    >>> model = nn.Sequential(nn.Linear(1, 1), nn.Dropout().eval())
    >>> learn = synth_learner(model=model, cbs=Callback(before_fit=lambda cb: keep_modes(cb.learn)))
    >>> with learn.no_bar(): learn.fit(1)
    >>> model[1].training
    False
    """
    learn.parts.modes.keep(learn.model)


def restore_modes(learn: Learner) -> None:
    """Set the mode that each module had before the evaluation, as the next training does.

    To be called in `after_eval`.
    """
    learn.parts.modes.restore()


class TrainEvalCallback(Callback):
    """Update the counters, and set the model's device and its training or evaluation mode.

    Every fit and evaluation has one: a Learner with `default_cbs=False` adds it for the run. Its `order` is -10, as in
    fastai, so the counters are up to date for all other callbacks.

    >>> from learnkit.testing import synth_learner
    >>> with synth_learner(n_train=10).no_bar() as learn: learn.fit(2)
    >>> learn.train_iter, learn.epoch, round(learn.pct_train, 6)
    (20, 1, 1.0)

    A callback that sets `learn.loss` instead of `loss_grad`, which is minimized, is warned of in the first batch.
    Checkpointed: the modules in evaluation mode.
    """

    order = -10
    run_valid = False
    needs_events = False
    runs_last = ('before_backward',)

    def before_fit(self) -> None:
        "Set the counters of a fit, or of an evaluation outside a fit, to its start, and move the model to its device."
        learn = self.learn
        learn.loss = torch.tensor(0.0)
        if learn.fitting or not learn.run.depth:
            learn.epoch = 0
            learn.train_iter = 0
            learn.pct_train = 0.0
            learn.parts.modes.begin_fit()
        move_to_device(learn)
        reset: Any = getattr(learn.model, 'reset', None)
        if reset is not None:
            reset()

    def before_train(self) -> None:
        learn = self.learn
        learn.parts.modes.train(learn)
        callbacks = learn.parts.callbacks
        if learn.parts.counters.needed:
            callbacks.check_once(self, 'before_batch', partial(check_counted, learn))
        if not learn.train_iter and may_change_loss(learn):
            loss = LossCheck(learn)
            callbacks.check_once(self, 'after_loss', loss.note)
            callbacks.check_once(self, 'before_backward', loss.check)

    def before_validate(self) -> None:
        self.learn.parts.modes.evaluate(self.learn)

    def after_batch(self) -> None:
        learn, counters = self.learn, self.learn.parts.counters
        learn.train_iter += 1
        # batches beyond the length of the loader, which is then wrong, do not count
        if learn.n_iter and learn.n_epoch and learn.iter < learn.n_iter:
            share = learn.pct_train + 1.0 / (learn.n_iter * learn.n_epoch)
            learn.pct_train = min(share, 1.0)  # rounding may exceed 1
        counters.batches += 1
        try:
            counters.samples += find_bs(learn.xb, learn.yb, size_func_of(learn))
        except BatchError:
            pass  # the number of samples is unknown
        if learn.token_func or (learn.xb and type(learn.xb[0]) is not Tensor):
            counters.tokens += token_count(learn)

    def after_epoch(self) -> None:
        if self.learn.fitting:
            self.learn.parts.counters.count_epoch()

    def cleanup(self) -> None:
        self.learn.parts.modes.saved = []

    @override
    def state_dict(self) -> dict[str, Any] | None:
        "Return the names of modules in evaluation mode, now and in training."
        return None if self.learn is None else self.learn.parts.modes.state_dict(self.learn.model)

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Set the mode of each module."
        if self.learn is not None:
            self.learn.parts.modes.load_state_dict(self.learn.model, sd)


def missing_train_eval(learn: Learner) -> list[Callback]:
    "Return a TrainEvalCallback for a run of a Learner without one."
    has_one = any(isinstance(cb, TrainEvalCallback) for cb in learn.parts.callbacks)
    return [] if has_one else [TrainEvalCallback()]


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
