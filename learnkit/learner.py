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
from learnkit.checkpoint.state import begin_resume, find_checkpoint
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
from learnkit.engine.loop import Loop
from learnkit.engine.own_loop import EventCheck, own_methods
from learnkit.engine.run import ContextStack, call_each, raise_first
from learnkit.engine.timings import Timings
from learnkit.engine.train_eval import SkipToEpoch, TrainEvalCallback
from learnkit.metrics.averages import as_metrics
from learnkit.optim.optimizers import Adam
from learnkit.optim.wrapper import OptimWrapper, trainable_params

if TYPE_CHECKING:
    from learnkit.callbacks.compile import WholeStep
    from learnkit.callbacks.model_summary import Summary
    from learnkit.callbacks.replay import Replay
    from learnkit.checkpoint.resume_check import ResumeCheck
    from learnkit.debug.explain import Handlers, Trace
    from learnkit.inference.stream import PredictionStream

__all__ = ['Learner', 'defaults', 'load_learner', 'replacing_yield']

defaults = SimpleNamespace(lr=1e-3, callbacks=[TrainEvalCallback, Recorder, ProgressCallback])
_open_learners: WeakSet[Learner] = (
    WeakSet()
)  # those whose callbacks are to be closed at interpreter exit

_before_epoch, _after_epoch = (
    ['before_fit', 'before_epoch'],
    ['after_epoch', 'after_fit'],
)  # for events fired by hand

_NOT_YET = {
    'pred': 'It exists from the forward pass of a batch on (event after_pred).',
    'loss_grad': 'It exists once the loss of a batch is computed (event after_loss).',
}


