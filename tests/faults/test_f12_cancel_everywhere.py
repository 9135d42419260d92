"""Row 12: every Cancel at every event. Where it is legal the contract's table holds, elsewhere it is a CancelError.

What must fire is computed here from a second, plain writing of the lifecycle."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from learnkit import Callback, CancelError, Learner
from learnkit.core.errors import BatchError
from learnkit.engine.events import LEVELS
from tests.faults.fault_helpers import (
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
        self.open.append(kind)
        cancelled = False
        try:
            self.fire(f'before_{kind}')
            body()
        except Skip as e:
            if e.args[0] != kind:
                raise
            cancelled = True
        finally:
            self.open.pop()
        if cancelled:
            self.fire(f'after_cancel_{kind}')
        self.fire(f'after_{kind}')

    def fit(self) -> None:
        def epochs() -> None:
            for _ in range(N_EPOCH):
                self.fire('before_iteration')
                self.level('epoch', self.epoch)
                for event in ('epoch_checkpoint', 'after_iteration', 'iteration_checkpoint'):
                    self.fire(event)

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
    assert cb.fired == fired, plan
    # a fit that CancelFit ended keeps its gradients; the next one clears them
    learn.model.zero_grad()
    is_clean(learn)
    if stray or len(plan) > 1:
        fits_like_fresh(learn, [cb, watch])


def legal_kinds_and_a_stray_one(run: str, event: str) -> list[str]:
    "Each event gets another Cancel without an open level."
    stray = [kind for kind in KINDS if expected(run, {(event, 1): kind})[1]]
    legal = [kind for kind in KINDS if kind not in stray]
    return legal + stray[len(event) % len(stray) :][:1] if stray else legal


RUNS_AND_EVENTS = [(run, event) for run in RUNS for event in events_of(run)]


@pytest.mark.parametrize(('run', 'event'), RUNS_AND_EVENTS)
def test_every_legal_cancel_and_a_stray_one_at_every_event(run: str, event: str) -> None:
    for kind in legal_kinds_and_a_stray_one(run, event):
        holds(run, {(event, 1): kind})


@pytest.mark.parametrize('kind', KINDS)
def test_a_cancel_in_the_event_of_its_own_cancel(kind: str) -> None:
    "The level is no longer open there: it is a stray one."
    holds('fit', {(LEVELS[kind].before, 1): kind, (LEVELS[kind].after_cancel, 1): kind})


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
    for run, plan, order in random_plans(40, seed=0):
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


@pytest.mark.parametrize(('outer', 'how'), NESTED)
@pytest.mark.parametrize('kind', KINDS)
def test_none_crosses_out_of_a_nested_run(kind: str, outer: str, how: str) -> None:
    """Every event of the nested run: legal there, and the fit continues unchanged; or an error that ends it.

    Each of the three places has a third of the events."""
    for event in events_of(how)[NESTED.index((outer, how)) :: 3]:
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
        assert inner.fired == fired, event
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
