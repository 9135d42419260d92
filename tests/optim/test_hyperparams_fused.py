"""Fused optimizers: where they are used, the requirements of their kernels, cost and precision."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learnkit import OptimWrapper
from learnkit.optim.hyperparams import can_fuse
from learnkit.optim.optimizers import Adam
from tests.helpers.optimizing import weights, weights_after


def test_adam_is_fused_and_differs_by_rounding() -> None:
    assert Adam(weights()).param_groups[0]['fused']
    assert not Adam(weights(), fused=False).param_groups[0]['fused']
    for dtype, tol in ((torch.float64, 1e-15), (torch.float32, 1e-6)):
        ends = [
            weights_after(partial(Adam, lr=0.05, fused=fused), ps=weights(dtype))
            for fused in (True, False)
        ]
        assert (ends[0] - ends[1]).abs().max() < tol


@pytest.mark.parametrize(
    'make',
    [
        lambda: nn.Parameter(torch.ones(2, dtype=torch.complex64)),
        lambda: nn.Parameter(torch.randn(4, 6)[:, :3]),
        lambda: nn.Parameter(torch.ones(1).expand(3)),
        lambda: nn.Parameter(torch.ones(2, device='meta')),
    ],
)
def test_adam_is_not_fused_where_that_is_not_possible(make: Any) -> None:
    p = make()
    assert not can_fuse([p]) and not Adam([p]).param_groups[0]['fused']


@pytest.mark.parametrize(
    'opt_func',
    [
        Adam,
        partial(torch.optim.Adam, fused=True),
        partial(torch.optim.SGD, momentum=0.9, fused=True),
    ],
)
def test_a_change_of_layout_costs_no_digits(opt_func: Any) -> None:
    "Without the check, torch's fused CPU kernels would silently update the wrong weights."

    def run(fused: bool) -> Tensor:
        gen = torch.Generator().manual_seed(0)
        p = nn.Parameter(torch.randn(4, 3, 5, 5, generator=gen, dtype=torch.float64))
        opt = (
            OptimWrapper(opt=partial(opt_func, fused=fused)([p], lr=0.05))
            if opt_func is not Adam
            else Adam([p], lr=0.05, fused=fused)
        )
        for i in range(6):
            if i == 2:
                p.data = p.data.contiguous(memory_format=torch.channels_last)
                opt.train()  # the next fit
            if i == 4:
                saved = opt.state_dict()
                for s in saved['state'].values():
                    s.update({k: v.contiguous() for k, v in s.items()})
                opt.load_state_dict(saved)
            p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=gen))
            opt.step()
        assert bool(opt.param_groups[0]['fused']) is fused
        return p.detach()

    assert torch.allclose(run(True), run(False), rtol=0, atol=1e-14)


def test_parameters_that_go_to_a_device_without_fused_kernels_are_not_fused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    "The optimizer of a resumed fit is made when the model is there already, and takes equal steps."
    p = nn.Parameter(torch.zeros(2))
    assert can_fuse([p])
    plugin = torch.device('privateuseone')
    monkeypatch.setattr(torch.accelerator, 'current_accelerator', lambda: plugin)
    assert not can_fuse([p])
