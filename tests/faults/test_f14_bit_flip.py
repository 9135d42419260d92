"""Row 14: one bit flipped anywhere in a checkpoint's file is a `DamagedError`, never other numbers."""

import random
from pathlib import Path

import pytest

from learnkit.checkpoint.file import read_state
from learnkit.core.errors import DamagedError
from tests.faults.file_helpers import split, write


def regions(path: Path) -> list[range]:
    "The parts of a file: the length, parts of the header, the digest, the padding, and each tensor."
    header, data = split(path)
    start = path.stat().st_size - len(data)
    text = path.read_bytes()[:start]
    edges = {
        0,
        8,
        35,
        99,
        text.index(b'"state"'),
        text.index(b'"views"'),
        len(text.rstrip(b' ')),
        start,
    }
    edges |= {start + at for entry in list(header.values())[1:] for at in entry['data_offsets']}
    return [range(a, b) for a, b in zip(sorted(edges)[:-1], sorted(edges)[1:], strict=True)]


def count_loaded(tmp_path: Path, n: int) -> int:
    whole, bad, draw = write(tmp_path / 'whole.ckpt'), tmp_path / 'bad.ckpt', random.Random(0)
    content, parts, loaded = whole.read_bytes(), regions(whole), 0
    read_state(whole)
    for i in range(n):
        flipped = bytearray(content)
        flipped[draw.choice(parts[i % len(parts)])] ^= 1 << draw.randrange(8)
        bad.write_bytes(flipped)
        try:
            read_state(bad)
            loaded += 1
        except DamagedError as e:
            loaded += str(bad) not in str(e)
    return loaded


def test_some_flips(tmp_path: Path) -> None:
    assert count_loaded(tmp_path, 150) == 0


@pytest.mark.full
def test_many_flips(tmp_path: Path) -> None:
    loaded = count_loaded(tmp_path, 3000)
    print(f'row 14: 3000 flipped bits in every region of the file, {loaded} loaded')
    assert loaded == 0
