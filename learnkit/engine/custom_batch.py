# SPDX-License-Identifier: Apache-2.0
"""Building blocks of a custom training loop: `forward`, `compute_loss`, `optimize`, `report_loss`.

A subclass of the Learner overrides `train_batch`, and also `evaluate_batch` if evaluations need a
loss other than `loss_func`:

    class GAN(Learner):
        def train_batch(self):
            critic, fake = self.model.critic, self.forward(self.model.generator, noise(self.x))
            scores = self.forward(critic, torch.cat([self.x, fake.detach()]))
            self.optimize(critic_loss(scores), only='critic')
            self.optimize(generator_loss(self.forward(critic, fake)), only='generator')

`forward` fires `before_pred` and `after_pred`; `optimize` fires `after_loss` and the events around
backward and step. Each call is one forward pass, or one turn of an optimizer: autocast, loss scale,
clipping and accumulation apply to the parameters of the optimizer that steps (`turn`,
`step_parameters`).

Callbacks work in such a loop as in the default loop. A loop that calls the model and `backward`
itself is checked up to its first step, and a warning names the callbacks that have no effect in it.

Steps that evaluate the loss again (LBFGS, SAM) repeat the passes of the batch: `step_with_closure`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from learnkit.core.batch import describe
from learnkit.core.contexts import replacing_yield
from learnkit.core.errors import (
    CancelBackwardException,
    FitError,
    LossError,
    StepPutOff,
    add_note,
)
from learnkit.core.model import name_of
from learnkit.core.validation import precision_hint, warn_user
from learnkit.engine.callback import Callback
from learnkit.engine.dispatch import takes_every_event
from learnkit.engine.events import STEP_EVENTS
from learnkit.engine.loop import Loop
from learnkit.engine.loss import loss_of, total_loss
from learnkit.engine.run import clear_pass
from learnkit.engine.seams import run_passes
from learnkit.engine.traits import trait_of
from learnkit.optim.wrapper import Closure

if TYPE_CHECKING:
    from learnkit.learner import Learner

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
# events of a training batch that an override may skip
BATCH_EVENTS = [event for event in STEP_EVENTS if not event.startswith('after_cancel_')]


@dataclass(frozen=True, slots=True)
class OptimizeCall:
    "Arguments of the current `optimize` call."

    only: str | None = None  # optimizer that steps; None: all of them
    compute: Callable[[], Any] | None = None  # computes the loss; None: a tensor was given
    retain_graph: bool = False


class CustomBatch:
    """State of the calls of `forward` and `optimize` in a batch.

    Takes the seam `step` in a fit whose optimizer evaluates the batch again.
    """

    holder = 'an optimizer with a closure'

    def __init__(self) -> None:
        self.call: Any = None  # current call of `optimize`
        self.calls_modules = False  # `forward` calls modules directly, without their wrapper
        self.loss_sum: Any = 0  # sum of this batch's losses passed to `optimize`
        self.n_losses = 0  # number of these losses

    def seams(self, learn: Learner) -> dict[str, Any] | None:
        "Return the step with a closure, if the optimizer needs one."
        return {'step': step_with_closure} if learn.opt.needs_closure else None

    @contextmanager
    def opened(self, learn: Learner, call: OptimizeCall) -> Iterator[None]:
        "Set the current `optimize` call, and the optimizer that it steps, within a context."
        before = self.call, learn.turn
        self.call = call
        learn.turn = call.only
        try:
            yield
        finally:
            self.call, learn.turn = before


def forward(
    learn: Learner,
    f: Callable[..., Any],  # the model, a part of it, or a function that calls modules
    *args: Any,  # arguments of `f`
    **kwargs: Any,  # keyword arguments of `f`
) -> Any:
    """Call `f(*args, **kwargs)` as a forward pass, and return its output.

    `before_pred` fires first. `f` runs in the callbacks' contexts of a forward pass, such as
    autocast. At `after_pred` the output is `self.pred`. The return value is `self.pred` after
    that event; with mixed precision it is float32. `self.pred` remains the output of the last
    call; assign the predictions for the metrics to `self.pred` at the end.

    With several ranks the modules are called directly, without `DistributedDataParallel`, and
    gradients are averaged before each step.

    >>> import torch
    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner()
    >>> learn.forward(learn.model, torch.ones(3, 1)).shape
    torch.Size([3, 1])
    """
    __tracebackhide__ = True
    learn('before_pred')
    with (
        replacing_yield(learn.parts.custom_batch, 'calls_modules', True),
        learn.contexts('forward'),
    ):
        try:
            learn.pred = f(*args, **kwargs)
        except Exception as e:
            hint = precision_hint(args, f) if isinstance(f, nn.Module) else ''
            add_note(e, f'{name_of(f)} got {describe((*args, *kwargs.values()))}{hint}')
            raise
        learn('after_pred')
    return learn.pred


def compute_loss(
    learn: Learner,
    pred: Any,
    *targets: Any,  # targets; if omitted, the targets of the batch, `self.yb`
) -> Any:
    """Return `loss_func(pred, *targets)`, computed in the contexts of a forward pass.

    In a custom `train_batch`, `MixUp` and `CutMix` blend only losses computed by this method.
    Raises `LossError` without a `loss_func`.

    >>> import torch
    >>> from learnkit.testing import synth_learner
    >>> float(synth_learner().compute_loss(torch.zeros(2), torch.ones(2)))
    1.0
    """
    __tracebackhide__ = True
    with (
        replacing_yield(learn.parts.custom_batch, 'calls_modules', True),
        learn.contexts('forward'),
    ):
        return learn.loss_func(pred, *targets) if targets else loss_of(learn, pred)


def optimize(
    learn: Learner,
    loss: Tensor | Mapping[str, Tensor] | Callable[[], Any],  # scalar, named parts, or f()
    only: str | int | None = None,  # name or index of the optimizer that steps; None: all
    retain_graph: bool = False,  # keep the graph for another loss that shares a part of it
) -> bool:
    """Take an optimizer step with the gradient of a loss; return False if no step was taken.

    Fires `after_loss`, runs the backward pass, fires `before_step`, steps, fires `after_step`,
    each with its events and contexts, and then clears the gradients. With `only`, one of
    several optimizers is affected: its gradients are unscaled, clipped and cleared, and the
    gradients of other parameters are unchanged. `GradientAccumulation` counts the batch's
    samples at each call, separately for each optimizer; a call that only accumulates returns
    False.

    Each call counts as one step (`learn.time.st`). A schedule advances once per batch. `EMA`
    averages after each step; with two steps per batch, `EMA(every=2)` averages once per batch. The
    batch's `loss` is the mean of its optimized losses. `self.log('critic_loss', loss)` records
    one loss in its own column.

    Optimizers that evaluate the loss several times, such as LBFGS, and `SAM` need a function as
    `loss`.

    Raises `OptimizerError` for an unknown optimizer, and for LBFGS if the loss is not a
    function; `FitError` outside of training; `LossError` for a loss without a gradient.

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
    if not learn.training:
        raise FitError(
            'optimize() was called outside of training. In `evaluate_batch` write '
            '`self.report_loss(loss)`.'
        )
    value: Any = loss
    compute = None if isinstance(value, (Tensor, Mapping)) or not callable(value) else value
    call = OptimizeCall(learn.opt.name_of(only), compute, retain_graph)
    own = learn.parts.custom_batch
    if 'loss_grad' not in learn.__dict__:  # the first loss of this batch
        own.loss_sum = own.n_losses = 0
    with own.opened(learn, call):
        learn.report_loss(value if compute is None else compute())
        own.loss_sum = own.loss_sum + learn.loss.detach()
        own.n_losses += 1
        stepped = _backward_and_step(learn)
    if own.n_losses > 1:
        learn.loss = own.loss_sum / own.n_losses
    return stepped


