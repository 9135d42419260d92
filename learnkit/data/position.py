"""Where in its data a training epoch is, so that a killed run goes on from that very batch.

A position says how the epoch began (the states of all generators) and how many of its batches were handed out. How a
run gets there again depends on the loader:

- a `TensorLoader`, a list or a tuple starts at that batch;
- of torch's DataLoader, consumed samples are skipped by index. Only where worker processes draw random numbers as they
  fetch samples are these fetched again, so that the workers' generators get to where they were;
- a loader with `state_dict` and `load_state_dict` goes on from its own state;
- any other iterable is iterated from the epoch's start up to that batch, an iterator from its own start.

With `n_iter` a pass over a loader without a length lasts longer than an epoch: `Stream`. Its position is the same, and
says how the pass began."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, islice
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from learnkit.core.errors import CheckpointError
from learnkit.core.random import (
    capture_own,
    capture_rng,
    preserved_rng,
    restore_own,
    restore_rng,
    same_states,
)
from learnkit.core.validation import warn_user
from learnkit.data.dataloaders import TensorLoader, n_batches
from learnkit.data.shard import Shard
from learnkit.data.torch_loader import (
    Rest,
    epochs_of,
    fetching_is_random,
    index_sampler,
    is_samplers,
    set_epochs,
    start_lists,
    with_sampler,
    workers_run,
)

__all__ = ['LoaderPosition', 'Stream', 'check_position', 'describe_drawn']

State = dict[str, Any]
_ARRAY = '__array__'  # the key of a tensor that stands for an array
_END = object()  # what `next` gives when a loader is through


class LoaderPosition:
    """One epoch's pass over a training loader, and where in it the run is.

    `begin` gives the iterator to draw from; nothing of this class runs between two batches. A drawing that has not
    begun stands between two epochs, and has a position as well.

    >>> import torch
    >>> loader = TensorLoader(torch.arange(6), bs=2, shuffle=True, seed=0)
    >>> drawing = LoaderPosition(loader)
    >>> first, *others = drawing.begin()
    >>> position = drawing.state_dict(1)
    >>> anew = TensorLoader(torch.arange(6), bs=2, shuffle=True, seed=0)
    >>> [x.tolist() for x, in LoaderPosition.resume(anew, position).begin()] == [x.tolist() for x, in others]
    True
    """

    def __new__(cls, dl: Any, *_: Any, **__: Any) -> Self:
        return super().__new__((dl.drawing if isinstance(dl, Shard) else None) or cls)

    def __init__(
        self,
        dl: Any,  # the training loader
        replay: bool | None = None,  # on resume, fetch consumed samples again; None: where needed
        n_before: int = 0,  # batches that earlier epochs drew from it, which matters of an iterator
    ):
        self.dl, self.replay, self.n_before = dl, replay, n_before
        self.start: State | None = (
            None  # every generator just before `iter(dl)`; None before `begin`
        )
        self.first: State | None = (
            None  # the global ones just before the first batch, where the order is drawn then
        )
        self.workers = _n_workers(dl)
        self._workers_ran = False  # persistent workers were running when the epoch began
        # when resumed: the batches to skip, and the loader's own state after them
        self._n, self._now = 0, State()

    @classmethod
    def resume(
        cls,
        dl: Any,  # the training loader, made in the same way
        state: Mapping[str, Any],  # from `state_dict`
        replay: bool | None = None,  # fetch consumed samples again; None: where it is needed
    ) -> Self:
        """Return a drawing that goes on from a position.

        In the middle of an epoch, `begin` then gives the batch that was next and leaves all global generators as they
        were before it. A position between epochs is put in place at once, and `begin` starts an epoch. Raises
        `CheckpointError`, with nothing changed, for a loader of another kind, length or batch size.
        """
        check_position(dl, state)
        drawing = cls(dl, replay, state['n_before'])
        drawing._n, drawing._now = state['n'], state['now']
        if state['start'] is None:
            drawing._stand_between_epochs(state['workers_run'])
        else:
            drawing.start, drawing.first = state['start'], state['first']
            drawing.workers, drawing._workers_ran = state['workers'], state['workers_ran']
        return drawing

    def begin(self) -> Iterator[Any]:
        """Return the iterator over the batches that come next.

        Raises `CheckpointError` when the epoch ends before it gets to a position's batch."""
        if self.start is not None:
            batches = self._go_on()
        else:
            self._workers_ran = workers_run(self.dl)
            self.start = _generators(self.dl)
            batches = iter(self.dl)
        late = self.first is None and not self._n and _starts_late(self.dl)
        return chain(self._note_first(), batches) if late else batches

    def _note_first(self) -> Iterator[Any]:
        "Note the global generators when the first batch is drawn; there is nothing to yield."
        self.first = capture_rng()
        yield from ()

    def state_dict(
        self,
        n_drawn: int,  # batches of this epoch that were handed out
    ) -> State:
        """Return the position after `n_drawn` batches, as tensors and plain values; the global generators are apart.

        Raises `CheckpointError` for a loader whose own state would not load safely."""
        now = _own_state(self.dl)
        if _n_workers(self.dl) and self.start is not None:
            now['own'] = _of_samples(now['own'])
        # torchdata's loader would start an epoch to tell its state before one
        if _has_state(self.dl) and (self.start is not None or not isinstance(self.dl, DataLoader)):
            if (state := _state_of(self.dl)) is not None:
                now['loader'] = _with_arrays_marked(state, f'The state of {type(self.dl).__name__}')
        return {
            'loader': describe_drawn(self.dl),
            'n': n_drawn,
            'n_before': self.n_before,
            'start': self.start,
            'first': self.first,
            'now': now,
            'workers': self.workers,
            'workers_ran': self._workers_ran,
            'workers_run': workers_run(self.dl),
            'processes': self.dl.cut.size if isinstance(self.dl, Shard) else 1,
        }

    def indices(
        self,
        i: int,  # a batch of this epoch
    ) -> list[Any] | None:
        """Return the data set's indices of batch `i`, worked out again without disturbing any generator.

        None where they cannot be known: of other loaders than torch's and `TensorLoader`, and before `begin`.

        >>> drawing = LoaderPosition(DataLoader(range(5), batch_size=2))
        >>> batches = drawing.begin()
        >>> drawing.indices(1)
        [2, 3]
        """
        if self.start is None or not getattr(self.dl, 'in_order', True):
            return None
        with preserved_rng(), _preserved_own(self.dl):
            if _by_index(self.dl):
                found = next(islice(self._index_lists(), i, None), None)
            elif _serves_tensors(self.dl) and i < len(self.dl):
                _restore(self.dl, self.start)
                found = self.dl.draw_indices(i)
            else:
                return None
        return None if found is None else list(found) if isinstance(found, Iterable) else [found]

    # -- going on from a position ------------------------------------------------------------------

    def _stand_between_epochs(self, ran: bool) -> None:
        "Put a loader where it was after an epoch."
        dl = self.dl
        if isinstance(dl, Iterator):
            with preserved_rng():
                _skip(dl, self.n_before)
        if 'loader' in self._now:
            dl.load_state_dict(_with_arrays(self._now['loader']))
        _put(dl, self._now)
        if not ran or workers_run(dl):
            return
        with preserved_rng(), _preserved_own(dl):
            some = list(islice(index_sampler(dl), 1)) if _by_index(dl) else []
        if some and fetching_is_random(_whole(dl), some):
            _warn_of_persistent_workers()
        # their start draws a seed, which the epochs after the first do without
        with preserved_rng(), _preserved_own(dl):
            iter(dl)

    def _go_on(self) -> Iterator[Any]:
        "Return the iterator over what is left of the epoch, and leave the global generators as they are."
        dl, n, current = self.dl, self._n, capture_rng()
        if type(dl) in (list, tuple):
            return islice(dl, n, None)
        if getattr(dl, 'persistent_workers', False):
            dl._iterator = None  # of a pass that this process broke off
        try:
            if isinstance(dl, Iterator):
                return _skip(dl, self.n_before + n)[0]
            if _serves_tensors(dl):
                _restore(dl, self.start)
                batches = dl.from_batch(n)
                _put(dl, self._now)
                return batches
            if _by_index(dl):
                return self._go_on_by_index(n, current)
            if 'loader' in self._now and not self._state_needs_replay():
                return self._go_on_from_state()
            return self._replay(n, current)
        finally:
            restore_rng(current)

    def _go_on_by_index(self, n: int, current: State) -> Iterator[Any]:
        dl = self.dl
        if not dl.in_order and dl.num_workers:
            warn_user(
                'A DataLoader with in_order=False gives batches as its workers finish them, so those that were not yet '
                'trained on cannot be told: some will come twice and some not at all in this epoch. '
                'Exact: in_order=True.'
            )
        lists = self._index_lists()
        _, began, some = _skip(lists, n)
        if self._must_replay(some):
            return self._replay(n, current)

        _put(dl, self._now)
        rest = Rest(lists, index_sampler(dl))
        batches = iter(with_sampler(dl, rest))
        rest.lists = None
        if dl.num_workers and not isinstance(dl, Shard):
            _warn_of_other_draws('sampler', began, current)
        if dl.persistent_workers:
            dl._iterator = batches  # which serve the epochs that follow
        return batches

    def _index_lists(self) -> Iterator[Any]:
        "Start the epoch's sampler as torch did, with every generator as it was then."
        dl, first = self.dl, None if self.workers else self.first
        _restore(dl, self.start)
        if isinstance(dl, Shard):
            return self.dl.batch_lists(self.workers, self._workers_ran, first)
        lists = start_lists(dl, self.workers, self._workers_ran)
        if first is not None:
            restore_rng(first)
        return lists

    def _must_replay(self, some: list[Any]) -> bool:
        "Tell whether consumed samples have to be fetched again, by the indices of some of them."
        dl = self.dl
        if self.replay is not None:
            return self.replay
        if not some:
            return not self._workers_ran
        if not (self.workers or _n_workers(dl)) or not fetching_is_random(_whole(dl), some):
            return False
        if self.workers != _n_workers(dl):
            warn_user(
                f'The checkpoint was taken with num_workers={self.workers}, now it is {_n_workers(dl)}. Samples are '
                'fetched with random numbers, which each worker draws for itself: they will differ from an '
                'uninterrupted run.'
            )
        elif self._workers_ran:
            _warn_of_persistent_workers()
        else:
            return True
        return False

    def _replay(self, n: int, current: State) -> Iterator[Any]:
        "Iterate from the epoch's start, and throw the consumed batches away."
        dl = self.dl
        _restore(dl, self.start)
        batches = iter(dl)
        if self.first is not None:
            restore_rng(self.first)
        batches, began, _ = _skip(batches, n)
        if isinstance(getattr(dl, 'dataset', None), IterableDataset):
            _warn_of_other_draws('data set', began, current)
        _put(dl, self._now)
        return batches

    def _state_needs_replay(self) -> bool:
        "Tell whether a loader's own state is not enough: no such state holds the generators of its workers."
        dl = self.dl
        if self.replay is not None:
            return self.replay
        if (
            not self.workers
            or not isinstance(dl, DataLoader)
            or isinstance(dl.dataset, IterableDataset)
        ):
            return False
        with _preserved_own(dl):
            return self._must_replay(list(islice(index_sampler(dl), 4)))

    def _go_on_from_state(self) -> Iterator[Any]:
        self.dl.load_state_dict(_with_arrays(self._now['loader']))
        batches = iter(self.dl)
        _put(self.dl, self._now)
        return batches


