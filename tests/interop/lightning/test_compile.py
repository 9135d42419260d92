"""`training_step` of modules in Lightning's style under `compile(step=True)`, beside the ordinary step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from fastcore.basics import noop
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import BinaryAccuracy

from learnkit import EMA, Callback, Checkpoint, DataLoaders, GuardNonFinite, MixedPrecision
from learnkit.interop import from_lightning
from tests.helpers.compiling import Backend, compiled, distance, needs_whole_step

pytestmark = needs_whole_step

X = torch.randn(160, 8, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
N_BATCHES = 20


class Module(nn.Module):
    "A module with dropout that logs its loss and a metric."

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        scores = self.net(x)
        loss = F.cross_entropy(scores, y)
        self.log('train_loss', loss, prog_bar=True)
        accuracy = (scores.argmax(1) == y).float().mean()
        self.log_dict({'acc': accuracy, 'share': 0.5}, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Numbered(Module):
    "A module that computes with the number of the batch, and returns a dict."

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        scores = self.net(x * (1 + 0.01 * batch_idx))
        self.log('number', batch_idx)
        return {'loss': F.cross_entropy(scores, y), 'scores': (scores, y)}


class Short(Module):
    "A module whose step takes the batch alone."

    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        return super().training_step(batch, 0)


class Scheduled(Module):
    "A module with a schedule."

    def configure_optimizers(self) -> Any:
        opt = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, 60)
        return [opt], [{'scheduler': schedule, 'interval': 'step'}]


class Hooks(Scheduled):
    "A module with hooks of the step, which are called as usual."

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[Tensor] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad.flatten() for p in self.parameters() if p.grad is not None]
        self.norms.append(torch.cat(grads).norm())

    def optimizer_step(self, epoch: int, i: int, optimizer: Any, closure: Any) -> None:
        optimizer.step(closure=closure)


def make(cls: type[nn.Module] = Module, cbs: Any = None, n: int = 160, **options: Any) -> Any:
    learn = from_lightning(cls(), DataLoaders.from_tensors((X[:n], Y[:n]), bs=8), cbs, **options)
    learn.logger = noop
    learn.create_mbar = False
    return learn


def fit(learn: Any, n_epoch: int = 5, **options: Any) -> Any:
    torch.manual_seed(1)
    learn.fit(n_epoch, **options)
    return learn


def fit_both(n_epoch: int = 5, **options: Any) -> tuple[Any, Any, Backend]:
    "Train ordinarily and compiled; return both Learners and the backend."
    plain = fit(make(**options), n_epoch)
    learn, backend = compiled(make(**options))
    return plain, fit(learn, n_epoch), backend


def history_of(learn: Any) -> dict[str, list[Any]]:
    rows = [{k: v for k, v in row.items() if k != 'time'} for row in learn.history]
    return {name: [row[name] for row in rows] for name in rows[0]}


full, param = pytest.mark.full, pytest.param
CLIP = {'gradient_clip_val': 0.1}
BY_VALUE = {'gradient_clip_val': 0.01, 'gradient_clip_algorithm': 'value'}


@pytest.mark.parametrize(
    ('cls', 'options'),
    [
        (Module, CLIP),
        (Hooks, {'accumulate_grad_batches': 3, **CLIP}),
        param(Module, {}, marks=full),
        param(Module, {'accumulate_grad_batches': 3}, marks=full),
        param(Numbered, BY_VALUE, marks=full),
        param(Short, {}, marks=full),
        param(Scheduled, {}, marks=full),
        param(Hooks, CLIP, marks=full),
    ],
)
def test_equals_the_ordinary_step(cls: type[nn.Module], options: dict[str, Any]) -> None:
    plain, learn, backend = fit_both(cls=cls, **options)
    whole = cls is not Hooks and 'accumulate_grad_batches' not in options
    text = 'The compiled step runs' if whole else 'Forward and backward run compiled'
    assert learn.explain_step().startswith(text)
    # ordinary: the batches up to the first step, which is checked, and the one that prepares the code
    assert backend.graphs == 1 and backend.calls >= 5 * N_BATCHES - 4
    assert distance(plain, learn) < 1e-6
    ours, theirs = history_of(learn), history_of(plain)
    assert [*ours] == [*theirs]
    for name in ours:
        assert ours[name] == pytest.approx(theirs[name], rel=1e-5)
    assert learn.trainer.global_step == plain.trainer.global_step == learn.opt.n_steps
    metrics, expected = learn.trainer.callback_metrics, plain.trainer.callback_metrics
    assert [*metrics] == [*expected]
    assert [float(v) for v in metrics.values()] == pytest.approx(
        [float(v) for v in expected.values()], rel=1e-5
    )
    if cls is Hooks:
        assert [float(n) for n in learn.model.norms] == pytest.approx(
            [float(n) for n in plain.model.norms], rel=1e-4
        )


class Look(Callback):
    "Keep the results of each batch."

    def before_fit(self) -> None:
        self.seen: list[Any] = []

    def after_batch(self) -> None:
        learn = self.learn
        output = learn._host.optimization.output
        assert not any(t.requires_grad for t in [learn.loss, output['loss']])
        values = [learn.loss, learn.loss_grad, output['loss'], output['scores'][0]]
        self.seen.append([t.detach() for t in values])


def test_results_of_a_batch() -> None:
    looks = Look(), Look()
    plain, learn = (make(Numbered, look, accumulate_grad_batches=2) for look in looks)
    fit(plain, 1)
    fit(compiled(learn)[0], 1)
    assert len(looks[0].seen) == N_BATCHES
    torch.testing.assert_close(looks[1].seen, looks[0].seen)


@full
@pytest.mark.parametrize(
    'make_cb', [EMA, GuardNonFinite, lambda: MixedPrecision('bf16')], ids=['ema', 'guard', 'bf16']
)
def test_callbacks(make_cb: Callable[[], Callback]) -> None:
    plain, learn = fit(make(cbs=make_cb())), compiled(make(cbs=make_cb()))[0]
    fit(learn)
    assert learn.explain_step().startswith('The compiled step runs')
    has_average = make_cb is EMA
    with plain.ema.applied() if has_average else nullcontext():
        with learn.ema.applied() if has_average else nullcontext():
            assert distance(plain, learn) < (1e-6 if make_cb in (EMA, GuardNonFinite) else 1e-3)


@full
def test_a_guard_skips_the_batch() -> None:
    "A refused batch is repeated by the ordinary step, which skips it."

    def fit_with(is_compiled: bool) -> Any:
        learn = make(cbs=GuardNonFinite('skip'), n=80)
        learn.dls.train = [(X[i : i + 8].clone(), Y[i : i + 8]) for i in range(0, 80, 8)]
        learn.dls.train[4][0][2, 3] = float('nan')
        if is_compiled:
            compiled(learn)
        with pytest.warns(UserWarning, match='batch 4 of epoch 0'):
            return fit(learn, 2)

    plain, learn = fit_with(False), fit_with(True)
    assert learn.explain_step().startswith('The compiled step runs')
    assert learn.guard_non_finite.n_skipped == plain.guard_non_finite.n_skipped == 2
    assert distance(plain, learn) < 1e-6
    assert history_of(learn)['acc_epoch'] == pytest.approx(history_of(plain)['acc_epoch'])


class Branching(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if batch_idx % 2 else loss


class Counting(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + 0.01 * self.trainer.global_step)


class Manual(Module):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss, opt = super().training_step(batch, batch_idx), self.optimizers()
        opt.zero_grad()
        self.manual_backward(loss)
        opt.step()


class Hooked(Module):
    def on_after_backward(self) -> None:
        for p in self.parameters():
            p.grad *= 0.5


class Measured(Module):
    def __init__(self) -> None:
        super().__init__()
        self.metric = BinaryAccuracy()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.metric(self.net(batch[0]).argmax(1), batch[1])
        self.log('metric', self.metric, on_step=False, on_epoch=True)
        return loss


@pytest.mark.parametrize(
    ('cls', 'reason'),
    [
        (Branching, 'Data-dependent branching'),
        param(Counting, 'n_steps == ', marks=full),
        (Manual, 'Manual has manual optimization'),
        (Hooked, 'Hooked.on_after_backward has to be called'),
        (Measured, "'metric'"),
    ],
)
def test_modules_that_need_the_ordinary_step(cls: type[nn.Module], reason: str) -> None:
    plain, learn, backend = fit_both(2, cls=cls)
    text = learn.explain_step()
    assert text.startswith('The ordinary step runs: ') and reason in text
    assert backend.graphs == (4 if cls is Counting else 0)
    assert distance(plain, learn) < 1e-6
    assert history_of(learn)['acc_epoch'] == pytest.approx(history_of(plain)['acc_epoch'])


def test_a_handler_before_the_forward_pass_needs_the_ordinary_step() -> None:
    learn, backend = compiled(make(cbs=Callback(before_pred=noop)))
    fit(learn, 1)
    assert backend.graphs == 0 and 'Callback(before_pred=noop)' in learn.explain_step()


def test_a_class_of_its_own_batch() -> None:
    learn = make()
    learn.__class__ = type('Own', (type(learn),), {'train_batch': lambda self: None})
    learn.compile(step=True, backend='eager')
    assert 'Own has its own `train_batch`' in learn.explain_step()


class Kill(Callback):
    "Stop the process at a step, as far as the Learner can tell."

    def __init__(self, n: int) -> None:
        self.n = n

    def after_batch(self) -> None:
        if self.learn.opt.n_steps == self.n:
            raise KeyboardInterrupt


@full
def test_resume_each_time_with_the_other_step(tmp_path: Path) -> None:
    def make_run(is_compiled: bool, *cbs: Callback) -> Any:
        learn = make(Scheduled, [Checkpoint('1ba', folder=tmp_path), *cbs])
        return compiled(learn)[0] if is_compiled else learn

    whole = fit(make(Scheduled), 3)
    for is_compiled, n in ((True, 15), (False, 33)):
        with pytest.raises(KeyboardInterrupt):
            fit(make_run(is_compiled, Kill(n)), 3, resume=n > 15)
    last = fit(make_run(True), 3, resume=True)
    assert last.explain_step().startswith('The compiled step runs')
    assert last.opt.n_steps == 60 and distance(whole, last) < 1e-6
    assert history_of(last)['acc_epoch'] == pytest.approx(history_of(whole)['acc_epoch'])
    assert history_of(last)['train_loss'] == pytest.approx(history_of(whole)['train_loss'])
