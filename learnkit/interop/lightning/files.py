# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Lightning, and the state of a LightningModule that is not weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from learnkit.core.errors import CheckpointError
from learnkit.engine.callback_state import decode, encode
from learnkit.interop.common.hooks import keep_plain
from learnkit.interop.lightning.host import LightningHost
from learnkit.metrics.state import collect_torchmetrics, list_parts, set_states


def dump_checkpoint(trainer: Any, weights_only: bool) -> dict[str, Any]:
    "Return the contents of a checkpoint of Lightning."
    module: Any = trainer.model
    checkpoint: dict[str, Any] = {
        'epoch': trainer.current_epoch,
        'global_step': trainer.global_step,
        'pytorch-lightning_version': '2.6.0',  # the format
        'state_dict': module.state_dict(),
        'loops': {'fit_loop': dump_progress(trainer)},
    }
    if not weights_only:
        states = {cb: cb.state_dict() for cb in trainer.callbacks if hasattr(cb, 'state_dict')}
        named = {find_state_key(cb): sd for cb, sd in states.items()}
        checkpoint['callbacks'] = {key: sd for key, sd in named.items() if sd}
        checkpoint['optimizer_states'] = [opt.state_dict() for opt in trainer.optimizers]
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        checkpoint['lr_schedulers'] = [scheduler.state_dict() for scheduler in schedulers]
    if getattr(module, 'hparams', None):
        checkpoint['hparams_name'] = getattr(module, '_hparams_name', None)
        checkpoint['hyper_parameters'] = dict(module.hparams)
    add_datamodule(trainer.datamodule, checkpoint)
    trainer.host.fire('on_save_checkpoint', checkpoint)
    return checkpoint


def add_datamodule(datamodule: Any, checkpoint: dict[str, Any]) -> None:
    "Add the state and the hyperparameters of a data module to a checkpoint of Lightning."
    if datamodule is None:
        return
    state = datamodule.state_dict() if hasattr(datamodule, 'state_dict') else None
    if state:
        checkpoint[type(datamodule).__qualname__] = state
    if getattr(datamodule, 'hparams', None):
        checkpoint['datamodule_hparams_name'] = getattr(datamodule, '_hparams_name', None)
        checkpoint['datamodule_hyper_parameters'] = dict(datamodule.hparams)


def dump_progress(trainer: Any) -> dict[str, Any]:
    "Return the epochs and batches of a fit by Lightning's names."
    loop = trainer.fit_loop
    epochs, batches = loop.epoch_progress.current, loop.batch_progress.current
    return {
        'epoch_progress': {'current': vars(epochs)},
        'epoch_loop.batch_progress': {
            'current': vars(batches),
            'is_last_batch': trainer.host.is_last_batch,
        },
    }


def find_state_key(cb: Any) -> str:
    "Return the key of a callback's state in a checkpoint of Lightning."
    key: str = getattr(cb, 'state_key', type(cb).__name__)
    return key


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    "Read a checkpoint of Lightning; raise `CheckpointError` for another file, or for one that holds objects."
    try:
        checkpoint = torch.load(path, map_location='cpu', weights_only=True)
    except UnpicklingError as e:
        raise CheckpointError(
            f'{path} holds more than tensors and plain values, and loading it could run code: {e}'
        ) from None
    if not isinstance(checkpoint, dict) or 'state_dict' not in checkpoint:
        raise CheckpointError(f'{path} is not a checkpoint of Lightning: it has no `state_dict`.')
    return checkpoint


def find_first_epoch(path: str | Path, checkpoint: Mapping[str, Any]) -> int:
    """Return the epoch that follows a checkpoint of Lightning.

    Raises `CheckpointError` within an epoch, where Lightning would begin the loader again."""
    loop = checkpoint.get('loops', {}).get('fit_loop', {})
    if 'epoch_progress' not in loop:
        return int(checkpoint.get('epoch', -1)) + 1
    current, batches = loop['epoch_progress']['current'], loop['epoch_loop.batch_progress']
    processed: int = current['processed']
    if current['started'] == processed:
        return processed
    if not batches['is_last_batch']:
        raise CheckpointError(
            f'{path} was written within epoch {processed}, and holds no position in the data: '
            '`Trainer(resume=True)` continues at the exact batch.'
        )
    return processed + 1


def load_weights(trainer: Any, checkpoint: Mapping[str, Any]) -> None:
    "Load the module, its data module and the states of callbacks from a checkpoint of Lightning."
    host, module = trainer.host, trainer.model
    datamodule = trainer.datamodule
    state = checkpoint.get(type(datamodule).__qualname__)
    if datamodule is not None and state is not None:
        datamodule.load_state_dict(state)
    load = host.find_own('on_load_checkpoint')
    if load is not None:
        load(checkpoint)
    module.load_state_dict(checkpoint['state_dict'], strict=getattr(module, 'strict_loading', True))
    if trainer.fn != 'fit':
        return
    host.fire_callbacks('on_load_checkpoint', checkpoint)
    states = checkpoint.get('callbacks', {})
    for cb in trainer.callbacks:
        if find_state_key(cb) in states:
            cb.load_state_dict(states[find_state_key(cb)])


def load_optimizers(trainer: Any, checkpoint: Mapping[str, Any]) -> None:
    "Load optimizers, schedulers and the number of steps from a checkpoint of Lightning."
    for opt, state in zip(trainer.optimizers, checkpoint.get('optimizer_states', ()), strict=False):
        opt.load_state_dict(state)
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    for scheduler, state in zip(schedulers, checkpoint.get('lr_schedulers', ()), strict=False):
        scheduler.load_state_dict(state)
    trainer.host.optimization.n_steps = checkpoint.get('global_step', 0)


def plain_attributes(module: Any) -> dict[str, Any]:
    "Return the public attributes of a module that are plain data, encoded."
    own = {k: v for k, v in vars(module).items() if not k.startswith('_') and k != 'training'}
    return keep_plain(own)


def list_saved(module: Any) -> list[str]:
    "Return the names of the attributes that `module_state` holds."
    metrics = list_parts(module).items()
    return [
        *(f'model.{name}' for name in plain_attributes(module)),
        *(f'model.{path}.{name}' for path, metric in metrics for name in vars(metric)),
    ]


def module_state(host: LightningHost) -> dict[str, Any]:
    "Return the state of a module that is not weights: metrics, plain public attributes, what its hook adds."
    module = host.module
    checkpoint: dict[str, Any] = {'state_dict': module.state_dict()}
    save = host.find_own('on_save_checkpoint')
    if save is not None:
        save(checkpoint)
    del checkpoint['state_dict']
    return {
        'checkpoint': encode(checkpoint),
        'attributes': plain_attributes(module),
        'torchmetrics': collect_torchmetrics(module),
    }


def load_module_state(host: LightningHost, sd: Mapping[str, Any]) -> None:
    "Restore the state that `module_state` returned."
    module = host.module
    load = host.find_own('on_load_checkpoint')
    if load is not None:
        load({'state_dict': module.state_dict(), **decode(sd['checkpoint'], host)})
    vars(module).update(decode(sd['attributes'], host))
    for path, metric in list_parts(module).items():
        if path in sd['torchmetrics']:
            state = sd['torchmetrics'][path]
            set_states(metric, decode(encode(state), host))
