"""Commands of the package: `python -m learnkit --version`, `env` for bug reports, and `demo`."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from learnkit.core.version import VERSION

__all__ = ['describe_environment', 'main']

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
    try:
        return version(package)
    except PackageNotFoundError:
        return ''


def _describe_devices() -> list[str]:
    import torch

    lines = [f'CPU: {os.cpu_count()} cores, {torch.get_num_threads()} threads of torch']
    if torch.cuda.is_available():
        runtime = torch.version.cuda or torch.version.hip
        properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        lines += [
            f'GPU {i}: {p.name}, {p.total_memory / 2**30:.0f} GiB (runtime {runtime})'
            for i, p in enumerate(properties)
        ]
    elif torch.backends.mps.is_available():
        lines.append('GPU: mps')
    else:
        lines.append('GPU: none that torch can use')
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    "Run a command and return the process's exit code."
    parser = argparse.ArgumentParser(
        prog='python -m learnkit', description='A training loop for PyTorch.', allow_abbrev=False
    )
    parser.add_argument('--version', action='version', version=f'learnkit {VERSION}')
    commands = parser.add_subparsers(title='commands', dest='command', required=True)
    commands.add_parser('env', help='print versions and devices, for a bug report')
    commands.add_parser(
        'demo', help='train on handwritten digits; `demo --help` lists the options', add_help=False
    )
    options, rest = parser.parse_known_args(argv)
    if options.command == 'demo':
        import torch

        from learnkit import demo

        torch.set_num_threads(1)  # a second thread does not speed up images this small
        return demo.main(rest)
    if rest:
        parser.error(f'unrecognized arguments: {" ".join(rest)}')
    print(describe_environment())
    return 0


if __name__ == '__main__':
    sys.exit(main())
