"""Autocast of the forward pass: the numbers of a plain loop, float32 for callbacks, and no autocast elsewhere."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fastcore.basics import noop
from torch import Tensor, nn

from learnkit import (
    Callback,
    CrossEntropyLossFlat,
    DataLoaders,
    Learner,
    Recorder,
    TrainEvalCallback,
    accuracy,
)
from learnkit.callbacks.mixed_precision import AMPMode, MixedPrecision
from tests.helpers.comparing import same
from tests.helpers.compiling import needs_whole_step
from tests.helpers.learners import quiet_learner

pytestmark = pytest.mark.filterwarnings('ignore:microbatch=.* on its own')

Batches = list[tuple[Tensor, Tensor]]


def data(n: int = 4, seed: int = 1) -> Batches:
    gen = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(8, 6, generator=gen), torch.randint(3, (8,), generator=gen)) for _ in range(n)
    ]


def net() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def learner(
    *cbs: Any, model: nn.Module | None = None, loss_func: Any = None, **kwargs: Any
) -> Learner:
    options = {'opt_func': partial(torch.optim.SGD, momentum=0.9), 'lr': 0.1, **kwargs}
    dls = (data(), data(2, seed=2))
    return quiet_learner(
        dls, model or net(), loss_func or nn.CrossEntropyLoss(), cbs=list(cbs), **options
    )


def state(model: nn.Module) -> list[Tensor]:
    return [t.detach().clone() for t in model.state_dict().values()]


def is_on() -> bool:
    return torch.is_autocast_enabled('cpu')


# -- numbers ---------------------------------------------------------------------------------------


def test_bf16_is_a_plain_autocast_loop_bit_for_bit() -> None:
    model, losses = net(), []
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        model.train()
        for x, y in data():
            with torch.autocast('cpu', dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x).float(), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
        model.eval()
        with torch.no_grad(), torch.autocast('cpu', dtype=torch.bfloat16):
            losses.append(sum(F.cross_entropy(model(x).float(), y) for x, y in data(2, seed=2)) / 2)

    learn = learner(MixedPrecision('bf16'))
    learn.fit(2)
    assert same(state(learn.model), state(model))
    expected = [loss.item() for loss in losses]
    assert [row['valid_loss'] for row in learn.history] == pytest.approx(expected, rel=1e-6)


# -- what others see -------------------------------------------------------------------------------


class Seen(Callback):
    "Record the dtype of the predictions."

    def __init__(self, order: float) -> None:
        self.order, self.types = order, set[Any]()

    def after_pred(self) -> None:
        self.types.add(self.learn.pred.dtype)


@pytest.mark.parametrize(
    ('mode', 'dtype'), [('bf16', torch.bfloat16), (AMPMode.FP16, torch.float16)]
)
def test_the_model_gives_half_and_what_comes_after_sees_float32(
    mode: str, dtype: torch.dtype
) -> None:
    first, later, types = Seen(9), Seen(10), set()

    def loss_func(pred: Tensor, y: Tensor) -> Tensor:
        # a product in the loss is computed in half precision
        types.update([pred.dtype, (pred @ pred.T).dtype])
        return F.cross_entropy(pred, y)

    def metric(pred: Tensor, y: Tensor) -> Tensor:
        types.add(pred.dtype)
        return pred.mean()

    learner(MixedPrecision(mode), first, later, loss_func=loss_func, metrics=metric).fit(1)
    assert first.types == {dtype} and later.types == {torch.float32}
    assert types == {torch.float32, dtype}


class SeenByEvent(Callback):
    "Record the dtypes of the predictions by event."

    def __init__(self, order: float) -> None:
        self.order = order
        self.types: dict[str, Any] = {}

    def run_event(self, event: str) -> None:
        pred = getattr(self.learn, 'pred', None)
        if pred is not None:
            self.types[f'{self.learn.phase} {event}'] = pred.dtype


@pytest.mark.parametrize('loss_func', [nn.CrossEntropyLoss(), CrossEntropyLossFlat()])
def test_cross_entropy_gets_the_scores_as_they_are_and_what_comes_after_sees_float32(
    loss_func: Any,
) -> None:
    seen, first = SeenByEvent(11), SeenByEvent(0)
    learn = learner(MixedPrecision('bf16'), seen, first, loss_func=loss_func)
    model = copy.deepcopy(learn.model)
    learn.fit(1)
    half = {event for event, dtype in seen.types.items() if dtype == torch.bfloat16}
    assert half == {'train after_pred'}
    assert seen.types['train after_loss'] == seen.types['valid after_pred'] == torch.float32
    assert first.types['train after_loss'] == torch.float32

    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in data():
        with torch.autocast('cpu', dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
    assert same(state(learn.model), state(model))


@pytest.mark.parametrize('microbatch', [None, 4])
def test_metrics_of_training_batches_get_float32(microbatch: int | None) -> None:
    def metric(pred: Tensor, y: Tensor) -> float:
        types.add(pred.dtype)
        return float((pred.detach().numpy().argmax(1) == y.numpy()).mean())

    types: set[torch.dtype] = set()
    cbs = [TrainEvalCallback, Recorder(train_metrics=True), MixedPrecision('bf16')]
    learner(*cbs, metrics=metric, default_cbs=False, microbatch=microbatch).fit(1)
    assert types == {torch.float32}


class Penalized(nn.CrossEntropyLoss):
    "Cross-entropy with a term of the user's own, which half precision would round."

    def forward(self, pred: Tensor, y: Tensor) -> Tensor:
        assert pred.dtype == torch.float32
        return super().forward(pred, y) + pred.square().mean()


def test_a_loss_that_extends_torchs_gets_float32() -> None:
    learn = learner(MixedPrecision('bf16'), loss_func=Penalized())
    learn.fit(1)
    assert learn.train_iter == 4


class CallsTheModel(Learner):
    "Trains without `self.forward`, so that no prediction is there."

    def train_batch(self) -> None:
        self.optimize(F.cross_entropy(self.model(self.x), self.y))


def test_a_loop_that_calls_the_model_itself_trains_too() -> None:
    dls = DataLoaders(data(), data(2, seed=2))
    learn = CallsTheModel(dls, net(), nn.CrossEntropyLoss(), cbs=MixedPrecision, metrics=accuracy)
    learn.logger = noop
    with pytest.warns(UserWarning, match='MixedPrecision waits for after_pred'):
        learn.fit(1)
    assert learn.train_iter == 4 and learn.history[0]['accuracy'] == learn.validate()[1]


class OwnLoss(nn.Module):
    "Computes its loss in `forward`, in half precision."

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {'loss': self.layer(x)[0, 0] ** 2}


def test_a_loss_in_half_precision_is_reported_in_float32() -> None:
    types: list[Any] = []
    note = Callback(after_batch=lambda cb: types.append((cb.loss.dtype, cb.loss_grad.dtype)))
    learn = quiet_learner(
        [x for x, _ in data()], OwnLoss(), cbs=[MixedPrecision('bf16'), note], lr=0.01
    )
    before = state(learn.model)
    learn.fit(1)
    assert types == [(torch.float32, torch.float32)] * 4 and not same(state(learn.model), before)


# -- autocast is on for the forward pass, and off everywhere else ----------------------------------


def test_autocast_is_on_from_the_model_to_the_loss_alone() -> None:
    seen: dict[str, set[bool]] = {}

    class Everywhere(Callback):
        def run_event(self, event: str) -> None:
            seen.setdefault(event, set()).add(is_on())

    learner(MixedPrecision('bf16'), Everywhere).fit(2)
    assert {event for event, on in seen.items() if True in on} == {'after_pred'}
    assert seen['after_pred'] == {True} and len(seen) > 20 and not is_on()


@pytest.mark.parametrize('where', ['model', 'loss'])
def test_autocast_is_left_when_the_model_or_the_loss_raises(where: str) -> None:
    def fail(*args: Any) -> Tensor:
        raise ValueError('here')

    learn = learner(MixedPrecision('bf16'), loss_func=fail if where == 'loss' else None)
    if where == 'model':
        learn.model[0].register_forward_hook(fail)
    with pytest.raises(ValueError, match='here'):
        learn.fit(1)
    assert not is_on()


# -- with the rest ---------------------------------------------------------------------------------


def test_the_methods_add_replace_and_remove() -> None:
    learn = learner()
    assert learn.to_bf16() is learn and learn.to_bf16() is learn
    assert [cb.amp_mode for cb in learn.cbs if isinstance(cb, MixedPrecision)] == ['bf16']
    assert learn.to_fp16(init_scale=8.0, growth_interval=5) is learn
    [cb] = [cb for cb in learn.cbs if isinstance(cb, MixedPrecision)]
    assert cb is learn.mixed_precision and cb.amp_mode is AMPMode.FP16 and cb.scales
    assert cb.scaler.get_scale() == 8 and cb.scaler.get_growth_interval() == 5
    assert learn.to_fp32() is learn and learn.to_fp32() is learn
    assert not any(isinstance(cb, MixedPrecision) for cb in learn.cbs)

    plain = learner()
    learn.fit(1)
    plain.fit(1)
    assert same(state(learn.model), state(plain.model))


@needs_whole_step
def test_the_ordinary_step_of_the_optimizer_follows_compiled_passes_with_a_scaled_loss() -> None:
    learn = learner(MixedPrecision('fp16')).compile(step=True, backend='eager')
    learn.fit(1)
    found = learn.explain_step()
    assert found.startswith('Forward and backward run compiled')
    assert 'MixedPrecision.before_step' in found
    plain = learner(MixedPrecision('fp16'))
    plain.fit(1)
    assert same(state(learn.model), state(plain.model))


# -- on a GPU --------------------------------------------------------------------------------------


def on_gpu(*cbs: Any) -> Learner:
    learn = learner(*cbs, model=net().cuda())
    learn.dls.device = torch.device('cuda')
    return learn


@pytest.mark.cuda
@pytest.mark.parametrize('mode', ['bf16', 'fp16'])
def test_training_on_a_gpu_learns_and_leaves_tf32_alone(mode: str) -> None:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    learn = on_gpu(MixedPrecision(mode))
    learn.fit(10)
    assert learn.history[-1]['train_loss'] < 0.8 * learn.history[0]['train_loss']
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before
    assert not torch.is_autocast_enabled('cuda') and learn.get_preds()[0].dtype == torch.float32
