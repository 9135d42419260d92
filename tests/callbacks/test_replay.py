"""Replay of a failed batch: the same numbers, the same exception, and an unchanged Learner."""

import gc
import weakref
from typing import Any

import pytest
import torch
from fastcore.basics import noop
from torch import Tensor, nn

from learnkit import (
    EMA,
    Callback,
    DataLoaders,
    GradientAccumulation,
    GuardNonFinite,
    Learner,
    MixUp,
    Replay,
)
from learnkit.checkpoint.compare import learn_digest
from learnkit.core.errors import FitError, LossError
from tests.helpers.comparing import same
from tests.helpers.learners import quiet_learner

pytestmark = pytest.mark.filterwarnings('ignore:microbatch=.* on its own')


class Boom(Exception):
    "The exception of these tests."


def learner(*cbs: Any, valid: bool = True, **kwargs: Any) -> Learner:
    torch.manual_seed(0)
    x = torch.randn(40, 3)
    train = (x, x.sum(1, keepdim=True))
    dls = DataLoaders.from_tensors(
        train, (x[:8], x[:8, :1]) if valid else None, bs=4, seed=1, device='cpu'
    )
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.4), nn.Linear(6, 1))
    return quiet_learner(
        dls,
        model,
        nn.MSELoss(),
        opt_func=torch.optim.Adam,
        lr=0.1,
        cbs=cbs,
        has_bar=False,
        **kwargs,
    )


class Seen(Callback):
    "Record a batch: inputs, dropped predictions, loss, mode, rate, counters."

    order = 80

    def __init__(self) -> None:
        batches: list[Any] = []
        # where no replay finds it to put it back
        self.put, self.all = batches.append, lambda: batches

    @property
    def batches(self) -> list[Any]:
        return self.all()

    def after_loss(self) -> None:
        learn = self.learn
        self.put(
            (
                learn.xb[0].clone(),
                learn.pred.detach().clone(),
                learn.loss.clone(),
                learn.model[2].training,
                torch.is_grad_enabled(),
                torch.is_autocast_enabled('cpu'),
                learn.opt.hypers[0]['lr'],
                learn.epoch,
                learn.iter,
                learn.train_iter,
                learn.pct_train,
                learn.n_iter,
                learn.phase,
            )
        )


def fail_at(event: str, epoch: int, i: int, training: bool = True) -> Callback:
    def fail(cb: Any) -> None:
        if (cb.epoch, cb.iter, cb.learn.training) == (epoch, i, training):
            raise Boom(f'{event} {i}')

    cb = Callback(**{event: fail})
    cb.order = 90
    return cb


EVENTS = (
    'before_batch after_pred after_loss after_backward before_step after_step after_batch'.split()
)


@pytest.mark.parametrize(
    ('event', 'microbatch'), [*[(event, None) for event in EVENTS], ('after_backward', 2)]
)
def test_it_fails_again_at_the_same_place_and_changes_nothing(
    event: str, microbatch: int | None
) -> None:
    learn = learner(seen := Seen(), EMA(), Replay(), microbatch=microbatch)
    with pytest.raises(Boom) as first:
        learn.fit_one_cycle(3, cbs=fail_at(event, 1, 3))
    before, last = learn_digest(learn), seen.batches[-1:]
    for _ in range(2):
        seen.batches.clear()
        with pytest.raises(Boom) as again:
            learn.replay()
        assert str(again.value) == str(first.value)
        assert again.value.__notes__[0] == first.value.__notes__[0]
        assert before == learn_digest(learn)
        if event in EVENTS[2:5]:
            assert same(seen.batches[-1], last[0])
    pieces = 0 if event in EVENTS[:2] else 1 if event in EVENTS[2:4] or not microbatch else 2
    assert len(seen.batches) == pieces


@pytest.mark.parametrize(
    ('cbs', 'how'), [([MixUp(0.4)], 'plain'), ([GradientAccumulation(12)], 'bf16')]
)
def test_it_is_the_same_batch_in_the_same_precision_with_the_same_random_numbers(
    cbs: Any, how: str
) -> None:
    learn = learner(*cbs, seen := Seen(), Replay())
    if how == 'bf16':
        learn.to_bf16()
    with pytest.raises(Boom):
        learn.fit(2, cbs=fail_at('after_loss', 1, 5))
    last = seen.batches[-1]
    with pytest.raises(Boom):
        learn.replay()
    assert len(seen.batches) == 19 and same(seen.batches[-1], last)


