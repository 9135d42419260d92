"""Row 14: one bit flipped anywhere in a checkpoint's file is a `DamagedError`, never other numbers."""
from __future__ import annotations

import random
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from file_helpers import write

from learnkit.errors import DamagedError
from learnkit.safeload import load_state
from learnkit.seals import body_size


def regions(path: Path) -> list[range]:
    "The parts of a file: each record, what lies between them, the archive's table, and each part of the seal."
    size, body = path.stat().st_size, body_size(path)
    with ZipFile(path) as archive:
        starts = [i.header_offset for i in archive.infolist()]
        edges = {0, *starts, *(i.header_offset + 30 + len(i.filename) for i in archive.infolist()), archive.start_dir}
    edges |= {body - 22, body, size - 56, size - 48, size - 16, size}
    return [range(a, b) for a, b in zip(sorted(edges)[:-1], sorted(edges)[1:], strict=True)]


def count_loaded(tmp_path: Path, n: int) -> int:
    whole, bad, draw = write(tmp_path/'whole.ckpt'), tmp_path/'bad.ckpt', random.Random(0)
    content, parts, loaded = whole.read_bytes(), regions(whole), 0
    load_state(whole)
    for i in range(n):
        flipped = bytearray(content)
        flipped[draw.choice(parts[i % len(parts)])] ^= 1 << draw.randrange(8)
        bad.write_bytes(flipped)
        try:
            load_state(bad)
            loaded += 1
        except DamagedError as e: loaded += str(bad) not in str(e)
    return loaded


def test_some_flips(tmp_path: Path) -> None: assert count_loaded(tmp_path, 150) == 0


@pytest.mark.full
def test_many_flips(tmp_path: Path) -> None:
    loaded = count_loaded(tmp_path, 3000)
    print(f'row 14: 3000 flipped bits in every region of the file, {loaded} loaded')
    assert loaded == 0


def test_torch_alone_does_not_notice(tmp_path: Path) -> None:
    "What the row is about: without the digest other numbers come out."
    path = write(tmp_path/'a.ckpt', {'w': torch.ones(1000)})
    content = bytearray(path.read_bytes())
    content[content.index(b'\0\0\x80\x3f' * 100) + 203] ^= 0x40
    path.write_bytes(content)
    assert not torch.load(path, weights_only=True)['w'].equal(torch.ones(1000))
    with pytest.raises(DamagedError, match='its digest differs'): load_state(path)
