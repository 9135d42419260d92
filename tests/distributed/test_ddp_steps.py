"""Steps of several processes equal steps of one process; gradients are sent when a step follows."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from learnkit import SGD, Callback, DataLoaders, GradientAccumulation, GradientClip, Learner, ranger
from learnkit.callbacks import EMA, SAM, GradientValueClip, MixedPrecision
from tests.helpers import own_loops
from tests.helpers.distributing import make_data, make_dls, make_learner, rows, same_rows, weights
from tests.helpers.own_loops import Duel, Pair
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist


class Sent(Callback):
    "Count the messages that the strategy sends in each training batch of an epoch, and after the last."

    order, run_valid = 1000, False

    def before_train(self) -> None:
        self.counts, self._before = [], n_sent()  # type: tuple[list[int], int]

    def after_batch(self) -> None:
        now = n_sent()
        self.counts.append(now - self._before)
        self._before = now

    def after_train(self) -> None:
        self.after_batch()


def n_sent() -> int:
    return int(dist.group.WORLD._get_sequence_number_for_group()) if dist.is_initialized() else 0  # type: ignore[union-attr]


def two_opts(params: Any, lr: float, model: nn.Sequential) -> dict[str, torch.optim.Optimizer]:
    return {
        'body': torch.optim.SGD(model[0].parameters(), lr=lr, momentum=0.9),
        'head': torch.optim.Adam(model[3].parameters(), lr=lr),
    }


def lbfgs(params: Any, lr: float) -> torch.optim.Optimizer:
    # longer ones make roundings grow
    return torch.optim.LBFGS(params, lr=lr, max_iter=4, history_size=2)


def made(
    bs: int, n: int = 101, cbs: Callable[[], list[Callback]] = list, **options: Any
) -> Learner:
    return make_learner(make_dls(n, bs), cbs=cbs(), **options)


def left_out() -> nn.CrossEntropyLoss:
    "A mean over unmasked targets with class weights: batches of 8 samples have different weights."
    return nn.CrossEntropyLoss(torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64), ignore_index=1)


def accumulating() -> list[Callback]:
    return [GradientAccumulation(32), Sent()]  # 4 batches


CASES: dict[str, Callable[[int], Learner]] = {
    'accumulation': partial(made, n=128, cbs=accumulating),
    'pieces and a tail': partial(made, microbatch=3, cbs=accumulating),
    'a tail': partial(made, cbs=accumulating),
    'SAM': partial(made, cbs=lambda: [SAM(0.1)], opt_func=SGD),
    'LBFGS': partial(made, opt_func=lbfgs, lr=0.1),
    'ranger': partial(made, opt_func=ranger),
    'clip': partial(made, cbs=lambda: [GradientClip(0.05)], opt_func=SGD, lr=0.5),
    'clip values': partial(made, cbs=lambda: [GradientValueClip(0.03)], opt_func=SGD, lr=0.5),
    'weighted classes, SAM': partial(
        made, loss_func=left_out(), cbs=lambda: [SAM(0.1)], opt_func=SGD
    ),
    'weighted classes, accumulation': partial(made, loss_func=left_out(), cbs=accumulating),
    'all': partial(
        made,
        opt_func=two_opts,
        microbatch=3,
        cbs=lambda: [GradientAccumulation(24), GradientClip(0.05), EMA(0.9)],
    ),
}
SENT = {  # one message a step; after the epoch five, as no backward pass has averaged the four gradients
    'accumulation': [0, 0, 0, 1] * 4 + [0],
    'a tail': [0, 0, 0, 1] * 3 + [0, 5],
    'pieces and a tail': [0, 0, 0, 1] * 3 + [0, 5],
}


def summarize_run(learn: Learner) -> dict[str, Any]:
    "Return the results of a training as plain values."
    averages = [
        t.reshape(-1)
        for cb in learn.cbs
        if isinstance(cb, EMA)
        for t in cb.state_dict()['averages'].values()
    ]
    return {
        'weights': torch.cat([weights(learn), *averages]),
        'rows': rows(learn),
        'counts': [learn.time.st, learn.time.sp, learn.time.ba],
        'sent': [n for cb in learn.cbs if isinstance(cb, Sent) for n in cb.counts],
    }


def trained(learn: Learner, n_epoch: int = 2, **options: Any) -> dict[str, Any]:
    "Train in this process group, and check that the replicas are equal at the end."
    with learn.distributed('ddp', timeout='20s', **options):
        learn.fit(n_epoch)
        learn.check_replicas()
    return summarize_run(learn)


@pytest.fixture(scope='module')
def ranks() -> list[dict[str, Any]]:
    return run_ranks(lambda rank: {name: trained(make(4)) for name, make in CASES.items()})


@pytest.mark.parametrize('case', CASES)
def test_steps_match_one_process(case: str, ranks: list[dict[str, Any]]) -> None:
    alone = CASES[case](8)
    begun = weights(alone)
    alone.fit(2)
    expected = summarize_run(alone)
    assert (weights(alone) - begun).abs().max() > 0.02
    for got in (r[case] for r in ranks):
        assert got['weights'].shape == expected['weights'].shape
        assert (got['weights'] - expected['weights']).abs().max() < 1e-10
        assert same_rows(got['rows'], expected['rows']) and got['counts'] == expected['counts']


@pytest.mark.parametrize('case', SENT)
def test_gradients_are_sent_when_a_step_follows(case: str, ranks: list[dict[str, Any]]) -> None:
    assert [r[case]['sent'] for r in ranks] == [SENT[case]] * 2


@pytest.mark.parametrize(('wrapper_options', 'n_expected'), [({}, 1), ({'bucket_cap_mb': 1e-4}, 3)])
def test_a_batch_sends_its_gradients_and_its_weight(
    wrapper_options: dict[str, Any], n_expected: int
) -> None:
    def job(rank: int) -> Any:
        sent: list[tuple[int, int]] = []

        def count(cb: Any) -> None:
            if cb.training:
                sent.append((n_sent(), cb.world.control._get_sequence_number_for_group()))

        cbs = Callback(after_batch=count)
        learn = make_learner(make_dls(101, 4), loss_func=left_out(), metrics=None, cbs=cbs)
        with learn.distributed('ddp', timeout='20s', agree_every=100, **wrapper_options):
            learn.fit(2)
        (first, own), (last, own_last) = sent[-12], sent[-2]  # the last batch is followed by others
        return weights(learn), (last - first) / 10, own_last - own

    alone = make_learner(make_dls(101, 8), loss_func=left_out(), metrics=None)
    alone.fit(2)
    for got, n_messages, n_own in run_ranks(job):
        assert (got - weights(alone)).abs().max() < 1e-10
        assert n_own == 10
        assert n_messages == n_expected


class Sided(nn.Module):
    "A model with a layer for the first half of each batch, which the second rank does not call."

    def __init__(self, side: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.side = side  # half of the batch that this rank has; None: both
        self.common, self.extra = nn.Linear(5, 3).double(), nn.Linear(5, 3).double()
        self.register_buffer('sparse', torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out = self.common(x) * self.sparse
        if self.side is None and self.training:
            half = len(x) // 2
            return torch.cat([out[:half] + self.extra(x[:half]), out[half:]])
        return out + self.extra(x) if self.side == 0 else out


class CustomBatch(Learner):
    "A loop that averages gradients right before the step."

    def train_batch(self) -> None:
        self.pred = self.forward(self.model, self.x)
        self.optimize(self.loss_func(self.pred, self.y))


@pytest.mark.parametrize('kind', [Learner, CustomBatch])
def test_a_layer_that_one_rank_does_not_call(kind: type[Learner]) -> None:
    def sided(side: int | None, bs: int) -> Learner:
        learn = make_learner(make_dls(104, bs), opt_func=SGD, metrics=None)
        learn.__class__ = kind
        learn.model = Sided(side)
        return learn

    alone = sided(None, 8)
    begun = weights(alone)
    alone.fit(2)
    assert (weights(alone) - begun)[-18:].abs().min() > 1e-4  # of the layer
    options = {'find_unused_parameters': True} if kind is Learner else {}
    for got in run_ranks(lambda rank: trained(sided(rank, 4), **options)):
        assert (got['weights'] - weights(alone)).abs().max() < 1e-10


# ----------------------------------------------------------------------------------- half precision


def halved(bs: int, cbs: list[Callback]) -> Learner:
    train, valid = ((x.float(), y) for x, y in (make_data(104), make_data(37, seed=2)))
    dls = DataLoaders.from_tensors(train, valid, bs=bs, seed=3, device='cpu')
    learn = make_learner(dls, cbs=cbs, opt_func=SGD, lr=0.1)
    learn.model.float()
    return learn


def test_half_precision_matches_one_process_within_rounding() -> None:
    def overflow(cb: Any) -> None:
        if cb.world.rank == 1 and cb.train_iter == 3:
            cb.learn.loss_grad = cb.loss_grad * float('inf')

    def job(rank: int) -> Any:
        fp16 = MixedPrecision('fp16', init_scale=2.0**10)
        skips = halved(4, [fp16, Callback(before_backward=overflow)])
        return [
            trained(halved(4, [MixedPrecision('bf16')]))['weights'],
            trained(skips)['weights'],
            [fp16.n_skipped, fp16.scaler.get_scale(), skips.time.st],
        ]

    alone, plain = halved(8, [MixedPrecision('bf16')]), halved(8, [])
    begun = weights(alone)
    for learn in (alone, plain):
        learn.fit(2)
    moved = (weights(plain) - begun).norm()
    assert 0 < (weights(alone) - weights(plain)).norm() < 0.02 * moved
    for bf16, fp16, counts in run_ranks(job):
        assert (bf16 - weights(alone)).norm() < 0.02 * moved
        assert 0.5 * moved < (fp16 - begun).norm() < 2 * moved
        assert counts == [1, 2.0**9, 25]  # one overflows, all skip


# ------------------------------------------------------------------------------- loops of one's own


VERBS: dict[str, Callable[[], list[Callback]]] = {
    'plain': list,
    'all': lambda: [GradientAccumulation(24), GradientClip(0.05), EMA(0.9)],
}


def duel(bs: int, name: str) -> Learner:
    train = make_data(101)[:1]
    dls = DataLoaders.from_tensors(train, make_data(37, seed=2)[:1], bs=bs, seed=3, device='cpu')
    learn = Duel(dls, Pair(), None, opt_func=own_loops.two_opts, lr=1e-2, cbs=VERBS[name]())
    learn.logger = lambda row: None
    return learn.remove_cb(learn.progress)


def test_a_loop_with_forward_and_optimize_matches_one_process() -> None:
    def job(rank: int) -> dict[str, Any]:
        return {name: trained(duel(4, name)) for name in VERBS}

    ranks = run_ranks(job)
    for name in VERBS:
        (alone := duel(8, name)).fit(2)
        expected = summarize_run(alone)
        for got in (rank[name] for rank in ranks):
            assert (got['weights'] - expected['weights']).abs().max() < 1e-10, name
            assert got['counts'] == expected['counts'] and same_rows(
                got['rows'], expected['rows']
            ), name
