# SPDX-License-Identifier: Apache-2.0
"""Callbacks that change the training, one small file a theme; names of `learnkit.monitors` are found here too."""

from importlib import import_module
from typing import Any

import lazy_loader

_find, _, _own = lazy_loader.attach_stub(__name__, __file__)
_monitors = import_module('learnkit.monitors')  # a later package: it imports callbacks
__all__ = sorted([*_own, *_monitors.__all__])


def __getattr__(name: str) -> Any:
    "Import a public name when it is first used."
    return getattr(_monitors, name) if name in _monitors.__all__ else _find(name)


def __dir__() -> list[str]:
    return __all__
