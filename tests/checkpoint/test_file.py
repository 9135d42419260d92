"""Write states to files and read them; `faults/test_f13` to `test_f25` test damaged and hostile files."""

import hashlib
import json
import math
import os
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from learnkit.checkpoint import file
from learnkit.checkpoint.file import FORMAT, read_info, read_state, write_state
from learnkit.core.errors import CheckpointError
from learnkit.core.file_tensor import FileTensor
from tests.faults.file_helpers import same


def through(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    write_state(path / 'a.ckpt', state, {})
    return read_state(path / 'a.ckpt')[0]


# The layout, worked out by hand


def test_the_layout(tmp_path: Path) -> None:
    w, n = torch.arange(3.0), torch.tensor([True])
    write_state(tmp_path / 'a.ckpt', {'n': n, 'm': {'w': w}, 'x': (1, 2.5)}, {'epoch': 3})
    content = (tmp_path / 'a.ckpt').read_bytes()
    length = int.from_bytes(content[:8], 'little')
    metadata = json.loads(content[8 : 8 + length])['__metadata__']
    digest = metadata.pop('sha256').encode()
    assert metadata == {
        'learnkit': '3',
        'info': '{"epoch":3}',
        'views': '{}',
        'state': '{"n":{"$tensor":"n"},"m":{"w":{"$tensor":"m.w"}},"x":{"$tuple":[1,2.5]}}',
    }
    assert content[8 + length :] == w.numpy().tobytes() + b'\1'
    assert content.count(digest) == 1
    assert hashlib.sha256(content.replace(digest, b'0' * 64)).hexdigest().encode() == digest
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / 'a.ckpt').stat().st_mode & 0o777 == 0o666 & ~umask


def test_info_is_read_without_the_data(tmp_path: Path) -> None:
    info = {'value': math.inf, 'name': 'ü', 'list': [1, None]}
    write_state(tmp_path / 'a', {'w': torch.ones(3)}, info)
    assert read_info(tmp_path / 'a') == read_state(tmp_path / 'a')[1] == {'format': FORMAT, **info}
    write_state(tmp_path / 'a', {}, {'value': math.nan})
    assert math.isnan(read_info(tmp_path / 'a')['value'])


def test_info_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / 'a').write_bytes(b'content')
    with pytest.raises(CheckpointError, match='JSON'):
        write_state(tmp_path / 'a', {}, {'a': b'bytes'})
    assert (tmp_path / 'a').read_bytes() == b'content'


# What comes back

DTYPES = [
    getattr(torch, name)
    for name in 'float32 bfloat16 int64 uint16 bool complex64 float8_e4m3fnuz'.split()
]


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    t = torch.randint(0, 2, (12 * dtype.itemsize,), dtype=torch.uint8).view(dtype).reshape(3, 4)
    tensors = {
        't': t,
        'scalar': t[0, 0].clone(),
        'empty': t[:0],
        'part': t[1:, 1:3],
        'turned': t.t(),
    }
    found = through(tmp_path, tensors)
    assert all(same(found[k], v.clone()) for k, v in tensors.items())
    assert set(load_file(tmp_path / 'a.ckpt')) == set(tensors)


@pytest.mark.parametrize(
    'value',
    [
        *(None, True, False, 0, -1, 256, 2**31, -(2**63), -(2**1999)),
        *(
            0.0,
            -0.0,
            1e-310,
            math.inf,
            -math.inf,
            math.nan,
            0.1 + 0.2,
            1 - 2j,
        ),
        *('', 'ü\0\U0001f600', '\ud800', '$tensor', 'x' * 70_000, b'\0\xff', b''),
        *([], (), {}, [[]], ((),), [1, (2, [3, {}])], {'a': {1: {'': None}}}),
        *({-1: 0}, {1.5: 1, None: 2}, {True: 1}),
        *({'$tensor': 'a'}, {'$dict': []}, {'$': {'$tuple': [1]}}, {'a.b': 1, 'a': {'b': 2}}),
    ],
    ids=lambda v: ascii(v)[:20],
)
def test_every_kind_of_value(tmp_path: Path, value: Any) -> None:
    found = through(tmp_path, {'a': value, 'b': [value, value]})
    assert repr(found) == repr({'a': value, 'b': [value, value]})


