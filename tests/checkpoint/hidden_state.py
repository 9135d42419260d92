"""Set-ups whose training depends on state in unusual places, each trained, resumed in new objects, and judged."""

import csv
import functools
import io
import itertools
import random
import re
import tempfile
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, WeightedRandomSampler

from learnkit import Callback, Checkpoint, DataLoaders, Learner
from tests.faults.run_helpers import quiet
from tests.helpers.resuming import scramble

N, BS, N_EPOCH, KILLED_AT = 12, 2, 2, 8
X = torch.randn(N, 1, generator=torch.Generator().manual_seed(0))
Make = Callable[[], dict[str, Any]]  # f(): the arguments of `make`, with objects of their own


class Rows(Dataset[Any]):
    "Samples that `change` changes."

    def __init__(self, change: Callable[[Any], Any] = float) -> None:
        self.change = change

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        x = X[i].clone()
        return x + 0.1 * float(self.change(x)), 2 * X[i]


class Weigh(Callback):
    "Weigh the loss of training batches by a number that a function draws."

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def weigh(self) -> Any:
        return self.draw()

    def after_loss(self) -> None:
        if self.training:
            self.learn.loss_grad = self.learn.loss_grad * (1 + float(self.weigh()) % 7 / 10)


class Shift(nn.Module):
    "A layer that shifts its inputs by what a subclass keeps."

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.set_up()

    def set_up(self) -> None:
        pass

    def shift(self) -> Any:
        return 0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + float(self.shift()) % 7 / 10 if self.training else x)


def make(
    folder: Path,
    model: nn.Module | None = None,
    loss: Any = nn.functional.mse_loss,
    rows: Any = None,
    cbs: Any = (),
    loader: Any = None,
    opt_func: Any = torch.optim.SGD,
    set_up: Callable[[Learner], None] | None = None,
    **options: Any,
) -> Learner:
    "Return a Learner of one set-up."
    torch.manual_seed(0)
    options = {'batch_size': BS, **options}
    train = DataLoader(Rows() if rows is None else rows, **options) if loader is None else loader
    dls = DataLoaders(train, DataLoader(Rows(), BS), device='cpu')
    learn = quiet(
        Learner(
            dls,
            Shift() if model is None else model,
            loss,
            opt_func,
            lr=0.05,
            cbs=[*cbs],
            path=folder,
        )
    )
    if set_up is not None:
        set_up(learn)
    return learn


class CheckpointTwice(Checkpoint):
    "Save after the first batch, which warns, and where the run is killed."

    def __init__(self) -> None:
        super().__init__('1ba', keep_last=None, background=False)

    def batch_checkpoint(self) -> None:
        if self.time.ba in (1, KILLED_AT):
            super().batch_checkpoint()

    def epoch_checkpoint(self) -> None:
        pass


def train(make_parts: Make, folder: Path, resume: Any = False) -> tuple[list[Any], list[str]]:
    "Train or resume; return the weights and the history, and what the first checkpoint warned of."
    with warnings.catch_warnings(record=True) as caught, redirect_stdout(io.StringIO()):
        warnings.simplefilter('always')
        scramble(0)
        learn = make(folder, **make_parts())
        scramble(int(resume is not False))
        learn.fit(N_EPOCH, cbs=CheckpointTwice(), resume=resume)
    weights = [p.tolist() for p in learn.model.parameters()]
    losses = [(row['train_loss'], row['valid_loss']) for row in learn.history]
    lines = [line for w in caught for line in str(w.message).splitlines()]
    return [*weights, *losses], lines


def judge(make_parts: Make, folder: Path, expected: str = '') -> str:
    """Return 'exact', 'named' or 'silent' for a run that is resumed in new objects; 'false alarm' if exact, but named.

    With `expected`, 'named' only if a line of the first checkpoint's warning contains it."""
    straight, lines = train(make_parts, folder)
    (checkpoint,) = folder.glob(f'checkpoints/*-ba{KILLED_AT}.ckpt')
    resumed, _ = train(make_parts, folder, checkpoint)
    is_named = any(expected in line for line in lines)
    if straight == resumed:
        return 'false alarm' if lines else 'exact'
    return 'named' if is_named and lines else 'silent'


# -- iterators -------------------------------------------------------------------------------------


class Bare:
    "An iterator that keeps its position where no attribute shows it."

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        return next(_position)


class Slotted:
    "An iterator without attributes that can be read."

    __slots__ = ()

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        return next(_position)


class Counted:
    "An iterator that counts in an attribute."

    def __init__(self) -> None:
        self.n = 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        self.n += 1
        return self.n


