"""Row 46: checkpoints between evaluations. Only evaluated weights have a value, and the best is written and kept."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from learnkit import Callback
from learnkit.checkpoint.folder import Entry, entries, find
from tests.faults.run_helpers import N_TRAIN, checkpointed

Plan = dict[int, float]  # validation loss by the number of batches trained before the evaluation


class Planned(Callback):
    "Set the values of evaluations from a plan."

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def after_loss(self) -> None:
        if not self.training:
            self.learn.loss = torch.tensor(self._plan[self.learn.time.ba])


class All(Callback):
    "Keep the `info` of every checkpoint, also of the removed ones."

    order = 1001

    def __init__(self) -> None:
        self._seen = dict[str, Entry]()

    def look(self) -> None:
        self._seen |= {e.path.name: e for e in entries(self.learn.checkpoint.checkpoint_folder())}

    batch_checkpoint = epoch_checkpoint = look


def expected_value(plan: Plan, entry: Entry, is_within: Callable[[int], bool]) -> float | None:
    "Return the value of the evaluation of a checkpoint's weights, or None."
    ba, place = entry.info['ba'], entry.info['point']
    # an evaluation within an epoch comes before the checkpoint of its batch, one at the end after it
    return plan.get(ba) if place == 'epoch' or is_within(ba) else None


def train(folder: Path, plan: Plan, every: str, n_epoch: int, **options: Any) -> list[Entry]:
    "Train, and return every written checkpoint in order."
    watch = All()
    fit = {k: options.pop(k) for k in ('eval_every',) if k in options}
    make = checkpointed(folder, every=every, keep_last=1, background=False, **options)
    make(Planned(plan), watch, **fit).fit(n_epoch)
    return sorted(watch._seen.values(), key=lambda e: e.number)


def check(
    folder: Path,
    plan: Plan,
    written: Sequence[Entry],
    is_within: Callable[[int], bool] = lambda at: False,  # whether an evaluation is within an epoch
) -> None:
    "Check the values, that the best and the newest were kept, and that 'best' finds the best."
    values = [expected_value(plan, e, is_within) for e in written]
    assert [e.info['value'] for e in written] == values
    scored = [(v, e.number) for v, e in zip(values, written, strict=True) if v is not None]
    kept = [e.number for e in reversed(entries(folder))]
    if not scored:
        assert kept == [written[-1].number]
        return
    best = min(scored)[1]
    assert kept == sorted({best, written[-1].number})
    found = find('best', folder)
    assert found is not None and found[0].name == written[best - 1].path.name


@pytest.mark.parametrize('every', ['1ba', '2ba', '4ba', '1ep', '2ep'])
def test_intervals(tmp_path: Path, every: str) -> None:
    "An epoch has three batches; the second evaluation is the best."
    plan = {3: 4.0, 6: 1.0, 9: 2.0, 12: 3.0}
    check(tmp_path, plan, train(tmp_path, plan, every, 4, monitor='valid_loss'))
    found = find('best', tmp_path)
    assert found is not None and (found[2]['value'], found[2]['ba']) == (1.0, 6)


def test_evaluations_within_epochs(tmp_path: Path) -> None:
    plan = {2: 4.0, 4: 1.0, 6: 2.0, 8: 3.0, 9: 9.0}
    written = train(tmp_path, plan, '1ba', 3, eval_every='2ba')
    check(tmp_path, plan, written, is_within=lambda at: at % 2 == 0)


def test_the_value_is_resumed(tmp_path: Path) -> None:
    "A run that is resumed between two evaluations writes the values of the run that was not stopped."
    plan = {3: 4.0, 6: 1.0, 9: 2.0, 12: 3.0}
    straight = [e.info['value'] for e in train(tmp_path / 'straight', plan, '1ba', 4)]
    make = checkpointed(tmp_path / 'run', every='1ba', keep_last=None, background=False)
    make(Planned(plan)).fit(4)
    for entry in entries(tmp_path / 'run'):
        if entry.info['ba'] > 7:
            entry.path.unlink()
    make(Planned(plan)).fit(4, resume='latest')
    assert [e.info['value'] for e in reversed(entries(tmp_path / 'run'))] == straight


def check_random(folder: Path, n: int, make_rng: Callable[[int], random.Random]) -> None:
    for i in range(n):
        rng = make_rng(i)
        n_epoch = rng.randrange(1, 6)
        every = f'{rng.randrange(1, 8)}ba'
        ba = range(1, N_TRAIN * n_epoch + 1)
        plan = {at: rng.choice([1.0, 2.0, 3.0, 4.0]) for at in ba if at % N_TRAIN == 0}
        check(
            folder / f'{i}',
            plan,
            train(folder / f'{i}', plan, every, n_epoch, monitor='valid_loss'),
        )


def test_random_plans(tmp_path: Path) -> None:
    check_random(tmp_path, 5, random.Random)


@pytest.mark.full
def test_many_random_plans(tmp_path: Path) -> None:
    check_random(tmp_path, 300, lambda i: random.Random(1000 + i))
    print('row 46: 300 random intervals and values, the best was kept and found each time')
