"""Row 4: as row 3, with loader workers and augmentation that draws from torch, NumPy and Python."""

from functools import partial
from pathlib import Path

import pytest

from tests.faults.resume_helpers import augmented, learner, resumed_at


@pytest.mark.parametrize('num_workers', [0, 2])
def test_some_steps(tmp_path: Path, num_workers: int) -> None:
    resumed_at(partial(learner, dls=partial(augmented, num_workers)), tmp_path, lambda n: [1, 8])


@pytest.mark.full
def test_every_step(tmp_path: Path) -> None:
    makes = {n: partial(learner, dls=partial(augmented, n)) for n in (0, 1, 2)}
    n = sum(resumed_at(make, tmp_path / f'{workers}') for workers, make in makes.items())
    print(
        f'row 4: {n} resumes at every step, with 0, 1 and 2 workers and random augmentation: exact'
    )
