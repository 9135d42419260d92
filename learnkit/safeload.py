"""The states of runs in files: written whole and sealed, and read with nothing believed before it was looked at."""
from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from learnkit.archives import check_archive, is_dense
from learnkit.batch import map_tensors
from learnkit.errors import CheckpointError, DamagedError
from learnkit.files import atomic_write
from learnkit.seals import FORMAT, body_size, seal, verify
from learnkit.weights import plain

__all__ = ['FORMAT', 'MIGRATIONS', 'save_state', 'load_state', 'check_structure', 'copied']

State = dict[str, Any]
MIGRATIONS: dict[int, Callable[[State], State]] = {}  # from each older format to the next

MAX_DEPTH = 100
MAX_INT_BITS = 2000      # torch reads whole numbers up to 2,040
MAX_REFERENCES = 64      # how often, on average over the bytes, a tensor may stand in a state
_ATOMS = {type(None), bool, float, complex, str}


# Saving

def save_state(
    state: State,          # tensors, numbers, texts, None, and lists, tuples and dicts of them
    path: str | Path,      # folders above it are made
    info: dict[str, Any],  # what is to be known of the file without reading it, see `learnkit.seals`
) -> None:
    """Write a state into a sealed file, which is there whole or not at all; what was there before stays until then.

    Tensors on any device are written, without gradients; those that are the same memory are written once, and only the
    part of a memory that a tensor shows. Raises `OptionError` or `CheckpointError` for what would not load again, and
    `OSError` when it cannot be written; nothing is left behind then. torch reads the file too:
    `torch.load(path, weights_only=True)`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_state({'model': {'w': torch.ones(2)}, 'epoch': 3}, f'{folder}/a.ckpt', {'epoch': 3})
    ...     state, info = load_state(f'{folder}/a.ckpt')
    >>> state
    {'model': {'w': tensor([1., 1.])}, 'epoch': 3}
    """
    known, owners = dict[Any, Tensor](), dict[Any, Any]()
    state = map_tensors(plain(state, 'state'), lambda t: _bare(t, known, owners))
    try: n_bytes = check_structure(state)
    except ValueError as e: raise CheckpointError(f'{path} was not written, as it would not load: it {e}.') from None
    try:
        with atomic_write(path) as tmp:
            _write(state, tmp)
            try:
                check_archive(tmp, size := tmp.stat().st_size)
                if n_bytes > size: raise ValueError('holds fewer bytes than the state')
            except ValueError as e: raise CheckpointError(f'{path} was not written: what torch wrote {e}.') from None
            seal(tmp, info)
    except OSError as e:
        if e.filename is None: e.filename = os.fspath(path)
        raise


def _bare(t: Tensor, known: dict[Any, Tensor], owners: dict[Any, Any]) -> Tensor:
    "Return a tensor's numbers with nothing else around them: one tensor for one memory, which it fills."
    if type(t) not in (Tensor, nn.Parameter) or t.layout is not torch.strided or t.is_quantized or t.is_meta:
        kind = type(t).__name__ if t.layout is torch.strided else str(t.layout).removeprefix('torch.')
        raise CheckpointError(f'A tensor of the state is {kind}, {t.device.type}, {t.dtype}: it would not load. Keep '
                              'plain, dense tensors in states.')
    t = t.detach().resolve_conj().resolve_neg()
    key = t.device, t.data_ptr(), t.dtype, t.shape, t.stride()
    if key not in known:
        memory = t.untyped_storage()
        fills = memory.nbytes() == t.nbytes and is_dense(t.shape, t.stride())
        alone = owners.setdefault((t.device, memory.data_ptr()), key) == key  # of w and w.t() only one can have it
        known[key] = t if fills and alone else t.clone()
    return known[key]


def _write(state: State, path: Path) -> None:
    "Let torch write. Of what fails then it names no cause, so ask the system again: a full disk is still full."
    try: torch.save(state, path)
    except RuntimeError:
        with path.open('ab') as f: f.write(bytes(4096))
        raise


# Loading

def load_state(
    path: str | Path,   # written by `save_state`
) -> tuple[State, dict[str, Any]]:
    """Return the state in a file and what its seal says, the state brought to the current format.

    Nothing is believed before it was looked at: the digest, the archive, what its pickle would do, and then what came
    out. No code in the file is run, and no more memory is taken than it has bytes. **The tensors are the file itself,
    mapped into memory**: writing to one changes nothing on the disk, but copy what is to stay (`copied`), as reading
    one ends the process when another program has cut the file short meanwhile. Tied weights are one tensor in several
    places.

    Raises `FileNotFoundError`, `DamagedError` that names the file and the place in it, and `CheckpointError` for a
    format that this version cannot read.
    """
    info = verify(path := Path(path))
    try:
        check_archive(path, body_size(path))
        state = _read(path)
        if check_structure(state) > path.stat().st_size: raise ValueError('holds more than it has bytes')
    except ValueError as e: raise DamagedError(f'{path} {e}. Nothing was loaded.') from None
    if not isinstance(state, dict): raise DamagedError(f'{path} holds no state, but a {type(state).__name__}.')
    return _migrated(state, info['format'], path), info


