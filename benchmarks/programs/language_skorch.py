"A character model with skorch."

import torch
from skorch import NeuralNet
from skorch.callbacks import GradientNormClipping, LRScheduler
from skorch.dataset import Dataset
from skorch.helper import predefined_split


class FlatCrossEntropy(torch.nn.CrossEntropyLoss):
    def forward(self, pred, y):
        return super().forward(pred.flatten(0, 1), y.flatten())


def train(data, model, epochs, lr):
    steps = epochs * -(-len(data.x) // 32)
    cycle = LRScheduler(
        torch.optim.lr_scheduler.OneCycleLR, max_lr=lr, total_steps=steps, step_every='batch'
    )
    net = NeuralNet(
        model,
        criterion=FlatCrossEntropy,
        optimizer=torch.optim.AdamW,
        lr=lr,
        max_epochs=epochs,
        batch_size=32,
        iterator_train__shuffle=True,
        train_split=predefined_split(Dataset(data.x_valid, data.y_valid)),
        callbacks=[cycle, GradientNormClipping(1.0)],
    )
    net.fit(data.x, data.y)
