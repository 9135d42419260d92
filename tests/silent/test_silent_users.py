"""What users' own functions and callbacks do: logs after the row, losses that add up, metrics, layers, loaders."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from learnkit import (
    Callback,
    DataLoaders,
    GradientAccumulation,
    Learner,
    LossError,
    MetricError,
    accuracy,
    error_rate,
)
from learnkit.callbacks import GuardNonFinite
from learnkit.losses import CrossEntropyLossFlat
from learnkit.metrics import DiceMulti, foreground_acc, top_k_accuracy
from tests.helpers.learners import quiet_learner

X = torch.linspace(-2, 2, 64 * 3, dtype=torch.float64).sin().view(64, 3)
Y = X.sum(1, keepdim=True)


def learner(
    y: Tensor = Y, loss_func: Any = None, model: Any = None, bs: int = 16, **options: Any
) -> Learner:
    torch.manual_seed(0)
    dls = DataLoaders.from_tensors((X, y), (X, y), bs=bs, shuffle=False, device='cpu')
    model = nn.Linear(3, 1).double() if model is None else model
    options = {'opt_func': torch.optim.SGD, 'lr': 0.01, **options}
    return quiet_learner(dls, model, loss_func or nn.MSELoss(), **options)


# -- logs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize('event', ['after_epoch', 'epoch_checkpoint'])
def test_what_is_logged_after_the_row_is_in_this_row(event: str) -> None:
    def note(cb: Callback) -> None:
        cb.learn.log('own', cb.epoch)
        cb.learn.log('last', 1, weight=None)
        cb.learn.log('last', cb.epoch, weight=None)

    rows: list[Any] = []
    learn = learner(cbs=Callback(**{event: note}, order=60))
    learn.logger = rows.append
    learn.fit(3)
    assert [r['own'] for r in learn.history] == [0, 1, 2]
    assert [r['last'] for r in learn.history] == [0, 1, 2]
    assert 'own' not in rows[0]  # the row was printed before
    learn.fit(1)
    assert [r['own'] for r in learn.history] == [0, 1, 2, 0]


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


@pytest.mark.parametrize('parts', PARTS)
def test_an_undeclared_sum_is_refused(parts: str) -> None:
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
    torch.testing.assert_close(learn.model.weight, plain.model.weight, rtol=0, atol=1e-12)
    PARTS[parts](lambda p, y: (p - y).square().mean() + 0.1).fit(1)  # a mean is let through


def test_shapes_are_compared_in_each_pass() -> None:
    def squares(pred: Tensor, y: Tensor) -> Tensor:
        return (pred - y).square().mean()

    with pytest.raises(LossError, match='are broadcast'):
        learner(Y[:, 0], squares).validate()

    learn = learner(loss_func=squares)
    learn.dls = DataLoaders.from_tensors((X, Y), (X, Y[:, 0]), bs=16, device='cpu')
    with pytest.raises(LossError, match='are broadcast'):
        learn.fit(1)
    learn = learner(loss_func=squares)
    learn.dls = DataLoaders([(X[:1], Y[:1, 0]), (X, Y[:, 0])])
    with pytest.raises(LossError, match='are broadcast'):
        learn.fit(1)


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


def test_ignored_targets_count_in_no_metric() -> None:
    y = torch.arange(16 * 6).view(16, 6) % 4
    scores = F.one_hot(y, 4).double() * 10
    y[:, 3:] = -100
    y[0] = -100  # a batch without a target that counts
    metrics = [accuracy, error_rate, partial(top_k_accuracy, k=1)]
    batches = [(scores[:1], y[:1]), (scores[1:4], y[1:4]), (scores[4:], y[4:])]
    learn = Learner(batches, nn.Identity(), CrossEntropyLossFlat(), metrics=metrics)
    found = learn.validate(dl=batches)
    assert list(found[1:]) == [1, 0, 1]
    maps, targets = scores[1:].movedim(-1, 1)[..., None], y[1:, :, None]
    assert foreground_acc(maps, targets) == 1 and DiceMulti()(maps, targets) == 1


# -- predictions -----------------------------------------------------------------------------------


@pytest.mark.parametrize('loss', [nn.CrossEntropyLoss(), CrossEntropyLossFlat(axis=1)])
def test_samples_of_unlike_sizes_have_probabilities(loss: Any) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(2, 3, n, n), torch.randint(4, (2, n, n))) for n in (4, 6)]
    learn = Learner(DataLoaders(batches, batches), nn.Conv2d(3, 4, 1), loss)
    preds, _, decoded = learn.get_preds(dl=batches, with_decoded=True)
    alone = [p for batch in batches for p in learn.get_preds(dl=[batch])[0]]
    assert all(map(torch.equal, preds, alone))
    if isinstance(loss, CrossEntropyLossFlat):
        assert all(map(torch.equal, decoded, [p.argmax(0) for p in alone]))


# -- guards ----------------------------------------------------------------------------------------


class HalfLoss(nn.Module):
    "A float16 loss of 40,000, whose double is infinite."

    def forward(self, pred: Tensor, y: Tensor) -> Tensor:
        return (pred.sum() * 0 + 40_000).half()


def test_a_large_half_precision_loss_is_finite() -> None:
    learn = learner(loss_func=HalfLoss(), cbs=GuardNonFinite())
    learn.fit(1)
    assert [loss.item() for loss in learn.recorder.losses] == [40_000] * 4


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
