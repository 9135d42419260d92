"""Row 51: models, loaders, samplers and callbacks of many kinds. Each resumes exactly, or was warned of.

`check_resume` finds the same. What no checkpoint holds is named by a warning before the kill."""

from __future__ import annotations

import itertools
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from learnkit import EMA, Callback, DataLoaders, Learner
from learnkit.callbacks import Checkpoint, GradientAccumulation, MixedPrecision
from learnkit.checkpoint.compare import differences
from tests.faults.run_helpers import Reach, State, quiet
from tests.helpers.harness import run_until_done
from tests.helpers.resuming import scramble

N, BS = 20, 4  # samples, batch size: five batches an epoch
N_EPOCH = 3

# -- data ------------------------------------------------------------------------------------------


def make_xy() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(7)
    x = torch.randn(N, 3, generator=g)
    return x, x.sum(1, keepdim=True)


class Plain(Dataset[Any]):
    def __init__(self) -> None:
        self.x, self.y = make_xy()

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i]


class Noisy(Plain):
    "Adds noise from three global generators."

    def __getitem__(self, i: int) -> Any:
        noise = torch.randn(3) + random.random() + float(np.random.rand())
        return self.x[i] + noise, self.y[i]


class OwnNoise(Plain):
    "Adds noise from its own generator."

    def __init__(self) -> None:
        super().__init__()
        self.transforms = [{'rng': np.random.default_rng(3)}]

    def __getitem__(self, i: int) -> Any:
        return self.x[i] + float(self.transforms[0]['rng'].random()), self.y[i]


class Counting(Plain):
    "Gives other samples the more it has given."

    def __init__(self) -> None:
        super().__init__()
        self._n_given = 0

    def __getitem__(self, i: int) -> Any:
        self._n_given += 1
        return self.x[i] + 0.1 * self._n_given, self.y[i]


class Loader:
    "A user's loader that shuffles by a count."

    def __init__(self) -> None:
        self.data, self.n_passes = Plain(), 0

    def __len__(self) -> int:
        return N // BS

    def __iter__(self) -> Iterator[Any]:
        self.n_passes += 1
        for ids in torch.tensor(shuffle(self.n_passes)).split(BS):
            yield self.data.x[ids], self.data.y[ids]


# -- samplers --------------------------------------------------------------------------------------


def shuffle(seed: int) -> list[int]:
    return torch.randperm(N, generator=torch.Generator().manual_seed(seed)).tolist()


class HiddenCount(Sampler[int]):
    def __init__(self) -> None:
        self._n_passes = 0

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        self._n_passes += 1
        yield from shuffle(self._n_passes)


class InClosure(HiddenCount):
    "Keeps its count where no attribute shows it."

    def __init__(self) -> None:
        count = itertools.count()
        self.seed = lambda: next(count)

    def __iter__(self) -> Iterator[int]:
        yield from shuffle(self.seed())


# -- callbacks -------------------------------------------------------------------------------------


class Jitter(Callback):
    "Changes the loss by a random number from its own generator."

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def draw(self) -> float:
        return float(self.rng.random())

    def after_loss(self) -> None:
        if self.training:
            self.learn.loss_grad = self.learn.loss_grad * (1 + self.draw())


class NestedJitter(Jitter):
    "Holds callbacks that are not the Learner's own, and gives one the Learner, as a wrapper does."

    def __init__(self) -> None:
        self.inner = [Jitter(np.random.default_rng(5)), Jitter(random.Random(6))]

    def before_fit(self) -> None:
        self.inner[0].learn = self.learn

    def draw(self) -> float:
        return sum(cb.draw() for cb in self.inner)


# -- models ----------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))


