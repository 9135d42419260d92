"""Passes over a training loader in copies of a Learner."""

from collections.abc import Iterator
from copy import deepcopy

import torch
from torch import Tensor, nn

from learnkit import Callback, DataLoaders, Learner


class Numbers:
    "An endless loader of batches of one number: 0, 1, 2, ..."

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        n = 0
        while True:
            yield torch.full((1, 1), float(n)), torch.zeros(1, 1)
            n += 1


def note(cb: Callback) -> None:
    cb.learn.seen.append(int(cb.x))


def test_a_copy_of_a_learner_begins_the_stream_again_and_the_original_continues() -> None:
    dls = DataLoaders(Numbers(), n_iter=3)
    learn = Learner(dls, nn.Linear(1, 1), nn.MSELoss(), lr=1e-4, cbs=Callback(before_batch=note))
    learn.seen = []
    with learn.no_bar(), learn.no_logging():
        learn.fit(2)
    assert learn.seen == [0, 1, 2, 3, 4, 5]

    copied = deepcopy(learn)
    for one, expected in ((copied, [0, 1, 2]), (learn, [6, 7, 8])):
        one.seen = []
        with one.no_bar(), one.no_logging():
            one.fit(1)
        assert one.seen == expected
