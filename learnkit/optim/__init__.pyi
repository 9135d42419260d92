# SPDX-License-Identifier: Apache-2.0

from .annealing import (
    Annealer as Annealer,
    SchedCos as SchedCos,
    SchedExp as SchedExp,
    SchedLin as SchedLin,
    SchedNo as SchedNo,
    SchedPoly as SchedPoly,
    annealer as annealer,
    combine_scheds as combine_scheds,
    combined_cos as combined_cos,
)
from .hyperparams import (
    norm_bias_params as norm_bias_params,
    params as params,
    trainable_params as trainable_params,
)
from .optimizers import (
    SGD as SGD,
    Adam as Adam,
    Lamb as Lamb,
    Lookahead as Lookahead,
    MuonAdamW as MuonAdamW,
    QHAdam as QHAdam,
    RAdam as RAdam,
    RMSProp as RMSProp,
    ranger as ranger,
)
from .wrapper import (
    OptimWrapper as OptimWrapper,
)
