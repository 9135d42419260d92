"""The exponential moving average of the weights: its numbers, when it is used, and how weights are restored."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from learnkit import (
    Callback,
    CancelEpochException,
    CancelFitException,
    CancelStepException,
    CancelValidException,
    Learner,
    TrainEvalCallback,
)
from learnkit.callbacks.accumulation import GradientAccumulation
from learnkit.callbacks.ema import EMA
from learnkit.core.errors import OptionError, TimeError, WeightsError
from tests.helpers.comparing import same
from tests.helpers.learners import bare_learner

SGD = partial(torch.optim.SGD, momentum=0.9)


def net() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)).double()


def batches(n: int = 4) -> list[tuple[Tensor, Tensor]]:
    gen = torch.Generator().manual_seed(1)
    rand = partial(torch.randn, generator=gen, dtype=torch.float64)
    return [(rand(8, 3), rand(8, 2)) for _ in range(n)]


def learner(model: nn.Module, *cbs: Any, n: int = 4, **kwargs: Any) -> Learner:
    return bare_learner(
        (batches(n), batches(2)), model, F.mse_loss, opt_func=SGD, lr=0.05, cbs=cbs, **kwargs
    )


def averaged_by_torch(model: nn.Module, decay: float, n_epoch: int, every: int = 1) -> nn.Module:
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
    averaged.update_parameters(model)  # the first time, it copies
    opt = SGD(model.parameters(), lr=0.05)
    for n, (x, y) in enumerate(batches() * n_epoch, start=1):
        F.mse_loss(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        if n % every == 0:
            averaged.update_parameters(model)
    return averaged.module


def state(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items()}


@pytest.mark.parametrize('every', [3])
def test_it_is_the_average_that_torch_computes_and_evaluation_uses_it(every: int) -> None:
    learn = learner(model := net(), EMA(0.8, every=every, warmup=None))
    learn.fit(3)
    raw = net()
    expected = averaged_by_torch(raw, 0.8, 3, every)
    assert same(state(model), state(raw))  # the model has its own weights
    with learn.ema.applied() as m:
        got = state(m)
    own = {k: v for k, v in state(expected).items() if not k.endswith('num_batches_tracked')}
    assert same({k: got[k] for k in own}, own)
    expected.eval()
    with torch.no_grad():
        loss = sum(F.mse_loss(expected(x), y).item() for x, y in batches(2)) / 2
    assert learn.history[-1]['valid_loss'] == pytest.approx(loss, abs=1e-12)
    assert learn.validate()[0] == pytest.approx(loss, abs=1e-12)
    preds, _ = learn.get_preds()
    assert torch.equal(preds, torch.cat([expected(x) for x, _ in batches(2)]).detach())
    assert same(state(model), state(raw))


def test_it_counts_steps_and_no_batches() -> None:
    learn = learner(net(), EMA(0.5), GradientAccumulation(16))
    learn.fit(2)
    assert learn.ema.state_dict()['n_steps'] == learn.opt.n_steps == 4

    def skip(cb: Any) -> None:
        if cb.iter % 2:
            raise CancelStepException

    learn = learner(net(), EMA(0.5), Callback(before_step=skip))
    learn.fit(2)
    assert learn.ema.state_dict()['n_updates'] == learn.opt.n_steps == 4


def test_steps_that_a_callback_before_it_cancels_are_not_counted() -> None:
    def skip(cb: Any) -> None:
        if cb.learn.time.ba in (1, 2):
            raise CancelStepException

    learn = learner(net(), Callback(before_step=skip), EMA(0.5))
    learn.fit(2)
    assert learn.ema.state_dict()['n_updates'] == learn.opt.n_steps == 6


def test_half_life_warmup_and_start() -> None:
    assert EMA(half_life='100st').decay ** 100 == pytest.approx(0.5)
    assert EMA(half_life='100ba', every='10st').decay ** 10 == pytest.approx(0.5)
    values: list[float] = []

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.w

    def run(cb: EMA) -> list[float]:
        values.clear()
        data = [(torch.ones(1, 1).double(), torch.ones(1, 1).double())] * 4
        look = Callback(after_step=lambda c: values.append(c.model.w.item()))
        loss_func = lambda p, y: -p.mean()
        cbs = [TrainEvalCallback, look, cb]
        learn = Learner(
            data, One(), loss_func, opt_func=torch.optim.SGD, lr=1.0, default_cbs=False, cbs=cbs
        )
        learn.fit(1)
        with cb.applied() as m:
            return [*values, m.w.item()]

    *weights, average = run(EMA(0.999, warmup=1.0))  # decay 0, 1/2, 2/3, 3/4: the plain mean
    assert weights == [1, 2, 3, 4] and average == pytest.approx(2.5)
    # 0, then the cap
    assert run(EMA(0.5, warmup=9.0))[-1] == pytest.approx((1 / 2 + 2 / 2) / 4 + 3 / 4 + 4 / 2)
    # timm's power form is the default
    shares, mean = [0, 1 - 2 ** (-2 / 3), 1 - 3 ** (-2 / 3), 1 - 4 ** (-2 / 3)], 0.0
    for share, weight in zip(shares, weights, strict=True):
        mean = share * mean + (1 - share) * weight
    assert run(EMA())[-1] == pytest.approx(mean)
    assert run(EMA(0.5, start=2, warmup=None))[-1] == pytest.approx((2 + 3) / 4 + 4 / 2)
    assert run(EMA(0.5, start='0.5dur', warmup=None))[-1] == pytest.approx((3 + 4) / 2)
    assert run(EMA(0.5, warmup=None))[-1] == pytest.approx(1 / 16 + 2 / 8 + 3 / 4 + 4 / 2)


EXITS: list[type[BaseException]] = [
    CancelValidException,
    CancelEpochException,
    CancelFitException,
    RuntimeError,
]


@pytest.mark.parametrize('error', EXITS)
@pytest.mark.parametrize('event', ['before_validate', 'after_loss'])
def test_whatever_ends_an_evaluation_the_weights_are_restored(
    error: type[BaseException], event: str
) -> None:
    seen: list[Any] = []

    def fail(cb: Any) -> None:
        if not cb.training or event == 'before_validate':
            raise error

    learn = learner(net(), EMA(0.5))
    cbs = [Callback(**{event: fail}), Callback(after_epoch=lambda cb: seen.append(state(cb.model)))]
    if error in EXITS[:3]:
        learn.fit(1, cbs=cbs)
    else:
        with pytest.raises(error):
            learn.fit(1, cbs=cbs)
    plain = learner(net())
    plain.fit(1)
    expected = state(plain.model)
    assert all(same(s, expected) for s in (*seen, state(learn.model)))
    learn.fit(1)
    assert learn.ema.state_dict()['n_steps'] == 8 and learn.ema._raw is None


def test_it_may_be_used_by_hand_and_kept_for_good() -> None:
    learn = learner(model := net(), EMA(0.5))
    learn.fit(1)
    raw = state(model)
    with learn.ema.applied():
        with learn.ema.applied():
            average = state(model)
        losses = learn.validate()
        assert same(state(model), average)
    assert same(state(model), raw) and not same(raw, average)
    assert learn.validate() == losses
    assert learn.ema.copy_to() is model and same(state(model), average)
    assert learn.validate() == losses


def test_tied_frozen_and_half_weights_and_masks() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3, bias=False)
            self.b = self.a
            self.frozen = nn.Linear(3, 3).requires_grad_(False)
            self.low = nn.Linear(3, 2).bfloat16()
            self.register_buffer('mask', torch.tensor([0.0, -torch.inf]))
            self.register_buffer('cache', torch.zeros(2), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.low(self.frozen(self.b(self.a(x.float()))).bfloat16()).double()

    learn = learner(model := Tied(), EMA(0.9))
    learn.fit(2)
    averages = learn.ema.state_dict()['averages']
    names = 'a.weight', 'low.weight', 'low.bias'
    assert {k: v.dtype for k, v in averages.items()} == dict.fromkeys(names, torch.float32)
    raw = state(model)
    learn.validate()
    assert same(state(model), raw)
    model.frozen.requires_grad_()
    learn.fit(1)
    assert {'frozen.weight', 'frozen.bias'} < learn.ema.state_dict()['averages'].keys()


def test_a_replaced_layer_starts_over_and_the_rest_continues() -> None:
    learn = learner(model := net(), EMA(0.99))
    learn.fit(1)
    kept = learn.ema.state_dict()['averages']['0.weight'].clone()
    model[3] = nn.Linear(6, 2).double()
    new = model[3].weight.detach().clone()
    with learn.ema.applied():
        assert torch.equal(model[3].weight, new) and torch.equal(model[0].weight, kept)
    learn.model = deepcopy(net())
    with learn.ema.applied() as m:
        assert same(state(m), state(net()))
    assert learn.ema.state_dict()['n_updates'] == 0


def test_for_another_model_average_and_counts_restart() -> None:
    for start, validates in ((0, False), ('6st', False), ('6st', True)):
        used, fresh = EMA(0.99, every=2, start=start), EMA(0.99, every=2, start=start)
        learner(net(), used, n=5).fit(2)
        second, alone = learner(net(), used), learner(net(), fresh)
        if validates:
            second.validate()  # which uses no average of the first model
        for learn in (second, alone):
            learn.fit(3)
        a, b = used.state_dict(), fresh.state_dict()
        assert same(a.pop('averages'), b.pop('averages')) and a == b
        losses = [[row['valid_loss'] for row in learn.history] for learn in (second, alone)]
        assert losses[0] == losses[1]
        second.model = net()
        second.fit(1)
        assert used.state_dict()['n_steps'] == 4  # the steps of the new model


def test_its_state_continues_in_another_process_and_refuses_another_model() -> None:
    whole = learner(net(), EMA(0.7, every=3, warmup=0.5))
    whole.fit(1)
    sd = deepcopy(whole.ema.state_dict())
    weights = state(whole.model)
    opt = deepcopy(whole.opt.state_dict())
    whole.fit(1)
    part = learner(net(), EMA(0.7, every=3, warmup=0.5))
    part.model.load_state_dict(weights)
    part.create_opt()
    part.opt.load_state_dict(opt)
    part.ema.load_state_dict(sd)
    part.fit(1)
    a, b = whole.ema.state_dict(), part.ema.state_dict()
    assert same(a.pop('averages'), b.pop('averages')) and a == b == {'n_steps': 8, 'n_updates': 2}

    before = part.ema.state_dict()
    sd['averages']['0.weight'] = torch.zeros(2, 2)
    with pytest.raises(WeightsError, match=r'0.weight: \(2, 2\) for \(6, 3\)'):
        part.ema.load_state_dict(sd)
    assert same(part.ema.state_dict()['averages'], before['averages'])
    lone = EMA()
    lone.load_state_dict(sd)
    with pytest.raises(WeightsError, match='another model'):
        learner(net(), lone).fit(1)


@pytest.mark.parametrize(
    'options',
    [
        {'decay': 1},
        {'every': '2ep'},
        {'half_life': '1ep'},
    ],
    ids=str,
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises((OptionError, TimeError), match=f'EMA\\({next(iter(options))}='):
        EMA(**options)


def test_a_second_average_is_refused() -> None:
    with pytest.raises(OptionError, match=r'EMA.* already'):
        learner(net(), EMA(0.5), EMA(0.9)).fit(1)


# -- buffers ---------------------------------------------------------------------------------------


class Watching(nn.Module):
    "Keep a maximum, a count and a chosen unit of the inputs in buffers; `forward` replaces one of them."

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 2).double()
        self.register_buffer('highest', torch.zeros((), dtype=torch.float64))
        self.register_buffer('count', torch.zeros(()))
        self.register_buffer('chosen', torch.tensor([1.0, 0.0, 0.0]).double())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.highest = torch.maximum(self.highest, x.max())
            self.count += 1
            self.chosen = self.chosen.roll(1)
        return self.lin(x)


def test_other_buffers_keep_their_current_values_under_the_average() -> None:
    learn = learner(model := Watching(), EMA(0.9))
    learn.fit(2)
    highest = max(x.max() for x, _ in batches())
    with learn.ema.applied():
        found = model.highest, model.count, model.chosen
    assert same(found, (highest, torch.tensor(8.0), torch.tensor([0.0, 0.0, 1.0]).double()))


def test_buffers_by_name_are_averaged() -> None:
    learn = learner(model := Watching(), EMA(0.9, warmup=None, buffers='cou*'))
    learn.fit(2)
    mean = 0.0
    for count in range(1, 9):
        mean = 0.9 * mean + 0.1 * count
    with learn.ema.applied():
        assert model.count.item() == pytest.approx(mean, rel=1e-6)
    assert model.count == 8
    learn = learner(Watching(), EMA(buffers=['chosen', 'codebook']))
    with pytest.raises(OptionError, match=r"'codebook'.*highest, count, chosen"):
        learn.fit(1)


def test_averaged_buffers_may_be_replaced_by_the_model() -> None:
    learn = learner(model := Watching(), EMA(0.5, warmup=None, buffers=['highest']))
    learn.fit(1)
    highest = torch.stack([x.max() for x, _ in batches()]).cummax(0).values
    mean = torch.tensor(0.0)
    for value in highest:
        mean = 0.5 * mean + 0.5 * value
    with learn.ema.applied():
        assert model.highest.item() == pytest.approx(mean.item(), abs=1e-12)
    assert model.highest == highest[-1]


@pytest.mark.parametrize('form', [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_a_spectral_norm_is_1_under_the_average(form: Any) -> None:
    torch.manual_seed(4)
    layer = nn.Linear(3, 6)
    nn.init.orthogonal_(layer.weight)  # so the vector of the largest singular value turns
    model = nn.Sequential(form(layer, n_power_iterations=5), nn.Linear(6, 2)).double()
    learn = learner(model, EMA(0.97, warmup=None), n=8)
    learn.fit(4)
    with learn.ema.applied():
        model.eval()(torch.zeros(1, 3).double())  # the hook computes the weight
        norm = torch.linalg.matrix_norm(model[0].weight, 2)
    assert norm.item() == pytest.approx(1, abs=0.02)
