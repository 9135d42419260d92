"""Buffers that a model has only after its first batches, and that state dicts leave out, in a new process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learnkit import Callback, DataLoaders, Learner, WeightsError
from learnkit.checkpoint.digest import differences
from tests.helpers.resuming import scramble

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)
        self._own = torch.Generator().manual_seed(9)

    def remember(self, x: Tensor) -> Any:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(1, generator=self._own)
        return self.net(x) + 0.1 * noise + 0.1 * self.remember(x)


class AtFirstUse(Base):
    def remember(self, x: Tensor) -> Any:
        if not hasattr(self, 'bank'):
            self.register_buffer('bank', x.detach().mean(), persistent=False)
        return self.bank


class PersistentAtFirstUse(Base):
    def remember(self, x: Tensor) -> Any:
        if not hasattr(self, 'bank'):
            self.register_buffer('bank', x.detach().mean())
        return self.bank


class FilledLater(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer('bank', None)

    def remember(self, x: Tensor) -> Any:
        if self.bank is None:
            self.bank = x.detach()[:2]
        return self.bank.mean()


class Growing(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer('bank', torch.zeros(1, 3))

    def remember(self, x: Tensor) -> Any:
        if self.training:
            self.bank = torch.cat([self.bank, x.detach()[:1]])
        return self.bank.mean()


class LossWithMemory(nn.Module):
    "Keeps a buffer that is not persistent, and draws from a generator of its own."

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer('mean', torch.zeros(1), persistent=False)
        self.rng = torch.Generator().manual_seed(1)

    def forward(self, pred: Tensor, target: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * pred.detach().mean(0)
        return ((pred - target - self.mean) ** 2).mean() * (1 + torch.rand((), generator=self.rng))


def make(model: Callable[[], nn.Module], loss: Callable[[], nn.Module] = nn.MSELoss) -> Learner:
    torch.manual_seed(0)
    dls = DataLoaders.from_tensors((X, X[:, :1]), (X[:4], X[:4, :1]), bs=4)
    return Learner(dls, model(), loss(), lr=0.01, default_cbs=False)


@pytest.mark.parametrize('model', [AtFirstUse, PersistentAtFirstUse, FilledLater, Growing])
@pytest.mark.parametrize('loss', [nn.MSELoss, LossWithMemory])
def test_a_new_process_ends_in_the_same_weights(model: type[Base], loss: type[nn.Module]) -> None:
    states: list[dict[str, Any]] = []
    whole = make(model, loss)
    keep = lambda cb: states.append(whole.checkpoint_state())
    whole.fit(3, cbs=Callback(batch_checkpoint=keep, epoch_checkpoint=keep))
    for state in (states[6], states[5]):  # within the second epoch, and at the end of the first
        scramble(1)
        learn = make(model, loss)
        learn.fit(3, resume=state)
        assert not differences(whole.checkpoint_state(), learn.checkpoint_state())


def test_a_buffer_of_torchs_modules_and_a_parameter_of_another_shape_are_refused() -> None:
    state = make(
        lambda: nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 1))
    ).checkpoint_state()
    for other in (nn.BatchNorm1d(4, affine=False), nn.BatchNorm1d(3)):
        learn = make(lambda other=other: nn.Sequential(other, nn.Linear(3, 1)))
        with pytest.raises(WeightsError, match=r'0\.(running_mean|weight)'):
            learn.load_checkpoint_state(state)