_position: Iterator[int] = itertools.count()


def restart(kind: type) -> Any:
    global _position
    _position = itertools.count()
    return kind()


def numbers() -> Iterator[int]:
    yield from range(1000)


def lines_of() -> str:
    return ''.join(f'{i}\n' for i in range(100))


class FromIterator(Weigh):
    "Draw from an iterator."

    def __init__(self, it: Any, number: Callable[[Any], Any] = float) -> None:
        self.it, self.number = it, number

    def weigh(self) -> Any:
        return self.number(next(self.it))


def frame() -> Any:
    import pandas as pd

    return pd.DataFrame({'a': range(40)})


def text_file() -> Any:
    file = tempfile.TemporaryFile('w+')  # noqa: SIM115
    file.write(''.join(f'{i}\n' for i in range(100)))
    file.seek(0)
    return file.file if hasattr(file, 'file') else file


def first(item: Any) -> float:
    return float(item[0])


MANY = list(range(100))
ITERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    'generator': (numbers, float),
    'generator expression': (lambda: (i for i in MANY), float),
    'iter(DataLoader)': (lambda: iter(DataLoader(MANY)), float),
    'enumerate': (lambda: enumerate(MANY), first),
    'zip': (lambda: zip(MANY, MANY, strict=True), first),
    'map': (lambda: map(float, MANY), float),
    'filter': (lambda: filter(None, MANY), float),
    'iter(list)': (lambda: iter(MANY), float),
    'iter(tuple)': (lambda: iter(tuple(MANY)), float),
    'iter(range)': (lambda: iter(range(100)), float),
    'iter(dict)': (lambda: iter(dict.fromkeys(MANY)), float),
    'iter(dict.items())': (lambda: iter(dict.fromkeys(MANY).items()), first),
    'iter(set)': (lambda: iter(set(MANY)), float),
    'iter(str)': (lambda: iter('0123456789' * 9), float),
    'iter(bytes)': (lambda: iter(bytes(MANY)), float),
    'iter(deque)': (lambda: iter(deque(MANY)), float),
    'iter(tensor)': (lambda: iter(torch.arange(100)), float),
    'iter(array)': (lambda: iter(np.arange(100)), float),
    'iter(function, end)': (lambda: iter(functools.partial(next, iter(MANY)), -1), float),
    'reversed': (lambda: reversed(MANY), float),
    'count': (itertools.count, float),
    'cycle': (lambda: itertools.cycle(MANY), float),
    'chain': (lambda: itertools.chain(MANY, MANY), float),
    'islice': (lambda: itertools.islice(MANY, 50), float),
    'accumulate': (lambda: itertools.accumulate(MANY), float),
    'product': (lambda: itertools.product(MANY, MANY), lambda item: float(item[1])),
    'permutations': (lambda: itertools.permutations(range(9)), lambda item: float(item[-1])),
    'pairwise': (lambda: itertools.pairwise(MANY), first),
    'takewhile': (lambda: itertools.takewhile(lambda i: i < 90, MANY), float),
    'tee': (lambda: itertools.tee(MANY)[0], float),
    'file': (text_file, float),
    'StringIO': (lambda: io.StringIO(lines_of()), float),
    'csv.reader': (lambda: csv.reader(lines_of().splitlines()), first),
    're.finditer': (lambda: re.finditer(r'\d+', lines_of()), lambda m: float(m.group())),
    'np.nditer': (lambda: np.nditer(np.arange(100)), float),
    'DataFrame.iterrows': (lambda: frame().iterrows(), lambda row: float(row[1].iloc[0])),
    'DataFrame.itertuples': (lambda: frame().itertuples(), first),
    'DataFrame.items': (lambda: iter(frame().T.items()), lambda item: float(item[0])),
    'bare class': (lambda: restart(Bare), float),
    'class with slots': (lambda: restart(Slotted), float),
    'class that counts': (Counted, float),
}


def in_callback(name: str) -> dict[str, Any]:
    create, number = ITERATORS[name]
    return {'cbs': [FromIterator(create(), number)]}


# -- other places ----------------------------------------------------------------------------------


def closure_of(draw: Callable[[], Any]) -> Callable[..., float]:
    return lambda *_: float(draw())


def data_closure_torch() -> dict[str, Any]:
    g = torch.Generator().manual_seed(1)
    return {'rows': Rows(closure_of(lambda: torch.rand(1, generator=g)))}


def data_closure_numpy() -> dict[str, Any]:
    g = np.random.default_rng(1)
    return {'rows': Rows(closure_of(g.random))}


