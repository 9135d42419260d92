"""What proves that two states are the same to the last bit, and says where they are not."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from learnkit.core.dtensor import whole_state
from learnkit.core.errors import OptionError
from learnkit.core.learner_type import LearnerLike
from learnkit.core.model import bare_model
from learnkit.core.random import capture_rng
from learnkit.core.time import UNITS
from learnkit.engine.callback_state import nondeterministic_state

__all__ = ['WALL_CLOCK', 'digest', 'differences', 'learn_digest', 'learn_state']

# what a checkpoint's state holds of the clock; `Timestamp` stands for the state of any, wherever it is
WALL_CLOCK = ('loop.sec', 'loop.seconds', 'callbacks.*.history.*.time', 'Timestamp.sec')

# the sections of a checkpoint whose differences tell the most come first; random generators tell the least
SECTIONS = ('model', 'loss_func', 'optimizer', 'grads', 'frozen', 'callbacks', 'loop', 'position')

Place = tuple[Any, ...]  # the keys that lead to a value
Patterns = frozenset[tuple[str, ...]]  # places that are left out, below the value at hand


def digest(
    state: Any,  # tensors, numbers, texts, bytes, None; lists, tuples and dicts of them
    leave_out: Iterable[str] = WALL_CLOCK,  # keys that do not count: `a.b.c`, `*` for any key
) -> str:
    """Return the SHA-256 of a nested state: equal for states that are equal to the last bit, and for no others.

    It depends on the keys of a dict, not on their order; on the dtype, shape and bytes of a tensor, not on its device
    or layout. 1, 1.0 and True differ, as do 0.0 and -0.0, a list and a tuple; NaN equals itself. NumPy's numbers count
    as Python's. Of a checkpoint's state the times are left out, with what its entry `wall_clock` (`{callback: names}`)
    lists. Raises `OptionError`, with the place, for anything else in a state.

    >>> a, b = torch.ones(2), torch.ones(2)
    >>> digest({'a': a, 'lr': 0.1}) == digest({'lr': 0.1, 'a': b})
    True
    >>> digest(1) == digest(1.)
    False
    """
    sha = sha256()
    for piece in _pieces(state, (), _patterns(state, leave_out)):
        sha.update(piece)
    return sha.hexdigest()


def differences(
    first: Any,  # two states, as for `digest`
    second: Any,
    leave_out: Iterable[str] = WALL_CLOCK,  # places that do not count, as for `digest`
    limit: int = 20,  # the most lines
) -> list[str]:
    """Return a line for each place in which two states differ, the model's first; none if their digests are equal.

    >>> a = {'model': {'0.weight': torch.zeros(2, 3)}, 'loop': {'epoch': 3}, 'rng': {'torch': torch.zeros(5)}}
    >>> b = {'model': {'0.weight': torch.eye(2, 3) / 8}, 'loop': {}, 'rng': {'torch': torch.ones(5)}}
    >>> for line in differences(a, b): print(line)
    model.0.weight: 2 of 6 elements differ, at most 0.12 (first at [0, 0]: 0.0 and 0.125)
    only in the first: loop.epoch
    rng.torch: differs
    """
    if not isinstance(limit, int) or limit < 1:
        raise OptionError(f'limit={limit!r}: give a number of lines from 1 on.')
    leave_out = tuple(leave_out)
    found = list(
        _differences(first, second, (), _patterns(first, leave_out) | _patterns(second, leave_out))
    )
    found.sort(key=lambda one: _rank(one[0]))
    lines = [
        text if text.startswith('only in') else f'{_shown(place)}: {text}' for place, text in found
    ]
    return lines if len(lines) <= limit else [*lines[:limit], f'and {len(lines) - limit} more']


def learn_digest(learn: LearnerLike) -> str:
    """Return the digest of a Learner as it is: weights, buffers, optimizer, callbacks, counters and generators.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner()
    >>> before = learn_digest(learn)
    >>> learn_digest(learn) == before
    True
    >>> _ = torch.rand(1)
    >>> learn_digest(learn) == before
    False
    """
    return digest(learn_state(learn))


def learn_state(learn: LearnerLike) -> dict[str, Any]:
    "Return what `learn_digest` is computed from, for `differences`; its tensors are the Learner's own."
    loss = learn.loss_func
    return {
        'model': whole_state(bare_model(learn.model).state_dict()),
        'loss_func': loss.state_dict() if isinstance(loss, nn.Module) else None,
        'optimizer': None if learn.opt is None else whole_state(learn.opt.state_dict()),
        'callbacks': whole_state(learn.callback_states()),
        'loop': {'time': learn.time.state_dict()},
        'rng': capture_rng(),
        'wall_clock': nondeterministic_state(learn),
    }


# What is left out


def _patterns(state: Any, leave_out: Iterable[str]) -> Patterns:
    "Return the places that are left out, with those that a checkpoint's state names itself."
    if isinstance(leave_out, str):
        raise OptionError(f'leave_out={leave_out!r}: give a list of places.')
    patterns = {tuple(place.split('.')) for place in leave_out}
    own = state.get('wall_clock') if patterns and isinstance(state, Mapping) else None
    if isinstance(own, Mapping):
        patterns |= {
            ('callbacks', str(key), *str(name).split('.'))
            for key, names in own.items()
            for name in names
        }
    return frozenset(patterns)


def _counts(
    state: Mapping[Any, Any] | Sequence[Any],
    patterns: Patterns,
) -> dict[Any, Patterns]:
    "Return the keys of a state that count, each with what is left out further in."
    keys = list(state) if isinstance(state, Mapping) else range(len(state))
    if not patterns:
        return dict.fromkeys(keys, patterns)
    anywhere = frozenset(p for p in patterns if p[0] == 'Timestamp')
    if isinstance(state, Mapping) and set(state) == set(UNITS):
        patterns |= {p[1:] for p in anywhere}
    inside = {k: frozenset(p[1:] for p in patterns if p[0] in ('*', str(k))) for k in keys}
    return {k: inner | anywhere for k, inner in inside.items() if () not in inner}


# Digests


def _pieces(value: Any, place: Place, patterns: Patterns) -> Iterator[Any]:
    "Yield bytes that no other value has: each begins with its kind and its length."
    if isinstance(value, Tensor):
        yield from _tensor_pieces(value, place)
    elif isinstance(value, Mapping):
        entries = _by_code(value, place, patterns)
        yield _head(b'D', len(entries))
        for code, (k, inner) in sorted(entries.items()):
            yield code
            yield from _pieces(value[k], (*place, k), inner)
    elif isinstance(value, (list, tuple)):
        counts = _counts(value, patterns)
        yield _head(b'L' if isinstance(value, list) else b'T', len(counts))
        for i, inner in counts.items():
            yield from _pieces(value[i], (*place, i), inner)
    else:
        kind, content = _scalar(value, place)
        yield _head(kind, len(content)) + content


def _code(value: Any, place: Place) -> bytes:
    return b''.join(_pieces(value, place, frozenset()))


def _by_code(
    state: Mapping[Any, Any], place: Place, patterns: Patterns
) -> dict[bytes, tuple[Any, Patterns]]:
    "Return the keys that count by their bytes, which tell 1, 1.0 and True apart, with what is left out further in."
    return {_code(k, (*place, k)): (k, inner) for k, inner in _counts(state, patterns).items()}


def _scalar(value: Any, place: Place) -> tuple[bytes, bytes]:
    "Return the kind and the content of what holds no other values."
    if isinstance(value, np.generic):
        value = value.item()
    match value:
        case None:
            return b'N', b''
        case bool():
            return b'B', b'%d' % value
        case int():
            return b'I', b'%d' % value
        case float():
            return b'F', struct.pack('<d', value)
        case complex():
            return b'C', struct.pack('<dd', value.real, value.imag)
        case str():
            return b'S', value.encode('utf-8', 'surrogatepass')
        case bytes():
            return b'Y', value
    raise OptionError(
        f'{_shown(place)} is a {type(value).__name__}, which has no digest. Keep tensors, numbers, '
        'texts, and lists, tuples or dicts of them.'
    )


def _head(kind: bytes, length: int) -> bytes:
    return kind + struct.pack('<q', length)


def _tensor_pieces(t: Tensor, place: Place) -> Iterator[Any]:
    t = _strided(t, place)
    if t.is_sparse:
        yield from _pieces((b'sparse', list(t.shape), t.indices(), t.values()), place, frozenset())
        return
    content = _rows(t).reshape(-1)
    yield _head(b'A', len(content)) + _code((_dtype(t), list(t.shape)), place)
    yield content.numpy()


def _strided(t: Tensor, place: Place) -> Tensor:
    "Return a tensor on the host without gaps; raise `OptionError` for one that has no values to look at."
    if (
        is_lazy(t)
        or t.is_meta
        or t.is_quantized
        or t.layout not in (torch.strided, torch.sparse_coo)
    ):
        kind = (
            'has no values yet'
            if is_lazy(t) or t.is_meta
            else f'is {"quantized" if t.is_quantized else t.layout}'
        )
        raise OptionError(f'{_shown(place)} is a tensor that {kind}: it has no digest.')
    t = t.detach().cpu()
    return t.coalesce() if t.is_sparse else t.resolve_conj().resolve_neg().contiguous()


# Differences


def _differences(a: Any, b: Any, place: Place, patterns: Patterns) -> Iterator[tuple[Place, str]]:
    if place[:1] == ('rng',) and len(place) == 2:  # its thousands of words tell nobody anything
        if digest(a) != digest(b):
            yield place, 'differs'
    elif isinstance(a, Mapping) and isinstance(b, Mapping):
        yield from _of_dicts(a, b, place, patterns)
    elif (
        isinstance(a, (list, tuple))
        and isinstance(b, (list, tuple))
        and isinstance(a, list) == isinstance(b, list)
    ):
        yield from _of_lists(a, b, place, patterns)
    elif isinstance(a, Tensor) and isinstance(b, Tensor):
        if text := _of_tensors(_strided(a, place), _strided(b, place)):
            yield place, text
    elif _code(a, place) != _code(b, place):
        yield place, _of_values(a, b)


def _of_dicts(
    a: Mapping[Any, Any], b: Mapping[Any, Any], place: Place, patterns: Patterns
) -> Iterator[Any]:
    here, there = _by_code(a, place, patterns), _by_code(b, place, patterns)
    for code, (k, inner) in here.items():
        if code in there:
            yield from _differences(a[k], b[k], (*place, k), inner)
        else:
            yield (*place, k), f'only in the first: {_shown((*place, k))}'
    for code, (k, _) in there.items():
        if code not in here:
            yield (*place, k), f'only in the second: {_shown((*place, k))}'


def _of_lists(
    a: Sequence[Any], b: Sequence[Any], place: Place, patterns: Patterns
) -> Iterator[tuple[Place, str]]:
    "Yield a line for other lengths, and one for all the entries that differ: lists are long."
    if len(a) != len(b):
        yield place, f'{len(a)} and {len(b)} entries'
    counts = _counts(a[: len(b)], patterns)
    found = [
        next(_differences(a[i], b[i], (*place, i), inner), None) for i, inner in counts.items()
    ]
    differ = [one for one in found if one is not None]
    if len(differ) == 1:
        yield differ[0]
    elif differ:
        where, text = differ[0]
        first = text if text.startswith('only in') else f'{_shown(where[len(place) :])}: {text}'
        yield place, f'{len(differ)} of {len(found)} entries differ, first {first}'


def _of_tensors(a: Tensor, b: Tensor) -> str:
    "Say how two tensors differ, in an empty text if they do not."
    if (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout):
        return f'{_form(a)} and {_form(b)}'
    if a.is_sparse:
        return (
            '' if _code(a, ()) == _code(b, ()) else f'sparse {_form(a)}, indices or values differ'
        )
    at = (_rows(a) != _rows(b)).any(1).nonzero().flatten()
    if not len(at):
        return ''
    x, y = (t.flatten()[at] for t in (a, b))
    values = f'{_number(x[0])} and {_number(y[0])}'
    if a.numel() == 1:
        return values
    wide = torch.complex128 if a.is_complex() else torch.float64
    gap = float((x.to(wide) - y.to(wide)).abs().max())
    size = f'at most {gap:.2g}' if gap else 'in bits alone'
    first = [int(i) for i in np.unravel_index(int(at[0]), a.shape)]
    return f'{len(at)} of {a.numel()} elements differ, {size} (first at {first}: {values})'


def _rows(t: Tensor) -> Tensor:
    "Return the bytes of a tensor, a row an element."
    return t.reshape(-1).view(torch.uint8).reshape(t.numel(), t.itemsize)


def _of_values(a: Any, b: Any) -> str:
    if type(a) is type(b):
        return f'{_short(a)} and {_short(b)}'
    return ' and '.join(
        _form(v) if isinstance(v, Tensor) else f'{_short(v)} ({type(v).__name__})' for v in (a, b)
    )


def _short(value: Any) -> str:
    return text if len(text := repr(value)) <= 80 else f'{text[:40]}...{text[-37:]}'


def _number(t: Tensor) -> str:
    return str((t.float() if t.is_floating_point() and t.itemsize < 4 else t).numpy()[()])


def _form(t: Tensor) -> str:
    return f'{_dtype(t)} {list(t.shape)}'


def _dtype(t: Tensor) -> str:
    return str(t.dtype).removeprefix('torch.')


def _rank(place: Place) -> int:
    section = place[0] if place else ''
    return SECTIONS.index(section) if section in SECTIONS else len(SECTIONS) + (section == 'rng')


def _shown(place: Place) -> str:
    "Show the keys that lead to a value: texts with dots between, others in brackets."
    text = ''.join(f'.{key}' if isinstance(key, str) else f'[{key!r}]' for key in place)
    return text.removeprefix('.') or 'the state'
