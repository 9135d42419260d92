"""Milliseconds of training time that saving 50 MB of model and optimizer state costs.

save-stall  the time for which training stops. With plain torch: `torch-save`; `safe`, which survives a kill at any
            instant (write a temporary file, flush it to the disk, rename it); and `copy`, which copies the state to
            allocated memory, as is necessary if another thread writes the file. With learnkit, in a fit: `Checkpoint`,
            which does the same as `safe` and computes a digest, in the foreground or in the background.
save-lost   the total: the time of a save and of the batches until the file is complete (at least 16), which the
            writing thread slows down, minus the time of as many batches without a save.
save-memory, resume-memory
            memory and waiting time of saves of 200 MB and of 1 GB, and memory of a resume, compared with `torch.save`
            and `torch.distributed.checkpoint.async_save` (`benchmarks/save_memory.py`).

    python -m benchmarks.checkpoint
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from benchmarks import save_memory
from benchmarks.cli import command_line
from benchmarks.harness import Workload

__all__ = ['WORKLOADS', 'build', 'main']

Times = dict[str, list[float]]  # seconds, by measurement

WIDTH = 2048  # width of a square layer: 16.8 MB of weights, and as much for each of Adam's averages
SAVES = 3  # per measurement, which is their median
BATCHES = 16  # minimum number of batches after a save


# ----------------------------------------------------------------------------------- by plain torch


def trained_state() -> dict[str, Any]:
    "Return the state of a layer and of Adam after a step."
    model = nn.Linear(WIDTH, WIDTH)
    opt = torch.optim.Adam(model.parameters())
    model(torch.randn(4, WIDTH)).sum().backward()
    opt.step()
    return {'model': model.state_dict(), 'opt': opt.state_dict()}


def plain(state: dict[str, Any], file: Path) -> Callable[[], object]:
    return lambda: torch.save(state, file)


def safe(state: dict[str, Any], file: Path) -> Callable[[], object]:
    def save() -> None:
        temporary = file.with_suffix('.tmp')
        torch.save(state, temporary)
        for path in (temporary, file.parent):
            if path == file.parent:
                os.replace(temporary, file)
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    return save


def copied(state: dict[str, Any], file: Path) -> Callable[[], object]:
    tensors = [t.detach() for t in tree_leaves(state) if isinstance(t, Tensor)]
    kept = [torch.empty_like(t) for t in tensors]
    return lambda: torch._foreach_copy_(kept, tensors)


WAYS = {'torch-save': plain, 'safe': safe, 'copy': copied}


def alone(folder: Path, way: str) -> Callable[[], Times]:
    "Return a function that saves a few times, and returns the seconds of each save."
    save = WAYS[way](trained_state(), folder / 'checkpoint.pt')

    return lambda: {'save-stall': [seconds(save) for _ in range(SAVES)]}


# -------------------------------------------------------------------------------- within a training


def in_a_fit(folder: Path, background: bool) -> Callable[[], Times]:
    "Return a function that saves a few times in a fit, and returns the seconds of each stop and its total cost."
    from learnkit import Callback, Checkpoint, DataLoaders, Learner

    class Saves(Callback):
        "Save, and compare the following batches with as many batches without a save."

        times: Times

        def before_fit(self) -> None:
            self.course = self.run_through()

        def batch_checkpoint(self) -> None:
            next(self.course)  # up to its next `yield`, where it waits for a batch

        def run_through(self) -> Iterator[None]:
            self.times = {'save-stall': [], 'save-lost': []}
            for _ in range(SAVES):
                yield
                began = time.perf_counter()
                path = self.checkpoint.save()
                self.times['save-stall'].append(time.perf_counter() - began)
                n = 0
                while n < BATCHES or not path.exists():
                    yield
                    n += 1
                with_save = time.perf_counter() - began
                yield
                began = time.perf_counter()
                for _ in range(n):
                    yield
                self.times['save-lost'].append(with_save - (time.perf_counter() - began))
            self.learn.stop()
            yield

    saves = Saves()
    x = torch.randn(4, WIDTH)
    saver = Checkpoint(
        every=None, folder=folder, keep_last=1, background=background, preemption=False
    )
    learn = Learner(
        DataLoaders([(x, x)] * 10_000, device='cpu'),
        nn.Linear(WIDTH, WIDTH),
        F.mse_loss,
        opt_func=torch.optim.Adam,
        cbs=[saves, saver],
    )

    def once() -> Times:
        with learn.no_bar(), learn.no_logging():
            learn.fit(1)
        return saves.times

    return once


def seconds(f: Callable[[], object]) -> float:
    began = time.perf_counter()
    f()
    return time.perf_counter() - began


# --------------------------------------------------------------------------------- what is measured

SUBJECTS: dict[str, Callable[[Path], Callable[[], Times]]] = {
    'learnkit-blocking': partial(in_a_fit, background=False),
    'learnkit-background': partial(in_a_fit, background=True),
    **{way: partial(alone, way=way) for way in WAYS},
}


def _workload(name: str, title: str, subjects: list[str]) -> Workload:
    return Workload(
        name,
        f'{title}, 50 MB of state, wall time',
        'benchmarks.checkpoint',
        dict.fromkeys(subjects, 'torch'),
        unit='ms a save',
        reference='learnkit-blocking',
    )


WORKLOADS = {
    'save-stall': _workload('save-stall', 'how long training stands still', list(SUBJECTS)),
    'save-lost': _workload(
        'save-lost', 'what training loses in all', ['learnkit-blocking', 'learnkit-background']
    ),
}


def build(workload: str, subject: str) -> Callable[[], float]:
    "Return a function that saves a few times and returns the median of the milliseconds."
    folder = tempfile.TemporaryDirectory()
    save = SUBJECTS[subject](Path(folder.name))

    def once(keep: Any = folder) -> float:
        return median(save()[workload]) * 1000

    return once


def main(argv: list[str] | None = None) -> int:
    "Measure what the command line asks for, print the tables, and return the exit status."
    return command_line(
        'checkpoint', __doc__, WORKLOADS, argv, rounds=7, measure_more=measure_memory
    )


def measure_memory(rounds: int) -> str:
    "Return the tables of memory, for 200 MB in all rounds and for 1 GB in one."
    sizes = {200: rounds, 1000: 1}
    return '\n\n'.join(
        save_memory.report(mb, save_memory.measure(mb, n)) for mb, n in sizes.items()
    )


if __name__ == '__main__':
    sys.exit(main())
