"""Claims about loggers: what their libraries read equals what a loop by hand would log.

A fit of three epochs of ten batches, of which a callback logs half of each loss."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from signal import SIGKILL
from time import sleep
from typing import Any

from learnkit import Callback, Checkpoint
from learnkit.loggers import CSVLogger, JSONLinesLogger, Logger, log_images, log_params
from tests.helpers import log_services
from tests.helpers.forks import Planned, reached, start
from tests.helpers.logging_fits import LogHalf, learner, plain_losses
from tests.helpers.resuming import scramble
from tests.sweeps.claims import Claim, Inapplicable, run_killed
from tests.sweeps.verdicts import Subject

N_EPOCH = 3
KILLS = (7, 9)  # at which batch of its process a run is killed
RTOL = 1e-5
Points = list[tuple[int, float]]


@dataclass(frozen=True)
class Reading:
    "How the files of a logger are read."

    points: Callable[[Path, str], Points]  # f(folder, name): steps and values
    params: Callable[[Path], dict[str, Any]]  # f(folder): configuration
    images: Callable[[Path], list[int]]  # f(folder): steps of the images 'pic'
    # f(folder): log without learnkit, for a library that may lose what a killed process has logged
    log_by_hand: Callable[[Path], None] | None = None
    # f(folder, name): as `points`, of a run of which parts were killed
    killed_points: Callable[[Path, str], Points] | None = None


# -- the table -------------------------------------------------------------------------------------


def find_file(folder: Path) -> Path:
    [path] = [*folder.glob('metrics.csv'), *folder.glob('metrics.jsonl')]
    return path


def read_points(folder: Path, name: str) -> Points:
    "Return the steps and values in a file of lines."
    from learnkit.loggers import read_log

    rows = read_log(find_file(folder))
    return [(row['step'], row[name]) for row in rows if row.get(name) is not None]


def read_csv_params(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / 'metrics.csv.params.json').read_text('utf-8'))
    return values


def read_json_params(folder: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in find_file(folder).read_text('utf-8').splitlines()]
    values: dict[str, Any] = [line['params'] for line in lines if 'params' in line][-1]
    return values


def list_image_steps(folder: Path) -> list[int]:
    "Return the steps in the names of pictures."
    return sorted(int(path.stem.split('-')[1]) for path in folder.rglob('pic-*.png'))


def read_tensorboard_params(folder: Path) -> dict[str, Any]:
    events = log_services.tensorboard(folder / 'tb').Tensors('params/text_summary')
    values: dict[str, Any] = json.loads(events[-1].tensor_proto.string_val[0])
    return values


def read_wandb_records(folder: Path) -> Iterator[Any]:
    "Yield the records of all parts of a run, also of those that were killed."
    for file in sorted(folder.glob('wandb/offline-run-*/*.wandb')):
        yield from log_services.wandb_part(file)


def read_wandb_points(folder: Path, name: str) -> Points:
    points: dict[int, Any] = {}
    for record in read_wandb_records(folder):
        if not record.HasField('history'):
            continue
        row = {'/'.join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
        if name in row:
            points[row['_step']] = row[name]
    return sorted(points.items())


def read_wandb_params(folder: Path) -> dict[str, Any]:
    updates = [u for r in read_wandb_records(folder) for u in r.config.update]
    return {u.key: json.loads(u.value_json) for u in updates}


def log_to_wandb(folder: Path) -> None:
    "Log 10 steps as W&B's documentation shows it."
    run = import_module('wandb').init(mode='offline', dir=folder)
    for step in range(10):
        run.log({'half': 0.5}, step=step)
    sleep(0.5)
    for _ in range(KILLS[0]):
        reached('batch')


def read_mlflow_params(folder: Path) -> dict[str, Any]:
    params: dict[str, Any] = log_services.mlflow_run(folder).data.params
    return params


def list_loggers(library: str) -> Iterator[tuple[str, Reading, Callable[[], Logger]]]:
    "Yield the loggers of a library."
    makers = {name: make for name, make, _ in log_services.SERVICES}
    if library == 'tensorboard':
        images = lambda folder: [
            e.step for e in log_services.tensorboard(folder / 'tb').Images('pic')
        ]
        reading = Reading(log_services.tensorboard_points, read_tensorboard_params, images)
        yield 'TensorBoardLogger', reading, partial(makers['tensorboard'], every='5ba')
    elif library == 'wandb':
        images = lambda folder: [step for step, _ in log_services.wandb_points(folder, 'pic')]
        reading = Reading(
            log_services.wandb_points, read_wandb_params, images, log_to_wandb, read_wandb_points
        )
        yield 'WandbLogger, offline', reading, partial(makers['wandb'], every='5ba')
    elif library == 'mlflow-skinny':
        reading = Reading(log_services.mlflow_points, read_mlflow_params, list_image_steps)
        yield 'MlflowLogger, files', reading, partial(makers['mlflow'], every='5ba')
    else:
        reading = Reading(read_points, read_csv_params, list_image_steps)
        yield 'CSVLogger', reading, partial(CSVLogger, every='5ba')
        reading = Reading(read_points, read_json_params, list_image_steps)
        yield 'JSONLinesLogger', reading, partial(JSONLinesLogger, 'metrics.jsonl', every='5ba')


LIBRARIES = dict.fromkeys(['', 'tensorboard', 'wandb', 'mlflow-skinny'], list_loggers)


def load_loggers(library: str) -> list[Subject]:
    "Return the loggers of an installed library."
    return [Subject(library, title, make, used) for title, used, make in list_loggers(library)]


# -- claims ----------------------------------------------------------------------------------------


class Killed(Callback):
    "The place at which a run is killed."

    order = -50

    def before_batch(self) -> None:
        if self.training:
            reached('batch')

    def state_dict(self) -> None:
        return None


def compare(expected: Points, got: Points) -> list[str]:
    "Return the first point that differs."
    if [step for step, _ in got] != [step for step, _ in expected]:
        steps = [step for step, _ in got]
        return [f'steps {steps[:40]}']
    for (step, a), (_, b) in zip(expected, got, strict=True):
        is_equal = math.isclose(a, float(b), rel_tol=RTOL) or (
            math.isnan(a) and math.isnan(float(b))
        )
        if not is_equal:
            return [f'step {step}: {b}, by hand {a}']
    return []


def list_halves(n_epoch: int) -> Points:
    return [(step, loss / 2) for step, loss in enumerate(plain_losses(n_epoch)[0], 1)]


def check_values(subject: Subject, folder: Path) -> list[str]:
    with learner(folder, LogHalf, subject.build()) as learn:
        learn.fit(N_EPOCH)
    losses = [(step, 2 * half) for step, half in list_halves(N_EPOCH) if step % 5 == 0]
    read = subject.options.points
    return compare(list_halves(N_EPOCH), read(folder, 'half')) or compare(
        losses, read(folder, 'loss')
    )


def fit_to_the_end(subject: Subject, folder: Path, seed: int) -> None:
    checkpoint = Checkpoint('3ba', folder / 'checkpoints', background=False)
    scramble(seed)
    with learner(folder, LogHalf, subject.build(), checkpoint, Killed()) as learn:
        learn.fit(N_EPOCH, resume=True)


def check_resume(subject: Subject, folder: Path) -> list[str]:
    "Kill twice between checkpoints, and resume in new processes."
    seeds = iter((2, 77, 78))
    run_killed(lambda: fit_to_the_end(subject, folder, next(seeds)), KILLS)
    used: Reading = subject.options
    read = used.killed_points or used.points
    lines = compare(list_halves(N_EPOCH), read(folder, 'half'))
    if not lines or used.log_by_hand is None:
        return lines
    own = folder / 'by hand'
    own.mkdir()
    with start(partial(used.log_by_hand, own), Planned('batch', KILLS[0], SIGKILL, False)) as child:
        child.wait(60)
    if read(own, 'half'):
        return lines
    raise Inapplicable(
        'the library writes after some seconds: a killed loop by hand loses steps too'
    )


def check_params(subject: Subject, folder: Path) -> list[str]:
    "The configuration, and a value of a callback."
    with learner(folder, subject.build()) as learn:
        log_params(learn, {'depth': 3})
        learn.fit(1)
    params = subject.options.params(folder)
    expected = {'depth': '3', 'model': 'Linear', 'batch_size': '4', 'epochs': '1'}
    found = {name: str(params.get(name)) for name in expected}
    return [f'{name}={found[name]}' for name in expected if found[name] != expected[name]]


def check_images(subject: Subject, folder: Path) -> list[str]:
    "A picture at the end of each epoch."

    def show(cb: Callback) -> None:
        log_images(cb, 'pic', log_services.PIXELS)

    with learner(folder, subject.build(), Callback(after_epoch=show)) as learn:
        learn.fit(2)
    steps = subject.options.images(folder)
    return [] if steps == [10, 20] else [f'pictures of the steps {steps}']


def check_nan(subject: Subject, folder: Path) -> list[str]:
    "NaN and both infinities."
    values = {2: math.nan, 3: math.inf, 4: -math.inf, 5: 1.5}

    def log(cb: Callback) -> None:
        if cb.training and cb.learn.time.ba + 1 in values:
            cb.learn.log('odd', values[cb.learn.time.ba + 1])

    with learner(folder, subject.build(), Callback(after_loss=log)) as learn:
        learn.fit(1)
    return compare(list(values.items()), subject.options.points(folder, 'odd'))


def check_two_runs(subject: Subject, folder: Path) -> list[str]:
    "Two Learners of a process, each with its folder, train in turns."
    folders = [folder / name for name in ('a', 'b')]
    learns = []
    for own in folders:
        own.mkdir()
        learns.append(learner(own, LogHalf, subject.build()))
    for _ in range(2):
        for learn in learns:
            learn.fit(1)
    for learn in learns:
        learn.close()
    lines = [compare(list_halves(2), subject.options.points(own, 'half')) for own in folders]
    return lines[0] or lines[1]


CLAIMS: dict[str, Claim] = {
    # first, before the process has a service of W&B, which forked processes would share
    'kill and resume': check_resume,
    'steps and values': check_values,
    'hyperparameters': check_params,
    'images': check_images,
    'NaN and infinity': check_nan,
    'two runs at once': check_two_runs,
}
