"""Row 15: files that are no checkpoint, or not one as torch writes it, under a good seal: an error names the file."""
from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_LZMA

import pytest
import torch
from file_helpers import INFO, rebuilt, sealed, unsealed, write

from learnkit.errors import CheckpointError, DamagedError
from learnkit.safeload import load_state
from learnkit.seals import MAGIC, seal

Change = Callable[[Path], Any]


def ends_with(json: bytes, length: int | None = None) -> Change:
    "A right digest over a seal that says something else."
    def change(path: Path) -> None:
        body = unsealed(path) + json + struct.pack('<Q', len(json) if length is None else length)
        path.write_bytes(body + hashlib.sha256(body).digest() + MAGIC)
    return change


def sealed_as(content: bytes) -> Change:
    def change(path: Path) -> None:
        path.write_bytes(content)
        seal(path, INFO)
    return change


def without(name: str) -> Change:
    return lambda path: rebuilt(path, lambda r: {k: v for k, v in r.items() if not k.endswith(name)})


def with_more(name: str) -> Change: return lambda path: rebuilt(path, lambda r: {**r, name: b'x'})


def renamed(old: str, new: str) -> Change:
    return lambda path: rebuilt(path, lambda r: {k.replace(old, new): v for k, v in r.items()})


def twice(path: Path) -> None:
    with pytest.warns(UserWarning, match='Duplicate name'): rebuilt(path, lambda r: [*r.items(), *list(r.items())[:1]])


def patched(old: bytes, new: bytes, first: bool = False) -> Change:
    "Other bytes in the archive's own structures, under a new seal."
    def change(path: Path) -> None:
        body = unsealed(path)
        at = body.index(old) if first else body.rindex(old)
        sealed_as(body[:at] + new + body[at + len(new):])(path)
    return change


FOLDER = '.a.ckpt'
CASES: dict[str, tuple[Change, str]] = {
    'an empty file': (lambda path: path.write_bytes(b''), 'it is empty'),
    'a folder': (lambda path: (path.unlink(), path.mkdir()), 'it is a folder'),
    'a pipe': (lambda path: (path.unlink(), os.mkfifo(path)), 'it is no regular file'),
    'a text': (lambda path: path.write_text('hello' * 100), 'no seal at its end'),
    'a file of torch.save': (lambda path: torch.save({'a': 1}, path), 'no seal at its end'),
    'a magic of another version': (lambda path: path.write_bytes(path.read_bytes()[:-1] + b'9'), 'no seal at its end'),
    'nothing but a magic': (lambda path: path.write_bytes(MAGIC), 'its seal cannot be read'),
    'no JSON': (ends_with(b'{"format": 1'), 'its seal cannot be read'),
    'JSON that is no object': (ends_with(b'[1]'), 'its seal cannot be read'),
    'JSON nested deeply': (ends_with(b'[' * 50_000), 'its seal cannot be read'),
    'JSON that is no text': (ends_with(b'{"format": 1, "a": "\xff"}'), 'its seal cannot be read'),
    'a length beyond the file': (ends_with(b'{}', 2**63), 'its seal cannot be read'),
    'no format': (ends_with(b'{}'), 'its seal names no format'),
    'a format that is no number': (ends_with(b'{"format": true}'), 'its seal names no format'),
    'a seal around nothing': (sealed_as(b''), 'is no archive'),
    'a sealed text': (sealed_as(b'hello' * 100), 'is no archive'),
    'a seal around a seal': (lambda path: seal(path, INFO), 'is no archive, or was cut short'),
    'no pickle': (without('data.pkl'), r'lacks the record data\.pkl'),
    'no byte order': (without('byteorder'), 'lacks the record byteorder'),
    'no version': (without('version'), 'lacks the record version'),
    'a record missing': (without('data/3'), 'lacks the record data/3'),
    'a record too many': (with_more(f'{FOLDER}/data/999'), 'has a record data/999 too many'),
    'a record of another kind': (with_more(f'{FOLDER}/code/a.py'), r'a record \.a\.ckpt/code/a\.py, which torch'),
    'constants of TorchScript': (with_more(f'{FOLDER}/constants.pkl'), 'which torch does not write'),
    'an absolute name': (renamed(f'{FOLDER}/byteorder', '/byteorder'), 'records outside of its folder'),
    'the folder above': (renamed(f'{FOLDER}/', '../'), 'records outside of its folder'),
    'a path upwards': (with_more(f'{FOLDER}/data/../../x'), 'which torch does not write'),
    'two folders': (renamed(f'{FOLDER}/version', 'b/version'), 'records outside of its folder'),
    'a record twice': (twice, 'which torch does not write'),
    'compressed records': (lambda path: rebuilt(path, dict, ZIP_DEFLATED), 'holds compressed records'),
    'records of LZMA': (lambda path: rebuilt(path, dict, ZIP_LZMA), 'holds compressed records'),
    'a record under two names': (patched(b'byteorder', b'byteOrder', first=True), 'two names for a record'),
    'a table elsewhere': (patched(b'PK\5\6\0\0\0\0', b'PK\5\6\1\0\0\0'), 'has two ends'),
    'another version of the pickle': (lambda path: sealed(path, {'a': 1}, pickle_protocol=4), 'a pickle of a protocol'),
    'a tensor alone': (lambda path: sealed(path, torch.ones(2)), 'holds no state, but a Tensor'),
}


@pytest.mark.parametrize('case', CASES)
def test_files(tmp_path: Path, case: str) -> None:
    path = write(tmp_path/'a.ckpt')
    change, says = CASES[case]
    change(path)
    with pytest.raises(DamagedError, match=says) as e: load_state(path)
    assert str(path) in str(e.value) and isinstance(e.value, CheckpointError)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path/'link').symlink_to(tmp_path/'nowhere')
    for name in ('nothing', 'link'):
        with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path/name))): load_state(tmp_path/name)


def test_an_archive_written_by_zipfile_passes(tmp_path: Path) -> None:
    "What is refused above is refused for its reason alone."
    path = rebuilt(write(tmp_path/'a.ckpt'), dict)
    assert load_state(path)[0]['loop']['epoch'] == 3