class Stream(Iterator[Any]):
    """Give the batches of a loader without a length, from one epoch to the next: a pass goes on until the loader ends.

    A pass that has ended is followed by the next one. The position is the pass's, and counts all its batches.

    >>> stream = Stream([1, 2, 3])
    >>> [next(stream) for _ in range(7)], stream.n
    ([1, 2, 3, 1, 2, 3, 1], 1)
    """

    def __init__(
        self,
        dl: Any,  # the training loader
        begin: Callable[[Any], Iterator[Any]] | None = None,  # f(LoaderPosition) begins a pass
        drawing: LoaderPosition | None = None,  # the first pass, when resumed
        n: int = 0,  # batches that were drawn of that
    ):
        self.dl, self.begin, self.n = dl, begin or LoaderPosition.begin, n
        self.drawing = LoaderPosition(dl) if drawing is None else drawing
        self._batches: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if (batch := self._draw()) is _END and self.n:
            self._restart()
            batch = self._draw()
        if batch is _END:
            self._restart()
            raise StopIteration
        self.n += 1
        return batch

    def _draw(self) -> Any:
        if self._batches is None:
            self._batches = self.begin(self.drawing)
        return next(self._batches, _END)

    def _restart(self) -> None:
        self.drawing, self.n, self._batches = LoaderPosition(self.dl), 0, None


