"""Dispatch: order, switches, changes during a run, redefined classes, observers, whole-event callbacks."""

from typing import Any
from warnings import catch_warnings, simplefilter

import pytest

from learnkit import (
    Callback,
    CallbackError,
    GradientClip,
    Learner,
    OrderError,
    Recorder,
    TrainEvalCallback,
)
from learnkit.engine.callback import defined_on_class
from learnkit.engine.dispatch import log_to_callbacks
from learnkit.testing import synth_learner
from tests.helpers.learners import bare_learner, quiet_synth_learner


def bare(*cbs: Any, n_train: int = 3, n_valid: int = 2, **kwargs: Any) -> Learner:
    "Return a Learner that counts and trains, and prints nothing."
    return bare_learner(n_train, n_valid, cls=synth_learner, cbs=cbs, recorder=None, **kwargs)


class Noted(Callback):
    "Appends its tag to a shared list at each of the given events."

    def __init__(self, tag: str, seen: list[str], *events: str, **options: Any) -> None:
        for e in events:
            setattr(self, e, lambda: seen.append(tag))
        for k, v in options.items():
            setattr(self, k, v)
        self.tag = tag

    def __repr__(self) -> str:
        return self.tag


# Order


def test_order_comes_first_then_the_order_of_adding() -> None:
    seen: list[str] = []
    cbs = [
        Noted(t, seen, 'before_fit', order=o)
        for t, o in zip('abcde', [5, 0, 5, -20, 0.5], strict=True)
    ]
    bare(*cbs).fit(0)
    assert ''.join(seen) == 'dbeac'


HANDLERS: dict[str, Any] = {'before_fit': lambda cb: None, 'after_fit': lambda cb: None}


def test_callbacks_that_run_first_or_last_go_by_order_among_themselves() -> None:
    ends = {'runs_first': ('before_fit',), 'runs_last': ('after_fit',)}
    made = [type(name, (Callback,), {'order': i} | ends)(**HANDLERS) for i, name in enumerate('AB')]
    learn = bare(Callback(**HANDLERS, order=-1), *made, Callback(**HANDLERS, order=5))
    names = [[type(cb).__name__ for cb in learn.ordered_cbs(event)] for event in HANDLERS]
    before, after = names
    assert before == ['A', 'B', 'TrainEvalCallback', 'Callback', 'Callback']
    assert after == ['Callback', 'Callback', 'A', 'B']


def test_a_change_of_order_acts_from_the_next_event() -> None:
    seen: list[str] = []
    a, b = (Noted(t, seen, 'before_epoch') for t in 'ab')
    learn = bare(a, b, n_valid=1)
    learn('before_epoch')
    a.order = 1
    learn('before_epoch')
    assert ''.join(seen) == 'abba'


class First(Noted):
    pass


class Second(Noted):
    run_after = First


class Zero(Noted):
    run_before = ('First', 'second')


def test_run_before_and_run_after_take_classes_and_names() -> None:
    seen: list[str] = []
    learn = bare(*(cls(cls.__name__, seen, 'before_fit') for cls in (Second, First, Zero)))
    learn.fit(0)
    assert seen == ['Zero', 'First', 'Second']
    assert [str(cb) for cb in learn.ordered_cbs('before_fit') if isinstance(cb, Noted)] == seen


def test_a_callback_that_had_to_wait_still_goes_by_its_order() -> None:
    seen: list[str] = []

    class Late(Noted):
        run_after = First

    cbs = [
        First('first', seen, 'before_fit'),
        Late('late', seen, 'before_fit', order=5),
        Noted('between', seen, 'before_fit', order=1),
    ]
    bare(*cbs).fit(0)
    assert seen == ['first', 'between', 'late']


def test_a_constraint_that_contradicts_order_names_both() -> None:
    learn = bare(First('the first', [], order=3))
    with pytest.raises(OrderError) as e:
        learn.add_cb(Second('the second', [], order=1))
    assert 'the first' in str(e.value) and 'the second' in str(e.value)
    assert not any(isinstance(cb, Second) for cb in learn.cbs)


