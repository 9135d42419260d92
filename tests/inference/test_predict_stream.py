"""Streamed predictions: the numbers and events of get_preds, and an unchanged Learner between batches."""

import random
from collections.abc import Iterator
from copy import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from learnkit import Callback, CancelBatchException, DataLoaders, Learner, TensorLoader, mae
from learnkit.callbacks.predictions import MCDropoutCallback
from learnkit.core.errors import EmptyLoaderError

N = 14


class Logits(nn.CrossEntropyLoss):
    def activation(self, out: Tensor) -> Tensor:
        return out.softmax(-1)

    def decodes(self, out: Tensor) -> Tensor:
        return out.argmax(-1)


def make(cbs: Any = None, valid: Any = None, shuffle: bool = False) -> Learner:
    torch.manual_seed(2)
    x, y = torch.randn(N, 3), torch.randint(4, (N,))
    valid = TensorLoader(x, y, bs=4, shuffle=shuffle, seed=1) if valid is None else valid
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    dls = DataLoaders(TensorLoader(x, y, bs=7, shuffle=True, seed=0), valid)
    learn = Learner(dls, model, Logits(), lr=0.1, cbs=cbs, metrics=mae)
    learn.metrics = []
    learn.remove_cb(learn.progress)
    learn.logger = print
    return learn


def state(learn: Learner) -> list[Any]:
    "Return everything that a prediction must not change."
    names = (
        'epoch n_epoch train_iter pct_train iter n_iter phase dl_name training fitting create_mbar'
    ).split()
    opt = None if learn.opt is None else learn.opt.state_dict()
    return [
        {n: getattr(learn, n) for n in names} | {'run': copy(learn.run)},
        [m.training for m in learn.model.modules()],
        list(learn.cbs),
        {k: v.tolist() for k, v in learn.model.state_dict().items()},
        str(opt),
        learn.history[:],
        learn.logger,
        torch.get_rng_state().tolist(),
        random.getstate(),
        str(np.random.get_state()),
        torch.is_grad_enabled(),
        [
            g.get_state().tolist()
            for dl in learn.dls
            if (g := getattr(dl, 'generator', None)) is not None
        ],
        learn.loss_func.reduction,
        learn.dl,
        learn.xb,
        learn.pred if 'pred' in vars(learn) else None,
    ]


def joined(stream: Any) -> list[Tensor]:
    return [torch.cat(parts) for parts in zip(*stream, strict=True)]


@pytest.mark.parametrize(
    'options',
    [
        {},
        {'with_input': True, 'with_decoded': True, 'with_loss': True},
        {'act': torch.neg},
        {'ds_idx': 0},
        {'dl': 'valid'},
    ],
)
def test_joined_they_are_what_get_preds_gives(options: Any) -> None:
    learn = make(shuffle=True)
    expected = learn.get_preds(reorder=False, **options)
    got = joined(learn.predict_iter(**options))
    assert len(got) == len(expected) and all(map(torch.equal, got, expected))
    # no generator has moved on
    assert all(map(torch.equal, joined(learn.predict_iter(**options)), expected))


def test_each_batch_draws_other_random_numbers() -> None:
    learn = make(valid=[(torch.ones(4, 3), torch.zeros(4).long())] * 2)
    first, second = (preds for preds, _ in learn.predict_iter(cbs=MCDropoutCallback()))
    assert not torch.equal(first, second)


def test_between_batches_the_learner_is_as_it_was() -> None:
    learn = make()
    with learn.no_logging():
        learn.fit(1)
    learn.model[0].eval()
    before, n = state(learn), 0
    for _ in learn.predict_iter(with_loss=True):
        now, n = state(learn), n + 1
        assert now[2][: len(before[2])] == before[2]
        assert now[:2] + now[3:] == before[:2] + before[3:]
    assert n == 4 and state(learn) == before


def test_what_the_consumer_draws_and_sets_stays() -> None:
    learn = make()
    torch.manual_seed(9)
    expected = torch.rand(4)
    torch.manual_seed(9)
    got = []
    for _ in learn.predict_iter():
        got.append(torch.rand(1))
        learn.model.eval()
    assert torch.equal(torch.cat(got), expected) and not learn.model.training


def test_left_early_everything_is_restored_and_other_runs_may_come_between() -> None:
    learn = make()
    before = state(learn)
    for _ in learn.predict_iter(with_loss=True):
        break
    assert state(learn) == before
    stream = learn.predict_iter()
    next(stream)
    with learn.no_logging():
        learn.fit(1)
        learn.validate()
    assert len(list(stream)) == 3 and len(learn.history) == 1


def test_inside_a_fit_it_changes_no_weight() -> None:
    def predict(cb: Any) -> None:
        got = joined(cb.learn.predict_iter(ds_idx=0, inner=True))
        assert got[0].shape == (N, 4)

    def train(cbs: Any) -> Any:
        learn = make()
        with learn.no_logging():
            learn.fit(2, cbs=cbs)
        return [v.tolist() for v in learn.model.state_dict().values()]

    assert train(Callback(after_epoch=predict)) == train(None)


def test_errors_and_cancelled_batches() -> None:
    learn = make()
    before = state(learn)

    def fail(cb: Any) -> None:
        raise OSError('gone')

    def cancel(cb: Any) -> None:
        if len(cb.x) == 2:
            raise CancelBatchException

    with pytest.raises(OSError, match='gone'):
        next(learn.predict_iter(cbs=Callback(before_pred=fail)))
    assert state(learn) == before
    sizes = [len(p) for p, _ in learn.predict_iter(cbs=Callback(before_pred=cancel))]
    assert sizes == [4, 4, 4]
    with pytest.raises(EmptyLoaderError, match='no batch'):
        next(learn.predict_iter(iter([])))


def test_no_gradient_is_kept_and_the_consumer_may_compute_some() -> None:
    learn = make()
    for preds, _ in learn.predict_iter(cpu=False):
        assert not preds.requires_grad and torch.is_grad_enabled()
        learn.model(torch.randn(4, 3)).sum().backward()


def test_any_iterable_and_a_loader_with_workers() -> None:
    x, y = torch.randn(10, 3), torch.randint(4, (10,))
    learn = make()

    def batches() -> Iterator[Any]:
        yield from ((x[i : i + 5], y[i : i + 5]) for i in (0, 5))

    for dl in (batches(), DataLoader(TensorDataset(x, y), 5, num_workers=1)):
        with torch.no_grad():
            expected = learn.model.eval()(x).softmax(-1)
        assert torch.allclose(joined(learn.predict_iter(dl))[0], expected, atol=1e-6)
