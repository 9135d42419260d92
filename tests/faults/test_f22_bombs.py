"""Row 22: small files that would take much memory or time, each under a good seal. Each is refused.

It is loaded in a child, whose peak of memory is read from the system: it rises by less than 50 MB."""
from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED

import pytest
import torch
from file_helpers import INFO, rebuilt, result_of, sealed, with_pickle, write

from learnkit.errors import DamagedError
from learnkit.safeload import load_state
from learnkit.seals import seal

BIG = 1 << 33


def called(name: bytes, *arguments: bytes) -> bytes:
    "A pickle that calls something with arguments."
    return b'\x80\x02c' + name + b'(' + b''.join(arguments) + b'tR.'


def number(n: int) -> bytes: return b'\x8a\x08' + n.to_bytes(8, 'little')


def tensor(n: bytes, start: bytes, shape: bytes, stride: bytes, key: bytes = b'0') -> bytes:
    "A pickle of a tensor over a record of four floats."
    return called(b'torch._utils\n_rebuild_tensor_v2\n', b'(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0', key,
                  b'X\3\0\0\0cpu', n, b'tQ', start, shape, b'\x85', stride, b'\x85\x89ccollections\nOrderedDict\n)R')


def deflated(path: Path) -> Path:
    "80 MB of zeros in 80 kB."
    write(path, {'w': torch.arange(4.)})
    zeros = {'.a.ckpt/data/0': bytes(80_000_000)}
    return rebuilt(path, lambda r: {**r, **zeros}, ZIP_DEFLATED)


def overlapping(path: Path) -> Path:
    "Every entry of the table points to the first record."
    write(path, {str(i): torch.arange(1000.) + i for i in range(50)})
    body = bytearray(rebuilt(path, dict).read_bytes())
    at = body.index(b'PK\1\2')
    while (at := body.find(b'PK\1\2', at + 4)) > 0: body[at + 42:at + 46] = bytes(4)
    path.write_bytes(body[:body.rindex(b'PK\5\6') + 22])
    seal(path, INFO)
    return path


def traversing(path: Path) -> Path:
    return rebuilt(write(path), lambda r: {**r, '.a.ckpt/../../../escaped': b'x', '/tmp/escaped': b'x'})


def laughs(kind: str, path: Path) -> Path:
    "Each level holds the one below ten times."
    part: Any = {'a': 1} if kind == 'dict' else [1] if kind == 'list' else (1,)
    for _ in range(60): part = dict.fromkeys('abcdefghij', part) if kind == 'dict' else type(part)([part] * 10)
    return sealed(path, {'a': part})


def cyclic(path: Path) -> Path:
    part: list[Any] = []
    part.append(part)
    return sealed(path, {'a': part})



def nested_keys(path: Path) -> Path:
    puts = b''.join(b'q' + bytes([i]) + b'h' + bytes([i]) + b'\x86' for i in range(60))
    return with_pickle(path, b'\x80\x02}K\1' + puts + b'Ns.')


def views(n: int, path: Path) -> Path:
    memory = torch.ones(500_000)
    return sealed(path, {'a': [memory.view(-1) for _ in range(n)]})


def doubling(path: Path) -> Path:
    "Each call of a codec makes the text twice as long."
    return with_pickle(path, b'\x80\x02' + b'c_codecs\nencode\n(' * 30 + b'X\2\0\0\0aa' + b'X\3\0\0\0hextR' * 30 + b'.')


def raw(pickle: bytes) -> Callable[[Path], Path]: return lambda path: with_pickle(path, pickle)