# What a loader is


def _n_workers(dl: Any) -> int:
    n = getattr(dl, 'num_workers', 0)
    return n if isinstance(n, int) else 0


def _serves_tensors(dl: Any) -> bool:
    return isinstance(dl, TensorLoader) and type(dl).__iter__ is TensorLoader.__iter__


def _by_index(dl: Any) -> bool:
    torchs = type(dl) is DataLoader or (isinstance(dl, Shard) and isinstance(dl, DataLoader))
    if not torchs or isinstance(dl.dataset, IterableDataset):
        return False
    return not isinstance(index_sampler(dl), Iterator)


def _has_state(dl: Any) -> bool:
    return all(
        callable(getattr(type(dl), name, None)) for name in ('state_dict', 'load_state_dict')
    )


def _state_of(dl: Any) -> Any:
    """Return a loader's own state, None with a warning where it has the method but cannot give one.

    accelerate's loaders have it, and raise where the loader inside them has none.
    """
    try:
        return dl.state_dict()
    except Exception as e:
        warn_user(
            f'{type(dl).__name__}.state_dict() raised {type(e).__name__}: {e}. The position of the '
            'training loader is saved without that state: a resumed run draws its batches from the '
            "epoch's start again, which is exact only where they come in the same order again."
        )
        return None


