"""Shared by tests of metrics: a tensor that counts host reads, and a stand-in for a Learner in one batch."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

HOST_READS = ('item', 'cpu', 'tolist', 'numpy', '__float__', '__bool__', '__int__')
devices = pytest.mark.parametrize('device', ['cpu', pytest.param('cuda', marks=pytest.mark.cuda)])


class Watched(torch.Tensor):
    "A tensor that claims to be on a device, and counts operations for which the host would wait."

    reads = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, '__name__', '') in HOST_READS:
            Watched.reads += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def watch_reads(t: torch.Tensor) -> torch.Tensor:
    Watched.reads = 0
    return t.as_subclass(Watched)


def batch(pred: Any = None, *yb: Any, xb: tuple[Any, ...] = (), **kw: Any) -> SimpleNamespace:
    return SimpleNamespace(pred=pred, yb=yb, xb=xb, **kw)


def feed(metric: Any, pred: torch.Tensor, *targs: torch.Tensor, bs: int = 64, **kw: Any) -> Any:
    "Return the metric after one pass over the set."
    metric.reset()
    for parts in zip(*(t.split(bs) for t in (pred, *targs)), strict=True):
        metric.accumulate(batch(*parts, **kw))
    return metric


def scores(n: int = 150, n_classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, n_classes), torch.randint(n_classes, (n,))


def transfers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    "Return a list to which each transfer of a tensor to the host appends its kind."
    seen: list[str] = []

    def note(kind: str, own: Any) -> Any:
        def read(t: torch.Tensor) -> Any:
            seen.append(kind)
            return own(t)

        return read

    for kind in ('item', 'tolist'):
        monkeypatch.setattr(torch.Tensor, kind, note(kind, getattr(torch.Tensor, kind)))
    return seen


def close(expected: Any) -> Any:
    return pytest.approx(expected, rel=1e-5, abs=1e-7)


def class_scores(n: int, seen: int | None = None) -> tuple[torch.Tensor, torch.Tensor, Any, Any]:
    "Return scores and targets of `n` classes, of which `seen` occur, as tensors and as arrays."
    targ = torch.randint(seen or n, (150,))
    pred = torch.randn(150, n) + torch.eye(n)[targ]
    pred[:, seen:] -= 100
    return pred, targ, targ.numpy(), pred.argmax(1).numpy()


def label_scores(n: int = 4) -> tuple[torch.Tensor, torch.Tensor, Any, Any]:
    targ = (torch.rand(150, n) < torch.linspace(0.1, 0.8, n)).long()
    pred = torch.randn(150, n) + targ - 0.5
    return pred, targ, targ.numpy(), pred.sigmoid().numpy()
