"""A training loop for PyTorch that a person can read, stop, change and trust.

    learn = Learner(DataLoaders(train, valid), model, loss_func, metrics=accuracy, cbs=[MyCallback()])
    learn.fit(5)

Start with `Learner`, `DataLoaders` and `Callback`. `EVENTS` names the moments of the loop at which callbacks run; the
`Cancel...Exception` classes skip what comes next. `doc(Learner.fit)` shows what each parameter means."""

import sys
from importlib import import_module
from types import FrameType
from typing import Any

import lazy_loader

from learnkit.core.contexts import paused_collection
from learnkit.core.version import VERSION

_find, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__version__ = VERSION

# packages whose names an error suggests
_SEARCHED = 'callbacks loggers metrics losses optim data interop distributed testing'.split()


def __getattr__(name: str) -> Any:
    "Import a public name when it is first used; metrics, losses and optimizers are found here as well."
    try:
        with paused_collection():
            return _find(name)
    except AttributeError:
        if name.startswith('_'):
            raise
    for package in ('metrics', 'losses', 'optim'):
        module = import_module(f'learnkit.{package}')
        if name in module.__all__:
            return getattr(module, name)
    from learnkit.core.hints import suggest_class

    packages = ['learnkit', *(f'learnkit.{package}' for package in _SEARCHED)]
    hint = suggest_class(name, {package: import_module(package).__all__ for package in packages})
    if _is_import(sys._getframe(1)):  # which would replace the message of an AttributeError
        raise ImportError(f'cannot import name {name!r} from {__name__!r}.{hint}', name=__name__)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}.{hint}', name=name)


def _is_import(frame: FrameType) -> bool:
    "Return True if a frame executes `from ... import ...`."
    from opcode import opmap  # rarely needed

    return frame.f_code.co_code[frame.f_lasti] == opmap['IMPORT_FROM']


if (_ipython := sys.modules.get('IPython')) and (_shell := _ipython.get_ipython()):
    from learnkit.debug.notebook import prepare_shell

    prepare_shell(_shell)
