"""Table of modules: every layer of torch.nn, and small models of other libraries that need no download.

`build()` makes a module; `Inputs` says with which inputs it is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.sweeps.verdicts import Subject

BS = 8


@dataclass(frozen=True)
class Inputs:
    "Inputs of a module."

    shape: tuple[int, ...]  # of a sample
    n: int = 1  # how many of this shape the module takes
    n_ids: int = 0  # integers below this number instead of floats


Rows = Iterator[tuple[str, Inputs, Callable[[], nn.Module]]]
VECTOR = Inputs((6,))
SIGNAL = Inputs((4, 12))
IMAGE = Inputs((4, 8, 8))
VOLUME = Inputs((4, 6, 6, 6))
SEQUENCE = Inputs((5, 6))
IDS = Inputs((5,), n_ids=9)
OF_RANK = {1: SIGNAL, 2: IMAGE, 3: VOLUME}

ACTIVATIONS = (
    'CELU ELU GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid LogSoftmax '
    'Mish PReLU ReLU ReLU6 RReLU SELU SiLU Sigmoid Softmax Softmin Softplus Softshrink Softsign '
    'Tanh Tanhshrink'
).split()
RANDOM = 'AlphaDropout Dropout Dropout1d Dropout2d Dropout3d FeatureAlphaDropout'.split()
# by name without the number of dimensions: arguments of the constructor
RANKED: dict[str, tuple[Any, ...]] = {
    'Conv': (4, 4, 3),
    'ConvTranspose': (4, 4, 3),
    'LazyConv': (4, 3),
    'LazyConvTranspose': (4, 3),
    'BatchNorm': (4,),
    'LazyBatchNorm': (),
    'InstanceNorm': (4, 1e-5, 0.1, True, True),
    'LazyInstanceNorm': (),
    'AvgPool': (2,),
    'MaxPool': (2,),
    'LPPool': (2, 2),
    'AdaptiveAvgPool': (2,),
    'AdaptiveMaxPool': (2,),
    'CircularPad': (1,),
    'ConstantPad': (1, 0.5),
    'ReflectionPad': (1,),
    'ReplicationPad': (1,),
    'ZeroPad': (1,),
}


def list_torch() -> Rows:
    "Yield the layers of torch.nn."
    for name in ACTIVATIONS:
        yield name, VECTOR, getattr(nn, name)
    for name in RANDOM:
        yield name, OF_RANK[int(name[-2])] if name[-1] == 'd' else VECTOR, getattr(nn, name)
    for name, arguments in RANKED.items():
        for rank, inputs in OF_RANK.items():
            cls = getattr(nn, f'{name}{rank}d')
            yield cls.__name__, inputs, partial(cls, *arguments)
    yield from list_torch_others()
    yield from list_torch_sequences()
    yield from list_torch_changed()


def list_torch_others() -> Rows:
    "Yield the layers whose arguments are their own."
    yield 'Softmax2d', IMAGE, nn.Softmax2d
    yield 'Threshold', VECTOR, partial(nn.Threshold, 0.1, 0.5)
    yield 'Identity', VECTOR, nn.Identity
    yield 'Linear', VECTOR, partial(nn.Linear, 6, 4)
    yield 'LazyLinear', VECTOR, partial(nn.LazyLinear, 4)
    yield 'Bilinear', Inputs((6,), 2), partial(nn.Bilinear, 6, 6, 4)
    yield 'CosineSimilarity', Inputs((6,), 2), nn.CosineSimilarity
    yield 'PairwiseDistance', Inputs((6,), 2), nn.PairwiseDistance
    yield 'LayerNorm', VECTOR, partial(nn.LayerNorm, 6)
    yield 'RMSNorm', VECTOR, partial(nn.RMSNorm, 6)
    yield 'GroupNorm', IMAGE, partial(nn.GroupNorm, 2, 4)
    yield 'LocalResponseNorm', IMAGE, partial(nn.LocalResponseNorm, 2)
    yield 'CrossMapLRN2d', IMAGE, partial(nn.CrossMapLRN2d, 2)
    yield 'FractionalMaxPool2d', IMAGE, partial(nn.FractionalMaxPool2d, 2, output_size=3)
    yield 'FractionalMaxPool3d', VOLUME, partial(nn.FractionalMaxPool3d, 2, output_size=3)
    yield 'Fold', Inputs((16, 9)), partial(nn.Fold, (4, 4), (2, 2))
    yield 'Unfold', IMAGE, partial(nn.Unfold, 2)
    yield 'Flatten', IMAGE, nn.Flatten
    yield 'Unflatten', VECTOR, partial(nn.Unflatten, 1, (2, 3))
    yield 'PixelShuffle', IMAGE, partial(nn.PixelShuffle, 2)
    yield 'PixelUnshuffle', IMAGE, partial(nn.PixelUnshuffle, 2)
    yield 'ChannelShuffle', IMAGE, partial(nn.ChannelShuffle, 2)
    yield 'Upsample', IMAGE, partial(nn.Upsample, scale_factor=2, mode='bilinear')
    yield 'UpsamplingBilinear2d', IMAGE, partial(nn.UpsamplingBilinear2d, scale_factor=2)
    yield 'UpsamplingNearest2d', IMAGE, partial(nn.UpsamplingNearest2d, scale_factor=2)
    yield 'Embedding', IDS, partial(nn.Embedding, 9, 6)
    yield 'Embedding(max_norm)', IDS, partial(nn.Embedding, 9, 6, max_norm=0.5)
    yield 'EmbeddingBag', IDS, partial(nn.EmbeddingBag, 9, 6)


def list_torch_sequences() -> Rows:
    "Yield recurrent layers and attention."
    for name in ('RNN', 'LSTM', 'GRU'):
        make = partial(getattr(nn, name), 6, 4, batch_first=True)
        yield name, SEQUENCE, make
        yield f'{name}(dropout)', SEQUENCE, partial(make, num_layers=2, dropout=0.3)
        yield f'{name}Cell', VECTOR, partial(getattr(nn, f'{name}Cell'), 6, 4)
    yield 'LSTM(proj_size)', SEQUENCE, partial(nn.LSTM, 6, 4, batch_first=True, proj_size=2)
    options: dict[str, Any] = {'d_model': 6, 'nhead': 2, 'dim_feedforward': 8, 'batch_first': True}
    pair, triple = Inputs((5, 6), 2), Inputs((5, 6), 3)
    layer = partial(nn.TransformerEncoderLayer, **options)
    decoder = partial(nn.TransformerDecoderLayer, **options)
    yield 'MultiheadAttention', triple, partial(nn.MultiheadAttention, 6, 2, batch_first=True)
    yield 'TransformerEncoderLayer', SEQUENCE, layer
    yield 'TransformerDecoderLayer', pair, decoder
    yield 'TransformerEncoder', SEQUENCE, lambda: nn.TransformerEncoder(layer(), 2)
    yield 'TransformerDecoder', pair, lambda: nn.TransformerDecoder(decoder(), 2)
    yield (
        'Transformer',
        pair,
        partial(nn.Transformer, **options, num_encoder_layers=1, num_decoder_layers=1),
    )


class OfLists(nn.Module):
    "Layers in a ModuleList and a ModuleDict, with a ParameterList and a ParameterDict."

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Tanh()])
        self.named = nn.ModuleDict({'last': nn.Linear(6, 4)})
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))])
        self.shifts = nn.ParameterDict({'one': nn.Parameter(torch.zeros(4))})

    def forward(self, x: Tensor) -> Tensor:
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = layer(x) * scale
        shifted: Tensor = self.named['last'](x) + self.shifts['one']
        return shifted


class Tied(nn.Module):
    "Two layers that share a weight."

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x).tanh())
        return out


def list_torch_changed() -> Rows:
    "Yield containers, and layers with parametrizations, pruned or prepared for quantization."
    yield 'Sequential', VECTOR, lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    yield 'ModuleList, ModuleDict, ParameterList, ParameterDict', VECTOR, OfLists
    yield 'tied weights', VECTOR, Tied
    for name in ('spectral_norm', 'weight_norm', 'orthogonal'):
        change = getattr(parametrizations, name)
        yield name, VECTOR, lambda change=change: change(nn.Linear(6, 4))
    prune = import_module('torch.nn.utils.prune')
    yield 'pruned', VECTOR, lambda: prune.l1_unstructured(nn.Linear(6, 4), 'weight', 0.3)
    ao = import_module('torch.ao.quantization')
    yield 'FakeQuantize', VECTOR, ao.FakeQuantize
    yield (
        'qat.Linear',
        VECTOR,
        lambda: import_module('torch.ao.nn.qat').Linear(6, 4, qconfig=ao.get_default_qat_qconfig()),
    )


def list_timm() -> Rows:
    "Yield timm's small models for tests."
    library = import_module('timm')
    for name in library.list_models('test_*', pretrained=False):
        config = library.get_pretrained_cfg(name)
        make = partial(library.create_model, name, num_classes=3)
        yield name, Inputs(tuple(config.input_size)), make


def list_transformers() -> Rows:
    "Yield small models of transformers."
    library = import_module('transformers')
    size = {
        'vocab_size': 16,
        'hidden_size': 8,
        'num_hidden_layers': 1,
        'num_attention_heads': 2,
        'intermediate_size': 16,
        'pad_token_id': 0,
    }
    small = {'vocab_size': 16, 'n_embd': 8, 'n_layer': 1, 'n_head': 2, 'pad_token_id': 0}
    distil = {'vocab_size': 16, 'dim': 8, 'n_layers': 1, 'n_heads': 2, 'hidden_dim': 16}
    grouped = {**size, 'num_key_value_heads': 1}
    configs: dict[str, dict[str, Any]] = {
        'Bert': size,
        'Roberta': size,
        'Electra': {**size, 'embedding_size': 8},
        'GPT2': {**small, 'bos_token_id': 1, 'eos_token_id': 2},
        'DistilBert': distil,
        'Llama': grouped,
        'Qwen2': grouped,
        'Mistral': grouped,
    }
    for name, options in configs.items():
        config = getattr(library, f'{name}Config')
        cls = getattr(library, f'{name}ForSequenceClassification')
        inputs = Inputs((6,), n_ids=15)
        yield cls.__name__, inputs, partial(make_of_config, cls, config, options)
    vit = {key: value for key, value in size.items() if key not in ('vocab_size', 'pad_token_id')}
    vit |= {'image_size': 8, 'patch_size': 4}
    cls = library.ViTForImageClassification
    yield cls.__name__, Inputs((3, 8, 8)), partial(make_of_config, cls, library.ViTConfig, vit)


def make_of_config(cls: Any, config: Any, options: dict[str, Any]) -> nn.Module:
    "Make a model of a new configuration."
    model: nn.Module = cls(config(**options))
    return model


LIBRARIES: dict[str, Callable[[], Rows]] = {
    'torch': list_torch,
    'timm': list_timm,
    'transformers': list_transformers,
}


def load_modules(library: str) -> list[Subject]:
    "Return the modules of an installed library."
    return [Subject(library, title, build, inputs) for title, inputs, build in LIBRARIES[library]()]
