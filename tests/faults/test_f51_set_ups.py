"""Row 51: models, loaders, samplers, callbacks, schedules of many kinds. Each resumes exactly, or was warned of.

`check_resume` finds the same. What no checkpoint holds is named by a warning before the kill."""

from __future__ import annotations

import itertools
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from learnkit import EMA, Callback, DataLoaders, Learner
from learnkit.callbacks import (
    Checkpoint,
    GradientAccumulation,
    GradientClip,
    LRScheduler,
    MixedPrecision,
    MixUp,
    ParamScheduler,
    ReduceLROnPlateau,
)
from learnkit.callbacks.schedule import combined_cos
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
    "Adds noise from its own generator, of one of three kinds."

    def __init__(self, rng: Any) -> None:
        super().__init__()
        self.transforms = [{'rng': rng}]

    def __getitem__(self, i: int) -> Any:
        rng = self.transforms[0]['rng']
        if isinstance(rng, torch.Generator):
            return self.x[i] + torch.rand(1, generator=rng), self.y[i]
        return self.x[i] + float(rng.random()), self.y[i]


class Counting(Plain):
    "Gives other samples the more it has given."

    def __init__(self) -> None:
        super().__init__()
        self._n_given = 0

    def __getitem__(self, i: int) -> Any:
        self._n_given += 1
        return self.x[i] + 0.1 * self._n_given, self.y[i]


class Flow(IterableDataset[Any]):
    "Shuffles by the number of the pass."

    def __init__(self) -> None:
        self.data = Plain()
        self._n_passes = 0

    def __iter__(self) -> Iterator[Any]:
        g = torch.Generator().manual_seed(self._n_passes)
        self._n_passes += 1
        for i in torch.randperm(N, generator=g).tolist():
            yield self.data[i]


class Loader:
    "A user's loader that shuffles by a count, or by the global generator."

    def __init__(self, counts: bool) -> None:
        self.data, self.counts, self.n_passes = Plain(), counts, 0

    def __len__(self) -> int:
        return N // BS

    def __iter__(self) -> Iterator[Any]:
        self.n_passes += 1
        g = torch.Generator().manual_seed(self.n_passes) if self.counts else None
        for ids in torch.randperm(N, generator=g).split(BS):
            yield self.data.x[ids], self.data.y[ids]


# -- samplers --------------------------------------------------------------------------------------


class Own(Sampler[int]):
    "Base class of the samplers below."

    def __init__(self) -> None:
        self.setup()

    def setup(self) -> None:
        pass

    def __len__(self) -> int:
        return N

    def order(self) -> list[int]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[int]:
        yield from self.order()


def shuffle(seed: int) -> list[int]:
    return torch.randperm(N, generator=torch.Generator().manual_seed(seed)).tolist()


class HiddenCount(Own):
    def setup(self) -> None:
        self._n_passes = 0

    def order(self) -> list[int]:
        self._n_passes += 1
        return shuffle(self._n_passes)


class LateCount(HiddenCount):
    "Counts at the end of a pass."

    def __iter__(self) -> Iterator[int]:
        yield from shuffle(self._n_passes)
        self._n_passes += 1


class NotedCount(HiddenCount):
    "Counts when an iterator is created."

    def __iter__(self) -> Iterator[int]:
        return iter(self.order())


class LazyCount(Own):
    "Has no count before its first pass."

    def order(self) -> list[int]:
        self._n_passes = getattr(self, '_n_passes', 0) + 1
        return shuffle(self._n_passes)


class EpochCount(Own):
    def setup(self) -> None:
        self.epoch = 0

    def order(self) -> list[int]:
        self.epoch += 1
        return shuffle(self.epoch)


class SetEpoch(EpochCount):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Wrapping(Own):
    "Holds the sampler that counts."

    def setup(self) -> None:
        self.inner = HiddenCount()

    def order(self) -> list[int]:
        return self.inner.order()[::-1]


class OwnRandom(Own):
    def setup(self) -> None:
        self.rng = random.Random(3)

    def order(self) -> list[int]:
        return self.rng.sample(range(N), N)


class OwnNumPy(Own):
    def setup(self) -> None:
        self.rng = np.random.default_rng(3)

    def order(self) -> list[int]:
        return self.rng.permutation(N).tolist()


class GlobalRandom(Own):
    def order(self) -> list[int]:
        return random.sample(range(N), N)


