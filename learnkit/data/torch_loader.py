# SPDX-License-Identifier: Apache-2.0
"""Rebuilding torch's DataLoader from its public attributes, and checks of its samplers and workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from learnkit.core.random import preserved_rng


def rebuild(
    dl: DataLoader[Any],
    kind: type[DataLoader[Any]] = DataLoader,
    **options: Any,  # `batch_size`, and `sampler` or `batch_sampler`; further changed options
) -> DataLoader[Any]:
    """Make a loader that fetches and collates samples as `dl` does, in other batches.

    `generator` is not copied, because the new loader's draws would change the order of `dl`. `persistent_workers`
    is not copied either.

    >>> list(rebuild(DataLoader([1, 2, 3, 4]), batch_size=2))
    [tensor([1, 2]), tensor([3, 4])]
    """
    return kind(
        dl.dataset,
        **{
            'num_workers': dl.num_workers,
            'collate_fn': dl.collate_fn,
            'pin_memory': dl.pin_memory,
            'timeout': dl.timeout,
            'worker_init_fn': dl.worker_init_fn,
            'multiprocessing_context': dl.multiprocessing_context,
            'prefetch_factor': dl.prefetch_factor,
            **options,
        },
    )


def rebuild_with_sampler(dl: DataLoader[Any], sampler: Any, **options: Any) -> DataLoader[Any]:
    "Rebuild a loader with another sampler; the seed of the workers is drawn with all generators preserved."
    batches = (
        {'batch_size': None, 'sampler': sampler}
        if dl.batch_sampler is None
        else {'batch_sampler': sampler}
    )
    with preserved_rng():
        seed = int(torch.empty((), dtype=torch.int64).random_())
    return rebuild(
        dl,
        **{
            'generator': torch.Generator().manual_seed(seed),
            'in_order': dl.in_order,
            'persistent_workers': dl.persistent_workers,
            **batches,
            **options,
        },
    )


def get_index_sampler(dl: DataLoader[Any]) -> Any:
    "Return the sampler that a loader iterates: of batches of indices, or of indices without automatic batching."
    return dl.sampler if dl.batch_sampler is None else dl.batch_sampler


def start_lists(
    dl: DataLoader[Any],
    workers: int,  # number of workers; with workers, torch starts the sampler a second time
    workers_ran: bool,  # whether persistent workers were running already and need no seed
) -> Iterator[Any]:
    "Start a loader's sampler as torch does, with the same draws from the generators."
    lists = iter(get_index_sampler(dl))
    if workers_ran:
        return lists
    # torch draws a seed for workers even if there are no workers
    torch.empty((), dtype=torch.int64).random_(generator=dl.generator)
    return iter(get_index_sampler(dl)) if workers else lists


class ResumedSampler:
    "Sampler that yields the remaining indices of an epoch first, and the loader's own sampler in later epochs."

    def __init__(self, lists: Iterator[Any], sampler: Iterable[Any]) -> None:
        self.lists: Iterator[Any] | None = lists
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        return iter(self.sampler) if self.lists is None else self.lists


def iterates_as_torch(dl: Any) -> bool:
    "Return True for torch's DataLoader, a subclass that only adds options, and torchdata's StatefulDataLoader."
    if type(dl).__module__.startswith('torchdata.stateful_dataloader'):
        return True
    return getattr(type(dl), '__iter__', None) is DataLoader.__iter__


def torch_in_order(dl: DataLoader[Any]) -> DataLoader[Any]:
    "Return a loader of the same samples in the data set's order, or `dl` if in order or not rebuildable."
    has_batch_sampler = dl.batch_size is None and dl.batch_sampler is not None
    if has_batch_sampler or isinstance(dl.dataset, IterableDataset):
        return dl
    shuffles = type(dl.sampler) is RandomSampler or _is_of_torchdata(dl.sampler)
    if not dl.drop_last and not shuffles and getattr(dl, 'in_order', True):
        return dl
    selects = not shuffles and type(dl.sampler) is not SequentialSampler
    return rebuild(dl, batch_size=dl.batch_size, sampler=dl.sampler if selects else None)


def _is_of_torchdata(sampler: Any) -> bool:
    "Return True for torchdata's random sampler, which does not inherit from torch's."
    kind = type(sampler)
    return kind.__module__.startswith('torchdata.') and kind.__name__ == 'RandomSampler'


def workers_run(dl: Any) -> bool:
    "Return True if persistent workers are running, so that the next epoch draws no seed for workers."
    return (
        bool(getattr(dl, 'persistent_workers', False))
        and getattr(dl, '_iterator', None) is not None
    )


def belongs_to_sampler(
    name: str,  # place of a random generator in a loader, as in `own_generators`
) -> bool:
    "Return True for a generator that draws the order of samples."
    return name.startswith(('generator', 'sampler', 'batch_sampler'))


def end_workers(batches: Any) -> None:
    "Terminate the workers of a failed pass; without this call torch waits 5 s for each hanging worker."
    for part in getattr(batches, 'parts', ()):
        end_workers(part.batches)
    for worker in getattr(batches, '_workers', ()):
        worker.terminate()


def workers_live(batches: Any) -> bool:
    "Return False if a worker process of a pass has ended, as by a signal."
    return all(worker.is_alive() for worker in getattr(batches, '_workers', ()))


def drop_started_pass(dl: Any) -> None:
    """Make the next pass over accelerate's wrapper of a StatefulDataLoader start when it is iterated.

    The wrapper starts the first pass when it is made, and draws its order then."""
    inner: Any = getattr(dl, 'base_dataloader', None)
    is_stateful = type(inner).__module__.startswith('torchdata.stateful_dataloader')
    if is_stateful and not inner.persistent_workers:
        inner.load_state_dict({})


def list_combined(dl: Any) -> list[Any]:
    "Return the loaders of a `CombinedLoader`, or an empty list for any other loader."
    return dl.loaders if hasattr(dl, 'batch_source') else []


def forget_workers(dl: Any) -> None:
    "Make the next pass start new persistent workers, because the current ones may be dead."
    if parts := list_combined(dl):
        for part in parts:
            forget_workers(part)
    elif getattr(dl, 'persistent_workers', False):
        dl._iterator = None
