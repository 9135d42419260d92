"""Read files of `torch.save` (`.pth`), whoever made them: archive and pickle are checked before torch reads them.

`torch.load(weights_only=True)` runs no code. It does not compare checksums, reads some archives
differently from other programs, and calls a few functions whose result can be far larger than the
file. What it leaves open is checked here."""

from __future__ import annotations

import codecs
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from pickletools import genops
from typing import Any, BinaryIO
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from learnkit.checkpoint.file import refers_too_often
from learnkit.core.errors import WeightsError

__all__ = ['read_torch_file', 'damage']

MAX_PICKLE = 64 << 20  # bytes; tensors are records of their own
# lists, tuples, dicts and calls in a pickle: a byte each there, sixty in memory
MAX_PARTS = 500_000
MAX_MARKS = 1000  # lists, tuples and dicts that are open at a time

_RECORD = re.compile(
    r'[^/]+/(data\.pkl|version|byteorder|\.format_version|\.storage_alignment|'
    r'\.data/serialization_id|data/\d{1,20})',
    re.ASCII,
)
_DIRECTORY = 0x10  # an attribute of DOS: torch reads no bytes of such a record, and says nothing
_PARTS = {'EMPTY_LIST', 'EMPTY_DICT', 'EMPTY_SET', 'TUPLE1', 'TUPLE2', 'TUPLE3', 'REDUCE'}
_CLOSE = {'TUPLE', 'APPENDS', 'SETITEMS'}
_END = struct.Struct('<4s4H2LH')  # the end of an archive, and its longer form with a pointer to it
_LONG_END = struct.Struct('<4sQ2H2L4Q')
_POINTER = struct.Struct('<4sLQL')
_UNREADABLE = (
    BadZipFile,
    EOFError,
    ValueError,
    OSError,
    NotImplementedError,
    RuntimeError,
    struct.error,
)


class _Inert:
    "Stand-in for the objects besides tensors in fastai's files, which are read without running any of them."

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


_FASTAI = [
    (_Inert, name)
    for name in (
        'fastcore.foundation.L',
        'numpy.dtype',
        'numpy.core.multiarray.scalar',
        'numpy._core.multiarray.scalar',
    )
]


def read_torch_file(
    path: Path,  # written by `torch.save`, of any version
    device: torch.device | str | None = None,  # where its tensors are put; None: the CPU
) -> Any:
    "Return the content of a file. Raises `WeightsError` for what is damaged, asks for code, or is a bomb."
    if other := _other_kind(path):
        raise WeightsError(f'{path} is {other} Nothing was loaded.')
    if wrong := damage(path):
        raise WeightsError(f'{path} is damaged: {wrong}. Nothing was loaded.')
    try:
        _check_pickles(path)
        # torch takes pairs, and does not say so
        with safe_globals(_FASTAI):  # type: ignore[arg-type]
            content = torch.load(path, map_location=device or 'cpu', weights_only=True)
        _check_tensors(content, path.stat().st_size)
    except Exception as e:  # bytes that are no pickle raise almost anything
        unsafe = _unsafe(path) if isinstance(e, UnpicklingError) else []
        if unsafe:
            raise WeightsError(
                _why_unsafe(path, unsafe)
            ) from None  # torch's own message says how to run the code
        reason = next(iter(str(e).splitlines()), '') or type(e).__name__
        if isinstance(e, UnpicklingError):
            reason = 'its pickle is not that of plain weights'
        raise WeightsError(
            f'{path} cannot be read as weights: {reason}. Nothing was loaded.'
        ) from None
    return content


# The archive


