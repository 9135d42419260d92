"""Row 40: the first process cannot save, or a loss is NaN in one. All raise, at the same step."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from learnkit import Callback, GuardNonFinite
from learnkit.callbacks import Checkpoint
from learnkit.checkpoint import file as statefile
from learnkit.core.errors import LearnkitError
from tests.faults.fault_helpers import others_in_full
from tests.helpers.distributing import make_dls, make_learner, weights
from tests.helpers.ranks import run_ranks


def cannot_save(rank: int, folder: Path, background: bool) -> list[Any]:
    "Train; the second checkpoint cannot be written."
    learn, n = make_learner(make_dls(200, 4)), 0
    real = statefile.write_tensors

    def full(*args: Any) -> Any:
        nonlocal n
        n += 1
        if n == 2:
            raise OSError(28, 'No space left on device')
        return real(*args)

    statefile.write_tensors = full  # type: ignore[assignment]  # of this process alone
    with learn.distributed('ddp', timeout='300s'):
        try:
            learn.fit(2, cbs=Checkpoint(every='3ba', folder=folder, background=background))
        except (OSError, LearnkitError) as e:
            return [type(e).__name__, str(e), learn.time.ba]
    return ['nothing was raised', '', learn.time.ba]


@pytest.mark.parametrize('background', [False, True])
def test_the_first_cannot_save(background: bool, tmp_path: Path) -> None:
    (first, _, ba), (other, text, other_ba) = run_ranks(cannot_save, 2, tmp_path, background)
    assert first == 'OSError'
    assert other == 'DistributedError'
    assert 'Process 0 of 2' in text
    assert 'No space' in text
    assert ba == other_ba and (ba == 6 if not background else 6 <= ba <= 10)
    assert [p.name for p in tmp_path.glob('*.ckpt')] == ['00001-ep0-ba3.ckpt']


def poisoned(rank: int, victim: int, what: str, policy: str) -> list[Any]:
    "Train with a NaN loss or gradient in one process at its fourth batch."
    warnings.simplefilter('ignore', UserWarning)  # of the batch that is skipped

    def poison(cb: Any) -> None:
        if cb.world.rank != victim or cb.learn.time.ba != 3:
            return
        if what == 'loss':
            cb.learn.loss_grad = cb.loss_grad * torch.nan
        else:
            next(cb.model.parameters()).grad.fill_(torch.nan)

    event = 'after_loss' if what == 'loss' else 'after_backward'
    learn = make_learner(
        make_dls(104, 4), cbs=[GuardNonFinite(policy), Callback(**{event: poison})]
    )
    with learn.distributed('ddp', timeout='300s'):
        try:
            learn.fit(1)
        except LearnkitError as e:
            return [type(e).__name__, str(e), learn.time.ba, weights(learn)]
        return ['', '', learn.time.ba, weights(learn)]


@pytest.mark.parametrize(
    ('victim', 'what'),
    others_in_full(
        [(0, 'loss'), (0, 'gradient'), (1, 'loss'), (1, 'gradient')],
        lambda victim, what: victim == (what == 'gradient'),
    ),
)
def test_nan_in_one(victim: int, what: str) -> None:
    a, b = run_ranks(poisoned, 2, victim, what, 'raise')
    assert a[2] == b[2] == 3 and torch.equal(a[3], b[3]) and a[3].isfinite().all()
    assert {a[0], b[0]} <= {'LossError', 'DistributedError'} and 'LossError' in (a[0], b[0])
    assert 'batch 3 of epoch 0' in (a, b)[victim][1]


def test_nan_in_one_is_skipped_in_both() -> None:
    a, b = run_ranks(poisoned, 2, 1, 'loss', 'skip')
    assert a[2] == b[2] == 13 and torch.equal(a[3], b[3]) and a[3].isfinite().all()
