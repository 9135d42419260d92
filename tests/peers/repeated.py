"""Runs with callbacks and modules of other packages that are killed and resumed, or rewound."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from learnkit import Callback, Checkpoint, Learner
from tests.helpers.rewinding import Record, describe
from tests.peers.rows import EQUAL, TOO_FAR, Row, quiet_folder

PART = 'Rewound'


def train_killed(make: Callable[[], Learner], epochs: int) -> Learner:
    "Train in a Learner that fails in the middle of an epoch, and resume in another one, which is returned."

    def fail(cb: Callback) -> None:
        if cb.train_iter == 5:
            raise InterruptedError

    for more in ([Callback(before_batch=fail)], []):
        learn = make().add_cbs([Checkpoint('4ba'), *more])
        with learn.no_bar(), suppress(InterruptedError):
            learn.fit(epochs, resume=True)
    return learn


def rewind_row(
    name: str,
    make: Callable[[list[Any]], Learner],  # f(callbacks), of the same numbers at each call
    epochs: int,
) -> Row:
    "Return whether every third batch of a run, rewound by a new Learner, has its state and loss, bit for bit."
    with quiet_folder():
        record = Record()
        torch.manual_seed(1)
        learn = make([Checkpoint('3ba', keep_last=None), record])
        with learn.no_bar():
            learn.fit(epochs)
        losses = learn.recorder.smooth_loss.raw
        again = make([Checkpoint('3ba', keep_last=None), Record()])
        batches = range(4, len(losses), 3)
        equal = 0
        for ba in batches:
            moment = again.rewind(ba)
            is_equal = describe(again) == record.digests[ba] and moment.step() == losses[ba]
            equal += is_equal
            if not is_equal:
                print(f'{name} rewound: batch {ba} differs')
    return Row(name, True, None, EQUAL if equal == len(batches) > 0 else TOO_FAR, '', PART)
