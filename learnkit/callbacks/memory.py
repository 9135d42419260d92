"""How much memory a run takes, on the host and on the GPU."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from learnkit.callbacks.monitor import Monitor
from learnkit.core.model import model_device

__all__ = ['MemoryMonitor']

GB = 1e9
# what they are called in torch.cuda.memory_stats()
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
    """Log the memory that the process holds and, of a model on a GPU, what its allocator says. All in GB, of 1e9 bytes.

    Peaks of the process are since it started, those of the allocator since `torch.cuda.reset_peak_memory_stats()` was
    called last. On the GPU each process logs the device of its own model. The device is not waited for. Where the
    system does not tell what a process holds (outside Linux, without psutil) there is only its peak.

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
    of_machine = True

    def measure(self) -> dict[str, float]:
        "Return what is held, in GB."
        device = model_device(self.learn.model, self.learn.dls)
        on_gpu = from_allocator(torch.cuda.memory_stats(device)) if device.type == 'cuda' else {}
        return {**on_gpu, **{f'memory/{name}_rss_mem': n / GB for name, n in resident().items()}}


def from_allocator(
    stats: Mapping[str, Any],  # of torch.cuda.memory_stats()
) -> dict[str, float]:
    """Return what is logged of the statistics of torch's allocator.

    >>> from_allocator({'allocated_bytes.all.peak': 3_000_000, 'num_alloc_retries': 1})
    {'memory/peak_allocated_mem': 0.003, 'memory/alloc_retries': 1}
    """
    found = {
        f'memory/{when}_{kind}_mem': stats[key] / GB
        for when in ('current', 'peak')
        for kind, name in KINDS.items()
        if (key := f'{name}.all.{when}') in stats
    }
    if 'num_alloc_retries' in stats:
        found['memory/alloc_retries'] = stats['num_alloc_retries']
    return found


def resident() -> dict[str, int]:
    """Return the bytes of RAM that this process holds (`current`) and held at most (`peak`), as far as they are known.

    >>> 0 < resident()['current'] <= resident()['peak']
    True
    """
    # Linux: `ru_maxrss` would not do, since a process starts with the peak of the one that started it
    if STATUS.exists():
        return from_status(STATUS.read_text())
    try:
        psutil = import_module('psutil')
    except ModuleNotFoundError:
        return {'peak': _peak()}
    info = psutil.Process().memory_info()
    return {'current': info.rss, 'peak': getattr(info, 'peak_wset', 0) or max(info.rss, _peak())}


def from_status(
    text: str,  # of /proc/self/status
) -> dict[str, int]:
    """Read the bytes held now and at most.

    >>> from_status('VmHWM:\\t 300 kB\\nVmRSS:\\t 200 kB')
    {'current': 204800, 'peak': 307200}
    """
    fields = dict(line.split(':', 1) for line in text.splitlines() if ':' in line)
    return {
        name: int(fields[key].split()[0]) * 1024
        for name, key in (('current', 'VmRSS'), ('peak', 'VmHWM'))
        if key in fields
    }


def _peak() -> int:
    "Return what the process held at most, where the system counts it in getrusage."
    try:
        resource = import_module('resource')
    except ModuleNotFoundError:
        return 0
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * (
        1 if sys.platform == 'darwin' else 1024
    )
