"A character model with Lightning."

import lightning as L
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class LanguageModel(L.LightningModule):
    def __init__(self, model, lr):
        super().__init__()
        self.model = model
        self.lr = lr

    def compute_loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.model(x).flatten(0, 1), y.flatten())

    def training_step(self, batch, batch_idx):
        loss = self.compute_loss(batch)
        self.log('train_loss', loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log('valid_loss', self.compute_loss(batch), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.lr, total_steps=self.trainer.estimated_stepping_batches
        )
        return {
            'optimizer': optimizer,
            'lr_scheduler': {'scheduler': scheduler, 'interval': 'step'},
        }


def train(data, model, epochs, lr):
    train_set = TensorDataset(torch.from_numpy(data.x), torch.from_numpy(data.y))
    valid_set = TensorDataset(torch.from_numpy(data.x_valid), torch.from_numpy(data.y_valid))
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True)
    valid_loader = DataLoader(valid_set, batch_size=32)
    trainer = L.Trainer(max_epochs=epochs, gradient_clip_val=1.0)
    trainer.fit(LanguageModel(model, lr), train_loader, valid_loader)
