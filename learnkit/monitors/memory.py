# SPDX-License-Identifier: Apache-2.0
"""Callback that logs memory of the process and of the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from learnkit.core.device import has_streams
from learnkit.core.model import model_device
from learnkit.monitors.monitor import Monitor

GB = 1e9
# keys of torch.cuda.memory_stats()
KINDS = {
    'allocated': 'allocated_bytes',
    'active': 'active_bytes',
    'inactive': 'inactive_split_bytes',
    'reserved': 'reserved_bytes',
}
MEANINGS = {
    'allocated': 'taken by tensors',
    'active': 'taken by tensors, or not yet free again',
    'inactive': 'free but split, so that it cannot be given back',
    'reserved': 'held by the allocator',
}
STATUS = Path('/proc/self/status')


class MemoryMonitor(Monitor):
    """Log the memory of the process and, for a model on a GPU, of torch's allocator, in GB of 1e9 bytes.

    Peaks of the process are since its start, peaks of the allocator since the last call of
    `torch.accelerator.reset_peak_memory_stats()`. Each rank logs its model's device. The host
    does not wait for the device. The memory of the process is logged on Linux.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(cbs=MemoryMonitor(every='5ba'))
    >>> with learn.no_bar(): learn.fit(1)
    >>> 0 < learn.history[0]['memory/peak_rss_mem'] < 1000
    True
    """

    metric_names = {
        **{
            f'memory/current_{kind}_mem': f'GB on the GPU, {meaning}'
            for kind, meaning in MEANINGS.items()
        },
        **{
            f'memory/peak_{kind}_mem': f'GB on the GPU at the peak, {meaning}'
            for kind, meaning in MEANINGS.items()
        },
        'memory/alloc_retries': 'how often the allocator had to empty its cache to find memory',
        'memory/current_rss_mem': 'GB of RAM that the process holds',
        'memory/peak_rss_mem': 'GB of RAM that it has held at most',
    }
    latest = ('memory/peak_', 'memory/alloc_retries')
    machine_dependent = True

    @override
    def measure(self) -> dict[str, float]:
        "Return memory in GB by name."
        device = model_device(self.learn.model, self.learn.dls)
        on_gpu = {}
        if has_streams(device):
            on_gpu = read_allocator(torch.accelerator.memory_stats(device))
        on_host = {f'memory/{name}_rss_mem': n / GB for name, n in read_resident().items()}
        return {**on_gpu, **on_host}


def read_allocator(
    stats: Mapping[str, Any],  # result of torch.accelerator.memory_stats()
) -> dict[str, float]:
    """Return the logged values of the statistics of torch's allocator.

    >>> read_allocator({'allocated_bytes.all.peak': 3_000_000, 'num_alloc_retries': 1})
    {'memory/peak_allocated_mem': 0.003, 'memory/alloc_retries': 1}
    """
    found = {}
    for when in ('current', 'peak'):
        for kind, name in KINDS.items():
            key = f'{name}.all.{when}'
            if key in stats:
                found[f'memory/{when}_{kind}_mem'] = stats[key] / GB
    if 'num_alloc_retries' in stats:
        found['memory/alloc_retries'] = stats['num_alloc_retries']
    return found


def read_resident() -> dict[str, int]:
    """Return the bytes of RAM of this process, now (`current`) and at most (`peak`), if known.

    >>> 0 < read_resident()['current'] <= read_resident()['peak']
    True
    """
    # `ru_maxrss` is wrong: a process starts with the peak of its parent process
    return parse_status(STATUS.read_text()) if STATUS.exists() else {}


def parse_status(
    text: str,  # content of /proc/self/status
) -> dict[str, int]:
    """Return the current and largest number of bytes.

    >>> parse_status('VmHWM:\\t 300 kB\\nVmRSS:\\t 200 kB')
    {'current': 204800, 'peak': 307200}
    """
    fields = dict(line.split(':', 1) for line in text.splitlines() if ':' in line)
    return {
        name: int(fields[key].split()[0]) * 1024
        for name, key in (('current', 'VmRSS'), ('peak', 'VmHWM'))
        if key in fields
    }
