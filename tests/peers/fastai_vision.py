"""Train, interpret, kill and resume a vision model with fastai's data, model and interpretation.

    python -m tests.peers.fastai_vision    # in the environment of fastai: print the rows

The same script runs in a learnkit Learner and in fastai's: a DataBlock of picture files, augmentation on the batch,
`vision_learner` without pretrained weights, `fine_tune`, `ClassificationInterpretation`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn

import learnkit
from tests.peers import fastai_data as data
from tests.peers.rows import EQUAL, TOO_FAR, Row, compare_numbers, quiet_folder

# isort: split
import matplotlib.pyplot as plt
from fastai import optimizer
from fastai.callback.core import Callback
from fastai.callback.mixup import MixUp
from fastai.interpret import ClassificationInterpretation
from fastai.metrics import accuracy, error_rate
from fastai.vision.all import get_image_files, vision_learner

PART = 'Vision, end to end'
KILL_AT = 7  # training batches: in the second fit of `fine_tune`
WHY_CLOSE = 'fastai rounds the progress of a schedule in pieces to float32'
WHY_SGD = 'with SGD without momentum, which fastai forgets at `unfreeze` and learnkit keeps'


class SeedEpochs(Callback):
    "Seed every random generator with the number of the epoch."

    order = -100

    def before_epoch(self) -> None:
        data.seed_generators(self.epoch)


class Kill(Callback):
    "Kill the process after so many training batches, without a word."

    n_batches = 0

    def before_batch(self) -> None:
        self.n_batches += self.training
        if self.n_batches > KILL_AT:
            os.kill(os.getpid(), signal.SIGKILL)


def small_net(pretrained: bool = False) -> nn.Module:
    "Return a small network in torchvision's form: `vision_learner` cuts it at the pooling layer."
    return nn.Sequential(*data.body(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2))


def make_fastai(folder: Path, cbs: list[Any], opt_func: Any = optimizer.SGD) -> Any:
    "Return fastai's `vision_learner`."
    data.seed_generators(0)
    dls = data.pictures(folder)
    options = {'metrics': [accuracy, error_rate], 'path': folder, 'cbs': cbs}
    return vision_learner(dls, small_net, pretrained=False, opt_func=opt_func, **options)


def make_learnkit(folder: Path, cbs: list[Any], opt_func: Any = learnkit.SGD) -> learnkit.Learner:
    "Return a learnkit Learner with the parts of fastai's `vision_learner`."
    made = make_fastai(folder, [])
    return learnkit.Learner(
        made.dls,
        made.model,
        made.loss_func,
        opt_func=opt_func,
        splitter=made.splitter,
        metrics=made.metrics,
        path=folder,
        cbs=cbs,
    )


def fine_tune(learn: Any, **options: Any) -> Any:
    "Fine-tune, and return the Learner."
    learn.fine_tune(2, 0.05, **options)
    return learn


def weights(learn: Any) -> dict[str, torch.Tensor]:
    return dict(learn.model.state_dict())


def make_with_adam(folder: Path, cbs: list[Any]) -> learnkit.Learner:
    return make_learnkit(folder, [MixUp(0.4), *cbs], learnkit.Adam)


def train_in_child(folder: Path) -> bool:
    "Train with checkpoints in a process that is killed; return whether it was."
    pid = os.fork()
    if not pid:
        fine_tune(make_with_adam(folder, [learnkit.Checkpoint(every='1ba'), Kill()]))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def compare_resumed(folder: Path) -> str:
    "Compare a run that was killed and resumed with one that was not."
    expected = fine_tune(make_with_adam(folder, []))
    if not train_in_child(folder):
        return TOO_FAR
    resumed = make_with_adam(folder, [learnkit.Checkpoint(every='1ba')])
    fine_tune(resumed, resume=True)
    steps = [learn.parts.counters.batches for learn in (expected, resumed)]
    return compare_numbers(weights(expected), weights(resumed)) if steps[0] == steps[1] else TOO_FAR


def predict(learn: Any) -> dict[str, torch.Tensor]:
    "Predict on files without labels, on one file, and on the validation set."
    files = get_image_files(learn.path / 'pictures').sorted()[:3]
    preds, _ = learn.get_preds(dl=learn.dls.test_dl(files))
    label, number, shares = learn.predict(files[0])
    valid, targets = learn.get_preds()
    is_named = torch.tensor(learn.dls.vocab[number] == label)
    return {
        'preds': preds,
        'number': number,
        'shares': shares,
        'named': is_named,
        'valid': valid,
        'targets': targets,
    }


def show(learn: Any) -> dict[str, torch.Tensor]:
    "Count the titled pictures that `show_results` and `plot_top_losses` draw."
    counts = {}
    interpretation = ClassificationInterpretation.from_learner(learn)
    for name, draw in {
        'results': lambda: learn.show_results(shuffle=False),
        'losses': lambda: interpretation.plot_top_losses(4),
        'matrix': interpretation.plot_confusion_matrix,
    }.items():
        plt.close('all')
        draw()
        axes = [ax for number in plt.get_fignums() for ax in plt.figure(number).axes]
        counts[name] = torch.tensor(sum(bool(ax.get_title()) for ax in axes))
    plt.close('all')
    return counts


def interpret(learn: Any) -> dict[str, torch.Tensor]:
    "Return the confusion matrix and the largest losses."
    interpretation = ClassificationInterpretation.from_learner(learn)
    losses, indices = interpretation.top_losses(3)
    matrix = torch.tensor(interpretation.confusion_matrix())
    return {'matrix': matrix, 'losses': losses, 'indices': indices}


def vision_rows() -> list[Row]:
    "Return the rows of the vision run."
    with quiet_folder() as root:
        theirs = fine_tune(make_fastai(root, [SeedEpochs(), MixUp(0.4)]))
        ours = fine_tune(make_learnkit(root, [SeedEpochs(), MixUp(0.4)]))
        resumed = compare_resumed(root)
        same_keys = list(theirs.recorder.metric_names) == list(ours.recorder.metric_names)
        found = {
            'DataBlock, aug_transforms, MixUp, vision_learner, fine_tune': compare_numbers(
                weights(theirs), weights(ours)
            )
        }
        for name, use in {
            'predict, get_preds(dl=dls.test_dl(items))': predict,
            'ClassificationInterpretation': interpret,
            'show_results, plot_top_losses, plot_confusion_matrix': show,
        }.items():
            found[name] = compare_numbers(use(theirs), use(ours))
        found['Checkpoint, SIGKILL in mid-epoch, fine_tune(resume=True)'] = resumed
    return [
        Row(
            name,
            True,
            same_keys,
            numbers,
            '' if numbers == EQUAL else f'{WHY_CLOSE}; {WHY_SGD}',
            PART,
        )
        for name, numbers in found.items()
    ]


if __name__ == '__main__':
    for row in vision_rows():
        print(row)