BOMBS: dict[str, tuple[Callable[[Path], Path], str]] = {
    'a zip bomb': (deflated, 'holds compressed records'),
    'records that overlap': (overlapping, 'records that overlap'),
    'a path traversal': (traversing, 'which torch does not write'),
    'a shape by stride 0': (lambda p: sealed(p, {'w': torch.ones(1).expand(BIG)}), 'larger than its record'),
    'numbers shown twice': (lambda p: sealed(p, {'w': torch.ones(99).as_strided((50, 50), (1, 1))}), 'larger than its'),
    'a window that overlaps': (lambda p: sealed(p, {'w': torch.ones(99).as_strided((9, 9), (2, 1))}), 'more than once'),
    'a storage beyond its record': (raw(tensor(number(BIG), b'K\0', number(BIG), b'K\1')), 'another num'),
    'a negative storage': (raw(tensor(b'J\xff\xff\xff\xff', b'K\0', b'K\1', b'K\1')), 'another number'),
    'a tensor beyond its storage': (raw(tensor(b'K\4', b'K\0', number(BIG), b'K\1')), 'than its record'),
    'a tensor behind its storage': (raw(tensor(b'K\4', number(BIG), b'K\1', b'K\1')), 'than its record'),
    'a stride beyond its storage': (raw(tensor(b'K\4', b'K\0', b'K\2', number(BIG))), 'more than once'),
    'a negative size': (raw(tensor(b'K\4', b'K\0', b'J\xff\xff\xff\xff', b'K\1')), 'a tensor that is none'),
    'a record that is not there': (raw(tensor(b'K\4', b'K\0', b'K\4', b'K\1', b'7')), 'lacks the record'),
    'an empty tensor type of 8 GB': (raw(called(b'torch\nFloatTensor\n', number(BIG))), 'more than data'),
    'a storage made by a call': (raw(called(b'torch\nFloatStorage\n', number(BIG))), 'calls torch'),
    'a bytearray': (raw(called(b'__builtin__\nbytearray\n', number(BIG))), r'__builtin__\.bytearray'),
    'a text that doubles': (doubling, r'calls _codecs encode'),
    'lists in lists': (raw(b'\x80\x02}K\1' + b']' * 100_000 + b'a' * 99_999 + b's.'), '100 levels deep'),
    'millions of lists': (raw(b'\x80\x02](' + b']' * 1_500_000 + b'e.'), 'more than 500,000 lists'),
    'marks upon marks': (raw(b'\x80\x02' + b'(' * 1_500_000 + b'.'), 'nested too deeply'),
    'a pickle of 65 MB': (raw(bytes(65 << 20)), 'has a pickle of 68,157,440 bytes'),
    'a billion laughs, lists': (lambda p: laughs('list', p), 'the same list twice'),
    'a billion laughs, dicts': (lambda p: laughs('dict', p), 'the same dict twice'),
    'a billion laughs, tuples': (lambda p: laughs('tuple', p), 'the same tuple twice'),
    'a cycle': (cyclic, 'the same list twice'),
    'a key of nested tuples': (nested_keys, 'a key that is neither text nor whole number'),
    'many references': (lambda p: sealed(p, {'a': [torch.ones(500_000)] * 300_000}), r'600,000,000,000 bytes in all'),
    'many views of a memory': (lambda p: views(1000, p), 'more than it has bytes'),
    'memo entries far apart': (raw(b'\x80\x02Nr\xff\xff\xff\x7f.'), 'torch does not write'),
}


def peak_mb() -> float:
    text = Path('/proc/self/status').read_text()
    return int(text.split('VmHWM:')[1].split()[0]) / 1024


def loaded(path: Path) -> dict[str, Any]:
    load_state(path.with_name('good.ckpt'))  # what the first load needs is no bomb's
    before, start, told = peak_mb(), time.perf_counter(), None
    try: load_state(path)
    except DamagedError as e: told = str(e)
    return {'told': told, 'mb': peak_mb() - before, 's': time.perf_counter() - start}


@pytest.mark.parametrize('bomb', BOMBS)
def test_memory(tmp_path: Path, bomb: str) -> None:
    make, says = BOMBS[bomb]
    write(tmp_path/'good.ckpt')
    path = result_of(lambda: str(make(tmp_path/'a.ckpt')))  # made in a child as well: the next one starts small
    found = result_of(lambda: loaded(Path(path)))
    assert found['told'] is not None, 'it loaded'
    assert path in found['told']
    assert re.search(says, found['told']), found['told']
    assert found['mb'] < 50 and found['s'] < 5, found
    assert not (tmp_path.parent/'escaped').exists()


def test_ties_are_no_bomb(tmp_path: Path) -> None:
    "The same weights under forty names, as in a model whose layers share them."
    w = torch.ones(50_000)
    write(tmp_path/'a.ckpt', {'model': {f'layers.{i}.w': w for i in range(40)}})
    state, _ = load_state(tmp_path/'a.ckpt')
    assert len(state['model']) == 40 and (tmp_path/'a.ckpt').stat().st_size < 220_000
