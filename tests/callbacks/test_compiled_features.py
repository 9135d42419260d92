"""Numbers of a compiled step with features of real trainings, alone and in pairs, beside the ordinary step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from learnkit import (
    EMA,
    Adam,
    Callback,
    Checkpoint,
    CutMix,
    DataLoaders,
    GradientClip,
    Learner,
    MixedPrecision,
    MixUp,
)
from learnkit.callbacks.nan_guard import GuardNonFinite
from learnkit.callbacks.training import GradientValueClip
from learnkit.monitors.optimizer_monitor import OptimizerMonitor
from tests.helpers.compiling import compiled, distance, needs_whole_step

pytestmark = needs_whole_step

FEATURES: dict[str, Callable[[], Callback]] = {
    'clip': partial(GradientClip, 0.5),
    'largest': partial(GradientClip, 0.05, float('inf')),
    'values': partial(GradientValueClip, 0.02),
    'bf16': partial(MixedPrecision, 'bf16'),
    'ema': partial(EMA, every=2, start='3st'),
    'guard': GuardNonFinite,
    'mixup': MixUp,
    'cutmix': CutMix,
    'monitor': partial(OptimizerMonitor, '25ba'),
}
OPTIMIZERS = {
    'sgd': (partial(torch.optim.SGD, momentum=0.9, weight_decay=0.01), 1e-6),
    'adam': (Adam, 5e-6),
    'adamw': (partial(torch.optim.AdamW, fused=True), 5e-6),
}
BF16_BOUND = 1e-3  # two orders of summation in half precision differ by more


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(16, 24, bias=False),
        nn.BatchNorm1d(24),
        nn.Dropout(0.2),
        nn.ReLU(),
        nn.Linear(24, 5),
    )


def learner(
    names: tuple[str, ...], opt_func: Any = OPTIMIZERS['sgd'][0], cbs: Any = (), n: int = 400
) -> Any:
    "Return a Learner on batches of 8 images of 4 x 4, with features."
    torch.manual_seed(0)
    x = torch.randn(n, 1, 4, 4)
    y = x.flatten(1)[:, :5].argmax(1)
    learn = Learner(
        DataLoaders.from_tensors((x, y), (x[:20], y[:20]), bs=8),
        make_model(),
        F.cross_entropy,
        opt_func=opt_func,
        cbs=[*(FEATURES[name]() for name in names), *cbs],
    )
    learn.logger = lambda row: None
    learn.create_mbar = False
    return learn


def fit(learn: Any, n_epoch: int = 2, **kwargs: Any) -> Any:
    torch.manual_seed(1)
    learn.fit_one_cycle(n_epoch, 0.01, **kwargs)
    return learn


def history_of(learn: Any) -> list[float]:
    return [row[name] for row in learn.history for name in ('train_loss', 'valid_loss')]


def check_numbers(names: tuple[str, ...], opt: str) -> None:
    "Train 100 steps with the ordinary and the compiled step, and compare weights and history."
    opt_func, bound = OPTIMIZERS[opt]
    bound = BF16_BOUND if 'bf16' in names else bound
    plain = fit(learner(names, opt_func))
    learn, backend = compiled(learner(names, opt_func))
    fit(learn)
    assert backend.calls >= 90 and learn.opt.n_steps == plain.opt.n_steps == 100
    assert learn.explain_step().startswith('The compiled step runs')
    assert distance(plain, learn) < bound
    assert history_of(learn) == pytest.approx(history_of(plain), rel=100 * bound)
    if 'ema' in names:
        with plain.ema.applied(), learn.ema.applied():
            assert distance(plain, learn) < bound
        assert learn.ema.state_dict()['n_updates'] == plain.ema.state_dict()['n_updates']
    if 'clip' in names:
        norms = [float(one.gradient_clip.total_norm) for one in (plain, learn)]
        assert norms[0] == pytest.approx(norms[1], rel=0.05)


SAMPLE = [('clip', 'ema'), ('bf16', 'guard'), ('mixup', 'values'), ('cutmix', 'monitor')]
PAIRS = [
    pair
    for pair in [*((name,) for name in FEATURES), *combinations(FEATURES, 2)]
    if pair != ('mixup', 'cutmix')  # refused: only one of them blends
]


@pytest.mark.parametrize('names', SAMPLE, ids='-'.join)
def test_a_sample_of_the_pairs(names: tuple[str, ...]) -> None:
    check_numbers(names, 'adamw')


@pytest.mark.full
@pytest.mark.parametrize('opt', OPTIMIZERS)
@pytest.mark.parametrize('names', PAIRS, ids='-'.join)
def test_pairs_of_features(names: tuple[str, ...], opt: str) -> None:
    check_numbers(names, opt)


class Kill(Callback):
    "Ends a fit in the middle of an epoch."

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def before_batch(self) -> None:
        if self.learn.train_iter == self.batch:
            raise InterruptedError


NAMES = ('clip', 'ema', 'mixup')


@pytest.mark.parametrize('is_compiled', [True, False])
def test_resume_twice_each_time_with_the_other_step(is_compiled: bool, tmp_path: Path) -> None:
    def make(compiles: bool, *cbs: Any) -> Any:
        save = Checkpoint('5ba', folder=tmp_path)
        learn = learner(NAMES, OPTIMIZERS['adamw'][0], [save, *cbs], n=96)
        return compiled(learn)[0] if compiles else learn

    whole = fit(learner(NAMES, OPTIMIZERS['adamw'][0], n=96), 3)
    killed = (make(is_compiled, Kill(8)), {}), (make(not is_compiled, Kill(18)), {'resume': True})
    for learn, kwargs in killed:
        with pytest.raises(InterruptedError):
            fit(learn, 3, **kwargs)
    last = fit(make(is_compiled), 3, resume=True)
    check_same(last, whole)


def check_same(learn: Any, whole: Any) -> None:
    assert learn.opt.n_steps == whole.opt.n_steps == 36 and distance(whole, learn) < 5e-6
    with whole.ema.applied(), learn.ema.applied():
        assert distance(whole, learn) < 5e-6
    assert history_of(learn) == pytest.approx(history_of(whole), rel=1e-4)


def test_a_compiled_fit_is_paused_twice() -> None:
    whole = fit(learner(NAMES, OPTIMIZERS['adamw'][0], n=96), 3)
    learn, backend = compiled(learner(NAMES, OPTIMIZERS['adamw'][0], n=96))
    fit(learn, 3, pause_at='7ba')
    assert learn.time.ba == 7 and learn.paused
    with learn.ema.applied():
        learn.validate()
    learn.resume(pause_at='18ba')
    assert learn.time.ba == 18
    learn.resume()
    # ordinary: the first batch of each part, and those before the average begins
    assert backend.calls >= 28
    check_same(learn, whole)


def test_rewinding_a_compiled_fit(tmp_path: Path) -> None:
    def make() -> Any:
        save = Checkpoint('1ep', folder=tmp_path)
        return compiled(learner(NAMES, OPTIMIZERS['adamw'][0], [save], n=96))[0]

    learn = fit(make(), 3)
    again = make()
    run = lambda one, resume: fit(one, 3, resume=resume)
    # the first batch behind a checkpoint is ordinary, with other rounding
    with pytest.warns(UserWarning, match='had the loss'):
        moment = again.rewind(17, fit=run, exact=False)
    assert again.time.ba == 17
    assert float(moment.step()) == pytest.approx(learn.recorder.smooth_loss.raw[17], rel=1e-4)


class Sequences(nn.Module):
    "Takes and returns dicts, with a loss, as transformers do."

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(20, 16), nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.tokens(input_ids).mean(1))
        return {'loss': F.cross_entropy(logits, labels), 'logits': logits, 'twice': 2 * logits}


def test_dict_batches_of_a_few_lengths_with_the_loss_of_the_model() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        batches = [
            {'input_ids': torch.randint(20, (8, n)), 'labels': torch.randint(3, (8,))}
            for n in (5, 7, 9) * 10
        ]
        cbs = [MixedPrecision('bf16'), GradientClip(1.0)]
        learn = Learner(DataLoaders(batches), Sequences(), opt_func=Adam, cbs=cbs)
        learn.logger = lambda row: None
        learn.create_mbar = False
        return learn

    plain, (learn, backend) = fit(make()), compiled(make())
    fit(learn)
    # all but the first batch of each length
    assert backend.graphs == 3 and backend.calls == 57
    assert distance(plain, learn) < BF16_BOUND


def test_the_guard_skips_a_bad_batch_as_in_the_ordinary_step() -> None:
    def make() -> Any:
        return learner((), OPTIMIZERS['adamw'][0], [GuardNonFinite('skip'), EMA()], n=160)

    def spoil(cb: Any) -> None:
        if cb.train_iter == 11:
            cb.learn.xb = (cb.learn.x * float('nan'),)

    plain, (learn, backend) = make(), compiled(make())
    for one in (plain, learn):
        one.add_cb(Callback(before_batch=spoil))
        with pytest.warns(UserWarning, match='batch 11 of epoch 0'):
            fit(one)
    assert backend.calls >= 38 and learn.opt.n_steps == plain.opt.n_steps == 39
    assert learn.guard_non_finite.n_skipped == plain.guard_non_finite.n_skipped == 1
    assert distance(plain, learn) < 5e-6
