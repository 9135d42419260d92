"""Classify pictures of shapes: train on five shapes, then fine-tune on five others of which there are few pictures.

    python examples/images.py                                   # all stages, some minutes on a CPU
    python examples/images.py --resume                          # after a kill: from the newest checkpoints
    torchrun --nproc-per-node=2 examples/images.py              # two processes, with the same batches in total

The pictures are computed, 32x32 pixels each. Folder `shapes/` receives checkpoints, the exported model and two plots.
The guide `nbs/project_images.ipynb` goes through this script step by step."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from learnkit import (
    Adam,
    Callback,
    Checkpoint,
    ClassificationInterpretation,
    DataLoaders,
    Learner,
    TensorLoader,
    accuracy,
)

FIRST = ('circle', 'square', 'triangle', 'ring', 'cross')  # many pictures
SECOND = ('ellipse', 'pentagon', 'hexagon', 'star', 'crescent')  # few pictures
SIZE = 32  # pixels


# -- the pictures ----------------------------------------------------------------------------------


def polygon_edge(angle: Tensor, n: int) -> Tensor:
    "Return the distance of a regular polygon's edge from its center, in each direction; corners are at 1."
    sector = 2 * math.pi / n
    return math.cos(sector / 2) / torch.cos(angle.remainder(sector) - sector / 2)


def star_edge(angle: Tensor) -> Tensor:
    "Return the distance of the edge of a star with five points, in each direction."
    sector = 2 * math.pi / 5
    towards_point = (angle.remainder(sector) - sector / 2).abs() / (sector / 2)
    return 0.45 + 0.55 * towards_point**1.5


def is_inside(name: str, x: Tensor, y: Tensor) -> Tensor:
    "Return which pixels are in a shape, of which (x, y) are the coordinates: its center at 0, its size 1."
    radius, angle = x.hypot(y), torch.atan2(y, x)
    match name:
        case 'circle':
            return radius < 0.9
        case 'ellipse':
            return (x / 0.95).hypot(y / 0.7) < 1
        case 'ring':
            return (radius < 0.95) & (radius > 0.5)
        case 'crescent':
            return (radius < 0.95) & ((x - 0.45).hypot(y) > 0.75)
        case 'cross':
            return (x.abs().minimum(y.abs()) < 0.3) & (x.abs().maximum(y.abs()) < 0.9)
        case 'star':
            return radius < star_edge(angle)
    n_corners = {'triangle': 3, 'square': 4, 'pentagon': 5, 'hexagon': 6}[name]
    return radius < polygon_edge(angle, n_corners)


def draw_uniform(n: int, low: float, high: float, generator: torch.Generator) -> Tensor:
    "Return random numbers of shape (n, 1, 1)."
    return torch.empty(n, 1, 1).uniform_(low, high, generator=generator)


def draw_textures(n: int, darkest: float, generator: torch.Generator) -> Tensor:
    "Return stripes of random color, direction and width, as pictures (n, 3, SIZE, SIZE)."
    grid = torch.linspace(-1, 1, SIZE)
    angle = draw_uniform(n, 0, math.pi, generator)
    along = grid * angle.cos() + grid[:, None] * angle.sin()
    phase = draw_uniform(n, 0, 6, generator)
    wave = torch.sin(along * draw_uniform(n, 2, 16, generator) + phase)
    color = darkest + 0.5 * torch.rand(n, 3, 1, 1, generator=generator)
    contrast = draw_uniform(n, 0, 0.2, generator)
    return color + (contrast * wave)[:, None]


def draw_shapes(
    names: Sequence[str],  # one class or more
    n: int,  # pictures of each class
    seed: int,  # other seeds draw other pictures
) -> tuple[Tensor, Tensor]:  # pictures (N, 3, 32, 32) in [0, 1], class numbers (N,)
    "Draw each shape `n` times: turned, stretched, with textures, noise, and a bar that hides a part of it."
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(len(names)).repeat(n)
    total = len(labels)
    grid = torch.linspace(-1, 1, SIZE)

    angle = draw_uniform(total, 0, 2 * math.pi, generator)
    size = draw_uniform(total, 0.5, 0.85, generator)
    x = grid - draw_uniform(total, -0.25, 0.25, generator)
    y = grid[:, None] - draw_uniform(total, -0.25, 0.25, generator)
    turned_x = (x * angle.cos() + y * angle.sin()) / size
    turned_y = (y * angle.cos() - x * angle.sin()) / size
    stretched_y = turned_y * draw_uniform(total, 0.9, 1.1, generator)

    inside = torch.zeros(total, SIZE, SIZE, dtype=torch.bool)
    for number, name in enumerate(names):
        rows = labels == number
        inside[rows] = is_inside(name, turned_x[rows], stretched_y[rows])
    shape = draw_textures(total, 0.45, generator)  # brighter than the background
    background = draw_textures(total, 0.05, generator)
    pictures = torch.where(inside[:, None], shape, background)

    bar_angle = draw_uniform(total, 0, math.pi, generator)
    across = grid * bar_angle.cos() + grid[:, None] * bar_angle.sin()
    distance = (across - draw_uniform(total, -0.6, 0.6, generator)).abs()
    is_hidden = distance < draw_uniform(total, 0, 0.15, generator)
    bar = torch.rand(total, 3, 1, 1, generator=generator)
    pictures = torch.where(is_hidden[:, None], bar, pictures)

    noise = torch.randn(pictures.shape, generator=generator)
    noisy = pictures + draw_uniform(total, 0.02, 0.1, generator)[:, None] * noise
    return noisy.clamp(0, 1), labels


def make_loaders(
    names: Sequence[str],  # the classes
    n_train: int,  # training pictures of each class
    n_valid: int,  # validation pictures of each class
    bs: int = 32,  # pictures in a batch
) -> DataLoaders:
    "Return training and validation pictures; the order of training has a fixed seed."
    train, valid = draw_shapes(names, n_train, seed=1), draw_shapes(names, n_valid, seed=2)
    dls = DataLoaders.from_tensors(train, valid, bs=bs, seed=0)
    dls.vocab = list(names)
    return dls


# -- the model -------------------------------------------------------------------------------------


class Block(nn.Module):
    "Two convolutions and a shortcut around them; `stride=2` halves height and width."

    def __init__(self, n_in: int, n_out: int, stride: int = 1) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(n_in, n_out, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(n_out),
            nn.ReLU(),
            nn.Conv2d(n_out, n_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(n_out),
        )
        self.shortcut = nn.Conv2d(n_in, n_out, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.convs(x) + self.shortcut(x))


class ResNet(nn.Module):
    "A small ResNet for pictures of 32x32 pixels: a body of convolutions, and a head for the classes."

    def __init__(self, n_classes: int, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            Block(width, width),
            Block(width, 2 * width, stride=2),
            Block(2 * width, 4 * width, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(4 * width, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def split_groups(model: ResNet) -> list[list[nn.Parameter]]:
    "Return three parameter groups: the first layers, the later ones, the head."
    return [
        list(model.body[:4].parameters()),
        list(model.body[4:].parameters()),
        list(model.head.parameters()),
    ]


# -- training --------------------------------------------------------------------------------------


class Augment(Callback):
    "Change each training batch on its device: mirror, turn and shift its pictures, and change their colors."

    def before_batch(self) -> None:
        if not self.training:
            return
        x = self.x
        mirrored = [dim for dim in (2, 3) if torch.rand(()) < 0.5]
        x = x.flip(mirrored).rot90(int(torch.randint(4, ())), (2, 3))
        x = x.roll(torch.randint(-3, 4, (2,)).tolist(), (2, 3))
        x = x[:, torch.randperm(3)]
        brightness = 1 + 0.1 * torch.randn(len(x), 1, 1, 1, device=x.device)
        self.learn.xb = ((x * brightness).clamp(0, 1),)


@dataclass(frozen=True)
class Setting:
    "One way to train on the second shapes."

    start: str  # 'scratch', 'frozen' (the body of the first model stays as it is) or 'fine-tuned'
    lr: float  # highest learning rate of the head
    lr_mult: float = 1  # 'fine-tuned': how many times smaller the rate of the first layers is

    def __str__(self) -> str:
        mult = f', lr_mult {self.lr_mult:g}' if self.start == 'fine-tuned' else ''
        return f'{self.start}, lr {self.lr:g}{mult}'


SETTINGS = (
    Setting('scratch', 3e-3),
    Setting('scratch', 1e-2),
    Setting('frozen', 1e-2),
    Setting('frozen', 3e-2),
    Setting('fine-tuned', 3e-3, lr_mult=10),
    Setting('fine-tuned', 1e-2, lr_mult=10),
    Setting('fine-tuned', 1e-2, lr_mult=1),
)


@dataclass(frozen=True)
class Sizes:
    "How much is drawn and trained."

    n_first: int = 1500  # training pictures of each of the first shapes
    n_second: int = 40  # and of the second
    n_valid: int = 200  # validation pictures of each shape
    n_test: int = 400  # test pictures of each shape
    epochs_first: int = 15
    epochs_second: int = 40
    n_seeds: int = 3  # trainings with each setting
    bs: int = 32  # pictures in a batch, of all processes together


QUICK = Sizes(12, 8, 8, 8, epochs_first=2, epochs_second=2, n_seeds=1, bs=8)


def make_learner(
    dls: DataLoaders,
    model: nn.Module,
    folder: Path,  # for checkpoints
) -> Learner:
    "Return the Learner of one training, which writes a checkpoint after each epoch."
    return Learner(
        dls,
        model,
        nn.CrossEntropyLoss(),
        opt_func=Adam,
        metrics=accuracy,
        splitter=split_groups,
        path=folder,
        cbs=[Checkpoint(), Augment()],
    )


def train_first(dls: DataLoaders, sizes: Sizes, folder: Path, resume: bool = False) -> Learner:
    "Train on the first shapes."
    torch.manual_seed(0)
    learn = make_learner(dls, ResNet(len(FIRST)), folder / 'first')
    with learn.distributed('ddp'):
        learn.fit_one_cycle(sizes.epochs_first, 1e-2, resume=resume)
    return learn


def train_second(
    setting: Setting,
    dls: DataLoaders,
    first: ResNet,  # trained on the first shapes
    epochs: int,
    folder: Path,
    seed: int = 0,  # of the weights, and of what is drawn while training
    resume: bool = False,
) -> Learner:
    "Train on the second shapes, from random weights or from the first model's."
    torch.manual_seed(seed)
    model = ResNet(len(SECOND))
    if setting.start != 'scratch':
        model.body.load_state_dict(first.body.state_dict())
    learn = make_learner(dls, model, folder / f'{setting}, seed {seed}')
    with learn.no_bar(), learn.distributed('ddp'):
        if setting.start == 'fine-tuned':
            frozen = epochs // 4
            learn.fine_tune(
                epochs - frozen,
                setting.lr,
                freeze_epochs=frozen,
                lr_mult=setting.lr_mult,
                resume=resume,
            )
        else:
            if setting.start == 'frozen':
                learn.freeze()
            learn.fit_one_cycle(epochs, setting.lr, resume=resume)
    return learn


# -- the whole project -----------------------------------------------------------------------------


def choose(
    runs: dict[Setting, list[Learner]],  # the trainings with each setting, one for each seed
    start: str,  # among the settings that start like this
) -> Setting:
    "Return the setting with the highest mean accuracy on the validation pictures."
    candidates = [setting for setting in runs if setting.start == start]
    return max(candidates, key=lambda setting: mean_accuracy(runs[setting]))


def mean_accuracy(learners: list[Learner]) -> float:
    "Return the mean of the last validation accuracies."
    return fmean(learn.history[-1]['accuracy'] for learn in learners)


def write_results(learn: Learner, test: TensorLoader, folder: Path) -> None:
    "Draw losses, confusion matrix and the worst mistakes, and export the model with a softmax."
    learn.recorder.plot_loss().figure.savefig(folder / 'loss.png')
    interp = ClassificationInterpretation.from_learner(learn, dl=test)
    interp.plot_confusion_matrix().figure.savefig(folder / 'confusion.png')
    interp.plot_top_losses(12).figure.savefig(folder / 'top_losses.png')
    path = learn.export((folder / 'shapes.pt2').absolute(), act=nn.Softmax(1))
    print(f'The model without learnkit: torch.export.load({str(path)!r}).module()')


def main(
    arguments: Sequence[str] | None = None,  # None: of the command line
) -> None:
    "Train with all settings, and print the figures."
    parser = argparse.ArgumentParser(description='Classify pictures of shapes.')
    parser.add_argument('--folder', type=Path, default=Path('shapes'), help='for all files')
    parser.add_argument('--resume', action='store_true', help='continue from the checkpoints there')
    parser.add_argument('--quick', action='store_true', help='a few pictures and epochs')
    args = parser.parse_args(arguments)
    sizes = QUICK if args.quick else Sizes()
    rank = int(os.environ.get('RANK', 0))
    show = print if rank == 0 else lambda *_: None
    bs = sizes.bs // int(os.environ.get('WORLD_SIZE', 1))

    if args.quick:
        show('--quick shows that the script runs: its figures mean nothing.')
    show(f'Training on {", ".join(FIRST)}')
    dls = make_loaders(FIRST, sizes.n_first, sizes.n_valid, bs)
    first = train_first(dls, sizes, args.folder, args.resume)

    show(f'Training on {", ".join(SECOND)}: {sizes.n_second} pictures of each')
    dls = make_loaders(SECOND, sizes.n_second, sizes.n_valid, bs)
    runs = {}
    for setting in SETTINGS:
        runs[setting] = [
            train_second(
                setting, dls, first.model, sizes.epochs_second, args.folder, seed, args.resume
            )
            for seed in range(sizes.n_seeds)
        ]
        show(f'{setting!s:40} validation accuracy {mean_accuracy(runs[setting]):.1%}')

    test = TensorLoader(*draw_shapes(SECOND, sizes.n_test, seed=3), bs=100)
    for start in ('scratch', 'frozen', 'fine-tuned'):
        setting = choose(runs, start)
        accuracies = [learn.validate(dl=test)['accuracy'] for learn in runs[setting]]
        values = ', '.join(f'{value:.1%}' for value in accuracies)
        show(f'{setting!s:40} test accuracy {fmean(accuracies):.1%} ({values})')

    if rank == 0:
        write_results(runs[choose(runs, 'fine-tuned')][0], test, args.folder)


if __name__ == '__main__':
    main()
