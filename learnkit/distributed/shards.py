# SPDX-License-Identifier: Apache-2.0
"""Sharded loaders: each rank's part of the batches of a single-process run. The user's loaders are not changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset
from typing_extensions import override

from learnkit.core.batch import BatchForm, find_bs, form_of
from learnkit.core.errors import DistributedError, EmptyLoaderError, OptionError
from learnkit.data.combined import CombinedLoader, CombinedPass
from learnkit.data.dataloaders import DataLoaders, TensorLoader, evaluation_loaders, n_batches
from learnkit.data.shard import Order, Shard
from learnkit.data.torch_loader import (
    get_index_sampler,
    iterates_as_torch,
    rebuild_with_sampler,
    start_lists,
    workers_run,
)
from learnkit.distributed.rounds import RoundIterator, RoundShard
from learnkit.distributed.shard_spec import ShardSpec

# number of rounds drawn at a time, because entering the context of `Order` takes 0.1 ms
N_ROUNDS = 32


def shard(
    dl: Any,  # loader that every rank has; not changed
    rank: int,  # rank of this process
    size: int,  # number of ranks
    batch_size: str = 'process',  # meaning of the loader's batch size: per 'process', or 'global'
    count: Callable[[Any], int] = find_bs,  # function returning the number of samples in a batch
) -> Any:
    """Return this rank's shard of a loader.

    A round is the batches of all ranks: the batch of a single-process run with the global batch size. Each round is
    divided into contiguous parts; `share(i)` returns the numbers of samples of batch `i` on this rank and on all
    ranks. A rank without a sample in the last round gets a filler, which does not count. If the loader drops a last
    smaller batch, a last smaller round is dropped.

    A DataLoader over samples by index and a `TensorLoader` read this rank's samples only. Of any other loader, every
    rank draws all batches and keeps its own. A loader with torch's `DistributedSampler` is returned unchanged.

    >>> shards = [shard(TensorLoader(torch.arange(5), bs=2), rank, 2) for rank in range(2)]
    >>> [[x.tolist() for x, in dl] for dl in shards]
    [[[0, 1], [4]], [[2, 3], [4]]]
    >>> [dl.share(1) for dl in shards]
    [(0, 1), (1, 1)]
    """
    return _make_shard(dl, ShardSpec(rank, size, batch_size, count=count), drops_last=True)


def shard_loaders(
    dls: Any,  # the user's `DataLoaders`, or a similar object; not changed
    rank: int,  # rank of this process
    size: int,  # number of ranks
    batch_size: str = 'process',  # meaning of the loaders' batch size: per 'process', or 'global'
    count: Callable[[Any], int] = find_bs,  # function returning the number of samples in a batch
) -> Any:
    """Return `DataLoaders` with this rank's shard of each loader, and the other attributes of `dls`.

    `n_iter`, if set, counts rounds. Raises `EmptyLoaderError` if the training loader has less than one round.

    >>> dls = DataLoaders.from_tensors(torch.arange(8), torch.arange(3), bs=2, shuffle=False)
    >>> [[x.tolist() for x, in dl] for dl in shard_loaders(dls, 1, 2)]
    [[[2, 3], [6, 7]], [[1, 2]]]
    """
    train = shard(dls.train, rank, size, batch_size, count)
    if n_batches(train) == 0:
        raise EmptyLoaderError(
            f'The training loader drops its samples, too few for a batch for each of {size} processes: lower its bs.'
        )
    spec = ShardSpec(rank, size, batch_size, count=count)
    shards = copy(dls) if isinstance(dls, DataLoaders) else _LoadersProxy(dls)
    shards.train = train
    shards.evaluation = [(name, _make_shard(dl, spec)) for name, dl in evaluation_loaders(dls)]
    shards.others = [_make_shard(dl, spec) for dl in getattr(dls, 'others', ())]
    return shards


def check_lengths(
    lengths: Sequence[int | None],  # length of each rank's training loader; None: unknown
) -> None:
    """Raise `DistributedError` if the lengths differ: a rank with more batches would wait forever.

    >>> check_lengths([4, 4])
    """
    if len(set(lengths)) == 1:
        return
    counts = ', '.join(f'{n} in process {i}' for i, n in enumerate(lengths))
    raise DistributedError(
        f'The processes have different numbers of training batches: {counts}. Pass loaders of one length.'
    )


class _LoadersProxy(DataLoaders):
    "Sharded loaders of an object of another library, whose other attributes are forwarded."

    def __init__(self, dls: Any) -> None:
        self.dls = dls
        self.n_inp = getattr(dls, 'n_inp', None)
        self.n_iter = getattr(dls, 'n_iter', None)
        self.path = Path(getattr(dls, 'path', '.'))
        self.evaluators = getattr(dls, 'evaluators', {})
        self._device = getattr(dls, 'device', None)

    @override
    def batch_form(self, name: str = 'train') -> BatchForm:
        return form_of(self.dls, name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__['dls'], name)


def _make_shard(
    dl: Any,
    spec: ShardSpec,
    drops_last: bool = False,  # drop a last smaller round if the loader drops a last smaller batch
) -> Any:
    "Return the shard of a loader, of the class that fits the loader."
    if isinstance(dl, CombinedLoader):
        return CombinedShard(dl, spec, drops_last)
    if drops_last and spec.batch_size == 'process':
        spec = replace(spec, drops_last=getattr(dl, 'drop_last', False))
    samplers = [s for s in list_samplers(dl) if isinstance(s, DistributedSampler)]
    if samplers:
        check_sampler(samplers[0], spec)
        return dl
    if type(dl) is TensorLoader:
        return TensorShard(dl, spec)
    if _gives_index_lists(dl):
        return _make_index_shard(dl, spec)
    if isinstance(dl, Iterator):
        return RoundIterator(dl, spec)
    return RoundShard(dl, spec)


def make_rank_seed(
    seed: int,  # seed that all ranks have
    rank: int,  # number of this rank's shard of the data
) -> int:
    """Return a seed that differs between ranks; rank 0 keeps the seed.

    >>> make_rank_seed(1, 0), make_rank_seed(1, 1)
    (1, 2177342782468422678)
    """
    return (seed + 0x9E3779B97F4A7C15 * rank) % 2**63


def check_sampler(sampler: DistributedSampler[Any], spec: ShardSpec) -> None:
    "Raise `OptionError` for a sampler of other ranks."
    if (sampler.num_replicas, sampler.rank) != (spec.size, spec.rank):
        raise OptionError(
            f'DistributedSampler(num_replicas={sampler.num_replicas}, rank={sampler.rank}): this process has part '
            f'{spec.rank} of {spec.size} of the data. Pass these numbers, or leave the sampler out.'
        )


def list_samplers(dl: Any) -> list[Any]:
    "Return the sampler of a loader, and the sampler of its batch sampler; None for a sampler that is absent."
    batch_sampler = getattr(dl, 'batch_sampler', None)
    return [getattr(dl, 'sampler', None), getattr(batch_sampler, 'sampler', None)]


# -- tensors in memory -----------------------------------------------------------------------------


class TensorShard(Shard, TensorLoader):
    "Shard of a `TensorLoader`, which selects rows of the same tensors for a whole batch at once."

    def __init__(self, source: TensorLoader, spec: ShardSpec) -> None:
        vars(self).update(vars(source))
        self.source = source
        self.spec = spec
        self.order = Order()

    @property
    def _sizes(self) -> tuple[int, int]:
        "Numbers of samples of a pass, and of a round."
        n = self.n // self.bs * self.bs if self.drop_last else self.n
        return n, self.bs * self.spec.per_round

    def __len__(self) -> int:
        return self.spec.count_batches(*self._sizes)

    @override
    def draw_order(self) -> Tensor:
        "Return the indices of the samples of all ranks in the order of an epoch."
        with self.order:
            return super().draw_order()

    @override
    def _split_rows(self, t: Tensor, n: int) -> Iterator[Tensor]:
        "Yield this rank's rows of each round from round `n` on, as views."
        shares = [(0, 0)] * n
        for start, rows, share in self.spec.pieces(*self._sizes, n):
            shares.append(share)
            self.order.shares = shares
            yield t[start + rows.start : start + rows.stop]


# -- several loaders -------------------------------------------------------------------------------


class CombinedShard(Shard, CombinedLoader):
    "Shard of each of several loaders, whose orders are drawn from the same generators in turn."

    def __init__(self, source: CombinedLoader, spec: ShardSpec, drops_last: bool) -> None:
        vars(self).update(vars(source))
        self.source = source
        self.spec = spec
        self.order = Order()
        of_part = replace(spec, count=lambda batch: spec.count([batch]))
        self.loaders = [_make_shard(dl, of_part, drops_last) for dl in source.loaders]
        for dl in self.loaders:
            if isinstance(dl, Shard):
                dl.order.join(self.order)
        if source.n_batches is not None:
            self.n_batches = spec.count_batches(source.n_batches, spec.per_round)

    @override
    def note_batch(self, drawn: CombinedPass) -> None:
        "Set the name of the loader of the last batch, and note the samples of each rank."
        super().note_batch(drawn)
        self.source.batch_source = self.batch_source
        drawn.shares.append(_find_share(drawn))
        self.order.shares = drawn.shares

    @override
    def order_state(self) -> dict[str, Any]:
        parts = [dl.order_state() if isinstance(dl, Shard) else None for dl in self.loaders]
        return {'whole': super().order_state(), 'parts': parts}

    @override
    def take_order(self, state: Mapping[str, Any]) -> None:
        for dl, part in zip(self.loaders, state['parts'], strict=True):
            if isinstance(dl, Shard):
                dl.take_order(part)
        super().take_order(state['whole'])


def _find_share(drawn: CombinedPass) -> tuple[int, int] | None:
    "Return the share of the last batch of a pass: of its first loader that has a batch."
    parts = drawn.parts if drawn.gives_parts else [drawn.parts[drawn.turn]]
    part = next(part for part in parts if part.batches is not None)
    found: tuple[int, int] | None = (
        part.dl.share(part.n - 1) if isinstance(part.dl, Shard) else None
    )
    return found


# -- DataLoaders over samples by index -------------------------------------------------------------


class IndexShard(Shard, DataLoader[Any]):
    "Shard of a DataLoader, which reads this rank's samples only; a `ShardSampler` yields the index lists."


class ShardSampler:
    """Sampler of this rank's part of each round of the index lists of a loader's own sampler.

    The loader's sampler runs on every rank, and draws the order of a single-process run."""

    def __init__(self, source: DataLoader[Any], spec: ShardSpec, order: Order) -> None:
        self.source = source
        self.order = order
        self.spec = spec
        self.seeds = torch.Generator()  # generator of the seeds of this rank's workers
        self.loader: Callable[[], Any] = lambda: None  # weak reference to this sampler's loader

    def __len__(self) -> int:
        n_lists = len(get_index_sampler(self.source))
        return self.spec.count_batches(n_lists, self.spec.per_round)

    def __iter__(self) -> Iterator[Any]:
        with self.order:
            state = (self.source.generator or torch.default_generator).get_state()
        generator = torch.Generator().set_state(state)
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator))
        self.seeds.manual_seed(make_rank_seed(seed, self.spec.rank))
        n = self.source.num_workers
        # with workers, torch starts the sampler twice, and takes lists from the second start only
        return self._begin() if n else self.begin(n, workers_ran=False)

    def _begin(self) -> Iterator[Any]:
        "Start a pass when the first list is requested, and yield this rank's parts."
        yield from self.begin(self.source.num_workers, workers_run(self.loader()))

    def begin(
        self,
        workers: int,  # number of workers of the pass, as for `start_lists`
        workers_ran: bool,  # whether persistent workers were running already
    ) -> Iterator[Any]:
        "Start a pass of the loader's sampler, and return an iterator over this rank's parts."
        with self.order:
            lists = start_lists(self.source, workers, workers_ran)
        return self._take_pieces(lists)

    def _take_pieces(self, lists: Iterator[Any]) -> Iterator[Any]:
        "Yield this rank's part of each round, as one index list."
        spec = self.spec
        shares: list[tuple[int, int]] = []
        for round_lists in spec.draw_rounds(lists, self.order, N_ROUNDS):
            k = sum(map(len, round_lists))
            shares.append(spec.share(k))
            self.order.shares = shares  # again, as another pass may have set it
            yield _select_entries(round_lists, spec.rows(k))


