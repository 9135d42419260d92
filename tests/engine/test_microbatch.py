"""Microbatches: gradients equal to the whole batch's, and the state within and after a microbatch."""

import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor, nn

from learnkit import (
    SGD,
    AvgMetric,
    Callback,
    CancelBackwardException,
    CancelBatchException,
    Learner,
    Recorder,
    TrainEvalCallback,
    mse,
)
from tests.helpers.learners import bare_learner

VOCAB, PAD = 7, -100


def mlp(n_out: int = 2) -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, n_out)).double()


def batch(n: int = 7, n_out: int = 2, seed: int = 1) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return (
        torch.randn(n, 3, generator=gen, dtype=torch.float64),
        torch.randn(n, n_out, generator=gen, dtype=torch.float64),
    )


def learner(
    batches: list[Any],
    model: nn.Module,
    *cbs: Any,
    loss: Any = None,
    size: int | None = 3,
    lr: float = 0.0,
    **kwargs: Any,
) -> Learner:
    return bare_learner(
        batches,
        model,
        loss or nn.MSELoss(),
        opt_func=SGD,
        lr=lr,
        cbs=cbs,
        recorder=None,
        microbatch=size,
        **kwargs,
    )


def grads_at_step(
    batches: list[Any], model: nn.Module, *cbs: Any, **kwargs: Any
) -> list[list[Tensor]]:
    "Return the gradients and the loss at each before_step."
    res: list[list[Tensor]] = []
    read = Callback(
        before_step=lambda cb: res.append([p.grad.clone() for p in model.parameters()] + [cb.loss])
    )
    learner(batches, model, *cbs, read, **kwargs).fit(1)
    return res


def plain(
    model: nn.Module, loss: Callable[..., Tensor], *parts: tuple[Tensor, Tensor]
) -> list[Tensor]:
    "Return the gradients and the loss of one batch, computed by autograd alone."
    value = sum((loss(model(x), y) for x, y in parts), torch.zeros((), dtype=torch.float64))
    return [*torch.autograd.grad(value, list(model.parameters())), value.detach()]


def close(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.allclose(p, q, rtol=0, atol=1e-10) for p, q in zip(a, b, strict=True))


LOSSES = {
    'mean': nn.MSELoss(),
    'function': F.mse_loss,
    'sum': nn.MSELoss(reduction='sum'),
    'sum partial': partial(F.mse_loss, reduction='sum'),
    'nested partial': partial(partial(F.l1_loss, reduction='sum')),
    'own': lambda pred, y: (pred - y).abs().mean(),
}


