"""Claims about metrics: the history has the value of the same metric in a loop by hand.

Ten samples in batches of 5, 2 and 3. The model returns its inputs, which are the predictions; its one weight has the
only gradient."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from learnkit import Callback, Checkpoint, DataLoaders, Learner
from tests.helpers.forks import reached
from tests.helpers.ranks import run_ranks
from tests.helpers.resuming import scramble
from tests.sweeps.claims import Claim, NothingToTry, by_hand, run_killed
from tests.sweeps.metrics import Columns, Measuring, N, make_data
from tests.sweeps.verdicts import Subject, shorten

SIZES = (5, 2, 3)
N_EPOCH = 2
KILLS = (2, 4, 2)  # at which batch of its process: the second of training, and twice of evaluation
RTOL = 1e-5
COLUMNS = ('fit', 'epoch', 'train_loss', 'valid_loss', 'time')


class Given(nn.Module):
    "A model that returns its input."

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Any) -> Any:
        return x


class Killed(Callback):
    "The place at which a run is killed, in training and in an evaluation."

    order = 70

    def after_batch(self) -> None:
        reached('batch')

    def state_dict(self) -> None:
        return None


def split_columns(columns: Columns) -> list[Columns]:
    "Return predictions and targets in batches of unequal sizes."
    ends = np.cumsum(SIZES)
    starts = [0, *ends[:-1]]
    return [tuple(column[a:b] for column in columns) for a, b in zip(starts, ends, strict=True)]


def make_learner(
    batches: list[Columns], metric: Any, *cbs: Any, folder: Path | None = None
) -> Learner:
    "Return a Learner that measures the predictions in its batches."
    model = Given()
    dls = DataLoaders(batches, batches, device='cpu', path=folder or '.', n_inp=1)

    def loss_func(pred: Any, *targets: Any) -> Tensor:
        return model.weight.sum() * 0.0

    options = {'opt_func': torch.optim.SGD, 'lr': 0.1, 'cbs': list(cbs)}
    return Learner(dls, model, loss_func, metrics=metric, **options)


def measure_by_hand(subject: Subject, columns: Columns) -> Any:
    "Return the value of a metric that is updated by batch, or of a score of the whole set."
    used: Measuring = subject.options
    if used.score is not None:
        preds, targets = (column.numpy() for column in columns)
        return used.score(targets, preds, **used.options)
    metric = subject.build()
    for batch in split_columns(columns):
        metric.update(*batch)
    return metric.compute()


def flatten(value: Any) -> list[float]:
    "Return the numbers in a nested value; None is a name that an earlier value had."
    if value is None:
        return []
    if isinstance(value, Mapping):
        return [number for part in value.values() for number in flatten(part)]
    if isinstance(value, (list, tuple)):
        return [number for part in value for number in flatten(part)]
    if isinstance(value, (Tensor, np.ndarray)):
        return [float(number) for number in torch.as_tensor(value).flatten().tolist()]
    return [float(value)]


def compare(expected: Any, got: Any) -> list[str]:
    "Return the two values if they differ."
    a, b = (np.array(flatten(value)) for value in (expected, got))
    if a.shape == b.shape and np.allclose(a, b, rtol=RTOL, atol=1e-7, equal_nan=True):
        return []
    return [shorten(f'{b.tolist()[:4]}, by hand {a.tolist()[:4]}')]


def read_row(row: Mapping[str, Any]) -> list[Any]:
    "Return the values of the metrics in a row of the history, of training and of evaluation."
    return [value for name, value in row.items() if name not in COLUMNS]


def validate(learn: Learner) -> list[Any]:
    with learn.no_logging(), learn.no_bar(), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return list(learn.validate())[1:]


# -- claims ----------------------------------------------------------------------------------------


def check_values(columns: Columns, subject: Subject) -> list[str]:
    "Return how an evaluation differs from a loop by hand."
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        expected = by_hand(lambda: measure_by_hand(subject, columns))
    return compare(expected, validate(make_learner(split_columns(columns), subject.build())))


def check_unequal(subject: Subject, folder: Path) -> list[str]:
    return check_values(make_data(subject.options.kind), subject)


def check_nan(subject: Subject, folder: Path) -> list[str]:
    "A prediction of one batch is NaN."
    first, *rest = make_data(subject.options.kind)
    if not isinstance(first, Tensor) or not first.is_floating_point():
        raise NothingToTry('predictions that are not numbers')
    first = first.clone()
    first[6] = torch.nan
    return check_values((first, *rest), subject)


def check_one_class(subject: Subject, folder: Path) -> list[str]:
    "All targets are those of the first sample."
    first, *rest = make_data(subject.options.kind)
    if not rest:
        raise NothingToTry('a metric without targets')
    return check_values((first, *map(repeat_first, rest)), subject)


def repeat_first(column: Any) -> Any:
    "Return a column of which each row is the first."
    return column[:1] * N if isinstance(column, list) else column[:1].repeat_interleave(N, 0)


def check_reset(subject: Subject, folder: Path) -> list[str]:
    "Three evaluations with one Learner, of which the second has the samples of the first batch."
    columns = make_data(subject.options.kind)
    batches = split_columns(columns)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        expected = by_hand(lambda: measure_again_by_hand(subject, columns))
    learn = make_learner(batches, subject.build())
    validate(learn)
    with learn.no_logging(), learn.no_bar():
        learn.validate(dl=batches[:1])
    return compare(expected, validate(learn))


def measure_again_by_hand(subject: Subject, columns: Columns) -> Any:
    "Return the third value of a metric that is reset twice, of which the second is of one batch."
    if subject.options.score is not None:
        return measure_by_hand(subject, columns)
    metric = subject.build()
    batches = split_columns(columns)
    for part in (batches, batches[:1], batches):
        metric.reset()
        for batch in part:
            metric.update(*batch)
        value = metric.compute()
    return value


def fit_to_the_end(subject: Subject, folder: Path, seed: int) -> list[list[float]]:
    "Measure training and evaluation with a checkpoint of each batch, or resume from the newest."
    batches = split_columns(make_data(subject.options.kind))
    checkpoint = Checkpoint('1ba', folder, background=False)
    learn = make_learner(batches, subject.build(), checkpoint, Killed(), folder=folder)
    learn.recorder.train_metrics = True
    scramble(seed)
    with learn.no_logging(), learn.no_bar():
        learn.fit(N_EPOCH, resume=True)
    return [flatten(read_row(row)) for row in learn.history]


def check_resume(subject: Subject, folder: Path) -> list[str]:
    "Kill in an epoch and in an evaluation, and resume in new processes; the metric measures training too."
    columns = make_data(subject.options.kind)
    expected = flatten(by_hand(lambda: measure_by_hand(subject, columns)))
    seeds = iter((2, 77, 78, 79))
    rows = run_killed(lambda: fit_to_the_end(subject, folder, next(seeds)), KILLS)
    if len(rows) != N_EPOCH:
        return [f'{len(rows)} rows']
    lines = [compare([*expected, *expected], row) for row in rows]
    return next((line for line in lines if line), [])


def check_ranks(subject: Subject, folder: Path) -> list[str]:
    "Two processes, of which the second has one batch less."
    columns = make_data(subject.options.kind)
    expected = by_hand(lambda: measure_by_hand(subject, columns))

    def job(rank: int) -> list[float]:
        warnings.simplefilter('ignore')  # of the library
        learn = make_learner(split_columns(columns), subject.build())
        with learn.distributed('ddp', timeout='20s'):
            return flatten(validate(learn))

    for got in run_ranks(job, timeout_s=60):
        if lines := compare(expected, got):
            return lines
    return []


CLAIMS: dict[str, Claim] = {
    'unequal batches': check_unequal,
    'NaN': check_nan,
    'one class': check_one_class,
    'reset': check_reset,
    'kill and resume': check_resume,
    'two processes': check_ranks,
}
