"""Cases: the memory that a checkpoint's copy takes, as the share of tensors that lie in new memory."""

import tempfile
from typing import Any
from unittest import mock

import torch
from torch import nn

from learnkit import Checkpoint, DataLoaders, Learner
from learnkit.callbacks import checkpoint as module
from tests.silent.cases import case


def written_states(background: bool) -> tuple[list[Any], set[int]]:
    "Return the model states of three saves, and the addresses of the model's weights."
    states: list[Any] = []
    x = torch.randn(12, 8)
    model = nn.Linear(8, 8)

    def keep(path: Any, state: Any, info: Any) -> None:
        states.append(state['model'])  # so that its memory is not used again

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(module, 'write_state', keep):
        checkpoint = Checkpoint('1ba', folder, background=background, preemption=False)
        dls = DataLoaders.from_tensors((x, x), bs=4)
        learn = Learner(dls, model, nn.MSELoss(), cbs=checkpoint)
        with learn.no_bar(), learn.no_logging():
            learn.fit(1)
    return states, {p.data_ptr() for p in model.parameters()}


def share_outside(state: Any, addresses: set[int]) -> float:
    return sum(t.data_ptr() not in addresses for t in state.values()) / len(state)


@case('saves', 'share of a second background copy in new memory', old='1.0')
def second_background_save() -> tuple[float, float]:
    (first, second, *_), _ = written_states(background=True)
    return share_outside(second, {t.data_ptr() for t in first.values()}), 0.0


@case('saves', 'share of the weights that a foreground save copies', old='1.0')
def foreground_save() -> tuple[float, float]:
    (first, *_), own = written_states(background=False)
    return share_outside(first, own), 0.0
