"""`kill_and_resume` finds what a resume loses, and reports training that fails by itself."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from learnkit import EMA, Callback, DataLoaders, Learner
from learnkit.testing import HarnessError, kill_and_resume

pytestmark = pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs os.fork')


def make_learner(cbs: Any = ()) -> Learner:
    torch.manual_seed(0)
    x = torch.randn(48, 3)
    train = (x, x.sum(1, keepdim=True))
    dls = DataLoaders.from_tensors(train, (x[:8], x[:8, :1]), bs=4, device='cpu')
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
    return Learner(dls, model, nn.MSELoss(), cbs=[EMA(), *cbs])


def forgetful() -> Learner:
    "Return a Learner that scales gradients by a count that is not in a checkpoint."
    seen = [1.0]

    def scale(cb: Callback) -> None:
        seen[0] += 0.1
        for p in cb.learn.model.parameters():
            p.grad *= seen[0]

    return make_learner([Callback(after_backward=scale)])


def test_training_that_is_killed_ends_as_if_it_was_not(tmp_path: Path) -> None:
    report = kill_and_resume(make_learner, n_epoch=2, kills=2, folder=tmp_path)
    assert report.exact and report.differences == []
    assert report.kills >= report.resumes >= 2 and report.runs >= 1 and len(report.digest) == 64
    assert {p.name for p in tmp_path.iterdir()} >= {'straight-0', 'straight-1', 'killed-0'}


@pytest.mark.filterwarnings('ignore:These attributes changed since the fit began')
def test_what_no_checkpoint_has_is_found_out() -> None:
    report = kill_and_resume(forgetful, n_epoch=2, kills=8)
    assert not report and report.differences[0].startswith('model.')


def test_a_learner_that_differs_each_time_or_fails_is_reported() -> None:
    def another() -> Learner:
        learn = make_learner()
        learn.model[0].bias.data.fill_(os.getpid())
        return learn

    with pytest.raises(HarnessError, match=r'(?s)nothing has killed differ.*model\.0'):
        kill_and_resume(another, 1)
    with pytest.raises(HarnessError, match='ZeroDivisionError'):
        kill_and_resume(lambda: 1 / 0, 1)


def test_training_that_does_not_end_is_reported() -> None:
    with pytest.raises(HarnessError, match=r'did not end within 0\.2 s'):
        kill_and_resume(lambda: time.sleep(30), 1, timeout_s=0.2)


def test_a_process_that_uses_cuda_forks_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: True)
    with pytest.raises(HarnessError, match='CUDA'):
        kill_and_resume(make_learner, 1)
