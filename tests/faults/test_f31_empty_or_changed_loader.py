"""Row 31: an empty loader, or one that changed on resume: a typed error before the first step, and nothing changed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from learnkit import (
    Callback,
    CheckpointError,
    DataLoaders,
    EmptyLoaderError,
    LoaderError,
    TensorLoader,
)
from tests.faults.fault_helpers import BS, make_dls
from tests.faults.run_helpers import checkpointed, content, make_learner, quiet, same, torch_dls


def pairs(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(n, 3), torch.ones(n, 1)


def untrained(learn: Any, error: type[Exception], match: str, **kwargs: Any) -> None:
    "Fit, which has to be refused with weights and optimizer as they were, and no step."
    learn.create_opt()
    before, steps = content(learn), list[int]()
    watch = Callback(before_batch=lambda cb: steps.append(cb.iter))
    with pytest.raises(error, match=match):
        learn.fit(2, cbs=watch, **kwargs)
    assert content(learn) == before and not steps and learn.opt.n_steps == 0


EMPTY: dict[str, Callable[[], Any]] = {
    'list': list,
    'torch': lambda: DataLoader(TensorDataset(*pairs(0)), BS),
    'tensors': lambda: TensorLoader(*pairs(0), bs=BS),
    'all dropped': lambda: DataLoader(TensorDataset(*pairs(BS - 1)), BS, drop_last=True),
    'generator': lambda: iter([]),
}


@pytest.mark.parametrize('kind', EMPTY)
def test_an_empty_loader(kind: str) -> None:
    learn = quiet(make_learner(dls=make_dls()))
    try:
        learn.dls = DataLoaders(EMPTY[kind](), make_dls().valid)
    except LoaderError:
        return  # it is told here already
    untrained(learn, EmptyLoaderError, 'no batch|empty')


CHANGED: dict[str, tuple[Callable[[], Any], str]] = {
    'longer': (lambda: torch_dls(n_train=5), r'batches 3, now 5; .*samples 12, now 20'),
    'shorter': (lambda: torch_dls(n_train=2), r'batches 3, now 2'),
    'batch size': (lambda: torch_dls(bs=2), r'batches 3, now 6; batch size 4, now 2'),
    'another kind': (make_dls, r'type DataLoader, now TensorLoader'),
    'empty': (lambda: torch_dls(n_train=1, bs=BS + 1, drop_last=True), r'batches 3, now 0'),
}
AT = {'in an epoch': '2ba', 'after an epoch': '1ep'}


@pytest.mark.parametrize('at', AT)
@pytest.mark.parametrize('kind', CHANGED)
def test_another_loader_on_resume(kind: str, at: str, tmp_path: Path) -> None:
    make = checkpointed(tmp_path, every=AT[at], keep_last=None)
    straight = make(dls=torch_dls())
    straight.fit(2)
    path = (
        tmp_path / {'in an epoch': '00001-ep0-ba2.ckpt', 'after an epoch': '00001-ep1-ba3.ckpt'}[at]
    )
    dls, pattern = CHANGED[kind]
    try:
        learn = make(dls=dls())
    except LoaderError:
        return
    error = EmptyLoaderError if kind == 'empty' else CheckpointError
    untrained(
        learn, error, 'no batch' if kind == 'empty' else f'not as it was.*{pattern}', resume=path
    )
    if kind in ('empty', 'longer'):
        return

    learn.dls = torch_dls()
    learn.fit(2, resume=path)
    assert same(straight.checkpoint_state(), learn.checkpoint_state()), (
        'with the right one it goes on'
    )
