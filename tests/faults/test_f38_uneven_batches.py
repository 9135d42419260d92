"""Row 38: processes with different numbers of batches. Joined; own loaders are refused."""

from typing import Any

import pytest

from learnkit import DataLoaders, Learner
from learnkit.core.errors import DistributedError
from tests.faults.fault_helpers import others_in_full
from tests.helpers.distributing import make_data, make_dls, make_learner, weights
from tests.helpers.ranks import run_ranks


def train(rank: int, n: int, kind: str) -> dict[str, Any]:
    learn = make_learner(make_dls(n, 4, kind))
    with learn.distributed('ddp', timeout='300s'):
        learn.fit(2)
        learn.check_replicas()
        return {'weights': weights(learn), 'steps': learn.time.st, 'samples': learn.time.sp}


def alone(n: int, kind: str) -> Learner:
    learn = make_learner(make_dls(n, 8, kind))
    learn.fit(2)
    return learn


# 36 samples are 9 batches of 4: five for one process, and four for the other
@pytest.mark.parametrize(
    ('n', 'kind'),
    others_in_full(
        [(36, 'tensors'), (36, 'torch'), (33, 'tensors'), (33, 'torch')],
        lambda n, kind: (n == 33) == (kind == 'torch'),
    ),
)
def test_joined(n: int, kind: str) -> None:
    expected = alone(n, kind)
    for got in run_ranks(train, 2, n, kind):
        assert (got['weights'] - weights(expected)).abs().max() < 1e-10
        assert got['steps'] == 10 and got['samples'] == 2 * n


def own_loaders(rank: int) -> list[Any]:
    "Give the processes separate batches, 5 and 4."
    x, y = make_data(20 - 4 * rank)
    learn = make_learner(DataLoaders(list(zip(x.split(4), y.split(4), strict=True)), device='cpu'))
    try:
        with learn.distributed('ddp', sharded_already=True, timeout='300s'):
            learn.fit(2)
    except DistributedError as e:
        return [str(e)]
    finally:
        assert learn.time.st == 0
    return [learn.time.st]


def test_loaders_that_bring_their_share_are_refused_before_the_first_step() -> None:
    for (text,) in run_ranks(own_loaders, 2):
        assert '5 in process 0, 4 in process 1' in text


@pytest.mark.full
def test_any_number_of_samples() -> None:
    n_tried = 0
    for n_ranks in (2, 3, 4):
        for n in range(8, 33):
            expected = make_learner(make_dls(n, 4 * n_ranks))
            expected.fit(2)
            for got in run_ranks(train, n_ranks, n, 'tensors'):
                assert (got['weights'] - weights(expected)).abs().max() < 1e-10
                assert got['samples'] == 2 * n
            n_tried += 1
    print(
        f'row 38: {n_tried} sizes of data sets in 2, 3 and 4 processes, each as one process has it'
    )
