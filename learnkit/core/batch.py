"""Operations on batches: splitting, moving, detaching, counting, joining, cutting, and calling the model.

A batch is a tensor, tuple, list, named tuple, dict or other mapping, dataclass, or any nesting of these. Containers are
rebuilt with their own type. Functions on the path of each batch check the common case first, a plain tuple or list."""

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
from learnkit.core.learner_type import LoopLike

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
    'tensors_in',
    'describe',
    'short_repr',
    'children_of',
    'rebuild',
]

# default names of targets in mappings and dataclasses
TARGET_NAMES = ('labels', 'label', 'targets', 'target', 'y')
_FORM = ': it is (*inputs, target), or a dict of inputs and `labels`. Look at what the collate function returns.'


def split_batch(
    batch: Any,  # batch of a loader
    n_inp: int | None = None,  # number of inputs in a tuple; None: all but the last, at least one
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:  # inputs and targets
    """Split a batch into inputs and targets.

    A mapping or dataclass is one input; its targets are the entries under `TARGET_NAMES` that are not None. Any other
    object is one input without targets. Raises `BatchError` for an empty batch, for an `n_inp` outside of the tuple,
    and for an `n_inp` given with a mapping or dataclass.

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

    n_inp: int | None = None  # number of inputs in a tuple
    targets: tuple[str, ...] | None = None  # names of the targets in a mapping
    strict: bool = True  # whether `n_inp` with a mapping is an error

    def split(
        self,
        batch: Any,  # batch of the loader
        predicting: bool = False,  # whether a batch without any target is accepted
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:  # inputs and targets
        "Split a batch into inputs and targets; raise `BatchError` for a batch of another form."
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
    dls: Any,  # `DataLoaders` or a similar object
    name: str = 'train',  # name of the loader
) -> BatchForm:
    "Return the form of a loader's batches."
    batch_form = getattr(type(dls), 'batch_form', None)
    if batch_form is not None:
        return batch_form(dls, name)
    return BatchForm(getattr(dls, 'n_inp', None), strict=False)  # fastai's `n_inp` is always set


def to_device(
    batch: Any,  # any nesting of tensors and other objects
    device: torch.device | str,  # target device
) -> Any:  # `batch` itself if no tensor has to be moved
    """Move every tensor in `batch` to `device`, with `non_blocking=True` if `device` is a GPU.

    Any other object with a `to` method (a PackedSequence, a graph) is moved by that method.

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
    cpu: bool = True,  # also move the tensors to the CPU
    gather: bool = True,  # ignored, for fastai's code: nothing is gathered over processes
) -> Any:
    """Detach every tensor in `b` from its graph.

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
    b: Any,  # batch, or the tuple of its inputs
    yb: tuple[Any, ...] = (),  # targets, if `b` is the inputs
    size_func: Callable[[Any, Any], int] | None = None,  # f(xb, yb): number of samples
) -> int:
    """Return the number of samples in a batch.

    The first matching case decides:

    1. `size_func` is given: its return value.
    2. The first entry with a size is a tensor or array (N, ...): N; a PackedSequence: the number of its sequences; an
       object with `num_graphs`: that number. Entries are ordered, inputs before targets. Entries of mappings,
       dataclasses and named tuples are entries of the batch.
    3. The first entry with a size is a list or tuple of m tensors, dicts or other containers, the first with n rows:
       either m samples, or m inputs of n samples. The last other entry that fits only one of both numbers decides, so
       that targets take precedence: a tensor of n rows, a list of m strings or dicts, a list of m tensors.
    4. No other entry decides: m, one entry per sample.
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
    learn: LoopLike,  # Learner with a current batch
) -> int:
    "Return the number of samples in this rank's current batch, by `find_bs` and the Learner's `size_func`."
    return find_bs(learn.xb, learn.yb, getattr(learn, 'size_func', None))


def batch_counter(
    learn: LoopLike,  # a Learner
) -> Callable[[Any], int]:
    "Return a function that counts the samples of a loader's batch as `count_samples` does for the current batch."
    form = form_of(learn.dls)
    size_func = getattr(learn, 'size_func', None)
    return lambda batch: find_bs(*form.split(batch), size_func)


def count_stacked(
    xb: tuple[Any, ...],  # inputs
) -> int:
    "Return the number of samples of stacked inputs; raise `BatchError` for a list with one entry per sample."
    n = find_bs(xb)
    if not has_listed_samples(xb, n):
        return n
    if has_certain_size(xb, ()):
        raise BatchError(
            f'The inputs {describe(xb)} have a list with one entry a sample: stack them into a tensor.'
        )
    return next(_tensor_sizes(xb))


