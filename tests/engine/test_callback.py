"""Callbacks alone: calls, functions, reading through to the Learner, shadowing, names, misses, state, `Periodic`."""

import traceback
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from learnkit import (
    Callback,
    CallbackError,
    Learner,
    Periodic,
    TimeError,
    UnknownEventError,
)
from learnkit.testing import RegModel, synth_dls
from tests.helpers.clock import use_clock
from tests.helpers.learners import bare_learner, quiet_synth_learner

SHADOW = 'You are shadowing an attribute ({0}) that exists in the learner. Use `self.learn.{0}` to avoid this'


def quiet(*cbs: Any, **kwargs: Any) -> Learner:
    "Return a Learner that prints nothing."
    return quiet_synth_learner(*cbs, has_bar=False, **kwargs)


# Calling


def test_a_call_by_event_name_returns_the_handlers_value() -> None:
    class Answer(Callback):
        def before_fit(self) -> int:
            return 42

        def my_own_event(self) -> str:
            return 'mine'

    assert Answer()('before_fit') == 42
    assert Answer()('my_own_event') == 'mine'
    assert Answer()('after_fit') is None


def test_functions_become_handlers_that_get_the_callback() -> None:
    cb = Callback(before_fit=lambda cb: cb.x + 1, after_fit=lambda cb: cb)
    cb.learn = SimpleNamespace(x=2)
    assert cb('before_fit') == 3
    assert cb('after_fit') is cb


def test_an_unknown_event_is_refused_at_once_with_the_closest() -> None:
    with pytest.raises(UnknownEventError, match=r"'befor_fit' \(Callback\).*`before_fit`"):
        Callback(befor_fit=print)


def test_a_subclass_needs_no_super_init() -> None:
    class Counter(Callback):
        def __init__(self, start: int) -> None:
            self.n = start

        def after_batch(self) -> None:
            self.n += 1

    learn = quiet(cb := Counter(5), n_train=3, n_valid=2)
    learn.fit(2)
    assert cb.n == 5 + 2 * (3 + 2)


# Reading and writing


def test_reads_go_to_any_object_that_was_assigned() -> None:
    cb = Callback()
    cb.learn = SimpleNamespace(a=1, b=[2])
    assert cb.a == 1 and cb.b is cb.learn.b
    cb.own = 7
    assert cb.own == 7 and not hasattr(cb.learn, 'own')


def test_shadowing_warns_with_that_text_and_leaves_the_learner_alone() -> None:
    cb = Callback()
    cb.learn = SimpleNamespace(a=1)
    with pytest.warns(UserWarning, match='shadowing') as w:
        cb.a += 1
    assert [str(o.message) for o in w] == [SHADOW.format('a')]
    assert w[0].filename == __file__
    assert cb.a == 2 and cb.learn.a == 1
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        cb.a = 5  # it is the callback's own by now
        cb.learn.a = 3
    assert cb.learn.a == 3


@pytest.mark.parametrize('name', ['loss', 'x', 'b', 'recorder'])
def test_shadowing_warns_for_state_properties_callbacks_and_the_models_attributes(
    name: str,
) -> None:
    learn = quiet(cb := Callback())
    before = getattr(learn, name)
    with pytest.warns(UserWarning, match='shadowing') as w:
        setattr(cb, name, 'mine')
    assert [str(o.message) for o in w] == [SHADOW.format(name)]
    assert getattr(learn, name) == before


def test_writing_through_learn_changes_the_run() -> None:
    def double(cb: Any) -> None:
        cb.learn.loss_grad = 2 * cb.loss_grad

    batches, model, grads = [(torch.randn(4, 1), torch.randn(4, 1))], RegModel(), []
    read = Callback(before_step=lambda cb: grads.append(cb.model.a.grad.clone()))
    for cbs in ([read], [Callback(after_loss=double), read]):
        bare_learner(batches, model, nn.MSELoss(), cbs=cbs, recorder=None, lr=0.0).fit(1)
    assert torch.equal(grads[1], 2 * grads[0])


# Misses


def test_a_miss_names_both_owners_and_the_closest_names() -> None:
    learn = quiet(cb := Callback())
    with pytest.raises(AttributeError) as e:
        _ = cb.los
    assert '`Callback`' in str(e.value) and '`Learner`' in str(e.value)
    assert '`los`' in str(e.value) and '`loss`' in str(e.value)
    assert e.value.name == 'los'
    with pytest.raises(AttributeError, match=r'`Learner` nor `RegModel` .*`modle`.*`model`'):
        _ = learn.modle


def test_a_miss_before_the_callback_has_a_learner_names_the_reason() -> None:
    with pytest.raises(AttributeError, match='not part of a Learner yet'):
        _ = Callback().loss


@pytest.mark.parametrize('name', ['pred', 'loss_grad'])
def test_reading_what_a_batch_does_not_have_yet_names_the_event(name: str) -> None:
    messages = []

    def early(cb: Any) -> None:
        with pytest.raises(AttributeError) as e:
            getattr(cb, name)
        messages.append(str(e.value))

    quiet(Callback(before_batch=early), n_train=2, n_valid=1).fit(1)
    assert len(messages) == 3 and all(f'`{name}`' in s and 'after_' in s for s in messages)


class Failing(nn.Module):
    "A module with a property that raises."

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.a + self.b

    @property
    def computed(self) -> int:
        return self.missing_inside_model


