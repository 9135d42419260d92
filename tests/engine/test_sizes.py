"""Number of samples of batches whose first tensor does not have the samples along its first axis."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from learnkit import (
    SGD,
    BatchError,
    Callback,
    DataLoaders,
    GradientAccumulation,
    Learner,
    Recorder,
    TrainEvalCallback,
)
from learnkit.core.batch import count_samples
from tests.helpers.learners import quiet_learner

N, LENGTH, BS = 30, 7, 4
Item = tuple[Tensor, Tensor]


def make_items(n: int = N, length: int = LENGTH, spread: int = 0, *shape: int) -> list[Item]:
    gen = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(length + i % (spread + 1), 3, generator=gen),
            torch.randn(shape, generator=gen),
        )
        for i in range(n)
    ]


def sequence_first(items: list[Item]) -> tuple[Tensor, Tensor]:
    "Collate to inputs (T, B, F) and targets (B, ...)."
    xs, ys = zip(*items, strict=True)
    return pad_sequence(list(xs)), torch.stack(ys)


def tagged(items: list[Item]) -> tuple[Tensor, Tensor]:
    "Collate to inputs (T, B, F) and targets (T, B)."
    x, _ = sequence_first(items)
    return x, x[..., 0]


def joined(items: list[Item]) -> tuple[Tensor, Tensor, Tensor]:
    "Collate to one long sequence (sum of lengths, F), the ends of its samples, and targets (B,)."
    xs, ys = zip(*items, strict=True)
    ends = torch.tensor([len(x) for x in xs]).cumsum(0)
    return torch.cat(xs), ends, torch.stack(ys)


class Sequences(nn.Module):
    "The mean over the time of (T, B, F), as outputs (B,)."

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.mean(0))[:, 0]


class Tags(Sequences):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)[..., 0]


class Joined(Sequences):
    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return torch.stack([self.out(s.mean(0))[0] for s in x.tensor_split(ends[:-1])])


def make_learner(dl: Any, model: nn.Module | None = None, *cbs: Any, **options: Any) -> Learner:
    torch.manual_seed(1)
    model = Sequences() if model is None else model
    cbs = (TrainEvalCallback, Recorder, *cbs)
    loss_func = options.pop('loss_func', nn.MSELoss())
    dls = DataLoaders(dl, dl)
    return quiet_learner(dls, model, loss_func, SGD, default_cbs=False, cbs=cbs, **options)


LOADERS: dict[str, Callable[[list[Item]], Any]] = {
    'loader': lambda items: DataLoader(items, BS, collate_fn=sequence_first),
    'batch sampler': lambda items: DataLoader(
        items,
        batch_sampler=BatchSampler(SequentialSampler(items), BS, False),
        collate_fn=sequence_first,
    ),
    'list': lambda items: list(DataLoader(items, BS, collate_fn=sequence_first)),
}


@pytest.mark.parametrize('kind', LOADERS)
@pytest.mark.parametrize('length', [LENGTH, BS, 2])  # the second is also the batch size
@pytest.mark.parametrize('spread', [0, 3])
def test_samples_of_sequences_along_the_first_axis(kind: str, length: int, spread: int) -> None:
    learn = make_learner(LOADERS[kind](make_items(N, length, spread)))
    learn.fit(1)
    assert learn.time.sp == N and learn.time.ba == 8


@pytest.mark.parametrize('length', [LENGTH, BS])
def test_accumulation_and_budgets_count_samples(length: int) -> None:
    dl = LOADERS['loader'](make_items(32, length))
    learn = make_learner(dl, None, GradientAccumulation(16))
    learn.fit(1)
    assert learn.time.st == 2
    learn = make_learner(dl)
    learn.fit('64sp')
    assert learn.time.ba == 16


def test_the_loss_of_an_epoch_is_a_mean_over_samples() -> None:
    def mean(pred: Tensor, y: Tensor) -> Tensor:
        return (pred - y).square().mean()

    dl = LOADERS['loader'](make_items(N, LENGTH, 3))
    learn = make_learner(dl, loss_func=mean, metrics=mean)
    model = learn.model
    with torch.no_grad():
        errors = torch.cat([(model(x) - y).square() for x, y in dl])
    expected = errors.double().mean().item()
    assert list(learn.validate()) == pytest.approx([expected] * 2, rel=1e-6)


def test_accumulated_gradients_of_unequal_batches() -> None:
    "The last batch of 2 samples counts as 2, not as its 7 steps of time."
    items = make_items(6)
    dl = LOADERS['loader'](items)
    learn = make_learner(dl, None, GradientAccumulation(6), lr=1.0)
    x, y = sequence_first(items)
    weight = learn.model.out.weight
    (grad,) = torch.autograd.grad(nn.MSELoss()(learn.model(x), y), weight)
    expected = weight.detach() - grad
    learn.fit(1)
    torch.testing.assert_close(learn.model.out.weight.detach(), expected)


OTHERS: dict[str, tuple[Any, Any]] = {
    'targets for each step': (tagged, Tags),
    'a joined sequence': (joined, Joined),
}


@pytest.mark.parametrize('kind', OTHERS)
def test_other_layouts_of_a_loader_with_a_batch_size(kind: str) -> None:
    collate, model = OTHERS[kind]
    learn = make_learner(DataLoader(make_items(), BS, collate_fn=collate), model())
    learn.fit(1)
    assert learn.time.sp == N


def test_a_data_set_smaller_than_a_batch() -> None:
    learn = make_learner(DataLoader(make_items(5), 64, collate_fn=sequence_first))
    learn.fit(1)
    assert learn.time.sp == 5
    squares = [(torch.randn(8), torch.randn(8)) for _ in range(5)]  # as many features as samples
    stack = lambda items: tuple(map(torch.stack, zip(*items, strict=True)))
    learn = make_learner(DataLoader(squares, 8, collate_fn=stack), nn.Linear(8, 8))
    learn.fit(1)
    assert learn.time.sp == 5


BATCH_FIRST: dict[str, tuple[tuple[int, ...], tuple[int, ...], int | None]] = {
    'vectors': ((6, 4), (6,), None),
    'as many features as samples': ((6, 6), (6,), None),
    'images with boxes': ((8, 3, 5, 5), (3, 5), 8),
    'images with boxes, no batch size': ((8, 3, 5, 5), (3, 5), None),
    'images with as many labels as channels': ((8, 3, 5, 5), (3,), None),
    'tokens, flattened targets': ((6, 4), (24,), None),
    'an incomplete batch': ((5, 8), (5, 1), 8),
    'crops, two a sample': ((16, 3), (16,), 8),
    'as many features as the batch size': ((5, 8), (5,), 8),
}


@pytest.mark.parametrize('kind', BATCH_FIRST)
def test_batches_of_samples_along_the_first_axis(kind: str) -> None:
    shape, of_target, bs = BATCH_FIRST[kind]
    x, y = torch.zeros(shape), torch.zeros(of_target)

    class Batches(list[Any]):
        batch_size = bs

    learn = make_learner(
        Batches([(x, y)] * 2), nn.Identity(), loss_func=lambda pred, y: pred.sum() * 0
    )
    sizes: list[int] = []
    note = Callback(after_batch=lambda cb: sizes.append(count_samples(cb.learn)))
    with learn.added_cbs(note):
        learn.validate()
    assert sizes == [shape[0]] * 2


def test_a_doubt_is_warned_of_once() -> None:
    "Targets (B, C) of a loader without a batch size could be rows of another kind."
    batches = [(x, y[:, None]) for x, y in LOADERS['list'](make_items())]
    model = nn.Sequential(Sequences(), nn.Unflatten(0, (-1, 1)))
    learn = make_learner(batches, model)
    with pytest.warns(UserWarning, match=r'7 samples.*4 by its targets.*size_func=') as caught:
        learn.fit(2)
    assert len(caught) == 1 and learn.time.sp == 2 * 8 * LENGTH
    learn = make_learner(batches, model, size_func=lambda xb, yb: len(yb[0]))
    learn.fit(1)
    assert learn.time.sp == N


def test_microbatches_of_another_axis_are_refused() -> None:
    learn = make_learner(LOADERS['loader'](make_items()), microbatch=2)
    with pytest.raises(BatchError, match=r'4 samples.*not along the first axis'):
        learn.fit(1)


def test_each_loader_has_its_own_layout() -> None:
    items = make_items()
    train = DataLoader(items, BS, collate_fn=sequence_first)
    x, y = sequence_first(items[:10])
    valid = [(x.transpose(0, 1)[i : i + 5].transpose(0, 1), y[i : i + 5]) for i in (0, 5)]
    learn = make_learner(train)
    learn.dls = DataLoaders(train, valid)
    learn.fit(2, cbs=[])
    assert learn.time.sp == 2 * N


@pytest.mark.parametrize('after', [3, 7, 11])
def test_a_resumed_fit_counts_alike(after: int) -> None:
    states: list[Any] = []

    def take(cb: Callback) -> None:
        if cb.learn.train_iter == after:
            states.append(cb.learn.checkpoint_state())

    def make(*cbs: Any) -> Learner:
        dl = LOADERS['loader'](make_items(N, LENGTH, 3))
        return make_learner(dl, None, GradientAccumulation(8), *cbs)

    straight, resumed = make(Callback(batch_checkpoint=take)), make()
    straight.fit(2)
    resumed.fit(2, resume=states[0])
    assert straight.time.sp == resumed.time.sp == 2 * N
    for p, q in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize('is_batch_first', [False, True])
def test_a_ragged_batch_after_square_ones(is_batch_first: bool) -> None:
    "Texts (T=4, B=4), and (4, 2) at the end; or rows (B=4, F=4), and (2, 4), with as many targets."

    def collate(items: list[Item]) -> tuple[Tensor, Tensor]:
        x = torch.stack([x[:, 0] for x, _ in items], 0 if is_batch_first else 1)
        return x, x.clone()

    learn = make_learner(DataLoader(make_items(18, 4), 4, collate_fn=collate), nn.Identity())
    learn.validate()
    counts = []

    def count(cb: Callback) -> None:
        counts.append(count_samples(cb.learn))

    with learn.added_cbs(Callback(before_batch=count)):
        learn.validate()
    assert counts == [4, 4, 4, 4, 2]


@pytest.mark.parametrize('length', [6, 3])
def test_the_time_may_vary_after_a_square_batch(length: int) -> None:
    "Padded sequences (B=4, T=4, F), then (4, 6, F) or (4, 3, F), with targets (4,)."
    first, second = torch.randn(4, 4, 3), torch.randn(4, length, 3)
    batches = [(first, torch.randn(4)), (second, torch.randn(4)), (first, torch.randn(4))]

    class Loader:
        batch_size, dataset = 4, range(12)

        def __iter__(self) -> Any:
            return iter(batches)

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(x.mean(1))[:, 0]

    learn = make_learner(Loader(), Mean())
    learn.fit(1)
    assert learn.time.sp == 12
