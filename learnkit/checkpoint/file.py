# SPDX-License-Identifier: Apache-2.0
"""Read and write a checkpoint: one safetensors file, with tensors as data and other values as JSON in its metadata.

    sha256      digest of the whole file with zeros instead of these 64 characters
    learnkit    version of this layout
    info        JSON: summary for a list of checkpoints; only the header has to be read
    state       JSON: the nested state, with {"$tensor": name} instead of each tensor
    views       JSON: dtype and order of dimensions of each tensor that the format cannot describe

Every tool that reads safetensors files can read the tensors. The format contains no pickle, so loading a file cannot
execute code. The digest detects damage, not forgery: anyone who can write a file can also write its digest.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn

from learnkit.checkpoint.host import allocate_bytes
from learnkit.core.errors import CheckpointError, DamagedError
from learnkit.core.file_tensor import FileTensor
from learnkit.core.files import atomic_write, identify_version
from learnkit.core.plain import identify_memory, is_dense

FORMAT = 3  # version of the layout of files
MIN_DEFERRED = 1 << 20  # size in bytes from which `read_state` can leave a tensor in the file

_ATOMS = (type(None), bool, int, float, str)
# dtypes of all supported versions of the library; others are stored as bytes
_DTYPES = {
    getattr(torch, name)
    for name in (
        'float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 bool '
        'int64 int32 int16 int8 uint64 uint32 uint16 uint8'
    ).split()
}

State = dict[str, Any]


# -- writing ---------------------------------------------------------------------------------------


def write_state(
    path: str | Path,  # path of the file; missing folders are created
    state: State,  # tensors, numbers, strings, bytes, None, and lists, tuples or dicts of them
    info: dict[str, Any],  # summary for `read_info`: JSON values; floats may be non-finite
) -> None:
    """Write a state into a file, atomically.

    Tensors may be on any device; their gradients are not written. Tensors that share the same memory are written once
    and are read as one tensor. NumPy scalars become Python numbers, and Parameters become tensors.

    Raises `CheckpointError` for a state that could not be read back, and `OSError` if the file cannot
    be written. An error leaves an existing file unchanged.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, 'a.ckpt')
    ...     write_state(path, {'model': {'w': torch.ones(2)}, 'betas': (0.9, 0.99)}, {'epoch': 3})
    ...     read_state(path)
    ({'model': {'w': tensor([1., 1.])}, 'betas': (0.9, 0.99)}, {'format': 3, 'epoch': 3})
    """
    packer = _Packer()
    try:
        packed = packer.pack(state, ())
        metadata = {
            'sha256': '0' * 64,
            'learnkit': str(FORMAT),
            'info': _to_json(info),
            'state': _to_json(packed),
            'views': _to_json(packer.views),
        }
        with atomic_write(path) as tmp:
            write_tensors(tmp, packer.tensors, metadata)
            with tmp.open('rb+') as f:
                start, digest = _hash_file(f, '0' * 64)
                f.seek(start)
                f.write(digest.encode())
    except (ValueError, TypeError, RecursionError) as e:
        raise CheckpointError(f'{path} was not written: {e}.') from None


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    "Write a safetensors file at a temporary path. Raises `OSError` if it cannot be written."
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    stored: dict[str, Tensor] = {}
    storages = set[int]()
    for name, t in tensors.items():
        t = t.cpu().contiguous()
        storage = t.untyped_storage().data_ptr()
        # the library refuses tensors that share a storage
        stored[name] = t.clone() if storage in storages else t
        storages.add(storage)
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(stored, path, metadata)
    except SafetensorError as e:
        raise OSError(f'{path} cannot be written: {e}') from None
    path.chmod(mode)  # the library's own file can be read by its owner only


def _hash_file(f: BinaryIO, digest: str) -> tuple[int, str]:
    "Return the position of the digest in a file, and the SHA-256 of the file with zeros instead of the digest."
    length = f.read(8)
    header = f.read(int.from_bytes(length, 'little'))
    at = header.index(f'"sha256":"{digest}'.encode()) + len('"sha256":"')
    sha = hashlib.sha256(length + header[:at] + b'0' * 64 + header[at + 64 :])
    while chunk := f.read(1 << 20):
        sha.update(chunk)
    return len(length) + at, sha.hexdigest()


def _to_json(value: Any) -> str:
    return json.dumps(value, separators=(',', ':'))


class _Packer:
    "Converter of a state to JSON values; it collects the tensors by name."

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}  # stored tensors, possibly views of the originals
        self.views: dict[str, dict[str, Any]] = {}
        self.names: dict[Any, str] = {}  # names by memory layout (device, address, dtype, shape)

    def pack(self, value: Any, key_path: tuple[Any, ...]) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        kind = type(value)
        if kind in _ATOMS:
            return value
        if isinstance(value, Tensor):
            return {'$tensor': self._name(value, key_path)}
        if kind is bytes:
            return {'$bytes': value.hex()}
        if kind is complex:
            return {'$complex': [value.real, value.imag]}
        if isinstance(value, Mapping):
            return self._pack_mapping(value, key_path)
        if isinstance(value, (list, tuple)):
            items = [self.pack(v, (*key_path, i)) for i, v in enumerate(value)]
            return items if isinstance(value, list) else {'$tuple': items}
        raise ValueError(
            f'the state has a {kind.__name__} at {_format_keys(key_path)}. Keep tensors, numbers, strings, '
            'bytes, None, and lists, tuples or dicts of them'
        )

    def _pack_mapping(self, value: Mapping[Any, Any], key_path: tuple[Any, ...]) -> dict[str, Any]:
        for key in value:
            if type(key) not in _ATOMS and not _is_tuple_of_atoms(key):
                raise ValueError(
                    f'the state has a key that is a {type(key).__name__} at {_format_keys(key_path)}. Keep '
                    'strings or numbers as keys'
                )
        packed = {key: self.pack(v, (*key_path, key)) for key, v in value.items()}
        if all(type(key) is str and not key.startswith('$') for key in value):
            return packed
        return {'$dict': [[self.pack(key, key_path), v] for key, v in packed.items()]}

    def _name(self, t: Tensor, key_path: tuple[Any, ...]) -> str:
        "Return the name of a stored tensor, and store it if it is new."
        if type(t) not in (Tensor, nn.Parameter) or not is_dense(t):
            raise ValueError(
                f'the state has a {type(t).__name__} ({t.layout}, {t.device}) at {_format_keys(key_path)}. '
                'Keep plain, dense tensors in states'
            )
        t = t.detach().resolve_conj().resolve_neg()
        memory = identify_memory(t)
        if memory not in self.names:
            self.names[memory] = self._add(t, key_path)
        return self.names[memory]

    def _add(self, t: Tensor, key_path: tuple[Any, ...]) -> str:
        name = '.'.join(map(str, key_path))
        while name in self.tensors or name == '__metadata__':
            name += '_'
        view: dict[str, Any] = {}
        # dimensions in the order of memory, so that the stored tensor is contiguous
        order = sorted(range(t.ndim), key=t.stride().__getitem__, reverse=True)
        if order != [*range(t.ndim)]:
            view['order'] = sorted(range(t.ndim), key=order.__getitem__)
            t = t.permute(order)
        if t.dtype not in _DTYPES:
            view['dtype'] = str(t.dtype).removeprefix('torch.')
            t = t.contiguous().unsqueeze(-1).view(torch.uint8)
        if view:
            self.views[name] = view
        self.tensors[name] = t
        return name


def _is_tuple_of_atoms(key: Any) -> bool:
    return type(key) is tuple and all(type(part) in _ATOMS for part in key)


def _format_keys(key_path: tuple[Any, ...]) -> str:
    "Return the position of a value in the state, shortened, because keys may have any length."
    return ''.join(f'[{ascii(key)[:60]}]' for key in key_path[:8])


# -- reading ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Entry:
    "Place of a tensor in a file, which can be read until the file changes."

    path: Path
    version: Any  # result of `identify_version`
    offset: int  # in bytes
    like: Tensor  # tensor on the meta device, as it is stored
    view: Mapping[str, Any] = field(default_factory=dict)  # its entry of `views`

    def read(self) -> Tensor:
        "Return a new tensor. The file is not mapped: a process ends if a mapped file is cut short."
        raw = allocate_bytes(self.like.nbytes)
        content: Any = raw.numpy()  # mypy does not know that it is a buffer
        try:
            with self.path.open('rb') as f:
                f.seek(self.offset)
                n = f.readinto(content)
                is_same = n == len(raw) and identify_version(os.fstat(f.fileno())) == self.version
        except FileNotFoundError:
            is_same = False
        if not is_same:
            raise damaged_error(self.path, 'it was changed or removed while it was read')
        return _restore_view(raw.view(self.like.dtype).view(self.like.shape), self.view)

    def defer(self) -> Tensor:
        "Return a tensor that is read when it is needed."
        return FileTensor.make(_restore_view(self.like, self.view), self.read)


def read_state(
    path: str | Path,
    deferred: Collection[str] = (),  # entries of the state whose large tensors are `FileTensor`s
) -> tuple[State, dict[str, Any]]:
    """Return the state in a file and its `info`, and verify the digest of the whole file.

    The tensors are copies on the CPU: the file is neither mapped nor left open. Tensors of the entries `deferred`
    stay in the file until they are used, unless another entry has them too.

    Raises `FileNotFoundError`, `DamagedError` for a damaged file, and `CheckpointError` for a format
    that this version cannot read.
    """
    path = Path(path)
    info = read_info(path)
    try:
        stored, metadata = _find_tensors(path)
        with path.open('rb') as f:
            digest = _hash_file(f, metadata['sha256'])[1]
    except (OSError, MemoryError):
        raise
    except Exception as e:  # the library's errors have no common base class
        raise damaged_error(path, f'it cannot be read: {shorten_error(e)}') from None
    if digest != metadata['sha256']:
        raise damaged_error(path, 'its digest differs: bytes have changed since it was written')
    _check_format(info['format'], path)
    try:
        return _unpack_state(metadata, stored, deferred), info
    except DamagedError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as e:
        raise damaged_error(path, f'its state cannot be read: {shorten_error(e)}') from None


def read_tensors(
    path: Path, device: torch.device | str | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    "Return the tensors of a safetensors file, and its metadata. A file cut short raises an error of the library."
    stored, metadata = _find_tensors(path)
    return {name: entry.read().to(device or 'cpu') for name, entry in stored.items()}, metadata


def _find_tensors(path: Path) -> tuple[dict[str, _Entry], dict[str, str]]:
    "Return the places of the tensors of a safetensors file, which the library verifies, and its metadata."
    from safetensors import safe_open

    with path.open('rb') as f, safe_open(path, framework='pt') as file:
        version = identify_version(os.fstat(f.fileno()))
        length = int.from_bytes(f.read(8), 'little')
        header = json.loads(f.read(length))
        stored = {}
        for name in file.keys():  # noqa: SIM118
            # a view of the mapped file, of which nothing is read
            like = torch.empty_like(file.get_tensor(name), device='meta')
            offset = 8 + length + header[name]['data_offsets'][0]
            # absolute, as the process may change its working directory
            stored[name] = _Entry(path.absolute(), version, offset, like)
        return stored, file.metadata() or {}


def read_info(path: str | Path) -> dict[str, Any]:
    """Return the `info` of a file, with its format as `'format'`. Only the header is read; it is not verified.

    Raises `FileNotFoundError`, and `DamagedError` for a file without a valid header.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    path.stat()  # raises `FileNotFoundError`
    if not path.is_file():
        raise damaged_error(path, 'it is not a regular file')  # reading a pipe would wait forever
    try:
        with safe_open(path, framework='pt') as file:
            metadata = file.metadata() or {}
        return {'format': int(metadata['learnkit']), **json.loads(metadata['info'])}
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as e:
        raise damaged_error(
            path,
            f'it was cut short, or is another kind of file ({shorten_error(e)}). Weights are loaded by '
            '`learn.load(path)`',
        ) from None


