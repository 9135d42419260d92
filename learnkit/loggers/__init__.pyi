# SPDX-License-Identifier: Apache-2.0

from .api import (
    log_images as log_images,
    log_params as log_params,
    log_text as log_text,
)
from .base import (
    Logger as Logger,
)
from .console import (
    ConsoleLogger as ConsoleLogger,
)
from .files import (
    CSVLogger as CSVLogger,
    JSONLinesLogger as JSONLinesLogger,
    read_log as read_log,
)
from .mlflow import (
    MlflowLogger as MlflowLogger,
)
from .tensorboard import (
    TensorBoardLogger as TensorBoardLogger,
)
from .wandb import (
    WandbLogger as WandbLogger,
)
