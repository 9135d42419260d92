"""Set-ups whose training depends on state in unusual places, each trained, resumed in new objects, and judged."""

from __future__ import annotations

import csv
import functools
import io
import itertools
import random
import re
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
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
        Learner(dls, Shift() if model is None else model, loss, opt_func, lr=0.05, cbs=[*cbs], path=folder)
    )
    if set_up is not None:
        set_up(learn)
    return learn


def train(make_parts: Make, folder: Path, resume: Any = False) -> tuple[list[Any], list[str]]:
    "Train or resume; return the weights and the history, and what the first checkpoint warned of."
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        scramble(0)
        learn = make(folder, **make_parts())
        scramble(int(resume is not False))
        saver = Checkpoint('1ba', keep_last=None, background=False)
        learn.fit(N_EPOCH, cbs=saver, resume=resume)
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


def lines_of(folder: str = '/proc/self/limits') -> str:
    return ''.join(f'{i}\n' for i in range(100))


def draw_from(it: Any, number: Callable[[Any], Any]) -> Any:
    return number(next(it))


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
    import tempfile

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
    'in a list': (lambda: numbers(), float),
}


def in_callback(name: str) -> dict[str, Any]:
    create, number = ITERATORS[name]
    return {'cbs': [FromIterator(create(), number)]}
