# SPDX-License-Identifier: Apache-2.0
"""Objects by which the modules of the engine work together: `learn.parts`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch

from learnkit.core.model import WholeBatches
from learnkit.engine.advice import Advice
from learnkit.engine.counters import Counters
from learnkit.engine.custom_batch import ClosureStep, CustomBatch
from learnkit.engine.evaluation_schedule import EvaluationSchedule
from learnkit.engine.lengths import Lengths
from learnkit.engine.loss_weights import LossWeights
from learnkit.engine.microbatch import Microbatches
from learnkit.engine.positions import TrainingPositions
from learnkit.engine.processes import OneProcess
from learnkit.engine.train_eval import Modes

if TYPE_CHECKING:
    from learnkit.engine.dispatch import CallbackSet, HandlerTable

UNDONE = {'undone': True}  # of parts that belong to the state of the training


@dataclass(eq=False)
class Parts:
    """State of the engine that belongs to one module and is read by others. Training code needs none of it.

    `docs/architecture.md` lists the classes. A pickled Learner makes its callbacks and tables again.
    """

    callbacks: CallbackSet = field(init=False)  # in the order of adding, with their switches
    own_names: frozenset[str] = frozenset()  # attributes that the Learner sets itself
    tables: tuple[HandlerTable, ...] = ()  # handlers of each event in evaluation and in training
    running: tuple[Any, str, Any] | None = (
        None  # callback and event of the handler that runs; outer
    )
    lock: Any = field(default_factory=RLock)  # one run at a time
    counters: Counters = field(default_factory=Counters, metadata=UNDONE)
    evaluations: Any = field(default_factory=EvaluationSchedule, metadata=UNDONE)
    modes: Modes = field(default_factory=Modes, metadata=UNDONE)
    positions: TrainingPositions = field(default_factory=TrainingPositions, metadata=UNDONE)
    microbatches: Microbatches = field(default_factory=Microbatches, metadata=UNDONE)
    closure: ClosureStep = field(default_factory=ClosureStep, metadata=UNDONE)
    custom_batch: CustomBatch = field(default_factory=CustomBatch, metadata=UNDONE)
    lengths: Lengths = field(default_factory=Lengths, metadata=UNDONE)
    loss_weights: LossWeights = field(default_factory=LossWeights)
    advice: Advice = field(default_factory=Advice, metadata=UNDONE)
    processes: Any = field(default_factory=OneProcess)  # or ManyProcesses
    whole_batches: WholeBatches | None = None  # call of a model with Composer's interface
    whole_step: Any = None  # instead of the default training batch; set by `compile(step=True)`
    resuming: Any = None  # ResumeState of a checkpoint that is not restored yet
    replay_source: Any = None  # callback that keeps the batch for `replay`
    rewound: Any = None  # folder of the run to which `rewind` has moved the Learner
    has_lost_weights: bool = False  # shards of the model went with a rank that failed
    batch_device: torch.device | None = None  # device of the last loader's batches
    # (requested `lr`, resulting rates) if the optimizer uses rates other than `lr`
    own_lrs: tuple[Any, Any] = (None, None)
    last_lrs: list[float] = field(default_factory=list)  # when they were last set, or a fit ended

    def list_undone(self) -> list[Any]:
        "Return the parts that belong to the state of the training, which `restored` writes back."
        return [getattr(self, f.name) for f in fields(self) if f.metadata.get('undone')]

    def __getstate__(self) -> dict[str, Any]:
        of_process = ('callbacks', 'tables', 'running', 'lock')
        return {name: value for name, value in vars(self).items() if name not in of_process}
