"""Looks at a moment of an earlier run, and differences of two runs: the second look, and what no loss shows."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from learnkit import (
    Callback,
    Checkpoint,
    DataLoaders,
    Learner,
    MixUp,
    SaveModelCallback,
    first_difference,
)
from learnkit.core.errors import CancelBatchException
from tests.helpers.learners import quiet_learner
from tests.silent.cases import case

row = partial(case, 'rewind', tolerance=0.0)  # bit for bit


def make(
    path: Path, *cbs: Any, model: Any = None, classes: bool = False, **options: Any
) -> Learner:
    torch.manual_seed(0)
    x = torch.randn(32, 4)
    y = (x.sum(1) > 0).long() if classes else x.sum(1, keepdim=True)
    data = TensorDataset(x, y)
    if model is None:
        last = nn.Linear(4, 2 if classes else 1)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), last)
    loss = nn.CrossEntropyLoss() if classes else nn.MSELoss()
    options = {'opt_func': torch.optim.SGD, 'lr': 0.05, **options}
    every = options.pop('every', '3ba')
    cbs = (Checkpoint(every, keep_last=None, rehearse='rehearse' not in options), *cbs)
    options.pop('rehearse', None)
    dls = DataLoaders(DataLoader(data, 8, shuffle=True), DataLoader(data, 8))
    return quiet_learner(dls, model, loss, path=path, cbs=cbs, **options)


@contextmanager
def quiet_folder() -> Iterator[Path]:
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        yield Path(folder)


class Note(Callback):
    "Note the losses of the training batches."

    order = 9000
    needed_to_rewind = False

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def after_loss(self) -> None:
        if self.learn.training:
            self.losses[self.learn.time.ba] = self.learn.loss_grad.item()


def train(learn: Learner, fit: Any = None) -> dict[int, float]:
    "Train two epochs, and return the losses as the loop computes them."
    noting = Note()
    with learn.no_bar(), learn.added_cbs([noting]):
        (fit or (lambda learn: learn.fit(2)))(learn)
    return noting.losses


def look_at(
    ba: int,
    cbs: Callable[[], list[Any]],
    look: Callable[[Any], Any],
    fit: Any = None,
    **options: Any,
) -> tuple[Any, dict[int, float]]:
    "Train a run, look at a moment of it, and return what is seen, or the error's class, and the run's losses."
    with quiet_folder() as path:
        losses = train(make(path, *cbs(), **options), fit)
        try:
            return look(make(path, *cbs(), **options).rewind(ba, fit=fit)), losses
        except Exception as e:
            return type(e).__name__, losses


def three_steps(moment: Any) -> list[float]:
    return [moment.step() for _ in range(3)]


def set_loss(cb: Any) -> None:
    if cb.learn.epoch == 0:
        cb.learn.loss_func = nn.L1Loss()


@row('step() after a callback has set another loss function', old='3.65917 three times')
def other_loss() -> Any:
    found, losses = look_at(5, lambda: [Callback(after_epoch=set_loss)], three_steps)
    return found, [losses[5]] * 3


@row('the same, at a checkpoint after the change', old='5.85840 three times')
def other_loss_at_checkpoint() -> Any:
    cbs = lambda: [Callback(after_epoch=set_loss)]
    return look_at(6, cbs, three_steps)[0], 'CheckpointError'


class Count(nn.Linear):
    "Line that counts its passes in an attribute that no checkpoint holds."

    n = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += self.training
        return super().forward(x) * (1 + self.n / 10)


def make_counting() -> nn.Module:
    torch.manual_seed(1)
    return Count(4, 1)


@row(
    'three looks before the first checkpoint, at state that no checkpoint holds',
    old='3.77191, 3.64410, 3.52491',
)
def lost_before() -> Any:
    return look_of_counting(), 'CheckpointError'


def look_of_counting(**options: Any) -> Any:
    with quiet_folder() as path:
        train(make(path, model=make_counting(), **options))
        try:
            return three_steps(make(path, model=make_counting(), **options).rewind(1))
        except Exception as e:
            return type(e).__name__


@row('the same, without the rehearsal that names it', old='3.77191, 3.64410, 3.52491')
def unnamed_before() -> Any:
    with quiet_folder() as path:
        losses = train(make(path, model=make_counting(), rehearse=False))
    return look_of_counting(rehearse=False), [losses[1]] * 3


@row(
    'validate() in a callback before the first checkpoint',
    old='CheckpointError: final_record is lost',
)
def validate_in_callback() -> Any:
    def evaluate(cb: Any) -> None:
        if cb.learn.training and cb.learn.train_iter == 1:
            cb.learn.validate()

    found, losses = look_at(5, lambda: [Callback(before_batch=evaluate)], three_steps)
    return found, [losses[5]] * 3


def split(model: Any) -> Any:
    return [[*model[0].parameters()], [*model[1:].parameters()]]


def fine_tune(learn: Any, **options: Any) -> None:
    learn.fine_tune(1, 0.01, freeze_epochs=1, **options)


@row('step() in the frozen fit of fine_tune', old='LossError')
def frozen() -> Any:
    found, losses = look_at(3, list, three_steps, fine_tune, splitter=split)
    return found, [losses[3]] * 3


@row('step() with SaveModelCallback', old='FileNotFoundError')
def best_weights() -> Any:
    found, losses = look_at(5, lambda: [SaveModelCallback()], three_steps)
    return found, [losses[5]] * 3


@row('samples() with MixUp and classes: number of rows', old='ValueError')
def blended_samples() -> Any:
    look = lambda moment: len(moment.samples())
    return look_at(5, lambda: [MixUp()], look, classes=True)[0], 8


@row('step(without=[-1])', old='3.66240, the loss of the whole batch')
def without_negative() -> Any:
    return look_at(5, list, lambda moment: moment.step(without=[-1]))[0], 'OptionError'


@row('step(without=) with an index of the data set', old='3.66240, the loss of the whole batch')
def without_index() -> Any:
    look = lambda moment: moment.step(without=[max(moment.indices)])
    return look_at(5, list, look)[0], 'OptionError'


@row('fit() after a rewind, then the run is rewound', old='CheckpointError')
def fit_after_rewind() -> Any:
    with quiet_folder() as path:
        losses = train(make(path))
        again = make(path)
        again.rewind(5)
        try:
            with again.no_bar():
                again.fit(2)
        except Exception:
            pass
        try:
            return make(path).rewind(5).step(), losses[5]
        except Exception as e:
            return type(e).__name__, losses[5]


# -- two runs --------------------------------------------------------------------------------------


class Plant(Callback):
    "Call a function after one training batch."

    order = 5

    def __init__(self, ba: int, f: Callable[[Any], Any]) -> None:
        self._ba, self._f = ba, f

    def after_step(self) -> None:
        if self.learn.train_iter == self._ba:
            self._f(self.learn)


def compare(
    cbs: Callable[[], list[Any]], shared: Callable[[], list[Any]] = list, fits: Any = (None, None)
) -> str:
    "Return the batch and the quantity of the first difference of two runs, or the error's class."
    with quiet_folder() as path:
        sides = [(path / 'a', shared), (path / 'b', lambda: [*shared(), *cbs()])]
        for (folder, make_cbs), fit in zip(sides, fits, strict=True):
            train(make(folder, *make_cbs()), fit)
        try:
            a, b = (make(folder, *make_cbs()) for folder, make_cbs in sides)
            found = first_difference(a, b, fit=fits[0])
        except Exception as e:
            return type(e).__name__
    return 'None' if found is None else f'batch {found.batch}: {found.what}'


def change_variance(learn: Any) -> None:
    learn.model[1].running_var.mul_(1.5)


@torch.no_grad()
def change_bias(learn: Any) -> None:
    learn.model[2].bias.add_(0.1)


@row('first_difference: running_var changed at batch 4', old='None')
def changed_buffer() -> Any:
    return compare(lambda: [Plant(4, change_variance)]), 'batch 4: buffer 1.running_var'


@row('first_difference: a weight changed at the last batch', old='None')
def changed_final_weight() -> Any:
    return compare(lambda: [Plant(7, change_bias)]), 'batch 7: weight 2.bias'


@row('first_difference: validation inputs changed by a callback', old='None')
def changed_validation() -> Any:
    def scale(cb: Any) -> None:
        if not cb.learn.training:
            cb.learn.xb = (cb.learn.xb[0] * 1.1,)

    return compare(lambda: [Callback(before_batch=scale)]), 'batch 4: xb'


@row(
    'first_difference: a batch skipped in both runs, a weight changed later',
    old='CheckpointError: no recorded loss',
)
def skipped_batch() -> Any:
    def skip(cb: Any) -> None:
        if cb.learn.training and cb.learn.train_iter == 2:
            raise CancelBatchException

    shared = lambda: [Callback(before_batch=skip)]
    return compare(lambda: [Plant(5, change_bias)], shared), 'batch 5: weight 2.bias'


@row('first_difference: one-cycle fits of two lengths, one fit=', old='batch 2: loss')
def two_lengths() -> Any:
    fits = [lambda learn, n=n, **kw: learn.fit_one_cycle(n, 0.05, **kw) for n in (2, 3)]
    return compare(list, fits=fits), 'batch 0: number of epochs (2 and 3)'
