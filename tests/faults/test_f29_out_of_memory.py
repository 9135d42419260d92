"""Row 29: out of memory. Gradients are freed, cleanup runs; with microbatch='auto' the batch is done in smaller pieces.

`tests/engine/test_microbatch_auto.py` has more of the halving."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learnkit import DataLoaders
from tests.faults.fault_helpers import (
    At,
    Watch,
    fits_like_fresh,
    fresh,
    is_clean,
    make_learner,
    raised_by,
    start_again,
)
from tests.faults.run_helpers import all_load, checkpointed, in_child, names

EVENTS = 'before_batch after_pred after_loss after_backward after_step before_validate'.split()


@pytest.mark.parametrize('event', EVENTS)
def test_gradients_are_freed_and_the_next_fit_works(event: str) -> None:
    fresh()
    error = torch.OutOfMemoryError('CUDA out of memory (raised by a test)')
    learn = make_learner(
        [bad := At(event, error, nth=2 if event != 'before_validate' else 1), watch := Watch()]
    )
    start_again(learn)
    assert raised_by(lambda: learn.fit(2)) is error
    assert watch.fired == [('after_error', error), ('cleanup', error)]
    assert all(p.grad is None for p in learn.model.parameters())
    is_clean(learn)
    fits_like_fresh(learn, [bad, watch])


class Wide(nn.Module):
    "Needs memory in proportion to the batch: 64 MB a sample."

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.a(x))
        if self.training:
            h = h + torch.zeros(len(x), 16_000_000).sum(1, keepdim=True)
        return self.b(h)


def test_when_the_system_gives_no_more(tmp_path: Path) -> None:
    "A limit of the process's own: torch's CPU allocator fails, in the middle of a step, and nothing is half done."

    def job() -> list[Any]:
        x = torch.randn(24, 3)
        train = torch.utils.data.DataLoader(list(zip(x, x[:, :1], strict=True)), 12)
        data = DataLoaders(train, device='cpu')
        learn = checkpointed(tmp_path, every='1ba')(dls=data, model=Wide())
        now = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + (300 << 20), resource.RLIM_INFINITY))
        error = raised_by(lambda: learn.fit(1))
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        free = all(p.grad is None for p in learn.model.parameters())
        learn.fit(1)
        return [type(error).__name__, str(error)[:200], free, learn.opt.n_steps]

    name, text, free, steps = in_child(job)
    assert name in ('RuntimeError', 'OutOfMemoryError', 'MemoryError')
    assert 'alloc' in text
    assert free
    assert steps == 2
    assert names(tmp_path) and all_load(tmp_path)
