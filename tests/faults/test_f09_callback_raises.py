"""Row 9: a callback raises. Its own exception comes out, with a note of where; the next fit equals a fresh one."""

from __future__ import annotations

import asyncio
import gc
import itertools
import weakref
from functools import cache
from typing import Any

import pytest

from learnkit import Callback, CancelError, FitError
from learnkit.core.errors import CancelBatchException
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
    others_in_full,
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
    StopAsyncIteration(),
    SystemExit(3),
    GeneratorExit(),
    asyncio.CancelledError(),
    KeyboardInterrupt(),
    MemoryError(),
    RecursionError('deep'),
    AssertionError(),
    ExceptionGroup('several', [ValueError(1), KeyError(2)]),
    TimeoutError(),
    AttributeError('no_such'),
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


@pytest.mark.parametrize(
    'event',
    (
        'before_batch after_loss after_step after_batch before_validate after_epoch '
        'epoch_checkpoint after_iteration batch_checkpoint'
    ).split(),
)
def test_the_second_time_an_event_fires(event: str) -> None:
    fails_clean(event, KeyError(), nth=2)


@pytest.mark.parametrize(
    ('event', 'error'),
    others_in_full(
        itertools.product(['before_fit', 'after_pred', 'after_validate'], ERRORS),
        lambda event, error: event == 'after_pred' or isinstance(error, (Mute, StopIteration)),
    ),
    ids=lambda o: o if isinstance(o, str) else type(o).__name__,
)
def test_every_kind_of_exception(event: str, error: BaseException) -> None:
    fails_clean(event, copy_without_notes(error))


def test_the_note_counts_epochs_and_batches() -> None:
    e = raised_by(lambda: make_learner(At('after_step', ValueError(), nth=5)).fit(2))
    assert notes(e) == ['in At.after_step (epoch 1, batch 1)']


def test_the_note_of_a_draw_names_the_batch_that_is_drawn() -> None:
    for event in ('before_draw', 'after_draw'):
        e = raised_by(lambda event=event: make_learner(At(event, ValueError(), nth=3)).fit(1))
        assert notes(e) == [f'in At.{event} (epoch 0, batch 2)']


def test_an_exception_that_takes_no_notes() -> None:
    class Frozen(Exception):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == '__notes__':
                raise TypeError('frozen')
            super().__setattr__(name, value)

    learn = make_learner(At('after_batch', Frozen('x')))
    e = raised_by(lambda: learn.fit(1))
    assert type(e) is Frozen and e.args == ('x',)
    is_clean(learn)


def test_an_existing_note_does_not_replace_ours() -> None:
    error = ValueError('x')
    error.add_note('mine')
    learn = make_learner()
    learn.loss_func = lambda pred, y: (_ for _ in ()).throw(error)
    e = raised_by(lambda: learn.fit(1))
    assert e is error and notes(e)[0] == 'mine' and notes(e)[-1] == 'in train (epoch 0, batch 0)'
    found = notes(e)[1]
    assert found == '<lambda> got Tensor[4, 1] float32 and the targets (Tensor[4, 1] float32,)'


def test_recursion_in_a_handler() -> None:
    def deep(cb: Any) -> None:
        deep(cb)

    learn = make_learner(bad := At('after_loss', deep, nth=2))
    start_again(learn)
    e = raised_by(lambda: learn.fit(1))
    assert type(e) is RecursionError and notes(e) == ['in At.after_loss (epoch 0, batch 1)']
    is_clean(learn)
    fits_like_fresh(learn, bad)


def test_an_exception_chained_in_a_handler_keeps_its_cause() -> None:
    def bad(cb: Any) -> None:
        try:
            raise KeyError('inner')
        except KeyError as e:
            raise ValueError('outer') from e

    e = raised_by(lambda: make_learner(At('after_batch', bad)).fit(1))
    assert type(e) is ValueError and type(e.__cause__) is KeyError and notes(e.__cause__) == []


