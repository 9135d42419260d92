"""The batch of all ranks: its samples and weight, and the factors with which the mean over ranks is its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from learnkit import Callback, Learner
from tests.helpers.distributing import make_dls, make_learner
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist

N_RANKS = 3
N = 25  # samples: two batches of 12, and one of a single sample, which the last rank has
WEIGHTS = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)


def weigh(xb: Any, yb: Any) -> float:
    return float((yb[0] + 1).sum())


def weighted_loss(pred: Tensor, targ: Tensor) -> Tensor:
    "Return a mean loss whose denominator is the weight that `weigh` returns."
    losses = F.cross_entropy(pred, targ, reduction='none')
    return (losses * (targ + 1)).sum() / (targ + 1).sum()


CASES: dict[str, Callable[[int], Learner]] = {
    'samples': lambda bs: make(bs, loss_func=nn.CrossEntropyLoss()),
    'weights of classes': lambda bs: make(bs, loss_func=nn.CrossEntropyLoss(WEIGHTS)),
    'weight_func': lambda bs: make(bs, loss_func=weighted_loss, weight_func=weigh),
    'sum': lambda bs: make(bs, loss_func=nn.CrossEntropyLoss(reduction='sum')),
    # the last batch has 10 samples: 3, 3 and 4 on each rank
    'microbatches': lambda bs: make(bs, 34, loss_func=nn.CrossEntropyLoss(WEIGHTS), microbatch=3),
}


def make(bs: int, n: int = N, **options: Any) -> Learner:
    return make_learner(make_dls(n, bs), metrics=None, lr=0.0, **options)


class Notes(Callback):
    "Note number of samples, weight and loss of each batch over all ranks, and this rank's part."

    order = 1000
    run_valid = False

    def before_fit(self) -> None:
        self.noted: list[dict[str, Any]] = []

    def after_batch(self) -> None:
        learn = self.learn
        batch = learn.parts.processes.batch
        weight = batch.total_weight(learn)
        self.noted.append(
            {
                'samples': batch.count_samples(learn),
                'weight': 0.0 if weight is None else float(weight),  # None for a sum
                'loss': float(batch.mean_loss(learn)),
                'is local': batch.has_local_samples(learn),
                'parts': [len(xb[0]) for xb, _ in batch.split(learn, learn.xb, learn.yb, 3)],
            }
        )


def train(make: Callable[[int], Learner], bs: int) -> list[dict[str, Any]]:
    learn = make(bs)
    notes = Notes()
    with learn.distributed('ddp', timeout='20s'), learn.added_cbs(notes):
        learn.fit(1)
    return notes.noted


@pytest.fixture(scope='module')
def ranks() -> list[dict[str, Any]]:
    return run_ranks(lambda rank: {name: train(make, 4) for name, make in CASES.items()}, N_RANKS)


@pytest.mark.parametrize('name', CASES)
def test_the_batch_of_all_ranks_is_that_of_one_process(
    name: str, ranks: list[dict[str, Any]]
) -> None:
    expected = train(CASES[name], 4 * N_RANKS)
    for noted in (rank[name] for rank in ranks):
        assert [batch['samples'] for batch in noted] == [
            12,
            12,
            10 if name == 'microbatches' else 1,
        ]
        for batch, of_one in zip(noted, expected, strict=True):
            assert batch['weight'] == pytest.approx(of_one['weight'], rel=1e-12)
            assert batch['samples'] == of_one['samples']
            assert batch['loss'] == pytest.approx(of_one['loss'], rel=1e-12)


def test_only_the_last_rank_has_the_sample_that_is_left(ranks: list[dict[str, Any]]) -> None:
    for name in ('samples', 'weights of classes', 'weight_func', 'sum'):
        are_local = [[batch['is local'] for batch in rank[name]] for rank in ranks]
        assert are_local == [[True, True, False], [True, True, False], [True, True, True]]


def test_ranks_have_as_many_microbatches(ranks: list[dict[str, Any]]) -> None:
    parts = [[batch['parts'] for batch in rank['microbatches']] for rank in ranks]
    assert parts == [
        [[3, 1], [3, 1], [1, 2]],
        [[3, 1], [3, 1], [1, 2]],
        [[3, 1], [3, 1], [3, 1]],
    ]


def test_an_evaluation_within_a_batch_leaves_its_samples() -> None:
    def job(rank: int) -> list[Any]:
        noted: list[Any] = []

        def evaluate(cb: Any) -> None:
            batch = cb.learn.parts.processes.batch

            def count() -> Any:
                return batch.has_local_samples(cb.learn), batch.count_samples(cb.learn)

            before = count()
            xb, yb = cb.learn.xb, cb.learn.yb
            cb.learn.validate()
            cb.learn.xb, cb.learn.yb = xb, yb
            noted.append([before, count()])

        with_evaluation = Callback(after_step=evaluate, run_valid=False)
        learn = make_learner(make_dls(N, 4, n_valid=14), cbs=with_evaluation)
        with learn.distributed('ddp', timeout='20s'):
            learn.fit(1)
        return noted

    for rank, noted in enumerate(run_ranks(job, N_RANKS)):
        of_batches = [(True, 12), (True, 12), (rank == 2, 1)]
        assert noted == [[samples, samples] for samples in of_batches]
