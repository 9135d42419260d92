"""Batches whose samples are not rows of one tensor: images with boxes, sequences of any length, graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from learnkit import DataLoaders, Learner

CHANNELS = 12


class Graphs:
    "A batch of graphs, each a tensor [nodes, 3], like torch_geometric's Batch."

    def __init__(self, graphs: list[Tensor]) -> None:
        self.graphs = graphs
        self.num_graphs = len(graphs)

    def to(self, device: Any) -> Graphs:
        return type(self)([g.to(device) for g in self.graphs])


class Detector(nn.Module):
    "Predicts boxes [k, 4] for each image [C, H, W] of a list; k depends on the image's mean."

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(CHANNELS, 4).double()
        nn.init.constant_(self.last.weight, 0.1)
        nn.init.constant_(self.last.bias, 0.0)

    def forward(self, images: Any) -> list[dict[str, Tensor]]:
        return [
            {'boxes': self.last(image.mean((1, 2))).expand(1 + int(image[0, 0, 0]) % 3, 4)}
            for image in images
        ]


def box_loss(preds: list[dict[str, Tensor]], targets: Any) -> Tensor:
    "Return the mean over samples of a squared distance of mean boxes."
    each = [
        (p['boxes'].mean(0) - t['boxes'].mean(0)).square().mean()
        for p, t in zip(preds, targets, strict=True)
    ]
    return torch.stack(each).mean()


def scenes(n: int = 64) -> list[tuple[Tensor, dict[str, Tensor]]]:
    "Return images [C, H, W] of different sizes, image i of value i, each with one to three boxes [k, 4]."
    samples = []
    for i in range(n):
        image = torch.full((CHANNELS, 3 + i % 2, 4), float(i), dtype=torch.float64)
        samples.append((image, {'boxes': torch.full((1 + i % 3, 4), i / n, dtype=torch.float64)}))
    return samples


def as_tuples(samples: list[Any]) -> Any:
    "Collate as torchvision's detection references do."
    return tuple(zip(*samples, strict=True))


def as_lists(samples: list[Any]) -> Any:
    return [list(column) for column in zip(*samples, strict=True)]


def detection(
    n: int = 64, bs: int = 16, collate: Callable[[list[Any]], Any] = as_tuples, **kwargs: Any
) -> Learner:
    "Return a Learner with SGD on scenes in their order."
    loader = torch.utils.data.DataLoader(scenes(n), batch_size=bs, collate_fn=collate)
    kwargs = {'lr': 1e-4, 'opt_func': torch.optim.SGD, 'loss_func': box_loss} | kwargs
    learn = Learner(DataLoaders(loader, loader), Detector(), **kwargs)
    learn.logger, learn.create_mbar = lambda row: None, False
    return learn
