"""Conversion to plain data, compared with what torch loads from a file without executing code."""

from collections import OrderedDict
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from learnkit.core.errors import OptionError
from learnkit.core.plain import as_plain, clone_view, to_plain, to_storable


def test_plain_data_loads_safely(tmp_path: Path) -> None:
    level = IntEnum('Level', ['LOW']).LOW
    value = OrderedDict(
        n=np.int64(3), level=level, states=[(None, b'a'), nn.Parameter(torch.ones(2))]
    )
    torch.save(to_plain(value, 'state'), tmp_path / 'a.pt')
    loaded = torch.load(tmp_path / 'a.pt', weights_only=True)
    assert loaded['states'].pop().equal(torch.ones(2))
    assert loaded == {'n': 3, 'level': 1, 'states': [(None, b'a')]}
    with pytest.raises(OptionError, match=r"opt\['a'\]\[1\] is a set"):
        to_plain({'a': [0, {1}]}, 'opt')
    assert to_storable({'a': {1}}) == {'a': None}


def test_subclasses_become_views_and_parts_are_cloned() -> None:
    class Wrapped(Tensor):
        @classmethod
        def __torch_dispatch__(cls, *args: Any) -> Any:
            raise NotImplementedError

    x = torch.arange(6.0).view(2, 3)
    assert type(as_plain(nn.Parameter(x))) is Tensor
    own = torch.ones(2).as_subclass(Wrapped)
    assert as_plain(own) is own  # without its class it would be no tensor
    assert clone_view(x.T).data_ptr() == x.data_ptr()
    assert clone_view(x[1]).untyped_storage().nbytes() == 12
