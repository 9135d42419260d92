"""A file of torch's looked through without torch: its zip archive, and what the pickle in it would do if it were run.

Only what `torch.save` writes for numbers, texts, tensors, and lists, tuples and dicts of them passes. Everything here
raises `ValueError` with the rest of a sentence that begins with the file's name."""
from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Callable, Collection, Mapping
from io import BytesIO
from itertools import islice
from math import prod
from pathlib import Path
from pickletools import genops
from typing import Any, NamedTuple
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

__all__ = ['check_archive', 'read_records', 'check_pickle', 'is_dense']

MAX_PICKLE = 64 << 20  # bytes; the tensors are records of their own
MAX_OPS = 5_000_000    # of the pickle: 150,000 tensors have as many
MAX_PARTS = 500_000    # lists and dicts: each is a byte in the file, and sixty in memory
MAX_MARKS = 1000

_END = struct.Struct('<4s4H2LH')                 # the end of an archive, and those of one above 4 GB
_END64, _LOCATOR = struct.Struct('<4sQ2H2L4Q'), struct.Struct('<4sLQL')
_LOCAL = struct.Struct('<4s22x2H')               # what stands before a record
_NEEDED = {'data.pkl', 'version', 'byteorder'}
_KNOWN = _NEEDED | {'.format_version', '.storage_alignment', '.data/serialization_id'}


class Record(NamedTuple):
    "Where the bytes of a record are."
    start: int
    stop: int


def check_archive(
    path: Path,   # written by torch.save
    size: int,    # of the archive: what is behind it has been looked at already
) -> None:
    "Raise `ValueError` for an archive that is not as torch writes it, and for a pickle that does more than hold data."
    with path.open('rb') as f, _mapped(f.fileno(), size) as body:
        f.seek(size)
        if b'PK\5\6' in f.read(): raise ValueError('has an archive in its seal')  # of which torch would read this one
        records = read_records(body)
        start, stop = records.pop('data.pkl')
        if stop - start > MAX_PICKLE:
            raise ValueError(f'has a pickle of {stop - start:,} bytes, and {MAX_PICKLE:,} can be read')
        data = body[start:stop]
    stored = {name[5:]: record.stop - record.start for name, record in records.items() if name.startswith('data/')}
    idle = sorted(stored.keys() - check_pickle(data, stored))
    if idle: raise ValueError(f'has a record data/{idle[0]} too many')


# The archive

def _mapped(fd: int, size: int) -> mmap.mmap:
    if size < _END.size: raise ValueError('is no archive')
    return mmap.mmap(fd, size, access=mmap.ACCESS_READ)


def read_records(body: mmap.mmap) -> dict[str, Record]:
    "Return where each record of an archive of torch's lies, by its name without the folder before it."
    directory = _directory(body)
    try: infos = ZipFile(body).infolist()  # type: ignore[call-overload]  # a map can seek
    except (BadZipFile, ValueError, NotImplementedError, struct.error) as e:
        raise ValueError(f'has a table of records that cannot be read: {e}') from None
    records, stop, folders = dict[str, Record](), 0, set[str]()
    for info in sorted(infos, key=lambda info: info.header_offset):
        folder, _, name = info.orig_filename.partition('/')
        folders.add(folder)
        if name in records or not (name in _KNOWN or re.fullmatch(r'data/(0|[1-9]\d{0,9})', name, re.ASCII)):
            raise ValueError(f'has a record {_shown(info.orig_filename)}, which torch does not write')
        records[name] = record = _record(info, body, stop)
        stop = record.stop
    if stop > directory: raise ValueError('has records that overlap')
    if len(folders) > 1 or folders & {'', '.', '..'}: raise ValueError('has records outside of its folder')
    if lacks := sorted(_NEEDED - records.keys()): raise ValueError(f'lacks the record {lacks[0]}')
    return records


