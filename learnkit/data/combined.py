# SPDX-License-Identifier: Apache-2.0
"""`CombinedLoader`: several loaders as one, at once or in turn, in the modes of Lightning's class of that name.

A pass over the loaders is a `CombinedPass`, which draws the batches of each loader from a `Part`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from learnkit.core.batch import rebuild
from learnkit.core.errors import EmptyLoaderError, LoaderError
from learnkit.core.hints import check_keywords
from learnkit.core.validation import check_count
from learnkit.data.dataloaders import check_loader, make_generator, make_unshuffled, n_batches

_END = object()  # marks the end of a loader, as the default of `next`


class CombinedLoader:
    """Loader of several loaders: multi-task training, distillation, replay of old data.

    | mode | a pass |
    |---|---|
    | `'min_size'` | a batch of every loader at once, until the shortest loader ends |
    | `'max_size'` | the same until the longest loader ends; None in place of a loader that has ended |
    | `'max_size_cycle'` | the same, and a loader that has ended starts again |
    | `'sequential'` | all batches of the first loader, then all of the second loader, ... |
    | `'weighted'` | batches of one loader at a time, drawn with `weights`; a loader that has ended starts again |

    In the first three modes a batch is a dict or a list like `loaders`, with the batch of each loader. The Learner
    splits each of them into inputs and targets. With a dict, the model is called with a dict of inputs, or by keyword,
    and the loss function with the predictions and a dict of targets. With a list, the model gets an input of each
    loader, and the loss function the predictions and a target of each. Samples are counted in the first loader.

    In the last two modes a batch is that of its loader, whose name is `batch_source`: the key in a dict, or the
    position in a list. Callbacks read it as `learn.batch_source`.

    A weighted pass has as many batches as all loaders together, or `n_batches`; it is endless if a loader has no
    length. A `generator` draws which loader is next.

    Checkpoints hold the position of each loader. In several processes each loader is sharded. Raises
    `LoaderError` for an unknown mode, for anything but loaders, and for options of another mode.

    >>> photos, drawings = [1, 2, 3], [10, 20]
    >>> list(CombinedLoader({'photo': photos, 'drawing': drawings}))
    [{'photo': 1, 'drawing': 10}, {'photo': 2, 'drawing': 20}]
    >>> list(CombinedLoader([photos, drawings], 'max_size_cycle'))
    [[1, 10], [2, 20], [3, 10]]
    >>> loader = CombinedLoader({'photo': photos, 'drawing': drawings}, 'weighted', weights=[3, 1], seed=2)
    >>> [loader.batch_source for batch in loader]
    ['drawing', 'photo', 'drawing', 'photo', 'photo']
    """

    @check_keywords
    def __init__(
        self,
        loaders: Mapping[Any, Iterable[Any]] | Sequence[Iterable[Any]],  # by name, or a list
        mode: str = 'min_size',  # one of the modes above
        *,
        weights: Mapping[Any, float]
        | Sequence[float]
        | None = None,  # share of each loader in a weighted pass, by name or in order; None: its length
        n_batches: int | None = None,  # batches of a weighted pass; None: of all loaders together
        generator: torch.Generator | None = None,  # draws the next loader of a weighted pass
        seed: int | None = None,  # seed of such a generator; None: drawn from torch's generator
    ):
        if mode not in _PASSES:
            raise LoaderError(
                f'CombinedLoader(mode={mode!r}): the modes are {", ".join(map(repr, _PASSES))}.'
            )
        named = _name_loaders(loaders)
        self.structure = loaders
        self.names = list(named)
        self.loaders = list(named.values())
        self.mode = mode
        # whether the Learner splits the batch of each loader into inputs and targets
        self.gives_parts = _PASSES[mode].gives_parts
        # name of the loader of the last batch that was drawn; None: of all loaders
        self.batch_source: Any = None
        self.n_batches = n_batches
        self.weights: list[float] | None = None
        self.generator: torch.Generator | None = None
        if mode == 'weighted':
            self._set_weights(weights, generator, seed)
        elif (weights, n_batches, generator, seed) != (None, None, None, None):
            raise LoaderError(
                f'CombinedLoader(mode={mode!r}): weights, n_batches, generator and seed are options of the mode '
                "'weighted'."
            )

    def _set_weights(
        self, weights: Any, generator: torch.Generator | None, seed: int | None
    ) -> None:
        "Check the options of a weighted pass, and set them."
        if self.n_batches is not None:
            check_count('n_batches', self.n_batches, error=LoaderError)
        self.weights = _list_weights(weights, self.names, self.loaders)
        if seed is None and generator is None:
            seed = int(torch.empty((), dtype=torch.int64).random_())
        self.generator = generator if seed is None else make_generator(seed, generator)

    def new(
        self,
        shuffle: bool = False,  # the samples of each loader keep their order, all of them
        drop_last: bool = False,
    ) -> CombinedLoader:
        """Return a loader of the same samples in order; instead of a weighted pass, the loaders take turns.

        >>> loader = CombinedLoader([[1, 2], [3]], 'weighted', seed=0)
        >>> list(loader.new())
        [1, 2, 3]
        """
        loaders = rebuild(self.structure, [make_unshuffled(dl) for dl in self.loaders])
        return CombinedLoader(loaders, 'sequential' if self.mode == 'weighted' else self.mode)

    @property
    def persistent_workers(self) -> bool:
        "True if the workers of a loader serve several passes."
        return any(getattr(dl, 'persistent_workers', False) for dl in self.loaders)

    def __len__(self) -> int:
        n = _PASSES[self.mode].find_length(self)
        if n is None:
            raise TypeError('The length of this CombinedLoader is not known.')
        return n

    def __iter__(self) -> Iterator[Any]:
        return self.begin([Part(dl) for dl in self.loaders])

    def begin(
        self,
        parts: list[Part],  # a new pass of each loader
    ) -> CombinedPass:
        "Begin a pass that draws its batches from given passes of the loaders."
        drawn = self.make_pass(parts)
        drawn.begin()
        return drawn

    def make_pass(self, parts: list[Part]) -> CombinedPass:
        "Return a pass that has not begun."
        return _PASSES[self.mode](self, parts)

    def join(
        self,
        batches: list[Any],  # a batch of each loader, or None
    ) -> Any:
        "Return the batches of all loaders in the structure of the argument `loaders`."
        return rebuild(self.structure, batches)

    def note_batch(
        self,
        drawn: CombinedPass,  # the pass that the batch was drawn in
    ) -> None:
        "Set the name of the loader that the last batch comes from."
        self.batch_source = None if drawn.gives_parts else self.names[drawn.turn]

    def __repr__(self) -> str:
        parts = ', '.join(
            f'{name!r}: {type(dl).__name__}'
            for name, dl in zip(self.names, self.loaders, strict=True)
        )
        return f'CombinedLoader({{{parts}}}, {self.mode!r})'


# -- passes ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    "Place of a pass over several loaders."

    turn: int  # number of the loader whose turn it is
    parts: list[Any]  # result of `note` of each part
    generator: Tensor | None  # state of the generator of a weighted pass


class Part:
    "Pass over one of several loaders, which may end and start again within a pass over all of them."

    def __init__(self, dl: Any) -> None:
        self.dl = dl
        self.n = 0  # batches drawn in the open pass
        self.batches: Iterator[Any] | None = None  # the open pass
        self.is_used_up = False  # whether a pass of the loader has ended

    def open(self) -> None:
        "Start a pass."
        self.batches = self.make_iterator()

    def make_iterator(self) -> Iterator[Any]:
        "Return the batches of a new pass."
        return iter(self.dl)

    def draw(self) -> Any:
        "Return the next batch, or `_END`."
        if self.batches is None:
            return _END
        batch = next(self.batches, _END)
        if batch is _END:
            self.close()
        else:
            self.n += 1
        return batch

    def note(self) -> Any:
        "Return what a draw changes; None: nothing that anybody asks for."
        return None

    def close(self) -> None:
        "End the open pass, which has no batch left."
        self.batches = None
        self.is_used_up = True
        self.n = 0

    def draw_again(self) -> Any:
        "Return the next batch, of a new pass if the open pass has ended."
        batch = self.draw()
        if batch is not _END:
            return batch
        self.open()
        batch = self.draw()
        if batch is _END:
            raise EmptyLoaderError(
                f'A loader in CombinedLoader ({type(self.dl).__name__}) returned no batch when it was started '
                'again. Pass a loader that starts again each time.'
            )
        return batch


class CombinedPass(Iterator[Any]):
    "Pass over several loaders. Each mode is a subclass."

    gives_parts: ClassVar[bool] = True  # whether a batch has the batches of all loaders
    # whether a pass with a length draws nothing after its last batch
    ends_by_length: ClassVar[bool] = False

    def __init__(self, loader: CombinedLoader, parts: list[Part]) -> None:
        self.loader = loader
        self.parts = parts
        self.n = 0  # batches drawn
        self.turn = 0  # number of the loader whose turn it is
        self.limit: int | None = None  # number of batches at which the pass ends
        self.place: Place | None = None  # while a batch is being drawn: the place before it
        # in several processes, of each batch: samples of this rank, samples of all ranks
        self.shares: list[tuple[int, int] | None] = []

    @classmethod
    def find_length(cls, loader: CombinedLoader) -> int | None:
        "Return the number of batches of a pass, or None if it is unknown."
        lengths = _list_lengths(loader)
        return None if None in lengths else max(n for n in lengths if n is not None)

    def begin(self) -> None:
        "Start the passes of the loaders."
        self.set_limit()
        for part in self.parts:
            part.open()

    def set_limit(self) -> None:
        "Set the number of batches of this pass, if it ends by its length."
        if self.ends_by_length:
            self.limit = self.find_length(self.loader)

    def __next__(self) -> Any:
        if self.limit is not None and self.n >= self.limit:
            raise StopIteration
        self.place = self.note()
        batch = self.draw()
        self.place = None
        if batch is _END:
            raise StopIteration
        self.n += 1
        self.loader.note_batch(self)
        return batch

    def draw(self) -> Any:
        "Return the next batch, or `_END`."
        raise NotImplementedError

    def note(self) -> Place:
        "Return the place of this pass, to which it can be brought again if the next draw is interrupted."
        generator = self.loader.generator
        state = None if generator is None else generator.get_state()
        return Place(self.turn, [part.note() for part in self.parts], state)

    def resume(
        self,
        n: int,  # batches drawn
        turn: int,  # number of the loader whose turn it is
    ) -> None:
        "Continue a pass, whose parts have been started."
        self.set_limit()
        self.n = n
        self.turn = turn
        self.shares = [(0, 0)] * n


class _MinSize(CombinedPass):
    ends_by_length = True

    @classmethod
    @override
    def find_length(cls, loader: CombinedLoader) -> int | None:
        # a stream without a length lasts longer than the others, as a rule
        return min((n for n in _list_lengths(loader) if n is not None), default=None)

    @override
    def draw(self) -> Any:
        batches = []
        for part in self.parts:
            batch = part.draw()
            if batch is _END:
                return _END
            batches.append(batch)
        return self.loader.join(batches)


class _MaxSize(CombinedPass):
    @override
    def draw(self) -> Any:
        batches = [part.draw() for part in self.parts]
        if all(batch is _END for batch in batches):
            return _END
        return self.loader.join([None if batch is _END else batch for batch in batches])


class _MaxSizeCycle(CombinedPass):
    ends_by_length = True

    @override
    def draw(self) -> Any:
        batches = []
        for part in self.parts:
            batch = part.draw()
            if batch is _END:
                if all(part.is_used_up for part in self.parts):
                    return _END
                batch = part.draw_again()
            batches.append(batch)
        return self.loader.join(batches)


class _Sequential(CombinedPass):
    gives_parts = False

    @classmethod
    @override
    def find_length(cls, loader: CombinedLoader) -> int | None:
        return _add_lengths(loader)

    @override
    def begin(self) -> None:
        self.parts[0].open()

    @override
    def draw(self) -> Any:
        while True:
            batch = self.parts[self.turn].draw()
            if batch is not _END or self.turn + 1 == len(self.parts):
                return batch
            self.turn += 1
            self.parts[self.turn].open()


class _Weighted(CombinedPass):
    gives_parts = False
    ends_by_length = True

    @classmethod
    @override
    def find_length(cls, loader: CombinedLoader) -> int | None:
        return _add_lengths(loader) if loader.n_batches is None else loader.n_batches

    @override
    def begin(self) -> None:
        "Set the limit; a loader starts when its first batch is drawn."
        self.set_limit()

    @override
    def draw(self) -> Any:
        assert self.loader.weights is not None
        weights = torch.tensor(self.loader.weights, dtype=torch.float64)
        # on the CPU: no value of a device is read
        self.turn = int(torch.multinomial(weights, 1, generator=self.loader.generator))
        return self.parts[self.turn].draw_again()


_PASSES: dict[str, type[CombinedPass]] = {
    'min_size': _MinSize,
    'max_size': _MaxSize,
    'max_size_cycle': _MaxSizeCycle,
    'sequential': _Sequential,
    'weighted': _Weighted,
}


# -- lengths and arguments -------------------------------------------------------------------------


def _list_lengths(loader: CombinedLoader) -> list[int | None]:
    return [n_batches(dl) for dl in loader.loaders]


def _add_lengths(loader: CombinedLoader) -> int | None:
    "Return the number of batches of all loaders together, or None if it is unknown."
    lengths = _list_lengths(loader)
    return None if None in lengths else sum(n for n in lengths if n is not None)


def _name_loaders(loaders: Any) -> dict[Any, Any]:
    "Return loaders by name or position; raise `LoaderError` for anything else."
    if isinstance(loaders, Mapping):
        named = dict(loaders)
    elif type(loaders) in (list, tuple):
        named = dict(enumerate(loaders))
    else:
        raise LoaderError(
            f'CombinedLoader got a {type(loaders).__name__}: pass a dict or a list of loaders.'
        )
    if not named:
        raise EmptyLoaderError('CombinedLoader got no loaders: pass one or more.')
    for name, dl in named.items():
        check_loader(str(name), dl)
    return named


def _list_weights(weights: Any, names: list[Any], loaders: list[Any]) -> list[float]:
    "Return the weight of each loader; raise `LoaderError` unless there is one for each."
    if weights is None:
        lengths = [n_batches(dl) for dl in loaders]
        if None in lengths:
            raise LoaderError(
                "CombinedLoader(mode='weighted'): a loader has no length. Pass the share of each loader, `weights=`."
            )
        return [float(n) for n in lengths if n is not None]
    given = dict(weights) if isinstance(weights, Mapping) else dict(enumerate(weights))
    expected = names if isinstance(weights, Mapping) else list(range(len(names)))
    if set(given) != set(expected):
        raise LoaderError(
            f'CombinedLoader(weights={weights!r}): pass one weight for each of the loaders {names}.'
        )
    values = [given[name] for name in expected]
    if not all(isfinite(w) and w >= 0 for w in values) or not any(values):
        raise LoaderError(
            f'CombinedLoader(weights={weights!r}): weights are numbers from 0, and one is above 0.'
        )
    return [float(w) for w in values]
