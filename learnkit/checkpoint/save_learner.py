# SPDX-License-Identifier: Apache-2.0
"""Save a Learner without its code, and create a Learner from the file without executing code from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from learnkit.checkpoint.save_load import resolve_path, write_file
from learnkit.checkpoint.weights import (
    FORMAT,
    check_weights,
    compare_weights,
    load_weights,
    model_state,
    read_weights,
)
from learnkit.core.batch import form_of
from learnkit.core.errors import EmptyLoaderError, ModelError, OptionError, WeightsError
from learnkit.core.model import bare_model, name_of, unwrap_partial
from learnkit.core.plain import to_plain
from learnkit.core.validation import warn_user
from learnkit.data.dataloaders import DataLoaders
from learnkit.optim.wrapper import evaluation_weights

if TYPE_CHECKING:
    from learnkit.learner import Learner

# the Learner's arguments in a configuration
OPTIONS = ('lr', 'wd', 'wd_bn_bias', 'moms', 'train_bn')


# -- writing ---------------------------------------------------------------------------------------


def save_learner(
    learn: Learner,
    fname: str | Path = 'learner.pth',
    /,
    **model_config: Any,
) -> Path:
    "Save weights and configuration in one file for `load_learner`, and return its path."
    path = resolve_path(fname, learn.path, suffix='')
    config = {**_collect_config(learn), 'model_config': to_plain(model_config, 'model_config')}
    with evaluation_weights(learn):
        state = {'learnkit': FORMAT, 'config': config, 'model': model_state(learn.model)}
        return write_file(learn, path, partial(torch.save, state))


def _collect_config(learn: Learner) -> dict[str, Any]:
    "Return a Learner's configuration as plain values: everything except weights, data and code."
    loss = unwrap_partial(learn.loss_func)
    vocab = getattr(learn.dls, 'vocab', None)
    config = {
        'model': type(bare_model(learn.model)).__name__,
        'loss_func': name_of(loss) if loss is not None else None,
        'activates': hasattr(loss, 'activation'),
        'n_inp': form_of(learn.dls, 'valid').n_inp,
        'vocab': None if vocab is None else [*vocab],
        'wd': learn.wd,
        'wd_bn_bias': learn.wd_bn_bias,
        'moms': tuple(learn.moms),
        'train_bn': learn.train_bn,
    }
    if isinstance(learn.lr, Real):
        config['lr'] = float(learn.lr)
    return {name: to_plain(value, name) for name, value in config.items()}


# -- reading ---------------------------------------------------------------------------------------


class MissingLoader:
    "Placeholder for the training loader of a Learner without data; raises `EmptyLoaderError` when used."

    def __iter__(self) -> Iterator[Any]:
        raise EmptyLoaderError(
            'This Learner was loaded without data: pass them, `load_learner(path, model=..., '
            'dls=dls)`, or set `learn.dls`.'
        )

    __len__: Any = __iter__


class MissingData(DataLoaders):
    "Placeholder for the `DataLoaders` of a Learner without data."

    def __init__(
        self, device: torch.device | str | None, path: Path, n_inp: int | None, vocab: Any
    ) -> None:
        super().__init__([None], device=device, path=path, n_inp=n_inp)
        self.train = MissingLoader()
        self.vocab = vocab

    def __repr__(self) -> str:
        return 'No data'


def build_learner(
    make: Callable[..., Any],  # class of the Learner
    path: Path,  # file written by `learn.save_learner`
    model: nn.Module | Callable[..., nn.Module] | None,
    dls: Any,
    loss_func: Callable[..., Any] | None,
    device: torch.device | str | None,
    **kwargs: Any,  # further arguments of `make`; they override the file's
) -> Any:
    "Create a Learner from a file; see `learnkit.load_learner`."
    stored = read_weights(path)
    if stored.config is None:
        raise WeightsError(
            f'{path} holds weights without a configuration: build a Learner and call its `load`, or '
            'write the file with `learn.save_learner`.'
        )
    config = stored.config
    built = _build_model(path, model, config)
    check_weights(path, compare_weights(built, stored.model), built)
    if loss_func is None and config.get('activates'):
        warn_user(
            f'The Learner in {path} had the loss {config.get("loss_func")}, which turns outputs into '
            'predictions. Pass `loss_func=` to have them activated and decoded as they were.'
        )
    if dls is None:
        dls = MissingData(device, path.parent, config.get('n_inp'), config.get('vocab'))
    options = {name: config[name] for name in OPTIONS if name in config}
    learn = make(dls, built, loss_func, **{**options, 'path': path.parent, **kwargs})
    load_weights(built, stored.model)
    return learn


def _build_model(path: Path, model: Any, config: dict[str, Any]) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    model_config = config.get('model_config', {})
    arguments = ', '.join(f'{k}={v!r}' for k, v in model_config.items())
    if not callable(model):
        raise OptionError(
            f'{path} holds the weights and configuration of a {config["model"]}, and no code. Say what builds the '
            f'model: `load_learner(path, model=build)` calls `build({arguments})`; this is model={model!r}.'
        )
    try:
        built = model(**model_config)
    except TypeError as e:
        e.add_note(f'It was called with the configuration in {path}: {arguments or "nothing"}.')
        raise
    if isinstance(built, nn.Module):
        return built
    raise ModelError(f'model={model!r} built a {type(built).__name__}, not an nn.Module.')
