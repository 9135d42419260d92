# SPDX-License-Identifier: Apache-2.0
"""Training loop: the nested levels fit, epoch, train or validate, batch, backward and step.

Each level is run by `_with_events`, the outermost one in `Learner.fit`. The loop names no feature. A
feature is a callback, or a function at one of the five seams (`learnkit.engine.seams`):

- `source` yields the epochs and the batches; a resumed fit yields the remaining ones.
- `model` calls the model; several processes call it in a wrapper.
- `loss` computes the loss; a model may compute its own.
- `batch` trains on a batch; microbatches train on it in parts.
- `step` takes the step of the optimizer; LBFGS takes it with a closure.

Train mode and counters are set by `TrainEvalCallback`, which every run has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch
from fastcore.basics import noop
from torch import nn

from learnkit.core.batch import form_of, to_device
from learnkit.core.errors import (
    CancelBackwardException,
    CancelBatchException,
    CancelEpochException,
    CancelStepException,
    CancelTrainException,
    CancelValidException,
    StepPutOff,
)
from learnkit.core.model import model_device
from learnkit.data.dataloaders import evaluation_loaders
from learnkit.engine.dispatch import CallbackHost
from learnkit.engine.events import LEVELS
from learnkit.engine.fields import LoopFields, release_batch, set_defaults
from learnkit.engine.loss import release_loss
from learnkit.engine.run import Run, refuse_run
from learnkit.engine.seams import Seams
from learnkit.optim.wrapper import evaluation_weights

_END = object()  # marks the end of a loader, as the default of `next`


class Loop(CallbackHost, LoopFields):
    """Training loop with its state. `Learner` adds the methods that users call.

    Custom training (two networks, two forward passes) overrides `train_batch`; `_do_one_batch`,
    `_do_grad_opt`, `_backward` and `_step` may be overridden, as in fastai. `__tracebackhide__` hides
    a method from the tracebacks of notebooks.
    """

    model: nn.Module
    dls: Any  # DataLoaders
    opt: Any  # OptimWrapper; None until the first fit
    turn: str | None = None  # name of the optimizer that steps; None: all of them

    def __init__(self) -> None:
        super().__init__()
        self._run = Run()
        self.seams: Any = Seams()
        set_defaults(self)

    run = property(attrgetter('_run'), refuse_run, doc='State of the current run.')

    # -- the loop --------------------------------------------------------------------------------

    def _do_fit(self) -> None:
        __tracebackhide__ = True
        for epoch in self.seams.source.epochs(self):  # of a resumed fit those that are left
            self.epoch = epoch
            self._with_events(self._do_epoch, 'epoch', CancelEpochException)
            self('epoch_checkpoint')

    def _do_epoch(self) -> None:
        __tracebackhide__ = True
        self._do_epoch_train()
        self.do_evaluation(self.parts.evaluations.list_due(self, at_epoch_end=True))

    def _do_epoch_train(self) -> None:
        __tracebackhide__ = True
        self.dl = self.dls.train
        self.phase = self.dl_name = 'train'
        self._with_events(self.all_batches, 'train', CancelTrainException)

    def do_evaluation(self, loaders: list[tuple[str, Any]] | None = None) -> None:
        "Evaluate validation loaders, given with their names. None: all of them."
        __tracebackhide__ = True
        loaders = evaluation_loaders(self.dls) if loaders is None else loaders
        if not loaders:
            return
        with self.parts.evaluations.opened(self):
            self('before_eval')
            for self.dl_name, dl in loaders:
                with self.parts.evaluations.preserved(dl):
                    self._do_epoch_validate(dl=dl)
            self('after_eval')

    def set_loader(self, dl: Any) -> None:
        "Set the loader to evaluate or predict on."
        self.dl = dl
        self.phase = 'valid' if self.phase == 'train' else self.phase
        self.dl_name = 'valid' if self.dl_name == 'train' else self.dl_name

    def _do_epoch_validate(self, ds_idx: int = 1, dl: Any = None) -> None:
        __tracebackhide__ = True
        self.set_loader(self.dls[ds_idx] if dl is None else dl)
        with torch.no_grad(), evaluation_weights(self):
            self._with_events(self.all_batches, 'validate', CancelValidException)

    def all_batches(self) -> None:
        """Train or evaluate on every batch of `self.dl`; `batch_checkpoint` fires after each training batch.

        >>> from learnkit import Learner
        >>> from learnkit.testing import RegModel, synth_dls
        >>> class FirstTwo(Learner):
        ...     "Train on the first two batches of each epoch."
        ...     def all_batches(self):
        ...         for i, batch in self.draw_batches():
        ...             self.one_batch(i, batch)
        ...             if self.training: self('batch_checkpoint')
        ...             if i == 1 or self.run.stopping: break
        >>> learn = FirstTwo(synth_dls(), RegModel(), torch.nn.MSELoss())
        >>> with learn.no_bar(): learn.fit(3)
        >>> learn.time.ba
        6
        """
        __tracebackhide__ = True
        for i, batch in self.draw_batches():
            self.one_batch(i, batch)
            if self.training:
                self('batch_checkpoint')
                if self.run.stopping:
                    break

    def draw_batches(self) -> Iterator[tuple[int, Any]]:
        "Yield the batches of `self.dl` with their numbers; fire `before_draw` and `after_draw` around each draw."
        self.run.batch_device = model_device(self.model, self.dls)
        self.batch_form = form_of(self.dls, self.loader_name or self.dl_name)
        source = self.seams.source
        numbers, batches = source.batches(self)
        try:
            for i in numbers:
                self.iter = i
                self('before_draw')
                batch = next(batches, _END)
                if batch is _END:
                    self.iter = max(0, i - 1)  # number of the last batch
                    return
                self.batch = batch
                self('after_draw')
                yield i, self.batch
        finally:
            del batches  # the frame of a traceback would keep its worker processes running
            source.end(self)

    def one_batch(self, i: int, b: Any) -> None:
        "Train or evaluate on batch `b`, number `i` of its loader."
        __tracebackhide__ = True
        self.iter = i
        self.__dict__.pop('pred', None)
        self.__dict__.pop('loss_grad', None)
        self._split(self._set_device(b))
        self._with_events(self._do_one_batch, 'batch', CancelBatchException)

    def _do_one_batch(self) -> None:
        __tracebackhide__ = True
        try:
            if self.training:
                self.train_batch()
            else:
                self.evaluate_batch()
        finally:
            release_loss(self)

    def train_batch(self) -> None:
        """Train on the current batch. Custom loops override this method.

        The default runs forward, loss, backward and step on `self.xb` and `self.yb`. An override
        calls `forward`, `compute_loss` and `optimize`, each as often as needed: two networks, two
        passes, several steps.

        >>> from torch import nn
        >>> from learnkit import Learner, SGD
        >>> from learnkit.testing import synth_dls, RegModel
        >>> class Noisy(Learner):
        ...     "Train on each batch, and on a copy with noise."
        ...     def train_batch(self):
        ...         for x in (self.x, self.x + 0.1*torch.randn_like(self.x)):
        ...             pred = self.forward(self.model, x)
        ...             self.optimize(self.compute_loss(pred))
        >>> learn = Noisy(synth_dls(), RegModel(), nn.MSELoss(), opt_func=SGD)
        >>> with learn.no_bar(): learn.fit(1)
        >>> learn.time.ba, learn.time.st
        (10, 20)
        """
        __tracebackhide__ = True
        if self.seams.batch is not None:  # microbatches, a compiled step
            self.seams.batch(self)
            return
        self._do_pred_loss()
        self._do_grad_opt()

    def evaluate_batch(self) -> None:
        """Evaluate the current batch, or predict on it: set `pred`, and `loss` if there are targets.

        Custom loops may override this method, with `forward` and `report_loss`.

        >>> from learnkit import Learner
        >>> from learnkit.testing import RegModel, synth_dls
        >>> class Absolute(Learner):
        ...     "Report the largest error of each batch as the loss of an evaluation."
        ...     def evaluate_batch(self):
        ...         pred = self.forward(self.model, self.x)
        ...         self.report_loss((pred - self.y).abs().max())
        >>> learn = Absolute(synth_dls(), RegModel(), torch.nn.MSELoss())
        >>> learn.validate()[0] > 0
        True
        """
        __tracebackhide__ = True
        self._do_pred_loss()

    def _do_pred_loss(self) -> None:
        __tracebackhide__ = True
        self('before_pred')
        with self.contexts('forward'):
            output = self.pred = self.seams.model(self)
            self('after_pred')
            loss = self.seams.loss(self, output)
            if loss is not None:  # None: no targets to compare the prediction with
                self.loss_grad = loss
                # for callbacks to read; it keeps its graph until the batch ends
                self.loss = loss.clone()
        self('after_loss')

    def _do_grad_opt(self) -> None:
        __tracebackhide__ = True
        self._with_events(self._backward, 'backward', CancelBackwardException)
        self._take_step()
        self.opt.zero_grad()  # not reached while gradients accumulate: the batch is cancelled

    def _backward(self, **options: Any) -> None:
        with self.contexts('backward'):
            self.loss_grad.backward(**options)

    def _take_step(self, step: Callable[[], Any] | None = None) -> None:
        """Take a step with its events. All loops take all their steps here; `step` replaces `_step`.

        Raises `StepPutOff`, which ends the batch, while gradients accumulate for a later step.
        """
        __tracebackhide__ = True
        if not self.parts.callbacks.is_step_due():
            raise StepPutOff
        self._with_events(step or self._step, 'step', CancelStepException)

    def _step(self) -> None:
        if self.seams.step is None:
            self.opt.step(only=self.turn)
        else:
            self.seams.step(self)

    def _with_events(
        self,
        f: Callable[[], Any],
        event_type: str,
        ex: type[Exception],
        final: Callable[[], Any] = noop,
    ) -> None:
        "Run `f` in a level of the loop: fire the level's events, and catch its Cancel exception `ex`."
        __tracebackhide__ = True
        level = LEVELS[event_type]
        run = self.run
        outer = run.levels
        cancelled = False
        run.levels = (*outer, event_type)
        try:
            self(level.before)
            f()
        except ex:
            cancelled = True
        finally:
            run.levels = outer
        if cancelled:
            self(level.after_cancel)
        self(level.after)
        final()

    # -- the batch -------------------------------------------------------------------------------

    def _set_device(self, b: Any) -> Any:
        device = self.run.batch_device if self.run.depth else None
        return to_device(b, device or model_device(self.model, self.dls))

    def _split(self, b: Any) -> None:
        form = self.batch_form or form_of(self.dls, self.loader_name or self.dl_name)
        self.xb, self.yb = form.split(b, self.phase == 'predict')

    def _end_cleanup(self) -> None:
        "Release the batch and its results."
        release_batch(self)
