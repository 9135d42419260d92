"""Digests: changes that they detect, changes that they ignore, and descriptions of differing states."""

import math
import struct
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from learnkit.checkpoint.digest import WALL_CLOCK, differences, digest
from learnkit.core.errors import OptionError
from learnkit.core.time import Timestamp

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.bool,
    torch.int64,
    torch.uint8,
    torch.complex64,
    torch.complex128,
]
if torch.__version__ >= '2.10':  # older releases cannot index it
    DTYPES.append(torch.float8_e4m3fn)
OTHER_NAN = struct.unpack('<d', struct.pack('<Q', 0x7FF8000000000001))[0]

# each differs from all others
APART = [
    *(None, True, False, 1, 0, 1.0, 0.0, -0.0, 1 + 0j, '1', b'1', '', b'', [], (), {}, 'Ä', 10**30),
    *([1], (1,), [[1]], [1, 1], [None], ['ab', 'c'], ['a', 'bc']),
    *(math.nan, OTHER_NAN, math.inf, -math.inf),
    *({1: 1}, {1.0: 1}, {True: 1}, {'1': 1}, {None: 1}, {'a': 1, 'b': 2}, {'a': 2, 'b': 1}),
    *map(torch.tensor, (1, 1.0, [1.0], [[1.0]], -0.0, 0.0)),
    *(torch.zeros(size) for size in ((0,), (0, 1), (2, 3), (3, 2), (6,))),
    *(torch.zeros(4, dtype=d) for d in DTYPES),
]


def test_what_is_apart_has_another_digest() -> None:
    digests = [digest(v) for v in APART]
    assert len(set(digests)) == len(APART) == len(set(map(digest, ([v] for v in APART))))
    assert all(len(d) == 64 for d in digests)


def test_the_digest_of_a_state_never_changes() -> None:
    state = {
        'w': torch.arange(6.0).reshape(2, 3),
        'lr': 0.1,
        'steps': [1, (2, None)],
        'name': 'net',
        'on': True,
    }
    assert digest(state) == 'ebfc7710ea254d5d37729260e1e993711619ab0fa687978c33fe96ce28370198'


@pytest.mark.parametrize('dtype', DTYPES)
def test_bytes_of_tensors_count_and_their_layout_does_not(dtype: torch.dtype) -> None:
    t = torch.arange(24).reshape(2, 3, 4).to(dtype)
    same = (
        t.transpose(0, 2).contiguous().transpose(0, 2),
        torch.stack([t, t], -1)[..., 0],
        nn.Parameter(t, False),
    )
    assert not same[0].is_contiguous()
    assert {digest(s) for s in same} == {digest(t)}
    assert not differences(list(same), [t, t, t])
    other = t.clone()
    other[1, 2, 3] = 0
    assert digest(other) != digest(t)
    assert differences(t, other)[0].startswith('the state: 1 of 24 elements differ')


def test_conjugates_and_scalars_of_numpy() -> None:
    z = torch.tensor([1 + 2j])
    assert digest(z.conj()) == digest(torch.tensor([1 - 2j])) != digest(z)
    assert digest([np.float64(0.5), np.int32(2), np.bool_(True)]) == digest([0.5, 2, True])


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.floats(width=16),
    st.text(max_size=2),
    st.sampled_from([torch.zeros(2), torch.zeros(2, dtype=torch.int32), torch.tensor([0.0, -0.0])]),
)
states = st.recursive(
    leaves,
    lambda s: (
        st.lists(s, max_size=3)
        | st.tuples(s, s)
        | st.dictionaries(st.sampled_from(['a', 'b', 1]), s, max_size=3)
    ),
    max_leaves=8,
)


@given(states, states)
def test_there_are_differences_exactly_where_digests_differ(a: Any, b: Any) -> None:
    assert bool(differences(a, b)) == (digest(a) != digest(b))
    assert not differences(a, deepcopy(a)) and digest(a) == digest(deepcopy(a))


@pytest.mark.parametrize(
    ('value', 'what'),
    [
        ({1, 2}, 'a set'),
        (np.zeros(2), 'a ndarray'),
        (torch.zeros(2, device='meta'), 'without values'),
        (nn.LazyLinear(2).weight, 'without values'),
        (torch.eye(2).to_sparse(), 'sparse'),
    ],
)
def test_what_has_no_digest_is_named_with_its_place(value: Any, what: str) -> None:
    for f in (digest, lambda s: differences(s, s)):
        with pytest.raises(OptionError, match=rf'^callbacks\.ema\[0\]\[2\]\.x .*{what}'):
            f({'callbacks': {'ema': [{2: {'x': value}}]}})


