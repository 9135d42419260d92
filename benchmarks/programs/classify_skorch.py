"Classification with skorch."

import torch
from skorch import NeuralNetClassifier
from skorch.callbacks import LRScheduler
from skorch.dataset import Dataset
from skorch.helper import predefined_split


def train(data, model, epochs, lr):
    steps = epochs * -(-len(data.x) // 64)
    cycle = LRScheduler(
        torch.optim.lr_scheduler.OneCycleLR, max_lr=lr, total_steps=steps, step_every='batch'
    )
    net = NeuralNetClassifier(
        model,
        criterion=torch.nn.CrossEntropyLoss,
        optimizer=torch.optim.AdamW,
        lr=lr,
        max_epochs=epochs,
        batch_size=64,
        iterator_train__shuffle=True,
        train_split=predefined_split(Dataset(data.x_valid, data.y_valid)),
        callbacks=[cycle],
    )
    net.fit(data.x, data.y)
