"Models of the benchmarks: a perceptron, convolutions, a recurrent network, a residual network, a GPT."

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ['GPT', 'Recurrent', 'ResNet', 'make_cnn', 'make_perceptron']


def make_perceptron(n_in: int, width: int = 100) -> nn.Module:
    "Return three linear layers over `n_in` values, for ten classes."
    layers = [nn.Linear(n_in, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def make_cnn() -> nn.Module:
    "Return three convolutions over a signal of 40 values."
    return nn.Sequential(
        nn.Unflatten(1, (1, 40)),
        nn.Conv1d(1, 25, 5, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv1d(25, 25, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv1d(25, 25, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(125, 10),
    )


class Recurrent(nn.Module):
    "A bidirectional GRU over a signal of 40 values, and a linear layer over all its states."

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(1, 6, batch_first=True, bidirectional=True)
        self.head = nn.Linear(40 * 12, 10)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(x.unsqueeze(2))
        return self.head(states.flatten(1))


class Block(nn.Module):
    "A block of a transformer: attention to earlier characters, then a perceptron."

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    "A transformer that predicts the next token at each position: (B, T) -> (B, T, vocabulary)."

    def __init__(
        self,
        vocabulary: int,
        length: int,  # longest sequence
        width: int = 32,
        layers: int = 2,
        heads: int = 4,
        tied: bool = False,  # whether the output layer shares the weights of the embedding
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(positions))))


class Residual(nn.Module):
    "Two 3x3 convolutions with batch norm, added to the input."

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(n_out)
        self.norm2 = nn.BatchNorm2d(n_out)
        self.short: nn.Module = nn.Identity()
        if stride != 1 or n_in != n_out:
            conv = nn.Conv2d(n_in, n_out, 1, stride, bias=False)
            self.short = nn.Sequential(conv, nn.BatchNorm2d(n_out))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(out + self.short(x))


class ResNet(nn.Module):
    "ResNet-18 for images of 32x32 (He et al., 2016), with `width` channels first: (B, 3, H, W) -> (B, 10)."

    def __init__(self, width: int = 64, blocks: tuple[int, ...] = (2, 2, 2, 2)) -> None:
        super().__init__()
        conv = nn.Conv2d(3, width, 3, padding=1, bias=False)
        layers: list[nn.Module] = [conv, nn.BatchNorm2d(width), nn.ReLU()]
        n_in = width
        for stage, n in enumerate(blocks):
            n_out = width * 2**stage
            for i in range(n):
                layers.append(Residual(n_in, n_out, 2 if stage and not i else 1))
                n_in = n_out
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(n_in, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))
