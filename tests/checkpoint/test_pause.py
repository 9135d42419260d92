"""A fit that is paused and continued in memory, compared with one that was never stopped."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from learnkit import Callback, Learner
from learnkit.core.errors import FitError, TimeError
from tests.faults.fault_helpers import digest, make_learner, rows, start_again
from tests.faults.run_helpers import torch_dls
from tests.faults.set_ups import CALLBACKS, LOADERS, LOSSES, MODELS
from tests.faults.test_f51_set_ups import Trace, combine, compare, picture
from tests.helpers.interrupting import pythons_own_handlers  # noqa: F401
from tests.helpers.resuming import scramble


def make(cbs: Any = None, **options: Any) -> Learner:
    learn = make_learner(cbs, **options)
    learn.remove_cb(learn.progress)
    learn.logger = lambda row: None
    if 'dls' not in options:
        start_again(learn)
    else:
        torch.default_generator.manual_seed(5)
    return learn


def end_of(learn: Learner) -> tuple[Any, ...]:
    return digest(learn), rows(learn), learn.time.replace(sec=0.0)


def straight(fit: Callable[..., None], **options: Any) -> tuple[Any, ...]:
    learn = make(**options)
    fit(learn)
    return end_of(learn)


def fine_tune(learn: Learner, **options: Any) -> None:
    learn.splitter = lambda model: [list(m.parameters()) for m in (model[0], model[1:])]
    learn.fine_tune(2, 0.05, **options)


FITS: dict[str, Callable[..., None]] = {
    'fit': lambda learn, **o: learn.fit(3, **o),
    'one cycle': lambda learn, **o: learn.fit_one_cycle(3, 0.05, **o),
    'flat': lambda learn, **o: learn.fit_flat_cos(3, 0.05, **o),
    'sgdr': lambda learn, **o: learn.fit_sgdr(2, 1, 0.05, **o),
    'fine tune': lambda learn, **o: fine_tune(learn, **o),
    'budget': lambda learn, **o: learn.fit('8ba', **o),
}


@pytest.mark.parametrize('name', list(FITS))
def test_a_pause_at_every_batch_changes_nothing(name: str) -> None:
    fit, expected = FITS[name], straight(FITS[name])
    learn = make()
    fit(learn, pause_at='1ba')
    n = 0
    while learn.paused is not None:
        n += 1
        assert learn.time.ba == n
        learn.validate()
        learn.get_preds(0)
        torch.rand(3)
        learn.resume(pause_at=f'{n + 1}ba')
    assert end_of(learn) == expected and n == expected[2].ba


@pytest.mark.parametrize('pause_at', ['1ep', '2ep', '7ba', '5st', '20sp', '0.5dur', 4])
def test_units_of_a_pause(pause_at: Any) -> None:
    expected = straight(FITS['one cycle'])
    learn = make()
    FITS['one cycle'](learn, pause_at=pause_at)
    assert learn.paused is not None
    learn.resume()
    assert end_of(learn) == expected


class Events(Callback):
    order = 10_001

    def __init__(self) -> None:
        self.fired: list[str] = []

    def run_event(self, event: str) -> None:
        self.fired.append(event)

    def state_dict(self) -> None:
        return None


def test_the_events() -> None:
    learn = make(events := Events())
    learn.fit(2, pause_at='2ba')
    assert events.fired[-3:] == ['after_batch', 'batch_checkpoint', 'cleanup']
    assert not learn.history and 'after_train' not in events.fired
    seen: list[bool] = []
    learn.add_cb(look := Callback(before_fit=lambda cb: seen.append(cb.learn.resumed)))
    events.fired.clear()
    learn.resume()
    assert seen == [True] and events.fired[:2] == ['before_fit', 'before_epoch']
    assert events.fired.count('after_fit') == 1 and events.fired.count('after_epoch') == 2
    assert learn.remove_cb(look).paused is None and len(learn.history) == 2


@pytest.mark.parametrize('in_thread', [False, True])
def test_a_request_of_a_callback_or_a_thread(in_thread: bool) -> None:
    def ask(cb: Any) -> None:
        if cb.time.ba != 3 or not cb.training:
            return
        if not in_thread:
            return cb.learn.pause()
        thread = threading.Thread(target=cb.learn.pause)
        thread.start()
        thread.join()

    expected = straight(FITS['fit'])
    learn = make(asking := Callback(before_pred=ask))
    learn.fit(3)
    assert learn.paused is not None and learn.time.ba == 4
    learn.remove_cb(asking)
    learn.resume()
    assert end_of(learn) == expected


def test_a_request_in_the_evaluation_pauses_after_the_epoch() -> None:
    learn = make(asking := Callback(before_validate=lambda cb: cb.learn.pause()))
    learn.fit(2)
    assert learn.paused is not None and len(learn.history) == 1 and learn.time.ep == 1
    learn.remove_cb(asking)
    learn.resume()
    assert len(learn.history) == 2


def test_what_is_refused() -> None:
    learn = make()
    with pytest.raises(FitError, match='no fit is running'):
        learn.pause()
    with pytest.raises(FitError, match='no fit is paused'):
        learn.resume()
    learn.fit(1, pause_at='2ba')
    with pytest.raises(TimeError, match="pause_at='2ba'"):
        learn.resume(pause_at='2ba')
    assert learn.paused is not None
    learn.fit(1)
    assert learn.paused is None
    learn.fit(1, pause_at='6ba')
    learn.close()
    assert learn.paused is None


# -- set-ups of users -----------------------------------------------------------------------------

PARTS = [
    ('model', 'mlp'),
    ('model', 'normed and lazy'),
    ('model', 'Generators'),
    ('loss', 'RandomLoss'),
    ('loader', 'of its own'),
    ('loader', 'deep generators'),
    ('loader', 'endless stream'),
    ('loader', 'workers, noise'),
    ('callback', 'EMA, accumulation, bf16'),
    ('callback', 'Unfreeze'),
    ('callback', 'LBFGS'),
]
ALL = [
    (axis, name)
    for axis, parts in {
        'model': MODELS,
        'loss': LOSSES,
        'loader': LOADERS,
        'callback': CALLBACKS,
    }.items()
    for name in parts
    # two fits differ; its attribute shadows the model's
    if name not in ('out of order', 'Scheduler')
]


def train(axis: str, name: str, pauses: list[int]) -> tuple[dict[str, str], dict[str, str]]:
    set_up = combine({axis: name})
    scramble(0)
    learn = set_up.make()
    scramble(0)
    learn.add_cb(trace := Trace())
    first = pauses[0] if pauses else None
    learn.fit(3, pause_at=first)
    for later in [*pauses[1:], None][: len(pauses)]:
        learn.validate()
        scramble(7)
        learn.resume(pause_at=later)
    assert learn.paused is None
    learn.remove_cb(trace)
    end = picture(learn)
    learn.close()
    return end, trace.batches


def is_exact(axis: str, name: str) -> None:
    expected = train(axis, name, [])
    found = train(axis, name, [2, 7, 8])
    assert not compare(expected[1], found[1]) and not compare(expected[0], found[0])


@pytest.mark.parametrize(('axis', 'name'), PARTS)
def test_set_ups(axis: str, name: str) -> None:
    is_exact(axis, name)


@pytest.mark.full
@pytest.mark.filterwarnings('ignore:The train loader')
@pytest.mark.parametrize(('axis', 'name'), ALL)
def test_every_set_up(axis: str, name: str) -> None:
    is_exact(axis, name)


# -- signals and errors ---------------------------------------------------------------------------


def interrupt_at(learn: Learner, event: str, nth: int) -> Callback:
    "Press Ctrl-C at the n-th event in training."
    seen: list[int] = []

    def press(cb: Any) -> None:
        seen.append(1)
        if len(seen) == nth:
            signal.raise_signal(signal.SIGINT)

    cb = Callback(**{event: press})
    learn.add_cb(cb)
    return cb


@pytest.mark.parametrize(
    ('event', 'nth'),
    [
        ('before_batch', 2),
        ('after_loss', 4),
        ('after_batch', 9),
        ('before_draw', 1),
        ('before_draw', 3),
        ('before_validate', 2),
    ],
)
def test_ctrl_c(event: str, nth: int) -> None:
    expected = straight(FITS['one cycle'])
    learn = make()
    pressing = interrupt_at(learn, event, nth)
    with pytest.raises(KeyboardInterrupt):
        FITS['one cycle'](learn)
    assert learn.paused is not None
    learn.remove_cb(pressing)
    learn.validate()
    learn.resume()
    assert end_of(learn) == expected


@pytest.mark.parametrize(
    ('event', 'repeats', 'line'),
    [
        ('before_batch', True, ''),
        ('before_pred', True, ''),
        ('after_loss', True, 'not exact'),
        ('before_step', True, 'not exact'),
        ('after_step', False, 'not exact'),
        ('after_batch', False, ''),
        ('batch_checkpoint', False, ''),
    ],
)
def test_an_error_of_a_callback(
    event: str, repeats: bool, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = straight(FITS['one cycle'])
    bad = [True]

    def fail(cb: Any) -> None:
        if cb.training and bad and cb.iter == 1:
            bad.clear()
            raise ValueError('a bug')

    learn = make()
    learn.add_cb(failing := Callback(**{event: fail}))
    with pytest.raises(ValueError, match='a bug'):
        FITS['one cycle'](learn)
    assert learn.paused is not None and learn.time.ba == (1 if repeats else 2)
    learn.remove_cb(failing)
    learn.logger = print
    learn.resume()
    out = capsys.readouterr().out
    assert ('not exact' in out) == bool(line)
    assert learn.time.ba == expected[2].ba and learn.time.st == expected[2].st
    if not line or not repeats:
        assert end_of(learn) == expected


def test_workers_live_through_ctrl_c_in_a_batch() -> None:
    fit = lambda learn: learn.fit(2)
    expected = straight(fit, dls=torch_dls(2, n_train=4))
    learn = make(dls=torch_dls(2, n_train=4))
    pressing = interrupt_at(learn, 'after_loss', 2)
    with pytest.raises(KeyboardInterrupt, match='2ba'):
        fit(learn)
    learn.remove_cb(pressing)
    learn.resume()
    assert end_of(learn) == expected
    learn.close()
