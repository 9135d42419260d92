"""Checkpoints and resume with learnkit, as in docs/checkpoints.md.

The averaged weights, the accumulated gradients and the counts of early stopping are part of the checkpoint."""

import torch
from torch.nn import functional as F

from benchmarks.programs import resume_task as task
from learnkit import (
    EMA,
    Checkpoint,
    DataLoaders,
    EarlyStoppingCallback,
    GradientAccumulation,
    Learner,
)


def train(folder):
    torch.manual_seed(0)
    dls = DataLoaders(task.train_loader(), task.valid_loader(), device='cpu')
    cbs = [
        GradientAccumulation(task.BATCH * task.ACCUMULATED),
        EMA(task.DECAY),
        EarlyStoppingCallback('valid_loss', patience=task.PATIENCE),
        Checkpoint(f'{task.SAVE_EVERY}ba', folder),
    ]
    learn = Learner(dls, task.Net(), F.cross_entropy, torch.optim.AdamW, cbs=cbs)
    learn.fit_one_cycle(task.EPOCHS, task.LR, resume=True)
    return learn.model.state_dict(), [row['valid_loss'] for row in learn.history]
