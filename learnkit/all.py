"""Everything for a notebook, in one line: `from learnkit.all import *`.

It brings the names of learnkit, of its callbacks, loggers, schedules, optimizers, losses, metrics and
test helpers, and what nearly every notebook imports as well: `torch`, `nn`, `F`, `np`, `partial` and
`Path`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import learnkit
from learnkit import callbacks, loggers, losses, metrics, optim, testing
from learnkit.callbacks import lr_finder, schedule

_MODULES = (learnkit, callbacks, loggers, losses, lr_finder, metrics, optim, schedule, testing)
_INTERNAL = {'as_metrics', 'check_column', 'dry_run', 'hidden_matrices', 'measures_batches'}

_found = {
    name: getattr(module, name)
    for module in _MODULES
    for name in module.__all__
    if name not in _INTERNAL
}
globals().update(_found)

__all__ = sorted(_found)  # the names are known only at run time
__all__ += ['F', 'Path', 'nn', 'np', 'partial', 'torch']
