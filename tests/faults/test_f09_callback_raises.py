"""Row 9: a callback raises. Its own exception comes out, with a note of where; the next fit equals a fresh one."""

import asyncio
from itertools import product
from typing import Any

import pytest

from learnkit import Callback, FitError
from tests.faults.fault_helpers import (
    CANCEL_EVENTS,
    FIT_EVENTS,
    N_EPOCH,
    At,
    Mute,
    Watch,
    copy_without_notes,
    digest,
    fits_like_fresh,
    is_clean,
    make_learner,
    notes,
    raised_by,
    rows,
    start_again,
    trigger,
)


class Custom(Exception):
    "An exception that cannot be constructed from a message."

    def __init__(self, code: int, *, why: str) -> None:
        super().__init__(code)
        self.why = why


ERRORS = [
    ValueError('broken', 3),
    KeyError(),
    Custom(4, why='x'),
    Mute('m'),
    StopIteration(1),
    SystemExit(3),
    asyncio.CancelledError(),
    KeyboardInterrupt(),
    ExceptionGroup('several', [ValueError(1), KeyError(2)]),
]


def fails_clean(event: str, error: BaseException, nth: int = 1) -> None:
    "Raise `error` at the n-th `event` of a fit, check the error and the remaining state, and fit again."
    bad, watch, later = At(event, error, nth), Watch(), At(event, lambda cb: None, nth)
    learn = make_learner([*trigger(event), bad, later, watch])
    start_again(learn)
    args = error.args
    e = raised_by(lambda: learn.fit(N_EPOCH, iteration=1))
    assert e is error and e.args == args and e.__cause__ is None
    where = [n for n in notes(e) if n.startswith(f'in At.{event} (epoch ')]
    assert len(where) == 1 and ', batch ' in where[0], notes(e)
    tb = e.__traceback__
    while tb.tb_next:
        tb = tb.tb_next
    assert tb.tb_frame.f_code.co_name == 'now', 'the traceback ends where it was raised'
    if event == 'cleanup':
        assert [x[0] for x in watch.fired] == ['cleanup']  # it failed after a run without errors
    else:
        assert watch.fired == [('after_error', error), ('cleanup', error)]
        assert later.seen == nth - 1, 'handlers behind the failing one do not run'
    is_clean(learn)
    fits_like_fresh(learn, [cb for cb in learn.cbs if isinstance(cb, (At, Watch))])


@pytest.mark.parametrize('event', [*FIT_EVENTS, *CANCEL_EVENTS])
def test_every_event(event: str) -> None:
    fails_clean(event, Custom(4, why='x'))


@pytest.mark.parametrize('error', ERRORS, ids=lambda e: type(e).__name__)
def test_every_kind_of_exception(error: BaseException) -> None:
    fails_clean('after_pred', copy_without_notes(error))


def test_the_note_counts_epochs_and_batches() -> None:
    e = raised_by(lambda: make_learner(At('after_step', ValueError(), nth=5)).fit(2))
    assert notes(e) == ['in At.after_step (epoch 1, batch 1)']


@pytest.mark.parametrize(
    ('event', 'how'),
    [
        *product(['before_fit', 'after_pred', 'after_fit', 'cleanup'], ['validate', 'get_preds']),
        *product(['before_draw', 'after_loss', 'after_validate', 'after_epoch'], ['validate']),
    ],
)
def test_in_a_run_without_training(event: str, how: str) -> None:
    error = Custom(4, why='x')
    learn = make_learner([bad := At(event, error), watch := Watch()])
    start_again(learn)
    before, mode = vars(learn).copy(), learn.model.training
    e = raised_by(getattr(learn, how))
    assert e is error and notes(e)[0].startswith(f'in At.{event} (')
    expected = ['cleanup'] if event == 'cleanup' else ['after_error', 'cleanup']
    assert [x[0] for x in watch.fired] == expected
    is_clean(learn)
    expected = tuple(before[k] for k in ('training', 'phase', 'dl_name', 'iter'))
    assert (learn.training, learn.phase, learn.dl_name, learn.iter) == expected
    assert learn.model.training == mode
    assert {k for k in vars(learn) if k[0] != '_'} <= {*before, 'final_record'}
    fits_like_fresh(learn, [bad, watch])


@pytest.mark.parametrize(
    ('event', 'outer', 'how'),
    [
        *product(['after_pred'], ['before_fit', 'after_loss', 'after_epoch'], ['validate']),
        *product(['before_fit', 'after_pred', 'after_epoch'], ['after_loss'], ['get_preds']),
    ],
)
def test_in_a_run_inside_a_fit(event: str, outer: str, how: str) -> None:
    error = KeyError()
    cbs = [
        At(outer, lambda cb: getattr(cb.learn, how)()),
        At(event, error, depth=2),
        watch := Watch(),
    ]
    learn = make_learner(cbs)
    start_again(learn)
    e = raised_by(lambda: learn.fit(N_EPOCH))
    assert e is error
    assert [n.split(' (')[0] for n in notes(e)] == [f'in At.{event}', f'in At.{outer}']
    assert watch.fired == [('after_error', error), ('cleanup', error)]
    fits_like_fresh(learn, cbs)


@pytest.mark.parametrize('event', ['before_fit', 'after_pred', 'after_validate'])
def test_a_nested_run_that_failed_and_was_forgiven_leaves_the_fit_alone(event: str) -> None:
    def forgive(cb: Any) -> None:
        with pytest.raises(KeyError):
            cb.learn.validate()

    cbs = [
        At('after_batch', forgive, nth=2),
        At(event, KeyError(), depth=2),
        Callback(after_loss=lambda cb: cb.learn.log('seen', float(cb.iter))),
    ]
    learn = make_learner(cbs)
    plain = make_learner(Callback(after_loss=lambda cb: cb.learn.log('seen', float(cb.iter))))
    for one in (learn, plain):
        start_again(one)
        one.fit(N_EPOCH)
    assert digest(learn) == digest(plain) and rows(learn) == rows(plain)
    is_clean(learn)


@pytest.mark.parametrize('event', ['before_fit', 'after_loss', 'before_validate', 'cleanup'])
def test_fit_inside_a_fit_is_refused(event: str) -> None:
    learn = make_learner(cb := At(event, lambda cb: cb.learn.fit(1)))
    start_again(learn)
    e = raised_by(lambda: learn.fit(N_EPOCH, iteration=1))
    assert type(e) is FitError and notes(e)[0].startswith(f'in At.{event}')
    fits_like_fresh(learn, cb)
