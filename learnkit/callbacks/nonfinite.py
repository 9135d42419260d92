"""A guard against NaN and infinity: it looks at the loss, and at gradients, before they reach the weights."""
from __future__ import annotations

import math
from typing import Any

import torch
from fastcore.basics import noop
from torch import Tensor

from learnkit.batch import map_tensors
from learnkit.callback import Callback
from learnkit.errors import (
    CancelBatchException,
    CancelFitException,
    CancelStepException,
    LossError,
    OptionError,
    did_you_mean,
)
from learnkit.gathering import Arriving
from learnkit.hints import warn_user
from learnkit.precision import MixedPrecision

__all__ = ['NonFiniteGuard', 'TerminateOnNaNCallback', 'say']


def say(cb: Callback, text: str) -> None:
    "Print a line, above the bar where there is one; under `no_logging()` nothing."
    if cb.learn.logger is noop: return
    from tqdm import tqdm
    tqdm.write(text)


class NonFiniteGuard(Callback):
    """Act on a loss or a gradient that is NaN or infinite, before it reaches the weights or the recorded losses.

    `policy` says how: 'stop' ends the fit at once (as CancelFit does: after a NaN there is nothing to evaluate or to
    checkpoint), 'skip' leaves out the batch, or the step where a gradient is at fault, and 'raise' raises a
    `LossError`. It says which batch it was and where the first such values are: in the inputs, a parameter, the
    predictions; `n_skipped` counts.

    On the CPU each loss is looked at before it is learned from, in microseconds. On a GPU such a look waits for the
    device. There, with 'stop' and 'raise', each loss is looked at when it has arrived, while the next batch is
    computed: one batch late, when the weights and the recorded losses have it already. `every=1` looks before the
    step on any device, as 'skip' does; `every=20` looks at twenty losses at once, after the last of these batches.

    Gradients are looked at once a step, those that are about to be used: of all microbatches and accumulated batches,
    unscaled, SAM's second ones, before clipping. Those that overflow in fp16 are the scaler's, which skips the step and
    lowers its scale. Checkpointed: `n_skipped`.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(cbs=NonFiniteGuard())
    >>> _ = learn.model.b.data.fill_(float('nan'))
    >>> with learn.removed_cbs(learn.progress): learn.fit(5)
    The loss is nan at batch 0 of epoch 0. Not finite: parameter b, the predictions. The fit ends here.
    """
    # of a step: after SAM, accumulation and unscaling, before clipping
    order, run_valid, remove_on_find = MixedPrecision.order + 0.5, False, True

    def __init__(
        self,
        policy: str = 'stop',       # 'stop', 'skip' or 'raise'
        grads: bool = False,        # look at the gradients too, before each step
        every: int | None = None,   # batches from one look at the loss to the next; None: each, on a GPU a batch late
    ) -> None:
        if policy not in (known := ('stop', 'skip', 'raise')):
            raise OptionError(f'policy={policy!r}: give one of {known}.{did_you_mean(str(policy), known)}')
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise OptionError(f'every={every!r}: give a number of batches, 1 or more, or None.')
        if every is not None and every > 1 and policy == 'skip':
            raise OptionError(f"policy='skip' looks at every batch: leave out every={every}.")
        self.policy, self.grads, self.every, self.n_skipped = policy, grads, every, 0
        self._told = False       # this fit was told of a skipped batch
        self._start()

    def _start(self) -> None:
        self._finite: Tensor | None = None           # whether the loss of this batch is, of all its pieces so far
        self._unseen: list[tuple[int, Tensor]] = []  # batches, and the same of their losses, on their device
        self._arriving = Arriving()

    def before_fit(self) -> None:
        "Start anew."
        if self.learn.fitting: self._start(); self._told = False

    def before_batch(self) -> None: self._finite = None

    def before_backward(self) -> None:
        "Look at the loss, or note whether it is finite."
        learn = self.learn
        if learn._repeating and learn.opt.needs_closure: return  # a line search probes
        if learn.loss_grad.numel() != 1: return                  # the loop refuses it
        value = learn.loss + learn.loss_grad.detach()            # the one is recorded, the other is learned from
        if not self._is_late(value):
            if not math.isfinite(value.item()): self._act_on_loss(learn.iter)
            return
        finite = value.isfinite().reshape(())
        self._finite = finite if self._finite is None else self._finite & finite

    def _is_late(self, loss: Tensor) -> bool:
        "Tell whether losses are looked at later than before their backward pass."
        if self.every is not None: return self.every > 1
        return loss.device.type != 'cpu' and self.policy != 'skip'

    def after_batch(self) -> None:
        "Look at the losses that are due."
        if self._finite is None: return
        batch, self._finite = (self.learn.iter, self._finite), None
        if self.every is None: self._look(self._arriving.put(batch))
        else:
            self._unseen.append(batch)
            if len(self._unseen) >= self.every: self._look_at_rest()

    def after_train(self) -> None:
        "Look at what is left."
        self._look_at_rest()

    def _look_at_rest(self) -> None:
        unseen, self._unseen = self._unseen, []
        if unseen: unseen = list(zip([i for i, _ in unseen], torch.stack([ok for _, ok in unseen]).cpu(), strict=True))
        self._look([*self._arriving.rest(), *unseen])

    def _look(self, batches: list[tuple[int, Tensor]]) -> None:
        for i, finite in batches:
            if not finite: self._act_on_loss(i, seen_late=True)

    def before_step(self) -> None:
        "Look at the gradients."
        if not self.grads or self.learn._repeating: return
        grads = [p.grad for p in self.learn.opt.parameters() if p.grad is not None]
        # the largest, not the sum of squares, which overflows
        if math.isfinite(torch.nn.utils.get_total_norm(grads, norm_type=math.inf).item()): return
        named = {id(p): n for n, p in self.learn.model.named_parameters()}
        bad = [named.get(id(p), 'a parameter outside the model') for p in self.learn.opt.parameters()
               if p.grad is not None and not p.grad.isfinite().all()]
        at = self._place(self.learn.iter)
        self._act(f'The gradient of {_listed(bad)} is not finite at {at}.', CancelStepException)

    def _act_on_loss(self, i: int, seen_late: bool = False) -> None:
        if seen_late: text = f'The loss was not finite at {self._place(i)} (seen at batch {self.learn.iter}).'
        else:
            text = f'The loss is {self.learn.loss.item()} at {self._place(i)}.'
            if culprits := self._culprits(): text += f' Not finite: {_listed(culprits)}.'
        self._act(text, CancelBatchException)

    def _act(self, text: str, skip: type[Exception]) -> None:
        if self.policy == 'raise': raise LossError(text)
        if self.policy == 'stop':
            say(self, f'{text} The fit ends here.')
            raise CancelFitException
        self.n_skipped += 1
        if not self._told: warn_user(f'{text} It is skipped, and so are others like it in this fit.')
        self._told = True
        if skip is CancelBatchException:
            if self.learn._repeating: self.learn.opt.zero_grad()  # of pieces of SAM's second pass
            del self.learn.loss_grad                              # a batch without one is not recorded
        raise skip

    def _place(self, i: int) -> str: return f'batch {i} of epoch {self.learn.epoch}'

    def _culprits(self) -> list[str]:
        "Return the names of the tensors of this batch that are not finite."
        learn = self.learn
        named = [*((f'input {i}', x) for i, x in enumerate(learn.xb)),
                 *((f'target {i}', y) for i, y in enumerate(learn.yb)),
                 *((f'parameter {n}', p) for n, p in learn.model.named_parameters()), ('the predictions', learn.pred)]
        return [name for name, value in named if not _is_finite(value)]

    def cleanup(self) -> None:
        "Let go of losses."
        self._start()

    def state_dict(self) -> dict[str, Any]:
        "Return how many batches or steps were skipped."
        return {'n_skipped': self.n_skipped}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Go on counting."
        self.n_skipped = sd['n_skipped']


class TerminateOnNaNCallback(NonFiniteGuard):
    """End the fit when the loss is NaN or infinite: the guard's policy 'stop'.

    >>> TerminateOnNaNCallback().policy
    'stop'
    """

    def __init__(
        self,
        grads: bool = False,        # look at the gradients too
        every: int | None = None,   # batches from one look to the next; None: each, on a GPU a batch late
    ) -> None:
        super().__init__('stop', grads, every)


def _is_finite(value: Any) -> bool:
    seen: list[bool] = []

    def look(t: Tensor) -> Tensor:
        seen.append(not t.is_floating_point() or bool(t.isfinite().all()))
        return t
    map_tensors(value, look)
    return all(seen)


def _listed(names: list[str], most: int = 5) -> str:
    return ', '.join(names[:most]) + (f' and {len(names) - most} more' if len(names) > most else '')
