# SPDX-License-Identifier: Apache-2.0
"""Options of Lightning's Trainer: read and check them, and find the package whose classes are the defaults."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch

from learnkit.core.device import find_accelerator
from learnkit.core.errors import OptionError

PACKAGES = ('lightning.pytorch', 'pytorch_lightning')
PROFILERS = {
    'simple': 'SimpleProfiler',
    'advanced': 'AdvancedProfiler',
    'pytorch': 'PyTorchProfiler',
}
# options that have no effect here but their default, and what takes their place
REFUSED = {
    'num_nodes': (1, 'one node is supported; several are started by `torchrun` with a `Learner`'),
    'barebones': (False, 'leave out callbacks, loggers and the bar one by one'),
    'plugins': (None, 'pass `precision` and `strategy` as strings'),
    'sync_batchnorm': (False, 'convert the module with `nn.SyncBatchNorm.convert_sync_batchnorm`'),
    'model_registry': (None, 'upload `trainer.checkpoint_callback.best_model_path`'),
}
STRATEGIES = ('auto', 'ddp', 'ddp_notebook', 'ddp_spawn', 'ddp_find_unused_parameters_true')
# '': the accelerator that torch finds
DEVICES = {'auto': '', 'cpu': 'cpu', 'gpu': '', 'cuda': 'cuda', 'mps': 'mps'}
AUTOCASTS = {'16-mixed': 'fp16', '16': 'fp16', 'bf16-mixed': 'bf16', 'bf16': 'bf16'}
WEIGHT_TYPES = {
    '64-true': torch.float64,
    '64': torch.float64,
    'bf16-true': torch.bfloat16,
    '16-true': torch.float16,
}
SINGLE = ('32-true', '32')


def check_refused(options: Mapping[str, Any]) -> None:
    "Raise `OptionError` for an option of Lightning's Trainer that does nothing here."
    for name, (default, fix) in REFUSED.items():
        if options[name] != default:
            raise OptionError(f'Trainer({name}={options[name]!r}) is not supported: {fix}.')


def find_package() -> str | None:
    "Return the name of the package of Lightning that the program has imported, or None."
    return next((name for name in PACKAGES if name in sys.modules), None)


def make_default(path: str, *args: Any, **kwargs: Any) -> Any:
    "Return an instance of a class of the imported package of Lightning, such as `callbacks.Timer`; None without one."
    package = find_package()
    if package is None:
        return None
    module, _, name = path.rpartition('.')
    return getattr(import_module(f'{package}.{module}'), name)(*args, **kwargs)


@dataclass
class Precision:
    "`precision` of the Trainer: autocast, or the type of the weights."

    name: str = '32-true'
    autocast: str = ''  # mode of `MixedPrecision`; '': none
    dtype: torch.dtype | None = None  # type of weights and inputs; None: as they are


def read_precision(precision: Any) -> Precision:
    "Return what a `precision` means; raise `OptionError` for an unknown one."
    name = '32-true' if precision is None else str(precision)
    if name in AUTOCASTS:
        return Precision(f'{name.partition("-")[0]}-mixed', autocast=AUTOCASTS[name])
    if name in WEIGHT_TYPES:
        return Precision(f'{name.partition("-")[0]}-true', dtype=WEIGHT_TYPES[name])
    if name in SINGLE:
        return Precision()
    known = ', '.join([*SINGLE, *AUTOCASTS, *WEIGHT_TYPES])
    raise OptionError(f'Trainer(precision={precision!r}) is not supported: one of {known}.')


def read_device(accelerator: Any, devices: Any) -> torch.device:
    """Return the device to train on.

    Raises `OptionError` for accelerators that torch does not have, and for several devices without their processes.
    """
    if accelerator not in DEVICES:
        known = ', '.join(DEVICES)
        raise OptionError(f'Trainer(accelerator={accelerator!r}) is not supported: one of {known}.')
    numbers = list(devices) if isinstance(devices, (list, tuple)) else None
    n = len(numbers) if numbers is not None else devices
    if n not in ('auto', -1, '-1') and int(n) > 1:
        raise OptionError(
            f'Trainer(devices={devices!r}): one process trains on one device. Start several with `torchrun`, and '
            'call `learn.distributed()` of `from_lightning(module, data)`.'
        )
    found = find_accelerator()
    default = 'cpu' if found is None else found.type
    kind = DEVICES[accelerator] or default
    if accelerator in ('gpu', 'cuda', 'mps') and (found is None or kind != found.type):
        raise OptionError(f'Trainer(accelerator={accelerator!r}): torch finds no such device here.')
    if kind == 'cpu' or not numbers:
        return torch.device(kind)
    return torch.device(kind, int(numbers[0]))


def check_alone(
    n: Any,  # number of processes that train together
) -> None:
    "Raise `OptionError` if a Trainer would run in one of several processes."
    if str(n) != '1':
        raise OptionError(
            f'A Trainer runs in one process, and this is one of {n}. Take `learn = from_lightning(module, data)` '
            'without a Trainer, and put `with learn.distributed():` around `learn.fit(n)`.'
        )


def check_strategy(strategy: Any) -> None:
    "Raise `OptionError` for a strategy that a run on one device does not have."
    if strategy not in STRATEGIES:
        known = ', '.join(STRATEGIES)
        raise OptionError(
            f'Trainer(strategy={strategy!r}) is not supported: one of {known}, or `learn.distributed()` of '
            '`from_lightning(module, data)`.'
        )


def read_limit(name: str, limit: Any) -> int | float:
    "Return a limit: a whole number of batches, or a share; None is all of them."
    if limit is None:
        return 1.0
    if isinstance(limit, int) or 0 <= limit <= 1:
        found: int | float = limit
        return found
    if limit % 1 == 0:
        return int(limit)
    raise OptionError(f'Trainer({name}={limit!r}): pass a share from 0.0 to 1.0, or a number.')


def limit_batches(name: str, n: float, limit: int | float) -> float:
    "Return how many of `n` batches remain within a limit, where `n` is infinite for an unknown length."
    if isinstance(limit, int):
        return min(n, limit)
    if limit == 1.0 or limit == 0.0 or n == 0:
        return n if limit else 0
    if n == float('inf'):
        raise OptionError(f'Trainer({name}={limit}): a loader without a length takes a number.')
    if int(n * limit) == 0:
        raise OptionError(f'Trainer({name}={limit}) of {n} batches is less than one batch.')
    return int(n * limit)


def read_seconds(interval: Any) -> float | None:
    "Return the seconds of a `timedelta`, a dict of its arguments, or 'days:hours:minutes:seconds'; None for a number."
    if isinstance(interval, str):
        names = ('days', 'hours', 'minutes', 'seconds')
        parts = interval.split(':')
        if len(parts) != len(names) or not all(part.isdigit() for part in parts):
            raise OptionError(f"Trainer(val_check_interval={interval!r}): pass 'DD:HH:MM:SS'.")
        interval = dict(zip(names, map(int, parts), strict=True))
    if isinstance(interval, Mapping):
        interval = timedelta(**interval)
    return interval.total_seconds() if isinstance(interval, timedelta) else None


def read_epochs(
    max_epochs: int | None, max_steps: int, has_limit: bool
) -> int:  # -1: no limit of epochs
    "Return the number of epochs to train: 1000 if nothing else ends the fit, as in Lightning."
    if max_epochs is not None:
        return max_epochs
    return -1 if max_steps != -1 or has_limit else 1000


def set_determinism(deterministic: bool | str | None, benchmark: bool | None) -> None:
    "Set torch's switches of `deterministic` and `benchmark`, as Lightning does; None leaves them."
    if deterministic is not None:
        torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == 'warn')
    if deterministic:
        os.environ['CUBLAS_WORKSPACE_CONFIG'] = ':4096:8'
        benchmark = False if benchmark is None else benchmark
    if benchmark is not None:
        torch.backends.cudnn.benchmark = benchmark