def take_step(
    learn: Learner,
    only: str | None = None,  # name of the optimizer that steps; None: all of them
    step: Callable[[], Any] | None = None,  # takes the step; None: the optimizer's own
) -> None:
    """Take a step of the optimizers with its events, after the gradients are computed.

    Raises `StepPutOff`, which ends the batch, while gradients accumulate for a later step.

    >>> from learnkit import Callback
    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(cbs=Callback(before_step=lambda cb: print('before')))
    >>> learn.create_opt()
    >>> take_step(learn)
    before
    """
    with learn.parts.custom_batch.opened(learn, OptimizeCall(only)):
        learn._take_step(step)


def report_loss(
    learn: Learner,
    loss: Tensor | Mapping[str, Tensor],  # scalar, or dict of named parts
) -> None:
    """Set the loss of the batch and fire `after_loss`; for a custom `evaluate_batch`.

    >>> import torch
    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner()
    >>> learn.report_loss(torch.tensor(2.))
    >>> learn.loss
    tensor(2.)
    """
    total: Tensor = loss if isinstance(loss, Tensor) else total_loss(learn, loss)
    learn.loss_grad = total
    learn.loss = total.clone()
    learn('after_loss')


def _backward_and_step(learn: Learner) -> bool:
    "Run the backward pass and the step of the current `optimize` call; return False if no step was taken."
    n_before = learn.opt.n_steps
    learn._with_events(partial(_backward_of_call, learn), 'backward', CancelBackwardException)
    try:
        learn._take_step()
    except StepPutOff:
        return False
    learn.opt.zero_grad(only=learn.turn)
    return bool(learn.opt.n_steps > n_before)


def _backward_of_call(learn: Learner) -> None:
    "Run the backward pass of the current `optimize` call; parameters of other optimizers keep their gradients."
    options = {'retain_graph': True} if learn.parts.custom_batch.call.retain_graph else {}
    others = nullcontext() if learn.turn is None else preserve_other_grads(learn.opt, learn.turn)
    with others:
        learn._backward(**options)