def test_names_that_are_alike(tmp_path: Path) -> None:
    a, b, c, d, e = (torch.tensor(i) for i in range(5))
    state = {'a.b': a, 'a': {'b': b}, 'x': {1: c, '1': d}, '__metadata__': e}
    assert repr(through(tmp_path, state)) == repr(state)


def test_what_is_made_plain(tmp_path: Path) -> None:
    state = {
        'np': np.float32(0.5),
        'od': nn.Linear(1, 1).state_dict(),
        'size': torch.Size([2]),
        'p': nn.Parameter(torch.ones(2)),
        'conj': torch.tensor([1 + 2j]).conj(),
    }
    found = through(tmp_path, state)
    assert found['np'] == 0.5 and type(found['od']) is dict and found['size'] == (2,)
    assert type(found['p']) is Tensor
    assert not found['p'].requires_grad
    assert found['conj'].item() == 1 - 2j


def test_only_what_a_tensor_shows_is_written(tmp_path: Path) -> None:
    big = torch.randn(1000, 1000)
    found = through(tmp_path, {'row': big[3], 'all': torch.ones(1).expand(1000)})
    assert (tmp_path / 'a.ckpt').stat().st_size < 10_000
    assert found['row'].equal(big[3]) and found['all'].equal(torch.ones(1000))


def test_ties_are_kept_and_written_once(tmp_path: Path) -> None:
    w = torch.randn(100, 100)
    found = through(tmp_path, {'a': w, 'b': w.detach(), 'c': [w[:50], w[:50]], 'd': w.t()})
    assert found['a'] is found['b'] and found['c'][0] is found['c'][1]
    assert found['d'].equal(w.t()) and found['c'][0].equal(w[:50])
    assert 100_000 < (tmp_path / 'a.ckpt').stat().st_size < 105_000, (
        'w twice, as it is and turned, and its half'
    )


# What is refused


class Kind(IntEnum):
    A = 1


class Sub(Tensor):
    pass


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize(
    ('value', 'expected_text'),
    [
        ({1, 2}, r"set at \['a'\]"),
        (object(), 'object at'),
        (Kind.A, 'Kind at'),
        (10**5000, '4300'),
        ({(1, Kind.A): 3}, 'tuple'),
        ({Kind.A: 3}, 'Kind'),
        (torch.ones(2).to_sparse(), 'sparse_coo'),
        (torch.ones(2, device='meta'), 'meta'),
        (torch.ones(2).as_subclass(Sub), 'Sub'),
    ],
    ids=lambda v: f'{type(v)}'[:20],
)
def test_what_would_not_load_is_refused_before_anything_is_written(
    tmp_path: Path, value: Any, expected_text: str
) -> None:
    (tmp_path / 'a.ckpt').write_text('old')
    with pytest.raises(CheckpointError, match=expected_text):
        write_state(tmp_path / 'a.ckpt', {'a': value}, {})
    assert (tmp_path / 'a.ckpt').read_text() == 'old' and os.listdir(tmp_path) == ['a.ckpt']


def test_deferred_entries_are_read_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    "Every dtype and order of dimensions; a tensor that another entry has too, and a small one, are read at once."
    monkeypatch.setattr(file, 'MIN_DEFERRED', 9)
    w, shared = torch.randn(3, 4), torch.randn(5)
    late = {'t': w.T, 'c': torch.randn(2, 2, dtype=torch.complex64), 'b': w.bfloat16(), 'w': w[:2]}
    state = {'model': {**late, 'shared': shared, 'n': torch.tensor(3)}, 'other': [shared]}
    write_state(tmp_path / 'a.ckpt', state, {})
    found, _ = read_state(tmp_path / 'a.ckpt', ['model'])
    model = found['model']
    assert {name for name, t in model.items() if isinstance(t, FileTensor)} == set(late)
    assert model['shared'] is found['other'][0] and torch.equal(model['shared'], shared)
    for name, t in late.items():
        assert (model[name].shape, model[name].dtype) == (t.shape, t.dtype)
        assert torch.equal(model[name].clone(), t) and model[name].clone().stride() == t.stride()
    (tmp_path / 'a.ckpt').write_bytes(b'')
    with pytest.raises(CheckpointError, match=r'a\.ckpt .*changed or removed'):
        model['t'].clone()