def _directory(body: mmap.mmap) -> int:
    "Return where the table of records begins. There is one way to read it: readers differ where there are two."
    end = len(body) - _END.size
    magic, *said, comment = _END.unpack_from(body, end)  # two numbers of disks, two of records, then size and start
    if magic != b'PK\5\6' or comment: raise ValueError('is no archive, or was cut short')
    at = end - _LOCATOR.size
    if at >= _END64.size and body[at:at + 4] == b'PK\6\7':
        end = at - _END64.size
        magic, length, _, _, *longer = _END64.unpack_from(body, end)
        same = said == [min(n, most) for n, most in zip(longer, [0xffff] * 4 + [0xffffffff] * 2, strict=True)]
        if magic != b'PK\6\6' or length != 44 or _LOCATOR.unpack_from(body, at)[1:3] != (0, end) or not same:
            raise ValueError('has two ends')
        said = longer
    disk, first, n_here, n, size, start = said
    if disk or first or n_here != n or start + size != end: raise ValueError('has two ends')
    return int(start)


def _record(info: ZipInfo, body: mmap.mmap, after: int) -> Record:
    "Return where the bytes of one record are, which is behind those of the record before."
    if info.compress_type != ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
        raise ValueError('holds compressed records')
    at = info.header_offset
    if not after <= at <= len(body) - _LOCAL.size: raise ValueError('has records that overlap')
    magic, n_name, n_extra = _LOCAL.unpack_from(body, at)
    start = at + _LOCAL.size + n_name + n_extra
    if magic != b'PK\3\4' or body[at + _LOCAL.size:start - n_extra] != info.orig_filename.encode():
        raise ValueError('has two names for a record')
    return Record(start, start + info.file_size)


# The pickle

_TENSORS = {'torch._utils _rebuild_tensor_v2': 6, 'torch._utils _rebuild_tensor_v3': 7}  # and how much they are given
_MAKERS = {'collections OrderedDict': [], '_codecs encode': [str, str], '__builtin__ complex': [float, float]}
_STORAGES = {'torch DoubleStorage': 8, 'torch FloatStorage': 4, 'torch HalfStorage': 2, 'torch BFloat16Storage': 2,
             'torch LongStorage': 8, 'torch IntStorage': 4, 'torch ShortStorage': 2, 'torch CharStorage': 1,
             'torch ByteStorage': 1, 'torch BoolStorage': 1, 'torch ComplexDoubleStorage': 16,
             'torch ComplexFloatStorage': 8, 'torch.storage UntypedStorage': 1}
_DTYPES = {'torch uint16': 2, 'torch uint32': 4, 'torch uint64': 8, 'torch complex32': 4, 'torch float8_e4m3fn': 1,
           'torch float8_e4m3fnuz': 1, 'torch float8_e5m2': 1, 'torch float8_e5m2fnuz': 1, 'torch float8_e8m0fnu': 1,
           'torch float4_e2m1fn_x2': 1}  # those without a storage of their own
_GLOBALS = _TENSORS.keys() | _MAKERS.keys() | _STORAGES.keys() | _DTYPES.keys()
_UNKNOWN, _NO_TENSOR = 'has a pickle that torch does not write', 'holds a tensor that is none'
_PART, _HOOKS, _VALUE = object(), object(), object()  # stand for a list or dict, a tensor's hooks, and any value


class _Global(str):
    "A name that the pickle would import."
    __slots__ = ()


class _Storage(NamedTuple):
    "The memory of tensors: items, and bytes of each."
    n: int
    itemsize: int


def check_pickle(
    data: bytes,
    stored: Mapping[str, int],  # bytes of each record `data/<key>`, by key
) -> Collection[str]:
    "Return the keys of the records that a pickle reads. Raise `ValueError` if it would do more than make plain data."
    machine = _Machine(data, stored)
    try: machine.run()
    except (ValueError, IndexError, TypeError, struct.error) as e:
        if names := _foreign(data):
            shown = ', '.join(names[:5]) + (', ...' if len(names) > 5 else '')
            raise ValueError(f'holds more than data: loading it would run code ({shown})') from None
        raise ValueError(f'{e}' if type(e) is ValueError else 'has a pickle that cannot be read') from None
    return machine.used


