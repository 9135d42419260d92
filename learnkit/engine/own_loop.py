"""The verbs of a training loop of your own: `forward`, `compute_loss`, `optimize`, `report_loss`.

A Learner that overrides `train_batch` is written with them, so that callbacks act in it as in the
ordinary loop. A loop that calls model and backward itself is looked at in its first batches, and
what cannot act in it is
named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from learnkit.core.batch import describe
from learnkit.core.errors import (
    CancelBackwardException,
    CancelStepException,
    FitError,
    LossError,
    OptimizerError,
    StepPutOff,
)
from learnkit.core.model import name_of
from learnkit.core.validation import precision_hint, warn_user
from learnkit.engine.callback import Callback
from learnkit.engine.dispatch import Entry, HandlerTable, takes_every_event
from learnkit.engine.events import CONTEXTS
from learnkit.engine.loop import Loop
from learnkit.engine.run import Turn, add_note

__all__ = ['OwnLoops', 'EventCheck', 'own_methods', 'replaces_batch', 'cannot_repeat']

# the methods of the loop of which an override may leave events out, from the outside in
BATCH_METHODS = (
    '_do_one_batch',
    'train_batch',
    '_do_pred_loss',
    '_do_grad_opt',
    '_backward',
    '_step',
    '_with_events',
)
# events and contexts of a training batch; each with the one that shows that its part was there
SHOWN_BY = {
    'before_pred': 'before_pred',
    'after_pred': 'after_pred',
    'after_loss': 'after_loss',
    'before_backward': 'before_backward',
    'after_backward': 'before_backward',
    'before_step': 'before_step',
    'after_step': 'before_step',
    **{name: name for name in CONTEXTS.values()},
}


class OwnLoops(Loop):
    """The part of the Learner that loops of one's own are written with.

    Override `train_batch`, and `evaluate_batch` where an evaluation needs another loss than
    `loss_func`:

        class GAN(Learner):
            def train_batch(self):
                critic, fake = self.model.critic, self.forward(self.model.generator, noise(self.x))
                scores = self.forward(critic, torch.cat([self.x, fake.detach()]))
                self.optimize(critic_loss(scores), only='critic')
                self.optimize(generator_loss(self.forward(critic, fake)), only='generator')

    `forward` fires `before_pred` and `after_pred`; `optimize` fires `after_loss` and the events
    around backward and step. Each call is a forward pass, or a turn, of its own for every callback:
    autocast, loss scale, clipping and accumulation act on it, on the parameters of the optimizer
    whose turn it is (`turn`, `step_parameters`).
    """

    _loss_sum: Any = None  # of the losses that were optimized in this batch
    _n_losses = 0

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
        self('before_pred')
        with self._apart(), self.contexts('forward'):
            try:
                self.pred = f(*args, **kwargs)
            except Exception as e:
                hint = precision_hint(args, f) if isinstance(f, nn.Module) else ''
                add_note(e, f'{name_of(f)} got {describe((*args, *kwargs.values()))}{hint}')
                raise
            self('after_pred')
        return self.pred

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
        if self.loss_func is None:
            raise LossError(
                'compute_loss() calls the `loss_func` of the Learner, and there is none: pass '
                '`loss_func=`, or compute the loss yourself.'
            )
        with self._apart(), self.contexts('forward'):
            return self.loss_func(pred, *targets) if targets else self.loss_of(pred)

    def optimize(
        self,
        loss: Tensor
        | Mapping[str, Tensor]
        | Callable[[], Any],  # a number, dict of parts, or f()
        only: str
        | int
        | None = None,  # name or index of the optimizer that steps; None: all
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
        if not self.training:
            raise FitError(
                'optimize() was called outside of training. In `evaluate_batch` write '
                '`self.report_loss(loss)`.'
            )
        given: Any = loss
        compute = None if isinstance(given, (Tensor, Mapping)) or not callable(given) else given
        turn = Turn(self.opt.name_of(only), compute, retain_graph)
        if compute is None and self.opt.evaluates_again(turn.only):
            raise OptimizerError(
                f'{self.opt!r} evaluates the loss several times a step: give optimize() a function '
                'that computes it, `self.optimize(lambda: ...)`.'
            )
        if 'loss_grad' not in self.__dict__:  # the first loss of this batch
            self._loss_sum, self._n_losses = None, 0
        with self.taking(turn):
            self.report_loss(given if compute is None else compute())
            self._count_loss()
            stepped = self._step_in_turn()
        if self._n_losses > 1:
            self.loss = self._loss_sum / self._n_losses
        return stepped

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
        if not isinstance(loss, Tensor):
            loss = self.total_loss(loss)
        self.loss_grad = loss
        self.loss = loss.detach().clone()
        self('after_loss')

    # -- inside --------------------------------------------------------------------------------

    @contextmanager
    def _apart(self) -> Iterator[None]:
        "Let a pass be one that no wrapper around the model takes part in."
        before, self.run.calls_modules = self.run.calls_modules, True
        try:
            yield
        finally:
            self.run.calls_modules = before

    def _count_loss(self) -> None:
        self._loss_sum = self.loss if self._loss_sum is None else self._loss_sum + self.loss
        self._n_losses += 1

    def _step_in_turn(self) -> bool:
        "Run backward and step of the turn; return False if no step was taken."
        n_before = self.opt.n_steps
        self._with_events(self._backward_in_turn, 'backward', CancelBackwardException)
        try:
            self._with_events(self._step, 'step', CancelStepException)
        except StepPutOff:
            return False
        self.opt.zero_grad(only=self.turn)
        return bool(self.opt.n_steps > n_before)

    def _backward_in_turn(self) -> None:
        assert self.run.turn is not None
        self._retains_graph = self.run.turn.retain_graph
        try:
            if self.turn is None:
                self._backward()
            else:
                with set_aside(self.opt, self.turn):
                    self._backward()
        finally:
            self._retains_graph = None

    def _repeat_turn(self) -> None:
        "Compute the loss of the turn again, with the backward pass."
        assert self.run.turn is not None
        if self.run.turn.compute is None:
            raise cannot_repeat('A second pass')
        self.clear_pass()
        self.report_loss(self.run.turn.compute())
        self._with_events(self._backward_in_turn, 'backward', CancelBackwardException)


def cannot_repeat(who: str) -> LossError:
    "Make the error for a loss that is to be computed again, and was given as a tensor."
    return LossError(
        f'{who} computes the loss again, and optimize() was given a tensor: give it a function '
        'that computes it, `self.optimize(lambda: ...)`.'
    )


@contextmanager
def set_aside(opt: Any, only: str) -> Iterator[None]:
    "Keep the gradients of all optimizers but one as they are."
    own = set(opt.parameters(only))
    kept = [(p, p.grad) for p in opt.parameters() if p not in own]
    for p, _ in kept:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in kept:
            p.grad = grad


# ---------------------------------------------------------- what cannot act in a loop of one's own


def own_methods(learn: Loop) -> list[str]:
    "Return the methods of a training batch that a Learner overrides."
    return [name for name in BATCH_METHODS if getattr(type(learn), name) is not getattr(Loop, name)]


def replaces_batch(learn: Loop) -> bool:
    "Return True if an override of `_do_one_batch` does not call the loop's own passes."
    method = type(learn)._do_one_batch
    called = set(getattr(getattr(method, '__code__', None), 'co_names', ()))
    return method is not Loop._do_one_batch and not called & {
        '_do_one_batch',
        '_do_pred_loss',
        'train_batch',
    }


class RecordingTable(HandlerTable):
    "The handlers of training; it remembers which events were looked up."

    def __init__(self, own: HandlerTable) -> None:
        super().__init__(own.callbacks, own.training)
        self.own = own
        self.seen: set[str] = set()

    def __getitem__(self, name: str) -> list[Entry]:
        self.seen.add(name)
        return self.own[name]


class EventCheck(Callback):
    """Warn of callbacks that wait for an event, or a context, which a loop of one's own does not
    have.

    `fit` adds it for a Learner that overrides a method of the batch. It looks at the batches up to
    the first step, or at one epoch where no step is counted; later ones cost nothing. No state.
    """

    order, run_valid, remove_on_find = 10_000, False, True

    def __init__(self) -> None:
        self._table: RecordingTable | None = None
        self._is_over = False  # this fit was judged
        self._n_steps = 0  # of the optimizer, as recording began
        self._n_whole = 0  # batches that were not cancelled

    def before_fit(self) -> None:
        "Refuse an optimizer that evaluates the loss again, where the loop cannot know which."
        learn = self.learn
        knows = any(
            getattr(type(learn), name) is not getattr(Loop, name)
            for name in ('_do_passes', '_step')
        )
        if learn.fitting and learn.opt.needs_closure and replaces_batch(learn) and not knows:
            raise OptimizerError(
                f'{learn.opt!r} evaluates the loss several times a step, and the `_do_one_batch` '
                f'of {type(learn).__name__} computes it by itself. Write it as `train_batch`, with '
                '`self.optimize(f)`, where f() computes the loss.'
            )

    def before_train(self) -> None:
        "Begin to record, in the first epoch of a fit."
        learn = self.learn
        if self._is_over or not learn.fitting or learn.tables is not learn.callbacks.tables:
            return
        self._table, self._n_steps, self._n_whole = (
            RecordingTable(learn.tables[True]),
            learn.opt.n_steps,
            0,
        )
        learn.tables = learn.tables[False], self._table

    def after_batch(self) -> None:
        "Judge after the first step."
        if self._table is None:
            return
        self._n_whole += 'after_cancel_batch' not in self._table.seen
        self._table.seen.discard('after_cancel_batch')
        if self.learn.opt.n_steps > self._n_steps:
            self._judge()

    def after_train(self) -> None:
        "Judge at the end of an epoch, where no step was counted."
        if self._n_whole:
            self._judge()
        else:
            self._stop()

    def _judge(self) -> None:
        if self._table is None:
            return
        seen, self._is_over = self._stop(), True
        waiting: dict[str, list[str]] = {}
        for event, shown_by in SHOWN_BY.items():
            if seen & {event, shown_by}:
                continue
            for _, switch, cb in self.learn.callbacks.tables[True][event]:
                if switch and waits_for_events(cb):
                    waiting.setdefault(type(cb).__name__, []).append(event)
        if not waiting:
            return
        what = '; '.join(
            f'{name} waits for {" and ".join(events)}' for name, events in waiting.items()
        )
        learn = self.learn
        own = own_methods(learn)
        method = own[0] if own else 'loop'
        warn_user(
            f'{type(learn).__name__} trains by its own `{method}`, which does not fire every event '
            f'of a batch, so that callbacks do not act as they should: {what}. Write the batch as '
            '`train_batch`, with `self.forward(...)` and `self.optimize(...)`.'
        )

    def _stop(self) -> set[str]:
        "Let the loop read its own tables again, and return what was looked up."
        table, self._table, learn = self._table, None, self.learn
        if table is None:
            return set()
        if learn.tables[True] is table:
            learn.tables = learn.callbacks.tables
        return table.seen

    def cleanup(self) -> None:
        "Stop recording."
        self._stop()
        self._is_over = False


def waits_for_events(cb: Any) -> bool:
    "Return True for a callback that a loop without its events keeps from acting."
    return getattr(cb, 'needs_events', True) and not takes_every_event(cb)
