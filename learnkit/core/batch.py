"""What the loop does with a batch: split, move, detach, measure, join, cut up, and give it to the model.

A batch may be a tensor, a tuple, list, named tuple, dict or other mapping, a dataclass, or any nesting of them;
containers are rebuilt as their own type. What runs on each batch tries the common case first, a plain tuple or list."""

from __future__ import annotations

import dataclasses
import inspect
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from learnkit.core.errors import BatchError

__all__ = [
    'TARGET_NAMES',
    'BatchForm',
    'split_batch',
    'form_of',
    'to_device',
    'to_detach',
    'detuplify',
    'find_bs',
    'count_samples',
    'batch_counter',
    'count_stacked',
    'has_certain_size',
    'concat',
    'microbatches',
    'cut_batch',
    'take_rows',
    'is_sample_list',
    'has_listed_samples',
    'have_listed_samples',
    'apply_model',
    'passed_names',
    'call_by_name',
    'unpack_output',
    'map_tensors',
    'describe',
    'children_of',
    'rebuilt',
]

# where a batch with named entries has its targets
TARGET_NAMES = ('labels', 'label', 'targets', 'target', 'y')
_FORM = ': it is (*inputs, target), or a dict of inputs and `labels`. Look at what the collate function returns.'


def split_batch(
    batch: Any,  # as the loader gave it
    n_inp: int | None = None,  # inputs among a tuple's entries; None: all but the last, or one
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:  # inputs and targets
    """Split a batch into its inputs and its targets.

    A mapping or dataclass is one input, and its targets are the entries under `TARGET_NAMES` that are not None; any
    other object is one input without targets. Raises `BatchError` for an empty batch, and for an `n_inp` that does not
    fit: of a mapping or dataclass, any.

    >>> split_batch(['image', 'mask', 'label'])
    (('image', 'mask'), ('label',))
    >>> split_batch({'text': 'a b', 'label': 1})
    (({'text': 'a b', 'label': 1},), (1,))
    """
    kind = type(batch)
    if (kind is list or kind is tuple) and len(batch) == 2 and (n_inp is None or n_inp == 1):
        return (batch[0],), (batch[1],)

    named = _named(batch)
    if named is not None:
        if not named:
            raise BatchError(f'The loader gave an empty batch ({describe(batch)}){_FORM}')
        if n_inp is not None:
            raise BatchError(
                f'n_inp={n_inp} counts the entries of a tuple, and the batch is {describe(batch)}: its '
                f'targets are the entries {", ".join(TARGET_NAMES)}, or those that '
                "`DataLoaders(targets=('boxes', 'labels'))` names. Leave n_inp out."
            )
        return (batch,), tuple(named[k] for k in TARGET_NAMES if named.get(k) is not None)

    items = (
        tuple(batch)
        if isinstance(batch, (tuple, list)) and not isinstance(batch, PackedSequence)
        else (batch,)
    )
    if not items:
        raise BatchError(f'The loader gave an empty batch ({describe(batch)}){_FORM}')
    n = max(len(items) - 1, 1) if n_inp is None else n_inp
    if not 1 <= n <= len(items):
        raise BatchError(
            f'n_inp={n} does not fit a batch with {len(items)} entries, {describe(batch)}: '
            f'set n_inp to a number from 1 to {len(items)}.'
        )
    return items[:n], items[n:]


@dataclasses.dataclass(frozen=True, slots=True)
class BatchForm:
    """Split the batches of one loader as `DataLoaders(n_inp=..., targets=...)` declares.

    >>> form = BatchForm(targets=('boxes', 'labels'))
    >>> form.split({'image': 1, 'boxes': 2, 'labels': 3})
    (({'image': 1, 'boxes': 2, 'labels': 3},), (2, 3))
    """

    n_inp: int | None = None  # entries of a tuple that are inputs
    targets: tuple[str, ...] | None = None  # names of a mapping's entries that are targets
    strict: bool = True  # whether `n_inp` is refused for mappings

    def split(
        self,
        batch: Any,  # as the loader gave it
        predicting: bool = False,  # whether a batch without any of the targets is accepted
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:  # inputs and targets
        "Return inputs and targets of a batch; raise `BatchError` for a batch of another form."
        if self.targets is not None:
            return self._split_named(batch, self.targets, predicting)
        if self.strict or self.n_inp is None or _named(batch) is None:
            return split_batch(batch, self.n_inp)
        return split_batch(batch)

    def _split_named(
        self, batch: Any, targets: tuple[str, ...], predicting: bool
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        named = _named(batch)
        missing = [name for name in targets if named is None or name not in named]
        if predicting and len(missing) == len(targets):
            return split_batch(batch)[0], ()
        if missing:
            raise BatchError(
                f'The batch {describe(batch)} has no entry {", ".join(map(repr, missing))}: '
                f'`DataLoaders(targets={targets})` names the entries of dicts that are targets.'
            )
        return (batch,), tuple((named or {})[name] for name in targets)


def form_of(
    dls: Any,  # `DataLoaders`, or an object that works like one
    name: str = 'train',  # the loader
) -> BatchForm:
    "Return how the batches of a loader are split."
    if (own := getattr(type(dls), 'batch_form', None)) is not None:
        return own(dls, name)
    return BatchForm(getattr(dls, 'n_inp', None), strict=False)  # other libraries always have one


def to_device(
    batch: Any,  # any nesting of tensors; what is no tensor is left alone
    device: torch.device | str,  # where the tensors shall be
) -> Any:  # `batch` itself when every tensor is there already
    """Move every tensor in `batch` to `device`, without waiting when that is a GPU.

    An object with a `to` method of its own (a PackedSequence, a graph) is moved by it.

    >>> batch = (torch.zeros(2), 'text')
    >>> to_device(batch, torch.device('cpu')) is batch
    True
    """
    if type(batch) is tuple or type(batch) is list:
        for t in batch:
            if type(t) is not Tensor or t.device != device:
                break
        else:
            return batch

    device = torch.device(device)
    return map_tensors(
        batch, lambda t: t.to(device, non_blocking=device.type == 'cuda'), lambda o: o.to(device)
    )


def to_detach(
    b: Any,  # any nesting of tensors
    cpu: bool = True,  # also move them to the CPU
) -> Any:
    """Return `b` with every tensor detached from its graph.

    >>> to_detach({'loss': torch.ones(1, requires_grad=True)})
    {'loss': tensor([1.])}
    """
    return map_tensors(b, lambda t: t.detach().cpu() if cpu else t.detach())


def detuplify(t: Any) -> Any:
    """Return the only element of a tuple or list, None for an empty one, and `t` itself otherwise.

    >>> detuplify((3,)), detuplify((1, 2)), detuplify(())
    (3, (1, 2), None)
    """
    if not isinstance(t, (tuple, list)) or len(t) > 1:
        return t
    return t[0] if t else None


def find_bs(
    b: Any,  # a batch, or the tuple of its inputs
    yb: tuple[Any, ...] = (),  # its targets, where `b` is the inputs
    size_func: Callable[[Any, Any], int] | None = None,  # f(xb, yb) that counts samples itself
) -> int:
    """Return the number of samples in a batch.

    The first case that holds decides:

    1. `size_func`: what it returns.
    2. The first entry with a size is a tensor or array (N, ...): N; a PackedSequence: its sequences; an object with
       `num_graphs`: that number. Entries come in their order, inputs before targets; those of mappings, dataclasses
       and named tuples are entries of the batch.
    3. The first entry with a size is a list or tuple of m tensors, dicts or other containers, the first of n rows: m
       samples, or some inputs of n samples. Another entry that fits only one of the two decides, the last one first,
       so that targets do: a tensor of n rows, a list of m strings or dicts, a list of m tensors.
    4. No other entry decides: m, one entry a sample.
    5. No entry holds a tensor with a dimension: the length of the first list of numbers, strings, dicts or tensors.

    Raises `BatchError` in any other case.

    >>> find_bs({'ids': torch.zeros(8, 12), 'weight': torch.tensor(1.)})
    8
    >>> images = [torch.zeros(3, 20, 30), torch.zeros(3, 25, 40)]
    >>> find_bs((images,), ([{'boxes': torch.zeros(5, 4)}, {'boxes': torch.zeros(1, 4)}],))
    2
    >>> find_bs(([torch.zeros(64, 9), torch.zeros(64, 5)],), (torch.zeros(64),))  # two inputs
    64
    """
    if (
        size_func is None
        and type(b) is tuple
        and b
        and type(b[0]) is Tensor
        and (shape := b[0].shape)
    ):
        return shape[0]

    if size_func is not None:
        return int(size_func(b, yb))
    return _count_and_certainty(b, yb)[0]


def count_samples(
    learn: Any,  # a Learner with a batch at hand
) -> int:
    "Return the number of samples in this process's batch, by `find_bs` and the Learner's `size_func`."
    return find_bs(learn.xb, learn.yb, getattr(learn, 'size_func', None))


def batch_counter(
    learn: Any,  # a Learner
) -> Callable[[Any], int]:
    "Return a function that counts the samples of a batch as a loader gave it, like those of the batch at hand."
    form, size_func = form_of(learn.dls), getattr(learn, 'size_func', None)
    return lambda batch: find_bs(*form.split(batch), size_func)


def count_stacked(
    xb: tuple[Any, ...],  # inputs
) -> int:
    "Return the number of samples of stacked inputs; raise `BatchError` for a list with one entry a sample."
    n = find_bs(xb)
    if not has_listed_samples(xb, n):
        return n
    if has_certain_size(xb, ()):
        raise BatchError(
            f'The inputs {describe(xb)} have a list with one entry a sample: stack them into a tensor.'
        )
    return next(_tensor_sizes(xb))


def has_certain_size(xb: tuple[Any, ...], yb: tuple[Any, ...]) -> bool:
    """Return False if only case 4 of `find_bs` counts the samples, where stacked inputs would look the same.

    Tensors that differ in their first dimension are samples, and so are images (C, H, W) of 1, 3 or 4 channels.

    >>> views = [torch.zeros(64, 9), torch.zeros(64, 9)]
    >>> has_certain_size((views,), ()), has_certain_size((views,), (torch.zeros(64),))
    (False, True)
    """
    return _count_and_certainty(xb, yb)[1]


def concat(
    items: list[Any],  # equal nested structures, one a batch
    dim: int = 0,  # the dimension along which tensors are joined; those without one are stacked
    sizes: list[int] | None = None,  # samples of each item, where known
    listed: bool = False,  # the batches have their samples in lists, see `has_listed_samples`
) -> Any:
    """Join batches of predictions, targets or inputs into one structure of the same kind.

    Tensors whose other dimensions differ become one flat list of their samples. A list of dicts, strings or other
    objects has one entry a sample, and such lists are chained, as are lists and tuples that `sizes` show to have one;
    graphs that can be taken apart become a list of them, and what else is no tensor one with an entry a batch. Raises
    `BatchError` when there is nothing to join or the structures differ.

    >>> concat([(torch.tensor([1, 2]), ['a', 'b']), (torch.tensor([3]), ['c'])])
    (tensor([1, 2, 3]), ['a', 'b', 'c'])
    >>> [len(t) for t in concat([(torch.zeros(5), torch.zeros(7)), (torch.zeros(4),)], sizes=[2, 1])]
    [5, 7, 4]
    """
    if not items:
        raise BatchError('There is nothing to join: not one batch was given.')
    first = items[0]
    if all(isinstance(o, Tensor) for o in items):
        return _join_tensors(items, dim)
    if sizes is not None and have_listed_samples(items, sizes, listed):
        return [sample for o in items for sample in o]
    if any(type(o) is not type(first) for o in items):
        return list(items)
    if _graph_count(first) is not None and hasattr(first, 'to_data_list'):
        return [graph for o in items for graph in o.to_data_list()]

    if isinstance(first, list) and (
        _is_sample_list(first) or any(len(o) != len(first) for o in items)
    ):
        return [sample for o in items for sample in o]
    children = [children_of(o) for o in items]
    if children[0] is None:
        return list(items)
    if any(_keys(o) != _keys(first) for o in items):
        raise BatchError(f'Batches of different structure cannot be joined: {_differing(items)}.')
    return rebuilt(
        first, [concat(list(group), dim, sizes, listed) for group in zip(*children, strict=True)]
    )


def microbatches(
    xb: tuple[Any, ...],  # inputs
    yb: tuple[Any, ...],  # targets
    size: int,  # the most samples a piece may have
    n: int | None = None,  # samples of the batch; None: as `find_bs` counts them
) -> list[tuple[tuple[Any, ...], tuple[Any, ...]]]:  # (xb, yb) of each piece
    """Cut a batch into pieces of at most `size` samples, without copying.

    Every tensor whose first dimension is the batch size is cut, as is a list or tuple with one entry a sample;
    everything else goes whole to each piece. A batch that is small enough is its own only piece. Raises `BatchError`
    for a batch that cannot be cut: see `cut_batch`.

    >>> [x.tolist() for (x,), _ in microbatches((torch.arange(5),), (), 2)]
    [[0, 1], [2, 3], [4]]
    """
    if size < 1:
        raise BatchError(f'A microbatch has at least 1 sample, not {size}.')
    if n is None:
        n = find_bs((*xb, *yb))
    if n <= size:
        return [(xb, yb)]
    return cut_batch(xb, yb, n, [slice(i, i + size) for i in range(0, n, size)])


def cut_batch(
    xb: tuple[Any, ...],  # inputs
    yb: tuple[Any, ...],  # targets
    n: int,  # samples of the batch
    pieces: Sequence[slice | list[int]],  # the samples of each piece
) -> list[tuple[tuple[Any, ...], tuple[Any, ...]]]:  # (xb, yb) of each piece
    """Return these pieces of a batch.

    Raises `BatchError` with the number of the entry for a PackedSequence or another object that cannot be cut, for
    inputs of which nothing has an entry a sample, and for tensors as targets of which none has.

    >>> cut_batch((torch.arange(3),), (['a', 'b', 'c'],), 3, [[2, 0]])
    [((tensor([2, 0]),), (['c', 'a'],))]
    """
    listed = has_listed_samples((*xb, *yb), n)
    cut = [
        (_cut_entries('input', xb, n, rows, listed), _cut_entries('target', yb, n, rows, listed))
        for rows in pieces
    ]
    for name, whole, parts in (('inputs', xb, cut[0][0]), ('targets', yb, cut[0][1])):
        is_cut = any(a is not b for a, b in zip(whole, parts, strict=True))
        if not is_cut and (name == 'inputs' or next(_tensor_sizes(whole), None) is not None):
            raise BatchError(
                f'The batch has {n} samples, and the {name} {describe(whole)} have nothing with an entry '
                f'for each: they cannot be cut. Give a tensor of {n} rows or a list of {n} entries.'
            )
    return cut


def _cut_entries(
    name: str,  # for errors
    entries: tuple[Any, ...],
    n: int,
    rows: slice | list[int],
    listed: bool,
) -> tuple[Any, ...]:
    "Return these samples of each entry, and name an entry that cannot be cut."
    cut = []
    for i, entry in enumerate(entries):
        try:
            cut.append(take_rows(entry, n, rows, listed))
        except BatchError as e:
            raise BatchError(f'{name} {i}: {e}') from None
    return tuple(cut)


def apply_model(
    model: Callable[..., Any],  # an `nn.Module`, or any function
    xb: tuple[Any, ...],  # inputs
) -> Any:
    """Call the model with the inputs of a batch.

    A single mapping or dataclass is passed by name when the model has parameters of those names or takes `**kwargs`
    alone; names that it does not know are left out. Otherwise it is passed whole.

    >>> apply_model(lambda ids, mask=1: (ids, mask), ({'ids': 5, 'length': 9},))
    (5, 1)
    """
    if len(xb) != 1 or type(xb[0]) is Tensor:
        return model(*xb)
    return call_by_name(model, xb, passed_names(model, xb))


def passed_names(model: Callable[..., Any], xb: tuple[Any, ...]) -> tuple[Any, ...] | None:
    "Return which entries of a single mapping or dataclass the model takes by name; None when it takes `xb` as it is."
    if len(xb) != 1 or type(xb[0]) is Tensor:
        return None
    fields = _named(xb[0])
    if not fields:
        return None
    names, takes_any = _parameters(model)
    if takes_any and all(isinstance(k, str) for k in fields):
        return tuple(fields)
    return tuple(k for k in fields if k in names) or None


def call_by_name(
    model: Callable[..., Any], xb: tuple[Any, ...], names: tuple[Any, ...] | None
) -> Any:
    "Call the model with those entries of its single input, or with `xb` as it is."
    if names is None:
        return model(*xb)
    fields = _named(xb[0]) or {}
    return model(**{k: fields[k] for k in names})


def unpack_output(out: Any) -> tuple[Any, Any]:  # the prediction, and the loss or None
    """Take the prediction and, where the model computed it, the loss out of what a model returned.

    A mapping or dataclass with `loss` or `logits`, or another object with a `loss`, is taken apart: the prediction is
    its `logits` or else all but the loss. Anything else is the prediction.

    >>> unpack_output({'loss': 0.5, 'logits': [1, 2]})
    ([1, 2], 0.5)
    >>> unpack_output({'boxes': [1, 2]})
    ({'boxes': [1, 2]}, None)
    """
    if isinstance(out, (Tensor, tuple, list)):
        return out, None
    named = _named(out)
    if named is None:
        # an object with logits alone is no model output: torch's distributions have them too
        if getattr(out, 'loss', None) is None:
            return out, None
        named = {'loss': out.loss, 'logits': getattr(out, 'logits', None)}

    loss, logits = named.get('loss'), named.get('logits')
    return (_without_loss(out) if logits is None else logits), loss


def describe(batch: Any) -> str:
    """Return a short text that says what a batch is made of, for messages.

    >>> describe((torch.zeros(8, 1, 28, 28), torch.zeros(8, dtype=torch.int64)))
    '(Tensor[8, 1, 28, 28] float32, Tensor[8] int64)'
    >>> describe({'ids': torch.zeros(8, 12), 'text': ['a'] * 8})
    "{'ids': Tensor[8, 12] float32, 'text': [8 x str]}"
    """
    if isinstance(batch, (Tensor, np.ndarray)):
        return (
            f'{type(batch).__name__}{list(batch.shape)} {str(batch.dtype).removeprefix("torch.")}'
        )
    children = children_of(batch)
    if children is None:
        return type(batch).__name__
    kinds = {type(o).__name__ for o in children}
    if (
        len(children) > 3
        and len(kinds) == 1
        and isinstance(batch, (list, tuple))
        and _is_sample_list(children)
    ):
        parts = [f'{len(children)} x {kinds.pop()}']
    else:
        parts = _parts(batch, children)

    if isinstance(batch, Mapping):
        return '{' + ', '.join(parts) + '}'
    if isinstance(batch, list):
        return '[' + ', '.join(parts) + ']'
    name = '' if type(batch) is tuple else type(batch).__name__
    return f'{name}({", ".join(parts)}{"," if not name and len(children) == 1 else ""})'


def _parts(batch: Any, children: list[Any]) -> list[str]:
    "Describe each of the first eight children."
    template = '{!r}: {}' if isinstance(batch, Mapping) else '{}={}'
    named = isinstance(batch, Mapping) or _is_record(batch)
    shown = [
        template.format(k, describe(o)) if named else describe(o)
        for k, o in zip(_keys(batch), children[:8], strict=False)
    ]
    return shown + ['...'] * (len(children) > 8)


# Structures: a container's children, and the container made anew from changed ones


def _is_dataclass(o: Any) -> bool:
    return dataclasses.is_dataclass(o) and not isinstance(o, type)


def _is_record(o: Any) -> bool:
    return _is_dataclass(o) or (isinstance(o, tuple) and hasattr(o, '_fields'))


def _keys(o: Any) -> list[Any]:
    "Return the keys of a mapping, the field names of a record, or the positions of a tuple or list."
    if isinstance(o, Mapping):
        return list(o.keys())
    if _is_dataclass(o):
        return [f.name for f in dataclasses.fields(o)]
    return list(getattr(o, '_fields', range(len(o))))


def children_of(o: Any) -> list[Any] | None:
    "Return what a container holds, in the order of `_keys`, or None for a leaf."
    if isinstance(o, (tuple, list)):
        return list(o)
    if isinstance(o, Mapping):
        return [o[k] for k in o]
    if _is_dataclass(o):
        return [getattr(o, f.name) for f in dataclasses.fields(o)]
    return None


def rebuilt(like: Any, children: list[Any]) -> Any:
    "Return a container of the type and the keys of `like` with other children."
    if isinstance(like, tuple):
        return like._make(children) if hasattr(like, '_make') else type(like)(children)
    if isinstance(like, Mapping) and not isinstance(like, MutableMapping):
        return type(like)(dict(zip(like, children, strict=True)))  # type: ignore[call-arg]

    new = copy(like)  # keeps what a subclass has besides, such as the factory of a defaultdict
    if isinstance(like, list):
        new[:] = children
    elif isinstance(like, MutableMapping):
        for k, v in zip(list(like), children, strict=True):
            new[k] = v
    else:
        for k, v in zip(_keys(like), children, strict=True):
            object.__setattr__(new, k, v)  # also when it is frozen
    return new


def map_tensors(b: Any, f: Callable[[Tensor], Any], own: Callable[[Any], Any] | None = None) -> Any:
    "Apply `f` to each tensor and `own` to what moves itself; return `b` itself when nothing changed."
    if type(b) is int:  # the state of Python's random generator has 625
        return b
    if isinstance(b, Tensor):
        return f(b)
    if own is not None and isinstance(b, np.ndarray) and b.dtype.kind in 'biufc':
        return f(torch.tensor(b))
    # a UserDict (the BatchEncoding of transformers) would move itself in place, and so change what the loader holds
    if own is not None and callable(getattr(b, 'to', None)) and not isinstance(b, UserDict):
        return own(b)
    children = children_of(b)
    if children is None:
        return b
    new = [map_tensors(o, f, own) for o in children]
    return b if all(a is o for a, o in zip(new, children, strict=True)) else rebuilt(b, new)


def _named(o: Any) -> Mapping[Any, Any] | None:
    "Return the entries of a mapping or the fields of a dataclass by name, or None for anything else."
    if isinstance(o, Mapping):
        return o
    return dict(zip(_keys(o), children_of(o) or (), strict=True)) if _is_dataclass(o) else None


def _is_sample_list(o: Iterable[Any]) -> bool:
    "Say whether a list stands for one entry a sample: it holds dicts or leaves that are no tensors."
    return not any(isinstance(c, (Tensor, np.ndarray, tuple, list)) for c in o)


# Sizes and pieces


def _is_list(o: Any) -> bool:
    "Return True for a list, or a tuple without names."
    return isinstance(o, list) or (
        isinstance(o, tuple) and not hasattr(o, '_fields') and not isinstance(o, PackedSequence)
    )


def _graph_count(o: Any) -> int | None:
    "Return the number of graphs of a batch of graphs, None for anything else."
    n = getattr(o, 'num_graphs', None)
    return n if isinstance(n, int) else None


def _entries(b: Any) -> Iterator[Any]:
    "Yield what a batch holds, through mappings, dataclasses and named tuples, but not what is inside of its lists."
    children = (
        None if isinstance(b, PackedSequence) or _graph_count(b) is not None else children_of(b)
    )
    for o in [b] if children is None else children:
        if o is b or _is_list(o):
            yield o
        else:
            yield from _entries(o)


def _tensor_sizes(b: Any) -> Iterator[int]:
    "Yield the batch size by each tensor, array or batch of graphs in `b`, in order."
    if isinstance(b, PackedSequence):
        yield int(b.batch_sizes[0])
    elif isinstance(b, (Tensor, np.ndarray)):
        if b.ndim:
            yield b.shape[0]
    elif (n := _graph_count(b)) is not None:
        yield n
    else:
        for o in children_of(b) or ():
            yield from _tensor_sizes(o)


def _list_sizes(b: Any, is_entry: bool = False) -> Iterator[int]:
    "Yield the length of each innermost list in `b`, in order; of an entry also that of a tuple, or a list of dicts."
    children = children_of(b) or []
    holds_samples = all(_is_leaf(o) or (is_entry and not _is_list(o)) for o in children)
    if children and holds_samples and (_is_list(b) if is_entry else isinstance(b, list)):
        yield len(b)
    for o in children:
        yield from _list_sizes(o, is_entry=True)


def _is_leaf(o: Any) -> bool:
    return children_of(o) is None


def _count_and_certainty(xb: Any, yb: tuple[Any, ...]) -> tuple[int, bool]:
    "Return the number of samples by cases 2 to 5 of `find_bs`, and whether something besides the default said so."
    for o in chain(_entries(xb), _entries(yb)):
        n = next(_tensor_sizes(o), None)
        if n is not None:
            return _count_listed(o, [*_entries(xb), *_entries(yb)]) if _is_list(o) else (n, True)
    for n in chain(_list_sizes(xb), _list_sizes(yb)):
        return n, True
    raise BatchError(
        f'The batch has no size: there is no tensor with a dimension in {describe(xb)}. Give a tensor '
        'whose first dimension counts the samples, or `Learner(size_func=f)`, where f(xb, yb) counts '
        'them.'
    )


def _count_listed(counted: Any, entries: list[Any]) -> tuple[int, bool]:
    "Do the same for a batch whose first entry with a size is a list, by its other entries."
    readings = {len(counted), *_sizes_of_first(counted)}
    for other in reversed(entries):
        fitting = readings.intersection(_possible_sizes(other)) if other is not counted else ()
        if len(fitting) == 1:
            return next(iter(fitting)), True
    return len(counted), len(readings) == 1 or _are_surely_samples(counted)


def _possible_sizes(o: Any) -> list[int]:
    "Return the numbers of samples that an entry allows for: a list of tensors has its length, and their rows."
    if not _is_list(o):
        return list(_tensor_sizes(o))[:1]
    of_dicts = any(not _is_leaf(c) and not _is_list(c) for c in o)
    return [len(o)] if of_dicts else [len(o), *_sizes_of_first(o)]


def _sizes_of_first(o: Any) -> list[int]:
    "Return the numbers of samples that the first entry with a size in a list allows for."
    for c in o:
        if sizes := ([len(c), *_sizes_of_first(c)] if _is_list(c) else list(_tensor_sizes(c))[:1]):
            return sizes
    return []


def _are_surely_samples(o: Any) -> bool:
    "Return True if a list is no list of stacked inputs: it holds dicts, images, or tensors of different sizes."
    of_dicts = any(not _is_leaf(c) and not _is_list(c) for c in o)
    return of_dicts or _are_images(o) or len(set(_tensor_sizes(o))) > 1


def _are_images(o: Any) -> bool:
    return all(isinstance(c, Tensor) and c.ndim == 3 and len(c) in (1, 3, 4) for c in o)


def is_sample_list(
    o: Any,
    n: int,  # samples of the batch
    listed: bool = False,  # samples are in lists: decides where `o` could be n stacked tensors
) -> bool:
    """Return True if a list or tuple has one entry for each of `n` samples.

    >>> rows = [torch.zeros(2), torch.zeros(2)]
    >>> is_sample_list([torch.zeros(2), torch.zeros(5)], 2), is_sample_list(rows, 2), is_sample_list(rows, 2, True)
    (True, False, True)
    """
    if not _is_list(o) or len(o) != n:
        return False
    return listed or _is_sample_list(o) or _are_images(o) or set(_tensor_sizes(o)) != {n}


def has_listed_samples(b: Any, n: int) -> bool:
    """Return True if a batch of `n` samples surely has them in a list of tensors or dicts.

    >>> has_listed_samples((torch.zeros(2, 3), [{'a': 1}, {'a': 2}]), 2), has_listed_samples((['a', 'b'],), 2)
    (True, False)
    """
    if type(b) is tuple and all(type(o) is Tensor for o in b):
        return False
    return any(is_sample_list(o, n) and not all(map(_is_text, o)) for o in _entries(b))


def _is_text(o: Any) -> bool:
    return _is_leaf(o) and not isinstance(o, (Tensor, np.ndarray))


def have_listed_samples(
    items: list[Any],  # one a batch
    sizes: list[int],  # samples of each batch
    listed: bool = False,
) -> bool:
    "Return True if each item is a list or tuple with one entry a sample of its batch."
    if not all(_is_list(o) and len(o) == n for o, n in zip(items, sizes, strict=True)):
        return False
    return any(is_sample_list(o, n, listed) for o, n in zip(items, sizes, strict=True))


def take_rows(
    o: Any,
    n: int,  # samples of the batch
    rows: slice | list[int],
    listed: bool = False,  # the batch has its samples in lists, see `has_listed_samples`
) -> Any:
    "Return these samples of whatever in `o` has `n` of them."
    if isinstance(o, PackedSequence):
        raise BatchError(
            'A PackedSequence cannot be cut into microbatches, or shared out: pad the sequences.'
        )
    if isinstance(o, (Tensor, np.ndarray)):
        return o[rows] if o.ndim and o.shape[0] == n else o
    if _graph_count(o) is not None:
        return _take_graphs(o, rows)
    if is_sample_list(o, n, listed):
        # never `o` itself
        return type(o)(o[i] for i in (range(n)[rows] if isinstance(rows, slice) else rows))
    children = children_of(o)
    if children is None:
        if callable(getattr(o, 'to', None)):
            raise BatchError(
                f'{type(o).__name__} holds data that cannot be cut into microbatches, or shared out: give '
                'tensors or lists.'
            )
        return o
    new = [take_rows(c, n, rows, listed) for c in children]
    return o if all(a is c for a, c in zip(new, children, strict=True)) else rebuilt(o, new)


def _take_graphs(o: Any, rows: slice | list[int]) -> Any:
    "Return a batch of some of the graphs."
    if not hasattr(o, 'to_data_list') or not hasattr(type(o), 'from_data_list'):
        raise BatchError(
            f'{type(o).__name__} cannot be cut into microbatches, or shared out: it has num_graphs, but '
            'no to_data_list and from_data_list.'
        )
    graphs = o.to_data_list()
    return type(o).from_data_list(
        graphs[rows] if isinstance(rows, slice) else [graphs[i] for i in rows]
    )


def _join_tensors(items: list[Tensor], dim: int) -> Tensor | list[Tensor]:
    "Join tensors along `dim`, stack those without dimensions, and list the samples of those that do not fit."
    ndim = items[0].ndim
    if ndim == 0 and all(t.ndim == 0 for t in items):
        return torch.stack(items)
    if all(t.ndim == ndim for t in items):
        d = dim % ndim
        if len({(*t.shape[:d], *t.shape[d + 1 :]) for t in items}) == 1:
            return torch.cat(items, dim)
    return [sample for t in items for sample in (t.unbind(dim) if t.ndim else (t,))]


def _differing(items: list[Any]) -> str:
    "Name the first item and the first one that is built differently."
    other = next(o for o in items if _keys(o) != _keys(items[0]))
    return f'{describe(items[0])} and {describe(other)}'


# Calling the model

_known_parameters: WeakKeyDictionary[Any, tuple[frozenset[str], bool]] = WeakKeyDictionary()


def _parameters(model: Any) -> tuple[frozenset[str], bool]:
    "Return the names that the model's forward takes, and whether it takes any name and needs none."
    try:
        if (known := _known_parameters.get(model)) is None:
            known = _known_parameters[model] = _read_parameters(model)
        return known
    except TypeError:
        return _read_parameters(model)  # it cannot be hashed or referred to weakly


def _read_parameters(model: Any) -> tuple[frozenset[str], bool]:
    "Read the signature of a model's forward, or of the model inside a wrapper (data parallel, compiled)."
    try:
        ps = inspect.signature(
            model.forward if isinstance(model, nn.Module) else model
        ).parameters.values()
    except ValueError:
        return frozenset(), False  # written in C
    names = frozenset(p.name for p in ps if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    inner = getattr(model, 'module', getattr(model, '_orig_mod', None))
    if not names and isinstance(inner, nn.Module):
        return _parameters(inner)

    needed = any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in ps
    )
    return names, not needed and any(p.kind is p.VAR_KEYWORD for p in ps)


def _without_loss(out: Any) -> Any:
    "Return a model's output without its loss."
    if isinstance(out, Mapping):
        if 'loss' not in out:
            return out
        rest = {k: v for k, v in out.items() if k != 'loss'}
        return type(out)(**rest) if _is_dataclass(out) else rest
    if getattr(out, 'loss', None) is None:
        return out
    new = copy(out)
    object.__setattr__(new, 'loss', None)
    return new
