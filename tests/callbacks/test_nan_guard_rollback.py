"""Rollback restores weights, buffers, optimizer states and averages of a snapshot, bit for bit."""

from __future__ import annotations

import math
from typing import Any
from warnings import catch_warnings

import pytest
import torch
from fastcore.basics import noop
from torch import Tensor, nn

from learnkit import EMA, SAM, Callback, GradientAccumulation, GuardNonFinite, Learner
from learnkit.core.errors import LossError, OptionError, TimeError
from tests.helpers.comparing import same

Batch = tuple[Tensor, Tensor]


def batches(n: int, *bad: int) -> list[Batch]:
    "Return batches of four samples, some with bad inputs."
    g = torch.Generator().manual_seed(1)
    found = [(torch.randn(4, 3, generator=g), torch.randn(4, 2, generator=g)) for _ in range(n)]
    for i in bad:
        found[i][0][1, 2] = math.nan
    return found


def learner(
    data: list[Batch], *cbs: Any, opt_func: Any = torch.optim.Adam, **kwargs: Any
) -> Learner:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    learn = Learner(data, model, nn.MSELoss(), opt_func=opt_func, lr=0.1, cbs=cbs, **kwargs)
    learn.remove_cb(learn.progress)
    learn.logger = noop
    return learn


def state(learn: Learner) -> list[Tensor]:
    "Return the weights, the buffers and the optimizer's state."
    states = learn.opt.state_dict()['state'].values()
    return [
        *learn.model.state_dict().values(),
        *(torch.as_tensor(v) for s in states for v in s.values()),
    ]


def without(data: list[Batch], *out: int) -> list[Batch]:
    return [b for i, b in enumerate(data) if i not in out]


def spoil_gradient(i: int) -> Callback:
    def spoil(cb: Any) -> None:
        if cb.iter == i:
            cb.learn.model[0].bias.grad[1] = math.inf

    return Callback(after_backward=spoil)


