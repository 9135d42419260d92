"""Row 15: files with a right digest that are not a checkpoint, or not written as one: an error names the file."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from learnkit.checkpoint.file import FORMAT, read_info, read_state
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


CASES: dict[str, Change] = {
    'an empty file': lambda path: path.write_bytes(b''),
    'a folder': lambda path: (path.unlink(), path.mkdir()),
    'a pipe': lambda path: (path.unlink(), os.mkfifo(path)),
    'a text': lambda path: path.write_text('hello' * 100),
    'a file of torch.save': lambda path: saved(path, {'a': 1}),
    'a safetensors file of weights': headed(lambda h: {'w': h['loss']}),
    'a header without an end': text(b'"views":', b'"views"'),
    'a header that is not UTF-8': text(b'"views"', b'"\xffiews"'),
    'no state': no_meta('state'),
    'no digest': no_meta('sha256'),
    'a format that is not a number': meta(learnkit='two'),
    'info that is not JSON': meta(info='{'),
    'a state that is not a string': headed(lambda h: h['__metadata__'].update(state={})),
    'a state that is a list': meta(state='[]'),
    'a tensor that is missing': headed(lambda h: str(h.pop('loss'))),
    'a tensor that the state alone has': meta(state='{"w":{"$tensor":"v"}}'),
    'a dtype that is unknown': entry(dtype='F31'),
    'a shape with a negative size': entry(shape=[-1]),
    'offsets that overlap': entry(data_offsets=[0, 8]),
    'offsets beyond the file': entry(data_offsets=[2**40, 2**40 + 8]),
    'no offsets': headed(lambda h: str(h['loss'].pop('data_offsets'))),
    'bytes behind the last tensor': lambda path: forged(
        path, split(path)[0], split(path)[1] + b'x'
    ),
    'a marker that is unknown': meta(state='{"w":{"$call":"os.system"}}'),
    'a view that is no permutation': meta(views='{"loss":{"order":[1]}}'),
    'a view of another size': meta(views='{"loss":{"dtype":"complex128"}}'),
    'a view that is a function': meta(views='{"loss":{"dtype":"save"}}'),
    'a key that is a list': meta(state='{"a":{"$dict":[[[1],2]]}}'),
    'bytes that are none': meta(state='{"a":{"$bytes":"x"}}'),
}


@pytest.mark.parametrize('case', CASES)
def test_files(tmp_path: Path, case: str) -> None:
    path = write(tmp_path / 'a.ckpt', {'loss': torch.ones(2), 'count': torch.tensor(3)})
    CASES[case](path)
    with pytest.raises(DamagedError, match='not a whole checkpoint') as e:
        read_state(path)
    assert str(path) in str(e.value)
    assert isinstance(e.value, CheckpointError)
    assert len(str(e.value)) < 500


def test_a_forgery_that_changes_nothing_loads(tmp_path: Path) -> None:
    "The files above are refused only for the named reason."
    path = write(tmp_path / 'a.ckpt')
    assert read_state(forged(path, *split(path)))[0]['loop']['epoch'] == 3
    assert read_info(path) == {'format': FORMAT, **INFO}


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / 'link').symlink_to(tmp_path / 'nowhere')
    for name in ('nothing', 'link'):
        with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / name))):
            read_state(tmp_path / name)


@pytest.mark.parametrize('name', ['data.pkl', 'data/0'])
def test_archives_of_weights_without_a_record(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path / 'a.pth', {'w': torch.ones(3), 'b': torch.ones(1)})
    assert read_weights(path).model['w'].tolist() == [1, 1, 1]
    rebuilt(path, lambda r: {k: v for k, v in r.items() if not k.endswith(name)})
    with pytest.raises(WeightsError, match='Nothing was loaded') as e:
        read_weights(path)
    assert str(path) in str(e.value)