def data_bound_method() -> dict[str, Any]:
    rows = Rows()
    rows.draw = random.Random(1).random  # type: ignore[attr-defined]
    rows.change = lambda x: rows.draw()  # type: ignore[attr-defined]
    return {'rows': rows}


def collate_closure() -> dict[str, Any]:
    g = random.Random(2)

    def collate(samples: list[Any]) -> Any:
        x, y = torch.utils.data.default_collate(samples)
        return x + g.random(), y

    return {'collate_fn': collate}


class WeightsSetter(Callback):
    "Set the weights of a sampler by the loss."

    def __init__(self, in_place: bool) -> None:
        self.in_place = in_place

    def after_batch(self) -> None:
        if not self.training:
            return
        sampler = self.dls.train.sampler
        if self.in_place:
            sampler.weights[self.iter] += 5
        else:
            sampler.weights = sampler.weights + torch.eye(N)[self.iter].double() * 5


def sampler_weights(in_place: bool) -> dict[str, Any]:
    sampler = WeightedRandomSampler(torch.ones(N), N)
    return {'sampler': sampler, 'cbs': [WeightsSetter(in_place)]}


class LeafTensor(Weigh):
    def __init__(self) -> None:
        self.t = torch.zeros(1, requires_grad=True)

    @torch.no_grad()
    def weigh(self) -> Any:
        return self.t.add_(1)


class LeafTensorInData(Rows):
    def __init__(self) -> None:
        super().__init__(self.draw)
        self.t = torch.zeros(1, requires_grad=True)

    @torch.no_grad()
    def draw(self, x: Any) -> Any:
        return self.t.add_(1)


class SlotsInCallback(Weigh):
    __slots__ = ('n',)

    def __init__(self) -> None:
        self.n = 0

    def weigh(self) -> int:
        self.n += 1
        return self.n


class SlotsTransform:
    __slots__ = ('n',)

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, x: Any) -> int:
        self.n += 1
        return self.n


class SlotsCollate:
    __slots__ = ('n',)

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, samples: list[Any]) -> Any:
        self.n += 1
        x, y = torch.utils.data.default_collate(samples)
        return x + self.n / 10, y


class KeptSet(Weigh):
    def __init__(self) -> None:
        self.items = set[int]()

    def weigh(self) -> int:
        if not self.items:
            self.items |= set(range(100))
            self.items -= set(range(100)) - {3, 8}  # 3 is first; in a new set 8 is
        return next(iter(self.items))


class Color(Enum):
    RED = 1
    GREEN = 2


class EnumList(Weigh):
    def __init__(self) -> None:
        self.colors = [Color.RED, Color.GREEN, Color.RED]

    def weigh(self) -> int:
        self.colors[2] = Color.GREEN if self.colors[2] is Color.RED else Color.RED
        self.colors.append(Color.RED)
        return self.colors[2].value + len(self.colors)


class EnumDict(Weigh):
    def __init__(self) -> None:
        self.counts = {Color.RED: 0}

    def weigh(self) -> int:
        self.counts[Color.RED] += 1
        return self.counts[Color.RED]


class Views(Weigh):
    "Two attributes that share memory."

    def __init__(self) -> None:
        self.whole = torch.zeros(4)
        self.head = self.whole[:2]

    def weigh(self) -> Any:
        self.head.add_(1)
        return self.whole.sum()


class SharedList(Weigh):
    "Two attributes that are one list."

    def __init__(self) -> None:
        self.one = self.two = list[int]()

    def weigh(self) -> int:
        self.one.append(1)
        return len(self.two)


def hooked(pre: bool = False, iterator: bool = False) -> dict[str, Any]:
    model, counts, it = Shift(), [0], itertools.count()

    def count(m: Any, x: Any, *out: Any) -> Any:
        counts[0] += 1
        value = next(it) if iterator else counts[0]
        return (x[0] + value % 5 / 9,) if pre else out[0] + value % 5 / 9

    layer = model.layer
    (layer.register_forward_pre_hook if pre else layer.register_forward_hook)(count)
    return {'model': model}


def tensor_hook() -> dict[str, Any]:
    model, counts = Shift(), [0]

    def scale(grad: Tensor) -> Tensor:
        counts[0] += 1
        return grad * (1 + counts[0] % 5 / 9)

    model.layer.weight.register_hook(scale)
    return {'model': model}


def forward_replaced() -> dict[str, Any]:
    model, counts = Shift(), [0]
    forward = model.forward

    def counting(x: Tensor) -> Tensor:
        counts[0] += 1
        return forward(x) * (1 + counts[0] % 5 / 9)

    model.forward = counting  # type: ignore[method-assign]
    return {'model': model}