class FailingLearner(Learner):
    @property
    def computed_here(self) -> int:
        return SimpleNamespace().missing_inside_learner


class FailingCallback(Callback):
    @property
    def computed_by_me(self) -> int:
        return self.model.missing_inside_callback


@pytest.mark.parametrize(
    ('name', 'inside', 'line'),
    [
        ('computed', 'missing_inside_model', 'return self.missing_inside_model'),
        ('computed_here', 'missing_inside_learner', 'SimpleNamespace().missing_inside_learner'),
        ('computed_by_me', 'missing_inside_callback', 'return self.model.missing_inside_callback'),
    ],
)
def test_an_attribute_error_inside_a_property_keeps_its_name_and_line(
    name: str, inside: str, line: str
) -> None:
    cb = FailingCallback()
    FailingLearner(synth_dls(), Failing(), nn.MSELoss(), cbs=cb, default_cbs=False)
    with pytest.raises(AttributeError) as e:
        getattr(cb, name)
    assert e.value.name == inside and inside in str(e.value) and f'`{name}`' not in str(e.value)
    assert any(line in (frame.line or '') for frame in traceback.extract_tb(e.value.__traceback__))


# Names, completion, looks


@pytest.mark.parametrize(
    ('cls', 'name'),
    [
        ('ComplicatedNameCallback', 'complicated_name'),
        ('EarlyStoppingCallback', 'early_stopping'),
    ],
)
def test_names_are_snake_case_without_callback(cls: str, name: str) -> None:
    cb = type(cls, (Callback,), {})()
    assert cb.name == name


def test_the_look_of_a_callback_names_its_functions() -> None:
    def hello(cb: Any) -> None:
        "Say nothing."

    assert repr(Callback(before_fit=hello)) == 'Callback(before_fit=hello)'
    assert repr(type('Mine', (Callback,), {})()) == 'Mine'


def test_a_notebook_does_not_take_the_models_html_for_the_callbacks() -> None:
    class Drawn(RegModel):
        def _repr_html_(self) -> str:
            return '<b>model</b>'

    quiet(cb := Callback(), model=Drawn())
    assert not hasattr(cb, '_repr_html_')


# Periodic


def fired(every: Any, n_epoch: int = 2, fits: int = 1, **kwargs: Any) -> list[int]:
    "Return the number of finished training batches at each call, in epochs of 4 batches of 16."
    at: list[int] = []
    learn = quiet(
        Periodic(every=every, on_every=lambda cb: at.append(cb.time.ba)), n_train=4, n_valid=1
    )
    for _ in range(fits):
        learn.fit(n_epoch, **kwargs)
    return at


def test_periodic_by_batches_steps_and_samples_counts_multiples() -> None:
    assert fired('3ba', 3) == [3, 6, 9, 12]
    assert fired('3st', 3) == [3, 6, 9, 12]
    assert fired('40sp', 2) == [3, 5, 8]  # crossed at 40, 80 and 120 of 128 samples
    assert fired('8sp', 1) == [1, 2, 3, 4]  # once a batch at most


def test_periodic_by_epochs_and_iterations() -> None:
    assert fired('2ep', 5) == [8, 16]
    assert fired(1, 2) == [4, 8]  # a plain number counts epochs
    assert fired('1iter', 5, iteration=2) == [8, 16]
    assert fired('2iter', 5, iteration=2) == [16]


def test_periodic_by_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fired('1h') == []
    clock = use_clock(monkeypatch)
    seen: list[float] = []
    learn = quiet(
        Callback(before_step=lambda cb: clock.sleep(3.0)),
        Periodic(every='10sec', on_every=lambda cb: seen.append(cb.time.sec)),
        n_train=8,
        n_valid=1,
    )
    learn.fit(1)
    assert seen == [12.0, 21.0]


def test_periodic_as_a_subclass_keeps_its_own_handlers() -> None:
    class Every(Periodic):
        def __init__(self) -> None:
            super().__init__(every='2ba')
            self.batches = self.calls = 0

        def after_batch(self) -> None:
            self.batches += 1

        def on_every(self) -> None:
            self.calls += 1

    quiet(cb := Every(), n_train=5, n_valid=2).fit(1)
    assert (cb.batches, cb.calls) == (5, 2)


@pytest.mark.parametrize('every', ['0ba', '3 lightyears'])
def test_periodic_refuses_what_is_not_an_interval(every: Any) -> None:
    with pytest.raises(TimeError):
        Periodic(every=every, on_every=print)


def test_periodic_resumes_from_its_state() -> None:
    first, second = (Periodic(every='2ba', on_every=print) for _ in range(2))
    quiet(first, n_train=2).fit(1)
    assert first.state_dict() != second.state_dict()
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()


def test_a_function_with_an_order_above_the_recorders_reads_the_row_of_its_epoch() -> None:
    rows = []
    note = Callback(after_epoch=lambda cb: rows.append(cb.history[-1]['epoch']), order=60)
    quiet(note).fit(2)
    assert rows == [0, 1]
    assert note.order == 60 and Callback.order == 0
    assert repr(Callback(after_fit=print, order=60)) == 'Callback(order=60, after_fit=print)'


def test_an_unknown_kind_of_run_is_refused() -> None:
    with pytest.raises(CallbackError, match="run_in='fits'"):
        Callback(after_fit=print, run_in='fits')
