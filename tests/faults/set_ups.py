"""Parts of set-ups for row 51: models, losses, loaders and callbacks as users write them, with state at the edge.

Each part is a dict of fields of `SetUp`. A part whose state no checkpoint can hold has the name of this state as
`lost`: the first checkpoint has to warn of it."""

import copy
import itertools
import random
from collections import deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from learnkit import EMA, SAM, Callback
from learnkit.callbacks import GradientAccumulation, MixedPrecision

N, BS = 20, 4  # samples, batch size: five batches an epoch

# -- models and losses -----------------------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))


def normed() -> nn.Module:
    first, second = spectral_norm(nn.Linear(3, 8)), nn.Linear(8, 8)
    return nn.Sequential(first, parametrizations.weight_norm(second), nn.LazyLinear(1))


class Model(nn.Module):
    "Adds to its inputs what a subclass keeps over training batches."

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 1)
        self.set_up()

    def set_up(self) -> None:
        pass

    def shift(self, x: Tensor) -> Any:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x + self.shift(x) if self.training else x)


class LazyBuffer(Model):
    is_persistent = False

    def shift(self, x: Tensor) -> Tensor:
        if not hasattr(self, 'mean'):
            self.register_buffer('mean', torch.zeros(3), persistent=self.is_persistent)
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.mean


class LazyPersistentBuffer(LazyBuffer):
    is_persistent = True


class Bank(Model):
    is_persistent = True

    def set_up(self) -> None:
        self.register_buffer('bank', None, persistent=self.is_persistent)

    def shift(self, x: Tensor) -> Tensor:
        self.bank = x.mean(0) if self.bank is None else 0.5 * self.bank + x.mean(0)
        return self.bank


class LooseBank(Bank):
    is_persistent = False


class Memory(Model):
    "Has a buffer that grows."

    def set_up(self) -> None:
        self.register_buffer('memory', torch.zeros(0, 3))

    def shift(self, x: Tensor) -> Tensor:
        self.memory = torch.cat([self.memory, x])[-10:]
        return self.memory.mean(0)


