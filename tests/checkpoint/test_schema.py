"""The schema of a state: what is wrong is named by its place, what was found, and what belongs there."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learnkit.checkpoint.schema import Each, Maybe, check_state, find_problems, is_generator, is_rng
from learnkit.core.errors import CheckpointError
from learnkit.core.random import capture_generator, capture_rng
from learnkit.testing import synth_learner


def test_the_first_wrong_entry_is_named_with_the_file() -> None:
    state = synth_learner().checkpoint_state()
    assert check_state(state) is state
    wrong = {**state, 'loop': {**state['loop'], 'done': {**state['loop']['done'], 'ba': -1}}}
    with pytest.raises(
        CheckpointError, match=r'^a.ckpt cannot be resumed: loop.done.ba is -1, not a number'
    ):
        check_state(wrong, Path('a.ckpt'))
    with pytest.raises(CheckpointError, match='This state is not a checkpoint'):
        check_state({'w': torch.ones(1)})


@pytest.mark.parametrize(
    ('value', 'schema', 'problem'),
    [
        (None, Maybe(int), None),
        ('a', Maybe(int), " is 'a', not a int"),
        ({'a': 1, 'b': 'x'}, Each(int), "['b'] is 'x', not a int"),
        ([1, 2], Each(int), ' is [int, int], not a mapping'),
        ([1, 'x'], Each(int, list), "[1] is 'x', not a int"),
        ({'a': {}}, {'a': {'b': int}}, 'a.b is missing'),
    ],
)
def test_kinds_of_schemas(value: Any, schema: Any, problem: str | None) -> None:
    assert next(find_problems(value, schema), None) == problem


def test_states_of_generators_are_tried_and_leave_the_generators_alone() -> None:
    state = capture_rng()
    torch.rand(1)
    before = torch.get_rng_state()
    assert is_rng(state) and not is_rng({**state, 'torch': state['torch'][:100]})
    assert torch.equal(torch.get_rng_state(), before)
    for generator in (torch.Generator(), np.random.default_rng(0), np.random.RandomState(0)):
        kind, captured = capture_generator(generator)
        assert is_generator((kind, captured)) and not is_generator((kind, None))
