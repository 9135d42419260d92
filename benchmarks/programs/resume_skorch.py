"""Checkpoints and resume with skorch: `Checkpoint` and `LoadInitState`.

https://skorch.readthedocs.io/en/stable/user/save_load.html
https://skorch.readthedocs.io/en/stable/user/FAQ.html (gradient accumulation)"""

import torch
from skorch import NeuralNetClassifier
from skorch.callbacks import Checkpoint, EarlyStopping, LoadInitState, LRScheduler
from skorch.helper import predefined_split
from skorch.history import History
from torch import nn

from benchmarks.programs import resume_task as task


class GradAccNet(NeuralNetClassifier):
    def get_loss(self, *args, **kwargs):
        loss = super().get_loss(*args, **kwargs)
        return loss / task.ACCUMULATED if self.module_.training else loss

    def train_step(self, batch, **fit_params):
        n = len(self.history[-1, 'batches']) - 1
        if n % task.ACCUMULATED == 0:
            self.optimizer_.zero_grad()
        step = self.train_step_single(batch, **fit_params)
        if (n + 1) % task.ACCUMULATED == 0:
            self.optimizer_.step()
        return step


def train(folder):
    torch.manual_seed(0)
    saver = Checkpoint(monitor=None, dirname=folder)
    n_done = 0
    if (folder / 'history.json').exists():
        n_done = len(History.from_file(folder / 'history.json'))
    schedule = LRScheduler(
        torch.optim.lr_scheduler.OneCycleLR,
        step_every='batch',
        max_lr=task.LR,
        total_steps=task.EPOCHS * task.BATCHES + 1,
    )
    net = GradAccNet(
        task.Net,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.AdamW,
        lr=task.LR,
        batch_size=task.BATCH,
        max_epochs=task.EPOCHS - n_done,
        iterator_train__shuffle=True,
        iterator_train__num_workers=2,
        train_split=predefined_split(task.valid_rows()),
        callbacks=[saver, LoadInitState(saver), schedule, EarlyStopping(patience=task.PATIENCE)],
        classes=range(task.N_CLASSES),
        verbose=0,
    )
    net.fit(task.train_rows(), y=None)
    return net.module_.state_dict(), list(map(float, net.history[:, 'valid_loss']))
