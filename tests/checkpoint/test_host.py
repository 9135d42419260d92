"""Copies of a state in host memory: their content, what they share, and what they allocate."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.memory import Alive
from learnkit.checkpoint import host
from learnkit.checkpoint.host import HostMemory, copy_to_host, view_on_host
from tests.faults.file_helpers import same

KINDS = {
    'float32': torch.arange(6.0).view(2, 3),
    'bfloat16': torch.arange(6.0).view(2, 3).bfloat16(),
    'bool': torch.tensor([True, False]),
    'complex': torch.tensor([1 + 2j, 3j]),
    'scalar': torch.tensor(3, dtype=torch.int64),
    'empty': torch.zeros(0, 3),
    'transposed': torch.arange(6.0).view(2, 3).t(),
    'channels_last': torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
    'part': torch.arange(12.0).view(3, 4)[1:, 1:3],
    'expanded': torch.ones(1).expand(5),
    'conjugate': torch.tensor([1 + 2j]).conj(),
    'parameter': nn.Parameter(torch.ones(3)),
}


@pytest.fixture(params=[1, 1 << 30], ids=['mapped', 'allocated'])
def kind_of_memory(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, '_MIN_MAPPED', request.param)


def pointers(state: Any) -> list[int]:
    return [t.data_ptr() for t in state.values()]


@pytest.mark.usefixtures('kind_of_memory')
@pytest.mark.parametrize('kind', KINDS)
def test_a_copy_has_the_layout_of_an_empty_like(kind: str) -> None:
    source = KINDS[kind].detach()
    memory = HostMemory()
    for factor in (1, 2):
        t = source if factor == 1 else source.logical_not() if kind == 'bool' else source + source
        t = torch.empty_like(source).copy_(t) if kind not in ('part', 'expanded') else t
        expected = torch.empty_like(t).copy_(t)
        found = memory.copy({'t': t})['t']
        assert type(found) is Tensor and same(found, expected)
        assert found.data_ptr() != t.data_ptr() or not t.numel()


@pytest.mark.usefixtures('kind_of_memory')
def test_the_next_copy_allocates_nothing() -> None:
    state = {'a': torch.ones(1000), 'b': torch.ones(1000), 'c': torch.ones(10, 100)}
    memory = HostMemory()
    first = memory.copy(state)
    before = pointers(first)
    for t in state.values():
        t.mul_(2)
    assert all(t.eq(1).all() for t in first.values()), 'training does not change the copy'
    with Alive() as alive:
        second = memory.copy(state)
        new = alive.nbytes() - sum(t.untyped_storage().nbytes() for t in second.values())
    assert pointers(second) == before and new == 0
    assert all(t.eq(2).all() for t in second.values())


@pytest.mark.usefixtures('kind_of_memory')
def test_what_the_next_copy_does_not_need_is_freed() -> None:
    memory = HostMemory()
    first = memory.copy({'history': torch.ones(7), 'w': torch.ones(3), 'old': torch.ones(2)})
    kept = {name: weakref.ref(t) for name, t in first.items()}
    del first
    second = memory.copy({'history': torch.ones(8), 'w': torch.zeros(3)})
    assert [name for name, ref in kept.items() if ref() is not None] == ['w']
    assert second['w'] is kept['w']() and second['history'].shape == (8,)
    del second, memory
    assert kept['w']() is None


def test_ties_stay_ties() -> None:
    w = torch.ones(4)
    for copied in (HostMemory().copy, copy_to_host, view_on_host):
        state = copied({'a': w, 'b': [w.detach(), (w[:2], w[:2])], 'n': 3, 's': 'text'})
        assert state['a'] is state['b'][0] and state['b'][1][0] is state['b'][1][1]
        assert (state['n'], state['s']) == (3, 'text')


def test_a_view_copies_nothing() -> None:
    state = {name: t for name, t in KINDS.items() if t.numel()}
    with Alive() as alive:
        seen = view_on_host(state)
        own = {t.untyped_storage().data_ptr() for t in state.values()}
        assert {t.untyped_storage().data_ptr() for t in seen.values()} == own
        assert alive.nbytes() <= sum(t.untyped_storage().nbytes() for t in state.values())
    assert all(not t.requires_grad and t.equal(state[name]) for name, t in seen.items())


def test_copies_of_a_user_are_apart() -> None:
    "A tensor of `checkpoint_state()` has a storage of its own size, and no later copy writes into it."
    state = {'a': torch.ones(5), 'b': torch.ones(50)[:5]}
    first, second = copy_to_host(state), copy_to_host(state)
    assert not set(pointers(first)) & set(pointers(second))
    assert [t.untyped_storage().nbytes() for t in first.values()] == [20, 20]
