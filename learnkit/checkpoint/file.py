"""Read and write a checkpoint: one safetensors file, with tensors as data and other values as JSON.

    8 bytes     the length of the header, little-endian
    header      JSON {"__metadata__": {...}, "model.weight": {"dtype": "F32", ...}, ...} and spaces
    data        the bytes of the tensors, one after the other

`__metadata__` holds strings, as the safetensors format demands:

    sha256      digest of the whole file with zeros instead of these 64 characters; always first
    learnkit    version of this layout
    info        JSON: summary for a list of checkpoints; only the header has to be read
    state       JSON: the nested state, with {"$tensor": name} instead of each tensor
    views       JSON: dtype and order of dimensions of each tensor that the format cannot describe

Every tool that reads safetensors files can read the tensors. The format contains no pickle, so
loading a file cannot execute code. The digest detects damage, not forgery: anyone who can write a
file can also write its digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from learnkit.core.errors import CheckpointError, DamagedError
from learnkit.core.files import atomic_write
from learnkit.core.plain import identify_memory, is_dense

__all__ = [
    'FORMAT',
    'write_state',
    'read_state',
    'read_entries',
    'read_info',
    'is_state_file',
    'refers_too_often',
]

FORMAT = 2  # version of the layout of files
MAX_HEADER = 100_000_000  # bytes, the limit of the safetensors library
MAX_PARTS = 500_000  # lists and objects in a header: 1 byte each in the file, 60 in memory
MAX_DIMS = 64  # dimensions of a tensor, as in torch
MAX_DEPTH = 100  # levels of nested lists, tuples and dicts
MAX_REFERENCES = 64  # average number of references to a byte of a tensor in a state

_BEGIN = b'{"__metadata__":{"sha256":"'
_DIGEST = slice(len(_BEGIN), len(_BEGIN) + 64)  # position of the digest in the header
_ATOMS = (type(None), bool, int, float, str)
_DTYPES = {
    'F64': torch.float64,
    'F32': torch.float32,
    'F16': torch.float16,
    'BF16': torch.bfloat16,
    'F8_E4M3': torch.float8_e4m3fn,
    'F8_E5M2': torch.float8_e5m2,
    'I64': torch.int64,
    'I32': torch.int32,
    'I16': torch.int16,
    'I8': torch.int8,
    'U64': torch.uint64,
    'U32': torch.uint32,
    'U16': torch.uint16,
    'U8': torch.uint8,
    'BOOL': torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

State = dict[str, Any]
_Entry = tuple[torch.dtype, list[int], int]  # dtype, shape and start of a tensor in the data


# -- writing ---------------------------------------------------------------------------------------


def write_state(
    path: str | Path,  # path of the file; missing folders are created
    state: State,  # tensors, numbers, strings, bytes, None, and lists, tuples or dicts of them
    info: dict[str, Any],  # summary for `read_info`: JSON values; floats may be non-finite
) -> None:
    """Write a state into a file, atomically.

    Tensors may be on any device. They are copied to the host one at a time; their gradients are not
    written. Tensors that share the same memory are written once and are read as one tensor. NumPy
    scalars become Python numbers, and Parameters become tensors.

    Raises `CheckpointError` for a state that could not be read back, and `OSError` if the file cannot
    be written. An error leaves an existing file unchanged.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, 'a.ckpt')
    ...     write_state(path, {'model': {'w': torch.ones(2)}, 'betas': (0.9, 0.99)}, {'epoch': 3})
    ...     read_state(path)
    ({'model': {'w': tensor([1., 1.])}, 'betas': (0.9, 0.99)}, {'format': 2, 'epoch': 3})
    """
    packer = _Packer()
    try:
        header = _make_header(packer, packer.pack(state, ()), info)
    except (ValueError, TypeError, RecursionError) as e:
        raise CheckpointError(f'{path} was not written: {e}.') from None
    try:
        with atomic_write(path) as tmp, tmp.open('wb') as f:
            _write(f, header, packer.tensors.values())
    except OSError as e:
        if e.filename is None:
            e.filename = os.fspath(path)
        raise


class _Packer:
    "Converter of a state to JSON values; it collects the tensors by name."

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}  # stored tensors, possibly views of the originals
        self.views: dict[str, dict[str, Any]] = {}
        self.names: dict[Any, str] = {}  # names by memory layout (device, address, dtype, shape)
        self.referred = 0  # bytes of all tensors, counted at each reference

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
        if len(key_path) == MAX_DEPTH:
            raise ValueError(f'the state is nested more than {MAX_DEPTH} levels deep')
        if isinstance(value, Mapping):
            return self._pack_mapping(value, key_path)
        if isinstance(value, (list, tuple)):
            items = [self.pack(v, (*key_path, i)) for i, v in enumerate(value)]
            return items if isinstance(value, list) else {'$tuple': items}
        raise ValueError(
            f'the state has a {kind.__name__}{_describe_keys(key_path)}. Keep tensors, numbers, strings, '
            'bytes, None, and lists, tuples or dicts of them'
        )

    def _pack_mapping(self, value: Mapping[Any, Any], key_path: tuple[Any, ...]) -> dict[str, Any]:
        for key in value:
            if type(key) not in _ATOMS:
                raise ValueError(
                    f'the state has a key that is a {type(key).__name__}{_describe_keys(key_path)}. Keep '
                    'strings or numbers as keys'
                )
        packed = [[key, self.pack(v, (*key_path, key))] for key, v in value.items()]
        if all(type(key) is str and not key.startswith('$') for key in value):
            return dict(packed)
        return {'$dict': packed}

    def _name(self, t: Tensor, key_path: tuple[Any, ...]) -> str:
        "Return the name of a stored tensor, and store it if it is new."
        if type(t) not in (Tensor, nn.Parameter) or not is_dense(t):
            raise ValueError(
                f'the state has a {type(t).__name__} ({t.layout}, {t.dtype}, {t.device})'
                f'{_describe_keys(key_path)}. Keep plain, dense tensors in states'
            )
        t = t.detach().resolve_conj().resolve_neg()
        self.referred += t.nbytes
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
        if t.dtype not in _DTYPE_NAMES:
            view['dtype'] = str(t.dtype).removeprefix('torch.')
            t = t.unsqueeze(-1).view(torch.uint8)
        if view:
            self.views[name] = view
        self.tensors[name] = t
        return name


def _describe_keys(key_path: tuple[Any, ...]) -> str:
    "Return the position of a value in the state, shortened, because keys may have any length."
    keys = ''.join(f'[{ascii(key)[:60]}]' for key in key_path[:8])
    return f' at {keys}{"..." * (len(key_path) > 8)}' if key_path else ''


def _make_header(packer: _Packer, packed: Any, info: dict[str, Any]) -> bytes:
    "Return the bytes before the data, with zeros instead of the digest."
    # sort by item size, so that each tensor starts at a multiple of its item size
    packer.tensors = dict(sorted(packer.tensors.items(), key=lambda named: -named[1].itemsize))
    stop = 0
    entries = {}
    for name, t in packer.tensors.items():
        start = stop
        stop = stop + t.nbytes
        entries[name] = {
            'dtype': _DTYPE_NAMES[t.dtype],
            'shape': [*t.shape],
            'data_offsets': [start, stop],
        }
    if refers_too_often(packer.referred, stop):
        raise ValueError(
            f'the state refers to the same tensors too often, {packer.referred:,} bytes in all'
        )

    metadata = {
        'sha256': '0' * 64,
        'learnkit': str(FORMAT),
        'info': _to_json(info),
        'state': _to_json(packed),
        'views': _to_json(packer.views),
    }
    header = _to_json({'__metadata__': metadata, **entries}).encode()
    header += b' ' * (-len(header) % 8)
    _check_size(header)
    return len(header).to_bytes(8, 'little') + header


def _to_json(value: Any) -> str:
    return json.dumps(value, separators=(',', ':'))


def _write(f: BinaryIO, header: bytes, tensors: Iterable[Tensor]) -> None:
    digest = hashlib.sha256(header)
    f.write(header)
    for t in tensors:
        data = _view_bytes(t.cpu().contiguous())
        digest.update(data)
        f.write(data)
    f.seek(8 + _DIGEST.start)
    f.write(digest.hexdigest().encode())


def _view_bytes(t: Tensor) -> memoryview:
    "Return the memory of a contiguous CPU tensor."
    return t.reshape(-1).view(torch.uint8).numpy().data


# -- reading ---------------------------------------------------------------------------------------


def read_state(path: str | Path) -> tuple[State, dict[str, Any]]:
    """Return the state in a file and its `info`, and verify the digest of the whole file.

    The tensors are copies on the CPU: the file is neither mapped nor left open. The sizes in the
    header are compared with the size of the file before memory is allocated, so reading needs about
    as much memory as the file has bytes.

    Raises `FileNotFoundError`, `DamagedError` for a damaged file, and `CheckpointError` for a format
    that this version cannot read.
    """
    path = Path(path)
    tensors = {}
    with _open(path) as f:
        header = _read_header(f, path)
        digest = hashlib.sha256(header.blank)
        for name in header.tensors:
            tensors[name] = _read_tensor(f, header, name, path)
            digest.update(_view_bytes(tensors[name]))
    if digest.hexdigest().encode() != header.digest:
        raise _damaged_error(path, 'its digest differs: bytes have changed since it was written')
    info = _parse_info(header, path)
    _check_format(info['format'], path)
    try:
        return _unpack_state(header.metadata, tensors), info
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as e:
        raise _damaged_error(path, f'its state cannot be read: {_shorten_error(e)}') from None


def read_entries(path: Path, keys: Iterable[str]) -> State:
    """Return some entries of the state in a file; only their tensors are read. The digest is not verified.

    Raises as `read_state` does, and `ValueError` or `KeyError` for a state that cannot be read.
    """
    with _open(path) as f:
        header = _read_header(f, path)
        views = json.loads(header.metadata['views'])

        @cache
        def read(name: str) -> Tensor:
            return _restore_view(_read_tensor(f, header, name, path), views.get(name, {}))

        unpacker = _Unpacker(read)
        state = json.loads(header.metadata['state'])
        return {key: unpacker.unpack(state[key], 1) for key in keys}


def _read_tensor(f: BinaryIO, header: _Header, name: str, path: Path) -> Tensor:
    dtype, shape, start = header.tensors[name]
    t = torch.empty(shape, dtype=dtype, device='cpu')
    f.seek(len(header.blank) + start)
    if f.readinto(_view_bytes(t)) != t.nbytes:  # type: ignore[attr-defined]  # missing in BinaryIO
        raise _damaged_error(path, 'it was cut short')
    return t


def read_info(path: str | Path) -> dict[str, Any]:
    """Return the `info` of a file, with its format as `'format'`. Only the header is read; it is not verified.

    Raises `FileNotFoundError`, and `DamagedError` for a file without a valid header.
    """
    path = Path(path)
    with _open(path) as f:
        return _parse_info(_read_header(f, path), path)


def is_state_file(path: Path) -> bool:
    "Return True if a file starts with the header of `write_state`."
    with path.open('rb') as f:
        return f.read(8 + len(_BEGIN))[8:] == _BEGIN


class _Header(NamedTuple):
    "Header of a file: the bytes before the data."

    blank: bytes  # bytes, with zeros instead of the digest
    digest: bytes
    metadata: dict[str, str]
    tensors: dict[str, _Entry]  # by name, in the data's order


def _open(path: Path) -> BinaryIO:
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise _damaged_error(path, 'it is a folder')
    if not stat.S_ISREG(mode):
        raise _damaged_error(path, 'it is not a regular file')  # opening a pipe would wait forever
    return path.open('rb')


def _read_header(f: BinaryIO, path: Path) -> _Header:
    "Read the header, and compare its sizes with the size of the file."
    size = os.fstat(f.fileno()).st_size
    if not size:
        raise _damaged_error(path, 'it is empty')
    start = f.read(8)
    length = int.from_bytes(start, 'little')
    text = f.read(length) if length <= min(size - 8, MAX_HEADER) else b''
    if not text.startswith(_BEGIN):
        raise _damaged_error(
            path,
            'it was cut short, or is another kind of file. Weights are loaded by `learn.load(path)`',
        )
    blank = start + text[: _DIGEST.start] + b'0' * 64 + text[_DIGEST.stop :]
    try:
        _check_size(text)
        entries = json.loads(text.decode(), object_pairs_hook=_to_dict)
        metadata = entries.pop('__metadata__')
        tensors = _check_tensors(entries, size - 8 - length)
        for key in ('learnkit', 'info', 'state', 'views'):
            if type(metadata[key]) is not str:
                raise ValueError(f'{key} is not a string')
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise _damaged_error(path, f'its header cannot be read: {_shorten_error(e)}') from None
    return _Header(blank, text[_DIGEST], metadata, tensors)


def _check_size(header: bytes) -> None:
    if len(header) > MAX_HEADER:
        raise ValueError(
            f'{len(header):,} bytes that are not tensors are too many: {MAX_HEADER:,} can be read'
        )
    if header.count(b'[') + header.count(b'{') > MAX_PARTS:
        raise ValueError(f'more than {MAX_PARTS:,} lists, dicts and tensors')


def _to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError('a name occurs twice')
    return unique


def _check_tensors(entries: dict[str, Any], n_bytes: int) -> dict[str, _Entry]:
    "Return the tensors of a header; raise `ValueError` unless they fill the data without gaps."
    tensors = {}
    stop = 0
    for name, entry in sorted(entries.items(), key=lambda named: named[1]['data_offsets']):
        dtype = _DTYPES[entry['dtype']]
        shape = entry['shape']
        offsets = entry['data_offsets']
        is_shape = len(shape) <= MAX_DIMS and all(
            type(n) is int and n >= 0 for n in (*shape, *offsets)
        )
        if not is_shape or prod(n or 1 for n in shape) >= 2**60:
            raise ValueError(f'{ascii(name)[:80]} is not a tensor')
        start = stop
        stop = stop + prod(shape) * dtype.itemsize
        if offsets != [start, stop]:
            raise ValueError(f'the bytes of {ascii(name)[:80]} are not where they should be')
        tensors[name] = dtype, shape, start
    if stop != n_bytes:
        raise ValueError(f'it has {n_bytes:,} bytes of tensors and should have {stop:,}')
    return tensors


def _unpack_state(metadata: dict[str, str], tensors: dict[str, Tensor]) -> State:
    "Return the state that a file's metadata describe; raise `ValueError` if it is invalid."
    n_bytes = sum(t.nbytes for t in tensors.values())
    for name, view in json.loads(metadata['views']).items():
        tensors[name] = _restore_view(tensors[name], view)
    unpacker = _Unpacker(tensors.__getitem__)
    state = unpacker.unpack(json.loads(metadata['state'], object_pairs_hook=_to_dict), 0)
    if type(state) is not dict:
        raise ValueError(f'it is a {type(state).__name__}')
    if unpacker.used != tensors.keys():
        raise ValueError('it does not use all tensors')
    if refers_too_often(unpacker.referred, n_bytes):
        raise ValueError(
            f'it refers to the same tensors too often, {unpacker.referred:,} bytes in all'
        )
    return state


def _restore_view(t: Tensor, view: Mapping[str, Any]) -> Tensor:
    "Return a tensor with its original dtype and order of dimensions."
    if 'dtype' in view:
        name = view['dtype']
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype) or not (dtype.is_complex or dtype.is_floating_point):
            raise ValueError(f'{name[:80]!r} is not a dtype of tensors in checkpoints')
        t = t.view(dtype).squeeze(-1)
    return t.permute(view['order']) if 'order' in view else t


class _Unpacker:
    "Converter of JSON values to a state; the inverse of `_Packer`."

    def __init__(self, find_tensor: Callable[[str], Tensor]) -> None:
        self.find_tensor = find_tensor
        self.used: set[str] = set()
        self.referred = 0

    def unpack(self, value: Any, depth: int) -> Any:
        if type(value) in _ATOMS:
            return value
        if depth == MAX_DEPTH:
            raise ValueError(f'it is nested more than {MAX_DEPTH} levels deep')
        match value:
            case {'$tensor': name}:
                t = self.find_tensor(name)
                self.used.add(name)
                self.referred += t.nbytes
                return t
            case {'$tuple': [*items]}:
                return tuple([self.unpack(v, depth + 1) for v in items])
            case {'$bytes': text}:
                return bytes.fromhex(text)
            case {'$complex': [float(real), float(imag)]}:
                return complex(real, imag)
            case {'$dict': [*pairs]}:
                return _to_dict([(key, self.unpack(v, depth + 1)) for key, v in pairs])
            case [*items]:
                return [self.unpack(v, depth + 1) for v in items]
        if any(key.startswith('$') for key in value):
            raise ValueError(f'{", ".join(value)[:80]!r} is unknown')
        return {key: self.unpack(v, depth + 1) for key, v in value.items()}


def refers_too_often(
    referred: int,  # bytes of tensors, counted at each reference
    stored: int,  # bytes of tensors in the file
) -> bool:
    "Return True if copies of each tensor would be far larger than the file."
    return referred > MAX_REFERENCES * stored + (1 << 20)


# -- errors ----------------------------------------------------------------------------------------


def _parse_info(header: _Header, path: Path) -> dict[str, Any]:
    try:
        return {'format': int(header.metadata['learnkit']), **json.loads(header.metadata['info'])}
    except (ValueError, TypeError, RecursionError) as e:
        raise _damaged_error(path, f'its info cannot be read: {_shorten_error(e)}') from None


def _check_format(found: int, path: Path) -> None:
    if found > FORMAT:
        raise CheckpointError(
            f'{path} has format {found}, and this version of learnkit reads format {FORMAT}: '
            'update learnkit.'
        )
    if found < FORMAT:
        raise CheckpointError(
            f'{path} was written by an older learnkit: it has format {found}, and this version reads '
            f'format {FORMAT}. Resume it with the version that wrote it, or save its weights there '
            'by `learn.save` and load them here by `learn.load`.'
        )


def _damaged_error(path: Path, what: str) -> DamagedError:
    return DamagedError(f'{path} is not a whole checkpoint: {what}. Nothing was loaded.')


def _shorten_error(error: Exception) -> str:
    "Return the message of an error, shortened and printable, because it may quote the file."
    lines = str(error).splitlines() or [type(error).__name__]
    return ascii(lines[0][:200])[1:-1]
