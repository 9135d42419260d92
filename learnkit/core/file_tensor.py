# SPDX-License-Identifier: Apache-2.0
"""Tensors whose values stay in a file until they are needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class FileTensor(Tensor):
    """Dtype and shape of a tensor in a file. Each call of `clone` reads the values, and nothing else does.

    >>> t = FileTensor.make(torch.empty(2), lambda: torch.ones(2))
    >>> t.shape, t.clone()
    (torch.Size([2]), tensor([1., 1.]))
    """

    read: Callable[[], Tensor]

    @classmethod
    def make(
        cls,
        like: Tensor,  # tensor of the same dtype, shape and strides
        read: Callable[[], Tensor],  # returns a new tensor with the values, in host memory
    ) -> FileTensor:
        t: FileTensor = torch.empty_like(like, device='meta').as_subclass(cls)
        t.read = read
        return t

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        "False: the tensor has values, in the file."
        return False

    def clone(self, **options: Any) -> Tensor:
        "Return a new tensor with the values."
        return self.read()

    def numpy(self, **options: Any) -> Any:
        "Return a new array with the values."
        return self.read().numpy()


def read_values(value: Any) -> Any:
    """Return a value with a new tensor for each `FileTensor` in nested dicts, lists and tuples.

    Other tensors are returned as they are.

    >>> read_values(torch.ones(1))
    tensor([1.])
    >>> read_values({'mean': (FileTensor.make(torch.empty(1), lambda: torch.ones(1)), 3)})
    {'mean': (tensor([1.]), 3)}
    """
    if isinstance(value, FileTensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {name: read_values(entry) for name, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(read_values(entry) for entry in value)
    return value
