# SPDX-License-Identifier: Apache-2.0
"""Position of a training epoch in the data of a `CombinedLoader`: the position of each of its loaders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from typing_extensions import override

from learnkit.core.errors import CheckpointError
from learnkit.core.random import (
    capture_generator,
    preserved_generators,
    preserved_rng,
    restore_generator,
)
from learnkit.data.combined import CombinedLoader, CombinedPass, Part, Place
from learnkit.data.dataloaders import n_batches
from learnkit.data.last_batch import hold_batch
from learnkit.data.position import (
    GLOBAL,
    LoaderPosition,
    State,
    capture_state,
    check_resumable,
    count_ranks,
    describe_drawn,
    has_foreign_state,
    needs_digest,
)

_NOTHING: State = {'own': {}, 'epochs': {}, 'counts': {}}


def make_position(
    dl: Any,  # the training loader
    n_before: int = 0,  # batches drawn in earlier epochs
    first: dict[str, Any] | None = None,  # the loader at the start of the fit; None: as it is
) -> LoaderPosition:
    "Return the position of the start of an epoch."
    kind = CombinedPosition if isinstance(dl, CombinedLoader) else LoaderPosition
    return kind(dl, n_before, first)


def resume_position(
    dl: Any,  # a training loader made like the saved one
    state: Mapping[str, Any],  # return value of `state_dict` of a position
) -> LoaderPosition:
    """Return a position that resumes from a saved state, see `LoaderPosition.resume`.

    >>> import torch
    >>> from learnkit.data import CombinedLoader, TensorLoader
    >>> def make():
    ...     return CombinedLoader([TensorLoader(torch.arange(6), bs=2, shuffle=True, seed=i) for i in range(2)])
    >>> position = make_position(make())
    >>> batches = position.begin()
    >>> first, state = next(batches), position.state_dict(1)
    >>> resumed = resume_position(make(), state).begin()
    >>> str(list(resumed)) == str(list(batches))
    True
    """
    kind = CombinedPosition if isinstance(dl, CombinedLoader) else LoaderPosition
    return kind.resume(dl, state)


class PartNote(NamedTuple):
    "What a draw from one of several loaders changes."

    position: LoaderPosition
    n: int
    is_open: bool
    is_used_up: bool
    last: Any


class PositionedPart(Part):
    "Pass over one of several loaders, with its position."

    def __init__(
        self,
        position: LoaderPosition,  # of the next pass, or of a resumed pass
        number: int | None,  # number of the pass over all loaders, for `set_epoch`
    ) -> None:
        super().__init__(position.dl)
        self.position = position
        self.number = number
        self.last: Any = None  # the last batch of the open pass; None: not needed
        self.closed: LoaderPosition | None = None  # position of the last pass that has ended
        self._n_resumed = 0  # batches of a resumed pass that were drawn before
        self._is_held = needs_digest(position.dl)

    @override
    def make_iterator(self) -> Iterator[Any]:
        if self.position.start is None:
            self.position.number = self.number
        return self.position.begin()

    def resume(self, saved: State) -> None:
        "Continue the pass of a saved part."
        self.is_used_up = saved['is_used_up']
        if saved['is_open']:
            self.n = self._n_resumed = saved['position']['n']
            self.open()

    def leave(self) -> None:
        "Leave an open pass. A loader that has not used the state that it has loaded would begin the next pass there."
        is_unused = self.batches is not None and self.n and self.n == self._n_resumed
        if self.batches is not None and is_unused and has_foreign_state(self.dl):
            with preserved_rng(), preserved_generators(self.dl):
                next(self.batches, None)
        self._n_resumed = 0

    @override
    def draw(self) -> Any:
        if self.batches is not None and not self.n:
            self.position.note_first_draw()
        n = self.n
        batch = super().draw()
        if self._is_held and self.n > n:
            self.last = hold_batch(batch)
        return batch

    @override
    def close(self) -> None:
        self.closed = self.position
        self.position = self.position.next_position(self.n)
        self.last = None
        super().close()

    @override
    def note(self) -> PartNote:
        return PartNote(self.position, self.n, self.batches is not None, self.is_used_up, self.last)

    def describe_lost_state(self) -> list[str]:
        "Return what a checkpoint cannot hold of the last pass."
        if self.batches is None and self.closed is not None:
            return self.closed.describe_lost_state(1)
        return self.position.describe_lost_state(self.n)


class CombinedPosition(LoaderPosition):
    """One epoch's pass over a `CombinedLoader`: the position in each loader, and which loader is next.

    A loader has a position within its data while a pass over it is open, and one between two passes otherwise."""

    dl: CombinedLoader

    def __init__(
        self,
        dl: CombinedLoader,
        n_before: int = 0,  # batches drawn in earlier epochs
        first: dict[str, Any] | None = None,  # the loader at the start of the fit; None: as it is
        positions: list[LoaderPosition] | None = None,  # of the loaders; None: of their first pass
    ):
        super().__init__(dl, n_before, first)
        self._positions = (
            [make_position(part) for part in dl.loaders] if positions is None else positions
        )
        self._drawn: CombinedPass | None = None
        self._parts: list[PositionedPart] = []  # of this pass
        # of a resumed position: the states of the parts, and the number of the loader whose turn it is
        self._saved_parts: list[State] = []
        self._saved_turn = 0

    @property
    def draws(self) -> list[str] | None:  # of the loaders
        "Generators that a batch of a loader is drawn from; None: unknown yet."
        found = [position.draws for position in self._list_positions()]
        if None in found:
            return None
        return sorted({name for names in found for name in names or ()} & {GLOBAL})

    @draws.setter
    def draws(self, names: list[str] | None) -> None:
        "Keep what the loaders have found out."

    # -- saving ------------------------------------------------------------------------------------

    @override
    def state_dict(self, n_drawn: int, last: Any = None, is_ended: bool = False) -> State:
        place = self._find_place()
        return {
            'loader': self.first,
            'drawn': describe_drawn(self.dl),
            'n': n_drawn,
            'n_before': self.n_before,
            'ranks': count_ranks(self.dl),
            'start': self.start,
            'now': self._describe_generator(place),
            'number': self.number,
            'draws': None,
            'before_last': None,
            'digest': None,
            'is_ended': is_ended,
            'workers': 0,
            'workers_ran': False,
            'workers_run': False,
            'turn': place.turn,
            'parts': [_save_part(note) for note in place.parts],
        }

    def _find_place(self) -> Place:
        "Return the place after the last whole batch."
        drawn = self._drawn
        if drawn is None:
            return Place(0, [PartNote(p, 0, False, False, None) for p in self._positions], None)
        return drawn.note() if drawn.place is None else drawn.place

    def _describe_generator(self, place: Place) -> State:
        generator = self.dl.generator
        if generator is None:
            return _NOTHING
        kind, state = capture_generator(generator)
        state = state if place.generator is None else place.generator
        return {**_NOTHING, 'own': {'generator': (kind, state)}}

    def _list_positions(self) -> list[LoaderPosition]:
        return [note.position for note in self._find_place().parts]

    # -- resuming ----------------------------------------------------------------------------------

    @classmethod
    @override
    def resume(cls, dl: Any, state: Mapping[str, Any]) -> CombinedPosition:
        check_parts(dl, state)
        position = cls(dl, state['n_before'])
        position.first = state['loader']
        position.load_state_dict(state)
        return position

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._n_skipped = state['n']
        self.number = state['number']
        self.start = state['start']
        self._saved_parts = [_fit_part(part, self.start is None) for part in state['parts']]
        self._saved_turn = state['turn']
        self._positions = [
            resume_position(dl, part['position'])
            for dl, part in zip(self.dl.loaders, self._saved_parts, strict=True)
        ]
        for position, part in zip(self._positions, self._saved_parts, strict=True):
            position.before_first = part['before_first']
        self._own_state = state['now']
        self._restore_generator()

    def _restore_generator(self) -> None:
        "Restore the generator that draws which loader is next."
        captured = self._own_state.get('own', {}).get('generator')
        if captured is not None and self.dl.generator is not None:
            restore_generator(self.dl.generator, captured)

    # -- passes ------------------------------------------------------------------------------------

    @override
    def next_position(
        self, n_drawn: int, first: dict[str, Any] | None = None, was_left: bool = False
    ) -> CombinedPosition:
        for part in self._parts:
            part.leave()
        positions = [
            note.position.next_position(note.n, was_left=not _is_ended(note))
            if note.is_open
            else note.position
            for note in self._find_place().parts
        ]
        return CombinedPosition(self.dl, self.n_before + n_drawn, first or self.first, positions)

    @override
    def note_first_draw(self) -> None:
        "Do nothing: each loader notes its own first batch."

    @override
    def begin(self) -> Iterator[Any]:
        self._parts = [PositionedPart(position, self.number) for position in self._positions]
        self._drawn = self.dl.make_pass(list(self._parts))
        if self.start is None:
            self.start = capture_state(self.dl, with_global=True)
            self._drawn.begin()
        else:
            self._continue(self._drawn)
        return self._drawn

    def _continue(self, drawn: CombinedPass) -> None:
        "Continue a resumed pass."
        for part, saved in zip(self._parts, self._saved_parts, strict=True):
            part.resume(saved)
        self._restore_generator()
        drawn.resume(self._n_skipped, self._saved_turn)

    @override
    def indices(self, i: int) -> list[Any] | None:
        "Return the indices of the last batch in the data set of its loader; None for batches of all loaders."
        drawn = self._drawn
        if drawn is None or drawn.gives_parts or i != drawn.n - 1:
            return None
        part = self._parts[drawn.turn]
        found: list[Any] | None = part.position.indices(part.n - 1) if part.n else None
        return found

    @override
    def describe_lost_state(self, n_drawn: int) -> list[str]:
        lost = [reason for part in self._parts for reason in part.describe_lost_state()]
        return list(dict.fromkeys(lost))


def check_parts(dl: Any, state: Mapping[str, Any]) -> None:
    "Raise `CheckpointError` if the position of a loader, or of a loader in a `CombinedLoader`, cannot be resumed."
    check_resumable(dl, state)
    if not isinstance(dl, CombinedLoader):
        return
    for name, part, saved in zip(dl.names, dl.loaders, state['parts'], strict=True):
        try:
            check_parts(part, saved['position'])
        except CheckpointError as e:
            raise CheckpointError(f'The loader {name!r} of the CombinedLoader: {e}') from e


def _is_ended(note: PartNote) -> bool:
    "Return True if a pass has no batch left, by the loader's length."
    return note.is_open and note.n == n_batches(note.position.dl)


def _save_part(note: PartNote) -> State:
    "Return the state of one of several loaders."
    position = note.position
    state = {
        'position': position.state_dict(note.n, note.last, _is_ended(note)),
        'before_first': position.before_first,
        'is_open': note.is_open,
        'is_used_up': note.is_used_up,
    }
    # a draw that was interrupted may have opened a pass after this note
    return _fit_part(state, is_between=not note.is_open)


def _fit_part(
    part: State,
    is_between: bool,  # its pass begins again
) -> State:
    "Return the state of a part, or if its pass begins again, the part as it was at the start of the pass."
    start = part['position']['start']
    if not is_between or start is None:
        return part
    position = {**part['position'], 'start': None, 'now': start, 'n': 0}
    return {**part, 'position': position, 'is_open': False}
