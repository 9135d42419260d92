"""Agreements of several processes: where they stop and leave."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from learnkit import Callback, CancelStepException, Learner
from learnkit.callbacks import (
    EarlyStopping,
    FixedStopper,
    ReduceLROnPlateau,
    SaveModelCallback,
    ShortEpochCallback,
    ThresholdStopper,
)
from tests.helpers.distributing import make_dls, make_learner
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist

N_BATCHES = 13  # of an epoch: 101 samples, 4 in each of two processes, or 8 in one
EVENT = Callable[[Any], Any]


def each(cases: dict[Any, Callable[[int], Any]]) -> dict[Any, list[Any]]:
    "Run each case in two processes; return the results of both."
    ranks = run_ranks(lambda rank: [do(rank) for do in cases.values()])
    return dict(zip(cases, zip(*ranks, strict=True), strict=True))


def make_training(*cbs: Any, bs: int = 4, path: Path | str = '.', **options: Any) -> Learner:
    return make_learner(make_dls(101, bs), path, cbs=list(cbs), **options)


def at(event: str, do: EVENT, where: EVENT = lambda cb: True, rank: int | None = 1) -> Callback:
    "Return a callback that acts at an event in one process or in all."

    def act(cb: Any) -> None:
        if (rank is None or cb.world.rank == rank) and where(cb):
            do(cb)

    return Callback(**{event: act})


def after(n: int) -> EVENT:
    return lambda cb: cb.training and cb.train_iter == n


def evaluating(epoch: int) -> EVENT:
    return lambda cb: not cb.training and (cb.epoch, cb.iter) == (epoch, 1)


def in_epoch(epoch: int) -> EVENT:
    return lambda cb: cb.epoch == epoch


def stopped(learn: Learner, fit: Callable[[Learner], Any], **options: Any) -> list[int]:
    "Train in this process group; return the number of batches and rows if all ranks agree."
    with learn.distributed('ddp', timeout='200s', **options):
        fit(learn)
        learn.check_replicas()
    return [learn.train_iter, len(learn.history)]


# ----------------------------------------------------------------------------------------- stopping

FITS: dict[str, Callable[[Learner], Any]] = {
    '17ba': lambda learn: learn.fit('17ba'),
    '150sp': lambda learn: learn.fit('150sp'),
    'fixed 150sp': lambda learn: learn.fit(4, cbs=FixedStopper('150sp')),
    'short epochs': lambda learn: learn.fit(2, cbs=ShortEpochCallback(0.5)),
}


def test_counted_stops_are_at_the_same_batch_as_in_one_process() -> None:
    cases = {
        (name, every): lambda rank, fit=fit, every=every: stopped(
            make_training(), fit, agree_every=every
        )
        for name, fit in FITS.items()
        for every in (1, None)
    }
    found = each(cases)
    for (name, _), got in found.items():
        alone = make_training(bs=8)
        FITS[name](alone)
        assert got == ([alone.train_iter, len(alone.history)],) * 2, name


# where one process stops, and after how many batches and epochs all do, by `agree_every`: one batch after the agreement
STOPS: list[tuple[str, EVENT, dict[int, list[int]]]] = [
    ('after_batch', after(1), {1: [2, 1], 4: [5, 1], 16: [13, 1]}),
    ('after_batch', after(12), {1: [13, 1], 4: [13, 1]}),
    ('after_batch', after(14), {1: [15, 2], 16: [17, 2]}),
    ('before_epoch', in_epoch(1), {1: [15, 2]}),
    ('after_train', in_epoch(1), {16: [26, 2]}),
    ('after_batch', evaluating(0), {1: [13, 1], 16: [13, 1]}),
    ('after_epoch', in_epoch(0), {16: [13, 1]}),
    ('after_epoch', in_epoch(2), {1: [39, 3]}),
]


def test_a_stop_in_one_process_stops_all_at_the_same_batch() -> None:
    def stop(cb: Any) -> None:
        cb.learn.stop()

    cases, expected = {}, {}
    for i, (event, where, ends) in enumerate(STOPS):
        for every, end in ends.items():
            cases[i, every] = lambda rank, event=event, where=where, every=every, who=i % 2: (
                stopped(
                    make_training(at(event, stop, where, who)),
                    lambda learn: learn.fit(3),
                    agree_every=every,
                )
            )
            expected[i, every] = (end, end)
    assert each(cases) == expected


def diverging_value(learn: Learner) -> float:
    "Return a value that grows over epochs in the first process, and shrinks in the other."
    return 1.0 + learn.epoch * (-1 if learn.world.rank else 1)


def test_callbacks_with_differing_values_follow_the_first_process(tmp_path: Path) -> None:
    def log(cb: Any) -> None:
        cb.learn.log('mine', cb.epoch * (-3.0 if cb.world.rank else 1.0))

    def rate(learn: Learner) -> list[float]:
        stopped(learn, lambda learn: learn.fit(5))
        return [learn.train_iter / N_BATCHES, *learn.opt.hypers.attrgot('lr')]

    watching = {
        'gets better': lambda: [EarlyStopping(diverging_value, comp='greater')],
        'gets worse': lambda: [EarlyStopping(diverging_value, comp='less')],
        'passes': lambda: [ThresholdStopper(diverging_value, 2.5, comp='greater')],
        'lowers': lambda: [ReduceLROnPlateau(diverging_value, comp='less')],
        'saves': lambda: [SaveModelCallback(diverging_value, comp='less')],
        'mean of all': lambda: [
            at('after_train', log, rank=None),
            EarlyStopping(lambda learn: learn.history[-1]['mine'], comp='greater'),
        ],
    }
    cases = {
        name: lambda rank, cbs=cbs: rate(make_training(*cbs(), path=tmp_path))
        for name, cbs in watching.items()
    }
    found = each(cases)
    assert all(a == b for a, b in found.values())
    epochs = {name: got[0][0] for name, got in found.items()}
    assert epochs == {
        'gets better': 5,
        'gets worse': 2,
        'passes': 3,
        'lowers': 5,
        'saves': 5,
        'mean of all': 2,
    }
    assert found['lowers'][0][1] < 1e-2 == found['saves'][0][1]


# -------------------------------------------------------------------------------- one process alone


def errors_of_ranks(
    raises: type[BaseException], event: str, where: EVENT, timeout: str = '200s'
) -> list[Any]:
    "Raise an error in process 1 only; return each process's error and its delay."

    def fail(cb: Any) -> None:
        raise raises

    learn, began = make_training(at(event, fail, where)), time.monotonic()
    try:
        with learn.distributed('ddp', timeout=timeout):
            learn.fit(2)
    except BaseException as e:
        return [type(e).__name__, str(e), time.monotonic() - began, learn.train_iter]
    return ['', '', time.monotonic() - began, learn.train_iter]


ENDS = {
    'exit in a batch': (SystemExit, 'before_step', after(5)),
    'exit in an evaluation': (SystemExit, 'before_batch', evaluating(0)),
    'Ctrl-C in a batch': (KeyboardInterrupt, 'before_step', after(5)),
    'cancelled step': (CancelStepException, 'before_step', after(5)),
}


@pytest.fixture(scope='module')
def ends() -> dict[str, list[Any]]:
    return each({name: lambda rank, how=how: errors_of_ranks(*how) for name, how in ENDS.items()})


@pytest.mark.parametrize('case', [name for name in ENDS if 'cancelled' not in name])
def test_who_leaves_alone_is_named_to_the_others_at_once(
    case: str, ends: dict[str, list[Any]]
) -> None:
    (other, message, took_s, n), (own, _, _, n_own) = ends[case]
    raises, event, _ = ENDS[case]
    assert own == raises.__name__ and n - n_own in (0, 1) and took_s < 150
    reason = 'has left the training' if raises is SystemExit else f'failed in Callback({event}=act)'
    assert other == 'DistributedError' and message.startswith(f'Process 1 of 2 {reason}')
    assert ('KeyboardInterrupt' in message) == (raises is KeyboardInterrupt)


@pytest.mark.parametrize('case', [name for name in ENDS if 'cancelled' in name])
def test_a_step_that_one_leaves_out_ends_all_at_the_end_of_the_epoch(
    case: str, ends: dict[str, list[Any]]
) -> None:
    for error, message, took_s, n in ends[case]:
        assert error == 'DistributedError' and n == N_BATCHES and took_s < 150
        assert message.startswith('The processes have taken 12 to 13 steps')
        assert 'self.world.any(...)' in message
