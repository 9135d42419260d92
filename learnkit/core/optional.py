# SPDX-License-Identifier: Apache-2.0
"""Import of optional libraries, with an error that contains the command to install a missing library."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from learnkit.core.errors import MissingExtraError

# modules whose package has another name
_PACKAGES = {'sklearn': 'scikit-learn', 'PIL': 'pillow', 'smbclient': 'smbprotocol'}


def describe_missing(
    who: str,  # object that needs the libraries, for the start of the message
    *modules: str,  # names of the modules that are missing
) -> str:
    """Return the message for missing libraries, with the command that installs them.

    >>> describe_missing('SystemMonitor', 'psutil')
    'SystemMonitor needs psutil: pip install psutil'
    """
    packages = [_PACKAGES.get(module, module) for module in modules]
    return f'{who} needs {" and ".join(packages)}: pip install {" ".join(packages)}'


def check_libraries(
    who: str,  # object that needs the libraries
    *modules: str,  # names of their top-level modules
) -> None:
    "Raise `MissingExtraError` if a library is not installed, without importing it."
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise MissingExtraError(describe_missing(who, *missing), name=missing[0])


def import_library(
    module: str,  # dotted name of the module
    who: str,  # object that needs the library
    hint: str = '',  # text appended to the message, such as an alternative
) -> Any:
    "Import a module of an optional library; raise `MissingExtraError` if the library is not installed."
    try:
        return import_module(module)
    except ModuleNotFoundError as e:
        library = (e.name or module).split('.')[0]
        if find_spec(library) is not None:  # installed, without this module
            raise
        raise MissingExtraError(describe_missing(who, library) + hint, name=library) from e
