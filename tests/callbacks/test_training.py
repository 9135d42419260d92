"""The callbacks about training on batches and epochs."""

from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from learnkit import Callback, Learner, TrainEvalCallback, before_batch_cb
from learnkit.callbacks.training import BnFreeze, CastToTensor, ChannelsLast, ShortEpochCallback
from learnkit.core.errors import OptionError
from learnkit.testing import synth_learner
from tests.helpers.learners import bare_learner


def quiet(*cbs: Any, **kwargs: Any) -> Learner:
    return bare_learner(cls=synth_learner, cbs=cbs, **kwargs)


def test_before_batch_cb_changes_batches_in_training_and_evaluation() -> None:
    @before_batch_cb
    def shift(cb: Callback, xb: tuple[Tensor, ...], yb: tuple[Tensor, ...]) -> Any:
        assert isinstance(cb.learn, Learner)
        return tuple(x + 100 for x in xb), tuple(y - 100 for y in yb)

    seen: list[tuple[bool, float, float]] = []
    look = Callback(
        before_pred=lambda cb: seen.append((cb.training, cb.x.mean().item(), cb.y.mean().item()))
    )
    learn = quiet(shift, look, n_train=1, n_valid=1, lr=0.0)
    (x, y), (xv, yv) = learn.dls.train.tensors, learn.dls.valid.tensors
    learn.fit(1)
    near = lambda mean, by: pytest.approx(mean.mean().item() + by, abs=1e-3)
    assert seen == [(True, near(x, 100), near(y, -100)), (False, near(xv, 100), near(yv, -100))]
    assert repr(shift) == 'Callback(before_batch=shift)'


@pytest.mark.parametrize(('pct', 'n'), [(0.0, 1), (0.25, 4), (1.0, 10)])
def test_a_short_epoch_has_as_many_batches_as_in_fastai(pct: float, n: int) -> None:
    seen: list[bool] = []
    watcher = Callback(before_batch=lambda cb: seen.append(cb.training))
    learn = quiet(ShortEpochCallback(pct), watcher, n_valid=10)
    learn.fit(2)
    assert [seen.count(True), seen.count(False)] == [2 * n, 2 * n] and len(learn.history) == 2
    seen.clear()
    learn.remove_cb(ShortEpochCallback)
    learn.fit(1, cbs=ShortEpochCallback(pct, short_valid=False))
    assert [seen.count(True), seen.count(False)] == [n, 10]


def test_every_batch_of_a_short_epoch_is_recorded_measured_and_gathered() -> None:
    learn = quiet(ShortEpochCallback(0.2), n_train=10, n_valid=10)
    losses: list[float] = []
    learn.fit(1, cbs=Callback(after_loss=lambda cb: losses.append(cb.loss.item())))
    assert learn.opt.n_steps == 3 and len(losses) == 6
    assert learn.recorder.smooth_loss.raw == pytest.approx(losses[:3])
    assert len(learn.recorder.lrs) == 3
    assert learn.history[-1]['valid_loss'] == pytest.approx(sum(losses[3:]) / 3)
    assert len(learn.get_preds()[0]) == 3 * 16


def test_short_epochs_need_a_share() -> None:
    for pct in (-0.1, 1.5, 'half', True):
        with pytest.raises(OptionError, match='pct='):
            ShortEpochCallback(pct)  # type: ignore[arg-type]  # the test


class Marked(Tensor):
    "A tensor subclass, as in data libraries."


class Pair(NamedTuple):
    image: Tensor
    name: str


def test_tensor_subclasses_become_plain_however_nested() -> None:
    x, seen = torch.randn(4, 1).as_subclass(Marked), []

    class First(nn.Linear):
        def forward(self, batch: Any) -> Tensor:
            seen.append(batch)
            return super().forward(batch[0]['a'].image)

    batch = (({'a': Pair(x, 'one')}, [x, 5]), torch.randn(4, 1).as_subclass(Marked))
    cbs = [TrainEvalCallback, CastToTensor, Callback(before_pred=lambda cb: seen.append(cb.y))]
    learn = Learner(([batch], [batch]), First(1, 1), nn.MSELoss(), default_cbs=False, cbs=cbs)
    learn.fit(1)
    assert [type(o) for o in seen[::2]] == [Tensor, Tensor]
    for named, (plain, five) in seen[1::2]:
        assert type(named['a'].image) is Tensor is type(plain)
        assert named['a'].name == 'one'
        assert five == 5
        assert plain.data_ptr() == x.data_ptr()
    assert type(batch[0][1][0]) is Marked  # what the loader holds is untouched


