"""Callbacks that count parameters, and describe the data: sizes, shapes and values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from learnkit.core.batch import BatchForm, find_bs, form_of
from learnkit.core.errors import BatchError
from learnkit.core.validation import check_count
from learnkit.data.dataloaders import batch_size_of, evaluation_loaders, n_batches
from learnkit.data.preserve import undisturbed_loader
from learnkit.engine.callback import Callback

__all__ = [
    'Count',
    'DatasetStats',
    'ParamCount',
    'count_parameters',
    'loader_stats',
    'n_samples',
]

MANY_CLASSES = 1000  # integers with more different values are not classes


# -- parameters ------------------------------------------------------------------------------------


class Count(NamedTuple):
    "Number of elements of parameters, and number of elements that are trained."

    total: int
    trainable: int


def count_parameters(model: nn.Module) -> dict[str, Count]:
    """Return the counts of the whole model, as 'total', and of each of its children.

    Parameters of the model itself are named '(model)'. A shared parameter counts once, for the
    first module that has it, so that the rows add up. Uninitialized parameters do not count.

    >>> model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1).requires_grad_(False))
    >>> count_parameters(model)
    {'total': Count(total=11, trainable=8), '0': Count(total=8, trainable=8), '2': Count(total=3, trainable=0)}
    """
    seen: set[nn.Parameter] = set()

    def count(params: Iterator[nn.Parameter]) -> Count:
        new = [p for p in params if p not in seen and not is_lazy(p)]
        seen.update(new)
        return Count(sum(p.numel() for p in new), sum(p.numel() for p in new if p.requires_grad))

    parts = {'(model)': count(model.parameters(recurse=False))}
    for name, child in model.named_children():
        parts[name] = count(child.parameters())
    parts = {name: part for name, part in parts.items() if part.total}
    counts = parts.values()
    total = Count(sum(c.total for c in counts), sum(c.trainable for c in counts))
    return {'total': total, **parts}


class ParamCount(Callback):
    """Count the parameters, in total and by top-level module, at the start of each fit.

    The counts are in `counts`, and `learn.summary()` prints a table. Loggers write the counts once
    with the configuration: `parameters/total`, `parameters/trainable`, and `parameters/<module>/...`.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(cbs=ParamCount())
    >>> with learn.no_bar(), learn.no_logging(): learn.fit(1)
    >>> learn.param_count.counts['total']
    Count(total=2, trainable=2)
    """

    run_in = 'fit'

    observer = True
    order = 60
    remove_on_find = True
    remove_on_fetch = True

    def __init__(self) -> None:
        self.counts: dict[str, Count] = {}

    def before_fit(self) -> None:
        "Count the parameters."
        self.counts = count_parameters(self.learn.model)

    def configuration(self) -> dict[str, Any]:
        "Return the counts by name, for loggers."
        flat: dict[str, Any] = {}
        for name, count in self.counts.items():
            prefix = 'parameters' if name == 'total' else f'parameters/{name}'
            flat[f'{prefix}/total'] = count.total
            flat[f'{prefix}/trainable'] = count.trainable
        return flat


# -- data ------------------------------------------------------------------------------------------


class DatasetStats(Callback):
    """Compute statistics of the data before the first training: sizes, shapes, types and values.

    `stats[loader]` has `samples`, `batches` and `batch_size` (None if the loader does not report
    them), `seen` (number of samples of the batches read), and `entries`. An entry describes one
    tensor of a batch over the first `n` batches: `shape` without the sample axis, `dtype`, and the
    count of each class (`classes`, for one integer per sample) or `mean`, `std`, `min` and `max`.
    Loggers write the statistics with the configuration (`data/train/samples`).

    Random generators, the loaders' own generators and worker processes are restored. No batch is
    read with `n=0`, or from an iterator, which would lose it. The statistics are computed again if
    `learn.dls` is another object.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(cbs=DatasetStats())
    >>> with learn.no_bar(), learn.no_logging(): learn.fit(1)
    >>> stats = learn.dataset_stats.stats['train']
    >>> stats['samples'], stats['batches'], stats['seen'], stats['entries']['input']['shape']
    (160, 10, 128, (1,))
    """

    run_in = 'fit'

    observer = True
    order = 60
    remove_on_find = True
    remove_on_fetch = True

    def __init__(
        self,
        n: int = 8,  # number of batches to read of each loader
    ) -> None:
        self.n = check_count('n', n, 0)
        self.stats: dict[str, dict[str, Any]] = {}
        self._described: Any = None  # loaders that `stats` describes

    def before_fit(self) -> None:
        "Compute the statistics, unless these loaders were described before."
        dls = self.learn.dls
        if self._described is dls:
            return
        loaders = [('train', dls.train), *evaluation_loaders(dls)]
        self.stats = {name: loader_stats(dl, self.n, form_of(dls, name)) for name, dl in loaders}
        self._described = dls

    def configuration(self) -> dict[str, Any]:
        "Return every number and shape by name, for loggers."
        flat: dict[str, Any] = {}
        for name, s in self.stats.items():
            flat |= {f'data/{name}/{k}': v for k, v in s.items() if k != 'entries'}
            for entry, values in s['entries'].items():
                flat |= {
                    f'data/{name}/{entry}/{k}': str(v) if k in ('shape', 'classes') else v
                    for k, v in values.items()
                }
        return flat


def loader_stats(
    dl: Any,  # loader
    n: int = 8,  # number of batches to read
    form: BatchForm | None = None,  # form of a batch; None: the last entry of a tuple is the target
) -> dict[str, Any]:
    """Return the sizes of a loader, and shapes, types and values of its first batches.

    The keys are described in `DatasetStats`.

    >>> loader_stats([(torch.zeros(4, 2), torch.tensor([0, 0, 1, 0]))])['entries']['target']
    {'shape': (), 'dtype': 'int64', 'classes': {0: 3, 1: 1}}
    """
    form = form or BatchForm()
    with undisturbed_loader(dl):
        iterator = iter(dl)
        batches = [] if iterator is dl else list(islice(iterator, n))
        del iterator  # ends its worker processes
    entries: dict[str, list[Tensor]] = {}
    for batch in batches:
        xb, yb = form.split(batch, predicting=True)
        for name, part in (('input', xb), ('target', yb)):
            for path, t in _tensors(name, part[0] if len(part) == 1 else part):
                entries.setdefault(path, []).append(t)
    return {
        'samples': n_samples(dl),
        'batches': n_batches(dl),
        'batch_size': batch_size_of(dl),
        'seen': sum(samples_in(b, form) for b in batches),
        'entries': {path: _describe_entry(ts) for path, ts in entries.items()},
    }


def samples_in(batch: Any, form: BatchForm | None = None) -> int:
    "Return the number of samples of a loader's batch, 0 if unknown."
    try:
        return find_bs(*(form or BatchForm()).split(batch, predicting=True))
    except BatchError:
        return 0


def n_samples(dl: Any) -> int | None:
    "Return the number of samples of a loader without dropped ones, None if unknown."
    if isinstance(dl, (list, tuple)):
        return sum(map(samples_in, dl))
    n = n_batches(dl)
    bs = batch_size_of(dl)
    if n is not None and bs is not None and getattr(dl, 'drop_last', False):
        return n * bs
    n_own = getattr(dl, 'n', None)
    if isinstance(n_own, int):
        return n_own
    size = n_batches(getattr(dl, 'sampler', None))
    return n_batches(getattr(dl, 'dataset', None)) if size is None else size


def _tensors(name: str, o: Any) -> Iterator[tuple[str, Tensor]]:
    "Yield the tensors of a nested structure, each with its path."
    if isinstance(o, Tensor):
        yield name, o
    elif isinstance(o, (Mapping, tuple, list)):
        for key, value in o.items() if isinstance(o, Mapping) else enumerate(o):
            yield from _tensors(f'{name}/{key}', value)


def _describe_entry(ts: list[Tensor]) -> dict[str, Any]:
    "Describe an entry of several batches; axes of different sizes are '*'."
    sizes = map(set, zip(*(t.shape[1:] for t in ts), strict=False))
    shape = tuple(axis.pop() if len(axis) == 1 else '*' for axis in sizes)
    described = {'shape': shape, 'dtype': str(ts[0].dtype).removeprefix('torch.')}
    values = torch.cat([t.detach().reshape(-1) for t in ts])
    is_class = not values.is_floating_point() and all(t.numel() == len(t) for t in ts)
    counts = Counter(values.tolist() if is_class else ())
    if is_class and len(counts) <= MANY_CLASSES:
        return {**described, 'classes': dict(sorted(counts.items()))}
    return {**described, **_moments(values)}


def _moments(values: Tensor) -> dict[str, float]:
    if not values.numel():
        return {}
    values = values.to('cpu', torch.float64)
    return {
        'mean': values.mean().item(),
        'std': values.std(correction=0).item(),
        'min': values.min().item(),
        'max': values.max().item(),
    }
