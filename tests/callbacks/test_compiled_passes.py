"""Forward and backward compiled alone: accumulated gradients, microbatches, SAM, fp16, beside the ordinary step."""

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
    Callback,
    CancelBatchException,
    Checkpoint,
    DataLoaders,
    GradientAccumulation,
    GradientClip,
    Learner,
    MixedPrecision,
    MixUp,
)
from learnkit.callbacks.nan_guard import GuardNonFinite
from learnkit.callbacks.sam import SAM
from tests.callbacks.test_compile import needs_compiler
from tests.callbacks.test_compiled_features import fit, history_of, make_model
from tests.helpers.compiling import compiled, distance, needs_whole_step

pytestmark = [
    needs_whole_step,
    pytest.mark.filterwarnings('ignore:microbatch=.* on its own'),
]

FEATURES: dict[str, Callable[[], Callback]] = {
    'batches': partial(GradientAccumulation, batches=3),
    'samples': partial(GradientAccumulation, 20),
    'sam': SAM,
    'fp16': partial(MixedPrecision, 'fp16'),
    'bf16': partial(MixedPrecision, 'bf16'),
    'clip': partial(GradientClip, 0.5),
    'ema': EMA,
    'guard': GuardNonFinite,
    'mixup': MixUp,
}
OF_PASSES = {'batches', 'samples', 'sam', 'fp16', 'micro', 'micro3'}
SIZES = {'micro': 4, 'micro3': 3}
IMPOSSIBLE = [
    {'batches', 'samples'},
    {'fp16', 'bf16'},
    {'micro', 'micro3'},
    {'batches', 'sam'},
    {'samples', 'sam'},
    {'micro', 'mixup'},  # the ordinary step runs
    {'micro3', 'mixup'},
]
SAMPLE = [('batches', 'clip'), ('samples', 'micro3'), ('sam', 'guard'), ('fp16', 'batches')]
PAIRS = [
    pair
    for pair in combinations([*FEATURES, *SIZES], 2)
    if OF_PASSES & set(pair) and set(pair) not in IMPOSSIBLE
]
LOSSES: dict[str, Any] = {
    'mean': F.cross_entropy,
    'weighted': nn.CrossEntropyLoss(weight=torch.arange(1.0, 6)),
    'sum': nn.CrossEntropyLoss(reduction='sum'),
}


def learner(names: tuple[str, ...], loss: str = 'mean', cbs: Any = (), n: int = 206) -> Any:
    "Return a Learner on batches of 8 images, the last one of 6, a fifth of the targets ignored."
    torch.manual_seed(0)
    x = torch.randn(n, 1, 4, 4)
    y = x.flatten(1)[:, :5].argmax(1)
    if not {'mixup', 'guard'} & set(names):  # a mean over no targets is not finite
        y = torch.where(torch.rand(n) < 0.2, -100, y)
    learn = Learner(
        DataLoaders.from_tensors((x, y), (x[:20], y[:20]), bs=8),
        make_model(),
        LOSSES[loss],
        opt_func=partial(torch.optim.AdamW, fused=True),
        cbs=[*(FEATURES[name]() for name in names if name in FEATURES), *cbs],
        microbatch=next((SIZES[name] for name in names if name in SIZES), None),
    )
    learn.logger = lambda row: None
    learn.create_mbar = False
    return learn


def check_numbers(names: tuple[str, ...], loss: str = 'mean') -> None:
    "Train with the ordinary and the compiled passes, and compare weights, steps and history."
    plain = fit(learner(names, loss))
    learn, backend = compiled(learner(names, loss))
    fit(learn)
    # all but the first batch, and the first of each other shape
    assert backend.calls >= 49 and learn.opt.n_steps == plain.opt.n_steps
    assert learn.explain_step().startswith('Forward and backward run compiled')
    assert distance(plain, learn) < 5e-6
    assert history_of(learn) == pytest.approx(history_of(plain), rel=1e-4)
    assert all(p.grad is None for p in learn.model.parameters())


@pytest.mark.parametrize('names', SAMPLE, ids='-'.join)
def test_a_sample_of_the_pairs(names: tuple[str, ...]) -> None:
    check_numbers(names)


@pytest.mark.full
@pytest.mark.parametrize('names', PAIRS, ids='-'.join)
def test_pairs_of_features(names: tuple[str, ...]) -> None:
    check_numbers(names)


