"""Composer-style callbacks in a Learner: small typical ones, and the state that they read and write."""

from functools import partial
from typing import Any

import pytest
import torch

from learnkit import Callback
from learnkit.core.errors import CallbackError
from learnkit.interop import from_composer
from tests.helpers.interop import Read, make_learner

learner = partial(make_learner, adapt=from_composer)


# -- typical callbacks in miniature ----------------------------------------------------------------


class SpeedMonitor:
    "Measures evaluation time."

    def __init__(self) -> None:
        self.eval_s = 0.0

    def eval_end(self, state: Any, logger: Any) -> None:
        self.eval_s += state.eval_timestamp.total_wct.total_seconds()
        logger.log_metrics({f'batches_{state.dataloader_label}': state.eval_timestamp.batch.value})

    def state_dict(self) -> dict[str, Any]:
        return {'eval_s': self.eval_s}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.eval_s = state['eval_s']


def test_speed_monitor() -> None:
    cb = SpeedMonitor()
    learn = learner(cb)
    learn.fit(2)
    assert [row['batches_day'] for row in learn.history] == [2, 2]
    assert 0 < cb.eval_s <= learn.time.sec
    assert learn.composer_speed_monitor.state_dict()['callback'] == {'eval_s': cb.eval_s}


# -- what is read ----------------------------------------------------------------------------------


def test_counts_at_the_ends_of_batches_and_epochs() -> None:
    at_batch = Read(
        lambda s: (
            s.timestamp.epoch.value,
            s.timestamp.batch.value,
            s.timestamp.sample_in_epoch.value,
            s.previous_timestamp.batch.value,
        ),
        'batch_end',
    )
    at_epoch = Read(
        lambda s: (
            int(s.timestamp.epoch),
            int(s.timestamp.batch_in_epoch),
            s.previous_timestamp.epoch.value,
            s.timestamp >= '2ep',
            s.max_duration.value,
        ),
        'epoch_end',
        'epoch_checkpoint',
    )
    learn = learner(at_batch, at_epoch)
    learn.fit(2)
    assert at_batch.got == [
        (0, 1, 8, 0),
        (0, 2, 16, 1),
        (0, 3, 24, 2),
        (1, 4, 8, 3),
        (1, 5, 16, 4),
        (1, 6, 24, 5),
    ]
    assert at_epoch.got == [(1, 0, 0, False, 2)] * 2 + [(2, 0, 1, True, 2)] * 2
    learn.fit(1)
    assert at_epoch.got[-1] == (3, 0, 2, True, 3)


# -- what is written -------------------------------------------------------------------------------


def test_the_logger_hands_on_what_callbacks_have_a_place_for() -> None:
    class Place(Callback):
        def __init__(self) -> None:
            self.got: list[Any] = []

        def log_params(self, params: Any) -> None:
            self.got.append(params)

        def log_text(self, step: int, name: str, text: str) -> None:
            self.got.append((step, name, text))

        def log_images(self, step: int, name: str, images: Any) -> None:
            self.got.append((step, name, images.shape))

    class Log:
        def fit_start(self, state: Any, logger: Any) -> None:
            logger.log_hyperparameters({'depth': 3})
            logger.log_table(['a', 'b'], [[1, 2]], name='t')
            logger.log_images(torch.zeros(2, 4, 5, 3), name='i', channels_last=True)
            logger.upload_file('x', __file__)
            assert not logger.has_file_upload_destination() and not logger.destinations

    place = Place()
    learn = learner(Log())
    learn.fit(1, cbs=place)
    assert place.got == [
        {'depth': 3},
        (0, 't', '| a | b |\n| --- | --- |\n| 1 | 2 |'),
        (0, 'i', (2, 3, 4, 5)),
    ]


# -- state, mistakes -------------------------------------------------------------------------------


def test_state_goes_through_and_two_of_one_class_stay_apart() -> None:
    a, b = SpeedMonitor(), SpeedMonitor()
    learn = learner(a, b)
    a.eval_s, b.eval_s = 1.0, 2.0
    adapters = [cb for cb in learn.cbs if hasattr(cb, 'wrapped')]
    states = [cb.state_dict() for cb in adapters]
    a.eval_s = b.eval_s = 0.0
    for cb, sd in zip(adapters, states, strict=True):
        cb.load_state_dict(sd)
    assert (a.eval_s, b.eval_s) == (1.0, 2.0)
    assert len({learn.parts.callbacks.keys[id(cb)] for cb in learn.cbs}) == len(learn.cbs)


def test_an_error_names_the_place_and_the_next_fit_works() -> None:
    class Fails:
        on = True

        def after_loss(self, state: Any, logger: Any) -> None:
            if self.on:
                raise ValueError('no')

    cb = Fails()
    learn = learner(cb)
    with pytest.raises(ValueError, match='no') as e:
        learn.fit(1)
    assert 'in Fails.after_loss, a Composer-style callback' in e.value.__notes__
    cb.on = False
    learn.fit(1)
    assert len(learn.history) == 1


def test_what_is_no_callback_is_refused() -> None:
    class Nothing:
        def go(self) -> None:
            pass

    with pytest.raises(CallbackError, match=r'Nothing.*init, '):
        from_composer(Nothing())
    with pytest.raises(CallbackError, match=r'write from_composer\(SpeedMonitor\(...\)\)'):
        from_composer(SpeedMonitor)
    with pytest.raises(CallbackError, match='needs no from_composer'):
        from_composer(Callback())