class SetsBatchSize(Callback):
    "Change the batch size in an epoch."

    def after_epoch(self) -> None:
        self.dls.train.batch_sampler.batch_size = 3


class ReplacesLoader(Callback):
    "Replace the training loader by one of another batch size."

    def before_epoch(self) -> None:
        self.learn.dls.train = DataLoader(Rows(), 2 + 2 * self.epoch)


def counting_class(base: type) -> type:
    "Return a subclass that counts on itself."
    return type('CountsOnClass', (base,), {'n': 0})


def count_on(kind: Any) -> int:
    kind.n += 1
    return int(kind.n)


def on_model_class() -> dict[str, Any]:
    kind = counting_class(Shift)
    kind.shift = lambda self: count_on(kind)  # type: ignore[attr-defined]
    return {'model': kind()}


def on_data_class() -> dict[str, Any]:
    kind = counting_class(Rows)
    return {'rows': kind(lambda x: count_on(kind))}


class OwnOrder(Sampler[int]):
    def __init__(self) -> None:
        self.set_up()

    def __len__(self) -> int:
        return N

    def set_up(self) -> None:
        pass

    def seed(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Iterator[int]:
        yield from random.Random(self.seed()).sample(range(N), N)


def on_sampler_class() -> dict[str, Any]:
    kind = counting_class(OwnOrder)
    kind.seed = lambda self: count_on(kind)  # type: ignore[attr-defined]
    return {'sampler': kind()}


def on_callback_class() -> dict[str, Any]:
    kind = counting_class(Weigh)
    kind.weigh = lambda self: count_on(kind)  # type: ignore[attr-defined]
    return {'cbs': [kind()]}


def iterator_on_class() -> dict[str, Any]:
    it = itertools.count()
    kind = type('Ids', (Shift,), {'ids': it, 'shift': lambda self: next(it)})
    return {'model': kind()}


class TextInSampler(OwnOrder):
    def set_up(self) -> None:
        self.text = ''

    def seed(self) -> int:
        self.text += 'a'
        return len(self.text)


class ListInSampler(OwnOrder):
    def set_up(self) -> None:
        self.passes = list[int]()

    def seed(self) -> int:
        self.passes.append(1)
        return len(self.passes)


class SecondLearner(Weigh):
    "Train another Learner."

    def __init__(self, folder: str = '.') -> None:
        dls = DataLoaders(DataLoader(Rows(), 6), DataLoader(Rows(), 6), device='cpu')
        torch.manual_seed(3)
        self.other = quiet(Learner(dls, nn.Linear(1, 1), nn.functional.mse_loss, lr=0.1))

    def weigh(self) -> Any:
        self.other.fit(1)
        return abs(self.other.model.weight.item()) * 9


class SecondOptimizer(Weigh):
    "Step an optimizer of a vector."

    def __init__(self) -> None:
        self.vector = torch.zeros(1, requires_grad=True)
        self.opt2 = torch.optim.Adam([self.vector], 0.1)

    def weigh(self) -> Any:
        (self.vector - 3).square().sum().backward()
        self.opt2.step()
        self.opt2.zero_grad()
        return self.vector.detach().abs() * 9


class Scheduler(Callback):
    def before_fit(self) -> None:
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.opt.optimizers[''], lambda n: 1 / (1 + n)
        )

    def after_batch(self) -> None:
        if self.training:
            self.scheduler.step()


def module_with(value: Any, draw: Callable[[Any], Any]) -> dict[str, Any]:
    model = Shift()
    model.kept = value
    model.shift = functools.partial(draw, model)  # type: ignore[method-assign]
    return {'model': model}


def append(m: Any) -> int:
    m.kept.append(1)
    return sum(m.kept)


def add_text(m: Any) -> int:
    m.kept += 'a'
    return len(m.kept)


def add_decimal(m: Any) -> Any:
    m.kept += Decimal('0.7')
    return m.kept


def add_field(m: Any) -> int:
    m.kept.n += 1
    return int(m.kept.n)


def move_to_end(m: Any) -> int:
    m.kept.move_to_end(next(iter(m.kept)))
    return next(iter(m.kept)) + 1


def add_byte(m: Any) -> int:
    m.kept.append(1)
    return len(m.kept)


def add_in_place(m: Any) -> float:
    m.kept[0] += 1
    return float(m.kept[0])


@torch.no_grad()
def add_to_parameter(m: Any) -> float:
    return float(m.kept[0].add_(1))