class Loose(nn.Module):
    "Has a buffer that no state dict holds, and extra state."

    def __init__(self) -> None:
        super().__init__()
        self.line, self.n = nn.Linear(3, 1), 0
        self.register_buffer('seen', torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.n += 1
            self.seen += 1
        return self.line(x) * (1 + 0.01 * self.n) + self.seen / 100

    def get_extra_state(self) -> dict[str, int]:
        return {'n': self.n}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.n = state['n']


# -- set-ups ---------------------------------------------------------------------------------------


@dataclass
class SetUp:
    "How a Learner is made, and the expected result."

    model: Callable[[], nn.Module] = mlp
    train: Callable[[], Any] = lambda: DataLoader(Plain(), BS, shuffle=True)  # the training loader
    cbs: Callable[[], list[Callback]] = list
    warns: str = ''  # words of the warning, if the resume is not exact

    def make(self) -> Learner:
        scramble(0)
        valid = DataLoader(Plain(), BS)
        dls = DataLoaders(self.train(), valid, device='cpu')
        return quiet(Learner(dls, self.model(), nn.MSELoss(), lr=0.01, cbs=self.cbs()))


def torch_loader(dataset: Callable[[], Any] = Plain, **options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(dataset(), **{'batch_size': BS, 'shuffle': True, **options})


def sampled(sampler: Callable[[], Any], **options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(Plain(), BS, sampler=sampler(), **options)


LOADERS: dict[str, Callable[[], Any]] = {
    'one of its own that counts': Loader,
    'a data set that counts': torch_loader(Counting),
    'a generator': lambda: torch_loader(generator=torch.Generator().manual_seed(3))(),
    'noise': torch_loader(Noisy),
    'noise of its own': torch_loader(OwnNoise),
    'workers, noise': torch_loader(Noisy, num_workers=2),
    'workers, a data set that counts': torch_loader(Counting, num_workers=2),
    'workers, sampler HiddenCount': sampled(HiddenCount, num_workers=2),
    'batches of a sampler that counts': lambda: DataLoader(
        Plain(), batch_sampler=BatchSampler(HiddenCount(), BS, False)
    ),
    'sampler HiddenCount': sampled(HiddenCount),
}
CALLBACKS: dict[str, Callable[[], list[Callback]]] = {
    'EMA, accumulation, bf16': lambda: [EMA(0.9), GradientAccumulation(8), MixedPrecision('bf16')],
    'a generator': lambda: [Jitter(random.Random(3))],
    'generators in nested callbacks': lambda: [NestedJitter()],
}
# set-ups with state that is missing from checkpoints
LOST = {
    'sampler InClosure': SetUp(train=sampled(InClosure), warns='InClosure'),
    'persistent workers, noise': SetUp(
        train=torch_loader(Noisy, num_workers=2, persistent_workers=True),
        warns='persistent workers',
    ),
    'workers out of order': SetUp(
        train=torch_loader(num_workers=2, in_order=False), warns='in_order=False'
    ),
}
SET_UPS = {
    'model: loose state': SetUp(model=Loose),
    **{f'loader: {name}': SetUp(train=train) for name, train in LOADERS.items()},
    **{f'callback: {name}': SetUp(cbs=cbs) for name, cbs in CALLBACKS.items()},
    **{f'warned set-up: {name}': set_up for name, set_up in LOST.items()},
}


def train(set_up: SetUp, folder: Path) -> State:
    "Train or resume, and return the final state and the warnings."
    learn = set_up.make()
    is_resumed = any(folder.glob('*.ckpt'))
    if is_resumed:
        scramble(1)
    saver = Checkpoint('1ba', folder, background=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        learn.fit(N_EPOCH, resume=is_resumed, cbs=[saver, Reach()])
        learn.remove_cbs(Reach)
    texts = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    for text in texts:
        print(f'warned: {text}', file=sys.stderr, flush=True)
    return {'state': learn.checkpoint_state(), 'warned': texts}


def kill_and_compare(set_up: SetUp, folder: Path, at: int) -> tuple[list[str], list[str]]:
    "Return the differences after a kill in a training batch, and the warnings of the uninterrupted run."
    straight = run_until_done(partial(train, set_up, folder / 'straight'))
    job = partial(train, set_up, folder / 'killed')
    killed = run_until_done(job, kill=[('train after_loss', at)])
    assert killed.kills == 1
    found = differences(straight.result['state'], killed.result['state'])
    return found, list(straight.result['warned'])


def is_exact_by_check(set_up: SetUp, stop_after: int) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return bool(set_up.make().check_resume(3 * (N // BS), stop_after))


def check_set_up(set_up: SetUp, folder: Path, at: int) -> str:
    "Return 'equal' or 'warned' if a set-up is as expected, and otherwise a description."
    found, warned = kill_and_compare(set_up, folder, at)
    by_check = is_exact_by_check(set_up, at - 1)
    if set_up.warns:
        is_named = any(set_up.warns in text for text in warned)
        # the first epoch may be exact, and batches that come out of order may differ by chance
        agrees = not (by_check and found) or set_up.warns == 'in_order=False'
        return 'warned' if is_named and agrees else f'{found[:3]}, {warned}, {by_check}'
    if found or warned or not by_check:
        return f'{found[:3]}, {warned}, check_resume: {by_check}'
    return 'equal'


SOME = [
    'loader: sampler HiddenCount',
    'callback: generators in nested callbacks',
    'warned set-up: sampler InClosure',
]


@pytest.mark.parametrize('name', SOME)
def test_some(tmp_path: Path, name: str) -> None:
    "Killed in the second epoch."
    expected = 'warned' if SET_UPS[name].warns else 'equal'
    assert check_set_up(SET_UPS[name], tmp_path, 8) == expected


def count(results: dict[str, str], kind: str) -> int:
    return sum(result == kind for result in results.values())


@pytest.mark.full
def test_every_set_up(tmp_path: Path) -> None:
    rng = random.Random(0)
    results = {}
    for i, (name, set_up) in enumerate(SET_UPS.items()):
        at = rng.randrange(2, N_EPOCH * 4)
        results[name] = check_set_up(set_up, tmp_path / f'{i}', at)
    print(
        f'row 51: {len(results)} set-ups, each killed at a random batch: {count(results, "equal")} equal, '
        f'{count(results, "warned")} named by a warning before the kill; check_resume called none exact that differs'
    )
    wrong = {name: r for name, r in results.items() if r not in ('equal', 'warned')}
    assert not wrong, '\n'.join(f'{name}: {r}' for name, r in wrong.items())