def has_certain_size(xb: tuple[Any, ...], yb: tuple[Any, ...]) -> bool:
    """Return False if only case 4 of `find_bs` determines the size, so that a list could also be stacked inputs.

    Tensors of different first dimension are samples, and so are images (C, H, W) with 1, 3 or 4 channels.

    >>> views = [torch.zeros(64, 9), torch.zeros(64, 9)]
    >>> has_certain_size((views,), ()), has_certain_size((views,), (torch.zeros(64),))
    (False, True)
    """
    if isinstance(xb, tuple) and xb and type(xb[0]) is Tensor and xb[0].ndim:
        return True  # its rows are the samples
    return _count_and_certainty(xb, yb)[1]


def concat(
    items: list[Any],  # one nested structure per batch, equal in all batches
    dim: int = 0,  # dimension along which tensors are joined; 0-dim tensors are stacked
    sizes: list[int] | None = None,  # number of samples of each item, if known
    listed: bool = False,  # whether samples are in lists, see `has_listed_samples`
) -> Any:
    """Join batches of predictions, targets or inputs to one nested structure.

    Tensors whose other dimensions differ become a flat list of samples. Lists with one entry per sample are chained:
    lists of dicts, strings or other objects, and lists and tuples of the lengths in `sizes`. Batches of graphs become
    a list of graphs. Any other object becomes a list with one entry per batch. Raises `BatchError` for an empty list
    and for different structures.

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
        raise BatchError(
            f'Batches of different structure cannot be joined: {_describe_difference(items)}.'
        )
    return rebuild(
        first, [concat(list(group), dim, sizes, listed) for group in zip(*children, strict=True)]
    )


def microbatches(
    xb: tuple[Any, ...],  # inputs
    yb: tuple[Any, ...],  # targets
    size: int,  # maximum number of samples of a microbatch
    n: int | None = None,  # number of samples of the batch; None: `find_bs`
) -> list[tuple[tuple[Any, ...], tuple[Any, ...]]]:  # (xb, yb) of each microbatch
    """Cut a batch into microbatches of at most `size` samples, without copying.

    Tensors whose first dimension is the batch size are cut, and lists or tuples with one entry per sample. Every
    microbatch gets all other objects uncut. A batch of at most `size` samples is returned as the only microbatch.
    Raises `BatchError` for a batch that cannot be cut, see `cut_batch`.

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
    n: int,  # number of samples of the batch
    pieces: Sequence[slice | list[int]],  # sample indices of each piece
) -> list[tuple[tuple[Any, ...], tuple[Any, ...]]]:  # (xb, yb) of each piece
    """Cut a batch into pieces with the given samples.

    Raises `BatchError` with the number of the entry for a PackedSequence or another object that cannot be cut, for
    inputs without an entry per sample, and for tensor targets without an entry per sample.

    >>> cut_batch((torch.arange(3),), (['a', 'b', 'c'],), 3, [[2, 0]])
    [((tensor([2, 0]),), (['c', 'a'],))]
    """
    listed = has_listed_samples((*xb, *yb), n)
    batches = [
        (_cut_entries('input', xb, n, rows, listed), _cut_entries('target', yb, n, rows, listed))
        for rows in pieces
    ]
    for name, whole, parts in (('inputs', xb, batches[0][0]), ('targets', yb, batches[0][1])):
        is_cut = any(a is not b for a, b in zip(whole, parts, strict=True))
        if not is_cut and (name == 'inputs' or next(_tensor_sizes(whole), None) is not None):
            raise BatchError(
                f'The batch has {n} samples, and the {name} {describe(whole)} have nothing with an entry '
                f'for each: they cannot be cut. Give a tensor of {n} rows or a list of {n} entries.'
            )
    return batches


def _cut_entries(
    name: str,  # 'input' or 'target', for errors
    entries: tuple[Any, ...],
    n: int,
    rows: slice | list[int],
    listed: bool,
) -> tuple[Any, ...]:
    "Return the samples `rows` of each entry; an error names the entry that cannot be cut."
    selected = []
    for i, entry in enumerate(entries):
        try:
            selected.append(take_rows(entry, n, rows, listed))
        except BatchError as e:
            raise BatchError(f'{name} {i}: {e}') from None
    return tuple(selected)