class InClosure(Own):
    "Keeps its count where no attribute shows it."

    def setup(self) -> None:
        count = itertools.count()
        self.seed = lambda: next(count)

    def order(self) -> list[int]:
        return shuffle(self.seed())


class RandomInClosure(InClosure):
    def setup(self) -> None:
        rng = random.Random(3)
        self.seed = lambda: rng.randrange(1000)


class CountInList(Own):
    "Keeps its count as the length of a list."

    def setup(self) -> None:
        self.passes: list[int] = []

    def order(self) -> list[int]:
        self.passes.append(1)
        return shuffle(len(self.passes))


class Batches(Own):
    "A batch sampler with a count."

    def setup(self) -> None:
        self._n_passes = 0

    def __len__(self) -> int:
        return N // BS

    def __iter__(self) -> Iterator[Any]:
        self._n_passes += 1
        ids = shuffle(self._n_passes)
        yield from (ids[i : i + BS] for i in range(0, N, BS))


OWN_SAMPLERS: list[type[Own]] = [
    HiddenCount,
    LateCount,
    NotedCount,
    LazyCount,
    EpochCount,
    SetEpoch,
    Wrapping,
    OwnRandom,
    OwnNumPy,
    GlobalRandom,
]
LOST_SAMPLERS: list[type[Own]] = [InClosure, RandomInClosure, CountInList]

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


class Helper:
    "An object of a callback that holds a generator."

    def __init__(self, rng: Any) -> None:
        self.parts = {'deep': [rng]}


class HelperJitter(Jitter):
    def __init__(self) -> None:
        self.helper = Helper(random.Random(5))

    def draw(self) -> float:
        return float(self.helper.parts['deep'][0].random())


class NestedJitter(Jitter):
    "Holds callbacks that are not the Learner's own."

    def __init__(self) -> None:
        self.inner = [Jitter(np.random.default_rng(5)), Jitter(random.Random(6))]

    def draw(self) -> float:
        return sum(cb.draw() for cb in self.inner)


class SetJitter(Jitter):
    "Gives the nested callback the Learner, as a wrapper does."

    def __init__(self) -> None:
        self.inner = Jitter(random.Random(7))

    def before_fit(self) -> None:
        self.inner.learn = self.learn

    def draw(self) -> float:
        return self.inner.draw()


class CountingCallback(Jitter):
    def __init__(self) -> None:
        self.n, self.seen = 0, [0]

    def draw(self) -> float:
        self.n += 1
        self.seen.append(self.n)
        return self.n % 3 / 10 + len(self.seen) % 5 / 10


class NestedCounting(Jitter):
    "Holds callbacks that count."

    def __init__(self) -> None:
        self.inner, self.more = CountingCallback(), [CountingCallback(), CountingCallback()]

    def draw(self) -> float:
        return self.inner.draw() + self.more[1].draw()


# -- models ----------------------------------------------------------------------------------------


def linear() -> nn.Module:
    return nn.Linear(3, 1)


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


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.b(self.a(x).relu()))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x[..., None])[0][:, -1])


MODELS: dict[str, Callable[[], nn.Module]] = {
    'linear': linear,
    'mlp': mlp,
    'loose state': Loose,
    'tied': Tied,
    'recurrent': Recurrent,
    'lazy': lambda: nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(1)),
}

# -- set-ups ---------------------------------------------------------------------------------------


@dataclass
class SetUp:
    "How a Learner is made, and the expected result."

    model: Callable[[], nn.Module] = mlp
    train: Callable[[], Any] = lambda: DataLoader(Plain(), BS, shuffle=True)  # the training loader
    cbs: Callable[[], list[Callback]] = list
    warns: str = ''  # words of the warning, if the resume is not exact
    options: dict[str, Any] = field(default_factory=dict)  # of the Learner
    has_check: bool = True  # whether `check_resume` can train it

    def make(self) -> Learner:
        scramble(0)
        valid = DataLoader(Plain(), BS)
        dls = DataLoaders(self.train(), valid, device='cpu')
        options = {'lr': 0.01, **self.options}
        return quiet(Learner(dls, self.model(), nn.MSELoss(), cbs=self.cbs(), **options))


