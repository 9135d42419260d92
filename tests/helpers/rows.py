"""A mapping of tensors with equally many rows."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch


class Rows(MutableMapping[str, Any]):
    "A mapping of tensors with equally many rows, over which it iterates, as a TensorDict."

    def __init__(self, **columns: Any):
        self.columns = columns

    @property
    def shape(self) -> torch.Size:
        return next(iter(self.columns.values())).shape[:1]

    @property
    def ndim(self) -> int:
        return 1

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.columns[key]
        return Rows(**{name: column[key] for name, column in self.columns.items()})

    def __setitem__(self, key: str, value: Any) -> None:
        if value.shape[:1] != self.shape:
            raise RuntimeError(f'{value.shape} for {self.shape}')
        self.columns = {**self.columns, key: value}

    def __delitem__(self, key: str) -> None:
        del self.columns[key]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __len__(self) -> int:
        return self.shape[0]

    def __bool__(self) -> bool:
        raise RuntimeError('no truth value')

    def __contains__(self, key: object) -> bool:
        raise NotImplementedError('use keys()')

    def keys(self) -> Any:
        return self.columns.keys()

    def values(self) -> Any:
        return self.columns.values()

    def items(self) -> Any:
        return self.columns.items()

    def get(self, key: str, default: Any = None) -> Any:
        return self.columns.get(key, default)

    def to(self, device: Any) -> Rows:
        return Rows(**{name: column.to(device) for name, column in self.columns.items()})
