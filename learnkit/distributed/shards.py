"""Shares of loaders: each process's part of the batches that one would have; the user's loaders are not changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from learnkit.core.batch import BatchForm, find_bs, form_of
from learnkit.core.errors import DistributedError, EmptyLoaderError, LoaderError
from learnkit.core.random import RNGState, preserved_generators, preserved_rng, restore_rng
from learnkit.data.dataloaders import (
    DataLoaders,
    TensorLoader,
    evaluation_loaders,
    in_order,
    n_batches,
)
from learnkit.data.shard import Order, Shard
from learnkit.data.torch_loader import (
    epochs_of,
    index_sampler,
    set_epochs,
    start_lists,
    with_sampler,
    workers_run,
)
from learnkit.distributed.cut import ShardSpec
from learnkit.distributed.rounds import RoundIterator, RoundShard

__all__ = [
    'shard',
    'shard_loaders',
    'check_lengths',
    'FirstBatches',
    'TensorShard',
    'IndexShard',
    'ShardSampler',
]

# drawn at a time: to let the order's generators stand for the process's own costs a tenth of a ms
MOST_ROUNDS = 32


def shard(
    dl: Any,  # the loader that every process has; it is not changed
    rank: int,  # the number of this process
    size: int,  # how many there are
    batch_size: str = 'process',  # whose batch size the loader has: each 'process', or 'global'
    uneven: str = 'join',  # last round: 'join' takes each sample once, 'pad' repeats, 'drop' omits
    fillers: bool = True,  # give a process without a sample in a round one that does not count
    count: Callable[[Any], int] = find_bs,  # returns the number of samples in a batch
) -> Any:
    """Return this process's share of a loader.

    All shares together give, round by round, the batches of one process whose batch size is that of all. A round is cut
    into contiguous pieces; `share(i)` says how many samples of batch `i` are this process's, and how many all have. A
    loader that leaves out a last smaller batch leaves out a last smaller round. Without `fillers`, processes may get
    different numbers of batches, at least one.

    A DataLoader over samples by index fetches this process's samples alone, and so does a `TensorLoader`; of any other
    loader, every process draws all batches and takes its own. A loader with torch's `DistributedSampler` is returned as
    it is. Raises `LoaderError` for a loader that is a share already.

    >>> dl = TensorLoader(torch.arange(5), bs=2)
    >>> [[x.tolist() for x, in shard(dl, rank, 2)] for rank in range(2)]
    [[[0, 1], [4]], [[2, 3], [4]]]
    >>> [shard(dl, rank, 2).share(1) for rank in range(2)]
    [(0, 1), (1, 1)]
    """
    drops = batch_size == 'process' and getattr(dl, 'drop_last', False)
    return _share(
        dl, ShardSpec(rank, size, batch_size, 'drop' if drops else uneven, fillers, count)
    )


def shard_loaders(
    dls: Any,  # the user's `DataLoaders`, or what works like one; not changed
    rank: int,
    size: int,
    batch_size: str = 'process',
    uneven: str = 'join',  # of the training loader; the others give each of their samples once
    fillers_in_evaluation: bool = False,  # all processes evaluate the same number of batches
    count: Callable[[Any], int] = find_bs,  # returns the number of samples in a batch
) -> Any:
    """Return loaders that give this process's share of each loader, and all else as `dls` has it.

    `n_iter`, where set, counts rounds. Raises `EmptyLoaderError` where the training loader is too small for a round.

    >>> dls = DataLoaders.from_tensors(torch.arange(8), torch.arange(3), bs=2, shuffle=False)
    >>> [[x.tolist() for x, in dl] for dl in shard_loaders(dls, 1, 2)]
    [[[2, 3], [6, 7]], [[1, 2]]]
    """
    train = shard(dls.train, rank, size, batch_size, uneven, count=count)
    if n_batches(train) == 0:
        raise EmptyLoaderError(
            f'The training loader has {n_batches(dls.train)} batches, which is less than one for all {size} processes '
            "together, and what is left over is dropped. Lower the batch size, or give uneven='join' without drop_last."
        )
    cut = ShardSpec(rank, size, batch_size, fillers=fillers_in_evaluation, count=count)
    shares = copy(dls) if isinstance(dls, DataLoaders) else _Like(dls)
    shares.train = train
    shares.evaluation = [(name, _share(dl, cut)) for name, dl in evaluation_loaders(dls)]
    shares.others = [_share(dl, cut) for dl in getattr(dls, 'others', ())]
    return shares


def check_lengths(
    lengths: Sequence[int | None],  # of each process's own training loader; None: it does not know
    uneven: str = 'join',
) -> int | None:
    """Return how many batches all processes have; with `uneven='drop'`, the fewest that one of them has.

    Raises `DistributedError` where they differ otherwise: a process would wait for ever for those that are through.

    >>> check_lengths([5, 4], uneven='drop')
    4
    """
    known = [n for n in lengths if n is not None]
    if len(known) < len(lengths) and len(set(lengths)) < 2:
        return None
    if len(set(lengths)) == 1 or (uneven == 'drop' and len(known) == len(lengths)):
        return min(known)
    counts = ', '.join(
        f'{"an unknown number" if n is None else n} in process {i}' for i, n in enumerate(lengths)
    )
    raise DistributedError(
        f'The processes have different numbers of training batches: {counts}. Give loaders of one '
        "length, or uneven='drop', which ends epochs with the shortest; or give every process the "
        'whole loader, whose share is then made here.'
    )


class FirstBatches:
    """Give the first batches of each pass over a loader, which gives this process's share by itself.

    >>> list(FirstBatches(range(5), 2))
    [0, 1]
    """

    def __init__(self, whole: Any, n: int) -> None:
        self.whole, self.n = whole, n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[Any]:
        return islice(self.whole, self.n)

    @property
    def sampler(self) -> Any:
        "The loader's, which may want to be told the epoch."
        return getattr(self.whole, 'sampler', None)


class _Like(DataLoaders):
    "Loaders in the place of those of another library, whose other attributes they have."

    def __init__(self, dls: Any) -> None:
        self.dls = dls
        self.n_inp, self.n_iter = getattr(dls, 'n_inp', None), getattr(dls, 'n_iter', None)
        self.path, self.evaluators = Path(getattr(dls, 'path', '.')), getattr(dls, 'evaluators', {})
        self._device = getattr(dls, 'device', None)

    def batch_form(self, name: str = 'train') -> BatchForm:
        return form_of(self.dls, name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__['dls'], name)


def _share(dl: Any, cut: ShardSpec) -> Any:
    if isinstance(dl, Shard):
        raise LoaderError(
            f'This {type(dl).__name__} is the share of one process already: give the whole loader.'
        )
    if _has_own_shares(dl):
        return dl
    if type(dl) is TensorLoader:
        return TensorShard(dl, cut)
    if _gives_index_lists(dl):
        return _index_shard(dl, cut)
    return (RoundIterator if isinstance(dl, Iterator) else RoundShard)(dl, cut)


def _has_own_shares(dl: Any) -> bool:
    sampler = getattr(dl, 'sampler', None)
    return isinstance(sampler, DistributedSampler) or isinstance(
        getattr(getattr(dl, 'batch_sampler', None), 'sampler', None), DistributedSampler
    )


# Tensors in memory


class TensorShard(Shard, TensorLoader):
    "A share of a `TensorLoader`: by index from the same tensors, with no work for a single sample."

    _shares: tuple[int, tuple[int, int], tuple[int, int]] | None = None

    def __init__(self, whole: TensorLoader, cut: ShardSpec) -> None:
        vars(self).update(vars(whole))
        self.whole, self.cut, self.order = whole, cut, Order()

    @property
    def _sizes(self) -> tuple[int, int]:
        "The samples of a pass, and of a round."
        return (
            self.n // self.bs * self.bs if self.drop_last else self.n
        ), self.bs * self.cut.per_round

    def __len__(self) -> int:
        return self.cut.n_given(*self._sizes)

    def share(self, i: int) -> tuple[int, int]:
        "Return how many samples of batch `i` are this process's, and how many all have."
        rounds, whole, last = self._shares or self._count_shares()
        return whole if i < rounds else last

    def _count_shares(self) -> tuple[int, tuple[int, int], tuple[int, int]]:
        "Return the number of whole rounds that give a batch here, and the shares of one and of the last round."
        n, full = self._sizes
        rounds, rest = divmod(n, full)
        return (
            rounds * bool(self.cut.rows(full) or not rest),
            self.cut.share(full),
            self.cut.share(rest),
        )

    def new(self, **changes: Any) -> TensorShard:
        "Return the share of a loader with other options that takes each sample once."
        return TensorShard(self.whole.new(**changes), replace(self.cut, uneven='join'))

    def draw_order(self) -> Tensor:
        "Return the samples' numbers in the order of an epoch of all processes."
        with self.order:
            return super().draw_order()

    def _split_rows(self, t: Tensor, n: int) -> Iterator[Tensor]:
        "Yield this process's rows of each round from round `n` on, views where none is repeated."
        self._shares = self._count_shares()  # of this pass, which `share` is asked in each batch
        samples, full = self._sizes
        rounds, rest = divmod(samples, full)
        rows, at = self.cut.rows(full) if rounds else range(0), rounds * full
        last = self.cut.rows(rest) if rest and self.cut.uneven != 'drop' else range(0)
        if not (self.cut.fillers or rows or last):
            last, at = range(1), at if rest else 0

        if rows:
            for block in t[n * full : rounds * full].split(1024 * full):
                yield from _rows(block.unflatten(0, (len(block) // full, full)), rows, 1).unbind(0)
        if last:
            yield _rows(t[at:], last, 0)


def _rows(t: Tensor, rows: range | list[int], dim: int) -> Tensor:
    "Return these rows along `dim`, a view where they follow one another."
    if isinstance(rows, range):
        return t.narrow(dim, rows.start, len(rows))
    return t.index_select(dim, torch.tensor(rows, device=t.device))


# DataLoaders over samples by index


class IndexShard(Shard, DataLoader[Any]):
    "A share of a DataLoader: one that fetches this process's samples alone. `ShardSampler` has its index lists."

    def batch_lists(self, workers: int, workers_ran: bool, first: RNGState | None) -> Iterator[Any]:
        "Start a pass over this process's index lists, as `ShardSampler.begin` does."
        return index_sampler(self).begin(workers, workers_ran, first)

    def new(self, **changes: Any) -> Any:
        "Return the share of a loader of the same samples in the data set's order, each once."
        return _share(in_order(self.whole), replace(self.cut, uneven='join'))


class ShardSampler:
    """Give this process's piece of each round of the index lists that a loader's own sampler gives.

    The loader's sampler runs in every process, and in each it draws what it draws in one that is alone."""

    def __init__(self, whole: DataLoader[Any], cut: ShardSpec, order: Order) -> None:
        self.whole, self.order = whole, order
        # for whom data end early is not known
        self.cut = cut if _sizes(whole, cut) else replace(cut, fillers=True)
        self.seeds = torch.Generator()  # of this process's workers
        # refers to the share that this is the sampler of
        self.loader: Callable[[], Any] = lambda: None

    def __len__(self) -> int:
        if (sizes := _sizes(self.whole, self.cut)) is not None:
            return self.cut.n_given(*sizes)
        rounds, rest = divmod(len(index_sampler(self.whole)), self.cut.per_round)
        return rounds + (rest > 0 and self.cut.uneven != 'drop')

    def __iter__(self) -> Iterator[Any]:
        with self.order:
            state = (self.whole.generator or torch.default_generator).get_state()
        seed = int(
            torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().set_state(state))
        )
        self.seeds.manual_seed((seed + 0x9E3779B97F4A7C15 * self.cut.rank) % 2**63)
        return self._begin()

    def _begin(self) -> Iterator[Any]:
        yield from self.begin(self.whole.num_workers, workers_run(self.loader()))

    def begin(
        self,
        workers: int,  # of the pass, as for `start_lists`
        workers_ran: bool,
        first: RNGState | None = None,  # global generators before the first list, if others drew
    ) -> Iterator[Any]:
        "Start a pass of the loader's sampler, and return this process's pieces."
        with self.order:
            lists = start_lists(self.whole, workers, workers_ran)
            if first is not None:
                restore_rng(first)
        return self._pieces(lists)

    def _pieces(self, lists: Iterator[Any]) -> Iterator[Any]:
        cut = self.cut
        shares: list[tuple[int, int]] = []
        for drawn, k in self._rounds(lists):
            if not (rows := cut.rows(k)):
                continue
            shares.append(cut.share(k))
            # of the pass that goes on: another one may have been begun, and left
            self.order.shares = shares
            yield _entries(drawn, rows)
        if not (shares or cut.fillers) and len(self):
            self.order.shares = [cut.share(k)]
            yield _entries(drawn, range(1))

    def _rounds(self, lists: Iterator[Any]) -> Iterator[tuple[list[Any], int]]:
        "Yield the index lists of each round, and their number of samples; drawn a few rounds at a time."
        per, sizes, n = self.cut.per_round, _sizes(self.whole, self.cut), 1
        while True:
            with self.order:
                drawn = list(islice(lists, n * per))
            for i in range(0, len(drawn), per):
                of_round = drawn[i : i + per]
                k = sum(map(len, of_round))
                if self.cut.uneven != 'drop' or (k == sizes[1] if sizes else len(of_round) == per):
                    yield of_round, k
            if len(drawn) < n * per:
                return
            n = min(2 * n, MOST_ROUNDS)


