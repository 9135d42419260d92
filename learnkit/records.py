"""Objects of a model's own classes among the processes: they travel as plain values, and are made anew by an example.

No class is looked up by a name that another process has sent: each process makes its objects like those that it has."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from learnkit.batch import children_of, rebuilt
from learnkit.errors import BatchError
from learnkit.merging import gathered
from learnkit.world import World

__all__ = ['exchanged']

Kind = tuple[str, tuple[Any, ...]]   # the name of a class, and the keys of a mapping
_RECORD = 'record of learnkit'


def exchanged(
    world: World,
    mine: Any,      # any nesting of tensors, arrays and plain values, also in dataclasses and mappings of any class
) -> list[Any]:
    """Return what each process has, as `gathered` does, with the classes that it has there.

    Raises `BatchError` in all processes where one has no example of a class, and for what cannot be taken apart."""
    examples: dict[Kind, Any] = {}
    apart = _apart(mine, examples)
    told = gathered(world, (list(examples), apart))
    known = {kind for kinds, _ in told for kind in kinds}
    for rank, (kinds, _) in enumerate(told):
        if lacking := known.difference(kinds):
            raise BatchError(f'Process {rank} of {world.size} has predicted nothing like the '
                             f'{min(name for name, _ in lacking)} of the others, and cannot make one. Let the model '
                             'return tensors in a dict or a tuple, or predict on at least as many samples as there are '
                             'processes.')
    return [_together(o, examples) for _, o in told]


def _apart(o: Any, examples: dict[Kind, Any]) -> Any:
    "Return a value as plain containers, and note one object of each kind."
    children = children_of(o)
    if children is None: return o
    parts = [_apart(child, examples) for child in children]
    if type(o) in (list, tuple): return type(o)(parts)
    if type(o) is dict: return dict(zip(o, parts, strict=True))
    kind = f'{type(o).__module__}.{type(o).__qualname__}', tuple(o) if isinstance(o, Mapping) else ()
    examples.setdefault(kind, o)
    return _RECORD, kind, parts


def _together(o: Any, examples: dict[Kind, Any]) -> Any:
    if type(o) is dict: return {k: _together(v, examples) for k, v in o.items()}
    if type(o) not in (list, tuple): return o
    if type(o) is tuple and len(o) == 3 and type(o[0]) is str and o[0] == _RECORD:
        return rebuilt(examples[o[1]], [_together(part, examples) for part in o[2]])
    return type(o)(_together(part, examples) for part in o)
