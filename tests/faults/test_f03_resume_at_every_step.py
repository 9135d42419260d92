"""Row 3: resume at every step of two epochs in a new process, other seeds: shuffle, dropout, Adam, one-cycle, EMA."""

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.faults.resume_helpers import augmented, learner, resumed_at


def test_some_steps(tmp_path: Path) -> None:
    "Return the first and last step of the first epoch, its end, a step of the second epoch, and the end."
    assert resumed_at(learner, tmp_path, lambda n: [0, 4, 5, 8, n - 1]) == 5


@pytest.mark.full
def test_every_step(tmp_path: Path) -> None:
    makes = {
        'in-memory loader': learner,
        'torch DataLoader': partial(learner, dls=partial(augmented, 0)),
        'SGD with momentum': partial(learner, opt_func=partial(torch.optim.SGD, momentum=0.9)),
        'AdamW': partial(learner, opt_func=torch.optim.AdamW),
        'evaluation every 3 batches': partial(learner, eval_every='3ba'),
        'microbatches': partial(learner, microbatch=2),
    }
    n = sum(resumed_at(make, tmp_path / name) for name, make in makes.items())
    print(
        f'row 3: {n} resumes, one at every step and epoch end of {len(makes)} trainings ({", ".join(makes)}): exact'
    )