def torch_loader(dataset: Callable[[], Any] = Plain, **options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(dataset(), **{'batch_size': BS, 'shuffle': True, **options})


def sampled(sampler: Callable[[], Any], **options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(Plain(), BS, sampler=sampler(), **options)


def seeded(cls: Any, seed: int = 3) -> Any:
    if cls is torch.Generator:
        return torch.Generator().manual_seed(seed)
    return np.random.default_rng(seed) if cls is np.random.Generator else cls(seed)


KINDS = {
    'torch': torch.Generator,
    'python': random.Random,
    'numpy': np.random.Generator,
    'old numpy': np.random.RandomState,
}


def loaders() -> dict[str, Callable[[], Any]]:
    "Loaders that resume exactly."
    made: dict[str, Callable[[], Any]] = {
        'in memory': lambda: DataLoaders.from_tensors(make_xy(), make_xy(), bs=BS, seed=1).train,
        'a list of batches': lambda: [
            (x, y) for x, y in zip(*(t.split(BS) for t in make_xy()), strict=True)
        ],
        'one of its own': lambda: Loader(counts=False),
        'one of its own that counts': lambda: Loader(counts=True),
        'a stream that counts': lambda: DataLoader(Flow(), BS),
        'a subset': torch_loader(lambda: Subset(Plain(), range(2, 18)), drop_last=True),
        'tensors': torch_loader(lambda: TensorDataset(*make_xy())),
        'a data set that counts': torch_loader(Counting),
        'in order': torch_loader(shuffle=False),
        'with replacement': sampled(lambda: RandomSampler(range(N), True, N)),
        'weighted': sampled(lambda: WeightedRandomSampler([1.0, 3.0] * 10, N)),
        'batches that count': lambda: DataLoader(Plain(), batch_sampler=Batches()),
        'batches of a sampler that counts': lambda: DataLoader(
            Plain(), batch_sampler=BatchSampler(HiddenCount(), BS, False)
        ),
        'a generator': lambda: DataLoader(
            Plain(), BS, shuffle=True, generator=torch.Generator().manual_seed(4)
        ),
    }
    made |= {f'sampler {cls.__name__}': sampled(cls) for cls in OWN_SAMPLERS}
    made |= {
        f'noise of its own, {name}': torch_loader(lambda cls=cls: OwnNoise(seeded(cls)))
        for name, cls in KINDS.items()
    }
    made['noise'] = torch_loader(Noisy)
    return made


def worker_loaders() -> dict[str, Callable[[], Any]]:
    "The same with worker processes, which cost more."
    two = {'num_workers': 2}
    made: dict[str, Callable[[], Any]] = {
        'workers': torch_loader(**two),
        'workers, noise': torch_loader(Noisy, **two),
        'workers, a data set that counts': torch_loader(Counting, **two),
        'persistent workers': torch_loader(persistent_workers=True, **two),
        'one worker': torch_loader(Noisy, num_workers=1),
    }
    made |= {f'workers, sampler {cls.__name__}': sampled(cls, **two) for cls in OWN_SAMPLERS}
    return made


def optimizers() -> dict[str, dict[str, Any]]:
    names = 'SGD', 'Adam', 'AdamW', 'RMSprop', 'Adagrad', 'NAdam', 'RAdam', 'Adamax', 'Rprop'
    return {name: {'opt_func': getattr(torch.optim, name)} for name in names}


def callbacks() -> dict[str, Callable[[], list[Callback]]]:
    scheduler = torch.optim.lr_scheduler
    one_cycle = {
        'lr': combined_cos(0.25, 1e-3, 1e-2, 1e-5),
        'mom': combined_cos(0.25, 0.95, 0.85, 0.95),
    }
    made: dict[str, Callable[[], list[Callback]]] = {
        'EMA': lambda: [EMA(0.9)],
        'MixUp': lambda: [MixUp()],
        'bf16': lambda: [MixedPrecision('bf16')],
        'fp16': lambda: [MixedPrecision('fp16')],
        'accumulation': lambda: [GradientAccumulation(6)],
        'clip': lambda: [GradientClip(0.1)],
        'plateau': lambda: [ReduceLROnPlateau(patience=1)],
        'one cycle': lambda: [ParamScheduler(one_cycle)],
        'StepLR': lambda: [LRScheduler(partial(scheduler.StepLR, step_size=1))],
        'CosineAnnealingWarmRestarts': lambda: [
            LRScheduler(partial(scheduler.CosineAnnealingWarmRestarts, T_0=2))
        ],
        'ExponentialLR': lambda: [LRScheduler(partial(scheduler.ExponentialLR, gamma=0.9))],
        'EMA, accumulation, one cycle, bf16': lambda: [
            EMA(0.9),
            GradientAccumulation(8),
            ParamScheduler(one_cycle),
            MixedPrecision('bf16'),
        ],
        'a count and a list': lambda: [CountingCallback()],
        'a generator in a helper': lambda: [HelperJitter()],
        'generators in nested callbacks': lambda: [NestedJitter()],
        'a nested callback with the Learner': lambda: [SetJitter()],
        'nested callbacks that count': lambda: [NestedCounting()],
    }
    for name, cls in KINDS.items():
        if name != 'torch':
            made[f'a generator, {name}'] = lambda cls=cls: [Jitter(seeded(cls))]
    return made


def lost() -> dict[str, SetUp]:
    "Return set-ups with state that is missing from checkpoints."
    made = {
        f'sampler {cls.__name__}': SetUp(train=sampled(cls), warns=cls.__name__)
        for cls in LOST_SAMPLERS
    }
    made |= {
        f'workers, sampler {cls.__name__}': SetUp(
            train=sampled(cls, num_workers=2), warns=cls.__name__
        )
        for cls in LOST_SAMPLERS[:1]
    }
    train = torch_loader(Noisy, num_workers=2, persistent_workers=True)
    made['persistent workers, noise'] = SetUp(train=train, warns='persistent workers')
    made['workers out of order'] = SetUp(
        train=torch_loader(num_workers=2, in_order=False), warns='in_order=False'
    )
    return made


def set_ups() -> dict[str, SetUp]:
    "Return every set-up by name."
    made = {
        f'model: {name}': SetUp(model=model, has_check=name != 'lazy')
        for name, model in MODELS.items()
    }
    made |= {f'loader: {name}': SetUp(train=train) for name, train in loaders().items()}
    made |= {f'loader: {name}': SetUp(train=train) for name, train in worker_loaders().items()}
    made |= {f'optimizer: {name}': SetUp(options=o) for name, o in optimizers().items()}
    made |= {f'callback: {name}': SetUp(cbs=cbs) for name, cbs in callbacks().items()}
    # what interacts: who draws random numbers, who counts steps
    for (a, train), (b, cbs) in itertools.product(loaders().items(), callbacks().items()):
        if a in ('noise', 'sampler HiddenCount', 'one of its own') and b in (
            'EMA',
            'MixUp',
            'fp16',
            'accumulation',
            'one cycle',
            'StepLR',
            'a generator in a helper',
            'generators in nested callbacks',
        ):
            made[f'combination: {a}, {b}'] = SetUp(train=train, cbs=cbs)
    for name, model in MODELS.items():
        if name != 'lazy':  # half precision needs its weights
            made[f'combination: {name}, evaluations within epochs'] = SetUp(
                model=model, options={'eval_every': '2ba'}
            )
    made |= {f'warned set-up: {name}': set_up for name, set_up in lost().items()}
    return made


SET_UPS = set_ups()


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
    by_check = is_exact_by_check(set_up, at - 1) if set_up.has_check else True
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
    'loader: workers, a data set that counts',
    'loader: a data set that counts',
    'loader: one of its own that counts',
    'callback: generators in nested callbacks',
    'warned set-up: sampler InClosure',
    'warned set-up: persistent workers, noise',
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
    kinds = dict.fromkeys(name.partition(':')[0] for name in results if ':' in name)
    for kind in kinds:
        of_kind = {name: r for name, r in results.items() if name.startswith(f'{kind}:')}
        print(f'row 51: {kind}s equal: {count(of_kind, "equal")}/{len(of_kind)}')
    wrong = {name: r for name, r in results.items() if r not in ('equal', 'warned')}
    assert not wrong, '\n'.join(f'{name}: {r}' for name, r in wrong.items())


def test_the_warning_comes_once_and_changes_nothing(tmp_path: Path) -> None:
    "A sampler that holds its count in an attribute draws the same order with and without the check."
    set_up = SET_UPS['loader: sampler HiddenCount']
    orders = []
    for is_checked in (True, False):
        learn = set_up.make()
        seen: list[Any] = []
        watch = Callback(before_batch=lambda cb, seen=seen: seen.append(cb.xb[0].clone()))
        cbs = [Checkpoint('1ba', tmp_path, background=False)] if is_checked else []
        learn.fit(2, cbs=[watch, *cbs])
        orders.append(torch.cat(seen))
    assert orders[0].equal(orders[1])
    learn = SET_UPS['warned set-up: sampler InClosure'].make()
    with pytest.warns(UserWarning, match='InClosure') as caught:
        learn.fit(2, cbs=Checkpoint('1ba', tmp_path / 'lost', background=False))
    assert len([w for w in caught if 'InClosure' in str(w.message)]) == 1
