# SPDX-License-Identifier: Apache-2.0

from .adapter import (
    from_lightning as from_lightning,
)
from .trainer import (
    Trainer as Trainer,
)
