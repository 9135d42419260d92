"""The benchmark of several processes: equal trainings, and correct arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import distributed, scaling
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


def test_scaling_arithmetic() -> None:
    s = scaling.Setting(
        parameters=1e9,
        gradient_bytes=2,
        nvlink_gb_s=100,
        hop_us=0,
        step_ms=100,
        backward=0.5,
        bucket_mb=100,
        host_hop_us=10,
        disk_gb_s=1,
        state_bytes=10,
        samples=1e6,
        batch=10,
        list_ns=100,
    )
    eight, many = scaling.costs(s, 8), scaling.costs(s, 1024)
    assert eight['gradients: all-reduce, ms'] == pytest.approx(2 * 7 / 8 * 2e9 / 1e11 * 1e3)
    # the last bucket: 35 ms fit into backward
    assert eight['gradients: waited for, ms a step'] == pytest.approx(2.0)
    assert scaling.costs(replace(s, step_ms=20), 8)[
        'gradients: waited for, ms a step'
    ] == pytest.approx(25.0)
    assert many['flag: there and back in a ring, ms'] == pytest.approx(20.46)
    assert many['flag: waited for, ms a step'] == 0
    assert scaling.costs(replace(s, step_ms=20), 1024)[
        'flag: waited for, ms a step'
    ] == pytest.approx(0.46)
    assert (
        eight['epoch: length, s'] == pytest.approx(1250.0)
        and many['start: sockets of a process'] == 2046
    )
    assert eight['data: the latter, share of an epoch'] == pytest.approx(0.1 / 1250)
    assert set(scaling.costs(s, 64)) == set(eight)
