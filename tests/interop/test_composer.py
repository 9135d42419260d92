"""Composer-style callbacks in a Learner: small typical ones, and the state that they read and write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fastcore.basics import noop
from torch import nn

from learnkit import Callback, DataLoaders, Learner
from learnkit.core.errors import CallbackError, TimeError
from learnkit.interop import from_composer
from learnkit.interop.composer_time import ComposerTime, ComposerTimestamp, TimeUnit
from learnkit.testing import RegModel


def learner(*cbs: Any, n_train: int = 3, microbatch: int | None = 4, **kwargs: Any) -> Learner:
    "Return a Learner on batches of 8 samples in microbatches of 4, with two validation loaders of 2 batches."
    torch.manual_seed(0)
    x = torch.randn(8 * n_train, 1)
    batches = [(x[i : i + 8], 2 * x[i : i + 8] + 1) for i in range(0, len(x), 8)]
    dls = DataLoaders(batches, {'day': batches[:2], 'night': batches[1:3]})
    learn = Learner(
        dls,
        RegModel(),
        nn.MSELoss(),
        opt_func=torch.optim.SGD,
        lr=0.1,
        microbatch=microbatch,
        cbs=[from_composer(cb) for cb in cbs],
        **kwargs,
    )
    learn.logger = noop
    return learn


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
    assert learn.cbs[-1].state_dict()['callback'] == {'eval_s': cb.eval_s}


# -- what is read ----------------------------------------------------------------------------------


class Read:
    "Records a function of the state at each given event."

    def __init__(self, read: Any, *events: str) -> None:
        self.read, self.events, self.got = read, events, []

    def run_event(self, event: Any, state: Any, logger: Any) -> None:
        if event in self.events:
            self.got.append(self.read(state))


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


def test_parts_of_the_learner() -> None:
    cb = Read(
        lambda s: (
            s.dataloader_label,
            s.dataloader_len.value if s.dataloader_len is not None else None,
            s.precision,
            s.device.name,
            s.scaler,
            s.schedulers,
            s.algorithms,
            s.outputs.numel() == 0,
        ),
        'fit_start',
        'batch_start',
        'eval_start',
        'eval_after_forward',
    )
    learn = learner(cb)
    learn.fit(1)
    same = ('fp32', 'cpu', None, [], [])
    valid = [(name, 2, *same, False) for name in ('day', 'night') for _ in range(3)]
    assert cb.got == [*[('train', 3, *same, True)] * 4, *valid]
    assert learn.cbs[-1].view.callbacks == [cb]


def test_elapsed_share_and_stop() -> None:
    cb = Read(lambda s: s.get_elapsed_duration().value, 'batch_end', 'fit_end')
    learn = learner(cb)
    learn.fit(2)
    assert cb.got == [0, 0, 0, 0.5, 0.5, 0.5, 1]  # in the unit of the length

    cb = Read(lambda s: s.get_elapsed_duration().value, 'batch_end')
    learner(cb).fit('4ba')
    assert cb.got == [0.25, 0.5, 0.75, 1]

    class Stop:
        def batch_end(self, state: Any, logger: Any) -> None:
            state.max_duration = state.timestamp.batch

    learn = learner(Stop())
    learn.fit(5)
    assert learn.time.ba == 1


# -- what is written -------------------------------------------------------------------------------


def weights_after(*cbs: Any, microbatch: int | None = None, n: int = 1) -> list[float]:
    learn = learner(*cbs, microbatch=microbatch)
    learn.fit(n)
    return [p.item() for p in learn.model.parameters()]


def weights_of_plain_loop(
    scale_x: float = 1.0, scale_loss: float = 1.0, shift: float = 0.0
) -> list[float]:
    torch.manual_seed(0)
    x, model = torch.randn(24, 1), RegModel()
    for i in range(0, 24, 8):
        loss = scale_loss * nn.functional.mse_loss(
            model(scale_x * x[i : i + 8]) + shift, 2 * x[i : i + 8] + 1
        )
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads, strict=True):
                p -= 0.1 * g
    return [p.item() for p in model.parameters()]


@pytest.mark.parametrize('microbatch', [None, 4])
@pytest.mark.parametrize('event', ['after_loss', 'before_backward'])
def test_a_loss_that_is_written_is_what_backward_runs_on(
    event: str, microbatch: int | None
) -> None:
    def double(self: Any, state: Any, logger: Any) -> None:
        state.loss = 2 * state.loss

    got = weights_after(type('Double', (), {event: double})(), microbatch=microbatch)
    assert got == pytest.approx(weights_of_plain_loop(scale_loss=2), rel=1e-5)


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
    states = [cb.state_dict() for cb in learn.cbs[-2:]]
    a.eval_s = b.eval_s = 0.0
    for cb, sd in zip(learn.cbs[-2:], states, strict=True):
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


def test_times_compare_and_combine_as_in_composer() -> None:
    t = ComposerTime(7, 'ba')
    assert t == 7 == int(t)
    assert t == '7ba'
    assert t > 6
    assert t <= '7ba'
    assert t != ComposerTime(8, TimeUnit.BATCH)
    assert (t - '9ba').value == -2
    assert (t + 2).value == 9
    assert (t / '14ba').value == 0.5
    assert (t % 2).value == 1
    assert str(t) == '7ba'
    with pytest.raises(TimeError, match='different units'):
        _ = t < '1ep'
    now = ComposerTimestamp(epoch=1, batch=7)
    assert now < '8ba' and now >= ComposerTime(1, 'ep') and now == '7ba' and now.get('ba') == t
    assert now == ComposerTimestamp(epoch=1, batch=7) != ComposerTimestamp(epoch=2, batch=7)
    with pytest.raises(TimeError, match='get_elapsed_duration'):
        now.get('dur')
