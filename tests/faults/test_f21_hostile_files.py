"""Row 21: files that would run code. Pickles in files of weights are refused, their globals named, and nothing runs.

The function that they call is `mark` of this module, which only creates a file. That each would run is shown by
`torch.load(weights_only=False)`, which leaves the sentinel. A checkpoint has no pickle:
nothing of it is ever unpickled, and what the header says is compared with the file."""

import pickle
import shutil
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch

from learnkit.checkpoint.file import read_state
from learnkit.checkpoint.weights import read_weights
from learnkit.core.errors import DamagedError, WeightsError
from tests.faults.file_helpers import make_state, saved, with_state, write


def mark(path: str) -> None:
    "Create an empty file, as proof that this function was called."
    Path(path).touch()


class Calls:
    "An object pickled as a call of `mark`."

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return mark, (self.path,)


class Sets:
    "An object that creates its file when its state is set."

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __setstate__(self, state: dict[str, Any]) -> None:
        Path(state['path']).touch()


def in_a_callback(path: Path) -> Any:
    state = make_state()
    state['callbacks']['recorder']['history'][1]['valid_loss'] = Calls(path)
    return state


MARK = r'test_f21_hostile_files\.mark'
PAYLOADS: dict[str, tuple[Callable[[Path], Any], str]] = {  # what is saved, and a named global
    'a call': (lambda p: {'a': Calls(p)}, MARK),
    'in a state of a callback': (in_a_callback, MARK),
    'BUILD': (lambda p: {'a': Sets(p)}, r'test_f21_hostile_files\.Sets'),
    'as a key': (lambda p: {('a', Calls(p)): 1}, MARK),
    'instead of the state': (lambda p: Calls(p), MARK),
    'a numpy array': (
        lambda p: {'a': [torch.ones(2).numpy(), Calls(p)]},
        rf'numpy\..*{MARK}',
    ),
}


def is_refused(path: Path, sentinel: Path, names: str) -> None:
    with pytest.raises(WeightsError, match=names) as e:
        read_weights(path)
    assert str(path) in str(e.value) and not sentinel.exists()
    shutil.copy(path, checkpoint := path.with_suffix('.ckpt'))
    with pytest.raises(DamagedError, match=r'a\.ckpt'):
        read_state(checkpoint)
    assert not sentinel.exists()


@pytest.mark.parametrize('payload', PAYLOADS)
def test_what_torch_pickles(tmp_path: Path, payload: str) -> None:
    make, names = PAYLOADS[payload]
    sentinel, path = tmp_path / 'sentinel', tmp_path / 'a.pth'
    saved(path, make(sentinel))
    is_refused(path, sentinel, rf'would run code \(.*{names}')
    try:
        torch.load(path, weights_only=False)
    except Exception:
        pass  # it ran, whatever came of it
    assert sentinel.exists()


def test_the_format_of_torch_before_1_6(tmp_path: Path) -> None:
    sentinel, path = tmp_path / 'sentinel', tmp_path / 'a.pth'
    saved(path, PAYLOADS['a call'][0](sentinel), _use_new_zipfile_serialization=False)
    is_refused(path, sentinel, 'cannot be read')
    torch.load(path, weights_only=False)
    assert sentinel.exists()


# A checkpoint


def test_a_checkpoint_is_never_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    "A checkpoint is not written by pickle either."

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError('unpickled')

    of_pickle = 'load', 'loads', 'dump', 'dumps', 'Unpickler', 'Pickler'
    for owner, names in (
        (torch, ('load', 'save')),
        (pickle, of_pickle),
        (torch._weights_only_unpickler, ('load', 'Unpickler')),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, refuse)
    state, _ = read_state(write(tmp_path / 'a.ckpt'))
    assert state['loop']['epoch'] == 3


def test_a_message_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    path = with_state(tmp_path / 'a.ckpt', '{"a":{"$\\u001b[2J' + 'x' * 1000 + '":1}}')
    with pytest.raises(DamagedError, match=r'a\.ckpt') as e:
        read_state(path)
    assert e.value.args[0].isprintable() and len(str(e.value)) < 500


# A program


def test_sample_inputs_of_a_program(tmp_path: Path) -> None:
    "An exported program, which unpickles its sample inputs, is neither a checkpoint nor weights."
    path, sentinel = tmp_path / 'net.pt2', tmp_path / 'sentinel'
    torch.save(((Calls(sentinel),), {}), buffer := BytesIO())
    with ZipFile(path, 'w') as z:
        z.writestr('net/models/model.json', '{}')
        z.writestr('net/data/sample_inputs/model.pt', buffer.getvalue())
    with pytest.raises(DamagedError, match='another kind'):
        read_state(path)
    with pytest.raises(WeightsError, match='cannot be read as weights'):
        read_weights(path)
    assert not sentinel.exists()
    torch.load(BytesIO(buffer.getvalue()), weights_only=False)
    assert sentinel.exists()
