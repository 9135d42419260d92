"""Row 42: a run is resumed with another number of ranks. Each sample comes once an epoch, or the resume is refused."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from learnkit import Callback
from learnkit.callbacks import Checkpoint
from learnkit.core.errors import CheckpointError
from tests.faults.fault_helpers import others_in_full
from tests.helpers.distributing import expect_interrupt, make_dls, make_learner
from tests.helpers.ranks import run_ranks

N, BATCH = 37, 12  # samples of an epoch, and of a batch of all processes


def train(
    rank: int, folder: Path, bs: int, batch_size: str, kind: str, until: int | None = None
) -> Any:
    "Train up to a number of batches of this run, and return the trained samples."
    seen: list[float] = []
    torch.manual_seed(0)
    warnings.filterwarnings('ignore', message='The checkpoint is of')

    def note(cb: Any) -> None:
        if not cb.training:
            return
        own = len(cb.x) if cb.world.size == 1 else cb.dl.share(cb.iter)[0]
        seen.extend(cb.x[:own, 0].tolist())

    def enough(cb: Any) -> None:
        if cb.learn.time.ba == until:
            raise KeyboardInterrupt

    cbs = [Checkpoint(every='1ba', folder=folder, background=False), Callback(before_batch=note)]
    learn = make_learner(make_dls(N, bs, kind), cbs=[*cbs, late(enough)])
    with learn.distributed('ddp', batch_size=batch_size, timeout='300s'):
        try:
            with expect_interrupt() if until else nullcontext():
                learn.fit(2, resume=True)
        except CheckpointError as e:
            return str(e)
    return seen


def late(f: Any) -> Callback:
    "Make a callback that runs after the checkpoint was written."
    cb = Callback(batch_checkpoint=f)
    cb.order = 2000
    return cb


def size(n_ranks: int, batch_size: str) -> int:
    return BATCH if batch_size == 'global' else BATCH // n_ranks


def both(
    folder: Path, before: int, after: int, batch_size: str, kind: str, n_batches: int
) -> list[float]:
    first = run_ranks(train, before, folder, size(before, batch_size), batch_size, kind, n_batches)
    then = run_ranks(train, after, folder, size(after, batch_size), batch_size, kind)
    return [x for seen in (*first, *then) for x in seen]


@pytest.mark.parametrize(
    ('before', 'after', 'batch_size', 'kind'),
    others_in_full(
        [
            (before, 3 - before, size, kind)
            for before in (2, 1)
            for size in ('process', 'global')
            for kind in ('tensors', 'torch')
        ],
        lambda *case: case in ((2, 1, 'process', 'tensors'), (1, 2, 'global', 'torch')),
    ),
)
def test_each_sample_once_an_epoch(
    before: int, after: int, batch_size: str, kind: str, tmp_path: Path
) -> None:
    seen = both(tmp_path, before, after, batch_size, kind, 2)
    assert sorted(seen) == sorted(2 * make_dls(N).train.tensors[0][:, 0].tolist())


def test_batches_of_another_size_are_refused(tmp_path: Path) -> None:
    run_ranks(train, 2, tmp_path, 6, 'process', 'tensors', 2)
    (text,) = run_ranks(train, 1, tmp_path, 6, 'process', 'tensors')
    assert 'batch size' in text and '12' in text and '6' in text


def test_between_epochs_any_size_will_do_that_fits_the_loader(tmp_path: Path) -> None:
    seen = both(tmp_path, 2, 1, 'process', 'tensors', 4)  # the epoch has four batches
    assert sorted(seen) == sorted(2 * make_dls(N).train.tensors[0][:, 0].tolist())


@pytest.mark.full
def test_every_place_and_numbers_up_to_four(tmp_path: Path) -> None:
    n_tried, once = 0, sorted(2 * make_dls(N).train.tensors[0][:, 0].tolist())
    for before in (1, 2, 3, 4):
        for after in (1, 2, 3, 4):
            for n in range(1, 8):
                path = tmp_path / f'{before}{after}{n}'
                assert sorted(both(path, before, after, 'process', 'torch', n)) == once
                n_tried += 1
    print(
        f'row 42: {n_tried} resumes, from and to 1, 2, 3 and 4 processes, after each of 7 batches'
    )
