"""Mistakes that are silent elsewhere in distributed training raise an error or a warning."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

from learnkit import Callback, DataLoaders, Learner
from learnkit.core.errors import DistributedError, ModelError
from tests.helpers.distributing import make_data, make_dls, make_learner, weights
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist


def make(**events: Callable[[Any], Any]) -> Learner:
    return make_learner(make_dls(101, 4), cbs=Callback(**events))


def unfrozen_in_an_epoch(rank: int) -> None:
    def unfreeze(cb: Any) -> None:
        if cb.training and cb.iter == 3:
            cb.model[0].requires_grad_(True)

    learn = make(after_batch=unfreeze)
    learn.create_opt()
    learn.model[0].requires_grad_(False)
    trained(learn)


def a_second_backward(rank: int) -> None:
    def again(cb: Any) -> None:
        F.cross_entropy(cb.model(cb.x * 1.1), cb.y).backward()

    trained(make(after_backward=again))


def other_data_within(rank: int) -> None:
    learn = make()
    with learn.distributed('ddp', timeout='20s'):
        learn.fit(1)
        learn.dls = make_dls(64, 4)
        learn.fit(1)


def wrapped_by_hand(rank: int) -> None:
    import torch.distributed as dist

    dist.init_process_group('gloo')
    learn = make()
    learn.model = nn.parallel.DistributedDataParallel(learn.model)
    try:
        trained(learn)
    finally:
        dist.destroy_process_group()


def another_choice(rank: int) -> None:
    data, g = TensorDataset(*make_data(60)), torch.Generator().manual_seed(rank)
    train, valid = (
        Subset(data, part.tolist()) for part in torch.randperm(60, generator=g).split([40, 20])
    )
    trained(make_learner(DataLoaders(DataLoader(train, 4), DataLoader(valid, 4), device='cpu')))


def other_counts(rank: int) -> None:
    learn = make()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        learn.fit(1 + rank)
    trained(learn)


def asked_alone(rank: int) -> None:
    def ask(cb: Any) -> None:
        if cb.world.rank == 1:
            cb.world.gather('mine')

    trained(make(after_train=ask))


SLIPS = {
    unfrozen_in_an_epoch: (
        DistributedError,
        'tensors are not as in process 0.*unfrozen within an epoch',
    ),
    a_second_backward: (DistributedError, 'tensors are not as in process 0.*second backward pass'),
    other_data_within: (
        DistributedError,
        '`learn.dls` was set while several processes train.*new context',
    ),
    wrapped_by_hand: (ModelError, 'is a DistributedDataParallel.*bare model'),
    another_choice: (DistributedError, 'train loader: 10 batches of 40 samples .choice'),
    other_counts: (
        DistributedError,
        'trained so far: .*26 ba.* in process 0, .*52 ba.* in process 1',
    ),
    asked_alone: (DistributedError, 'Process 0 of 2 gathers .*, and process 1 gathers values'),
}


def trained(learn: Learner) -> None:
    with learn.distributed('ddp', timeout='20s'):
        learn.fit(2)


@pytest.mark.parametrize('slip', SLIPS, ids=lambda f: f.__name__)
def test_common_mistakes_are_reported(slip: Callable[[int], None]) -> None:
    error, expected_text = SLIPS[slip]

    def job(rank: int) -> str:
        with pytest.raises(error) as e:
            slip(rank)
        return str(e.value).replace('\n', ' ')

    for error in run_ranks(job):
        assert re.search(expected_text, error), error


def test_a_forgotten_context_is_reported_once() -> None:
    def job(rank: int) -> list[str]:
        learn = make()
        with warnings.catch_warnings(record=True) as messages:
            warnings.simplefilter('always')
            learn.fit(1)
            learn.fit(1)
        with learn.distributed('ddp', timeout='20s'):
            learn.fit(1)
        return [str(w.message) for w in messages]

    for messages in run_ranks(job):
        assert len(messages) == 1 and 'put `with learn.distributed():` around' in messages[0]


def test_an_optimizer_that_has_trained_alone_has_the_state_of_the_first() -> None:
    def job(rank: int) -> Any:
        learn = make()
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            cbs = Callback(
                after_loss=lambda cb: setattr(cb.learn, 'loss_grad', cb.loss_grad * (1 + rank))
            )
            learn.fit(1, cbs=cbs)
        with learn.distributed('ddp', timeout='20s'):
            learn.fit(1)
            learn.check_replicas()
        return weights(learn)

    a, b = run_ranks(job)
    assert torch.equal(a, b)