def test_a_step_that_accumulation_brings_comes_again() -> None:
    learn = learner(GradientAccumulation(12), Replay())
    with pytest.raises(Boom):
        learn.fit(1, cbs=fail_at('after_step', 0, 5))
    with pytest.raises(Boom):
        learn.replay()


@pytest.mark.parametrize('where', ['fit', 'validate'])
def test_an_evaluation_batch_is_repeated_in_eval_mode_without_gradients(where: str) -> None:
    learn = learner(seen := Seen(), EMA(), Replay())
    if where == 'validate':
        learn.fit(1)
    cb = fail_at('after_loss', 0, 1, training=False)
    with pytest.raises(Boom):
        learn.fit(1, cbs=cb) if where == 'fit' else learn.validate(cbs=cb)
    before, last = learn_digest(learn), seen.batches[-1]
    with pytest.raises(Boom):
        learn.replay()
    assert same(seen.batches[-1], last) and last[3:5] == (False, False) and last[-1] == 'valid'
    assert before == learn_digest(learn)


def test_without_a_failure_the_last_training_batch_gives_its_loss_again() -> None:
    learn = learner(seen := Seen(), Replay(), valid=False)
    learn.fit(2)
    before, weights = learn_digest(learn), [p.detach().clone() for p in learn.model.parameters()]
    loss, n = learn.replay(), len(seen.batches)
    assert loss is not None and torch.equal(loss, seen.batches[-1][2]) and n == 21
    assert torch.equal(seen.batches[-1][0], seen.batches[-2][0]), 'the same samples'
    assert torch.equal(learn.replay(), loss) and before == learn_digest(learn)
    assert all(map(torch.equal, weights, learn.model.parameters()))


def test_a_change_of_the_model_or_a_callback_takes_effect() -> None:
    learn = learner(Replay())
    cb = fail_at('after_pred', 0, 2)
    with pytest.raises(Boom):
        learn.fit(1, cbs=cb)
    cb.run = False
    assert learn.replay() is not None
    cb.run = True
    with pytest.raises(Boom):
        learn.replay()
    cb.after_pred = noop  # type: ignore[attr-defined]
    nn.init.zeros_(learn.model[3].weight)
    nn.init.zeros_(learn.model[3].bias)
    batch = learn.run.replay_source._trained.batch
    loss = learn.replay()
    assert loss is not None and loss.item() == pytest.approx(batch[1].square().mean().item())


def test_the_guards_error_comes_again_and_anomaly_detection_names_the_operation() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 0).abs().sqrt() + x

    learn = learner(GuardNonFinite(), Replay())
    learn.model[2] = Root()
    with pytest.raises(LossError) as first:
        learn.fit(1)
    with pytest.raises(LossError) as again:
        learn.replay()
    assert str(first.value) == str(again.value) and 'gradient of 0.weight' in str(again.value)
    with (
        pytest.warns(UserWarning, match='Error detected in AbsBackward0'),
        pytest.raises(RuntimeError, match='AbsBackward0'),
    ):
        learn.replay(detect_anomaly=True)
    assert not torch.is_anomaly_enabled()


def test_after_a_failure_outside_of_a_batch_the_last_one_is_repeated() -> None:
    learn = learner(Replay())
    with pytest.raises(Boom):
        learn.fit(1, cbs=Callback(after_train=lambda cb: fail()))
    assert learn.replay() is not None


def fail() -> None:
    raise Boom


def test_the_next_fit_and_close_let_go() -> None:
    for let_go in (lambda learn: learn.fit(1), lambda learn: learn.close()):
        learn = learner(Replay())
        bad = fail_at('after_loss', 0, 2)
        with pytest.raises(Boom):
            learn.fit(1, cbs=bad)
        batch = weakref.ref(learn.run.replay_source._trained.batch[0])
        bad.run = False
        let_go(learn)
        gc.collect()
        assert batch() is None


def test_nothing_to_repeat() -> None:
    learn = learner()
    with pytest.raises(FitError, match=r'learn.add_cb\(Replay\(\)\)'):
        learn.replay()
    learn.add_cb(Replay())
    with pytest.raises(FitError, match='There is no batch'):
        learn.replay()
    with pytest.raises(FitError, match='under way'):
        learn.fit(1, cbs=Callback(before_batch=lambda cb: cb.replay()))
