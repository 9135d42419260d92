"""Exact comparison of values that hold tensors."""

from typing import Any

import torch
from torch import Tensor, nn


def same(a: Any, b: Any) -> bool:
    "Return True if types, dtypes, keys in their order and all values are equal; a list equals a tuple."
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, nn.Module):
        return same(a.state_dict(), b.state_dict())
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b
