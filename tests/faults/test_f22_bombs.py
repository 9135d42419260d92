"""Row 22: small files that would take much memory, checkpoints under a right digest and weights: all refused.

It is loaded in a child, whose peak of memory is read from the system: it rises by less than 50 MB."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from learnkit.checkpoint.file import read_state
from learnkit.checkpoint.weights import read_weights
from learnkit.core.errors import DamagedError, WeightsError
from tests.faults.file_helpers import forged, rebuilt, result_of, saved, split, with_state, write

BIG = 1 << 33


def traversing(path: Path) -> Path:
    change = lambda r: {**r, 'a/../../../escaped': b'x', '/tmp/escaped': b'x'}
    return rebuilt(saved(path, {'w': torch.ones(1)}), change)


def entry(shape: list[int], start: int, stop: int, dtype: str = 'F32') -> dict[str, Any]:
    return {'dtype': dtype, 'shape': shape, 'data_offsets': [start, stop]}


def lying(changes: dict[str, Any], length: int | None = None) -> Callable[[Path], Path]:
    "A checkpoint of four floats whose header lies about them."

    def make(path: Path) -> Path:
        header, data = split(write(path, {'w': torch.arange(4.0)}))
        return forged(path, {**header, **changes}, data, length)

    return make


def state(text: str) -> Callable[[Path], Path]:
    return lambda path: with_state(path, text)


CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    'a shape of 8 GB': lying({'w': entry([BIG // 4], 0, 16)}),
    'a shape and offsets of 8 GB': lying({'w': entry([BIG // 4], 0, BIG)}),
    'a shape that overflows': lying({'w': entry([2**32, 2**32], 0, 0)}),
    'a shape of 100,000 sizes': lying({'w': entry([1] * 100_000, 0, 4)}),
    'a header of 10 GB': lying({}, 10**10),
    'a header of 2**63 bytes': lying({}, 2**63),
    'a thousand tensors over one place': lying({f'{i}': entry([4], 0, 16) for i in range(1000)}),
    'lists in lists': state('{"a":' + '[' * 100_000 + ']' * 100_000 + '}'),
    'a number of a million digits': state('{"a":' + '1' * 1_000_000 + '}'),
}
WEIGHTS: dict[str, Callable[[Path], Path]] = {'a path traversal': traversing}
BOMBS = {
    (kind, name): make
    for name, bombs in (('a.ckpt', CHECKPOINTS), ('a.pth', WEIGHTS))
    for kind, make in bombs.items()
}


def peak_mb() -> float:
    text = Path('/proc/self/status').read_text()
    return int(text.split('VmHWM:')[1].split()[0]) / 1024


def read(path: Path) -> None:
    (read_state if path.suffix == '.ckpt' else read_weights)(path)


def loaded(path: Path) -> dict[str, Any]:
    read(path.parents[1] / f'good{path.suffix}')  # what the first load needs is no bomb's
    before, error_text = peak_mb(), None
    try:
        read(path)
    except (DamagedError, WeightsError) as e:
        error_text = str(e)
    return {'error_text': error_text, 'mb': peak_mb() - before}


@pytest.fixture(scope='module')
def bombs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "Make them all in a child, so that those which load them start small."
    folder = tmp_path_factory.mktemp('bombs')
    write(folder / 'good.ckpt')
    saved(folder / 'good.pth', {'w': torch.ones(3)})

    def make_all() -> None:
        for (kind, name), make in BOMBS.items():
            (folder / f'{kind}, {name}').mkdir()
            make(folder / f'{kind}, {name}' / name)

    result_of(make_all)
    return folder


@pytest.mark.parametrize('bomb', BOMBS, ids=', '.join)
def test_memory(bombs: Path, bomb: tuple[str, str]) -> None:
    path = bombs / ', '.join(bomb) / bomb[1]
    found = result_of(lambda: loaded(path))
    assert found['error_text'] is not None, 'it loaded'
    assert str(path) in found['error_text']
    assert found['mb'] < 50, found
    assert not any((parent / 'escaped').exists() for parent in path.parents)
