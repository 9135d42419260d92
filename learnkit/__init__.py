# SPDX-License-Identifier: Apache-2.0
"""A training loop for PyTorch that a person can read, stop, change and trust.

    learn = Learner(DataLoaders(train, valid), model, loss_func, metrics=accuracy, cbs=[MyCallback()])
    learn.fit(5)

Start with `Learner`, `DataLoaders` and `Callback`. `EVENTS` names the moments of the loop at which callbacks run; the
`Cancel...Exception` classes skip what comes next. `doc(Learner.fit)` shows what each parameter means."""

from importlib import import_module
from typing import Any

import lazy_loader

from learnkit.core.contexts import paused_collection
from learnkit.core.version import VERSION

_find, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__version__ = VERSION

# packages whose names an error suggests
_SEARCHED = 'callbacks monitors loggers data interop distributed testing'.split()


def __getattr__(name: str) -> Any:
    "Import a public name when it is first used."
    try:
        with paused_collection():
            return _find(name)
    except AttributeError:
        if name.startswith('_'):
            raise
    from learnkit.core.hints import suggest_class

    packages = ['learnkit', *(f'learnkit.{package}' for package in _SEARCHED)]
    hint = suggest_class(name, {package: import_module(package).__all__ for package in packages})
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}.{hint}', name=name)


def load_ipython_extension(shell: Any) -> None:
    "Show the comments of parameters in the help of IPython and Jupyter, after `%load_ext learnkit`."
    from learnkit.debug.notebook import prepare_shell

    prepare_shell(shell)
