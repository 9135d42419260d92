"""What a later fit or a later process would have used without a word: batches, best weights, attributes, generators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from learnkit import Callback, Checkpoint, DataLoaders, Learner, TrackerCallback
from learnkit.checkpoint.file import read_state
from learnkit.checkpoint.folder import find

X = torch.linspace(-2, 2, 24 * 3, dtype=torch.float64).sin().view(24, 3)
Y = X.sum(1, keepdim=True)


def make_learner(cbs: Any = (), shuffle: bool = False, **options: Any) -> Learner:
    torch.manual_seed(0)
    dls = DataLoaders.from_tensors((X, Y), (X, Y), bs=4, shuffle=shuffle, device='cpu')
    options = {'opt_func': torch.optim.SGD, 'lr': 0.1, **options}
    learn = Learner(dls, nn.Linear(3, 1).double(), nn.MSELoss(), cbs=cbs, **options)
    learn.logger = lambda row: None
    return learn


@pytest.mark.silent(
    'six times fit("1ba"): distance of the weights from six batches of a plain loop'
)
def test_fits_of_one_batch_train_on_one_batch_after_the_other(
    row: Callable[..., None],
) -> None:
    learn = make_learner()
    plain, repeated = make_learner().model, make_learner().model
    for _ in range(6):
        learn.fit('1ba')
    for model, batches in ((plain, range(6)), (repeated, [0] * 6)):
        opt = torch.optim.SGD(model.parameters(), 0.1)
        for i in batches:
            opt.zero_grad()
            nn.functional.mse_loss(model(X[4 * i : 4 * i + 4]), Y[4 * i : 4 * i + 4]).backward()
            opt.step()

    def distance(model: nn.Module) -> float:
        return (model.weight - plain.weight).abs().max().item()

    row(was=distance(repeated), now=distance(learn.model), independent=0.0)
    assert distance(learn.model) == 0 and distance(repeated) > 0.01


@pytest.mark.silent(
    "Checkpoint(every='5ba', monitor='valid_loss'): loss of the weights in the best file"
)
def test_the_best_file_has_the_weights_that_were_measured(
    row: Callable[..., None], tmp_path: Path
) -> None:
    "The rate grows after the first of three epochs of six batches, so that this epoch is the best."

    def grow(cb: Callback) -> None:
        cb.learn.opt.set_hyper('lr', 0.1 if cb.train_iter < 6 else 1.0)

    files = Checkpoint('5ba', tmp_path, monitor='valid_loss', keep_last=None, background=False)
    learn = make_learner([files, Callback(before_batch=grow)])
    learn.fit(3)

    def measure(path: Path) -> float:
        model = nn.Linear(3, 1).double()
        model.load_state_dict(read_state(path)[0]['model'])
        return nn.functional.mse_loss(model(X), Y).item()

    measured = min(epoch['valid_loss'] for epoch in learn.history)
    found = find('best', tmp_path)
    assert found is not None and found[2]['value'] == measured
    (next_file,) = tmp_path.glob('*-ba10.ckpt')  # the first at the interval after the evaluation
    row(was=measure(next_file), now=measure(found[0]), independent=measured)
    assert measure(found[0]) == pytest.approx(measured, rel=1e-12)
    assert measure(next_file) > 2 * measured


class Smoothed(TrackerCallback):
    "Sums the validation losses of its epochs in attributes that have names of a base's variables."

    def before_fit(self) -> None:
        super().before_fit()
        self.items = 0
        self.values = 0.0

    def after_epoch(self) -> None:
        super().after_epoch()
        self.items += 1
        self.values += self.learn.history[-1]['valid_loss']


@pytest.mark.silent('a subclass of TrackerCallback after a resume: epochs that it has counted')
def test_attributes_of_a_subclass_are_resumed(row: Callable[..., None], tmp_path: Path) -> None:
    def train(n: int, folder: Path, **options: Any) -> Smoothed:
        learn = make_learner([cb := Smoothed(), Checkpoint(folder=folder, preemption=False)])
        learn.fit(n, **options)
        return cb

    plain = train(4, tmp_path / 'plain')
    train(3, tmp_path / 'resumed')
    resumed = train(4, tmp_path / 'resumed', resume=True)
    row(was=1, now=resumed.items, independent=plain.items)
    assert (resumed.items, resumed.values) == (4, plain.values)


class Noise:
    "Adds noise of its own generator."

    def __init__(self, seed: int) -> None:
        self.rng = np.random.RandomState(seed)

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.rng.standard_normal()


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    "Rows of `X` with the noise of one of 40 transforms."

    def __init__(self) -> None:
        self.transforms = [Noise(i) for i in range(40)]

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.transforms[39](X[i]), Y[i]


@pytest.mark.silent('40 transforms with generators of their own: a weight after a resume')
def test_every_generator_of_a_data_set_is_resumed(row: Callable[..., None], tmp_path: Path) -> None:
    def train(n: int, folder: Path, **options: Any) -> float:
        learn = make_learner(Checkpoint(folder=folder, preemption=False))
        learn.dls = DataLoaders(DataLoader(Noisy(), 4))
        learn.fit(n, **options)
        return learn.model.weight[0, 0].item()

    plain = train(2, tmp_path / 'plain')
    train(1, tmp_path / 'resumed')
    resumed = train(2, tmp_path / 'resumed', resume=True)
    row(was=0.468514, now=resumed, independent=plain)
    assert resumed == plain
