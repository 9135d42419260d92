"""Roles of parameters and buffers: weight decay, averages, frozen norm layers, a second run."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

from learnkit import EMA, SGD, BnFreeze, DataLoaders, Learner
from learnkit.callbacks import ActivationCheckpointing
from tests.helpers.learners import quiet_learner
from tests.silent.cases import case

row = partial(case, 'roles')


def quiet(model: nn.Module, *cbs: Any, n: int = 4, **options: Any) -> Learner:
    "Return a Learner of random vectors in double precision, with `n` batches of 8."
    gen = torch.Generator().manual_seed(1)
    x, y = torch.randn(8 * n, 3, generator=gen), torch.randn(8 * n, 2, generator=gen)
    dls = DataLoaders.from_tensors((x.double(), y.double()), bs=8, shuffle=False, device='cpu')
    options = {'opt_func': SGD, 'lr': 0.05, **options}
    learn = quiet_learner(dls, model.double(), nn.MSELoss(), cbs=list(cbs), **options)
    return learn.no_bar().__enter__()


def shares_after_decay(model: nn.Module, opt_func: Any, **options: Any) -> dict[str, float]:
    "Return how much of each parameter is left after a step with zero gradients, by name."
    learn = Learner([torch.zeros(1)], model, lambda *_: None, opt_func, lr=0.1, **options)
    learn.create_opt()
    learn.opt.set_hypers(wd=0.2)
    for p in model.parameters():
        p.data.fill_(1)
        p.grad = torch.zeros_like(p)
    learn.opt.step()
    return {name: p.mean().item() for name, p in model.named_parameters()}


def compare_decay(model: nn.Module, spared: list[str], opt_func: Any = SGD, **options: Any) -> Any:
    left = shares_after_decay(model, opt_func, **options)
    by_hand = {name: 1.0 if name in spared else 1 - 0.1 * 0.2 for name in left}
    return left, by_hand


@row('in_proj_bias of attention', old='0.98 of it left after a step, for 1')
def attention() -> Any:
    return compare_decay(nn.MultiheadAttention(4, 2), ['in_proj_bias', 'out_proj.bias'])


class OwnNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.extra_bias = nn.Parameter(torch.ones(2, 3))


@row("a norm layer of one's own, a bare bias of two dimensions", old='both 0.98')
def own_norm() -> Any:
    return compare_decay(OwnNorm(), ['weight', 'extra_bias'])


@row('the same with partial(AdamW), wd_bn_bias=False', old='both 0.98')
def own_norm_adamw() -> Any:
    opt_func = partial(torch.optim.AdamW, betas=(0.8, 0.9))
    return compare_decay(OwnNorm(), ['weight', 'extra_bias'], opt_func, wd_bn_bias=False)


@row('LlamaRMSNorm, T5LayerNorm', old='all 0.98')
def norms_of_transformers() -> Any:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    model = nn.Sequential(LlamaRMSNorm(6), T5LayerNorm(6), nn.Linear(6, 6))
    return compare_decay(model, ['0.weight', '1.weight', '2.bias'])


@row('slopes of PReLU and a scalar scale', old='both 0.98')
def slopes() -> Any:
    model = nn.Sequential(nn.PReLU(3), nn.Linear(3, 2))
    model.register_parameter('scale', nn.Parameter(torch.ones(())))
    return compare_decay(model, ['scale', '0.weight', '1.bias'])


# -- averages --------------------------------------------------------------------------------------


class Watching(nn.Module):
    "Keep a maximum, a count and a chosen unit of the inputs."

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 2)
        self.register_buffer('highest', torch.zeros(()))
        self.register_buffer('count', torch.zeros(()))
        self.register_buffer('chosen', torch.tensor([1.0, 0.0, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.highest.copy_(torch.maximum(self.highest, x.max()))
            self.count += 1
            self.chosen.copy_(self.chosen.roll(1))
        return self.lin(x)


@row(
    'running maximum, counter and one-hot buffer under the average of EMA',
    old='3.03013, 220.591 and [0.333, 0.342, 0.325]',
)
def buffers_under_the_average() -> Any:
    learn = quiet(model := Watching(), EMA(0.99), n=32)
    learn.fit(8)
    with learn.ema.applied():
        found = [model.highest.item(), model.count.item(), model.chosen.tolist()]
    x, _ = learn.dls.train.tensors
    return [found[0], found[1], *found[2]], [x.max().item(), 256.0, 0.0, 1.0, 0.0]


def norm_under_the_average(form: Callable[..., Any]) -> tuple[float, float]:
    torch.manual_seed(4)
    layer = nn.Linear(3, 6)
    nn.init.orthogonal_(layer.weight)  # so the vector of the largest singular value turns
    model = nn.Sequential(form(layer, n_power_iterations=5), nn.Linear(6, 2))
    learn = quiet(model, EMA(0.97, warmup=None), n=8, lr=0.2)
    learn.fit(4)
    with learn.ema.applied(), torch.no_grad():
        model.eval()(torch.zeros(1, 3).double())  # a hook computes the weight
        return torch.linalg.matrix_norm(model[0].weight, 2).item(), 1.0


@row('spectral norm under the average', old='1.2965', tolerance=0.02)
def spectral_norm_under_the_average() -> Any:
    return norm_under_the_average(parametrizations.spectral_norm)


@row('spectral norm by a hook under the average', old='2.54655', tolerance=0.02)
def hooked_spectral_norm_under_the_average() -> Any:
    return norm_under_the_average(spectral_norm)


# -- frozen norm layers ----------------------------------------------------------------------------


def statistics_after_freezing(layer: Any) -> list[float]:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(3, 8), nn.Unflatten(1, (4, 2)), layer, nn.Flatten())
    split = lambda m: [list(part.parameters()) for part in m]
    model = nn.Sequential(body, nn.Linear(8, 2))
    learn = quiet(model, BnFreeze(), splitter=split, train_bn=False)
    learn.freeze()
    learn.fit(1)
    return layer.running_mean.tolist()


@row('running mean of a frozen BatchNorm1d(affine=False)', old='[0.026, -0.003, -0.067, 0.02]')
def plain_batch_norm() -> Any:
    return statistics_after_freezing(nn.BatchNorm1d(4, affine=False)), [0.0] * 4


@row('running mean of a frozen InstanceNorm1d', old='[0.026, -0.003, -0.067, 0.02]')
def instance_norm() -> Any:
    layer = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
    return statistics_after_freezing(layer), [0.0] * 4


@row('freeze() with BnFreeze, and without train_bn=False', old='silent: the statistics change')
def nothing_is_frozen() -> Any:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        split = lambda m: [list(part.parameters()) for part in m]
        learn = quiet(nn.Sequential(body, nn.Linear(4, 2)), BnFreeze(), splitter=split)
        learn.freeze()
        learn.fit(1)
    return ['train_bn=False' in str(w.message) for w in seen], [True]


# -- a second run of modules -----------------------------------------------------------------------


def gap_of_checkpointing(block: Callable[[], nn.Module], read: Callable[..., Any]) -> Any:
    "Return a quantity of the model after 16 steps with `ActivationCheckpointing`, and without any callback."
    found = []
    for cbs in ([ActivationCheckpointing(nn.Sequential)], []):
        torch.manual_seed(0)
        model = nn.ModuleDict({'block': nn.Sequential(block()), 'head': nn.Linear(4, 2)})
        model.forward = lambda x, m=model: m['head'](m['block'](x))  # type: ignore[method-assign]
        quiet(model, *cbs, n=8, lr=0.5).fit(2)
        found.append(read(model))
    return tuple(found)


@row(
    'weights with activation checkpointing of a spectral norm',
    old='up to 0.007 apart',
    tolerance=1e-12,
)
def checkpointed_spectral_norm() -> Any:
    make = lambda: parametrizations.spectral_norm(nn.Linear(3, 4))
    return gap_of_checkpointing(make, lambda m: m['head'].weight.flatten().tolist())


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 4)
        self.register_buffer('count', torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += self.training
        return super().forward(x)


@row('calls that a checkpointed module counts', old='32')
def checkpointed_count() -> Any:
    return gap_of_checkpointing(Counting, lambda m: int(m['block'][0].count))[0], 16