class Learner(Loop):
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
    _is_open_for_use = False  # its callbacks are to be closed
    _ran_in: int | None = None  # the process in which it ran since it was last closed
    lr_search: LRSearch | None = None  # what the last `lr_find` has found
    whole_step: WholeStep | None = None  # runs the training step after `compile(step=True)`
    replay_source: Replay | None = None  # the callback that has kept a batch for `replay`
    optimized_loss_sum: Tensor | None = None  # of the losses that `optimize` got in this batch
    n_optimized_losses = 0  # how many they are

    def __init__(
        self,
        dls: Any,  # DataLoaders, a (train, valid) tuple of loaders, or a loader
        model: nn.Module,
        loss_func: Callable[..., Any]
        | None = None,  # f(pred, *targets); None: that of the data, or of the model
        opt_func: Any = Adam,  # f(params, lr=): a torch.optim class, a partial, a function
        lr: Any = None,  # a number, one a group, a slice, or a dict with one an
        # optimizer; None: `defaults.lr`
        splitter: Callable[
            [nn.Module], Any
        ] = trainable_params,  # gives the model's parameters, or groups of them
        cbs: Any = None,  # a callback (or its class), or several
        metrics: Any = None,  # f(pred, *targets), a Metric, of torchmetrics, or several
        path: str | Path | None = None,  # folder for files; None: that of `dls`
        model_dir: str | Path = 'models',  # folder for weights, below `path`
        wd: float | None = None,  # weight decay; None: that of `opt_func`
        wd_bn_bias: bool | None = None,  # let norms and biases decay; None: see below
        train_bn: bool = True,  # whether norm layers of frozen groups are trained
        moms: tuple[float, ...] = (0.95, 0.85, 0.95),  # momentum for schedules
        default_cbs: bool = True,  # add `defaults.callbacks`
        microbatch: int | str | None = None,  # samples a piece at most; 'auto': what memory allows
        weight_func: Callable[..., Any]
        | str
        | None = None,  # f(xb, yb): what a batch weighs; 'tokens', 'samples';
        # None: what the loss averages over
        token_func: Callable[..., int]
        | None = None,  # f(xb, yb): its tokens; None: those of `input_ids`
        size_func: Callable[..., int]
        | None = None,  # f(xb, yb): its samples; None: as `find_bs` counts them
        eval_every: str
        | int
        | Time
        | None = '1ep',  # when to evaluate: epochs, '500ba', '10m'; None: never
    ) -> None:
        check_model(model)
        super().__init__()
        self.dls, self.model = as_dataloaders(dls), model
        if loss_func is None:
            loss_func = getattr(getattr(self.dls, 'train_ds', None), 'loss_func', None)
        self.loss_func = loss_func
        check_loss(self.loss_func)
        self.opt_func, self.lr, self.splitter = (
            opt_func,
            defaults.lr if lr is None else lr,
            splitter,
        )
        self.path = Path(path) if path is not None else Path(getattr(self.dls, 'path', '.'))
        self.model_dir, self.wd, self.wd_bn_bias, self.train_bn, self.moms = (
            model_dir,
            wd,
            wd_bn_bias,
            train_bn,
            moms,
        )
        self.microbatch, self.weight_func = (
            check_microbatch(self, microbatch),
            check_weight_func(weight_func),
        )
        check_function('size_func', size_func)
        self.token_func, self.size_func, self.eval_every = token_func, size_func, eval_every
        self.logger: Callable[[Any], Any] = print
        self.create_mbar, self.opt = True, None
        self._entered: list[ExitStack] = []
        self._own_lrs: tuple[Any, Any] = (
            None,
            None,
        )  # the `lr` that the optimizer was asked for, and the rates it has
        self._lrs_left: list[float] = []  # the rates as the Learner, or a fit, has left them
        self.metrics = metrics
        self.add_cbs([*(defaults.callbacks if default_cbs else []), *listed(cbs)])
        self('after_create')

    # -- training ----------------------------------------------------------------------------------

    def fit(
        self,
        n_epoch: int
        | str
        | Time,  # epochs, or how much of a unit: '2h', '5000ba', '1e6sp'; 0 trains nothing
        lr: Any = None,  # learning rate for this fit, or a dict by optimizer; None: the Learner's
        wd: float | None = None,  # weight decay for this fit; None: the Learner's
        cbs: Any = None,  # further callbacks for this fit
        reset_opt: bool = False,  # make a new optimizer
        start_epoch: int = 0,  # skip the epochs before this one
        iteration: int
        | str
        | Time
        | None = None,  # so many epochs are an iteration, with events of its own
        resume: Any = False,  # go on from a checkpoint: True, 'latest', 'best', a path, or a state
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
        with self.added_cbs(
            [*listed(cbs), *own, *checks, *self.evaluations.begin(self, per_iteration)]
        ):
            found = find_checkpoint(self, resume)
            self._prepare_opt(lr, wd, reset_opt)
            self.replay_source = None
            with self._training_weights(), self.strategy.run(self, 'fit'):
                self.n_epoch, self.epochs_per_iteration, self.run.stopping = (
                    epochs,
                    per_iteration,
                    False,
                )
                self.timings = Timings()
                begin_resume(self, found)
                self._with_events(self._do_fit, 'fit', CancelFitException, self._end_cleanup)

    def fit_until(
        self,
        total: str
        | int
        | Time,  # what this Learner is to have trained in all: epochs, or any other unit
        **kwargs: Any,  # more for `fit`
    ) -> None:
        """Train until `total` is reached, over all fits of this Learner; nothing where it is reached already.

        >>> from learnkit.testing import synth_learner
        >>> with synth_learner().no_bar() as learn: learn.fit(2); learn.fit_until('5ep')
        >>> len(learn.history)
        5
        """
        total = as_time(total, 'ep')
        if total.unit == 'dur':
            raise TimeError(f'fit_until({str(total)!r}): a share of what? Give epochs, or hours.')
        left = total.value - self.finished(total.unit)
        if left > 0:
            self.fit(Time(left, total.unit), **kwargs)

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
        if reset_opt or self.opt is None or self._opt_is_of_another_model():
            self.create_opt()
        elif not isinstance(self.opt, OptimWrapper):
            self.opt = OptimWrapper(opt=self.opt)  # assigned by hand
        if self._opt_is_of_another_model():
            raise OptimizerError(
                f'No parameter of this {type(self.model).__name__} is in the optimizer, which would '
                'learn nothing. Make it of `learn.model.parameters()`, or pass its class.'
            )
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
        if isinstance(self.opt_func, partial) and 'lr' in self.opt_func.keywords:
            self.lr = self.opt_func.keywords['lr']
        opt = make_optimizer(
            self.opt_func,
            self.model,
            self.lr,
            self.splitter,
            self.wd_bn_bias,
            self.train_bn,
            last=self.opt,
            loss_func=self.loss_func,
        )
        if self.opt is not None:
            if opt is not self.opt:
                self.counters.steps += getattr(self.opt, 'n_steps', 0)
            if not callable(self.opt_func):
                opt.clear_state()  # it is the same one, to be started anew
        self.opt = opt
        note_params(self, is_ready=not callable(self.opt_func))
        lrs = self._lrs_left = rates_of(opt)
        brought = isinstance(self.lr, (int, float)) and any(lr != self.lr for lr in lrs)
        if brought and not callable(self.opt_func):
            self.lr = lrs[0] if len(set(lrs)) == 1 else lrs
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
        "Run the passes of the `optimize` under way again."
        own_loop.repeat_turn(self)

    # -- evaluation and prediction -----------------------------------------------------------------

    def validate(
        self,
        ds_idx: int | None = None,  # 0: training, 1: first validation loader; None: all validation
        dl: Any = None,  # a loader to use instead, or its name in `dls`
        cbs: Any = None,  # further callbacks for this run
    ) -> L | None:
        """Compute loss and metrics, and return them as a list: `[valid_loss, *metrics]` of each loader.

        Counters, history, RNGs and the modes of the modules are afterwards as they were. A callback may call it from
        any of its events, and is itself not called in the evaluation that it starts.

        Raises `LoaderError` when there is no such loader, and `EmptyLoaderError` when it has no batch.

        >>> from learnkit import mae
        >>> from learnkit.testing import synth_learner
        >>> with synth_learner(metrics=mae).no_bar() as learn: valid_loss, error = learn.validate()
        >>> 0 <= error <= valid_loss ** 0.5
        True
        """
        from learnkit.inference.predict import validate

        return validate(self, ds_idx, dl, cbs)

    def get_preds(
        self,
        ds_idx: int = 1,  # which loader to predict on: 0 training, 1 validation
        dl: Any = None,  # a loader to use instead, or its name in `dls`
        with_input: bool = False,  # return the inputs, first
        with_decoded: bool = False,  # return decoded predictions, by `loss_func.decodes`
        with_loss: bool = False,  # return the loss of each sample, last
        act: Callable[[Any], Any] | None = None,  # on predictions; None: `loss_func.activation`
        inner: bool = False,  # leave out the events of fit and epoch: for use inside a callback
        reorder: bool = True,  # in data-set order, nothing dropped, where the loader can be rebuilt
        cbs: Any = None,  # further callbacks for this run
        sink: Any = None,  # where batches go as they come, instead of memory: see below
        **kwargs: Any,  # more for `GatherPredsCallback`
    ) -> Any:
        """Return predictions and targets of a loader on the CPU, joined along the first dimension.

        Where several processes train together, all of them call it: each predicts its share, and each gets everything
        (its own alone, with loaders that were `sharded_already`).

        What was asked for comes in the order: inputs, predictions, targets, decoded predictions, losses. Several inputs
        or targets come as a list or tuple of tensors; targets are None where the loader has none. A shuffling loader's
        samples come in the data set's order, each once, and so do those that a weighted or partial loader of fastai
        chooses, each as often as chosen. A torch sampler that chooses (WeightedRandomSampler) is followed in the order
        of its draws, as are a list, an iterable data set, and a batch sampler of one's own.

        With a `sink` memory stays constant and the sink itself is returned. It is a folder, which gets a file a batch
        (`000000.pt`, a dict for `torch.load`); the path of a `.npy` file or an array (`numpy.memmap`), which get the
        predictions alone; or a function, called with the entries of each batch. Until they are complete, the folder and
        the file are called `<name>.part`: what an interrupted run wrote is there, and is written over by the next.
        Nothing else is: a file, or a folder that is not empty, is refused. Several processes write files of one folder,
        numbered in the order of the data; of a `.npy` file each writes its own, which
        `learnkit.inference.sinks.read_rows` joins.

        Raises `LoaderError` when there is no such loader, `EmptyLoaderError` when it has no batch, and `OptionError`
        for a sink that cannot take what was asked for.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner(n_valid=2)
        >>> with learn.no_bar(): preds, targets = learn.get_preds()
        >>> preds.shape, targets.shape
        (torch.Size([32, 1]), torch.Size([32, 1]))
        """
        from learnkit.inference.predict import get_preds

        return get_preds(
            self,
            ds_idx,
            dl,
            with_input,
            with_decoded,
            with_loss,
            act,
            inner,
            reorder,
            cbs,
            sink,
            **kwargs,
        )

    def predict_iter(
        self,
        dl: Any = None,  # a loader, or its name in `dls`
        ds_idx: int = 1,  # which loader when `dl` is None: 0 training, 1 validation
        with_input: bool = False,  # yield the inputs, first
        with_decoded: bool = False,  # yield decoded predictions, by `loss_func.decodes`
        with_loss: bool = False,  # yield the loss of each sample, last
        act: Callable[[Any], Any] | None = None,  # on predictions; None: `loss_func.activation`
        inner: bool = False,  # leave out the events of fit and epoch: for use inside a callback
        cpu: bool = True,  # bring them to the CPU; False: leave them where the model is
        cbs: Any = None,  # further callbacks for this run
    ) -> PredictionStream:
        """Predict batch by batch, each when it is asked for, in the loader's order: an iterator over their entries.

        Each batch is what `get_preds` would return for it, and the events are the same. Between two batches the
        Learner is as it was before (modes, RNGs, weights, loop state), and no memory grows. Leaving the loop
        early ends the run as a `CancelValidException` would. A stream does not outlast what it runs in: when
        its Learner goes on to a fit, a validation or other predictions, is copied, or has callbacks taken out,
        it is ended first, and asking it for more raises `FitError`. Of several processes each gets its share.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner(default_cbs=False)
        >>> [tuple(preds.shape) for preds, targs in learn.predict_iter()]
        [(16, 1), (16, 1)]
        """
        from learnkit.inference.predict import predict_iter

        return predict_iter(
            self, dl, ds_idx, with_input, with_decoded, with_loss, act, inner, cpu, cbs
        )

    def predict(
        self,
        item: Any,  # the input of one sample as a data set gives it; a tuple of several inputs
        rm_type_tfms: Any = None,  # for data of fastai: how many type transforms to leave out
        with_input: bool = False,  # return the input too, first
    ) -> tuple[Any, ...]:  # (input,) prediction decoded by `loss_func.decodes`, and activated
        """Predict on one sample.

        What `dls.decode_batch` makes of the prediction comes first, where the data can do that (fastai's); otherwise
        its name in `dls.vocab`, or without one the prediction as `loss_func.decodes` gives it.

        >>> from learnkit.testing import synth_learner
        >>> decoded, same, pred = synth_learner(default_cbs=False).predict(torch.ones(1))
        >>> pred.shape
        torch.Size([1])
        """
        from learnkit.inference.predict import predict

        return predict(self, item, rm_type_tfms, with_input)

    def tta(
        self,
        ds_idx: int = 1,  # which loader to predict on: 0 training, 1 validation
        dl: Any = None,  # a loader to use instead, or its name in `dls`
        n: int = 4,  # how often to predict on augmented samples
        item_tfms: Any = None,  # for data of fastai: other transforms of each item
        batch_tfms: Any = None,  # for data of fastai: other transforms of each batch
        beta: float | None = 0.25,  # share of the plain predictions; None: both, augmented first
        use_max: bool = False,  # take the largest prediction instead of the mean
        augment: Callable[..., Any] | None = None,  # f(*xb) -> augmented inputs, for any loader
    ) -> tuple[Any, Any]:  # predictions, targets
        """Predict on augmented samples too (test time augmentation) and average: `lerp(augmented, plain, beta)`.

        fastai's data brings its training transforms; for any other loader `augment` makes the inputs of a batch anew,
        as a torchvision transform does. Each of the `n` times draws other random numbers, and the RNGs are afterwards
        as they were. Several outputs are averaged each.

        Raises `OptionError` when there is nothing that could augment, or `n` is not positive.

        >>> from learnkit.testing import synth_learner
        >>> preds, targs = synth_learner(default_cbs=False).tta(augment=lambda x: x + 0.1 * torch.randn_like(x))
        >>> preds.shape
        torch.Size([32, 1])
        """
        from learnkit.inference.predict import tta

        return tta(self, ds_idx, dl, n, item_tfms, batch_tfms, beta, use_max, augment)

    def show_results(
        self,
        ds_idx: int = 1,  # which loader's first batch: 0 training, 1 validation
        dl: Any = None,  # a loader to use instead
        max_n: int = 9,  # the most samples shown
        **kwargs: Any,  # more for the data's own method
    ) -> Any:
        """Show a batch with its predictions: images in a grid, anything else as a table; return what was drawn.

        Wrong classes are marked, and have their names in `dls.vocab` where there is one. Images take `figsize`. A
        method `show_results(batch, preds, max_n=..., **kwargs)` of the loader, as fastai's have it, or of its data set
        is used instead, if there is one; it gets a whole batch and the decoded predictions. Loaders, random generators
        and the model are afterwards as they were.

        >>> from learnkit import Learner
        >>> scores = torch.tensor([[3., 1.], [2., 0.]])
        >>> Learner([(scores, torch.tensor([0, 1]))], nn.Identity(), nn.CrossEntropyLoss()).show_results(ds_idx=0)
        x[0]  x[1]  target  predicted
           3     1       0          0
           2     0       1          0  wrong
        """
        from learnkit.inference.show import show_results

        return show_results(self, ds_idx, dl, max_n, **kwargs)

    # -- saving and loading ------------------------------------------------------------------------

    def save(
        self,
        file: str | Path,  # a name below `path/model_dir`, or an absolute path; `.pth` is added
        with_opt: bool | None = None,  # save the optimizer's state; None: if there is an optimizer
    ) -> Path:
        """Save the weights, and return the path of the file.

        The file is torch's: `{'model': ..., 'opt': ...}`, or the model's state dict alone. A name that ends in
        `.safetensors` gets the weights alone, in that library's format. It is there whole or not at all, and folders
        are made. Of several processes that train together all call it, and the
        first one writes. Raises `OptionError` for a name that cannot be a file and for
        `with_opt` in a format without place for it, `OptimizerError` when `with_opt` is asked for and there is no
        optimizer; nothing is written then.

        >>> import tempfile
        >>> from learnkit.testing import synth_learner
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     learn = synth_learner(path=folder)
        ...     print(learn.save('line').relative_to(folder).as_posix())
        ...     a = learn.model.a.item()
        ...     _ = learn.model.a.data.zero_()
        ...     learn.load('line').model.a.item() == a
        models/line.pth
        True
        """
        from learnkit.checkpoint.saving import save

        return save(self, file, with_opt)

    def load(
        self,
        file: str | Path,  # as for `save`
        with_opt: bool | None = None,  # load the optimizer's state; None: when the file has it
        device: torch.device | str | int | None = None,  # where the file is read to; None: the CPU
        strict: bool = True,  # False: take what fits by name, and convert other dtypes
    ) -> Self:
        """Load what `save`, `torch.save` of a state dict, fastai's or safetensors has written, and return the learner.

        Nothing in the file is executed. The values are copied: parameters stay the same objects. Everything is
        compared before anything is copied: a `WeightsError` lists every name, shape and dtype that differs, and leaves
        weights and optimizer as they were; it is also raised for files that are damaged or hold more than data. An
        optimizer that does not exist yet is made. An optimizer's state that fastai saved is of another form: there, the
        weights alone are loaded, with a warning. `before_load` fires when all was compared, `after_load` in the end.

        >>> import tempfile
        >>> from learnkit.testing import synth_learner
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = (learn := synth_learner()).save(f'{folder}/line')
        ...     again = synth_learner().load(path)
        >>> torch.equal(again.model.a, learn.model.a)
        True
        """
        from learnkit.checkpoint.saving import load

        return load(self, file, with_opt, device, strict)

    def save_learner(
        self,
        fname: str | Path = 'learner.pth',  # a name below `path`, or an absolute path
        /,
        **model_config: Any,  # plain values that build the model; `load_learner` passes them on
    ) -> Path:
        """Save weights and configuration in one file for `load_learner`, and return its path.

        The file holds tensors and plain values, and no code: what it is loaded with, a model class for one, is in the
        hands of who loads it, who can therefore trust a file from anywhere. It keeps the rates and options of this
        Learner, the class names of its data (`dls.vocab`) and the names of model and loss; the optimizer's state and
        the data stay behind. Raises `OptionError` for a value that is not plain.

        >>> import tempfile
        >>> from learnkit import Learner
        >>> from learnkit import load_learner
        >>> def build(hidden): return nn.Sequential(nn.Linear(1, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     learn = Learner([(torch.zeros(4, 1), torch.zeros(4, 1))], build(hidden=8), nn.MSELoss(), path=folder)
        ...     path = learn.save_learner('net.pth', hidden=8)
        ...     load_learner(path, model=build, loss_func=nn.MSELoss())
        Learner(Sequential, loss_func=MSELoss, valid=[], cbs=[TrainEvalCallback, Recorder, ProgressCallback])
        """
        from learnkit.checkpoint.saving import save_learner

        return save_learner(self, fname, **model_config)

    def export(
        self,
        fname: str | Path = 'export.pt2',  # name below `path`, or an absolute path; adds `.pt2`
        act: Callable[[Any], Any] | None = None,  # applied to outputs, e.g. `loss_func.activation`
        sample: Any = None,  # inputs, a tuple if several; None: shaped like those of the data
    ) -> Path:
        """Save the model as a program for serving (`torch.export`), for any batch size, and return the file's path.

        The program is on the CPU, in evaluation mode, and needs none of the model's code:
        `torch.export.load(path).module()(x)`. What callbacks do to a batch is no part of it. The file also holds inputs
        of the sample's shapes, all zero: nothing of the data is in it. The first of several processes writes it.

        Loading such a file executes trusted code: `torch.export.load` unpickles its sample inputs. Load only files of
        your own making; to exchange models use `save_learner`.

        Raises `ModelError` with torch's reason for a model that cannot be exported, and `OptionError` where there is no
        batch to take the shapes from, or for the name of another kind of file.

        >>> import tempfile
        >>> from learnkit.testing import synth_learner
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     program = torch.export.load(synth_learner(path=folder).export()).module()
        >>> program(torch.ones(5, 1)).shape
        torch.Size([5, 1])
        """
        from learnkit.checkpoint.saving import export

        return export(self, fname, act, sample)

    # -- checkpoints -------------------------------------------------------------------------------

    def checkpoint_state(self) -> dict[str, Any]:
        """Return everything that training depends on, copied to host memory, as plain values and tensors.

        It is what the callback `Checkpoint` writes: model, loss function and optimizers, pending gradients, counters,
        history and every callback's state by its key, all random generators, and the place in the training data.
        `fit(n, resume=state)` goes on from it, exactly, when it was taken at `batch_checkpoint`, `epoch_checkpoint` or
        `iteration_checkpoint`. Outside of a fit it can be put back by `load_checkpoint_state`.

        Raises `CheckpointError` elsewhere in a run, where half of the callbacks have handled an event, and
        `CallbackError` for a callback's state that would not load safely.

        >>> from learnkit.testing import synth_learner
        >>> state = synth_learner().checkpoint_state()
        >>> sorted(state)  # doctest: +NORMALIZE_WHITESPACE
        ['buffers', 'callbacks', 'frozen', 'grads', 'loop', 'loss_func', 'model', 'optimizer', 'position', 'rng',
         'wall_clock']
        """
        from learnkit.checkpoint.state import checkpoint_state

        return checkpoint_state(self)

    def load_checkpoint_state(
        self,
        state: Mapping[str, Any],  # from `checkpoint_state`, of a Learner made in the same way
    ) -> None:
        """Put a checkpoint's state into this Learner, outside of a fit; nothing of `state` is shared or changed.

        Weights, optimizers, counters, history, callbacks' states and random generators are then as they were. To train
        on from the very batch, use `fit(n, resume=state)`. Everything is compared before anything changes. Raises
        `WeightsError` with every difference, and `CheckpointError` for what is no such state.
        """
        from learnkit.checkpoint.state import load_checkpoint_state

        load_checkpoint_state(self, state)

    def check_resume(
        self,
        n_batches: int = 8,  # training batches of each run; more than an epoch has try its end, too
        stop_after: int | None = None,  # batches after which one run is stopped; None: half of them
    ) -> ResumeCheck:
        """Train without a stop, and with one, and say whether both end in the same state, to the last bit.

        The second run is saved in a file after `stop_after` batches and gone on with from there, with all random
        generators seeded otherwise, as a new process would. Weights, optimizer, generators, the data's position,
        history and the callbacks' states are compared: what is listed as different is remembered by something that no
        checkpoint holds. A callback says what it remembers by `state_dict` and `load_state_dict`; of one that does not,
        what it keeps and no checkpoint holds (an iterator, an open file) is named then, as are attributes of modules,
        of the Learner, of callbacks and of the data that differ and that no checkpoint holds.

        Everything is afterwards as it was, as with `lr_find`. Callbacks that write files (loggers, `Checkpoint`) are
        left out, and what is saved below `learn.path` goes to a folder that is removed. Raises `FitError` for numbers
        that cannot be followed.

        >>> from learnkit import EMA
        >>> from learnkit.testing import synth_learner
        >>> bool(synth_learner(cbs=EMA()).check_resume())
        True
        """
        from learnkit.checkpoint.resume_check import check_resume

        return check_resume(self, n_batches, stop_after)

    def callback_states(self) -> dict[str, Any]:
        """Return the state of every callback that has one, by its key: its `state_key`, or its name, made unique.

        Of a callback without a `state_dict`, one written for fastai for instance, that is every attribute that has
        changed since it was added and is data: numbers, texts, tensors, arrays, paths, random generators, and lists,
        tuples, sets and dicts of data.

        Raises `CallbackError`, with the callback's name, for a state that would not load safely.

        >>> from learnkit import EMA
        >>> from learnkit.testing import synth_learner
        >>> sorted(synth_learner(cbs=[EMA(), EMA(0.9)]).callback_states())
        ['ema', 'ema_2', 'recorder', 'train_eval']
        """
        from learnkit.engine.callback_state import callback_states

        return callback_states(self)

    def load_callback_states(
        self,
        states: Mapping[str, Any],  # from `callback_states`, of a Learner with the same callbacks
    ) -> None:
        """Hand each state to its callback.

        A state whose callback is not there is left out with a warning, and so is a callback without a state, which
        goes on as it is: both are named.
        """
        from learnkit.engine.callback_state import load_callback_states

        load_callback_states(self, states)

    # -- several processes -------------------------------------------------------------------------

    def distributed(
        self,
        strategy: str = 'auto',  # 'ddp': each rank has the whole model; 'fsdp': a part; 'auto'
        **options: Any,  # more of `DistributedTraining`
    ) -> AbstractContextManager[Self]:
        """Return a context in which this Learner trains in all the processes that were started together.

        Start the script by `torchrun --nproc-per-node=2 script.py`; on its own, it trains in one process. See
        `DistributedTraining` for the options and for what is raised.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner()
        >>> with learn.no_bar(), learn.distributed('ddp'): learn.fit(1)
        >>> len(learn.history), learn.world.size
        (1, 1)
        """
        from learnkit.distributed.callback import DistributedTraining

        return self.added_cbs(DistributedTraining(strategy, **options))

    def launch(
        self,
        fn: Callable[[Any], Any],  # f(learn) in each process: `lambda learn: learn.fit(3)`
        nproc: int = 2,  # processes
        *,
        timeout: str | int | Time = '10m',  # after which a process that waits for another gives up
        **options: Any,  # more of `DistributedTraining`
    ) -> Any:
        """Train in several processes that are started here, as from a notebook, and bring back what they have trained.

        Each calls `fn` with a copy of this Learner, in the context of `distributed(**options)`. Weights, optimizer,
        history, counters and callbacks' states of the first are then this Learner's, and what `fn` has returned there
        is returned. Rows and bars of the first are shown here; interrupting the kernel ends them all. Functions and
        classes of a notebook go along by value (`pip install "learnkit[launch]"`).

        Raises `OptionError` or `MissingExtraError` before anything is started, for what cannot be sent with its name,
        and `DistributedError` with the traceback of the process that has failed first; this Learner is then unchanged.

        >>> from learnkit.testing import synth_learner
        >>> synth_learner().launch(lambda learn: learn.fit(1), nproc=0)
        Traceback (most recent call last):
        learnkit.core.errors.OptionError: nproc=0: give a whole number of processes, 1 or more.
        """
        from learnkit.distributed.launch import launch

        return launch(self, fn, nproc, timeout=timeout, **options)

    def check_replicas(self) -> None:
        """Compare weights, buffers and the optimizer's state of all processes.

        Every process calls it. Raises `DistributedError`, in each, with the names of the tensors that differ.

        >>> from learnkit.testing import synth_learner
        >>> synth_learner().check_replicas()
        """
        from learnkit.distributed.compare import check_replicas

        check_replicas(self)

    # -- reading -----------------------------------------------------------------------------------

    @property
    def metrics(self) -> L:
        "The metrics; assign functions, Metrics or torchmetrics objects."
        return self._metrics

    @metrics.setter
    def metrics(self, metrics: Any) -> None:
        self._metrics = as_metrics(metrics)

    @property
    def smooth_loss(self) -> Any:
        "The smoothed training loss of the last step, as a 0-dim tensor."
        value = self._recorder('smooth_loss').smooth_loss.value
        if value is None:
            raise MissingAttribute(
                'smooth_loss', self, why='It exists from the first training step on.'
            )
        return value

    @property
    def history(self) -> History:
        "What the Recorder has kept: one dict an epoch, over all fits."
        return self._recorder('history').history

    def _recorder(self, wanted: str) -> Recorder:
        if (recorder := recorder_of(self)) is not None:
            return recorder
        raise MissingAttribute(
            wanted, self, why='It comes from the Recorder: `learn.add_cb(Recorder())`.'
        )

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
            name = (
                f'valid_{name}' if self.dl_name in ('valid', 'train') else f'{self.dl_name}/{name}'
            )
        for cb in self.callbacks:
            if receive := getattr(type(cb), 'receive_log', None):
                receive(cb, name, value, weight, shown)

    def show_training_loop(self) -> None:
        "Print the lifecycle, with the callbacks that run at each event."
        training = self.training
        for m in LIFECYCLE:
            if m.event in ('before_train', 'before_validate'):
                training = m.event == 'before_train'
            cbs = [] if m.is_note else self.ordered_cbs(m.event, training)
            print(
                f'{"  " * m.depth}{m.event if m.is_note else f"- {m.event:<18}"}{f" {cbs}" if cbs else ""}'.rstrip()
            )

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

    # -- contexts ----------------------------------------------------------------------------------

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
        with self.removed_cbs([ProgressCallback, ShowGraph]), rows:
            yield self

    def loss_not_reduced(self) -> Any:
        "Return a context in which the loss is computed for each sample."
        if hasattr(self.loss_func, 'reduction'):
            return replacing_yield(self.loss_func, 'reduction', 'none')
        if self.loss_func is None:
            return replacing_yield(self, 'loss_func', None)
        if not takes(self.loss_func, 'reduction'):
            raise LossError(
                f'{name_of(self.loss_func)} cannot give the loss of each sample: it has no `reduction`. '
                "Give it that keyword, 'none' for one number a sample."
            )
        return replacing_yield(self, 'loss_func', partial(self.loss_func, reduction='none'))

    def validation_context(self, cbs: Any = None, inner: bool = False) -> ExitStack:
        "Return a context for validating by hand: no rows, no epoch bar and, unless `inner`, the events around it."
        return ContextStack(
            [
                self.no_logging,
                self.no_mbar,
                lambda: self.lock,
                partial(self.added_cbs, cbs),
                *([] if inner else [self._around]),
            ]
        )

    @contextmanager
    def _around(self) -> Iterator[Self]:
        "Fire the events around a validation: before_fit, before_epoch ... after_epoch, after_fit."
        with self.strategy.run(self, ''), self._level('fit'), self._level('epoch'):
            yield self

    @contextmanager
    def _level(self, event_type: str) -> Iterator[None]:
        "Wrap a with-block as `_with_events` wraps a function."
        level, outer, cancelled = LEVELS[event_type], self.run.levels, False
        self.run.levels = (*outer, event_type)
        try:
            try:
                self(level.before)
            except level.exception as e:
                raise CancelError(
                    f'{type(e).__name__} in {level.before}: a with-block cannot be skipped.'
                ) from e
            yield
        except level.exception:
            cancelled = True
        finally:
            self.run.levels = outer
        if cancelled:
            self(level.after_cancel)
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
        try:
            swallowed = self._entered.pop().__exit__(*exc_info)
        except BaseException as e:
            error, swallowed = e, False
        raised = [] if self.run.depth else self._close()
        if error is exc_info[1]:
            raise_first(None if swallowed else error, raised)
        else:
            raise_first(error, raised)
            raise error  # type: ignore[misc]  # it was set above
        return swallowed

    def _end_streams(self) -> None:
        from learnkit.inference.stream import end_streams

        end_streams(self)

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
        if not self._is_open_for_use:
            return []
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
            warn_user(
                f'{type(e).__name__} while a Learner that was dropped was closed: {e} '
                f'{" ".join(getattr(e, "__notes__", ()))}. Call `learn.close()` to have it raised.'
            )

    # -- attributes of the model and the callbacks -------------------------------------------------

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            if (
                name.startswith(('__', *SHOWN_ELSEWHERE))
                or name in _NOT_YET
                or 'model' not in self.__dict__
            ):
                raise MissingAttribute(name, self, why=_NOT_YET.get(name, ''))
            if defined_on_class(self, name):
                return object.__getattribute__(self, name)  # raises its own error again
            model = self.model
            try:
                return getattr(model, name)
            except AttributeError:
                if defined_on_class(model, name):
                    return object.__getattribute__(model, name)
            raise MissingAttribute(name, self, model)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.model)})

    def __repr__(self) -> str:
        return learner_text(self)

    @never_raising
    def _repr_html_(self) -> str:
        return learner_html(self)


def rates_of(opt: OptimWrapper) -> list[float]:
    "Return the learning rate of each group that has one, as a plain number."
    return [float(h['lr']) for h in opt.hypers if 'lr' in h]


@atexit.register
def _close_all() -> None:
    "Close the callbacks of every Learner that is still there."
    raise_first(None, [e for learn in list(_open_learners) for e in learn._close()])


def load_learner(
    path: str | Path,  # written by `learn.save_learner`
    model: nn.Module
    | Callable[..., nn.Module]
    | None = None,  # the model, or what builds it from its configuration
    dls: Any = None,  # data, as for `Learner`; None: predict on given loaders
    loss_func: Callable[..., Any] | None = None,  # as for `Learner`
    device: torch.device
    | str
    | None = None,  # without `dls`: where it runs; None: a GPU if there is one
    cpu: bool = False,  # fastai's way to say `device='cpu'`
    **kwargs: Any,  # more for `Learner`, in place of what the file says
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
