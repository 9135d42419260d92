"""A block that reads from loaders changes no later batch, whatever draws the order."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from learnkit import Callback, DataLoaders, Learner, TensorLoader
from learnkit.core.batch import are_equal
from learnkit.core.random import capture_own, capture_rng


class Counting(Sampler[int]):
    "Draws the order of each epoch from a count of epochs."

    epoch = 0

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        g = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(12, generator=g).tolist())


class Noisy(Dataset[Any]):
    "Samples with noise from their own generator and from the global generators."

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Any:
        return torch.tensor([i + self.rng.random(), np.random.rand(), torch.rand(()).item()]), i % 2


KINDS = {
    'tensors': lambda: TensorLoader(torch.rand(12, 3), torch.arange(12) % 2, bs=4, shuffle=True),
    'shuffled': lambda: DataLoader(Noisy(), 4, shuffle=True),
    'seeded': lambda: DataLoader(Noisy(), 4, shuffle=True, generator=torch.Generator()),
    'counting': lambda: DataLoader(Noisy(), 4, sampler=Counting()),
}


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('when', ['before', 'in the middle'])
def test_training_continues_as_without_a_display(kind: str, when: str) -> None:
    def trained(look: bool) -> tuple[Tensor, Any]:
        torch.manual_seed(0)
        np.random.seed(0)
        dl = KINDS[kind]()
        dls = DataLoaders(dl, dl)
        learn = Learner(dls, nn.Linear(3, 2), nn.CrossEntropyLoss(), lr=0.1, default_cbs=False)

        def looks(*_: Any) -> None:
            learn.dls.show_batch()
            if learn.training or not learn.run.depth:
                learn.show_results(ds_idx=0)

        if look and when == 'before':
            looks()
        learn.fit(2, cbs=Callback(after_batch=looks) if look and when != 'before' else None)
        return learn.model.weight.detach(), (capture_rng(), capture_own(dl))

    (a, before), (b, after) = trained(False), trained(True)
    assert torch.equal(a, b) and are_equal(before[0], after[0])
    assert repr(before[1]) == repr(after[1])