def apply_model(
    model: Callable[..., Any],  # `nn.Module` or function
    xb: tuple[Any, ...],  # inputs
) -> Any:
    """Call the model with the inputs of a batch.

    A single mapping or dataclass is passed by keyword if the model has parameters of these names or takes only
    `**kwargs`; other entries are dropped. Otherwise the mapping or dataclass is passed as one argument.

    >>> apply_model(lambda ids, mask=1: (ids, mask), ({'ids': 5, 'length': 9},))
    (5, 1)
    """
    if len(xb) != 1 or type(xb[0]) is Tensor:
        return model(*xb)
    return call_by_name(model, xb, passed_names(model, xb))


def passed_names(model: Callable[..., Any], xb: tuple[Any, ...]) -> tuple[Any, ...] | None:
    "Return the keys of a single mapping or dataclass to pass by keyword, or None to pass `xb` unchanged."
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
    "Call the model with the entries `names` of its single input as keywords, or with `xb` if `names` is None."
    if names is None:
        return model(*xb)
    fields = _named(xb[0]) or {}
    return model(**{k: fields[k] for k in names})


def unpack_output(out: Any) -> tuple[Any, Any]:  # prediction, and loss or None
    """Split the output of a model into the prediction and the loss, if the model computed one.

    Of a mapping or dataclass with `loss` or `logits`, or another object with a `loss`, the prediction is `logits`, or
    all entries but the loss if there is no `logits`. Any other output is the prediction.

    >>> unpack_output({'loss': 0.5, 'logits': [1, 2]})
    ([1, 2], 0.5)
    >>> unpack_output({'boxes': [1, 2]})
    ({'boxes': [1, 2]}, None)
    """
    if isinstance(out, (Tensor, tuple, list)):
        return out, None
    named = _named(out)
    if named is None:
        # `logits` alone does not mark a model output: torch's distributions have `logits` too
        if getattr(out, 'loss', None) is None:
            return out, None
        named = {'loss': out.loss, 'logits': getattr(out, 'logits', None)}

    loss, logits = named.get('loss'), named.get('logits')
    return (_without_loss(out) if logits is None else logits), loss


def short_repr(value: Any) -> str:
    """Return the repr of a value on one short line, for messages; tensors and batches of them are described.

    >>> short_repr('adam'), short_repr(torch.zeros(64, 4))
    ("'adam'", 'Tensor[64, 4] float32')
    """
    if isinstance(value, (Tensor, np.ndarray)) or children_of(value) is not None:
        return describe(value)
    text = repr(value)
    return text if len(text) <= 100 and '\n' not in text else type(value).__name__


