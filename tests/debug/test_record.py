"""The losses that a run has recorded, by the number of the batch."""

from typing import Any

import pytest
import torch

from learnkit import Callback
from learnkit.core.errors import CancelBatchException, CheckpointError
from learnkit.debug.record import Record, measure_jumps, read_record, refuse
from learnkit.testing import synth_learner

NAN = float('nan')


def make_state(losses: list[float], skipped: tuple[int, ...] = ()) -> dict[str, Any]:
    raw = torch.tensor(losses, dtype=torch.float64)
    return {'smooth_loss': {'raw': raw}, 'skipped': torch.tensor(skipped, dtype=torch.int64)}


def test_losses_have_the_numbers_of_their_batches() -> None:
    plain = read_record(make_state([1.0, 2.0]), first=8, n=2)
    assert plain == Record({8: 1.0, 9: 2.0}, range(8, 10))
    skipped = read_record(make_state([1.0, 2.0], skipped=(0, 2)), first=8, n=4)
    assert skipped == Record({9: 1.0, 11: 2.0}, range(8, 12))
    # it is unknown which batch had no loss
    assert read_record(make_state([1.0, 2.0]), first=8, n=3) == Record()
    assert read_record({}, first=8, n=3) == Record()


def test_the_first_other_loss() -> None:
    record = Record({3: 0.5, 5: NAN}, range(3, 6))
    assert not record.find_other({3: 0.5, 5: NAN}, range(3, 6))
    for losses, batches, text in (
        ({3: 0.5000001}, [3], 'batch 3 has the loss 0.5000001, and had the loss 0.5'),
        ({}, [3], 'batch 3 has no loss, and had the loss 0.5'),
        ({3: 0.5, 4: 1.0, 5: 1.0}, range(3, 6), 'batch 4 has the loss 1.0, and had no loss'),
        ({5: 0.0}, [5], 'batch 5 has the loss 0.0, and had the loss nan'),
        ({6: 0.0}, [6], 'the run has recorded no loss of batch 6'),
    ):
        assert record.find_other(losses, batches) == [text]


def test_reasons_are_an_error_or_a_warning() -> None:
    refuse([], exact=True)
    with pytest.raises(CheckpointError, match='one'):
        refuse(['one'], exact=True)
    with pytest.warns(UserWarning, match='one'):
        refuse(['one'], exact=False)


def test_the_recorder_notes_batches_without_a_loss() -> None:
    def skip(cb: Any) -> None:
        if cb.learn.training and cb.learn.train_iter in (2, 12):
            raise CancelBatchException

    learn = synth_learner(n_train=10, cbs=Callback(before_batch=skip))
    with learn.no_bar():
        learn.fit(2)
        state = learn.recorder.state_dict()
        assert state['skipped'].tolist() == [2, 12]
        record = read_record(state, 0, 20)
        assert sorted({*range(20)} - {*record.losses}) == [2, 12]
        learn.fit(1)
    assert learn.recorder.state_dict()['skipped'].tolist() == [2]


def test_a_jump_is_measured_by_the_jumps_nearby() -> None:
    losses = {ba: 1.0 + 0.1 * (-1) ** ba for ba in range(40, 100)}
    losses[70] += 3.0
    jumps = {jump.ba: jump for jump in measure_jumps(losses)}
    assert sorted(jumps) == [*range(41, 100)]
    spike = jumps[70]
    assert (spike.before, spike.after) == (losses[69], losses[70])
    # of 21 jumps nearby, 19 have the absolute value 0.2
    assert spike.size == pytest.approx((losses[70] - losses[69]) / 0.2)
    assert jumps[90].size == pytest.approx(1.0) and jumps[71].size < 0
    assert measure_jumps({3: 1.0, 4: NAN})[0].size == float('inf')
    assert measure_jumps({3: 1.0}) == []


def test_the_first_and_the_last_jump_are_no_noise_by_themselves() -> None:
    "The jump at the edge, which is small here, counts once."
    losses = [2.0, 2.001, *(1.0 + 0.1 * (-1) ** i for i in range(20))]
    sizes = [jump.size for jump in measure_jumps(dict(enumerate(losses)))]
    assert max(map(abs, sizes)) < 10