class DeletesAttribute(Shift):
    def set_up(self) -> None:
        self.is_first = 3

    def shift(self) -> int:
        if hasattr(self, 'is_first'):
            del self.is_first
            return 5
        return 1


def mutable_default() -> dict[str, Any]:
    def loss(pred: Tensor, y: Tensor, counts: list[int] = [0]) -> Tensor:  # noqa: B006
        counts[0] += pred.requires_grad
        return (pred - y).square().mean() * (1 + counts[0] % 5 / 9)

    loss.__defaults__ = ([0],)
    return {'loss': loss}


def attribute_of_function() -> dict[str, Any]:
    def loss(pred: Tensor, y: Tensor) -> Tensor:
        loss.n += pred.requires_grad  # type: ignore[attr-defined]
        return (pred - y).square().mean() * (1 + loss.n % 5 / 9)  # type: ignore[attr-defined]

    loss.n = 0  # type: ignore[attr-defined]
    return {'loss': loss}


def loss_closure() -> dict[str, Any]:
    it = itertools.count()

    def loss(pred: Tensor, y: Tensor) -> Tensor:
        n = next(it) if pred.requires_grad else 0
        return (pred - y).square().mean() * (1 + n % 5 / 9)

    return {'loss': loss}


class LossObject:
    "A loss that is no module."

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, pred: Tensor, y: Tensor) -> Tensor:
        self.n += pred.requires_grad
        return (pred - y).square().mean() * (1 + self.n % 5 / 9)


def data_partial() -> dict[str, Any]:
    def draw(counts: list[int], x: Any) -> int:
        counts[0] += 1
        return counts[0] % 5

    return {'rows': Rows(functools.partial(draw, [0]))}


class Node:
    def __init__(self, inner: Any = None) -> None:
        self.inner, self.n = inner, 0

    def __call__(self, x: Any) -> int:
        if self.inner is not None:
            return int(self.inner(x))
        self.n += 1
        return self.n % 5


def nested(depth: int) -> Node:
    node = Node()
    for _ in range(depth):
        node = Node(node)
    return node


class SetsEachEpoch(Callback):
    "Set the loss function, and an attribute of the model by the epoch."

    def before_epoch(self) -> None:
        self.learn.loss_func = nn.functional.l1_loss
        self.model.kept = self.epoch + 1


class CountsEpochs(Callback):
    "Count in an attribute of the model."

    def before_epoch(self) -> None:
        self.model.kept += 1


class SavesEntry(Shift):
    "Keep a count in an entry of the state dict, by the methods of torch for it."

    def set_up(self) -> None:
        self.n = 0

    def shift(self) -> int:
        self.n += 1
        return self.n

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f'{prefix}n'] = torch.tensor(self.n)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.n = int(state_dict.pop(f'{prefix}n'))
        super()._load_from_state_dict(state_dict, prefix, *args)


class CarriesHidden(Shift):
    "Continue from the output of the batch before, which is detached when it is used."

    def set_up(self) -> None:
        self.h = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x + self.h.detach())
        if self.training:
            self.h = out.mean().reshape(1)
        return out


class InList(Rows):
    "Keep a count in a list, of a number of entries."

    def __init__(self, n: int) -> None:
        super().__init__(self.draw)
        self.a = [0] * n

    def draw(self, x: Any) -> Any:
        self.a[0] += 1
        return self.a[0] % 5


class InArray(Rows):
    def __init__(self, n: int) -> None:
        super().__init__(self.draw)
        self.a = np.zeros(n)

    def draw(self, x: Any) -> Any:
        self.a[0] += 1
        return self.a[0] % 5


class InQueue(Weigh):
    "Keep a number in an object of an installed package."

    def __init__(self) -> None:
        from queue import Queue

        self.queue: Queue[int] = Queue()

    def weigh(self) -> int:
        self.queue.put(1)
        return self.queue.qsize()


@dataclass
class Count:
    n: int = 0


class InDataclass(Weigh):
    def __init__(self) -> None:
        self.count = Count()

    def weigh(self) -> int:
        self.count.n += 1
        return self.count.n


class Drawing:
    "Has a generator, which is restored, and a count, which is not."

    def __init__(self) -> None:
        self.rng, self.n = random.Random(1), 0

    def draw(self) -> float:
        self.n += 1
        return self.rng.random() + self.n


class InDrawing(Weigh):
    def __init__(self) -> None:
        self.drawing = Drawing()

    def weigh(self) -> float:
        return self.drawing.draw()


