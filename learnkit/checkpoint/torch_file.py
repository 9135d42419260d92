"""Read files of `torch.save` (`.pth`) from any source, after a check of the archive and the pickle.

`torch.load(weights_only=True)` runs no code. However, it does not compare checksums, reads some
archives differently from other programs, and calls a few functions whose result can be far larger
than the file. This module refuses such files before torch reads them.
"""

from __future__ import annotations

import codecs
import re
import struct
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from pickletools import genops
from typing import Any, BinaryIO
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from learnkit.checkpoint.file import refers_too_often
from learnkit.core.errors import WeightsError

__all__ = ['read_torch_file', 'find_damage']

MAX_PICKLE = 64 << 20  # bytes; tensors are in separate records
# lists, tuples, dicts and calls in a pickle: one byte each in the file, sixty in memory
MAX_PARTS = 500_000
MAX_MARKS = 1000  # depth of nested lists, tuples and dicts

_RECORD = re.compile(
    r'[^/]+/(data\.pkl|version|byteorder|\.format_version|\.storage_alignment|'
    r'\.data/serialization_id|data/\d{1,20})',
    re.ASCII,
)
# bits of a record's flags: sizes after the data, UTF-8 name; torch's reader ignores most other bits
_FLAGS = 0x808
_CLIPPED = 0xFFFFFFFF  # stands for a size or an offset that the zip64 extra field has instead
_PART_OPS = {'EMPTY_LIST', 'EMPTY_DICT', 'EMPTY_SET', 'TUPLE1', 'TUPLE2', 'TUPLE3', 'REDUCE'}
_CLOSING_OPS = {'TUPLE', 'APPENDS', 'SETITEMS'}
_END = struct.Struct('<4s4H2LH')  # end of an archive
_LONG_END = struct.Struct('<4sQ2H2L4Q')  # end of a zip64 archive, before `_POINTER` and `_END`
_POINTER = struct.Struct('<4sLQL')
_ZIP_ERRORS = (
    BadZipFile,
    EOFError,
    ValueError,
    OSError,
    NotImplementedError,
    RuntimeError,
    struct.error,
)


class _Inert:
    "Placeholder for objects in fastai's files that are not tensors, so that none of their code runs."

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


_SAFE_GLOBALS = [
    (_Inert, name)
    for name in (
        'fastcore.foundation.L',
        'numpy.dtype',
        'numpy.core.multiarray.scalar',
        'numpy._core.multiarray.scalar',
    )
]


def read_torch_file(
    path: Path,  # file written by any version of `torch.save`
    device: torch.device | str | None = None,  # device of the tensors; None: the CPU
) -> Any:
    """Return the content of a file.

    Raises `WeightsError` for a file that is damaged, would run code, or would need far more memory than its size.
    """
    other_kind = _detect_other_kind(path)
    if other_kind:
        raise WeightsError(f'{path} is {other_kind} Nothing was loaded.')
    problem = find_damage(path)
    if problem:
        raise WeightsError(f'{path} is damaged: {problem}. Nothing was loaded.')
    try:
        _check_pickles(path)
        # torch accepts pairs, which its type annotation lacks
        with safe_globals(_SAFE_GLOBALS):  # type: ignore[arg-type]
            # `mmap=False` overrides torch's configuration: a mapped file that is cut short ends the process
            content = torch.load(path, map_location=device or 'cpu', weights_only=True, mmap=False)
        _check_tensors(content, path.stat().st_size)
    except Exception as e:  # arbitrary bytes raise almost any type of error
        unsafe = _list_unsafe_names(path) if isinstance(e, UnpicklingError) else []
        if unsafe:
            # without torch's message, which explains how to run the code
            raise WeightsError(_explain_unsafe(path, unsafe)) from None
        reason = next(iter(str(e).splitlines()), '') or type(e).__name__
        if isinstance(e, UnpicklingError):
            reason = 'its pickle holds more than plain weights'
        raise WeightsError(
            f'{path} cannot be read as weights: {reason}. Nothing was loaded.'
        ) from None
    return content


# -- the archive -----------------------------------------------------------------------------------


