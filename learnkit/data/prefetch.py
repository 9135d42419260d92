# SPDX-License-Identifier: Apache-2.0
"""Copies of batches to the device while the device computes on earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from learnkit.core.batch import map_tensors, tensors_in
from learnkit.core.device import has_streams, records_streams
from learnkit.data.dataloaders import TensorLoader
from learnkit.data.workers import starting_workers

_END = object()  # marks the end of a loader, as the default of `next`


def read_ahead(
    dl: Any,  # the loader
    device: torch.device,  # device that batches are moved to
    begin: Callable[[], Iterator[Any]] | None = None,  # begins a resumable pass; None: `iter(dl)`
) -> Iterator[Any]:
    """Return an iterator that copies a loader's batches to an accelerator while it computes, from pinned memory.

    One batch is drawn ahead, so that reading it overlaps too. It is drawn when it is asked for where drawing it
    early would lose it or change the position that a checkpoint saves: from a loader that is an iterator, and in a
    resumable pass if this process may draw random numbers for it, or if the loader keeps its own state. On devices
    without streams, or whose allocator knows of one stream only, the loader's own iterator is returned.

    >>> list(read_ahead([1, 2], torch.device('cpu')))
    [1, 2]
    """
    with starting_workers(dl):
        batches = iter(dl) if begin is None else begin()
    is_resumable = begin is not None
    if not (has_streams(device) and records_streams(device)):
        return batches
    draws_ahead = batches is not dl and (not is_resumable or _can_prefetch(dl))
    return _Copier(batches, device, draws_ahead)


def _can_prefetch(dl: Any) -> bool:
    "Return True if drawing a batch early changes neither a generator of this process nor a state of the loader."
    if type(dl) in (list, tuple):
        return True
    iterate = getattr(type(dl), '__iter__', None)
    if iterate is TensorLoader.__iter__:
        return True
    return iterate is DataLoader.__iter__ and dl.num_workers > 0


class _Copier(Iterator[Any]):
    "Iterator that copies batches on its own stream; a loader's error is raised at the batch it belongs to."

    def __init__(self, batches: Iterator[Any], device: torch.device, draws_ahead: bool) -> None:
        self.batches = batches
        self.device = device
        self.draws_ahead = draws_ahead
        self.stream = torch.Stream(device)
        self.next_batch: Any = None
        self.error: Exception | None = None
        if draws_ahead:
            self._fetch()

    def _fetch(self) -> None:
        try:
            self.next_batch = next(self.batches, _END)
            if self.next_batch is _END:
                return
            with self.stream:
                # an object with its own `to` is left to the loop: the allocator would not know of its tensors
                self.next_batch = map_tensors(self.next_batch, lambda t: _send(t, self.device))
        except Exception as e:
            self.error = e

    def __next__(self) -> Any:
        if not self.draws_ahead:
            self._fetch()
        if self.error is not None:
            raise self.error
        if self.next_batch is _END:
            raise StopIteration
        batch = self.next_batch
        current_stream = torch.accelerator.current_stream(self.device)
        current_stream.wait_stream(self.stream)
        for t in tensors_in(batch):
            # the allocator must not reuse the memory while the current stream computes on it
            t.record_stream(current_stream)
        if self.draws_ahead:
            self._fetch()
        return batch


def _send(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    "Start to copy a tensor to a device, from pinned memory."
    source = t.pin_memory() if t.device.type == 'cpu' else t
    return source.to(device, non_blocking=True)
