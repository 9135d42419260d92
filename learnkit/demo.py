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
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from learnkit.core.errors import MissingExtraError
from learnkit.core.files import atomic_write
from learnkit.core.optional import check_libraries
from learnkit.data.dataloaders import DataLoaders
from learnkit.inference.interpretation import ClassificationInterpretation
from learnkit.learner import Learner
from learnkit.metrics.functional import accuracy
from learnkit.optim.optimizers import Adam

FILES = {
    'model.pth': 'the weights',
    'history.csv': 'one line an epoch',
    'digits.png': 'losses and confusion matrix',
}


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
    bs: int = 32,  # batch size
) -> Learner:
    "Train on the digits and return the Learner."
    torch.manual_seed(seed)
    learn = Learner(
        digits(bs, seed),
        small_cnn(),
        loss_func=F.cross_entropy,
        opt_func=Adam,
        lr=5e-4,
        metrics=accuracy,
    )
    learn.fit(epochs)
    return learn


# -- output files ----------------------------------------------------------------------------------


def save_history(history: Sequence[dict[str, Any]], path: Path) -> None:
    "Write a CSV file with a header and one line per epoch."
    with (
        atomic_write(path) as temporary,
        temporary.open('w', newline='', encoding='utf-8') as f,
    ):
        writer = csv.DictWriter(f, fieldnames=list(history[0]))
        writer.writeheader()
        writer.writerows(history)


def save_picture(learn: Learner, interp: ClassificationInterpretation, path: Path) -> None:
    "Plot the losses of each step and evaluation, and the confusion matrix."
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout='constrained')
    losses, matrix = figure.subplots(1, 2, width_ratios=(1.15, 1))
    learn.recorder.plot_loss(ax=losses)
    losses.set(title='Loss', ylabel='cross-entropy')
    counts = interp.confusion_matrix()
    title = f'Validation: {counts.trace()} of {counts.sum()} right'
    interp.plot_confusion_matrix(title=title, ax=matrix)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format='png', dpi=120)


def save_all(learn: Learner, out: Path) -> float:
    "Write weights, history and plot, and return the validation accuracy."
    interp = ClassificationInterpretation.from_learner(learn)
    with atomic_write(out / 'model.pth') as temporary:
        torch.save(learn.model.cpu().state_dict(), temporary)
    save_history(learn.history, out / 'history.csv')
    save_picture(learn, interp, out / 'digits.png')
    return accuracy(interp.preds, interp.targs).item()


# -- the command line ------------------------------------------------------------------------------


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    "Return the command's options."
    parser = argparse.ArgumentParser(
        prog='python -m learnkit.demo',
        description='Train a small network on handwritten digits.',
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument('--epochs', type=int, default=15, help='times through the training images')
    parser.add_argument('--seed', type=int, default=0, help='of the split, weights and order')
    parser.add_argument('--out', type=Path, default=Path('digits-demo'), help='folder for files')
    parser.add_argument('--bs', type=int, default=32, help='images a batch')
    options = parser.parse_args(argv)
    for name in ('epochs', 'bs'):
        if getattr(options, name) < 1:
            parser.error(f'--{name} is 1 or more')
    return options


def main(argv: Sequence[str] | None = None) -> int:
    "Run the demo and return the process's exit code."
    options = parse_options(argv)
    try:
        check_libraries('the demo', 'sklearn', 'matplotlib')
        options.out.mkdir(parents=True, exist_ok=True)
        learn = train(options.epochs, options.seed, options.bs)
        validation_accuracy = save_all(learn, options.out)
    except (MissingExtraError, OSError) as e:
        print(f'learnkit.demo: {e}', file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print('learnkit.demo: stopped', file=sys.stderr)
        return 130
    print(f'{validation_accuracy:.1%} of the validation images are classified correctly.')
    for name, description in FILES.items():
        print(f'wrote {options.out / name}: {description}')
    return 0


if __name__ == '__main__':
    # a second thread does not speed up images this small, and slows them down on busy cores
    torch.set_num_threads(1)
    sys.exit(main())
