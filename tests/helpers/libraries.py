"""Optional libraries: tests of a library that is listed here are skipped where it is not installed."""

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

# installed by `.[dev]`: with LEARNKIT_ALL_LIBRARIES in the environment a test that misses one fails
DEV = set(
    """IPython PIL cloudpickle datasets furo gymnasium huggingface_hub ipykernel jupyter_client jupyterlab matplotlib
    mlflow myst_nb nbclient nbconvert nbformat onnx onnxruntime onnxscript optuna pandas peft playwright psutil
    pytorch_optimizer schedulefree scipy setuptools sklearn sphinx tensorboard torchdata torchmetrics transformers
    wandb""".split()
)
OTHER = set(
    'accelerate fastai flask moto opacus ray resource s3fs'.split()
)  # `resource` is Python's, on Unix alone


def skip_if_absent(module: str | None) -> None:
    "Skip the test if the library of a module is listed and not installed."
    library = (module or '').partition('.')[0]
    if library not in DEV | OTHER or find_spec(library) is not None:
        return
    if library in DEV and os.environ.get('LEARNKIT_ALL_LIBRARIES'):
        pytest.fail(f'{library} is not installed; .[dev] installs it')
    pytest.skip(f'needs {library}', allow_module_level=True)


def import_or_skip(module: str) -> Any:
    "Import a module; skip the test if its library is listed and not installed."
    try:
        return import_module(module)
    except ModuleNotFoundError as e:
        skip_if_absent(e.name)
        raise


class Library:
    "A module that is imported when its first attribute is read, which keeps collection fast."

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        # pytest looks for its marks on whatever a file has, at which `importlib.util.LazyLoader` would import
        if name.startswith('_'):
            raise AttributeError(name)
        return getattr(import_module(self._name), name)


def require(*names: str) -> Any:
    "Skip the tests of a file if a library is not installed; return the last library as a lazy module."
    for name in names:
        skip_if_absent(name)
    return Library(names[-1])
