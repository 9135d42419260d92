"""What counts as a sample: of lists of images, ragged sequences and graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from learnkit import (
    AvgMetric,
    Callback,
    DataLoaders,
    GradientAccumulation,
    Learner,
    Periodic,
    find_bs,
)
from tests.helpers.sampling import Detector, Graphs, as_lists, box_loss, detection, scenes

Row = Callable[..., None]


@pytest.mark.silent('64 images as a list: samples after one epoch')
def test_epoch_of_detection(row: Row) -> None:
    learn = detection()
    learn.fit(1)
    row(was=48, now=learn.time.sp, independent=64)
    assert learn.time.sp == 64


@pytest.mark.silent("images as a list, 16 a batch, fit('60sp'): batches")
def test_budget_of_samples(row: Row) -> None:
    learn = detection()
    learn.fit('60sp')
    row(was=5, now=learn.time.ba, independent=4)
    assert learn.time.ba == 4


@pytest.mark.silent("images as a list, 16 a batch, every='32sp': times in an epoch")
def test_every_so_many_samples(row: Row) -> None:
    at: list[int] = []
    detection(cbs=Periodic('32sp', lambda cb: at.append(cb.learn.time.sp))).fit(1)
    row(was=1, now=len(at), independent=2)
    assert at == [32, 64]


@pytest.mark.silent('images as a list, 4 a batch: steps of GradientAccumulation(16) on 64')
def test_accumulated_steps(row: Row) -> None:
    learn = detection(bs=4, cbs=GradientAccumulation(16))
    learn.fit(1)
    row(was=8, now=learn.opt.n_steps, independent=4)
    assert learn.opt.n_steps == 4


@pytest.mark.silent('images as a list, microbatch=5: distance of weights to whole batches')
def test_microbatches_of_images(row: Row) -> None:
    whole, cut = detection(), detection(microbatch=5)
    for learn in (whole, cut):
        learn.fit(1)
    distance = float((whole.model.last.weight - cut.model.last.weight).detach().abs().max())
    row(was='RuntimeError', now=distance, independent=0.0)
    assert distance < 1e-14


@pytest.mark.silent('predictions and targets of 64 images with boxes: their entries')
def test_entries_of_predictions(row: Row) -> None:
    preds, targets = detection().get_preds()
    row(was='64 and 16', now=f'{len(preds)} and {len(targets)}', independent='64 and 64')
    assert [float(t['boxes'][0, 0]) for t in targets] == [i / 64 for i in range(64)]
    assert [len(p['boxes']) for p in preds] == [len(t['boxes']) for t in targets]


@pytest.mark.silent('images as lists, batches of 16 and 4: valid_loss')
def test_validation_loss(row: Row) -> None:
    learn = detection(n=20, collate=as_lists)
    model = Detector()
    images, targets = as_lists(scenes(20))
    expected = float(box_loss(model(images), targets).detach())
    loss = learn.validate()[0]
    row(was=305.277, now=loss, independent=expected)
    assert loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.silent('ragged sequences, batches of 3 and 1: metric that averages over samples')
def test_metric_of_ragged_sequences(row: Row) -> None:
    sequences = [torch.full((length, 2), float(i)) for i, length in enumerate((5, 7, 2, 9))]
    batches = [(sequences[:3], sequences[:3]), (sequences[3:], sequences[3:])]

    class Tripled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(3.0))

        def forward(self, sequences: Any) -> Any:
            return [self.scale * s for s in sequences]

    def error(preds: Any, targets: Any) -> Any:
        return torch.stack([(p - t).mean() for p, t in zip(preds, targets, strict=True)]).mean()

    value = Learner(
        DataLoaders(batches, batches), Tripled(), error, metrics=AvgMetric(error)
    ).validate()[1]
    expected = sum(2.0 * i for i in range(4)) / 4
    row(was=4.57143, now=value, independent=expected)
    assert value == pytest.approx(expected)


@pytest.mark.silent('a batch of 3 graphs: samples after one batch')
def test_graphs(row: Row) -> None:
    batch = Graphs([torch.ones(n, 3) for n in (4, 2, 6)])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(3, 1)

        def forward(self, graphs: Graphs) -> Any:
            return torch.stack([self.last(g).mean() for g in graphs.graphs])

    learn = Learner(DataLoaders([(batch, torch.zeros(3))]), Model(), F.mse_loss)
    learn.logger, learn.create_mbar = lambda row: None, False
    learn.fit(1)
    row(was=0, now=learn.time.sp, independent=3)
    assert learn.time.sp == 3 and find_bs((batch,)) == 3


@pytest.mark.silent("samples of an object with rows, size_func=: after fit('10sp') on batches of 5")
def test_size_func(row: Row) -> None:
    class Opaque:
        rows = torch.ones(5, 2)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(2, 1)

        def forward(self, batch: Any) -> Any:
            return self.last(batch.rows).mean()

    def loss(pred: Any, targ: Any) -> Any:
        return (pred - targ).square()

    dls = DataLoaders([(Opaque(), torch.tensor(1.0))])
    learn = Learner(dls, Model(), loss, size_func=lambda xb, yb: len(xb[0].rows), cbs=Callback())
    learn.logger, learn.create_mbar = lambda row: None, False
    learn.fit('10sp')
    row(was='TypeError', now=learn.time.sp, independent=10)
    assert (learn.time.sp, learn.time.ba) == (10, 2)
