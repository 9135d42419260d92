"""Weights and optimizer states in files: read without running code, compared name by name, then copied into place."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from learnkit.checkpoint.file import is_state_file, read_state
from learnkit.checkpoint.torch_file import read_torch_file
from learnkit.core.dtensor import distribute_like, full_tensor, local, mesh_of
from learnkit.core.errors import CheckpointError, OptionError, WeightsError
from learnkit.core.model import bare_model
from learnkit.core.plain import plain

__all__ = [
    'Stored',
    'read_weights',
    'write_safetensors',
    'check_weights',
    'load_weights',
    'weights_differ',
    'model_state',
    'own_state',
]

FORMAT = 1  # of files written by `save_learner`
SAFETENSORS = '.safetensors'  # the suffix of files in that library's format


@dataclass
class Stored:
    "What a file of weights holds."

    model: Mapping[str, Any]
    opt: Any = None  # the optimizer's state, where there is one
    loss_func: Any = None  # of a loss function whose parameters are trained
    config: dict[str, Any] | None = None  # of a file written by `save_learner`


# Reading


def read_weights(
    path: Path,  # from torch.save, `save`, `save_learner` or fastai; or any safetensors file
    device: torch.device | str | None = None,  # where its tensors are put; None: the CPU
) -> Stored:
    """Read weights, or the weights of a checkpoint, checksums first. No code in a file is run, whatever it holds.

    A file `.safetensors` has no checksums: sizes are compared with the file's own, and bytes are taken as they are.
    Raises `FileNotFoundError`, and `WeightsError` for what is damaged, is no file of weights, or asks for code.
    """
    if not path.exists():
        raise _not_found(path)
    if not path.is_file():
        raise WeightsError(f'{path} is a folder, and no file of weights.')
    if path.suffix == SAFETENSORS:
        return Stored(_read_safetensors(path, device))
    state = _read_checkpoint(path) if is_state_file(path) else read_torch_file(path, device)
    return _parts(state, path)


def _read_checkpoint(path: Path) -> Mapping[str, Any]:
    "Return the state of a checkpoint, with the tensors that are in a folder next to its file."
    try:
        state, _ = read_state(path)
        if 'parts' not in state:
            return state
        from learnkit.checkpoint import dcp

        dcp.check_parts(path, state['parts'])
        return dcp.with_parts(state, path)
    except CheckpointError as e:
        raise WeightsError(f'{e}') from None


def _not_found(path: Path) -> FileNotFoundError:
    files = path.parent.glob('*') if path.parent.is_dir() else ()
    stems = {
        p.stem: p.name
        for p in files
        if p.suffix in ('.pth', '.pt', '.pkl', '.bin', SAFETENSORS) and p.is_file()
    }
    close = [stems[stem] for stem in get_close_matches(path.stem, stems, n=3, cutoff=0.7)]
    error = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if close:
        error.add_note(f'The folder has {", ".join(close)}.')
    return error


def _parts(state: Any, path: Path) -> Stored:
    "Tell the layouts apart: ours and fastai's with optimizer, checkpoints, with a configuration, a bare state dict."
    model, opt, loss_func, config = state, None, None, None
    if isinstance(state, Mapping) and isinstance(state.get('model'), Mapping):
        if set(state) in ({'model', 'opt'}, {'model', 'opt', 'loss_func'}):
            model, opt, loss_func = state['model'], state['opt'], state.get('loss_func')
        elif {'model', 'optimizer', 'position'} <= state.keys():
            model, opt, loss_func = state['model'], state['optimizer'], state.get('loss_func')
        elif 'learnkit' in state:
            model, config = state['model'], _config(state, path)
    if not isinstance(model, Mapping) or not all(_is_entry(k, v) for k, v in model.items()):
        raise WeightsError(
            f'{path} holds no state dict (tensors by name), but {_shown(state)}. Nothing was loaded.'
        )
    return Stored(model, opt, loss_func, config)


def _config(state: Mapping[str, Any], path: Path) -> dict[str, Any]:
    version, config = state['learnkit'], state.get('config')
    if version != FORMAT:
        raise WeightsError(
            f'{path} has format {version!r}, this version of learnkit reads {FORMAT}: update learnkit.'
        )
    if not isinstance(config, dict):
        raise WeightsError(f'{path} has no configuration. Nothing was loaded.')
    return config


def _is_entry(name: Any, value: Any) -> bool:
    return isinstance(name, str) and (isinstance(value, Tensor) or name.endswith('_extra_state'))


def _shown(state: Any) -> str:
    if not isinstance(state, Mapping):
        return f'a {type(state).__name__}'
    return f'a dict of {", ".join([*map(repr, list(state)[:5]), *["..."] * (len(state) > 5)]) or "nothing"}'


# The format of safetensors


def write_safetensors(
    state: Mapping[str, Any],  # of a model
    path: Path,  # the file, written over
) -> None:
    """Write weights and buffers in safetensors' format. Tied ones are kept once, and the header says which they are.

    Raises `OptionError` for what this format has no place for.
    """
    from safetensors.torch import save_file  # few programs need it

    kept: dict[str, Tensor] = {}
    names: dict[Any, str] = {}  # by the place in memory
    metadata, memory = {'format': 'pt'}, set()
    for name, t in sorted(state.items()):
        if (
            not isinstance(t, Tensor)
            or is_lazy(t)
            or t.is_meta
            or t.layout is not torch.strided
            or t.is_quantized
        ):
            raise OptionError(
                f'{name}, a {_kind(t)}, has no place in a file {SAFETENSORS}: use one with `.pth`.'
            )
        t = t.detach().resolve_conj().resolve_neg()
        if (place := _place(t)) and (first := names.setdefault(place, name)) != name:
            metadata[name] = first
            continue
        at = t.device, t.untyped_storage().data_ptr()
        kept[name] = (
            t.clone(memory_format=torch.contiguous_format) if at in memory else t.contiguous()
        )
        memory.add(at)
    try:
        save_file(kept, str(path), metadata=metadata)
    except KeyError as e:
        raise OptionError(
            f'{e} has no place in a file {SAFETENSORS}: use one with `.pth`.'
        ) from None


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return (
        'parameter without values' if is_lazy(value) or value.is_meta else f'{value.layout} tensor'
    )


def _place(t: Any) -> Any:
    "Return where in memory a tensor is, and how: tied ones are in the same place."
    if not isinstance(t, Tensor) or is_lazy(t) or t.is_meta or t.layout is not torch.strided:
        return None
    t = local(t)
    return (t.device, t.data_ptr(), t.dtype, t.shape, t.stride()) if t.numel() else None


def _read_safetensors(path: Path, device: torch.device | str | None) -> dict[str, Tensor]:
    "Read the tensors of a file, the tied ones under each of their names, when its sizes agree."
    from safetensors import safe_open  # few programs need it

    try:
        with safe_open(str(path), framework='pt', device=str(device or 'cpu')) as file:
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
            tied = {
                k: v for k, v in (file.metadata() or {}).items() if k != 'format' and v in tensors
            }
    except (
        Exception
    ) as e:  # the library's own have no common base with those of dtypes that it does not know
        raise WeightsError(
            f'{path} cannot be read as safetensors: {e}. Nothing was loaded.'
        ) from None
    return {**{name: tensors[first] for name, first in tied.items()}, **tensors}


# Comparing


def check_weights(
    path: Path | str,  # the file, for the message
    differences: list[str],  # from `weights_differ` and `OptimWrapper.differences`
    model: nn.Module,
    fix: str = '',  # what can be done about it
) -> None:
    "Raise a `WeightsError` that lists every difference, if there is one."
    if not differences:
        return
    n = len(differences)
    raise WeightsError(
        '\n  '.join(
            [
                f'{path} does not fit {type(bare_model(model)).__name__}, in {n} '
                f'place{"s" * (n > 1)}. Nothing was loaded.{fix}',
                *differences,
            ]
        )
    )


def unprefixed(weights: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
    "Return the weights without the prefix of a wrapper that the model does not have."
    for prefix in ('_orig_mod.', 'module.'):
        if (
            weights
            and all(k.startswith(prefix) for k in weights)
            and not hasattr(model, prefix[:-1])
        ):
            weights = {k.removeprefix(prefix): v for k, v in weights.items()}
    return weights


def _fitting(weights: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
    "Return the weights under the model's names; one that a file leaves out as tied to another has that one's values."
    weights, own = unprefixed(weights, model), model.state_dict()
    if own.keys() <= weights.keys():
        return weights
    there = {place: weights[k] for k, t in own.items() if k in weights and (place := _place(t))}
    return {
        **weights,
        **{k: there[_place(t)] for k, t in own.items() if k not in weights and _place(t) in there},
    }


def weights_differ(
    model: nn.Module,
    weights: Mapping[str, Any],  # of a file
    strict: bool = True,  # False: names may be missing or unknown, and other dtypes are converted
) -> list[str]:
    """Return a line for each name that is missing or unknown, and for each other shape or dtype.

    >>> weights_differ(nn.Linear(2, 1), {'weight': torch.zeros(1, 3), 'b': torch.zeros(1)})
    ['missing: bias [1]', 'unexpected: b [1]', 'shape: weight is [1, 2], in the file [1, 3]']
    """
    own, weights = bare_model(model).state_dict(), _fitting(weights, bare_model(model))
    lines = (
        [f'missing: {k}{_size(v)}' for k, v in own.items() if k not in weights] if strict else []
    )
    if strict:
        lines += [f'unexpected: {k}{_size(v)}' for k, v in weights.items() if k not in own]
    for name in (k for k in own if k in weights):
        here, there = own[name], weights[name]
        if not isinstance(here, Tensor) or is_lazy(here):
            continue
        if not isinstance(there, Tensor):
            lines.append(f'type: {name} is a tensor, in the file {type(there).__name__}')
        elif here.shape != there.shape:
            lines.append(f'shape: {name} is{_size(here)}, in the file{_size(there)}')
        elif here.dtype != there.dtype and strict:
            lines.append(f'dtype: {name} is {_dtype(here)}, in the file {_dtype(there)}')
    return lines


def _size(t: Any) -> str:
    return f' {list(t.shape)}' if isinstance(t, Tensor) and not is_lazy(t) else ''


def _dtype(t: Tensor) -> str:
    return str(t.dtype).removeprefix('torch.')


# Copying


def load_weights(model: nn.Module, weights: Mapping[str, Any], strict: bool = True) -> None:
    "Copy weights that were compared into the model's own tensors."
    model = bare_model(model)
    weights = _fitting(weights, model)
    if mesh_of(model) is not None:
        own = model.state_dict()
        weights = {name: distribute_like(value, own.get(name)) for name, value in weights.items()}
    model.load_state_dict(weights, strict=strict)


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a model; what is no tensor in it is checked to be plain.

    Weights that are cut over processes are put together, on the host: all processes call it."""
    state = own_state(model)
    if mesh_of(model) is None:
        return state
    owners = {name: id(p) for name, p in bare_model(model).named_parameters(remove_duplicate=False)}
    put_together: dict[Any, Any] = {}  # tied weights once
    for name, value in state.items():
        key = owners.get(name, name)
        if key not in put_together:
            put_together[key] = full_tensor(value)
        state[name] = put_together[key]
    return state


def own_state(model: nn.Module) -> dict[str, Any]:
    "Return the same with this process's parts of weights that are cut."
    state = bare_model(model).state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            state[name] = plain(value, name)
    return state
