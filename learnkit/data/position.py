# SPDX-License-Identifier: Apache-2.0
"""Position of a training epoch in its data, from which a killed run resumes at the next batch.

A position holds the generator states at the start of the epoch and the number of batches drawn since. How a position
is restored depends on the loader:

- A `TensorLoader`, list or tuple starts at the batch.
- torch's DataLoader without workers skips consumed samples by index. With workers, consumed samples are fetched
  again, because the workers' random generators have to reach their former states.
- A loader with `state_dict` and `load_state_dict` resumes from its own state.
- Any other iterable is iterated from the start of the epoch to the batch. An iterator is iterated from its own
  start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from itertools import islice
from typing import Any, Self

import torch
from torch.utils.data import DataLoader, IterableDataset

from learnkit.core.errors import CheckpointError
from learnkit.core.plain import to_plain
from learnkit.core.random import capture_rng, preserved_rng, restore_rng
from learnkit.core.validation import warn_user
from learnkit.data.dataloaders import TensorLoader, batch_size_of, n_batches
from learnkit.data.loader_state import capture_loader_state, restore_loader_state
from learnkit.data.shard import Shard
from learnkit.data.torch_loader import (
    ResumedSampler,
    belongs_to_sampler,
    forget_workers,
    get_index_sampler,
    rebuild_with_sampler,
    start_lists,
    workers_run,
)

State = dict[str, Any]
_END = object()  # marks the end of a loader, as the default of `next`


class LoaderPosition:
    """One epoch's pass over a training loader, and the position of the run in the pass.

    `begin` returns the iterator of batches; this class does no work between two batches. Before `begin`, the position
    is between two epochs.

    >>> import torch
    >>> loader = TensorLoader(torch.arange(6), bs=2, shuffle=True, seed=0)
    >>> position = LoaderPosition(loader)
    >>> first, *others = position.begin()
    >>> state = position.state_dict(1)
    >>> same_loader = TensorLoader(torch.arange(6), bs=2, shuffle=True, seed=0)
    >>> resumed = LoaderPosition.resume(same_loader, state)
    >>> [x.tolist() for x, in resumed.begin()] == [x.tolist() for x, in others]
    True
    """

    def __init__(
        self,
        dl: Any,  # the training loader
        n_before: int = 0,  # batches drawn in earlier epochs, needed for an iterator
        first: dict[str, Any] | None = None,  # the loader at the start of the fit; None: as it is
    ):
        self.dl = dl
        self.n_before = n_before
        self.first = describe_drawn(dl) if first is None else first
        # states of all generators just before `iter(dl)`; None before `begin`
        self.start: State | None = None
        self.n_workers = getattr(dl, 'num_workers', 0) or 0
        self.workers = self.n_workers  # of a resumed position, the saved number
        self._workers_ran = False  # persistent workers were running when the epoch began
        # of a resumed position: number of batches to skip, and the loader's own state after them
        self._n_skipped = 0
        self._own_state = State()

    @classmethod
    def resume(
        cls,
        dl: Any,  # a training loader made like the saved one
        state: Mapping[str, Any],  # return value of `state_dict`
    ) -> Self:
        """Return a position that resumes from a saved state.

        Within an epoch, `begin` returns the remaining batches and leaves all global generators unchanged. A state
        between epochs is restored at once, and `begin` starts an epoch. Raises `CheckpointError`, with nothing
        changed, for a loader of another type, length or batch size.
        """
        (check_position if state['start'] is None else _check_drawn)(dl, state)
        position = cls(dl, state['n_before'])
        position.first = state['loader']
        position.load_state_dict(state)
        return position

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        "Take a saved state, which is not checked. A state between epochs is restored at once."
        self._n_skipped = state['n']
        self._own_state = state['now']
        if state['start'] is None:
            self._restore_between_epochs(state['workers_run'])
        else:
            ranks = _count_ranks(self.dl)
            if state.get('ranks', ranks) != ranks:
                self._own_state = _without_order(state['now'])
            self.start = state['start']
            self.workers = state['workers']
            self._workers_ran = state['workers_ran']

    def begin(self) -> Iterator[Any]:
        """Return the iterator over the remaining batches of the epoch.

        Raises `CheckpointError` if the epoch ends before the batch of a resumed position."""
        if self.start is not None:
            return self._resume_epoch()
        self._workers_ran = self.workers > 0 and workers_run(self.dl)
        self.start = _capture(self.dl, with_global=True)
        return iter(self.dl)

    def state_dict(
        self,
        n_drawn: int,  # batches of this epoch drawn so far
    ) -> State:
        """Return the position after `n_drawn` batches as tensors and plain values, without the global generators.

        Raises `OptionError` for a loader whose own state would not load safely."""
        now = _capture(self.dl)
        if self.n_workers and self.start is not None:
            now = _without_samplers(now)
        # between epochs, state_dict of torchdata's StatefulDataLoader would start an epoch
        dl = _unshard(self.dl) if self.start is None else self.dl
        if _has_state(dl) and (self.start is not None or not isinstance(dl, DataLoader)):
            state = _loader_state(dl)
            if state is not None:
                now['loader'] = deepcopy(to_plain(state, f'The state of {type(dl).__name__}'))
        return {
            'loader': self.first,
            'drawn': describe_drawn(self.dl),
            'n': n_drawn,
            'n_before': self.n_before,
            'ranks': _count_ranks(self.dl),
            'start': self.start,
            'now': now,
            'workers': self.workers,
            'workers_ran': self._workers_ran,
            'workers_run': self.n_workers > 0 and workers_run(self.dl),
        }

    def indices(
        self,
        i: int,  # number of a batch of this epoch
    ) -> list[Any] | None:
        """Return the data set indices of batch `i`, recomputed with all generators preserved.

        Returns None before `begin`, and for loaders other than torch's DataLoader and `TensorLoader`.

        >>> position = LoaderPosition(DataLoader(range(5), batch_size=2))
        >>> batches = position.begin()
        >>> position.indices(1)
        [2, 3]
        """
        if self.start is None:
            return None
        with _preserved(self.dl):
            if _has_index_lists(self.dl):
                indices = next(islice(self._restart_index_lists(), i, None), None)
            elif _is_tensor_loader(self.dl) and i < len(self.dl):
                _restore(self.dl, self.start)
                indices = self.dl.draw_indices(i)
            else:
                return None
        if indices is None:
            return None
        return list(indices) if isinstance(indices, Iterable) else [indices]

    def describe_lost_state(
        self,
        n_drawn: int,  # batches of this epoch drawn so far
    ) -> list[str]:
        "Return why a run resumed here would draw other random numbers or samples, by the options of its loader."
        dl = self.dl
        if self.start is None or not n_drawn or not _has_index_lists(dl):
            return []
        lost = []
        if not dl.in_order and dl.num_workers:
            lost.append(
                'A DataLoader with in_order=False gives batches as its workers finish them: some come twice and some '
                'not at all in an epoch that is resumed. Exact: in_order=True.'
            )
        if dl.persistent_workers:
            lost.append(
                'The random generators of persistent workers run on from epoch to epoch and cannot be restored: '
                'random samples will differ after a resume. Exact: persistent_workers=False.'
            )
        return lost

    # -- resuming from a position ------------------------------------------------------------------

    def _restore_between_epochs(self, workers_ran: bool) -> None:
        "Restore a loader's state after an epoch."
        dl = self.dl
        if isinstance(dl, Iterator):
            with preserved_rng():
                _skip(dl, self.n_before)
        if 'loader' in self._own_state:
            loader = _unshard(dl)
            loader.load_state_dict(deepcopy(self._own_state['loader']))
            if hasattr(loader, 'restart_on_stop_iteration'):
                with _preserved(dl):
                    next(_iterate_rest(loader), None)
        _restore_own_state(dl, self._own_state)
        if not workers_ran or workers_run(dl):
            return
        # starting workers draws a seed, which an uninterrupted run draws only in its first epoch
        with _preserved(dl):
            iter(dl)

    def _resume_epoch(self) -> Iterator[Any]:
        "Return the iterator over the remaining batches, and leave the global generators unchanged."
        dl = self.dl
        n = self._n_skipped
        current = capture_rng()
        if type(dl) in (list, tuple):
            return islice(dl, n, None)
        if self.n_workers:
            forget_workers(dl)  # of an interrupted pass of this process
        try:
            if isinstance(dl, Iterator):
                _skip(dl, self.n_before + n)
                return dl
            if _has_index_lists(dl):
                return self._resume_by_index(n)
            if _is_tensor_loader(dl):
                _restore(dl, self.start)
                batches = dl.from_batch(n)
            elif self._own_state.get('loader') is not None and not self._must_replay():
                _restore(dl, self.start)  # the loader may draw its order again
                dl.load_state_dict(deepcopy(self._own_state['loader']))
                batches = _iterate_rest(dl)
            else:
                return self._replay(n)
            _restore_own_state(dl, self._own_state)
            return batches
        finally:
            restore_rng(current)

    def _resume_by_index(self, n: int) -> Iterator[Any]:
        dl = self.dl
        if self._must_replay() and not self._workers_ran:
            return self._replay(n)
        lists = self._restart_index_lists()
        _skip(lists, n)
        _restore_own_state(dl, self._own_state)
        sampler = ResumedSampler(lists, get_index_sampler(dl))
        batches = iter(rebuild_with_sampler(dl, sampler))
        sampler.lists = None
        if dl.persistent_workers:
            dl._iterator = batches  # its workers serve the following epochs
        return batches

    def _restart_index_lists(self) -> Iterator[Any]:
        "Start the epoch's sampler as torch did, with every generator restored to the start of the epoch."
        dl = self.dl
        _restore(dl, self.start)
        if isinstance(dl, Shard):
            lists: Iterator[Any] = get_index_sampler(self.dl).begin(self.workers, self._workers_ran)
            return lists
        return start_lists(dl, self.workers, self._workers_ran)

    def _must_replay(self) -> bool:
        "Return True if workers have to fetch consumed samples again, so that their generators advance."
        dl = self.dl
        if not isinstance(dl, DataLoader) or isinstance(dl.dataset, IterableDataset):
            return False
        if self.workers != self.n_workers:
            warn_user(
                f'The checkpoint was taken with num_workers={self.workers}, now it is {self.n_workers}. Samples that '
                'are fetched with random numbers will differ from an uninterrupted run.'
            )
            return False
        return self.n_workers > 0

    def _replay(self, n: int) -> Iterator[Any]:
        "Iterate from the start of the epoch and discard the consumed batches."
        dl = self.dl
        _restore(dl, self.start)
        batches = iter(dl)
        _skip(batches, n)
        _restore_own_state(dl, self._own_state)
        return batches


# -- kinds of loaders ------------------------------------------------------------------------------


def _is_tensor_loader(dl: Any) -> bool:
    return isinstance(dl, TensorLoader) and type(dl).__iter__ is TensorLoader.__iter__


def _has_index_lists(dl: Any) -> bool:
    "Return True for torch's DataLoader, or a shard of one, whose sampler can be restarted."
    is_torch = type(dl) is DataLoader or (isinstance(dl, Shard) and isinstance(dl, DataLoader))
    if not is_torch or isinstance(dl.dataset, IterableDataset):
        return False
    return not isinstance(get_index_sampler(dl), Iterator)


def _has_state(dl: Any) -> bool:
    return all(
        callable(getattr(type(dl), name, None)) for name in ('state_dict', 'load_state_dict')
    )


def _loader_state(dl: Any) -> Any:
    "Return `dl.state_dict()`, or None with a warning if it raises, as accelerate's loaders may."
    try:
        return dl.state_dict()
    except Exception as e:
        warn_user(
            f'{type(dl).__name__}.state_dict() raised {type(e).__name__}: {e}. A resumed run draws the batches from '
            "the epoch's start again, which is exact only if they come in the same order."
        )
        return None


def _iterate_rest(dl: Any) -> Iterator[Any]:
    """Return the batches that remain after `load_state_dict`.

    At the end of an epoch, the `Loader` of torchdata.nodes would start the next one, and draw its order twice."""
    if not getattr(dl, 'restart_on_stop_iteration', False):
        return iter(dl)
    dl.restart_on_stop_iteration = False
    try:
        return iter(dl)
    finally:
        dl.restart_on_stop_iteration = True


def _unshard(dl: Any) -> Any:
    return dl.source if isinstance(dl, Shard) else dl


def _count_ranks(dl: Any) -> int:
    return dl.spec.size if isinstance(dl, Shard) else 1


def describe_drawn(dl: Any) -> dict[str, Any]:
    "Return the type and sizes that must match for a position to be restored; of a shard, the sizes over all ranks."
    batches = n_batches(dl)
    per_batch = dl.spec.per_round if isinstance(dl, Shard) else 1
    dl = _unshard(dl)
    bs = batch_size_of(dl)
    dataset = getattr(dl, '__dict__', {}).get('dataset')
    samples = dl.n if _is_tensor_loader(dl) else n_batches(dataset)
    return {
        'type': type(dl).__name__,
        'batches': batches,
        'batch size': None if bs is None else bs * per_batch,
        'samples': samples,
    }


def check_position(dl: Any, state: Mapping[str, Any]) -> None:
    "Raise `CheckpointError` if a loader is not as the position's was at the start of its fit."
    _compare(state['loader'], describe_drawn(dl))


def count_in_batches(
    dl: Any,  # the training loader
    state: Mapping[str, Any],  # return value of `LoaderPosition.state_dict`
    is_same_step: bool,  # whether an optimizer step has as many samples as the saved run's
) -> Mapping[str, Any]:
    """Return a position counted in batches of a loader, whose size may differ if a step has as many samples.

    Raises `CheckpointError` for a loader that differs otherwise, and for a position within one of its batches."""
    saved = state.get('drawn', state['loader'])
    now = describe_drawn(dl)
    old, new = saved.get('batch size'), now['batch size']
    if old != new and is_same_step and _has_same_samples(dl, saved, now):
        n, rest = divmod(state['n'] * old, new)
        if state['n'] == saved['batches']:
            n, rest = now['batches'], 0
        if rest:
            raise CheckpointError(
                f'The checkpoint was taken after {state["n"]} batches of {old} samples, within a batch of {new}: '
                f'resume with {old}, or take checkpoints between steps, `Checkpoint(every="100st")`.'
            )
        sizes = {name: now[name] for name in ('batches', 'batch size')}
        state = {
            **state,
            'loader': {**state['loader'], **sizes},
            'drawn': {**saved, **sizes},
            'n': n,
            'now': _without_order(state['now']) if state['start'] is not None else state['now'],
        }
    check_position(dl, state)
    return state


def _has_same_samples(dl: Any, saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    "Return True if an epoch of both loaders may have the same samples, in batches of two sizes."
    if saved.get('batches') is None or now['batches'] is None:
        return False
    old, new = saved['batch size'], now['batch size']
    surplus = abs(saved['batches'] * old - now['batches'] * new)
    return surplus == 0 or (surplus < max(old, new) and not getattr(_unshard(dl), 'drop_last', 0))


def _check_drawn(dl: Any, state: Mapping[str, Any]) -> None:
    "Raise `CheckpointError` if a loader is not as the position's was in its epoch."
    with _preserved(dl):
        # the length of a loader may depend on the epoch
        start = {name: state['start'].get(name, {}) for name in ('epochs', 'counts')}
        restore_loader_state(_unshard(dl), start)
        _compare(state.get('drawn', state['loader']), describe_drawn(dl))


def _compare(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    differences = [
        f'{name} {saved.get(name)}, now {value}'
        for name, value in now.items()
        if saved.get(name) != value and not (name == 'batches' and None in (saved.get(name), value))
    ]
    if differences:
        raise CheckpointError(
            'The training loader is not as it was when the checkpoint was taken: '
            f'{"; ".join(differences)}. Give the data and the batches that it had, as many samples in a step of all '
            'processes, or begin a new fit with its weights.'
        )


# -- generators ------------------------------------------------------------------------------------


def _capture(dl: Any, with_global: bool = False) -> State:
    "Return the state of a loader, of a shard the state of the whole loader, and of the global generators if asked."
    if isinstance(dl, Shard):
        with dl.order:
            return _capture(dl.source, with_global)
    state = capture_loader_state(dl)
    if not with_global or type(dl) in (list, tuple):
        return state  # nothing is drawn for a list
    # NumPy takes as long to copy its state as a small batch takes
    rng = {'torch': torch.get_rng_state()} if type(dl) is TensorLoader else capture_rng()
    return {'rng': rng, **state}


def _restore(dl: Any, state: State | None) -> list[str]:
    "Restore a state of `_capture`; return the names of generators that the loader lacks."
    if state is None:
        return []
    if isinstance(dl, Shard):
        with dl.order:
            return _restore(dl.source, state)
    if 'rng' in state:
        restore_rng(state['rng'])
    return restore_loader_state(dl, state)


def _restore_own_state(dl: Any, state: State) -> None:
    "Restore a loader's state, and warn of generators that the loader lacks."
    warn_of_missing_generators('training loader', _restore(dl, state))


def warn_of_missing_generators(
    owner: str,  # what had the generators
    paths: list[str],  # result of `restore_own`
) -> None:
    "Warn of generators that a checkpoint has a state for, and that are missing now."
    if paths:
        warn_user(
            f'The {owner} had random generators when the checkpoint was taken that it lacks now: '
            f'{", ".join(paths)}. What they draw will differ from an uninterrupted run. A generator that is made '
            'when it is first used cannot be restored: make it in `__init__`.'
        )


def _without_samplers(state: State) -> State:
    "Drop the state of samplers, which run ahead of the batches and are restored by drawing again."
    kept = {
        name: {path: value for path, value in state[name].items() if not belongs_to_sampler(path)}
        for name in ('own', 'counts')
    }
    return {**state, **kept}


def _without_order(state: State) -> State:
    "Drop the state of the order, which batches of another size, or more ranks, draw further ahead."
    return {**_without_samplers(state), 'loader': None}


@contextmanager
def _preserved(dl: Any) -> Iterator[None]:
    "Restore a loader's state and the global generators at the end of the block."
    state = _capture(dl)
    with preserved_rng(), dl.preserve() if isinstance(dl, Shard) else nullcontext():
        try:
            yield
        finally:
            _restore(dl, state)


def _skip(it: Iterator[Any], n: int) -> None:
    "Draw `n` entries."
    for i in range(n):
        if next(it, _END) is _END:
            raise CheckpointError(
                f'The training loader ended after {i} batches, and the checkpoint was taken after '
                f'{n}: its data have changed. Give the data that it had.'
            )
