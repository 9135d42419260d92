"""Torch's own DataLoader, made anew from its public attributes, and what can be learnt about it in that way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from traceback import walk_tb
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from learnkit.core.random import RNGState, capture_rng, own_generators, preserved_rng, same_states

__all__ = [
    'rebuild',
    'with_sampler',
    'without_workers',
    'index_sampler',
    'start_lists',
    'Rest',
    'torch_in_order',
    'is_samplers',
    'workers_run',
    'fetching_is_random',
    'end_workers',
    'forget_workers',
    'epochs_of',
    'set_epochs',
]


def rebuild(
    dl: DataLoader[Any],
    kind: type[DataLoader[Any]] = DataLoader,
    **options: Any,  # `batch_size`, and `sampler` or `batch_sampler`; and what is to change
) -> DataLoader[Any]:
    """Make a loader anew that fetches samples and joins them as `dl` does, in batches of its own.

    It has neither the `generator`, whose draws would change those of `dl`, nor workers that outlive their epoch.

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


def with_sampler(dl: DataLoader[Any], sampler: Any, **options: Any) -> DataLoader[Any]:
    "Make a loader anew with another sampler; its workers' seed is drawn without moving any generator in use."
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


def without_workers(dl: DataLoader[Any]) -> DataLoader[Any]:
    "Return a loader that fetches the same batches in this process."
    return with_sampler(
        dl,
        index_sampler(dl),
        num_workers=0,
        persistent_workers=False,
        timeout=0,
        prefetch_factor=None,
        multiprocessing_context=None,
    )


def index_sampler(dl: DataLoader[Any]) -> Any:
    return dl.sampler if dl.batch_sampler is None else dl.batch_sampler


def start_lists(
    dl: DataLoader[Any],
    workers: int,  # of the pass: torch starts the sampler a second time for them
    workers_ran: bool,  # persistent workers were there already, and need no seed
) -> Iterator[Any]:
    "Start a pass of a loader's sampler as torch does, drawing what torch draws."
    lists = iter(index_sampler(dl))
    if workers_ran:
        return lists
    # torch's seed for workers, if any
    torch.empty((), dtype=torch.int64).random_(generator=dl.generator)
    return iter(index_sampler(dl)) if workers else lists


class Rest:
    "A sampler that gives what is left of an epoch, and from the next epoch on what the loader's own gives."

    def __init__(self, lists: Iterator[Any], sampler: Iterable[Any]) -> None:
        self.lists: Iterator[Any] | None = lists
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        return iter(self.sampler) if self.lists is None else self.lists


def torch_in_order(dl: DataLoader[Any]) -> DataLoader[Any]:
    "Return a loader of the same samples in the data set's order; `dl` itself where that is so, or none can be made."
    own_batches = dl.batch_size is None and dl.batch_sampler is not None
    if own_batches or isinstance(dl.dataset, IterableDataset):
        return dl
    if not dl.drop_last and type(dl.sampler) is not RandomSampler and getattr(dl, 'in_order', True):
        return dl
    chooses = type(dl.sampler) not in (RandomSampler, SequentialSampler)
    return rebuild(dl, batch_size=dl.batch_size, sampler=dl.sampler if chooses else None)


def workers_run(dl: Any) -> bool:
    "Tell whether persistent workers are there: their next epoch starts without a draw for their seed."
    return (
        bool(getattr(dl, 'persistent_workers', False))
        and getattr(dl, '_iterator', None) is not None
    )


def is_samplers(name: str) -> bool:
    return name.startswith(('generator', 'sampler', 'batch_sampler'))


def fetching_is_random(dl: DataLoader[Any], some: list[Any]) -> bool:
    """Tell whether fetching batches of these indices moves a random generator, by fetching a few of their samples.

    A worker process of its own does that, so that no file is opened in this one."""
    if not all(map(is_samplers, own_generators(dl))):
        return True
    cut = [indices if dl.batch_sampler is None else list(indices)[:4] for indices in some]
    watched = with_sampler(
        dl,
        [cut[0], *cut],
        num_workers=1,
        persistent_workers=False,
        pin_memory=False,
        collate_fn=_Watch(dl.collate_fn),
    )
    try:
        return any(watched)
    except Exception:
        return True  # a few samples may not make a batch; an error in the data comes again


def end_workers(
    dl: Any,  # a loader
    e: BaseException,  # what drawing from it has raised
) -> None:
    "End the workers of a pass that has failed, hanging ones too; torch waits 5 s for each, when garbage is collected."
    for frame, _ in walk_tb(e.__traceback__):
        batches = frame.f_locals.get('self')
        if not isinstance(batches, _MultiProcessingDataLoaderIter):
            continue
        for worker in batches._workers:
            worker.terminate()
        batches._shutdown_workers()
        break
    forget_workers(dl)


def forget_workers(dl: Any) -> None:
    "Let the next pass have other persistent workers: these may be dead."
    if getattr(dl, 'persistent_workers', False):
        dl._iterator = None


class _Watch:
    "Joins samples as a loader does, and gives whether a generator has moved since the last time."

    def __init__(self, join: Callable[[Any], Any]) -> None:
        self.join = join
        self.last: RNGState | None = None

    def __call__(self, samples: Any) -> bool:
        self.join(samples)
        before, self.last = self.last, capture_rng()
        return before is not None and not same_states(before, self.last)


# Numbers of epochs


def epochs_of(dl: Any) -> dict[str, int]:
    """Return the number of the epoch of what has one in a loader (samplers that count them, or are told), by its place.

    >>> class Sampler(list):
    ...     epoch = 3
    >>> epochs_of(DataLoader([1], sampler=Sampler([0])))
    {'sampler': 3, 'batch_sampler.sampler': 3}
    """
    return {path: owner.epoch for path, owner in _counting(dl)}


def set_epochs(
    dl: Any,  # a loader
    epochs: Mapping[str, int],  # from `epochs_of`
) -> None:
    "Set them, by `set_epoch` where there is one."
    for path, owner in _counting(dl):
        if (epoch := epochs.get(path, owner.epoch)) == owner.epoch:
            continue
        if hasattr(owner, 'set_epoch'):
            owner.set_epoch(epoch)
        else:
            with suppress(AttributeError):
                owner.epoch = epoch  # it may be one that cannot be set


def _counting(dl: Any) -> Iterator[tuple[str, Any]]:
    has_state = hasattr(type(dl), 'load_state_dict')  # then that has its number, too
    for path in ('', 'sampler', 'batch_sampler', 'batch_sampler.sampler', 'dataset'):
        owner = dl if not path else getattr(dl, '__dict__', {}).get(path.partition('.')[0])
        if '.' in path:
            owner = getattr(owner, 'sampler', None)
        if type(getattr(owner, 'epoch', None)) is int and (path or not has_state):
            yield path, owner
