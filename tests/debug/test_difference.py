"""The event, the callback and the quantity of one difference that was planted in one of two runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from learnkit import Callback, Checkpoint, DataLoaders, GradientClip, Learner
from learnkit.core.errors import CheckpointError, OptionError
from learnkit.debug.difference import Difference, first_difference
from learnkit.optim import Adam

N, BS, EPOCHS = 48, 8, 3


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    "Rows with a transform."

    def __init__(self, scale: float) -> None:
        self.x = torch.randn(N, 4)
        self.scale = scale

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x = self.x[i]
        return x * self.scale, x.sum(0, keepdim=True)


def make(
    path: Path, *cbs: Any, seed: int = 0, order: int = 0, scale: float = 1.0, eps: float = 1e-5
) -> Learner:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(order)
    dl = DataLoader(Noisy(scale), BS, shuffle=True, generator=generator)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
    learn = Learner(
        DataLoaders(dl),
        model,
        nn.MSELoss(),
        opt_func=lambda params, lr: Adam(params, lr=lr, eps=eps),
        lr=0.01,
        path=path,
        cbs=[Checkpoint('5ba', keep_last=None), *cbs],
    )
    learn.logger = lambda *_: None
    return learn


class Plant(Callback):
    "Call a function at one batch."

    order = 5

    def __init__(self, event: str, ba: int, f: Callable[[Any], Any]) -> None:
        self._ba, self._f = ba, f
        setattr(self, event, self._run)

    def _run(self) -> None:
        # in `after_batch` the batch is counted already
        if self.learn.train_iter - ('after_batch' in vars(self)) == self._ba:
            self._f(self.learn)


@torch.no_grad()
def change_weight(learn: Learner) -> None:
    next(learn.model.parameters()).mul_(1.01)


def change_x(learn: Learner) -> None:
    learn.xb = (learn.xb[0] * 1.01,)


KINDS = 'order transform generator weight rate xb clip eps'.split()
Expected = tuple[int, str, str, str]


def plant(kind: str, ba: int) -> tuple[dict[str, Any], Callable[[], list[Any]], Expected]:
    "Return options and callbacks of a run with a planted difference, and what has to be found."
    none: Callable[[], list[Any]] = list
    if kind == 'order':
        return {'order': ba}, none, (0, 'after_draw', '', 'order of samples')
    if kind == 'transform':
        return {'scale': 1 + ba / 100}, none, (0, 'after_draw', '', 'batch')
    if kind == 'eps':
        return {'eps': ba * 1e-4}, none, (0, 'before_epoch', '', 'hyper eps')  # the first event
    if kind == 'clip':
        expected = (0, 'before_step', 'GradientClip', 'gradient of')
        return {}, lambda: [GradientClip(0.01 * ba)], expected
    events: dict[str, tuple[str, Callable[[Any], Any], str]] = {
        'generator': ('after_batch', lambda learn: torch.rand(1), 'random numbers'),
        'weight': ('after_step', change_weight, 'weight 0.weight'),
        'rate': ('before_batch', lambda learn: learn.opt.set_hypers(lr=0.02), 'hyper lr'),
        'xb': ('before_batch', change_x, 'xb'),
    }
    event, f, what = events[kind]
    return {}, lambda: [Plant(event, ba, f)], (ba, event, 'Plant', what)


def compare(kind: str, ba: int, seed: int, path: Path) -> tuple[Difference | None, Expected]:
    options, cbs, expected = plant(kind, ba)
    sides: list[tuple[Path, dict[str, Any], Callable[[], list[Any]]]] = [
        (path / 'a', {}, list),
        (path / 'b', options, cbs),
    ]
    for folder, own, more in sides:
        learn = make(folder, *more(), seed=seed, **own)
        with learn.no_bar():
            learn.fit(EPOCHS)
    a, b = (make(folder, *more(), seed=seed, **own) for folder, own, more in sides)
    return first_difference(a, b), expected


def is_found(found: Difference | None, expected: Expected) -> bool:
    if found is None:
        return False
    ba, event, callback, what = expected
    where = (found.batch, found.event, found.callback) == (ba, event, callback)
    return where and found.what.startswith(what)


@pytest.mark.parametrize('kind', KINDS)
def test_a_planted_difference_is_named(kind: str, tmp_path: Path) -> None:
    found, expected = compare(kind, 8, 0, tmp_path)
    assert is_found(found, expected), f'{found!r}, expected {expected}'


@pytest.mark.full
def test_forty_pairs(tmp_path: Path) -> None:
    wrong = []
    for kind in KINDS:
        for seed in range(5):
            result = compare(kind, 2 + 3 * seed, seed, tmp_path / f'{kind}{seed}')
            if not is_found(*result):
                wrong.append((kind, seed, *result))
    print(f'first_difference: {40 - len(wrong)} of 40 named')
    assert len(wrong) <= 2, wrong


def test_equal_runs_folders_and_a_tolerance(tmp_path: Path) -> None:
    for name, scale in (('a', 1.0), ('b', 1.0), ('c', 1 + 1e-6)):
        with make(tmp_path / name, scale=scale).no_bar() as learn:
            learn.fit(1)
    a, b, c = (tmp_path / name for name in 'abc')
    assert first_difference(a, b, make=make) is None
    scaled = make(c, scale=1 + 1e-6)
    found = first_difference(make(a), scaled)
    assert found is not None and found.what == 'batch'
    assert first_difference(make(a), make(c, scale=1 + 1e-6), atol=1e-2) is None
    with pytest.raises(OptionError, match='is a folder'):
        first_difference(a, b)
    with pytest.raises(OptionError, match='same Learner'):
        first_difference(scaled, scaled)
    with make(tmp_path / 'd').no_bar() as silent, silent.removed_cbs(silent.recorder):
        silent.fit(1)
    with pytest.raises(CheckpointError, match='recorded loss'):
        first_difference(make(a), make(tmp_path / 'd'))


def test_the_first_larger_difference(tmp_path: Path) -> None:
    def shift(learn: Learner) -> None:
        learn.xb = (learn.xb[0] + 1,)

    for name, cbs in (('a', []), ('b', [Plant('before_batch', 4, shift)])):
        with make(tmp_path / name, *cbs, scale=1 + 1e-7 * bool(cbs)).no_bar() as learn:
            learn.fit(1)
    b = make(tmp_path / 'b', Plant('before_batch', 4, shift), scale=1 + 1e-7)
    found = first_difference(make(tmp_path / 'a'), b, atol=1e-3)
    assert found is not None
    assert (found.batch, found.callback, found.what) == (4, 'Plant', 'xb')
