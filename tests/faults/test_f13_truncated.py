"""Row 13: a checkpoint's file cut short anywhere is a `DamagedError` that names it, and never loads."""
from __future__ import annotations

import random
from pathlib import Path

import pytest
from file_helpers import INFO, unsealed, write

from learnkit.errors import DamagedError
from learnkit.safeload import load_state
from learnkit.seals import read_info, seal


def refused(path: Path, content: bytes) -> bool:
    path.write_bytes(content)
    try: load_state(path)
    except DamagedError as e: return str(path) in str(e)
    return False


def offsets(n_bytes: int, n: int) -> list[int]:
    "0, the last bytes, and places between them."
    near = [0, 1, 2, 55, 56, 57, *(n_bytes - i for i in (1, 2, 16, 17, 48, 49, 56, 57, 58, 100))]
    return near + random.Random(0).sample(range(60, n_bytes - 101), n - len(near))


def count_loaded(tmp_path: Path, n: int) -> int:
    content = write(tmp_path/'whole.ckpt').read_bytes()
    load_state(tmp_path/'whole.ckpt')
    return sum(not refused(tmp_path/'cut.ckpt', content[:at]) for at in offsets(len(content), n))


def test_cut_at_some_offsets(tmp_path: Path) -> None: assert count_loaded(tmp_path, 40) == 0


@pytest.mark.full
def test_cut_at_many_offsets(tmp_path: Path) -> None:
    loaded = count_loaded(tmp_path, 500)
    print(f'row 13: 500 offsets, 0 among them, {loaded} loaded')
    assert loaded == 0


def test_what_is_said(tmp_path: Path) -> None:
    path = write(tmp_path/'a.ckpt')
    path.write_bytes(path.read_bytes()[:-1])
    for look in (load_state, read_info):
        with pytest.raises(DamagedError, match=r'a\.ckpt is no whole checkpoint: it has no seal at its end: it was'):
            look(path)
    path.write_bytes(b'')
    with pytest.raises(DamagedError, match='it is empty'): load_state(path)


def test_cut_before_it_was_sealed(tmp_path: Path) -> None:
    "The digest is right then: the archive is looked at by itself."
    body, path = unsealed(write(tmp_path/'a.ckpt')), tmp_path/'b.ckpt'
    for at in (0, 1, 21, 22, 100, len(body) // 2, len(body) - 23, len(body) - 22, len(body) - 1):
        path.write_bytes(body[:at])
        seal(path, INFO)
        with pytest.raises(DamagedError, match=r'b\.ckpt '): load_state(path)
    path.write_bytes(body)
    seal(path, INFO)
    load_state(path)
