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
from learnkit.hints import warn_user

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

    On the CPU a look takes microseconds. On a GPU each waits for the batch's loss: `every=20` looks at twenty losses at
    once, and is then as many batches late. Do not check gradients under a scaler (fp16): it skips steps that
    overflow itself. Checkpointed: `n_skipped`.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(cbs=NonFiniteGuard())
    >>> _ = learn.model.b.data.fill_(float('nan'))
    >>> with learn.removed_cbs(learn.progress): learn.fit(5)
    The loss is nan at batch 0 of epoch 0. Not finite: parameter b, the predictions. The fit ends here.
    """
    order, run_valid, remove_on_find = -9, False, True

    def __init__(
        self,
        policy: str = 'stop',    # 'stop', 'skip' or 'raise'
        grads: bool = False,     # look at the gradients too, before each step
        every: int = 1,          # batches from one look at the loss to the next
    ) -> None:
        if policy not in (known := ('stop', 'skip', 'raise')):
            raise OptionError(f'policy={policy!r}: give one of {known}.{did_you_mean(str(policy), known)}')
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise OptionError(f'every={every!r}: give a number of batches, 1 or more.')
        if every > 1 and policy == 'skip':
            raise OptionError(f"policy='skip' looks at every batch: leave out every={every}.")
        self.policy, self.grads, self.every, self.n_skipped = policy, grads, every, 0
        self._unseen: list[tuple[int, Tensor]] = []  # batches and their losses, on their device
        self._told = False                           # this fit was told of a skipped batch

    def before_fit(self) -> None:
        "Start anew."
        if self.learn.fitting: self._unseen, self._told = [], False

    def before_backward(self) -> None:
        "Look at the loss."
        learn = self.learn
        if learn._repeating or learn.loss_grad.numel() != 1: return  # a line search probes; the loop refuses the other
        value = learn.loss + learn.loss_grad.detach()  # the one is recorded, the other is learned from
        if self.every == 1:
            if not math.isfinite(value.item()): self._act_on_loss(learn.iter)
            return
        self._unseen.append((learn.iter, value))
        if len(self._unseen) >= self.every: self._look()

    def after_train(self) -> None:
        "Look at what is left."
        self._look()

    def _look(self) -> None:
        unseen, self._unseen = self._unseen, []
        if not unseen: return
        finite = torch.stack([v.reshape(()) for _, v in unseen]).isfinite().tolist()
        if not all(finite): self._act_on_loss(unseen[finite.index(False)][0])

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

    def _act_on_loss(self, i: int) -> None:
        if self.every > 1: text = f'The loss was not finite at {self._place(i)} (seen at batch {self.learn.iter}).'
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
        if skip is CancelBatchException: del self.learn.loss_grad  # a batch without one is not recorded
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
        self._unseen = []

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
        grads: bool = False,     # look at the gradients too
        every: int = 1,          # batches from one look to the next
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
