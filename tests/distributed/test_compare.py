"""Descriptions and checksums by which ranks are compared; ranks that differ are refused."""

import zlib
from typing import Any

import pytest
import torch

from learnkit.comm.ranks import SINGLE_RANK
from learnkit.core.errors import DistributedError
from learnkit.distributed.compare import (
    compute_checksum,
    find_differences,
)
from tests.helpers.distributing import make_learner
from tests.helpers.ranks import run_ranks


class Gathered:
    "A process group whose other ranks have given values."

    def __init__(self, *others: dict[str, Any]) -> None:
        self.others = others

    def gather(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        return [own, *self.others]


def test_differences_name_value_and_rank() -> None:
    world: Any = Gathered({'a': 1, 'b': 2}, {'a': 5, 'c': 3})
    assert find_differences(world, {'a': 1, 'b': 2}) == [
        ('a', 2, 1, 5),
        ('b', 2, 2, 'absent'),
        ('c', 2, 'absent', 3),
    ]


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.int64])
def test_a_checksum_is_of_all_bytes(dtype: torch.dtype) -> None:
    t = torch.arange(12).view(3, 4).to(dtype)
    storage = bytes(t.untyped_storage().tolist())
    assert compute_checksum(t) == compute_checksum(t.T.contiguous().T) == zlib.crc32(storage)
    t[2, 3] += 1
    assert compute_checksum(t) != zlib.crc32(storage)


@pytest.mark.dist
def test_models_that_differ_are_refused() -> None:
    def job(rank: int) -> str:
        learn = make_learner()
        if rank:
            learn.model[3] = torch.nn.Linear(16, 4).double()
        with (
            pytest.raises(DistributedError, match='do not have the same model') as e,
            learn.distributed('ddp'),
        ):
            pass
        assert learn.world is SINGLE_RANK and learn.dls.train.bs == 8
        return str(e.value)

    assert all('3.weight' in text for text in run_ranks(job))


@pytest.mark.dist
def test_processes_with_other_options_are_refused() -> None:
    def job(rank: int) -> str:
        with (
            pytest.raises(DistributedError, match='same model, data') as e,
            make_learner().distributed('ddp', batch_size=('process', 'global')[rank]),
        ):
            pass
        return str(e.value)

    for text in run_ranks(job):
        assert "batch_size: 'process' in process 0, 'global' in process 1" in text
