"""What is said beside an error of somebody else's, and where warnings point: at the user's own line."""
from __future__ import annotations

import contextlib
import sys
from inspect import signature
from pathlib import Path
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn

from learnkit.batch import map_tensors

__all__ = ['takes', 'warn_user', 'precision_hint', 'classes_hint']

# files whose lines tell a user nothing: the package's, and those that call it back
_NOT_THE_USERS = (str(Path(__file__).parent), contextlib.__file__, str(Path(torch.__file__).parent))


def warn_user(text: str) -> None:
    "Warn at the line that led into the package."
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    warn(text, stacklevel=level)


def precision_hint(b: Any, model: nn.Module) -> str:
    """Say what to do about float64 in a batch, which NumPy makes, and a model in float32; for any other an empty text.

    >>> precision_hint((torch.zeros(2, 3, dtype=torch.float64),), nn.Linear(3, 1))
    ". The model is in float32, NumPy's numbers are float64: give it `x.astype('float32')`, or of a tensor `x.float()`"
    """
    found: set[torch.dtype] = set()
    def note(t: Tensor) -> Tensor: found.add(t.dtype); return t
    map_tensors(b, note)
    own = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if own != {torch.float32} or torch.float64 not in found: return ''
    return (". The model is in float32, NumPy's numbers are float64: give it `x.astype('float32')`, or of a tensor "
            '`x.float()`')


def classes_hint(loss_func: Any, pred: Any, yb: tuple[Any, ...], e: Exception) -> str:
    """Say which classes there are, after an error of class numbers that are out of bounds; else an empty text.

    >>> error = IndexError('Target 9 is out of bounds.')
    >>> classes_hint(nn.CrossEntropyLoss(), torch.zeros(2, 5), (torch.tensor([0, 9]),), error)
    ': targets from 0 to 9 for 5 classes'
    """
    targ, axis = (yb[0] if yb else None), getattr(loss_func, 'axis', 1)
    if not isinstance(e, IndexError) or 'out of bounds' not in str(e): return ''
    if not isinstance(pred, Tensor) or not isinstance(targ, Tensor) or not -pred.ndim <= axis < pred.ndim: return ''
    low, high = (int(v) for v in targ.aminmax())
    return f': targets from {low} to {high} for {pred.shape[axis]} classes'


def takes(f: Any, name: str) -> bool:
    "Tell whether a function takes a keyword, as far as can be seen."
    try: params = signature(f).parameters.values()
    except (TypeError, ValueError): return True  # written in C: calling it will tell
    return any(p.name == name or p.kind is p.VAR_KEYWORD for p in params)
