"""The training loop: nested fit, epoch, train, batch, backward and step, each under one wrapper."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any

import torch
from fastcore.basics import noop
from torch import Tensor

from learnkit.core.batch import (
    BatchForm,
    apply_model,
    count_samples,
    describe,
    detuplify,
    form_of,
    has_certain_size,
    to_device,
    unpack_output,
)
from learnkit.core.errors import (
    BatchError,
    CancelBackwardException,
    CancelBatchException,
    CancelEpochException,
    CancelStepException,
    CancelTrainException,
    CancelValidException,
    EmptyLoaderError,
    LossError,
    TimeError,
)
from learnkit.core.model import model_device, name_of
from learnkit.core.random import preserved_generators, preserved_rng
from learnkit.core.validation import (
    check_pairing,
    loss_hint,
    model_hint,
    precision_hint,
    takes_alone,
    warn_user,
)
from learnkit.data.checks import epoch_length
from learnkit.data.dataloaders import evaluation_loaders
from learnkit.data.torch_loader import end_workers, forget_workers
from learnkit.engine.events import LEVELS
from learnkit.engine.resume import Resuming
from learnkit.engine.run import add_note
from learnkit.engine.timings import EVERY, TimedTable
from learnkit.optim.wrapper import Closure, OptimWrapper

__all__ = ['Loop', 'token_count', 'sample_count']

_END = object()  # what `next` gives when a loader is through


_Thunk = Callable[[], Any]


class Loop(Resuming):
    """The loop. `Learner` adds what surrounds it: construction, saving, predictions and so on.

    The methods from `_do_fit` to `_with_events` are the whole loop. Training of an unusual kind
    (two networks, two passes) overrides `train_batch`; `_do_one_batch`, `_do_grad_opt`, `_backward`
    and `_step` may be, as in fastai. Those that say nothing of where a run is are left out of a
    notebook's tracebacks (`__tracebackhide__`).
    """
    _form: BatchForm | None = None    # of the loader that is drawn from
    _source: str | None = None        # the loader's name in `dls`, where `dl_name` is another one
    _takes_alone: tuple[Any, str] = None, ''  # loss function, if it takes predictions alone
    _retains_graph: bool | None = None  # whether a backward pass keeps the graph for another one
    _pairing_known = True  # from the first loss of a fit on: predictions and targets were looked at
    _batch_known = True    # from the first training batch of a fit on: it was looked at
    _counts_samples: str | None = None  # what of this fit counts samples: '60sp'

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _do_fit(self) -> None:
        __tracebackhide__ = True
        self._pairing_known = self._batch_known = False
        for epoch in self._epochs():
            self.epoch = epoch
            if self._starts_iteration(): self('before_iteration')
            self._with_events(self._do_epoch, 'epoch', CancelEpochException)
            self._checkpoint('epoch')
            if self._ends_iteration(): self._end_iteration()
            if self._stopping: break

    def _do_epoch(self) -> None:
        __tracebackhide__ = True
        self._do_epoch_train()
        self._resume_at('evaluation')
        self._do_evaluation(self._due_loaders(at_epoch_end=True))

    def _do_epoch_train(self) -> None:
        self.dl, self.phase, self.dl_name = self.dls.train, 'train', 'train'
        self._with_events(self.all_batches, 'train', CancelTrainException)

    def _do_epoch_validate(self, ds_idx: int = 1, dl: Any = None) -> None:
        self._set_loader(self.dls[ds_idx] if dl is None else dl)
        with torch.no_grad(), self._evaluated_weights():
            self._with_events(self.all_batches, 'validate', CancelValidException)

    def all_batches(self) -> None:
        "Train or evaluate on every batch of `self.dl`."
        __tracebackhide__ = True
        for i, batch in self._draws():
            self.one_batch(i, batch)
            if self.training: self._checkpoint('batch')
            if self.training and self._stopping: break

    def one_batch(self, i: int, b: Any) -> None:
        "Train or evaluate on one batch."
        self.iter = i
        self._forget_pass()
        self._split(self._set_device(b))
        self._with_events(self._do_one_batch, 'batch', CancelBatchException)

    def _do_one_batch(self) -> None:
        __tracebackhide__ = True
        if self.training:
            if not self._batch_known:
                self._look_at_batch()
            self.train_batch()
        else:
            self.evaluate_batch()

    def train_batch(self) -> None:
        """Train on the batch at hand: the method that a loop of your own overrides.

        This one runs forward, loss, backward and step on `self.xb` and `self.yb`, in pieces when
        `microbatch` is set. Another one is written with `forward`, `compute_loss` and `optimize`, each
        as often as needed: two networks, two passes, several steps.

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
            return self._do_microbatches(self.microbatch)
        self._do_pred_loss()
        self._do_grad_opt()

    def evaluate_batch(self) -> None:
        """Evaluate the batch at hand, or predict on it: `pred`, and `loss` where there are targets.

        A loop of your own may override it, with `forward` and `report_loss`.
        """
        __tracebackhide__ = True
        self._do_pred_loss()

    def _look_at_batch(self) -> None:
        "Raise for the first training batch of a fit where its samples are counted, or cut, and cannot be."
        self._batch_known = True
        asked, self._counts_samples = self._counts_samples, None
        if self.microbatch: self._check_cut()
        try: n = count_samples(self)
        except BatchError as e:
            if asked is None: return
            raise TimeError(f'{asked}: samples are not counted. {e}') from None
        if n < 1 and asked is not None:
            raise TimeError(f'{asked}: the first batch has {n} samples, {describe(self.xb)}.')
        if self.size_func is None and not has_certain_size(self.xb, self.yb):
            warn_user(f'The batch {describe((*self.xb, *self.yb))} is counted as {n} samples, one for each entry of a '
                      'list. If the list holds several inputs instead, stacked over samples, give '
                      '`Learner(size_func=lambda xb, yb: len(xb[0][0]))`; otherwise `lambda xb, yb: len(xb[0])`.')

    def _do_pred_loss(self) -> None:
        self('before_pred')
        with self.contexts('forward'):
            self.pred, own_loss = self._do_pred()
            self('after_pred')
            self._do_loss(own_loss)
        self('after_loss')
        if self.training and 'loss_grad' not in self.__dict__: raise self._no_loss()

    def _do_grad_opt(self) -> None:
        self._with_events(self._backward, 'backward', CancelBackwardException)
        self._with_events(self._step, 'step', CancelStepException)
        self.opt.zero_grad()

    def _with_events(self, f: _Thunk, event_type: str, ex: type[Exception], final: _Thunk = noop) -> None:
        __tracebackhide__ = True
        level, outer, cancelled = LEVELS[event_type], self._open, False
        self._open = (*outer, event_type)
        try: self(level.before); f()
        except ex: cancelled = True
        finally: self._open = outer
        if cancelled: self(level.after_cancel)
        self(level.after); final()

    def _evaluated_weights(self) -> AbstractContextManager[None]:
        "Return a context in which the weights are what the optimizer wants evaluated and saved."
        return self.opt.evaluating() if isinstance(self.opt, OptimWrapper) else nullcontext()

    # -- loaders -------------------------------------------------------------------------------------------------------

    def _do_evaluation(self, loaders: list[tuple[str, Any]] | None = None) -> None:
        __tracebackhide__ = True
        loaders = evaluation_loaders(self.dls) if loaders is None else loaders
        if not loaders: return
        outer = self._evaluating  # of the evaluation in which a callback starts this one
        with preserved_rng():
            self._evaluating = True
            try:
                self._tell('_before_evaluation')
                self('before_eval')
                for self.dl_name, dl in loaders:
                    with preserved_generators(dl): self._do_epoch_validate(dl=dl)
                self('after_eval')
            finally: self._evaluating = outer

    def _set_loader(self, dl: Any) -> None:
        "Set the loader that is evaluated or predicted on."
        self.dl = dl
        if self.phase == 'train': self.phase = 'valid'
        if self.dl_name == 'train': self.dl_name = 'valid'

    def _draws(self) -> Iterator[tuple[int, Any]]:
        "Yield the batches of `self.dl` with their numbers, each between `before_draw` and `after_draw`."
        self.n_iter, limit = epoch_length(self.dls, self.dl)
        self._device = model_device(self.model, self.dls)
        self._form = form_of(self.dls, self._source or self.dl_name)
        first, batches = self._open_loader()
        if batches is None: return
        try:
            for i in count(first) if limit is None else range(first, limit):
                self.iter = i
                if self.training: self._count_to_timing()
                self('before_draw')
                try: batch = next(batches, _END)
                except Exception as e:
                    end_workers(self.dl, e)
                    self._tell('_draw_failed')
                    raise
                if batch is _END: return self._stop_drawing(i)
                self.batch = batch
                self('after_draw')
                yield i, self.batch
        finally:
            del batches  # a traceback would keep its worker processes running
            if self.training:
                self._n_drawn = self.iter + 1
                self._stop_timing()

    def _count_to_timing(self) -> None:
        "Measure one step in so many, through timed handlers; a step ends with the beginning of the next."
        self._until_timed -= 1
        if self._until_timed > 0: return
        if self._stop_timing(): self._until_timed = EVERY - 1
        elif self._tables is self._callbacks.tables:
            self._tables = self._tables[False], self._timed_table()
            self.timings.device = self._device
            self.timings.begin_step()

    def _stop_timing(self) -> bool:
        "Let the loop read its own tables again; tell whether it read others."
        if not isinstance(self._tables[True], TimedTable): return False
        self._tables = self._callbacks.tables
        self.timings.end_step()
        return True

    def _timed_table(self) -> TimedTable:
        "Return the timed handlers of this fit; they are made anew only when callbacks have changed."
        more = self._callbacks.more_tables
        for table in more:
            if isinstance(table, TimedTable) and table.timings is self.timings: return table
        timed = TimedTable(self._tables[True], self.timings)
        more[:] = [*(t for t in more if not isinstance(t, TimedTable)), timed]
        return timed

    def _forget_run(self) -> None:
        for dl in (self.dls.train, *(dl for _, dl in evaluation_loaders(self.dls))):
            forget_workers(dl)
        self._stream = None  # its iterator may have ended with the error
        super()._forget_run()

    def _is_open(self, level: str) -> bool:
        # an override may not keep them
        return level in self._open or type(self)._with_events is not Loop._with_events

    # -- the parts of a batch ------------------------------------------------------------------------------------------

    @property
    def x(self) -> Any:
        "The input of the batch, or the tuple of them when there are several; assign `xb` to change it."
        return detuplify(self.xb)

    @x.setter
    def x(self, value: Any) -> None: raise _tuple_wanted('x')

    @property
    def y(self) -> Any:
        "The target of the batch, or the tuple of them when there are several; assign `yb` to change it."
        return detuplify(self.yb)

    @y.setter
    def y(self, value: Any) -> None: raise _tuple_wanted('y')

    def _set_device(self, b: Any) -> Any:
        return to_device(b, (self._depth and self._device) or model_device(self.model, self.dls))

    def _split(self, b: Any) -> None:
        form = self._form or form_of(self.dls, self._source or self.dl_name)
        self.xb, self.yb = form.split(b, self.phase == 'predict')

    def _do_pred(self) -> tuple[Any, Any]:
        model = self.model if self._replica is None or not self.training else self._replica
        try: return unpack_output(apply_model(model, self.xb))
        except Exception as e:
            __tracebackhide__ = True
            if not isinstance(self.xb, (tuple, list)): raise self._no_tuple('xb', 'x') from e
            add_note(e, f'{type(self.model).__name__} got {describe(self.xb)}{model_hint(self.xb, self.model, e)}')
            raise

    def _do_loss(self, own_loss: Tensor | None) -> None:
        try: has_targets = bool(self.yb)
        except RuntimeError as e: raise self._no_tuple('yb', 'y') from e  # it is a tensor
        if self.loss_func is not None and has_targets: loss = self._loss_of(self.pred)
        elif own_loss is not None: loss = own_loss
        elif self.loss_func is not None and self._needs_no_targets(): loss = self._loss_of(self.pred)
        else: return
        if not isinstance(loss, Tensor): loss = self._total_loss(loss)
        self.loss_grad = loss
        self.loss = loss.detach().clone()

    def _needs_no_targets(self) -> bool:
        """Return True for a loss function of the predictions alone, as self-supervised learning has.

        In predictions a loss that could also take targets is not called: their samples may have none yet.
        """
        func, takes = self._takes_alone
        if func is not self.loss_func:
            func, takes = self._takes_alone = self.loss_func, takes_alone(self.loss_func)
        return takes == 'only' or (takes == 'also' and self.phase != 'predict')

    def _loss_of(self, pred: Any) -> Any:
        if not self._pairing_known:
            self._pairing_known = True
            check_pairing(self.loss_func, pred, self.yb)
        try: return self.loss_func(pred, *self.yb)
        except Exception as e:
            if not isinstance(self.yb, (tuple, list)): raise self._no_tuple('yb', 'y') from e
            add_note(e, f'{name_of(self.loss_func)} got {describe(pred)} and the targets {describe(self.yb)}'
                        f'{loss_hint(self.loss_func, pred, self.yb, e)}')
            raise

    def _no_tuple(self, name: str, entry: str) -> BatchError:
        "Make the error for a tensor where a tuple of them belongs."
        return BatchError(f'`{name}` is {describe(getattr(self, name))}, not a tuple: write `self.learn.{name} = '
                          f'({entry},)`.')

    def _total_loss(self, parts: Any) -> Tensor:
        "Record the named parts of a loss, and return its `loss` entry or their sum."
        if not isinstance(parts, Mapping) or not parts or not all(isinstance(p, Tensor) for p in parts.values()):
            raise LossError(f'{getattr(self.loss_func, "__name__", self.loss_func)} returned {parts!r}: a loss is a '
                            'tensor, or a dict of named tensors.')
        for name, value in parts.items():
            if name != 'loss' and not self._repeating:
                self.log(f'train_{name}' if self.training else name, value, self._weight())
        # of tensors
        return parts['loss'] if 'loss' in parts else sum(parts.values())  # type: ignore[return-value]

    def _no_loss(self) -> LossError | BatchError:
        "Make the error for a training batch that gave no loss."
        if self.loss_func is None:
            return LossError(f'No loss function: {type(self.model).__name__} gave {describe(self.pred)}, without a '
                             'loss of its own. Pass `loss_func=`, for example torch.nn.functional.cross_entropy.')
        return BatchError(f'The training batch {describe(self.batch)} has no targets, so there is no loss to learn '
                          'from. Give (input, target) batches, or set `self.learn.yb` in before_batch.')

    def _stop_drawing(self, n: int) -> None:
        "Go back to the last of the `n` batches that were drawn."
        self.iter = max(0, n - 1)
        if n:
            if self.n_iter is not None and n < self.n_iter:
                warn_user(f'The {self.dl_name} loader ended after {n} of its {self.n_iter} batches. Its length is '
                          'wrong, or a StopIteration was raised inside the data set, which looks like the end.')
            return
        once = ' It is an iterator, used up after one pass: give a loader that starts anew each time.'
        raise EmptyLoaderError(f'The {self.dl_name} loader ({type(self.dl).__name__}) gave no batch.'
                               f'{once if isinstance(self.dl, Iterator) else ""}')

    def _weight(self) -> Any:
        count = self._count_for_loss(self.xb, self.yb) if self.weight_func else None
        return sample_count(self) if count is None else count

    def _repeat_turn(self) -> None:
        "Run the passes of the `optimize` under way again."

    def log(self, name: str, value: Any, weight: Any = 1, shown: bool = True) -> None:
        "Average a named value over the epoch; `Learner` hands it to its recorder."

    def _backward(self) -> None:
        try:
            with self.contexts('backward'): self.loss_grad.backward(retain_graph=self._retains_graph)
        except RuntimeError as e:
            if self.loss_grad.numel() == 1 and self.loss_grad.requires_grad:
                hint = precision_hint(self.yb, self.model) or loss_hint(self.loss_func, self.pred, self.yb, e)
                if hint: add_note(e, f'The targets are {describe(self.yb)}{hint}')
                raise
            raise LossError(self._why_no_backward()) from e

    def _why_no_backward(self) -> str:
        if self.loss_grad.numel() != 1:
            return (f'The loss has shape {tuple(self.loss_grad.shape)}; one number is needed to learn from. Use '
                    "reduction='mean', or return loss.mean().")
        return ('The loss does not depend on any parameter that requires a gradient. Is the model frozen, or was the '
                'loss detached, computed under no_grad, or turned into a number and back?')

    def _step(self) -> None:
        if not self.opt.takes_closure: self.opt.step(only=self.turn)
        else: self._step_with_closure()

    def _step_with_closure(self) -> None:
        "Let the optimizer evaluate the batch as often as it likes; the first evaluation has been done already."
        before = {name: self.__dict__.get(name) for name in ('pred', 'loss', 'loss_grad')}
        was_known = self.opt.needs_closure

        def evaluate() -> Tensor:
            if not was_known: self._tell('_check_closure')
            self._repeating = True
            self.opt.zero_grad(only=self.turn)
            self._do_passes()
            return self._loss_of_all()

        try: self.opt.step(Closure(evaluate, self._loss_of_all), only=self.turn)
        except BaseException:
            self.opt.clear_state(closures=True)  # half a line search is no state to go on from
            raise
        finally: self._repeating = False
        self.__dict__.update(before)  # what is recorded is of the weights that the batch met

    def _loss_of_all(self) -> Tensor:
        "Return the loss of the batch at hand, in all processes that train together: an optimizer decides by it."
        return self.loss

    def _do_passes(self) -> None:
        "Run forward and backward over the batch, in pieces when `microbatch` is set, without the step."
        if self._turn is not None:
            return self._repeat_turn()
        if self.microbatch: return self._do_pieces(self.microbatch)
        self._forget_pass()
        self._do_pred_loss()
        self._with_events(self._backward, 'backward', CancelBackwardException)








def _tuple_wanted(name: str) -> AttributeError:
    return AttributeError(f'`{name}` is read only: write `self.learn.{name}b = ({name},)`.')


def token_count(learn: Any) -> int:
    "Return the number of tokens of a batch, as `token_func` says or by its `input_ids`; 0 where it has none."
    if learn.token_func is not None: return int(learn.token_func(learn.xb, learn.yb))
    ids = learn.xb[0].get('input_ids') if learn.xb and isinstance(learn.xb[0], Mapping) else None
    return ids.numel() if isinstance(ids, Tensor) else 0


def sample_count(learn: Any) -> int:
    "Return the number of samples of a batch, 0 where it cannot be told."
    try: return count_samples(learn)
    except BatchError: return 0
