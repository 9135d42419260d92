"""The benchmark of several processes: equal trainings, and correct arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import distributed
from benchmarks.teams import TASKS, in_turns
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist


def joined(rank: int, job: Any, *arguments: Any) -> Any:
    import torch.distributed as dist

    dist.init_process_group('gloo')
    try:
        return job(rank, *arguments)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize('name', ['linears', 'shards'])
def test_subjects_train_alike_to_the_last_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = replace(TASKS[name], n_batches=3, bs=4)
    monkeypatch.setitem(TASKS, name, task)
    subjects = ['raw', 'learnkit-bare', 'learnkit', 'learnkit-no-flag']
    ranks = run_ranks(joined, 2, in_turns, name, subjects, 2)
    weights = [rank['weights'] for rank in ranks]
    assert distributed.unequal(weights) == [] and not torch.equal(
        weights[0]['raw'], _flat(task.model())
    )
    assert all(
        len(v) == 2 and min(map(min, v)) > 0 for rank in ranks for v in rank['values'].values()
    )
    weights[1]['learnkit'][-1] += 1
    assert distributed.unequal(weights) == ['learnkit']


def _flat(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])
