# SPDX-License-Identifier: Apache-2.0
"""Save and load weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from learnkit.checkpoint.optimizer_state import encode_optimizer
from learnkit.checkpoint.weights import (
    SAFETENSORS,
    Stored,
    check_weights,
    compare_stored,
    load_stored,
    model_state,
    read_weights,
    write_safetensors,
)
from learnkit.comm.dtensor import gather_full_state
from learnkit.core.errors import OptimizerError, OptionError, WeightsError
from learnkit.core.files import as_local_path, atomic_write, check_file
from learnkit.core.model import has_weights
from learnkit.core.validation import warn_user
from learnkit.engine.optimizer import has_foreign_opt
from learnkit.optim.state import is_torch_state
from learnkit.optim.wrapper import OptimWrapper, evaluation_weights

if TYPE_CHECKING:
    from learnkit.learner import Learner


def save(
    learn: Learner,
    *,
    file: str | Path,
    with_opt: bool | None,
) -> Path:
    "Save the weights, and return the path of the file."
    path = find_weights_path(learn, file)
    with evaluation_weights(learn):
        return _write_weights(learn, path, with_opt)


def _write_weights(learn: Learner, path: Path, with_opt: bool | None) -> Path:
    "Write the current weights, and return the path."
    if path.suffix == SAFETENSORS:
        if with_opt:
            raise OptionError(
                f'{path}: this format has no place for the state of an optimizer. Use a file `.pth`, or '
                'leave out `with_opt`.'
            )
        return write_file(learn, path, partial(write_safetensors, model_state(learn.model)))
    if with_opt and learn.opt is None:
        raise OptimizerError(
            'There is no optimizer yet, so its state cannot be saved: leave out `with_opt`, or '
            'call `fit` or `create_opt()` first.'
        )
    state: Any = model_state(learn.model)
    if with_opt is not False and learn.opt is not None:
        state = {
            'model': state,
            'opt': gather_full_state(encode_optimizer(learn.opt.state_dict()), first_only=True),
        }
        if has_weights(learn.loss_func):
            state['loss_func'] = model_state(learn.loss_func)
    return write_file(learn, path, partial(torch.save, state))


def write_file(learn: Learner, path: Path, write: Callable[[Path], None]) -> Path:
    "Write a file atomically in rank 0, and return its path."
    if learn.world.is_first:
        with atomic_write(path) as tmp:
            write(tmp)
    return path


def load(
    learn: Learner,
    file: str | Path,
    *,
    with_opt: bool | None,
    device: torch.device | str | int | None,
    strict: bool,
) -> Any:
    "Load weights written by `save`, `torch.save` of a state dict, fastai or safetensors; return the Learner."
    learn.world.barrier()  # rank 0 may still be writing the file in `save`
    path = find_weights_path(learn, file, to_read=True)
    stored = read_weights(path, None if device is None else torch.device(device))
    opt_state = choose_opt_state(stored, with_opt, path)
    with_loss = opt_state is not None and has_weights(learn.loss_func)
    stored = Stored(stored.model, opt_state, stored.loss_func if with_loss else None)
    with ensure_optimizer(learn, needed=opt_state is not None):
        differences = compare_stored(learn, stored, strict)
        check_weights(path, differences, learn.model, _suggest_fix(differences))
    learn('before_load')
    load_stored(learn, stored, strict)
    if learn.opt is None and any(p.requires_grad for p in learn.model.parameters()):
        learn.create_opt()
    learn('after_load')
    return learn


@contextmanager
def ensure_optimizer(learn: Learner, needed: bool) -> Iterator[None]:
    "Create an optimizer if one is needed and missing, and discard it if the block fails."
    counters = learn.parts.counters
    before = learn.opt, learn.lr, counters.steps
    if needed and (learn.opt is None or has_foreign_opt(learn)):
        learn.create_opt()
    if needed and not isinstance(learn.opt, OptimWrapper):
        learn.opt = OptimWrapper(opt=learn.opt)  # assigned by hand
    try:
        yield
    except BaseException:
        learn.opt, learn.lr, counters.steps = before
        raise


def find_weights_path(learn: Learner, file: Any, to_read: bool = False) -> Path:
    "Return the path of a weights file. A file to read may have another suffix."
    folder = learn.path / as_local_path(learn.model_dir)
    path = resolve_path(file, folder, '' if str(file).endswith(SAFETENSORS) else '.pth')
    given = Path(os.path.abspath(folder / file))
    return given if to_read and given.is_file() and not path.is_file() else path


def check_weights_path(learn: Learner, file: str | Path) -> None:
    "Raise `OptionError` if a weights file of this name cannot be written."
    check_file(find_weights_path(learn, file))


def resolve_path(file: Any, folder: Path, suffix: str = '.pth') -> Path:
    "Return the absolute path of a file in `folder`; raise `OptionError` for an invalid name."
    if not isinstance(file, (str, Path)):
        raise OptionError(
            f'This {type(file).__name__} cannot be a file: pass the name of one. A state dict in memory '
            'is loaded by `learn.model.load_state_dict(...)`.'
        )
    name = str(file)
    as_local_path(name)  # raises for a URL
    if not name.strip() or '\0' in name or name.endswith('/') or Path(name).name in ('', '..'):
        raise OptionError(f'{file!r} cannot be a file: pass a name, or a path that ends in one.')
    # absolute, so that `load` accepts the path that `save` returns
    path = Path(os.path.abspath(folder / (name if name.endswith(suffix) else f'{name}{suffix}')))
    if path.is_dir():
        raise OptionError(f'{path} is a folder: pass the name of a file.')
    return path


def choose_opt_state(stored: Stored, with_opt: bool | None, path: Path) -> Any:
    "Return the optimizer's state to load, or None."
    if with_opt is False or (with_opt is None and stored.opt is None):
        return None
    if is_torch_state(stored.opt):
        return stored.opt
    content = (
        'no optimizer state' if stored.opt is None else "an optimizer state that is not torch's"
    )
    if with_opt:
        raise WeightsError(
            f'{path} has {content}: pass `with_opt=False` for the weights alone. Nothing was loaded.'
        )
    warn_user(
        f'{path} has {content}: only the weights are loaded. Pass `with_opt=False` to load it without this warning.'
    )
    return None


def _suggest_fix(differences: list[str]) -> str:
    kinds = {d.partition(':')[0].split()[0] for d in differences}
    if kinds == {'optimizer'}:
        return ' Pass `with_opt=False` for the weights alone.'
    if kinds <= {'missing', 'unexpected', 'dtype'}:
        return ' Pass `strict=False` to load what fits by name.'
    return ' Build the model with the sizes and layers that it had when it was saved.'