def _index_shard(dl: DataLoader[Any], cut: ShardSpec) -> IndexShard:
    sampler = ShardSampler(dl, cut, order := Order())
    made: Any = with_sampler(dl, sampler, kind=IndexShard, generator=sampler.seeds, in_order=True)
    made.whole, made.cut, made.order, sampler.loader = dl, sampler.cut, order, ref(made)
    return made


def _gives_index_lists(dl: Any) -> bool:
    "Tell whether a loader is torch's own, or one made by its constructor alone, over lists of indices."
    if (
        not isinstance(dl, DataLoader)
        or isinstance(dl.dataset, IterableDataset)
        or hasattr(dl, 'load_state_dict')
    ):
        return False
    if any(
        getattr(type(dl), f) is not getattr(DataLoader, f)
        for f in ('__iter__', '__len__', '_get_iterator')
    ):
        return False
    sampler = index_sampler(dl)
    if isinstance(sampler, Iterator) or dl.batch_sampler is not None:
        return not isinstance(sampler, Iterator)
    epochs = epochs_of(dl)
    with preserved_rng(), preserved_generators(dl):
        first = next(iter(sampler), None)
    set_epochs(dl, epochs)
    return isinstance(first, (list, range)) or getattr(first, 'ndim', 0) == 1


def _sizes(dl: DataLoader[Any], cut: ShardSpec) -> tuple[int, int] | None:
    "Return the samples of a pass, and of a round; None where they are not known."
    sampler = index_sampler(dl)
    if type(sampler) is not BatchSampler or (n := n_batches(sampler.sampler)) is None:
        return None
    return n - n % sampler.batch_size * sampler.drop_last, sampler.batch_size * cut.per_round


def _entries(drawn: list[Any], rows: range | list[int]) -> Any:
    "Return these entries of index lists that stand one behind the other."
    one = drawn[0]
    if (
        isinstance(rows, range)
        and len(rows) == len(one)
        and rows.start % len(one) == 0
        and all(len(o) == len(one) for o in drawn)
    ):
        return drawn[rows.start // len(one)]
    if len(drawn) > 1:
        one = (
            torch.cat(drawn)
            if isinstance(one, Tensor)
            else np.concatenate(drawn)
            if isinstance(one, np.ndarray)
            else list(chain.from_iterable(drawn))
        )
    if isinstance(rows, range):
        return one[rows.start : rows.stop]
    return one[rows] if isinstance(one, (Tensor, np.ndarray)) else [one[i] for i in rows]
