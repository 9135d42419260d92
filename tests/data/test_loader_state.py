"""State of loaders: a loader made alike gives the batches that come next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from learnkit import TensorLoader
from learnkit.data.loader_state import capture_loader_state, restore_loader_state


class Rotating(Sampler[int]):
    "Begins each pass one sample later."

    n_passes = 0

    def __iter__(self) -> Iterator[int]:
        self.n_passes += 1
        return iter([(i + self.n_passes) % 5 for i in range(5)])


@pytest.mark.parametrize(
    'make',
    [
        lambda: DataLoader(range(5), sampler=Rotating()),
        lambda: DataLoader(range(5), shuffle=True, generator=torch.Generator()),
        lambda: DataLoader(range(5), sampler=DistributedSampler(range(5), 2, 0)),
        lambda: TensorLoader(torch.arange(9), bs=2, shuffle=True, seed=1),
    ],
)
def test_the_next_pass_is_as_of_the_saved_loader(make: Callable[[], Any], tmp_path: Path) -> None:
    dl, other = make(), make()
    capture_loader_state(dl), capture_loader_state(other)  # counts are compared with the first
    for epoch in range(3):
        getattr(getattr(dl, 'sampler', None), 'set_epoch', lambda n: None)(epoch)
        list(dl)
    torch.save(capture_loader_state(dl), tmp_path / 'a.pt')
    expected = repr(list(dl))
    assert restore_loader_state(other, torch.load(tmp_path / 'a.pt')) == []
    assert repr(list(other)) == expected
