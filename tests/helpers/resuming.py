"""Tests of exact resume: train without a stop, keep every checkpoint, resume from each in a new Learner."""

import io
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from learnkit import Callback, Learner
from learnkit.checkpoint.digest import differences

State = dict[str, Any]


def through_a_file(state: State) -> State:
    "Return a state saved to and loaded from a file without code."
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)  # type: ignore[no-any-return]  # a dict went in


class Keep(Callback):
    "Keep a checkpoint of every place of the loop."

    order = 2000

    def __init__(self, keeping: bool = True) -> None:
        self.kept, self._keeping = list[State](), keeping

    def keep(self) -> None:
        if self._keeping:
            self.kept.append(self.learn.checkpoint_state())

    batch_checkpoint = epoch_checkpoint = iteration_checkpoint = keep

    def state_dict(self) -> None:
        return None


def scramble(seed: int) -> None:
    "Seed every global generator, as in another process."
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def train_without_stop(
    make: Callable[[], Learner], fit: Callable[..., None]
) -> tuple[State, list[State]]:
    "Train without a stop; return the final state, and the checkpoints of every place before it."
    scramble(0)
    learn, keep = make(), Keep()
    learn.add_cb(keep)
    with learn.no_logging():
        fit(learn, False)
    return learn.checkpoint_state(), keep.kept


def check_every_place(
    make: Callable[[], Learner],  # makes the Learner, seeded as a script would
    fit: Callable[[Learner, Any], None] = lambda learn, resume: learn.fit(2, resume=resume),
    places: Callable[[list[State]], Iterable[State]] = lambda kept: kept,  # which are tried
    keep_again: bool = False,  # whether resumed runs take checkpoints, too
    n_more_kills: int = 2,  # how often the first of them is killed again
) -> list[State]:
    """Assert that resuming from each checkpoint gives exactly the final state of the uninterrupted run.

    The first of them is also killed again: its run resumes from a checkpoint of the resumed run."""
    end, kept = train_without_stop(make, fit)
    assert kept
    chosen = [*map(through_a_file, places(kept))]

    def resume(state: State, seed: int, keeping: bool) -> list[State]:
        scramble(100 + seed)
        learn, keep = make(), Keep(keeping)
        scramble(200 + seed)
        learn.add_cb(keep)
        with learn.no_logging():
            fit(learn, state)
        loop = state['loop']
        where = f'{loop["point"]} {loop["epoch"]}.{loop["iter"]}, with seed {seed}'
        assert not (found := differences(end, learn.checkpoint_state())), '\n'.join(
            [f'resumed at {where}:', *found]
        )
        return keep.kept

    taken = resume(chosen[0], 0, keeping=True)
    for i, state in enumerate(chosen[1:]):
        resume(state, 1 + i, keep_again)
    for life in range(n_more_kills):
        if taken:
            taken = resume(through_a_file(taken[len(taken) // 2]), 1000 + life, keeping=True)
    return kept
