"""Read one batch ahead: while the GPU computes on one batch, the next one travels to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from learnkit.core.batch import map_tensors, to_device
from learnkit.data.dataloaders import TensorLoader

__all__ = ['read_ahead']

_END = object()  # what `next` gives when a loader is through


def read_ahead(
    dl: Any,  # a loader
    device: torch.device,  # where its batches are needed
    begin: Callable[[], Iterator[Any]] | None = None,  # begins a resumable pass; None: `iter(dl)`
) -> Iterator[Any]:
    """Return an iterator over a loader's batches that, for a CUDA device, is one batch ahead and has it there already.

    Elsewhere, and for an iterator (what is drawn from it too early would be lost), it is the loader's own. So it is
    where a position is kept that a batch drawn early would change: where this process may draw random numbers to fetch
    one, and for a loader that keeps a state of its own.

    >>> list(read_ahead([1, 2], torch.device('cpu')))
    [1, 2]
    """
    batches = iter(dl) if begin is None else begin()
    if device.type != 'cuda' or batches is dl or (begin is not None and not _may_be_early(dl)):
        return batches
    return _ReadAhead(batches, device)


def _may_be_early(dl: Any) -> bool:
    "Tell whether drawing a batch early moves neither a generator of this process nor a state of the loader."
    if type(dl) in (list, tuple):
        return True
    own = getattr(type(dl), '__iter__', None)
    return own is TensorLoader.__iter__ or (own is DataLoader.__iter__ and dl.num_workers > 0)


class _ReadAhead(Iterator[Any]):
    "Copies on a stream of its own; an error of the loader comes with the batch that it belongs to."

    def __init__(self, batches: Iterator[Any], device: torch.device) -> None:
        self.batches, self.device, self.stream = batches, device, torch.cuda.Stream(device)
        self.ready: Any = None
        self.error: Exception | None = None
        self._fetch()

    def _fetch(self) -> None:
        try:
            self.ready = next(self.batches, _END)
            if self.ready is _END:
                return
            with torch.cuda.stream(self.stream):
                self.ready = to_device(map_tensors(self.ready, _pinned), self.device)
        except Exception as e:
            self.error = e

    def __next__(self) -> Any:
        if self.error is not None:
            raise self.error
        if self.ready is _END:
            raise StopIteration
        batch, current = self.ready, torch.cuda.current_stream(self.device)
        current.wait_stream(self.stream)

        def in_use(t: torch.Tensor) -> torch.Tensor:
            # its memory is not given away while this stream computes on it
            t.record_stream(current)
            return t

        map_tensors(batch, in_use)
        self._fetch()
        return batch


def _pinned(t: torch.Tensor) -> torch.Tensor:
    return t.pin_memory() if t.device.type == 'cpu' else t
