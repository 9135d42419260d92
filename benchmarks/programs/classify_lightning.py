"Classification with Lightning."

import lightning as L
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self, model, lr):
        super().__init__()
        self.model = model
        self.lr = lr

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        self.log('train_loss', loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        pred = self.model(x)
        self.log('valid_loss', F.cross_entropy(pred, y), prog_bar=True)
        self.log('accuracy', (pred.argmax(1) == y).float().mean(), prog_bar=True)

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
    train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
    valid_loader = DataLoader(valid_set, batch_size=64)
    trainer = L.Trainer(max_epochs=epochs)
    trainer.fit(Classifier(model, lr), train_loader, valid_loader)
