"""Training in several processes, on one machine or many, through torch.distributed."""

from __future__ import annotations

from learnkit.distributed.callback import DistributedTraining

__all__ = ['DistributedTraining']
