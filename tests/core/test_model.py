"""Models: buffers are restored after a pass that is not a part of the training."""

import torch
from torch import nn

from learnkit.core.model import copy_buffers, restore_buffers


class Replacing(nn.Module):
    "Replace a buffer in every pass."

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer('last', torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x.sum(0)
        return x


def test_running_statistics_and_replaced_buffers_are_restored() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), Replacing())
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    last = model[1].last
    copies = copy_buffers(model)
    model(torch.randn(8, 2))
    # batch norm changes its statistics without a new version of the tensor
    assert not torch.equal(model[0].running_mean, before['0.running_mean'])
    restore_buffers(copies)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
    assert model[1].last is last


def test_equal_buffers_are_not_written_so_that_a_graph_stays_valid() -> None:
    model = nn.BatchNorm1d(2, affine=True).eval()
    x = torch.randn(4, 2, requires_grad=True)
    copies = copy_buffers(model)
    loss = model(x).sum()
    restore_buffers(copies, skip_equal=True)
    loss.backward()
    assert x.grad is not None
