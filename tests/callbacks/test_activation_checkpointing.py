"""The same numbers as without, dropout included, with less memory for activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learnkit import DataLoaders, Learner
from learnkit.callbacks import ActivationCheckpointing
from learnkit.core.errors import ModelError
from tests.helpers.comparing import same
from tests.helpers.fsdp import Block
from tests.helpers.ranks import run_ranks


class Noisy(Block):
    n_calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        Noisy.n_calls += 1
        return self.drop(super().forward(x))


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(5, 7), nn.Sequential(*[Noisy() for _ in range(3)]), nn.Linear(7, 1)
    )


def learner(model: nn.Module, *cbs: Any) -> Learner:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, 5, generator=g), torch.randn(24, 1, generator=g)
    dls = DataLoaders.from_tensors((x, y), (x, y), bs=8, shuffle=False)
    learn = Learner(dls, model, nn.MSELoss(), lr=0.01, cbs=cbs)
    learn.logger = lambda *_: None
    return learn


def trained(*cbs: Any) -> tuple[Learner, int]:
    "Return a trained Learner, and how often a block ran."
    Noisy.n_calls = 0
    learn = learner(make_model(), *cbs)
    torch.manual_seed(2)
    with learn.no_bar():
        learn.fit(2)
    return learn, Noisy.n_calls


@pytest.mark.parametrize('modules', [Noisy, (Noisy,), lambda m: isinstance(m, Noisy)])
def test_numbers_are_those_without(modules: Any) -> None:
    plain, n_plain = trained()
    learn, n = trained(ActivationCheckpointing(modules))
    assert same(learn.model.state_dict(), plain.model.state_dict())
    assert learn.recorder.losses == plain.recorder.losses
    # three blocks in three batches of two epochs run twice, and once in evaluations
    assert (n_plain, n) == (36, 36 + 18)
    assert not any('forward' in vars(m) for m in learn.model.modules())


def test_less_is_kept_for_the_backward_pass() -> None:
    def kept(*cbs: Any) -> int:
        sizes: dict[int, int] = {}

        def note(t: Tensor) -> Tensor:
            sizes[t.data_ptr()] = t.numel()
            return t

        learn = learner(make_model(), *cbs)
        with learn.no_bar(), torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            learn.fit('1ba')
        return sum(sizes.values())

    assert kept(ActivationCheckpointing(Noisy)) < 0.7 * kept()


@pytest.mark.parametrize(
    ('model', 'modules', 'text'),
    [
        (nn.Linear(5, 1), nn.Conv1d, 'has no such modules'),
        (
            nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.BatchNorm1d(7)), nn.Linear(7, 1)),
            nn.Sequential,
            'running statistics .BatchNorm1d',
        ),
    ],
)
def test_refused_before_anything_has_changed(model: nn.Module, modules: Any, text: str) -> None:
    learn = learner(model, ActivationCheckpointing(modules))
    with pytest.raises(ModelError, match=text), learn.no_bar():
        learn.fit(1)
    assert not any('forward' in vars(m) for m in model.modules())


def train_on_ranks(rank: int, strategy: str) -> float:
    "Return the largest difference of the weights with and without, on two ranks."
    torch.distributed.init_process_group('gloo')
    found = []
    for modules in (None, Noisy):
        learn = learner(make_model())
        torch.manual_seed(2)
        with learn.no_bar(), learn.distributed(strategy, checkpoint_activations=modules):
            added = [cb for cb in learn.cbs if isinstance(cb, ActivationCheckpointing)]
            assert len(added) == (modules is not None)
            learn.fit(2)
        found.append(learn.model.state_dict())
    return max((found[0][k] - found[1][k]).abs().max().item() for k in found[0])


@pytest.mark.dist
@pytest.mark.parametrize('strategy', ['ddp', 'fsdp'])
def test_an_option_of_several_processes(strategy: str) -> None:
    assert run_ranks(train_on_ranks, 2, strategy) == [0.0, 0.0]


def test_the_option_serves_one_process() -> None:
    learn = learner(make_model())
    Noisy.n_calls = 0
    with learn.no_bar(), learn.distributed(checkpoint_activations=Noisy):
        learn.fit('1ba')
    assert (
        Noisy.n_calls == 6 + 9
    )  # three blocks twice in a batch, and once in three of the evaluation
