"""Warnings of handlers with other libraries' names, and of attributes that hide the loop's state."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from learnkit import Callback, Periodic, Recorder
from learnkit.engine.lint import event_like
from learnkit.loggers import Logger
from learnkit.testing import synth_learner


def warnings_of_callback(cb: Any) -> list[str]:
    "Return the warnings of adding a callback, and check that they point to this file."
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        synth_learner(cbs=cb, default_cbs=False)
    assert {w.filename for w in seen} <= {__file__}
    return [str(w.message) for w in seen]


@pytest.mark.parametrize(
    ('name', 'meant'),
    [
        ('on_epoch_end', 'after_epoch'),
        ('on_epoch_begin', 'before_epoch'),
        ('on_train_batch_end', 'after_batch'),
        ('on_fit_start', 'before_fit'),
        ('on_train_start', 'before_fit'),
        ('on_train_epoch_end', 'after_train'),
        ('on_validation_end', 'after_validate'),
        ('epoch_start', 'before_epoch'),
        ('batch_end', 'after_batch'),
        ('training_step', 'after_batch'),
        ('on_before_optimizer_step', 'before_step'),
        ('after_bach', 'after_batch'),
        ('on_save_checkpoint', 'state_dict'),
        ('on_epoch_finished', 'after_epoch'),
    ],
)
def test_handlers_of_another_name(name: str, meant: str) -> None:
    cls = type('Slip', (Callback,), {name: lambda self, *args: None})
    expected = [f'Slip.{name} is not an event, and no event calls it. Did you mean `{meant}`?']
    assert warnings_of_callback(cls) == expected
    assert event_like(name) == meant


def test_methods_of_other_names_and_of_mixins_are_left_alone() -> None:
    class Own(Callback):
        def on_new_best(self) -> None:
            pass

        def weekend(self) -> None:
            pass

        def _on_epoch_end(self) -> None:
            pass

        on_fit_end = None

    class Tick(Periodic):
        def on_every(self) -> None:
            pass

    class Mine(Logger):
        def log_metrics(self, metrics: Any, step: int) -> None:
            pass

    class Library:
        def run_all(self) -> None:
            self.on_train_start()

        def on_train_start(self) -> None:
            pass

    class Both(Library, Callback):
        def on_train_start(self) -> None:
            pass

    for cb in (Own, Tick('1ep'), Mine(), Both):
        assert warnings_of_callback(cb) == []


# -- attributes that hide --------------------------------------------------------------------------

HIDES = (
    'You are shadowing an attribute ({0}) that exists in the learner. Use `self.learn.{0}` to avoid this, or '
    'choose another name'
)


def test_attributes_of_the_constructor_and_the_class_that_hide_the_loops_state() -> None:
    class Hides(Callback):
        loss = None

        def __init__(self, epoch: int) -> None:
            self.epoch, self.lr = epoch, 0.1

    class Below(Hides):
        pass

    class Fine(Callback):
        def __init__(self, x: int) -> None:
            self.x, self.metrics, self.path = x, [], '.'

        @property
        def pred(self) -> int:
            return 3

    class Others(Callback):
        def __init__(this, self: Any) -> None:
            self.epoch, this.inner = 1, self
            this.inner.loss = self.pred.iter = 0

    class Inside(Callback):
        def __init__(self, x: int) -> None:
            y, self.epoch = x, x
            self.loss = lambda: (self, y)

    class Subclass(Recorder):
        pass

    assert (
        warnings_of_callback(Inside(3))
        == warnings_of_callback(Hides(3))
        == warnings_of_callback(Below(3))
        == [HIDES.format(name) for name in ('epoch', 'loss')]
    )
    for cb in (Fine(3), Others(SimpleNamespace(pred=SimpleNamespace())), Subclass):
        assert warnings_of_callback(cb) == []


# -- names of other libraries ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ('name', 'here'),
    [
        ('targets', '`y` or `yb`'),
        ('inputs', '`x` or `xb`'),
        ('device', '`x.device`'),
        ('optimizer', '`opt`'),
        ('outputs', '`pred`'),
        ('learning_rate', "`opt.hypers[-1]['lr']`"),
        ('global_step', '`train_iter`'),
    ],
)
def test_where_a_name_of_another_library_is(name: str, here: str) -> None:
    def read(cb: Callback) -> None:
        with pytest.raises(AttributeError) as e:
            getattr(cb, name)
        expected = f'Neither `Callback` nor `Learner` has an attribute `{name}`. Here it is {here}.'
        assert str(e.value) == expected
        for path in here.strip('`').split('` or `'):
            eval(f'cb.{path}', {'cb': cb})  # it is there

    with synth_learner(cbs=Callback(after_loss=read)).no_bar() as learn:
        learn.fit(1)
