"""The state before any batch of an earlier run, and its loss, again; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from learnkit import CSVLogger, GradientAccumulation, MixedPrecision, MixUp
from learnkit.core.errors import CheckpointError, OptionError
from learnkit.debug.rewind import find_spike
from tests.helpers.rewinding import BATCHES, Record, describe, make, train

CASES: dict[str, dict[str, Any]] = {
    'plain': {},
    'accumulation': {'cbs': lambda: [GradientAccumulation(16)]},
    'bf16': {'cbs': lambda: [MixedPrecision('bf16')]},
    'mixup': {'cbs': lambda: [MixUp()]},
    'microbatch': {'microbatch': 3},
    'workers': {'workers': 2},
    'logger': {'cbs': lambda: [CSVLogger()]},
}


@pytest.mark.parametrize('name', CASES)
def test_the_state_and_the_loss_of_any_batch(name: str, tmp_path: Path) -> None:
    options = dict(CASES[name])
    cbs = options.pop('cbs', list)
    record = Record()
    losses = train(make(tmp_path, *cbs(), record, **options))
    files = {f: f.stat().st_mtime_ns for f in tmp_path.rglob('*') if f.is_file()}
    again = make(tmp_path, *cbs(), Record(), **options)
    for ba in (7, BATCHES - 1, 16, 11):
        moment = again.rewind(f'{ba}ba')
        assert again.time.ba == moment.ba == ba
        assert describe(again) == record.digests[ba]
        assert moment.indices == record.indices[ba]
        assert moment.step() == losses[ba] == moment.step()
    assert {f: f.stat().st_mtime_ns for f in tmp_path.rglob('*') if f.is_file()} == files


def test_other_units_and_before_the_first_checkpoint(tmp_path: Path) -> None:
    losses = train(make(tmp_path))
    assert make(tmp_path).rewind(2).step() == losses[2]
    assert make(tmp_path).rewind(0).play('9ba') == losses[:9]
    again = make(tmp_path)
    for to, ba in (('1ep', 8), ('72sp', 9), ('10st', 10)):
        assert again.rewind(to).ba == ba
    with pytest.raises(
        CheckpointError, match='no checkpoint before 3ba, and this Learner has trained'
    ):
        again.rewind('3ba')
    with pytest.raises(CheckpointError, match='ends before 99ba'):
        again.rewind('99ba')


def test_the_largest_jump() -> None:
    assert find_spike({3: 1.0, 4: 2.0, 5: float('nan'), 6: 9.0}).value == 5
    with pytest.raises(CheckpointError, match='no losses'):
        find_spike({3: 1.0})


def test_a_run_that_cannot_be_repeated_is_refused_by_name(tmp_path: Path) -> None:
    train(make(tmp_path, MixUp()))
    with pytest.raises(CheckpointError, match='had the callbacks mix_up'):
        make(tmp_path).rewind('13ba')
    other = make(tmp_path, MixUp(), seed=1)
    with pytest.raises(CheckpointError, match=r'batch 1\d has the loss'):
        other.rewind('19ba')
    with pytest.warns(UserWarning, match='cannot be repeated exactly'):
        assert other.rewind('19ba', exact=False).ba == 19
    with pytest.raises(CheckpointError, match='no run to rewind'):
        make(tmp_path / 'empty').rewind('3ba')
    with pytest.raises(OptionError, match='Give a time'):
        make(tmp_path).rewind()