def conv_learner(*cbs: Any, **kwargs: Any) -> Learner:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 2))
    gen = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(4, 3, 6, 6, generator=gen), torch.randn(4, 2, generator=gen)) for _ in range(3)
    ]
    dls = (batches, batches)
    loss_func = nn.MSELoss()
    return bare_learner(dls, model, loss_func, lr=0.01, cbs=cbs, recorder=None, **kwargs)


def is_channels_last(t: Tensor) -> bool:
    return t.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize('fused', [False, True])
def test_channels_last_lasts_for_a_run_and_changes_no_result(fused: bool) -> None:
    def adam(params: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=lr, fused=fused)

    layouts: list[tuple[bool, bool]] = []
    look = Callback(
        after_pred=lambda cb: layouts.append(
            (is_channels_last(cb.model[0].weight), is_channels_last(cb.model[0](cb.x)))
        )
    )
    ends = []
    for cbs in ((), (ChannelsLast, look)):
        learn = conv_learner(opt_func=adam)
        learn.fit(1)  # the optimizer's state begins in the usual layout
        learn.add_cbs(cbs)
        learn.fit(1)
        learn.remove_cbs(ChannelsLast)
        learn.fit(1)
        ends.append([p.detach() for p in learn.model.parameters()])
    assert layouts == [(True, True)] * 6 + [(False, False)] * 6
    for p, q in zip(*ends, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    assert learn.model[0].weight.is_contiguous() and not is_channels_last(learn.model[0].weight)
    state = learn.opt.state[learn.model[0].weight]
    assert state['exp_avg'].is_contiguous() and not is_channels_last(state['exp_avg'])


def test_channels_last_is_undone_after_an_error_and_leaves_what_was_so_before() -> None:
    def fail(cb: Any) -> None:
        raise RuntimeError('there')

    learn = conv_learner(ChannelsLast)
    with pytest.raises(RuntimeError, match='there'):
        learn.fit(1, cbs=Callback(after_backward=fail))
    assert not is_channels_last(learn.model[0].weight)
    learn.model.to(memory_format=torch.channels_last)
    learn.fit(1)
    assert is_channels_last(learn.model[0].weight)


def test_frozen_batch_norms_keep_their_statistics() -> None:
    def norms() -> nn.Module:
        torch.manual_seed(4)
        return nn.Sequential(
            nn.Linear(1, 3),
            nn.BatchNorm1d(3).requires_grad_(False),
            nn.BatchNorm1d(3),
            nn.BatchNorm1d(3, affine=False),
            nn.Linear(3, 1),
        )

    def check(cb: Any) -> None:
        modes.append([m.training for m in cb.model[1:4]])
        if cb.iter == 1:
            cb.learn.validate()  # in mid-epoch

    modes: list[list[bool]] = []
    learn = quiet(BnFreeze, model=norms(), n_train=3)
    learn.fit(2, cbs=Callback(after_loss=lambda cb: cb.training and check(cb)))
    assert modes == [[False, True, True]] * 6
    frozen, own, plain = learn.model[1:4]
    assert frozen.num_batches_tracked == 0
    assert frozen.running_mean.eq(0).all()
    assert frozen.running_var.eq(1).all()
    assert own.num_batches_tracked == plain.num_batches_tracked == 6
    frozen.requires_grad_()
    learn.fit(1)
    assert frozen.num_batches_tracked == 3

    thaw = Callback(before_epoch=lambda cb: cb.model[1].requires_grad_(cb.epoch == 1))
    learn = quiet(BnFreeze, model=norms(), n_train=3)
    learn.fit(2, cbs=thaw)
    assert learn.model[1].num_batches_tracked == 3 and learn.bn_freeze._frozen == []


def split_net() -> nn.Module:
    torch.manual_seed(4)
    body = nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False))
    return nn.Sequential(body, nn.Linear(3, 1))


@pytest.mark.parametrize('train_bn', [True, False])
def test_bn_freeze_after_freeze(train_bn: bool) -> None:
    model = split_net()
    learn = quiet(
        BnFreeze,
        model=model,
        n_train=3,
        train_bn=train_bn,
        splitter=lambda m: [list(part.parameters()) for part in m],
    )
    learn.freeze()
    found = nullcontext() if not train_bn else pytest.warns(UserWarning, match='train_bn=False')
    with found:
        learn.fit(1)
    learn.unfreeze()
    learn.fit(1)  # warns of nothing
    quiet(BnFreeze, model=split_net(), n_train=1).fit(1)  # no parameter is frozen
    own, plain = model[0][1], model[0][2]
    # the layer without parameters follows the norm before it
    n = 6 if train_bn else 3
    assert (own.num_batches_tracked, plain.num_batches_tracked) == (n, n)
