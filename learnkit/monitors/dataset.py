# SPDX-License-Identifier: Apache-2.0
"""Callbacks that count parameters and samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from learnkit.core.batch import BatchForm, find_bs
from learnkit.core.errors import BatchError
from learnkit.data.dataloaders import batch_size_of, evaluation_loaders, n_batches
from learnkit.engine.callback import Callback

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
    """Record the sizes of the loaders before each training.

    `stats[loader]` has `samples`, `batches` and `batch_size`, each None if the loader does not
    report it. Loggers write the sizes with the configuration (`data/train/samples`). No batch is
    read.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(cbs=DatasetStats())
    >>> with learn.no_bar(), learn.no_logging(): learn.fit(1)
    >>> learn.dataset_stats.stats['train']
    {'samples': 160, 'batches': 10, 'batch_size': 16}
    """

    run_in = 'fit'

    observer = True
    order = 60
    remove_on_find = True
    remove_on_fetch = True

    def __init__(self) -> None:
        self.stats: dict[str, dict[str, Any]] = {}

    def before_fit(self) -> None:
        "Read the sizes."
        dls = self.learn.dls
        loaders = [('train', dls.train), *evaluation_loaders(dls)]
        self.stats = {name: loader_stats(dl) for name, dl in loaders}

    def configuration(self) -> dict[str, Any]:
        "Return every size by name, for loggers."
        return {
            f'data/{name}/{key}': value
            for name, sizes in self.stats.items()
            for key, value in sizes.items()
        }


def loader_stats(dl: Any) -> dict[str, int | None]:
    """Return the numbers of samples and batches of a loader and its batch size, None if unknown.

    >>> import torch
    >>> loader_stats([(torch.zeros(4, 2), torch.tensor([0, 0, 1, 0]))])
    {'samples': 4, 'batches': 1, 'batch_size': None}
    """
    return {'samples': n_samples(dl), 'batches': n_batches(dl), 'batch_size': batch_size_of(dl)}


def samples_in(batch: Any) -> int:
    "Return the number of samples of a loader's batch, 0 if unknown."
    try:
        return find_bs(*BatchForm().split(batch, predicting=True))
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
