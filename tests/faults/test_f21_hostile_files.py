"""Row 21: files that would run code. Pickles in files of weights are refused, their globals named, and nothing runs.

That each would run is shown by `torch.load(weights_only=False)`, which leaves the sentinel. A checkpoint has no pickle:
nothing of it is ever unpickled, and what the header says is compared with the file."""

from __future__ import annotations

import builtins
import functools
import operator
import os
import pickle
import shutil
from collections import OrderedDict
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from torch import nn

from learnkit.checkpoint.file import read_state
from learnkit.checkpoint.weights import read_weights
from learnkit.core.errors import DamagedError, WeightsError
from tests.faults.file_helpers import make_state, members, saved, with_pickle, with_state, write


class Calls:
    "An object pickled as a call of `f`."

    def __init__(self, f: Any, *args: Any) -> None:
        self.f, self.args = f, args

    def __reduce__(self) -> Any:
        return self.f, self.args


class Sets:
    "An object that creates its file when its state is set."

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __setstate__(self, state: dict[str, Any]) -> None:
        Path(state['path']).touch()


class Net(nn.Module):
    "A module that creates its file when its state is set."

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = str(path)

    def __setstate__(self, state: dict[str, Any]) -> None:
        Path(state['path']).touch()
        super().__setstate__(state)


def opens(path: Path) -> str:
    return f'open({str(path)!r}, "w").close()'


def by_load(path: Path) -> Any:
    "Return a `torch.load` of a second file, which creates the file."
    torch.save(Calls(os.system, f'touch {path}'), inner := path.with_name('inner.pt'))
    return Calls(functools.partial(torch.load, weights_only=False), str(inner))


def by_hub(path: Path) -> Any:
    "Return a call of torch.hub, which runs the hubconf.py of a folder."
    path.with_name('hub').mkdir(exist_ok=True)
    path.with_name('hub').joinpath('hubconf.py').write_text(f'def go():\n    {opens(path)}\n')
    return Calls(
        functools.partial(torch.hub.load, source='local'), str(path.with_name('hub')), 'go'
    )


def deep(path: Path) -> Any:
    state = make_state()
    state['callbacks']['recorder']['history'][1]['valid_loss'] = Calls(os.system, f'touch {path}')
    return state


def by_attributes(path: Path) -> Any:
    "Return a chain of getattr from a harmless object."
    module = Calls(getattr, Calls(getattr, Calls(__import__, 'os'), 'path'), 'os')
    return Calls(operator.call, Calls(getattr, module, 'system'), f'touch {path}')


def in_a_dict(path: Path) -> Any:
    "Attributes of an OrderedDict, as a state dict has them."
    weights: Any = OrderedDict(w=torch.ones(1))
    weights._metadata = Calls(os.system, f'touch {path}')
    return {'model': weights}


def in_hooks(path: Path) -> Any:
    return {
        'model': {
            'w': Calls(
                torch._utils._rebuild_tensor_v2,
                *(
                    torch.ones(2).untyped_storage(),
                    0,
                    (2,),
                    (1,),
                    False,
                    OrderedDict(a=Calls(os.system, f'touch {path}')),
                ),
            )
        }
    }


