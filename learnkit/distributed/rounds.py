"""Shards of loaders that cannot be read by index: every rank draws all batches, and keeps its part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any

from torch.nn.utils.rnn import PackedSequence
from typing_extensions import override

from learnkit.core.batch import rebuild, slice_batch, split_batch
from learnkit.core.errors import BatchError
from learnkit.data.dataloaders import make_unshuffled, n_batches
from learnkit.data.position import LoaderPosition, describe_drawn
from learnkit.data.shard import Order, Shard
from learnkit.distributed.shard_spec import ShardSpec

State = dict[str, Any]


class RoundsPosition(LoaderPosition):
    """Position in a pass over a `RoundShard`.

    The saved position is the position in the whole loader. Batches of the shard are counted in rounds."""

    def __init__(self, dl: RoundShard, n_before: int = 0) -> None:
        super().__init__(dl, n_before)
        self.inner = LoaderPosition(dl.source, n_before * dl.spec.per_round)

    @override
    def begin(self) -> Iterator[Any]:
        "Return an iterator over this rank's next batches."
        dl = self.dl
        if 'order' in self._own_state:
            dl.order.state = self._own_state['order']
        with dl.order:
            batches = self.inner.begin()
        self.start = self.inner.start
        return dl.rounds(batches, self._n_skipped)

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        "Take a saved state, and set the position in the whole loader."
        self._n_skipped = state['n']
        self._own_state = state['now']
        self.start = state['start']
        n_drawn = self._n_skipped * self.dl.spec.per_round
        n_whole = n_batches(self.dl.source)
        if n_whole is not None:
            n_drawn = min(n_drawn, n_whole)
        whole = {**state, 'n': self._own_state.get('drawn', n_drawn)}
        if self.start is not None:
            self.inner.load_state_dict(whole)
            return
        with self.dl.order:
            self.inner.load_state_dict(whole)

    @override
    def state_dict(
        self,
        n_drawn: int,  # number of rounds of this epoch that were returned
    ) -> State:
        "Return the position after `n_drawn` rounds."
        dl = self.dl
        with dl.order:
            state = self.inner.state_dict(n_drawn * dl.spec.per_round)
        if self.start is not None:
            state['now'] |= {'order': dl.order.state, 'drawn': dl.n_drawn}
        return {
            **state,
            'loader': describe_drawn(dl),
            'n': n_drawn,
            'n_before': self.n_before,
        }

    @override
    def indices(self, i: int) -> None:
        "Return None, because the indices of samples are unknown."


class RoundShard(Shard):
    """Shard of any iterable: one batch of each round, or with a global batch size, some rows of each batch.

    If the last round has fewer batches than ranks, the filler of the other ranks is the round's last batch."""

    position_class = RoundsPosition
    draws_all = True

    def __init__(
        self,
        source: Any,  # loader that every rank has; not changed
        spec: ShardSpec,  # this rank's part of a round
    ) -> None:
        self.source = source
        self.order = Order()
        # before a batch is drawn, its size is unknown, and so is whether all ranks get a row of it
        self.spec = spec if spec.batch_size == 'process' else replace(spec, fillers=True)
        self.n_drawn = 0  # number of batches drawn from the whole loader in this pass

    def __len__(self) -> int:
        n = n_batches(self.source)
        if n is None:
            raise TypeError(f'The length of this {type(self.source).__name__} is not known.')
        spec = self.spec
        if spec.batch_size == 'global':
            return n
        rounds, rest = divmod(n, spec.size)
        if spec.uneven == 'drop' or not rest:
            return rounds
        if spec.uneven == 'pad' or spec.fillers or spec.rank < rest:
            return rounds + 1
        return max(1, rounds)

    def __iter__(self) -> Iterator[Any]:
        with self.order:
            batches = iter(self.source)
        return self.rounds(batches)

    def new(self, **changes: Any) -> Any:
        "Return a shard of the same samples in the order of the data set, if the order is known."
        return type(self)(make_unshuffled(self.source), replace(self.spec, uneven='join'))

    def rounds(
        self,
        batches: Iterator[Any],  # remaining batches of a pass over the whole loader
        n: int = 0,  # number of previous rounds
    ) -> Iterator[Any]:
        "Yield this rank's part of each round."
        shares = [(0, 0)] * n
        filler = None
        self.n_drawn = n * self.spec.per_round
        for drawn in self._draw_rounds(batches):
            self.n_drawn += len(drawn)
            if self.spec.batch_size == 'global':
                batch, share = self._take_rows(drawn[0])
            else:
                batch, share = self._take_batch(drawn)
            if batch is None:
                filler = filler or (drawn[-1], share)
            else:
                shares.append(share)
                self.order.shares = shares
                yield batch
        if filler and not shares:
            self.order.shares = [filler[1]]
            yield filler[0]

    def _draw_rounds(self, batches: Iterator[Any]) -> Iterator[list[Any]]:
        "Yield the batches of each round."
        per = self.spec.per_round
        spec = self.spec
        draws_nothing = type(self.source) in (list, tuple)
        order = nullcontext() if draws_nothing else self.order
        while True:
            with order:
                drawn = list(islice(batches, per))
            if len(drawn) == per or (drawn and spec.uneven != 'drop'):
                yield drawn
            if len(drawn) < per:
                return

    def _take_batch(self, drawn: list[Any]) -> tuple[Any, tuple[int, int]]:
        "Return this rank's batch of a round and its share; the batch is None if no batch is left for the rank."
        spec = self.spec
        n = len(drawn)
        if spec.uneven == 'pad':
            drawn = [drawn[i % n] for i in range(spec.size)]
        sizes = [self._count(b) for b in drawn]
        if spec.rank < len(drawn):
            return drawn[spec.rank], (sizes[spec.rank], sum(sizes))
        return drawn[-1] if spec.fillers else None, (0, sum(sizes))

    def _count(self, batch: Any) -> int:
        "Return the number of samples in a batch; 1 if the number is unknown."
        try:
            return self.spec.count(batch)
        except BatchError:
            return 1

    def _take_rows(self, batch: Any) -> tuple[Any, tuple[int, int]]:
        "Return this rank's rows of a batch, and its share."
        k = self.spec.count(batch)
        rows = self.spec.rows(k)
        selection = slice(rows.start, rows.stop) if isinstance(rows, range) else rows
        return _select_rows(batch, k, selection), self.spec.share(k)


class RoundIterator(RoundShard, Iterator[Any]):
    "Shard of an iterator, which is read once."

    def __iter__(self) -> Iterator[Any]:
        self._batches = self.rounds(self.source)
        return self

    def __next__(self) -> Any:
        if '_batches' not in vars(self):
            iter(self)
        return next(self._batches)


def _select_rows(
    batch: Any,
    k: int,  # number of samples in the batch
    rows: slice | list[int],  # samples to select
) -> Any:
    "Return a batch of some samples, in the same nesting as the loader's batch."
    [(xb, yb)] = slice_batch(*split_batch(batch), k, [rows])
    is_one_entry = isinstance(batch, PackedSequence) or not isinstance(batch, (tuple, list))
    return xb[0] if is_one_entry else rebuild(batch, [*xb, *yb])
