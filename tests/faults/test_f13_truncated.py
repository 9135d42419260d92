"""Row 13: a checkpoint's file cut short anywhere is a `DamagedError` that names it, and never loads."""

import random
from pathlib import Path

import pytest

from learnkit.checkpoint.file import read_info, read_state
from learnkit.core.errors import DamagedError
from tests.faults.file_helpers import forged, split, write


def refused(path: Path, content: bytes) -> bool:
    path.write_bytes(content)
    try:
        read_state(path)
    except DamagedError as e:
        return str(path) in str(e)
    return False


def offsets(n_bytes: int, n: int) -> list[int]:
    "Return 0, the ends of the header's parts, the last bytes, and places between them."
    near = [0, 1, 7, 8, 9, 34, 35, 36, 98, 99, 100, *(n_bytes - i for i in (1, 2, 16, 100))]
    return near + random.Random(0).sample(range(101, n_bytes - 101), n - len(near))


def count_loaded(tmp_path: Path, n: int) -> int:
    content = write(tmp_path / 'whole.ckpt').read_bytes()
    read_state(tmp_path / 'whole.ckpt')
    return sum(not refused(tmp_path / 'cut.ckpt', content[:at]) for at in offsets(len(content), n))


def test_cut_at_some_offsets(tmp_path: Path) -> None:
    assert count_loaded(tmp_path, 40) == 0


@pytest.mark.full
def test_cut_at_many_offsets(tmp_path: Path) -> None:
    loaded = count_loaded(tmp_path, 500)
    print(f'row 13: 500 offsets, 0 among them, {loaded} loaded')
    assert loaded == 0


def test_by_every_reader(tmp_path: Path) -> None:
    path = write(tmp_path / 'a.ckpt')
    content = path.read_bytes()
    for other in (content[:-1], content[:300], b'', content + b'\0'):
        path.write_bytes(other)
        for read in (read_state, read_info):
            with pytest.raises(DamagedError, match=r'a\.ckpt'):
                read(path)


def test_a_right_digest_of_half_the_data(tmp_path: Path) -> None:
    header, data = split(write(tmp_path / 'a.ckpt'))
    for at in (0, 1, len(data) // 2, len(data) - 1):
        with pytest.raises(DamagedError, match=r'b\.ckpt'):
            read_state(forged(tmp_path / 'b.ckpt', header, data[:at]))
    read_state(forged(tmp_path / 'b.ckpt', header, data))
