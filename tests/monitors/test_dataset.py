"""Parameter counts, and statistics of the data."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from learnkit.loggers import JSONLinesLogger
from learnkit.monitors.dataset import DatasetStats, ParamCount, count_parameters, loader_stats
from tests.helpers.learners import quiet_synth_learner


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


def test_loggers_write_both_with_the_configuration(tmp_path: Path) -> None:
    cbs = [ParamCount(), DatasetStats(), JSONLinesLogger(tmp_path / 'log.jsonl')]
    learn = quiet_synth_learner(path=tmp_path, cbs=cbs)
    learn.fit(1)
    lines = [json.loads(line) for line in (tmp_path / 'log.jsonl').read_text().splitlines()]
    (params,) = (line['params'] for line in lines if 'params' in line)
    assert params['parameters/total'] == params['parameters/trainable'] == 2
    assert params['data/train/samples'] == 160 and params['data/valid/batches'] == 2


def test_what_knows_no_length_is_not_guessed() -> None:
    class Endless:
        def __iter__(self) -> Any:
            while True:
                yield torch.zeros(2, 3), torch.ones(2, 1)

    assert loader_stats(Endless()) == {'samples': None, 'batches': None, 'batch_size': None}
    dropping = DataLoader([(torch.zeros(1), 0)] * 10, batch_size=4, drop_last=True)
    assert loader_stats(dropping)['samples'] == 8
