"""A LightningModule in several processes trains as one process does on the batches of all of them together."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from learnkit.interop import from_lightning
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist

G = torch.Generator().manual_seed(0)
X = torch.randn(48, 4, generator=G)
DATA = TensorDataset(X, X.sum(1, keepdim=True))


class Module(nn.Module):
    "A module with the methods of a LightningModule."

    log: Any
    trainer: Any

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def compute_loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.compute_loss(batch)
        self.log('train', loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log('valid', self.compute_loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        opt = torch.optim.Adam(self.parameters(), 0.05)
        return [opt], [torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)]


def train(rank: int, batch_size: int) -> dict[str, Any]:
    "Train two fits, and return weights, logged values and what the trainer says of the processes."
    module = Module()
    loaders = DataLoader(DATA, batch_size), DataLoader(DATA, batch_size)
    learn = from_lightning(module, loaders)
    with learn.no_bar(), learn.no_logging(), learn.distributed():
        for _ in range(2):
            learn.fit(2)
        trainer = module.trainer
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        found['processes'] = (trainer.global_rank, trainer.world_size)
        found['steps'] = trainer.global_step
    return found | {'weights': [p.detach() for p in module.parameters()]}


def test_a_module_in_two_processes_trains_as_one_on_all_batches() -> None:
    whole = train(0, 8)
    for rank, found in enumerate(run_ranks(train, 2, 4)):
        assert found['processes'] == (rank, 2)
        assert found['steps'] == whole['steps']
        for a, b in zip(found['weights'], whole['weights'], strict=True):
            torch.testing.assert_close(a, b)
        for name in ('train', 'valid'):
            assert found[name] == pytest.approx(whole[name], rel=1e-5)
