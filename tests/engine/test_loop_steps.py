"""All loops take their steps in one function, with the same events in the same order."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from learnkit import (
    SAM,
    SGD,
    Callback,
    CancelBackwardException,
    CancelStepException,
    GradientAccumulation,
    Learner,
)
from learnkit.core.errors import StepPutOff
from learnkit.engine.events import STEP_EVENTS
from learnkit.interop import from_lightning

N_BATCHES = 6
STEP = ['after_loss', 'before_backward', 'after_backward', 'before_step', 'after_step']
LOSS = STEP[:3]  # events of a batch, or a part of one, without a step


def batches() -> list[tuple[Tensor, Tensor]]:
    gen = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 3, generator=gen), torch.randn(4, 1, generator=gen)) for _ in range(6)]


class Watch(Callback):
    "Record the events from `after_loss` to `after_step`."

    order = 200
    run_valid = False

    def __init__(self) -> None:
        self.events: list[str] = []

    def run_event(self, event_name: str) -> Any:
        if event_name in STEP_EVENTS[STEP_EVENTS.index('after_loss') :]:
            self.events.append(event_name)


class Levels(Learner):
    "Count how often the level of a step is opened: an event of `_take_step` would fire so often."

    n_opened = 0

    def _take_step(self, step: Callable[[], Any] | None = None) -> None:
        due = self.parts.callbacks.is_step_due()
        self.n_opened += due
        super()._take_step(step)


class Own(Levels):
    def train_batch(self) -> None:
        self.stepped = self.optimize(self.compute_loss(self.forward(self.model, self.x)))


class Twice(Levels):
    def train_batch(self) -> None:
        for _ in range(2):
            self.optimize(lambda: self.compute_loss(self.forward(self.model, self.x)))


class Module(nn.Module):
    automatic_optimization = True

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 1)

    def training_step(self, batch: Any, i: int) -> Any:
        loss = F.mse_loss(self.lin(batch[0]), batch[1])
        if self.automatic_optimization:
            return loss
        opt = self.optimizers()
        opt.zero_grad()
        self.manual_backward(loss)
        return opt.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(
    cls: type[Learner], *cbs: Any, opt_func: Any = SGD, **options: Any
) -> tuple[Any, list[str]]:
    torch.manual_seed(0)
    watch = Watch()
    learn = cls(
        batches(), nn.Linear(3, 1), nn.MSELoss(), opt_func, lr=0.1, cbs=[*cbs, watch], **options
    )
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
    return learn, watch.events


SEVERAL = [*LOSS, *LOSS, *STEP]  # three batches, or parts, for a step
PATHS: dict[str, tuple[type[Learner], list[Any], dict[str, Any], list[str]]] = {
    'loop': (Levels, [], {}, STEP * N_BATCHES),
    'optimize()': (Own, [], {}, STEP * N_BATCHES),
    'optimize() twice': (Twice, [], {}, STEP * 2 * N_BATCHES),
    'microbatches': (Levels, [], {'microbatch': 2}, (LOSS + STEP) * N_BATCHES),
    'accumulation': (Levels, [GradientAccumulation(batches=3)], {}, SEVERAL * 2),
    # two steps, and one for the rest of the epoch
    'accumulation with a rest': (
        Levels,
        [GradientAccumulation(batches=4)],
        {},
        [*LOSS * 3, *STEP, *LOSS * 2, *STEP[3:]],
    ),
    'accumulation of samples': (Levels, [GradientAccumulation(12)], {}, SEVERAL * 2),
    'accumulation of microbatches': (
        Levels,
        [GradientAccumulation(batches=3)],
        {'microbatch': 2},
        [*LOSS * 5, *STEP] * 2,
    ),
    'accumulation in optimize()': (Own, [GradientAccumulation(batches=3)], {}, SEVERAL * 2),
    # the batch again, before other callbacks get `before_step`
    'SAM': (Levels, [SAM()], {}, [*LOSS, *LOSS, *STEP[3:]] * N_BATCHES),
}


@pytest.mark.parametrize('name', PATHS)
def test_each_path_fires_the_same_events_for_a_step(name: str) -> None:
    cls, cbs, options, expected = PATHS[name]
    learn, events = run(cls, *cbs, **options)
    assert events == expected
    n_steps = events.count('after_step')
    assert learn.n_opened == learn.opt.n_steps == n_steps


@pytest.mark.parametrize('is_automatic', [True, False])
def test_a_lightning_module_fires_the_same_events(is_automatic: bool) -> None:
    module, watch = Module(), Watch()
    module.automatic_optimization = is_automatic
    learn = from_lightning(module, batches(), cbs=[watch])
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
    assert watch.events == STEP * N_BATCHES
    assert learn.opt.n_steps == N_BATCHES


def test_a_closure_fires_them_once_for_a_step() -> None:
    opt_func = lambda params, lr: torch.optim.LBFGS(params, lr=lr, max_iter=2)
    learn, events = run(Levels, opt_func=opt_func)
    again = [event for event in events if event in STEP[3:]]
    assert again == ['before_step', 'after_step'] * N_BATCHES
    assert learn.n_opened == learn.opt.n_steps == N_BATCHES


def test_optimize_returns_whether_it_stepped() -> None:
    seen: list[bool] = []
    note = Callback(after_batch=lambda cb: seen.append(cb.learn.stepped))
    note.run_valid = False
    run(Own, GradientAccumulation(batches=3), note)
    assert seen == [False, False, True] * 2


@pytest.mark.parametrize('options', [{}, {'microbatch': 2}])
def test_a_callback_that_answers_will_step(options: dict[str, Any]) -> None:
    "A step is put off, with its gradients, by any callback with the method `will_step`."

    class EverySecond(Callback):
        def will_step(self) -> bool:
            return self.iter % 2 == 1

    learn, events = run(Levels, EverySecond(), **options)
    assert events.count('before_step') == events.count('after_step') == learn.opt.n_steps == 3

    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(batches()):
        F.mse_loss(model(x), y).backward()
        if i % 2:
            opt.step()
            opt.zero_grad()
    torch.testing.assert_close(learn.model.weight, model.weight)


def test_a_rest_that_another_callback_puts_off_counts_for_the_next_epoch() -> None:
    class Never(Callback):
        def will_step(self) -> bool:
            return self.time.ba == 1

    learn, events = run(Levels, GradientAccumulation(batches=2), Never())
    assert learn.opt.n_steps == events.count('after_step') == 1
    pending = next(cb for cb in learn.cbs if isinstance(cb, GradientAccumulation))
    assert pending.state_dict() == {'sums': {}}  # dropped at the end of the fit


def test_microbatches_whose_backward_passes_are_all_cancelled() -> None:
    def skip(cb: Any) -> None:
        if cb.iter == 0:
            raise CancelBackwardException

    learn, _ = run(
        Levels, GradientAccumulation(batches=3), Callback(before_backward=skip), microbatch=2
    )
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for some in (batches()[1:3], batches()[3:]):
        n = 12  # the cancelled batch counts, and adds no gradient
        sum(F.mse_loss(model(x), y) * len(x) / n for x, y in some).backward()
        opt.step()
        opt.zero_grad()
    torch.testing.assert_close(learn.model.weight, model.weight)


def test_a_loop_that_opens_the_step_itself_accumulates_too() -> None:
    class Bare(Learner):
        "As fastai's `_do_grad_opt`."

        def _do_grad_opt(self) -> None:
            self._backward()
            self._with_events(self._step, 'step', CancelStepException)
            self.opt.zero_grad()

    class Put(Callback):
        def before_step(self) -> None:
            if self.iter % 3 != 2:
                raise StepPutOff

    learn, events = run(Bare, Put())
    assert learn.opt.n_steps == events.count('after_step') == 2