@pytest.mark.parametrize('loss', LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize('size', [3, 50])
def test_gradients_and_loss_match_the_whole_batch(loss: Any, size: int) -> None:
    model, b = mlp(), batch(7)
    [got] = grads_at_step([b], model, loss=loss, size=size)
    assert close(got, plain(model, loss, b))


@given(n=st.integers(1, 20), size=st.integers(1, 21), seed=st.integers(0, 99))
def test_any_batch_and_any_size(n: int, size: int, seed: int) -> None:
    model, b = mlp(), batch(n, seed=seed)
    [got] = grads_at_step([b], model, size=size)
    assert close(got, plain(model, F.mse_loss, b))


def tokens(n: int = 5, length: int = 6) -> tuple[Tensor, Tensor]:
    "Return inputs and token targets, padded to different lengths."
    x, y = torch.randn(n, length, 3, dtype=torch.float64), torch.randint(VOCAB, (n, length))
    for i in range(n):
        y[i, 1 + i :] = PAD
    return x, y


def token_loss(pred: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(pred.flatten(0, 1), y.flatten(), ignore_index=PAD)


@pytest.mark.parametrize('as_number', [int, lambda count: count], ids=['int', 'tensor'])
def test_a_mean_over_tokens_needs_and_gets_weight_func(as_number: Callable[[Tensor], Any]) -> None:
    model, b = mlp(VOCAB), tokens()
    expected = plain(model, token_loss, b)

    def count(xb: Any, yb: Any) -> Any:
        return as_number((yb[0] != PAD).sum())

    [got] = grads_at_step([b], model, loss=token_loss, size=2, weight_func=count)
    assert close(got, expected)
    [by_name] = grads_at_step([b], model, loss=token_loss, size=2, weight_func='tokens')
    assert close(by_name, expected)
    with pytest.warns(UserWarning, match='weight_func'):
        [unweighted] = grads_at_step([b], model, loss=token_loss, size=2)
    assert not close(unweighted, expected)
    [of_samples] = grads_at_step([b], model, loss=token_loss, size=2, weight_func='samples')
    assert close(of_samples, unweighted)


def test_a_loss_of_named_parts() -> None:
    model, b = mlp(), batch(7)
    parts = lambda pred, y: {'fit': F.mse_loss(pred, y), 'size': pred.square().mean()}
    whole = lambda pred, y: sum(parts(pred, y).values())
    rec = Recorder(valid_metrics=False)
    learn = learner([b], model, rec, read := Callback(), loss=parts)
    got: list[Tensor] = []
    read.before_step = lambda: got.extend(
        [*(p.grad.clone() for p in model.parameters()), learn.loss]
    )
    learn.logger = print
    learn.fit(1)
    assert close(got, plain(model, whole, b))
    row = learn.history[0]
    assert row['train_fit'] == pytest.approx(F.mse_loss(model(b[0]), b[1]).item(), abs=1e-10)
    assert row['train_size'] == pytest.approx(model(b[0]).square().mean().item(), abs=1e-10)


# Events and state


def test_events_of_the_pieces_and_what_they_see() -> None:
    model, (x, y) = mlp(), batch(7)
    seen: list[tuple[str, int, bool, bool]] = []
    events = 'before_batch before_pred after_loss after_backward before_step after_step after_batch'.split()

    class Look(Callback):
        def run_event(self, event_name: str) -> None:
            if event_name in events:
                assert len(self.xb[0]) == len(self.yb[0])
                seen.append((event_name, len(self.x), 'pred' in vars(self.learn), self.xb[0] is x))

    learner([(x, y)], model, Look()).fit(1)
    piece = lambda n: [
        ('before_pred', n, False, False),
        ('after_loss', n, True, False),
        ('after_backward', n, True, False),
    ]
    assert seen == [
        ('before_batch', 7, False, True),
        *piece(3),
        *piece(3),
        *piece(1),
        ('before_step', 7, True, True),
        ('after_step', 7, True, True),
        ('after_batch', 7, True, True),
    ]


def test_loss_is_the_pieces_own_inside_and_the_weighted_mean_after() -> None:
    model, (x, y) = mlp(), batch(7)
    losses: dict[str, list[float]] = {'after_loss': [], 'before_step': [], 'after_batch': []}

    class Look(Callback):
        def run_event(self, event_name: str) -> None:
            if event_name in losses:
                losses[event_name].append(self.loss.item())

    learner([(x, y)], model, Look()).fit(1)
    pieces = [F.mse_loss(model(x[i : i + 3]), y[i : i + 3]).item() for i in (0, 3, 6)]
    assert losses['after_loss'] == pytest.approx(pieces, abs=1e-12)
    whole = (3 * pieces[0] + 3 * pieces[1] + pieces[2]) / 7
    assert losses['before_step'] == losses['after_batch'] == pytest.approx([whole], abs=1e-12)


def test_validation_is_not_split() -> None:
    seen = Counter()
    dls = ([batch(7)], [batch(7), batch(5)])
    cbs = [
        TrainEvalCallback,
        Callback(after_pred=lambda cb: seen.update([(cb.training, len(cb.pred))])),
    ]
    learn = Learner(dls, mlp(), nn.MSELoss(), microbatch=2, default_cbs=False, cbs=cbs)
    learn.fit(1)
    assert seen == {(True, 2): 3, (True, 1): 1, (False, 7): 1, (False, 5): 1}


def test_dropout_draws_as_in_a_loop_over_the_pieces() -> None:
    model, (x, y) = nn.Sequential(mlp(), nn.Dropout(0.5)), batch(7)
    torch.manual_seed(9)
    [got] = grads_at_step([(x, y)], model)
    torch.manual_seed(9)
    model.zero_grad()
    for i, n in ((0, 3), (3, 3), (6, 1)):
        (F.mse_loss(model(x[i : i + 3]), y[i : i + 3]) * (n / 7)).backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(got, model.parameters(), strict=False))


# Cancels


def test_cancel_backward_leaves_out_one_piece() -> None:
    model, (x, y) = mlp(), batch(7)
    n = iter(range(9))

    def skip(cb: Any) -> None:
        if next(n) == 1:
            raise CancelBackwardException

    after: Counter[str] = Counter()
    count = Callback(
        after_backward=lambda cb: after.update(['after']),
        after_cancel_backward=lambda cb: after.update(['cancel']),
    )
    [got] = grads_at_step([(x, y)], model, Callback(before_backward=skip), count)
    kept = torch.tensor([0, 1, 2, 6])
    assert close(got[:-1], [g * 4 / 7 for g in plain(model, F.mse_loss, (x[kept], y[kept]))[:-1]])
    assert after == {'after': 3, 'cancel': 1}


def test_cancel_batch_in_a_piece_discards_this_batchs_gradients_alone() -> None:
    model, bs = mlp(), [batch(7, seed=s) for s in range(4)]
    seen: list[int] = []

    class Cancel(Callback):
        def before_step(self) -> None:
            if self.iter == 0:
                raise CancelBatchException  # its gradients are kept, as of a whole batch

        def before_pred(self) -> None:
            seen.append(self.iter)
            if self.iter == 1 and seen.count(1) == 2:
                raise CancelBatchException

        def after_cancel_batch(self) -> None:
            assert self.xb[0] is bs[self.iter][0]

    got = grads_at_step(bs, model, Cancel())
    assert Counter(seen) == {0: 3, 1: 2, 2: 3, 3: 3} and len(got) == 2
    assert close(got[0][:-1], plain(model, F.mse_loss, bs[0], bs[2])[:-1])
    assert close(got[1], plain(model, F.mse_loss, bs[3]))


# What is measured


def test_a_training_metric_sees_every_sample() -> None:
    model, bs = mlp(), [batch(7, seed=1), batch(4, seed=2)]
    metrics = [mse, AvgMetric(lambda p, y: (p - y).abs().mean(), 'mae')]
    learn = learner(bs, model, Recorder(train_metrics=True, valid_metrics=False), metrics=metrics)
    learn.logger = print
    learn.fit(1)
    pred, y = torch.cat([model(x) for x, _ in bs]), torch.cat([y for _, y in bs])
    assert learn.history[0]['mse'] == pytest.approx(F.mse_loss(pred, y).item(), abs=1e-10)
    assert learn.history[0]['mae'] == pytest.approx(F.l1_loss(pred, y).item(), abs=1e-10)


def fit_with_warnings(layer: nn.Module, size: int = 3) -> list[str]:
    "Fit twice in microbatches; return the warnings."
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 2)).double()
    learn = learner([batch(6), batch(6)], model, TrainEvalCallback, size=size)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        for _ in range(2):
            learn.fit(1)
    return [str(w.message) for w in caught]


@pytest.mark.parametrize(
    'make',
    [
        lambda: nn.BatchNorm1d(4),
        lambda: nn.BatchNorm1d(4, track_running_stats=False),
        lambda: nn.Sequential(
            nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
        ),
    ],
)
def test_layers_that_see_each_microbatch_on_its_own_are_warned_of_once(make: Any) -> None:
    (message,) = fit_with_warnings(make())
    assert message.startswith('microbatch=3: 1') and 'each microbatch of 3 samples' in message


def test_several_layers_are_counted() -> None:
    (message,) = fit_with_warnings(nn.Sequential(*[nn.BatchNorm1d(4) for _ in range(3)]))
    assert '1.0 (BatchNorm1d) and 2 other layers see each microbatch' in message


@pytest.mark.parametrize('make', [lambda: nn.GroupNorm(2, 4), lambda: nn.Dropout(0.5)])
def test_layers_without_statistics_are_not_warned_of(make: Any) -> None:
    assert fit_with_warnings(make()) == []
    assert fit_with_warnings(nn.BatchNorm1d(4), size=6) == []  # whole batches
