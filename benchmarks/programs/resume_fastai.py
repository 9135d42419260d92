"""Checkpoints and resume with fastai: `SaveModelCallback(every_epoch=True)` and `start_epoch=`.

https://docs.fast.ai/callback.tracker.html#savemodelcallback
https://docs.fast.ai/callback.schedule.html#learner.fit_one_cycle
Without early stopping: `EarlyStoppingCallback` raises IndexError in an epoch that `start_epoch` skips."""

import csv

from fastai.callback.progress import CSVLogger
from fastai.callback.schedule import Learner  # with `fit_one_cycle`
from fastai.callback.tracker import SaveModelCallback
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.torch_core import set_seed
from torch.nn import functional as F

from benchmarks.programs import resume_task as task


def train(folder):
    set_seed(0, reproducible=True)
    dls = DataLoaders(
        DataLoader(task.train_rows(), bs=task.BATCH, shuffle=True, num_workers=2),
        DataLoader(task.valid_rows(), bs=task.N_VALID, num_workers=0),
    )
    cbs = [
        GradientAccumulation(task.BATCH * task.ACCUMULATED),
        SaveModelCallback(every_epoch=True, with_opt=True),
        CSVLogger(append=True),
    ]
    learn = Learner(dls, task.Net(), loss_func=F.cross_entropy, cbs=cbs, path=folder)
    saved = [int(path.stem.split('_')[1]) for path in folder.glob('models/model_*.pth')]
    first = max(saved, default=-1) + 1
    if first:
        learn.load(f'model_{first - 1}', with_opt=True)
    with learn.no_bar(), learn.no_logging():
        learn.fit_one_cycle(task.EPOCHS, task.LR, start_epoch=first)
    rows = csv.DictReader((folder / 'history.csv').open())
    losses = [
        float(row['valid_loss'])
        for row in rows
        if row['valid_loss'] not in (None, '', 'valid_loss')
    ]
    return learn.model.state_dict(), losses
