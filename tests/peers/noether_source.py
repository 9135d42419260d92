"""Make a copy of Noether's repository importable as `noether`, also with Python 3.11."""

from __future__ import annotations

import sys
import types
import typing
from typing import Any

import typing_extensions

from tests.peers.wild import Files
from tests.peers.wild_sources import REPOSITORIES

REPOSITORY = REPOSITORIES['noether'].name
BIDICT = 'noether.core.utils.bidict'  # its one file with the syntax of Python 3.12


def import_noether() -> None:
    "Add the copy to the path, and what Python 3.11 lacks."
    source = Files(REPOSITORY, {}).folder / 'src'
    sys.path.insert(0, str(source))
    vars(typing).setdefault('override', typing_extensions.override)
    text = (source / f'{BIDICT.replace(".", "/")}.py').read_text('utf-8')
    text = text.replace('class Bidict[KT, VT]:', 'class Bidict(Generic[KT, VT]):')
    module = types.ModuleType(BIDICT)
    names: dict[str, Any] = {name: typing.TypeVar(name) for name in ('KT', 'VT')}
    vars(module).update(names, Generic=typing.Generic)
    exec(text, vars(module))
    sys.modules[BIDICT] = module


import_noether()