class Queue(Model):
    "Keeps a queue as MoCo does, and a copy of its layer that follows it."

    def set_up(self) -> None:
        self.key = copy.deepcopy(self.line).requires_grad_(False)
        self.register_buffer('queue', torch.zeros(8, 1))
        self.register_buffer('place', torch.zeros(1, dtype=torch.long))

    def shift(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.key.weight.lerp_(self.line.weight, 0.1)
            self.queue[int(self.place)] = self.key(x).mean()
            self.place[0] = (self.place[0] + 1) % 8
        return self.queue.mean()


class ExtraState(Model):
    def set_up(self) -> None:
        self.n = 0
        self.register_buffer('seen', torch.zeros(1), persistent=False)

    def shift(self, x: Tensor) -> Tensor:
        self.n += 1
        self.seen += 1
        return self.n + self.seen / 10

    def get_extra_state(self) -> dict[str, int]:
        return {'n': self.n}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.n = state['n']


class Generators(Model):
    def set_up(self) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.others = [np.random.default_rng(3), random.Random(4)]

    def shift(self, x: Tensor) -> Tensor:
        noise = sum(float(g.random()) for g in self.others)
        return torch.randn(x.shape, generator=self.generator) + noise


class Chance(Model):
    def shift(self, x: Tensor) -> int:
        return int(random.random() < 0.5)


class Steps(Model):
    "Warms up by a count of its calls."

    n_steps = 0

    def shift(self, x: Tensor) -> float:
        self.n_steps += 1
        return min(1, self.n_steps / 10)


class Centers(Model):
    def set_up(self) -> None:
        self.centers = [torch.zeros(3) for _ in range(2)]

    def shift(self, x: Tensor) -> Tensor:
        self.centers[0] += 0.1 * x.mean(0)
        return self.centers[0]


class Recent(Model):
    def set_up(self) -> None:
        self.recent = deque([0.0], maxlen=4)

    def shift(self, x: Tensor) -> float:
        self.recent.append(float(x.mean()))
        return sum(self.recent)


class Hidden(Model):
    "Keeps the state of a recurrent layer from batch to batch."

    def set_up(self) -> None:
        self.hidden = None

    def shift(self, x: Tensor) -> Tensor:
        self.hidden = x.mean(0) if self.hidden is None else torch.tanh(self.hidden + x).mean(0)
        return self.hidden


class FirstBatch(Model):
    "Initializes itself by its first batch."

    def set_up(self) -> None:
        self.is_initialized = False

    def shift(self, x: Tensor) -> float:
        if not self.is_initialized:
            self.line.weight.data /= x.std()
        self.is_initialized = True
        return 0.0


MODELS: dict[str, dict[str, Any]] = {
    'mlp': {'model': mlp},
    'normed and lazy': {'model': normed},
    **{
        model.__name__: {'model': model}
        for model in (LazyBuffer, LazyPersistentBuffer, Bank, LooseBank, Memory, Queue)
        + (ExtraState, Generators, Chance)
    },
    'Steps': {'model': Steps, 'lost': 'n_steps'},
    'Centers': {'model': Centers, 'lost': 'centers'},
    'Recent': {'model': Recent, 'lost': 'recent'},
    'Hidden': {'model': Hidden, 'lost': 'hidden'},
    'FirstBatch': {'model': FirstBatch, 'lost': 'is_initialized'},
}


class Loss(nn.Module):
    "Weighs the loss by a count in a buffer."

    is_persistent = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer('n', torch.zeros(1), persistent=self.is_persistent)
        self.scale = nn.Parameter(torch.ones(1))

    def weigh(self) -> Any:
        self.n += 1
        return 1 + self.n / 50

    def forward(self, pred: Tensor, y: Tensor) -> Tensor:
        weight = self.weigh() if pred.requires_grad else 1
        return (self.scale**2 * (pred - y) ** 2).mean() * weight


class LooseLoss(Loss):
    is_persistent = False


class RandomLoss(Loss):
    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(3)

    def weigh(self) -> float:
        return self.rng.random()


class CountingLoss(Loss):
    n_calls = 0

    def weigh(self) -> float:
        self.n_calls += 1
        return 1 + self.n_calls / 50


LOSSES: dict[str, dict[str, Any]] = {
    **{loss.__name__: {'loss': loss} for loss in (Loss, LooseLoss, RandomLoss)},
    'CountingLoss': {'loss': CountingLoss, 'lost': 'n_calls'},
}

# -- data ------------------------------------------------------------------------------------------


class Plain(Dataset[Any]):
    def __init__(self, change: Callable[[Tensor], Tensor] = Tensor.clone) -> None:
        self.x = torch.randn(N, 3, generator=torch.Generator().manual_seed(7))
        self.y = self.x.sum(1, keepdim=True)
        self.change = change

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return self.change(self.x[i]), self.y[i]


class Jitter:
    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __call__(self, x: Tensor) -> Tensor:
        return x + float(self.rng.random())


class Compose:
    def __init__(self, changes: list[Any]) -> None:
        self.changes = changes

    def __call__(self, x: Tensor) -> Tensor:
        for change in self.changes:
            x = change(x)
        return x


def deep() -> Dataset[Any]:
    halves = [
        Subset(Plain(Compose([Compose([Jitter(np.random.default_rng(i))])])), range(i, N, 2))
        for i in (0, 1)
    ]
    return Subset(ConcatDataset(halves), list(range(N)))


def many() -> Dataset[Any]:
    return Plain(Compose([Jitter(random.Random(i)) for i in range(40)]))


def add_noise(x: Tensor) -> Tensor:
    "Add noise from three global generators."
    return x + torch.randn(3) + random.random() + float(np.random.rand())


class Counting(Plain):
    n_given = 0

    def __getitem__(self, i: int) -> Any:
        self.n_given += 1
        return self.x[i] + 0.1 * self.n_given, self.y[i]


class MixUp:
    "Collates samples, and mixes them with each other."

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)

    def __call__(self, samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        return torch.lerp(x, x.flip(0), float(self.rng.beta(0.4, 0.4))), y


class Annealed(MixUp):
    n_batches = 0

    def __call__(self, samples: list[Any]) -> Any:
        self.n_batches += 1
        x, y = super().__call__(samples)
        return x / self.n_batches, y


def shuffle(seed: int) -> list[int]:
    return torch.randperm(N, generator=torch.Generator().manual_seed(seed)).tolist()


class ByPass(Sampler[int]):
    def __init__(self) -> None:
        self._n_passes = 0

    def __len__(self) -> int:
        return N

    def next_seed(self) -> int:
        self._n_passes += 1
        return self._n_passes

    def __iter__(self) -> Iterator[int]:
        yield from shuffle(self.next_seed())


class InClosure(ByPass):
    "Keeps its count where no attribute shows it."

    def __init__(self) -> None:
        count = itertools.count()
        self.next_seed = lambda: next(count)


class InList(ByPass):
    def __init__(self) -> None:
        self.passes: list[int] = []

    def next_seed(self) -> int:
        self.passes.append(1)
        return len(self.passes)


class ByEpoch(ByPass):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def next_seed(self) -> int:
        return self.epoch


class Growing(Sampler[list[int]]):
    "Gives a batch more in each pass."

    n_batches = 3

    def __len__(self) -> int:
        return self.n_batches

    def __iter__(self) -> Iterator[list[int]]:
        yield from torch.randperm(N)[: BS * self.n_batches].view(-1, BS).tolist()
        self.n_batches = min(self.n_batches + 1, N // BS)


class Stream(IterableDataset[Any]):
    "Ends after `n` samples of each worker."

    def __init__(self, n: int | None = None) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        worker, data = get_worker_info(), Plain(add_noise)
        first = 0 if worker is None else worker.id
        for i in itertools.islice(itertools.count(first), self.n):
            yield data[i % N]


class Loader:
    "A user's loader that shuffles by a count, and draws from a generator."

    def __init__(self) -> None:
        self.data, self.n_passes, self.rng = Plain(), 0, np.random.default_rng(2)

    def __len__(self) -> int:
        return N // BS

    def __iter__(self) -> Iterator[Any]:
        self.n_passes += 1
        for ids in torch.tensor(shuffle(self.n_passes)).split(BS):
            yield self.data.x[ids] + float(self.rng.random()), self.data.y[ids]


class TwoLoaders(Loader):
    "Goes on with the second loader's batches in the next epoch."

    def __init__(self) -> None:
        self.first, self.second = loader()(), loader()()
        self.batches = None

    def __iter__(self) -> Iterator[Any]:
        if self.batches is None:
            self.batches = itertools.cycle(list(self.second))
        for x, y in self.first:
            yield x + next(self.batches)[0], y


def loader(dataset: Callable[[], Any] = Plain, **options: Any) -> Callable[[], Any]:
    "Return a function that makes a DataLoader; options that are functions make the value."

    def make() -> Any:
        made = {k: option() if callable(option) else option for k, option in options.items()}
        if 'batch_sampler' not in made:
            made = {'batch_size': BS, 'shuffle': 'sampler' not in made, **made}
        return DataLoader(dataset(), **made)

    return make


def stateful() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Plain(add_noise), BS, shuffle=True)


def nodes() -> Any:
    from torch.utils.data import RandomSampler
    from torchdata import nodes

    samples = nodes.MapStyleWrapper(Plain(), RandomSampler(Plain()))
    return nodes.Loader(nodes.Mapper(nodes.Batcher(samples, BS), default_collate))


class OnLoader(Callback):
    "Changes something of the training loader."

    def __init__(self, event: str, change: Callable[[Any, int], None]) -> None:
        self.__dict__[event] = lambda: change(self.learn.dls.train, self.learn.epoch)


def grow_batches(dl: Any, epoch: int) -> None:
    dl.batch_sampler.batch_size += 2


def set_batches(dl: Any, epoch: int) -> None:
    dl.batch_sampler.batch_size = BS + 2 * epoch


def set_weights(dl: Any, epoch: int) -> None:
    dl.sampler.weights[epoch] += 5


def set_samples(dl: Any, epoch: int) -> None:
    dl.dataset.x[epoch] *= 2


def set_epoch(dl: Any, epoch: int) -> None:
    dl.sampler.set_epoch(epoch)


def on(event: str, change: Callable[[Any, int], None]) -> tuple[Callable[[], Callback]]:
    return (lambda: OnLoader(event, change),)


weighted = partial(WeightedRandomSampler, torch.ones(N), N)
LOADERS: dict[str, dict[str, Any]] = {
    'shuffled': {'train': loader()},
    'of a generator': {'train': loader(generator=lambda: torch.Generator().manual_seed(3))},
    'of its own': {'train': Loader},
    'noise': {'train': loader(partial(Plain, add_noise), sampler=ByPass)},
    'workers, noise': {'train': loader(partial(Plain, add_noise), sampler=ByPass, num_workers=2)},
    'a data set that counts': {'train': loader(Counting)},
    'workers, a data set that counts': {'train': loader(Counting, num_workers=2)},
    'deep generators': {'train': loader(deep)},
    '40 transforms': {'train': loader(many)},
    'mixup': {'train': loader(collate_fn=MixUp)},
    'ByPass': {'train': loader(sampler=ByPass)},
    'workers, ByPass': {'train': loader(sampler=ByPass, num_workers=2)},
    'batches of ByPass': {'train': loader(batch_sampler=lambda: BatchSampler(ByPass(), BS, False))},
    'ByEpoch': {'train': loader(sampler=ByEpoch), 'cbs': on('before_epoch', set_epoch)},
    'Growing': {'train': loader(batch_sampler=Growing)},
    'batch size after epoch': {'cbs': on('after_epoch', grow_batches)},
    'batch size before epoch': {'cbs': on('before_epoch', set_batches)},
    'stream, workers': {'train': loader(partial(Stream, 10), num_workers=2, shuffle=False)},
    'endless stream': {'train': loader(Stream, shuffle=False), 'n_iter': N // BS},
    'stateful': {'train': stateful},
    'nodes': {'train': nodes},
    'Annealed': {'train': loader(collate_fn=Annealed), 'lost': 'n_batches'},
    'InClosure': {'train': loader(sampler=InClosure), 'lost': 'next_seed'},
    'InList': {'train': loader(sampler=InList), 'lost': 'passes'},
    'TwoLoaders': {'train': TwoLoaders, 'lost': 'batches'},
    'weights': {
        'train': loader(sampler=weighted),
        'cbs': on('after_batch', set_weights),
        'lost': 'weights',
    },
    'samples': {'cbs': on('after_batch', set_samples), 'lost': '.x'},
    'persistent workers': {
        'train': loader(partial(Plain, add_noise), num_workers=2, persistent_workers=True),
        'lost': 'persistent',
    },
    'out of order': {'train': loader(num_workers=2, in_order=False), 'lost': 'in_order'},
}

# -- callbacks and fits ----------------------------------------------------------------------------

Pair = namedtuple('Pair', 'n other')


class Color(Enum):
    RED = 1
    GREEN = 2


@dataclass
class Count:
    n: int = 0


class Weigh(Callback):
    "Weighs the loss of training batches by what a subclass keeps."

    def weigh(self) -> Any:
        raise NotImplementedError

    def after_loss(self) -> None:
        if self.training:
            self.learn.loss_grad = self.learn.loss_grad * (1 + self.weigh() / 50)


class Plainly(Weigh):
    "Keeps values of many types that a checkpoint holds."

    def __init__(self) -> None:
        self.pair, self.color, self.space = Pair(0, 1), Color.RED, SimpleNamespace(n=0)
        self.numbers: set[float] = set()
        self.recent = deque([1.0], maxlen=3)
        self.order = 10
        self.array, self.scalar, self.is_first = np.zeros(2), np.float32(1), True

    def weigh(self) -> Any:
        self.pair = self.pair._replace(n=self.pair.n + 1)
        self.color = Color.GREEN if self.color is Color.RED else Color.RED
        self.space.n += 1
        self.numbers.add(self.pair.n * 7 % 11 + 0.5)
        self.recent.append(self.learn.loss_grad.item())
        self.array += 1
        self.scalar *= np.float32(1.1)
        if self.pair.n == 2:
            del self.is_first
        return self.pair.n + self.color.value + self.space.n + sum(self.recent) + len(vars(self))


class Jittering(Weigh):
    "Holds generators, and a callback that is not the Learner's own."

    def __init__(self, inner: Any = None) -> None:
        self.rngs, self.inner = [np.random.default_rng(5), random.Random(6)], inner

    def weigh(self) -> Any:
        return sum(float(g.random()) for g in self.rngs) + (self.inner.weigh() if self.inner else 0)


class InObject(Weigh):
    def __init__(self) -> None:
        self.count = Count()

    def weigh(self) -> int:
        self.count.n += 1
        return self.count.n


class InIterator(Weigh):
    def __init__(self) -> None:
        self.numbers = itertools.count()

    def weigh(self) -> int:
        return next(self.numbers)


class Follower(Weigh):
    "Averages the weights in a copy of the model."

    def before_fit(self) -> None:
        self.average = copy.deepcopy(self.learn.model)

    @torch.no_grad()
    def weigh(self) -> Tensor:
        pairs = list(zip(self.average.parameters(), self.model.parameters(), strict=True))
        for average, p in pairs:
            average.lerp_(p, 0.1)
        return pairs[0][0].abs().mean()


class Scheduler(Callback):
    "Steps a scheduler of torch."

    def before_fit(self) -> None:
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.opt.optimizers[''], 0.9)

    def after_batch(self) -> None:
        if self.training:
            self.scheduler.step()


class OnLearner(Weigh):
    def weigh(self) -> int:
        self.learn.n_weighed = vars(self.learn).get('n_weighed', 0) + 1
        return self.learn.n_weighed


class Unfreeze(Callback):
    "Trains the first layer after the first epoch, with half the rate."

    def before_fit(self) -> None:
        if not self.learn.resumed:
            next(self.model.parameters()).requires_grad_(False)

    def after_epoch(self) -> None:
        next(self.model.parameters()).requires_grad_(True)
        for group in self.opt.param_groups:
            group['lr'] *= 0.5


CALLBACKS: dict[str, dict[str, Any]] = {
    'none': {},
    'EMA, accumulation, bf16': {
        'cbs': (lambda: EMA(0.9), lambda: GradientAccumulation(8), lambda: MixedPrecision('bf16'))
    },
    'SAM': {'cbs': (SAM,)},
    'Plainly': {'cbs': (Plainly,)},
    'Jittering': {'cbs': (lambda: Jittering(Jittering()),)},
    'Unfreeze': {'cbs': (Unfreeze,)},
    'LBFGS': {'options': {'opt_func': torch.optim.LBFGS}},
    'InObject': {'cbs': (InObject,), 'lost': 'count'},
    'InIterator': {'cbs': (InIterator,), 'lost': 'numbers'},
    'Follower': {'cbs': (Follower,), 'lost': 'average'},
    'Scheduler': {'cbs': (Scheduler,), 'lost': 'scheduler'},
    'OnLearner': {'cbs': (OnLearner,), 'lost': 'n_weighed'},
}
FITS: dict[str, dict[str, Any]] = {
    'fit': {},
    'one cycle': {'fit': lambda learn, saver, **o: learn.fit_one_cycle(3, cbs=saver('a'), **o)},
    'budget': {'fit': lambda learn, saver, **o: learn.fit('14ba', cbs=saver('a'), **o)},
    'every epoch': {'every': '1ep'},
    'every 3 batches': {'every': '3ba'},
}
