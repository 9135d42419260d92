"""Pruning by Optuna: the same study as in plain Optuna, in one process and in two."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from learnkit import Callback, DataLoaders, Learner, MetricError, OptionError, R2Score, accuracy
from learnkit.callbacks import OptunaPruning
from learnkit.core.errors import MissingExtraError
from tests.helpers.learners import quiet_learner
from tests.helpers.ranks import run_ranks

optuna = pytest.importorskip('optuna')

RATES = [0.1, 0.05, 0.001, 0.2, 0.0001, 0.0]
N, BS, EPOCHS = 40, 4, 4


@pytest.fixture(autouse=True)
def quiet_optuna() -> Iterator[None]:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(before)


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(N, 3, generator=torch.Generator().manual_seed(1))
    return x, x.sum(1, keepdim=True)


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(3, 1)


def learner(lr: float, *cbs: Any, bs: int = BS, **options: Any) -> Learner:
    dls = DataLoaders.from_tensors(tensors(), tensors(), bs=bs, shuffle=False)
    opt_func = torch.optim.SGD
    return quiet_learner(
        dls, model(), nn.MSELoss(), opt_func=opt_func, lr=lr, cbs=[*cbs], **options
    )


def search(objective: Callable[[Any], float], rates: list[float] = RATES) -> Any:
    "Return a study that tries the rates in order and prunes below the median."
    study = optuna.create_study(pruner=optuna.pruners.MedianPruner(2, n_warmup_steps=1))
    for lr in rates:
        study.enqueue_trial({'lr': lr})
    study.optimize(objective, n_trials=len(rates))
    return study


def results(study: Any) -> list[Any]:
    return [(t.state.name, t.value, t.intermediate_values) for t in study.trials]


def train_by_hand(trial: Any) -> float:
    x, y = tensors()
    net = model()
    opt = torch.optim.SGD(net.parameters(), lr=trial.suggest_float('lr', 0, 1))
    loss = math.inf
    for epoch in range(EPOCHS):
        for xb, yb in zip(x.split(BS), y.split(BS), strict=True):
            opt.zero_grad()
            nn.functional.mse_loss(net(xb), yb).backward()
            opt.step()
        with torch.no_grad():
            losses = [nn.functional.mse_loss(net(xb), yb) for xb, yb in batches(x, y)]
        loss = math.fsum(map(float, losses)) / len(losses)
        trial.report(loss, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return loss


def batches(x: torch.Tensor, y: torch.Tensor) -> Iterator[Any]:
    return zip(x.split(BS), y.split(BS), strict=True)


def test_a_study_has_the_values_of_the_same_study_by_hand() -> None:
    events: list[str] = []

    def objective(trial: Any) -> float:
        watch = Callback(
            cleanup=lambda cb: events.append('cleanup'),
            after_fit=lambda cb: events.append('after_fit'),
            after_error=lambda cb: events.append('after_error'),
        )
        learn = learner(trial.suggest_float('lr', 0, 1), watch)
        learn.fit(EPOCHS, cbs=OptunaPruning(trial))
        loss: float = learn.history[-1]['valid_loss']
        return loss

    study, by_hand = search(objective), search(train_by_hand)
    states = ['COMPLETE', 'COMPLETE', 'PRUNED', 'COMPLETE', 'PRUNED', 'PRUNED']
    assert [t.state.name for t in study.trials] == states
    for own, other in zip(results(study), results(by_hand), strict=True):
        assert own[0] == other[0]
        assert own[1] == pytest.approx(other[1], rel=1e-5)
        assert own[2] == pytest.approx(other[2], rel=1e-5)
    assert study.best_params == by_hand.best_params
    assert events == ['after_fit', 'cleanup'] * 6


def test_evaluations_within_an_epoch_are_reported_by_their_batch() -> None:
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=1.0, n_warmup_steps=9))
    trial = study.ask()
    learn = learner(0.001, eval_every='4ba')
    with pytest.raises(optuna.TrialPruned, match='step 12'):
        learn.fit(3, cbs=OptunaPruning(trial, at='evaluation'))
    assert sorted(study.trials[0].intermediate_values) == [4, 8, 12]
    assert learn.time.ba == 12


def unknown(pred: torch.Tensor, targ: torch.Tensor) -> torch.Tensor:
    return torch.tensor(math.nan)


def test_nan_is_pruned() -> None:
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=1.0))
    learn = learner(0.01, metrics=unknown)
    with pytest.raises(optuna.TrialPruned, match='unknown is nan at step 0'):
        learn.fit(2, cbs=OptunaPruning(study.ask(), 'unknown'))


def test_an_epoch_without_an_evaluation_is_not_reported() -> None:
    study = optuna.create_study()
    learn = learner(0.001, eval_every='3ep')
    learn.fit(6, cbs=OptunaPruning(study.ask()))
    assert sorted(study.trials[0].intermediate_values) == [2, 5]


@pytest.mark.filterwarnings('ignore')  # of Optuna's about values that are all NaN, and of the loss
def test_a_study_continues_after_a_diverged_trial() -> None:
    def objective(trial: Any) -> float:
        learn = learner(trial.suggest_float('lr', 0, 1e9), metrics=R2Score)
        learn.fit(2, cbs=OptunaPruning(trial, 'r2_score'))
        return float(learn.history[-1]['r2_score'])

    study = optuna.create_study(direction='maximize', pruner=optuna.pruners.MedianPruner(1))
    for lr in (0.01, 1e9, 0.001):
        study.enqueue_trial({'lr': lr})
    study.optimize(objective, n_trials=3)
    assert [t.state.name for t in study.trials] == ['COMPLETE', 'PRUNED', 'PRUNED']
    assert math.isnan(study.trials[1].intermediate_values[0]) and study.best_params['lr'] == 0.01


def test_what_cannot_be_meant_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    maximize = optuna.create_study(direction='maximize').ask()
    with pytest.raises(OptionError, match=r'valid_loss.*maximize'):
        OptunaPruning(maximize)
    OptunaPruning(maximize, 'accuracy')
    OptunaPruning(maximize, 'my_own')
    OptunaPruning(optuna.trial.FixedTrial({}))
    with pytest.raises(OptionError, match="at='batch'"):
        OptunaPruning(maximize, 'accuracy', at='batch')
    learn = learner(0.1, metrics=accuracy)
    with pytest.raises(MetricError, match='acuracy'):
        learn.fit(1, cbs=OptunaPruning(maximize, 'acuracy'))
    with pytest.raises(OptionError, match='needs the trial'):
        learn.fit(1, cbs=OptunaPruning(None))
    assert learn.time.ba == 0
    monkeypatch.setattr('learnkit.core.optional.find_spec', lambda name: None)
    with pytest.raises(
        MissingExtraError, match=r'^OptunaPruning needs optuna: pip install optuna$'
    ):
        OptunaPruning(maximize)


def search_on_rank(rank: int) -> Any:
    "Try rates on two ranks, the first of which has the study; return how each trial ended on this rank."
    study = optuna.create_study(pruner=optuna.pruners.MedianPruner(2, n_warmup_steps=1))
    ended = []
    for lr in RATES[:3]:
        trial = study.ask() if rank == 0 else None
        learn = learner(lr, bs=BS // 2)
        state = optuna.trial.TrialState.COMPLETE
        try:
            with learn.distributed():
                learn.fit(EPOCHS, cbs=OptunaPruning(trial))
        except optuna.TrialPruned:
            state = optuna.trial.TrialState.PRUNED
        ended.append((state.name, len(learn.history)))
        if trial is not None:
            value = None if state.name == 'PRUNED' else learn.history[-1]['valid_loss']
            study.tell(trial, value, state)
    return ended, [t.intermediate_values for t in study.trials]


def test_all_of_two_processes_are_pruned() -> None:
    first, second = run_ranks(search_on_rank)
    by_hand = search(train_by_hand, RATES[:3])
    states = [(t.state.name, len(t.intermediate_values)) for t in by_hand.trials]
    assert first[0] == second[0] == states
    assert not second[1]
    for own, trial in zip(first[1], by_hand.trials, strict=True):
        assert own == pytest.approx(trial.intermediate_values, rel=1e-5, abs=1e-9)
