"""Bad input raises a typed error with the cause and the fix before a weight changes; then the Learner trains."""

from typing import Any

import pytest
from torch import nn

from learnkit import Callback, mae
from learnkit.core.errors import CallbackError, FitError, ModelError
from tests.helpers.refusing import make, refuses, trains


class NeedsArgs(Callback):
    def __init__(self, n: int) -> None:
        self.n = n


CALLBACKS = [
    (5, ['5', 'Callback(event=function)']),
    ('mixup', ["'mixup'"]),
    (mae, ['mae', 'Callback(event=function)']),
    (nn.Linear, ['Linear is a model', 'Learner(dls, model)']),
    (NeedsArgs, ['NeedsArgs', 'without arguments', 'instance']),
    (object(), ['object']),
]


@pytest.mark.parametrize(('bad', 'expected_text'), CALLBACKS, ids=lambda o: str(o)[:12])
def test_an_invalid_callback_is_refused(bad: Any, expected_text: list[str]) -> None:
    with pytest.raises(CallbackError) as e:
        make(cbs=bad)
    assert all(s in str(e.value) for s in expected_text), str(e.value)
    learn = make()
    for do in (
        lambda learn: learn.fit(1, cbs=[Callback(), bad]),
        lambda learn: learn.add_cb(bad),
        lambda learn: learn.validate(cbs=bad),
        lambda learn: learn.get_preds(cbs=bad),
        lambda learn: setattr(learn, 'cbs', [bad]),
    ):
        refuses(learn, CallbackError, *expected_text, do=do)
    trains(learn)


def test_a_model_without_trainable_parameters() -> None:
    model = nn.Linear(1, 1).requires_grad_(False)
    learn = make(model=model)
    refuses(learn, ModelError, 'Linear', 'no trainable parameters', 'requires_grad_()')
    assert len(learn.validate()) == 1, 'it can still be evaluated'
    model.requires_grad_(True)
    trains(learn)


@pytest.mark.parametrize('n', [-1, 1.5, None, True, float('nan')], ids=repr)
def test_an_invalid_number_of_epochs_is_refused(n: Any) -> None:
    learn = make()
    refuses(learn, FitError, 'n_epoch', 'whole number', '0 or more', do=lambda learn: learn.fit(n))
    trains(learn)
