"""Undo changes of objects, in place."""

import random
from collections import OrderedDict, defaultdict, deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from fastcore.foundation import L
from torch import nn
from torch.utils.data import DataLoader

from learnkit.data.dataloaders import DataLoaders
from learnkit.engine.callback import Callback
from learnkit.engine.snapshot import Snapshot, preserve_dataloaders, preserved_forward
from learnkit.metrics.base import Mean, Metric


def spoil(kinds: dict[str, Any]) -> None:
    kinds['list'][1].append(3)
    kinds['list'][:] = []
    kinds['dict']['a']['c'] = 2
    kinds['set'].clear()
    kinds['deque'].extend([2, 3, 4])
    kinds['tuple'][0].append(2)
    kinds['ordered'].move_to_end('b')
    kinds['default']['z'].append(1)
    for name, change in (('numpy', 1), ('tensor', 1)):
        kinds[name] += change
    kinds['none'], kinds['more'] = 1, 2


def test_every_kind_of_content_is_written_back_into_the_same_object() -> None:
    kinds: dict[str, Any] = {
        'list': [1, [2]],
        'dict': {'a': {'b': 1}},
        'set': {1, 2},
        'deque': deque([1], maxlen=3),
        'tuple': ([1],),
        'ordered': OrderedDict(b=1, a=2),
        'default': defaultdict(list, a=[1]),
        'numpy': np.zeros(2),
        'tensor': torch.zeros(2),
        'none': None,
    }
    inner = kinds['list'][1]
    noted = Snapshot([kinds])
    spoil(kinds)
    ids = {k: id(v) for k, v in kinds.items()}
    noted.undo()

    assert (
        kinds['list'] == [1, [2]] and kinds['list'][1] is inner and kinds['dict'] == {'a': {'b': 1}}
    )
    assert kinds['set'] == {1, 2} and kinds['deque'] == deque([1]) and kinds['tuple'] == ([1],)
    assert [*kinds['ordered']] == ['b', 'a']
    assert kinds['default'] == {'a': [1]}
    assert not kinds['numpy'].any()
    assert not kinds['tensor'].any()
    assert kinds['none'] is None and 'more' not in kinds
    assert all(id(kinds[k]) == i for k, i in ids.items() if k not in ('none', 'more'))


def test_tensors_keep_their_identity_flags_and_gradients() -> None:
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    p.grad = grad = torch.full((2,), 5.0)
    noted = Snapshot([[p, q]])
    with torch.no_grad():
        p.mul_(2)
    p.grad.zero_()
    p.grad, q.grad = None, torch.ones(2)
    q.requires_grad_(False)
    q.data = torch.zeros(7, dtype=torch.float64)
    noted.undo()
    assert p.grad is grad and grad.tolist() == [5.0, 5.0] and p.tolist() == [1.0, 1.0]
    assert (
        q.requires_grad and q.grad is None and q.tolist() == [1.0, 1.0] and q.dtype == torch.float32
    )


def test_generators() -> None:
    a = torch.Generator()
    b = random.Random(0)
    c = np.random.default_rng(0)
    d = np.random.RandomState(0)
    e = np.random.PCG64(0)

    def draw() -> list[Any]:
        return [torch.rand(1, generator=a).item(), b.random(), c.random(), d.rand(), e.random_raw()]

    noted = Snapshot([[a, b, c, d, e]])
    first = draw()
    noted.undo()
    assert draw() == first


class Count(Metric):
    def reset(self) -> None:
        self.n: list[int] = []


def owners() -> list[Any]:
    "Return an object of each kind whose attributes a snapshot restores, each with something to change."
    layer, mean = nn.Linear(2, 2), Mean()
    layer.calls, opt, cb = [0], torch.optim.Adam(layer.parameters()), Callback()
    cb.notes = {'inner': Callback()}
    metric = Count()
    metric.reset()
    return [
        layer,
        opt,
        torch.optim.lr_scheduler.StepLR(opt, 1),
        cb,
        metric,
        mean,
        L(1, 2),
        torch.amp.GradScaler('cpu'),
    ]


def test_the_attributes_of_owners_are_written_back() -> None:
    layer, opt, sched, cb, metric, mean, several, scaler = every = owners()
    noted, before = Snapshot([every]), [dict(vars(o)) for o in every]
    layer.calls.append(1)
    layer.other = nn.Linear(1, 1)
    layer(torch.ones(2)).sum().backward()
    opt.step(), sched.step()
    cb.notes['inner'].seen = cb.seen = 1
    metric.n.append(1), mean.add(5.0), several.append(3)
    scaler.load_state_dict({**scaler.state_dict(), 'scale': 2.0})
    assert opt.state and opt.param_groups[0]['lr'] == 1e-4
    noted.undo()
    assert [list(vars(o)) for o in every] == [list(attributes) for attributes in before]
    assert layer.calls == [0]
    assert not opt.state
    assert opt.param_groups[0]['lr'] == 1e-3
    assert sched.last_epoch == 0
    assert 'seen' not in vars(cb.notes['inner'])
    assert metric.n == []
    assert mean.value is None
    assert several == [1, 2]
    assert layer.weight.grad is None and scaler.get_scale() == 2.0**16


def test_an_object_of_another_kind_stays_whole() -> None:
    client, counter, outside = SimpleNamespace(sent=0, queue=[0]), iter([1, 2]), [1]
    cb = Callback()
    cb.client = client
    noted = Snapshot([cb, [client, counter, outside]], excluded=[outside])
    client.sent += 1
    client.queue.append(0)
    next(counter), outside.append(2)
    noted.undo()
    assert (client.sent, client.queue, outside, next(counter)) == (1, [0, 0], [1, 2], 2)


def test_persistent_workers_are_let_go() -> None:
    dl = DataLoader(list(range(8)), 2, shuffle=True, num_workers=1, persistent_workers=True)
    torch.manual_seed(0)
    with preserve_dataloaders(DataLoaders(dl)):
        first = [b.tolist() for b in dl]
    assert dl._iterator is None
    assert [b.tolist() for b in dl] == first
    del dl


def test_weights_that_a_forward_pass_scales_are_restored() -> None:
    model = nn.Sequential(nn.Embedding(3, 2, max_norm=0.5), nn.Linear(2, 1))
    nn.init.ones_(model[0].weight)
    with preserved_forward(model):
        model(torch.tensor([0, 2]))
        assert model[0].weight[0].norm() < 0.51
    assert torch.equal(model[0].weight, torch.ones(3, 2))
