"""Checkpoints and resume with Lightning: `ModelCheckpoint`, `fit(ckpt_path='last')`, and torchdata's loader.

https://lightning.ai/docs/pytorch/stable/common/checkpointing_intermediate.html
https://lightning.ai/docs/pytorch/stable/common/checkpointing_basic.html"""

import csv

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.nn import functional as F
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.programs import resume_task as task


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = task.Net()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log('valid_loss', F.cross_entropy(self.net(x), y))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), task.LR)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, task.LR, task.STEPS)
        return [optimizer], [{'scheduler': scheduler, 'interval': 'step'}]


def train(folder):
    L.seed_everything(0, workers=True)
    saver = ModelCheckpoint(
        folder / 'checkpoints',
        save_last=True,
        every_n_train_steps=task.SAVE_EVERY // task.ACCUMULATED,
    )
    stopper = EarlyStopping('valid_loss', patience=task.PATIENCE)
    trainer = L.Trainer(
        max_epochs=task.EPOCHS,
        accelerator='cpu',
        accumulate_grad_batches=task.ACCUMULATED,
        callbacks=[saver, stopper, EMAWeightAveraging(decay=task.DECAY)],
        logger=CSVLogger(folder),
    )
    module = Classifier()
    loader = task.train_loader(StatefulDataLoader)
    trainer.fit(module, loader, task.valid_loader(), ckpt_path='last')
    return module.net.state_dict(), read_losses(folder)


def read_losses(folder):
    files = sorted(folder.glob('lightning_logs/version_*/metrics.csv'))
    rows = [row for file in files for row in csv.DictReader(file.open())]
    return [float(row['valid_loss']) for row in rows if row.get('valid_loss')]