def damage(path: str | Path) -> str | None:
    """Return what is wrong with an archive of `torch.save`, None if it is whole.

    Every byte of a record is read and compared with its checksum. Files in another format, of torch
    before 1.6 for example, have no checksums and count as whole.
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
        except _UNREADABLE as e:
            return f'{e}'.lower()
    return f'record {bad!r} is not as it was written' if bad else None


def _check_table(archive: ZipFile, f: BinaryIO) -> None:
    "Raise `ValueError` for a table of records that torch does not write, and might read differently."
    _check_end(f)
    infos = archive.infolist()
    names = [info.orig_filename for info in infos]
    for info in infos:
        if (
            info.compress_type != ZIP_STORED
            or info.compress_size != info.file_size
            or info.flag_bits & 1
        ):
            raise ValueError('it holds compressed records')
        if not _RECORD.fullmatch(info.orig_filename) or info.external_attr & _DIRECTORY:
            raise ValueError(
                f'it has a record {info.orig_filename[:80]!a}, which torch does not write'
            )
    if len(set(names)) < len(names) or len({name.partition('/')[0] for name in names}) > 1:
        raise ValueError('it has records twice, or in two folders')
    if sum(info.file_size for info in infos) > f.seek(0, 2):
        raise ValueError('its records overlap')


def _check_end(f: BinaryIO) -> None:
    "Raise `ValueError` unless there is one way to find the table: readers differ where there are two."
    size = f.seek(0, 2)
    f.seek(max(0, size - _LONG_END.size - _POINTER.size - _END.size))
    tail = f.read()
    magic, *found, comment = _END.unpack(tail[-_END.size :])  # two disks, two counts, size, start
    end = size - _END.size
    pointer = tail[-_END.size - _POINTER.size : -_END.size]
    if pointer.startswith(b'PK\6\7'):
        end -= _POINTER.size + _LONG_END.size
        long_magic, length, _, _, *longer = _LONG_END.unpack(tail[: _LONG_END.size])
        short = [
            min(n, most) for n, most in zip(longer, [0xFFFF] * 4 + [0xFFFFFFFF] * 2, strict=True)
        ]
        if (long_magic, length, found) != (b'PK\6\6', 44, short) or _POINTER.unpack(pointer)[
            1:3
        ] != (0, end):
            raise ValueError('it has two ends')
        found = longer
    disk, first_disk, n_here, n, length, start = found
    if magic != b'PK\5\6' or comment or disk or first_disk or n_here != n or start + length != end:
        raise ValueError('it has two ends, or was cut short')


def _other_kind(path: Path) -> str:
    "Return what kind of file it is if `torch.save` has not written it, else an empty string."
    with path.open('rb') as f:
        start = f.read(2)
    if start not in (b'', b'PK') and start[:1] != b'\x80':
        return "no file of torch's: it holds no saved weights."
    try:
        with ZipFile(path) as archive:
            names = archive.namelist()
    except _UNREADABLE:
        return ''  # or damaged
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


# The pickle


def _check_pickles(path: Path) -> None:
    "Raise `ValueError` for pickles that would take far more memory than they have bytes."
    with _pickles(path) as pickles:
        for pickle in pickles:
            _check_pickle(pickle)


@contextmanager
def _pickles(path: Path) -> Iterator[list[BinaryIO]]:
    with path.open('rb') as f:
        if f.read(2) != b'PK':
            f.seek(0)
            yield [f] * 5  # before torch 1.6: three for the version, the content, the tensors' keys
            return
        with ZipFile(f) as archive:
            info = next(info for info in archive.infolist() if info.filename.endswith('/data.pkl'))
            if info.file_size > MAX_PICKLE:
                raise ValueError(
                    f'it has a pickle of {info.file_size:,} bytes, and {MAX_PICKLE:,} can be read'
                )
            yield [BytesIO(archive.read(info))]


def _check_pickle(pickle: BinaryIO) -> None:
    imported, strings = set[str](), set[str]()
    n_parts = n_marks = 0
    for op, value, _ in genops(pickle):
        n_parts += op.name in _PARTS
        n_marks += (op.name == 'MARK') - (op.name in _CLOSE)
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
    if 'bytearray' in imported:  # of any size
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


def _unsafe(path: Path) -> list[str]:
    "Return what a pickle asks for that is more than data; it is read, not run."
    with safe_globals(_FASTAI):  # type: ignore[arg-type]  # as above
        try:
            return sorted(ascii(name[:80])[1:-1] for name in get_unsafe_globals_in_checkpoint(path))
        except Exception:
            return []  # an old or a broken file: the caller has the error already


def _why_unsafe(path: Path, names: list[str]) -> str:
    shown = ', '.join(names[:5]) + (', ...' if len(names) > 5 else '')
    text = (
        f'{path} holds more than weights: loading it would run code ({shown}). Nothing was loaded.'
    )
    if any(n.startswith('fastai.') for n in names):
        return (
            f"{text} It looks like a Learner that fastai's `learn.export` pickled. With fastai, load it and write "
            "`torch.save(learn.model.state_dict(), 'weights.pth')`; that file loads here."
        )
    if any(n.startswith('torch.nn.') for n in names):
        return f'{text} It looks like a whole pickled model: save `model.state_dict()` instead.'
    return text


# The tensors


def _check_tensors(content: Any, size: int) -> None:
    "Raise `ValueError` for tensors with more bytes than the file has, or with the same bytes again and again."
    stored: dict[int, int] = {}
    seen: set[int] = set()
    referred = 0
    parts = [content]
    while parts:
        part = parts.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Mapping):
            parts.extend(part.values())
        elif isinstance(part, (list, tuple)):
            parts.extend(part)
        elif isinstance(part, Tensor) and part.layout is torch.strided:
            memory = part.untyped_storage()
            stored[memory.data_ptr()] = memory.nbytes()
            referred += part.nbytes
    n_bytes = sum(stored.values())
    if n_bytes > size or refers_too_often(referred, n_bytes):
        raise ValueError(f'{size:,} bytes hold tensors of {max(n_bytes, referred):,}')
