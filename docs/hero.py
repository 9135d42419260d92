"""Draw the pictures of the first page, and print the run that they show: `python docs/hero.py`.

The run is the code of docs/index.md. The curves are the losses of each epoch, and the confusion
matrix is of the validation set. Run this again when the code of the page changes, and copy the
printed table to the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from learnkit import ClassificationInterpretation, Learner

HERE = Path(__file__).resolve().parent
STATIC = HERE / 'static'
SHAPES = {'curves': (5.4, 4.4), 'matrix': (4.6, 4.4)}  # inches
INK = '#374151'
TRAIN, VALID = '#9ca3af', '#2563eb'


def run() -> Learner:
    "Run the first code block of the page, and return its Learner."
    code = re.search(r'```python\n(.*?)```', (HERE / 'index.md').read_text('utf-8'), re.S)
    assert code is not None
    names: dict[str, Any] = {}
    exec(compile(code[1], 'index.md', 'exec'), names)
    return names['learn']


def draw_curves(learn: Learner, ax: Any) -> None:
    "Plot the training loss and the validation loss of each epoch."
    history = learn.history
    epochs = range(len(history))
    train = [row['train_loss'] for row in history]
    valid = [row['valid_loss'] for row in history]
    ax.plot(epochs, train, color=TRAIN, lw=2, label='training')
    ax.plot(epochs, valid, color=VALID, lw=2, label='validation')
    ax.set(xlabel='epoch', ylabel='loss', ylim=(0, None), title='Learning curves')
    ax.legend(frameon=False)
    ax.spines[['top', 'right']].set_visible(False)
    ax.grid(alpha=0.25)


def draw_matrix(learn: Learner, ax: Any) -> str:
    "Plot the confusion matrix of the validation set, and return its title."
    counts = ClassificationInterpretation.from_learner(learn).confusion_matrix()
    shown = counts / counts.sum(1, keepdims=True)
    ax.imshow(shown, cmap='Blues', vmin=0, vmax=1.2)
    for i, row in enumerate(counts):
        for j, n in enumerate(row):
            if n:
                ax.text(j, i, int(n), ha='center', va='center', color='white' if i == j else INK)
    title = f'{counts.trace()} of {counts.sum()} validation digits are correct'
    ticks = range(len(counts))
    ax.set(xlabel='predicted', ylabel='digit', xticks=ticks, yticks=ticks, title=title)
    ax.spines[:].set_visible(False)
    return title


def main() -> None:
    "Run, draw, and write the pictures."
    torch.set_num_threads(1)
    learn = run()
    figures = {
        name: Figure(figsize=size, layout='constrained', facecolor='white')
        for name, size in SHAPES.items()
    }
    draw_curves(learn, figures['curves'].subplots())
    print(draw_matrix(learn, figures['matrix'].subplots()))
    for name, figure in figures.items():
        figure.savefig(STATIC / f'{name}.png', dpi=150)


if __name__ == '__main__':
    main()