def find_damage(path: str | Path) -> str | None:
    """Return a description of what is wrong with an archive of `torch.save`, or None if it is undamaged.

    Every byte of a record is read and compared with its checksum. Files in another format, for
    example of torch before 1.6, have no checksums and count as undamaged.
    """
    path = Path(path)
    with path.open('rb') as f:
        start = f.read(2)
        if not start:
            return 'it is empty'
        if start != b'PK':
            return None
        try:
            with ZipFile(f) as archive:
                _check_table(archive, f)
                bad = archive.testzip()
        except _ZIP_ERRORS as e:
            return f'{e}'.lower()
    return f'record {bad!r} is not as it was written' if bad else None


def _check_table(archive: ZipFile, f: BinaryIO) -> None:
    "Raise `ValueError` for a table of records that torch would not write, as other programs may read it differently."
    _check_end(f)
    infos = archive.infolist()
    names = [info.orig_filename for info in infos]
    for info in infos:
        if info.compress_type != ZIP_STORED or info.compress_size != info.file_size:
            raise ValueError('it holds compressed records')
        if not _RECORD.fullmatch(info.orig_filename) or not _is_plain(info):
            raise ValueError(
                f'it has a record {info.orig_filename[:80]!a}, which torch does not write'
            )
    folders = {name.partition('/')[0] for name in names}
    if len(set(names)) < len(names) or len(folders) > 1:
        raise ValueError('it has records twice, or in two folders')
    if sum(info.file_size for info in infos) > f.seek(0, 2):
        raise ValueError('its records overlap')


def _is_plain(info: ZipInfo) -> bool:
    """Return True if an entry of the table holds only a name, sizes, an offset and a checksum.

    Any other field makes some reader treat the record differently. With the DOS attribute of a
    directory, for example, torch's reader returns uninitialized memory.
    """
    others = (
        info.create_system,
        info.volume,
        info.flag_bits & ~_FLAGS,
        info.internal_attr,
        info.external_attr,
    )
    sizes = (info.file_size, info.compress_size, info.header_offset)
    clipped = [n for n in sizes if n >= _CLIPPED]
    extra = struct.pack(f'<2H{len(clipped)}Q', 1, 8 * len(clipped), *clipped) if clipped else b''
    return not any(others) and not info.comment and info.extra == extra


def _check_end(f: BinaryIO) -> None:
    "Raise `ValueError` if the archive has two ends, because readers differ in which table they find."
    size = f.seek(0, 2)
    f.seek(max(0, size - _LONG_END.size - _POINTER.size - _END.size))
    tail = f.read()
    # fields: disk, first disk, number of records on this disk, number of records, length, start
    magic, *fields, comment = _END.unpack(tail[-_END.size :])
    end = size - _END.size
    pointer = tail[-_END.size - _POINTER.size : -_END.size]
    if pointer.startswith(b'PK\6\7'):
        end -= _POINTER.size + _LONG_END.size
        long_magic, long_length, _, _, *long_fields = _LONG_END.unpack(tail[: _LONG_END.size])
        limits = [0xFFFF] * 4 + [0xFFFFFFFF] * 2
        clipped = [min(n, limit) for n, limit in zip(long_fields, limits, strict=True)]
        is_long_end = (long_magic, long_length, fields) == (b'PK\6\6', 44, clipped)
        if not is_long_end or _POINTER.unpack(pointer)[1:3] != (0, end):
            raise ValueError('it has two ends')
        fields = long_fields
    disk, first_disk, n_here, n, length, start = fields
    if magic != b'PK\5\6' or comment or disk or first_disk or n_here != n or start + length != end:
        raise ValueError('it has two ends, or was cut short')


def _detect_other_kind(path: Path) -> str:
    "Return a description of a file that `torch.save` did not write, or an empty string for a file that it wrote."
    with path.open('rb') as f:
        start = f.read(2)
    if start not in (b'', b'PK') and start[:1] != b'\x80':
        return "no file of torch's: it holds no saved weights."
    try:
        with ZipFile(path) as archive:
            names = archive.namelist()
    except _ZIP_ERRORS:
        return ''  # written by torch before 1.6, or damaged
    if any(n.endswith('/models/model.json') for n in names):
        return (
            'a program that `learn.export` wrote, and no weights: run it by `torch.export.load(path).module()(x)`, '
            'if you trust it. What loads here is written by `learn.save` or `learn.save_learner`.'
        )
    if any('/code/' in n for n in names):
        return 'a TorchScript program, and no weights: run it by `torch.jit.load`.'
    if any(n.endswith('data.pkl') for n in names):
        return ''
    return f"a zip archive, and none of torch's: it holds {', '.join(names[:3]) or 'nothing'}."