def _starts_late(dl: Any) -> bool:
    "Tell whether a loader may draw random numbers for the epoch's order with its first batch."
    if type(dl) in (list, tuple) or isinstance(dl, Iterator) or _serves_tensors(dl):
        return False
    return not (_by_index(dl) and (dl.num_workers or isinstance(dl, Shard)))


def _whole(dl: Any) -> Any:
    return dl.whole if isinstance(dl, Shard) else dl


def _order_of(dl: Any) -> AbstractContextManager[Any]:
    return dl.order if isinstance(dl, Shard) else nullcontext()


def describe_drawn(dl: Any) -> dict[str, Any]:
    "Return what has to be the same for a position to hold: of a share, that of all processes together."
    batches, per_batch = n_batches(dl), dl.cut.per_round if isinstance(dl, Shard) else 1
    dl = _whole(dl)
    samples = getattr(dl, '__dict__', {}).get('dataset')
    bs = getattr(dl, 'bs', getattr(dl, 'batch_size', None))
    return {
        'type': type(dl).__name__,
        'batches': batches,
        'batch size': bs * per_batch if isinstance(bs, int) else None,
        'samples': dl.n if _serves_tensors(dl) else None if samples is None else n_batches(samples),
    }


_ENTRIES: dict[str, Any] = {
    'loader': dict,
    'n': int,
    'n_before': int,
    'start': (dict, type(None)),
    'first': (dict, type(None)),
    'now': dict,
    'workers': int,
    'workers_ran': bool,
    'workers_run': bool,
}


def check_position(dl: Any, state: Mapping[str, Any]) -> None:
    "Raise `CheckpointError` for what is no position, or one of another loader."
    if not isinstance(state, Mapping) or any(
        not isinstance(state.get(k), kind) for k, kind in _ENTRIES.items()
    ):
        raise CheckpointError(
            'The checkpoint has no position in its data that this version understands.'
        )
    with _preserved_own(dl):
        # a loader's length may be another in each epoch
        set_epochs(_whole(dl), state['now'].get('epochs', {}))
        was, now = state['loader'], describe_drawn(dl)
    before, here = state.get('processes', 1), dl.cut.size if isinstance(dl, Shard) else 1
    differ = [
        f'{name} {_of_all(name, was.get(name), before)}, now {_of_all(name, now[name], here)}'
        for name in now
        if was.get(name) != now[name]
    ]
    if differ:
        raise CheckpointError(
            'The training loader is not as it was when the checkpoint was taken: '
            f'{"; ".join(differ)}. Give the data and the loader that it had, or begin a new fit with '
            'its weights.'
        )
    if now['batches'] is not None and not 0 <= state['n'] <= now['batches']:
        raise CheckpointError(
            f'The checkpoint was taken after {state["n"]} batches of an epoch that has '
            f'{now["batches"]}.'
        )


