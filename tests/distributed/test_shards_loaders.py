"""Shards of whole `DataLoaders`, loaders that are already sharded, and refused loaders."""

from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from learnkit import DataLoaders, TensorLoader
from learnkit.core.errors import DistributedError, EmptyLoaderError, OptionError
from learnkit.data.evaluator import Evaluator
from learnkit.distributed.shards import check_lengths, shard, shard_loaders
from tests.helpers.positions import Items
from tests.helpers.shards import batch_list, ids, items, own_loader, tensors


def test_loaders_have_all_that_the_users_have() -> None:
    x = torch.arange(40)
    night = Evaluator(TensorLoader(x[:5], bs=4), every='2ep')
    train = TensorLoader(x, bs=4)
    valid = {'day': DataLoader(x[:6], 2), 'night': night}
    dls = DataLoaders(train, valid, [x[:2], x[2:4]], device='cpu', path='data', n_inp=1)
    before = dict(vars(dls))
    shares = shard_loaders(dls, 1, 2)
    assert type(shares) is DataLoaders
    assert shares.n_inp == 1
    assert shares.path == dls.path
    assert shares.device == dls.device
    assert shares.evaluators == {'night': night} and len(shares) == 4
    assert [[ids(b) for b in dl] for _, dl in shares.evaluation] == [[[2, 3], [5]], [[2, 3, 4]]]
    assert [b.tolist() for b in shares.others[0]] == [[2, 3]]
    assert vars(dls) == before and dls.train is before['train']


def test_evaluation_takes_every_sample_once() -> None:
    x = torch.arange(11)
    dls = DataLoaders(*(TensorLoader(x, bs=2, drop_last=True) for _ in range(2)))
    shards = [shard_loaders(dls, rank, 4) for rank in range(4)]
    parts = [[ids(b) for i, b in enumerate(s.valid) if s.valid.share(i)[0]] for s in shards]
    assert sorted(chain.from_iterable(chain.from_iterable(parts))) == list(range(10))
    assert [len(s.train) for s in shards] == [1] * 4


def test_loaders_of_another_library_keep_their_attributes() -> None:
    class Others:
        vocab = ['a', 'b']
        device = torch.device('cpu')

        def __init__(self) -> None:
            self.train, self.valid = [torch.arange(2), torch.arange(2)], [torch.arange(4)]

        def __getitem__(self, i: int) -> Any:
            return (self.train, self.valid)[i]

    shares = shard_loaders(Others(), 1, 2)
    assert shares.vocab == ['a', 'b'] and shares.device.type == 'cpu'
    assert len(list(shares.train)) == 1 and [name for name, _ in shares.evaluation] == ['valid']


def test_users_loaders_are_not_changed() -> None:
    for make in (tensors, items, batch_list, own_loader):
        dl: Any = make(1)
        before = dict(getattr(dl, '__dict__', {}))
        list(shard(dl, 0, 2)), list(shard(dl, 1, 2))
        assert getattr(dl, '__dict__', {}) == before


def test_loaders_that_share_out_by_themselves_are_left_alone() -> None:
    ds = Items()
    by_torch = DataLoader(ds, 4, sampler=DistributedSampler(ds, num_replicas=2, rank=1))
    assert shard(by_torch, 1, 2) is by_torch
    batches = BatchSampler(DistributedSampler(ds, num_replicas=2, rank=1), 4, False)
    assert shard(dl := DataLoader(ds, batch_sampler=batches), 1, 2) is dl
    for rank, size in ((0, 2), (1, 4)):
        with pytest.raises(OptionError, match=f'part {rank} of {size}'):
            shard(by_torch, rank, size)


def test_a_loader_with_less_than_a_round_is_refused() -> None:
    for make in (tensors, items):
        with pytest.raises(EmptyLoaderError, match='each of 2 processes'):
            shard_loaders(DataLoaders(make(1, n=7, drop_last=True)), 0, 2)


def test_lengths_that_differ_are_refused_with_all_of_them() -> None:
    with pytest.raises(DistributedError, match='5 in process 0, 4 in process 1'):
        check_lengths([5, 4])
    with pytest.raises(DistributedError, match='None in process 1'):
        check_lengths([5, None])
    check_lengths([None, None])
