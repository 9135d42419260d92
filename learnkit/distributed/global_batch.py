# SPDX-License-Identifier: Apache-2.0
"""`GlobalBatch`, the batch of all ranks: its samples, its weight, and the factor of a rank's loss in its mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from learnkit.comm.ranks import Comm
from learnkit.core.batch import count_samples, find_bs, size_func_of, slice_batch
from learnkit.engine.counters import sample_count, token_count
from learnkit.engine.microbatch import divide, weighted_loss
from learnkit.engine.processes import LocalBatch

if TYPE_CHECKING:
    from learnkit.learner import Learner


class GlobalBatch(LocalBatch):
    """The batch of all ranks, of which `learn.xb` and `learn.yb` hold this rank's part.

    `DistributedTraining` calls `begin` with each batch. The mean over ranks of each rank's loss times `loss_factor` is
    the loss of the global batch. If the loss is not a mean over samples, the factor depends on the sum of the ranks'
    weights, which is computed during the forward pass.
    """

    def __init__(
        self,
        is_even: bool,  # True if ranks have as many samples in a batch of which the loader has no shares
    ) -> None:
        self.is_even = is_even
        # samples of this rank and of all ranks in the batches of training (True) and evaluation (False), because an
        # evaluation may run within a training batch; None: unknown
        self._shares: dict[bool, tuple[int, int] | None] = {True: None, False: None}
        # weight of this rank, and f() -> weight of all ranks
        self._weights: tuple[Tensor, Callable[[], Tensor]] | None = None

    # -- samples ---------------------------------------------------------------------------------

    def begin(self, learn: Learner) -> None:
        "Find the numbers of samples of a new batch, of this rank and of all ranks."
        find_share = getattr(learn.dl, 'share', None)
        if find_share is not None:
            self._shares[learn.training] = find_share(learn.iter)
        else:
            self._shares[learn.training] = self._count_share(learn) if learn.training else None
        if learn.training:
            self._weights = None

    def _count_share(self, learn: Learner) -> tuple[int, int] | None:
        "Return the share of a training batch of a loader without shares; torch's sampler shards evenly."
        n = sample_count(learn)
        total = n * learn.world.data_size if self.is_even else sum_over_shards(n, learn.world)
        return (n, total) if total else None

    @override
    def has_local_samples(self, learn: Learner) -> bool:
        "Return True if the batch has samples of this rank; a filler batch only keeps the ranks in step."
        share = self._shares[learn.training]
        return share is None or share[0] > 0

    @override
    def count_samples(self, learn: Learner) -> int:
        "Return the number of samples of the batch over all ranks."
        share = self._shares[True]
        return super().count_samples(learn) if share is None else share[1]

    def update_counters(self, learn: Learner) -> None:
        "Count the samples and tokens of all ranks, after the counters have counted those in this rank's batch."
        counters = learn.parts.counters
        share = self._shares[True]
        if share is not None:
            counters.samples += share[1] - sample_count(learn)
        if learn.token_func or (learn.xb and isinstance(learn.xb[0], Mapping)):
            n = token_count(learn)
            own = n if self.has_local_samples(learn) else 0
            counters.tokens += sum_over_shards(own, learn.world) - n

    @override
    def split(self, learn: Learner, xb: Any, yb: Any, size: int) -> list[tuple[Any, Any]]:
        "Split a batch into microbatches: as many as on the rank with the most samples."
        microbatches = super().split(learn, xb, yb, size)
        share = self._shares[True]
        if share is None or learn.microbatch in (1, 'auto'):
            return microbatches
        n = -(-share[1] // (learn.world.data_size * size))
        if len(microbatches) == n:
            return microbatches
        bs = find_bs(xb, yb, size_func_of(learn))
        return slice_batch(xb, yb, bs, [slice(bs * i // n, bs * (i + 1) // n) for i in range(n)])

    # -- weights ---------------------------------------------------------------------------------

    def start_sum(self, learn: Learner) -> None:
        "Start to sum the ranks' weights of a training batch, unless its numbers of samples determine them."
        weights = learn.parts.loss_weights
        if not (weights.is_sum(learn) or weights.are_samples(learn)):
            self._sum_weights(learn)

    def clear(self) -> None:
        "Drop the sum of the weights, which keeps the connections of the process group open."
        self._weights = None

    @override
    def total_weight(self, learn: Learner) -> Any:
        "Return the weight of the batch over all ranks; None for a loss that is a sum."
        weights = learn.parts.loss_weights
        if weights.is_sum(learn):
            return None
        if weights.are_samples(learn):
            return self.count_samples(learn)
        _, wait_for_total = self._sum_weights(learn)
        return wait_for_total()

    def loss_factor(self, learn: Learner) -> Any:
        """Return the factor of this rank's loss with which the mean over ranks is the mean over all samples.

        Waits for the sum of the ranks' weights, if the loss is not a mean over samples."""
        size = learn.world.data_size
        weights = learn.parts.loss_weights
        if weights.is_sum(learn):
            return size if self._count_own_samples(learn) else 0
        if weights.are_samples(learn):
            own, total = self._shares[True] or (1, size)
            return 1 if own * size == total else own * size / total
        weight, wait_for_total = self._sum_weights(learn)
        return divide(weight * size, wait_for_total())

    @override
    def mean_loss(self, learn: Learner) -> Tensor:
        "Return the mean loss over the samples of all ranks."
        loss = weighted_loss(learn.loss.detach(), self.loss_factor(learn))
        return learn.world.sum(loss) / learn.world.size

    def _count_own_samples(self, learn: Learner) -> int:
        share = self._shares[True]
        return count_samples(learn) if share is None else share[0]

    def _sum_weights(self, learn: Learner) -> tuple[Tensor, Callable[[], Tensor]]:
        "Return this rank's weight, and f() -> the sum over ranks, which starts with the first call in a batch."
        if self._weights is None:
            weight: Any = 0  # of a filler
            if self._count_own_samples(learn):
                weight = learn.parts.loss_weights.weigh_batch(learn, learn.xb, learn.yb)
            own = torch.as_tensor(weight, dtype=torch.float64, device=learn.run.batch_device)
            self._weights = own, learn.world.start_sum(own / learn.world.copies)
        return self._weights


def sum_over_shards(
    n: int,  # number of this rank, equal on ranks that train on the same samples
    world: Comm,
) -> int:
    "Return the sum of a number over the shards of the data."
    return int(world.sum(torch.tensor(n))) // world.copies
