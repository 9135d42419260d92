"""Sinks do not overwrite files, and write late predictions completely and in order."""

from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from learnkit import (
    BatchError,
    Callback,
    DataLoaders,
    DistributedError,
    Learner,
    OptionError,
    TensorLoader,
)
from learnkit.inference.sinks import save_plain
from tests.helpers.distributing import make_learner
from tests.helpers.ranks import run_ranks


def make(model: nn.Module | None = None) -> Learner:
    torch.manual_seed(0)
    x = torch.randn(10, 2)
    loader = TensorLoader(x, torch.zeros(10, 3), bs=4)
    learn = Learner(DataLoaders(loader, loader), model or nn.Linear(2, 3), nn.MSELoss())
    learn.remove_cb(learn.progress)
    return learn


@pytest.mark.parametrize('name', ['preds', 'preds.npy'])
def test_what_is_there_is_not_overwritten(name: str, tmp_path: Path) -> None:
    learn, sink = make(), tmp_path / name
    learn.get_preds(sink=sink)
    before = sorted((p.name, p.stat().st_mtime_ns) for p in tmp_path.rglob('*'))
    with pytest.raises(OptionError, match='is there already'):
        learn.get_preds(sink=sink)
    assert sorted((p.name, p.stat().st_mtime_ns) for p in tmp_path.rglob('*')) == before


def test_values_of_numpy_and_enums_are_saved_as_plain_values(tmp_path: Path) -> None:
    mode = StrEnum('Mode', ['FP16']).FP16
    values = {
        'loss': np.float64(0.5),
        'n': np.int32(2),
        'mode': mode,
        'ids': np.arange(2),
        'raw': b'a',
    }
    save_plain(values, tmp_path / 'a.pt')
    loaded = torch.load(tmp_path / 'a.pt', weights_only=True)
    assert torch.equal(loaded.pop('ids'), torch.arange(2))
    assert loaded == {'loss': 0.5, 'n': 2, 'mode': 'fp16', 'raw': b'a'}
    for value in (np.array(['a']), {1}, object()):
        with pytest.raises(BatchError, match='safe to load'):
            save_plain([value], tmp_path / 'b.pt')


# -- several processes -----------------------------------------------------------------------------


def catch_error(rank: int, sink: Path, at_the_end: Any = None) -> tuple[str, str]:
    "Predict into a sink; return the error."
    learn = make_learner()
    with learn.distributed('ddp', timeout='20s'):
        try:
            cbs = at_the_end and Callback(after_validate=lambda cb: at_the_end())
            learn.get_preds(sink=sink, cbs=cbs)
        except (DistributedError, OSError) as e:
            return type(e).__name__, str(e)
    return 'nothing', ''


def predict_to_own_disk(rank: int, folder: Path, name: str, bad: int) -> tuple[str, str]:
    own = folder / f'{bad}{name}' / str(rank)
    own.parent.mkdir(exist_ok=True)
    own.touch() if rank == bad else own.mkdir()  # a file where a folder is to be
    return catch_error(rank, own / 'preds' / name)


@pytest.mark.dist
@pytest.mark.parametrize('bad', [0, 1])
def test_a_disk_that_fails_in_one_process_is_reported_by_all(tmp_path: Path, bad: int) -> None:
    answers = run_ranks(predict_to_own_disk, 2, tmp_path, 'batches', bad)
    assert answers[bad][0] == 'NotADirectoryError', answers
    kind, message = answers[1 - bad]
    assert kind == 'DistributedError'
    assert f'Process {bad} of 2 has failed: NotADirectoryError' in message
