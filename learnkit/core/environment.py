# SPDX-License-Identifier: Apache-2.0
"""Versions of libraries, and the devices of this machine."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from learnkit.core.version import VERSION

REQUIRED = 'torch fastcore numpy tqdm lazy_loader safetensors filelock'.split()
OPTIONAL = (
    'matplotlib scikit-learn pandas torchmetrics transformers pytorch_optimizer schedulefree psutil tensorboard '
    'wandb mlflow mlflow-skinny cloudpickle ray onnx onnxruntime torchvision ipykernel jupyterlab'
).split()


def describe_environment() -> str:
    """Return versions and devices as lines of text, for bug reports; paths and host names are left out.

    >>> describe_environment().splitlines()[0] == f'learnkit: {VERSION}'
    True
    """
    versions = {name: _find_version(name) for name in [*REQUIRED, *OPTIONAL]}
    lines = [
        f'learnkit: {VERSION}',
        f'Python: {platform.python_version()} ({platform.python_implementation()})',
        f'system: {platform.system()} {platform.release()} {platform.machine()}',
        *_describe_devices(),
        *(f'{name}: {versions[name] or "not installed"}' for name in REQUIRED),
        *(f'{name}: {versions[name]}' for name in OPTIONAL if versions[name]),
    ]
    return '\n'.join(lines)


def _find_version(package: str) -> str:
    "Return the version of an installed package, or an empty string."
    import torch

    try:
        # torch's own version names its build, too
        return torch.__version__ if package == 'torch' else version(package)
    except PackageNotFoundError:
        return ''


def _describe_devices() -> list[str]:
    "Return lines with the CPU and the GPUs."
    import torch

    lines = [f'CPU: {os.cpu_count()} cores, {torch.get_num_threads()} threads of torch']
    if torch.cuda.is_available():
        runtime = torch.version.cuda or torch.version.hip
        properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        lines += [
            f'GPU {i}: {p.name}, {p.total_memory / 2**30:.0f} GiB (runtime {runtime})'
            for i, p in enumerate(properties)
        ]
    elif torch.accelerator.is_available():
        kind, n = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
        lines.append(f'GPU: {kind}, {n}')
    else:
        lines.append('GPU: none that torch can use')
    return lines
