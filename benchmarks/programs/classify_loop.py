"Classification with a hand-written loop, as PyTorch's tutorials have it."

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def train(data, model, epochs, lr):
    train_set = TensorDataset(torch.from_numpy(data.x), torch.from_numpy(data.y))
    valid_set = TensorDataset(torch.from_numpy(data.x_valid), torch.from_numpy(data.y_valid))
    train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
    valid_loader = DataLoader(valid_set, batch_size=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, lr, total_steps=epochs * len(train_loader)
    )
    for epoch in range(epochs):
        model.train()
        train_loss = 0.0
        for x, y in train_loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            train_loss += loss.item() * len(x)
        model.eval()
        valid_loss = 0.0
        correct = 0
        with torch.no_grad():
            for x, y in valid_loader:
                pred = model(x)
                valid_loss += F.cross_entropy(pred, y).item() * len(x)
                correct += (pred.argmax(1) == y).sum().item()
        print(
            f'{epoch} train_loss {train_loss / len(train_set):.4f} '
            f'valid_loss {valid_loss / len(valid_set):.4f} accuracy {correct / len(valid_set):.4f}'
        )
