"""Row 27: NaN or Inf in loss or gradient, with the guard on. It stops before the step; the error names the source."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from learnkit import Callback, Learner
from learnkit.callbacks import GuardNonFinite
from learnkit.callbacks.replay import KnownPass
from learnkit.core.errors import LossError
from learnkit.engine.positions import TrainingPositions
from tests.faults.fault_helpers import (
    fits_like_fresh,
    is_clean,
    make_learner,
    notes,
    raised_by,
    start_again,
)

pytestmark = pytest.mark.filterwarnings('ignore:microbatch=.* on its own')

BAD_BATCH = 2


class Keep(Callback):
    "Keep the bytes of weights and optimizer state as the bad batch begins."

    order = 90
    kept = b''

    def before_batch(self) -> None:
        if self.learn.training and self.learn.iter == BAD_BATCH:
            self.kept = everything(self.learn)


def everything(learn: Learner) -> bytes:
    tensors = [
        *learn.model.parameters(),
        *(v for s in learn.opt.state_dict()['state'].values() for v in s.values()),
    ]
    return b''.join(torch.as_tensor(t).detach().numpy().tobytes() for t in tensors)


def at_bad_batch(event: str, do: Callable[[Any], object]) -> Callback:
    def act(cb: Any) -> None:
        if cb.learn.training and cb.iter == BAD_BATCH:
            do(cb.learn)

    return Callback(**{event: act})


def spoil_input(learn: Any) -> None:
    "Spoil the second sample of the batch as the loader gave it."
    x = learn.batch[0].clone()
    x[1, 2] = math.nan
    learn.batch = (x, learn.batch[1])


def spoil_target(learn: Any) -> None:
    y = learn.batch[1].clone()
    y[3] = math.inf
    learn.batch = (learn.batch[0], y)


def spoil_loss(learn: Any) -> None:
    learn.loss_grad = learn.loss_grad * math.nan


def hook_output(learn: Any) -> Any:
    "Let a layer return an infinite value in the bad batch."

    def spoil(module: Any, args: Any, out: Tensor) -> Any:
        if learn.training and learn.iter == BAD_BATCH:
            return out * math.inf

    return learn.model[3].register_forward_hook(spoil)


def hook_gradient(learn: Any) -> Any:
    "Let the gradient of a weight be NaN in the bad batch."
    return learn.model[0].weight.register_hook(
        lambda grad: grad * (math.nan if learn.iter == BAD_BATCH else 1.0)
    )


def bad_loss(pred: Tensor, y: Tensor) -> Tensor:
    loss = (pred - y).square().mean()
    return loss / 0 if (y == 7.0).any() else loss


def mark_target(learn: Any) -> None:
    learn.batch = (learn.batch[0], learn.batch[1].clone().fill_(7.0))


def check(learn: Learner, keep: Keep, match: str) -> None:
    "The fit fails before the step, with a message that names the place and the tensor."
    start_again(learn)
    learn.parts.positions = KnownPass([40, 41, 42, 43])
    e = raised_by(lambda: learn.fit(1))
    assert (
        type(e) is LossError and f'at batch {BAD_BATCH} of epoch 0' in str(e) and match in str(e)
    ), str(e)
    assert notes(e)[0].startswith('in GuardNonFinite.')
    assert keep.kept
    assert everything(learn) == keep.kept, 'weights and optimizer are byte for byte as before'
    learn.parts.positions = TrainingPositions()
    if learn.microbatch:
        learn.microbatch = None
        del learn.parts.microbatches.index  # the number of the piece that it was at
    is_clean(learn)


SPOILED_EVENTS: list[tuple[str, Callable[[Any], object], str]] = [
    ('after_draw', spoil_input, 'Not finite: input 0 in sample 41 of the data set (row 1).'),
    ('after_draw', spoil_target, 'target 0 in sample 43 of the data set (row 3).'),
    (
        'before_batch',
        lambda learn: setattr(learn, 'xb', (learn.xb[0] * math.nan,)),
        'input 0, as a callback left it',
    ),
    ('after_loss', spoil_loss, 'a callback has changed it since'),
    (
        'after_pred',
        lambda learn: setattr(learn, 'pred', learn.pred * math.inf),
        'Not finite: the predictions. The batch has the samples 40, 41, 42, 43 of the data set',
    ),
]


@pytest.mark.parametrize(('event', 'spoil', 'match'), SPOILED_EVENTS)
@pytest.mark.parametrize('microbatch', [None, 2])
def test_in_the_batch_or_by_a_callback(
    event: str, spoil: Any, match: str, microbatch: int | None
) -> None:
    cbs = [keep := Keep(), GuardNonFinite(), at_bad_batch(event, spoil)]
    learn = make_learner(cbs, microbatch=microbatch)
    check(learn, keep, match)
    fits_like_fresh(learn, cbs)


@pytest.mark.parametrize(
    ('hook', 'match'),
    [
        (hook_output, 'Not finite: the output of 3 (Linear). The batch has the samples 40'),
        (hook_gradient, 'The gradient of 0.weight is not finite'),
    ],
)
def test_in_one_layer_or_one_gradient(hook: Any, match: str) -> None:
    learn = make_learner(cbs := [keep := Keep(), GuardNonFinite()])
    handle = hook(learn)
    check(learn, keep, match)
    handle.remove()
    fits_like_fresh(learn, cbs)


def test_in_the_loss_function() -> None:
    cbs = [keep := Keep(), GuardNonFinite(), at_bad_batch('after_draw', mark_target)]
    learn = make_learner(cbs, loss_func=bad_loss)
    check(learn, keep, 'are finite: see the loss function, bad_loss')
