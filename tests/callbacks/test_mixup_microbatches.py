"""MixUp and CutMix with microbatches: each microbatch has its own partners, and `yb` contains only targets."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from learnkit import Callback, CancelBackwardException, CancelBatchException
from learnkit.callbacks.mixup import CutMix, MixHandler, MixUp
from tests.helpers.mixup import Notes, learner, net, soft

AT = (
    'before_batch before_pred after_pred after_loss before_backward before_step after_batch'.split()
)


@pytest.mark.parametrize('mixer', [MixUp, CutMix])
def test_microbatches_have_their_own_targets_alone_for_whoever_looks(
    mixer: type[MixHandler],
) -> None:
    seen: list[tuple[str, int, list[type]]] = []

    def weight(xb: Any, yb: Any) -> int:
        seen.append(('weight', len(yb), [type(y) for y in yb]))
        return len(yb[0])

    class Look(Callback):
        order, run_valid = -100, False

        def run_event(self, event: str) -> None:
            if event in AT:
                seen.append((event, len(self.learn.yb), [type(y) for y in self.learn.yb]))

    learn = learner(mixer, Look, microbatch=3, weight_func=weight)
    learn.fit(1)
    assert {name for name, *_ in seen} == {'weight', *AT}
    assert all((n, kinds) == (1, [Tensor]) for _, n, kinds in seen)


def test_cancelled_backward_passes_and_batches_keep_the_pieces_in_step() -> None:
    def cancel(cb: Callback) -> None:
        pieces.append(cb.iter)
        if cb.iter == 0 and pieces.count(0) == 2:
            raise CancelBackwardException
        if cb.iter == 1 and pieces.count(1) == 2:
            raise CancelBatchException

    pieces: list[int] = []
    learn = learner(MixUp, Callback(before_backward=cancel), Notes, lr=0.0, microbatch=3)
    learn.fit(1)
    assert len(learn.notes.rows) == 3
    model = net()
    for row in learn.notes.rows[1:]:
        expected = F.cross_entropy(model(row['xb'][0]), soft(row['y'], row['yb1'][0], row['lam']))
        assert torch.allclose(row['loss'], expected, rtol=1e-6)
