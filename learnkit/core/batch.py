# SPDX-License-Identifier: Apache-2.0
"""Operations on batches: split, move, detach, count, join and split a batch, and pass it to the model.

A batch is a tensor, tuple, list, named tuple, dict or other mapping, or any nesting of these. Containers are rebuilt
with the same type; joined TensorDicts become a dict. Functions on the path of each batch check for a plain tuple or
list first."""

from __future__ import annotations

import dataclasses
import inspect
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from learnkit.core.device import has_streams
from learnkit.core.errors import BatchError
from learnkit.core.plain import ATOMS

if TYPE_CHECKING:
    from learnkit.learner import Learner

# default names of targets in mappings
TARGET_NAMES = ('labels', 'label', 'targets', 'target', 'y')
_FORM = ': it is (*inputs, target), or a dict of inputs and `labels`. Look at what the collate function returns.'


def split_batch(
    batch: Any,  # batch of a loader
    n_inp: int | None = None,  # number of inputs in a tuple; None: all but the last, at least one
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:  # inputs and targets
    """Split a batch into inputs and targets.

    A mapping is one input; its targets are the entries under `TARGET_NAMES` that are not None, whatever `n_inp` is. Any
    other object is one input without targets. Raises `BatchError` for an empty batch, and for an `n_inp` outside of the
    tuple.

    >>> split_batch(['image', 'mask', 'label'])
    (('image', 'mask'), ('label',))
    >>> split_batch({'text': 'a b', 'label': 1})
    (({'text': 'a b', 'label': 1},), (1,))
    """
    kind = type(batch)
    if (kind is list or kind is tuple) and len(batch) == 2 and (n_inp is None or n_inp == 1):
        return (batch[0],), (batch[1],)
    is_row = isinstance(batch, (tuple, list)) and not isinstance(batch, PackedSequence)
    is_mapping = isinstance(batch, Mapping)
    if (is_row or is_mapping) and len(batch) == 0:
        raise BatchError(f'The loader returned an empty batch ({describe(batch)}){_FORM}')
    if is_mapping:
        return (batch,), tuple(batch[k] for k in TARGET_NAMES if batch.get(k) is not None)
    items = tuple(batch) if is_row else (batch,)
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
    # f(xb, yb): number of samples, if it is not the length of the first axis of the first tensor
    size_func: Callable[[Any, Any], int] | None = None
    has_parts: bool = False  # whether a batch is a dict or list of the batches of several loaders

    def split(
        self,
        batch: Any,  # batch of the loader
        predicting: bool = False,  # accept a batch without targets
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:  # inputs and targets
        """Split a batch into inputs and targets; raise `BatchError` for a batch that lacks declared entries.

        >>> BatchForm(has_parts=True).split({'day': ('x', 'y'), 'night': ('x2', 'y2')})
        (({'day': 'x', 'night': 'x2'},), ({'day': 'y', 'night': 'y2'},))
        """
        if self.has_parts:
            return self._split_parts(batch, predicting)
        return self._split_whole(batch, predicting)

    def _split_parts(self, batch: Any, predicting: bool) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        "Split the batch of each loader; a loader that has ended, and yields None, has no inputs and no targets."
        inputs = []
        targets = []
        for part in children_of(batch) or ():
            xb, yb = ((), ()) if part is None else self._split_whole(part, predicting)
            inputs.append(detuplify(xb))
            targets.append(detuplify(yb))
        has_targets = any(y is not None for y in targets)
        if isinstance(batch, Mapping):
            return (rebuild(batch, inputs),), (rebuild(batch, targets),) if has_targets else ()
        return tuple(inputs), tuple(targets) if has_targets else ()

    def _split_whole(self, batch: Any, predicting: bool) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        if self.targets is None:
            return split_batch(batch, self.n_inp)
        names = _list_keys(batch) if isinstance(batch, Mapping) else []
        missing = [name for name in self.targets if name not in names]
        if predicting and len(missing) == len(self.targets):
            return split_batch(batch)[0], ()
        if missing:
            raise BatchError(
                f'The batch {describe(batch)} has no entry {", ".join(map(repr, missing))}: '
                f'`DataLoaders(targets={self.targets})` names the entries of dicts that are targets.'
            )
        return (batch,), tuple(batch[name] for name in self.targets)


def form_of(
    dls: Any,  # `DataLoaders` or a similar object
    name: str = 'train',  # name of the loader
) -> BatchForm:
    "Return how the batches of a loader are split into inputs and targets."
    batch_form = getattr(type(dls), 'batch_form', None)
    if batch_form is not None:
        return batch_form(dls, name)
    return BatchForm(getattr(dls, 'n_inp', None))


def to_device(
    batch: Any,  # any nesting of tensors and other objects
    device: torch.device | str,  # target device
) -> Any:  # `batch` itself if no tensor has to be moved
    """Move every tensor in `batch` to `device`, with `non_blocking=True` if `device` is a CUDA device.

    Other objects with a `to` method, such as a PackedSequence or a graph, are moved with that method.

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
    ahead = has_streams(device)
    return map_tensors(batch, lambda t: t.to(device, non_blocking=ahead), lambda o: o.to(device))


def to_detach(
    b: Any,  # any nesting of tensors
    cpu: bool = True,  # also move the tensors to the CPU
    gather: bool = True,  # ignored: accepted for compatibility with fastai
) -> Any:
    """Detach every tensor in `b` from the autograd graph.

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

    `size_func` decides if it is given. Otherwise the first tensor or array outside of lists decides by its first axis,
    inputs before targets. Without one, the length of the first list or tuple decides. Raises `BatchError` in any other
    case.

    >>> find_bs({'ids': torch.zeros(8, 12), 'weight': torch.tensor(1.)})
    8
    >>> images = [torch.zeros(3, 20, 30), torch.zeros(3, 25, 40)]
    >>> find_bs((images,), ([{'boxes': torch.zeros(5, 4)}, {'boxes': torch.zeros(1, 4)}],))
    2
    """
    if size_func is not None:
        return int(size_func(b, yb))
    if type(b) is tuple and b and type(b[0]) is Tensor and b[0].ndim:
        return b[0].shape[0]
    for part in (b, yb):
        array = first_array(part)
        if array is not None:
            return len(array)
    sized = [o for o in [*_iter_entries(b), *_iter_entries(yb)] if _is_list(o) and o]
    if not sized:
        raise BatchError(
            f'The batch has no size: there is no tensor with a dimension in {describe(b)}. Pass '
            '`Learner(size_func=f)`, where f(xb, yb) returns the number of samples.'
        )
    return len(sized[0])


def first_array(b: Any) -> Any:
    """Return the first tensor or array of a batch that has a dimension and is not in a list, or None.

    >>> first_array({'weight': torch.tensor(1.), 'ids': torch.zeros(8, 12)}).shape
    torch.Size([8, 12])
    """
    for o in _iter_entries(b):
        if isinstance(o, (Tensor, np.ndarray)) and o.ndim:
            return o
    return None


def size_func_of(
    learn: Learner,  # Learner with a current batch
) -> Callable[[Any, Any], int] | None:
    "Return `learn.size_func`, or the function that counts the samples of the current loader's batches, or None."
    func: Callable[[Any, Any], int] | None = getattr(learn, 'size_func', None)
    if func is not None:
        return func
    form = getattr(learn, 'batch_form', None)
    return None if form is None else form.size_func


def count_samples(
    learn: Learner,  # Learner with a current batch
) -> int:
    "Return the number of samples in this rank's current batch, by `find_bs` and `size_func_of`."
    return find_bs(learn.xb, learn.yb, size_func_of(learn))


def list_sizes(
    learn: Learner,  # Learner with a current batch
) -> list[int]:  # one number, except for a batch of several loaders at once
    """Return the number of samples that each loader has in this rank's current batch.

    Loaders that have ended, and yield None, are left out."""
    form = getattr(learn, 'batch_form', None)
    if form is None or not form.has_parts:
        return [count_samples(learn)]
    is_named = len(learn.xb) == 1 and isinstance(learn.xb[0], Mapping)
    parts = learn.xb[0].values() if is_named else learn.xb
    return [find_bs((part,)) for part in parts if part is not None]


def batch_counter(
    learn: Learner,  # a Learner
) -> Callable[[Any], int]:
    "Return a function that splits a batch of the training loader and counts its samples like `count_samples`."
    form = form_of(learn.dls)
    size_func = getattr(learn, 'size_func', None)
    return lambda batch: find_bs(*form.split(batch), size_func)


def count_stacked(
    xb: tuple[Any, ...],  # inputs
) -> int:
    "Return the number of samples of stacked inputs; raise `BatchError` for a list with one entry per sample."
    n = find_bs(xb)
    if has_listed_samples(xb, n):
        raise BatchError(
            f'The inputs {describe(xb)} have a list with one entry a sample: stack them into a tensor.'
        )
    return n


def concat(
    items: list[Any],  # one nested structure per batch, the same structure for all batches
    dim: int = 0,  # dimension along which tensors are joined; 0-dim tensors are stacked
    sizes: list[int] | None = None,  # number of samples of each item, if known
) -> Any:
    """Join batches of predictions, targets or inputs into one nested structure.

    Tensors are concatenated; tensors that differ in a dimension other than `dim` become a flat list of samples. Lists
    with one entry per sample are chained: lists of dicts, strings or other objects, and lists and tuples of the
    lengths in `sizes`. Any other object becomes a list with one entry per batch. Raises `BatchError` for an empty
    list and for different structures.

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
    if sizes is not None and are_sample_lists(items, sizes):
        return list(chain.from_iterable(items))
    if any(type(o) is not type(first) for o in items):
        return list(items)
    if isinstance(first, list) and (
        _holds_objects(first) or any(len(o) != len(first) for o in items)
    ):
        return list(chain.from_iterable(items))
    children = [children_of(o) for o in items]
    if children[0] is None:
        return list(items)
    for o in items:
        if _list_keys(o) != _list_keys(first):
            raise BatchError(
                'Batches of different structure cannot be joined: '
                f'{describe(first)} and {describe(o)}.'
            )
    like = dict.fromkeys(first.keys()) if _is_mapping_of_rows(first) else first
    return rebuild(like, [concat(list(group), dim, sizes) for group in zip(*children, strict=True)])


def microbatches(
    xb: tuple[Any, ...],  # inputs
    yb: tuple[Any, ...],  # targets
    size: int,  # maximum number of samples of a microbatch
    n: int | None = None,  # number of samples of the batch; None: `find_bs`
) -> list[tuple[tuple[Any, ...], tuple[Any, ...]]]:  # (xb, yb) of each microbatch
    """Split a batch into microbatches of at most `size` samples, without copying.

    Tensors whose first dimension is the batch size are split, and so are lists or tuples with one entry per sample.
    Other objects are passed whole to every microbatch. A batch of at most `size` samples is the only microbatch.
    Raises `BatchError` for a batch that cannot be split, see `slice_batch`.

    >>> [x.tolist() for (x,), _ in microbatches((torch.arange(5),), (), 2)]
    [[0, 1], [2, 3], [4]]
    """
    if n is None:
        n = find_bs((*xb, *yb))
    if n <= size:
        return [(xb, yb)]
    return slice_batch(xb, yb, n, [slice(i, i + size) for i in range(0, n, size)])


def slice_batch(
    xb: tuple[Any, ...],  # inputs
    yb: tuple[Any, ...],  # targets
    n: int,  # number of samples of the batch
    slices: Sequence[slice | list[int]],  # sample indices of each part
) -> list[tuple[tuple[Any, ...], tuple[Any, ...]]]:  # (xb, yb) of each part
    """Return parts of a batch with the given samples.

    Raises `BatchError` for an entry that cannot be split, such as a PackedSequence, if no input has one entry per
    sample, and if tensor targets do not.

    >>> slice_batch((torch.arange(3),), (['a', 'b', 'c'],), 3, [[2, 0]])
    [((tensor([2, 0]),), (['c', 'a'],))]
    """
    batches = [
        (tuple(take_rows(o, n, rows) for o in xb), tuple(take_rows(o, n, rows) for o in yb))
        for rows in slices
    ]
    for name, whole, parts in (('inputs', xb, batches[0][0]), ('targets', yb, batches[0][1])):
        is_split = any(a is not b for a, b in zip(whole, parts, strict=True))
        has_rows = any(t.ndim for t in tensors_in(whole))
        if not is_split and (name == 'inputs' or has_rows):
            raise BatchError(
                f'The batch has {n} samples, and the {name} {describe(whole)} have nothing with an entry '
                f'for each: they cannot be split. Pass a tensor of {n} rows or a list of {n} entries.'
            )
    return batches


def apply_model(
    model: Callable[..., Any],  # `nn.Module` or function
    xb: tuple[Any, ...],  # inputs
) -> Any:
    """Call the model with the inputs of a batch.

    A single mapping is passed by keyword if the model has parameters of these names or takes only `**kwargs`; other
    entries are dropped. Otherwise the mapping is passed as one argument.

    >>> apply_model(lambda ids, mask=1: (ids, mask), ({'ids': 5, 'length': 9},))
    (5, 1)
    """
    if len(xb) != 1 or type(xb[0]) is Tensor:
        return model(*xb)
    return call_by_name(model, xb, passed_names(model, xb))


def passed_names(model: Callable[..., Any], xb: tuple[Any, ...]) -> tuple[Any, ...] | None:
    "Return the keys of a single mapping to pass by keyword, or None to pass `xb` unchanged."
    if len(xb) != 1 or not isinstance(xb[0], Mapping):
        return None
    names, takes_any = _get_parameters(model)
    keys = _list_keys(xb[0])
    return tuple(k for k in keys if takes_any or k in names) or None


def call_by_name(
    model: Callable[..., Any], xb: tuple[Any, ...], names: tuple[Any, ...] | None
) -> Any:
    "Call the model with the entries `names` of its single input as keywords, or with `xb` if `names` is None."
    return model(*xb) if names is None else model(**{k: xb[0][k] for k in names})


def unpack_output(out: Any) -> tuple[Any, Any]:  # prediction, and loss or None
    """Split the output of a model into the prediction and the loss, if the output is a mapping with a `loss`.

    The prediction is the entry `logits`, or a dict of all entries except the loss if there is no `logits`.

    >>> unpack_output({'loss': 0.5, 'logits': [1, 2]})
    ([1, 2], 0.5)
    >>> unpack_output({'boxes': [1, 2]})
    ({'boxes': [1, 2]}, None)
    """
    if not isinstance(out, Mapping):
        return out, None
    pred = out.get('logits')
    if pred is None:
        others = {k: v for k, v in out.items() if k != 'loss'}
        pred = others if len(others) < len(_list_keys(out)) else out
    return pred, out.get('loss')


def short_repr(value: Any) -> str:
    """Return a one-line description of a value for messages: its repr, or types and shapes of tensors and containers.

    >>> short_repr('adam'), short_repr(torch.zeros(64, 4))
    ("'adam'", 'Tensor[64, 4] float32')
    """
    if isinstance(value, (Tensor, np.ndarray)) or children_of(value) is not None:
        return describe(value)
    text = repr(value)
    return text if len(text) <= 100 and '\n' not in text else type(value).__name__


def describe(batch: Any) -> str:
    """Return the types and shapes of a batch as a short string for messages.

    >>> describe((torch.zeros(8, 1, 28, 28), torch.zeros(8, dtype=torch.int64)))
    '(Tensor[8, 1, 28, 28] float32, Tensor[8] int64)'
    >>> describe({'ids': torch.zeros(8, 12), 'text': ['a'] * 8})
    "{'ids': Tensor[8, 12] float32, 'text': [8 x str]}"
    """
    if isinstance(batch, (Tensor, np.ndarray)):
        dtype = str(batch.dtype).removeprefix('torch.')
        return f'{type(batch).__name__}{list(batch.shape)} {dtype}'
    children = children_of(batch)
    if children is None:
        return type(batch).__name__
    parts = [describe(o) for o in children[:8]] + ['...'] * (len(children) > 8)
    if isinstance(batch, Mapping):
        named = [f'{k!r}: {part}' for k, part in zip(batch.keys(), parts, strict=False)]
        return '{' + ', '.join(named) + '}'
    kinds = {type(o).__name__ for o in children}
    if len(children) > 3 and _holds_objects(children) and len(kinds) == 1:
        parts = [f'{len(children)} x {kinds.pop()}']
    text = ', '.join(parts)
    if isinstance(batch, list):
        return f'[{text}]'
    return f'({text},)' if len(children) == 1 else f'({text})'


# -- containers ------------------------------------------------------------------------------------


def _list_keys(o: Any) -> list[Any]:
    "Return the keys of a mapping, or the indices of a tuple or list."
    return list(o.keys()) if isinstance(o, Mapping) else list(range(len(o)))


def children_of(o: Any) -> list[Any] | None:
    "Return the values of a container in their order, or None for an object that is not a container."
    if isinstance(o, (tuple, list)):
        return list(o)
    # not `iter(o)`, which yields the rows of a TensorDict
    return list(o.values()) if isinstance(o, Mapping) else None


def _is_mapping_of_rows(o: Any) -> bool:
    "Return True for a TensorDict: a mapping that is indexed like a tensor, and whose entries have equally many rows."
    return isinstance(o, Mapping) and hasattr(o, 'shape')


def rebuild(like: Any, children: list[Any]) -> Any:
    "Return a container with the type and keys of `like` and the given values."
    if isinstance(like, tuple):
        return like._make(children) if hasattr(like, '_make') else type(like)(children)
    # torch.compile does not trace a copy
    if type(like) is list:
        return list(children)
    if type(like) is dict:
        return dict(zip(_list_keys(like), children, strict=True))
    new = copy(like)  # keeps attributes such as the factory of a defaultdict
    if isinstance(like, list):
        new[:] = children
    else:
        for k, v in zip(_list_keys(like), children, strict=True):
            new[k] = v
    return new


def map_tensors(b: Any, f: Callable[[Tensor], Any], own: Callable[[Any], Any] | None = None) -> Any:
    """Apply `f` to each tensor of a nested structure, and return `b` itself if no tensor changed.

    With `own`, also apply `own` to other objects with a `to` method, and `f` to numeric NumPy arrays as tensors.
    """
    if type(b) is int:  # the state of Python's random generator holds 625 ints
        return b
    if isinstance(b, Tensor):
        return f(b)
    if own is not None and isinstance(b, np.ndarray) and b.dtype.kind in 'biufc':
        return f(torch.tensor(b))
    # `to` of a UserDict, such as a BatchEncoding of transformers, would change the loader's object in place
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


def are_equal(
    a: Any,
    b: Any,
    others: bool | None = None,  # result for objects of other types; None: compare these by ==
) -> bool:
    """Return True if two nested structures have equal types and equal numbers, strings, tensors and arrays.

    NaN equals NaN. Tensors may be on different devices.

    >>> nan = float('nan')
    >>> are_equal([torch.tensor(nan), {'a': nan}], [torch.tensor(nan), {'a': nan}]), are_equal([nan], [1.0])
    (True, False)
    """
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return False
        b = b.to(a.device)
        return torch.equal(a, b) or bool(((a == b) | (a != a) & (b != b)).all())
    if isinstance(a, (np.ndarray, np.generic)):
        return np.array_equal(a, b, equal_nan=a.dtype.kind in 'fc')
    if isinstance(a, Mapping):
        keys = _list_keys(a)
        return set(keys) == set(b.keys()) and all(are_equal(a[k], b[k], others) for k in keys)
    if isinstance(a, (tuple, list)):
        pairs = zip(a, b, strict=False)
        return len(a) == len(b) and all(are_equal(v, w, others) for v, w in pairs)
    if others is not None and not isinstance(a, ATOMS):
        return others
    return bool(a == b or (a != a and b != b))


def _holds_objects(o: Iterable[Any]) -> bool:
    "Return True if a list holds only dicts, strings or other objects, and so has one entry per sample."
    return not any(isinstance(c, (Tensor, np.ndarray, tuple, list)) for c in o)


# -- sizes and parts -------------------------------------------------------------------------------


def _is_list(o: Any) -> bool:
    "Return True for a list, or a tuple that is not a named tuple."
    return isinstance(o, (list, tuple)) and not hasattr(o, '_fields')


def _iter_entries(b: Any) -> Iterator[Any]:
    "Yield the entries of a batch, and of nested mappings and named tuples; a nested list is one entry."
    children = None if isinstance(b, PackedSequence) else children_of(b)
    if children is None:
        yield b
        return
    for o in children:
        if _is_list(o):
            yield o
        else:
            yield from _iter_entries(o)


def is_sample_list(
    o: Any,
    n: int,  # number of samples of the batch
) -> bool:
    """Return True if a list or tuple has one entry for each of `n` samples.

    A list of `n` tensors that all have `n` rows holds stacked inputs or outputs, unless these are images (C, H, W).

    >>> is_sample_list([torch.zeros(2), torch.zeros(5)], 2), is_sample_list([torch.zeros(2), torch.zeros(2)], 2)
    (True, False)
    """
    if not _is_list(o) or len(o) != n:
        return False
    if not all(isinstance(t, (Tensor, np.ndarray)) and t.ndim and len(t) == n for t in o):
        return True
    return n in (1, 3, 4) and all(t.ndim == 3 for t in o)


def are_sample_lists(
    items: list[Any],  # one item per batch
    sizes: list[int],  # number of samples of each batch
) -> bool:
    "Return True if each item is a list or tuple with one entry per sample of its batch."
    pairs = list(zip(items, sizes, strict=True))
    if not all(_is_list(o) and len(o) == n for o, n in pairs):
        return False
    return any(is_sample_list(o, n) for o, n in pairs)


def has_listed_samples(b: Any, n: int) -> bool:
    """Return True if a batch of `n` samples has a list of tensors, or of containers of tensors, one per sample.

    >>> has_listed_samples((torch.zeros(2, 3), [torch.zeros(4), torch.zeros(5)]), 2), has_listed_samples((['a'],), 1)
    (True, False)
    """
    return any(is_sample_list(o, n) and tensors_in(o) for o in _iter_entries(b))


def take_rows(
    o: Any,
    n: int,  # number of samples of the batch
    rows: slice | list[int],  # sample indices
) -> Any:
    "Return `o` with the selected samples of each tensor and list that has `n` samples; other objects are unchanged."
    if isinstance(o, (Tensor, np.ndarray)) or _is_mapping_of_rows(o):
        return o[rows] if o.ndim and o.shape[0] == n else o
    if is_sample_list(o, n):
        indices = range(n)[rows] if isinstance(rows, slice) else rows
        return type(o)(o[i] for i in indices)  # a copy, even if all rows are selected
    children = children_of(o)
    if isinstance(o, PackedSequence) or (children is None and callable(getattr(o, 'to', None))):
        raise BatchError(
            f'{type(o).__name__} cannot be split into microbatches or between ranks: pass tensors or lists, or '
            'padded sequences.'
        )
    if children is None:
        return o
    new = [take_rows(c, n, rows) for c in children]
    return o if all(a is c for a, c in zip(new, children, strict=True)) else rebuild(o, new)


def _join_tensors(items: list[Tensor], dim: int) -> Tensor | list[Tensor]:
    "Concatenate tensors along `dim`, stack 0-dim tensors, and return a list of samples for different shapes."
    if all(t.ndim == 0 for t in items):
        return torch.stack(items)
    ndim = items[0].ndim
    if all(t.ndim == ndim for t in items):
        d = dim % ndim
        if len({(*t.shape[:d], *t.shape[d + 1 :]) for t in items}) == 1:
            return torch.cat(items, dim)
    return list(chain.from_iterable(t.unbind(dim) if t.ndim else (t,) for t in items))


# -- calling the model -----------------------------------------------------------------------------

_parameter_cache: WeakKeyDictionary[Any, tuple[frozenset[str], bool]] = WeakKeyDictionary()


def _get_parameters(model: Any) -> tuple[frozenset[str], bool]:
    "Return the cached parameter names of a model's forward, and True if forward takes only `**kwargs`."
    known = _parameter_cache.get(model)
    if known is None:
        known = _parameter_cache[model] = _read_parameters(model)
    return known


def _read_parameters(model: Any) -> tuple[frozenset[str], bool]:
    "Read the signature of a model's forward; the wrappers of DDP and torch.compile are unwrapped if it has no names."
    try:
        ps = inspect.signature(
            model.forward if isinstance(model, nn.Module) else model
        ).parameters.values()
    except ValueError:
        return frozenset(), False  # functions written in C have no signature
    names = frozenset(p.name for p in ps if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    inner = getattr(model, 'module', getattr(model, '_orig_mod', None))
    if not names and isinstance(inner, nn.Module):
        return _get_parameters(inner)

    needed = any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in ps
    )
    return names, not needed and any(p.kind is p.VAR_KEYWORD for p in ps)