def test_a_cycle_names_all_of_it_and_nothing_is_added() -> None:
    class A(Callback):
        run_before = 'B'

    class B(Callback):
        run_before = 'C'

    class C(Callback):
        run_before = A

    learn = bare(A(), B())
    with pytest.raises(OrderError, match='A, B, C'):
        learn.add_cbs([Callback(), C()])
    assert len(learn.cbs) == 3


# Adding and removing while an event is under way


def test_a_callback_added_in_an_event_acts_from_the_next_one() -> None:
    seen: list[str] = []
    late = Noted('late', seen, 'before_batch', 'after_pred', order=99)

    def add(cb: Any) -> None:
        if late not in cb.learn.cbs:
            cb.learn.add_cb(late)

    learn = bare(Callback(before_batch=add), n_train=1, n_valid=1)
    learn.fit(1)
    assert seen == ['late'] * 3  # after_pred of the first batch, both events of the second


def test_a_callback_that_is_removed_runs_no_more_in_the_same_event() -> None:
    seen: list[str] = []
    victim = Noted('victim', seen, 'before_batch', order=99)
    learn = bare(victim, Callback(before_batch=lambda cb: cb.learn.remove_cb(victim)))
    learn.fit(1)
    assert seen == [] and victim.learn is None and victim not in learn.cbs


def test_run_false_acts_at_once_and_until_the_end_of_the_fit() -> None:
    seen: list[str] = []
    victim = Noted('v', seen, 'before_batch', 'after_fit', order=99)

    def off(cb: Any) -> None:
        if cb.epoch == 1:
            victim.run = False

    learn = bare(victim, Callback(before_batch=off), n_train=2, n_valid=1)
    learn.fit(3)
    assert seen == ['v'] * 3  # the first epoch: two batches and one of validation
    learn.fit(1)
    assert seen == ['v'] * 7  # and after_fit


@pytest.mark.parametrize(('option', 'phases'), [('run_train', {False}), ('run_valid', {True})])
def test_run_train_and_run_valid_are_about_the_events_of_a_batch(
    option: str, phases: set[bool]
) -> None:
    batches, wide = [], []
    cb = Callback(
        after_batch=lambda cb: batches.append(cb.training),
        after_train=lambda cb: wide.append('train'),
        after_validate=lambda cb: wide.append('valid'),
    )
    setattr(cb, option, False)
    bare(cb).fit(1)
    assert set(batches) == phases and wide == ['train', 'valid']


def test_a_handler_that_is_given_later_runs() -> None:
    seen = []
    learn = bare(cb := Callback())
    learn.fit(1)
    cb.before_fit = lambda: seen.append('now')
    learn.fit(0)
    del cb.before_fit
    learn.fit(0)
    assert seen == ['now']


# Names that are taken, keys, redefinition


def test_a_check_runs_in_the_turn_of_its_callback_until_it_has_decided() -> None:
    seen: list[str] = []

    def add_check(cb: Any) -> None:
        cb.learn.parts.callbacks.check_once(cb, 'after_batch', check)

    def check() -> bool:
        seen.append('check')
        return seen.count('check') == 2

    first = Noted('a', seen, 'after_batch', order=1, run_valid=False)
    last = Noted('z', seen, 'after_batch', order=9, run_valid=False)
    checking = Callback(before_train=add_check, order=5)
    bare(last, checking, first, n_train=3).fit(1)
    assert seen == ['a', 'check', 'z', 'a', 'check', 'z', 'a', 'z']


