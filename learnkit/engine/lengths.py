# SPDX-License-Identifier: Apache-2.0
"""Numbers of batches in the epochs of a Learner's loaders."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from learnkit.core.validation import warn_user
from learnkit.data.dataloaders import evaluation_loaders, n_batches

if TYPE_CHECKING:
    from learnkit.learner import Learner


class Lengths:
    """Lengths of loaders, corrected where a loader yields more or fewer batches than its `len()`.

    The length of a loader is its `len()`. If a complete pass had another number of batches, that number is its length
    from the next pass on, until `len()` changes. Checkpointed: the number of the training loader.

    >>> lengths, loader = Lengths(), [1, 2, 3]
    >>> lengths.correct(loader, 5)
    >>> lengths.find(loader), lengths.find([1, 2, 3])
    (5, 3)
    """

    def __init__(self) -> None:
        # a reference to a loader, weak if possible, its `len()`, and the batches of its last pass, by the loader's `id`
        self._corrections: dict[int, tuple[Callable[[], Any], int, int]] = {}
        # batches of each complete epoch of a training loader without a length; None: no epoch yet, 0: they differ
        self.usual: int | None = None
        self.was_resumed = False  # an epoch of this process was begun in another one

    def __getstate__(self) -> dict[str, Any]:
        "Return the attributes without the corrections: a copy has other loaders."
        return {'_corrections': {}, 'usual': None, 'was_resumed': False}

    def begin_fit(self) -> None:
        "Forget the epochs of earlier fits, whose loader may have been another one."
        self.usual = None
        self.was_resumed = False

    def find(self, dl: Any) -> int | None:
        "Return the number of batches of a loader, or None if it is unknown."
        n = n_batches(dl)
        refer, said, given = self._corrections.get(id(dl), (None, n, n))
        is_known = (
            refer is not None and refer() is dl
        )  # another loader may have the same `id` later
        return given if is_known and said == n else n

    def limit(self, learn: Learner, dl: Any) -> int | None:
        "Return the number of batches after which a pass ends without asking for another one, or None."
        is_cut = self.find(dl) is None and dl is learn.dls.train
        return getattr(learn.dls, 'n_iter', None) if is_cut else None

    def correct(
        self,
        dl: Any,
        given: int | None,  # batches of a complete pass; None: only `len()` is known
    ) -> None:
        "Set the number of batches that a loader with a length has yielded."
        said = n_batches(dl)
        self._corrections.pop(id(dl), None)
        if said is not None and given is not None and given != said:
            self._corrections[id(dl)] = refer_to(dl), said, given

    def correction(self, dl: Any) -> int | None:
        "Return the number of batches of a loader if it differs from its `len()`, else None."
        n = self.find(dl)
        return None if n == n_batches(dl) else n

    def check(
        self,
        learn: Learner,
        n: int,  # batches of a complete pass over `learn.dl`
    ) -> None:
        "Correct the length of the current loader, and warn if its number of batches is unexpected."
        dl = learn.dl
        said, expected = n_batches(dl), self.find(dl)
        own = [learn.dls.train, *(loader for _, loader in evaluation_loaders(learn.dls))]
        if any(dl is loader for loader in own):
            self.correct(dl, n)
        if said is None and learn.training and learn.fitting and dl is learn.dls.train:
            self._compare_with_others(learn, n)
        if said is None or n in (said, expected):
            return
        what = f'The {learn.dl_name} loader ({type(dl).__name__})'
        if n < said:
            warn_user(
                f'{what} ended after {n} of its {said} batches. Its length is wrong, or a StopIteration was raised '
                'inside the data set, which looks like the end.'
            )
        elif not learn.training or learn.n_epoch is not None:  # otherwise schedules follow a budget
            schedules = ''
            if learn.training and expected is not None and n > expected:
                schedules = f' Schedules stopped after batch {expected}; the next epoch expects {n} batches.'
            warn_user(
                f'{what} returned {n} batches, and its length is {said}.{schedules} Correct its `__len__`, or '
                'remove it.'
            )

    def _compare_with_others(self, learn: Learner, n: int) -> None:
        "Warn if an epoch after a resume from a loader's own state has another length than the epochs before."
        usual = self.usual
        self.usual = n if usual in (None, n) else 0
        has_state = hasattr(type(learn.dl), 'load_state_dict')
        if self.was_resumed and has_state and usual and n != usual:
            warn_user(
                f'Epoch {learn.epoch} had {n} batches, and each epoch before it {usual}. The run was resumed from the '
                f'state of its loader ({type(learn.dl).__name__}), which may not have restored all of its position: '
                'the samples may differ from an uninterrupted run.'
            )


def refer_to(o: Any) -> Callable[[], Any]:
    "Return a weak reference to an object, or a strong one for a type without weak references, such as a list."
    try:
        return weakref.ref(o)
    except TypeError:
        return lambda: o


def find_length(learn: Learner, dl: Any) -> int | None:
    """Return the number of batches of a loader, or None if it is unknown.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(n_train=3)
    >>> find_length(learn, learn.dls.train)
    3
    """
    n: int | None = learn.parts.lengths.find(dl)
    return n


def epoch_length(learn: Learner, dl: Any) -> tuple[int | None, int | None]:
    "Return the number of batches in an epoch of `dl`, or None, and the limit `n_iter` on it, or None."
    n = find_length(learn, dl)
    limit = learn.parts.lengths.limit(learn, dl)
    return (limit if n is None else n), limit