# ------------------------------------------------------------------------------ what does not count


def checkpoint(**changes: Any) -> dict[str, Any]:
    "Return a small checkpoint state with some entries changed: `a__b=value`."
    time = Timestamp(ba=10, sec=1.5).state_dict()
    rows = [
        {'epoch': 0, 'train_loss': 0.5, 'time': 1.2},
        {'epoch': 1, 'train_loss': 0.25, 'time': 1.1},
    ]
    state: dict[str, Any] = {
        'model': {'0.weight': torch.zeros(3, 10), '0.bias': torch.zeros(3)},
        'loss_func': {},
        'optimizer': {
            'state': {0: {'step': torch.tensor(4.0)}},
            'param_groups': [{'lr': 0.1, 'params': [0]}],
        },
        'loop': {'epoch': 3, 'seconds': 8.5, 'time': time},
        'rng': {'torch': torch.zeros(9), 'python': (3, (1, 2), None)},
        'callbacks': {
            'recorder': {'history': rows, 'losses': [0.5, 0.25, 0.125]},
            'speed': {'rates': {'sec': 1.0}, 'busy': 0.7, 'n': 3},
        },
        'nondeterministic_state': {'speed': ['busy', 'rates.sec']},
    }
    for name, value in changes.items():
        *way, last = name.split('__')
        inner: Any = state
        for k in way:
            inner = inner[int(k) if isinstance(inner, list) else k]
        inner[last] = value
    return state


TIMES = {
    'loop__seconds': 9.0,
    'loop__time': Timestamp(ba=10, sec=2.5).state_dict(),
    'callbacks__recorder__history__1__time': 7.0,
    'callbacks__speed__busy': 0.1,
    'callbacks__speed__rates__sec': 2.0,
}


@pytest.mark.parametrize('name', TIMES)
def test_times_are_left_out(name: str) -> None:
    a, b = checkpoint(), checkpoint(**{name: TIMES[name]})
    assert digest(a) == digest(b) and not differences(a, b)
    assert digest(a, ()) != digest(b, ()) and len(differences(a, b, ())) == 1


def test_places_listed_by_the_user_are_left_out() -> None:
    a, b = checkpoint(), checkpoint(model__extra=torch.zeros(1), loop__seconds=9.0)
    leave_out = [*WALL_CLOCK, 'model.extra']
    assert digest(a, leave_out) == digest(b, leave_out) and not differences(a, b, leave_out)
    assert differences(a, b, ['model.*']) == ['loop.seconds: 8.5 and 9.0']
    with pytest.raises(OptionError, match='list of places'):
        digest(a, 'model.extra')


# ------------------------------------------------------------------------------------- what is said


def test_each_place_that_differs_has_a_line() -> None:
    other = checkpoint(
        rng__torch=torch.ones(9),
        loop__epoch=3.0,
        callbacks__recorder__losses=[0.5, 0.3, 0.1],
        model__more=torch.ones(1),
    )
    other['model']['0.weight'][1, 4:] = torch.tensor([0.12, -0.5, 0, 0, 0, 0])
    other['model']['0.bias'] = torch.zeros(4, dtype=torch.float64)
    del other['loss_func']
    assert differences(checkpoint(), other) == [
        'model.0.weight: 2 of 30 elements differ, at most 0.5 (first at [1, 4]: 0.0 and 0.12)',
        'model.0.bias: float32 [3] and float64 [4]',
        'only in the second: model.more',
        'only in the first: loss_func',
        'loop.epoch: 3 and 3.0',
        'rng.torch: 9 of 9 elements differ, at most 1 (first at [0]: 0.0 and 1.0)',
        'callbacks.recorder.losses[1]: 0.25 and 0.3',
    ]


def test_lists_have_a_line_for_all_their_entries() -> None:
    a = [{'loss': float(i), 'n': i} for i in range(100)]
    b = deepcopy(a)
    b[7]['loss'] = 1.0
    b[9] = {'n': 9}
    assert differences({'h': a}, {'h': b}) == ['h[7].loss: 7.0 and 1.0']
    expected = ['h: 91 and 90 entries', 'only in the first: h[0].loss']
    assert differences({'h': a[9:]}, {'h': b[9:99]}) == expected


def test_the_number_of_lines_has_a_limit() -> None:
    a, b = ({'model': {f'{i}': float(i + j) for i in range(25)}} for j in (0, 1))
    assert len(differences(a, b)) == 21 and differences(a, b)[-1] == 'and 5 more'
    assert differences(a, b, limit=1) == ['model.0: 0.0 and 1.0', 'and 24 more']
