# SPDX-License-Identifier: Apache-2.0

# mypy: disable-error-code="empty-body"
"""Learner: data, model, loss and optimizer in one object, with methods to train, evaluate and save."""

from __future__ import annotations

import atexit
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self, TypeVar
from weakref import WeakSet

import torch
from fastcore.basics import noop
from fastcore.foundation import L
from torch import Tensor, nn
from typing_extensions import override

from learnkit.callbacks.live_plot import ShowGraph
from learnkit.callbacks.lr_suggestions import valley
from learnkit.callbacks.progress import ProgressCallback
from learnkit.callbacks.recorder import History, Recorder, recorder_of
from learnkit.comm.ranks import SINGLE_RANK, Comm
from learnkit.core.batch import detuplify, to_detach
from learnkit.core.contexts import replacing_yield
from learnkit.core.denominator import check_weight_func
from learnkit.core.errors import CallbackError, CancelFitException
from learnkit.core.files import as_local_path
from learnkit.core.hints import check_keywords
from learnkit.core.html import never_raising
from learnkit.core.interrupts import deferred_interrupts
from learnkit.core.model import check_can_run, takes_batches
from learnkit.core.time import Time, Timestamp, as_time
from learnkit.core.validation import warn_user
from learnkit.data.dataloaders import as_dataloaders, check_loaders, decodes_batches
from learnkit.data.evaluator import as_every
from learnkit.debug.repr import learner_html, learner_text
from learnkit.engine import custom_batch, optimizer
from learnkit.engine.budget import Budget, parse_iteration, parse_length
from learnkit.engine.callback import SHOWN_ELSEWHERE, MissingAttribute, defined_on_class
from learnkit.engine.checks import check_loss, check_microbatch, check_model, warn_of_rate
from learnkit.engine.counters import COUNTER_OF_UNIT
from learnkit.engine.custom_batch import EventCheck, list_overrides
from learnkit.engine.dispatch import as_callback, as_list, enter_all
from learnkit.engine.events import LIFECYCLE
from learnkit.engine.loop import Loop
from learnkit.engine.parts import Parts
from learnkit.engine.pause import FitCall, FitPaused, PauseRequest, parse_pause, request_pause
from learnkit.engine.resumed_run import check_rewound
from learnkit.engine.run import call_each, note_error, raise_first
from learnkit.engine.seams import SEAMS, fit_seams
from learnkit.engine.train_eval import SkipToEpoch, TrainEvalCallback, missing_train_eval
from learnkit.metrics.averages import as_metrics, metrics_of_model
from learnkit.optim.optimizers import Adam
from learnkit.optim.wrapper import trainable_params

if TYPE_CHECKING:
    from learnkit.callbacks.history import Values
    from learnkit.callbacks.lr_finder import LRSearch
    from learnkit.callbacks.model_summary import Summary
    from learnkit.checkpoint.resume_check import ResumeCheck
    from learnkit.debug.moment import Moment
    from learnkit.debug.paused import Paused
    from learnkit.debug.trace import Handlers, Trace
    from learnkit.monitors.step_time import Timings

__all__ = ['Learner', 'defaults', 'load_learner', 'replacing_yield']

F = TypeVar('F', bound=Callable[..., Any])

defaults = SimpleNamespace(lr=1e-3, callbacks=[TrainEvalCallback, Recorder, ProgressCallback])
_open_learners: WeakSet[Learner] = WeakSet()  # Learners whose callbacks `close` has to reach

# fastai's names; events to fire by hand around an evaluation
_before_epoch = ['before_fit', 'before_epoch']
_after_epoch = ['after_epoch', 'after_fit']

# public names that `dir` leaves out: of the engine, for subclasses, of fastai, and arguments of `Learner`
_UNLISTED = frozenset(
    """parts own_names contexts turn step_parameters batch_form loader_name set_loader stage epochs_per_iteration
    resumed train_eval callback_changed callback_states load_callback_states load_checkpoint_state lr_search
    all_batches draw_batches one_batch evaluate_batch do_evaluation compute_loss
    final_record gather_args to_detach create_mbar no_mbar loss_not_reduced validation_context metric_names
    model_dir train_bn wd_bn_bias moms splitter size_func token_func weight_func""".split()
)

_MISSING_REASONS = {
    'pred': 'It exists from the forward pass of a batch on (event after_pred).',
    'loss_grad': 'It exists once the loss of a batch is computed (event after_loss).',
    'timings': 'It exists in and after a fit with the callback StepTimeMonitor().',
}


def implemented_in(module: str, name: str = '') -> Callable[[F], F]:
    """Decorate a method that only has a signature and a docstring.

    A call checks its arguments, adds the defaults, and calls the function of the same name, or of `name`, in a module
    that is imported by the first call. The function takes the Learner, and all other parameters by their names.
    """

    def decorate(method: F) -> F:
        signature = inspect.signature(method)
        learn, *others = signature.parameters.values()
        by_keyword = signature.replace(parameters=[learn, *map(_as_keyword, others)])

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            method(*args, **kwargs)  # raises `TypeError` for arguments that do not fit
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            passed = inspect.BoundArguments(by_keyword, given.arguments)
            function = getattr(import_module(module), name or method.__name__)
            return function(*passed.args, **passed.kwargs)

        return check_keywords(call)  # type: ignore[return-value]  # the signature is that of `method`

    return decorate


def _as_keyword(p: inspect.Parameter) -> inspect.Parameter:
    "Return a keyword-only parameter, unless it has no name for callers."
    has_name = p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    return p.replace(kind=inspect.Parameter.KEYWORD_ONLY) if has_name else p


