"""Casts of weights in autocast blocks: dropped, or not kept."""

import pytest
import torch
from torch import nn

from learnkit.core.autocast import drop_casts, uncached_autocast

BF16 = {'device_type': 'cpu', 'dtype': torch.bfloat16}


def double(layer: nn.Linear) -> float:
    "Double the weight, and return the output for an input of 1."
    with torch.no_grad():
        layer.weight *= 2
    return layer(torch.ones(1)).item()


def test_casts_are_dropped() -> None:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    with torch.autocast(**BF16):
        assert [double(layer), double(layer)] == [2, 2]  # torch keeps the first cast
        drop_casts()
        assert double(layer) == 8


def test_no_casts_are_kept() -> None:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    with uncached_autocast(), torch.autocast(**BF16):
        assert [double(layer), double(layer)] == [2, 4]
    assert torch.is_autocast_cache_enabled()
    with pytest.raises(ValueError, match='broken'), uncached_autocast():
        raise ValueError('broken')
    assert torch.is_autocast_cache_enabled()
