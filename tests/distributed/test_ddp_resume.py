"""Checkpoints of several processes: one file, from which any number of processes resumes."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from learnkit import Callback, GradientAccumulation, Learner
from learnkit.callbacks import EMA, Checkpoint
from learnkit.checkpoint.compare import learn_digest
from learnkit.core.errors import CheckpointError
from tests.helpers.distributing import expect_interrupt, make_dls, make_learner, rows, weights
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist


class Break(Callback):
    "Interrupt the run after `n` training batches in every process."

    order = 2000

    def __init__(self, n: int) -> None:
        self.n = n

    def batch_checkpoint(self) -> None:
        if self.learn.time.ba == self.n:
            raise KeyboardInterrupt


def make(
    path: Path, kind: str = 'tensors', bs: int = 4, cbs: Any = (), n: int = 101, **options: Any
) -> Learner:
    dls = make_dls(
        n, bs, kind.partition('-')[0], **({'num_workers': 1} if kind == 'torch-workers' else {})
    )
    return make_learner(
        dls, path, dropout=0.2, cbs=[Checkpoint(every='1ba', keep_last=None), *cbs], **options
    )


def train(
    path: Path,
    n_ranks: int = 2,
    broken_off: int | None = None,
    resume: Any = False,
    fit: str = 'fit_one_cycle',
    batch_size: str = 'process',
    other_number: bool = False,
    **options: Any,
) -> list[dict[str, Any]]:
    "Train three epochs in `n_ranks` processes; return each digest, weights, history and seen samples."

    def job(rank: int) -> dict[str, Any]:
        torch.manual_seed(rank + 5 if resume else 1)
        warnings.filterwarnings('ignore', message='There is a state for a callback `break`')
        if other_number:
            warnings.filterwarnings('ignore', message='The checkpoint is of [12] process')
        seen: list[float] = []
        note = Callback(
            before_batch=lambda cb: (
                cb.training
                and seen.extend(
                    cb.x[:, 0].tolist() if cb.world.size == 1 or cb.dl.share(cb.iter)[0] else []
                )
            )
        )
        more = [Break(broken_off)] if broken_off else []
        cbs = [make_cb() for make_cb in options.get('cbs', ())]
        learn = make(path, **{**options, 'cbs': cbs})
        with (
            expect_interrupt() if broken_off else nullcontext(),
            learn.distributed('ddp', timeout='20s', batch_size=batch_size),
            learn.added_cbs([note, *more]),
        ):
            getattr(learn, fit)(3, 1e-2, resume=resume)
        return {
            'digest': learn_digest(learn),
            'weights': weights(learn),
            'rows': rows(learn),
            'seen': seen,
            'drawn': torch.rand(3),
        }

    return run_ranks(job, n_ranks)


CASES: dict[str, dict[str, Any]] = {
    'workers': {'kind': 'torch-workers'},
    'four, accumulation': {'n_ranks': 4, 'cbs': (lambda: GradientAccumulation(50),)},
    'ema': {'cbs': (lambda: GradientAccumulation(24), lambda: EMA(0.9))},
}


@pytest.mark.parametrize('case', CASES)
def test_an_interrupted_run_resumes_exactly(case: str, tmp_path: Path) -> None:
    expected = train(tmp_path / 'whole', **CASES[case])
    for n in (2, 17):
        train(tmp_path / f'{n}', broken_off=n, **CASES[case])
        again = train(tmp_path / f'{n}', resume=True, **CASES[case])
        for got, wanted in zip(again, expected, strict=True):
            assert torch.equal(got['weights'], wanted['weights'])
            assert got['rows'] == wanted['rows'] and torch.equal(got['drawn'], wanted['drawn'])
            assert got['digest'] == wanted['digest']


@pytest.mark.parametrize(('before', 'after'), [(2, 1), (1, 2)])
def test_each_sample_once_with_another_number_of_processes(
    before: int, after: int, tmp_path: Path
) -> None:
    first = train(tmp_path, before, broken_off=5, bs=8 // before)
    then = train(tmp_path, after, resume=True, bs=8 // after, other_number=True)
    n_seen = [sum(len(r['seen']) for r in ranks) for ranks in (first, then)]
    assert n_seen == [40, 3 * 101 - 40]
    epoch = sorted(x for ranks in (first, then) for r in ranks for x in r['seen'])
    assert epoch == sorted(make_dls(101).train.tensors[0][:, 0].tolist() * 3)
    assert len(then[0]['rows']) == 3


def test_another_global_batch_size_is_refused_in_mid_epoch(tmp_path: Path) -> None:
    train(tmp_path, 2, broken_off=5, bs=4)

    def job(rank: int) -> str:
        learn = make(tmp_path, bs=4)
        with pytest.raises(CheckpointError, match='batch size') as e:
            learn.fit_one_cycle(3, 1e-2, resume=True)
        return str(e.value)

    assert 'processes' in run_ranks(job, 1)[0]


def test_a_folder_that_cannot_be_written_is_reported_in_every_process(tmp_path: Path) -> None:
    (tmp_path / 'checkpoints').write_text('a file')

    def job(rank: int) -> list[Any]:
        learn = make(tmp_path)
        with (
            pytest.raises(Exception, match='cannot hold checkpoints') as e,
            learn.distributed(timeout='20s'),
        ):
            learn.fit(1)
        return [type(e.value).__name__, learn.time.ba]

    assert run_ranks(job) == [['CheckpointError', 0], ['DistributedError', 0]]
