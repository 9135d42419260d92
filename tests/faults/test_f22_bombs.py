"""Row 22: small files that would take much memory, checkpoints under a right digest and weights: all refused.

What a file claims is far larger than the file, and nothing in it could harm another program. It is loaded in a child,
whose peak of memory is read from the system: it rises by less than 50 MB."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from learnkit.checkpoint.file import read_state
from learnkit.checkpoint.weights import read_weights
from learnkit.core.errors import DamagedError, WeightsError
from tests.faults.file_helpers import forged, rebuilt, result_of, saved, split, with_state, write

BIG = 1 << 28


def scattered(path: Path) -> Path:
    "An archive with a record outside the folder of its records."
    return rebuilt(saved(path, {'w': torch.ones(1)}), lambda r: {**r, 'other/record': b'x'})


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
    'a shape of 256 MB': lying({'w': entry([BIG // 4], 0, 16)}),
    'a shape and offsets of 256 MB': lying({'w': entry([BIG // 4], 0, BIG)}),
    'a shape that overflows': lying({'w': entry([2**32, 2**32], 0, 0)}),
    'a shape of 5,000 sizes': lying({'w': entry([1] * 5000, 0, 4)}),
    'a header of 256 MB': lying({}, BIG),
    'a header of 2**63 bytes': lying({}, 2**63),
    'a thousand tensors over one place': lying({f'{i}': entry([4], 0, 16) for i in range(1000)}),
    'lists in lists': state('{"a":' + '[' * 5000 + ']' * 5000 + '}'),
    'a number of 5,000 digits': state('{"a":' + '1' * 5000 + '}'),
}
WEIGHTS: dict[str, Callable[[Path], Path]] = {'a record in another folder': scattered}
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
