# SPDX-License-Identifier: Apache-2.0
"""Position of a training epoch in its data, from which a killed run resumes at the next batch.

A position holds the generator states at the start of the epoch and the number of batches drawn since. How a position
is restored depends on the loader:

- A `TensorLoader`, list or tuple starts at the batch.
- torch's DataLoader without workers skips consumed samples by index. With workers, consumed samples are fetched
  again, because the workers' random generators have to reach their former states.
- A loader with `state_dict` and `load_state_dict` resumes from its own state, unless that state is known to leave out
  the content of a shuffle buffer.
- Any other iterable is iterated from the start of the epoch to the batch. An iterator is iterated from its own
  start.

A loader may start a pass when the first batch is drawn, as its `__iter__` is a generator function. What it draws then,
such as a seed for workers, belongs to the start of the pass. The first batch after a resume from the loader's
state is therefore drawn with the generators as they were at the start of the pass, which are restored afterwards. If
the batches themselves are drawn from these generators, the epoch is iterated from its start instead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from itertools import chain, islice
from typing import Any, Self
from weakref import finalize

import torch
from torch.utils.data import DataLoader, IterableDataset

from learnkit.core.batch import are_equal
from learnkit.core.errors import CheckpointError
from learnkit.core.plain import to_plain
from learnkit.core.random import capture_own, capture_rng, preserved_rng, restore_own, restore_rng
from learnkit.core.validation import warn_user
from learnkit.data.combined import CombinedLoader
from learnkit.data.dataloaders import TensorLoader, batch_size_of, n_batches
from learnkit.data.last_batch import Digest, differs, digest_batch, hold_batch
from learnkit.data.loader_state import (
    capture_loader_state,
    find_out_of_order,
    has_lossy_state,
    restore_loader_state,
    set_epochs,
)
from learnkit.data.shard import Shard, unshard
from learnkit.data.torch_loader import (
    ResumedSampler,
    belongs_to_sampler,
    drop_started_pass,
    forget_workers,
    get_index_sampler,
    iterates_as_torch,
    rebuild_with_sampler,
    start_lists,
    workers_run,
)

State = dict[str, Any]
GLOBAL = 'global'  # name of the global generators in `LoaderPosition.draws`
_FIX_ORDER = (
    'Exact: a fixed order (seeded by attributes of the loader, from threads or workers that keep it), or '
    '`state_dict` and `load_state_dict`.'
)
_FIX_SHARED = (
    'It selects samples by a global random generator, from which the model or other code draws as well. Exact: a '
    'separate generator, in an attribute of the loader or the data set.'
)
_END = object()  # marks the end of a loader, as the default of `next`
_reported: set[int] = set()  # ids of the loaders whose `state_dict` has raised, and was reported


class LoaderPosition:
    """One epoch's pass over a training loader, and the position of the run in the pass.

    `begin` returns the iterator of batches. Between two batches this class works only for a loader that draws its
    batches from the global generators of this process. Before `begin`, the position is between two epochs.

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
        # whether the pass before this one was left before its end: the loader's own state is then of its middle
        self.was_left = False
        # number of the pass, for `set_epoch`; None: it is not called
        self.number: int | None = None
        # generators of this process that a batch after the first is drawn from: paths of own ones, and `GLOBAL`
        self.draws: list[str] | None = None  # None: unknown yet
        # of one loader of a `CombinedLoader`: the generators just before its first batch, which other loaders may have
        # drawn from since `start`
        self.before_first: State | None = None
        # global generators before the last batch, if it is drawn from them
        self._before_last: State | None = None
        # the same while the next batch is being drawn: an exception may end that
        self.before_draw: State | None = None
        # of a resumed position: number of batches to skip, the loader's own state after them, the last batch's digest,
        # and whether no batch is left
        self._n_skipped = 0
        self._own_state = State()
        self._digest: Digest | None = None
        self._is_ended = False
        # whether the last drawn batch is not used yet, and of a resumed position this batch
        self._holds_last = False
        self.last_drawn: Any = None

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
        check_resumable(dl, state)
        position = cls(dl, state['n_before'])
        position.first = state['loader']
        position.load_state_dict(state)
        return position

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        "Take a saved state, which is not checked. A state between epochs is restored at once."
        self._n_skipped = state['n']
        self._holds_last = state.get('holds_last', False)
        self._own_state = state['now']
        self.draws = state['draws']
        self.number = state['number']
        if state['start'] is None:
            self._restore_between_epochs(state['workers_run'])
        else:
            ranks = count_ranks(self.dl)
            if state['ranks'] != ranks:
                self._own_state = _without_order(state['now'])
            else:
                self._digest = state['digest']
            self._before_last = state['before_last']
            self._is_ended = state['is_ended']
            self.start = state['start']
            self.workers = state['workers']
            self._workers_ran = state['workers_ran']

    def next_position(
        self,
        n_drawn: int,  # batches drawn in this epoch
        first: dict[str, Any] | None = None,  # the loader at the start of the fit; None: as here
        was_left: bool = False,  # whether this epoch was left before its end
    ) -> LoaderPosition:
        "Return the position of the start of the epoch after this one."
        following = LoaderPosition(self.dl, self.n_before + n_drawn, first or self.first)
        following.was_left = was_left
        return following

    def note_first_draw(self) -> None:
        "Note the generators just before the first batch of the epoch is drawn."
        self.before_first = capture_state(self.dl, with_global=True)

    def begin(self) -> Iterator[Any]:
        """Return the iterator over the remaining batches of the epoch.

        Raises `CheckpointError` if the epoch ends before the batch of a resumed position."""
        if self.start is not None:
            return self._resume_epoch()
        dl = self.dl
        self._set_epochs()
        self._workers_ran = self.workers > 0 and workers_run(dl)
        drop_started_pass(dl)
        self.start = capture_state(dl, with_global=True)
        if not has_foreign_state(dl) or self.was_left:
            return self._watch(iter(dl), 0)
        with suppress(Exception):  # a checkpoint warns of it
            self.start['loader'] = deepcopy(dl.state_dict())
        return self._watch(self._begin_again_if_empty(iter(dl)), 0)

    def state_dict(
        self,
        n_drawn: int,  # batches of this epoch drawn so far
        last: Any = None,  # the last of them, held by `hold_batch`; None: unknown
        is_ended: bool = False,  # whether no batch of the epoch is left
    ) -> State:
        """Return the position after `n_drawn` batches as tensors and plain values, without the global generators.

        Raises `OptionError` for a loader whose own state would not load safely."""
        now = capture_state(self.dl)
        if self.n_workers and self.start is not None:
            now = _without_samplers(now)
        dl = unshard(self.dl) if self.start is None else self.dl
        name = f'The state of {type(dl).__name__}'
        # between epochs, state_dict of torchdata's StatefulDataLoader would start an epoch
        is_between = self.start is None
        if _has_state(dl) and not (is_between and (self.was_left or _is_stateful_dataloader(dl))):
            state = _loader_state(dl)
            if state is not None:
                now['loader'] = deepcopy(to_plain(state, name))
        start = self.start
        if start is not None and 'loader' in start:
            start = {**start, 'loader': to_plain(start['loader'], name)}
        return {
            'loader': self.first,
            'drawn': describe_drawn(self.dl),
            'n': n_drawn,
            'n_before': self.n_before,
            'ranks': count_ranks(self.dl),
            'start': start,
            'now': now,
            'number': self.number,
            'draws': self.draws,
            'before_last': None if start is None else self._before_last,
            'digest': None if last is None else digest_batch(last),
            'is_ended': is_ended,
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
        if self.start is None or not n_drawn:
            return []
        lost = [
            f'A {kind} with in_order=False returns batches as its workers finish them: some come twice and some not at '
            'all in an epoch that is resumed. Exact: in_order=True.'
            for kind in find_out_of_order(unshard(dl))
        ]
        if iterates_as_torch(dl) and dl.persistent_workers:
            lost.append(
                'The random generators of persistent workers run on from epoch to epoch and cannot be restored: '
                'random samples will differ after a resume. Exact: persistent_workers=False.'
            )
        return lost

    # -- passes --------------------------------------------------------------------------------------

    def _begin_again_if_empty(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return the batches of a pass, or of the next one if it is empty.

        After a state from the end of an epoch is loaded, the first pass of some loaders is the empty rest of that
        epoch."""

        def group() -> Iterator[Any]:
            first = next(batches, _END)
            if first is _END:
                self._restore_start()
                yield iter(self.dl)
            else:
                yield (first,)
                yield batches

        return chain.from_iterable(group())

    def _set_epochs(self) -> None:
        "Call `set_epoch` of the loader and its parts with the number of the pass, if it has one."
        if self.number is not None:
            set_epochs(unshard(self.dl), self.number)

    def _restore_start(self, kept: Iterable[str] = (), is_begun: bool = False) -> None:
        "Restore the generators as at the start of the pass, or, if `is_begun`, its first batch; not the paths `kept`."
        start = (self.before_first if is_begun else None) or self.start or {}
        restore_rng(start.get('rng', {}))
        restore_own(self.dl, {k: v for k, v in start.get('own', {}).items() if k not in kept})

    def _watch(
        self,
        batches: Iterator[Any],
        n_drawn: int,  # batches of this epoch drawn so far
    ) -> Iterator[Any]:
        """Return the batches, and find out once a pass which generators of this process a batch is drawn from.

        The first batch does not show it, as the pass may draw when it starts."""
        if not _may_draw(self.dl):
            self.draws = []
        if self.draws is not None and GLOBAL not in self.draws:
            return batches

        def group() -> Iterator[Any]:
            if not n_drawn:
                yield islice(batches, 1)
            if self.draws is None:
                before = _capture_generators(self.dl)
                self.before_draw = before[GLOBAL]
                batch = next(batches, _END)
                if batch is _END:
                    return
                self.before_draw = None
                now = _capture_generators(self.dl)
                self.draws = [k for k in now if not are_equal(now[k], before.get(k, now[k]))]
                self._before_last = before[GLOBAL] if GLOBAL in self.draws else None
                yield (batch,)
            if GLOBAL not in self.draws:
                yield batches
                return
            while True:
                self.before_draw = capture_rng(devices=False)
                batch = next(batches, _END)
                if batch is _END:
                    return
                self._before_last = self.before_draw
                self.before_draw = None
                yield (batch,)

        return chain.from_iterable(group())

    # -- resuming from a position ------------------------------------------------------------------

    def _restore_between_epochs(self, workers_ran: bool) -> None:
        "Restore a loader's state after an epoch."
        dl = self.dl
        if isinstance(dl, Iterator):
            with preserved_rng():
                _skip(dl, self.n_before)
        if 'loader' in self._own_state:
            loader = unshard(dl)
            loader.load_state_dict(deepcopy(self._own_state['loader']))
            if hasattr(loader, 'restart_on_stop_iteration'):
                with _preserved(dl):
                    next(_iterate_rest(loader), None)
        restore_own_state(dl, self._own_state, self._lacks_state)
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
        self._set_epochs()  # as `begin` did; a state may hold for this epoch only
        if self.n_workers:
            forget_workers(dl)  # of an interrupted pass of this process
        try:
            if isinstance(dl, Iterator):
                self._draw_again(dl, self.n_before + n)
                return self._watch(dl, n)
            if _has_index_lists(dl):
                return self._resume_by_index(n)
            if _is_tensor_loader(dl):
                _restore(dl, self.start)
                batches = dl.from_batch(n)
            elif self._has_whole_state() and not self._must_replay():
                return self._resume_by_state(n)
            else:
                return self._replay(n)
            restore_own_state(dl, self._own_state)
            return batches
        finally:
            restore_rng(current)

    def _has_whole_state(self) -> bool:
        is_whole = self._own_state.get('loader') is not None and not has_lossy_state(self.dl)
        return is_whole and not self._holds_last  # a batch that is not used is drawn again

    def _resume_by_state(self, n: int) -> Iterator[Any]:
        "Return the batches that remain after the loader's own state is loaded."
        dl = self.dl
        is_foreign = has_foreign_state(dl)
        # if a batch is drawn from global generators, what its pass draws when it starts cannot be told apart
        can_start_apart = self.draws is not None and GLOBAL not in self.draws
        has_start = self.start is not None and 'loader' in self.start
        if is_foreign and has_start and not can_start_apart and not self._is_ended:
            return self._replay(n)
        _restore(dl, self.start)  # the loader may draw its order again
        self._set_epochs()  # a state may hold for this epoch only
        dl.load_state_dict(deepcopy(self._own_state['loader']))
        if is_foreign and self._is_ended:
            # the loader might begin the next epoch
            restore_own_state(dl, self._own_state, is_loaded=True)
            return iter(())
        batches = _iterate_rest(dl)
        restore_own_state(dl, self._own_state, is_loaded=True)
        if is_foreign and can_start_apart:
            batches = self._start_apart(batches)
        return self._watch(batches, n)

    def _start_apart(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return the batches, the first of which starts the pass with the generators as they were at its start.

        Own generators that each batch is drawn from keep their state."""

        def group() -> Iterator[Any]:
            own = capture_own(self.dl)
            with preserved_rng():
                self._restore_start(kept=self.draws or (), is_begun=True)
                first = next(batches, _END)
            restore_own(self.dl, {k: v for k, v in own.items() if k not in (self.draws or ())})
            if first is not _END:
                yield (first,)
                yield batches

        return chain.from_iterable(group())

    def _resume_by_index(self, n: int) -> Iterator[Any]:
        dl = self.dl
        if self._must_replay() and not self._workers_ran:
            return self._replay(n)
        lists = self._restart_index_lists()
        _skip(lists, n)
        restore_own_state(dl, self._own_state)
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
        else:
            lists = start_lists(dl, self.workers, self._workers_ran)
        if not self.workers:  # which fetch the first batches when the pass begins
            _restore(dl, self.before_first)
        return lists

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
        drop_started_pass(dl)
        _restore(dl, self.start, self._lacks_state)
        if self.start is not None and 'loader' in self.start:
            dl.load_state_dict(deepcopy(self.start['loader']))
        batches = iter(dl)
        if has_foreign_state(dl):
            batches = self._begin_again_if_empty(batches)
        if not self.workers:
            _restore(dl, self.before_first)
        self._draw_again(batches, n)
        restore_own_state(dl, self._own_state, self._lacks_state)
        return self._watch(batches, n)

    def _draw_again(self, batches: Iterator[Any], n: int) -> None:
        """Draw the consumed batches, and warn if the last one differs from the batch that was trained on.

        Raises `CheckpointError` if there are fewer."""
        batch = None
        after_first: State | None = None
        for i in range(n):
            if i == n - 1 and self._before_last is not None:
                restore_rng(self._before_last)
            batch = next(batches, _END)
            rng = capture_rng(devices=False) if batch is _END or i in (0, n - 1) else None
            after_first = after_first or rng
            if batch is _END:
                is_shared = self._draws_global or not are_equal(after_first, rng)
                raise _error_of_early_end(i, n, is_shared)
        self.last_drawn = batch if self._holds_last else None
        if n and self._digest is not None:
            is_shared = self._draws_global or not are_equal(after_first, rng)
            self._compare(digest_batch(hold_batch(batch)), is_shared)

    def _compare(
        self,
        again: Digest,  # digest of the last consumed batch
        is_shared: bool,  # whether batches are drawn from a global generator
    ) -> None:
        "Warn if the last consumed batch differs from the saved one."
        own = capture_own(unshard(self.dl))
        may_vary = is_shared or any(
            not are_equal(own.get(path), state)
            for path, state in self._own_state.get('own', {}).items()
            if not belongs_to_sampler(path)
        )
        if not differs(self._digest or {}, again, everywhere=may_vary):
            return
        warn_user(
            f'The training loader ({_name(self.dl)}) returns other batches when it repeats the epoch: batch '
            f'{self._n_skipped - 1} differs from the one before the checkpoint. The rest of the epoch may have other '
            f'samples than in an uninterrupted run. {_FIX_SHARED if is_shared else _FIX_ORDER}'
        )

    @property
    def _lacks_state(self) -> bool:
        "True if the checkpoint has no state of the loader's own, whose numbers are restored then."
        return not _is_of_torchdata(self.dl) and self._own_state.get('loader') is None

    @property
    def _draws_global(self) -> bool:
        return self.draws is not None and GLOBAL in self.draws


# -- kinds of loaders ------------------------------------------------------------------------------


def _is_tensor_loader(dl: Any) -> bool:
    return isinstance(dl, TensorLoader) and type(dl).__iter__ is TensorLoader.__iter__


def _has_index_lists(dl: Any) -> bool:
    "Return True for torch's DataLoader, or a shard of one, whose sampler can be restarted."
    is_torch = type(dl) is DataLoader or (isinstance(dl, Shard) and isinstance(dl, DataLoader))
    if not is_torch or isinstance(dl.dataset, IterableDataset):
        return False
    return not isinstance(get_index_sampler(dl), Iterator)


def lists_indices(dl: Any) -> bool:
    "Return True for a loader of which a position can list the samples of each batch."
    return _is_tensor_loader(dl) or _has_index_lists(dl)


def _has_state(dl: Any) -> bool:
    "Return True for a loader whose own state a checkpoint holds; accelerate's wrappers hold a part of it only."
    if dl.__class__ is not type(dl):
        return False
    return all(
        callable(getattr(type(dl), name, None)) for name in ('state_dict', 'load_state_dict')
    )


def _is_of_torchdata(dl: Any) -> bool:
    return any(kind.__module__.partition('.')[0] == 'torchdata' for kind in type(dl).__mro__)


def _is_stateful_dataloader(dl: Any) -> bool:
    return _is_of_torchdata(dl) and isinstance(dl, DataLoader)


def has_foreign_state(dl: Any) -> bool:
    "Return True for a loader whose state at the end of an epoch may mean that end, or the start of the next epoch."
    return _has_state(dl) and not _is_of_torchdata(dl)


def _may_draw(dl: Any) -> bool:
    "Return True if this process may draw random numbers for a batch, in an order that is not drawn as indices."
    if type(dl) in (list, tuple) or _is_tensor_loader(dl) or _is_of_torchdata(dl):
        return False
    return not (_has_index_lists(dl) or (iterates_as_torch(dl) and dl.num_workers))


def needs_digest(dl: Any) -> bool:
    "Return True for a loader whose batches are drawn again by a resume."
    if type(dl) in (list, tuple) or _is_tensor_loader(dl) or isinstance(dl, CombinedLoader):
        return False  # the position of a CombinedLoader holds the batches of its loaders
    return bool(getattr(dl, 'num_workers', 0)) or not _has_index_lists(dl)


def _loader_state(dl: Any) -> Any:
    "Return `dl.state_dict()`, or None if it raises, as accelerate's loaders may; warn once for each loader."
    try:
        return dl.state_dict()
    except Exception as e:
        if id(dl) not in _reported:
            _reported.add(id(dl))
            with suppress(TypeError):  # an object of a class with `__slots__`
                finalize(dl, _reported.discard, id(dl))  # a newer object may get the id
            warn_user(
                f'{type(dl).__name__}.state_dict() raised {type(e).__name__}: {e}. A resumed run draws the batches '
                "from the epoch's start again, which is exact only if they come in the same order."
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


def _name(dl: Any) -> str:
    "Return the types of a loader and of its data set."
    dl = unshard(dl)
    dataset = getattr(dl, 'dataset', None)
    name = type(dl).__name__
    return name if dataset is None else f'{name} of {type(dataset).__name__}'


def count_ranks(dl: Any) -> int:
    "Return the number of ranks that a loader is divided among."
    return dl.spec.size if isinstance(dl, Shard) else 1


def describe_drawn(dl: Any) -> dict[str, Any]:
    "Return the type and sizes that must match for a position to be restored; of a shard, the sizes over all ranks."
    batches = n_batches(dl)
    per_batch = dl.spec.per_round if isinstance(dl, Shard) else 1
    dl = unshard(dl)
    bs = batch_size_of(dl)
    dataset = getattr(dl, '__dict__', {}).get('dataset')
    samples = dl.n if _is_tensor_loader(dl) else n_batches(dataset)
    combined = {'mode': dl.mode, 'loaders': str(dl.names)} if isinstance(dl, CombinedLoader) else {}
    return {
        **combined,
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
    saved = state['drawn']
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
            'digest': None,
            'before_last': None,
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
    return surplus == 0 or (surplus < max(old, new) and not getattr(unshard(dl), 'drop_last', 0))


def check_resumable(dl: Any, state: Mapping[str, Any]) -> None:
    "Raise `CheckpointError` if a saved position cannot be resumed with a loader."
    if state['start'] is None:
        check_position(dl, state)
    else:
        _check_drawn(dl, state)


def _check_drawn(dl: Any, state: Mapping[str, Any]) -> None:
    "Raise `CheckpointError` if a loader is not as the position's was in its epoch."
    with _preserved(dl):
        # the length of a loader may depend on the epoch
        start = {name: state['start'].get(name, {}) for name in ('epochs', 'counts')}
        restore_loader_state(unshard(dl), start)
        _compare(state['drawn'], describe_drawn(dl))


def _compare(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    differences = [
        f'{name} {saved.get(name)}, now {value}'
        for name, value in now.items()
        if saved.get(name) != value and not (name == 'batches' and None in (saved.get(name), value))
    ]
    if differences:
        raise CheckpointError(
            'The training loader is not as it was when the checkpoint was taken: '
            f'{"; ".join(differences)}. Use the data and the batch size that the checkpoint was written with, the same '
            'number of samples per step over all processes, or begin a new fit with its weights.'
        )


# -- generators ------------------------------------------------------------------------------------


def capture_state(dl: Any, with_global: bool = False) -> State:
    "Return the state of a loader, of a shard the state of the whole loader, and of the global generators if asked."
    if isinstance(dl, Shard):
        with dl.order:
            return capture_state(dl.source, with_global)
    state = capture_loader_state(dl)
    if not with_global or type(dl) in (list, tuple):
        return state  # nothing is drawn for a list
    # NumPy takes as long to copy its state as a small batch takes
    rng = {'torch': torch.get_rng_state()} if type(dl) is TensorLoader else capture_rng()
    return {'rng': rng, **state}


def _capture_generators(dl: Any) -> State:
    "Return the states of the global generators and of a loader's own ones, by name."
    return {GLOBAL: capture_rng(devices=False), **capture_own(unshard(dl))}


def _restore(
    dl: Any, state: State | None, with_loader: bool = False, is_loaded: bool = False
) -> list[str]:
    "Restore a state of `capture_state`, as `restore_loader_state`; return the names of generators that are missing."
    if state is None:
        return []
    if isinstance(dl, Shard):
        with dl.order:
            return _restore(dl.source, state)
    if 'rng' in state:
        restore_rng(state['rng'])
    return restore_loader_state(dl, state, with_loader, is_loaded)


def restore_own_state(
    dl: Any, state: State, with_loader: bool = False, is_loaded: bool = False
) -> None:
    "Restore a loader's state, and warn of generators that the loader lacks."
    missing = _restore(dl, state, with_loader, is_loaded)
    warn_of_missing_generators('training loader', missing)


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
    state = capture_state(dl)
    with preserved_rng(), dl.preserve() if isinstance(dl, Shard) else nullcontext():
        try:
            yield
        finally:
            _restore(dl, state)


def _skip(it: Iterator[Any], n: int) -> None:
    "Draw `n` entries."
    for i in range(n):
        if next(it, _END) is _END:
            raise _error_of_early_end(i, n)


def _error_of_early_end(n_drawn: int, n: int, is_shared: bool = False) -> CheckpointError:
    "Return the error for an epoch that has fewer batches when it is repeated."
    reason = (
        f'it returns other batches when it repeats the epoch. {_FIX_SHARED}'
        if is_shared
        else 'its data changed, or it returns other batches when it repeats the epoch. Use the data that '
        'the checkpoint was written with.'
    )
    return CheckpointError(
        f'The training loader ended after {n_drawn} batches, and the checkpoint was taken after {n}: {reason}'
    )