def is_state_file(path: Path) -> bool:
    "Return True for a file of `write_state`."
    try:
        return bool(read_info(path))
    except DamagedError:
        return False


def _unpack_state(
    metadata: dict[str, str], stored: dict[str, _Entry], deferred: Collection[str]
) -> State:
    "Return the state that a file's metadata describe; raise `ValueError` if it is invalid."
    for name, view in json.loads(metadata['views']).items():
        stored[name] = replace(stored[name], view=view)
    packed = json.loads(metadata['state'])
    needed = {*_list_names({key: v for key, v in packed.items() if key not in deferred})}
    tensors = {}
    for name, entry in stored.items():
        is_needed = name in needed or entry.like.nbytes < MIN_DEFERRED
        tensors[name] = entry.read() if is_needed else entry.defer()
    state = _unpack(packed, tensors)
    if type(state) is not dict:
        raise ValueError(f'it is a {type(state).__name__}')
    return state


def _list_names(packed: Any) -> Iterator[str]:
    "Yield the names of the tensors in JSON values of a state."
    if isinstance(packed, dict) and '$tensor' in packed:
        yield packed['$tensor']
    elif isinstance(packed, (dict, list)):
        for part in packed.values() if isinstance(packed, dict) else packed:
            yield from _list_names(part)


