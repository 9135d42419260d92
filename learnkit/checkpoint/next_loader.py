# SPDX-License-Identifier: Apache-2.0
"""Continue a paused fit with another training loader at once: with the samples that the epoch has left."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import TYPE_CHECKING, Any

from learnkit.checkpoint.pause import Pause
from learnkit.checkpoint.resume import move_loop
from learnkit.core.errors import CheckpointError, OptionError
from learnkit.data.position import (
    LoaderPosition,
    count_in_batches,
    describe_drawn,
    lists_indices,
)
from learnkit.engine.pause import PausedState

if TYPE_CHECKING:
    from learnkit.learner import Learner


def find_rest(learn: Learner, pause: Pause) -> Mapping[str, Any] | None:
    """Return the position of a paused fit in the Learner's training loader; None if the epoch has no batch left.

    Raises `OptionError` for loaders whose samples, or their order, differ or are unknown."""
    old, new = pause.open_pass.dl, learn.dls.train
    if new is old:
        raise OptionError(
            'learn.resume(at_once=True): the training loader is the one of the pause. Set `learn.dls` first.'
        )
    if pause.point == 'epoch' or pause.is_trained:
        return None
    reason = _explain_loaders(learn, pause, old, new) or _explain_sizes(pause, old, new)
    if not reason:
        position = _count_position(pause, new)
        if position is not None and _has_same_order(pause, new, position):
            return position
        reason = 'The new loader has other samples or another order: pass one with the same data, `shuffle` and `seed`.'
    raise OptionError(
        f'learn.resume(at_once=True): {reason} Without `at_once`, the new loader is used from the next epoch on.'
    )


def _explain_loaders(learn: Learner, pause: Pause, old: Any, new: Any) -> str:
    "Return why the samples that are left are unknown, or ''."
    if learn.world.size > 1:
        return 'This is for one process.'
    if type(old) is not type(new) or not (lists_indices(old) and lists_indices(new)):
        return (
            'The samples that are left are known of two loaders of one class, `TensorLoader` or '
            f'`torch.utils.data.DataLoader`, not of {type(old).__name__} and {type(new).__name__}.'
        )
    if pause.grads:
        return 'The fit is paused while gradients are accumulated: pause after a step.'
    samples = [describe_drawn(dl)['samples'] for dl in (old, new)]
    if samples[0] != samples[1]:
        return f'The data had {samples[0]} samples, now {samples[1]}.'
    return ''


def _explain_sizes(pause: Pause, old: Any, new: Any) -> str:
    "Return why a batch of the new size cannot begin at the pause, or ''."
    before, now = (describe_drawn(dl)['batch size'] for dl in (old, new))
    if before is None or now is None:
        return 'The size of a batch is unknown.'
    if pause.n_drawn * before % now == 0:
        return ''
    multiple = now // gcd(before, now)
    following = pause.n_drawn + -pause.n_drawn % multiple
    n_iter = pause.state['loop']['n_iter']
    is_within = n_iter is None or following < n_iter
    hint = f', next at {pause.time.ba + following - pause.n_drawn}ba' if is_within else ''
    return (
        f'{pause.n_drawn} batches of {before} samples are not a whole number of batches of {now}: '
        f'pause after a multiple of {multiple} batches of the epoch{hint}.'
    )


def _count_position(pause: Pause, new: Any) -> Mapping[str, Any] | None:
    "Return the position of the pause in batches of a loader, or None if its epoch has other samples."
    try:
        return count_in_batches(new, pause.state['position'], is_same_step=True)
    except CheckpointError:
        return None


def _has_same_order(pause: Pause, new: Any, position: Mapping[str, Any]) -> bool:
    "Return True if the last samples before the pause are the same in both loaders."
    n, own = position['n'], pause.open_pass.position
    if not n or own is None:
        return not n
    before = own.indices(pause.n_drawn - 1)
    now = LoaderPosition.resume(new, position).indices(n - 1)
    if before is None or now is None:
        return False
    size = min(len(before), len(now))
    return bool(before[-size:] == now[-size:])


def move_to_loader(
    state: PausedState,
    position: Mapping[str, Any],  # return value of `find_rest`
) -> None:
    "Let a paused fit continue at a position in the Learner's training loader."
    state.open_pass = None
    move_loop(state, position)