def _foreign(data: bytes) -> list[str]:
    "Return what a pickle would import that is no part of plain data, whatever its protocol."
    names, texts = set[str](), ['', '']
    try:
        for op, value, _ in islice(genops(data), 500_000):
            if isinstance(value, str) and 'UNICODE' in op.name: texts = [texts[1], value]
            if op.name in ('GLOBAL', 'INST'): names.add(str(value))
            elif op.name == 'STACK_GLOBAL': names.add(' '.join(texts))
    except Exception: pass  # broken off: what it would have imported so far is known
    return sorted(_shown(name.replace(' ', '.')) for name in names - _GLOBALS)


def _shown(name: str) -> str: return ascii(name[:80])[1:-1]  # a message may go to a terminal


class _Machine:
    "A stack machine that follows a pickle, with stand-ins for everything but atoms and tuples."

    def __init__(self, data: bytes, stored: Mapping[str, int]) -> None:
        self.file, self.stored, self.used = BytesIO(data), stored, set[str]()
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: list[Any] = []
        self.n_parts = 0

    def run(self) -> None:
        read = self.file.read
        for _ in range(MAX_OPS):
            op = read(1)
            if op == b'.':
                if len(self.stack) != 1 or self.marks or read(1): break
                return
            if op in _CONSTANTS: self.stack.append(_CONSTANTS[op])
            elif op in _DO: _DO[op](self)
            else: raise ValueError(_UNKNOWN)
        raise ValueError('has a pickle that does not end where it should')

    def take(self, n: int) -> bytes:
        data = self.file.read(n)
        if len(data) != n: raise ValueError('has a pickle that was cut short')
        return data

    def number(self, form: struct.Struct) -> Any: return form.unpack(self.take(form.size))[0]

    def protocol(self) -> None:
        if self.take(1) != b'\2': raise ValueError('has a pickle of a protocol that torch does not write')

    def part(self) -> None:
        self.n_parts += 1
        if self.n_parts > MAX_PARTS: raise ValueError(f'holds more than {MAX_PARTS:,} lists and dicts')
        self.stack.append(_PART)

    def text(self) -> None: self.stack.append(str(self.take(self.number(_U4)), 'utf-8', 'surrogatepass'))

    def long(self) -> None: self.stack.append(int.from_bytes(self.take(self.number(_U1)), 'little', signed=True))

    def name(self) -> None:
        module, name = (self.file.readline(200)[:-1].decode() for _ in range(2))
        self.stack.append(_Global(f'{module} {name}'))
        if self.stack[-1] not in _GLOBALS: raise ValueError(f'asks for {_shown(self.stack[-1])}')

    def put(self, form: struct.Struct) -> None:
        if self.number(form) != len(self.memo): raise ValueError(_UNKNOWN)
        self.memo.append(self.stack[-1])

    def get(self, form: struct.Struct) -> None: self.stack.append(self.memo[self.number(form)])

    def mark(self) -> None:
        if len(self.marks) >= MAX_MARKS: raise ValueError('is nested too deeply')
        self.marks.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marks.pop()
        return items

    def make_tuple(self, n: int | None = None) -> None:
        items = self.since_mark() if n is None else [self.stack.pop() for _ in range(n)][::-1]
        self.stack.append(tuple(items))

    def append(self, items: list[Any]) -> None:
        if self.stack[-1] is not _PART: raise ValueError(_UNKNOWN)

    def set_items(self, items: list[Any]) -> None:
        self.append(items)
        if len(items) % 2 or not all(map(_is_key, items[::2])):
            raise ValueError('has a dict with a key that is neither text nor whole number')

    def storage(self) -> None:
        "Stand for a record: of just the size that is asked for."
        if type(pid := self.stack.pop()) is not tuple or len(pid) != 5: raise ValueError(_UNKNOWN)
        kind, of, key, _, n = pid
        if kind != 'storage' or type(of) is not _Global or of not in _STORAGES or type(key) is not str:
            raise ValueError(_UNKNOWN)
        size = _STORAGES[of]
        if key not in self.stored: raise ValueError(f'lacks the record data/{_shown(key)}')
        if type(n) is not int or n * size != self.stored[key] or n < 0:
            raise ValueError(f'has a record data/{key} of {self.stored[key]:,} bytes, and asks for another number')
        self.used.add(key)
        self.stack.append(_Storage(n, size))

    def call(self) -> None:
        arguments, f = self.stack.pop(), self.stack.pop()
        if type(f) is not _Global or type(arguments) is not tuple: raise ValueError(_UNKNOWN)
        if f in _TENSORS and len(arguments) == _TENSORS[f]: _check_tensor(*arguments)
        elif f not in _MAKERS or [type(a) for a in arguments] != _MAKERS[f] or (
                f == '_codecs encode' and arguments[1] != 'latin1'):
            raise ValueError(f'calls {_shown(f)} in a way that torch does not')
        self.stack.append(_HOOKS if f == 'collections OrderedDict' else _VALUE)


