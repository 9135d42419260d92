"""Values that callbacks watch: absent values, NaN, metrics that cannot be computed, counts of an average."""

import math
import warnings
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from fastcore.basics import noop
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from learnkit import (
    Callback,
    DataLoaders,
    EarlyStoppingCallback,
    Learner,
    ReduceLROnPlateau,
    SaveModelCallback,
)
from learnkit.callbacks import EMA, MixedPrecision
from learnkit.callbacks.best_metric import BestMetric
from learnkit.callbacks.schedule import LRScheduler
from learnkit.interop import from_hf, from_keras
from learnkit.metrics import (
    APScoreMulti,
    ExplainedVariance,
    R2Score,
    RocAucBinary,
    SpearmanCorrCoef,
    ValueMetric,
    skm_to_fastai,
)
from learnkit.testing import synth_learner
from tests.helpers.learners import quiet_synth_learner
from tests.helpers.libraries import import_or_skip
from tests.silent.cases import case

watched = partial(case, 'watched')
NAN = math.nan
FALLING = [12.0 - i for i in range(12)]


def train(values: list[float], *cbs: Any, every: str = '1ep', **options: Any) -> Learner:
    "Train an epoch for each value of the metric `score`."
    at: dict[str, Learner] = {}
    score = ValueMetric(lambda: values[at['learn'].epoch], 'score')
    options = {'n_train': 2, 'n_valid': 1, 'metrics': score, 'eval_every': every, **options}
    at['learn'] = learn = synth_learner(cbs=[*cbs], **options)
    learn.remove_cbs([cb for cb in learn.cbs if cb.name == 'progress'])
    learn.logger = noop
    learn.fit(len(values))
    return learn


def count_epochs(patience: Any, every: str) -> int:
    stopper = EarlyStoppingCallback('score', 'less', patience=patience)
    return len(train(FALLING, stopper, every=every).history)


@watched(
    "epochs of EarlyStoppingCallback(patience=1), every value better, eval_every='2ep'", old='1'
)
def _early_stopping() -> tuple[Any, Any]:
    return count_epochs(1, '2ep'), 12


@watched("the same with patience='1ep', '2ba', '3st' and eval_every='3ep'", old='[2, 2, 2]')
def _early_stopping_by_time() -> tuple[Any, Any]:
    return [count_epochs(patience, '3ep') for patience in ('1ep', '2ba', '3st')], [12] * 3


@watched("rate of ReduceLROnPlateau(patience=2), every value better, eval_every='3ep'", old='1e-06')
def _plateau() -> tuple[Any, Any]:
    learn = train(FALLING, ReduceLROnPlateau('score', 'less', patience=2), every='3ep', lr=0.01)
    return float(learn.opt.hypers[-1]['lr']), 0.01


@watched('patience 2 with NaN at each third epoch: epochs', old='2')
def _nan_is_an_evaluation() -> tuple[Any, Any]:
    stopper = EarlyStoppingCallback('score', 'less', patience=2)
    return len(train([NAN] * 12, stopper, every='3ep').history), 6


@watched(
    "SaveModelCallback, eval_every='7ba' of 10: valid_loss of the loaded weights", old='0.476008'
)
def _best_weights_within_an_epoch() -> tuple[Any, Any]:
    torch.manual_seed(0)
    losses = []
    note = Callback(after_eval=lambda cb: losses.append(cb.recorder.measured['valid_loss']))
    with TemporaryDirectory() as folder:
        cbs = [SaveModelCallback(), note]
        learn = quiet_synth_learner(lr=0.01, path=folder, cbs=cbs, eval_every='7ba')
        with learn.no_bar():
            learn.fit(3)
            found = float(learn.validate()[0])
    return found, min(losses[:-1])


@watched('`new_best` of BestMetric after NaN', old='True')
def _best_metric() -> tuple[Any, Any]:
    best = BestMetric('score', comp='less')
    train([1.0, NAN], best)
    return best.new_best, False


@watched("steps of torch's ReduceLROnPlateau on NaN: last rate", old='1')
def _scheduler_on_nan() -> tuple[Any, Any]:
    values = [2.0, NAN, NAN, NAN]
    make = partial(lr_scheduler.ReduceLROnPlateau, patience=1)
    learn = train(values, LRScheduler(make, monitor='score'), lr=1.0)
    by_hand = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(by_hand)
    for value in values:
        scheduler.step(value)
    return float(learn.opt.hypers[-1]['lr']), by_hand.param_groups[0]['lr']


@watched('warnings of ReduceLROnPlateau with negative losses, which it never lowers', old='0')
def _negative_losses() -> tuple[Any, Any]:
    scheduler = LRScheduler(partial(lr_scheduler.ReduceLROnPlateau, patience=1), monitor='score')
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        train([-1.0] * 6, scheduler)
    return sum("threshold_mode='abs'" in str(w.message) for w in found), 1


def trainer_state(values: list[float]) -> Any:
    transformers = import_or_skip('transformers')

    def arguments(folder: str) -> Any:
        options = {'eval_strategy': 'epoch', 'metric_for_best_model': 'score', 'use_cpu': True}
        return transformers.TrainingArguments(
            folder, greater_is_better=False, report_to='none', **options
        )

    with TemporaryDirectory() as folder:
        stopper = from_hf(transformers.EarlyStoppingCallback(2), arguments(folder))
        learn = train(values, stopper)
    return [len(learn.history), float(learn.trainer_run.state.best_metric)]


# what transformers.Trainer 5.24 has with these values
@watched('from_hf, NaN first: epochs and best metric of the Trainer', old='[3, nan]')
def _best_of_the_trainer() -> tuple[Any, Any]:
    return trainer_state([NAN, 5.0, 4.0, 3.0, 2.0, 1.0]), [6, 1.0]


