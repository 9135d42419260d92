"""The Learner: everything that training needs in one object, and what may be done with it."""
from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

import torch
from fastcore.basics import noop
from fastcore.foundation import L
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from learnkit.callbacks.live_plot import ShowGraph
from learnkit.callbacks.lr_finder import LRSearch, valley
from learnkit.callbacks.progress import ProgressCallback
from learnkit.callbacks.recorder import History, Recorder, recorder_of
from learnkit.core.batch import to_detach
from learnkit.core.contexts import replacing_yield
from learnkit.core.denominator import check_weight_func
from learnkit.core.errors import (
    CallbackError,
    CancelError,
    CancelFitException,
    LossError,
    OptimizerError,
    TimeError,
)
from learnkit.core.html import never_raising
from learnkit.core.model import name_of
from learnkit.core.time import Time, as_time
from learnkit.core.validation import takes, warn_user
from learnkit.data.dataloaders import as_dataloaders, check_loaders
from learnkit.debug.repr import learner_html, learner_text
from learnkit.distributed.strategy import Processes
from learnkit.engine import own_loop
from learnkit.engine.budget import Budget, as_length
from learnkit.engine.callback import SHOWN_ELSEWHERE, MissingAttribute, defined_on_class
from learnkit.engine.checks import (
    check_function,
    check_iteration,
    check_loss,
    check_microbatch,
    check_model,
)
from learnkit.engine.coverage import cover_params, note_params
from learnkit.engine.dispatch import listed
from learnkit.engine.events import LEVELS, LIFECYCLE
from learnkit.engine.freezing import check_trained, make_optimizer
from learnkit.engine.own_loop import EventCheck, own_methods
from learnkit.engine.run import ContextStack, call_each, raise_first
from learnkit.engine.timings import Timings
from learnkit.engine.train_eval import SkipToEpoch, TrainEvalCallback
from learnkit.inference.predict import Predictions
from learnkit.metrics.averages import as_metrics
from learnkit.optim.optimizers import Adam
from learnkit.optim.wrapper import OptimWrapper, trainable_params

if TYPE_CHECKING:
    from learnkit.callbacks.compile import WholeStep
    from learnkit.callbacks.model_summary import Summary
    from learnkit.callbacks.replay import Replay
    from learnkit.debug.explain import Handlers, Trace

__all__ = ['Learner', 'defaults', 'load_learner', 'replacing_yield']

defaults = SimpleNamespace(lr=1e-3, callbacks=[TrainEvalCallback, Recorder, ProgressCallback])
_open_learners: WeakSet[Learner] = WeakSet()  # those whose callbacks are to be closed at interpreter exit

_before_epoch, _after_epoch = ['before_fit', 'before_epoch'], ['after_epoch', 'after_fit']  # for events fired by hand

_NOT_YET = {'pred': 'It exists from the forward pass of a batch on (event after_pred).',
            'loss_grad': 'It exists once the loss of a batch is computed (event after_loss).'}