@contextmanager
def preserve_other_grads(opt: Any, only: str) -> Iterator[None]:
    "Return a context that preserves the gradients of all optimizers except one."
    active = set(opt.parameters(only))
    preserved = [(p, p.grad) for p in opt.parameters() if p not in active]
    for p, _ in preserved:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in preserved:
            p.grad = grad


# -- steps that evaluate the loss of the batch again: LBFGS, SAM -----------------------------------


def step_with_closure(learn: Learner) -> None:
    """Take the step of an optimizer that evaluates the batch again; the loop has evaluated it once already.

    What is recorded is the evaluation before the step. Callbacks that clip gradients clip those of every evaluation.
    """
    clips = [trait_of(cb, 'clip_step_gradients') for cb in learn.cbs]

    def evaluate() -> Tensor:
        learn.opt.zero_grad(only=learn.turn)
        with torch.enable_grad():  # a step may run without gradients
            repeat_passes(learn)
        for clip in clips:
            if clip is not None:
                clip()
        return learn.parts.processes.batch.mean_loss(learn)

    closure = Closure(evaluate, lambda: learn.parts.processes.batch.mean_loss(learn))
    before = {name: learn.__dict__.get(name) for name in ('pred', 'loss', 'loss_grad')}
    try:
        learn.opt.step(closure, only=learn.turn)
    except BaseException:
        learn.opt.clear_state(closures=True)  # an unfinished line search cannot be continued
        raise
    learn.__dict__.update(before)


def repeat_passes(learn: Learner) -> None:
    "Run the forward and backward passes of the batch again, without the step."
    call = learn.parts.custom_batch.call
    with replacing_yield(learn.run, 'repeating', True):
        if call is not None:
            repeat_call(learn, call)
        elif learn.microbatch:
            learn.parts.microbatches.run(learn, learn.microbatch)
        else:
            clear_pass(learn)
            (learn.seams.passes or run_passes)(learn)


def repeat_call(learn: Learner, call: OptimizeCall) -> None:
    "Compute the loss of the current `optimize` call again, with the backward pass."
    if call.compute is None:
        raise make_repeat_error('A second pass')
    clear_pass(learn)
    learn.report_loss(call.compute())
    learn._with_events(partial(_backward_of_call, learn), 'backward', CancelBackwardException)


def make_repeat_error(caller: str) -> LossError:
    "Return the error for a loss that must be computed again but was passed as a tensor."
    return LossError(
        f'{caller} computes the loss again, and optimize() was given a tensor: pass it a function '
        'that computes it, `self.optimize(lambda: ...)`.'
    )


# -- callbacks that have no effect in a custom loop ------------------------------------------------


def list_overrides(learn: Learner, base: type[Loop] = Loop) -> list[str]:
    "Return the names in `BATCH_METHODS` that the class of a Learner overrides, compared to a base class."
    return [name for name in BATCH_METHODS if getattr(type(learn), name) is not getattr(base, name)]


def replaces_batch(learn: Learner) -> bool:
    "Return True if `_do_one_batch` is overridden: its passes cannot be run again."
    return type(learn)._do_one_batch is not Loop._do_one_batch


class EventCheck(Callback):
    """Warn of callbacks whose events a custom loop does not fire.

    `fit` adds this callback for a Learner that overrides a method of the batch. It notes the events that it gets
    itself, up to the first batch with a step. No state is checkpointed.
    """

    order = -10_000
    run_in = 'fit'
    run_valid = False
    remove_on_find = True
    runs_first = ('before_step',)

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._n_steps = 0  # number of optimizer steps before the batch

    def before_batch(self) -> None:
        self._n_steps = self.learn.opt.n_steps

    @override
    def run_event(self, event_name: str) -> Any:
        "Note the event, and run its method."
        self._seen.add(event_name)
        return super().run_event(event_name)

    def after_batch(self) -> None:
        "After the first step, warn of callbacks that handle events that did not fire."
        learn = self.learn
        callbacks = learn.parts.callbacks
        if learn.opt.n_steps == self._n_steps:
            return
        callbacks.hold([self])
        waiting: dict[str, list[str]] = {}
        for event in BATCH_EVENTS:
            for _, switch, cb in callbacks.plain_tables[True][event]:
                if event not in self._seen and switch and waits_for_events(cb):
                    waiting.setdefault(type(cb).__name__, []).append(event)
        if waiting:
            summary = '; '.join(
                f'{name} waits for {" and ".join(events)}' for name, events in waiting.items()
            )
            warn_user(
                f'{type(learn).__name__} trains by its own `{list_overrides(learn)[0]}`, which does not fire '
                f'every event of a batch: {summary}. Write the batch as `train_batch`, with `self.forward(...)` '
                'and `self.optimize(...)`.'
            )

    def cleanup(self) -> None:
        self.learn.parts.callbacks.release([self])


def waits_for_events(cb: Any) -> bool:
    "Return True for a callback that has no effect if its events do not fire."
    return trait_of(cb, 'needs_events') and not takes_every_event(type(cb))
