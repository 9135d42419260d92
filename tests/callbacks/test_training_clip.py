"""Compare clipping with torch's functions in a plain loop, and combine it with other training callbacks."""

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnkit import Callback, Learner
from learnkit.callbacks.training import GradientClip, GradientValueClip
from learnkit.core.errors import OptionError
from tests.helpers.learners import bare_learner

AdamW = partial(torch.optim.AdamW, weight_decay=0.01)


def net() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def batches(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    gen = torch.Generator().manual_seed(1)
    rand = partial(torch.randn, generator=gen, dtype=torch.float64)
    return [(rand(n, 3), rand(n, 2)) for n in sizes]


class Single(nn.Module):
    "Convert to single precision."

    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def learner(train: Any, model: nn.Module, *cbs: Any, **kwargs: Any) -> Learner:
    return bare_learner(
        (train, train),
        model,
        F.mse_loss,
        opt_func=AdamW,
        lr=0.05,
        wd_bn_bias=True,
        cbs=cbs,
        recorder=None,
        **kwargs,
    )


@pytest.mark.parametrize(
    ('cb', 'clip'),
    [
        (GradientClip, lambda ps: nn.utils.clip_grad_norm_(ps, 1.0)),
        (GradientClip(0.05), lambda ps: nn.utils.clip_grad_norm_(ps, 0.05)),
        (GradientClip(0.05, 1), lambda ps: nn.utils.clip_grad_norm_(ps, 0.05, 1)),
        (GradientClip(0.05, math.inf), lambda ps: nn.utils.clip_grad_norm_(ps, 0.05, math.inf)),
        (GradientValueClip(0.02), lambda ps: nn.utils.clip_grad_value_(ps, 0.02)),
    ],
)
@pytest.mark.parametrize('size', [None, 3])
def test_the_weights_match_a_plain_loop(cb: Any, clip: Any, size: int | None) -> None:
    learn, model = learner(bs := batches(6, 6, 6), net(), cb, microbatch=size), net()
    learn.fit(2)
    opt = AdamW(model.parameters(), lr=0.05)
    for x, y in bs * 2:
        for a, b in zip(x.split(size or 6), y.split(size or 6), strict=True):
            loss = F.mse_loss(model(a), b)
            (loss if size is None else loss * (len(a) / len(x))).backward()
        clip(model.parameters())
        opt.step()
        opt.zero_grad()
    for p, q in zip(learn.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize('keeps_graph', [False, True])
@pytest.mark.parametrize('norm_type', [2.0, math.inf])
def test_gradients_of_two_dtypes_and_with_a_graph_match_torch(
    norm_type: float, keeps_graph: bool
) -> None:
    grads = []

    def look(cb: Any) -> None:
        params = list(cb.learn.model.parameters())
        originals = [p.grad for p in params]
        if keeps_graph:  # as after `backward(create_graph=True)`
            originals = [grad * one for grad, one in zip(originals, ones, strict=True)]
        for p, grad in zip(params, originals, strict=True):
            p.grad = grad.clone()
        norm = nn.utils.clip_grad_norm_(params, 0.05, norm_type)
        grads.append((norm, [p.grad for p in params]))
        for p, grad in zip(params, originals, strict=True):
            p.grad = grad

    model = nn.Sequential(nn.Linear(3, 6), Single(), nn.Linear(6, 2))
    model[0].double()
    ones = [torch.ones_like(p, requires_grad=True) for p in model.parameters()]
    learn = learner(batches(6), model, GradientClip(0.05, norm_type), Callback(before_step=look))
    kept = Callback(before_step=lambda cb: grads.append((0, [p.grad for p in model.parameters()])))
    kept.order = 12
    learn.fit(1, cbs=kept)
    (norm, expected), (_, found) = grads
    total_norm = learn.gradient_clip.total_norm
    assert torch.equal(total_norm, norm.detach()) and norm > 0.05
    assert not total_norm.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.filterwarnings(r'ignore:.*2\.weight, 2\.bias')  # the splitter leaves them out
def test_only_what_the_optimizer_trains_is_clipped() -> None:
    model, norms = net(), []

    def look(cb: Any) -> None:
        norms.append((cb.gradient_clip.total_norm, model[2].weight.grad.norm()))

    after = Callback(before_step=look)
    after.order = 12
    splitter = lambda m: list(m[0].parameters())
    learn = learner(batches(6), model, GradientClip(1e-3), after, splitter=splitter)

    def unclipped(cb: Any) -> None:
        norms.append(nn.utils.get_total_norm([p.grad for p in model[0].parameters()]))

    learn.fit(1, cbs=Callback(before_step=unclipped))
    assert norms[0] == norms[1][0] > 1e-3 and norms[1][1] > 1e-3
    norm = learn.gradient_clip.total_norm
    # still there after the fit
    assert norm == norms[0] and norm.shape == () and not norm.requires_grad


@pytest.mark.parametrize(
    'make',
    [
        lambda: GradientClip(0),
        lambda: GradientClip(-1),
        lambda: GradientClip(math.nan),
        lambda: GradientClip(max_norm='1'),
        lambda: GradientValueClip(0),
    ],
)
def test_a_bad_limit_is_refused(make: Any) -> None:
    with pytest.raises(OptionError, match='max_'):
        make()


@pytest.mark.parametrize(
    ('cb', 'clip'),
    [
        (GradientClip(0.05), lambda ps: nn.utils.clip_grad_norm_(ps, 0.05)),
        (GradientValueClip(0.02), lambda ps: nn.utils.clip_grad_value_(ps, 0.02)),
    ],
)
def test_each_evaluation_of_a_closure_is_clipped(cb: Any, clip: Any) -> None:
    learn, model = learner(bs := batches(6, 6, 6), net(), cb), net()
    learn.opt_func = torch.optim.LBFGS
    learn.fit(2)
    opt = torch.optim.LBFGS(model.parameters(), lr=0.05)
    for x, y in bs * 2:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            clip(model.parameters())
            return loss

        opt.step(closure)
    for p, q in zip(learn.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)