class Learner(Predictions, Processes):
    """Train `model` on `dls` with `loss_func`: the loop, its callbacks and its state.

    `dls` is a `DataLoaders`, a tuple (train, valid) of any iterables of batches, or one to train on. `loss_func` and
    `metrics` are called with the predictions and the targets; `opt_func` makes the optimizer, any torch class will do;
    `cbs` are callbacks. `learnkit.doc(Learner)` shows every parameter with what it means, `doc(Learner.fit)` those of
    a method. Model and batches go to `dls.device`: a GPU where there is one.

    Whatever the Learner does not have itself is read from the model. `x` and `y` are the inputs and targets of the
    batch, without their tuple when there is one of them.

    The optimizer is what was given: a ready one keeps its groups and options, and a torch class
    trains as in a hand-written loop. Norm layers and biases are left out of weight decay for the
    optimizers by fastai's names (`Adam`, `SGD`), and for every optimizer with `wd_bn_bias=False`;
    with True they decay. Parameters of a `loss_func` that is a module are trained with the last
    group, unless they require no gradients. Optimizers that need a closure, or are switched
    between training and evaluation, are described at `OptimWrapper`.

    Raises `ModelError`, `LoaderError`, `LossError`, `MetricError` or `CallbackError` for what cannot be used as given.

    >>> import torch
    >>> from learnkit.data.dataloaders import DataLoaders
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> learn = Learner(DataLoaders.from_tensors((x, 2 * x), bs=16), nn.Linear(1, 1), nn.MSELoss(), lr=0.1)
    >>> with learn.no_bar(), learn.no_logging(): learn.fit(5)
    >>> len(learn.history)
    5
    """
    _marks_misses = True
    _is_open_for_use = False            # its callbacks are to be closed
    _ran_in: int | None = None          # the process in which it ran since it was last closed
    lr_search: LRSearch | None = None  # what the last `lr_find` has found
    whole_step: WholeStep | None = None  # runs the training step after `compile(step=True)`
    replay_source: Replay | None = None  # the callback that has kept a batch for `replay`
    optimized_loss_sum: Tensor | None = None  # of the losses that `optimize` got in this batch
    n_optimized_losses = 0  # how many they are

    def __init__(
        self,
        dls: Any,                                        # DataLoaders, a (train, valid) tuple of loaders, or a loader
        model: nn.Module,
        loss_func: Callable[..., Any] | None = None,     # f(pred, *targets); None: that of the data, or of the model
        opt_func: Any = Adam,                            # f(params, lr=): a torch.optim class, a partial, a function
        lr: Any = None,                                  # a number, one a group, a slice, or a dict with one an
                                                         # optimizer; None: `defaults.lr`
        splitter: Callable[[nn.Module], Any] = trainable_params,  # gives the model's parameters, or groups of them
        cbs: Any = None,                                 # a callback (or its class), or several
        metrics: Any = None,                             # f(pred, *targets), a Metric, of torchmetrics, or several
        path: str | Path | None = None,                  # folder for files; None: that of `dls`
        model_dir: str | Path = 'models',                # folder for weights, below `path`
        wd: float | None = None,                         # weight decay; None: that of `opt_func`
        wd_bn_bias: bool | None = None,                  # let norms and biases decay; None: see below
        train_bn: bool = True,                           # whether norm layers of frozen groups are trained
        moms: tuple[float, ...] = (0.95, 0.85, 0.95),    # momentum for schedules
        default_cbs: bool = True,                        # add `defaults.callbacks`
        microbatch: int | str | None = None,             # samples a piece at most; 'auto': what memory allows
        weight_func: Callable[..., Any] | str | None = None,  # f(xb, yb): what a batch weighs; 'tokens', 'samples';
                                                         # None: what the loss averages over
        token_func: Callable[..., int] | None = None,    # f(xb, yb): its tokens; None: those of `input_ids`
        size_func: Callable[..., int] | None = None,     # f(xb, yb): its samples; None: as `find_bs` counts them
        eval_every: str | int | Time | None = '1ep',     # when to evaluate: epochs, '500ba', '10m'; None: never
    ) -> None:
        check_model(model)
        super().__init__()
        self.dls, self.model = as_dataloaders(dls), model
        if loss_func is None: loss_func = getattr(getattr(self.dls, 'train_ds', None), 'loss_func', None)
        self.loss_func = loss_func
        check_loss(self.loss_func)
        self.opt_func, self.lr, self.splitter = opt_func, defaults.lr if lr is None else lr, splitter
        self.path = Path(path) if path is not None else Path(getattr(self.dls, 'path', '.'))
        self.model_dir, self.wd, self.wd_bn_bias, self.train_bn, self.moms = model_dir, wd, wd_bn_bias, train_bn, moms
        self.microbatch, self.weight_func = check_microbatch(self, microbatch), check_weight_func(weight_func)
        check_function('size_func', size_func)
        self.token_func, self.size_func, self.eval_every = token_func, size_func, eval_every
        self.logger: Callable[[Any], Any] = print
        self.create_mbar, self.opt = True, None
        self._entered: list[ExitStack] = []
        self._own_lrs: tuple[Any, Any] = None, None  # the `lr` that the optimizer was asked for, and the rates it has
        self._lrs_left: list[float] = []             # the rates as the Learner, or a fit, has left them
        self.metrics = metrics
        self.add_cbs([*(defaults.callbacks if default_cbs else []), *listed(cbs)])
        self('after_create')

    # -- training ------------------------------------------------------------------------------------------------------

    def fit(
        self,
        n_epoch: int | str | Time,       # epochs, or how much of a unit: '2h', '5000ba', '1e6sp'; 0 trains nothing
        lr: Any = None,                  # learning rate for this fit, or a dict by optimizer; None: the Learner's
        wd: float | None = None,         # weight decay for this fit; None: the Learner's
        cbs: Any = None,                 # further callbacks for this fit
        reset_opt: bool = False,         # make a new optimizer
        start_epoch: int = 0,            # skip the epochs before this one
        iteration: int | str | Time | None = None,  # so many epochs are an iteration, with events of its own
        resume: Any = False,             # go on from a checkpoint: True, 'latest', 'best', a path, or a state
    ) -> None:
        """Train for `n_epoch` epochs, or until a budget is used: `fit('90m')`, `fit('5000ba')`.

        A budget ends at the end of a batch; the epoch under way then ends as usual, with its evaluation.

        With `resume=True` the fit goes on from the newest whole checkpoint of its folder (see `Checkpoint`), from that
        very batch and as if it had never stopped, up to `n_epoch` epochs in all; where there is none yet, it starts.
        What the checkpoint says of rates and counters wins over the arguments.

        Raises a `LearnkitError` for bad input before anything has changed. Whatever a callback, the model or the data
        raises comes out as it is, with a note of where, after every callback's `cleanup`; the Learner can fit again.

        >>> from learnkit.testing import synth_learner
        >>> with synth_learner(n_train=10).no_bar() as learn: learn.fit(2); learn.fit('15ba')
        >>> [(row['fit'], row['epoch']) for row in learn.history], learn.time.ba
        ([(0, 0), (0, 1), (1, 0), (1, 1)], 35)
        """
        __tracebackhide__ = True
        per_iteration = check_iteration(iteration)
        epochs, budget = as_length(self, n_epoch, start_epoch, per_iteration)
        check_loaders(self.dls)
        own = [SkipToEpoch(start_epoch)] * bool(start_epoch) + ([Budget(budget)] if budget else [])
        checks = [EventCheck()] if own_methods(self) else []
        with self.added_cbs([*listed(cbs), *own, *checks, *self.evaluations.begin(self, per_iteration)]):
            found = self._find_checkpoint(resume)
            self._prepare_opt(lr, wd, reset_opt)
            self.replay_source = None
            with self._training_weights(), self.strategy.run(self, 'fit'):
                self.n_epoch, self.epochs_per_iteration, self.run.stopping = epochs, per_iteration, False
                self.timings = Timings()
                self._begin_resume(found)
                self._with_events(self._do_fit, 'fit', CancelFitException, self._end_cleanup)

    def fit_until(
        self,
        total: str | int | Time,   # what this Learner is to have trained in all: epochs, or any other unit
        **kwargs: Any,             # more for `fit`
    ) -> None:
        """Train until `total` is reached, over all fits of this Learner; nothing where it is reached already.

        >>> from learnkit.testing import synth_learner
        >>> with synth_learner().no_bar() as learn: learn.fit(2); learn.fit_until('5ep')
        >>> len(learn.history)
        5
        """
        total = as_time(total, 'ep')
        if total.unit == 'dur': raise TimeError(f'fit_until({str(total)!r}): a share of what? Give epochs, or hours.')
        left = total.value - self.finished(total.unit)
        if left > 0: self.fit(Time(left, total.unit), **kwargs)

    def fit_one_cycle(
        self,
        n_epoch: int,
        lr_max: Any = None,  # the highest rate: a number, one a group, a slice; None: the Learner's
        div: float = 25.0,  # the fit starts at `lr_max / div`
        div_final: float = 1e5,  # and ends at `lr_max / div_final`
        pct_start: float = 0.25,  # the share of the fit after which the rate is highest
        wd: float | None = None,  # weight decay; None: the Learner's
        moms: tuple[float, ...] | None = None,  # momentum at the start, the highest rate, the end
        cbs: Any = None,  # further callbacks for this fit
        reset_opt: bool = False,  # make a new optimizer
        start_epoch: int = 0,  # skip the epochs before this one
        resume: Any = False,  # go on from a checkpoint, as in `fit`
    ) -> None:
        """Train with a rate that rises and falls once (Smith, 2018), each along half a cosine.

        Momentum mirrors the rate. `moms` are the Learner's where none are given, unless the
        optimizer has no momentum, or one of 0: that stays.

        Raises what `fit` raises, `ScheduleError` for a cycle that cannot be followed, and
        `OptimizerError` for a wrong number of rates.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner(n_train=4)
        >>> with learn.no_bar(): learn.fit_one_cycle(1, 0.1, pct_start=0.5)
        >>> [round(lr, 4) for lr in learn.recorder.lrs]
        [0.004, 0.052, 0.1, 0.05]
        """
        from learnkit.callbacks.schedule import fit_one_cycle

        fit_one_cycle(
            self,
            n_epoch,
            lr_max,
            div,
            div_final,
            pct_start,
            wd,
            moms,
            cbs,
            reset_opt,
            start_epoch,
            resume,
        )

    def fit_flat_cos(
        self,
        n_epoch: int,
        lr: Any = None,  # the flat rate: a number, one a group, or a slice; None: the Learner's
        div_final: float = 1e5,  # the fit ends at `lr / div_final`
        pct_start: float = 0.75,  # the share of the fit after which the rate falls
        wd: float | None = None,  # weight decay; None: the Learner's
        cbs: Any = None,  # further callbacks for this fit
        reset_opt: bool = False,  # make a new optimizer
        start_epoch: int = 0,  # skip the epochs before this one
        resume: Any = False,  # go on from a checkpoint, as in `fit`
    ) -> None:
        """Train at a flat rate that falls along half a cosine at the end.

        Raises as `fit_one_cycle` does.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner(n_train=4)
        >>> with learn.no_bar(): learn.fit_flat_cos(1, 0.1, pct_start=0.5)
        >>> [round(lr, 4) for lr in learn.recorder.lrs]
        [0.1, 0.1, 0.1, 0.05]
        """
        from learnkit.callbacks.schedule import fit_flat_cos

        fit_flat_cos(
            self, n_epoch, lr, div_final, pct_start, wd, cbs, reset_opt, start_epoch, resume
        )

    def fit_sgdr(
        self,
        n_cycles: int,
        cycle_len: int,  # epochs of the first cycle
        lr_max: Any = None,  # the rate at each start, as in `fit_one_cycle`; None: the Learner's
        cycle_mult: int = 2,  # how many times as long each cycle is as the one before
        cbs: Any = None,  # further callbacks for this fit
        reset_opt: bool = False,  # make a new optimizer
        wd: float | None = None,  # weight decay; None: the Learner's
        start_epoch: int = 0,  # skip the epochs before this one
        resume: Any = False,  # go on from a checkpoint, as in `fit`
    ) -> None:
        """Train in cycles, in each of which the rate falls to 0 along half a cosine.

        Source: Loshchilov and Hutter, 2017. Raises as `fit_one_cycle` does.

        >>> from learnkit.testing import synth_learner
        >>> with synth_learner(n_train=2).no_bar() as learn: learn.fit_sgdr(2, 1, 0.1)
        >>> [round(lr, 4) for lr in learn.recorder.lrs]
        [0.1, 0.05, 0.1, 0.0854, 0.05, 0.0146]
        """
        from learnkit.callbacks.schedule import fit_sgdr

        fit_sgdr(
            self, n_cycles, cycle_len, lr_max, cycle_mult, cbs, reset_opt, wd, start_epoch, resume
        )

    def fine_tune(
        self,
        epochs: Any,  # epochs with all groups, or a budget such as '2h'
        base_lr: float = 2e-3,  # highest rate of the last group; half of it once all are trained
        freeze_epochs: int = 1,  # epochs before, with the last group alone
        lr_mult: float = 100,  # then the first group's rate is the last one's divided by it
        pct_start: float = 0.3,  # as in `fit_one_cycle`, for the epochs with all groups
        div: float = 5.0,  # likewise
        div_final: float = 1e5,  # from here on: as in `fit_one_cycle`, for both fits
        wd: float | None = None,
        moms: tuple[float, ...] | None = None,
        cbs: Any = None,
        reset_opt: bool = False,
        start_epoch: int = 0,  # skip the epochs before it, and those with the last group alone
        resume: Any = False,  # go on from a checkpoint of either fit, as in `fit`
    ) -> None:
        """Train the last group alone, then all groups with graded rates, in one cycle each.

        Groups come from the Learner's `splitter`: the body of a model that was trained before, and
        its new head. Raises as `fit_one_cycle` does.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner(splitter=lambda m: [[m.a], [m.b]])
        >>> with learn.no_bar(): learn.fine_tune(2, freeze_epochs=1)
        >>> [(row['fit'], row['epoch']) for row in learn.history]
        [(0, 0), (1, 0), (1, 1)]
        """
        from learnkit.callbacks.schedule import fine_tune

        fine_tune(
            self,
            epochs,
            base_lr,
            freeze_epochs,
            lr_mult,
            pct_start,
            div,
            div_final,
            wd,
            moms,
            cbs,
            reset_opt,
            start_epoch,
            resume,
        )

    def lr_find(
        self,
        start_lr: Any = 1e-7,  # the first rate, or one a param group
        end_lr: Any = 10,  # the one that `num_it` batches lead up to
        num_it: int = 100,  # batches; below 6 count as 6, as in fastai
        stop_div: bool = True,  # end when the smoothed loss is four times its least value
        show_plot: bool = True,  # draw the loss over the rates
        suggest_funcs: Any = valley,  # f(lrs, losses, num_it) -> (rate, point), several, or None
        ax: Any = None,  # matplotlib axes to draw in; None: a new figure
    ) -> Any:
        """Train a little with a growing rate, undo it, and return suggested rates (Smith, 2017).

        The rates are a named tuple. Everything is afterwards as it was: weights, buffers,
        optimizer, random generators, loaders, history, counters and the attributes of every
        callback, also when the search is interrupted. Nothing is written to disk. Callbacks with
        `remove_on_find` are left out; others run as in a fit. `learn.lr_search` keeps the rates and
        losses, and `learn.recorder.plot_lr_find()` draws them again. The search needs memory for a
        second copy of the weights and the optimizer's state.

        Raises `ScheduleError` for rates that do not grow, `OptionError` for what cannot suggest,
        and `LossError` when the loss was not finite from the beginning.

        >>> from learnkit.callbacks.lr_finder import steep, valley
        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner()
        >>> with learn.no_bar():
        ...     rates = learn.lr_find(num_it=30, show_plot=False, suggest_funcs=(valley, steep))
        >>> rates._fields, learn.opt, len(learn.lr_search.lrs) <= 30
        (('valley', 'steep'), None, True)
        """
        from learnkit.callbacks.lr_finder import lr_find

        return lr_find(self, start_lr, end_lr, num_it, stop_div, show_plot, suggest_funcs, ax)

    def _prepare_opt(self, lr: Any, wd: float | None, reset_opt: bool) -> None:
        if reset_opt or self.opt is None or self._opt_is_of_another_model(): self.create_opt()
        elif not isinstance(self.opt, OptimWrapper): self.opt = OptimWrapper(opt=self.opt)  # assigned by hand
        if self._opt_is_of_another_model():
            raise OptimizerError(f'No parameter of this {type(self.model).__name__} is in the optimizer, which would '
                                 'learn nothing. Make it of `learn.model.parameters()`, or pass its class.')
        self._cover_params()
        check_trained(self.opt, self.model)
        wd = self.wd if wd is None else wd
        if lr is None:
            lr = self._lrs_to_start_with()
        hypers = {'lr': lr, 'wd': wd}
        self.opt.set_hypers(**{name: value for name, value in hypers.items() if value is not None})
        self._lrs_left = rates_of(self.opt)
        self.opt.zero_grad()

    def _cover_params(self) -> None:
        "Bring the optimizer up to date with the parameters that there are now."
        if isinstance(self.opt, OptimWrapper):
            cover_params(self)

    @contextmanager
    def _training_weights(self) -> Iterator[None]:
        "Let the outermost fit begin at the weights that are trained, and end at those to predict with."
        if self.run.depth:
            yield
            return
        self.opt.train()
        try:
            yield
        finally:
            self.opt.eval()
            self._lrs_left = rates_of(self.opt)

    def _lrs_to_start_with(self) -> Any:
        """Return the rates of a fit that was given none.

        They are the Learner's, or what the optimizer brought, with the rates of groups that came
        later. What was set by hand since the last fit stays; what a schedule left does not.
        """
        asked, own = self._own_lrs
        now = rates_of(self.opt)
        if not now:
            return None
        if not own or asked is not self.lr:
            return self.lr
        n = len(own)
        if not callable(self.opt_func) and now[:n] != self._lrs_left[:n]:
            own = now[:n]
        self._own_lrs = asked, own
        return [*own, *now[n:]]

    def _opt_is_of_another_model(self) -> bool:
        "Tell whether `model` was replaced, so that the optimizer has none of its parameters."
        own = {id(p) for p in self.model.parameters()}
        return not any(id(p) in own for g in self.opt.param_groups for p in g['params'])

    def create_opt(self) -> None:
        "Make the optimizer. Rates that `opt_func` brings itself win over `lr`, until `lr` is set again."
        if isinstance(self.opt_func, partial) and 'lr' in self.opt_func.keywords: self.lr = self.opt_func.keywords['lr']
        opt = make_optimizer(self.opt_func, self.model, self.lr, self.splitter, self.wd_bn_bias, self.train_bn,
                             last=self.opt, loss_func=self.loss_func)
        if self.opt is not None:
            if opt is not self.opt: self.counters.steps += getattr(self.opt, 'n_steps', 0)
            if not callable(self.opt_func): opt.clear_state()  # it is the same one, to be started anew
        self.opt = opt
        note_params(self, is_ready=not callable(self.opt_func))
        lrs = self._lrs_left = rates_of(opt)
        brought = isinstance(self.lr, (int, float)) and any(lr != self.lr for lr in lrs)
        if brought and not callable(self.opt_func): self.lr = lrs[0] if len(set(lrs)) == 1 else lrs
        is_own = brought or (not callable(self.opt_func) and lrs)
        self._own_lrs = (self.lr, lrs) if is_own else (None, None)

    # -- freezing, precision and compilation -------------------------------------------------------

    def freeze_to(
        self,
        n: int,  # the first group that is trained; from -1 on counted from the end
    ) -> None:
        """Freeze the groups before group `n`, and train those from there on.

        The groups come from the Learner's `splitter`. The parameters of a frozen group require no
        gradient; its norm layers are trained all the same unless `train_bn` is False.
        """
        from learnkit.engine.freezing import freeze_to

        freeze_to(self, n)

    def freeze(self) -> None:
        """Freeze all groups but the last.

        With one group alone nothing is frozen, as in fastai, and a warning says so.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner(splitter=lambda m: [[m.a], [m.b]])
        >>> learn.freeze()
        >>> learn.model.a.requires_grad, learn.model.b.requires_grad
        (False, True)
        """
        from learnkit.engine.freezing import freeze

        freeze(self)

    def unfreeze(self) -> None:
        """Train all groups.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner(splitter=lambda m: [[m.a], [m.b]])
        >>> learn.freeze(); learn.unfreeze()
        >>> all(p.requires_grad for p in learn.model.parameters())
        True
        """
        from learnkit.engine.freezing import unfreeze

        unfreeze(self)

    def to_bf16(self) -> Self:
        """Compute the forward pass in bfloat16 from now on: see `MixedPrecision`.

        >>> from learnkit.testing import synth_learner
        >>> synth_learner(default_cbs=False).to_bf16().to_bf16().cbs
        [MixedPrecision(amp_mode='bf16')]
        """
        from learnkit.callbacks.mixed_precision import to_bf16

        return to_bf16(self)

    def to_fp16(
        self,
        **scaler: Any,  # `init_scale`, `growth_factor`, `backoff_factor`, `growth_interval`
    ) -> Self:
        """Compute the forward pass in float16 from now on, with scaled gradients.

        The options go to the scaler: see `MixedPrecision`.
        """
        from learnkit.callbacks.mixed_precision import to_fp16

        return to_fp16(self, **scaler)

    def to_fp32(self) -> Self:
        "Compute everything in the precision of the weights: without `MixedPrecision`."
        from learnkit.callbacks.mixed_precision import to_fp32

        return to_fp32(self)

    def compile(
        self,
        step: bool = False,  # the whole training step, not the model alone
        **options: Any,  # for torch.compile: `mode`, `dynamic`, `backend`, `options`
    ) -> Self:
        """Compile the model in place or, with `step=True`, the whole training step.

        The model's state dict keeps its keys. The whole step begins as usual; once the optimizer
        has its state, compiled and ordinary steps take turns, timed, and the faster goes on.
        `explain_step` says which runs and why. It is made for torch's SGD, Adam and AdamW and
        learnkit's own, one optimizer, no microbatches. After it `pred` and `loss_grad` are
        detached; gradients are never attached to parameters.

        A batch of another shape runs as usual, until so many come in a row that it is compiled
        again for varying shapes. Random numbers are drawn as ordinarily (inductor's
        `fallback_random`), which dropout masks depend on.

        >>> from learnkit.testing import synth_learner
        >>> synth_learner().compile(step=True, backend='eager').explain_step()
        'The ordinary step runs: compiling comes after the next training batch.'
        """
        from learnkit.callbacks.compile import compile_learner

        return compile_learner(self, step, **options)

    def explain_step(self) -> str:
        """Describe which training step runs, the compiled or the ordinary one, and why.

        >>> from learnkit.testing import synth_learner
        >>> synth_learner().explain_step()
        'The ordinary step runs: `learn.compile(step=True)` was not called.'
        """
        from learnkit.callbacks.compile import explain_step

        return explain_step(self)

    # -- the verbs of a loop of your own -----------------------------------------------------------

    def forward(
        self,
        f: Callable[..., Any],  # the model, a part of it, or a function that calls some
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call `f(*args, **kwargs)` as a forward pass, and return what it gave.

        `before_pred` comes first; what callbacks put around a forward pass (autocast) is around
        `f`; in `after_pred` the output is `pred`, and what callbacks have made of it is returned:
        with mixed precision, float32. `pred` stays the output of the last pass; set `self.pred` at
        the end to what metrics are to see.

        With several processes modules are called themselves, without `DistributedDataParallel`:
        gradients are averaged before each step.

        >>> import torch
        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner()
        >>> learn.forward(learn.model, torch.ones(3, 1)).shape
        torch.Size([3, 1])
        """
        __tracebackhide__ = True
        return own_loop.forward(self, f, *args, **kwargs)

    def compute_loss(
        self,
        pred: Any,
        *targets: Any,  # none: the targets of the batch, `self.yb`
    ) -> Any:
        """Return `loss_func(pred, *targets)`, computed in the contexts of a forward pass.

        In a loop of your own `MixUp` and `CutMix` blend the loss only here. Raises `LossError`
        without a `loss_func`.

        >>> import torch
        >>> from learnkit.testing import synth_learner
        >>> float(synth_learner().compute_loss(torch.zeros(2), torch.ones(2)))
        1.0
        """
        __tracebackhide__ = True
        return own_loop.compute_loss(self, pred, *targets)

    def optimize(
        self,
        loss: Tensor | Mapping[str, Tensor] | Callable[[], Any],  # one number, named parts, or f()
        only: str | int | None = None,  # the name or place of the optimizer that steps; None: all
        retain_graph: bool = False,  # keep the graph, for another loss that shares a part of it
    ) -> bool:
        """Take a step with the gradient of a loss, and return False where no step was taken.

        `after_loss`, backward, `before_step`, step, `after_step`, with their events and contexts,
        and then the gradients are cleared. With `only`, all of this is about one of several
        optimizers: its gradients are unscaled, clipped and cleared, and gradients of the others'
        parameters stay as they were. `GradientAccumulation` counts the batch's samples at each
        call, for each optimizer on its own, and a call that comes to no step returns False.

        Each call counts as one step (`learn.time.st`). A schedule moves once a batch. `EMA`
        averages after each step: `EMA(every=2)` for once a batch with two. The batch's `loss`
        becomes the mean of those that were optimized in it; `self.log('critic_loss', loss)` makes a
        column of one.

        Give a function for what computes the loss more than once: an optimizer such as LBFGS, and
        `SAM`.

        Raises `OptimizerError` for an optimizer that is not there, and for LBFGS with a loss that
        is not a function; `FitError` outside of training; `LossError` for a loss that nothing can
        be learned from.

        >>> from learnkit import Learner, SGD
        >>> from learnkit.testing import synth_dls, RegModel
        >>> class Own(Learner):
        ...     def train_batch(self):
        ...         loss = self.compute_loss(self.forward(self.model, self.x))
        ...         self.optimize(loss)
        >>> learn = Own(synth_dls(), RegModel(), nn.MSELoss(), opt_func=SGD)
        >>> with learn.no_bar(): learn.fit(1)
        >>> learn.time.st
        10
        """
        __tracebackhide__ = True
        return own_loop.optimize(self, loss, only, retain_graph)

    def report_loss(
        self,
        loss: Tensor | Mapping[str, Tensor],  # one number, or a dict of named parts
    ) -> None:
        """Set the loss of the batch, and fire `after_loss`: for an `evaluate_batch` of your own.

        >>> import torch
        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner()
        >>> learn.report_loss(torch.tensor(2.))
        >>> learn.loss
        tensor(2.)
        """
        own_loop.report_loss(self, loss)

    def repeat_turn(self) -> None:
        own_loop.repeat_turn(self)

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def metrics(self) -> L:
        "The metrics; assign functions, Metrics or torchmetrics objects."
        return self._metrics

    @metrics.setter
    def metrics(self, metrics: Any) -> None: self._metrics = as_metrics(metrics)

    @property
    def smooth_loss(self) -> Any:
        "The smoothed training loss of the last step, as a 0-dim tensor."
        value = self._recorder('smooth_loss').smooth_loss.value
        if value is None: raise MissingAttribute('smooth_loss', self, why='It exists from the first training step on.')
        return value

    @property
    def history(self) -> History:
        "What the Recorder has kept: one dict an epoch, over all fits."
        return self._recorder('history').history

    def _recorder(self, wanted: str) -> Recorder:
        if (recorder := recorder_of(self)) is not None: return recorder
        raise MissingAttribute(wanted, self, why='It comes from the Recorder: `learn.add_cb(Recorder())`.')

    def log(self, name: str, value: Any, weight: Any = 1, shown: bool = True) -> None:
        """Average a named value over the epoch, on its device; it becomes a column of the history.

        With `weight=None` the latest value counts, and no mean is taken. `shown=False` leaves it out of the table that
        is printed. What is logged in evaluation gets the prefix `valid_`, or the loader's name and `/`. It reaches
        every callback with a method `receive_log(name, value, weight, shown)`: the Recorder, and each logger.

        >>> from learnkit import Callback
        >>> from learnkit.testing import synth_learner
        >>> def note(cb): cb.learn.log('bs', len(cb.x))
        >>> with synth_learner(cbs=Callback(before_batch=note)).no_bar() as learn: learn.fit(1)
        >>> learn.history[0]['bs'], learn.history[0]['valid_bs']
        (16.0, 16.0)
        """
        if self.run.evaluating or 'validate' in self.run.levels:
            name = f'valid_{name}' if self.dl_name in ('valid', 'train') else f'{self.dl_name}/{name}'
        for cb in self.callbacks:
            if receive := getattr(type(cb), 'receive_log', None): receive(cb, name, value, weight, shown)

    def show_training_loop(self) -> None:
        "Print the lifecycle, with the callbacks that run at each event."
        training = self.training
        for m in LIFECYCLE:
            if m.event in ('before_train', 'before_validate'): training = m.event == 'before_train'
            cbs = [] if m.is_note else self.ordered_cbs(m.event, training)
            print(f'{"  " * m.depth}{m.event if m.is_note else f"- {m.event:<18}"}{f" {cbs}" if cbs else ""}'.rstrip())

    def to_detach(self, b: Any, cpu: bool = True, gather: bool = True) -> Any:
        "Detach a nested batch, by the loader's own method where it has one."
        own = getattr(self.dl, 'to_detach', None)
        return own(b, cpu, gather) if own else to_detach(b, cpu)

    # -- looking inside ----------------------------------------------------------------------------

    def summary(self) -> Summary:
        """Describe the model, layer by layer, and how it is trained.

        The notes name the optimizer, the loss, frozen groups and callbacks. The shapes come from
        one batch of the training loader (in the middle of a fit, the current one), which goes
        through the model and its callbacks as in prediction. Nothing is disturbed: RNGs, loaders,
        buffers such as BatchNorm's, modes and lazy modules are afterwards as they were.

        Raises `LoaderError` when every loader is an iterator, of which a batch would be lost.

        >>> from learnkit.testing import synth_learner
        >>> synth_learner().summary()
        RegModel: 16 x 1 -> 16 x 1
        ----------------------------------------------------
        Layer    Type      Output shape  Parameters  Trained
        ----------------------------------------------------
        (model)  RegModel  16 x 1                 2  yes
        ----------------------------------------------------
        Total params: 2
        ...
        """
        from learnkit.callbacks.model_summary import summarize_learner

        return summarize_learner(self)

    def explain(
        self,
        event_name: str,  # an event
    ) -> Handlers:
        """List who runs at an event, in order, each with the file and line of its function.

        >>> from learnkit.testing import synth_learner
        >>> [h.function for h in synth_learner().explain('after_epoch')]
        ['TrainEvalCallback.after_epoch', 'Recorder.after_epoch']
        """
        from learnkit.debug.explain import explain

        return explain(self, event_name)

    def metric_names(self) -> dict[str, str]:
        """Return every name that is recorded or logged, with what it means.

        >>> from learnkit.testing import synth_learner
        >>> synth_learner().metric_names()
        {'train_loss': 'training loss, mean of the epoch', 'valid_loss': 'a column of the history'}
        """
        from learnkit.debug.explain import list_metric_names

        return list_metric_names(self)

    def trace(self) -> AbstractContextManager[Trace]:
        """Record, for the length of a context, which callback changed what.

        Batch, loss, weights, hyper-parameters and random numbers are compared before and after each
        handler: this is for looking, and slow. A callback that calls itself an observer and changed
        something is warned of by name.

        >>> from learnkit import Callback
        >>> from learnkit.testing import synth_learner
        >>> def double(cb): cb.learn.xb = tuple(2 * x for x in cb.xb)
        >>> learn = synth_learner(n_train=1, cbs=Callback(before_batch=double))
        >>> with learn.no_bar(), learn.no_logging(), learn.trace() as changes: learn.fit(1)
        >>> print(next(c for c in changes if c.what == 'xb'))
        epoch 0, batch 0, before_batch: Callback changed xb
        """
        from learnkit.debug.explain import trace

        return trace(self)

    def replay(
        self,
        detect_anomaly: bool = False,  # let autograd name the operation whose gradient is NaN
    ) -> Tensor | None:  # the loss, when the batch goes through
        """Repeat the batch in which the last run failed, or the last training batch.

        `Replay()` has to be a callback. It is the same batch with the same random numbers and
        modes, in microbatches and precision as before, all its events fire, and what was raised is
        raised again, at the same place: set a breakpoint, run `%debug`, change the model or a
        callback, and try again. With `detect_anomaly` autograd also says where that operation was
        called. Whether it raises or not, everything is restored: weights, buffers, optimizer,
        counters, history, callbacks, random numbers. The weights are the Learner's current ones.

        The callbacks of the run take part, also those that were given to `fit`, but for those that
        only track, save or stop (`remove_on_find`), unless one of them raised. Their `before_fit`
        and `before_epoch` fire first, and their `cleanup` in the end. Switch one off with
        `run = False`.

        Raises `FitError` when there is no batch to repeat.

        >>> from learnkit import Replay
        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner()
        >>> with learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=Replay())
        >>> with learn.no_logging(): learn.replay().shape
        torch.Size([])
        """
        from learnkit.callbacks.replay import replay

        return replay(self, detect_anomaly)

    # -- contexts ------------------------------------------------------------------------------------------------------

    def no_logging(self) -> Any:
        "Return a context in which no rows are shown."
        return replacing_yield(self, 'logger', noop)

    def no_mbar(self) -> Any:
        "Return a context without the bar over the epochs."
        return replacing_yield(self, 'create_mbar', False)

    @contextmanager
    def no_bar(self) -> Iterator[Self]:
        "Show no progress for the length of a context: no bars, no graph and, unless `logger` was set, no rows."
        rows = self.no_logging() if self.logger is print else nullcontext()
        with self.removed_cbs([ProgressCallback, ShowGraph]), rows: yield self

    def loss_not_reduced(self) -> Any:
        "Return a context in which the loss is computed for each sample."
        if hasattr(self.loss_func, 'reduction'): return replacing_yield(self.loss_func, 'reduction', 'none')
        if self.loss_func is None: return replacing_yield(self, 'loss_func', None)
        if not takes(self.loss_func, 'reduction'):
            raise LossError(f'{name_of(self.loss_func)} cannot give the loss of each sample: it has no `reduction`. '
                            "Give it that keyword, 'none' for one number a sample.")
        return replacing_yield(self, 'loss_func', partial(self.loss_func, reduction='none'))

    def validation_context(self, cbs: Any = None, inner: bool = False) -> ExitStack:
        "Return a context for validating by hand: no rows, no epoch bar and, unless `inner`, the events around it."
        return ContextStack([self.no_logging, self.no_mbar, lambda: self.lock, partial(self.added_cbs, cbs),
                          *([] if inner else [self._around])])

    @contextmanager
    def _around(self) -> Iterator[Self]:
        "Fire the events around a validation: before_fit, before_epoch ... after_epoch, after_fit."
        with self.strategy.run(self, ''), self._level('fit'), self._level('epoch'): yield self

    @contextmanager
    def _level(self, event_type: str) -> Iterator[None]:
        "Wrap a with-block as `_with_events` wraps a function."
        level, outer, cancelled = LEVELS[event_type], self.run.levels, False
        self.run.levels = (*outer, event_type)
        try:
            try: self(level.before)
            except level.exception as e:
                raise CancelError(f'{type(e).__name__} in {level.before}: a with-block cannot be skipped.') from e
            yield
        except level.exception: cancelled = True
        finally: self.run.levels = outer
        if cancelled: self(level.after_cancel)
        self(level.after)

    def __copy__(self) -> Self:
        raise CallbackError('A Learner cannot share its callbacks with a copy: use copy.deepcopy.')

    def __enter__(self) -> Self:
        stack = ExitStack()
        stack.enter_context(self._around())
        self._entered.append(stack)
        return self

    def __exit__(self, *exc_info: Any) -> bool | None:
        error: BaseException | None = exc_info[1]
        try: swallowed = self._entered.pop().__exit__(*exc_info)
        except BaseException as e: error, swallowed = e, False
        raised = [] if self.run.depth else self._close()
        if error is exc_info[1]: raise_first(None if swallowed else error, raised)
        else: raise_first(error, raised); raise error  # type: ignore[misc]  # it was set above
        return swallowed

    def _open_for_use(self) -> None:
        _open_learners.add(self)
        self._is_open_for_use = True  # a WeakSet has lost the Learner by the time of `__del__`
        if self.run.depth:
            self._ran_in = os.getpid()

    def close(self) -> None:
        """Let every callback close what it holds open; a second call does nothing, until the Learner is used again.

        A Learner that ran and is dropped without it is closed when it is garbage-collected, others at interpreter exit.
        """
        raise_first(None, self._close())

    def _close(self) -> list[BaseException]:
        self.replay_source = self.passes.stream = None
        if not self._is_open_for_use: return []
        _open_learners.discard(self)
        self._is_open_for_use, self._ran_in = False, None
        return call_each(self, 'close') + call_each(self, 'post_close')

    def __del__(self) -> None:
        """Close the callbacks of a Learner that ran and was dropped; errors become warnings.

        Nothing happens at interpreter exit, which has closed every Learner, and in a forked process.
        """
        if sys.is_finalizing() or self._ran_in != os.getpid():
            return
        # garbage is collected anywhere, for example within torch.export, which traces what tensors do
        with _disable_current_modes():
            raised = self._close()
        for e in raised:
            warn_user(f'{type(e).__name__} while a Learner that was dropped was closed: {e} '
                      f'{" ".join(getattr(e, "__notes__", ()))}. Call `learn.close()` to have it raised.')

    # -- attributes of the model and the callbacks ---------------------------------------------------------------------

    if not TYPE_CHECKING:
        def __getattr__(self, name):
            if name.startswith(('__', *SHOWN_ELSEWHERE)) or name in _NOT_YET or 'model' not in self.__dict__:
                raise MissingAttribute(name, self, why=_NOT_YET.get(name, ''))
            if defined_on_class(self, name): return object.__getattribute__(self, name)  # raises its own error again
            model = self.model
            try: return getattr(model, name)
            except AttributeError:
                if defined_on_class(model, name): return object.__getattribute__(model, name)
            raise MissingAttribute(name, self, model)

    def __dir__(self) -> list[str]: return sorted({*super().__dir__(), *dir(self.model)})

    def __repr__(self) -> str: return learner_text(self)

    @never_raising
    def _repr_html_(self) -> str: return learner_html(self)


def rates_of(opt: OptimWrapper) -> list[float]:
    "Return the learning rate of each group that has one, as a plain number."
    return [float(h['lr']) for h in opt.hypers if 'lr' in h]


@atexit.register
def _close_all() -> None:
    "Close the callbacks of every Learner that is still there."
    raise_first(None, [e for learn in list(_open_learners) for e in learn._close()])


def load_learner(
    path: str | Path,                              # written by `learn.save_learner`
    model: nn.Module | Callable[..., nn.Module] | None = None,  # the model, or what builds it from its configuration
    dls: Any = None,                               # data, as for `Learner`; None: predict on given loaders
    loss_func: Callable[..., Any] | None = None,   # as for `Learner`
    device: torch.device | str | None = None,      # without `dls`: where it runs; None: a GPU if there is one
    cpu: bool = False,                             # fastai's way to say `device='cpu'`
    **kwargs: Any,                                 # more for `Learner`, in place of what the file says
) -> Learner:
    """Make a Learner with the weights and options of a file, ready to predict, validate or train.

    The file holds no code, so loading it is safe whoever it comes from; the model's code comes from `model`: a class or
    function, called with the configuration that was given to `save_learner`, or a model that is ready. Without
    `dls`, loaders are given to each call: `learn.get_preds(dl=...)`; `learn.dls.vocab` has the class names.

    Raises `OptionError` without `model`, `WeightsError` for a file that is damaged, is no such file, or does not fit
    the model (all differences listed, the model unchanged), and `ModelError` when `model` builds none.

    >>> import tempfile
    >>> x = torch.ones(8, 3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     learn = Learner([(x, x[:, :2])], nn.Linear(3, 2), nn.MSELoss(), path=folder)
    ...     path = learn.save_learner('net.pth', in_features=3, out_features=2)
    ...     again = load_learner(path, model=nn.Linear, loss_func=nn.MSELoss(), cpu=True)
    >>> torch.equal(again.model.weight, learn.model.weight)
    True
    """
    from learnkit.checkpoint.exchange import build_learner

    where = 'cpu' if cpu else device
    return build_learner(Learner, Path(path), model, dls, loss_func, where, **kwargs)
