"""Row 15: files with a right digest that are not a checkpoint, or not written as one: an error names the file.

So it is for archives of weights that torch would not write."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_LZMA

import pytest
import torch

from learnkit.checkpoint.file import read_info, read_state
from learnkit.checkpoint.weights import read_weights
from learnkit.core.errors import CheckpointError, DamagedError, WeightsError
from tests.faults.file_helpers import INFO, forged, rebuilt, saved, split, with_metadata, write

Change = Callable[[Path], Any]


def headed(change: Callable[[dict[str, Any]], Any]) -> Change:
    "Change the header, with a correct digest."

    def forge(path: Path) -> None:
        header, data = split(path)
        made = change(header)
        forged(path, made if type(made) is dict else header, data)

    return forge


def text(old: bytes, new: bytes) -> Change:
    "Change bytes of the header, with a correct digest."

    def forge(path: Path) -> None:
        data = split(path)[1]
        header = path.read_bytes()[8 : -len(data)]
        assert old in header
        forged(path, header.replace(old, new, 1), data)

    return forge


def meta(**changes: str) -> Change:
    return lambda path: with_metadata(path, **changes)


def no_meta(name: str) -> Change:
    return headed(lambda h: str(h['__metadata__'].pop(name)))


def entry(**changes: Any) -> Change:
    return headed(lambda h: h['loss'].update(changes))


def long(length: int) -> Change:
    return lambda path: forged(path, *split(path), length=length)


def header_length(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[:8], 'little')


CASES: dict[str, tuple[Change, str]] = {
    'an empty file': (lambda path: path.write_bytes(b''), 'empty'),
    'a folder': (lambda path: (path.unlink(), path.mkdir()), 'folder'),
    'a pipe': (lambda path: (path.unlink(), os.mkfifo(path)), 'regular file'),
    'a text': (lambda path: path.write_text('hello' * 100), 'another kind'),
    'a file of torch.save': (lambda path: saved(path, {'a': 1}), r'learn\.load'),
    'a safetensors file of weights': (headed(lambda h: {'w': h['loss']}), 'another kind'),
    'seven bytes': (lambda path: path.write_bytes(b'1234567'), 'another kind'),
    'a length of 10 GB': (long(10**10), 'another kind'),
    'a length of 2**64 - 1': (long(2**64 - 1), 'another kind'),
    'a length that is too short': (
        lambda path: forged(path, *split(path), length=header_length(path) - 50),
        'header',
    ),
    'a header without an end': (text(b'"views":', b'"views"'), 'header'),
    'a header that is not UTF-8': (text(b'"views"', b'"\xffiews"'), 'header'),
    'a header nested deeply': (text(b'"dtype":"F32"', b'"dtype":' + b'[' * 50_000), 'header'),
    'metadata that are a list': (
        text(b'{"__metadata__":{"sha256":"', b'{"__metadata__":["sha256":"'),
        'kind',
    ),
    'no state': (no_meta('state'), 'state'),
    'no info': (no_meta('info'), 'info'),
    'no format': (no_meta('learnkit'), 'learnkit'),
    'a format that is not a number': (meta(learnkit='two'), 'two'),
    'info that is a list': (meta(info='[1]'), 'info'),
    'info that is not JSON': (meta(info='{'), 'info'),
    'a state that is not a string': (headed(lambda h: h['__metadata__'].update(state={})), 'state'),
    'a state that is not JSON': (meta(state='{'), 'state'),
    'a state that is a list': (meta(state='[]'), 'list'),
    'views that are a list': (meta(views='[]'), 'state'),
    'a tensor that is missing': (headed(lambda h: str(h.pop('loss'))), 'header'),
    'a tensor too many': (
        headed(lambda h: h.update(v={'dtype': 'U8', 'shape': [0], 'data_offsets': [0, 0]})),
        'all',
    ),
    'a tensor that the state alone has': (meta(state='{"w":{"$tensor":"v"}}'), 'v'),
    'a name twice': (text(b'"count":{"d', b'"loss":{"d'), 'twice'),
    'a dtype that is unknown': (entry(dtype='F31'), 'F31'),
    'a dtype of another size': (entry(dtype='F64'), 'loss'),
    'a shape that is larger': (entry(shape=[3]), 'loss'),
    'a shape that is smaller': (entry(shape=[1]), 'loss'),
    'a shape that is huge': (entry(shape=[2**62, 2**62]), 'loss'),
    'a shape that is huge and empty': (entry(shape=[2**40, 2**40, 0]), 'loss'),
    'a shape with a negative size': (entry(shape=[-1]), 'loss'),
    'a shape with a fraction': (entry(shape=[2.0]), 'loss'),
    'a shape with a truth value': (entry(shape=[True, 2]), 'loss'),
    'offsets that overlap': (entry(data_offsets=[0, 8]), 'where they should'),
    'offsets beyond the file': (entry(data_offsets=[2**40, 2**40 + 8]), 'where they should'),
    'offsets the wrong way round': (entry(data_offsets=[16, 8]), 'where they should'),
    'offsets that are three': (entry(data_offsets=[8, 16, 16]), 'where they should'),
    'no offsets': (headed(lambda h: str(h['loss'].pop('data_offsets'))), 'offsets'),
    'an entry that is a number': (headed(lambda h: h.update(loss=3)), 'header'),
    'bytes behind the last tensor': (
        lambda path: forged(path, split(path)[0], split(path)[1] + b'x'),
        'should have',
    ),
    'a marker that is unknown': (meta(state='{"w":{"$call":"os.system"}}'), r'\$call'),
    'a view that is no permutation': (meta(views='{"loss":{"order":[1]}}'), 'state'),
    'a view of another size': (meta(views='{"loss":{"dtype":"complex128"}}'), 'state'),
    'a view that is a function': (meta(views='{"loss":{"dtype":"save"}}'), 'save'),
    'a view of a quantized dtype': (meta(views='{"loss":{"dtype":"qint32"}}'), 'qint32'),
    'a key that is a list': (meta(state='{"a":{"$dict":[[[1],2]]}}'), 'state'),
    'a key twice': (meta(state='{"a":{"$dict":[[1,2],[1,3]]}}'), 'twice'),
    'bytes that are none': (meta(state='{"a":{"$bytes":"x"}}'), 'state'),
    'a complex number of three': (meta(state='{"a":{"$complex":[1.0,2.0,3.0]}}'), r'\$complex'),
}


@pytest.mark.parametrize('case', CASES)
def test_files(tmp_path: Path, case: str) -> None:
    path = write(tmp_path / 'a.ckpt', {'loss': torch.ones(2), 'count': torch.tensor(3)})
    change, expected_text = CASES[case]
    change(path)
    with pytest.raises(DamagedError, match=expected_text) as e:
        read_state(path)
    assert str(path) in str(e.value)
    assert isinstance(e.value, CheckpointError)
    assert len(str(e.value)) < 500


def test_a_forgery_that_changes_nothing_loads(tmp_path: Path) -> None:
    "The files above are refused only for the named reason."
    path = write(tmp_path / 'a.ckpt')
    assert read_state(forged(path, *split(path)))[0]['loop']['epoch'] == 3
    assert read_info(path) == {'format': 2, **INFO}


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / 'link').symlink_to(tmp_path / 'nowhere')
    for name in ('nothing', 'link'):
        with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / name))):
            read_state(tmp_path / name)


# Archives of weights


def without(name: str) -> Change:
    return lambda path: rebuilt(
        path, lambda r: {k: v for k, v in r.items() if not k.endswith(name)}
    )


def with_more(name: str) -> Change:
    return lambda path: rebuilt(path, lambda r: {**r, name: b'x'})


def renamed(old: str, new: str) -> Change:
    return lambda path: rebuilt(path, lambda r: {k.replace(old, new): v for k, v in r.items()})


def twice(path: Path) -> None:
    with pytest.warns(UserWarning, match='Duplicate name'):
        rebuilt(path, lambda r: [*r.items(), *list(r.items())[:1]])


def patched(old: bytes, new: bytes, first: bool = False) -> Change:
    "Change bytes of the archive's structures."

    def change(path: Path) -> None:
        body = path.read_bytes()
        at = body.index(old) if first else body.rindex(old)
        path.write_bytes(body[:at] + new + body[at + len(new) :])

    return change


def in_the_table(at: int, bit: int) -> Change:
    "Set a bit in each entry of the table of records."

    def change(path: Path) -> None:
        body, entry = bytearray(path.read_bytes()), 0
        while (entry := body.find(b'PK\1\2', entry + 1)) > 0:
            body[entry + at] |= bit
        path.write_bytes(body)

    return change


def hidden(path: Path) -> None:
    body = path.read_bytes()
    at = body.index(b'PK\1\2')
    path.write_bytes(body[:at] + b'hidden' + body[at:])


ARCHIVES: dict[str, tuple[Change, str]] = {
    'no pickle': (without('data.pkl'), "none of torch's"),
    'no version': (without('version'), 'cannot be read'),
    'a record missing': (without('data/0'), 'cannot be read'),
    'a record of another kind': (with_more('a/extra.py'), r'a/extra\.py'),
    'an absolute name': (renamed('a/byteorder', '/byteorder'), '/byteorder'),
    'the folder above': (with_more('../data/7'), 'two folders'),
    'a path upwards': (with_more('a/data/../../x'), r'a/data/\.\./'),
    'two folders': (renamed('a/version', 'b/version'), 'two folders'),
    'a record twice': (twice, 'twice'),
    'records with the attribute of a folder': (in_the_table(38, 0x10), 'torch does not write'),
    'encrypted records': (in_the_table(8, 1), 'torch does not write'),
    'compressed records': (lambda path: rebuilt(path, dict, ZIP_DEFLATED), 'compressed'),
    'records of LZMA': (lambda path: rebuilt(path, dict, ZIP_LZMA), 'compressed'),
    'a record under two names': (patched(b'byteorder', b'byteOrder', first=True), 'byteorder'),
    'a table elsewhere': (
        patched(b'PK\5\6\0\0\0\0', b'PK\5\6\1\0\0\0'),
        'two ends|cannot|multiple',
    ),
    'an end behind the end': (
        lambda path: path.write_bytes(path.read_bytes() + path.read_bytes()[-22:]),
        'is damaged',
    ),
    'a comment': (lambda path: path.write_bytes(path.read_bytes()[:-2] + b'\1\0x'), 'two ends'),
    'bytes before the archive': (
        lambda path: path.write_bytes(b'PK' + path.read_bytes()),
        'two ends',
    ),
    'bytes before the table': (hidden, 'two ends'),
}


@pytest.mark.parametrize('case', ARCHIVES)
def test_archives(tmp_path: Path, case: str) -> None:
    path = saved(tmp_path / 'a.pth', {'w': torch.ones(3), 'b': torch.ones(1)})
    assert read_weights(path).model['w'].tolist() == [1, 1, 1]
    change, expected_text = ARCHIVES[case]
    change(path)
    with pytest.raises(WeightsError, match=expected_text) as e:
        read_weights(path)
    assert str(path) in str(e.value)


def test_an_archive_written_by_zipfile_loads(tmp_path: Path) -> None:
    path = rebuilt(saved(tmp_path / 'a.pth', {'w': torch.ones(3)}), dict)
    assert read_weights(path).model['w'].tolist() == [1, 1, 1]
