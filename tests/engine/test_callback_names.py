"""Warnings of handlers with other libraries' names, and of attributes that hide the loop's state."""

import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from learnkit import Callback, Periodic
from learnkit.core.errors import CallbackError
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
        ('on_train_batch_end', 'after_batch'),
        ('epoch_start', 'before_epoch'),
        ('training_step', 'after_batch'),
        ('after_bach', 'after_batch'),
    ],
)
def test_handlers_of_another_name(name: str, meant: str) -> None:
    cls = type('Slip', (Callback,), {name: lambda self, *args: None})
    [message] = warnings_of_callback(cls)
    assert f'Slip.{name}' in message and f'`{meant}`' in message


def test_methods_of_other_names_are_left_alone() -> None:
    class Own(Callback):
        def on_new_best(self) -> None:
            pass

        def _on_epoch_end(self) -> None:
            pass

        on_fit_end = None

    class Tick(Periodic):
        def on_every(self) -> None:
            pass

    for cb in (Own, Tick('1ep')):
        assert warnings_of_callback(cb) == []


@pytest.mark.parametrize(
    ('name', 'here'),
    [
        ('targets', '`y` or `yb`'),
        ('device', '`x.device`'),
        ('optimizer', '`opt`'),
        ('learning_rate', "`opt.hypers[-1]['lr']`"),
    ],
)
def test_where_a_name_of_another_library_is(name: str, here: str) -> None:
    def read(cb: Callback) -> None:
        with pytest.raises(AttributeError, match=f'`{name}`') as e:
            getattr(cb, name)
        assert str(e.value).endswith(f' Here it is {here}.')
        for path in here.strip('`').split('` or `'):
            eval(f'cb.{path}', {'cb': cb})  # it is there

    with synth_learner(cbs=Callback(after_loss=read)).no_bar() as learn:
        learn.fit(1)


def test_a_handler_that_takes_the_learner_is_refused_when_it_is_added() -> None:
    class Mini(Callback):
        def before_fit(self, learn: Any) -> None: ...

    learn = synth_learner()
    before = list(learn.cbs)
    with pytest.raises(
        CallbackError, match=r'Mini.before_fit takes learn, .*`def before_fit\(self\):`'
    ):
        learn.add_cbs([Callback(), Mini])
    assert list(learn.cbs) == before


def test_a_method_patched_into_fastais_learner_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fastai = SimpleNamespace(Learner=type('Learner', (), {'freeze_body': lambda self: None}))
    monkeypatch.setitem(sys.modules, 'fastai.learner', fastai)  # type: ignore[arg-type]
    with pytest.raises(
        AttributeError, match=r'fastai.*patch `learnkit.Learner` with `freeze_body`'
    ):
        synth_learner().freeze_body()