class Learner(Loop):
    """Train `model` on `dls` with `loss_func`: the training loop, its callbacks and its state.

    `dls` is a `DataLoaders`, a tuple (train, valid) of any iterables of batches, or one training loader. `loss_func`
    and `metrics` are called with the predictions and the targets. `opt_func` creates the optimizer; any torch
    optimizer class works. `learnkit.doc(Learner)` shows every parameter with its meaning, and `doc(Learner.fit)` the
    parameters of a method. The model and the batches are moved to `dls.device`, by default a GPU if available.

    A model with the methods of Composer's `ComposerModel` is called with the whole batch, and needs neither `loss_func`
    nor `metrics`: the model's `loss`, `get_metrics` and `update_metric` are the defaults.

    Attributes that the Learner does not have are read from the model. `x` and `y` are the inputs and targets of the
    batch: a tuple if there are several, otherwise the single element.

    An optimizer instance keeps its groups and options. A torch optimizer class behaves as in a
    hand-written loop; without `lr` it has its own default rate, and everything else `defaults.lr`.
    Parameters of at most one dimension, parameters named as a bias and all parameters of torch's norm
    layers are excluded from weight decay for the optimizers with fastai's names (`Adam`, `SGD`), and
    for every optimizer with `wd_bn_bias=False`; with `wd_bn_bias=True` it applies to them too. If
    `loss_func` is a module, its parameters that require gradients are trained with the last group.
    `OptimWrapper` describes optimizers that need a closure or that switch between training and
    evaluation.

    `weight_func` returns the weight of a batch in the mean loss of an epoch: `f(xb, yb)`, 'tokens', 'samples', or None
    for the number of elements that the loss averages over.

    `size_func` returns the number of samples of a batch. Without it, the first axis of the first tensor counts them,
    or the second axis or the targets if the first batch of a loader shows that its samples are there.

    Raises `ModelError`, `LoaderError`, `LossError`, `MetricError` or `CallbackError` for unusable arguments.

    >>> import torch
    >>> from learnkit.data.dataloaders import DataLoaders
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> learn = Learner(DataLoaders.from_tensors((x, 2 * x), bs=16), nn.Linear(1, 1), nn.MSELoss(), lr=0.1)
    >>> with learn.no_bar(), learn.no_logging(): learn.fit(5)
    >>> len(learn.history)
    5
    """

    parts: Parts
    timings: Timings  # set by `StepTimeMonitor`
    final_record: Any  # values of the last evaluation; set by the Recorder
    lr_search: LRSearch | None = None  # result of the last `lr_find`
    stage: int | None = None  # index of the fit in `fine_tune`
    epochs_per_iteration: int | None = None

    @check_keywords
    def __init__(
        self,
        dls: Any,  # DataLoaders, a (train, valid) tuple of loaders, or a loader
        model: nn.Module,
        loss_func: Callable[..., Any] | None = None,  # f(pred, *targets); None: of data or model
        opt_func: Any = Adam,  # f(params, lr=): a torch.optim class, a partial, a function
        lr: Any = None,  # number, list by group, slice, or dict by optimizer; None: see below
        splitter: Callable[[nn.Module], Any] = trainable_params,  # f(model) -> parameters or groups
        cbs: Any = None,  # callback (or callback class), or several
        metrics: Any = None,  # f(pred, *targets), Metric, torchmetrics metric, or several
        path: str | Path | None = None,  # folder for files; None: `dls.path`
        model_dir: str | Path = 'models',  # folder for weights, below `path`
        wd: float | None = None,  # weight decay; None: the default of `opt_func`
        wd_bn_bias: bool | None = None,  # weight decay of norms and biases, as above
        train_bn: bool = True,  # whether norm layers of frozen groups are trained
        moms: tuple[float, ...] = (0.95, 0.85, 0.95),  # momentum for schedules
        default_cbs: bool = True,  # add `defaults.callbacks`, and `CastToTensor` for fastai's data
        microbatch: int | str | None = None,  # maximum samples a microbatch; 'auto': by memory
        weight_func: Callable[..., Any] | str | None = None,  # f(xb, yb) -> weight; see below
        token_func: Callable[..., int] | None = None,  # f(xb, yb); None: counts `input_ids`
        size_func: Callable[..., int] | None = None,  # f(xb, yb) -> samples; None: see below
        eval_every: str | int | Time | None = '1ep',  # epochs, '500ba', '10m'; None: never
    ) -> None:
        check_model(model)
        self.parts = Parts()
        super().__init__()
        self.world: Comm = SINGLE_RANK  # processes that train together
        self.error: BaseException | None = None
        self.resumed = False  # True while a resumed fit fires its first events again
        self.dls = as_dataloaders(dls)
        self.model = model
        if loss_func is None:
            loss_func = getattr(getattr(self.dls, 'train_ds', None), 'loss_func', None)
        self.loss_func: Any = loss_func
        check_loss(self.loss_func)
        self.opt_func = opt_func
        self.lr: Any = optimizer.find_default_lr(opt_func, defaults.lr) if lr is None else lr
        self.splitter = splitter
        self.path = as_local_path(getattr(self.dls, 'path', '.') if path is None else path)
        self.model_dir = model_dir
        self.wd = wd
        self.wd_bn_bias = wd_bn_bias
        self.train_bn = train_bn
        self.moms = moms
        self.microbatch = check_microbatch(self, microbatch)
        self.weight_func = check_weight_func(weight_func)
        self.token_func = token_func
        self.size_func = size_func
        self.eval_every = eval_every
        self.logger: Callable[[Any], Any] = print
        self.create_mbar = True
        self.opt: Any = None
        self._open_blocks: list[Any] = []  # contexts of open `with learn:` blocks
        if metrics is None and takes_batches(model):
            metrics = metrics_of_model(model)
        self.metrics = metrics
        default = list(defaults.callbacks) if default_cbs else []
        if default and decodes_batches(getattr(self.dls, 'train', None)):
            from learnkit.callbacks.training import CastToTensor

            default.append(CastToTensor)
        self.own_names = frozenset(vars(self))  # attributes that the Learner sets itself
        self.add_cbs([*default, *as_list(cbs)])
        if self.parts.callbacks.has_handler('after_create'):  # a fit fills the tables again
            self('after_create')

    # -- training ----------------------------------------------------------------------------------

    @check_keywords
    def fit(
        self,
        n_epoch: int | str | Time,  # epochs, or a budget: '2h', '5000ba', '1e6sp'; 0: no training
        lr: Any = None,  # learning rate of this fit, or dict by optimizer; None: the Learner's
        wd: float | None = None,  # weight decay of this fit; None: the Learner's
        cbs: Any = None,  # additional callbacks for this fit
        reset_opt: bool = False,  # create a new optimizer
        start_epoch: int = 0,  # first epoch to train; earlier epochs are skipped
        iteration: int | str | Time | None = None,  # epochs per iteration, which has its own events
        resume: Any = False,  # checkpoint to resume: True, 'latest', 'best', path, or state
        pause_at: int
        | str
        | Time
        | None = None,  # pause at this time over all fits: '613ba', '2ep'
    ) -> None:
        """Train for `n_epoch` epochs, or until a budget is used: `fit('90m')`, `fit('5000ba')`.

        A budget ends at the end of a batch. The current epoch then ends as usual, with its evaluation. The next fit
        with a budget trains on the batches that are left of the loader's pass.

        With `resume=True` the fit resumes from the newest complete checkpoint of its folder (see `Checkpoint`), at the
        exact batch, as if training had never stopped, and trains up to `n_epoch` epochs in total. Without a checkpoint
        the fit starts from the beginning. The checkpoint's rates and counters take precedence over the arguments.

        Ctrl-C, and the stop button of a notebook, stop the fit at the end of the current training batch. `pause_at`
        stops it at a time, and so does `learn.pause()` in a callback or a thread. `learn.resume()` then continues it.

        Raises a `LearnkitError` for invalid arguments before anything has changed. An exception of a callback, the
        model or the data is raised unchanged, with a note that names the event and the batch, after every callback's
        `cleanup`. The Learner can then fit again.

        >>> from learnkit.testing import synth_learner
        >>> with synth_learner(n_train=10).no_bar() as learn: learn.fit(2); learn.fit('15ba')
        >>> [(row['fit'], row['epoch']) for row in learn.history], learn.time.ba
        ([(0, 0), (0, 1), (1, 0), (1, 1)], 35)
        """
        __tracebackhide__ = True
        warn_of_rate(lr)
        check_rewound(self, resume)
        epochs_per_iteration = None if iteration is None else parse_iteration(iteration)
        epochs, budget = parse_length(self, n_epoch, start_epoch, epochs_per_iteration)
        check_loaders(self.dls)
        check_can_run(self)
        given = [as_callback(cb) for cb in as_list(cbs)]
        before, behind = missing_train_eval(self), parse_pause(self, pause_at)
        if start_epoch:
            behind.append(SkipToEpoch(start_epoch))
        if budget:
            behind.append(Budget(budget))
        if list_overrides(self):
            behind.append(EventCheck())
        behind += self.parts.evaluations.begin(self, epochs_per_iteration)
        added = [*before, *behind]
        call = FitCall(n_epoch, lr, wd, given, added, start_epoch, iteration, self.stage)
        with deferred_interrupts() as deferred, self.added_cbs([*before, *given, *behind]):
            checkpoint = None
            if resume is not None and resume is not False:
                from learnkit.checkpoint.resume import find_checkpoint, resumed

                checkpoint = find_checkpoint(self, resume)
            optimizer.prepare_opt(self, lr, wd, reset_opt)
            self.run.resuming = checkpoint
            self.run.replay_source = None
            with (
                optimizer.training_weights(self),
                self.parts.processes.run(self, 'fit'),
                self._pausable(call) as request,
                fit_seams(self),
                deferred.paused(request.receive_interrupt),
            ):
                self.n_epoch = epochs
                self.epochs_per_iteration = epochs_per_iteration
                self.run.stopping = False
                with nullcontext() if checkpoint is None else resumed(self, checkpoint):
                    self._with_events(self._do_fit, 'fit', CancelFitException, self._end_cleanup)

    @contextmanager
    def _pausable(self, call: FitCall) -> Iterator[PauseRequest]:
        "Let a fit pause within a context; keep what it needs to continue, also after an error."
        __tracebackhide__ = True
        outer = self.run.request
        request = self.run.request = PauseRequest(self)
        self.run.pause = None
        self.run.not_paused = ''
        if self.opt is not None:
            self.opt.was_cut = False
        call.then, self.run.then = self.run.then, None
        try:
            yield request
        except BaseException as e:
            from learnkit.checkpoint.pause_errors import keep_pause

            keep_pause(self, call, e)
            if not isinstance(e, FitPaused):
                if isinstance(e, KeyboardInterrupt) and request.has_raised and outer is None:
                    e.args = tuple(self._describe_stop())
                raise
        finally:
            self.run.request = outer
        if request.is_interrupt:
            raise KeyboardInterrupt(*self._describe_stop()) from None

    def _describe_stop(self) -> list[str]:
        "Return the message of a Ctrl-C that has ended a fit."
        pause = self.run.pause
        if pause is None:
            return [f'stopped; the fit cannot continue, because {self.run.not_paused}.']
        return [f'stopped {pause.describe()}: `learn.resume()` continues there.']

    def pause(self) -> None:
        """Pause the fit after the current batch: `fit` returns, and `learn.resume()` continues there.

        A callback or another thread calls this method. The batch ends with its `batch_checkpoint`. Then only `cleanup`
        fires: no evaluation, no row of the history, no `after_epoch` and no `after_fit`. Called in an evaluation at the
        end of an epoch, or later, the fit pauses after `epoch_checkpoint`. With `Checkpoint(on_pause=True)`, a
        checkpoint is written before `cleanup`. Several processes pause at the same batch, once all of them have
        received the request. Raises `FitError` if no fit is running.

        >>> from learnkit import Callback
        >>> from learnkit.testing import synth_learner
        >>> def look(cb):
        ...     if cb.time.ba == 13: cb.learn.pause()
        >>> learn = synth_learner(n_train=10, cbs=Callback(batch_checkpoint=look))
        >>> with learn.no_bar(): learn.fit(2)
        >>> learn.paused
        Paused(after batch 3 of 10 of epoch 1, 13ba)
        >>> _ = learn.remove_cb(Callback)
        >>> with learn.no_bar(): learn.resume()
        >>> learn.time.ba, learn.paused
        (20, None)
        """
        request_pause(self)

    @property
    def paused(self) -> Paused | None:
        """The fit that was paused, interrupted or ended by an error; None if `learn.resume()` cannot continue it.

        `time` is the time of the pause, `batch` the next batch and `last_batch` the last one. `samples()` lists the
        samples of the next batch with their losses, `show()` draws them, and `layers()` lists the norms of each layer.
        `cbs` are the callbacks that were given to the fit. None of these affects the fit.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner(n_train=10)
        >>> with learn.no_bar(): learn.fit(2, pause_at='13ba')
        >>> learn.paused, learn.paused.time.ba, len(learn.paused.samples())
        (Paused(after batch 3 of 10 of epoch 1, 13ba), 13, 16)
        """
        if self.run.pause is None:
            return None
        from learnkit.debug.paused import Paused

        return Paused(self, self.run.pause)

    @implemented_in('learnkit.callbacks.changes')
    def resume(
        self,
        lr: Any = None,  # new highest rate, as for the fit; None: as it is
        lr_scale: float | None = None,  # factor of the rates of the rest of the fit
        n_epoch: int | None = None,  # new number of epochs of the fit, with those that were trained
        stretch: bool = False,  # stretch the schedules to the new number; False: keep their length
        at_once: bool = False,  # use a new training loader at once; False: from the next epoch on
        pause_at: int | str | Time | None = None,  # as for `fit`
    ) -> None:
        """Continue the paused fit in memory, at the exact batch; `fit(resume=True)` reads a checkpoint's file instead.

        Everything of the fit continues: its schedule, callbacks, bar, row of the history, random generators, and the
        order of the loader. If nothing was changed, the result is bit for bit the same as without the pause; with
        `compile(step=True)` it is the same up to rounding, because the first batch after a pause takes the ordinary
        step. `before_fit`, and within an epoch `before_epoch` and `before_train`, fire again with `learn.resumed` True;
        then the callbacks' states are restored. `after_fit` fires once, at the real end. Evaluations, predictions,
        `summary`, `save` and `lr_find` do not affect the paused fit; a new `fit` or `learn.close()` ends it.

        What was changed in between holds for the rest of the fit: weights, layers, loss function, metrics, callbacks,
        frozen layers, `learn.wd`, `learn.lr`, and hyperparameters that no schedule sets. Another training loader is
        used from the next epoch on, or with `at_once=True` at once, for the samples that this epoch has left; both
        loaders must be a `TensorLoader` or both torch's DataLoader, with the same data in the same order. Each change
        is printed, marked in plots, and sent to loggers; `learn.history.changes` and checkpoints keep it.

        After an exception before the optimizer's step, the batch is repeated, exactly if the forward pass had not run
        or with the callback `Replay`. After the step, the remaining events of the batch fire. Between batches and in an
        evaluation, the events or the evaluation that failed are repeated. What is not exact is printed. Callbacks whose
        class was defined again, as in a notebook cell that was run again, get the new class.

        Raises `FitError` with the reason if the fit cannot continue, and `OptionError`, with nothing changed, for
        arguments that exclude each other, a schedule whose highest rate is unknown, and a loader that cannot be used at
        once.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner(n_train=10, lr=0.1)
        >>> with learn.no_bar(): learn.fit(2, pause_at='13ba')
        >>> with learn.no_mbar(): learn.resume(lr=0.03)
        13ba: lr 0.1 -> 0.03
        ...
        >>> learn.recorder.lrs[12:14], len(learn.history), learn.history.changes[0]['ba']
        ([0.1, 0.03], 2, 13)
        """

    def train(self, mode: bool = True) -> nn.Module:
        """Set the model to training mode, as `learn.model.train()` does; `learn.fit(5)` trains.

        Warns outside of a run, where training was probably meant.
        """
        if mode and not self.run.depth:
            warn_user(
                'learn.train() sets the model to training mode, and trains nothing: `learn.fit(5)` trains. '
                '`learn.model.train()` sets the mode without this warning.'
            )
        return self.model.train(mode)

    def fit_until(
        self,
        total: str | int | Time,  # total training of this Learner: epochs, or any other unit
        **kwargs: Any,  # further arguments of `fit`
    ) -> None:
        """Train until `total` is reached over all fits of this Learner; do nothing if it is reached already.

        >>> from learnkit.testing import synth_learner
        >>> with synth_learner().no_bar() as learn: learn.fit(2); learn.fit_until('5ep')
        >>> len(learn.history)
        5
        """
        total = as_time(total, 'ep')
        remainder = total.value - self.finished(total.unit)
        if remainder > 0:
            self.fit(Time(remainder, total.unit), **kwargs)

    @implemented_in('learnkit.callbacks.schedule')
    def fit_one_cycle(
        self,
        n_epoch: int,
        lr_max: Any = None,  # highest rate: number, list by group, or slice; None: the Learner's
        div: float = 25.0,  # divisor of `lr_max` for the initial rate
        div_final: float = 1e5,  # divisor of `lr_max` for the final rate
        pct_start: float = 0.25,  # share of the fit during which the rate rises
        wd: float | None = None,  # weight decay; None: the Learner's
        moms: tuple[float, ...] | None = None,  # momentum at the start, the highest rate, the end
        cbs: Any = None,  # additional callbacks for this fit
        reset_opt: bool = False,  # create a new optimizer
        start_epoch: int = 0,  # first epoch to train; earlier epochs are skipped
        resume: Any = False,  # checkpoint to resume, as in `fit`
        pause_at: int | str | Time | None = None,  # time of a pause over all fits, as in `fit`
    ) -> None:
        """Train with the 1cycle policy: the rate rises and then falls, each along half a cosine.

        Momentum mirrors the rate. `moms=None` uses the Learner's `moms`, unless the optimizer has
        no momentum or a momentum of 0, which then stays. Source: Smith, 2018.

        Raises what `fit` raises, `ScheduleError` for a cycle that cannot be followed, and
        `OptimizerError` for a wrong number of rates.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner(n_train=4)
        >>> with learn.no_bar(): learn.fit_one_cycle(1, 0.1, pct_start=0.5)
        >>> [round(lr, 4) for lr in learn.recorder.lrs]
        [0.004, 0.052, 0.1, 0.05]
        """

    @implemented_in('learnkit.callbacks.schedule')
    def fit_flat_cos(
        self,
        n_epoch: int,
        lr: Any = None,  # flat rate: number, list by group, or slice; None: the Learner's
        div_final: float = 1e5,  # divisor of `lr` for the final rate
        pct_start: float = 0.75,  # share of the fit with the flat rate
        wd: float | None = None,  # weight decay; None: the Learner's
        cbs: Any = None,  # additional callbacks for this fit
        reset_opt: bool = False,  # create a new optimizer
        start_epoch: int = 0,  # first epoch to train; earlier epochs are skipped
        resume: Any = False,  # checkpoint to resume, as in `fit`
        pause_at: int | str | Time | None = None,  # time of a pause over all fits, as in `fit`
    ) -> None:
        """Train at a flat rate that falls along half a cosine at the end.

        Raises as `fit_one_cycle` does.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner(n_train=4)
        >>> with learn.no_bar(): learn.fit_flat_cos(1, 0.1, pct_start=0.5)
        >>> [round(lr, 4) for lr in learn.recorder.lrs]
        [0.1, 0.1, 0.1, 0.05]
        """

    @implemented_in('learnkit.callbacks.schedule')
    def fit_sgdr(
        self,
        n_cycles: int,
        cycle_len: int | str | Time,  # length of the first cycle: epochs, or a time: '5000ba'
        lr_max: Any = None,  # rate at each start, as in `fit_one_cycle`; None: the Learner's
        cycle_mult: int = 2,  # length of each cycle relative to the previous one
        cbs: Any = None,  # additional callbacks for this fit
        reset_opt: bool = False,  # create a new optimizer
        wd: float | None = None,  # weight decay; None: the Learner's
        start_epoch: int = 0,  # first epoch to train; earlier epochs are skipped
        resume: Any = False,  # checkpoint to resume, as in `fit`
        pause_at: int | str | Time | None = None,  # time of a pause over all fits, as in `fit`
    ) -> None:
        """Train in cycles (SGDR): in each cycle the rate falls to 0 along half a cosine.

        Source: Loshchilov and Hutter, 2017. Raises as `fit_one_cycle` does.

        >>> from learnkit.testing import synth_learner
        >>> with synth_learner(n_train=2).no_bar() as learn: learn.fit_sgdr(2, 1, 0.1)
        >>> [round(lr, 4) for lr in learn.recorder.lrs]
        [0.1, 0.05, 0.1, 0.0854, 0.05, 0.0146]
        """

    @implemented_in('learnkit.callbacks.schedule')
    def fine_tune(
        self,
        epochs: Any,  # epochs with all groups, or a budget such as '2h'
        base_lr: float = 2e-3,  # highest rate of the last group; halved when all groups train
        freeze_epochs: int = 1,  # number of initial epochs that train the last group alone
        lr_mult: float = 100,  # ratio of the last group's rate to the first one's, all groups
        pct_start: float = 0.3,  # as in `fit_one_cycle`, for the epochs with all groups
        div: float = 5.0,  # as in `fit_one_cycle`, for the epochs with all groups
        div_final: float = 1e5,  # as in `fit_one_cycle`, for both fits
        wd: float | None = None,  # weight decay; None: the Learner's
        moms: tuple[float, ...] | None = None,  # momentum, as in `fit_one_cycle`
        cbs: Any = None,  # additional callbacks for both fits
        reset_opt: bool = False,  # create a new optimizer
        start_epoch: int = 0,  # first epoch with all groups; if not 0, freeze epochs are skipped
        resume: Any = False,  # checkpoint of either fit to resume, as in `fit`
        pause_at: int | str | Time | None = None,  # time of a pause over all fits, as in `fit`
    ) -> None:
        """Train the last group alone, then all groups with graded rates, in one cycle each.

        The Learner's `splitter` defines the groups: the body of a pretrained model, and its new
        head. Raises as `fit_one_cycle` does.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner(splitter=lambda m: [[m.a], [m.b]])
        >>> with learn.no_bar(): learn.fine_tune(2, freeze_epochs=1)
        >>> [(row['fit'], row['epoch']) for row in learn.history]
        [(0, 0), (1, 0), (1, 1)]
        """

    @implemented_in('learnkit.callbacks.lr_finder')
    def lr_find(
        self,
        start_lr: Any = 1e-7,  # first rate, or list by parameter group
        end_lr: Any = 10,  # rate after `num_it` batches
        num_it: int = 100,  # number of batches; at least 6, as in fastai
        stop_div: bool = True,  # stop when the smoothed loss is four times its minimum
        show_plot: bool = True,  # plot the loss over the rates
        suggest_funcs: Any = valley,  # f(lrs, losses, num_it) -> (rate, point), several, or None
        ax: Any = None,  # matplotlib axes; None: a new figure
    ) -> Any:
        """Train a few batches with a growing rate, undo them, and return suggested rates.

        The rates are a named tuple. Weights, buffers, extra state, optimizer, random generators,
        loaders, history, counters and the attributes of every callback are restored, also if the
        search is interrupted. Lazy modules are initialized first, by a prediction of one batch.
        Nothing is written to disk. Callbacks with `remove_on_find` are left out; all
        others run as in a fit. `learn.lr_search` keeps the rates and losses, and
        `learn.recorder.plot_lr_find()` plots them again. The search needs memory for a second copy
        of the weights and the optimizer's state. Source: Smith, 2017.

        Raises `ScheduleError` for rates that do not grow, `OptionError` for an unusable function in
        `suggest_funcs`, and `LossError` if no finite loss was computed from the start.

        >>> from learnkit.callbacks.lr_suggestions import steep, valley
        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner()
        >>> with learn.no_bar():
        ...     rates = learn.lr_find(num_it=30, show_plot=False, suggest_funcs=(valley, steep))
        >>> rates._fields, learn.opt, len(learn.lr_search.lrs) <= 30
        (('valley', 'steep'), None, True)
        """

    @implemented_in('learnkit.callbacks.batch_size_finder')
    def find_batch_size(
        self,
        max_size: int | None = None,  # largest size to try; None: the number of training samples
        exact: bool = False,  # bisect between powers of two, to the exact size
    ) -> int:
        """Return the largest batch size with which a training step fits in memory.

        The sizes 2, 4, 8 ... are tried, with two steps each, until memory runs out: the result is a
        power of two. With `exact=True` the sizes up to the one that failed are bisected, and the
        result is the largest size itself. Batches repeat the samples of the loader's first batch.
        Samples of other shapes may need more memory, and other programs may use the same GPU, so
        leave some room.

        Everything is restored as by `lr_find`: weights, buffers, optimizer, random generators,
        loaders, counters and callbacks; the copies are in CPU memory. Callbacks run as in a fit,
        except `GradientAccumulation` and callbacks with `remove_on_find`.
        Microbatches are disabled: the result is also the largest `microbatch`.

        On the CPU, an operating system that overcommits memory ends the process without an error:
        set a limit (`ulimit -v`), or a small `max_size`.

        Raises the out-of-memory error if not even one sample fits, `FitError` during a run and with
        several ranks, and `OptionError` for a loader that is an iterator.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner()
        >>> learn.find_batch_size(max_size=100), learn.find_batch_size(100, exact=True), learn.opt
        (64, 100, None)
        """

    # -- reading ---------------------------------------------------------------------------------

    @property
    def x(self) -> Any:
        "Input of the batch, or a tuple of several inputs. Assign `xb` to change it."
        return detuplify(self.xb)

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

    @property
    def batch_source(self) -> Any:
        """Name of the loader that the batch comes from, if a `CombinedLoader` takes turns; else None.

        >>> from learnkit import Callback, CombinedLoader, Learner
        >>> from learnkit.testing import RegModel, synth_dls
        >>> loaders = {name: synth_dls(n_train=2).train for name in ('photo', 'drawing')}
        >>> learn = Learner(CombinedLoader(loaders, 'sequential'), RegModel(), nn.MSELoss())
        >>> look = Callback(before_batch=lambda cb: print(cb.batch_source))
        >>> with learn.no_bar(): learn.fit(1, cbs=look)
        photo
        photo
        drawing
        drawing
        """
        return getattr(self.dl, 'batch_source', None)

    @property
    def time(self) -> Timestamp:
        "Epochs, batches, steps, samples, tokens and seconds finished so far, over all fits of this Learner."
        amounts: dict[str, Any] = self.parts.counters.by_unit()
        amounts |= {unit: self.finished(unit) for unit in ('st', 'sec')}
        # rounding may bring a sum of shares above 1
        share = min(self.pct_train, 1.0) if self.fitting else None
        return Timestamp(**amounts, dur=share)

    def finished(self, unit: str) -> Any:
        """Return the amount finished so far in one unit of `learn.time`, as a plain number.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner()
        >>> with learn.no_bar(): learn.fit(2)
        >>> learn.finished('ep'), learn.finished('ba'), learn.finished('st')
        (2, 20, 20)
        """
        if unit == 'st':
            return self.parts.counters.steps + getattr(self.opt, 'n_steps', 0)
        if unit == 'sec':
            return self.parts.processes.seconds(self)
        return getattr(self.parts.counters, COUNTER_OF_UNIT[unit])

    @property
    def step_parameters(self) -> list[nn.Parameter]:
        "Parameters that the current step updates: the parameters of one optimizer (`turn`), or of all."
        return list(self.opt.parameters(self.turn))

    @property
    def eval_every(self) -> Any:
        """Interval of evaluations, for loaders without their own interval. None: never.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner()
        >>> learn.eval_every = '2ep'
        >>> learn.eval_every
        Time('2ep')
        """
        return self.parts.evaluations.every

    @eval_every.setter
    def eval_every(self, every: Any) -> None:
        self.parts.evaluations.every = as_every(every)

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
        self.parts.processes.stop(self)

    # -- freezing, precision and compilation -------------------------------------------------------

    create_opt = optimizer.create_opt
    freeze_to = optimizer.freeze_to
    freeze = optimizer.freeze
    unfreeze = optimizer.unfreeze

    @implemented_in('learnkit.callbacks.mixed_precision')
    def to_bf16(self) -> Self:
        """Compute the forward pass of all further batches in bfloat16: see `MixedPrecision`.

        >>> from learnkit.testing import synth_learner
        >>> synth_learner(default_cbs=False).to_bf16().to_bf16().cbs
        [MixedPrecision(amp_mode='bf16')]
        """

    @implemented_in('learnkit.callbacks.mixed_precision')
    def to_fp16(
        self,
        **scaler: Any,  # `init_scale`, `growth_factor`, `backoff_factor`, `growth_interval`
    ) -> Self:
        """Compute the forward pass of all further batches in float16, with gradient scaling.

        The options are passed to the gradient scaler: see `MixedPrecision`.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner(default_cbs=False).to_fp16()
        >>> learn.cbs
        [MixedPrecision(amp_mode='fp16')]
        >>> learn.to_fp32().cbs
        []
        """

    @implemented_in('learnkit.callbacks.mixed_precision')
    def to_fp32(self) -> Self:
        "Compute in the precision of the weights: remove `MixedPrecision`."

    @implemented_in('learnkit.callbacks.compile', 'compile_learner')
    def compile(
        self,
        step: bool = False,  # compile the whole training step, not only the model
        **options: Any,  # options of torch.compile: `mode`, `dynamic`, `backend`, `options`
    ) -> Self:
        """Compile the model, without replacing it, or with `step=True` the whole training step.

        The model's state dict keeps its keys. With `step=True`, training starts with an ordinary
        step, after which the optimizer has its state. `explain_step` reports which kind of step
        runs, and why. Compiled steps support SGD, Adam and AdamW of torch and of learnkit. Forward
        and backward alone are compiled, and the ordinary step of the optimizer follows, with
        accumulated gradients, microbatches, several optimizers or another optimizer, SAM and fp16.
        Callbacks that act within the step take part by a method `compiled_step`. After a compiled
        step `pred` and `loss_grad` are detached; the parameters' `grad` is not set if the update is
        compiled too.

        The step is compiled once for each shape of batches, up to 8: at once for the first shape,
        for another one when it comes the second time, such as the smaller last batch of the second
        epoch. With `dynamic=True` it is compiled once for all shapes. Random numbers, such as
        dropout masks, are drawn as in an ordinary step (inductor's `fallback_random`), unless
        `mode` is given.

        >>> from learnkit.testing import synth_learner
        >>> synth_learner().compile(step=True, backend='eager').explain_step()
        'The ordinary step runs: ...'
        """

    @implemented_in('learnkit.callbacks.compile')
    def explain_step(self) -> str:
        """Describe whether the compiled or the ordinary training step runs, and why.

        >>> from learnkit.testing import synth_learner
        >>> synth_learner().explain_step()
        'The ordinary step runs: `learn.compile(step=True)` was not called.'
        """

    # -- methods for a custom `train_batch` or `evaluate_batch` ------------------------------------

    forward = custom_batch.forward
    compute_loss = custom_batch.compute_loss
    optimize = custom_batch.optimize
    report_loss = custom_batch.report_loss

    # -- evaluation and prediction -----------------------------------------------------------------

    @implemented_in('learnkit.inference.validate')
    def validate(
        self,
        ds_idx: int | None = None,  # 0: training, 1: first validation loader; None: all validation
        dl: Any = None,  # loader to use instead, or its name in `dls`
        cbs: Any = None,  # additional callbacks for this run
    ) -> Values:  # None if a callback cancels the evaluation
        """Compute loss and metrics, and return them as a list with names: `[valid_loss, *metrics]` of each loader.

        Index the list by position or by name: `learn.validate()['accuracy']`.

        Counters, history, random generators and module modes are restored. A callback may call `validate` in any
        event; that callback is not called in the evaluation.

        Raises `LoaderError` for a loader that does not exist, and `EmptyLoaderError` for one without batches.

        >>> from learnkit import mae
        >>> from learnkit.testing import synth_learner
        >>> with synth_learner(metrics=mae).no_bar() as learn: valid_loss, error = learn.validate()
        >>> 0 <= error <= valid_loss ** 0.5
        True
        >>> with learn.no_bar(): learn.validate().names
        ['valid_loss', 'mae']
        """

    @implemented_in('learnkit.inference.predict')
    def get_preds(
        self,
        ds_idx: int = 1,  # loader to predict on: 0 training, 1 validation
        dl: Any = None,  # loader to use instead, or its name in `dls`
        with_input: bool = False,  # return the inputs, first
        with_decoded: bool = False,  # return decoded predictions (`loss_func.decodes`)
        with_loss: bool = False,  # return the loss of each sample, last
        act: Callable[[Any], Any] | None = None,  # activation; None: the loss function's, see below
        inner: bool = False,  # skip the events of fit and epoch, for use inside a callback
        reorder: bool = True,  # data-set order without dropped samples, if possible
        cbs: Any = None,  # additional callbacks for this run
        sink: Any = None,  # destination of the batches instead of memory: see below
        **kwargs: Any,  # further arguments of `GatherPredsCallback`
    ) -> Any:
        """Return predictions and targets of a loader on the CPU, concatenated along the first dimension.

        The predictions of a classifier are probabilities: `loss_func.activation` is applied. For torch's classification
        losses the activation is the softmax or sigmoid that the loss contains (`CrossEntropyLoss`, `BCEWithLogitsLoss`,
        as modules or functions; `NLLLoss`: the exponential). `act=lambda x: x` returns the model's outputs.

        With several ranks, every rank calls `get_preds`. Each rank predicts its shard and receives the predictions of
        all ranks; with loaders declared `sharded_already`, each rank receives the predictions of its shard only.

        The order of the result is: inputs, predictions, targets, decoded predictions, losses. Several inputs or targets
        are a list or tuple of tensors; targets are None if the loader has no targets. Samples of a shuffling loader are
        returned in data-set order, each once. Samples that a weighted or partial fastai loader draws are in data-set
        order too, each as often as drawn. A torch sampler that draws samples (WeightedRandomSampler) keeps the order of
        its draws, as do a list, an iterable data set, and a custom batch sampler.

        With a `sink`, memory use is constant and the sink is returned. The sink is a folder, which receives a file per
        batch (`000000.pt`, a dict for `torch.load`); the path of a `.npy` file, which receives the predictions only; or
        a function, called with the entries of each batch. Until complete, the folder or file is named `<name>.part`.
        Nothing is overwritten: an existing file or non-empty folder, also the `.part` of an interrupted run, raises
        `OptionError`. With several ranks, the sink is a function, or a folder that all ranks share, whose files are
        numbered in the order of the data.

        Raises `LoaderError` for a loader that does not exist, `EmptyLoaderError` for one without batches, and
        `OptionError` for a sink that cannot store the requested entries.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner(n_valid=2)
        >>> with learn.no_bar(): preds, targets = learn.get_preds()
        >>> preds.shape, targets.shape
        (torch.Size([32, 1]), torch.Size([32, 1]))
        """

    @implemented_in('learnkit.inference.predict')
    def predict_iter(
        self,
        dl: Any = None,  # loader, or its name in `dls`
        ds_idx: int = 1,  # loader if `dl` is None: 0 training, 1 validation
        with_input: bool = False,  # yield the inputs, first
        with_decoded: bool = False,  # yield decoded predictions (`loss_func.decodes`)
        with_loss: bool = False,  # yield the loss of each sample, last
        act: Callable[[Any], Any] | None = None,  # activation; None: as in `get_preds`
        inner: bool = False,  # skip the events of fit and epoch, for use inside a callback
        cpu: bool = True,  # move results to the CPU; False: keep them on the model's device
        cbs: Any = None,  # additional callbacks for this run
    ) -> Iterator[tuple[Any, ...]]:
        """Return an iterator over the predictions of each batch, computed on demand in the loader's order.

        Each batch is a separate run, and each item is what `get_preds` would return for the batch, up to random
        numbers. Memory use is constant. With several ranks, each rank receives its shard, and all of them have to
        iterate to the end.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner(default_cbs=False)
        >>> [tuple(preds.shape) for preds, targs in learn.predict_iter()]
        [(16, 1), (16, 1)]
        """

    @implemented_in('learnkit.inference.predict')
    def predict(
        self,
        item: Any,  # input of one sample as in the data set; a tuple for several inputs
        rm_type_tfms: Any = None,  # number of type transforms to skip (fastai data)
        with_input: bool = False,  # return the input, first
    ) -> tuple[Any, ...]:  # ([input,] label, decoded prediction, activated prediction)
        """Predict on one sample, as a batch that the loader's collate function makes.

        The label is the result of `dls.decode_batch` if the data has it (fastai), otherwise the class name in
        `dls.vocab`, otherwise the decoded prediction. `loss_func.decodes` decodes; with torch's own losses this is the
        most probable class, or the labels with a probability above 0.5.

        >>> from learnkit.testing import synth_learner
        >>> decoded, same, pred = synth_learner(default_cbs=False).predict(torch.ones(1))
        >>> pred.shape
        torch.Size([1])
        """

    @implemented_in('learnkit.inference.predict')
    def tta(
        self,
        ds_idx: int = 1,  # loader to predict on: 0 training, 1 validation
        dl: Any = None,  # loader to use instead, or its name in `dls`
        n: int = 4,  # number of predictions on augmented samples
        item_tfms: Any = None,  # other item transforms (fastai data)
        batch_tfms: Any = None,  # other batch transforms (fastai data)
        beta: float | None = 0.25,  # weight of the plain predictions; None: both, augmented first
        use_max: bool = False,  # maximum of the augmented predictions instead of their mean
        augment: Callable[..., Any] | None = None,  # f(*xb) -> augmented inputs, for any loader
        undo: Callable[[Any], Any] | None = None,  # f(preds) -> predictions of the plain inputs
    ) -> tuple[Any, Any]:  # predictions, targets
        """Predict with test-time augmentation: `lerp(augmented, plain, beta)`.

        fastai's data uses its training transforms. For any other loader `augment` computes augmented inputs of a batch,
        for example with a torchvision transform. Each of the `n` passes draws new random numbers; the random generators
        are restored. Several outputs are averaged separately.

        Predictions of each position, such as masks, move with the inputs: `undo` gets the model's outputs for an
        augmented batch, right after `augment` got the batch, and moves them back. Without `undo`, predictions with the
        size of the inputs cause a warning.

        Raises `OptionError` if the data has no augmentation, if `n` is not positive, or if the predictions of augmented
        inputs have another shape.

        >>> from learnkit.testing import synth_learner
        >>> preds, targs = synth_learner(default_cbs=False).tta(augment=lambda x: x + 0.1 * torch.randn_like(x))
        >>> preds.shape
        torch.Size([32, 1])

        A model that segments images, with mirrored images:

        >>> from learnkit import Learner
        >>> learn = Learner([(torch.rand(2, 3, 8, 8), torch.zeros(2, 1, 8, 8))], nn.Conv2d(3, 1, 1), nn.MSELoss())
        >>> masks, targs = learn.tta(0, n=1, augment=lambda x: x.flip(-1), undo=lambda masks: masks.flip(-1))
        """

    @implemented_in('learnkit.inference.show')
    def show_results(
        self,
        ds_idx: int = 1,  # loader whose first batch is shown: 0 training, 1 validation
        dl: Any = None,  # loader to use instead
        max_n: int = 9,  # maximum number of samples
        shuffle: bool = False,  # show random samples; for fastai's loaders
        **kwargs: Any,  # further arguments of the data's own `show_results`; images: `figsize`
    ) -> Any:
        """Show a batch with its predictions: images in a grid, other data as a table; return the figure or table.

        Wrong classes are marked, and classes are shown by their names in `dls.vocab` if available. Each image of a
        segmentation is followed by its target mask and the predicted one, with one legend. If the loader (as in
        fastai) or its data set has a method `show_results(batch, preds, max_n=..., **kwargs)`, that method is called
        with a whole batch and the decoded predictions instead. Loaders, random generators and the model are restored.

        Raises `OptionError` for `shuffle=True` if the loader cannot be copied with another order.

        >>> from learnkit import Learner
        >>> scores = torch.tensor([[3., 1.], [2., 0.]])
        >>> Learner([(scores, torch.tensor([0, 1]))], nn.Identity(), nn.CrossEntropyLoss()).show_results(ds_idx=0)
        x[0]  x[1]  target  predicted
           3     1       0          0
           2     0       1          0  wrong
        """

    # -- saving and loading ------------------------------------------------------------------------

    @implemented_in('learnkit.checkpoint.save_load')
    def save(
        self,
        file: str | Path,  # name below `path/model_dir`, or absolute path; `.pth` is appended
        with_opt: bool | None = None,  # save the optimizer's state; None: if an optimizer exists
    ) -> Path:
        """Save the weights, and return the path of the file.

        The file is written by `torch.save`: `{'model': ..., 'opt': ...}`, or the model's state dict only. A name that
        ends in `.safetensors` saves the weights only, in that library's format. The file is written atomically, and
        missing folders are created. With several ranks, every rank calls `save` and rank 0 writes.

        Raises `OptionError` for an invalid file name and for `with_opt` in a format that cannot hold the optimizer's
        state, and `OptimizerError` for `with_opt` without an optimizer. In these cases nothing is written.

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

    def load(
        self,
        file: str | Path,  # as for `save`
        with_opt: bool | None = None,  # load the optimizer's state; None: if the file has it
        device: torch.device | str | int | None = None,  # device to read the file to; None: CPU
        strict: bool = True,  # False: load matching names only, and convert other dtypes
        weights_only: bool = True,  # ignored (a parameter of fastai's): no code in a file is executed
    ) -> Self:
        """Load weights written by `save`, `torch.save` of a state dict, fastai or safetensors; return the Learner.

        No code in the file is executed. Values are copied: parameters remain the same objects. All entries are compared
        before any is copied. An optimizer that does not exist yet is created if a parameter requires gradients. The
        optimizer state in a fastai file has another format: only the weights are loaded, with a warning. `before_load`
        fires after the comparison, and `after_load` at the end.

        Raises `WeightsError` with every name, shape and dtype that differs, or for a file that is damaged or holds more
        than data. In these cases weights and optimizer are unchanged.

        >>> import tempfile
        >>> from learnkit.testing import synth_learner
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = (learn := synth_learner()).save(f'{folder}/line')
        ...     again = synth_learner().load(path)
        >>> torch.equal(again.model.a, learn.model.a)
        True
        """
        from learnkit.checkpoint.save_load import load

        return load(self, file, with_opt=with_opt, device=device, strict=strict)

    @implemented_in('learnkit.checkpoint.save_learner')
    def save_learner(
        self,
        fname: str | Path = 'learner.pth',  # name below `path`, or absolute path
        /,
        **model_config: Any,  # plain values that `load_learner` passes to the model's constructor
    ) -> Path:
        """Save weights and configuration in one file for `load_learner`, and return its path.

        The file holds tensors and plain values, and no code. The code, such as the model class, is passed to
        `load_learner`, so a file from an untrusted source is safe to load. The file holds the rate, the options of this
        Learner, the class names of its data (`dls.vocab`) and the names of model and loss; it does not hold the
        optimizer's state or the data. Raises `OptionError` for a value that is not plain.

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

    @implemented_in('learnkit.inference.export')
    def export(
        self,
        fname: str | Path = 'export.pt2',  # name below `path`, or absolute path; appends `.pt2`
        act: Callable[[Any], Any] | None = None,  # applied to outputs, e.g. `loss_func.activation`
        sample: Any = None,  # example inputs, tuple if several; None: shapes of the data's inputs
        # free axes besides the batch axis, by argument of `forward`: {'tokens': {1: 'length'}}
        dynamic_shapes: Mapping[str, Mapping[int, Any]] | None = None,
    ) -> Path:
        """Save the model as a program for serving (`torch.export`), for any batch size, and return the file's path.

        `dynamic_shapes` frees further axes, such as the length of a sequence or the size of an image. torch infers the
        bounds of an axis with a name; a `torch.export.Dim` states them. The program is then compared with the model
        at a second size. All other axes keep the size of the sample.

        The program is on the CPU, in evaluation mode, and runs without the model's code:
        `torch.export.load(path).module()(x)`. It does not include changes that callbacks make to a batch. The file also
        holds all-zero inputs with the sample's shapes, and no data. With several ranks, rank 0 writes the file.

        `torch.export.load` unpickles the sample inputs and can therefore execute code. Load only files that you have
        written; to exchange models use `save_learner`.

        Raises `ModelError` with torch's reason for a model that cannot be exported, and `OptionError` without a batch
        that defines the shapes, for a file name with another suffix, or for axes that the inputs lack.

        >>> import tempfile
        >>> from learnkit.testing import synth_learner
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     program = torch.export.load(synth_learner(path=folder).export()).module()
        >>> program(torch.ones(5, 1)).shape
        torch.Size([5, 1])
        """

    # -- checkpoints -------------------------------------------------------------------------------

    @implemented_in('learnkit.checkpoint.state')
    def checkpoint_state(self) -> dict[str, Any]:
        """Return the complete training state, copied to host memory, as plain values and tensors.

        The callback `Checkpoint` writes this state: model, loss function and optimizers, pending gradients, counters,
        history and every callback's state by its key, all random generators, and the position in the training data.
        `fit(n, resume=state)` resumes exactly from a state taken at `batch_checkpoint`, `epoch_checkpoint` or
        `iteration_checkpoint`. Outside of a fit, `load_checkpoint_state` restores the state.

        Raises `CheckpointError` at any other event of a run, at which only some callbacks have handled the event, and
        `CallbackError` for a callback's state that would not load safely.

        >>> from learnkit.testing import synth_learner
        >>> state = synth_learner().checkpoint_state()
        >>> sorted(state)  # doctest: +NORMALIZE_WHITESPACE
        ['buffers', 'callbacks', 'frozen', 'generators', 'grads', 'loop', 'loss_buffers', 'loss_func', 'model',
         'nondeterministic_state', 'optimizer', 'persistent', 'position', 'rng']
        """

    @implemented_in('learnkit.checkpoint.resume')
    def load_checkpoint_state(
        self,
        state: Mapping[str, Any],  # result of `checkpoint_state` of a Learner created the same way
    ) -> None:
        """Restore a checkpoint's state outside of a fit; `state` is copied and not changed.

        Weights, optimizers, counters, history, callbacks' states and random generators are restored. To continue
        training at the exact batch, use `fit(n, resume=state)`. All entries are compared before any is changed. Raises
        `WeightsError` with every difference, and `CheckpointError` for any other object.

        >>> from learnkit.testing import synth_learner
        >>> learn, other = synth_learner(), synth_learner()
        >>> with learn.no_bar(): learn.fit(1)
        >>> other.load_checkpoint_state(learn.checkpoint_state())
        >>> other.time.ba, torch.equal(other.model.a, learn.model.a)
        (10, True)
        """

    @implemented_in('learnkit.checkpoint.resume_check')
    def check_resume(
        self,
        n_batches: int | None = None,  # training batches of each run; None: see below
        stop_after: int | None = None,  # number of batches before the stop; None: half of them
    ) -> ResumeCheck:
        """Compare an uninterrupted run with a resumed one, bit by bit.

        The second run is saved to a file after `stop_after` batches and resumed from that file, with all random
        generators seeded differently, as in a new process. Weights, optimizer, generators, the data's position, history
        and the callbacks' states are compared. A difference means that some state is not part of the checkpoint. The
        result also names what has changed and no checkpoint holds, as `Checkpoint` does at the first checkpoint of a
        fit: an attribute of a module, a cache of the data set, an iterator in a callback.

        By default a run crosses two ends of an epoch, but has at most 50 batches, or 8 of a loader without a length.

        All state is restored, as with `lr_find`. Callbacks that write files (loggers, `Checkpoint`) are left out, and
        files saved below `learn.path` are written to a temporary folder. Raises `FitError` for invalid numbers of
        batches.

        >>> from learnkit import EMA
        >>> from learnkit.testing import synth_learner
        >>> bool(synth_learner(cbs=EMA()).check_resume())
        True
        """

    @implemented_in('learnkit.debug.rewind')
    def rewind(
        self,
        to: str
        | int
        | Time
        | None = None,  # the batch: 1234, '1234ba', '3ep' (its first), '5000sp'
        spike: bool = False,  # go to the largest jump of the loss, relative to the noise nearby
        fit: Callable[..., Any]
        | None = None,  # f(learn, resume=), which trained; None: `learn.fit`
        folder: str | Path | None = None,  # folder of the checkpoints; None: the Checkpoint's
        exact: bool = True,  # raise an error if the run cannot be repeated exactly; False: warn
    ) -> Moment:
        """Return the moment before a batch of an earlier run: the Learner is restored to its state then, bit for bit.

        Make the Learner as for training, with its callbacks. It trains from the nearest earlier checkpoint up to the
        batch, without loggers, checkpoints, rows and bars. `moment.batch` is the batch, `moment.indices` its samples in
        the data set. `moment.step()` repeats the step, `moment.step(lr=, without=, cbs=)` takes a different one.
        `moment.samples()` lists the samples with their losses. `learn.fit(n, resume=moment)` trains on from there as a
        branch, in its own folder.

        Raises `CheckpointError` where the run cannot be exact: a checkpoint has warned of it, torch has another
        version, a callback is missing, the fit has a different number of epochs, or a loss on the way differs from the
        record. Each look at the moment also compares its first loss. A later `fit` without `resume=moment` that would
        write into the folder of the run raises `CheckpointError`.

        >>> import tempfile
        >>> from learnkit import Checkpoint
        >>> from learnkit.testing import synth_learner
        >>> def make(folder):
        ...     _ = torch.manual_seed(0)
        ...     return synth_learner(path=folder, cbs=Checkpoint('5ba')).no_bar()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with make(folder) as learn, learn.no_logging(): learn.fit(2)
        ...     with make(folder) as again: moment = again.rewind('13ba')
        ...     print(again.time.ba, moment.step() == learn.recorder.smooth_loss.raw[13])
        13 True
        """

    @implemented_in('learnkit.engine.callback_state')
    def callback_states(self) -> dict[str, Any]:
        """Return the callbacks' states by key: the callback's `state_key`, or its name, made unique.

        For a callback without a `state_dict`, such as a fastai callback, the state is every attribute that has changed
        since the callback was added and is data: numbers, strings, tensors, arrays, paths, random generators, and
        lists, tuples, sets and dicts of data. Callbacks without a state are left out.

        Raises `CallbackError`, with the callback's name, for a state that would not load safely.

        >>> from learnkit import EMA
        >>> from learnkit.testing import synth_learner
        >>> sorted(synth_learner(cbs=[EMA(), EMA(0.9)]).callback_states())
        ['ema', 'ema_2', 'recorder', 'train_eval']
        """

    @implemented_in('learnkit.engine.callback_state')
    def load_callback_states(
        self,
        states: Mapping[str, Any],  # result of `callback_states` with the same callbacks
    ) -> None:
        """Load each state into its callback.

        A warning names the states without a callback, which are ignored, and the callbacks without a state, which are
        unchanged.

        >>> from learnkit.testing import synth_learner
        >>> learn, other = synth_learner(), synth_learner()
        >>> with learn.no_bar(): learn.fit(1)
        >>> other.load_callback_states(learn.callback_states())
        >>> len(other.recorder.losses)
        10
        """

    # -- distributed training ----------------------------------------------------------------------

    def distributed(
        self,
        strategy: str = 'ddp',  # 'ddp': replicated model; 'fsdp': sharded model
        checkpoint_activations: Any = None,  # modules of `ActivationCheckpointing`; None: keep all
        **options: Any,  # further arguments of `DistributedTraining`
    ) -> AbstractContextManager[Self]:
        """Return a context in which this Learner trains on all ranks of the process group.

        Start the script with `torchrun --nproc-per-node=2 script.py`; without torchrun, the script trains in a single
        process. See `DistributedTraining` for the options and exceptions.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner()
        >>> with learn.no_bar(), learn.distributed('ddp'): learn.fit(1)
        >>> len(learn.history), learn.world.size
        (1, 1)
        """
        from learnkit.callbacks.activation_checkpointing import ActivationCheckpointing
        from learnkit.distributed.callback import DistributedTraining

        cbs: list[Any] = [DistributedTraining(strategy, **options)]
        if checkpoint_activations is not None:
            cbs.append(ActivationCheckpointing(checkpoint_activations))
        return self.added_cbs(cbs)

    @implemented_in('learnkit.distributed.launch')
    def launch(
        self,
        fn: Callable[[Any], Any],  # f(learn) in each process: `lambda learn: learn.fit(3)`
        nproc: int = 2,  # number of processes
        **options: Any,  # arguments of `DistributedTraining`
    ) -> Any:
        """Start several processes, for example from a notebook, train in them, and load the result into this Learner.

        Each process calls `fn` with a copy of this Learner, in the context of `distributed(**options)`. Weights,
        optimizer, history, counters and callbacks' states of rank 0 are then loaded into this Learner, and the return
        value of `fn` on rank 0 is returned. Table rows and progress bars of rank 0 are shown in this process;
        interrupting the kernel ends all processes. Functions and classes of a notebook are pickled by value
        (`pip install cloudpickle`).

        Raises `OptionError` or `MissingExtraError` before a process is started, and `DistributedError` for an object
        that cannot be pickled, or with the traceback of the process that failed first. In these cases this Learner is
        unchanged.

        >>> from learnkit.testing import synth_learner
        >>> synth_learner().launch(lambda learn: learn.fit(1), nproc=0)
        Traceback (most recent call last):
        learnkit.core.errors.OptionError: nproc=0: pass a whole number, 1 or more.
        """

    @implemented_in('learnkit.distributed.compare')
    def check_replicas(self) -> None:
        """Compare weights, buffers and the optimizer's state of all ranks.

        Every rank calls `check_replicas`. Raises `DistributedError` on every rank, with the names of the tensors that
        differ.

        >>> from learnkit.testing import synth_learner
        >>> synth_learner().check_replicas()
        """

    # -- metrics and logged values -----------------------------------------------------------------

    @property
    def metrics(self) -> L:
        """The metrics; assign functions, `Metric` or torchmetrics objects.

        >>> from learnkit import mae, mse
        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner(metrics=mae)
        >>> learn.metrics = [mae, mse]
        >>> learn.metrics
        [ElementMean(mae), ElementMean(mse)]
        """
        return self._metrics

    @metrics.setter
    def metrics(self, metrics: Any) -> None:
        self._metrics = as_metrics(metrics)

    @property
    def smooth_loss(self) -> Any:
        """The smoothed training loss of the last step, as a 0-dim tensor.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner()
        >>> with learn.no_bar(): learn.fit(1)
        >>> learn.smooth_loss.shape, bool(learn.smooth_loss == learn.recorder.losses[-1])
        (torch.Size([]), True)
        """
        if recorder_of(self) is None and 'smooth_loss' in vars(self):
            return vars(self)['smooth_loss']
        value = self._get_recorder().smooth_loss.value
        if value is None:
            raise MissingAttribute(
                'smooth_loss', self, why='It exists from the first training step on.'
            )
        return value

    @smooth_loss.setter
    def smooth_loss(self, value: Tensor) -> None:
        "Store the value that fastai's Recorder assigns, in a Learner without learnkit's Recorder."
        vars(self)['smooth_loss'] = value

    @property
    def history(self) -> History:
        "The values that the Recorder has recorded: one dict per epoch, over all fits."
        return self._get_recorder().history

    def _get_recorder(self) -> Recorder:
        recorder = recorder_of(self)
        if recorder is None:
            raise MissingAttribute('recorder', self, why='Add it: `learn.add_cb(Recorder())`.')
        return recorder

    def log(self, name: str, value: Any, weight: Any = 1, shown: bool = True) -> None:
        """Average a named value over the epoch, on its device, as a column of the history.

        With `weight=None` the latest value is recorded instead of the mean. `shown=False` leaves the column out of the
        printed table. A value logged after the Recorder has recorded the epoch (in `after_epoch` with an `order` above
        50) is added to the epoch's row of the history, but is not printed, and each process keeps its own. In an
        evaluation the name gets the prefix `valid_`, or the loader's name and `/`. The value is passed to every
        callback with a method `receive_log(name, value, weight, shown)`: the Recorder, and each logger. Raises
        `MetricError` for the name of a loss or metric column.

        >>> from learnkit import Callback
        >>> from learnkit.testing import synth_learner
        >>> def note(cb): cb.learn.log('bs', len(cb.x))
        >>> with synth_learner(cbs=Callback(before_batch=note)).no_bar() as learn: learn.fit(1)
        >>> learn.history[0]['bs'], learn.history[0]['valid_bs']
        (16.0, 16.0)
        """
        if self.parts.evaluations.running or 'validate' in self.run.levels:
            name = (
                f'valid_{name}' if self.dl_name in ('valid', 'train') else f'{self.dl_name}/{name}'
            )
        self.parts.callbacks.notify('receive_log', name, value, weight, shown)

    def show_training_loop(self) -> None:
        """Print the events of a fit in order with the callbacks that run at each, and the features that replace a step.

        >>> from learnkit.testing import synth_learner
        >>> synth_learner().show_training_loop()  # doctest: +ELLIPSIS
        - after_create
        - before_load
        - after_load
        - before_fit         [TrainEvalCallback, Recorder, ProgressCallback]
        ...
        """
        training = self.training
        for m in LIFECYCLE:
            if m.event in ('before_train', 'before_validate'):
                training = m.event == 'before_train'
            cbs = [] if m.is_note else self.ordered_cbs(m.event, training)
            entry = m.event if m.is_note else f'- {m.event:<18}'
            callbacks = f' {cbs}' if cbs else ''
            print(f'{"  " * m.depth}{entry}{callbacks}'.rstrip())
        print(
            'seams, each with the feature that runs its own function there; -: the loop runs its own'
        )
        for name, what in SEAMS.items():
            print(f'seam {name:<7} {self.seams.holders.get(name, "-"):<12} {what}')

    def to_detach(self, b: Any, cpu: bool = True, gather: bool = True) -> Any:
        """Detach the tensors of a nested batch; a loader's method `to_detach` overrides this method.

        >>> from learnkit.testing import synth_learner
        >>> synth_learner().to_detach([torch.ones(2, requires_grad=True) * 2])
        [tensor([2., 2.])]
        """
        loader_method = getattr(self.dl, 'to_detach', None)
        return loader_method(b, cpu, gather) if loader_method else to_detach(b, cpu)

    # -- inspection and debugging ------------------------------------------------------------------

    @implemented_in('learnkit.callbacks.model_summary', 'summarize_learner')
    def summary(self) -> Summary:
        """Summarize the model, layer by layer, and its training.

        The notes name the optimizer, the loss, frozen groups and callbacks. The shapes come from
        one batch of the training loader (during a fit, the current batch), which passes through the
        model and its callbacks as in prediction. Random generators, loaders, buffers such as
        BatchNorm's, extra state and module modes are restored; lazy modules are initialized.

        Raises `LoaderError` if every loader is an iterator, because a batch would be lost.

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

    @implemented_in('learnkit.debug.report', 'write_report')
    def report(
        self,
        fname: str | Path = 'report.html',  # name below `path`, or absolute path; appends `.html`
        predictions: bool = True,  # predict on the first validation loader
        top_k: int = 9,  # number of samples with the largest losses to show
    ) -> Path:
        """Write a report of the run as one HTML file, and return its path.

        The file holds the settings, the history with its curves, the schedule of the last fit, the
        layers of the model, data, seeds, machine and versions (as `python -m learnkit env` prints
        them), and the samples with the largest losses. A classifier's report has the confusion
        matrix, a regression model's a plot of predictions over targets. Parts without data are left
        out. The file contains no script, loads nothing, and follows the browser's light or dark
        mode. Names of classes and callbacks are escaped. An existing file is replaced.

        During a fit, a callback may write the report at any event: weights, counters, history,
        random generators and the order of the data are unchanged. The file is written atomically.
        With several ranks, every rank calls `report` and rank 0 writes. Plots need matplotlib.

        Raises `OptionError` for a folder that does not exist and for an invalid file name.

        >>> import tempfile
        >>> from learnkit.testing import synth_learner
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with synth_learner(path=folder).no_bar() as learn: learn.fit(1)
        ...     text = learn.report('run.html').read_text()
        >>> text.count('<h1>RegModel</h1>'), '<script' in text
        (1, False)
        """

    @implemented_in('learnkit.loggers.values', 'configuration')
    def gather_args(self) -> dict[str, Any]:
        """Return the options of the Learner, its data and callbacks, as loggers record them.

        fastai's loggers call this method.

        >>> from learnkit.testing import synth_learner
        >>> synth_learner().gather_args()['model']
        'RegModel'
        """

    @implemented_in('learnkit.debug.trace')
    def explain(
        self,
        event_name: str,  # name of the event
    ) -> Handlers:
        """List the callbacks that run at an event, in order, with the file and line of each function.

        >>> from learnkit.testing import synth_learner
        >>> [h.function for h in synth_learner().explain('after_epoch')]
        ['TrainEvalCallback.after_epoch', 'Recorder.after_epoch']
        """

    @implemented_in('learnkit.debug.trace', 'list_metric_names')
    def metric_names(self) -> dict[str, str]:
        """Return every recorded or logged name, with its meaning.

        >>> from learnkit.testing import synth_learner
        >>> synth_learner().metric_names()
        {'train_loss': 'training loss, mean of the epoch', 'valid_loss': 'a column of the history'}
        """

    @implemented_in('learnkit.debug.trace')
    def trace(self) -> AbstractContextManager[Trace]:
        """Return a context that records which callback changes what.

        Batch, loss, weights, hyperparameters and random generators are compared before and after
        each handler, which is slow. A warning names each callback that is declared as an observer
        and has changed something.

        >>> from learnkit import Callback
        >>> from learnkit.testing import synth_learner
        >>> def double(cb): cb.learn.xb = tuple(2 * x for x in cb.xb)
        >>> learn = synth_learner(n_train=1, cbs=Callback(before_batch=double))
        >>> with learn.no_bar(), learn.no_logging(), learn.trace() as changes: learn.fit(1)
        >>> print(next(c for c in changes if c.what == 'xb'))
        epoch 0, batch 0, before_batch: Callback(before_batch=double) changed xb
        """

    @implemented_in('learnkit.callbacks.replay')
    def replay(
        self,
        detect_anomaly: bool = False,  # use autograd's anomaly detection to locate NaN gradients
    ) -> Tensor | None:  # loss, if no exception was raised
        """Repeat the batch in which the last run failed, or the last training batch.

        The run needs the callback `Replay()`. The batch is repeated with the same random numbers,
        module modes, microbatches and precision. All its events fire, and the same exception is
        raised at the same line: set a breakpoint, run `%debug`, change the model or a callback, and
        replay again. With `detect_anomaly`, autograd names the operation with a NaN gradient, and
        the line of its forward call. The Learner's current weights are used. Weights, buffers,
        optimizer, counters, history, callbacks and random generators are restored, with or without
        an exception.

        The callbacks of the run are called, including those passed to `fit`. Callbacks that only
        track, save or stop (`remove_on_find`) are left out, unless one of them raised. `before_fit`
        and `before_epoch` fire first, and `cleanup` at the end. Disable a callback with
        `run = False`.

        Raises `FitError` if no batch was kept.

        >>> from learnkit import Replay
        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner()
        >>> with learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=Replay())
        >>> with learn.no_logging(): learn.replay().shape
        torch.Size([])
        """

    # -- contexts ----------------------------------------------------------------------------------

    def no_logging(self) -> Any:
        "Return a context in which no rows are printed."
        return replacing_yield(self, 'logger', noop)

    def no_mbar(self) -> Any:
        """Return a context without the progress bar over the epochs.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner()
        >>> with learn.no_mbar(), learn.no_logging(): learn.fit(1)
        >>> learn.time.ep
        1
        """
        return replacing_yield(self, 'create_mbar', False)

    @contextmanager
    def no_bar(self) -> Iterator[Self]:
        "Return a context without progress bars, graphs and, unless `logger` was set, rows."
        rows = self.no_logging() if self.logger is print else nullcontext()
        with self.removed_cbs([ProgressCallback, ShowGraph]), rows:
            yield self

    def loss_not_reduced(self) -> Any:
        """Return a context in which the loss is computed for each sample.

        >>> from learnkit.testing import synth_learner
        >>> from torch import nn
        >>> learn = synth_learner(loss_func=nn.MSELoss())
        >>> with learn.loss_not_reduced(): print(learn.loss_func.reduction)
        none
        """
        if hasattr(self.loss_func, 'reduction'):
            return replacing_yield(self.loss_func, 'reduction', 'none')
        if self.loss_func is None:
            return replacing_yield(self, 'loss_func', None)
        return replacing_yield(self, 'loss_func', partial(self.loss_func, reduction='none'))

    def validation_context(
        self, cbs: Any = None, inner: bool = False
    ) -> AbstractContextManager[None]:
        """Return a context for a manual validation: no rows or epoch bar; fit and epoch events unless `inner`.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner()
        >>> with learn.no_bar(), learn.validation_context(): learn.do_evaluation()
        >>> float(learn.recorder.final_record[0]) == learn.validate()[0]
        True
        """
        contexts = [
            self.no_logging,
            self.no_mbar,
            lambda: self.run.lock,
            lambda: self.added_cbs([*missing_train_eval(self), *as_list(cbs)]),
        ]
        return enter_all(contexts if inner else [*contexts, self._fire_outer_events])

    @contextmanager
    def _fire_outer_events(self) -> Iterator[Self]:
        "Fire the events around a validation: before_fit, before_epoch ... after_epoch, after_fit."
        with self.parts.processes.run(self, ''):
            self(_before_epoch)  # no level is open: a with-block cannot be skipped
            yield self
            self(_after_epoch)

    def __copy__(self) -> Self:
        raise CallbackError('A Learner cannot share its callbacks with a copy: use copy.deepcopy.')

    @contextmanager
    def _opened(self) -> Iterator[Self]:
        "Fire the events around a validation, and close the callbacks at the end of the outermost run."
        error: BaseException | None = None
        try:
            with self._fire_outer_events():
                yield self
        except BaseException as e:
            error = e
            raise
        finally:
            if not self.run.depth:
                raise_first(error, self._close())

    def __enter__(self) -> Self:
        self._open_blocks.append(self._opened())
        return self._open_blocks[-1].__enter__()

    def __exit__(self, *exc_info: Any) -> bool | None:
        return self._open_blocks.pop().__exit__(*exc_info)

    _note_error = note_error

    @override
    def _open_for_use(self) -> None:
        _open_learners.add(self)

    def close(self) -> None:
        """Close the resources of every callback; calling `close` twice has no effect.

        The Learner can be used, and closed, again. A Learner that still exists at interpreter exit is closed then.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner()
        >>> with learn.no_bar(): learn.fit(1)
        >>> learn.close()
        """
        raise_first(None, self._close())

    def _close(self) -> list[BaseException]:
        "Close every callback, and return the exceptions that were raised."
        if self.run.pause is not None:
            self.run.pause.open_pass.close()
        self.run.replay_source = self.run.pause = None
        self.run.not_paused = ''
        self.parts.positions.forget()
        if self not in _open_learners:
            return []
        _open_learners.discard(self)
        return call_each(self, 'close') + call_each(self, 'post_close')

    # -- attributes of the model and the callbacks -------------------------------------------------

    if TYPE_CHECKING:
        recorder: Recorder

    def __getattr__(self, name: str) -> Any:
        if (
            name.startswith(('__', *SHOWN_ELSEWHERE))
            or name in _MISSING_REASONS
            or 'model' not in self.__dict__
        ):
            raise MissingAttribute(name, self, why=_MISSING_REASONS.get(name, ''))
        if defined_on_class(self, name):
            return object.__getattribute__(self, name)  # raises the property's own error
        model = self.model
        try:
            return getattr(model, name)
        except AttributeError:
            if defined_on_class(model, name):
                return object.__getattribute__(model, name)
        raise MissingAttribute(name, self, model)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__()} - _UNLISTED)

    __repr__ = learner_text
    _repr_html_ = never_raising(learner_html)


@atexit.register
def _close_all() -> None:
    "Close the callbacks of every Learner that is still open."
    raise_first(None, [e for learn in list(_open_learners) for e in learn._close()])


def load_learner(
    path: str | Path,  # file written by `learn.save_learner`
    model: nn.Module | Callable[..., nn.Module] | None = None,  # model, or f(**model_config)
    dls: Any = None,  # data, as for `Learner`; None: pass a loader to each call
    loss_func: Callable[..., Any] | None = None,  # loss function, as for `Learner`
    device: torch.device | str | None = None,  # device without `dls`; None: a GPU if available
    cpu: bool = False,  # fastai's spelling of `device='cpu'`
    **kwargs: Any,  # further arguments of `Learner`; they override the file's
) -> Learner:
    """Create a Learner with the weights and options of a file, ready to predict, validate or train.

    The file holds no code, so a file from an untrusted source is safe to load. `model` is a class or function, called
    with the configuration that was passed to `save_learner`, or a model instance. Without `dls`, pass a loader to each
    call: `learn.get_preds(dl=...)`. `learn.dls.vocab` holds the class names.

    Raises `OptionError` without `model`, `WeightsError` for a file that is damaged, has another format, or does not fit
    the model (all differences are listed, and the model is unchanged), and `ModelError` if `model` does not return a
    module.

    >>> import tempfile
    >>> x = torch.ones(8, 3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     learn = Learner([(x, x[:, :2])], nn.Linear(3, 2), nn.MSELoss(), path=folder)
    ...     path = learn.save_learner('net.pth', in_features=3, out_features=2)
    ...     again = load_learner(path, model=nn.Linear, loss_func=nn.MSELoss(), cpu=True)
    >>> torch.equal(again.model.weight, learn.model.weight)
    True
    """
    from learnkit.checkpoint.save_learner import build_learner

    learner_device = 'cpu' if cpu else device
    return build_learner(
        Learner, as_local_path(path), model, dls, loss_func, learner_device, **kwargs
    )
