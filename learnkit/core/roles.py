# SPDX-License-Identifier: Apache-2.0
"""Roles of parameters and buffers: which have no weight decay, which are averaged, which norm layers are frozen.

- *No weight decay*: parameters of at most one dimension, parameters named as a bias, and all parameters of torch's
  norm layers. This is the rule of timm and nanoGPT, plus biases and norm layers of more dimensions.
- *Averaged*: trainable parameters, and the running statistics of torch's norm layers. Other buffers keep their current
  values, unless they are selected by name.
- *Frozen norm layer*: a layer with running statistics whose parameters are all frozen. A layer without parameters
  follows the nearest module before it in its `nn.Sequential`, or else its parent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

BATCH_NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d,
)  # fmt: skip
INSTANCE_NORMS = (
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
    nn.LazyInstanceNorm1d, nn.LazyInstanceNorm2d, nn.LazyInstanceNorm3d,
)  # fmt: skip
STATISTICS_NORMS = (*BATCH_NORMS, *INSTANCE_NORMS)  # with `running_mean` and `running_var`, or None
NORMS = (*STATISTICS_NORMS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def has_batch_statistics(module: nn.Module) -> bool:
    """Return True if the samples of a batch affect each other: batch norm, and instance norm with running statistics.

    >>> has_batch_statistics(nn.InstanceNorm1d(2)), has_batch_statistics(nn.BatchNorm1d(2))
    (False, True)
    """
    has_statistics = getattr(module, 'running_mean', None) is not None
    is_instance_norm = isinstance(module, INSTANCE_NORMS)
    return isinstance(module, BATCH_NORMS) or (is_instance_norm and has_statistics)


# -- weight decay ----------------------------------------------------------------------------------


def norm_bias_params(model: nn.Module, with_bias: bool = True) -> list[nn.Parameter]:
    """Return the parameters of torch's norm layers and, with `with_bias`, all others without weight decay.

    These are parameters of at most one dimension, such as biases, scales and the slopes of PReLU,
    and parameters named as a bias, such as `relative_position_bias_table`. The shape of a lazy
    parameter is unknown, so it is selected only by its name and its layer.

    >>> attention = nn.MultiheadAttention(4, 2)
    >>> names = {id(p): name for name, p in attention.named_parameters()}
    >>> [names[id(p)] for p in norm_bias_params(attention)]
    ['in_proj_bias', 'out_proj.bias']
    """
    norms = {id(p) for m in model.modules() if isinstance(m, NORMS) for p in list_own_params(m)}
    found = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if id(p) in norms or (with_bias and (has_one_dim(p) or is_bias(name))):
            found[id(p)] = p
    return list(found.values())


def list_own_params(m: nn.Module) -> list[nn.Parameter]:
    "Return the parameters of a module and of its parametrized tensors, without the parameters of its children."
    own = [*m.parameters(recurse=False)]
    if is_parametrized(m):
        own += m.get_submodule('parametrizations').parameters()
    return own


def has_one_dim(p: nn.Parameter) -> bool:
    "Return True for a parameter of at most one dimension; False if it is lazy."
    return not is_lazy(p) and p.ndim <= 1


def is_bias(name: str) -> bool:
    """Return True if a parameter is named as a bias: a word in the last part of its name begins with 'bias'.

    Numbers in a list and torch's `original` of a parametrized tensor are skipped.

    >>> [is_bias(name) for name in ('in_proj_bias', 'biases.0', 'parametrizations.bias.original0')]
    [True, True, True]
    >>> is_bias('relative_attention_bias.weight'), is_bias('unbiased_weight')
    (False, False)
    """
    parts = [s for s in name.split('.') if not s.isdigit() and not s.startswith('original')]
    return bool(parts) and any(word.startswith('bias') for word in parts[-1].split('_'))


# -- averages --------------------------------------------------------------------------------------


def find_averaged(
    model: nn.Module,
    patterns: Collection[str] = (),  # names or patterns of further buffers, as in `named_buffers`
) -> dict[str, Tensor]:
    """Return the parameters and buffers that an average of a model's weights covers, by name, each once.

    >>> sorted(find_averaged(nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, affine=False))))
    ['0.weight', '1.running_mean', '1.running_var']
    """
    norms = [m for m in model.modules() if isinstance(m, STATISTICS_NORMS)]
    statistics = {id(t) for m in norms for t in (m.running_mean, m.running_var)}
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    buffers = {
        name: t
        for name, t in model.named_buffers()
        if id(t) in statistics or (t.is_floating_point() and matches(name, patterns))
    }
    return {**params, **buffers}


def matches(name: str, patterns: Collection[str]) -> bool:
    """Return True if a name matches one of the patterns of `fnmatch`.

    >>> matches('encoder.codebook', ['*.codebook']), matches('encoder.codebook', ())
    (True, False)
    """
    return any(fnmatchcase(name, pattern) for pattern in patterns)


# -- frozen norm layers ----------------------------------------------------------------------------


def find_frozen_norms(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the norm layers with running statistics that are frozen.

    >>> body = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False)).requires_grad_(False)
    >>> [m is body[1] for m in find_frozen_norms(nn.Sequential(body, nn.BatchNorm1d(2)))]
    [True]
    """
    parents = {id(child): parent for parent in model.modules() for child in parent.children()}
    for m in model.modules():
        if isinstance(m, STATISTICS_NORMS) and m.track_running_stats:
            params = find_followed_params(m, parents)
            if params and not any(p.requires_grad for p in params):
                yield m


def find_followed_params(m: nn.Module, parents: dict[int, nn.Module]) -> list[nn.Parameter]:
    "Return the parameters of a module; without any, the parameters of the module that it follows."
    while not (params := list(m.parameters())):
        parent = parents.get(id(m))
        if parent is None:
            return []
        if isinstance(parent, nn.Sequential):
            siblings = list(parent.children())
            n_before = next(i for i, sibling in enumerate(siblings) if sibling is m)
            for sibling in reversed(siblings[:n_before]):
                if params := list(sibling.parameters()):
                    return params
        m = parent
    return params
