"""Evaluations at epoch ends or within epochs, each loader at its own interval."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from learnkit import (
    EMA,
    Callback,
    CancelTrainException,
    DataLoaders,
    Learner,
    TimeError,
    mae,
    mse,
)
from learnkit.data.evaluator import Evaluator
from learnkit.testing import synth_dls
from tests.helpers.learners import quiet_synth_learner


class Seen(Callback):
    "Record which loader was evaluated after how many batches."

    order = 1000

    def __init__(self) -> None:
        self.at: list[tuple[str, int]] = []

    def after_validate(self) -> None:
        self.at.append((self.dl_name, self.learn.time.ba))


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1)
    )


def learner(n_train: int = 5, valid: Any = None, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    dls = synth_dls(bs=8, n_train=n_train)
    if valid is not None:
        dls = DataLoaders(dls.train, valid(dls.valid))
    return quiet_synth_learner(dls=dls, model=net(), lr=0.05, **kwargs)


@pytest.mark.parametrize(
    ('every', 'expected'),
    [
        ('1ep', [5, 10, 15]),
        ('2ep', [10, 15]),
        ('4ba', [4, 8, 12, 15]),
        (None, []),
        ('16sp', [2, 4, 6, 8, 10, 12, 14, 15]),
        ('0.5dur', [8, 15]),
        ('100ba', [15]),
        ('3st', [3, 6, 9, 12, 15]),
    ],
)
def test_a_loader_is_evaluated_at_its_interval_and_at_the_end(
    every: Any, expected: list[int]
) -> None:
    learn = learner(eval_every=every, cbs=(seen := Seen()))
    learn.fit(3)
    assert [ba for _, ba in seen.at] == expected
    assert [row['ba'] for row in learn.recorder.evaluations] == expected


def test_intervals_continue_over_fits() -> None:
    learn = learner(eval_every='4ba', cbs=(seen := Seen()))
    learn.fit(1)
    learn.fit(1)
    assert [ba for _, ba in seen.at] == [4, 5, 8, 10]


def test_each_loader_has_its_own_interval_and_metrics() -> None:
    valid = lambda dl: {
        'day': dl,
        'night': Evaluator(dl, '2ep', [mae]),
        'dusk': Evaluator(dl, '4ba'),
        'never': Evaluator(dl, None),
    }
    learn = learner(metrics=mse, cbs=(seen := Seen()), valid=valid)
    learn.fit(3)
    at = {
        name: [ba for n, ba in seen.at if n == name] for name in ('day', 'night', 'dusk', 'never')
    }
    assert at == {'day': [5, 10, 15], 'night': [10, 15], 'dusk': [4, 8, 12, 15], 'never': []}
    columns = [n for n in learn.recorder.metric_names if '/' in n]
    expected = (
        'day/loss day/mse night/loss night/mae dusk/loss dusk/mse never/loss never/mse'.split()
    )
    assert columns == expected
    first, second, third = learn.history
    assert first['night/mae'] is None
    assert second['night/mae'] == pytest.approx(mae_of(learn, second), abs=1)
    assert third['night/loss'] == pytest.approx(third['day/loss']) and third['never/loss'] is None


def mae_of(learn: Learner, row: dict[str, Any]) -> float:
    return row['day/mse'] ** 0.5


@pytest.mark.parametrize('every', ['2ba', '7sp'])
def test_evaluation_in_the_middle_of_an_epoch_changes_nothing(every: str) -> None:
    "Equal bit for bit with dropout, batch norm, shuffling from the global generator, and a scheduled rate."

    def trained(every: Any) -> dict[str, Any]:
        learn = learner(eval_every=every)
        learn.dls.train = torch.utils.data.DataLoader(
            learn.dls.train.dataset, batch_size=8, shuffle=True
        )
        torch.manual_seed(11)
        learn.fit_one_cycle(2, 0.1)
        return {
            **learn.model.state_dict(),
            'losses': torch.stack(list(learn.recorder.losses)),
            'draw': torch.rand(3),
            'lrs': torch.tensor(learn.recorder.lrs),
        }

    plain, often = trained(None), trained(every)
    assert all(torch.equal(plain[k], often[k]) for k in plain)


def test_the_loop_state_matches_the_training_batch_afterwards() -> None:
    def look(cb: Any) -> None:
        cb.learn.noted.append(
            (
                cb.training,
                cb.phase,
                cb.dl_name,
                cb.iter,
                cb.dl is cb.dls.train,
                len(cb.xb[0]),
                cb.model.training,
            )
        )

    learn = learner(eval_every='2ba', cbs=Callback(batch_checkpoint=look))
    learn.noted = []
    learn.fit(1)
    assert learn.noted == [(True, 'train', 'train', i, True, 8, True) for i in range(5)]


class Counts(Callback):
    order = 1000

    def __init__(self) -> None:
        self.n: Counter[tuple[str, bool]] = Counter()

    def run_event(self, event_name: str) -> None:
        self.n[event_name, bool(self.learn.training)] += 1


def test_exact_event_counts_in_nested_settings() -> None:
    "Return a Learner with 2 epochs of 3 batches of 2 microbatches, and two validation loaders of 2 batches."
    torch.manual_seed(0)
    dls = synth_dls(bs=8, n_train=3, n_valid=2)
    dls = DataLoaders(dls.train, {'a': dls.valid, 'b': dls.valid})
    learn = quiet_synth_learner(dls=dls, microbatch=4, eval_every='2ba', cbs=(counts := Counts()))
    counts.n.clear()
    learn.fit(2, iteration=1)
    evaluations, validations = 3, 6  # after batches 2, 4 and 6
    n: Counter[str] = Counter()
    for (event, _), k in counts.n.items():
        n[event] += k
    in_training = {event: k for (event, training), k in counts.n.items() if training}
    assert n['before_fit'] == n['after_fit'] == n['cleanup'] == 1
    for event in (
        'before_iteration before_epoch after_epoch epoch_checkpoint after_iteration '
        'iteration_checkpoint before_train after_train'
    ).split():
        assert n[event] == 2, event
    assert n['before_eval'] == n['after_eval'] == evaluations
    assert n['before_validate'] == n['after_validate'] == validations
    pieces, batches = 12, 6
    for event in ('before_pred', 'after_pred', 'after_loss'):
        assert n[event] == pieces + 2 * validations, event
    for event in ('before_backward', 'after_backward'):
        assert n[event] == pieces, event
    for event in ('before_step', 'after_step', 'batch_checkpoint'):
        assert n[event] == batches, event
    for event in ('before_batch', 'after_batch'):
        assert n[event] == batches + 2 * validations, event
    assert n['after_draw'] == batches + 2 * validations
    # once more in each pass, to find its end
    assert n['before_draw'] == n['after_draw'] + 2 + validations
    assert in_training['after_batch'] == batches


@pytest.mark.parametrize('bad', ['0ba', '100tok'])
def test_bad_intervals_are_refused_before_training(bad: Any) -> None:
    with pytest.raises(TimeError):
        learner(eval_every=bad).fit(1)
    with pytest.raises(TimeError):
        learner(valid=lambda dl: {'x': Evaluator(dl, bad)}).fit(1)


def test_the_interval_may_be_assigned() -> None:
    learn = learner(cbs=(seen := Seen()))
    learn.eval_every = '4ba'
    learn.fit(1)
    assert [ba for _, ba in seen.at] == [4, 5]
    with pytest.raises(TimeError):
        learn.eval_every = 'often'


def test_iterations_need_a_length() -> None:
    with pytest.raises(TimeError, match='iteration='):
        learner(eval_every='1iter').fit(1)
    learn = learner(eval_every='1iter', cbs=(seen := Seen()))
    learn.fit(4, iteration=2)
    assert [ba for _, ba in seen.at] == [10, 20]


@pytest.mark.parametrize('event', ['before_validate', 'after_pred'])
def test_averaged_weights_do_not_stay_when_an_evaluation_in_mid_epoch_is_cut_short(
    event: str,
) -> None:
    def cut(cb: Any) -> None:
        if not cb.training and cb.learn.time.ba == 2:
            raise CancelTrainException

    def trained(cbs: Any) -> Any:
        learn = learner(eval_every='2ba', cbs=[*cbs, Callback(**{event: cut})])
        learn.fit(2)
        return [p.detach().clone() for p in learn.model.parameters()]

    averaged, plain = trained([EMA(0.5)]), trained([])
    assert all(torch.equal(a, b) for a, b in zip(averaged, plain, strict=True))