def function_callback() -> dict[str, Any]:
    counts = [0]

    def weigh(cb: Any) -> None:
        if cb.training:
            counts[0] += 1
            cb.learn.loss_grad = cb.learn.loss_grad * (1 + counts[0] % 5 / 9)

    return {'cbs': [Callback(after_loss=weigh)]}


def function_attribute() -> dict[str, Any]:
    def weigh(cb: Any) -> None:
        if cb.training:
            cb.n = vars(cb).get('n', 0) + 1
            cb.learn.loss_grad = cb.learn.loss_grad * (1 + cb.n % 5 / 9)

    return {'cbs': [Callback(after_loss=weigh)]}


class OnLearner(Weigh):
    def weigh(self) -> int:
        self.learn.n_weighed = vars(self.learn).get('n_weighed', 0) + 1
        return self.learn.n_weighed


class IteratorOnLearner(Weigh):
    def before_fit(self) -> None:
        self.learn.numbers = itertools.count()

    def weigh(self) -> int:
        return next(self.learn.numbers)


class TensorOnLearner(Weigh):
    def before_fit(self) -> None:
        self.learn.total = torch.zeros(1)

    def weigh(self) -> Tensor:
        self.learn.total = self.learn.total + 1
        return self.learn.total


class CountingSGD(torch.optim.SGD):
    n = 0

    def step(self, closure: Any = None) -> Any:
        self.n += 1
        for group in self.param_groups:
            group['lr'] = 0.05 / (1 + self.n % 5)
        return super().step(closure)


class WithState(Weigh):
    "Leave an attribute out of its state."

    def __init__(self) -> None:
        self.n = 0

    def weigh(self) -> int:
        self.n += 1
        return self.n

    def state_dict(self) -> dict[str, int]:
        return {'other': 1}

    def load_state_dict(self, sd: Any) -> None:
        pass


class LateCount(Weigh):
    "Count only after the first checkpoint."

    def __init__(self) -> None:
        self.count = Count()

    def weigh(self) -> int:
        if self.train_iter > 3:
            self.count.n += 1
        return self.count.n


class Cached(Rows):
    "Keep random samples in a dict."

    def __init__(self) -> None:
        super().__init__(self.draw)
        self.cache: dict[float, float] = {}

    def draw(self, x: Any) -> float:
        return self.cache.setdefault(float(x), random.random() * 5)


def lru_cached() -> dict[str, Any]:
    @functools.lru_cache
    def draw(x: float) -> float:
        return random.random() * 5

    return {'rows': Rows(lambda x: draw(float(x)))}


_counts = [0]


def count_globally() -> int:
    _counts[0] += 1
    return _counts[0]


def with_global() -> dict[str, Any]:
    _counts[0] = 0
    return {'cbs': [Weigh(draw=count_globally)]}


class InValidation(Rows):
    "Count samples of the validation, which a callback reads."

    n = 0

    def __getitem__(self, i: int) -> Any:
        self.n += 1
        return super().__getitem__(i)


class ReadsValidation(Weigh):
    def before_fit(self) -> None:
        self.dls.valid.dataset.__class__ = InValidation

    def weigh(self) -> int:
        return self.dls.valid.dataset.n + 1


class PrivateOnLearner(Weigh):
    def weigh(self) -> int:
        self.learn._n_weighed = vars(self.learn).get('_n_weighed', 0) + 1
        return self.learn._n_weighed


def tensor_in_hook() -> dict[str, Any]:
    model, kept = Shift(), [torch.zeros(1)]

    def add(m: Any, x: Any, out: Tensor) -> Tensor:
        kept[0] = kept[0] + 1
        return out + kept[0] % 5 / 9

    model.layer.register_forward_hook(add)
    return {'model': model}


def on_inner_class() -> dict[str, Any]:
    kind = type('Inner', (), {'n': 0, '__call__': lambda self, x: count_on(kind) % 5})
    return {'rows': Rows(kind())}


class LoaderWithState:
    "Leave a count out of its state."

    def __init__(self) -> None:
        self.n = 0

    def __len__(self) -> int:
        return N // BS

    def __iter__(self) -> Iterator[Any]:
        self.n += 1
        for ids in torch.arange(N).split(BS):
            yield X[ids] + self.n, 2 * X[ids]

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, sd: Any) -> None:
        pass


class LazyList(OwnOrder):
    "Make a list in its first pass."

    def seed(self) -> int:
        self.passes = [*vars(self).get('passes', []), 1]
        return len(self.passes)


def in_file() -> dict[str, Any]:
    path = Path(tempfile.mkstemp()[1])

    def draw() -> int:
        path.write_text(f'{path.read_text()}a')
        return len(path.read_text())

    return {'cbs': [Weigh(draw=draw)]}