def test_a_handler_of_a_run_is_called_in_training_only_and_leaves_with_the_run() -> None:
    seen: list[bool] = []

    def add_handler(cb: Any) -> None:
        callbacks = cb.learn.parts.callbacks
        for _ in range(2):  # the second replaces the first
            callbacks.add_run_handler(cb, 'after_pred', lambda: seen.append(cb.training))

    cb = Callback(before_fit=add_handler)
    learn = bare(cb, n_train=3, n_valid=2)
    learn.fit(1)
    assert seen == [True] * 3
    learn.remove_cb(cb)
    learn.fit(1)
    assert len(seen) == 3


@pytest.mark.parametrize(
    'cls',
    ['ModelCallback', 'FitCallback'],
)
def test_a_name_of_the_learner_keeps_the_learners_attribute(cls: str) -> None:
    learn = bare()
    name = type(cls, (Callback,), {})().name
    ran: list[Any] = []
    cb = type(cls, (Callback,), {'before_fit': lambda self: ran.append(self)})()
    learn.add_cb(cb)
    assert learn.cbs[-1] is cb
    assert vars(learn).get(name) is not cb
    learn('before_fit')
    assert ran == [cb]
    learn.remove_cb(cb)
    assert len(learn.cbs) == 1
    assert defined_on_class(learn, name) or name in vars(learn)


@pytest.mark.parametrize('wrong', [print, 'recorder', Noted])
def test_what_is_not_a_callback_is_refused_before_anything_is_added(wrong: Any) -> None:
    learn = bare()
    with pytest.raises(CallbackError, match=r'Callback|Noted'):
        learn.add_cbs([Callback(), wrong])
    assert len(learn.cbs) == 1


def test_the_same_instance_cannot_be_added_twice() -> None:
    learn = bare(cb := Callback())
    with pytest.raises(CallbackError, match='already'):
        learn.add_cb(cb)
    with pytest.raises(CallbackError, match='already'):
        learn.add_cbs([other := Callback(), other])
    assert len(learn.cbs) == 2


def test_two_of_one_class_both_stay_and_the_later_has_the_name() -> None:
    seen: list[str] = []
    a, b = (Noted(t, seen, 'before_fit') for t in 'ab')
    learn = bare(a, b)
    learn.fit(0)
    assert seen == ['a', 'b'] and learn.noted is b
    learn.remove_cb(b)
    assert learn.noted is a


def define(text: str) -> type[Callback]:
    "Run a notebook cell that defines `Cell`."
    space: dict[str, Any] = {'Callback': Callback, '__name__': 'a_notebook'}
    exec(text, space)
    return space['Cell']


def test_a_class_defined_again_replaces_its_old_instances_at_their_place() -> None:
    seen: list[str] = []
    text = 'class Cell(Callback):\n    def before_fit(self): self.learn.seen.append("{}")'
    old, new = define(text.format('old')), define(text.format('new'))
    learn = bare(Noted('a', seen, 'before_fit'), old(), Noted('b', seen, 'before_fit'), old())
    learn.seen = seen
    learn.add_cb(new())
    learn.fit(0)
    assert seen == ['a', 'new', 'b']
    assert isinstance(learn.cell, new) and not any(isinstance(cb, old) for cb in learn.cbs)


# Whole-event callbacks, observers


