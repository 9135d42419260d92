# SPDX-License-Identifier: Apache-2.0

from .combined import (
    CombinedLoader as CombinedLoader,
)
from .dataloaders import (
    DataLoaders as DataLoaders,
    TensorLoader as TensorLoader,
    default_device as default_device,
)
from .evaluator import (
    Evaluator as Evaluator,
)
