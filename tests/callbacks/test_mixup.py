"""MixUp and CutMix: blended inputs, the loss, visible targets, and the restored Learner."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fastcore.basics import noop
from torch import Tensor, nn

from learnkit import Callback, CancelBatchException, accuracy
from learnkit.callbacks.mixup import CutMix, MixHandler, MixUp
from tests.helpers.mixup import CLASSES, N, Notes, images, learner, net, soft

both = pytest.mark.parametrize('mixer', [MixUp, CutMix])


# -- what is blended -------------------------------------------------------------------------------


def test_mixup_is_the_closed_form_of_its_draws() -> None:
    learn = learner(MixUp(0.7), Notes, lr=0.0)
    torch.manual_seed(3)
    beta = torch.distributions.Beta(torch.tensor(0.7), torch.tensor(0.7))
    expected = []
    for x, y in images():
        lam, order = beta.sample((N,)), torch.randperm(N)
        lam = torch.maximum(lam, 1 - lam).double()
        expected.append(
            (
                lam,
                lam[:, None, None, None] * x + (1 - lam)[:, None, None, None] * x[order],
                y[order],
            )
        )
    torch.manual_seed(3)
    learn.fit(1)
    for row, (lam, x, y1) in zip(learn.notes.rows, expected, strict=True):
        assert row['lam'].shape == (N,)
        assert torch.equal(row['lam'], lam.float())
        assert torch.equal(row['yb1'][0], y1)
        assert torch.allclose(row['xb'][0], x, rtol=0, atol=1e-14) and (row['lam'] >= 0.5).all()
        assert torch.equal(row['y'], row['batch'][1])


def test_cutmix_pastes_one_box_and_its_share_is_exact() -> None:
    learn = learner(CutMix(), Notes, lr=0.0, batches=images(40))
    learn.fit(1)
    shares = []
    for row in learn.notes.rows:
        x, new = row['batch'][0], row['xb'][0]
        changed = (new != x).any(1).any(0)  # (H, W), in any sample
        rows, columns = changed.any(1).nonzero().flatten(), changed.any(0).nonzero().flatten()
        area = len(rows) * len(columns)
        shares.append(1 - area / 48)
        assert row['lam'].shape == (1,) and row['lam'].item() == pytest.approx(shares[-1], abs=1e-6)
        if not area:
            continue
        box = ..., slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
        order = [next(j for j in range(N) if torch.equal(new[box][i], x[box][j])) for i in range(N)]
        assert sorted(order) == list(range(N))
        assert torch.equal(row['yb1'][0], row['batch'][1][order])
        assert torch.equal(new[..., ~changed], x[..., ~changed])
    assert min(shares) < 0.3 and max(shares) > 0.8


def test_the_draws_match_fastai() -> None:
    "Compare with numbers recorded from fastai 2.8 after torch.manual_seed(7), for 8 images of 8 x 6."
    mixup = (
        [0.9781090, 0.8962013, 0.5231748, 0.9844235, 0.7284831, 0.6228055, 0.8172889, 0.8967966],
        [0, 1, 3, 0, 1, 2, 4, 2],
    )
    cutmix = [0.5833334], [4, 0, 1, 1, 3, 0, 2, 2]
    for mixer, (lam, y1) in ((MixUp, mixup), (CutMix, cutmix)):
        batches = [(torch.zeros(N, 3, 8, 6).double(), torch.arange(N) % CLASSES)]
        learn = learner(mixer, Notes, batches=batches)
        torch.manual_seed(7)
        learn.fit(1)
        [row] = learn.notes.rows
        assert row['lam'].tolist() == pytest.approx(lam, abs=1e-6) and row['yb1'][0].tolist() == y1


@both
def test_the_batches_of_the_loader_are_never_written_to(mixer: type[MixHandler]) -> None:
    batches = images()
    learner(mixer, batches=batches).fit(2)
    for old, new in zip(images(), batches, strict=True):
        for a, b in zip(old, new, strict=True):
            assert torch.equal(a, b)


# -- the loss --------------------------------------------------------------------------------------


class Flat(nn.Module):
    "Cross-entropy over flattened elements with classes last, as in fastai, marked as a loss of classes."

    y_int = True

    def __init__(self, reduction: str = 'mean') -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, pred: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(pred.flatten(0, -2), y.flatten(), reduction=self.reduction)


LOSSES: dict[str, Any] = {
    'module': nn.CrossEntropyLoss(),
    'function': F.cross_entropy,
    'partial': partial(F.cross_entropy, reduction='mean'),
    'fastai': Flat(),
    'sum': nn.CrossEntropyLoss(reduction='sum'),
}


@both
@pytest.mark.parametrize('microbatch', [None, 3, 'auto'])
@pytest.mark.parametrize('loss', LOSSES, ids=LOSSES)
def test_the_gradient_matches_targets_blended_by_hand(
    mixer: type[MixHandler], loss: str, microbatch: int | str | None
) -> None:
    learn = learner(mixer, Notes, loss_func=LOSSES[loss], lr=0.0, microbatch=microbatch)
    learn.fit(1)
    model = net()
    for row in learn.notes.rows:
        x, y = row['xb'][0], row['batch'][1]
        expected = F.cross_entropy(
            model(x),
            soft(y, row['yb1'][0], row['lam'].expand(N)),
            reduction='sum' if 'sum' in loss else 'mean',
        )
        grads = list(torch.autograd.grad(expected, list(model.parameters())))
        assert torch.allclose(row['loss'], expected, rtol=1e-6) and row['loss'].shape == ()
        for a, b in zip(row['grads'], grads, strict=True):
            assert torch.allclose(a, b, rtol=1e-6, atol=1e-8)


# -- who sees what ---------------------------------------------------------------------------------


@both
@pytest.mark.parametrize('microbatch', [None, 3])
def test_the_loss_function_is_replaced_for_the_forward_pass_of_training_alone(
    mixer: type[MixHandler], microbatch: int | None
) -> None:
    learn, seen = learner(mixer, microbatch=microbatch), set()
    plain = learn.loss_func

    class Everywhere(Callback):
        def run_event(self, event: str) -> None:
            if self.learn.loss_func is not plain:
                seen.add((event, self.learn.training, self.learn.loss_func.__name__))
            assert plain.reduction == 'mean'

    learn.add_cb(Everywhere)
    learn.fit(2)
    assert seen == {('after_pred', True, 'CrossEntropyLoss')} and learn.loss_func is plain


@both
@pytest.mark.parametrize('microbatch', [None, 3])
def test_training_metrics_get_the_targets_of_the_samples_themselves(
    mixer: type[MixHandler], microbatch: int | None
) -> None:
    seen: list[Tensor] = []

    def metric(pred: Tensor, y: Tensor) -> Tensor:
        if learn.training:
            seen.append(y)
        return accuracy(pred, y)

    ends: list[Any] = []
    watcher = Callback(after_batch=lambda cb: ends.append(cb.yb))
    learn = learner(mixer, watcher, metrics=metric, microbatch=microbatch)
    learn.recorder.train_metrics = True
    learn.fit(1)
    expected = [y for _, y in images()]
    assert torch.equal(torch.cat([y for y in seen if len(y)])[-4 * N :], torch.cat(expected))
    assert [len(yb) for yb in ends] == [1] * 6 and torch.equal(ends[0][0], expected[0])
    assert {'train_metric', 'valid_metric'} <= {*learn.history[0]}


@both
@pytest.mark.parametrize('loss', ['module', 'function', 'fastai'])
def test_evaluation_is_plain_also_in_the_middle_of_training(
    mixer: type[MixHandler], loss: str
) -> None:
    values: list[tuple[float, float]] = []

    def check(cb: Callback) -> None:
        if not cb.training:
            return
        learn = cb.learn
        got = learn.validate()[0]
        preds, targs, losses = learn.get_preds(with_loss=True, act=noop)
        values.append((got, F.cross_entropy(preds, targs).item()))
        assert losses.mean().item() == pytest.approx(got)

    for event in ('before_batch', 'after_pred', 'after_loss', 'before_step', 'after_batch'):
        after = Callback(**{event: check})
        after.order = 40
        learner(mixer, after, loss_func=LOSSES[loss]).fit(1)
        assert len(values) == 4 and all(a == pytest.approx(b) for a, b in values)
        values.clear()


FAIL_AT = (
    'before_batch before_pred after_pred after_loss before_backward after_step after_batch'.split()
)


@both
@pytest.mark.parametrize('error', [ValueError, KeyboardInterrupt, CancelBatchException])
@pytest.mark.parametrize('event', FAIL_AT)
def test_the_loss_function_is_restored_whatever_happens(
    mixer: type[MixHandler], event: str, error: type[BaseException]
) -> None:
    def fail(cb: Callback) -> None:
        if cb.training and cb.iter == 2:
            raise error

    learn = learner(
        mixer,
        Callback(**{event: fail})
        if event != 'after_batch' or error is not CancelBatchException
        else Callback(),
        microbatch=3,
    )
    plain = learn.loss_func
    try:
        learn.fit(1)
    except (ValueError, KeyboardInterrupt):
        pass
    assert (
        learn.loss_func is plain and plain.reduction == 'mean' and 'yb1' not in vars(learn.cbs[-2])
    )
