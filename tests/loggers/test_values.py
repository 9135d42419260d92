"""Conversion of values and images for loggers."""

import numpy as np
import pytest
import torch

from learnkit import OptionError
from learnkit.loggers.values import as_images, fetch


def test_images_of_every_kind() -> None:
    floats = torch.tensor([[0.0, 0.5, 1.0], [-3.0, 2.0, float('nan')]])
    assert as_images(floats)[0, :, :, 0].tolist() == [[0, 128, 255], [0, 255, 0]]
    shapes = as_images([torch.rand(3, 4, 4)] * 2).shape, as_images(np.random.rand(2, 3, 4, 4)).shape
    assert shapes == ((2, 4, 4, 3),) * 2
    for bad in (torch.rand(5), torch.rand(2, 5, 4, 4), torch.zeros(3, 3).long()):
        with pytest.raises(OptionError, match='mages are'):
            as_images(bad)


def test_fetch_takes_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, 'tolist', lambda t: calls.append(t.shape) or tolist(t))
    rows = fetch([{'a': torch.tensor(1.5), 'b': 2}, {'a': torch.tensor([2.5], requires_grad=True)}])
    assert rows == [{'a': 1.5, 'b': 2}, {'a': 2.5}] and calls == [(2,)]