PAYLOADS: dict[
    str, tuple[Callable[[Path], Any], str]
] = {  # what is saved, and a global that is named
    'os.system': (lambda p: {'a': Calls(os.system, f'touch {p}')}, 'posix.system'),
    'eval': (lambda p: {'a': Calls(builtins.eval, opens(p))}, 'eval'),
    'exec': (lambda p: {'a': Calls(builtins.exec, opens(p))}, 'exec'),
    'getattr': (lambda p: {'a': by_attributes(p)}, 'call.*__import__.*getattr'),
    'a method by its name': (
        lambda p: {'a': Calls(operator.methodcaller('touch'), p)},
        'methodcaller',
    ),
    'torch.load': (lambda p: {'a': by_load(p)}, r'torch\.serialization\.load'),
    'torch.hub': (lambda p: {'a': by_hub(p)}, r'torch\.hub\.load'),
    'in a state of a callback': (deep, 'posix.system'),
    'BUILD': (lambda p: {'a': Sets(p)}, r'test_f21_hostile_files\.Sets'),
    'a module': (lambda p: {'model': Net(p)}, r'test_f21_hostile_files\.Net'),
    'attributes of a dict': (in_a_dict, 'posix.system'),
    'hooks of a tensor': (in_hooks, 'posix.system'),
    'as a key': (lambda p: {('a', Calls(os.system, f'touch {p}')): 1}, 'posix.system'),
    'instead of the state': (lambda p: Calls(os.system, f'touch {p}'), 'posix.system'),
    'a numpy scalar': (
        lambda p: {'a': [torch.ones(2).numpy(), Calls(os.system, f'touch {p}')]},
        r'numpy\..*posix',
    ),
}
RAW = {  # pickles as bytes; %b is a shell command
    'protocol 0': (b"(S'%b'\nios\nsystem\n.", 'cannot be read'),
    'protocol 4': (b'\x80\x04\x8c\x02os\x8c\x06system\x93\x8c%c%b\x85R.', 'protocol 4'),
    'in a persistent id': (
        b'\x80\x02(X\7\0\0\0storagecos\nsystem\nU%c%b\x85RX\1\0\0\x000X\3\0\0\0cpuK\4tQ.',
        r'os\.system',
    ),
    'a persistent id of its own': (b'\x80\x02cos\nsystem\nU%c%b\x85RQ.', r'os\.system'),
    'what is broken off': (b'\x80\x02cos\nsystem\nU%c%b\x85R', 'cannot be read'),
    'a shadowed name': (
        b'\x80\x02ctorch\nserialization.os.system\nU%c%b\x85R.',
        r'torch\.serialization\.os\.system',
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


@pytest.mark.parametrize('payload', ['os.system', 'BUILD'])
def test_the_format_of_torch_before_1_6(tmp_path: Path, payload: str) -> None:
    sentinel, path = tmp_path / 'sentinel', tmp_path / 'a.pth'
    saved(path, PAYLOADS[payload][0](sentinel), _use_new_zipfile_serialization=False)
    is_refused(path, sentinel, 'cannot be read')
    torch.load(path, weights_only=False)
    assert sentinel.exists()


@pytest.mark.parametrize('payload', RAW)
def test_bytes(tmp_path: Path, payload: str) -> None:
    form, names = RAW[payload]
    command = f'touch {tmp_path}/sentinel'.encode()
    path = with_pickle(
        tmp_path / 'a.pth', form.replace(b'%c', bytes([len(command)])).replace(b'%b', command)
    )
    is_refused(path, tmp_path / 'sentinel', names)
    try:
        torch.load(path, weights_only=False)
    except Exception:
        pass
    # Python 2's names have no dots
    assert (tmp_path / 'sentinel').exists() == (payload != 'a shadowed name')


def test_a_name_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    path = with_pickle(tmp_path / 'a.pth', b'\x80\x02c\x1b[2Jos\nsystem\x07' + b'x' * 1000 + b'\n.')
    with pytest.raises(WeightsError, match='would run code') as e:
        read_weights(path)
    assert e.value.args[0].isprintable() and len(str(e.value)) < 400


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


STATES = {
    'a marker of code': '{"a":{"$reduce":["os","system","touch %s"]}}',
    'a pickle as bytes, not as a state': '{"$bytes":"%s"}',
    'a name of a function as a dtype': '{"a":{"$dtype":"torch.hub.load"}}',
    'an object of JSON alone': '"touch %s"',
}


@pytest.mark.parametrize('kind', STATES)
def test_a_state_that_names_code(tmp_path: Path, kind: str) -> None:
    path = with_state(tmp_path / 'a.ckpt', STATES[kind].replace('%s', str(tmp_path / 'sentinel')))
    with pytest.raises(DamagedError, match=r'a\.ckpt') as e:
        read_state(path)
    assert e.value.args[0].isprintable() and not (tmp_path / 'sentinel').exists()


def test_a_message_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    path = with_state(tmp_path / 'a.ckpt', '{"a":{"$\x1b[2J' + 'x' * 1000 + '":1}}')
    with pytest.raises(DamagedError, match=r'a\.ckpt') as e:
        read_state(path)
    path = with_state(tmp_path / 'a.ckpt', '{"a":{"$\\u001b[2J' + 'x' * 1000 + '":1}}')
    with pytest.raises(DamagedError, match=r'a\.ckpt') as e:
        read_state(path)
    assert e.value.args[0].isprintable() and len(str(e.value)) < 500


# A program


def is_refused_everywhere(path: Path, sentinel: Path) -> None:
    "An exported program is neither a checkpoint nor weights."
    with pytest.raises(DamagedError, match='another kind'):
        read_state(path)
    for suffix in ('.pt2', '.pth'):
        shutil.copy(path, other := path.with_suffix(suffix))
        with pytest.raises(WeightsError, match='is a program'):
            read_weights(other)
    assert not sentinel.exists()


def hostile(sentinel: Path) -> bytes:
    torch.save(((Calls(os.system, f'touch {sentinel}'),), {}), buffer := BytesIO())
    return buffer.getvalue()


def test_sample_inputs_of_a_program(tmp_path: Path) -> None:
    path, sentinel = tmp_path / 'net.ckpt', tmp_path / 'sentinel'
    with ZipFile(path, 'w') as z:
        z.writestr('net/models/model.json', '{}')
        z.writestr('net/data/sample_inputs/model.pt', hostile(sentinel))
    is_refused_everywhere(path, sentinel)


@pytest.mark.full
def test_sample_inputs_of_a_real_program(tmp_path: Path) -> None:
    program, path, sentinel = tmp_path / 'net.pt2', tmp_path / 'a.ckpt', tmp_path / 'sentinel'
    torch.export.save(torch.export.export(nn.Linear(2, 1), (torch.ones(3, 2),)), program)
    with ZipFile(path, 'w') as z:
        for name, data in members(program).items():
            z.writestr(name, hostile(sentinel) if 'sample_inputs' in name else data)
    is_refused_everywhere(path, sentinel)
    torch.load(BytesIO(hostile(sentinel)), weights_only=False)
    assert sentinel.exists()
    print(f'row 21: {len(PAYLOADS) + len(RAW)} hostile pickles and an exported program, 0 ran')


def test_the_states_that_are_saved_pass(tmp_path: Path) -> None:
    read_state(write(tmp_path / 'a.ckpt'))
    saved(tmp_path / 'a.pth', make_state()['model'])
    assert len(read_weights(tmp_path / 'a.pth').model) == 13
