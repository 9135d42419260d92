"""The state that callbacks of Composer read and write."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from learnkit.interop import from_composer
from learnkit.testing import RegModel
from tests.helpers.interop import Read, make_learner

learner = partial(make_learner, adapt=from_composer)


def test_parts_of_the_learner() -> None:
    cb = Read(
        lambda s: (
            s.dataloader_label,
            s.dataloader_len.value if s.dataloader_len is not None else None,
            s.precision,
            s.device.name,
            s.scaler,
            s.schedulers,
            s.algorithms,
            s.outputs.numel() == 0,
        ),
        'fit_start',
        'batch_start',
        'eval_start',
        'eval_after_forward',
    )
    learn = learner(cb)
    learn.fit(1)
    same = ('fp32', 'cpu', None, [], [])
    valid = [(name, 2, *same, False) for name in ('day', 'night') for _ in range(3)]
    assert cb.got == [*[('train', 3, *same, True)] * 4, *valid]
    assert learn.cbs[-1].view.callbacks == [cb]


def test_elapsed_share_and_stop() -> None:
    cb = Read(lambda s: s.get_elapsed_duration().value, 'batch_end', 'fit_end')
    learn = learner(cb)
    learn.fit(2)
    assert cb.got == [0, 0, 0, 0.5, 0.5, 0.5, 1]  # in the unit of the length

    cb = Read(lambda s: s.get_elapsed_duration().value, 'batch_end')
    learner(cb).fit('4ba')
    assert cb.got == [0.25, 0.5, 0.75, 1]

    class Stop:
        def batch_end(self, state: Any, logger: Any) -> None:
            state.max_duration = state.timestamp.batch

    learn = learner(Stop())
    learn.fit(5)
    assert learn.time.ba == 1


def weights_after(*cbs: Any, microbatch: int | None = None, n: int = 1) -> list[float]:
    learn = learner(*cbs, microbatch=microbatch)
    learn.fit(n)
    return [p.item() for p in learn.model.parameters()]


def weights_of_plain_loop(
    scale_x: float = 1.0, scale_loss: float = 1.0, shift: float = 0.0
) -> list[float]:
    torch.manual_seed(0)
    x, model = torch.randn(24, 1), RegModel()
    for i in range(0, 24, 8):
        loss = scale_loss * nn.functional.mse_loss(
            model(scale_x * x[i : i + 8]) + shift, 2 * x[i : i + 8] + 1
        )
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads, strict=True):
                p -= 0.1 * g
    return [p.item() for p in model.parameters()]


@pytest.mark.parametrize('microbatch', [None, 4])
@pytest.mark.parametrize('event', ['after_loss', 'before_backward'])
def test_a_loss_that_is_written_is_what_backward_runs_on(
    event: str, microbatch: int | None
) -> None:
    def double(self: Any, state: Any, logger: Any) -> None:
        state.loss = 2 * state.loss

    got = weights_after(type('Double', (), {event: double})(), microbatch=microbatch)
    assert got == pytest.approx(weights_of_plain_loop(scale_loss=2), rel=1e-5)
