"""`ShardSpec`: which samples of a round, the batches of all ranks, belong to a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from learnkit.core.batch import find_bs
from learnkit.core.errors import LoaderError, OptionError, did_you_mean

BATCH_SIZES = ('process', 'global')
UNEVEN = ('join', 'pad', 'drop')


def check_option(name: str, value: Any, known: tuple[str, ...]) -> None:
    "Raise `OptionError` if the value of an option is not one of the known values."
    if value not in known:
        raise OptionError(
            f'{name}={value!r}: give {" or ".join(map(repr, known))}.'
            f'{did_you_mean(str(value), known)}'
        )


@dataclass(frozen=True)
class ShardSpec:
    """Division of a round, the batches of all ranks, into contiguous parts, one for each rank.

    Raises `OptionError` for an unknown option.

    >>> [list(ShardSpec(rank, 3).rows(7)) for rank in range(3)]
    [[0, 1], [2, 3], [4, 5, 6]]
    >>> [list(ShardSpec(rank, 3, uneven='pad').rows(7)) for rank in range(3)]
    [[0, 1, 2], [3, 4, 5], [6, 0, 1]]
    """

    rank: int
    size: int
    batch_size: str = 'process'  # meaning of the loader's batch size: per 'process', or 'global'
    uneven: str = 'join'  # last round: 'join' takes each sample once, 'pad' repeats, 'drop' omits
    fillers: bool = True  # whether a rank without samples gets a filler, which does not count
    count: Callable[[Any], int] = find_bs  # function returning the number of samples in a batch

    def __post_init__(self) -> None:
        check_option('batch_size', self.batch_size, BATCH_SIZES)
        check_option('uneven', self.uneven, UNEVEN)
        if not 0 <= self.rank < self.size:
            raise LoaderError(f'There is no process {self.rank} of {self.size}: they count from 0.')

    @property
    def per_round(self) -> int:
        "Number of the loader's batches in a round."
        return self.size if self.batch_size == 'process' else 1

    def share(
        self,
        k: int,  # number of samples of the round
    ) -> tuple[int, int]:  # number of samples of this rank, and of all ranks
        "Return the numbers of samples of a round that count on this rank, and on all ranks."
        start, stop, total = self._bounds(k)
        return stop - start, total

    def rows(
        self,
        k: int,  # number of samples of the round
    ) -> range | list[int]:
        "Return the indices of this rank's samples in a round, including a filler."
        start, stop, _ = self._bounds(k)
        if stop > k:
            return [i % k for i in range(start, stop)]
        if stop > start or not self.fillers:
            return range(start, stop)
        filler = min(start, k - 1)
        return range(filler, filler + 1)

    def count_batches(
        self,
        n: int,  # number of samples of a pass over the loader
        full: int,  # number of samples of a full round
    ) -> int:
        "Return the number of this rank's batches; 1, for a filler, if only other ranks have samples."
        rounds, rest = divmod(n, full)
        n_batches = rounds * (len(self.rows(full)) > 0)
        if rest and self.uneven != 'drop':
            n_batches += len(self.rows(rest)) > 0
        return n_batches if self.fillers or not n else max(1, n_batches)

    def pieces(
        self,
        n: int,  # number of samples of a pass over the loader
        full: int,  # number of samples of a full round
        first: int = 0,  # number of the first round
    ) -> Iterator[tuple[int, range | list[int], tuple[int, int]]]:
        "Yield the start of each round in which this rank has a batch, its rows in the round, and its share."
        is_empty = True
        for start in range(first * full, n, full):
            k = min(full, n - start)
            rows = self.rows(k)
            if rows and (k == full or self.uneven != 'drop'):
                is_empty = False
                yield start, rows, self.share(k)
        if is_empty and not self.fillers:
            # at least one batch, so that an epoch of this rank is not empty
            yield 0, range(1), (0, self.share(min(full, n))[1])

    def _bounds(self, k: int) -> tuple[int, int, int]:
        "Return the start and stop of this rank's samples in a round, and the number of all samples."
        total = -(-k // self.size) * self.size if self.uneven == 'pad' else k
        start = total * self.rank // self.size
        stop = total * (self.rank + 1) // self.size
        return start, stop, total
