"""Pauses and errors together with features that change a batch, a step or the weights of an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from learnkit import EMA, SAM, Callback, GradientAccumulation, Learner, MixedPrecision, MixUp
from learnkit.callbacks import Replay
from learnkit.core.errors import FitError
from learnkit.interop import from_lightning
from tests.checkpoint.test_pause import end_of, make

pytestmark = pytest.mark.filterwarnings('ignore:microbatch=.* on its own')

COMBINED: dict[str, Callable[[], Learner]] = {
    'microbatches': lambda: make(microbatch=2),
    'accumulation': lambda: make(GradientAccumulation(batches=2)),
    'accumulated microbatches': lambda: make(GradientAccumulation(batches=2), microbatch=2),
    'bf16': lambda: make(MixedPrecision('bf16')),
    'EMA': lambda: make([EMA(0.9), GradientAccumulation(batches=2)]),
    'SAM': lambda: make(SAM()),
    'MixUp': lambda: make(MixUp()),
}


def run(learn: Learner, pause_at: list[Any]) -> tuple[Any, ...]:
    averages = [cb for cb in learn.cbs if isinstance(cb, EMA)]
    learn.fit_one_cycle(3, 0.05, pause_at=pause_at[0] if pause_at else None)
    for later in [*pause_at[1:], None][: len(pause_at)]:
        learn.validate()
        torch.rand(3)
        learn.resume(pause_at=later)
    assert learn.paused is None
    ends = [[t.tolist() for t in cb.state_dict()['averages'].values()] for cb in averages]
    return *end_of(learn), ends


@pytest.mark.parametrize('name', COMBINED)
def test_pauses(name: str) -> None:
    expected = run(COMBINED[name](), [])
    assert run(COMBINED[name](), ['1ba', '2ba', '5ba']) == expected


def fail_once(learn: Learner, event: str, nth: int) -> None:
    "Raise an error at the n-th time that an event fires in training, and continue."
    left = [nth]

    def fail(cb: Any) -> None:
        if cb.training:
            left[0] -= 1
            if not left[0]:
                raise ValueError('a bug')

    learn.add_cb(failing := Callback(**{event: fail}))
    with pytest.raises(ValueError, match='a bug'):
        learn.fit_one_cycle(3, 0.05)
    learn.remove_cb(failing)
    learn.validate()


# events at which a window of accumulated batches is not mixed with the failed batch, or is complete
@pytest.mark.parametrize(
    ('event', 'nth', 'with_replay'),
    [
        ('before_batch', 2, False),
        ('after_cancel_batch', 1, False),
        ('after_batch', 1, False),
        ('batch_checkpoint', 3, False),
        ('after_step', 1, False),
        ('after_backward', 2, True),
        ('after_loss', 1, True),
    ],
)
def test_a_window_continues_after_an_error(event: str, nth: int, with_replay: bool) -> None:
    expected = run(COMBINED['accumulation'](), [])
    learn = COMBINED['accumulation']()
    if with_replay:
        learn.add_cb(Replay())
    fail_once(learn, event, nth)
    learn.resume()
    assert (*end_of(learn), []) == expected


def test_a_window_that_an_error_has_mixed_is_refused() -> None:
    learn = COMBINED['accumulation']()
    fail_once(learn, 'after_backward', 2)
    assert learn.paused is None
    with pytest.raises(FitError, match='accumulated'):
        learn.resume()
    learn.fit(1)
    with pytest.raises(FitError, match='no fit is paused'):
        learn.resume()


@pytest.mark.full
def test_a_compiled_step() -> None:
    """Each fit, also one that continues, begins with an ordinary step, which rounds otherwise.

    The bias before the batch norm has a gradient of rounding errors only, which Adam scales to its rate: weights and
    the losses of evaluations differ, and those of training do not."""

    def losses(pause_at: list[Any]) -> list[float]:
        learn = make(EMA(0.9)).compile(step=True, backend='eager')
        run(learn, pause_at)
        assert learn.time.ba == learn.time.st == 9
        found: list[float] = learn.recorder.smooth_loss.raw
        return found

    assert losses(['1ba', '5ba']) == pytest.approx(losses([]), rel=1e-4)


class Module(nn.Module):
    "A module with the methods of a LightningModule."

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return (self.net(x) - y).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


def train_module(pause_at: str | None) -> list[float]:
    torch.manual_seed(0)
    learn = from_lightning(Module(), make().dls)
    with learn.no_bar(), learn.no_logging():
        learn.fit(2, pause_at=pause_at)
        if pause_at is not None:
            torch.rand(3)
            learn.resume()
    assert learn.time.ba == 6
    return [t for p in learn.model.parameters() for t in p.flatten().tolist()]


def test_a_lightning_module() -> None:
    assert train_module('4ba') == train_module(None)
