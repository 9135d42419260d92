"""Samples of a batch: one rule for counting, cutting, gathering and sharding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence

from learnkit import DataLoaders, Learner, Periodic, find_bs
from learnkit.callbacks import EarlyStopping
from learnkit.core.batch import concat, is_sample_list, microbatches, slice_batch
from learnkit.core.errors import BatchError, LossError, TimeError
from learnkit.distributed.shards import shard
from learnkit.inference.gather import average_per_sample, reorder_samples
from tests.helpers.distributing import weights
from tests.helpers.ranks import run_ranks

CHANNELS = 12


class Detector(nn.Module):
    "Predicts boxes [k, 4] for each image [C, H, W] of a list; k depends on the image's mean."

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(CHANNELS, 4).double()
        nn.init.constant_(self.last.weight, 0.1)
        nn.init.constant_(self.last.bias, 0.0)

    def forward(self, images: Any) -> list[dict[str, Tensor]]:
        return [
            {'boxes': self.last(image.mean((1, 2))).expand(1 + int(image[0, 0, 0]) % 3, 4)}
            for image in images
        ]


def box_loss(preds: list[dict[str, Tensor]], targets: Any) -> Tensor:
    "Return the mean over samples of a squared distance of mean boxes."
    each = [
        (p['boxes'].mean(0) - t['boxes'].mean(0)).square().mean()
        for p, t in zip(preds, targets, strict=True)
    ]
    return torch.stack(each).mean()


def scenes(n: int = 64) -> list[tuple[Tensor, dict[str, Tensor]]]:
    "Return images [C, H, W] of different sizes, image i of value i, each with one to three boxes [k, 4]."
    samples = []
    for i in range(n):
        image = torch.full((CHANNELS, 3 + i % 2, 4), float(i), dtype=torch.float64)
        samples.append((image, {'boxes': torch.full((1 + i % 3, 4), i / n, dtype=torch.float64)}))
    return samples


def as_tuples(samples: list[Any]) -> Any:
    "Collate as torchvision's detection references do."
    return tuple(zip(*samples, strict=True))


def as_lists(samples: list[Any]) -> Any:
    return [list(column) for column in zip(*samples, strict=True)]


def detection(
    n: int = 64, bs: int = 16, collate: Callable[[list[Any]], Any] = as_tuples, **kwargs: Any
) -> Learner:
    "Return a Learner with SGD on scenes in their order."
    loader = torch.utils.data.DataLoader(scenes(n), batch_size=bs, collate_fn=collate)
    kwargs = {'lr': 1e-4, 'opt_func': torch.optim.SGD, 'loss_func': box_loss} | kwargs
    learn = Learner(DataLoaders(loader, loader), Detector(), **kwargs)
    learn.logger, learn.create_mbar = lambda row: None, False
    return learn


def images(n: int, channels: int = 12) -> list[Tensor]:
    return [torch.zeros(channels, 4 + i, 5) for i in range(n)]


def boxes(n: int) -> list[dict[str, Tensor]]:
    return [{'boxes': torch.zeros(3, 4)} for _ in range(n)]


# ----------------------------------------------------------------------------------------- counting


@pytest.mark.parametrize(
    ('xb', 'yb', 'n'),
    [
        ((torch.zeros(4, 2), images(9)), (boxes(9),), 4),
        (({'image': torch.zeros(4, 2), 'boxes': boxes(9)},), (), 4),
        ((torch.tensor(1.0), torch.zeros(6)), (), 6),
        ((images(64),), (torch.zeros(64),), 64),
        (([torch.zeros(64, 2), torch.zeros(64, 5)],), (torch.zeros(64),), 64),
        # without a tensor outside of lists, the first list decides
        ((tuple(images(64)),), (tuple(boxes(64)),), 64),
        (({'images': images(64), 'targets': boxes(64)},), (boxes(64),), 64),
        (([torch.zeros(64, 2), torch.zeros(64, 5)],), (['a'] * 64,), 2),
        ((['a', 'b', 'c'],), (), 3),
    ],
)
def test_samples_of_a_batch(xb: Any, yb: Any, n: int) -> None:
    assert find_bs(xb, yb) == find_bs((*xb, *yb)) == n
    assert find_bs(xb, yb, lambda *batch: 77) == 77


class Sum(nn.Module):
    "Returns the sum of all inputs, times a weight."

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, x: Any) -> Tensor:
        return self.weight * torch.stack([t.double().sum() for t in x]).sum()


def own_loss(pred: Tensor, *targets: Any) -> Tensor:
    return pred.mean()


def learner(batches: Any, model: nn.Module | None = None, **kwargs: Any) -> Learner:
    kwargs = {'loss_func': own_loss, 'opt_func': torch.optim.SGD, 'lr': 1e-3} | kwargs
    learn = Learner(DataLoaders(batches), Sum() if model is None else model, **kwargs)
    learn.logger, learn.create_mbar = lambda row: None, False
    return learn


class Opaque:
    def __init__(self, n: int) -> None:
        self.n = n

    def to(self, device: Any) -> Opaque:
        return self


class OfOpaque(Sum):
    def forward(self, x: Opaque) -> Tensor:
        return self.weight * x.n


@pytest.mark.parametrize('how', ['fit', 'every', 'eval_every', 'patience'])
def test_samples_that_are_not_counted_are_refused_where_they_are_asked_for(how: str) -> None:
    batches = [(Opaque(5), torch.tensor(1.0))]
    cbs = {
        'every': Periodic('10sp', print),
        'patience': EarlyStopping('train_loss', patience='10sp'),
    }
    eval_every = '10sp' if how == 'eval_every' else '1ep'
    learn = learner(batches, OfOpaque(), cbs=cbs.get(how), eval_every=eval_every)
    if how == 'eval_every':
        learn.dls = DataLoaders(batches, batches)
    with pytest.raises(TimeError, match=r'10sp.*size_func'):
        learn.fit('10sp' if how == 'fit' else 1)
    assert learn.model.weight.item() == 1.0  # no step was taken

    counted = learner(batches, OfOpaque(), size_func=lambda xb, yb: xb[0].n)
    counted.fit('10sp')
    assert (counted.time.sp, counted.time.ba) == (10, 2)


def test_every_counter_agrees_on_uneven_batches() -> None:
    n, seen = 22, []
    learn = detection(n=n, bs=4, cbs=Periodic('4sp', lambda cb: seen.append(cb.learn.time.sp)))
    learn.fit(2)
    assert learn.time.sp == 2 * n
    # one at each multiple of 4 that was crossed
    assert seen == [4, 8, 12, 16, 20, 26, 30, 34, 38, 42, 44]
    model, (inputs, targets) = learn.model, as_lists(scenes(n))
    expected = float(box_loss(model(inputs), targets).detach())
    assert learn.history[-1]['valid_loss'] == pytest.approx(expected, rel=1e-6)


# ------------------------------------------------------------------------------------------ cutting


@pytest.mark.parametrize('collate', [as_tuples, as_lists])
@pytest.mark.parametrize('n', [3, 5])
def test_lists_of_samples_are_cut_between_samples(collate: Any, n: int) -> None:
    samples = [
        (torch.full((3, 4, 4), float(i)), {'boxes': torch.full((3, 4), float(i))}) for i in range(n)
    ]
    x, y = collate(samples)
    pieces = microbatches((x,), (y,), 2)
    assert [len(a) for (a,), _ in pieces] == [min(2, n - i) for i in range(0, n, 2)]
    assert [float(t[0, 0, 0]) for (a,), _ in pieces for t in a] == list(range(n))
    assert [float(t['boxes'][0, 0]) for _, (b,) in pieces for t in b] == list(range(n))
    assert all(type(a) is type(x) and type(b) is type(y) for (a,), (b,) in pieces)


def test_lists_of_inputs_are_cut_inside() -> None:
    x = [torch.arange(4), torch.arange(4) * 10]
    pieces = microbatches((x,), (torch.arange(4),), 2)
    expected = [[[0, 1], [0, 10]], [[2, 3], [20, 30]]]
    assert [[t.tolist() for t in a] for (a,), _ in pieces] == expected
    pair = [torch.arange(2), torch.arange(2) * 10]  # as many inputs as samples
    found = [[t.tolist() for t in a] for (a,), _ in microbatches((pair,), (torch.arange(2),), 1)]
    assert found == [[[0], [0]], [[1], [10]]]


@pytest.mark.parametrize(
    ('xb', 'yb', 'n', 'match'),
    [
        ((torch.zeros(4), Opaque(4)), (torch.zeros(4),), 4, 'Opaque'),
        (
            (torch.zeros(4),),
            (pack_sequence([torch.zeros(2)] * 4),),
            4,
            'PackedSequence',
        ),
        (
            (torch.zeros(4),),
            (torch.zeros(11, 6),),
            4,
            r'4 samples.*targets.*11, 6',
        ),  # boxes of all images in one tensor
        (
            (torch.zeros(4, 2),),
            (torch.zeros(4),),
            3,
            r'3 samples.*inputs.*4, 2',
        ),  # as a size_func may count
    ],
)
def test_what_cannot_be_cut_is_named(xb: Any, yb: Any, n: int, match: str) -> None:
    with pytest.raises(BatchError, match=match):
        slice_batch(xb, yb, n, [slice(0, 2), slice(2, 4)])


def test_a_batch_that_cannot_be_cut_is_refused_before_the_first_step() -> None:
    small = (torch.ones(4), pack_sequence([torch.zeros(2)] * 4))
    learn, calls = learner([small] * 3, microbatch=2), []
    learn.model.register_forward_hook(lambda *args: calls.append(1))
    with pytest.raises(BatchError, match='PackedSequence'):
        learn.fit(1)
    assert not calls and learn.model.weight.item() == 1.0


def test_microbatches_of_images_train_as_whole_batches() -> None:
    whole, cut = detection(n=20, bs=8), detection(n=20, bs=8, microbatch=3)
    for learn in (whole, cut):
        learn.fit(2)
    torch.testing.assert_close(weights(cut), weights(whole), rtol=0, atol=1e-14)
    assert cut.history[0]['train_loss'] == pytest.approx(whole.history[0]['train_loss'])


# ---------------------------------------------------------------------------------------- gathering


@pytest.mark.parametrize('collate', [as_tuples, as_lists])
@pytest.mark.parametrize(('n', 'bs'), [(11, 4), (4, 1), (1, 1)])  # also batches of one
def test_predictions_and_targets_stay_aligned(collate: Any, n: int, bs: int) -> None:
    learn = detection(n, bs, collate)
    inputs, preds, targets = learn.get_preds(with_input=True)
    assert len(inputs) == len(preds) == len(targets) == n
    with torch.no_grad():
        expected = learn.model(inputs)
    for i in range(n):
        assert float(inputs[i][0, 0, 0]) == i and float(targets[i]['boxes'][0, 0]) == i / n
        assert torch.equal(preds[i]['boxes'], expected[i]['boxes'])


def box_losses(preds: Any, targets: Any, reduction: str = 'mean') -> Tensor:
    each = torch.stack([box_loss([p], [t]) for p, t in zip(preds, targets, strict=True)])
    return each if reduction == 'none' else each.mean()


def test_losses_of_listed_samples() -> None:
    learn = detection(11, 4, loss_func=box_losses)
    preds, targets, losses = learn.get_preds(with_loss=True)
    expected = [float(box_loss([p], [t])) for p, t in zip(preds, targets, strict=True)]
    assert losses.tolist() == pytest.approx(expected)


def test_samples_are_put_in_order_or_refused() -> None:
    order = torch.tensor([2, 0, 1])
    ragged = [torch.zeros(3), torch.zeros(1), torch.zeros(2)]
    assert [len(t) for t in reorder_samples(ragged, order)] == [2, 3, 1]
    x, (a, b) = reorder_samples((torch.arange(3), [torch.arange(3), torch.arange(3) + 5]), order)
    assert (x.tolist(), a.tolist(), b.tolist()) == ([2, 0, 1], [2, 0, 1], [7, 5, 6])
    assert reorder_samples(None, order) is None
    for wrong in (torch.zeros(17, 5), [torch.zeros(3), torch.zeros(4)], [Opaque(1), Opaque(2)]):
        with pytest.raises(BatchError, match=r'3 samples.*reorder'):
            reorder_samples(wrong, order)


class Ragged(nn.Module):
    "Returns logits [T] for each sequence [T, 2] of a list."

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(2, 1)

    def forward(self, sequences: Any, lengths: Any = None) -> list[Tensor]:
        return [self.last(s)[:, 0] for s in sequences]


def ragged_loss(preds: Any, targets: Any) -> Tensor:
    return torch.stack([F.mse_loss(p, t) for p, t in zip(preds, targets, strict=True)]).mean()


@pytest.mark.parametrize('n_inp', [1, 2])
def test_ragged_sequences(n_inp: int) -> None:
    lengths = [5, 7, 2, 9, 4, 4, 1]
    xs = [torch.full((t, 2), float(i)) for i, t in enumerate(lengths)]
    ys = [torch.full((t,), float(i)) for i, t in enumerate(lengths)]
    batches = [
        (xs[i : i + 3], *[torch.tensor(lengths[i : i + 3])] * (n_inp - 1), ys[i : i + 3])
        for i in (0, 3, 6)
    ]
    learn = Learner(DataLoaders(batches, batches, n_inp=n_inp), Ragged(), ragged_loss)
    learn.logger, learn.create_mbar = lambda row: None, False
    inputs, preds, targets = learn.get_preds(with_input=True)
    x = inputs if n_inp == 1 else inputs[0]
    assert n_inp == 1 or inputs[1].tolist() == lengths
    assert [[len(t) for t in o] for o in (x, preds, targets)] == [lengths] * 3
    assert [float(t[0]) for t in targets] == [float(t[0, 0]) for t in x] == list(range(7))
    learn.fit(1)
    assert learn.time.sp == 7


def test_streams_and_sinks_have_one_entry_a_sample(tmp_path: Path) -> None:
    learn = detection(9, 4)
    sizes = [(type(p), len(p), len(t)) for p, t in learn.predict_iter()]
    assert sizes == [(list, 4, 4), (list, 4, 4), (list, 1, 1)]
    learn.get_preds(sink=tmp_path / 'preds')
    files = [torch.load(f, weights_only=True) for f in sorted((tmp_path / 'preds').iterdir())]
    assert [(len(f['preds']), len(f['targs'])) for f in files] == [(4, 4), (4, 4), (1, 1)]
    assert [float(t['boxes'][0, 0]) for f in files for t in f['targs']] == [i / 9 for i in range(9)]


def test_batches_are_joined_by_their_sizes() -> None:
    pair = (torch.zeros(2), torch.ones(2))
    assert [t.tolist() for t in concat([pair, pair], sizes=[2, 2])] == [
        [0] * 4,
        [1] * 4,
    ]  # two outputs of 2 samples
    assert [
        len(t) for t in concat([(torch.zeros(5), torch.zeros(2)), (torch.zeros(2),)], sizes=[2, 1])
    ] == [5, 2, 2]
    assert not is_sample_list({'a': 1}, 1) and is_sample_list(['a'], 1)


def test_losses_of_other_things_than_samples_are_refused() -> None:
    nodes = torch.arange(20.0)
    assert average_per_sample(nodes, 4, (torch.zeros(4, 5),)).tolist() == [2, 7, 12, 17]
    assert average_per_sample(nodes, 4, (nodes,)) is nodes  # one for each entry of the targets
    with pytest.raises(LossError, match='4 samples'):
        average_per_sample(nodes, 4, (torch.zeros(10),))


# ------------------------------------------------------------------------------------------- others


def test_tta_averages_tensors_and_refuses_boxes() -> None:
    learn = detection(8, 4)
    with pytest.raises(BatchError, match=r'tta.*dict'):
        learn.tta(augment=lambda images: images)
    xs = [torch.full((t, 2), float(t)) for t in (5, 7, 2)]
    learn = Learner(DataLoaders([(xs, [x[:, 0] for x in xs])]), Ragged(), ragged_loss)
    learn.logger, learn.create_mbar = lambda row: None, False
    preds, _ = learn.tta(ds_idx=0, n=2, beta=0.5, augment=lambda xs: [x + 2.0 for x in xs])
    with torch.no_grad():
        plain, moved = learn.model(xs), learn.model([x + 2.0 for x in xs])
    for p, a, b in zip(preds, plain, moved, strict=True):
        torch.testing.assert_close(p, (a + b) / 2)


def test_shares_of_batches_of_images() -> None:
    batches = [as_tuples(scenes(7)), as_tuples(scenes(3))]
    values: list[list[float]] = [[], []]
    for rank in range(2):
        dl = shard(batches, rank, 2, batch_size='global')
        for i, (x, y) in enumerate(dl):
            assert len(x) == len(y) == dl.share(i)[0] and dl.share(i)[1] == (7, 3)[i]
            values[rank] += [float(image[0, 0, 0]) for image in x]
    assert values == [[0, 1, 2, 0], [3, 4, 5, 6, 1, 2]]
    with pytest.raises(BatchError, match='Opaque'):
        next(iter(shard([(Opaque(4), torch.zeros(4))], 0, 2, batch_size='global')))


@pytest.mark.dist
def test_two_processes_count_and_train_as_one() -> None:
    def job(rank: int) -> Any:
        learn = detection(n=22, bs=4)
        with learn.distributed('ddp', timeout='20s'):
            learn.fit(2)
            preds, targets = learn.get_preds()
            return (
                weights(learn),
                learn.time.sp,
                len(preds),
                [float(t['boxes'][0, 0]) for t in targets],
            )

    alone = detection(n=22, bs=8)
    alone.fit(2)
    for own, sp, n_preds, values in run_ranks(job, 2):
        torch.testing.assert_close(own, weights(alone), rtol=0, atol=1e-12)
        assert (sp, n_preds) == (44, 22) and values == [i / 22 for i in range(22)]
