"""Row 16: a disk that is full. The error is the system's, the old file loads, and no temporary is left."""

import errno
import os
import random
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from learnkit.checkpoint.file import read_state, write_state
from tests.faults.file_helpers import INFO, make_state, result_of, same, write


def test_at_every_stage_of_writing(tmp_path: Path) -> None:
    path = write(tmp_path / 'a.ckpt', old := make_state(1))
    size = path.stat().st_size
    limits = [0, 1, 100, size // 2, size - 400, size - 200, size - 60, size - 1, size + 100]
    found = result_of(lambda: saved_within(path, limits))
    assert ['File too large' in f['error_text'] for f in found] == [True] * 8 + [False]
    assert all(f['left'] == ['a.ckpt'] and f['old'] for f in found[:-1])
    assert all(str(tmp_path) in f['error_text'] for f in found[:-1])
    assert not same(old, make_state())
    assert same(read_state(path)[0]['model'], dict(make_state()['model']))


def test_a_disk_without_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / 'a.ckpt')

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, 'No space left on device')  # some file systems report it here

    monkeypatch.setattr(os, 'fsync', full)
    with pytest.raises(OSError, match='No space'):
        write(path, {'w': 1})
    assert os.listdir(tmp_path) == ['a.ckpt'] and 'model' in read_state(path)[0]


def saved_within(path: Path, limits: list[int]) -> list[dict[str, Any]]:
    "Save with a limit of file sizes, which fails like a full disk."
    # each fork seeds its generator, and the size of the file depends on its numbers
    random.seed(0)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    found, before = [], read_state(path)[0]
    for limit in limits:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        error: OSError | None = None
        try:
            write_state(path, make_state(), INFO)
        except OSError as e:
            error = e
        found.append(
            {
                'error_text': str(error),
                'left': os.listdir(path.parent),
                'old': same(read_state(path)[0], before),
            }
        )
    return found
