"A character model with a loop written for speed, without weight decay of norms and biases, as learnkit trains."

import torch
from torch.nn import functional as F


def train(data, model, epochs, lr):
    x = torch.from_numpy(data.x)
    y = torch.from_numpy(data.y)
    x_valid = torch.from_numpy(data.x_valid)
    y_valid = torch.from_numpy(data.y_valid)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    spared = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{'params': decayed}, {'params': spared, 'weight_decay': 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, fused=True)
    steps = epochs * -(-len(x) // 32)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    for epoch in range(epochs):
        model.train()
        train_loss = 0.0
        for rows in torch.randperm(len(x)).split(32):
            loss = F.cross_entropy(model(x[rows]).flatten(0, 1), y[rows].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            train_loss += loss.item() * len(rows)
        model.eval()
        valid_loss = 0.0
        with torch.no_grad():
            for xb, yb in zip(x_valid.split(32), y_valid.split(32), strict=True):
                loss = F.cross_entropy(model(xb).flatten(0, 1), yb.flatten())
                valid_loss += loss.item() * len(xb)
        print(
            f'{epoch} train_loss {train_loss / len(x):.4f} valid_loss {valid_loss / len(x_valid):.4f}'
        )
