"""The test score at the best validation score."""

import math
from typing import Any

import pytest
import torch
from fastcore.basics import noop
from torch import Tensor

from learnkit import Callback, DataLoaders, Learner
from learnkit.callbacks.best_metric import BestMetric
from learnkit.core.errors import MetricError, OptionError
from learnkit.data.evaluator import Evaluator
from learnkit.engine.run import preserved_state
from learnkit.metrics.averages import ValueMetric
from learnkit.metrics.direction import MetricProperties
from learnkit.testing import synth_dls, synth_learner
from tests.helpers.learners import quiet_synth_learner

NAN = math.nan


def mae(pred: Tensor, targ: Tensor) -> Tensor:
    return (pred - targ).abs().mean()


def learner(*cbs: Any, lr: float = 0.3) -> Learner:
    "Return a Learner with a learning rate so high that the loss rises and falls."
    torch.manual_seed(3)
    x = torch.randn(48, 1)
    noisy = 2 * x + torch.randn(48, 1)
    valid = {'valid': (x[:16], noisy[:16]), 'test': (x, 2 * x + 1)}
    dls = DataLoaders.from_tensors((x, noisy), valid, bs=8, seed=0)
    return quiet_synth_learner(dls=dls, lr=lr, metrics=mae, cbs=[*cbs])


def test_the_columns_match_the_best_evaluation_so_far() -> None:
    learn = learner(BestMetric('valid_loss', 'test/*'))
    learn.fit(8)
    rows = learn.history
    losses = [row['valid_loss'] for row in rows]
    assert len({losses.index(min(losses[:i])) for i in range(1, 9)}) > 1
    assert losses.index(min(losses)) < 7
    for i, row in enumerate(rows):
        best = min(rows[: i + 1], key=lambda r: r['valid_loss'])
        found = [row[f'best/{n}'] for n in ('valid_loss', 'test/loss', 'test/mae')]
        assert found == [best['valid_loss'], best['test/loss'], best['test/mae']]
    best = min(rows, key=lambda r: r['valid_loss'])
    expected = {n: best[n] for n in ('valid_loss', 'test/loss', 'test/mae')}
    assert learn.best_metric.at_best == expected
    assert learn.best_metric.best_at.ba == 6 * (best['epoch'] + 1)


def test_higher_may_be_better_and_targets_are_all_by_themselves() -> None:
    learn = learner(BestMetric('mae', comp='greater'))
    learn.fit(6)
    worst = max(learn.history, key=lambda r: r['mae'])
    expected = {n: worst[n] for n in ('mae', 'valid_loss', 'test/loss', 'test/mae')}
    assert learn.best_metric.at_best == expected


def test_several_evaluations_in_an_epoch_leave_the_best_and_no_average() -> None:
    seen: list[float] = []

    class Evaluate(Callback):
        order = 70

        def after_batch(self) -> None:
            if not self.training or self.iter != 2:
                return
            with preserved_state(self.learn):
                self.learn.do_evaluation()

        def after_eval(self) -> None:
            seen.append(self.learn.recorder.epoch_metrics.values['valid_loss'])

    learn = learner(BestMetric('valid_loss', 'test/loss'), Evaluate())
    learn.fit(4)
    assert len(seen) == 8 and learn.history[-1]['best/valid_loss'] == min(seen)
    assert learn.history[0]['best/valid_loss'] == min(seen[:2])


def test_the_best_score_is_printed_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    learn = learner(BestMetric('valid_loss', 'test/mae'))
    learn.logger = print
    with learn.no_bar():
        learn.logger = lambda row: None
        learn.fit(2)
    best = min(learn.history, key=lambda r: r['valid_loss'])
    assert (
        f'Best valid_loss in epoch {best["epoch"]}: valid_loss {best["valid_loss"]:.6g}, '
        f'test/mae {best["test/mae"]:.6g}'
    ) in capsys.readouterr().out


def test_the_state_is_resumed() -> None:
    learn, other = learner(BestMetric()), learner(BestMetric())
    learn.fit(3)
    other.best_metric.load_state_dict(learn.best_metric.state_dict())
    assert other.best_metric.at_best == learn.best_metric.at_best
    assert other.best_metric.best_at == learn.best_metric.best_at


@pytest.mark.parametrize(
    ('wrong', 'error'),
    [
        ({'source': 'quux'}, OptionError),
        ({'comp': 'best'}, OptionError),
    ],
)
def test_options_that_cannot_work_are_refused(wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        BestMetric(**wrong)


@pytest.mark.parametrize(
    'options',
    [
        {'source': 'accuracy'},
        {'targets': 'tests/*'},
        {'source': 'train_loss'},
        {'source': 'quux', 'comp': MetricProperties(lower='quux')},
    ],
)
def test_unknown_columns_are_refused_before_training(options: Any) -> None:
    learn = learner(BestMetric(**options))
    with pytest.raises(MetricError):
        learn.fit(1)
    assert learn.time.ba == 0


def test_nan_and_absent_values_are_never_the_best() -> None:
    at: dict[str, Learner] = {}
    values = [NAN, 0.0, 5.0, 0.0, NAN, 0.0, 3.0, 0.0, 4.0]
    seen: list[Any] = []
    score = ValueMetric(lambda: values[at['learn'].epoch], 'score')
    number = ValueMetric(lambda: NAN if at['learn'].epoch == 6 else 1.0, 'number')
    best = BestMetric('score', 'number', comp='less')
    look = Callback(after_epoch=lambda cb: seen.append((best.best, best.new_best)), order=70)
    at['learn'] = learn = synth_learner(
        n_train=1, metrics=[score, number], cbs=[best, look], eval_every='2ep'
    )
    learn.logger = noop
    values.insert(0, 9.0)  # epochs 1, 3, 5, ... are evaluated
    learn.fit(10)
    inf = math.inf
    assert [b for b, _ in seen] == [inf, inf, inf, 5, 5, 5, 5, 3, 3, 3]
    assert [new for _, new in seen][1::2] == [False, True, False, True, False]
    assert best.at_best['score'] == 3.0 and best.at_best['number'] == 1.0
    assert 'best/score' not in learn.history[1] or learn.history[1]['best/score'] is None
    assert [learn.history[i]['best/score'] for i in (3, 5, 7, 9)] == [5.0, 5.0, 3.0, 3.0]


def test_an_evaluation_of_another_loader_is_not_the_best() -> None:
    seen: list[bool] = []
    parts = synth_dls(n_train=1)
    dls = DataLoaders(parts.train, {'valid': parts.valid, 'night': Evaluator(parts.valid, '1ep')})
    best = BestMetric('valid_loss')
    look = Callback(after_epoch=lambda cb: seen.append(best.new_best), order=70)
    learn = quiet_synth_learner(dls=dls, cbs=[best, look], eval_every='2ep', lr=0.01)
    learn.fit(4)
    assert seen == [False, True, False, True]
