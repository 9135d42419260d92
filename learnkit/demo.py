# SPDX-License-Identifier: Apache-2.0
"""Train a small convolutional network on 1,797 handwritten digits: `python -m learnkit.demo`.

The digits come with scikit-learn, so nothing is downloaded. A fifth of them is used for validation. The demo prints a
table while it trains, and writes the weights, the history and a plot into a folder.

Read `train` first: a project needs nothing else.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from learnkit.core.optional import check_libraries
from learnkit.data.dataloaders import DataLoaders
from learnkit.inference.interpretation import ClassificationInterpretation
from learnkit.learner import Learner
from learnkit.metrics.functional import accuracy
from learnkit.optim.optimizers import Adam

# -- the training ----------------------------------------------------------------------------------


def digits(
    bs: int = 32,  # batch size
    seed: int = 0,  # seed of the split and of the training order
) -> DataLoaders:
    "Return the digits as 1,437 training and 360 validation images of shape (1, 8, 8), with values in [0, 1]."
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    images = data.images[:, None].astype('float32') / 16
    labels = data.target
    x, xv, y, yv = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=seed
    )
    return DataLoaders.from_tensors((x, y), (xv, yv), bs=bs, seed=seed)


def small_cnn() -> nn.Module:
    "Return a network of three convolutions that maps images (B, 1, 8, 8) to scores (B, 10)."

    def conv(n_in: int, n_out: int) -> list[nn.Module]:
        return [nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU()]

    return nn.Sequential(
        *conv(1, 32),
        *conv(32, 32),
        nn.MaxPool2d(2),
        *conv(32, 64),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(64 * 4 * 4, 10),
    )


def train(
    epochs: int = 15,  # number of epochs
    seed: int = 0,  # seed of the split, the weights and the order
) -> Learner:
    "Train on the digits and return the Learner."
    torch.manual_seed(seed)
    learn = Learner(
        digits(seed=seed),
        small_cnn(),
        loss_func=F.cross_entropy,
        opt_func=Adam,
        lr=5e-4,
        metrics=accuracy,
    )
    learn.fit(epochs)
    return learn


# -- the command -----------------------------------------------------------------------------------


def save_all(learn: Learner, out: Path) -> None:
    "Write weights, history and plot, and print the validation accuracy."
    from matplotlib.figure import Figure

    torch.save(learn.model.cpu().state_dict(), out / 'model.pth')
    with (out / 'history.csv').open('w', newline='', encoding='utf-8') as f:
        writer = csv.DictWriter(f, fieldnames=list(learn.history[0]))
        writer.writeheader()
        writer.writerows(learn.history)
    interp = ClassificationInterpretation.from_learner(learn)
    figure = Figure(figsize=(11, 5), layout='constrained')
    losses, matrix = figure.subplots(1, 2)
    learn.recorder.plot_loss(ax=losses)
    interp.plot_confusion_matrix(ax=matrix)
    figure.savefig(out / 'digits.png', dpi=120)
    share = accuracy(interp.preds, interp.targs).item()
    print(f'{share:.1%} of the validation images are classified correctly.')


def main(argv: Sequence[str] | None = None) -> int:
    "Run the demo and return the process's exit code."
    parser = argparse.ArgumentParser(
        prog='python -m learnkit.demo', description=train.__doc__, allow_abbrev=False
    )
    parser.add_argument('--epochs', type=int, default=15, help='number of epochs (15)')
    parser.add_argument('--seed', type=int, default=0, help='of the split, weights and order (0)')
    parser.add_argument('--out', type=Path, default=Path('digits-demo'), help='folder for files')
    options = parser.parse_args(argv)
    check_libraries('the demo', 'sklearn', 'matplotlib')
    options.out.mkdir(parents=True, exist_ok=True)
    save_all(train(options.epochs, options.seed), options.out)
    print(f'Weights, history and a picture are in {options.out}.')
    return 0


if __name__ == '__main__':
    # a second thread does not speed up images this small, and slows them down on busy cores
    torch.set_num_threads(1)
    sys.exit(main())