@pytest.mark.full
@pytest.mark.parametrize('loss', ['weighted', 'sum'])
@pytest.mark.parametrize('names', [('batches',), ('samples', 'micro3'), ('micro',)], ids='-'.join)
def test_denominators(names: tuple[str, ...], loss: str) -> None:
    check_numbers(names, loss)


class Kill(Callback):
    "Ends a fit behind a checkpoint."

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def batch_checkpoint(self) -> None:
        if self.learn.train_iter == self.batch:
            raise InterruptedError

    order = 200


@pytest.mark.parametrize('is_compiled', [True, False])
def test_pending_gradients_in_a_checkpoint(is_compiled: bool, tmp_path: Path) -> None:
    names = ('batches', 'ema')

    def make(compiles: bool, cbs: Any) -> Any:
        learn = learner(names, cbs=[*cbs, Checkpoint('1ba', folder=tmp_path)], n=84)
        return compiled(learn)[0] if compiles else learn

    whole = fit(learner(names, n=84), 3)
    # with two batches since the last step, and with one in the second epoch
    first = make(is_compiled, [Kill(5)])
    second = make(not is_compiled, [Kill(16)])
    third = make(is_compiled, [])
    for learn, kwargs in (first, {}), (second, {'resume': True}):
        with pytest.raises(InterruptedError):
            fit(learn, 3, **kwargs)
    fit(third, 3, resume=True)
    assert third.opt.n_steps == whole.opt.n_steps
    assert distance(whole, third) < 5e-6
    with whole.ema.applied(), third.ema.applied():
        assert distance(whole, third) < 5e-6
    assert history_of(third) == pytest.approx(history_of(whole), rel=1e-4)


def test_gradients_that_a_cancelled_batch_keeps_are_added() -> None:
    def cancel(cb: Any) -> None:
        if cb.iter == 7:
            raise CancelBatchException

    def make() -> Any:
        keep = Callback(before_step=cancel)
        return learner(('fp16',), cbs=[keep], n=84)

    plain, (learn, backend) = fit(make()), compiled(make())
    fit(learn)
    assert backend.calls >= 19 and distance(plain, learn) < 5e-6
    assert learn.opt.n_steps == plain.opt.n_steps == 20


@pytest.mark.parametrize('names', [('batches',), ('micro',)], ids='-'.join)
def test_the_guard_skips_a_bad_batch_and_keeps_the_gradients_of_the_others(
    names: tuple[str, ...],
) -> None:
    def spoil(cb: Any) -> None:
        if cb.train_iter == 11:
            cb.learn.xb = (cb.learn.x * float('nan'),)

    def make() -> Any:
        learn = learner((*names, 'guard'), cbs=[Callback(before_batch=spoil)])
        learn.guard_non_finite.policy = 'skip'
        return learn

    plain, (learn, backend) = make(), compiled(make())
    for one in (plain, learn):
        with pytest.warns(UserWarning, match='batch 11 of epoch 0'):
            fit(one)
    assert learn.guard_non_finite.n_skipped == plain.guard_non_finite.n_skipped == 1
    assert backend.calls >= 49 and distance(plain, learn) < 5e-6


class TwoBiases(nn.Module):
    "Two parameters whose gradients are the same numbers, and one whose gradient is one number."

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 5)
        self.other, self.shift = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x.flatten(1)) + self.other
        return out * self.shift.sum()


@needs_compiler
@pytest.mark.full
def test_gradients_that_share_memory_are_clipped_once() -> None:
    def make() -> Any:
        learn = learner(('batches', 'clip'), n=84)
        learn.model = TwoBiases()
        return learn

    plain, learn = fit(make(), 4), fit(make().compile(step=True), 4)
    assert learn.explain_step().startswith('Forward and backward run compiled')
    assert distance(plain, learn) < 5e-6


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize(
    'names', [('batches', 'clip', 'ema'), ('micro', 'guard'), ('sam',)], ids='-'.join
)
def test_inductor_gives_the_same_numbers(names: tuple[str, ...]) -> None:
    plain, learn = fit(learner(names)), fit(learner(names).compile(step=True))
    assert learn.explain_step().startswith('Forward and backward run compiled')
    assert distance(plain, learn) < 5e-6


def test_an_error_of_the_optimizers_step_keeps_its_message() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if learn.iter == 3:
                raise RuntimeError('the optimizer failed')
            return super().step(closure)

    learn, backend = compiled(learner((), n=84))
    learn.opt_func = Failing
    with pytest.raises(RuntimeError, match='the optimizer failed') as raised:
        learn.fit(1)
    assert type(raised.value) is RuntimeError and backend.calls == 3
