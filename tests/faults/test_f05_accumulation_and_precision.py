"""Row 5: as row 3, in the middle of accumulation, and in reduced precision: pending gradients are in the checkpoint."""

from functools import partial
from pathlib import Path

import pytest

from learnkit import GradientAccumulation, MixedPrecision
from tests.faults.resume_helpers import BS, learner, resumed_at

CASES = {
    'accumulation': [partial(GradientAccumulation, 3 * BS)],
    'bf16': [partial(MixedPrecision, 'bf16')],
    'fp16': [partial(MixedPrecision, 'fp16')],
    'accumulation in bf16': [
        partial(GradientAccumulation, 3 * BS),
        partial(MixedPrecision, 'bf16'),
    ],
    'accumulation in fp16': [
        partial(GradientAccumulation, 3 * BS),
        partial(MixedPrecision, 'fp16'),
    ],
}


@pytest.mark.parametrize('case', ['accumulation', 'fp16', 'accumulation in bf16'])
def test_some_steps(tmp_path: Path, case: str) -> None:
    "Two batches of three are accumulated, in the first epoch and in the second."
    resumed_at(partial(learner, *CASES[case]), tmp_path, lambda n: [1, 8])


@pytest.mark.full
def test_every_step(tmp_path: Path) -> None:
    n = sum(resumed_at(partial(learner, *cbs), tmp_path / case) for case, cbs in CASES.items())
    print(f'row 5: {n} resumes at every step of {", ".join(CASES)}: exact')
