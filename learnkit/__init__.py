"""A training loop for PyTorch that a person can read, stop, change and trust.

    learn = Learner(DataLoaders(train, valid), model, loss_func, metrics=accuracy, cbs=[MyCallback()])
    learn.fit(5)

Start with `Learner`, `DataLoaders` and `Callback`. `EVENTS` names the moments of the loop at which callbacks run; the
`Cancel...Exception` classes skip what comes next. `doc(Learner.fit)` shows what each parameter means."""

from typing import Any

import lazy_loader

from learnkit.core.version import VERSION

_find, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__version__ = VERSION


def __getattr__(name: str) -> Any:
    "Import a public name when it is first used; metrics, losses and optimizers are found here as well."
    try:
        return _find(name)
    except AttributeError:
        if name.startswith('_'):
            raise
    from importlib import import_module

    for package in ('metrics', 'losses', 'optim'):
        module = import_module(f'learnkit.{package}')
        if name in module.__all__:
            return getattr(module, name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}', name=name)
