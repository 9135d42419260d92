# SPDX-License-Identifier: Apache-2.0
"""`ShardSpec`: which samples of a round, the batches of all ranks, belong to a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from learnkit.core.batch import find_bs
from learnkit.data.shard import Order


@dataclass(frozen=True)
class ShardSpec:
    """Division of a round, the batches of all ranks, into contiguous parts, one for each rank.

    >>> [list(ShardSpec(rank, 3).rows(7)) for rank in range(3)]
    [[0, 1], [2, 3], [4, 5, 6]]
    >>> [list(ShardSpec(rank, 3).rows(2)) for rank in range(3)], ShardSpec(0, 3).share(2)
    ([[0], [0], [1]], (0, 2))
    """

    rank: int
    size: int
    batch_size: str = 'process'  # meaning of the loader's batch size: per 'process', or 'global'
    drops_last: bool = False  # whether a last round that is smaller is dropped
    count: Callable[[Any], int] = find_bs  # function returning the number of samples in a batch

    @property
    def per_round(self) -> int:
        "Number of the loader's batches in a round."
        return self.size if self.batch_size == 'process' else 1

    def share(
        self,
        k: int,  # number of samples of the round
    ) -> tuple[int, int]:  # number of samples of this rank, and of all ranks
        "Return the numbers of samples of a round that count on this rank, and on all ranks."
        start, stop = self._bounds(k)
        return stop - start, k

    def rows(
        self,
        k: int,  # number of samples of the round
    ) -> range:
        "Return the indices of this rank's samples in a round, or of a filler, which does not count."
        start, stop = self._bounds(k)
        filler = min(start, k - 1)
        return range(start, stop) if stop > start else range(filler, filler + 1)

    def count_batches(
        self,
        n: int,  # number of samples, or batches, of a pass over the loader
        full: int,  # number in a full round
    ) -> int:
        "Return the number of batches, which is the same on every rank."
        return n // full if self.drops_last else -(-n // full)

    def pieces(
        self,
        n: int,  # number of samples of a pass over the loader
        full: int,  # number of samples of a full round
        first: int = 0,  # number of the first round
    ) -> Iterator[tuple[int, range, tuple[int, int]]]:
        "Yield the start of each round, this rank's rows in the round, and its share."
        for i in range(first, self.count_batches(n, full)):
            k = min(full, n - i * full)
            yield i * full, self.rows(k), self.share(k)

    def draw_rounds(
        self,
        source: Iterator[Any],  # batches of the loader, or their index lists
        order: Order,  # generators that all ranks draw them from
        n: int = 1,  # number of rounds to draw at a time
    ) -> Iterator[list[Any]]:
        "Yield the batches of each round."
        n_batches = n * self.per_round
        is_at_end = False
        while not is_at_end:
            with order:
                drawn = list(islice(source, n_batches))
            is_at_end = len(drawn) < n_batches
            for i in range(0, len(drawn), self.per_round):
                batches = drawn[i : i + self.per_round]
                if len(batches) == self.per_round or not self.drops_last:
                    yield batches

    def _bounds(self, k: int) -> tuple[int, int]:
        "Return the start and stop of this rank's samples in a round."
        return k * self.rank // self.size, k * (self.rank + 1) // self.size
