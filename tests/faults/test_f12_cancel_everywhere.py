"""Row 12: every Cancel at every event. Where it is legal the contract's table holds, elsewhere it is a CancelError.

What must fire is computed here from a second, plain writing of the lifecycle."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from learnkit import Callback, CancelError, Learner
from learnkit.core.errors import BatchError
from learnkit.engine.events import LEVELS
from tests.faults.fault_helpers import (
    FIT_EVENTS,
    N_EPOCH,
    N_TRAIN,
    N_VALID,
    At,
    Watch,
    cancel,
    fits_like_fresh,
    is_clean,
    make_learner,
    notes,
    others_in_full,
    raised_by,
    start_again,
)

KINDS = ('backward', 'step', 'batch', 'train', 'validate', 'epoch', 'fit')


class Skip(Exception):
    "A Cancel of the model below: which level it ends."


class Stray(Exception):
    "A Cancel where no level of its kind is open."


class Lifecycle:
    "The contract, written down once more: `plan` maps (event, n-th time) to the kind of Cancel that is raised there."

    def __init__(self, plan: dict[tuple[str, int], str]) -> None:
        self.plan, self.fired, self.open = plan, list[str](), list[str]()

    def fire(self, event: str) -> None:
        self.fired.append(event)
        kind = self.plan.get((event, self.fired.count(event)))
        if kind is None:
            return
        if kind not in self.open:
            raise Stray(kind, event)
        raise Skip(kind)

    def level(self, kind: str, body: Callable[[], None]) -> None:
        name = {'validate': 'validate'}.get(kind, kind)
        self.open.append(kind)
        try:
            self.fire(f'before_{name}')
            body()
        except Skip as e:
            if e.args[0] != kind:
                raise
            cancelled = True
        else:
            cancelled = False
        finally:
            self.open.pop()
        if cancelled:
            self.fire(f'after_cancel_{name}')
        self.fire(f'after_{name}')

    def fit(self, iteration: bool = True) -> None:
        def epochs() -> None:
            for _ in range(N_EPOCH):
                if iteration:
                    self.fire('before_iteration')
                self.level('epoch', self.epoch)
                self.fire('epoch_checkpoint')
                if iteration:
                    self.fire('after_iteration')
                    self.fire('iteration_checkpoint')

        self.level('fit', epochs)

    def epoch(self) -> None:
        self.level('train', lambda: self.batches(N_TRAIN, True))
        self.evaluate()

    def evaluate(self) -> None:
        self.fire('before_eval')
        self.level('validate', lambda: self.batches(N_VALID, False))
        self.fire('after_eval')

    def batches(self, n: int, training: bool) -> None:
        for i in range(n + 1):
            self.fire('before_draw')
            if i == n:
                return
            self.fire('after_draw')
            self.level('batch', lambda: self.batch(training))
            if training:
                self.fire('batch_checkpoint')

    def batch(self, training: bool) -> None:
        for e in ('before_pred', 'after_pred', 'after_loss'):
            self.fire(e)
        if not training:
            return
        self.level('backward', lambda: None)
        self.level('step', lambda: None)

    def validate(self) -> None:
        self.level('fit', lambda: self.level('epoch', self.evaluate))

    def get_preds(self) -> None:
        def predict() -> None:
            self.fire('before_predict')
            self.level('validate', lambda: self.batches(N_VALID, False))
            self.fire('after_predict')

        self.level('fit', lambda: self.level('epoch', predict))


class Plan(Callback):
    "Follow a plan, and record the events of the run at `depth`."

    order = -20  # before all others, the default ones too

    def __init__(
        self, plan: dict[tuple[str, int], str], depth: int = 1, order: float = -20
    ) -> None:
        self.plan, self.depth, self.fired = plan, depth, list[str]()
        self.__dict__['order'] = order

    def __call__(self, event_name: str) -> None:
        if self.learn.run.depth != self.depth or event_name in ('after_error', 'cleanup'):
            return
        self.fired.append(event_name)
        kind = self.plan.get((event_name, self.fired.count(event_name)))
        if kind:
            raise cancel(kind)


def expected(run: str, plan: dict[tuple[str, int], str]) -> tuple[list[str], bool]:
    "Return the fired events, and whether a Cancel without an open level ends the run."
    model = Lifecycle(plan)
    try:
        getattr(model, run)()
    except Stray:
        return model.fired, True
    return model.fired, False


def predict(learn: Learner) -> None:
    "Predict; if everything is canceled before the first prediction, expect the error after the run."
    try:
        learn.get_preds()
    except BatchError as e:
        if 'not one batch' not in str(e):
            raise


RUNS: dict[str, Callable[[Learner], Any]] = {
    'fit': lambda learn: learn.fit(N_EPOCH, iteration=1),
    'validate': lambda learn: learn.validate(),
    'get_preds': predict,
}


def events_of(run: str) -> list[str]:
    return list(dict.fromkeys(expected(run, {})[0]))


def holds(run: str, plan: dict[tuple[str, int], str], order: float = -20) -> None:
    "Run a plan: the events are the model's, a stray Cancel is an error that names handler, event and range."
    fired, stray = expected(run, plan)
    learn = make_learner([cb := Plan(plan, order=order), watch := Watch()])
    start_again(learn)
    if not stray:
        RUNS[run](learn)
    else:
        e = raised_by(lambda: RUNS[run](learn))
        assert type(e) is CancelError, (plan, e)
        event, kind = fired[-1], plan[fired[-1], fired.count(fired[-1])]
        level = LEVELS[kind]
        assert type(e.__cause__) is level.exception and level.exception.__name__ in str(e)
        assert f'Plan.{event} (epoch ' in str(e) + ' '.join(notes(e))
        assert level.before in str(e)
        assert level.after in str(e)
        assert watch.fired == [('after_error', e), ('cleanup', e)]
    assert cb.fired == fired, (plan, first_difference(cb.fired, fired))
    # a fit that CancelFit ended keeps its gradients; the next one clears them
    learn.model.zero_grad()
    is_clean(learn)
    if stray or len(plan) > 1:
        fits_like_fresh(learn, [cb, watch])


def first_difference(a: list[str], b: list[str]) -> tuple[int, list[str], list[str]]:
    i = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return i, a[max(0, i - 2) : i + 3], b[max(0, i - 2) : i + 3]


def legal_kinds(run: str, event: str, nth: int = 1) -> list[str]:
    return [kind for kind in KINDS if not expected(run, {(event, nth): kind})[1]]


def legal_kinds_and_a_stray_one(run: str, event: str, nth: int = 1) -> list[str]:
    "Each event gets another Cancel without an open level."
    legal = legal_kinds(run, event, nth)
    stray = [kind for kind in KINDS if kind not in legal]
    return legal + stray[len(event) % len(stray) :][:1] if stray else legal


RUNS_AND_EVENTS = [(run, event) for run in RUNS for event in events_of(run)]


@pytest.mark.parametrize(('run', 'event'), RUNS_AND_EVENTS)
def test_every_legal_cancel_and_a_stray_one_at_every_event(run: str, event: str) -> None:
    for kind in legal_kinds_and_a_stray_one(run, event):
        holds(run, {(event, 1): kind})


@pytest.mark.full
@pytest.mark.parametrize(('run', 'event'), RUNS_AND_EVENTS)
def test_every_cancel_at_every_event(run: str, event: str) -> None:
    for kind in KINDS:
        holds(run, {(event, 1): kind})


def time_in_validation(event: str) -> int:
    "Return the first time that an event of both loops fires in validation."
    return 1 + (N_TRAIN + 1 if event == 'before_draw' else N_TRAIN)


@pytest.mark.parametrize(
    ('event', 'kind'),
    others_in_full(
        itertools.product(
            (
                'before_draw after_draw before_batch before_pred after_pred after_loss after_batch'
            ).split(),
            KINDS,
        ),
        lambda event, kind: (
            kind in legal_kinds_and_a_stray_one('fit', event, time_in_validation(event))
        ),
    ),
)
def test_every_cancel_in_the_validation_of_a_fit(event: str, kind: str) -> None:
    holds('fit', {(event, time_in_validation(event)): kind})


@pytest.mark.parametrize(
    ('event', 'order', 'kind'),
    others_in_full(
        [
            (event, order, kind)
            for event in FIT_EVENTS
            if event not in ('cleanup', 'after_fit')
            for order in (0, 95)
            for kind in legal_kinds('fit', event)
        ],
        lambda event, order, kind: (
            kind == legal_kinds('fit', event)[-1 if order and len(event) % 2 == 0 else 0]
        ),
    ),
)
def test_in_the_middle_of_the_other_callbacks_and_behind_them(
    event: str, order: float, kind: str
) -> None:
    "Handlers of lower order have run, and handlers of higher order have not: no default callback may fail."
    holds('fit', {(event, 1): kind}, order)


@pytest.mark.parametrize(
    ('outer', 'inner'),
    others_in_full(
        itertools.product(KINDS, KINDS),
        lambda outer, inner: (KINDS.index(outer) + KINDS.index(inner)) % 3 == 0,
    ),
)
def test_a_cancel_in_the_after_cancel_of_another(outer: str, inner: str) -> None:
    holds('fit', {(LEVELS[outer].before, 1): outer, (LEVELS[outer].after_cancel, 1): inner})


def random_plans(n: int, seed: int) -> Iterator[tuple[str, dict[tuple[str, int], str], int]]:
    rng = random.Random(seed)
    for _ in range(n):
        run = rng.choice(['fit', 'fit', 'fit', 'validate', 'get_preds'])
        plan: dict[tuple[str, int], str] = {}
        while len(plan) < rng.randint(1, 5):
            fired, _ = expected(run, plan)
            i = rng.randrange(len(fired))
            at = fired[i], fired[: i + 1].count(fired[i])
            if at in plan:
                break
            legal = [k for k in KINDS if not expected(run, {**plan, at: k})[1]]
            if legal:
                plan[at] = rng.choice(legal)
            elif rng.random() < 0.1:
                plan[at] = rng.choice(KINDS)
        yield run, plan, rng.choice([-20, 0, 55, 95])


def test_random_legal_plans() -> None:
    for run, plan, order in random_plans(20, seed=0):
        holds(run, plan, order)


@pytest.mark.full
def test_many_random_legal_plans() -> None:
    n = n_cancels = 0
    for run, plan, order in random_plans(4000, seed=1):
        holds(run, plan, order)
        n, n_cancels = n + 1, n_cancels + len(plan)
    print(
        f'row 12: {n} random plans with {n_cancels} Cancels: events as in the contract, each next fit as a fresh one'
    )


# -- nested runs -----------------------------------------------------------------------------------

NESTED = [('before_fit', 'get_preds'), ('after_loss', 'validate'), ('before_validate', 'get_preds')]


@pytest.mark.parametrize('part', [0, *(pytest.param(i, marks=pytest.mark.full) for i in (1, 2))])
@pytest.mark.parametrize(('outer', 'how'), NESTED)
@pytest.mark.parametrize('kind', KINDS)
def test_none_crosses_out_of_a_nested_run(kind: str, outer: str, how: str, part: int) -> None:
    """Every event of the nested run: legal there, and the fit continues unchanged; or an error that ends it.

    Each of the three places has a third of the events in the ordinary form, and all of them in the full one."""
    first = (part + NESTED.index((outer, how))) % 3
    for event in events_of(how)[first::3]:
        plan = {(event, 1): kind}
        fired, stray = expected(how, plan)
        inner = Plan(plan, depth=2)
        learn = make_learner([whole := Plan({}), At(outer, lambda cb: RUNS[how](cb.learn)), inner])
        start_again(learn)
        if stray:
            e = raised_by(lambda learn=learn: learn.fit(N_EPOCH, iteration=1))
            assert type(e) is CancelError and LEVELS[kind].exception.__name__ in str(e)
            assert any(f'in At.{outer}' in n for n in notes(e)), 'the outer handler is told'
        else:
            learn.fit(N_EPOCH, iteration=1)
            assert whole.fired == expected('fit', {})[0]
        assert inner.fired == fired, (event, first_difference(inner.fired, fired))
        learn.model.zero_grad()
        is_clean(learn)


@pytest.mark.parametrize('kind', KINDS)
def test_by_hand_outside_a_run(kind: str) -> None:
    "An event called by hand has no open level; one batch by hand has its own."
    learn = make_learner(At('before_epoch', cancel(kind), depth=0))
    e = raised_by(lambda: learn('before_epoch'))
    assert type(e) is CancelError and 'At.before_epoch' in str(e)
    learn = make_learner(At('after_pred', cancel(kind), depth=0))
    batch = next(iter(learn.dls.valid))
    if kind == 'batch':
        learn.one_batch(0, batch)
    else:
        assert type(raised_by(lambda: learn.one_batch(0, batch))) is CancelError
    assert learn.run.levels == ()


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('place', ['model', 'loss', 'loader'])
def test_raised_by_what_is_no_callback(place: str, kind: str) -> None:
    def burn(*_: Any) -> Any:
        raise cancel(kind)

    learn = make_learner()
    start_again(learn)
    loss_func, train = learn.loss_func, learn.dls.train
    if place == 'model':
        learn.model[0].register_forward_hook(burn)
    elif place == 'loss':
        learn.loss_func = burn
    else:
        learn.dls.train = type('Burning', (list,), {'__iter__': burn})([1])
    legal = {
        'model': ('batch', 'train', 'epoch', 'fit'),
        'loss': ('batch', 'train', 'epoch', 'fit'),
        'loader': ('train', 'epoch', 'fit'),
    }[place]
    run = lambda: learn.fit(1)
    if kind == 'train' and place != 'loader':
        learn.dls.evaluation.clear()  # in validation it would be a stray one
    if kind in legal:
        run()
    else:
        e = raised_by(run)
        assert type(e) is CancelError and type(e.__cause__) is LEVELS[kind].exception
    learn.loss_func, learn.dls.train = loss_func, train
    learn.model[0]._forward_hooks.clear()
    is_clean(learn)
    fits_like_fresh(learn)


@pytest.mark.parametrize('kind', ['validate', 'epoch', 'fit', 'batch'])
def test_predictions_that_were_cut_short_are_what_was_predicted(kind: str) -> None:
    "Cancel in the second batch: the first predictions are returned, or an error reports that there are none."
    learn = make_learner()
    whole = learn.get_preds(with_loss=True)
    learn.add_cb(At('after_pred', cancel(kind), nth=2))
    preds, targs, losses = learn.get_preds(with_loss=True)
    assert isinstance(preds, type(whole[0])) and isinstance(targs, type(whole[1]))
    n = len(preds)
    assert n == len(targs) == len(losses)
    assert n in (4, 8)
    assert preds[:4].equal(whole[0][:4])
    assert targs.equal(whole[1][:n])
    assert losses.flatten().tolist() == pytest.approx(whole[2].flatten()[:n].tolist())


@pytest.mark.parametrize('event', ['before_validate', 'before_epoch', 'before_fit', 'before_batch'])
def test_predictions_without_a_single_batch(event: str) -> None:
    kind = {
        'before_validate': 'validate',
        'before_epoch': 'epoch',
        'before_fit': 'fit',
        'before_batch': 'batch',
    }[event]
    learn = make_learner([At(event, cancel(kind), nth=1), At(event, cancel(kind), nth=2, order=-1)])
    e = raised_by(learn.get_preds)
    assert type(e).__name__ == 'BatchError' and 'not one batch' in str(e)


@pytest.mark.parametrize('kind', ['validate', 'epoch', 'fit'])
def test_a_cancelled_validation_does_not_repeat_the_last_epochs_numbers(kind: str) -> None:
    learn = make_learner(Callback(before_validate=lambda cb: raise_in_second_epoch(cb, kind)))
    start_again(learn)
    learn.fit(N_EPOCH)
    first, *rest = learn.history
    assert first['valid_loss'] is not None
    assert all(row['valid_loss'] is None and row['mae'] is None for row in rest)


def raise_in_second_epoch(cb: Any, kind: str) -> None:
    if cb.epoch == 1:
        raise cancel(kind)


def test_with_learn_a_cancel_ends_the_block() -> None:
    for kind in ('epoch', 'fit'):
        learn, fired = make_learner(cb := Plan({})), list[str]()
        with learn:
            fired.append('in')
            raise cancel(kind)
        ends = {
            'epoch': ['after_cancel_epoch', 'after_epoch', 'after_fit'],
            'fit': ['after_cancel_fit', 'after_fit'],
        }[kind]
        assert fired == ['in']
        assert cb.fired == ['before_fit', 'before_epoch', *ends, 'close', 'post_close'][:-2]
        assert learn.run.depth == 0 and learn.run.levels == ()
    learn = make_learner()

    def run() -> None:
        with learn:
            raise cancel('batch')

    assert type(raised_by(run)) is CancelError
    is_clean(learn)


def test_the_model_of_the_lifecycle_counts_right() -> None:
    "Check the model above by a fit without Cancel, counted by hand."
    fired = expected('fit', {})[0]
    counts = {
        e: fired.count(e)
        for e in (
            'before_batch',
            'before_draw',
            'after_draw',
            'before_step',
            'batch_checkpoint',
            'before_validate',
        )
    }
    assert counts == {
        'before_batch': 10,
        'before_draw': 14,
        'after_draw': 10,
        'before_step': 6,
        'batch_checkpoint': 6,
        'before_validate': 2,
    }
    assert fired[:6] == [
        'before_fit',
        'before_iteration',
        'before_epoch',
        'before_train',
        'before_draw',
        'after_draw',
    ]
    assert fired[-5:] == [
        'after_epoch',
        'epoch_checkpoint',
        'after_iteration',
        'iteration_checkpoint',
        'after_fit',
    ]
