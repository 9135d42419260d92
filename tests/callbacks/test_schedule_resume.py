"""Schedules, torch schedulers and mixed precision resume exactly in the middle of an epoch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torch_lr

from learnkit import Callback, DataLoaders, MixedPrecision
from learnkit.callbacks import GradientAccumulation
from learnkit.callbacks.schedule import LRScheduler, ParamScheduler, SchedCos, SchedLin
from learnkit.engine.budget import Budget
from learnkit.engine.traits import trait_of
from tests.helpers.comparing import same
from tests.helpers.learners import quiet_learner

N_BATCHES, N_EPOCH = 5, 3


def learner(*cbs: Any, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    x = torch.randn(4 * N_BATCHES, 3)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    dls = DataLoaders.from_tensors((x, x.sum(1, keepdim=True)), (x[:6], x[:6, :1]), bs=4)
    return quiet_learner(dls, model, loss_func=nn.MSELoss(), lr=0.05, cbs=list(cbs), **kwargs)


def straight_and_resumed(
    make: Callable[[], Any], after: int, length: Any = N_EPOCH, event: str = 'batch_checkpoint'
) -> tuple[Any, Any]:
    "Train without a stop, and resume from a state after some batches; compare the results."
    states: list[Any] = []

    def take(cb: Any) -> None:
        if cb.train_iter == after:
            states.append(cb.learn.checkpoint_state())

    straight, other = make(), make()
    torch.manual_seed(1)
    with straight.no_bar():
        straight.fit(length, cbs=Callback(**{event: take}))
    torch.manual_seed(2)
    with other.no_bar():
        other.fit(length, resume=states[0])
    assert straight.recorder.hps == other.recorder.hps
    for p, q in zip(
        straight.model.state_dict().values(), other.model.state_dict().values(), strict=True
    ):
        assert torch.equal(p, q)
    one, two = (learn.callback_states() for learn in (straight, other))
    del one['recorder'], two['recorder']  # it has times
    assert same(one, two)
    return straight, other


# -- a schedule of functions -----------------------------------------------------------------------


@pytest.mark.parametrize('after', [4, 7])
def test_param_scheduler_with_a_weight_decay_that_splits_groups(after: int) -> None:
    def make() -> Any:
        scheds = {'lr': SchedCos(0.1, 0.001), 'wd': SchedLin(0.0, 0.3), 'mom': SchedLin(0.9, 0.5)}
        splitter = lambda m: [list(m[0].parameters()), list(m[1:].parameters())]
        return learner(ParamScheduler(scheds), splitter=splitter)

    straight, other = straight_and_resumed(make, after)
    assert len(set(other.recorder.lrs)) == N_EPOCH * N_BATCHES
    assert other.recorder.hps['wd'][-1] > 0.2
    assert len(straight.opt.param_groups) == len(other.opt.param_groups) == 4


# -- torch's schedulers ----------------------------------------------------------------------------

STEPS = N_EPOCH * N_BATCHES
MAKERS: dict[str, Callable[[Any], Any]] = {
    'step': partial(torch_lr.StepLR, step_size=2, gamma=0.5),
    'one cycle': partial(torch_lr.OneCycleLR, max_lr=0.2, total_steps=STEPS + 1),
    'linear': partial(torch_lr.LinearLR, start_factor=0.1, total_iters=8),
    'sequence': lambda opt: torch_lr.SequentialLR(
        opt, [torch_lr.ConstantLR(opt, 0.2, 2), torch_lr.ExponentialLR(opt, 0.8)], [2]
    ),
    'lambda': partial(torch_lr.LambdaLR, lr_lambda=lambda i: 1 / (1 + i)),
}


@pytest.mark.filterwarnings('ignore:OneCycleLR has')
@pytest.mark.parametrize('by', ['batch', 'epoch'])
@pytest.mark.parametrize('name', MAKERS)
def test_a_factorys_scheduler(name: str, by: str) -> None:
    straight, _ = straight_and_resumed(lambda: learner(LRScheduler(MAKERS[name], by=by)), 8)
    assert len(set(straight.recorder.lrs)) > 1


@pytest.mark.parametrize('after', [1, 2])
def test_a_scheduler_does_not_move_on_without_a_step(after: int) -> None:
    make = lambda: learner(GradientAccumulation(8), LRScheduler(MAKERS['linear'], by='batch'))
    straight, _ = straight_and_resumed(make, after)
    assert straight.recorder.lrs[0] == straight.recorder.lrs[1] < straight.recorder.lrs[2]


def test_a_plateau_remembers_what_it_saw() -> None:
    make = lambda: learner(
        LRScheduler(partial(torch_lr.ReduceLROnPlateau, patience=0, threshold=0.9))
    )
    straight, _ = straight_and_resumed(make, 8)
    assert len(set(straight.recorder.lrs)) > 1


# -- precision -------------------------------------------------------------------------------------


@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
@pytest.mark.parametrize('after', [1, 3])
def test_mixed_precision_between_two_steps(mode: str, after: int) -> None:
    def make() -> Any:  # a scale that is raised every third step, and too high now and then
        options = (
            {'init_scale': 2.0**14, 'growth_interval': 3, 'growth_factor': 4.0}
            if mode == 'fp16'
            else {}
        )
        return learner(MixedPrecision(mode, **options), GradientAccumulation(8))

    straight, other = straight_and_resumed(make, after)
    assert straight.mixed_precision.n_skipped == other.mixed_precision.n_skipped


# -- a budget --------------------------------------------------------------------------------------


def test_the_start_of_a_budget_of_time_differs_from_run_to_run() -> None:
    assert Budget('2h').nondeterministic_state == ('began',)
    assert trait_of(Budget('5ep'), 'nondeterministic_state') == ()
