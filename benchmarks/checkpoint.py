"""Milliseconds that a training stands still to save 50 MB of model and optimizer state, by plain torch.

These are the ways that are there to choose from: a plain `torch.save`; one that survives a kill at any instant
(written beside the target, flushed to the disk, put in its place); and a copy of the state to memory that is kept for
it, which is all that a training has to wait for when another thread does the writing.

    python -m benchmarks.checkpoint
"""
from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from benchmarks.cli import command_line
from benchmarks.harness import Workload

__all__ = ['WORKLOADS', 'build', 'main']

WIDTH = 2048  # a square layer of it: 16.8 MB of weights, and momentum and squares as large


def trained_state() -> dict[str, Any]:
    "Return the state of a layer and of Adam after a step."
    model = nn.Linear(WIDTH, WIDTH)
    opt = torch.optim.Adam(model.parameters())
    model(torch.randn(4, WIDTH)).sum().backward()
    opt.step()
    return {'model': model.state_dict(), 'opt': opt.state_dict()}


def plain(state: dict[str, Any], file: Path) -> Callable[[], object]: return lambda: torch.save(state, file)


def safe(state: dict[str, Any], file: Path) -> Callable[[], object]:
    def save() -> None:
        temporary = file.with_suffix('.tmp')
        torch.save(state, temporary)
        for path in (temporary, file.parent):
            if path == file.parent: os.replace(temporary, file)
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    return save


def copied(state: dict[str, Any], file: Path) -> Callable[[], object]:
    tensors = [t.detach() for t in tree_leaves(state) if isinstance(t, Tensor)]
    kept = [torch.empty_like(t) for t in tensors]
    return lambda: torch._foreach_copy_(kept, tensors)


WAYS = {'torch-save': plain, 'safe': safe, 'copy': copied}

WORKLOADS = {'checkpoint': Workload(
    'checkpoint', 'a save of 50 MB of state, wall time', 'benchmarks.checkpoint', dict.fromkeys(WAYS, 'torch'),
    unit='ms', reference='safe')}


def build(workload: str, subject: str) -> Callable[[], float]:
    "Return a function that saves once and returns the milliseconds it took."
    folder = tempfile.TemporaryDirectory()
    save = WAYS[subject](trained_state(), Path(folder.name) / 'checkpoint.pt')

    def once(keep: Any = folder) -> float:
        began = time.perf_counter()
        save()
        return (time.perf_counter() - began) * 1000
    return once


def main(argv: list[str] | None = None) -> int:
    "Measure what the command line asks for, print the table, and return the exit status."
    return command_line('checkpoint', __doc__, WORKLOADS, argv, rounds=7)


if __name__ == '__main__': sys.exit(main())
