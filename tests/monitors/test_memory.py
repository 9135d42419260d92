"""Compare the memory monitor with other sources of the system, and with blocks of known size."""

import sys

import pytest
import torch

from learnkit import Callback
from learnkit.monitors.memory import MemoryMonitor, read_allocator, read_resident
from learnkit.testing import synth_learner

linux = pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
BLOCK = 64 * 2**20  # bytes


def test_a_block_shows_while_it_is_held_and_in_the_peak_after_it() -> None:
    held: list[torch.Tensor] = []

    def change(cb: Callback) -> None:
        if cb.learn.epoch == 1:
            held.append(torch.ones(BLOCK // 4))
        if cb.learn.epoch == 2:
            held.clear()

    learn = synth_learner(n_train=2, cbs=[MemoryMonitor('1ep'), Callback(before_train=change)])
    learn.fit(3)
    now, peak = (
        [row[f'memory/{name}_rss_mem'] for row in learn.history] for name in ('current', 'peak')
    )
    assert now[1] - now[0] == pytest.approx(BLOCK / 1e9, rel=0.2)
    assert now[2] < now[1] - 0.8 * BLOCK / 1e9
    assert min(peak[1:]) > 0.99 * now[1]  # the kernel counts in strides


@linux
def test_agrees_with_psutil() -> None:
    psutil = pytest.importorskip('psutil')
    assert read_resident()['current'] == pytest.approx(psutil.Process().memory_info().rss, rel=0.05)


def test_statistics_of_the_allocator_in_gb() -> None:
    stats = {
        f'{name}.all.{when}': n * 10**9
        for when, n in (('current', 1), ('peak', 2))
        for name in ('allocated_bytes', 'active_bytes', 'inactive_split_bytes', 'reserved_bytes')
    }
    got = read_allocator({**stats, 'num_alloc_retries': 7, 'allocation.all.freed': 3})
    assert got == {
        **{
            f'memory/current_{kind}_mem': 1.0
            for kind in ('allocated', 'active', 'inactive', 'reserved')
        },
        **{
            f'memory/peak_{kind}_mem': 2.0
            for kind in ('allocated', 'active', 'inactive', 'reserved')
        },
        'memory/alloc_retries': 7,
    }
    assert set(got) < set(MemoryMonitor.metric_names)
