"""Private training with Opacus: the weights of a plain loop with the same noise, with Poisson sampling and resumed."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from learnkit import Callback, Checkpoint, DataLoaders, Learner, accuracy
from tests.helpers.learners import quiet_learner

opacus = pytest.importorskip('opacus')

pytestmark = [
    pytest.mark.filterwarnings('ignore:Secure RNG'),
    pytest.mark.filterwarnings('ignore:Full backward hook'),
]

X = torch.randn(32, 5, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
DELTA = 1e-5


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)  # of the first batch, if it is empty
    yield
    logging.disable(logging.NOTSET)


class Setup:
    "The parts that Opacus makes private."

    def __init__(self, bs: int, poisson: bool) -> None:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
        opt = torch.optim.Adam(model.parameters(), lr=0.05)
        loader = DataLoader(TensorDataset(X, Y), batch_size=bs, shuffle=True)
        self.noise = torch.Generator().manual_seed(5)
        self.engine = opacus.PrivacyEngine()
        self.model, self.opt, self.loader = self.engine.make_private(
            module=model,
            optimizer=opt,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=0.5,
            poisson_sampling=poisson,
            noise_generator=self.noise,
        )

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


class Privacy(Callback):
    "Save the privacy budget that was spent, and the generator of the noise."

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def state_dict(self) -> dict[str, Any]:
        accountant = self.setup.engine.accountant.state_dict()
        return {'accountant': accountant, 'noise': self.setup.noise.get_state()}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        self.setup.engine.accountant.load_state_dict(sd['accountant'])
        self.setup.noise.set_state(sd['noise'])


def learner(setup: Setup, path: Path | str = '.') -> Learner:
    dls = DataLoaders(setup.loader, [(X, Y)], device='cpu')
    learn = quiet_learner(
        dls,
        setup.model,
        F.cross_entropy,
        setup.opt,
        metrics=accuracy,
        path=path,
        cbs=Privacy(setup),
    )
    torch.manual_seed(7)
    return learn


def train_by_hand(setup: Setup, n_epoch: int = 2) -> list[int]:
    "Train in a plain loop; return the batch sizes."
    torch.manual_seed(7)
    setup.model.train()
    sizes = []
    for _ in range(n_epoch):
        for x, y in setup.loader:
            setup.opt.zero_grad()
            F.cross_entropy(setup.model(x), y).backward()
            setup.opt.step()
            sizes.append(len(x))
    return sizes


@pytest.mark.parametrize(('bs', 'poisson'), [(8, False), (8, True), (1, True)])
def test_a_private_training_is_the_plain_loop(bs: int, poisson: bool) -> None:
    plain, setup = Setup(bs, poisson), Setup(bs, poisson)
    sizes = train_by_hand(plain)
    assert (min(sizes) == 0) == (bs == 1)
    learn = learner(setup)
    learn.fit(2)
    assert torch.equal(setup.weights(), plain.weights())
    budgets = [s.engine.get_epsilon(DELTA) for s in (setup, plain)]
    assert budgets[0] == budgets[1] > 0
    assert learn.time.st == len(sizes) and learn.time.sp == sum(sizes)
    assert 0 < learn.history[-1]['train_loss'] < 100  # an empty batch has no loss


@pytest.mark.parametrize('name', ['ba5', 'ba8'])
def test_a_private_training_resumes_exactly(tmp_path: Path, name: str) -> None:
    first = Setup(8, poisson=True)
    learner(first, tmp_path).fit(2, cbs=Checkpoint(every='1ba', keep_last=8, rehearse=False))
    path = next((tmp_path / 'checkpoints').glob(f'*{name}.ckpt'))
    setup = Setup(8, poisson=True)
    other = Checkpoint(folder=tmp_path / 'other', rehearse=False)
    learner(setup, tmp_path).fit(2, resume=path, cbs=other)
    assert torch.equal(setup.weights(), first.weights())
    assert setup.engine.get_epsilon(DELTA) == first.engine.get_epsilon(DELTA)
    plain = Setup(8, poisson=True)
    train_by_hand(plain)
    assert torch.equal(setup.weights(), plain.weights())


def test_large_batches_in_parts() -> None:
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    plain, setup = Setup(16, poisson=True), Setup(16, poisson=True)
    for s in (plain, setup):
        part = BatchMemoryManager(data_loader=s.loader, max_physical_batch_size=4, optimizer=s.opt)
        with part as s.loader:
            if s is plain:
                train_by_hand(s, 1)
            else:
                learner(s).fit(1)
    assert torch.equal(setup.weights(), plain.weights())
