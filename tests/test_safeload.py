"""States written to files and read again; `faults/test_f13` to `test_f25` have the others."""
from __future__ import annotations

import os
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from learnkit import safeload
from learnkit.errors import CheckpointError, DamagedError, OptionError
from learnkit.safeload import check_structure, copied, load_state, save_state


def through(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    save_state(state, path/'a.ckpt', {})
    return load_state(path/'a.ckpt')[0]


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.stride() == b.stride() and a.flatten().view(torch.uint8).equal(
        b.contiguous().flatten().view(torch.uint8)) if a.is_contiguous() else a.equal(b) and a.stride() == b.stride()


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
          torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
          torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    size = dtype.itemsize
    t = torch.randint(0, 2, (12 * size,), dtype=torch.uint8).view(dtype).reshape(3, 4)
    tensors = {'t': t, 'scalar': t[0, 0].clone(), 'empty': t[:0], 'part': t[1:, 1:3], 'turned': t.t()}
    found = through(tmp_path, tensors)
    assert all(same(found[k], v.clone()) and found[k].shape == v.shape for k, v in tensors.items())


@pytest.mark.parametrize('value', [
    None, True, False, 0, -1, 255, 256, 65_536, 2**31, -2**63, 2**127, -2**1999, 0., -0., 1e-310, float('inf'), 1 - 2j,
    '', 'ü\0\U0001f600', 'x' * 70_000, b'\0\xff', [], (), {}, [[]], ((),), [1, (2, [3, {}])], {'a': {1: {'': None}}},
    {-1: 0},
], ids=lambda v: repr(v)[:20])
def test_every_kind_of_value(tmp_path: Path, value: Any) -> None:
    found = through(tmp_path, {'a': value, 'b': [value, value]})
    assert repr(found) == repr({'a': value, 'b': [value, value]})


def test_what_is_made_plain(tmp_path: Path) -> None:
    found = through(tmp_path, {'np': np.float32(0.5), 'od': nn.Linear(1, 1).state_dict(), 'size': torch.Size([2]),
                               'p': nn.Parameter(torch.ones(2)), 'conj': torch.tensor([1 + 2j]).conj()})
    assert found['np'] == 0.5 and type(found['od']) is dict and found['size'] == (2,)
    assert type(found['p']) is Tensor and not found['p'].requires_grad and found['conj'].item() == 1 - 2j


def test_many_lists_and_long_ones(tmp_path: Path) -> None:
    state = {'losses': [float(i) for i in range(50_000)], 'rows': [{'epoch': i, 'loss': i / 7} for i in range(2000)]}
    assert through(tmp_path, state) == state


def test_more_records_than_a_short_archive_has(tmp_path: Path) -> None:
    found = through(tmp_path, {'w': [torch.tensor(i) for i in range(3000)]})
    assert [int(t) for t in found['w']] == list(range(3000))


@pytest.mark.full
def test_more_than_65535_records(tmp_path: Path) -> None:
    found = through(tmp_path, {'w': [torch.tensor(i) for i in range(70_000)]})
    assert int(found['w'][-1]) == 69_999


def test_only_what_a_tensor_shows_is_written(tmp_path: Path) -> None:
    big = torch.randn(1000, 1000)
    found = through(tmp_path, {'row': big[3], 'all': torch.ones(1).expand(1000), 'last': torch.randn(8, 3, 4, 4).to(
        memory_format=torch.channels_last)[:2]})
    assert (tmp_path/'a.ckpt').stat().st_size < 20_000
    assert found['row'].equal(big[3]) and found['all'].equal(torch.ones(1000))
    assert found['last'].is_contiguous(memory_format=torch.channels_last)


def test_ties_are_kept_and_written_once(tmp_path: Path) -> None:
    w = torch.randn(100, 100)
    found = through(tmp_path, {'a': w, 'b': w.detach(), 'c': [w[:50], w[:50]], 'd': w.t()})
    assert found['a'] is found['b'] and found['c'][0] is found['c'][1]
    assert found['d'].equal(w.t()) and found['c'][0].equal(w[:50])
    assert 100_000 < (tmp_path/'a.ckpt').stat().st_size < 105_000, 'w twice, as it is and turned, and its half'


def test_loaded_tensors_are_the_file_and_copies_are_not(tmp_path: Path) -> None:
    state = through(tmp_path, {'a': torch.ones(3), 'l': [torch.zeros(2)], 't': (1, 'x')})
    own = copied(state)
    state['a'].fill_(7)
    assert load_state(tmp_path/'a.ckpt')[0]['a'].tolist() == [1, 1, 1], 'the file is as it was'
    assert own['a'].tolist() == [1, 1, 1] and own['t'] == (1, 'x') and own['l'] is not state['l']
    os.truncate(tmp_path/'a.ckpt', 0)
    assert own['l'][0].tolist() == [0, 0]


def test_what_is_saved_is_not_changed(tmp_path: Path) -> None:
    w = nn.Parameter(torch.ones(2))
    state = {'w': w, 'x': [w]}
    through(tmp_path, state)
    assert state == {'w': w, 'x': [w]} and w.requires_grad


class Kind(IntEnum): A = 1
class Sub(Tensor): pass


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize(('value', 'says'), [
    ({1, 2}, r"state\['a'\] is a set"), (object(), "is a object"), (np.ones(2), 'is a ndarray'), (Kind.A, r"a Kind at"),
    (b'', 'empty bytes'), (2**2001, 'a number of 2002 bits'), ({(1, 2): 3}, 'key that is a tuple'), ({1.: 2}, 'float'),
    (torch.ones(2).to_sparse(), 'sparse_coo'), (torch.ones(2, device='meta'), 'meta'),
    (torch.ones(2).as_subclass(Sub), 'Sub'),
    (torch.quantize_per_tensor, 'is a '), (torch.float32, 'is a dtype'), (nn.Linear(1, 1), 'is a Linear'),
], ids=lambda v: f'{v}'[:20])
def test_what_would_not_load_is_refused_before_anything_is_written(tmp_path: Path, value: Any, says: str) -> None:
    (tmp_path/'a.ckpt').write_text('old')
    with pytest.raises((CheckpointError, OptionError), match=says): save_state({'a': value}, tmp_path/'a.ckpt', {})
    assert (tmp_path/'a.ckpt').read_text() == 'old' and os.listdir(tmp_path) == ['a.ckpt']


def test_nesting(tmp_path: Path) -> None:
    def nested(n: int) -> Any: return [nested(n - 1)] if n else 1
    assert through(tmp_path, {'a': nested(99)}) == {'a': nested(99)}
    with pytest.raises(CheckpointError, match='nested more than 100 levels deep'): through(tmp_path, {'a': nested(100)})


def test_where_it_is() -> None:
    shared = [1]
    for state, says in (({'a': [shared, {'b': shared}]}, r"the same list twice, once at \['a'\]\[1\]\['b'\]"),
                        ({'a': {3: [1, {2}]}}, r"has a set at \['a'\]\[3\]\[1\]"),
                        ({'\x1b[2J' + 'x' * 500: {1}}, r"at \['\\x1b\[2Jx{1,60}"),
                        ({'a': [torch.ones(10**6)] * 100}, '400,000,000 bytes in all')):
        with pytest.raises(ValueError, match=says) as e: check_structure(state)
        assert len(str(e.value)) < 200
    assert check_structure({'a': [torch.ones(100)] * 1000, 'b': ((), (), [], [])}) == 400


def test_what_torch_writes_is_looked_at_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    "A version of torch that writes otherwise is found out at the first save, and not at the first load."
    save = torch.save
    monkeypatch.setattr(torch, 'save', lambda state, path: save(state, path, pickle_protocol=4))
    with pytest.raises(CheckpointError, match=r'a\.ckpt was not written: what torch wrote has a pickle of a protocol'):
        save_state({'a': 1}, tmp_path/'a.ckpt', {})
    assert os.listdir(tmp_path) == []


def test_what_torch_refuses_after_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_state({'a': 1}, tmp_path/'a.ckpt', {})
    def refuse(*args: object, **kwargs: object) -> None: raise RuntimeError('not today\nand more')
    monkeypatch.setattr(safeload.torch, 'load', refuse)
    with pytest.raises(DamagedError, match=r'a\.ckpt cannot be read: not today\. Nothing was loaded\.'):
        load_state(tmp_path/'a.ckpt')


def test_names_of_files(tmp_path: Path) -> None:
    for name in ('a', 'a.b.ckpt', '.hidden', 'ü x', 'x' * 200, 'PK\5\6'):
        save_state({'a': 1}, tmp_path/'new'/name, {'epoch': 1})
        assert load_state(str(tmp_path/'new'/name)) == ({'a': 1}, {'format': 1, 'epoch': 1})