def _restore_view(t: Tensor, view: Mapping[str, Any]) -> Tensor:
    "Return a tensor with its original dtype and order of dimensions."
    if 'dtype' in view:
        t = t.view(getattr(torch, view['dtype'])).squeeze(-1)
    return t.permute(view['order']) if 'order' in view else t


def _unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    "Convert JSON values to a state; the inverse of `_Packer.pack`."
    if type(value) in _ATOMS:
        return value
    match value:
        case {'$tensor': name}:
            return tensors[name]
        case {'$tuple': [*items]}:
            return tuple([_unpack(v, tensors) for v in items])
        case {'$bytes': text}:
            return bytes.fromhex(text)
        case {'$complex': [float(real), float(imag)]}:
            return complex(real, imag)
        case {'$dict': [*pairs]}:
            return {_unpack(key, tensors): _unpack(v, tensors) for key, v in pairs}
        case [*items]:
            return [_unpack(v, tensors) for v in items]
    if any(key.startswith('$') for key in value):
        raise ValueError(f'{", ".join(value)[:80]!r} is unknown')
    return {key: _unpack(v, tensors) for key, v in value.items()}


# -- errors ----------------------------------------------------------------------------------------


def _check_format(found: int, path: Path) -> None:
    if found == FORMAT:
        return
    fix = 'update learnkit'
    if found < FORMAT:
        fix = 'it was written by an older learnkit. Resume it there, or save its weights by `learn.save`'
    raise CheckpointError(f'{path} has format {found}, and this version reads {FORMAT}: {fix}.')


def damaged_error(path: Path, what: str) -> DamagedError:
    "Return the error for a damaged checkpoint."
    return DamagedError(f'{path} is not a whole checkpoint: {what}. Nothing was loaded.')


def shorten_error(error: BaseException) -> str:
    "Return the message of an error, shortened and printable, because it may quote the file."
    lines = str(error).splitlines() or [type(error).__name__]
    return ascii(lines[0][:200])[1:-1]
