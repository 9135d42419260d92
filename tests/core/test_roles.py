"""Parameters without weight decay, averaged tensors and frozen norm layers, by name of the expected ones."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

from learnkit.core.roles import find_averaged, find_frozen_norms, norm_bias_params


class RMSNormOfOnesOwn(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class Scaled(nn.Module):
    "Parameters without a layer of torch around them."

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.gamma = nn.Parameter(torch.ones(4))  # as in LayerScale
        self.relative_position_bias_table = nn.Parameter(torch.ones(9, 2))
        self.unbiased = nn.Parameter(torch.ones(2, 2))
        self.biases = nn.ParameterList([nn.Parameter(torch.ones(2, 2))])
        self.position = nn.Parameter(torch.ones(1, 5, 4))


class ConditionalNorm(nn.BatchNorm1d):
    "A norm layer whose scales come from a layer of its own."

    def __init__(self) -> None:
        super().__init__(4, affine=False)
        self.scales = nn.Linear(6, 4)


def parametrized() -> nn.Module:
    layer = nn.LayerNorm((2, 3))
    return nn.utils.parametrize.register_parametrization(layer, 'weight', nn.Identity())


# module, and the names of its parameters that are decayed; all others are not
DECAYED: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    'attention': (
        lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True),
        ['in_proj_weight', 'out_proj.weight'],
    ),
    'encoder': (
        lambda: nn.TransformerEncoderLayer(4, 2, 8),
        [
            'self_attn.in_proj_weight',
            'self_attn.out_proj.weight',
            'linear1.weight',
            'linear2.weight',
        ],
    ),
    'LSTM': (lambda: nn.LSTM(2, 3), ['weight_ih_l0', 'weight_hh_l0']),
    'own norm': (lambda: nn.Sequential(nn.Linear(2, 2), RMSNormOfOnesOwn(2)), ['0.weight']),
    'norm of an image': (lambda: nn.LayerNorm((2, 4, 4)), []),
    'parametrized norm': (parametrized, []),
    'conditional norm': (ConditionalNorm, ['scales.weight']),
    'bilinear': (lambda: nn.Bilinear(2, 2, 3), ['weight']),
    'PReLU': (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.PReLU(2)), ['0.weight']),
    'embedding': (lambda: nn.Embedding(5, 2), ['weight']),
    'bare parameters': (Scaled, ['unbiased', 'position']),
    'spectral norm': (lambda: spectral_norm(nn.Linear(3, 2)), ['weight_orig']),
    'lazy': (lambda: nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()), ['0.weight']),
}


@pytest.mark.parametrize('name', DECAYED)
def test_what_has_no_weight_decay(name: str) -> None:
    make, decayed = DECAYED[name]
    model = make()
    spared = {id(p) for p in norm_bias_params(model)}
    assert [name for name, p in model.named_parameters() if id(p) not in spared] == decayed


def test_norm_layers_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.GroupNorm(1, 3), nn.PReLU(), nn.RMSNorm((2, 3)))
    names = {id(p): name for name, p in model.named_parameters()}
    found = [names[id(p)] for p in norm_bias_params(model, with_bias=False)]
    assert found == ['1.weight', '1.bias', '3.weight']
    assert norm_bias_params(ConditionalNorm(), with_bias=False) == []


@pytest.mark.parametrize('kind', ['llama', 'qwen', 't5'])
def test_norms_of_transformers(kind: str) -> None:
    transformers = pytest.importorskip('transformers')
    small = {'num_attention_heads': 2, 'hidden_size': 8, 'intermediate_size': 8, 'vocab_size': 9}
    configs = {
        'llama': lambda: transformers.LlamaConfig(num_hidden_layers=1, **small),
        'qwen': lambda: transformers.Qwen2Config(
            num_hidden_layers=1, num_key_value_heads=2, **small
        ),
        't5': lambda: transformers.T5Config(
            vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2
        ),
    }
    model = transformers.AutoModel.from_config(configs[kind]())
    spared = {id(p) for p in norm_bias_params(model)}
    expected = [name for name, p in model.named_parameters() if p.ndim < 2]
    assert [name for name, p in model.named_parameters() if id(p) in spared] == expected
    assert any('norm' in name for name in expected)


# -- averages --------------------------------------------------------------------------------------


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer('total', torch.zeros(()))
        self.register_buffer('running_mean', torch.zeros(2))


class OwnNorm(nn.BatchNorm2d):
    def __init__(self) -> None:
        super().__init__(2)
        self.register_buffer('peak', torch.zeros(()))


def test_what_is_averaged() -> None:
    model = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(2, 2, bias=False)),
        spectral_norm(nn.Linear(2, 2, bias=False)),
        OwnNorm(),
        nn.InstanceNorm1d(2, track_running_stats=True),
        nn.BatchNorm1d(2, track_running_stats=False, affine=False),
        nn.Linear(2, 1, bias=False).requires_grad_(False),
        Counts(),
    )
    own = [
        '0.parametrizations.weight.original',
        '1.weight_orig',
        '2.weight',
        '2.bias',
        '2.running_mean',
        '2.running_var',
        '3.running_mean',
        '3.running_var',
    ]
    assert list(find_averaged(model)) == own
    assert list(find_averaged(model, ['6.*'])) == [*own, '6.total', '6.running_mean']


# -- frozen norm layers ----------------------------------------------------------------------------


def plain(n: int = 2) -> nn.Module:
    return nn.BatchNorm1d(n, affine=False)


def frozen(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(*modules).requires_grad_(False)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.lin = plain(), nn.Linear(2, 2)


FROZEN: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    'with parameters': (
        lambda: nn.Sequential(nn.BatchNorm1d(2).requires_grad_(False), nn.BatchNorm1d(2)),
        ['0'],
    ),
    'one of two parameters': (
        lambda: (
            frozen(nn.BatchNorm1d(2))
            .append(nn.Linear(2, 2))
            .apply(lambda m: m.bias.requires_grad_() if isinstance(m, nn.BatchNorm1d) else m)
        ),
        [],
    ),
    'after a frozen layer': (
        lambda: nn.Sequential(
            frozen(nn.Linear(2, 2)), nn.ReLU(), plain(), nn.Linear(2, 2), plain()
        ),
        ['2'],
    ),
    'first of a frozen part': (lambda: nn.Sequential(frozen(plain(), nn.Linear(2, 2))), ['0.0']),
    'first of a trained part': (
        lambda: nn.Sequential(frozen(nn.Linear(2, 2)), nn.Sequential(plain(), nn.Linear(2, 2))),
        [],
    ),
    'in a part of its own': (
        lambda: nn.Sequential(frozen(nn.Linear(2, 2)), nn.Sequential(plain(), nn.ReLU())),
        ['1.0'],
    ),
    'in a block': (
        lambda: nn.ModuleList([Block().requires_grad_(False), Block()]),
        ['0.norm'],
    ),
    'instance norm': (
        lambda: frozen(nn.Conv1d(2, 2, 1), nn.InstanceNorm1d(2, track_running_stats=True)),
        ['1'],
    ),
    'without statistics': (
        lambda: frozen(nn.BatchNorm1d(2, track_running_stats=False), nn.InstanceNorm1d(2)),
        [],
    ),
    'alone': (plain, []),
    'none': (lambda: frozen(nn.LayerNorm(2), nn.Linear(2, 2)), []),
}


@pytest.mark.parametrize('name', FROZEN)
def test_frozen_norm_layers(name: str) -> None:
    make, expected = FROZEN[name]
    model = make()
    names = {id(m): name for name, m in model.named_modules()}
    assert [names[id(m)] for m in find_frozen_norms(model)] == expected
