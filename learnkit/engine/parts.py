# SPDX-License-Identifier: Apache-2.0
"""Objects by which the modules of the engine work together: `learn.parts`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from learnkit.engine.advice import Advice
from learnkit.engine.counters import Counters
from learnkit.engine.custom_batch import CustomBatch
from learnkit.engine.evaluation_schedule import EvaluationSchedule
from learnkit.engine.lengths import Lengths
from learnkit.engine.loss_weights import LossWeights
from learnkit.engine.microbatch import Microbatches
from learnkit.engine.positions import TrainingPositions
from learnkit.engine.processes import OneProcess
from learnkit.engine.train_eval import Modes

if TYPE_CHECKING:
    from learnkit.engine.dispatch import CallbackSet
    from learnkit.learner import Learner

UNDONE = {'undone': True}  # of parts that belong to the state of the training


@dataclass(eq=False)
class Parts:
    """State of the engine that belongs to one module and is read by others. Training code needs none of it.

    `docs/architecture.md` lists the classes. A pickled Learner makes its callbacks again.
    """

    callbacks: CallbackSet = field(init=False)  # in the order of adding, with their switches
    counters: Counters = field(default_factory=Counters, metadata=UNDONE)
    evaluations: Any = field(default_factory=EvaluationSchedule, metadata=UNDONE)
    modes: Modes = field(default_factory=Modes, metadata=UNDONE)
    positions: TrainingPositions = field(default_factory=TrainingPositions, metadata=UNDONE)
    custom_batch: CustomBatch = field(default_factory=CustomBatch, metadata=UNDONE)
    microbatches: Microbatches = field(default_factory=Microbatches, metadata=UNDONE)
    lengths: Lengths = field(default_factory=Lengths, metadata=UNDONE)
    loss_weights: LossWeights = field(default_factory=LossWeights)
    advice: Advice = field(default_factory=Advice, metadata=UNDONE)
    processes: Any = field(default_factory=OneProcess)  # or ManyProcesses

    def list_undone(self) -> list[Any]:
        "Return the parts that belong to the state of the training, which `restored` writes back."
        return [getattr(self, f.name) for f in fields(self) if f.metadata.get('undone')]

    def list_features(self) -> list[Any]:
        "Return the parts that take seams of the loop in a fit, see `learnkit.engine.seams`."
        return [self.positions, self.custom_batch, self.microbatches]

    def begin_fit(self, learn: Learner) -> None:
        "Begin a fit."
        self.advice.begin_fit()
        self.positions.begin_fit(learn)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != 'callbacks'}


def replace_flow(learn: Learner, evaluations: Any, lengths: Any, positions: Any) -> None:
    "Have a Learner evaluate, count and draw batches by other objects than its own, of subclasses."
    parts = learn.parts
    parts.evaluations, parts.lengths, parts.positions = evaluations, lengths, positions
    learn.seams.source = positions  # of evaluations, too
