"""The first checkpoint names what has changed since the fit's start and no checkpoint holds, and nothing else."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

from learnkit import EMA, Callback, Checkpoint, DataLoaders, GradientClip, Learner
from learnkit.checkpoint.rehearsal import fingerprint
from learnkit.testing import synth_learner
from tests.faults.run_helpers import quiet

X = torch.randn(12, 1, generator=torch.Generator().manual_seed(0))


class Rows(Dataset[Any]):
    cache: dict[int, Tensor] | None = None

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> Any:
        if self.cache is not None:
            self.cache[i] = X[i] + random.random()
        return X[i], 2 * X[i]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.config, self.calls, self.drawn = {'depth': 1}, 0, torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Counts(Model):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.drawn += 1
        return self.net(x)


class Saves(Counts):
    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


class OwnEMA(Callback):
    def before_fit(self) -> None:
        self.average = copy.deepcopy(self.model)

    def after_batch(self) -> None:
        with torch.no_grad():
            self.average.net.weight.lerp_(self.model.net.weight, 0.1)


class Noise:
    "A collate function with a generator of its own, which is restored, and a count, which is not."

    def __init__(self, counts: bool) -> None:
        self.rng, self.counts, self.n = random.Random(1), counts, [0]

    def __call__(self, rows: Any) -> Any:
        self.n[0] += self.counts
        x, y = torch.utils.data.default_collate(rows)
        return x + self.rng.random(), y


def named(
    folder: Path,
    *cbs: Any,
    model: Callable[[], nn.Module] = Model,
    loss: Any = nn.functional.mse_loss,
    rows: Dataset[Any] | None = None,
    **options: Any,
) -> list[str]:
    "Return the names in the warnings of a fit with a checkpoint in its first and its second epoch."
    loader: Any = DataLoader(Rows() if rows is None else rows, batch_size=4, **options)
    learn = quiet(Learner(DataLoaders(loader, loader), model(), loss, cbs=cbs, path=folder))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        learn.fit(2, cbs=Checkpoint('2ba'))
    return [line.split(':')[0].strip() for w in caught for line in str(w.message).splitlines()[1:]]


def cached() -> Rows:
    rows = Rows()
    rows.cache = {}
    return rows


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler(torch.ones(12), 12, generator=torch.Generator())


def raise_weight(cb: Callback) -> None:
    cb.dls.train.sampler.weights[0] += 1


def counting_loss() -> Callable[[Tensor, Tensor], Tensor]:
    steps = iter(range(1000))
    return lambda pred, y: ((pred - y) ** 2).mean() * (1 + 1 / (1 + next(steps)))


def test_ordinary_programs_are_told_nothing(tmp_path: Path) -> None:
    assert named(tmp_path, EMA(), GradientClip(1.0), shuffle=True, collate_fn=Noise(False)) == []
    assert named(tmp_path, model=lambda: nn.Sequential(nn.LazyLinear(1), nn.Dropout())) == []
    assert named(tmp_path, sampler=weighted(), loss=nn.SmoothL1Loss()) == []
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        quiet(synth_learner(path=tmp_path, cbs=Checkpoint('2ba'))).fit_one_cycle(2)


def test_what_would_be_lost_is_named_once(tmp_path: Path) -> None:
    assert named(tmp_path, model=Counts) == ['model.calls', 'model.drawn']
    assert named(tmp_path, model=Saves) == []
    assert named(tmp_path, OwnEMA()) == ['OwnEMA.average']
    assert named(tmp_path, rows=cached()) == ['training loader.dataset.cache']
    assert named(tmp_path, collate_fn=Noise(True)) == ['training loader.collate_fn.n']
    raises = Callback(before_batch=raise_weight, run_valid=False)
    assert named(tmp_path, raises, sampler=weighted()) == ['sampler.weights']
    assert named(tmp_path, loss=counting_loss()) == ['loss_func']


def test_the_option_leaves_it_out(tmp_path: Path) -> None:
    learn = quiet(synth_learner(model=Counts(), path=tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        learn.fit(1, cbs=Checkpoint('2ba', rehearse=False))
    assert learn.model.calls > 0


def test_fingerprints_see_changes_in_place() -> None:
    values = [[1, 2], {'a': torch.zeros(2)}, {3}, Noise(True), nn.Linear(1, 1), iter([1, 2])]
    for value in values:
        assert fingerprint(value) == fingerprint(value)
    before = [fingerprint(value) for value in values]
    values[0].append(3)  # type: ignore[attr-defined]
    values[1]['a'] += 1  # type: ignore[index]
    values[2].add(4)  # type: ignore[attr-defined]
    values[3].n[0] = 9  # type: ignore[attr-defined]
    values[4].weight.data += 1  # type: ignore[attr-defined]
    next(values[5])  # type: ignore[call-overload]
    changed = [fingerprint(value) != old for value, old in zip(values, before, strict=True)]
    assert changed == [True] * 4 + [False, True]  # `.data` has a version of its own
