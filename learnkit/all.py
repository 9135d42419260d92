# SPDX-License-Identifier: Apache-2.0
"""All public names for a notebook: `from learnkit.all import *`.

Exports the names of learnkit, its callbacks, loggers, schedules, optimizers, losses and metrics, the names of fastcore
that `fastai.basics` has (`L`, `patch`, `store_attr`, `delegates`, `Path.ls`, ...), and common imports of notebooks:
`torch`, `nn`, `F`, `np`, `partial` and `Path`. Where learnkit and fastcore share a name, learnkit's is exported.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import learnkit
from learnkit.core.contexts import paused_collection

with paused_collection():
    import numpy as np
    import torch
    from fastcore import basics, foundation, meta, parallel, xtras
    from fastcore.imports import noop, noops
    from torch import nn
    from torch.nn import functional as F

    from learnkit import callbacks, loggers, losses, metrics, optim
    from learnkit.callbacks import lr_finder, schedule

_FASTCORE = (basics, foundation, meta, parallel, xtras)
_MODULES = (*_FASTCORE, learnkit, callbacks, loggers, losses, lr_finder, metrics, optim, schedule)
_INTERNAL = {'as_metrics', 'check_column', 'dry_run', 'hidden_matrices', 'measures_batches'}

_exports = {
    name: getattr(module, name)
    for module in _MODULES
    for name in module.__all__
    # pytest would collect `test_eq` and the like in a module that imports this one
    if name not in _INTERNAL and not name.startswith('test_')
}
globals().update(_exports)

__all__ = sorted(_exports)  # collected at run time
__all__ += ['F', 'Path', 'nn', 'noop', 'noops', 'np', 'partial', 'torch']