def _make_index_shard(dl: DataLoader[Any], spec: ShardSpec) -> IndexShard:
    order = Order()
    sampler = ShardSampler(dl, spec, order)
    loader: Any = rebuild_with_sampler(
        dl, sampler, kind=IndexShard, generator=sampler.seeds, in_order=True
    )
    loader.source = dl
    loader.spec = spec
    loader.order = order
    sampler.loader = ref(loader)
    return loader


def _gives_index_lists(dl: Any) -> bool:
    "Return True for a DataLoader over index lists, whose iteration is not overridden by a subclass."
    return (
        isinstance(dl, DataLoader)
        and not isinstance(dl.dataset, IterableDataset)
        and not hasattr(dl, 'load_state_dict')
        and iterates_as_torch(dl)
        and type(dl).__len__ is DataLoader.__len__
        and not isinstance(get_index_sampler(dl), Iterator)
        and (dl.batch_sampler is not None or isinstance(dl.sampler, BatchSampler))
    )


def _select_entries(lists: list[Any], rows: range) -> Any:
    "Select entries of the concatenation of index lists (tensors, arrays or lists), by position."
    if isinstance(lists[0], Tensor):
        return torch.cat(lists)[list(rows)]
    if isinstance(lists[0], np.ndarray):
        return np.concatenate(lists)[list(rows)]
    indices = list(chain.from_iterable(lists))
    return [indices[i] for i in rows]