def describe(batch: Any) -> str:
    """Return a short description of a batch's types and shapes, for messages.

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


# -- containers ------------------------------------------------------------------------------------


def _is_dataclass(o: Any) -> bool:
    return dataclasses.is_dataclass(o) and not isinstance(o, type)


def _is_record(o: Any) -> bool:
    return _is_dataclass(o) or (isinstance(o, tuple) and hasattr(o, '_fields'))


def _keys(o: Any) -> list[Any]:
    "Return the keys of a mapping, the field names of a record, or the indices of a tuple or list."
    if isinstance(o, Mapping):
        return list(o.keys())
    if _is_dataclass(o):
        return [f.name for f in dataclasses.fields(o)]
    return list(getattr(o, '_fields', range(len(o))))


def children_of(o: Any) -> list[Any] | None:
    "Return the values in a container in the order of `_keys`, or None for a leaf."
    if isinstance(o, (tuple, list)):
        return list(o)
    if isinstance(o, Mapping):
        return [o[k] for k in o]
    if _is_dataclass(o):
        return [getattr(o, f.name) for f in dataclasses.fields(o)]
    return None


def rebuild(like: Any, children: list[Any]) -> Any:
    "Return a container with the type and keys of `like` and other children."
    if isinstance(like, tuple):
        return like._make(children) if hasattr(like, '_make') else type(like)(children)
    if isinstance(like, Mapping) and not isinstance(like, MutableMapping):
        return type(like)(dict(zip(like, children, strict=True)))  # type: ignore[call-arg]

    new = copy(like)  # keeps attributes of a subclass, such as the factory of a defaultdict
    if isinstance(like, list):
        new[:] = children
    elif isinstance(like, MutableMapping):
        for k, v in zip(list(like), children, strict=True):
            new[k] = v
    else:
        for k, v in zip(_keys(like), children, strict=True):
            object.__setattr__(new, k, v)  # a frozen dataclass has no `__setattr__`
    return new


def map_tensors(b: Any, f: Callable[[Tensor], Any], own: Callable[[Any], Any] | None = None) -> Any:
    "Apply `f` to each tensor and `own` to each object with a `to` method; return `b` itself if nothing changed."
    if type(b) is int:  # fast path: the state of Python's random generator holds 625 ints
        return b
    if isinstance(b, Tensor):
        return f(b)
    if own is not None and isinstance(b, np.ndarray) and b.dtype.kind in 'biufc':
        return f(torch.tensor(b))
    # the `to` of a UserDict (BatchEncoding of transformers) would change the loader's own object
    if own is not None and callable(getattr(b, 'to', None)) and not isinstance(b, UserDict):
        return own(b)
    children = children_of(b)
    if children is None:
        return b
    new = [map_tensors(o, f, own) for o in children]
    return b if all(a is o for a, o in zip(new, children, strict=True)) else rebuild(b, new)


def tensors_in(b: Any) -> list[Tensor]:
    """Return the tensors of a nested structure, such as a batch, in order.

    >>> tensors_in({'ids': torch.tensor(3), 'others': ('a', [torch.tensor(4)])})
    [tensor(3), tensor(4)]
    """
    if isinstance(b, Tensor):
        return [b]
    return [t for o in children_of(b) or () for t in tensors_in(o)]


def _named(o: Any) -> Mapping[Any, Any] | None:
    "Return the entries of a mapping or the fields of a dataclass by name, or None for anything else."
    if isinstance(o, Mapping):
        return o
    return dict(zip(_keys(o), children_of(o) or (), strict=True)) if _is_dataclass(o) else None


def _is_sample_list(o: Iterable[Any]) -> bool:
    "Return True if a list has one entry per sample because it holds dicts or leaves other than tensors."
    return not any(isinstance(c, (Tensor, np.ndarray, tuple, list)) for c in o)


# -- sizes and pieces ------------------------------------------------------------------------------


def _is_list(o: Any) -> bool:
    "Return True for a list, or a tuple without names."
    return isinstance(o, list) or (
        isinstance(o, tuple) and not hasattr(o, '_fields') and not isinstance(o, PackedSequence)
    )


def _graph_count(o: Any) -> int | None:
    "Return the number of graphs of a batch of graphs, or None."
    n = getattr(o, 'num_graphs', None)
    return n if isinstance(n, int) else None


def _entries(b: Any) -> Iterator[Any]:
    "Yield the entries of a batch, also of nested mappings, dataclasses and named tuples, but not of lists."
    children = (
        None if isinstance(b, PackedSequence) or _graph_count(b) is not None else children_of(b)
    )
    for o in [b] if children is None else children:
        if o is b or _is_list(o):
            yield o
        else:
            yield from _entries(o)


def _tensor_sizes(b: Any) -> Iterator[int]:
    "Yield the batch size of each tensor, array or batch of graphs in `b`, in order."
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
    "Yield the length of each innermost list in `b`, in order; of entries also of tuples and lists of dicts."
    children = children_of(b) or []
    holds_samples = all(_is_leaf(o) or (is_entry and not _is_list(o)) for o in children)
    if children and holds_samples and (_is_list(b) if is_entry else isinstance(b, list)):
        yield len(b)
    for o in children:
        yield from _list_sizes(o, is_entry=True)


def _is_leaf(o: Any) -> bool:
    return children_of(o) is None


def _count_and_certainty(xb: Any, yb: tuple[Any, ...]) -> tuple[int, bool]:
    "Return the number of samples by cases 2 to 5 of `find_bs`, and False if only case 4 decided."
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
    "Return the same for a batch whose first entry with a size is the list `counted` (cases 3 and 4)."
    candidates = {len(counted), *_sizes_of_first(counted)}
    for other in reversed(entries):
        fitting = candidates.intersection(_possible_sizes(other)) if other is not counted else ()
        if len(fitting) == 1:
            return next(iter(fitting)), True
    return len(counted), len(candidates) == 1 or _are_surely_samples(counted)


def _possible_sizes(o: Any) -> list[int]:
    "Return the possible numbers of samples of an entry: of a list of tensors, its length or the tensors' rows."
    if not _is_list(o):
        return list(_tensor_sizes(o))[:1]
    return [len(o)] if _holds_dicts(o) else [len(o), *_sizes_of_first(o)]


def _sizes_of_first(o: Any) -> list[int]:
    "Return the possible numbers of samples of the first entry with a size in a list."
    for c in o:
        sizes = [len(c), *_sizes_of_first(c)] if _is_list(c) else list(_tensor_sizes(c))[:1]
        if sizes:
            return sizes
    return []


def _are_surely_samples(o: Any) -> bool:
    "Return True if a list cannot be a list of stacked inputs: it holds dicts, images, or tensors of different sizes."
    return _holds_dicts(o) or _are_images(o) or len(set(_tensor_sizes(o))) > 1


def _holds_dicts(o: Any) -> bool:
    "Return True if a list holds a container other than a list or tuple."
    return any(not _is_leaf(c) and not _is_list(c) for c in o)


def _are_images(o: Any) -> bool:
    return all(isinstance(c, Tensor) and c.ndim == 3 and len(c) in (1, 3, 4) for c in o)


def is_sample_list(
    o: Any,
    n: int,  # number of samples of the batch
    listed: bool = False,  # whether samples are in lists, if `o` could also be n stacked tensors
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
    """Return True if a batch of `n` samples certainly has its samples in a list of tensors or dicts.

    >>> has_listed_samples((torch.zeros(2, 3), [{'a': 1}, {'a': 2}]), 2), has_listed_samples((['a', 'b'],), 2)
    (True, False)
    """
    if type(b) is tuple and all(type(o) is Tensor for o in b):
        return False
    return any(is_sample_list(o, n) and not all(map(_is_text, o)) for o in _entries(b))


def _is_text(o: Any) -> bool:
    return _is_leaf(o) and not isinstance(o, (Tensor, np.ndarray))


def have_listed_samples(
    items: list[Any],  # one item per batch
    sizes: list[int],  # number of samples of each batch
    listed: bool = False,
) -> bool:
    "Return True if each item is a list or tuple with one entry per sample of its batch."
    if not all(_is_list(o) and len(o) == n for o, n in zip(items, sizes, strict=True)):
        return False
    return any(is_sample_list(o, n, listed) for o, n in zip(items, sizes, strict=True))


def take_rows(
    o: Any,
    n: int,  # number of samples of the batch
    rows: slice | list[int],  # sample indices
    listed: bool = False,  # whether samples are in lists, see `has_listed_samples`
) -> Any:
    "Select samples of each object in `o` that has `n` samples."
    if isinstance(o, PackedSequence):
        raise BatchError(
            'A PackedSequence cannot be cut into microbatches, or shared out: pad the sequences.'
        )
    if isinstance(o, (Tensor, np.ndarray)):
        return o[rows] if o.ndim and o.shape[0] == n else o
    if _graph_count(o) is not None:
        return _take_graphs(o, rows)
    if is_sample_list(o, n, listed):
        indices = range(n)[rows] if isinstance(rows, slice) else rows
        return type(o)(o[i] for i in indices)  # a copy, also for all rows
    children = children_of(o)
    if children is None:
        if callable(getattr(o, 'to', None)):
            raise BatchError(
                f'{type(o).__name__} holds data that cannot be cut into microbatches, or shared out: give '
                'tensors or lists.'
            )
        return o
    new = [take_rows(c, n, rows, listed) for c in children]
    return o if all(a is c for a, c in zip(new, children, strict=True)) else rebuild(o, new)


def _take_graphs(o: Any, rows: slice | list[int]) -> Any:
    "Return a batch of the selected graphs."
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
    "Concatenate tensors along `dim`, stack 0-dim tensors, and return a list of samples for different shapes."
    ndim = items[0].ndim
    if ndim == 0 and all(t.ndim == 0 for t in items):
        return torch.stack(items)
    if all(t.ndim == ndim for t in items):
        d = dim % ndim
        if len({(*t.shape[:d], *t.shape[d + 1 :]) for t in items}) == 1:
            return torch.cat(items, dim)
    return [sample for t in items for sample in (t.unbind(dim) if t.ndim else (t,))]


def _describe_difference(items: list[Any]) -> str:
    "Describe the first item and the first item of another structure."
    other = next(o for o in items if _keys(o) != _keys(items[0]))
    return f'{describe(items[0])} and {describe(other)}'


# -- calling the model -----------------------------------------------------------------------------

_known_parameters: WeakKeyDictionary[Any, tuple[frozenset[str], bool]] = WeakKeyDictionary()


def _parameters(model: Any) -> tuple[frozenset[str], bool]:
    "Return the parameter names of the model's forward, and True if forward takes only `**kwargs`."
    try:
        known = _known_parameters.get(model)
        if known is None:
            known = _known_parameters[model] = _read_parameters(model)
        return known
    except TypeError:
        return _read_parameters(model)  # an unhashable object, or one without weak references


def _read_parameters(model: Any) -> tuple[frozenset[str], bool]:
    "Read the signature of a model's forward, or of the model inside a wrapper (data parallel, compiled)."
    try:
        ps = inspect.signature(
            model.forward if isinstance(model, nn.Module) else model
        ).parameters.values()
    except ValueError:
        return frozenset(), False  # functions written in C have no signature
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
