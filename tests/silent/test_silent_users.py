"""What users' own functions and callbacks do: logs after the row, losses that add up, metrics, layers, loaders."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from learnkit import (
    Callback,
    DataLoaders,
    GradientAccumulation,
    Learner,
    LossError,
    MetricError,
    SaveModelCallback,
    accuracy,
    error_rate,
)
from learnkit.callbacks import EarlyStoppingCallback, GuardNonFinite
from learnkit.losses import CrossEntropyLossFlat
from learnkit.metrics import (
    DiceMulti,
    foreground_acc,
    skm_to_fastai,
    top_k_accuracy,
)

X = torch.linspace(-2, 2, 64 * 3, dtype=torch.float64).sin().view(64, 3)
Y = X.sum(1, keepdim=True)


def learner(
    y: Tensor = Y, loss_func: Any = None, model: Any = None, bs: int = 16, **options: Any
) -> Learner:
    torch.manual_seed(0)
    dls = DataLoaders.from_tensors((X, y), (X, y), bs=bs, shuffle=False, device='cpu')
    model = nn.Linear(3, 1).double() if model is None else model
    options = {'opt_func': torch.optim.SGD, 'lr': 0.01, **options}
    learn = Learner(dls, model, loss_func or nn.MSELoss(), **options)
    learn.logger = lambda row: None
    return learn


# -- logs ------------------------------------------------------------------------------------------


@pytest.mark.silent('learn.log after the row of the epoch: value in the row of epoch 1')
@pytest.mark.parametrize('event', ['after_epoch', 'epoch_checkpoint'])
def test_what_is_logged_after_the_row_is_in_this_row(row: Any, event: str) -> None:
    def note(cb: Callback) -> None:
        cb.learn.log('own', cb.epoch)
        cb.learn.log('own', cb.epoch + 2)  # the mean of both
        cb.learn.log('last', 1, weight=None)
        cb.learn.log('last', cb.epoch, weight=None)

    rows: list[Any] = []
    learn = learner(cbs=Callback(**{event: note}, order=60))
    learn.logger = rows.append
    learn.fit(3)
    if event == 'after_epoch':
        row(was=0, now=learn.history[1]['own'], independent=2)
    assert [r['own'] for r in learn.history] == [1, 2, 3]
    assert [r['last'] for r in learn.history] == [0, 1, 2]
    assert 'own' not in rows[0]  # the row was printed before
    learn.fit(1)
    assert [r['own'] for r in learn.history] == [1, 2, 3, 1]


def test_what_is_logged_as_an_epoch_begins_is_in_its_row() -> None:
    def note(cb: Callback) -> None:
        cb.learn.log('own', cb.epoch + 10 * cb.learn.recorder.n_fits)

    learn = learner(cbs=Callback(before_epoch=note))
    learn.fit(2)
    learn.fit(1)
    assert [r['own'] for r in learn.history] == [10, 11, 20]


def test_a_log_cannot_replace_a_metric() -> None:
    def note(cb: Callback) -> None:
        cb.learn.log('mae', 5.0)

    def mae(pred: Tensor, y: Tensor) -> Tensor:
        return (pred - y).abs().mean()

    with pytest.raises(MetricError, match=r"log\('mae'\)"):
        learner(metrics=mae, cbs=Callback(after_batch=note)).fit(1)


# -- losses ----------------------------------------------------------------------------------------


class Added(nn.Module):
    def forward(self, pred: Tensor, y: Tensor) -> Tensor:
        return (pred - y).square().sum()


def added(pred: Tensor, y: Tensor) -> Tensor:
    return (pred - y).square().sum()


def marked(pred: Tensor, y: Tensor) -> Tensor:
    return added(pred, y)


marked.reduction = 'sum'  # type: ignore[attr-defined]

PARTS = {
    'accumulated': lambda loss: learner(loss_func=loss, cbs=GradientAccumulation(64)),
    'microbatches': lambda loss: learner(loss_func=loss, bs=64, microbatch=16),
}


@pytest.mark.silent('a sum as loss, in parts of a batch: weight after a step')
@pytest.mark.parametrize('parts', PARTS)
def test_an_undeclared_sum_is_refused(row: Any, parts: str) -> None:
    for loss in (added, Added(), lambda p, y: F.mse_loss(p, y, reduction='sum')):
        learn = PARTS[parts](loss)
        before = learn.model.weight.clone()
        with pytest.raises(LossError, match=r"`reduction = 'sum'`"):
            learn.fit(1)
        assert torch.equal(learn.model.weight, before)

    learn = PARTS[parts](marked)
    plain = learner(loss_func=added, bs=64)
    learn.fit(1)
    plain.fit(1)
    if parts == 'accumulated':
        row(was='divided by 64', now='LossError', independent=plain.model.weight[0, 0].item())
    torch.testing.assert_close(learn.model.weight, plain.model.weight, rtol=0, atol=1e-12)
    PARTS[parts](lambda p, y: (p - y).square().mean() + 0.1).fit(1)  # a mean is let through


@pytest.mark.silent(
    '(n, 1) predictions and (n,) targets in validation alone: loss of an exact model'
)
def test_shapes_are_compared_in_each_pass(row: Any) -> None:
    def squares(pred: Tensor, y: Tensor) -> Tensor:
        return (pred - y).square().mean()

    with pytest.raises(LossError, match='are broadcast') as e:
        learner(Y[:, 0], squares).validate()
    row(was=9.6, now=type(e.value).__name__, independent=0)

    learn = learner(loss_func=squares)
    learn.dls = DataLoaders.from_tensors((X, Y), (X, Y[:, 0]), bs=16, device='cpu')
    with pytest.raises(LossError, match='are broadcast'):
        learn.fit(1)
    learn = learner(loss_func=squares)
    learn.dls = DataLoaders([(X[:1], Y[:1, 0]), (X, Y[:, 0])])
    with pytest.raises(LossError, match='are broadcast'):
        learn.fit(1)


def test_targets_first_are_warned_of() -> None:
    def keras(y_true: Tensor, y_pred: Tensor) -> Tensor:
        return (y_true - y_pred).square().mean()

    for options in ({'loss_func': keras}, {'metrics': keras}):
        with pytest.warns(UserWarning, match=r'keras\(y_true, y_pred\)'):
            learner(**options).fit(1)


# -- metrics ---------------------------------------------------------------------------------------


def test_a_metric_that_broadcasts_is_warned_of() -> None:
    def error(pred: Tensor, y: Tensor) -> Tensor:
        return (pred - y).abs().mean()

    def squeezed(pred: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(pred.squeeze(1), y)

    with pytest.warns(UserWarning, match=r'error compares .* \(16, 1\) and \(16,\)'):
        learner(Y[:, 0], squeezed, metrics=error).fit(1)
    learner(metrics=error).fit(1)


def test_a_metric_in_place_changes_no_training() -> None:
    def in_place(pred: Tensor, y: Tensor) -> Tensor:
        return (pred.sigmoid_() - y).abs().mean()

    plain, other = learner(), learner(metrics=in_place)
    plain.fit(1)
    other.fit(1)
    assert torch.equal(plain.model.weight, other.model.weight)


def test_a_score_of_scikit_learn_needs_classes() -> None:
    metrics = pytest.importorskip('sklearn.metrics')
    with pytest.raises(MetricError, match=r'have one output.*is_class=False'):
        learner(metrics=skm_to_fastai(metrics.r2_score)).fit(1)
    learn = learner(metrics=skm_to_fastai(metrics.r2_score, is_class=False))
    learn.fit(1)
    with torch.no_grad():
        expected = metrics.r2_score(Y.numpy(), learn.model(X).numpy())
    assert learn.history[0]['r2_score'] == pytest.approx(expected, rel=1e-9)


@pytest.mark.silent('accuracy with targets of -100, of a perfect model')
def test_ignored_targets_count_in_no_metric(row: Any) -> None:
    y = torch.arange(16 * 6).view(16, 6) % 4
    scores = F.one_hot(y, 4).double() * 10
    y[:, 3:] = -100
    y[0] = -100  # a batch without a target that counts
    metrics = [accuracy, error_rate, partial(top_k_accuracy, k=1)]
    batches = [(scores[:1], y[:1]), (scores[1:4], y[1:4]), (scores[4:], y[4:])]
    learn = Learner(batches, nn.Identity(), CrossEntropyLossFlat(), metrics=metrics)
    found = learn.validate(dl=batches)
    row(was=0.5, now=found['accuracy'], independent=1)
    assert list(found[1:]) == [1, 0, 1]
    maps, targets = scores[1:].movedim(-1, 1)[..., None], y[1:, :, None]
    assert foreground_acc(maps, targets) == 1 and DiceMulti()(maps, targets) == 1


@pytest.mark.parametrize('name', ['wrong_rate', 'eer', 'MAE', 'cost'])
def test_a_monitor_that_nobody_knows_is_warned_of(name: str, tmp_path: Any) -> None:
    metrics = {name: lambda pred, y: (pred - y).abs().mean()}
    for make in (SaveModelCallback, EarlyStoppingCallback):
        with pytest.warns(UserWarning, match=f"monitor='{name}': higher counts as better"):
            learner(metrics=metrics, path=tmp_path, cbs=make(name)).fit(1)
        learner(metrics=metrics, path=tmp_path, cbs=make(name, comp='less')).fit(1)


# -- layers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('event', 'moves'), [('before_epoch', True), ('before_train', True), ('after_batch', False)]
)
def test_unfrozen_layers_are_trained_or_warned_of(event: str, moves: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    unfreeze: Callable[[Any], Any] = lambda cb: cb.learn.model[0].requires_grad_(True)
    learn = learner(model=model, cbs=Callback(**{event: unfreeze}))
    if moves:
        learn.fit(1)
    else:
        with pytest.warns(UserWarning, match='within the epoch.*: 0.weight, 0.bias'):
            learn.fit(1)
    assert torch.equal(model[0].weight, before) != moves


# -- predictions -----------------------------------------------------------------------------------


@pytest.mark.silent('get_preds of batches of unlike sizes: sum of the probabilities of a pixel')
@pytest.mark.parametrize('loss', [nn.CrossEntropyLoss(), CrossEntropyLossFlat(axis=1)])
def test_samples_of_unlike_sizes_have_probabilities(row: Any, loss: Any) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(2, 3, n, n), torch.randint(4, (2, n, n))) for n in (4, 6)]
    learn = Learner(DataLoaders(batches, batches), nn.Conv2d(3, 4, 1), loss)
    preds, _, decoded = learn.get_preds(dl=batches, with_decoded=True)
    alone = [p for batch in batches for p in learn.get_preds(dl=[batch])[0]]
    if isinstance(loss, nn.CrossEntropyLoss):
        row(was='logits', now=preds[0].sum(0)[0, 0].item(), independent=1)
    assert all(map(torch.equal, preds, alone))
    if isinstance(loss, CrossEntropyLossFlat):
        assert all(map(torch.equal, decoded, [p.argmax(0) for p in alone]))


class Plain(DataLoader[Any]):
    "A user's loader."


class Doubling(DataLoader[Any]):
    "A user's loader with its own iteration, which cannot be rebuilt."

    def __iter__(self) -> Any:
        return (tuple(2 * t for t in batch) for batch in super().__iter__())


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_predictions_of_a_stateful_loader_are_in_order() -> None:
    torchdata = pytest.importorskip('torchdata.stateful_dataloader')
    t = torch.arange(10.0)[:, None]
    dl = torchdata.StatefulDataLoader(
        TensorDataset(t, t), batch_size=4, shuffle=True, drop_last=True
    )
    learn = Learner(DataLoaders(dl), nn.Linear(1, 1), nn.MSELoss())
    assert learn.get_preds(0)[1].flatten().tolist() == list(range(10))


def test_predictions_of_a_subclass_of_a_loader_are_in_order() -> None:
    t = torch.arange(10.0)[:, None]
    for kind, factor, n in ((Plain, 1, 10), (Doubling, 2, 8)):
        dl = kind(TensorDataset(t, t), batch_size=4, shuffle=True, drop_last=True)
        learn = Learner(DataLoaders(dl), nn.Linear(1, 1), nn.MSELoss())
        targs = learn.get_preds(0)[1].flatten()
        assert len(targs) == n and targs.max() <= 9 * factor
        if kind is Plain:
            assert targs.tolist() == list(range(10))


# -- guards ----------------------------------------------------------------------------------------


class HalfLoss(nn.Module):
    "A float16 loss of 40,000, whose double is infinite."

    def forward(self, pred: Tensor, y: Tensor) -> Tensor:
        return (pred.sum() * 0 + 40_000).half()


@pytest.mark.silent('GuardNonFinite with a float16 loss of 40,000: batches of a fit of four')
def test_a_large_half_precision_loss_is_finite(row: Any) -> None:
    learn = learner(loss_func=HalfLoss(), cbs=GuardNonFinite())
    learn.fit(1)
    row(was=0, now=len(learn.recorder.losses), independent=4)
    assert [loss.item() for loss in learn.recorder.losses] == [40_000] * 4
