"""The same numbers as without, dropout included, with less memory for activations."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

from learnkit import DataLoaders, Learner
from learnkit.callbacks import ActivationCheckpointing
from learnkit.core.errors import ModelError
from tests.helpers.comparing import same
from tests.helpers.fsdp import Block
from tests.helpers.learners import quiet_learner
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


def learner(model: nn.Module, *cbs: Any, cls: type[Learner] = Learner) -> Learner:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, 5, generator=g), torch.randn(24, 1, generator=g)
    dls = DataLoaders.from_tensors((x, y), (x, y), bs=8, shuffle=False)
    return quiet_learner(dls, model, nn.MSELoss(), cls=cls, lr=0.01, cbs=cbs)


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


def test_refused_before_anything_has_changed() -> None:
    model = nn.Linear(5, 1)
    learn = learner(model, ActivationCheckpointing(nn.Conv1d))
    with pytest.raises(ModelError, match='has no such modules'), learn.no_bar():
        learn.fit(1)
    assert not any('forward' in vars(m) for m in model.modules())


def test_random_slopes_are_refused() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(5, 1), nn.RReLU()))
    learn = learner(model, ActivationCheckpointing(lambda m: m is model[0]))
    with pytest.raises(ModelError, match='RReLU'), learn.no_bar():
        learn.fit(1)
    assert learn.train_iter == 0 and 'forward' not in vars(model[0])


class RunningMean(nn.Module):
    "Subtract a running mean, which each call updates; `replaces` puts another tensor in its place."

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.replaces = replaces
        self.register_buffer('mean', torch.zeros(7))
        self.register_buffer('count', torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.replaces:
            self.mean = self.mean.lerp(x.detach().mean(0), 0.1)
            self.count = self.count + 1
        elif self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
            self.count += 1
        return (x - self.mean).tanh()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    'batch norm': lambda: nn.Sequential(nn.BatchNorm1d(7), nn.Tanh()),
    'spectral norm': lambda: nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(7, 7)), nn.Tanh()
    ),
    'spectral norm by a hook': lambda: nn.Sequential(spectral_norm(nn.Linear(7, 7)), nn.Tanh()),
    'own running mean': lambda: nn.Sequential(RunningMean(False), nn.Tanh()),
    'own running mean that is replaced': lambda: nn.Sequential(RunningMean(True), nn.Tanh()),
}


@pytest.mark.parametrize('name', LAYERS)
def test_a_second_run_leaves_no_trace_in_buffers(name: str) -> None:
    def weights(*cbs: Any) -> dict[str, Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 7), LAYERS[name](), nn.Linear(7, 1))
        learn = learner(model, *cbs)
        with learn.no_bar():
            learn.fit(3)
        return model.state_dict()

    assert same(weights(ActivationCheckpointing(nn.Sequential)), weights())


def test_a_graph_that_is_used_twice_runs_the_module_twice_with_the_same_buffers() -> None:
    class Twice(Learner):
        def train_batch(self) -> None:
            loss = self.compute_loss(self.forward(self.model, self.x))
            loss.backward(retain_graph=True)
            self.optimize(loss)

    def weights(*cbs: Any) -> dict[str, Tensor]:
        torch.manual_seed(3)
        block = nn.Sequential(nn.BatchNorm1d(7), RunningMean(False))
        model = nn.Sequential(nn.Linear(5, 7), block, nn.Linear(7, 1))
        learn = learner(model, *cbs, cls=Twice)
        with learn.no_bar():
            learn.fit(2)
        return model.state_dict()

    assert same(weights(ActivationCheckpointing(nn.Sequential)), weights())


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