@pytest.mark.parametrize(
    ('event', 'how'),
    others_in_full(
        itertools.product(
            (
                'before_fit before_epoch before_validate before_draw after_draw before_batch '
                'after_pred after_loss after_batch after_validate after_epoch after_fit cleanup'
            ).split(),
            ['validate', 'get_preds'],
        ),
        lambda event, how: (
            how == 'validate' or event in ('before_fit', 'after_pred', 'after_fit', 'cleanup')
        ),
    ),
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
    others_in_full(
        itertools.product(
            ['before_fit', 'before_validate', 'after_pred', 'after_validate', 'after_epoch'],
            (
                'before_fit before_epoch after_loss after_batch before_validate after_epoch '
                'after_fit'
            ).split(),
            ['validate', 'get_preds'],
        ),
        lambda event, outer, how: (
            event == 'after_pred' if how == 'validate' else outer == 'after_loss'
        ),
    ),
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


def test_no_tensor_of_the_failed_batch_lives_on() -> None:
    refs: list[Any] = []

    def remember(cb: Any) -> None:
        refs.extend(weakref.ref(t) for t in (cb.pred, cb.loss_grad, cb.loss, *cb.xb, *cb.yb))
        raise ValueError

    learn = make_learner(At('before_backward', remember))

    def fail() -> None:
        with pytest.raises(ValueError):
            learn.fit(1)

    fail()
    gc.collect()
    assert len(refs) == 5 and not any(ref() is not None for ref in refs)


def test_callbacks_that_change_the_callbacks_while_an_event_runs() -> None:
    events = 'before_fit before_batch after_step after_batch after_epoch after_fit cleanup'
    for event in events.split():
        victim, gone = At(event, lambda cb: None), []
        cbs = [
            At(event, lambda cb: cb.learn.remove_cb(cb)),
            At(event, lambda cb, victim=victim: cb.learn.remove_cb(victim)),
            victim,
            At(
                event,
                lambda cb, gone=gone: gone.append(
                    cb.learn.add_cb(At('after_batch', lambda cb: None)).cbs[-1]
                ),
            ),
        ]
        learn = make_learner(cbs)
        start_again(learn)
        learn.fit(N_EPOCH)
        assert victim.seen == 0 and victim.learn is None and cbs[0] not in learn.cbs, event
        assert len(gone) == 1 and gone[0] in learn.cbs
        is_clean(learn)
        fits_like_fresh(learn, [cb for cb in learn.cbs if isinstance(cb, At)])


def test_a_callback_that_adds_itself_again_is_refused() -> None:
    learn = make_learner(bad := At('after_batch', lambda cb: cb.learn.add_cb(cb)))
    start_again(learn)
    e = raised_by(lambda: learn.fit(1))
    assert type(e).__name__ == 'CallbackError' and 'already part of this Learner' in str(e)
    fits_like_fresh(learn, bad)


def test_the_progress_is_removed_in_the_middle_of_a_fit() -> None:
    for event in ('after_batch', 'after_validate', 'after_epoch'):
        learn = make_learner(cb := At(event, lambda cb: cb.learn.remove_cb(cb.learn.progress)))
        start_again(learn)
        learn.fit(N_EPOCH)
        assert learn.logger is print
        fits_like_fresh(learn, cb)


@pytest.mark.parametrize(
    'event',
    [
        pytest.param(
            event,
            marks=[]
            if event in ('before_fit', 'after_loss', 'before_validate', 'after_fit', 'cleanup')
            else [pytest.mark.full],
        )
        for event in FIT_EVENTS
    ],
)
def test_fit_inside_a_fit_is_refused(event: str) -> None:
    learn = make_learner(cb := At(event, lambda cb: cb.learn.fit(1)))
    start_again(learn)
    e = raised_by(lambda: learn.fit(N_EPOCH, iteration=1))
    assert type(e) is FitError and notes(e)[0].startswith(f'in At.{event}')
    fits_like_fresh(learn, cb)


@pytest.mark.parametrize('how', ['validate', 'get_preds'])
def test_fit_inside_a_nested_run_is_refused(how: str) -> None:
    learn = make_learner(
        cbs := [
            At('after_batch', lambda cb: getattr(cb.learn, how)()),
            At('after_pred', lambda cb: cb.learn.fit(1), depth=2),
        ]
    )
    start_again(learn)
    e = raised_by(lambda: learn.fit(N_EPOCH))
    assert type(e) is FitError
    fits_like_fresh(learn, cbs)


@pytest.mark.parametrize('how', ['validate', 'get_preds'])
def test_fit_inside_a_standalone_validation_is_refused(how: str) -> None:
    learn = make_learner(cb := At('after_pred', lambda cb: cb.learn.fit(1)))
    start_again(learn)
    e = raised_by(getattr(learn, how))
    assert type(e) is FitError
    fits_like_fresh(learn, cb)


@cache
def without_an_evaluation(event: str) -> tuple[str, Any]:
    learn = make_learner(trigger(event))
    start_again(learn)
    learn.fit(N_EPOCH, iteration=1)
    return digest(learn), rows(learn)


@pytest.mark.parametrize(
    ('event', 'what'),
    others_in_full(
        itertools.product([*FIT_EVENTS, *CANCEL_EVENTS], ['validate', 'get_preds']),
        lambda event, what: (
            what == ('validate', 'get_preds')[len(event) % 2] or event == 'after_loss'
        ),
    ),
)
def test_evaluating_in_a_handler_changes_nothing(event: str, what: str) -> None:
    learn = make_learner(
        [*trigger(event), look := At(event, lambda cb: getattr(cb.learn, what)(), nth=1)]
    )
    start_again(learn)
    learn.fit(N_EPOCH, iteration=1)
    plain = without_an_evaluation(event if trigger(event) else '')
    assert look.seen and (digest(learn), rows(learn)) == plain
    is_clean(learn)


@pytest.mark.parametrize(
    'event', ['before_draw', 'after_pred', 'after_loss', 'after_batch', 'after_validate']
)
@pytest.mark.parametrize('what', ['validate', 'get_preds'])
def test_evaluating_inside_an_evaluation_changes_nothing(event: str, what: str) -> None:
    "Raise at the second validation batch, when losses and metrics are partly accumulated."

    def look(cb: Any) -> None:
        if not cb.training and cb.iter == 1 and cb.learn.run.depth == 1:
            getattr(cb.learn, what)()

    learn, plain = make_learner(Callback(**{event: look})), make_learner()
    for one in (learn, plain):
        start_again(one)
        one.fit(N_EPOCH)
    assert digest(learn) == digest(plain) and rows(learn) == rows(plain)
    values = [[round(v, 6) for v in one.validate()] for one in (learn, plain)]
    preds = [one.get_preds()[0] for one in (learn, plain)]
    assert values[0] == values[1]
    assert preds[0].equal(preds[1])


@pytest.mark.parametrize(
    'event', ['after_batch', 'after_validate', 'before_fit', 'cleanup', 'after_fit']
)
def test_closing_in_a_handler(event: str) -> None:
    closed: list[int] = []
    learn = make_learner(
        cbs := [At(event, lambda cb: cb.learn.close()), Callback(close=lambda cb: closed.append(1))]
    )
    start_again(learn)
    learn.fit(N_EPOCH)
    is_clean(learn)
    learn.remove_cb(cbs[0])
    fits_like_fresh(learn)


@pytest.mark.parametrize('event', [e for e in FIT_EVENTS if e != 'cleanup'])
def test_stop_at_every_event_ends_with_every_event(event: str) -> None:
    fired: list[str] = []

    class EventTrace(Callback):
        order = 99

        def __call__(self, event_name: str) -> None:
            fired.append(event_name)

    learn = make_learner([cb := At(event, lambda cb: cb.learn.stop()), trace := EventTrace()])
    start_again(learn)
    learn.fit(3, iteration=2)
    for before, after in [
        ('before_fit', 'after_fit'),
        ('before_epoch', 'after_epoch'),
        ('before_epoch', 'epoch_checkpoint'),
        ('before_train', 'after_train'),
        ('before_validate', 'after_validate'),
        ('before_eval', 'after_eval'),
        ('before_batch', 'after_batch'),
        ('before_backward', 'after_backward'),
        ('before_step', 'after_step'),
    ]:
        assert fired.count(before) == fired.count(after) > 0, (before, after)
    # only a whole iteration, of two epochs, has an end
    n_whole = fired.count('before_epoch') // 2
    assert fired.count('after_iteration') == fired.count('iteration_checkpoint') == n_whole
    assert fired.count('before_step') == fired.count('batch_checkpoint')
    # in training after that batch, elsewhere after that epoch; where the next one has begun, after its first batch
    epochs = 2 if event in ('after_iteration', 'iteration_checkpoint') else 1
    assert fired.count('before_epoch') == (3 if event == 'after_fit' else epochs)
    is_clean(learn)
    fits_like_fresh(learn, [cb, trace])


def test_a_cancel_out_of_its_place_is_an_error_like_any_other() -> None:
    learn = make_learner([bad := At('after_batch', CancelBatchException()), watch := Watch()])
    start_again(learn)
    e = raised_by(lambda: learn.fit(N_EPOCH))
    assert type(e) is CancelError and watch.fired == [('after_error', e), ('cleanup', e)]
    fits_like_fresh(learn, [bad, watch])
