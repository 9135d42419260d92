from .callback import (
    DistributedTraining as DistributedTraining,
)