@watched('from_hf, always NaN: epochs and best metric of the Trainer', old='[3, nan]')
def _nan_of_the_trainer() -> tuple[Any, Any]:
    return trainer_state([NAN] * 5), [3, math.inf]


@watched('from_keras: epochs with val_loss in the logs of 4, eval_every=2', old='[0, 1, 2, 3]')
def _logs_of_keras() -> tuple[Any, Any]:
    found = []

    class Note:
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if 'val_loss' in logs:
                found.append(epoch)

    train([1.0] * 4, from_keras(Note()), every='2ep')
    return found, [1, 3]


def as_tensors(*values: Any) -> list[Tensor]:
    return [torch.tensor(value) for value in values]


@watched('scores of a diverged model', old='ValueError: Input contains NaN.')
def _scores_of_nan() -> tuple[Any, Any]:
    import_or_skip('sklearn')
    numbers = as_tensors([1.0, NAN, 3.0], [1.0, 2.0, 3.0])
    classes = as_tensors([[NAN, 1.0], [0.0, 1.0]], [0, 1])
    labels = as_tensors([[NAN, 1.0], [0.0, 1.0]], [[0, 1], [1, 0]])
    found = [metric()(*numbers) for metric in (R2Score, ExplainedVariance)]
    found += [RocAucBinary()(*classes), APScoreMulti()(*labels)]
    return found, [NAN] * 4


@watched(
    "a user's score by scikit-learn of a diverged model", old='ValueError: Input contains NaN.'
)
def _own_score_of_nan() -> tuple[Any, Any]:
    score = skm_to_fastai(import_or_skip('sklearn.metrics').r2_score, is_class=False)
    return score(*as_tensors([1.0, NAN], [1.0, 2.0])), NAN


@watched('epochs of a fit with R2Score that diverges in the first', old='ValueError')
def _diverged_fit() -> tuple[Any, Any]:
    import_or_skip('sklearn')
    spoil = Callback(after_train=lambda cb: nn.init.constant_(cb.learn.model.a, NAN))
    return len(train([1.0] * 3, spoil, metrics=R2Score).history), 3


@watched('mean loss of an epoch with both infinities', old='ValueError: -inf + inf in fsum')
def _opposite_infinities() -> tuple[Any, Any]:
    y = torch.tensor([[1.0], [math.inf], [-math.inf]])
    dls = DataLoaders.from_tensors((torch.ones(3, 1), y), bs=1, shuffle=False)
    loss_func = lambda pred, targ: targ.mean() + 0 * pred.sum()
    return train([1.0], dls=dls, loss_func=loss_func, metrics=None).history[0]['train_loss'], NAN


def compare_ranks(pred: list[float], targ: list[float]) -> tuple[float, float]:
    expected = import_or_skip('scipy.stats').spearmanr(pred, targ)[0]
    return SpearmanCorrCoef()(*as_tensors(pred, targ)), float(expected)


@watched('SpearmanCorrCoef of two ordered points', old='0.999996', tolerance=0.0)
def _two_points() -> tuple[Any, Any]:
    return SpearmanCorrCoef()(*as_tensors([1.0, 2.0], [3.0, 9.0])), 1.0


@watched('SpearmanCorrCoef of a constant side', old='0')
def _constant_side() -> tuple[Any, Any]:
    return compare_ranks([1.0, 2.0, 3.0], [5.0, 5.0, 5.0])


@watched('SpearmanCorrCoef with NaN', old='0.4')
def _nan_among_ranks() -> tuple[Any, Any]:
    return compare_ranks([1.0, NAN, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0])


@watched('SpearmanCorrCoef with ties', old='0.7631575', tolerance=1e-12)
def _ties() -> tuple[Any, Any]:
    return compare_ranks([1.0, 2.0, 2.0, 3.0, 5.0], [2.0, 2.0, 1.0, 4.0, 9.0])


X = torch.linspace(-2, 2, 48).sin().view(16, 3).repeat(4, 1)
Y = X.sum(1, keepdim=True)


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(3, 1)


def fit_model(cb: Any, seed: int) -> Learner:
    dls = DataLoaders.from_tensors((X, Y), (X, Y), bs=4, shuffle=False)
    learn = Learner(dls, make_model(seed), F.mse_loss, opt_func=torch.optim.SGD, lr=0.02, cbs=[cb])
    learn.remove_cbs([cb for cb in learn.cbs if cb.name == 'progress'])
    learn.logger = noop
    learn.fit(1)
    return learn


@watched("valid_loss of an EMA's second model", old='1.43084')
def _ema_of_a_second_model() -> tuple[Any, Any]:
    ema = EMA(0.99)
    fit_model(ema, 1)
    found = fit_model(ema, 2).history[-1]['valid_loss']

    model = make_model(2)
    average = [p.detach().clone() for p in model.parameters()]
    opt = torch.optim.SGD(model.parameters(), lr=0.02)
    for n, (x, y) in enumerate(zip(X.split(4), Y.split(4), strict=True)):
        F.mse_loss(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        decay = min(0.99, 1 - (1 + n) ** (-2 / 3))
        average = [
            decay * a + (1 - decay) * p for a, p in zip(average, model.parameters(), strict=True)
        ]
    return found, F.mse_loss(F.linear(X, *average), Y).item()


@watched("fp16 scale after a MixedPrecision's second model", old='8192')
def _scale_of_a_second_model() -> tuple[Any, Any]:
    cb = MixedPrecision('fp16', init_scale=1024.0, growth_interval=10)
    for seed in (1, 2):
        fit_model(cb, seed)
    return cb.scaler.get_scale(), 1024.0 * 2 ** (16 // 10)
