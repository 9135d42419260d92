"""Loss scaling for fp16 on the CPU: the numbers of a plain loop with torch's scaler, also after cancels."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnkit import (
    Callback,
    CancelBackwardException,
    Learner,
    ModelError,
    OptimizerError,
)
from learnkit.callbacks.mixed_precision import MixedPrecision
from learnkit.core.errors import OptionError
from tests.helpers.comparing import same
from tests.helpers.learners import quiet_learner

Batches = list[tuple[Tensor, Tensor]]
Maker = Callable[..., Any]

# overflows at first, and grows soon after: both happen within ten steps
SCALER = {'init_scale': 2.0**22, 'growth_factor': 4.0, 'backoff_factor': 0.25, 'growth_interval': 3}
SGD = partial(torch.optim.SGD, momentum=0.9)


def data(n: int = 10) -> Batches:
    gen = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 6, generator=gen), torch.randint(3, (8,), generator=gen)) for _ in range(n)
    ]


def net() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def state(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def learner(*cbs: Any, batches: Batches | None = None, **kwargs: Any) -> Learner:
    options = {'opt_func': SGD, 'lr': 0.1, 'wd_bn_bias': True, **kwargs}
    dls = data() if batches is None else batches
    return quiet_learner(dls, net(), nn.CrossEntropyLoss(), cbs=list(cbs), **options)


def after(order: float, **handlers: Any) -> Callback:
    cb = Callback(**handlers)
    cb.order = order
    return cb


class Loop:
    "Train in a plain loop with autocast and torch's scaler."

    def __init__(self, *makers: Maker, **scaler: Any) -> None:
        self.model = net()
        self.scaler = torch.amp.GradScaler('cpu', **{**SCALER, **scaler})
        params = list(self.model.parameters())
        parts = [params] if len(makers) < 2 else [params[:2], params[2:]]
        self.opts = [make(part, lr=0.1) for make, part in zip(makers or [SGD], parts, strict=True)]
        self.scales: list[float] = []

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast('cpu', dtype=torch.float16):
            return F.cross_entropy(self.model(x).float(), y)

    def backward(self, *batches: tuple[Tensor, Tensor]) -> None:
        for b in batches:
            self.scaler.scale(self.loss(*b)).backward()

    def step(self, clip: float | None = None) -> None:
        for opt in self.opts:
            self.scaler.unscale_(opt)
        if clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        finite = all(
            v.item() == 0 for o in self.opts for v in self.scaler._found_inf_per_device(o).values()
        )
        for opt in self.opts:
            if finite:
                self.scaler.step(opt)  # several optimizers step together or not at all
        self.update()
        self.zero_grad()

    def update(self) -> None:
        self.scaler.update()
        self.scales.append(self.scaler.get_scale())

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def equals(self, learn: Learner) -> bool:
        return (
            same(state(self.model), state(learn.model))
            and self.scaler.state_dict() == learn.mixed_precision.scaler.state_dict()
        )


# -- against torch's scaler in a plain loop --------------------------------------------------------

OPTS: dict[str, tuple[Maker, ...]] = {
    'sgd': (SGD,),
    'adam': (torch.optim.Adam,),
    'fused adam': (partial(torch.optim.Adam, fused=True),),
    'two': (SGD, partial(torch.optim.AdamW, fused=True)),
}


@pytest.mark.parametrize('makers', OPTS.values(), ids=OPTS)
def test_weights_and_scale_match_a_plain_loop_bit_for_bit(makers: tuple[Maker, ...]) -> None:
    hand, scales = Loop(*makers), []
    for b in data() * 2:
        hand.backward(b)
        hand.step()
    assert any(a > b for a, b in zip(hand.scales, hand.scales[1:], strict=False)), 'no overflow'
    assert any(a < b for a, b in zip(hand.scales, hand.scales[1:], strict=False)), 'no growth'

    def two(params: list[Any], lr: float) -> list[Any]:
        return [
            make(part, lr=lr) for make, part in zip(makers, (params[:2], params[2:]), strict=True)
        ]

    learn = learner(
        MixedPrecision('fp16', **SCALER), opt_func=makers[0] if len(makers) == 1 else two
    )
    watcher = Callback(after_step=lambda cb: scales.append(cb.mixed_precision.scaler.get_scale()))
    learn.add_cb(watcher)
    learn.fit(2)
    skipped = sum(
        a > b for a, b in zip([SCALER['init_scale'], *hand.scales], hand.scales, strict=False)
    )
    assert hand.equals(learn) and scales == hand.scales
    assert learn.mixed_precision.n_skipped == skipped > 1
    assert learn.time.st == learn.opt.n_steps == 20 - skipped


class Clip(Callback):
    "Clip right after mixed precision, and record the norms."

    order, run_valid = MixedPrecision.order + 1, False

    def __init__(self) -> None:
        self.norms: list[float] = []

    def before_step(self) -> None:
        self.norms.append(nn.utils.clip_grad_norm_(self.learn.model.parameters(), 0.1).item())


def test_gradients_are_unscaled_once_before_they_are_clipped_and_never_infinite_then() -> None:
    hand, learn = Loop(), learner(MixedPrecision('fp16', **SCALER), Clip)
    for b in data() * 2:
        hand.backward(b)
        hand.step(clip=0.1)
    learn.fit(2)
    assert hand.equals(learn) and len(learn.clip.norms) == 20 - learn.mixed_precision.n_skipped
    assert all(0 < norm < 10 for norm in learn.clip.norms)


# -- what others cancel ----------------------------------------------------------------------------


def cancelling(
    event: str, order: float, error: type[Exception], batches: tuple[int, ...] = (4, 7)
) -> Callback:
    def cancel(cb: Callback) -> None:
        if cb.training and cb.iter in batches:
            raise error

    return after(order, **{event: cancel})


@pytest.mark.parametrize('order', [0, 20])
def test_a_cancelled_backward_pass_takes_no_step_and_leaves_the_scale(order: float) -> None:
    hand = Loop()
    for i, b in enumerate(data()):
        if i in (4, 7):
            continue
        hand.backward(b)
        hand.step()
    learn = learner(
        MixedPrecision('fp16', **SCALER),
        cancelling('before_backward', order, CancelBackwardException),
    )
    learn.fit(1)
    assert hand.equals(learn)


# -- bad input -------------------------------------------------------------------------------------

BAD = [
    ({'amp_mode': 'fp32'}, "amp_mode='fp32': pass 'fp16' or 'bf16'"),
    ({'amp_mode': 'bf161'}, 'Did you mean `bf16`'),
]


@pytest.mark.parametrize(('options', 'message'), BAD)
def test_options_that_make_no_scaler_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        MixedPrecision(**options)


def test_weights_in_fp16_are_refused_before_anything_changes() -> None:
    learn = learner(MixedPrecision('fp16'))
    learn.model.half()
    before = state(learn.model)
    with pytest.raises(ModelError, match=r'weights in float16.*model.float\(\)'):
        learn.fit(1)
    assert same(state(learn.model), before)


def test_an_optimizer_with_closure_is_refused_with_fp16() -> None:
    learn = learner(MixedPrecision('fp16'), opt_func=torch.optim.LBFGS)
    before = state(learn.model)
    with pytest.raises(OptimizerError, match=r'several times a step.*bf16'):
        learn.fit(1)
    assert same(state(learn.model), before)


def test_another_model_starts_with_a_new_scale() -> None:
    used, fresh = MixedPrecision('fp16', **SCALER), MixedPrecision('fp16', **SCALER)
    learner(used).fit(1)
    assert used.scaler.get_scale() != SCALER['init_scale'] and used.n_skipped
    second, alone = learner(used), learner(fresh)
    for learn in (second, alone):
        learn.fit(1)
    assert used.scaler.state_dict() == fresh.scaler.state_dict()
    assert used.n_skipped == fresh.n_skipped
    assert same(state(second.model), state(alone.model))
    loop = Loop()
    for batch in data():
        loop.backward(batch)
        loop.step()
    assert loop.equals(second)
    scale, n_skipped = used.scaler.get_scale(), used.n_skipped
    second.fit(0)  # a further fit of the same model continues
    assert used.scaler.get_scale() == scale and used.n_skipped == n_skipped


def test_a_loaded_scale_is_of_the_model_of_its_learner() -> None:
    first, second = MixedPrecision('fp16', **SCALER), MixedPrecision('fp16', **SCALER)
    learner(first).fit(1)
    second.load_state_dict(first.state_dict())  # of the next fit, as there is no Learner yet
    learn = learner(second)
    learn.fit(0)
    assert second.state_dict() == first.state_dict()
    second.load_state_dict(first.state_dict())
    other = learner(second)
    other.fit(0)
    assert second.scaler.get_scale() == SCALER['init_scale']
    another = learner(second)
    second.load_state_dict(first.state_dict())
    another.fit(0)
    assert second.state_dict() == first.state_dict()


def test_a_loss_that_stays_infinite_is_reported() -> None:
    spoil = Callback(before_batch=lambda cb: cb.xb[0].fill_(float('inf')))
    learn = learner(MixedPrecision('fp16', init_scale=2.0), spoil)
    before = state(learn.model)
    with pytest.warns(UserWarning, match=r'not finite .* 0\.5'):
        learn.fit(1)
    assert same(state(learn.model), before) and learn.mixed_precision.n_skipped == 10