# -- the pickle ------------------------------------------------------------------------------------


def _check_pickles(path: Path) -> None:
    "Raise `ValueError` for pickles that would need far more memory than their size."
    with path.open('rb') as f:
        if f.read(2) != b'PK':  # written by torch before 1.6, with pickles in a row
            f.seek(0)
            # three pickles for the version, one for the content, one for the tensors' keys
            for _ in range(5):
                _check_pickle(f)
            return
        with ZipFile(f) as archive:
            info = next(info for info in archive.infolist() if info.filename.endswith('/data.pkl'))
            if info.file_size > MAX_PICKLE:
                raise ValueError(
                    f'it has a pickle of {info.file_size:,} bytes, and {MAX_PICKLE:,} can be read'
                )
            _check_pickle(BytesIO(archive.read(info)))


def _check_pickle(pickle: BinaryIO) -> None:
    imported = set[str]()
    strings = set[str]()
    n_parts = n_marks = 0
    for op, value, _ in genops(pickle):
        n_parts += op.name in _PART_OPS
        n_marks += (op.name == 'MARK') - (op.name in _CLOSING_OPS)
        if n_parts > MAX_PARTS or n_marks > MAX_MARKS:
            raise ValueError(f'it has more than {MAX_PARTS:,} lists and dicts, or too deep ones')
        if op.name == 'PROTO' and value != 2:
            raise ValueError(
                f'its pickle has protocol {value}: save it by `torch.save` without `pickle_protocol`'
            )
        if op.name == 'GLOBAL':
            imported.add(str(value).rpartition(' ')[2])
        elif op.name == 'BINUNICODE':
            strings.add(str(value)[:50])
    if 'bytearray' in imported:  # could have any size
        raise ValueError('it asks for a bytearray')
    # 'hex' doubles its input each time
    if 'encode' in imported and any(map(_is_codec, strings - {'latin1'})):
        raise ValueError('it encodes strings in a way that torch does not')


def _is_codec(name: str) -> bool:
    try:
        codecs.lookup(name)
    except (LookupError, ValueError):
        return False
    return True


def _list_unsafe_names(path: Path) -> list[str]:
    "Return the names of functions and classes that a pickle would call, without running the pickle."
    with safe_globals(_SAFE_GLOBALS):  # type: ignore[arg-type]  # as above
        try:
            names = get_unsafe_globals_in_checkpoint(path)
        except Exception:
            return []  # an old or a broken file: the caller has the error already
    return sorted(ascii(name[:80])[1:-1] for name in names)


def _explain_unsafe(path: Path, names: list[str]) -> str:
    listed_names = ', '.join(names[:5]) + (', ...' if len(names) > 5 else '')
    text = (
        f'{path} holds more than weights: loading it would run code ({listed_names}). '
        'Nothing was loaded.'
    )
    if any(n.startswith('fastai.') for n in names):
        return (
            f"{text} It looks like a Learner that fastai's `learn.export` pickled. With fastai, load it and write "
            "`torch.save(learn.model.state_dict(), 'weights.pth')`; that file loads here."
        )
    if any(n.startswith('torch.nn.') for n in names):
        return f'{text} It looks like a whole pickled model: save `model.state_dict()` instead.'
    return text


# -- the tensors -----------------------------------------------------------------------------------


def _check_tensors(content: Any, size: int) -> None:
    "Raise `ValueError` for tensors with more bytes than the file, or for too many tensors that share their bytes."
    storage_sizes: dict[int, int] = {}  # bytes by address
    visited: set[int] = set()
    n_referred = 0  # bytes of all tensors, shared storages counted repeatedly
    queue = [content]
    while queue:
        value = queue.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, Mapping):
            queue.extend(value.values())
        elif isinstance(value, (list, tuple)):
            queue.extend(value)
        elif isinstance(value, Tensor) and value.layout is torch.strided:
            storage = value.untyped_storage()
            storage_sizes[storage.data_ptr()] = storage.nbytes()
            n_referred += value.nbytes
    n_bytes = sum(storage_sizes.values())
    if n_bytes > size or refers_too_often(n_referred, n_bytes):
        raise ValueError(f'{size:,} bytes hold tensors of {max(n_bytes, n_referred):,}')
