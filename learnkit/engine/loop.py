"""Training loop: the nested levels fit, epoch, train, batch, backward and step, each run by `_with_events`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from operator import attrgetter
from typing import Any

import torch
from fastcore.basics import noop
from torch import Tensor, nn

from learnkit.core.batch import (
    BatchForm,
    apply_model,
    count_samples,
    describe,
    detuplify,
    form_of,
    has_certain_size,
    short_repr,
    slice_batch,
    to_device,
    unpack_output,
)
from learnkit.core.comm import SINGLE_RANK, Comm
from learnkit.core.denominator import LossWeights, check_is_mean
from learnkit.core.errors import (
    BatchError,
    CancelBackwardException,
    CancelBatchException,
    CancelEpochException,
    CancelException,
    CancelStepException,
    CancelTrainException,
    CancelValidException,
    EmptyLoaderError,
    LossError,
    TimeError,
    add_note,
)
from learnkit.core.learner_type import LoopLike
from learnkit.core.model import loss_of_batch, model_device, name_of, predict_batch
from learnkit.core.random import preserved_generators, preserved_rng
from learnkit.core.time import Timestamp
from learnkit.core.validation import (
    check_class_scores,
    check_pairing,
    loss_hint,
    model_hint,
    precision_hint,
    takes_alone,
    warn_of_order,
    warn_user,
)
from learnkit.data.dataloaders import epoch_length, evaluation_loaders
from learnkit.data.evaluator import as_every
from learnkit.data.prefetch import read_ahead
from learnkit.data.torch_loader import end_workers, forget_workers
from learnkit.engine.callback import Callback
from learnkit.engine.counters import COUNTER_OF_UNIT, Counters
from learnkit.engine.dispatch import CallbackHost, format_place
from learnkit.engine.evaluation import EvaluationSchedule
from learnkit.engine.events import CONTEXTS, LEVELS
from learnkit.engine.microbatch import (
    restore_gradients,
    train_within_memory,
    weigh,
    weighted_loss,
)
from learnkit.engine.optimizer import cover_params
from learnkit.engine.passes import TrainingPasses
from learnkit.engine.resume import open_resumed, resume_at, resumed_epochs
from learnkit.engine.run import (
    NO_CONTEXT,
    ContextStack,
    OptimizeCall,
    Run,
    is_in_use,
    make_cancel_error,
    preserved_state,
    refuse_run,
)
from learnkit.engine.strategy import SingleProcess
from learnkit.engine.timings import Timings
from learnkit.optim.wrapper import Closure, OptimWrapper

__all__ = ['Loop', 'list_overrides', 'token_count', 'sample_count']

# methods of a training batch, outermost first; an override may skip events
BATCH_METHODS = (
    '_do_one_batch',
    'train_batch',
    '_do_pred_loss',
    '_do_grad_opt',
    '_backward',
    '_step',
    '_with_events',
)

_END = object()  # marks the end of a loader, as the default of `next`


class Loop(CallbackHost):
    """Training loop with its state. `Learner` adds the methods that users call.

    The methods from `_do_fit` to `_with_events` are the whole loop. Custom training (two networks,
    two forward passes) overrides `train_batch`; `_do_one_batch`, `_do_grad_opt`, `_backward` and
    `_step` may be overridden, as in fastai. Methods that do not show where a run is are hidden from
    the tracebacks of notebooks (`__tracebackhide__`).
    """

    model: nn.Module
    dls: Any
    dl: Any
    batch: Any
    opt: Any
    loss_func: Any
    xb: tuple[Any, ...]
    yb: tuple[Any, ...]
    pred: Any
    loss: Any
    loss_grad: Any
    microbatch: int | str | None
    token_func: Callable[[tuple[Any, ...], tuple[Any, ...]], int] | None
    size_func: Callable[[tuple[Any, ...], tuple[Any, ...]], int] | None = None
    weight_func: Callable[[tuple[Any, ...], tuple[Any, ...]], Any] | str | None

    batch_form: BatchForm | None = None  # how batches of the current loader are split
    loader_name: str | None = None  # name of the loader in `dls`, if `dl_name` differs
    auto_microbatch: int | None = None  # size that fits into memory, with microbatch='auto'
    # called instead of `train_batch`, which it may call; set by `compile(step=True)`
    whole_step: Callable[[], None] | None = None
    _takes_alone_cache: tuple[Any, str] = None, ''  # loss function, and result of `takes_alone`
    _has_checked_pairing = True  # False until a pass has checked predictions against targets
    _checked_pairing: list[Any] | None = None  # loss function and sample shapes of the last check
    _has_checked_loss = True  # False until a fit has checked the loss function
    _has_checked_batch = True  # False until a fit has checked its first training batch

    def __init__(self) -> None:
        super().__init__()
        self._run = Run()
        self.counters = Counters()
        self.strategy = SingleProcess()
        self.evaluations = EvaluationSchedule()
        self.passes = TrainingPasses()
        self.loss_weights = LossWeights()
        self.timings = Timings()
        self.world: Comm = SINGLE_RANK  # processes that train together
        self.replica: nn.Module | None = None  # called instead of the model in training
        self.training = False
        self.fitting = False
        self.phase = 'train'
        self.dl_name = 'train'
        self.resumed = False  # True while a resumed fit fires its first events again
        self.n_epoch: int | None = 1
        self.epoch = 0
        self.iter = 0
        self.n_iter: int | None = None
        self.train_iter = 0
        self.pct_train = 0.0
        self.epochs_per_iteration: int | None = None
        self.turn: str | None = None  # optimizer that `optimize(only=)` trains; None: all
        self.error: BaseException | None = None
        self._end_cleanup()

    run = property(attrgetter('_run'), refuse_run, doc='State of the current run.')

    # -- the loop --------------------------------------------------------------------------------

    def _do_fit(self) -> None:
        __tracebackhide__ = True
        self._has_checked_loss = self._has_checked_batch = False
        self._checked_pairing = None
        for epoch in self._iterate_epochs():
            self.epoch = epoch
            per_iteration = self.epochs_per_iteration
            if per_iteration and (epoch % per_iteration == 0 or self.resumed):
                self('before_iteration')
            self._with_events(self._do_epoch, 'epoch', CancelEpochException)
            self.fire_checkpoint('epoch')
            if self.ends_iteration():
                self.end_iteration()
            if self.run.stopping:
                break

    def _do_epoch(self) -> None:
        __tracebackhide__ = True
        self._do_epoch_train()
        if self.run.resume is not None:
            resume_at(self, 'evaluation')
        self.do_evaluation(self.evaluations.list_due(self, at_epoch_end=True))

    def _do_epoch_train(self) -> None:
        self.dl = self.dls.train
        self.phase = 'train'
        self.dl_name = 'train'
        self._with_events(self.all_batches, 'train', CancelTrainException)

    def _do_epoch_validate(self, ds_idx: int = 1, dl: Any = None) -> None:
        self.set_loader(self.dls[ds_idx] if dl is None else dl)
        with torch.no_grad(), self.evaluated_weights():
            self._with_events(self.all_batches, 'validate', CancelValidException)

    def all_batches(self) -> None:
        """Train or evaluate on every batch of `self.dl`.

        >>> from learnkit import Learner
        >>> from learnkit.testing import RegModel, synth_dls
        >>> class FirstTwo(Learner):
        ...     "Train on the first two batches of each epoch."
        ...     def all_batches(self):
        ...         for i, batch in self.draw_batches():
        ...             self.one_batch(i, batch)
        ...             if i == 1: break
        >>> learn = FirstTwo(synth_dls(), RegModel(), torch.nn.MSELoss())
        >>> with learn.no_bar(): learn.fit(3)
        >>> learn.time.ba
        6
        """
        __tracebackhide__ = True
        for i, batch in self.draw_batches():
            self.one_batch(i, batch)
            if self.training:
                self.fire_checkpoint('batch')
                if self.run.stopping:
                    break

    def one_batch(self, i: int, b: Any) -> None:
        "Train or evaluate on batch `b`, number `i` of its loader."
        self.iter = i
        self.clear_pass()
        self._split(self._set_device(b))
        self._with_events(self._do_one_batch, 'batch', CancelBatchException)

    def _do_one_batch(self) -> None:
        __tracebackhide__ = True
        if not self.training:
            self.evaluate_batch()
            return
        if not self._has_checked_batch:
            self._check_first_batch()
        if self.whole_step is None:
            self.train_batch()
        else:
            self.whole_step()

    def train_batch(self) -> None:
        """Train on the current batch. Custom loops override this method.

        The default runs forward, loss, backward and step on `self.xb` and `self.yb`, in
        microbatches if `microbatch` is set. An override calls `forward`, `compute_loss` and
        `optimize`, each as often as needed: two networks, two passes, several steps.

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
        if self.microbatch:
            self._do_microbatches(self.microbatch)
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
        self('before_pred')
        with self.contexts('forward'):
            output, own_loss = self._do_pred()
            self.pred = output
            self('after_pred')
            if not self.run.takes_batches:
                own_loss = self._unpack_pred(output)
            self._do_loss(own_loss)
        self('after_loss')
        if self.training and 'loss_grad' not in self.__dict__:
            raise self._make_no_loss_error()

    def _do_grad_opt(self) -> None:
        self._with_events(self._backward, 'backward', CancelBackwardException)
        self._with_events(self._step, 'step', CancelStepException)
        self.opt.zero_grad()

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

    @contextmanager
    def open_level(self, event_type: str) -> Iterator[None]:
        """Open a level of the loop within a context: fire its first event, and at the end the others.

        For a function, `_with_events` takes less time. It also drops the Cancel exception, with
        the tensors of its frames, before the handlers of `after_cancel_*` run.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner()
        >>> with learn.open_level('validate'): print(learn.is_open('validate'))
        True
        """
        level = LEVELS[event_type]
        run = self.run
        outer = run.levels
        cancelled = False
        run.levels = (*outer, event_type)
        try:
            yield
        except level.exception:
            cancelled = True
        finally:
            run.levels = outer
        if cancelled:
            self(level.after_cancel)
        self(level.after)

    # -- the parts of a batch --------------------------------------------------------------------

    def clear_pass(self) -> None:
        "Delete the prediction and the loss of the last forward pass."
        state = self.__dict__
        state.pop('pred', None)
        state.pop('loss_grad', None)

    def _set_device(self, b: Any) -> Any:
        device = self.run.device if self.run.depth else None
        return to_device(b, device or model_device(self.model, self.dls))

    def _split(self, b: Any) -> None:
        form = self.batch_form or form_of(self.dls, self.loader_name or self.dl_name)
        self.xb, self.yb = form.split(b, self.phase == 'predict')

    def _do_pred(self) -> tuple[Any, Any]:
        "Call the model, and return its output, and the loss of a model that takes whole batches, or None."
        model = self.model if self.replica is None or not self.training else self.replica
        try:
            if self.run.takes_batches:
                return predict_batch(self, model)
            return apply_model(model, self.xb), None
        except Exception as e:
            __tracebackhide__ = True
            if not isinstance(self.xb, (tuple, list)):
                raise self._make_tuple_error('xb', 'x') from e
            hint = model_hint(self.xb, self.model, e)
            add_note(e, f'{type(self.model).__name__} got {describe(self.xb)}{hint}')
            raise

    def _unpack_pred(self, output: Any) -> Any:
        "Set `pred` to the prediction in it, and return the loss that the model computed itself, or None."
        self.pred, own_loss = unpack_output(self.pred)
        if own_loss is None and self.pred is not output:
            own_loss = unpack_output(output)[1]  # a callback has taken the logits only
        return own_loss

    def _do_loss(self, own_loss: Tensor | None) -> None:
        "Set `loss_grad` and `loss`, from the loss function or the model's own loss."
        try:
            has_targets = bool(self.yb)
        except RuntimeError as e:  # `yb` is a tensor
            raise self._make_tuple_error('yb', 'y') from e
        if self.loss_func is not None and has_targets:
            loss = self.loss_of(self.pred)
        elif own_loss is not None:
            loss = own_loss
        elif self.run.takes_batches and self.training:
            loss = loss_of_batch(self)
        elif self.loss_func is not None and self._needs_no_targets():
            loss = self.loss_of(self.pred)
        else:
            return
        if not isinstance(loss, Tensor):
            loss = self.total_loss(loss)
        self.loss_grad = loss
        self.loss = loss.detach().clone()

    def loss_of(self, pred: Any) -> Any:
        """Return the result of the loss function for predictions and the targets of the batch.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner(loss_func=torch.nn.MSELoss())
        >>> learn.yb = (torch.zeros(4),)
        >>> learn.loss_of(torch.ones(4))
        tensor(1.)
        """
        if not (self._has_checked_pairing and self._has_checked_loss):
            self._check_loss(pred)
        try:
            return self.loss_func(pred, *self.yb)
        except Exception as e:
            if not isinstance(self.yb, (tuple, list)):
                raise self._make_tuple_error('yb', 'y') from e
            what = f'{describe(pred)} and the targets {describe(self.yb)}'
            hint = loss_hint(self.loss_func, pred, self.yb, e)
            add_note(e, f'{name_of(self.loss_func)} got {what}{hint}')
            raise

    def _check_loss(self, pred: Any) -> None:
        "Check shapes at the first loss of a pass, and the loss function at the first loss of a fit."
        # a single prediction fits any shape, so that the next loss is checked too
        self._has_checked_pairing = not isinstance(pred, Tensor) or pred.numel() > 1
        shapes = [t.shape[1:] for t in (pred, *self.yb) if isinstance(t, Tensor)]
        pairing = [id(self.loss_func), *shapes]
        if pairing != self._checked_pairing:
            check_pairing(self.loss_func, pred, self.yb)
            self._checked_pairing = pairing if self._has_checked_pairing else None
        if self._has_checked_loss:
            return
        self._has_checked_loss = True
        check_class_scores(self.loss_func, pred, self.yb)
        warn_of_order(self.loss_func)
        if self.training and (self.microbatch or self.world.size > 1):
            check_is_mean(self, pred)

    def total_loss(self, parts: Any) -> Tensor:
        """Log the named parts of a loss, and return the part `loss`, or else the sum of all parts.

        >>> from torch.nn import functional as F
        >>> from learnkit.testing import synth_learner
        >>> def parts(pred, y): return {'fit': F.mse_loss(pred, y), 'size': 0.1 * pred.abs().mean()}
        >>> learn = synth_learner(loss_func=parts)
        >>> with learn.no_bar(): learn.fit(1)  # `total_loss` adds the two, and logs each
        >>> [name for name in learn.history[-1] if name.endswith(('_fit', '_size'))]
        ['train_fit', 'train_size', 'valid_fit', 'valid_size']
        """
        is_dict = isinstance(parts, Mapping) and bool(parts)
        if not is_dict or not all(isinstance(part, Tensor) for part in parts.values()):
            name = getattr(self.loss_func, '__name__', self.loss_func)
            raise LossError(
                f'{name} returned {parts!r}: a loss is a tensor, or a dict of named tensors.'
            )
        weights = self.loss_weights
        has_func = self.weight_func is not None
        weight = weights.weigh_batch(self, self.xb, self.yb) if has_func else sample_count(self)
        for name, value in parts.items():
            if name != 'loss' and not self.run.repeating:
                self.log(f'train_{name}' if self.training else name, value, weight)
        if 'loss' in parts:
            total: Tensor = parts['loss']
        else:
            total = sum(parts.values())
        return total

    def _needs_no_targets(self) -> bool:
        """Return True for a loss function of the predictions alone, as in self-supervised learning.

        While predicting, a loss function that could also take targets is not called: the samples
        may not have targets yet.
        """
        func, takes = self._takes_alone_cache
        if func is not self.loss_func:
            takes = takes_alone(self.loss_func)
            self._takes_alone_cache = self.loss_func, takes
        return takes == 'only' or (takes == 'also' and self.phase != 'predict')

    def log(self, name: str, value: Any, weight: Any = 1, shown: bool = True) -> None:
        "Average a named value over the epoch. `Learner` passes the value to its recorder."

    def _backward(self) -> None:
        try:
            with self.contexts('backward'):
                self.loss_grad.backward(retain_graph=self.run.retains_graph)
        except AttributeError as e:
            if isinstance(self.loss_grad, Tensor):
                raise
            raise LossError(
                f'`learn.loss_grad` was set to {short_repr(self.loss_grad)}, which is not a tensor, so there are no '
                'gradients. Compute it from the tensor, as in `self.learn.loss_grad = 2 * self.loss_grad`; '
                '`learn.trace()` shows which callback has set it.'
            ) from e
        except RuntimeError as e:
            if self.loss_grad.numel() == 1 and self.loss_grad.requires_grad:
                hint = precision_hint(self.yb, self.model)
                hint = hint or loss_hint(self.loss_func, self.pred, self.yb, e)
                if hint:
                    add_note(e, f'The targets are {describe(self.yb)}{hint}')
                raise
            raise LossError(self._explain_no_backward()) from e

    def _step(self) -> None:
        if self.opt.takes_closure:
            self._step_with_closure()
        else:
            self.opt.step(only=self.turn)

    def _step_with_closure(self) -> None:
        "Step an optimizer that evaluates the loss repeatedly; the first evaluation is done already."
        before = {name: self.__dict__.get(name) for name in ('pred', 'loss', 'loss_grad')}
        is_expected = self.opt.needs_closure

        def evaluate() -> Tensor:
            if not is_expected:
                self.callbacks.notify('on_reevaluation')
            self.run.repeating = True
            self.opt.zero_grad(only=self.turn)
            self.repeat_passes()
            return self.strategy.batch_loss(self)

        closure = Closure(evaluate, lambda: self.strategy.batch_loss(self))
        try:
            self.opt.step(closure, only=self.turn)
        except BaseException:
            self.opt.clear_state(closures=True)  # an unfinished line search cannot be continued
            raise
        finally:
            self.run.repeating = False
        self.__dict__.update(before)  # record the evaluation before the step

    def repeat_passes(self) -> None:
        "Run the forward and backward passes of the batch again, without the step."
        if self.run.optimize_call is not None:
            self.repeat_optimize_call()
        elif self.microbatch:
            self.run_microbatches(self.microbatch)
        else:
            self.clear_pass()
            self._do_pred_loss()
            self._with_events(self._backward, 'backward', CancelBackwardException)

    def repeat_optimize_call(self) -> None:
        "Run the passes of the current `optimize` call again."

    # -- microbatches ----------------------------------------------------------------------------

    def _do_microbatches(self, size: int | str) -> None:
        pending = [(p, p.grad.clone()) for p in self.opt.parameters() if p.grad is not None]
        try:
            if size == 'auto':
                train_within_memory(self, pending)
            else:
                self.run_microbatches(size)
        except CancelBatchException:  # the gradient of a part of the batch is useless
            restore_gradients(self, pending)
            self.__dict__.pop('loss_grad', None)
            raise
        self._with_events(self._step, 'step', CancelStepException)
        self.opt.zero_grad()

    def run_microbatches(self, size: int | str) -> None:
        "Accumulate the gradients of microbatches, weighted so that their sum is the batch's gradient."
        xb = self.xb
        yb = self.yb
        run = self.run
        weights = None
        if isinstance(size, str):  # 'auto'
            n = count_samples(self)
            size = min(self.auto_microbatch or n, n)
        microbatches = self.strategy.split(self, xb, yb, size)
        if not self.loss_weights.is_sum(self):
            weights = [self.loss_weights.weigh_batch(self, *part) for part in microbatches]
        total = None
        try:
            for i, microbatch in enumerate(microbatches):
                self.xb, self.yb = microbatch
                run.microbatch = i
                run.is_last_microbatch = i + 1 == len(microbatches)
                self.clear_pass()
                self._do_pred_loss()
                weight = None if weights is None else weights[i]
                run.microbatch_share = weigh(weight, weights, self.loss.dtype)
                loss = weighted_loss(self.loss, run.microbatch_share)
                total = loss if total is None else total + loss
                self._with_events(self._backward_microbatch, 'backward', CancelBackwardException)
        finally:
            self.xb = xb
            self.yb = yb
            run.is_last_microbatch = True
            run.microbatch_share = 1.0
        self.loss = total

    def _backward_microbatch(self) -> None:
        "Run backward on the weighted loss of a microbatch; the weight also applies to terms that callbacks added."
        self.loss_grad = self.loss_grad * self.run.microbatch_share
        self._backward()

    # -- loaders ---------------------------------------------------------------------------------

    def draw_batches(self) -> Iterator[tuple[int, Any]]:
        "Yield the batches of `self.dl` with their numbers; fire `before_draw` and `after_draw` around each draw."
        self.n_iter, limit = epoch_length(self.dls, self.dl)
        self.run.device = model_device(self.model, self.dls)
        self.batch_form = form_of(self.dls, self.loader_name or self.dl_name)
        if self.training and self.fitting:
            # callbacks may have unfrozen or replaced parameters in `before_train`
            cover_params(self)  # type: ignore[arg-type]  # in a fit it is a Learner
        first, batches = self._open_loader()
        if batches is None:
            return
        self._has_checked_pairing = False
        timings = self.timings
        try:
            for i in count(first) if limit is None else range(first, limit):
                self.iter = i
                if self.training:
                    timings.steps_left -= 1
                    if timings.steps_left <= 0:
                        timings.switch(self)
                self('before_draw')
                try:
                    batch = next(batches, _END)
                except Exception as e:
                    end_workers(self.dl, e)
                    self.callbacks.notify('on_draw_failed')
                    raise
                if batch is _END:
                    self._check_drawn(i)
                    return
                self.batch = batch
                self('after_draw')
                yield i, self.batch
        finally:
            if self.training:
                self.passes.end(self, batches)
                timings.stop(self)
            del batches  # or else a traceback keeps its worker processes running

    def _open_loader(self) -> tuple[int, Iterator[Any] | None]:
        "Return the number of the first batch, and the iterator, or None if no batch is left."
        device = self.run.device
        assert device is not None  # `draw_batches` has set it
        if not (self.training and self.fitting):
            return 0, read_ahead(self.dl, device)
        if self.run.resume is not None:
            return open_resumed(self)
        return self.passes.begin(self)

    def _check_drawn(self, n: int) -> None:
        "Set `iter` to the last of the `n` batches that were drawn; raise `EmptyLoaderError` if `n` is 0."
        self.iter = max(0, n - 1)
        if not n:
            hint = ''
            if isinstance(self.dl, Iterator):
                hint = ' It is an iterator, used up after one pass: give a loader that starts again each time.'
            raise EmptyLoaderError(
                f'The {self.dl_name} loader ({type(self.dl).__name__}) gave no batch.{hint}'
            )
        if self.n_iter is not None and n < self.n_iter:
            warn_user(
                f'The {self.dl_name} loader ended after {n} of its {self.n_iter} batches. Its '
                'length is wrong, or a StopIteration was raised inside the data set, which looks '
                'like the end.'
            )

    # -- evaluation ------------------------------------------------------------------------------

    def do_evaluation(self, loaders: list[tuple[str, Any]] | None = None) -> None:
        "Evaluate validation loaders, given with their names. None: all of them."
        __tracebackhide__ = True
        if loaders is None:
            loaders = evaluation_loaders(self.dls)
        if not loaders:
            return
        outer = self.run.evaluating  # True if a callback starts this evaluation in another one
        with preserved_rng():
            self.run.evaluating = True
            try:
                self.callbacks.notify('on_evaluation')
                self('before_eval')
                for self.dl_name, dl in loaders:
                    with preserved_generators(dl):
                        self._do_epoch_validate(dl=dl)
                self('after_eval')
            finally:
                self.run.evaluating = outer

    def evaluate_within_epoch(self, loaders: list[tuple[str, Any]]) -> None:
        "Evaluate between two training batches, and restore the state that the evaluation changes."
        with preserved_state(self):
            try:
                self.do_evaluation(loaders)
            except BaseException:
                self.callbacks.notify('on_run_failed')
                raise

    def set_loader(self, dl: Any) -> None:
        "Set the loader to evaluate or predict on."
        self.dl = dl
        if self.phase == 'train':
            self.phase = 'valid'
        if self.dl_name == 'train':
            self.dl_name = 'valid'

    def evaluated_weights(self) -> AbstractContextManager[None]:
        "Return a context in which the model has the weights that its optimizer provides for evaluation."
        return self.opt.evaluating() if isinstance(self.opt, OptimWrapper) else nullcontext()

    @property
    def eval_every(self) -> Any:
        """Interval of evaluations, for loaders without their own interval. None: never.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner()
        >>> learn.eval_every = '2ep'
        >>> learn.eval_every
        Time('2ep')
        """
        return self.evaluations.every

    @eval_every.setter
    def eval_every(self, every: Any) -> None:
        self.evaluations.every = as_every(every)

    # -- epochs and iterations -------------------------------------------------------------------

    def _iterate_epochs(self) -> Iterable[int]:
        if self.run.resume is not None:
            return resumed_epochs(self)
        return count() if self.n_epoch is None else range(self.n_epoch)

    def ends_iteration(self) -> bool:
        "Return True if the current epoch is the last epoch of an iteration, and was not cut."
        per_iteration = self.epochs_per_iteration
        if per_iteration is None or self.passes.is_cut:
            return False
        return (self.epoch + 1) % per_iteration == 0

    def end_iteration(self) -> None:
        "Fire the events at the end of an iteration."
        self('after_iteration')
        self.fire_checkpoint('iteration')

    def fire_checkpoint(self, level: str) -> None:
        "Fire the checkpoint event of a level: 'batch', 'epoch' or 'iteration'. The run can be saved there."
        self.run.checkpoint_event = level
        self(_CHECKPOINT_EVENTS[level])
        self.run.checkpoint_event = ''

    # -- reading ---------------------------------------------------------------------------------

    @property
    def x(self) -> Any:
        "Input of the batch, or a tuple of several inputs. Assign `xb` to change it."
        return detuplify(self.xb)

    @x.setter
    def x(self, value: Any) -> None:
        raise _make_read_only_error('x')

    @property
    def y(self) -> Any:
        """Target of the batch, or a tuple of several targets. Assign `yb` to change it.

        >>> from learnkit import Callback
        >>> from learnkit.testing import synth_learner
        >>> def look(cb):
        ...     if cb.iter == 0 and cb.training: print(cb.x.shape, cb.y.shape, len(cb.yb))
        >>> with (learn := synth_learner()).no_bar(): learn.fit(1, cbs=Callback(before_batch=look))
        torch.Size([16, 1]) torch.Size([16, 1]) 1
        """
        return detuplify(self.yb)

    @y.setter
    def y(self, value: Any) -> None:
        raise _make_read_only_error('y')

    @property
    def time(self) -> Timestamp:
        "Epochs, batches, steps, samples, tokens and seconds finished so far, over all fits of this Learner."
        counters = self.counters
        # rounding may bring a sum of shares above 1
        share = min(self.pct_train, 1.0) if self.fitting else None
        return Timestamp(
            iter=counters.iterations,
            ep=counters.epochs,
            ba=counters.batches,
            st=self.finished('st'),
            sp=counters.samples,
            tok=counters.tokens,
            sec=self.finished('sec'),
            dur=share,
        )

    def finished(self, unit: str) -> Any:
        """Return the amount finished so far in one unit of `learn.time`, as a plain number.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner()
        >>> with learn.no_bar(): learn.fit(2)
        >>> learn.finished('ep'), learn.finished('ba'), learn.finished('st')
        (2, 20, 20)
        """
        if unit == 'st':
            return self.counters.steps + getattr(self.opt, 'n_steps', 0)
        if unit == 'sec':
            return self.strategy.seconds(self)
        return getattr(self.counters, COUNTER_OF_UNIT[unit])

    @property
    def step_parameters(self) -> list[nn.Parameter]:
        "Parameters that the current step updates: the parameters of one optimizer (`turn`), or of all."
        return list(self.opt.parameters(self.turn))

    def contexts(self, part: str) -> AbstractContextManager[Any]:
        """Return the contexts of callbacks around a part of a batch, as one context.

        `part` is 'forward' (from the model to the loss) or 'backward'.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner().to_bf16()
        >>> with learn.contexts('forward'): print((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        torch.bfloat16
        """
        entries = self.tables[self.training][CONTEXTS[part]]
        if not entries:
            return NO_CONTEXT
        if len(entries) > 1:
            return ContextStack([make for make, switch, _ in entries if switch])
        make, switch, _ = entries[0]
        context = make() if switch else None
        return NO_CONTEXT if context is None else context

    # -- runs ------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the fit after the current batch or epoch; every `after_*` and checkpoint event still fires.

        >>> from learnkit import Callback
        >>> from learnkit.testing import synth_learner
        >>> def enough(cb):
        ...     if cb.train_iter == 15: cb.learn.stop()
        >>> with synth_learner(n_train=10, cbs=Callback(after_batch=enough)).no_bar() as learn: learn.fit(100)
        >>> learn.train_iter, len(learn.history)
        (15, 2)

        Several processes that train together end once all of them have agreed to end
        (`DistributedTraining`).
        """
        self.strategy.stop(self)

    @contextmanager
    def open_optimize_call(self, call: OptimizeCall) -> Iterator[None]:
        "Set the current `optimize` call, and the optimizer that it steps, within a context."
        before = self.run.optimize_call, self.turn
        self.run.optimize_call = call
        self.turn = call.only
        try:
            yield
        finally:
            self.run.optimize_call, self.turn = before

    def forget_run(self) -> None:
        "Release the tensors of a failed run, and the persistent workers of its loaders."
        for dl in (self.dls.train, *(dl for _, dl in evaluation_loaders(self.dls))):
            forget_workers(dl)
        self.passes.forget()
        self._end_cleanup()
        if self.opt is not None:
            self.opt.zero_grad()

    def _end_cleanup(self) -> None:
        self.dl = None
        self.xb = (None,)
        self.yb = (None,)
        self.pred = None
        self.loss = None
        self.batch = self.batch_form = None
        self.__dict__.pop('loss_grad', None)
        if self.run.depth <= 1:
            self.passes.close()
            self.end_resume()

    def end_resume(self) -> None:
        "Clear the checkpoint that the fit was resumed from."
        self.run.resume = None
        self.resumed = False
        self.run.resumes_at = 0

    def _is_in_use(self) -> bool:
        return is_in_use(self)

    def is_open(self, level: str) -> bool:
        "Return True if a level of the loop ('fit', 'batch' ...) is open in the current run."
        # an override of `_with_events` may not update `run.levels`
        is_overridden = type(self)._with_events is not Loop._with_events
        return level in self.run.levels or is_overridden

    def note_error(self, e: BaseException, cb: Callback, event_name: str) -> None:
        """Add a note to an exception: the callback, the event, epoch and batch.

        Raises `CancelError` for a Cancel exception whose level is not open.
        """
        evaluation = ', in an evaluation' if self.is_open('validate') else ''
        where = f'{type(cb).__name__}.{event_name} ({format_place(self)}{evaluation})'
        if not isinstance(e, CancelException):
            add_note(e, f'in {where}')
        elif not self.is_open(e.level):
            raise make_cancel_error(e, f'in {where}', self.run.levels) from e

    # -- checks and errors -----------------------------------------------------------------------

    def _check_first_batch(self) -> None:
        "Raise for a fit's first training batch if samples must be counted, or split, and cannot be."
        self._has_checked_batch = True
        amount = self.run.counts_samples
        self.run.counts_samples = None
        if self.microbatch:
            n = count_samples(self)
            slice_batch(self.xb, self.yb, n, [slice(0, n)])
        try:
            n = count_samples(self)
        except BatchError as e:
            if amount is None:
                return
            raise TimeError(f'{amount}: samples are not counted. {e}') from None
        if n < 1 and amount is not None:
            raise TimeError(f'{amount}: the first batch has {n} samples, {describe(self.xb)}.')
        if self.size_func is None and not has_certain_size(self.xb, self.yb):
            warn_user(
                f'The batch {describe((*self.xb, *self.yb))} is counted as {n} samples, one for '
                'each entry of a list. If the list holds several inputs instead, stacked over '
                'samples, give `Learner(size_func=lambda xb, yb: len(xb[0][0]))`; otherwise '
                '`lambda xb, yb: len(xb[0])`.'
            )

    def _make_tuple_error(self, name: str, entry: str) -> BatchError:
        return BatchError(
            f'`{name}` is {describe(getattr(self, name))}, not a tuple: write '
            f'`self.learn.{name} = ({entry},)`.'
        )

    def _make_no_loss_error(self) -> LossError | BatchError:
        if self.loss_func is None:
            return LossError(
                f'No loss function: {type(self.model).__name__} gave {describe(self.pred)}, '
                'without a loss of its own. Pass `loss_func=`, for example '
                'torch.nn.functional.cross_entropy.'
            )
        return BatchError(
            f'The training batch {describe(self.batch)} has no targets, so there is no loss to '
            'learn from. Give (input, target) batches, or set `self.learn.yb` in before_batch.'
        )

    def _explain_no_backward(self) -> str:
        if self.loss_grad.numel() != 1:
            return (
                f'The loss has shape {tuple(self.loss_grad.shape)}; one number is needed to learn '
                "from. Use reduction='mean', or return loss.mean()."
            )
        return (
            'The loss does not depend on any parameter that requires a gradient. Is the model '
            'frozen, or was the loss detached, computed under no_grad, or turned into a number and '
            'back?'
        )


_CHECKPOINT_EVENTS = {level: f'{level}_checkpoint' for level in ('batch', 'epoch', 'iteration')}


def _make_read_only_error(name: str) -> AttributeError:
    return AttributeError(f'`{name}` is read only: write `self.learn.{name}b = ({name},)`.')


def token_count(learn: LoopLike) -> int:
    "Return the number of tokens of a batch, from `token_func` or its `input_ids`, or 0 without these."
    if learn.token_func is not None:
        return int(learn.token_func(learn.xb, learn.yb))
    ids = learn.xb[0].get('input_ids') if learn.xb and isinstance(learn.xb[0], Mapping) else None
    return ids.numel() if isinstance(ids, Tensor) else 0


def sample_count(learn: LoopLike) -> int:
    "Return the number of samples of a batch, or 0 if it is unknown."
    try:
        return count_samples(learn)
    except BatchError:
        return 0


def list_overrides(learn: LoopLike) -> list[str]:
    "Return the names in `BATCH_METHODS` that the class of a Learner overrides."
    return [name for name in BATCH_METHODS if getattr(type(learn), name) is not getattr(Loop, name)]
