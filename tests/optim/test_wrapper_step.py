"""A step without torch's profiler annotation equals the original step, with all of its hooks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from learnkit.optim.wrapper import OptimWrapper

OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, nesterov=True),
    lambda ps: torch.optim.Adam(ps, 0.1),
    lambda ps: torch.optim.AdamW(ps, 0.1, fused=True),
]


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.1]))


def take_steps(p: nn.Parameter, opt: Any, n: int = 3) -> list[float]:
    for _ in range(n):
        (p**2).sum().backward()
        opt.step()
        p.grad = None
    return p.tolist()


@pytest.mark.parametrize('make', OPTIMIZERS)
def test_it_is_the_optimizers_own_step(make: Callable[[Any], Any]) -> None:
    a, b = parameter(), parameter()
    assert take_steps(a, OptimWrapper(opt=make([a]))) == take_steps(b, make([b]))
    assert torch.is_grad_enabled() and a.requires_grad


@contextmanager
def hooked(opt: Any, where: str, seen: list[str]) -> Iterator[None]:
    def note(*args: Any) -> None:
        seen.append(where)

    handle = {
        'pre': lambda: opt.register_step_pre_hook(note),
        'post': lambda: opt.register_step_post_hook(note),
        'global pre': lambda: register_optimizer_step_pre_hook(note),
        'global post': lambda: register_optimizer_step_post_hook(note),
    }[where]()
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize('where', ['pre', 'post', 'global pre', 'global post'])
def test_hooks_run_once_a_step(where: str) -> None:
    p, seen = parameter(), []  # type: ignore[var-annotated]
    opt = torch.optim.SGD([p], 0.1)
    wrapper = OptimWrapper(opt=opt)
    with hooked(opt, where, seen):
        take_steps(p, wrapper)
    assert seen == [where] * 3
    take_steps(p, wrapper)
    assert len(seen) == 3


def test_a_profiler_sees_the_step() -> None:
    p = parameter()
    wrapper = OptimWrapper(opt=torch.optim.SGD([p], 0.1))
    take_steps(p, wrapper)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        take_steps(p, wrapper)
    assert {e.key: e.count for e in profile.key_averages()}['Optimizer.step#SGD.step'] == 3


def test_a_step_that_was_replaced_is_taken_as_it_is() -> None:
    p, seen = parameter(), []  # type: ignore[var-annotated]
    opt = torch.optim.SGD([p], 0.1)
    own = opt.step
    opt.step = lambda *args: (seen.append(1), own(*args))  # type: ignore[assignment,func-returns-value,return-value]
    take_steps(p, OptimWrapper(opt=opt))
    assert len(seen) == 3


def test_a_step_wrapped_by_a_subclass_is_taken() -> None:
    "`functools.wraps` copies torch's mark and points past the wrapper."
    taken: list[int] = []

    class Counted(torch.optim.SGD):
        @wraps(torch.optim.SGD.step)
        def step(self, *args: Any) -> Any:
            taken.append(1)
            return super().step(*args)

    torch.optim.SGD([parameter()], 0.1)  # from the first one on torch's own step is marked
    p = parameter()
    take_steps(p, OptimWrapper(opt=Counted([p], 0.1)))
    assert len(taken) == 3


@pytest.mark.parametrize('make', OPTIMIZERS)
def test_a_gradient_scaler_unscales_for_the_inner_optimizer(make: Callable[[Any], Any]) -> None:
    "A fused optimizer would skip the step itself if the scale were passed to it; a step on inf is skipped."
    ends = []
    for wrap in (lambda o: OptimWrapper(opt=o), lambda o: o):
        p = parameter()
        opt, scaler = wrap(make([p])), torch.amp.GradScaler('cpu', init_scale=1024.0)
        for factor in (1.0, float('inf'), 1.0):
            scaler.scale((p**2).sum() * factor).backward()
            scaler.step(opt)
            scaler.update()
            p.grad = None
        ends.append(p.tolist())
    assert ends[0] == pytest.approx(ends[1], rel=1e-6)