def _of_all(name: str, value: Any, processes: int) -> str:
    return (
        f'{value} (of all {processes} processes)'
        if name == 'batch size' and processes > 1
        else str(value)
    )


# Generators


def _own_state(dl: Any) -> State:
    with _order_of(dl):
        return {'own': capture_own(_whole(dl)), 'epochs': epochs_of(_whole(dl))}


def _generators(dl: Any) -> State:
    with _order_of(dl):
        return {'rng': capture_rng(), **_own_state(dl)}


def _restore(dl: Any, state: State | None) -> list[str]:
    "Put every generator to a state of `_generators`; return the names of those that the loader does not have."
    if state is None:
        return []
    with _order_of(dl):
        if 'rng' in state:
            restore_rng(state['rng'])
        set_epochs(_whole(dl), state['epochs'])
        return restore_own(_whole(dl), state['own'])


def _put(dl: Any, state: State) -> None:
    "Put a loader's own generators to a position's."
    if missing := _restore(dl, state):
        warn_user(
            f'The training loader had random generators when the checkpoint was taken that it lacks now: '
            f'{", ".join(missing)}. What they draw will differ from an uninterrupted run. One that is made when it is '
            'first used cannot be put back: make it in `__init__`.'
        )


def _of_samples(own: State) -> State:
    "Leave out a sampler's generators: one that is ahead of its workers gets there again by drawing."
    return {name: state for name, state in own.items() if not is_samplers(name)}


@contextmanager
def _preserved_own(dl: Any) -> Iterator[None]:
    state = _own_state(dl)
    with dl.kept() if isinstance(dl, Shard) else nullcontext():
        try:
            yield
        finally:
            _restore(dl, state)


def _warn_of_other_draws(who: str, began: State | None, current: State) -> None:
    "Warn where a sampler or data set went on drawing from a global generator that others drew from as well."
    if began is None:
        return
    ended = capture_rng()
    moved = [k for k in began if k in current and not same_states(began[k], ended[k])]
    shared = [k for k in moved if not same_states(ended[k], current[k])]
    if shared:
        warn_user(
            f'The {who} of the training loader goes on drawing from the global generator of '
            f'{" and ".join(shared)}, and so does other code: what comes next may differ from an '
            'uninterrupted run. Give it a generator of its own.'
        )


def _warn_of_persistent_workers() -> None:
    warn_user(
        'Samples are fetched with random numbers by persistent workers, whose generators run on from epoch to '
        'epoch and cannot be put back: the numbers will differ from an uninterrupted run. Exact: '
        'persistent_workers=False.'
    )


# Skipping


def _skip(it: Iterator[Any], n: int) -> tuple[Iterator[Any], State | None, list[Any]]:
    "Draw `n` entries; return the iterator, the global generators after the first, and up to four of those drawn."
    began, some, step = None, [], -(-n // 4)
    for i in range(n):
        if (entry := next(it, _END)) is _END:
            raise CheckpointError(
                f'The training loader ended after {i} batches, and the checkpoint was taken after '
                f'{n}: its data have changed. Give the data that it had.'
            )
        if i == 0:
            began = capture_rng()
        if i % step == 0:
            some.append(entry)
    return it, began, some


# The state of a loader


def _with_arrays_marked(value: Any, where: str) -> Any:
    "Return a copy of a loader's state with arrays as marked tensors. Raises `CheckpointError` for other objects."
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return value
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray) and value.dtype.kind in 'biufc':
        return {_ARRAY: torch.from_numpy(value.copy())}
    if isinstance(value, Mapping):
        return {k: _with_arrays_marked(v, f'{where}[{k!r}]') for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        entries = [_with_arrays_marked(v, f'{where}[{i}]') for i, v in enumerate(value)]
        return entries if isinstance(value, list) else tuple(entries)
    raise CheckpointError(
        f'{where} is a {type(value).__name__}, which would not load safely. Let the loader, its '
        'sampler and its data set keep tensors, arrays, numbers, strings, and lists, tuples or '
        'dicts of them.'
    )


def _with_arrays(value: Any) -> Any:
    "Return what `_with_arrays_marked` was given."
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        if _ARRAY in value:
            return value[_ARRAY].numpy().copy()
        return {k: _with_arrays(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_with_arrays, value))
    return value