@pytest.mark.parametrize('fault', ['input', 'gradient'])
@pytest.mark.parametrize('opt_func', [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize('microbatch', [None, 2])
def test_it_is_training_without_the_batches_since_the_copy(
    fault: str, opt_func: Any, microbatch: int | None
) -> None:
    bad = [7] if fault == 'input' else []
    guard = GuardNonFinite('rollback', snapshot_every=3)
    learn = learner(data := batches(12, *bad), guard, opt_func=opt_func, microbatch=microbatch)
    if fault == 'gradient':
        learn.add_cb(spoil_gradient(7))
    with pytest.warns(UserWarning, match=r'batch 7 of epoch 0.* 1ba'):
        learn.fit(1)
    assert (guard.n_rollbacks, guard.n_skipped, learn.opt.n_steps) == (1, 0, 11)
    assert len(learn.recorder.losses) == (11 if fault == 'input' else 12)

    other = learner(without(data, 6, 7), opt_func=opt_func, microbatch=microbatch)
    other.fit(1)
    assert same(state(learn), state(other))


def test_before_any_step_it_is_the_beginning_optimizer_state_and_all() -> None:
    learn = learner(data := batches(4, 1), GuardNonFinite('rollback'))
    with pytest.warns(UserWarning, match='batch 1'):
        learn.fit(1)
    other = learner(without(data, 0, 1))
    other.fit(1)
    assert same(state(learn), state(other))


def test_averages_of_the_weights_go_back_with_them() -> None:
    learn = learner(
        data := batches(9, 5), EMA(0.5), GuardNonFinite('rollback', snapshot_every='4ba')
    )
    with pytest.warns(UserWarning, match='batch 5'):
        learn.fit(1)
    other = learner(without(data, 4, 5), EMA(0.5))
    other.fit(1)
    mine, theirs = learn.ema.state_dict(), other.ema.state_dict()
    assert same([*mine['averages'].values()], [*theirs['averages'].values()])
    assert mine['n_steps'] == theirs['n_steps'] == 7


@pytest.mark.parametrize('microbatch', [None, 2])
def test_accumulated_gradients_of_other_weights_are_dropped(microbatch: int | None) -> None:
    guard = GuardNonFinite('rollback', snapshot_every='1ba')
    learn = learner(data := batches(8, 5), GradientAccumulation(8), guard, microbatch=microbatch)
    with pytest.warns(UserWarning, match='batch 5'):
        learn.fit(1)
    other = learner(without(data, 4, 5), GradientAccumulation(8), microbatch=microbatch)
    other.fit(1)
    assert learn.opt.n_steps == 3 and same(state(learn), state(other))


def test_weights_that_sam_has_moved_match_the_copy_too() -> None:
    def spoil(cb: Any) -> None:
        if cb.learn.closure.repeating and cb.iter == 3:
            cb.learn.loss_grad = cb.learn.loss_grad * math.nan

    learn = learner(
        data := batches(6),
        SAM(),
        GuardNonFinite('rollback', snapshot_every='2ba'),
        Callback(after_loss=spoil),
    )
    with pytest.warns(UserWarning, match='batch 3'):
        learn.fit(1)
    other = learner(without(data, 2, 3), SAM())
    other.fit(1)
    assert same(state(learn), state(other))


def test_it_gives_up_when_going_back_does_not_help() -> None:
    guard = GuardNonFinite('rollback', snapshot_every='2ba', max_rollbacks=3)
    learn = learner(batches(12, *range(5, 12)), guard)
    kept: list[Any] = []
    learn.add_cb(
        Callback(after_batch=lambda cb: kept.append(state(cb.learn)) if cb.iter == 3 else None)
    )
    with (
        catch_warnings(record=True, action='always') as caught,
        pytest.raises(LossError, match=r'batch 8 .* 3 times'),
    ):
        learn.fit(1)
    expected = [True] * 3
    assert [f'batch {i} of epoch 0' in str(w.message) for i, w in enumerate(caught, 5)] == expected
    assert guard.n_rollbacks == 3 and same(state(learn), kept[0])


def test_a_new_copy_takes_so_many_good_batches_and_starts_the_count_again() -> None:
    guard = GuardNonFinite('rollback', snapshot_every='2ba', max_rollbacks=1)
    learn = learner(batches(14, 3, 6, 9, 12), guard)
    with catch_warnings(record=True, action='always') as caught:
        learn.fit(1)
    assert guard.n_rollbacks == 4 == len(caught)


def test_a_resumed_fit_goes_back_to_the_copy_of_the_one_before() -> None:
    first = learner(batches(5), guard := GuardNonFinite('rollback', snapshot_every='4ba'))
    kept: dict[str, Any] = {}
    first.add_cb(Callback(after_step=lambda cb: kept.update(guard=guard.state_dict(), at=cb.iter)))
    copy: list[Tensor] = []

    def keep(cb: Any) -> None:
        if cb.iter == 4:
            copy.extend(map(torch.clone, state(cb.learn)))

    first.add_cb(Callback(before_batch=keep))
    first.fit(1)
    assert kept['at'] == 4

    learn = learner(batches(1, 0), guard := GuardNonFinite('rollback'))
    learn.counters.batches = 5
    learn.add_cb(Callback(before_train=lambda cb: guard.load_state_dict(kept['guard'])))
    learn.create_opt()
    learn.opt.load_state_dict(first.opt.state_dict())
    with pytest.warns(UserWarning, match='batch 0'):
        learn.fit(1)
    assert same(state(learn), copy)


def test_no_copy_is_made_of_weights_that_are_not_finite() -> None:
    def spoil(cb: Any) -> None:
        if cb.iter == 3:
            cb.learn.model[0].weight.data[0, 0] = math.inf

    learn = learner(
        data := batches(8),
        GuardNonFinite('rollback', snapshot_every='2ba'),
        Callback(after_step=spoil),
    )
    with pytest.warns(UserWarning, match=r'parameter 0\.weight.*3ba|2ba'):
        learn.fit(1)
    other = learner(without(data, 2, 3, 4))
    other.fit(1)
    assert same(state(learn), state(other))

    learn.model[2].bias.data[0] = math.nan
    with pytest.raises(LossError, match=r'not finite to begin with: 2\.bias'):
        learn.fit(1)


@pytest.mark.parametrize('fault', ['input', 'gradient'])
def test_skip_leaves_running_statistics_as_they_were(fault: str) -> None:
    bad = [3] if fault == 'input' else []
    learn = learner(data := batches(6, *bad), GuardNonFinite('skip'))
    if fault == 'gradient':
        learn.add_cb(spoil_gradient(3))
    with pytest.warns(UserWarning, match='batch 3'):
        learn.fit(1)
    other = learner(without(data, 3))
    other.fit(1)
    assert same(state(learn), state(other)) and learn.model[1].num_batches_tracked == 5


def test_nothing_is_kept_after_the_fit() -> None:
    learn = learner(batches(3), guard := GuardNonFinite('rollback'))
    learn.fit(1)
    assert guard.state_dict()['good'] is None


@pytest.mark.parametrize(
    ('options', 'error', 'match'),
    [
        ({'every': 2}, OptionError, 'every=2'),
        ({'max_rollbacks': -1}, OptionError, 'max_rollbacks=-1'),
        ({'snapshot_every': '0.1dur'}, OptionError, 'snapshot_every'),
        ({'snapshot_every': 0}, TimeError, 'positive'),
    ],
)
def test_options_that_cannot_work(options: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        GuardNonFinite('rollback', **options)
