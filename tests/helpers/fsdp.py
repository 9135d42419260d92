"""A model of blocks and a Learner for tests of strategy `fsdp`, and the difference between lists of tensors."""

import torch
from torch import nn

from learnkit import DataLoaders, Learner


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(7, 9), nn.GELU(), nn.Linear(9, 7))
        self.norm = nn.LayerNorm(7)

    def forward(self, x):
        return self.norm(x + self.inner(x))


class Net(nn.Module):
    "Blocks between two layers; one layer is too small to be sharded over two processes."

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(5, 7)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(7, 1)

    def forward(self, x):
        x = self.stem(x)
        for b in self.blocks:
            x = b(x)
        return self.head(x)


def learner(model=Net, n=33, **kwargs):
    g = torch.Generator().manual_seed(0)
    # at both ends one is left over
    x, y = torch.randn(n + 17, 5, generator=g), torch.randn(n + 17, 1, generator=g)
    torch.manual_seed(1)
    options = {'loss_func': nn.MSELoss(), 'lr': 0.01, **kwargs}
    dls = DataLoaders.from_tensors((x[:n], y[:n]), (x[n:], y[n:]), bs=8)
    return Learner(dls, model(), **options)


class Wrong(list[str]):
    "Names of the checks that have failed in a process, as it returns them."

    def check(self, name, holds):
        if not holds:
            self.append(name)


def state_values(learn):
    return [t.detach().clone() for t in learn.model.state_dict().values()]


def max_difference(a, b):
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


class WithStatistics(Net):
    "A model with running statistics and frozen weights."

    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.BatchNorm1d(7), nn.Linear(7, 1))
        self.stem.requires_grad_(False)


class EvenBlock(Block):
    "A block whose hidden units two ranks can share."

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(7, 8), nn.GELU(), nn.Linear(8, 7))


class Even(Net):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([EvenBlock(), EvenBlock()])


def divide_blocks(model, mesh):
    "Divide the hidden units of each block of `Even`."
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {'blocks.*.inner.0': ColwiseParallel(), 'blocks.*.inner.2': RowwiseParallel()}
    parallelize_module(model, mesh, plan)
