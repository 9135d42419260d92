# SPDX-License-Identifier: Apache-2.0
"""Callback that logs the load of the machine: CPU, RAM, disk, network and GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from learnkit.core.model import model_device
from learnkit.core.optional import import_library
from learnkit.core.time import Time
from learnkit.monitors.monitor import Monitor


class SystemMonitor(Monitor):
    """Log the load of the machine and, for a model on a GPU, the values that its driver reports.

    CPU load is the load of the whole machine since the last measurement; the disk is the disk of
    `learn.path`. Load, temperature and power of a GPU come from NVIDIA's management library,
    through torch (`nvidia-ml-py`); without the library only GPU memory is logged.

    Raises `MissingExtraError` without psutil.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(cbs=SystemMonitor(every='5ba'))
    >>> with learn.no_bar(): learn.fit(1)
    >>> 0 < learn.history[0]['cpu_memory_percent'] < 100
    True
    """

    metric_names = {
        'cpu_percentage': 'load of all CPU cores, 0 to 100',
        'cpu_memory_percent': 'share of the RAM in use, 0 to 100',
        'cpu_memory_used': 'bytes of RAM in use',
        'cpu_memory_available': 'bytes of RAM that are available',
        'disk_memory_percent': 'share of the disk in use, 0 to 100',
        'disk_memory_used': 'bytes of the disk in use',
        'disk_memory_free': 'bytes of the disk that are free',
        'network_bytes_sent': 'bytes sent since the machine started',
        'network_bytes_recv': 'bytes received since the machine started',
        'memory_free_bytes': 'bytes of GPU memory that are free',
        'memory_used_bytes': 'bytes of GPU memory in use, by all processes',
        'gpu_percentage': 'share of the time that the GPU computed, 0 to 100',
        'memory_percentage': 'share of the time that GPU memory was read or written, 0 to 100',
        'gpu_temperature_C': 'temperature of the GPU in degrees Celsius',
        'gpu_power_usage_W': 'power that the GPU draws, in watts',
    }
    run_in = 'fit'
    latest = ('network_',)
    machine_dependent = True

    def __init__(
        self,
        every: int | str | Time = '10sec',  # interval of measurements; CPU load needs 0.1 s or more
    ) -> None:
        super().__init__(every)
        import_library('psutil', 'SystemMonitor')

    @override
    def before_fit(self) -> None:
        "Start measuring the CPU load."
        super().before_fit()
        import_library('psutil', 'SystemMonitor').cpu_percent()

    @override
    def measure(self) -> dict[str, float]:
        "Return the load of CPU, RAM, disk, network and GPU by name."
        psutil = import_library('psutil', 'SystemMonitor')
        path = Path(self.learn.path).absolute()
        # `learn.path` does not exist before its first file is written
        folder = next(p for p in (path, *path.parents) if p.exists())
        ram = psutil.virtual_memory()
        disk = psutil.disk_usage(str(folder))
        net = psutil.net_io_counters()
        values = {
            'cpu_percentage': psutil.cpu_percent(),
            'cpu_memory_percent': ram.percent,
            'cpu_memory_used': ram.used,
            'cpu_memory_available': ram.available,
            'disk_memory_percent': disk.percent,
            'disk_memory_used': disk.used,
            'disk_memory_free': disk.free,
        }
        if net is not None:
            values |= {'network_bytes_sent': net.bytes_sent, 'network_bytes_recv': net.bytes_recv}
        device = model_device(self.learn.model, self.learn.dls)
        return {**values, **read_gpu(device)} if device.type == 'cuda' else values


def read_gpu(device: torch.device) -> dict[str, float]:
    "Return the memory of a GPU, and the values of its sensors that are available."
    free, total = torch.cuda.mem_get_info(device)
    values: dict[str, float] = {'memory_free_bytes': free, 'memory_used_bytes': total - free}
    for name, read in SENSORS.items():
        try:
            values[name] = read(device)
        except Exception:
            continue  # no library, permission or sensor: drivers raise errors of many types
    return values


def _read_watts(device: torch.device) -> float:
    return torch.cuda.power_draw(device) / 1000


SENSORS: dict[str, Callable[[Any], float]] = {
    'gpu_percentage': torch.cuda.utilization,
    'memory_percentage': torch.cuda.memory_usage,
    'gpu_temperature_C': torch.cuda.temperature,
    'gpu_power_usage_W': _read_watts,
}