def _read(path: Path) -> Any:
    try: return torch.load(path, map_location='cpu', weights_only=True, mmap=True)
    except (OSError, MemoryError): raise
    except Exception as e:  # what passed is as torch writes it; if torch disagrees, almost anything comes
        reason = next(iter(str(e).splitlines()), '') or type(e).__name__
        raise ValueError(f'cannot be read: {reason}') from None


def _migrated(state: State, found: int, path: Path) -> State:
    for number in range(found, FORMAT):
        if number not in MIGRATIONS:
            raise CheckpointError(f'{path} has format {found}, which this version of learnkit reads no more: load it '
                                  'with an older one.')
        state = MIGRATIONS[number](state)
    return state


# What a state may hold

def check_structure(state: Any) -> int:
    """Return the bytes of the tensors in a state, each counted once.

    Raises `ValueError`, with the rest of a sentence, for what is no plain data, for nesting beyond 100 levels, for a
    list, tuple or dict that occurs twice (what nests such parts may take for ever to copy), and for tensors that occur
    so often that a copy of each would be far larger than the state.

    >>> check_structure({'a': [1, torch.zeros(2)], 'b': ()})
    8
    """
    census = _Census()
    census.count(state, ())
    if census.referred > MAX_REFERENCES * census.distinct + (1 << 20):
        raise ValueError(f'refers to the same tensors again and again, {census.referred:,} bytes in all')
    return census.distinct


class _Census:
    "What was met on the way through a state."

    def __init__(self) -> None:
        self.parts, self.tensors = set[int](), set[int]()
        self.distinct = self.referred = 0  # bytes of tensors, each once, and as often as they occur

    def count(self, value: Any, where: tuple[Any, ...]) -> None:
        kind = type(value)
        if kind in _ATOMS: return
        if kind is Tensor: self._tensor(value)
        elif kind is dict or kind is list or kind is tuple: self._part(value, where)
        elif kind is int:
            if (n := value.bit_length()) > MAX_INT_BITS: raise ValueError(f'has a number of {n} bits{_at(where)}')
        elif kind is bytes:
            if not value: raise ValueError(f"has empty bytes{_at(where)}, which torch does not load: use None or ''")
        else: raise ValueError(f'has a {kind.__name__}{_at(where)}')

    def _tensor(self, t: Tensor) -> None:
        self.referred += t.nbytes
        if id(t) in self.tensors: return
        self.tensors.add(id(t))
        self.distinct += t.nbytes

    def _part(self, part: Any, where: tuple[Any, ...]) -> None:
        if not part: return  # there is one empty tuple for all
        kind = type(part)
        if id(part) in self.parts: raise ValueError(f'has the same {kind.__name__} twice, once{_at(where)}')
        if len(where) == MAX_DEPTH: raise ValueError(f'is nested more than {MAX_DEPTH} levels deep')
        self.parts.add(id(part))
        if kind is not dict:
            for i, value in enumerate(part): self.count(value, (*where, i))
            return
        for key, value in part.items():
            if type(key) is not str and type(key) is not int:
                raise ValueError(f'has a key that is a {type(key).__name__}{_at(where)}')
            self.count(value, (*where, key))


def _at(where: tuple[Any, ...]) -> str:
    "Say at which place, briefly: keys may come from anybody."
    if not where: return ''
    return ' at ' + ''.join(f'[{ascii(key)[:60]}]' for key in where[:8]) + ('...' if len(where) > 8 else '')


def copied(state: Any) -> Any:
    """Return a copy of a checked state that shares no memory with it; tied tensors stay tied.

    >>> w = torch.zeros(2)
    >>> a = copied({'w': w, 'tied': w})
    >>> a['w'] is not w and a['w'] is a['tied']
    True
    """
    made: dict[int, Tensor] = {}

    def copy(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in made: made[id(value)] = value.clone()
            return made[id(value)]
        if isinstance(value, dict): return {k: copy(v) for k, v in value.items()}
        return type(value)(map(copy, value)) if isinstance(value, (list, tuple)) else value
    return copy(state)