class IteratorInModule(Shift):
    def set_up(self) -> None:
        self.numbers = numbers()

    def shift(self) -> int:
        return next(self.numbers)


class IteratorInData(Rows):
    def __init__(self) -> None:
        super().__init__(lambda x: next(self.numbers) % 5)
        self.numbers = numbers()


class IteratorInSampler(OwnOrder):
    def set_up(self) -> None:
        self.seeds = itertools.count()

    def seed(self) -> int:
        return next(self.seeds)


class CollateIterator:
    def __init__(self) -> None:
        self.numbers = zip(MANY, MANY, strict=True)

    def __call__(self, samples: list[Any]) -> Any:
        x, y = torch.utils.data.default_collate(samples)
        return x + next(self.numbers)[0] % 5 / 9, y


def bound_next() -> dict[str, Any]:
    return {'cbs': [Weigh(draw=itertools.count().__next__)]}


def iterator_in_closure() -> dict[str, Any]:
    it = numbers()
    return {'cbs': [Weigh(draw=lambda: next(it))]}


def iterator_in_list() -> dict[str, Any]:
    cb = Weigh(its=[numbers()])
    cb.draw = lambda: next(cb.its[0])
    return {'cbs': [cb]}


EXACT: dict[str, Make] = {
    'slots of a callback': lambda: {'cbs': [SlotsInCallback()]},
    'batch size set by a callback': lambda: {'cbs': [SetsBatchSize()]},
    'loader replaced in each epoch': lambda: {'cbs': [ReplacesLoader()]},
    'attribute of a function as callback': function_attribute,
    'set in each epoch': lambda: {**module_with(1, lambda m: m.kept), 'cbs': [SetsEachEpoch()]},
    'own entry of the state dict': lambda: {'model': SavesEntry()},
    'generator in a dict of a module': lambda: module_with(
        {'g': random.Random(1)}, lambda m: m.kept['g'].random() * 5
    ),
}
NAMED: dict[str, tuple[Make, str]] = {
    'torch generator in a closure of the data': (data_closure_torch, 'dataset.change'),
    'NumPy generator in a closure of the data': (data_closure_numpy, 'dataset.change'),
    'bound method of a generator in the data': (data_bound_method, 'dataset.draw'),
    'generator in a closure of collate_fn': (collate_closure, 'training loader.collate_fn'),
    'weights of a sampler set': (lambda: sampler_weights(False), 'sampler.weights'),
    'weights of a sampler changed': (lambda: sampler_weights(True), 'sampler.weights'),
    'leaf tensor with requires_grad': (lambda: {'cbs': [LeafTensor()]}, 'LeafTensor.t'),
    'leaf tensor in the data': (lambda: {'rows': LeafTensorInData()}, 'dataset.t'),
    'slots of a transform': (lambda: {'rows': Rows(SlotsTransform())}, 'dataset.change'),
    'slots of collate_fn': (lambda: {'collate_fn': SlotsCollate()}, 'collate_fn.n'),
    'list of enums': (lambda: {'cbs': [EnumList()]}, 'EnumList.colors'),
    'dict with enums': (lambda: {'cbs': [EnumDict()]}, 'EnumDict.counts'),
    'closure of a forward hook': (hooked, '_forward_hooks'),
    'closure of a forward pre-hook': (lambda: hooked(pre=True), '_forward_pre_hooks'),
    'iterator in a forward hook': (lambda: hooked(iterator=True), '_forward_hooks'),
    'closure of a replaced forward': (forward_replaced, 'model.forward'),
    'count on the class of the model': (on_model_class, 'CountsOnClass.n'),
    'count on the class of the data': (on_data_class, 'CountsOnClass.n'),
    'count on the class of the sampler': (on_sampler_class, 'CountsOnClass.n'),
    'count on the class of a callback': (on_callback_class, 'CountsOnClass.n'),
    'iterator on the class of the model': (iterator_on_class, 'Ids.ids'),
    'string of a sampler': (lambda: {'sampler': TextInSampler()}, 'sampler.text'),
    'list of a sampler': (lambda: {'sampler': ListInSampler()}, 'sampler.passes'),
    'second Learner': (lambda: {'cbs': [SecondLearner()]}, 'SecondLearner.other'),
    'second optimizer': (lambda: {'cbs': [SecondOptimizer()]}, 'SecondOptimizer.opt2'),
    'scheduler of torch': (lambda: {'cbs': [Scheduler()]}, 'Scheduler.scheduler'),
    'deque of a module': (lambda: module_with(deque([0], 5), append), 'model.kept'),
    'string of a module': (lambda: module_with('', add_text), 'model.kept'),
    'Decimal of a module': (lambda: module_with(Decimal(0), add_decimal), 'model.kept'),
    'namespace of a module': (lambda: module_with(SimpleNamespace(n=0), add_field), 'model.kept'),
    'order of an OrderedDict': (
        lambda: module_with(OrderedDict.fromkeys(range(3)), move_to_end),
        'model.kept',
    ),
    'bytearray of a module': (lambda: module_with(bytearray(), add_byte), 'model.kept'),
    'list of the data': (lambda: {'rows': InList(100_000)}, 'dataset.a'),
    'array of a module': (lambda: module_with(np.zeros(2), add_in_place), 'model.kept'),
    'parameter in a list': (
        lambda: module_with([nn.Parameter(torch.zeros(1))], add_to_parameter),
        'model.kept',
    ),
    'default of a function': (mutable_default, 'loss_func'),
    'attribute of a function': (attribute_of_function, 'loss_func'),
    'iterator in a loss': (loss_closure, 'loss_func'),
    'attribute of a loss': (lambda: {'loss': LossObject()}, 'loss_func'),
    'partial function of the data': (data_partial, 'dataset.change'),
    'nested objects': (lambda: {'rows': Rows(nested(12))}, 'dataset.change'),
    'objects nested deeper than Python recurses': (
        lambda: {'rows': Rows(nested(300))},
        'dataset.change',
    ),
    'array of the data': (lambda: {'rows': InArray(4)}, 'dataset.a'),
    'dataclass': (lambda: {'cbs': [InDataclass()]}, 'InDataclass.count'),
    'object with a generator and a count': (lambda: {'cbs': [InDrawing()]}, 'InDrawing.drawing'),
    'closure of a function as callback': (function_callback, 'Callback.after_loss'),
    'number of the Learner': (lambda: {'cbs': [OnLearner()]}, 'learn.n_weighed'),
    'iterator of the Learner': (lambda: {'cbs': [IteratorOnLearner()]}, 'learn.numbers'),
    'attribute of an optimizer': (lambda: {'opt_func': CountingSGD}, 'CountingSGD.n'),
    'iterator of a module': (lambda: {'model': IteratorInModule()}, 'model.numbers'),
    'iterator of the data': (lambda: {'rows': IteratorInData()}, 'dataset.numbers'),
    'iterator of a sampler': (lambda: {'sampler': IteratorInSampler()}, 'sampler.seeds'),
    'iterator of collate_fn': (lambda: {'collate_fn': CollateIterator()}, 'collate_fn.numbers'),
    'bound method of an iterator': (bound_next, 'Weigh.draw'),
    'iterator in a closure': (iterator_in_closure, 'Weigh.draw'),
    'iterator in a list': (iterator_in_list, 'Weigh.its'),
}
# the rows of "What it does not look at" in docs/checkpoints.md
UNSEEN: dict[str, Make] = {
    'global variable': with_global,
    'large array': lambda: {'rows': InArray(1 << 18)},
    'long list or dict': lambda: {'rows': InList(100_001)},
    'object of an installed package': lambda: {'cbs': [InQueue()]},
    'cache of the data': lambda: {'rows': Cached()},
    'lru_cache': lru_cached,
    'order of a set': lambda: {'cbs': [KeptSet()]},
    'shared memory': lambda: {'cbs': [Views()]},
    'one list in two attributes': lambda: {'cbs': [SharedList()]},
    'hook of a tensor': tensor_hook,
    'tensor of the Learner': lambda: {'cbs': [TensorOnLearner()]},
    'private attribute of the Learner': lambda: {'cbs': [PrivateOnLearner()]},
    'tensor in a hook': tensor_in_hook,
    'class of an object in an attribute': on_inner_class,
    'loader with `load_state_dict`': lambda: {'loader': LoaderWithState()},
    'first made by a sampler': lambda: {'sampler': LazyList()},
    'outside of the process': in_file,
    'deleted attribute': lambda: {'model': DeletesAttribute()},
    'what a state_dict leaves out': lambda: {'cbs': [WithState()]},
    'validation data': lambda: {'cbs': [ReadsValidation()]},
    'hidden state with its graph': lambda: {'model': CarriesHidden()},
    'counted in `before_epoch`': lambda: {
        **module_with(0, lambda m: m.kept),
        'cbs': [CountsEpochs()],
    },
    'after the first checkpoint': lambda: {'cbs': [LateCount()]},
}
