# SPDX-License-Identifier: Apache-2.0
"""Shards of loaders that cannot be read by index: every rank draws all batches, and keeps its part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.nn.utils.rnn import PackedSequence

from learnkit.core.batch import rebuild, slice_batch, split_batch
from learnkit.data.dataloaders import n_batches
from learnkit.data.shard import Order, Shard
from learnkit.distributed.shard_spec import ShardSpec


class RoundShard(Shard):
    """Shard of any iterable: one batch of each round, or with a global batch size, some rows of each batch.

    If the last round has fewer batches than ranks, the filler of the other ranks is the round's last batch."""

    draws_all = True

    def __init__(
        self,
        source: Any,  # loader that every rank has; not changed
        spec: ShardSpec,  # this rank's part of a round
    ) -> None:
        self.source = source
        self.order = Order()
        self.spec = spec

    def __len__(self) -> int:
        n = n_batches(self.source)
        if n is None:
            raise TypeError(f'The length of this {type(self.source).__name__} is not known.')
        return self.spec.count_batches(n, self.spec.per_round)

    def __iter__(self) -> Iterator[Any]:
        with self.order:
            batches = iter(self.source)
        return self._take_parts(batches)

    def _take_parts(self, batches: Iterator[Any]) -> Iterator[Any]:
        "Yield this rank's part of each round of a pass over the whole loader."
        take = self._take_rows if self.spec.batch_size == 'global' else self._take_batch
        shares = []
        for drawn in self.spec.draw_rounds(batches, self.order):
            batch, share = take(drawn)
            shares.append(share)
            self.order.shares = shares
            yield batch

    def _take_batch(self, drawn: list[Any]) -> tuple[Any, tuple[int, int]]:
        "Return this rank's batch of a round, or a filler, and its share."
        sizes = list(map(self.spec.count, drawn))
        if self.spec.rank < len(drawn):
            return drawn[self.spec.rank], (sizes[self.spec.rank], sum(sizes))
        return drawn[-1], (0, sum(sizes))

    def _take_rows(self, drawn: list[Any]) -> tuple[Any, tuple[int, int]]:
        "Return this rank's rows of the one batch of a round, and its share."
        [batch] = drawn
        k = self.spec.count(batch)
        rows = self.spec.rows(k)
        return _select_rows(batch, k, slice(rows.start, rows.stop)), self.spec.share(k)


class RoundIterator(RoundShard, Iterator[Any]):
    "Shard of an iterator, which is read once."

    def __init__(self, source: Any, spec: ShardSpec) -> None:
        super().__init__(source, spec)
        self._batches = self._take_parts(source)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._batches)


def _select_rows(
    batch: Any,
    k: int,  # number of samples in the batch
    rows: slice,  # samples to select
) -> Any:
    "Return a batch of some samples, in the same nesting as the loader's batch."
    [(xb, yb)] = slice_batch(*split_batch(batch), k, [rows])
    is_one_entry = isinstance(batch, PackedSequence) or not isinstance(batch, (tuple, list))
    return xb[0] if is_one_entry else rebuild(batch, [*xb, *yb])
