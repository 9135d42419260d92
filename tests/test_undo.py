"""Undoing what happened to objects, in place."""
from __future__ import annotations

import random
import threading
from array import array
from collections import OrderedDict, defaultdict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from learnkit.data import DataLoaders
from learnkit.undo import Undo, unchanged_loaders


class Slotted:
    __slots__ = ('a', 'b')

    def __init__(self) -> None: self.a: Any = [1]


def spoil(kinds: dict[str, Any]) -> None:
    kinds['list'][1].append(3)
    kinds['list'][:] = []
    kinds['dict']['a']['c'] = 2
    kinds['set'].clear()
    kinds['deque'].extend([2, 3, 4])
    kinds['tuple'][0].append(2)
    kinds['ordered'].move_to_end('b')
    kinds['default']['z'].append(1)
    kinds['array'].append(2.)
    for name, change in (('bytes', b'c'), ('numpy', 1), ('tensor', 1)): kinds[name] += change
    kinds['object'].x.append(2)
    kinds['object'].y, kinds['slots'].a, kinds['slots'].b, kinds['none'], kinds['more'] = 1, 5, 6, 1, 2


def test_every_kind_of_content_is_written_back_into_the_same_object() -> None:
    kinds: dict[str, Any] = {
        'list': [1, [2]], 'dict': {'a': {'b': 1}}, 'set': {1, 2}, 'deque': deque([1], maxlen=3), 'tuple': ([1],),
        'ordered': OrderedDict(b=1, a=2), 'default': defaultdict(list, a=[1]), 'bytes': bytearray(b'ab'),
        'array': array('d', [1.]), 'numpy': np.zeros(2), 'tensor': torch.zeros(2), 'object': SimpleNamespace(x=[1]),
        'slots': Slotted(), 'none': None}
    inner = kinds['list'][1]
    noted = Undo([kinds])
    spoil(kinds)
    ids = {k: id(v) for k, v in kinds.items()}
    noted.undo()

    assert kinds['list'] == [1, [2]] and kinds['list'][1] is inner and kinds['dict'] == {'a': {'b': 1}}
    assert kinds['set'] == {1, 2} and kinds['deque'] == deque([1]) and kinds['tuple'] == ([1],)
    assert [*kinds['ordered']] == ['b', 'a'] and kinds['default'] == {'a': [1]} and kinds['bytes'] == b'ab'
    assert kinds['array'] == array('d', [1.]) and not kinds['numpy'].any() and not kinds['tensor'].any()
    assert vars(kinds['object']) == {'x': [1]} and kinds['slots'].a == [1]
    assert kinds['none'] is None and 'more' not in kinds
    assert all(id(kinds[k]) == i for k, i in ids.items() if k not in ('none', 'more'))


def test_tensors_keep_their_identity_flags_and_gradients() -> None:
    p, q, views = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)), torch.zeros(1).expand(3)
    p.grad = grad = torch.full((2,), 5.)
    noted = Undo([[p, q, views]])
    with torch.no_grad(): p.mul_(2)
    p.grad.zero_()
    p.grad, q.grad = None, torch.ones(2)
    q.requires_grad_(False)
    q.data = torch.zeros(7, dtype=torch.float64)
    noted.undo()
    assert p.grad is grad and grad.tolist() == [5., 5.] and p.tolist() == [1., 1.]
    assert q.requires_grad and q.grad is None and q.tolist() == [1., 1.] and q.dtype == torch.float32


def test_generators() -> None:
    a, b, c, d, e = (torch.Generator(), random.Random(0), np.random.default_rng(0), np.random.RandomState(0),
                     np.random.PCG64(0))
    def draw() -> list[Any]:
        return [torch.rand(1, generator=a).item(), b.random(), c.random(), d.rand(), e.random_raw()]
    noted = Undo([[a, b, c, d, e]])
    first = draw()
    noted.undo()
    assert draw() == first


def test_what_has_dealings_outside_stays_as_it_is(tmp_path: Path) -> None:
    queue = SimpleNamespace(lock=threading.Lock(), items=[1])
    with (tmp_path / 'log').open('w') as file:
        logger, counter, outside = SimpleNamespace(file=file, n=1), iter([1, 2]), [1]
        noted = Undo([[queue, logger, counter, outside]], but=[outside])
        for items in (queue.items, outside): items.append(2)
        next(counter)
        logger.n = 2
        noted.undo()
    assert queue.items == [1, 2] and logger.n == 2 and outside == [1, 2] and next(counter) == 2


def test_objects_that_lead_to_each_other() -> None:
    a: Any = SimpleNamespace(n=1)
    a.b = SimpleNamespace(a=a, n=1, me=[])
    a.b.me.append(a.b.me)
    noted = Undo([a])
    a.b.n, a.n = 2, 2
    noted.undo()
    assert a.n == a.b.n == 1


def test_a_long_chain_of_objects() -> None:
    last = chain = SimpleNamespace(n=1)
    for _ in range(5000): chain = SimpleNamespace(next=chain)
    noted = Undo([chain])
    last.n = 2
    noted.undo()
    assert last.n == 1


def test_persistent_workers_are_let_go() -> None:
    dl = DataLoader(list(range(8)), 2, shuffle=True, num_workers=1, persistent_workers=True)
    torch.manual_seed(0)
    with unchanged_loaders(DataLoaders(dl)): first = [b.tolist() for b in dl]
    assert dl._iterator is None
    assert [b.tolist() for b in dl] == first
    del dl
