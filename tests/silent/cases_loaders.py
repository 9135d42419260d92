"""Cases: custom loaders in a run that is killed and resumed, against the run without a stop."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from tests.helpers import own_loaders as own
from tests.silent.cases import case


def killed_run(make: Callable[[], Any], *kills: int) -> own.Run:
    with tempfile.TemporaryDirectory() as folder:
        return own.train(make, Path(folder), kills)


def sum_of_weights(make: Callable[[], Any], n: int) -> tuple[float, float]:
    return sum(killed_run(make, n).weights), sum(killed_run(make).weights)


def has_warning(make: Callable[[], Any], n: int, text: str) -> bool:
    return any(text in message for message in killed_run(make, n).warnings)


@case('loaders', 'weights: a seed for workers is drawn with the first batch', old='-1.20686')
def seed_of_a_late_start() -> tuple[float, float]:
    return sum_of_weights(own.Seeding, 5)


@case('loaders', 'weights: each batch has noise from the global generator', old='-2.00061')
def noise_after_a_late_start() -> tuple[float, float]:
    return sum_of_weights(own.Augmenting, 5)


@case('loaders', 'batches: a state after the last batch means the next epoch', old='64')
def state_of_the_next_epoch() -> tuple[int, int]:
    return len(killed_run(own.NextEpoch, 32).ids), own.N_EPOCH * own.N_BATCHES


@case('loaders', 'first sample of the third epoch: `state_dict` raises', old='44')
def state_that_raises() -> tuple[int, int]:
    return killed_run(own.Raising, 32).ids[32][0], own.order_of(1)[0]


@case('loaders', 'warnings: `state_dict` raises at each checkpoint', old='49')
def warnings_of_a_state_that_raises() -> tuple[int, int]:
    return len(killed_run(own.Raising).warnings), 1


@case('loaders', 'a warning: an epoch is repeated with other samples', old='False')
def repeated_otherwise() -> tuple[bool, bool]:
    return has_warning(own.Unseeded, 5, 'returns other batches'), True


@case('loaders', 'a warning: a buffer is shuffled by the generator of dropout', old='False')
def shared_generator() -> tuple[bool, bool]:
    text = 'from which the model or other code draws'
    return has_warning(lambda: DataLoader(own.Buffer(), own.BS), 5, text), True


@case('loaders', 'an error: the length of an iterator in a loader', old='RuntimeError')
def length_that_raises() -> tuple[str, str]:
    return killed_run(lambda: own.Wrapping(own.Counting(RuntimeError))).error, ''
