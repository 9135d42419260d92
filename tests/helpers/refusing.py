"""Checks that a Learner refuses an input, stays unchanged, and trains afterwards."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from learnkit import DataLoaders, Learner
from learnkit.core.errors import LearnkitError

X, Y = torch.linspace(-1, 1, 24)[:, None], torch.linspace(-2, 2, 24)[:, None]


def make(
    dls: Any = None,
    model: nn.Module | None = None,
    loss_func: Any = nn.functional.mse_loss,
    **kwargs: Any,
) -> Learner:
    return Learner(
        DataLoaders.from_tensors((X, Y), (X, Y), bs=8, device='cpu') if dls is None else dls,
        nn.Linear(1, 1) if model is None else model,
        loss_func,
        **{'lr': 0.1, **kwargs},
    )


def refuses(
    learn: Learner,
    error: type[LearnkitError],
    *expected_text: str,
    do: Callable[[Learner], Any] = lambda learn: learn.fit(2),
) -> str:
    "Check the error's type and words, and that model, optimizer, callbacks and state are unchanged."
    weights = [t.clone() for t in learn.model.state_dict().values()]
    modes, cbs, opt = [m.training for m in learn.model.modules()], list(learn.cbs), learn.opt
    hypers = [dict(h) for h in opt.hypers] if opt else None
    with pytest.raises(error) as info:
        do(learn)
    message = str(info.value)
    assert type(info.value) is error
    for word in expected_text:
        assert word in message, message
    for a, b in zip(learn.model.state_dict().values(), weights, strict=True):
        assert torch.equal(a, b)
    assert not any(p.grad is not None for p in learn.model.parameters())
    assert (
        list(learn.cbs) == cbs
        and learn.logger is print
        and (learn.run.depth, learn.run.levels, learn.fitting) == (0, (), False)
    )
    assert len(learn.history) == 0 and modes == [True] * len(modes)
    if hypers:
        assert [dict(h) for h in learn.opt.hypers] == hypers
    return message


def trains(learn: Learner) -> None:
    "Check that the Learner still trains."
    before = [p.clone() for p in learn.model.parameters()]
    learn.fit(1)
    assert len(learn.history) == 1 and learn.history[0]['train_loss'] > 0
    assert not all(torch.equal(a, b) for a, b in zip(learn.model.parameters(), before, strict=True))
