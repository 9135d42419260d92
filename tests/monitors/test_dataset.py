"""Parameter counts, and statistics of the data."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastcore.basics import noop
from torch import Tensor, nn
from torch.utils.data import DataLoader

from learnkit import Callback, DataLoaders, Learner
from learnkit.loggers import JSONLinesLogger
from learnkit.monitors.dataset import DatasetStats, ParamCount, count_parameters, loader_stats
from learnkit.testing import synth_learner


class Tied(nn.Module):
    "A model with one parameter and two children that share a weight."

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.body[0].weight
        self.body[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.scale + self.head(x)


def test_parameters_are_counted_once() -> None:
    counts = count_parameters(Tied())
    assert counts == {'total': (1 + 40 + 16, 41), '(model)': (1, 1), 'body': (56, 40)}
    assert counts['total'].total == sum(p.numel() for p in Tied().parameters())
    assert count_parameters(nn.ReLU()) == {'total': (0, 0)}
    assert count_parameters(nn.LazyLinear(3)) == {'total': (0, 0)}


def test_the_count_follows_freezing() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
    dls = [(torch.randn(4, 4), torch.randn(4, 8))]
    learn = Learner(dls, model, nn.MSELoss(), cbs=ParamCount())
    learn.logger = lambda row: None
    with learn.no_bar():
        learn.fit(1)
        assert learn.param_count.counts['total'] == (112, 112)
        model[0].requires_grad_(False)
        learn.fit(1)
    assert learn.param_count.counts == {'total': (112, 72), '0': (40, 0), '2': (72, 72)}


def test_loggers_write_both_with_the_configuration(tmp_path: Path) -> None:
    cbs = [ParamCount(), DatasetStats(n=2), JSONLinesLogger(tmp_path / 'log.jsonl')]
    learn = synth_learner(path=tmp_path, cbs=cbs)
    learn.logger = noop
    learn.fit(1)
    lines = [json.loads(line) for line in (tmp_path / 'log.jsonl').read_text().splitlines()]
    (params,) = (line['params'] for line in lines if 'params' in line)
    assert params['parameters/total'] == params['parameters/trainable'] == 2
    assert params['data/train/samples'] == 160 and params['data/valid/batches'] == 2
    assert params['data/train/input/shape'] == '(1,)'
    assert params['data/train/input/dtype'] == 'float32'


# --------------------------------------------------------------------------------------------- data


def test_statistics_against_numpy() -> None:
    x, y = torch.randn(50, 3, 5, 4, dtype=torch.float32) * 3 + 1, torch.randint(4, (50,))
    valid = {'day': (x[:20], y[:20]), 'night': (x[20:], y[20:])}
    dls = DataLoaders.from_tensors((x, y), valid, bs=8, shuffle=False)
    model = nn.Sequential(nn.Flatten(), nn.Linear(60, 4))
    learn = Learner(dls, model, nn.CrossEntropyLoss(), cbs=DatasetStats(n=3))
    learn.logger = noop
    learn.fit(1)
    stats = learn.dataset_stats.stats
    assert list(stats) == ['train', 'day', 'night']
    for name, lo, hi, size, n in (
        ('train', 0, 24, 50, 7),
        ('day', 0, 20, 20, 3),
        ('night', 20, 44, 30, 4),
    ):
        got, values = stats[name], x[lo:hi].numpy().astype(np.float64)
        assert got['samples'] == size
        assert got['batches'] == n
        assert got['batch_size'] == 8
        assert got['seen'] == hi - lo
        image = got['entries']['input']
        assert (image['shape'], image['dtype']) == ((3, 5, 4), 'float32')
        assert [image[k] for k in ('mean', 'std', 'min', 'max')] == pytest.approx(
            [values.mean(), values.std(), values.min(), values.max()], rel=1e-12
        )
        classes, counts = np.unique(y[lo:hi].numpy(), return_counts=True)
        assert got['entries']['target'] == {
            'shape': (),
            'dtype': 'int64',
            'classes': dict(zip(classes.tolist(), counts.tolist(), strict=True)),
        }


def test_nested_batches_of_different_lengths() -> None:
    batches = [
        {'ids': torch.randint(9, (4, n)), 'text': ['a'] * 4, 'labels': torch.tensor([0, 1, 1, 1])}
        for n in (5, 7)
    ]
    entries = loader_stats(batches)['entries']
    assert set(entries) == {'input/ids', 'input/labels', 'target'}
    assert entries['input/ids']['shape'] == ('*',) and entries['target']['classes'] == {0: 2, 1: 6}
    assert loader_stats(batches)['samples'] == 8


def test_what_knows_no_length_is_not_guessed_and_an_iterator_keeps_its_batches() -> None:
    class Endless:
        def __iter__(self) -> Any:
            while True:
                yield torch.zeros(2, 3), torch.ones(2, 1)

    stats = loader_stats(Endless(), n=4)
    assert (stats['samples'], stats['batches'], stats['seen']) == (None, None, 8)
    drawn = iter([(torch.zeros(2), torch.zeros(2))] * 3)
    assert loader_stats(drawn)['entries'] == {} and len(list(drawn)) == 3
    dropping = DataLoader([(torch.zeros(1), 0)] * 10, batch_size=4, drop_last=True)
    assert loader_stats(dropping, 0)['samples'] == 8


class Noisy(torch.utils.data.Dataset[Any]):
    "A data set that draws from every random generator."

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> Any:
        return torch.randn(1) + random.random() + np.random.rand(), torch.randn(1)


@pytest.mark.parametrize('workers', [0, 1])
def test_looking_disturbs_nothing(workers: int) -> None:
    def weights(*cbs: Callback) -> list[Tensor]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        dls = DataLoaders.from_datasets(
            Noisy(),
            Noisy(),
            bs=8,
            num_workers=workers,
            persistent_workers=bool(workers),
            generator=torch.Generator().manual_seed(5),
        )
        model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.3), nn.Linear(4, 1))
        learn = Learner(dls, model, nn.MSELoss(), lr=0.1, cbs=[*cbs])
        learn.logger = noop
        with learn.no_bar():
            learn.fit(2)
        for dl in dls:
            dl._iterator = None  # workers that the garbage collector has to end take 5 s
        return [p.detach() for p in model.parameters()]

    assert all(map(torch.equal, weights(), weights(DatasetStats(n=2), ParamCount())))


def test_other_loaders_are_measured_again() -> None:
    learn = synth_learner(cbs=DatasetStats())
    learn.logger = noop
    learn.fit(1)
    learn.dls = DataLoaders.from_tensors((torch.randn(8, 1), torch.randn(8, 1)), bs=4)
    learn.fit(1)
    assert {n: s['samples'] for n, s in learn.dataset_stats.stats.items()} == {'train': 8}
