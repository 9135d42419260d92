"""How the data are cut: in rounds, of which every process gets its piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from learnkit.core.batch import find_bs
from learnkit.core.errors import LoaderError, OptionError, did_you_mean

__all__ = ['ShardSpec', 'BATCH_SIZES', 'UNEVEN']

BATCH_SIZES = ('process', 'global')
UNEVEN = ('join', 'pad', 'drop')


@dataclass(frozen=True)
class ShardSpec:
    """Cut rounds, the batches of all processes, into contiguous pieces, one for each.

    Raises `OptionError` and `LoaderError` for what is no option, or no process.

    >>> [list(ShardSpec(rank, 3).rows(7)) for rank in range(3)]
    [[0, 1], [2, 3], [4, 5, 6]]
    >>> [list(ShardSpec(rank, 3, uneven='pad').rows(7)) for rank in range(3)]
    [[0, 1, 2], [3, 4, 5], [6, 0, 1]]
    """

    rank: int
    size: int
    batch_size: str = 'process'  # whose batch size a loader has: each 'process', or 'global'
    uneven: str = 'join'  # 'join': each sample once; 'pad': repeat some; 'drop': leave out the rest
    fillers: bool = True  # a process without a sample of its own gets one that does not count
    count: Callable[[Any], int] = find_bs  # returns the number of samples in a loader's batch

    def __post_init__(self) -> None:
        for name, known in (('batch_size', BATCH_SIZES), ('uneven', UNEVEN)):
            if (value := getattr(self, name)) not in known:
                raise OptionError(
                    f'{name}={value!r}: give {" or ".join(map(repr, known))}.'
                    f'{did_you_mean(str(value), known)}'
                )
        if not 0 <= self.rank < self.size:
            raise LoaderError(f'There is no process {self.rank} of {self.size}: they count from 0.')

    @property
    def per_round(self) -> int:
        "How many of the loader's batches make a round."
        return self.size if self.batch_size == 'process' else 1

    def share(
        self,
        k: int,  # samples of the round
    ) -> tuple[int, int]:  # samples of this process, and of all
        "Return how many samples of a round count here, and in all processes together."
        start, stop, total = self._bounds(k)
        return stop - start, total

    def rows(self, k: int) -> range | list[int]:
        "Return the numbers of this process's samples in a round of `k`, a filler's as well."
        start, stop, _ = self._bounds(k)
        if stop > k:
            return [i % k for i in range(start, stop)]
        if stop > start or not self.fillers:
            return range(start, stop)
        return range(min(start, k - 1), min(start, k - 1) + 1)

    def n_given(
        self,
        n: int,  # samples of a pass
        full: int,  # samples of a round
    ) -> int:
        "Return how many batches this process gets; one, a filler, where others alone have samples."
        rounds, rest = divmod(n, full)
        given = rounds * (len(self.rows(full)) > 0)
        if rest and self.uneven != 'drop':
            given += len(self.rows(rest)) > 0
        return given if self.fillers or not n else max(1, given)

    def _bounds(self, k: int) -> tuple[int, int, int]:
        total = -(-k // self.size) * self.size if self.uneven == 'pad' else k
        return total * self.rank // self.size, total * (self.rank + 1) // self.size, total