class Every(Callback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def before_fit(self) -> None:
        self.seen.append('the method')


class ByCall(Every):
    def __call__(self, event_name: str) -> None:
        self.seen.append(event_name)


class ByRunEvent(Every):
    def run_event(self, event_name: str) -> None:
        self.seen.append(event_name)


class WithSuper(Every):
    def run_event(self, event_name: str) -> Any:
        self.seen.append(event_name)
        return super().run_event(event_name)


@pytest.mark.parametrize('cls', [ByCall, ByRunEvent])
def test_an_override_of_call_or_run_event_gets_every_event_and_no_method_runs(
    cls: type[Every],
) -> None:
    bare(cb := cls(), n_train=1, n_valid=1).fit(1)
    expected = """after_create before_fit before_epoch before_train
        before_draw after_draw before_batch before_pred after_pred after_loss before_backward after_backward
        before_step after_step after_batch batch_checkpoint before_draw after_train before_eval before_validate
        before_draw after_draw before_batch before_pred after_pred after_loss after_batch before_draw
        after_validate after_eval after_epoch epoch_checkpoint after_fit cleanup""".split()
    assert cb.seen == expected


def test_super_runs_the_method_and_keeps_run_valid() -> None:
    class Both(WithSuper):
        run_valid = False

        def after_batch(self) -> None:
            self.seen.append(f'batch {self.training}')

    bare(cb := Both(), n_train=2, n_valid=1).fit(1)
    assert cb.seen.count('the method') == 1 and cb.seen.count('after_batch') == 3
    assert [s for s in cb.seen if s.startswith('batch ')] == ['batch True'] * 2


def test_an_observers_handlers_build_no_graph() -> None:
    made = {}

    class Look(Callback):
        observer = True

        def after_pred(self) -> None:
            made['method'] = (self.pred * 2).requires_grad

    class LookAtAll(Callback):
        observer = True

        def run_event(self, event_name: str) -> None:
            if event_name == 'after_pred':
                made['run_event'] = (self.pred * 2).requires_grad

    class Act(Callback):
        def after_pred(self) -> None:
            made['other'] = (self.pred * 2).requires_grad

    learn = bare(Look(), LookAtAll(), Act(), n_train=1)
    learn.training = True
    learn.create_opt()
    learn.one_batch(0, learn.dls.one_batch())
    assert made == {'method': False, 'run_event': False, 'other': True}


# The list of callbacks


def test_remove_by_instance_class_and_list() -> None:
    learn = bare(a := Callback(), b := Every(), c := Every())
    learn.remove_cb(a)
    assert a.learn is None and not hasattr(learn, 'callback') and len(learn.cbs) == 3
    learn.remove_cb(Every)
    assert b.learn is None and c.learn is None and len(learn.cbs) == 1
    learn.add_cbs([a, b])
    learn.remove_cbs([a, b])
    assert [type(cb) for cb in learn.cbs] == [TrainEvalCallback]


def test_removed_callbacks_return_to_their_places() -> None:
    cbs = [Noted(t, [], 'before_fit') for t in 'abcd']
    learn = bare(*cbs)
    with learn.removed_cbs([cbs[0], cbs[2]]):
        assert [str(cb) for cb in learn.cbs[1:]] == ['b', 'd'] and cbs[0].learn is None
    assert [str(cb) for cb in learn.cbs[1:]] == ['a', 'b', 'c', 'd'] and cbs[2].learn is learn
    with pytest.raises(ZeroDivisionError), learn.removed_cbs(Noted):
        raise ZeroDivisionError
    assert [str(cb) for cb in learn.cbs[1:]] == ['a', 'b', 'c', 'd']


def test_added_cbs_are_gone_after_the_context_and_after_fit() -> None:
    learn = bare()
    with learn.added_cbs([Every, Callback()]):
        assert len(learn.cbs) == 3
    assert len(learn.cbs) == 1
    names = []
    learn.fit(0, cbs=Callback(before_fit=lambda cb: names.append(len(learn.cbs))))
    assert names == [2] and len(learn.cbs) == 1


def test_cbs_can_be_assigned() -> None:
    learn = bare(a := Callback(), b := Every())
    learn.cbs = [learn.cbs[0], b, Recorder]
    assert [type(cb) for cb in learn.cbs] == [TrainEvalCallback, Every, Recorder]
    assert a.learn is None
    assert learn.cbs.filter(lambda cb: cb.order == 50) == [learn.recorder]
    assert learn._grab_cbs(type(learn.recorder)) == [learn.recorder]
    learn.cbs = None
    assert len(learn.cbs) == 0


def test_a_callback_added_to_another_learner_leaves_the_first() -> None:
    one, other = bare(cb := Callback()), bare()
    other.add_cb(cb)
    assert cb.learn is other and cb not in one.cbs and len(other.cbs) == 2


def test_the_class_of_all_callbacks_removes_only_those_made_from_functions() -> None:
    learn = synth_learner(cbs=[Callback(after_batch=lambda cb: None), Noted('a', [])])
    learn.remove_cb(Callback)
    assert [type(cb).__name__ for cb in learn.cbs] == [
        'TrainEvalCallback',
        'Recorder',
        'ProgressCallback',
        'Noted',
    ]
    with learn.removed_cbs(Callback):
        assert len(learn.cbs) == 4


def test_an_order_that_nobody_wrote_follows() -> None:
    seen: list[str] = []

    class AfterRow(Callback):
        run_after = Recorder

        def after_epoch(self) -> None:
            seen.append(f'{len(self.recorder.history)} rows')

    class BeforeCounters(Callback):
        run_before = TrainEvalCallback

        def after_batch(self) -> None:
            if self.training:
                seen.append(f'{self.train_iter} batches')

    learn = quiet_synth_learner(cbs=[BeforeCounters, AfterRow], n_train=1)
    learn.fit(1)
    assert seen == ['0 batches', '1 rows']

    class Written(AfterRow):
        order = 0

    with pytest.raises(OrderError, match=r'Recorder \(order 50\).*Written \(order 0\)'):
        learn.add_cb(Written())


# -- a cell that is run again ----------------------------------------------------------------------


def note_batch(cb: Callback) -> None: ...


def test_add_cb_replaces_a_callback_of_the_same_arguments() -> None:
    class Every(Callback):
        def __init__(self, n: int = 1) -> None:
            self.n = n

    class Hidden(Callback):
        def __init__(self, n: int = 1) -> None:
            self._n = n

    def add(*cbs: Callback) -> tuple[int, int]:
        learn = synth_learner(default_cbs=False)
        with catch_warnings(record=True) as caught:
            simplefilter('always')
            for cb in cbs:
                learn.add_cb(cb)
        assert cbs[-1] in learn.cbs
        return len(learn.cbs), len(caught)

    assert add(Every(), Every()) == (1, 1)
    assert add(GradientClip(0.5), GradientClip(0.5)) == (1, 1)
    assert add(Every(), Every(2)) == (2, 0)
    assert add(Hidden(), Hidden()) == (2, 0), 'what the arguments were is not known'
    named = [Callback(after_batch=note_batch), Callback(after_batch=note_batch)]
    assert add(*named) == (1, 1)
    assert add(Callback(after_batch=lambda cb: 1), Callback(after_batch=lambda cb: 2)) == (2, 0)
    assert len(synth_learner(default_cbs=False).add_cbs([Every(), Every()]).cbs) == 2


def test_a_callback_of_a_fit_does_not_replace_the_learners() -> None:
    learn = synth_learner(cbs=GradientClip(0.5))
    with learn.no_bar():
        learn.fit(1, cbs=GradientClip(0.5))
    assert sum(isinstance(cb, GradientClip) for cb in learn.cbs) == 1


def test_a_value_reaches_callbacks_under_exactly_its_name() -> None:
    seen: list[tuple[Any, ...]] = []

    class Receiver(Callback):
        def receive_log(self, *args: Any) -> None:
            seen.append((self.tag, *args))

    cbs = [Receiver(), Receiver()]
    for tag, cb in zip('ab', cbs, strict=True):
        cb.tag = tag
    log = Callback(after_eval=lambda cb: log_to_callbacks(cb.learn, 'f1', 0.5, None, False))
    learn = bare(*cbs, log)
    learn.validate()
    assert seen == [(tag, 'f1', 0.5, None, False) for tag in 'ab']
    log_to_callbacks(learn, 'f1', 0.25, to=cbs[1:])
    assert seen[2:] == [('b', 'f1', 0.25, 1, True)]
