"""Compare gradient accumulation with a torch loop that averages over all samples of a group, in float64."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnkit import (
    Callback,
    CancelFitException,
    Learner,
    Recorder,
)
from learnkit.callbacks.accumulation import GradientAccumulation
from learnkit.core.errors import OptionError
from tests.helpers.learners import bare_learner

Batch = tuple[Tensor, Tensor]


def mlp() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def batches(*sizes: int) -> list[Batch]:
    gen = torch.Generator().manual_seed(1)
    rand = partial(torch.randn, generator=gen, dtype=torch.float64)
    return [(rand(n, 3), rand(n, 2)) for n in sizes]


def learner(
    train: Any, model: nn.Module, *cbs: Any, loss: Any = F.mse_loss, **kwargs: Any
) -> Learner:
    options = {'opt_func': partial(torch.optim.SGD, momentum=0.9), 'lr': 0.1, **kwargs}
    dls = (train, train)
    return bare_learner(dls, model, loss, cbs=cbs, recorder=None, **options)


def plain(
    model: nn.Module, epochs: list[list[list[Batch]]], loss: Callable[..., Tensor] = F.mse_loss
) -> nn.Module:
    "Train in plain torch, with one step for each group of batches."
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for group in (g for groups in epochs for g in groups):
        x, y = (torch.cat(parts) for parts in zip(*group, strict=True))
        loss(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model


def same(a: nn.Module, b: nn.Module, atol: float = 1e-12) -> bool:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.allclose(p, q, rtol=0, atol=atol) for p, q in pairs)


def groups_of(bs: list[Batch], n_acc: int, n_epoch: int) -> list[list[list[Batch]]]:
    "Return the groups of each epoch; an incomplete last group counts if its epoch has another group."
    epochs, group = [], []
    for _ in range(n_epoch):
        groups = []
        for b in bs:
            group.append(b)
            if sum(len(x) for x, _ in group) >= n_acc:
                groups, group = [*groups, group], []
        if group and groups:
            groups, group = [*groups, group], []
        epochs.append(groups)
    return epochs


@pytest.mark.parametrize('size', [None, 3], ids=['whole', 'microbatches'])
@pytest.mark.parametrize(
    ('sizes', 'n_acc'),
    [
        ((4, 4, 4, 4), 8),  # fits
        ((4, 4, 4, 4, 4), 8),  # a tail
        ((5, 5, 5, 2), 8),  # more than n_acc in a group, and a short last batch
        ((1,) * 9, 4),
        ((7, 3), 1),
        ((4, 3), 12),  # an epoch is not enough: samples count for the next one
    ],
)
def test_the_weights_match_big_batches(
    sizes: tuple[int, ...], n_acc: int, size: int | None
) -> None:
    bs = batches(*sizes)
    learn = learner(bs, mlp(), GradientAccumulation(n_acc), microbatch=size)
    learn.fit(4)
    epochs = groups_of(bs, n_acc, 4)
    assert same(learn.model, plain(mlp(), epochs))
    assert learn.opt.n_steps == sum(map(len, epochs)) > 0


def test_a_mean_over_tokens_is_weighted_by_weight_func() -> None:
    gen = torch.Generator().manual_seed(2)
    bs = [
        (
            torch.randn(n, 6, 3, generator=gen, dtype=torch.float64),
            torch.randint(2, (n, 6), generator=gen),
        )
        for n in (4, 3, 4)
    ]
    for i, (_, y) in enumerate(bs):
        y[:, 2 + i :] = -100

    def loss(pred: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(pred.flatten(0, 1), y.flatten())

    def count(xb: Any, yb: Any) -> Tensor:
        return (yb[0] != -100).sum()

    expected = plain(mlp(), [[bs[:2], bs[2:]]] * 2, loss)
    for size in (None, 2):
        learn = learner(
            bs, mlp(), GradientAccumulation(6), loss=loss, weight_func=count, microbatch=size
        )
        learn.fit(2)
        assert same(learn.model, expected)
    learn = learner(bs, mlp(), GradientAccumulation(6), loss=loss, weight_func='samples')
    learn.fit(2)
    assert not same(learn.model, expected)


def test_a_loss_that_is_a_sum_is_not_scaled() -> None:
    bs, loss = batches(4, 4, 2), nn.MSELoss(reduction='sum')
    learn = learner(bs, mlp(), GradientAccumulation(5), loss=loss)
    learn.fit(2)
    assert same(learn.model, plain(mlp(), [[bs[:2], bs[2:]]] * 2, loss))


def test_the_reported_loss_is_never_scaled_and_what_belongs_to_a_step_fires_at_real_steps() -> None:
    bs, losses, seen = batches(4, 4, 2), [], []

    def log(event: str) -> dict[str, Any]:
        return {event: lambda cb: seen.append(event)}

    watch = Callback(
        after_loss=lambda cb: losses.append((cb.loss.item(), F.mse_loss(cb.pred, cb.y).item())),
        **log('after_step'),
        **log('after_cancel_batch'),
        **log('after_train'),
    )
    watch.order = 20
    learn = learner(bs, mlp(), GradientAccumulation(8), watch, Recorder)
    learn.logger = lambda row: None
    learn.fit(1)
    assert len(losses) == 6 and all(a == b for a, b in losses)
    assert seen == 'after_cancel_batch after_step after_cancel_batch after_step after_train'.split()
    assert learn.train_iter == 3 and len(learn.recorder.losses) == 3
    weighted = sum(loss * len(x) for (loss, _), (x, _) in zip(losses[3:], bs, strict=True)) / 10
    assert learn.history[-1]['valid_loss'] == pytest.approx(weighted)


def test_the_gradient_at_the_step_is_as_in_fastai() -> None:
    "Batch size 8 and 8 batches of 1 give equal gradients; an `n_acc` that is never reached gives no step."
    x, y = batches(8)[0]
    grads: list[list[Tensor]] = []

    def watch(cb: Any) -> None:
        grads.append([p.grad.clone() for p in cb.model.parameters()])

    ones = list(zip(x.split(1), y.split(1), strict=True))
    learner([(x, y)], mlp(), Callback(before_step=watch)).fit(1)
    after = Callback(before_step=watch)
    after.order = GradientAccumulation.order + 1
    learner(ones, mlp(), GradientAccumulation(n_acc=8), after).fit(1)
    assert len(grads) == 2
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(*grads, strict=True))


def test_a_fit_without_a_step_warns_with_the_numbers_and_leaves_nothing() -> None:
    learn = learner(batches(4, 4), model := mlp(), GradientAccumulation(100))
    with pytest.warns(UserWarning, match=r'n_acc=100.*only 16 samples') as caught:
        learn.fit(2)
    assert caught[0].filename == __file__  # at the line that called fit
    assert same(model, mlp(), 0) and all(p.grad is None for p in model.parameters())
    assert not learn.gradient_accumulation.state_dict()['sums']
    stop = Callback(after_batch=lambda cb: cb.learn.stop())
    learn.fit(1, cbs=stop)  # it was meant to end early: nothing to warn of

    def cancel(cb: Any) -> None:
        raise CancelFitException

    learn.fit(1, cbs=Callback(after_batch=cancel))


@pytest.mark.parametrize('n_acc', [0, -1, 2.5, True, 'many', None])
def test_a_wrong_n_acc_is_refused(n_acc: Any) -> None:
    with pytest.raises(OptionError, match='n_acc='):
        GradientAccumulation(n_acc)


def test_what_cannot_accumulate_is_refused_before_training() -> None:
    learn = learner(batches(4), model := mlp(), GradientAccumulation, opt_func=torch.optim.LBFGS)
    with pytest.raises(OptionError, match='LBFGS'):
        learn.fit(1)
    assert same(model, mlp(), 0)
