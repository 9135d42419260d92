# SPDX-License-Identifier: Apache-2.0

from .callback import (
    DistributedTraining as DistributedTraining,
)
