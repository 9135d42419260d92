"""Everything for a notebook, in one line: `from learnkit.all import *`.

It brings the names of learnkit, those of its callbacks, loggers, schedules, optimizers, losses, metrics and ready-made
parts for tests, and what nearly every notebook imports besides: `torch`, `nn`, `F`, `np`, `partial` and `Path`."""
from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import learnkit
from learnkit import *  # noqa: F403  # it is what this module is for, as are the next ones
from learnkit import callbacks, exchange, loggers, losses, lrfind, metrics, optimizers, schedule, testing
from learnkit.callbacks import *  # noqa: F403
from learnkit.exchange import *  # noqa: F403
from learnkit.loggers import *  # noqa: F403
from learnkit.losses import *  # noqa: F403
from learnkit.lrfind import *  # noqa: F403
from learnkit.metrics import *  # noqa: F403
from learnkit.optimizers import *  # noqa: F403
from learnkit.schedule import *  # noqa: F403
from learnkit.testing import *  # noqa: F403

_PARTS = (learnkit, callbacks, exchange, loggers, losses, lrfind, metrics, optimizers, schedule, testing)
_INNER = {'LRFind', 'Schedules', 'as_metrics', 'check_column', 'dry_run', 'hidden_matrices', 'measures_batches'}

__all__ = sorted({name for part in _PARTS for name in part.__all__} - _INNER)
__all__ += ['F', 'Path', 'nn', 'np', 'partial', 'torch']
