"""Run every callback that fastai ships in a learnkit Learner and in fastai's, and compare.

Both train the same model on the same fastai loaders with SGD, and seed the random generators at the beginning of each
epoch, because evaluation restores them in learnkit.

    python -m tests.peers.fastai_bench [NAME ...]   # in the environment: print rows, and each number that differs
"""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import learnkit
from tests.peers import fastai_data as data
from tests.peers.fastai_cases import CASES, NOT_RUN, Case
from tests.peers.fastai_guide import guide_rows
from tests.peers.fastai_vision import SeedEpochs, vision_rows
from tests.peers.repeated import rewind_row
from tests.peers.rows import TOO_FAR, Row, compare_numbers, quiet_folder

# isort: split
import fastai.learner as fastai_learner
from fastai import optimizer
from fastai.callback.core import Callback
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import accuracy

TOLERANCE = 2e-6  # relative: a mean of float32 values is added up in another order
REWOUND = (
    'MixUp',
    'CutMix',
    'MixedPrecision',
    'GradientAccumulation',
    'ReduceLROnPlateau',
    'EarlyStoppingCallback',
)  # callbacks whose runs are rewound, too
OPTIMIZERS = {fastai_learner.Learner: optimizer.SGD, learnkit.Learner: learnkit.SGD}


class CountSteps(Callback):
    "Count the optimizer's steps."

    def before_fit(self) -> None:
        self.n_steps = 0

    def after_step(self) -> None:
        self.n_steps += 1


@dataclass
class Outcome:
    "What a fit left."

    weights: dict[str, torch.Tensor]
    values: dict[str, Any] = field(default_factory=dict)


def make_learner(case: Case, library: type, folder: Path, more: list[Any]) -> Any:
    "Return one of the two Learners, with a case's callbacks and more."
    data.seed_generators(0)
    loaders = case.loaders(folder)
    model = case.model()
    options = {'loss_func': CrossEntropyLossFlat(), 'metrics': accuracy, **case.options(model)}
    opt_func = partial(OPTIMIZERS[library], mom=case.mom)
    if case.optimizer is not None:
        is_fastai = library is fastai_learner.Learner
        wrapped = partial(optimizer.OptimWrapper, opt=case.optimizer)
        opt_func = wrapped if is_fastai else case.optimizer
    cbs = [*more, *case.make()]
    return library(loaders, model, opt_func=opt_func, cbs=cbs, path=folder, **options)


def train(case: Case, library: type, folder: Path) -> Outcome:
    "Train a case with one of the two Learners."
    count = CountSteps()
    learn = make_learner(case, library, folder, [SeedEpochs(), count])
    if library is learnkit.Learner and hasattr(learn.recorder, 'train_loss'):
        learn.recorder.train_loss = 'smooth'  # as in fastai
    case.fit(learn)
    recorder = learn.recorder
    values = {
        'n_steps': count.n_steps,
        'names': list(recorder.metric_names),
        # fastai leaves out what was not measured, learnkit has None
        'values': [[v for v in row if v is not None] for row in recorder.values if row],
        'lrs': list(recorder.lrs),
        'losses': list(recorder.losses),
        'observed': dict(case.observe(learn)),
    }
    state = learn.model.state_dict()
    # a quantized model has dtypes in its state, too
    weights = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return Outcome(weights, values)


def flatten(value: Any, name: str = '') -> Iterator[tuple[str, Any]]:
    "Yield each number, string and tensor of a nested value, with its path."
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flatten(item, f'{name}.{key}')
    elif isinstance(value, (list, tuple)) or type(value).__name__ == 'L':
        for i, item in enumerate(value):
            yield from flatten(item, f'{name}[{i}]')
    elif isinstance(value, np.generic):
        yield name, value.item()
    else:
        yield name, value


def is_same(a: Any, b: Any) -> bool:
    "Return True if two leaves are equal; numbers, if they are within the tolerance."
    if isinstance(a, (torch.Tensor, np.ndarray)) or isinstance(b, (torch.Tensor, np.ndarray)):
        x, y = torch.as_tensor(a).double(), torch.as_tensor(b).double()
        return x.shape == y.shape and torch.allclose(x, y, TOLERANCE, TOLERANCE, equal_nan=True)
    if isinstance(a, float) and isinstance(b, float):
        both_nan = math.isnan(a) and math.isnan(b)
        return both_nan or math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(a == b)


def compare_case(case: Case) -> Row:
    "Return the row of a case."
    outcomes = []
    for library in OPTIMIZERS:
        try:
            with quiet_folder() as folder:
                outcomes.append(train(case, library, folder))
        except Exception as error:
            traceback.print_exc()
            name = 'learnkit' if library is learnkit.Learner else 'fastai'
            why = f'fails in {name}: {type(error).__name__}: {str(error)[:200]}'
            return Row(case.name, False, False, TOO_FAR, case.why or why, case.part)
    for outcome in outcomes:
        if not case.rows:
            outcome.values = {
                name: outcome.values[name] for name in ('n_steps', 'names', 'observed')
            }
    expected, found = (dict(flatten(outcome.values)) for outcome in outcomes)
    numbers = compare_numbers(outcomes[0].weights, outcomes[1].weights)
    different = [
        path for path in expected.keys() & found.keys() if not is_same(expected[path], found[path])
    ]
    for path in sorted(different):
        print(f'{case.name}{path}: {expected[path]!r} in fastai, {found[path]!r} in learnkit')
    if expected.keys() != found.keys():
        print(f'{case.name}: only in one: {sorted(expected.keys() ^ found.keys())}')
    if different:
        numbers = TOO_FAR
    return Row(case.name, True, expected.keys() == found.keys(), numbers, case.why, case.part)


def rewind_case(case: Case) -> Row:
    def make(more: list[Any]) -> Any:
        return make_learner(case, learnkit.Learner, Path('.'), more)

    return rewind_row(case.name, make, epochs=2)


def rows(names: list[str] | None = None) -> list[Row]:
    "Return a row for each callback of fastai, and for what is done with a Learner."
    chosen = [case for case in CASES if not names or case.name in names]
    found = [compare_case(case) for case in chosen]
    if names:
        return found
    return [
        *found,
        *vision_rows(),
        *guide_rows(),
        *map(rewind_case, (case for case in CASES if case.name in REWOUND)),
        *(Row(name, None, None, '', why) for name, why in NOT_RUN.items()),
    ]


if __name__ == '__main__':
    for row in rows(sys.argv[1:]):
        print(row)
