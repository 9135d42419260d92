# SPDX-License-Identifier: Apache-2.0
"""State of a loader: what the loader, its samplers and its data set keep while they are iterated.

The state holds random generators, seeds, epoch numbers and counts. A sampler that shuffles by the number of its pass,
for example, repeats the order of an epoch only if that number is restored. Another number that never changes is an
option, which a resumed process may set to another value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from types import NoneType
from typing import Any
from weakref import finalize

from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from learnkit.core.random import capture_generator, capture_own, restore_own
from learnkit.data.dataloaders import TensorLoader

State = dict[str, Any]  # 'own': generators, 'epochs', 'counts', each by attribute path

NUMBERS = (int, float, bool, NoneType)
_PARTS = ('sampler', 'batch_sampler', 'dataset')
_KINDS = (DataLoader, Dataset, Sampler)
_SEED = 'seed'  # end of the names of seeds
# attributes with the number of the pass, the second of Mosaic's data sets
_EPOCHS = ('epoch', 'next_epoch')
_NODES = ('root', 'source', 'dataset')  # attributes by which a loader built of nodes has its nodes
# lists of parts: of torch's ConcatDataset, stages of webdataset, of a CombinedLoader
LISTS = ('datasets', 'pipeline', 'loaders')
# numbers of an owner as they were first seen, by the owner's id
_first_numbers: dict[int, dict[str, Any]] = {}


def capture_loader_state(dl: Any) -> State:
    """Return the generators, epoch numbers and counts of a loader and its parts as tensors and plain values.

    Each count comes with the value that it had when this process first saw its owner.

    >>> from torch.utils.data import DataLoader
    >>> class Reversing(Sampler):
    ...     n_passes = 0
    ...     def __iter__(self):
    ...         self.n_passes += 1
    ...         return iter([0, 1, 2][::-1 if self.n_passes % 2 else 1])
    >>> dl = DataLoader(range(3), sampler=Reversing())
    >>> _ = capture_loader_state(dl), list(dl), list(dl)
    >>> capture_loader_state(dl)['counts']['sampler']
    {'n_passes': (None, 2)}
    """
    state: State = {'own': {}, 'epochs': {}, 'counts': {}}
    if type(dl) is TensorLoader:
        # it draws from one generator, and counts nothing
        if dl.generator is not None:
            state['own'] = {'generator': capture_generator(dl.generator)}
        return state
    state['own'] = capture_own(dl)
    for path, owner in find_parts(dl):
        if name := _find_epoch(owner):
            state['epochs'][path] = getattr(owner, name)
        if _is_own(owner) or type(owner) is BatchSampler:  # whose batch size a callback may change
            first, present = _read_numbers(owner)
            state['counts'][path] = {name: (first.get(name), n) for name, n in present.items()}
    return state


def restore_loader_state(
    dl: Any,
    state: Mapping[str, Any],  # return value of `capture_loader_state` of a loader made alike
    with_loader: bool = False,  # restore a loader's own numbers, though it has `load_state_dict`
    is_loaded: bool = False,  # the loader's own state was loaded, with the states of its parts
) -> list[str]:  # names of generators that this loader lacks
    """Restore a loader's state, except counts that were changed neither there nor here and are not seeds.

    An epoch number is set by `set_epoch` if its owner has that method."""
    epochs = state.get('epochs', {})
    counts = state.get('counts', {})

    def saves_itself(path: str, owner: Any) -> bool:
        "Return True for a part whose own state includes its epoch and its counts."
        is_held = is_loaded if path else not with_loader
        return is_held and hasattr(type(owner), 'load_state_dict')

    parts = [(path, owner) for path, owner in find_parts(dl) if not saves_itself(path, owner)]
    for path, owner in parts:
        epoch = epochs.get(path)
        name = _find_epoch(owner)
        if epoch is None or name is None or epoch == getattr(owner, name):
            continue
        if hasattr(owner, 'set_epoch'):
            owner.set_epoch(epoch)
        else:
            with suppress(AttributeError):
                setattr(owner, name, epoch)  # a read-only property raises
    for path, owner in parts:
        if path not in counts or not hasattr(owner, '__dict__'):
            continue  # another type of object may be at this path now
        first, present = _read_numbers(owner)
        for name, (saved_first, value) in counts[path].items():
            is_changed = value != saved_first or present.get(name) != first.get(name)
            if is_changed or name.endswith(_SEED):
                owner.__dict__[name] = value
        for name in present.keys() - first.keys() - counts[path].keys():
            del owner.__dict__[name]  # the first pass makes it
    return restore_own(dl, state.get('own', {}))


def drop_seeds(
    state: Mapping[str, Any],  # return value of `capture_loader_state`
) -> State:
    "Return the state of a loader without seeds, for a rank that may have others than the rank that saved it."
    counts = {
        path: {name: value for name, value in numbers.items() if not name.endswith(_SEED)}
        for path, numbers in state.get('counts', {}).items()
    }
    return {**state, 'counts': counts}


def set_epochs(
    dl: Any,
    epoch: int,  # number of the pass that begins
) -> None:
    """Call `set_epoch` of a loader, its samplers and its data sets, where they have that method.

    >>> from torch.utils.data import DataLoader, DistributedSampler
    >>> sampler = DistributedSampler(range(3), num_replicas=1, rank=0)
    >>> set_epochs(DataLoader(range(3), sampler=sampler), 5)
    >>> sampler.epoch
    5
    """
    for _, owner in find_parts(dl):
        set_epoch = getattr(owner, 'set_epoch', None)
        if callable(set_epoch):
            set_epoch(epoch)


def find_own_parts(dl: Any) -> list[tuple[str, Any]]:
    "Return (attribute path, object) of the parts of a loader that were written by the user."
    return [(path, owner) for path, owner in find_parts(dl) if _is_own(owner)]


def find_parts(dl: Any) -> list[tuple[str, Any]]:
    "Return (attribute path, object) of a loader, its samplers and its data sets, each once."
    return _walk(dl, _list_inner)


def _walk(
    root: Any, list_inner: Callable[[Any], Iterable[tuple[str, Any]]]
) -> list[tuple[str, Any]]:
    "Return (path, object) of an object and of all that a function lists within the objects, each once."
    found = [('', root)]
    seen = {id(root)}
    for path, owner in found:  # grows during the loop
        for name, value in list_inner(owner):
            if id(value) not in seen:
                seen.add(id(value))
                found.append((f'{path}.{name}'.removeprefix('.'), value))
    return found


def _list_inner(owner: Any) -> list[tuple[str, Any]]:
    "Return the attributes of a part that are parts, and the entries of its lists of parts."
    parts: list[tuple[str, Any]] = []
    # a copy, since threads of a loader may set attributes
    for name, value in list(getattr(owner, '__dict__', {}).items()):
        if name in _PARTS or isinstance(value, _KINDS):
            parts.append((name, value))
        elif name in LISTS and isinstance(value, (list, tuple)):
            parts += [(f'{name}.{i}', part) for i, part in enumerate(value)]
    return parts


def has_lossy_state(dl: Any) -> bool:
    "Return True for a loader of Hugging Face's data that shuffle in a buffer, which their state leaves out."
    owners = _walk(getattr(dl, 'dataset', dl), _list_of_datasets)
    return any('buffer_size' in _attributes_of_datasets(owner) for _, owner in owners)


def _list_of_datasets(owner: Any) -> Iterator[tuple[str, Any]]:
    "Yield the attributes of an object of the package `datasets`, and the entries of its lists."
    for name, value in _attributes_of_datasets(owner).items():
        yield from ((name, part) for part in (value if isinstance(value, list) else [value]))


def _attributes_of_datasets(owner: Any) -> dict[str, Any]:
    is_from_datasets = type(owner).__module__.partition('.')[0] == 'datasets'
    return getattr(owner, '__dict__', {}) if is_from_datasets else {}


def find_out_of_order(dl: Any) -> list[str]:
    "Return the types of a loader, and of the nodes that it is built of, whose workers finish in any order."
    return [
        type(owner).__name__
        for _, owner in _walk(dl, _list_nodes)
        if getattr(owner, 'num_workers', True) and getattr(owner, 'in_order', True) is False
    ]


def _list_nodes(owner: Any) -> Iterator[tuple[str, Any]]:
    return ((name, getattr(owner, name)) for name in _NODES if hasattr(owner, name))


def _find_epoch(owner: Any) -> str | None:
    "Return the name of the attribute with the epoch number of a part, or None."
    return next((name for name in _EPOCHS if type(getattr(owner, name, None)) is int), None)


def _is_own(owner: Any) -> bool:
    return type(owner).__module__.partition('.')[0] != 'torch' and hasattr(owner, '__dict__')


def _read_numbers(owner: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    "Return the numeric attributes, as this process first saw them and as they are now, without `epoch`."
    attributes = vars(owner).copy()
    present = {k: v for k, v in attributes.items() if type(v) in NUMBERS and k != 'epoch'}
    key = id(owner)
    if key not in _first_numbers:
        with suppress(TypeError):  # an object of a class with `__slots__`
            finalize(owner, _first_numbers.pop, key)  # a newer object may get the id
            _first_numbers[key] = present
    return _first_numbers.get(key, present), present
