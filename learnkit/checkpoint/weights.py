# SPDX-License-Identifier: Apache-2.0
"""Read weights and optimizer states without executing code, compare them name by name, and load them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from learnkit.checkpoint.dcp import load_shards
from learnkit.checkpoint.digest import digest
from learnkit.checkpoint.file import is_state_file, read_state, read_tensors, write_tensors
from learnkit.checkpoint.folder import check_files
from learnkit.checkpoint.optimizer_state import decode_optimizer
from learnkit.checkpoint.torch_file import read_torch_file
from learnkit.comm.dtensor import distribute_like, full_tensor, local_shard, mesh_of
from learnkit.core.autocast import drop_casts
from learnkit.core.errors import CheckpointError, OptionError, WeightsError
from learnkit.core.file_tensor import read_values
from learnkit.core.model import bare_model, check_has_values, move_to_device
from learnkit.core.plain import identify_memory, is_dense, to_plain
from learnkit.optim.state import find_differences, release_state

if TYPE_CHECKING:
    from learnkit.learner import Learner

FORMAT = 1  # format of files written by `save_learner`
LEFT_OUT = 'left_out'  # entry of a checkpoint: the digest of each weight that it leaves out
SAFETENSORS = '.safetensors'  # suffix of files in that library's format


@dataclass
class Stored:
    "Content of a weights file, or the same entries of a checkpoint."

    model: Mapping[str, Any]  # state dict of the model
    opt: Any = None  # state of the optimizer
    loss_func: Any = None  # state dict of a loss function with parameters
    config: dict[str, Any] | None = None  # configuration written by `save_learner`


# -- reading ---------------------------------------------------------------------------------------


def read_weights(
    path: Path,  # file of torch.save, `save`, `save_learner` or fastai; or any safetensors file
    device: torch.device | str | None = None,  # device of the tensors; None: the CPU
) -> Stored:
    """Read weights, or the weights of a checkpoint, after verifying checksums. Code in a file is never executed.

    A `.safetensors` file has no checksums: only its sizes are verified. Raises `FileNotFoundError`, and `WeightsError`
    for a file that is damaged, is not a weights file, or requires code to be executed.
    """
    path.stat()  # raises `FileNotFoundError`
    if path.suffix == SAFETENSORS:
        return Stored(_read_safetensors(path, device))
    state = _read_checkpoint(path) if is_state_file(path) else read_torch_file(path, device)
    return _split_state(state, path)


def _read_checkpoint(path: Path) -> Mapping[str, Any]:
    "Return the state of a checkpoint, with the tensors in the folder next to its file."
    try:
        state, _ = read_state(path)
        check_files(path, {**state, 'files': {}})
        return load_shards(state, path)
    except CheckpointError as e:
        raise WeightsError(f'{e}') from None


def _split_state(state: Any, path: Path) -> Stored:
    """Split a file's content by its layout.

    The layouts are: weights with optimizer (also fastai's), checkpoint, weights with configuration, and state dict.
    """
    stored = Stored(state)
    if isinstance(state, Mapping) and isinstance(state.get('model'), Mapping):
        loss_func = state.get('loss_func')
        if set(state) in ({'model', 'opt'}, {'model', 'opt', 'loss_func'}):
            stored = Stored(state['model'], _decode_optimizer(state['opt'], path), loss_func)
        elif {'model', 'optimizer', 'position'} <= state.keys():
            stored = Stored(state['model'], _decode_optimizer(state['optimizer'], path), loss_func)
        elif 'learnkit' in state:
            stored = Stored(state['model'], config=state.get('config'))
            if state['learnkit'] != FORMAT or not isinstance(stored.config, dict):
                raise WeightsError(
                    f'{path} has format {state["learnkit"]!r}, and this learnkit reads {FORMAT}: update it.'
                )
    model = stored.model
    if not isinstance(model, Mapping) or not all(_is_entry(k, v) for k, v in model.items()):
        keys = f' of {[*state][:5]}' if isinstance(state, Mapping) else ''
        raise WeightsError(
            f'{path} holds no state dict (tensors by name), but a {type(state).__name__}{keys}. Nothing was loaded.'
        )
    return stored


def _decode_optimizer(state: Any, path: Path) -> Any:
    "Return the optimizer's state in a file; raise `WeightsError` if it cannot be decoded."
    try:
        return decode_optimizer(state)
    except CheckpointError as e:
        raise WeightsError(f'{path}: {e}') from None


def _is_entry(name: Any, value: Any) -> bool:
    return isinstance(name, str) and (isinstance(value, Tensor) or name.endswith('_extra_state'))


# -- the format of safetensors ---------------------------------------------------------------------


def write_safetensors(
    state: Mapping[str, Any],  # state dict of a model
    path: Path,  # path of the file, which is overwritten
) -> None:
    """Write weights and buffers in the safetensors format.

    Tied tensors are stored once, under the first of their names; the header maps the other names to this name.

    Raises `OptionError` for values that the format cannot hold.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[Any, str] = {}  # first name of each tensor, by its memory
    metadata = {'format': 'pt'}
    for name, t in sorted(state.items()):
        if not isinstance(t, Tensor) or not is_dense(t):
            raise OptionError(
                f'{name} is not a dense tensor with values, and safetensors cannot store it: use a file with `.pth`.'
            )
        t = t.detach().resolve_conj().resolve_neg()
        memory = _identify_memory(t)
        first_name = names.setdefault(memory, name) if memory else name
        if first_name == name:
            tensors[name] = t
        else:
            metadata[name] = first_name
    write_tensors(path, tensors, metadata)


def _identify_memory(t: Any) -> Any:
    "Return address and layout of a tensor, which are equal for tied tensors; None if it has no memory."
    if not isinstance(t, Tensor) or not is_dense(t):
        return None
    t = local_shard(t)
    return identify_memory(t) if t.numel() else None


def _read_safetensors(path: Path, device: torch.device | str | None) -> dict[str, Tensor]:
    "Read the tensors of a safetensors file, tied tensors under each of their names."
    try:
        tensors, metadata = read_tensors(path, device)
    # the library's errors have no common base class with its errors for unknown dtypes
    except Exception as e:
        raise WeightsError(
            f'{path} cannot be read as safetensors: {e}. Nothing was loaded.'
        ) from None
    tied = {k: v for k, v in metadata.items() if k != 'format' and v in tensors}
    return {**{name: tensors[first_name] for name, first_name in tied.items()}, **tensors}


# -- comparing -------------------------------------------------------------------------------------


def check_weights(
    path: Path | str,  # file, for the message
    differences: list[str],  # results of `compare_weights` and `find_differences`
    model: nn.Module,  # model, for the message
    fix: str = '',  # suggestion for the user
) -> None:
    "Raise a `WeightsError` that lists every difference, if there is one."
    if not differences:
        return
    name = type(bare_model(model)).__name__
    places = 'place' if len(differences) == 1 else 'places'
    summary = (
        f'{path} does not fit {name}, in {len(differences)} {places}. Nothing was loaded.{fix}'
    )
    raise WeightsError('\n  '.join([summary, *differences]))


def _match_names(weights: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
    """Return the weights under the model's names.

    The given names may have the prefix of a wrapper that the model does not have, and tied weights may have only one
    of their names.
    """
    for prefix in ('_orig_mod.', 'module.'):
        is_on_all = bool(weights) and all(name.startswith(prefix) for name in weights)
        if is_on_all and not hasattr(model, prefix[:-1]):
            weights = {name.removeprefix(prefix): value for name, value in weights.items()}
    model_weights = model.state_dict()
    if model_weights.keys() <= weights.keys():
        return weights
    memory = {name: _identify_memory(t) for name, t in model_weights.items()}
    values = {memory[name]: weights[name] for name in memory if memory[name] and name in weights}
    tied = {
        name: values[memory[name]]
        for name in memory
        if name not in weights and memory[name] in values
    }
    return {**weights, **tied}


def compare_weights(
    model: nn.Module,
    weights: Mapping[str, Any],  # weights of a file
    strict: bool = True,  # False: allow missing and unexpected names, and other dtypes
) -> list[str]:
    """Return a line for each missing or unexpected name, and for each different kind, shape or dtype.

    >>> compare_weights(nn.Linear(2, 1), {'weight': torch.zeros(1, 3), 'b': torch.zeros(1)})
    ['missing: bias [1]', 'unexpected: b [1]', 'shape: weight is [1, 2], in the file [1, 3]']
    """
    check_has_values(model)
    current = bare_model(model).state_dict()
    weights = _match_names(weights, bare_model(model))
    lines = []
    if strict:
        missing = [name for name in current if name not in weights]
        unexpected = [name for name in weights if name not in current]
        lines += [f'missing: {name}{_format_shape(current[name])}' for name in missing]
        lines += [f'unexpected: {name}{_format_shape(weights[name])}' for name in unexpected]
    for name, t in current.items():
        if name not in weights or not isinstance(t, Tensor) or is_lazy(t):
            continue
        value = weights[name]
        if not isinstance(value, Tensor) or value.layout != t.layout or value.is_meta:
            lines.append(f'kind: {name} is {_format_kind(t)}, in the file {_format_kind(value)}')
        elif t.shape != value.shape and not loads_other_shape(model, name, value):
            lines.append(f'shape: {name} is{_format_shape(t)}, in the file{_format_shape(value)}')
        elif t.dtype != value.dtype and strict:
            lines.append(f'dtype: {name} is {_format_dtype(t)}, in the file {_format_dtype(value)}')
    return lines


def loads_other_shape(
    model: nn.Module,
    name: str,  # name in the state dict
    value: Tensor,  # value of another shape than the model's
) -> bool:
    """Return True if a buffer's module loads a value of another shape, as observers of quantization do.

    A copy of the module loads the value, since only its `load_state_dict` knows.
    """
    prefix, _, key = name.rpartition('.')
    try:
        module = bare_model(model).get_submodule(prefix)
        if key not in dict(module.named_buffers(recurse=False)):
            return False
        deepcopy(module).load_state_dict({key: read_values(value)}, strict=False)
    except (AttributeError, RuntimeError):
        return False
    return True


def _format_shape(t: Any) -> str:
    return f' {list(t.shape)}' if isinstance(t, Tensor) and not is_lazy(t) else ''


def _format_kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f'a {type(value).__name__}'
    layout = str(value.layout).removeprefix('torch.').replace('strided', 'dense')
    return 'a tensor without values (meta)' if value.is_meta else f'a {layout} tensor'


def _format_dtype(t: Tensor) -> str:
    return str(t.dtype).removeprefix('torch.')


# -- copying ---------------------------------------------------------------------------------------


def load_weights(model: nn.Module, weights: Mapping[str, Any], strict: bool = True) -> None:
    "Copy weights into the model's tensors, after `compare_weights`."
    model = bare_model(model)
    weights = _match_names(weights, model)
    unique = {id(value): value for value in weights.values()}  # tied weights are read once
    values = {key: read_values(value) for key, value in unique.items()}
    weights = {name: values[id(value)] for name, value in weights.items()}
    if mesh_of(model) is not None:
        current = model.state_dict()
        weights = {
            name: distribute_like(value, current.get(name)) for name, value in weights.items()
        }
    model.load_state_dict(weights, strict=strict)
    drop_casts()


def compare_stored(learn: Learner, stored: Stored, strict: bool = True) -> list[str]:
    "Return a line for each difference of a Learner's model, loss function and optimizers from stored ones."
    lines = compare_weights(learn.model, stored.model, strict)
    if isinstance(learn.loss_func, nn.Module) and stored.loss_func is not None:
        lines += [f'loss_func: {d}' for d in compare_weights(learn.loss_func, stored.loss_func)]
    if stored.opt is not None:
        lines += find_differences(learn.opt, stored.opt, bare_model(learn.model))
    return lines


def load_stored(
    learn: Learner,
    stored: Stored,
    strict: bool = True,
    copy: bool = True,  # False: the optimizers use the tensors of their state, which nothing else does
) -> None:
    """Load a Learner's model, loss function and optimizers, after `compare_stored`.

    Tensors that are still in a file are read for one of these at a time.
    """
    if stored.opt is not None and not copy:
        release_state(learn.opt)
    load_weights(learn.model, stored.model, strict)
    if isinstance(learn.loss_func, nn.Module) and stored.loss_func is not None:
        load_weights(learn.loss_func, stored.loss_func)
    if stored.opt is not None:
        # the state is loaded to the device of the parameters, so move them first
        move_to_device(learn)
        converted = find_converted(learn.model, stored.model)
        learn.opt.load_state_dict(stored.opt, converted, copy)


def find_converted(model: nn.Module, weights: Mapping[str, Any]) -> set[nn.Parameter]:
    "Return the parameters whose dtype differs from the dtype in a file."
    model = bare_model(model)
    weights = _match_names(weights, model)
    return {
        p
        for name, p in model.named_parameters()
        if isinstance(weights.get(name), Tensor) and weights[name].dtype != p.dtype
    }


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a model, with full tensors; other values must be plain.

    Sharded weights are gathered on the host of the first rank, so every rank must call this function.
    """
    state = collect_module_state(model)
    if mesh_of(model) is None:
        return state
    owners = {name: id(p) for name, p in _named_params(model)}
    gathered: dict[Any, Any] = {}  # tied weights are gathered once
    for name, value in state.items():
        key = owners.get(name, name)
        if key not in gathered:
            gathered[key] = full_tensor(value, first_only=True)
        state[name] = gathered[key]
    return state


def collect_module_state(model: nn.Module) -> dict[str, Any]:
    "Return the state dict of a module, with this rank's shards of sharded weights. Raises `ModelError` on meta."
    check_has_values(model)
    state = bare_model(model).state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            state[name] = to_plain(value, name)
    return state


# -- checkpoints without frozen weights ------------------------------------------------------------


def find_trainable(model: nn.Module) -> set[str]:
    """Return the names of the trainable parameters, tied ones by each of their names.

    >>> find_trainable(nn.Linear(2, 1).requires_grad_(False))
    set()
    """
    return {name for name, p in _named_params(model) if p.requires_grad}


def _named_params(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return bare_model(model).named_parameters(remove_duplicate=False)


def leave_out_frozen_weights(
    model: nn.Module,
    state: dict[str, Any],  # state of a checkpoint
    trained: Collection[str],  # names of the parameters to keep
    digests: dict[str, str],  # digests of the other parameters by name; new ones are added
) -> dict[str, Any]:
    "Return the state with digests instead of the weights of the other parameters. Buffers are kept."
    params = {name for name, _ in _named_params(model)} - {*trained}
    frozen = sorted(params & state['model'].keys())
    for name in frozen:
        if name not in digests:  # a digest takes long to compute
            digests[name] = digest(state['model'][name])
    weights = {name: value for name, value in state['model'].items() if name not in frozen}
    return {**state, 'model': weights, LEFT_OUT: {name: digests[name] for name in frozen}}


def add_frozen_weights(
    model: nn.Module,
    state: Mapping[str, Any],  # state of a checkpoint
    path: Path | None = None,  # its file, for the message
) -> Mapping[str, Any]:
    """Return the state with the model's weights in place of the weights that the checkpoint leaves out.

    Raises `WeightsError` if the model lacks one of them, or has another value.
    """
    expected = state.get(LEFT_OUT)
    if not expected:
        return state
    weights = bare_model(model).state_dict()
    frozen = {name: weights[name] for name in expected if name in weights}
    others = [name for name in expected if name not in frozen]
    others += [name for name, value in frozen.items() if digest(value) != expected[name]]
    if others:
        raise WeightsError(
            f'{path or "The checkpoint"} leaves out {len(expected)} frozen weights '
            f'(`trainable_only=True`), and {len(others)} of them differ in this model, such as '
            f'{others[0]}. Load the same base model first. Nothing was loaded.'
        )
    return {**state, 'model': {**frozen, **state['model']}}
