"""A paused fit that continues with another loader: the samples that the epoch has left, in batches of another size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fastcore.basics import noop
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from learnkit import Callback, Checkpoint, DataLoaders, GradientAccumulation, Learner
from learnkit.core.errors import OptionError

X = torch.arange(24.0)[:, None] / 24
Y = 2 * X - 1


def make_tensors(bs: int, seed: int | None = 3, shuffle: bool = True, n: int = 24) -> DataLoaders:
    return DataLoaders.from_tensors((X[:n], Y[:n]), bs=bs, seed=seed, shuffle=shuffle)


def make_torch(bs: int, **options: Any) -> DataLoaders:
    data = TensorDataset(X, Y)
    return DataLoaders(DataLoader(data, batch_size=bs, shuffle=True, **options))


def make_with_generator(bs: int) -> DataLoaders:
    return make_torch(bs, generator=torch.Generator().manual_seed(4))


class Batches(Callback):
    "Keep the inputs of the training batches."

    run_valid = False

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def before_batch(self) -> None:
        self.seen.append(self.learn.xb[0].clone())

    def state_dict(self) -> None:
        return None


def make(dls: DataLoaders, **options: Any) -> Learner:
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    learn = Learner(dls, model, nn.MSELoss(), opt_func=torch.optim.SGD, lr=0.1, **options)
    learn.logger = noop
    torch.manual_seed(1)
    return learn


def train(batches: list[torch.Tensor]) -> list[torch.Tensor]:
    "Return the weights of a loop by hand over these inputs."
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches:
        opt.zero_grad()
        nn.functional.mse_loss(model(x), 2 * x - 1).backward()
        opt.step()
    return list(model.parameters())


def check(learn: Learner, expected: list[torch.Tensor]) -> None:
    for p, q in zip(learn.model.parameters(), expected, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


MAKERS: dict[str, Callable[..., DataLoaders]] = {
    'tensors': make_tensors,
    'torch': make_torch,
    'generator': make_with_generator,
}


@pytest.mark.parametrize('bs', [8, 2])
@pytest.mark.parametrize('name', list(MAKERS))
def test_the_samples_that_are_left(name: str, bs: int) -> None:
    make_dls = MAKERS[name]
    straight = make(make_dls(4), cbs=(straight_batches := Batches()))
    straight.fit(3)
    order = torch.cat(straight_batches.seen)
    learn = make(make_dls(4), cbs=(batches := Batches()))
    learn.fit(3, pause_at='8ba')
    learn.dls = make_dls(bs)
    learn.resume(at_once=True)
    assert [len(x) for x in batches.seen] == [4] * 8 + [bs] * (40 // bs)
    assert torch.equal(torch.cat(batches.seen), order)
    expected = [*order[:32].split(4), *order[32:].split(bs)]
    check(learn, train(expected))
    assert [c['what'] for c in learn.history.changes] == ['train loader']
    assert learn.time.sp == 72 and len(learn.history) == 3


def test_workers() -> None:
    learn = make(make_torch(4, num_workers=1), cbs=(batches := Batches()))
    learn.fit(1, pause_at='2ba')
    learn.dls = make_torch(8, num_workers=1)
    learn.resume(at_once=True)
    assert [len(x) for x in batches.seen] == [4, 4, 8, 8]
    assert torch.equal(torch.cat(batches.seen).sort(0).values, X)
    learn.close()


def test_a_schedule_counts_samples() -> None:
    seen: list[float] = []
    note = Callback(before_batch=lambda cb: seen.append(cb.learn.pct_train))
    learn = make(make_tensors(4), cbs=note)
    learn.fit(2, pause_at='8ba')
    learn.dls = make_tensors(8)
    learn.resume(at_once=True)
    assert seen == pytest.approx([i / 12 for i in range(8)] + [i / 6 for i in (4, 5)])


def test_checkpoints_of_the_mixed_epoch(tmp_path: Path) -> None:
    def make_saved(bs: int) -> Learner:
        return make(make_tensors(bs), path=tmp_path, cbs=Checkpoint('1ba', keep_last=None))

    learn = make_saved(4)
    learn.fit_one_cycle(3, 0.1, pause_at='8ba')
    learn.dls = make_tensors(8)
    learn.resume(at_once=True, lr_scale=0.5, pause_at='9ba')
    for stop in ('10ba', None):
        again = make_saved(8)
        again.fit_one_cycle(3, 0.1, resume=True, pause_at=stop)
    learn.resume()
    check(again, list(learn.model.parameters()))
    assert again.history.changes == learn.history.changes and again.time.ba == learn.time.ba


REFUSED: dict[str, tuple[Any, Any, str, str]] = {
    'the same': (make_tensors(4), None, '8ba', 'Set `learn.dls`'),
    'another kind': (make_tensors(4), make_torch(4), '8ba', 'TensorLoader and DataLoader'),
    'another order': (make_tensors(4), make_tensors(8, shuffle=False), '8ba', 'order'),
    'other samples': (make_tensors(4), make_tensors(4, n=20), '8ba', '24 samples, now 20'),
    'within a batch': (
        make_tensors(4),
        make_tensors(8),
        '9ba',
        'multiple of 2 batches of the epoch, next at 10ba',
    ),
    'near the end': (
        make_tensors(4),
        make_tensors(12),
        '10ba',
        r'multiple of 3 batches of the epoch\.',
    ),
    'no order': ([(X[:4], Y[:4])] * 6, [(X[:8], Y[:8])] * 3, '8ba', 'list'),
}


@pytest.mark.parametrize('name', list(REFUSED))
def test_what_is_refused(name: str) -> None:
    old, new, at, text = REFUSED[name]
    old, new = (DataLoaders(d) if isinstance(d, list) else d for d in (old, new))
    learn = make(old)
    learn.fit(3, pause_at=at)
    if new is not None:
        learn.dls = new
    with pytest.raises(OptionError, match=text):
        learn.resume(at_once=True, lr=0.5)
    assert learn.paused is not None and learn.opt.lrs == [0.1]
    learn.dls = old
    learn.resume()
    assert learn.time.ba == 18 and not learn.history.changes


def test_within_an_accumulation() -> None:
    learn = make(make_tensors(4), cbs=GradientAccumulation(12))
    learn.fit(1, pause_at='2ba')
    learn.dls = make_tensors(8)
    with pytest.raises(OptionError, match='accumulated'):
        learn.resume(at_once=True)


def test_at_the_end_of_an_epoch() -> None:
    learn = make(make_tensors(4), cbs=(batches := Batches()))
    learn.fit(2, pause_at='1ep')
    learn.dls = make_tensors(8)
    learn.resume(at_once=True)
    assert [len(x) for x in batches.seen] == [4] * 6 + [8] * 3


@pytest.mark.parametrize('name', list(MAKERS))
def test_pauses_of_an_epoch_whose_next_one_has_another_loader(name: str) -> None:
    make_dls = MAKERS[name]

    def fit(*stops: str | None, at_once: bool = False) -> tuple[Learner, list[torch.Tensor]]:
        learn = make(make_dls(4), cbs=(batches := Batches()))
        learn.fit(3, pause_at='7ba')
        learn.dls = make_dls(8)
        for stop in stops:
            learn.resume(pause_at=stop)
        if at_once:
            learn.resume(at_once=True)
        return learn, batches.seen

    straight, order = fit(None)
    learn, seen = fit('8ba', '9ba', None)
    assert [len(x) for x in seen] == [4] * 12 + [8] * 3 and learn.time.ba == 15
    torch.testing.assert_close(seen, order, rtol=0, atol=0)
    check(learn, list(straight.model.parameters()))

    learn, seen = fit('8ba', at_once=True)
    assert [len(x) for x in seen] == [4] * 8 + [8] * 2 + [8] * 3
    torch.testing.assert_close(torch.cat(seen[:10]), torch.cat(order[:12]), rtol=0, atol=0)
    check(learn, train(seen))
    assert [(c['ba'], c['what']) for c in learn.history.changes] == [
        (7, 'train loader'),
        (8, 'train loader'),
    ]


def test_an_error_at_the_end_of_the_training_before_another_loader() -> None:
    def fail(cb: Callback) -> None:
        if cb.learn.time.ba == 12 and not failed:
            failed.append(True)
            raise ValueError

    failed: list[bool] = []
    learn = make(make_tensors(4), cbs=[(batches := Batches()), Callback(after_train=fail)])
    learn.fit(3, pause_at='7ba')
    learn.dls = make_tensors(8)
    with pytest.raises(ValueError):
        learn.resume()
    assert '6 of 6 of epoch 1' in repr(learn.paused)
    learn.resume()
    assert [len(x) for x in batches.seen] == [4] * 12 + [8] * 3
    assert [row['epoch'] for row in learn.history] == [0, 1, 2]
    check(learn, train(batches.seen))
