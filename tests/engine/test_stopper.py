"""A fit that a callback has ended, and that is resumed with another limit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from learnkit import Callback, Checkpoint, EarlyStoppingCallback, Learner
from learnkit.callbacks.stoppers import FixedStopper, ThresholdStopper
from learnkit.testing import synth_dls, synth_learner

# for each stopper the limit of the first fit, that of the second one, and the epochs that both train
LIMITS: dict[str, tuple[Callable[[Any], Any], Any, Any, int, int]] = {
    'patience': (lambda n: EarlyStoppingCallback('drift', comp='less', patience=n), 2, 4, 3, 5),
    'patience as a time': (
        lambda n: EarlyStoppingCallback('drift', comp='less', patience=n), '1ep', '3ep', 3, 5,
    ),
    'time': (FixedStopper, '3ep', '5ep', 3, 5),
    'threshold': (lambda n: ThresholdStopper('falling', n, comp='less'), 7.5, 5.5, 3, 5),
}  # fmt: skip


def write_values(cb: Any) -> None:
    cb.learn.log('drift', 1.0 + cb.epoch)
    cb.learn.log('falling', 9.0 - cb.epoch)


def make(path: Path, *stoppers: Any) -> Learner:
    torch.manual_seed(0)
    log = Callback(before_train=write_values, run_in='fit')
    kept = Checkpoint('1ep', path, keep_last=None)
    return synth_learner(dls=synth_dls(), lr=0.05, path=path, cbs=[log, *stoppers, kept])


def fit(learn: Learner, **options: Any) -> Learner:
    with learn.no_bar(), learn.no_logging():
        learn.fit(9, **options)
    return learn


@pytest.mark.parametrize('kind', list(LIMITS))
def test_a_later_limit_continues_as_if_it_had_been_there_from_the_start(
    kind: str, tmp_path: Path
) -> None:
    stop, first, second, n_first, n_second = LIMITS[kind]
    assert len(fit(make(tmp_path / 'a', stop(first))).history) == n_first
    resumed = fit(make(tmp_path / 'a', stop(second)), resume=True)
    straight = fit(make(tmp_path / 'b', stop(second)))
    assert len(resumed.history) == len(straight.history) == n_second
    for found, expected in zip(
        resumed.model.parameters(), straight.model.parameters(), strict=True
    ):
        assert torch.equal(found, expected)
    # the second time, with the limit that has ended it
    again = fit(make(tmp_path / 'a', stop(second)), resume=True)
    assert len(again.history) == n_second


def test_the_same_limit_ends_it_again(tmp_path: Path) -> None:
    for kind, (stop, first, _, n_first, _) in LIMITS.items():
        fit(make(tmp_path / kind, stop(first)))
        assert len(fit(make(tmp_path / kind, stop(first)), resume=True).history) == n_first


@pytest.mark.parametrize('swap', [False, True])
def test_of_two_stoppers_one_is_enough(swap: bool, tmp_path: Path) -> None:
    def stoppers(patience: int) -> list[Any]:
        both = [FixedStopper('3ep'), LIMITS['patience'][0](patience)]
        return both[::-1] if swap else both

    fit(make(tmp_path, *stoppers(2)))
    assert len(fit(make(tmp_path, *stoppers(4)), resume=True).history) == 3


def test_a_stop_of_the_user_ends_a_longer_fit_with_a_warning(tmp_path: Path) -> None:
    def stop(cb: Any) -> None:
        if cb.epoch == 1:
            cb.learn.stop()

    fit(make(tmp_path, Callback(after_epoch=stop)))
    learn = make(tmp_path, Callback(after_epoch=stop))
    with learn.no_bar(), learn.no_logging(), pytest.warns(UserWarning, match='more patience'):
        learn.fit(12, resume=True)
    assert len(learn.history) == 2
