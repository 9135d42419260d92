"""Conversion to plain data: compared with what torch loads from a file without executing code."""

from __future__ import annotations

from collections import OrderedDict
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from learnkit.core.errors import OptionError
from learnkit.core.plain import as_plain, clone_view, identify_memory, to_plain, to_storable


class Marked(Tensor):
    pass


class Wrapped(Tensor):
    @classmethod
    def __torch_dispatch__(cls, *args: Any) -> Any:
        raise NotImplementedError


def test_plain_data_loads_safely(tmp_path: Path) -> None:
    value = OrderedDict(
        n=np.int64(3),
        level=IntEnum('Level', ['LOW']).LOW,
        states=[(np.float64(0.5), None, b'a'), nn.Parameter(torch.ones(2))],
    )
    plain = to_plain(value, 'state')
    torch.save(plain, tmp_path / 'a.pt')
    loaded = torch.load(tmp_path / 'a.pt', weights_only=True)
    assert loaded['states'].pop().equal(torch.ones(2)) and type(plain['states'].pop()) is Tensor
    assert loaded == plain == {'n': 3, 'level': 1, 'states': [(0.5, None, b'a')]}
    assert [type(plain[k]) for k in ('n', 'level')] == [int, int]


@pytest.mark.parametrize('bad', [object(), {1}, np.ones(2)])
def test_other_objects_are_named_by_their_place(bad: Any) -> None:
    with pytest.raises(OptionError, match=rf"opt\['a'\]\[1\] is a {type(bad).__name__}"):
        to_plain({'a': [0, bad]}, 'opt')
    assert to_storable({'a': object()}) == {'a': None}


def test_subclasses_become_plain_views() -> None:
    x = torch.randn(2, 3)
    marked = x.as_subclass(Marked)
    assert type(as_plain(marked)) is Tensor and as_plain(marked).data_ptr() == x.data_ptr()
    own = torch.ones(2).as_subclass(Wrapped)
    assert as_plain(own) is own and as_plain(x) is x  # without its class it would be no tensor


def test_a_view_is_cloned_and_a_whole_storage_is_not() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert clone_view(x).data_ptr() == x.data_ptr() == clone_view(x.T).data_ptr()
    part = clone_view(x[1])
    assert part.tolist() == [3, 4, 5] and part.untyped_storage().nbytes() == 12
    assert identify_memory(x) == identify_memory(x[:]) != identify_memory(x[:1])
