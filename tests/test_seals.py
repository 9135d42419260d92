"""What stands at the end of a checkpoint's file, byte by byte, and what is said when it does not."""
from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from learnkit.errors import CheckpointError, DamagedError
from learnkit.seals import FORMAT, MAX_INFO, body_size, read_info, seal, verify


def sealed(path: Path, content: bytes = b'content', **info: Any) -> Path:
    path.write_bytes(content)
    seal(path, info)
    return path


@pytest.mark.parametrize('content', [b'', b'x', os.urandom(3_000_000)], ids=len)
def test_the_layout(tmp_path: Path, content: bytes) -> None:
    data = sealed(tmp_path/'a', content, epoch=3, name='ü').read_bytes()
    text = json.dumps({'format': 1, 'epoch': 3, 'name': 'ü'}, separators=(',', ':')).encode()
    start = content + text + len(text).to_bytes(8, 'little')
    assert data == start + hashlib.sha256(start).digest() + b'learnkit-seal-01'
    assert verify(tmp_path/'a') == read_info(tmp_path/'a') == json.loads(text)
    assert body_size(tmp_path/'a') == len(content)


def test_the_format_is_the_current_one_unless_it_is_given(tmp_path: Path) -> None:
    assert verify(sealed(tmp_path/'a')) == {'format': FORMAT}
    assert read_info(sealed(tmp_path/'a', format=7)) == {'format': 7}


def test_numbers_that_are_none(tmp_path: Path) -> None:
    info = verify(sealed(tmp_path/'a', value=math.inf, worst=math.nan))
    assert info['value'] == math.inf and math.isnan(info['worst'])


@pytest.mark.parametrize('info', [{'a': 'x' * MAX_INFO}, {'a': b'bytes'}, {(1,): 2}, {'a': torch.ones(1)}],
                         ids=['long', 'bytes', 'key', 'tensor'])
def test_what_cannot_be_written_beside_leaves_the_file_as_it_is(tmp_path: Path, info: dict[Any, Any]) -> None:
    (tmp_path/'a').write_bytes(b'content')
    with pytest.raises(CheckpointError, match='written beside a checkpoint'): seal(tmp_path/'a', info)
    assert (tmp_path/'a').read_bytes() == b'content'


def test_the_longest_seal_leaves_the_archive_readable(tmp_path: Path) -> None:
    torch.save({'w': torch.ones(3)}, path := tmp_path/'a.pt')
    size = path.stat().st_size
    seal(path, {'a': 'x' * (MAX_INFO - len('{"format":1,"a":""}'))})
    assert path.stat().st_size == size + MAX_INFO + 56 and len(verify(path)['a']) > 59_000
    for mmap in (False, True): assert torch.load(path, weights_only=True, mmap=mmap)['w'].tolist() == [1, 1, 1]


def test_listing_does_not_read_the_content(tmp_path: Path) -> None:
    path = sealed(tmp_path/'a', b'content', epoch=3)
    path.write_bytes(b'CONTENT' + path.read_bytes()[7:])
    assert read_info(path)['epoch'] == 3
    with pytest.raises(DamagedError, match='its digest differs: bytes have changed'): verify(path)
    with open(path, 'r+b') as f:  # a hole of 8 GB before the seal: reading that would take seconds
        tail = path.read_bytes()[7:]
        f.truncate(7)
        f.seek(8 << 30)
        f.write(tail)
    start = time.perf_counter()
    assert read_info(path)['epoch'] == 3 and time.perf_counter() - start < 0.5
    path.unlink()


def test_a_newer_format_is_told_after_the_digest(tmp_path: Path) -> None:
    path = sealed(tmp_path/'a', format=FORMAT + 1)
    with pytest.raises(CheckpointError, match='update learnkit'): verify(path)
    path.write_bytes(b'C' + path.read_bytes()[1:])
    with pytest.raises(DamagedError, match='its digest differs'): verify(path)


def test_other_threads_run_meanwhile(tmp_path: Path) -> None:
    path, n = sealed(tmp_path/'a', bytes(60_000_000)), [0]
    done = threading.Event()

    def count() -> None:
        while not done.is_set(): n[0] += 1; time.sleep(0.001)
    thread = threading.Thread(target=count)
    thread.start()
    verify(path)
    done.set()
    thread.join()
    assert n[0] >= 5


def test_nothing_of_torch_is_imported() -> None:
    code = ("import sys, types; sys.modules['learnkit'] = p = types.ModuleType('learnkit'); p.__path__ = ['learnkit']\n"
            "import learnkit.seals, learnkit.locks, learnkit.archives, learnkit.files\n"
            "assert not {'torch', 'numpy'} & set(sys.modules)")
    subprocess.run([sys.executable, '-c', code], check=True, cwd=Path(__file__).parents[1])
