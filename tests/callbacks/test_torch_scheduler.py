"""torch schedulers in a fit give the rates of a plain loop."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torch_lr

from learnkit import (
    Callback,
    CancelBatchException,
    CancelStepException,
    Checkpoint,
    GradientAccumulation,
    Learner,
)
from learnkit.callbacks.schedule import LRScheduler
from learnkit.core.errors import MetricError, OptimizerError, OptionError
from learnkit.testing import synth_learner
from tests.helpers.learners import bare_learner


def learner(n_train: int = 5, **kwargs: Any) -> Any:
    options = {'opt_func': torch.optim.AdamW, 'lr': 0.5, **kwargs}
    return bare_learner(n_train, 1, cls=synth_learner, **options)


def plain(make: Callable[[Any], Any], n: int, values: Any = None) -> Any:
    "Return the rates and momenta of each of `n` steps of a plain loop that steps the scheduler after each."
    opt = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler, found = make(opt), []
    for i in range(n):
        opt.step()
        found.append([(g['lr'], g['betas'][0]) for g in opt.param_groups])
        scheduler.step(*([] if values is None else [values[i]]))
    return found


class Used(Callback):
    def __init__(self) -> None:
        self.values: list[Any] = []

    def before_step(self) -> None:
        self.values.append([(float(h['lr']), float(h['mom'])) for h in self.opt.hypers])


def chained(opt: Any) -> Any:
    return torch_lr.ChainedScheduler(
        [torch_lr.LinearLR(opt, 0.5, total_iters=3), torch_lr.ExponentialLR(opt, 0.9)],
        optimizer=opt,
    )


def sequential(opt: Any) -> Any:
    return torch_lr.SequentialLR(
        opt,
        [torch_lr.ConstantLR(opt, 0.1, total_iters=2), torch_lr.CosineAnnealingLR(opt, 6)],
        milestones=[2],
    )


MAKERS = {
    'step': partial(torch_lr.StepLR, step_size=2),
    'multi_step': partial(torch_lr.MultiStepLR, milestones=[1, 3, 3]),
    'exponential': partial(torch_lr.ExponentialLR, gamma=0.5),
    'cosine': partial(torch_lr.CosineAnnealingLR, T_max=4),
    'lambda': partial(torch_lr.LambdaLR, lr_lambda=lambda i: 1 / (i + 1)),
    'linear': torch_lr.LinearLR,
    'cyclic': partial(torch_lr.CyclicLR, base_lr=0.1, max_lr=1.0, step_size_up=3),
    'one_cycle': partial(torch_lr.OneCycleLR, max_lr=1.0, total_steps=20),
    'restarts': partial(torch_lr.CosineAnnealingWarmRestarts, T_0=3),
    'chained': chained,
    'sequential': sequential,
}


@pytest.mark.parametrize('name', MAKERS)
def test_by_batch_the_rates_match_a_plain_loop(name: str) -> None:
    used, learn = Used(), learner()
    learn.fit(2, cbs=[LRScheduler(MAKERS[name], by='batch'), used])
    assert used.values == plain(MAKERS[name], 10)
    assert learn.recorder.lrs == [v[-1][0] for v in used.values]


def test_a_cycle_of_batches_that_steps_by_epoch_is_reported() -> None:
    with pytest.warns(UserWarning, match=r"OneCycleLR .* 20 .* 5 .*by='batch'"):
        learner().fit(5, cbs=LRScheduler(MAKERS['one_cycle']))
    cycle = partial(torch_lr.OneCycleLR, max_lr=1.0, total_steps=5)
    learner().fit(5, cbs=LRScheduler(cycle))


def test_by_epoch_and_each_fit_starts_over() -> None:
    used, learn = Used(), learner(2)
    learn.add_cbs([LRScheduler(MAKERS['cyclic']), used])
    for _ in range(2):
        used.values = []
        learn.opt = None
        learn.fit(5)
        assert used.values[::2] == used.values[1::2] == plain(MAKERS['cyclic'], 5)


def test_each_group_of_the_splitter_is_one_for_the_scheduler() -> None:
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    used = Used()
    split = lambda m: [[*m[0].parameters()], [*m[1].parameters(), *m[2].parameters()]]
    learn = learner(3, model=model, splitter=split, wd=0.1, wd_bn_bias=False)
    make = partial(torch_lr.LambdaLR, lr_lambda=[lambda i: 1 / (i + 1), lambda i: 0.5**i])
    learn.fit(1, lr=[0.25, 0.5], cbs=[LRScheduler(make, by='batch'), used])
    assert len(learn.opt.param_groups) == 4  # biases and norms are spared from weight decay
    expected = [[0.25 / (i + 1), 0.5 * 0.5**i] for i in range(3)]
    assert [[lr for lr, _ in v] for v in used.values] == expected
    assert [g['lr'] for g in learn.opt.param_groups] == [0.25 / 4] * 2 + [0.5**4] * 2
    assert [g['weight_decay'] for g in learn.opt.param_groups] == [0.1, 0.0, 0.1, 0.0]
    assert not any('initial_lr' in g for g in learn.opt.param_groups)


def test_the_rate_of_the_fit_is_where_it_starts() -> None:
    used, learn = Used(), learner(1)
    learn.fit(2, lr=0.25, cbs=[LRScheduler(MAKERS['exponential']), used])
    learn.fit(2, cbs=[LRScheduler(MAKERS['exponential']), used])
    assert [lr for ((lr, _),) in used.values] == [0.25, 0.125, 0.5, 0.25]


@pytest.mark.parametrize('n_acc', [1, 2])
def test_by_batch_it_moves_on_only_after_a_step(n_acc: int) -> None:
    def accumulate(cb: Any) -> None:
        if (cb.train_iter + 1) % n_acc:
            raise CancelBatchException

    used, learn = Used(), learner(6)
    cbs = [
        LRScheduler(MAKERS['exponential'], by='batch'),
        Callback(after_backward=accumulate),
        used,
    ]
    learn.fit(1, cbs=cbs)
    assert used.values == plain(MAKERS['exponential'], 6 // n_acc)


@pytest.mark.parametrize('n_epoch', [1, 3])
def test_the_step_for_accumulated_samples_that_are_left_over_counts(n_epoch: int) -> None:
    used, learn = Used(), learner(5)
    used.order = GradientAccumulation.order + 1
    cbs = [LRScheduler(MAKERS['exponential'], by='batch'), GradientAccumulation(32), used]
    learn.fit(n_epoch, cbs=cbs)
    assert learn.opt.n_steps == 3 * n_epoch  # of two, two and one batch of 16
    assert used.values == plain(MAKERS['exponential'], 3 * n_epoch)
    assert learn.opt.hypers[0]['lr'] == 0.5 * 0.5 ** (3 * n_epoch)


def test_a_skipped_step_does_not_count_nor_warn() -> None:
    def skip(cb: Any) -> None:
        if cb.train_iter < 2:
            raise CancelStepException

    used, learn = Used(), learner(4)
    skipping = Callback(before_step=skip)
    skipping.order = -5
    learn.fit(1, cbs=[LRScheduler(MAKERS['exponential'], by='batch'), skipping, used])
    assert used.values == plain(MAKERS['exponential'], 2)
    never = Callback(before_step=lambda cb: (_ for _ in ()).throw(CancelStepException()))
    # no step at all: no warning either
    learn.fit(3, cbs=[LRScheduler(MAKERS['exponential']), never])
    assert learn.opt.hypers[0]['lr'] == 0.5**4


def test_skipped_epochs_advance_it() -> None:
    used, learn = Used(), learner(2)
    learn.fit(4, start_epoch=2, cbs=[LRScheduler(MAKERS['cosine']), used])
    assert used.values == [v for v in plain(MAKERS['cosine'], 4)[2:] for _ in range(2)]


def test_reduce_on_plateau_gets_the_value_of_each_epoch() -> None:
    losses = [3.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    make = partial(torch_lr.ReduceLROnPlateau, patience=1, factor=0.5)

    def write_loss(cb: Any) -> None:
        cb.learn.history[-1]['valid_loss'] = losses[cb.epoch]

    saying = Callback(after_epoch=write_loss)
    saying.order = 51
    for monitor in (None, 'valid_loss'):
        used, learn = Used(), learner(1)
        learn.fit(8, cbs=[LRScheduler(make, monitor=monitor), saying, used])
        assert used.values == plain(make, 8, values=losses)
    learn = learner(1, metrics=nn.functional.l1_loss)
    learn.fit(2, cbs=LRScheduler(torch_lr.ReduceLROnPlateau, monitor='l1_loss'))
    assert learn.history[-1]['l1_loss'] > 0
    learn.fit(
        3,
        start_epoch=2,
        cbs=(scheduler := LRScheduler(torch_lr.ReduceLROnPlateau, monitor='train_loss')),
    )
    assert scheduler.scheduler.last_epoch == 1  # skipped epochs have no value


def rates_of(make: Callable[[Any], Any], losses: list[float | None]) -> list[Any]:
    "Return the rates and momenta of a fit, with a batch an epoch, whose rows have these losses."
    used, learn = Used(), learner(1)

    def write_loss(cb: Any) -> None:
        cb.learn.history[-1]['valid_loss'] = losses[cb.epoch]

    learn.fit(
        len(losses), cbs=[LRScheduler(make), Callback(after_epoch=write_loss, order=51), used]
    )
    return used.values


NAN = math.nan
PLATEAU = partial(torch_lr.ReduceLROnPlateau, patience=1, factor=0.5)


def test_on_a_plateau_nan_is_a_value_and_an_absent_value_is_not() -> None:
    for losses in ([NAN, NAN, NAN, 1.0, 1.0], [2.0, NAN, NAN, NAN, 1.0, NAN]):
        assert rates_of(PLATEAU, losses) == plain(PLATEAU, len(losses), values=losses)
    evaluated = [3.0, 3.0, 3.0, 3.0]
    every_third = [value for loss in evaluated for value in (None, None, loss)]
    assert rates_of(PLATEAU, every_third)[::3] == plain(PLATEAU, 4, values=evaluated)
    assert rates_of(PLATEAU, [None] * 6) == plain(PLATEAU, 6, values=[1.0] * 2 + [0.0] * 4)[:1] * 6


@pytest.mark.parametrize('mode', ['min', 'max'])
def test_a_relative_threshold_of_negative_values_is_reported(mode: str) -> None:
    losses = [-1.0] * 6
    relative, absolute = (partial(PLATEAU, mode=mode, threshold_mode=m) for m in ('rel', 'abs'))
    limit = r'< -0\.9999' if mode == 'min' else r'> -1\.0001'
    message = rf"value -1, .* {limit} .*threshold_mode='abs'"
    with pytest.warns(UserWarning, match=message) as found:
        rates = rates_of(relative, losses)
    assert rates == plain(relative, 6, values=losses) == rates[:1] * 6  # torch lowers no rate
    assert len(found) == 1  # once a fit
    assert rates_of(absolute, losses) == plain(absolute, 6, values=losses) != rates
    exact = partial(relative, threshold=0.0)
    assert rates_of(exact, losses) == plain(exact, 6, values=losses) != rates
    for values in ([NAN] * 3, [0.0] * 3, [math.inf] * 3):  # no negative best value: no warning
        assert rates_of(relative, values) == plain(relative, 3, values=values)


@pytest.mark.parametrize(
    ('make', 'message'),
    [
        (lambda: LRScheduler(3), r'partial\(StepLR'),
        (lambda: LRScheduler(MAKERS['step'], by='step'), "'batch' or 'epoch'"),
    ],
)
def test_what_is_not_a_scheduler(make: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()


@pytest.mark.parametrize(
    ('cb', 'message'),
    [
        (
            lambda: LRScheduler(torch_lr.ReduceLROnPlateau, monitor='valid_los'),
            'Did you mean `valid_loss`',
        ),
        (lambda: LRScheduler(partial(torch_lr.LambdaLR, lr_lambda=[len, len])), None),
    ],
)
def test_errors_before_training(cb: Any, message: str | None) -> None:
    learn = learner()
    error = ValueError if message is None else MetricError
    with pytest.raises(error, match=message):
        learn.fit(1, cbs=cb())
    assert learn.train_iter == 0
    learn.fit(1)


def test_a_scheduler_that_needs_a_value_is_refused_by_batch() -> None:
    learn = learner()
    with pytest.raises(OptionError, match="ReduceLROnPlateau, by='batch'"):
        learn.fit(1, cbs=LRScheduler(torch_lr.ReduceLROnPlateau, by='batch'))
    assert learn.train_iter == 0
    learn.fit(1)


class Halved:
    "A scheduler without `state_dict`, whose rate depends on its steps."

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.n_steps = 0

    def step(self) -> None:
        self.n_steps += 1
        for group in self.optimizer.param_groups:
            group['lr'] = 0.5 / 2**self.n_steps


def test_a_scheduler_without_a_state_dict_is_resumed() -> None:
    states: list[Any] = []
    keep = Callback(batch_checkpoint=lambda cb: states.append(cb.learn.checkpoint_state()))
    learn = learner()
    learn.fit(2, cbs=[LRScheduler(Halved, by='batch'), keep])
    assert learn.opt.hypers[0]['lr'] == 0.5 / 2**10
    for state in states[2], states[6]:
        again = learner()
        rates: list[float] = []
        note = Callback(before_step=lambda cb, rates=rates: rates.append(cb.opt.hypers[0]['lr']))
        again.fit(2, cbs=[LRScheduler(Halved, by='batch'), note], resume=state)
        n_done = 10 - len(rates)
        assert rates == [0.5 / 2**n for n in range(n_done, 10)]


# -- rates that no batch uses, and other schedulers ------------------------------------------------


def linear_cycle(n: int) -> Any:
    return partial(
        torch_lr.OneCycleLR, max_lr=1.0, total_steps=n, anneal_strategy='linear', pct_start=0.85
    )


@pytest.mark.parametrize('opt_func', [torch.optim.AdamW, torch.optim.SGD])
def test_a_rate_that_no_batch_uses_is_not_checked(tmp_path: Path, opt_func: Any) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return learner(5, opt_func=partial(opt_func, **momentum), path=tmp_path)

    momentum = {'momentum': 0.9} if opt_func is torch.optim.SGD else {}
    schedule = LRScheduler(linear_cycle(10), by='batch')
    used, learn = Used(), make()
    learn.fit(2, cbs=[schedule, used, Checkpoint(every='1ba', keep_last=20)])
    if opt_func is torch.optim.AdamW:
        assert used.values == plain(linear_cycle(10), 10)
    opt = opt_func([nn.Parameter(torch.zeros(1))], lr=0.5, **momentum)
    own = linear_cycle(10)(opt)
    for lr in learn.recorder.lrs:
        assert lr == opt.param_groups[0]['lr'] > 0
        opt.step()
        own.step()
    assert opt.param_groups[0]['lr'] < 0  # of torch, after the last batch
    assert learn.opt.hypers[0]['lr'] == learn.recorder.lrs[-1]
    assert learn.opt.hypers[0]['mom'] < 1

    for n in (4, 9, 10):
        resumed = make()
        path = next((tmp_path / 'checkpoints').glob(f'*ba{n}.ckpt'))
        new = LRScheduler(linear_cycle(10), by='batch')
        resumed.fit(2, resume=path, cbs=[new, Checkpoint(folder=tmp_path / 'other')])
        assert torch.equal(resumed.model.a, learn.model.a)
        assert resumed.recorder.lrs == learn.recorder.lrs
    learn.fit(1)  # with valid rates


def test_a_rate_that_a_batch_would_use_is_checked() -> None:
    used, learn = Used(), learner(4)
    make = partial(torch_lr.LambdaLR, lr_lambda=lambda i: 1 - i)
    with pytest.raises(OptimizerError, match=r'lr=-0.5'):
        learn.fit(1, cbs=[LRScheduler(make, by='batch'), used])
    assert [values[-1][0] for values in used.values] == [0.5, 0.0]
    with pytest.raises(OptimizerError, match=r'lr=-0.5'):
        learner().fit(1, cbs=LRScheduler(partial(torch_lr.LambdaLR, lr_lambda=lambda i: -1)))


class ByEpoch:
    "A scheduler whose `step` requires the epoch."

    def __init__(self, opt: Any) -> None:
        self.optimizer = opt
        self.base_values = [group['lr'] for group in opt.param_groups]

    def step(self, epoch: int, metric: float | None = None) -> None:
        raise NotImplementedError


class ByBoth(ByEpoch):
    def step(self, epoch: int, *, n: int, **options: Any) -> None: ...  # type: ignore[override]


class Counted(ByEpoch):
    "A scheduler as timm's, by the count of epochs or of steps."

    def __init__(self, opt: Any, t_in_epochs: bool = True) -> None:
        super().__init__(opt)
        self.t_in_epochs = t_in_epochs

    def state_dict(self) -> dict[str, Any]:
        return {'base_values': self.base_values}

    def step(self, epoch: int, metric: float | None = None) -> None:
        assert metric is None
        self.set_rates(epoch if self.t_in_epochs else None)

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        self.set_rates(None if self.t_in_epochs else num_updates)

    def set_rates(self, n: int | None) -> None:
        for group, base in zip(self.optimizer.param_groups, self.base_values, strict=True):
            group['lr'] = group['lr'] if n is None else base / (1 + n)


class CountedPlateau(Counted):
    "As timm's `PlateauLRScheduler`: it holds torch's, and its state dict has no count of bad epochs."

    def __init__(self, opt: Any) -> None:
        super().__init__(opt)
        self.lr_scheduler = torch_lr.ReduceLROnPlateau(opt, factor=0.5, patience=1)

    def state_dict(self) -> dict[str, Any]:
        return {'best': self.lr_scheduler.best}

    def step(self, epoch: int, metric: float | None = None) -> None:
        assert epoch == self.lr_scheduler.last_epoch + 1 and metric is not None
        self.lr_scheduler.step(metric)


@pytest.mark.parametrize('by', ['epoch', 'batch'])
def test_a_scheduler_that_is_called_with_a_count(by: str, tmp_path: Path) -> None:
    make = partial(Counted, t_in_epochs=by == 'epoch')
    learn = learner()
    n = 5 if by == 'batch' else 1
    for _ in range(2):  # each fit counts from its own begin
        learn.fit(3, 0.6, cbs=LRScheduler(make, by=by))
        assert learn.opt.hypers[0]['lr'] == pytest.approx(0.6 / (1 + 3 * n))
    resumed = learner(path=tmp_path)
    fit = partial(resumed.fit, 3, 0.6, resume=True)
    with pytest.raises(ZeroDivisionError):
        fit(cbs=[Checkpoint('1ba'), LRScheduler(make, by=by), Callback(before_epoch=fail_late)])
    fit(cbs=[Checkpoint('1ba'), LRScheduler(make, by=by)])
    assert resumed.opt.hypers[0]['lr'] == pytest.approx(0.6 / (1 + 3 * n))


def fail_late(cb: Any) -> None:
    if cb.epoch == 2:
        raise ZeroDivisionError


def test_a_plateau_that_is_called_with_a_count_resumes_with_its_bad_epochs(tmp_path: Path) -> None:
    column = Callback(after_train=lambda cb: cb.learn.log('mine', 1.0))
    cb = partial(LRScheduler, CountedPlateau, monitor='mine')
    learn = learner()
    learn.fit(4, 0.8, cbs=[cb(), column])
    assert (
        learn.opt.hypers[0]['lr'] == 0.4
    )  # the second and the third epoch after the best one are bad
    resumed = learner(path=tmp_path)
    fit = partial(resumed.fit, 4, 0.8, resume=True)
    with pytest.raises(ZeroDivisionError):
        fit(cbs=[Checkpoint('1ba'), cb(), column, Callback(before_epoch=fail_late)])
    fit(cbs=[Checkpoint('1ba'), cb(), column])
    assert resumed.opt.hypers[0]['lr'] == 0.4


@pytest.mark.parametrize(('by', 't_in_epochs'), [('epoch', False), ('batch', True)])
def test_a_scheduler_that_counts_in_the_other_unit_is_refused(by: str, t_in_epochs: bool) -> None:
    learn = learner()
    with pytest.raises(OptionError, match=f't_in_epochs={t_in_epochs}'):
        learn.fit(1, cbs=LRScheduler(partial(Counted, t_in_epochs=t_in_epochs), by=by))
    assert learn.train_iter == 0


@pytest.mark.parametrize(
    ('make', 'message'),
    [
        (ByEpoch, r'ByEpoch.step\(\) requires epoch,.*ParamScheduler'),
        (ByBoth, r'ByBoth.step\(\) requires epoch and n,'),
        (lambda opt: opt.param_groups, r'list has no `step\(\)`'),
    ],
)
@pytest.mark.parametrize('by', ['epoch', 'batch'])
def test_another_scheduler_is_refused_before_training(make: Any, message: str, by: str) -> None:
    learn = learner()
    with pytest.raises(OptionError, match=message):
        learn.fit(1, cbs=LRScheduler(make, by=by))
    assert learn.train_iter == 0
    learn.fit(1)


# -- one of several optimizers ------------------------------------------------------------------------


class Alternating(Learner):
    "Step one optimizer in each batch, and the other one in every third batch."

    def train_batch(self) -> None:
        loss = self.compute_loss(self.forward(self.model, self.x))
        self.optimize(loss, only='fast')
        if self.iter % 3 == 2:
            loss = self.compute_loss(self.forward(self.model, self.x))
            self.optimize(loss, only='slow')


def two_optimizers(*cbs: Any) -> Any:
    model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))
    opts = {
        'fast': torch.optim.Adam(model[0].parameters(), lr=0.5),
        'slow': torch.optim.SGD(model[1].parameters(), lr=0.25),
    }
    dls = synth_learner(n_train=7).dls
    return Alternating(dls, model, nn.MSELoss(), opt_func=opts, cbs=list(cbs))


def halve(**options: Any) -> LRScheduler:
    return LRScheduler(partial(torch_lr.StepLR, step_size=1, gamma=0.5), **options)


def rates_of_optimizers(learn: Any) -> list[float]:
    return [learn.opt[name].param_groups[0]['lr'] for name in ('fast', 'slow')]


def test_a_scheduler_of_one_optimizer_follows_the_steps_of_that_one() -> None:
    learn = two_optimizers(halve(by='batch', only='fast'), halve(by='batch', only='slow'))
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
        assert rates_of_optimizers(learn) == [0.5 / 2**7, 0.25 / 2**2]
        learn.fit(1)  # the rates begin again with each fit
    assert rates_of_optimizers(learn) == [0.5 / 2**7, 0.25 / 2**2]


def test_a_scheduler_of_one_optimizer_leaves_the_other_one() -> None:
    learn = two_optimizers(halve(only=1))
    with learn.no_bar(), learn.no_logging():
        learn.fit(2)
    assert rates_of_optimizers(learn) == [0.5, 0.25 / 2**2]


def test_schedulers_of_two_optimizers_resume(tmp_path: Path) -> None:
    cbs = [halve(by='batch', only='fast'), halve(by='batch', only='slow')]
    learn = two_optimizers(*cbs, Checkpoint('2ba', tmp_path, keep_last=None))
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
    for path in sorted(tmp_path.glob('*.ckpt')):
        resumed = two_optimizers(halve(by='batch', only='fast'), halve(by='batch', only='slow'))
        with resumed.no_bar(), resumed.no_logging():
            resumed.fit(1, resume=path)
        assert rates_of_optimizers(resumed) == rates_of_optimizers(learn)


def test_a_scheduler_of_an_unknown_optimizer_is_refused_before_training() -> None:
    learn = two_optimizers(halve(only='fats'))
    with learn.no_bar(), pytest.raises(OptimizerError, match='fast'):
        learn.fit(1)
    assert learn.time.ba == 0
