"""Shares of loaders that cannot be read by index: every process draws all batches, and takes its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from torch.nn.utils.rnn import PackedSequence

from learnkit.core.batch import cut_batch, rebuilt, split_batch
from learnkit.core.errors import BatchError
from learnkit.data.dataloaders import in_order, n_batches
from learnkit.data.position import LoaderPosition, describe_drawn
from learnkit.data.shard import Order, Shard
from learnkit.distributed.cut import ShardSpec

__all__ = ['RoundShard', 'RoundIterator', 'RoundsDrawing']

State = dict[str, Any]


class RoundsDrawing(LoaderPosition):
    """A pass over such a share: one over the whole loader, in rounds.

    The position is that of the pass over the whole loader. Batches are counted in rounds."""

    def __init__(self, dl: RoundShard, replay: bool | None = None, n_before: int = 0) -> None:
        super().__init__(dl, replay, n_before)
        self.inner = LoaderPosition(dl.whole, replay, n_before * dl.cut.per_round)

    def begin(self) -> Iterator[Any]:
        "Return the iterator over this process's batches that come next."
        dl, inner, n = self.dl, self.inner, self._n
        if self.start is not None:
            self._resume_inner()
        with dl.order:
            batches = inner.begin()
        self.start = inner.start
        return dl.rounds(batches, n)

    def _resume_inner(self) -> None:
        inner, dl = self.inner, self.dl
        per, whole = dl.cut.per_round, n_batches(dl.whole)
        inner.start, inner.first, inner._now = self.start, self.first, self._now
        inner.workers, inner._workers_ran = self.workers, self._workers_ran
        inner._n = self._now.get(
            'drawn', self._n * per if whole is None else min(self._n * per, whole)
        )
        if 'order' in self._now:
            dl.order.state = self._now['order']

    def _restore_between_epochs(self, ran: bool) -> None:
        self.inner._now = self._now
        with self.dl.order:
            self.inner._restore_between_epochs(ran)

    def state_dict(
        self,
        n_drawn: int,  # rounds of this epoch that were handed out
    ) -> State:
        "Return the position after `n_drawn` rounds."
        dl = self.dl
        with dl.order:
            state = self.inner.state_dict(n_drawn * dl.cut.per_round)
        if self.start is not None:
            state['now'] |= {'order': dl.order.state, 'drawn': dl.n_drawn}
        return {
            **state,
            'loader': describe_drawn(dl),
            'n': n_drawn,
            'n_before': self.n_before,
            'processes': dl.cut.size,
        }

    def indices(self, i: int) -> None:
        "They are not known."


class RoundShard(Shard):
    """A share of any iterable: of each round of batches this process's, or of each batch this process's rows.

    By process, where the last round has too few batches for all, a filler is its last batch again."""

    drawing, draws_all = RoundsDrawing, True

    def __init__(self, whole: Any, cut: ShardSpec) -> None:
        # the size of a batch is known only when it is there: whether rows are left for all, too
        self.whole, self.order = whole, Order()
        self.cut = cut if cut.batch_size == 'process' else replace(cut, fillers=True)
        self.n_drawn = 0  # batches of the whole loader in this pass

    def __len__(self) -> int:
        if (n := n_batches(self.whole)) is None:
            raise TypeError(f'The length of this {type(self.whole).__name__} is not known.')
        cut = self.cut
        if cut.batch_size == 'global':
            return n
        rounds, rest = divmod(n, cut.size)
        if cut.uneven == 'drop' or not rest:
            return rounds
        if cut.uneven == 'pad' or cut.fillers or cut.rank < rest:
            return rounds + 1
        return max(1, rounds)

    def __iter__(self) -> Iterator[Any]:
        with self.order:
            batches = iter(self.whole)
        return self.rounds(batches)

    def new(self, **changes: Any) -> Any:
        "Return the share of a loader of the same samples in the data set's order, where there is one."
        return type(self)(in_order(self.whole), replace(self.cut, uneven='join'))

    def rounds(
        self,
        batches: Iterator[Any],  # what is left of a pass of the whole loader
        n: int = 0,  # rounds before it
    ) -> Iterator[Any]:
        "Yield this process's part of each round."
        shares, filler = [(0, 0)] * n, None
        self.n_drawn = n * self.cut.per_round
        for drawn in self._drawn(batches):
            self.n_drawn += len(drawn)
            if self.cut.batch_size == 'global':
                batch, share = self._rows(drawn[0])
            else:
                batch, share = self._turn(drawn)
            if batch is None:
                filler = filler or (drawn[-1], share)
            else:
                shares.append(share)
                self.order.shares = shares
                yield batch
        if filler and not shares:
            self.order.shares = [filler[1]]
            yield filler[0]

    def _drawn(self, batches: Iterator[Any]) -> Iterator[list[Any]]:
        "Yield the batches of each round; those of a list are drawn from no generator."
        per, cut, plain = self.cut.per_round, self.cut, type(self.whole) in (list, tuple)
        while True:
            if plain:
                drawn = list(islice(batches, per))
            else:
                with self.order:
                    drawn = list(islice(batches, per))
            if len(drawn) == per or (drawn and cut.uneven != 'drop'):
                yield drawn
            if len(drawn) < per:
                return

    def _turn(self, drawn: list[Any]) -> tuple[Any, tuple[int, int]]:
        "Return the batch of a round that is this process's, None where it has none and needs none; and its share."
        cut, n = self.cut, len(drawn)
        if cut.uneven == 'pad':
            drawn = [drawn[i % n] for i in range(cut.size)]
        sizes = [self._size(b) for b in drawn]
        if cut.rank < len(drawn):
            return drawn[cut.rank], (sizes[cut.rank], sum(sizes))
        return drawn[-1] if cut.fillers else None, (0, sum(sizes))

    def _size(self, batch: Any) -> int:
        try:
            return self.cut.count(batch)
        except BatchError:
            return 1

    def _rows(self, batch: Any) -> tuple[Any, tuple[int, int]]:
        k = self.cut.count(batch)
        rows = self.cut.rows(k)
        return _rows_of(
            batch, k, slice(rows.start, rows.stop) if isinstance(rows, range) else rows
        ), self.cut.share(k)


class RoundIterator(RoundShard, Iterator[Any]):
    "A share of an iterator, whose batches come but once."

    def __iter__(self) -> Iterator[Any]:
        self._batches = self.rounds(self.whole)
        return self

    def __next__(self) -> Any:
        if '_batches' not in vars(self):
            iter(self)
        return next(self._batches)


def _rows_of(batch: Any, k: int, rows: slice | list[int]) -> Any:
    "Return these samples of a batch of `k`, as the loader gave it."
    [(xb, yb)] = cut_batch(*split_batch(batch), k, [rows])
    is_one_entry = isinstance(batch, PackedSequence) or not isinstance(batch, (tuple, list))
    return xb[0] if is_one_entry else rebuilt(batch, [*xb, *yb])
