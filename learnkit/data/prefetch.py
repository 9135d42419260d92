# SPDX-License-Identifier: Apache-2.0
"""Prefetching of one batch: the next batch is copied to the GPU while the GPU computes on the current batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from learnkit.core.batch import map_tensors, tensors_in, to_device
from learnkit.data.dataloaders import TensorLoader

_END = object()  # marks the end of a loader, as the default of `next`


def read_ahead(
    dl: Any,  # the loader
    device: torch.device,  # device that batches are moved to
    begin: Callable[[], Iterator[Any]] | None = None,  # begins a resumable pass; None: `iter(dl)`
) -> Iterator[Any]:
    """Return an iterator over a loader's batches that, on a CUDA device, prefetches one batch to the device.

    The loader's own iterator is returned on other devices, and for a loader that is an iterator: a batch prefetched
    but not used would be lost. The same holds in a resumable pass if prefetching would change the saved position:
    if this process may draw random numbers to fetch a batch, or if the loader keeps its own state.

    >>> list(read_ahead([1, 2], torch.device('cpu')))
    [1, 2]
    """
    batches = iter(dl) if begin is None else begin()
    is_resumable = begin is not None
    if device.type != 'cuda' or batches is dl or (is_resumable and not _can_prefetch(dl)):
        return batches
    return _Prefetcher(batches, device)


def _can_prefetch(dl: Any) -> bool:
    "Return True if drawing a batch early changes neither a generator of this process nor a state of the loader."
    if type(dl) in (list, tuple):
        return True
    iterate = getattr(type(dl), '__iter__', None)
    if iterate is TensorLoader.__iter__:
        return True
    return iterate is DataLoader.__iter__ and dl.num_workers > 0


class _Prefetcher(Iterator[Any]):
    "Iterator that copies the next batch on its own CUDA stream; a loader's error is raised at the batch it belongs to."

    def __init__(self, batches: Iterator[Any], device: torch.device) -> None:
        self.batches = batches
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.next_batch: Any = None
        self.error: Exception | None = None
        self._fetch()

    def _fetch(self) -> None:
        try:
            self.next_batch = next(self.batches, _END)
            if self.next_batch is _END:
                return
            with torch.cuda.stream(self.stream):
                self.next_batch = to_device(map_tensors(self.next_batch, _pin), self.device)
        except Exception as e:
            self.error = e

    def __next__(self) -> Any:
        if self.error is not None:
            raise self.error
        if self.next_batch is _END:
            raise StopIteration
        batch = self.next_batch
        current_stream = torch.cuda.current_stream(self.device)
        current_stream.wait_stream(self.stream)
        for t in tensors_in(batch):
            # the allocator must not reuse the memory while the current stream computes on it
            t.record_stream(current_stream)
        self._fetch()
        return batch


def _pin(t: torch.Tensor) -> torch.Tensor:
    return t.pin_memory() if t.device.type == 'cpu' else t
