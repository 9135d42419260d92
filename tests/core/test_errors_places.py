"""Where an exception was raised is a record of its own: a user's note that reads like one is not."""

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learnkit import Callback, Learner, Replay
from learnkit.core.errors import LossError, OptionError, add_place, list_places
from learnkit.distributed.failures import describe_place

NOTE = 'in row 7 of data.csv'
BATCHES = [(torch.zeros(2, 1), torch.zeros(2, 1))] * 2


class Failing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise make_error()


def make_error() -> ValueError:
    e = ValueError('broken')
    e.add_note(NOTE)
    return e


def fail(model: nn.Module, **options: Any) -> tuple[Learner, BaseException]:
    learn = Learner(BATCHES, model, options.pop('loss_func', nn.MSELoss()), **options)
    with pytest.raises(ValueError, match='broken') as caught, learn.no_bar():
        learn.fit(1)
    return learn, caught.value


def test_a_users_note_keeps_hint_and_place() -> None:
    _, e = fail(Failing(1, 1))
    assert e.__notes__ == [
        NOTE,
        'Failing got (Tensor[2, 1] float32,)',
        'in train (epoch 0, batch 0)',
    ]

    def loss_func(pred: Tensor, y: Tensor) -> Tensor:
        raise make_error()

    _, e = fail(nn.Linear(1, 1), loss_func=loss_func)
    assert e.__notes__[0] == NOTE and e.__notes__[1].startswith('loss_func got Tensor[2, 1]')
    assert list_places(e) == ('train (epoch 0, batch 0)',)


def test_a_callbacks_error_has_its_place_and_no_hint() -> None:
    def act(cb: Callback) -> None:
        raise make_error()

    _, e = fail(nn.Linear(1, 1), cbs=Callback(before_batch=act))
    place = 'Callback(before_batch=act) (epoch 0, batch 0)'
    assert e.__notes__ == [NOTE, f'in {place}']
    assert list_places(e) == (place,)


def test_a_rank_reports_the_recorded_place() -> None:
    learn = Learner(BATCHES, nn.Linear(1, 1), nn.MSELoss())
    e = make_error()
    assert describe_place(e, learn) == 'in train (epoch 0, batch 0)'
    add_place(e, 'Callback.before_batch (epoch 3, batch 1)')
    add_place(e, 'Outer.after_epoch (epoch 0, batch 9)')
    assert describe_place(e, learn) == 'in Callback.before_batch (epoch 3, batch 1)'


@pytest.mark.parametrize('cls', [ValueError, LossError, OptionError, KeyboardInterrupt])
def test_a_place_is_pickled(cls: type[BaseException]) -> None:
    e = cls('broken')
    e.add_note(NOTE)
    add_place(e, 'Callback.before_batch (epoch 3, batch 1)')
    copy = pickle.loads(pickle.dumps(e))
    assert list_places(copy) == ('Callback.before_batch (epoch 3, batch 1)',)
    assert copy.__notes__ == [NOTE, 'in Callback.before_batch (epoch 3, batch 1)']


class Closed(Exception):
    "Refuses attributes and notes."

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)


def test_an_exception_that_refuses_notes_has_a_place() -> None:
    e = Closed()
    add_place(e, 'here')
    assert list_places(e) == ('here',)


class Fails(Callback):
    "Has a note that names another callback."

    def before_batch(self) -> None:
        e = ValueError('broken')
        e.add_note('in Named.before_batch by hand')
        raise e


class Named(Callback):
    "Is left out of a repetition, unless it failed."

    remove_on_find = True
    n_calls = 0

    def before_batch(self) -> None:
        self.n_calls += 1


def test_a_repetition_leaves_out_a_tracker_that_a_note_names() -> None:
    named = Named()
    learn, _ = fail(nn.Linear(1, 1), cbs=[named, Fails(), Replay()])
    n_calls = named.n_calls
    with pytest.raises(ValueError, match='broken'), learn.no_logging():
        learn.replay()
    assert named.n_calls == n_calls