def _check_tensor(memory: Any, start: Any, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any = None) -> None:
    "A tensor lies within its memory, each item once."
    if type(memory) is not _Storage or grad is not False or hooks is not _HOOKS: raise ValueError(_NO_TENSOR)
    if dtype is not None and (type(dtype) is not _Global or dtype not in _DTYPES): raise ValueError(_NO_TENSOR)
    itemsize, numbers = memory.itemsize if dtype is None else _DTYPES[dtype], [start, *shape, *strides]
    if len(shape) != len(strides) or len(shape) > 64 or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
        raise ValueError(_NO_TENSOR)

    if not prod(shape): return
    if (start + prod(shape)) * itemsize > memory.n * memory.itemsize:
        raise ValueError('holds a tensor that is larger than its record')
    if not is_dense(shape, strides): raise ValueError('holds a tensor that shows some numbers more than once')


def _is_key(k: Any) -> bool:
    return type(k) is str or (type(k) is int and abs(k) < 2**63)  # hashing a nest of tuples may take for ever


def is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    "Say whether a tensor that is not empty fills a piece of memory, each place once, in whatever order of dimensions."
    expected = 1
    for stride, n in sorted((stride, n) for stride, n in zip(strides, shape, strict=True) if n != 1):
        if stride != expected: return False
        expected *= n
    return True


_U1, _U2, _U4, _I4, _F8 = map(struct.Struct, ('<B', '<H', '<I', '<i', '>d'))
_CONSTANTS: dict[bytes, Any] = {b'N': None, b'\x88': True, b'\x89': False, b')': ()}
_DO: dict[bytes, Callable[[_Machine], None]] = {
    b'q': lambda m: m.put(_U1), b'r': lambda m: m.put(_U4), b'h': lambda m: m.get(_U1), b'j': lambda m: m.get(_U4),
    b'K': lambda m: m.stack.append(m.number(_U1)), b'M': lambda m: m.stack.append(m.number(_U2)),
    b'J': lambda m: m.stack.append(m.number(_I4)), b'G': lambda m: m.stack.append(m.number(_F8)),
    b'X': _Machine.text, b'\x8a': _Machine.long, b'(': _Machine.mark, b't': _Machine.make_tuple,
    b'\x85': lambda m: m.make_tuple(1), b'\x86': lambda m: m.make_tuple(2), b'\x87': lambda m: m.make_tuple(3),
    b'}': _Machine.part, b']': _Machine.part, b'c': _Machine.name, b'Q': _Machine.storage, b'R': _Machine.call,
    b'a': lambda m: m.append([m.stack.pop()]), b'e': lambda m: m.append(m.since_mark()),
    b's': lambda m: m.set_items([m.stack.pop(-2), m.stack.pop()]), b'u': lambda m: m.set_items(m.since_mark()),
    b'\x80': _Machine.protocol,
}
