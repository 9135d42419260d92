# SPDX-License-Identifier: Apache-2.0
"""The digest of a Learner: everything that training or another method can change."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from learnkit.checkpoint.digest import WALL_CLOCK, differences, digest
from learnkit.checkpoint.state import collect_state
from learnkit.comm.dtensor import gather_full_state
from learnkit.core.errors import OptionError
from learnkit.core.model import bare_model
from learnkit.core.random import MODULE_INTERNALS, capture_own
from learnkit.data.dataloaders import evaluation_loaders
from learnkit.engine.callback_state import encode

if TYPE_CHECKING:
    from learnkit.learner import Learner

__all__ = ['WALL_CLOCK', 'differences', 'digest', 'learn_digest', 'learn_state']


def learn_digest(
    learn: Learner,
    folder: Path | None = None,  # folder of the run, whose files are included
) -> str:
    """Return the digest of everything in a Learner that training or another method can change.

    This covers what a checkpoint holds, outside of a fit too, and in addition: the mode, the hooks, `requires_grad`
    and the plain attributes of every module; the random generators in loaders and callbacks; which callbacks there
    are, and when they run; the settings of the Learner; and the files of a folder.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner()
    >>> before = learn_digest(learn)
    >>> learn_digest(learn) == before
    True
    >>> _ = torch.rand(1)
    >>> learn_digest(learn) == before
    False
    """
    return digest(learn_state(learn, folder))


def learn_state(
    learn: Learner,
    folder: Path | None = None,  # folder of the run, whose files are included
) -> dict[str, Any]:
    "Return the state that `learn_digest` hashes, for `differences`. Its tensors are not copied."
    state: dict[str, Any] = gather_full_state(collect_state(learn, ''))
    for part in ('model', 'loss_func'):
        weights = state[part] or {}
        state[part] = {name: _mark_lazy(value) for name, value in weights.items()}
    keys = learn.parts.callbacks.keys
    loaders = [('train', learn.dls.train), *evaluation_loaders(learn.dls)]
    return {
        **state,
        'modules': _describe_modules(bare_model(learn.model)),
        'loss_modules': _describe_modules(learn.loss_func),
        'loaders': {name: capture_own(dl) for name, dl in loaders},
        'cbs': [[keys[id(cb)], cb.run, cb.run_train, cb.run_valid] for cb in learn.cbs],
        'cb_generators': {keys[id(cb)]: capture_own(cb) for cb in learn.cbs},
        'settings': {k: v for k, v in vars(learn).items() if type(v) in (bool, int, float, str)},
        'grad_enabled': torch.is_grad_enabled(),
        'files': {} if folder is None else _read_files(folder),
    }


def _mark_lazy(value: Any) -> Any:
    "Return the class name in place of a parameter or buffer that has no values yet."
    return type(value).__name__ if isinstance(value, Tensor) and is_lazy(value) else value


def _describe_modules(root: Any) -> dict[str, Any]:
    "Return mode, number of hooks, `requires_grad` and plain attributes of each module, by name."
    if not isinstance(root, nn.Module):
        return {}
    return {
        name: {
            'training': m.training,
            'hooks': sum(len(v) for k, v in vars(m).items() if k.endswith('_hooks')),
            'requires_grad': {k: p.requires_grad for k, p in m.named_parameters(recurse=False)},
            'attributes': _collect_plain(m),
        }
        for name, m in root.named_modules()
    }


def _collect_plain(m: nn.Module) -> dict[str, Any]:
    "Return the attributes of a module that are plain data, except the attributes that every module has."
    plain = {}
    for name, value in vars(m).items():
        if name not in MODULE_INTERNALS:
            with suppress(OptionError, RecursionError, TypeError, ValueError):
                plain[name] = encode(value)
    return plain


def _read_files(folder: Path) -> dict[str, bytes]:
    "Return the contents of all files in a folder, by relative path."
    paths = sorted(path for path in folder.rglob('*') if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
