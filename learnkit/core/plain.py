"""Plain data: what loads without running code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from learnkit.core.errors import OptionError

__all__ = ['plain']


def plain(
    value: Any,  # a state or a configuration
    where: str,  # its name, for the message
) -> Any:
    """Return `value` made of what loads safely: tensors, numbers, texts, None, and lists, tuples and dicts of them.

    NumPy's numbers become Python's. Raises `OptionError` that names the place of anything else.

    >>> plain({'lr': np.float32(0.5), 'sizes': [1, 2]}, 'opt')
    {'lr': 0.5, 'sizes': [1, 2]}
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (Tensor, bool, int, float, complex, str, bytes)):
        return value
    if isinstance(value, Mapping):
        return {k: plain(v, f'{where}[{k!r}]') for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(
            plain(v, f'{where}[{i}]') for i, v in enumerate(value)
        )
    raise OptionError(
        f'{where} is a {type(value).__name__}, which would not load safely. Keep tensors, numbers, '
        'texts, and lists, tuples or dicts of them.'
    )
