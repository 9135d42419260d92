"""Checkpoints without frozen weights: their contents, exact resume, and models with another base."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from learnkit import Callback, Checkpoint, DataLoaders, Learner, OptionError, WeightsError
from learnkit.checkpoint.digest import differences
from learnkit.checkpoint.folder import entries
from tests.helpers.learners import quiet_learner
from tests.helpers.ranks import run_ranks

N = 5  # batches an epoch


class Net(nn.Module):
    "A frozen base with tied weights and a batch norm, and a small trained head."

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Sequential(nn.Linear(3, 32), nn.BatchNorm1d(32), nn.Linear(32, 32))
        self.tied = self.base[2]
        self.head = nn.Linear(32, 1)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.tied(self.base(x).relu()))  # type: ignore[no-any-return]  # a tensor


def make(path: Path, *cbs: Any, seed: int = 0, **options: Any) -> Learner:
    x = torch.randn(4 * N, 3, generator=torch.Generator().manual_seed(5))
    dls = DataLoaders.from_tensors((x, x[:, :1]), (x[:8], x[:8, 1:2]), bs=4, seed=1)
    saver = Checkpoint('2ba', keep_last=None, trainable_only=True, **options)
    return quiet_learner(dls, Net(seed), nn.MSELoss(), lr=0.01, path=path, cbs=[saver, *cbs])


def saved_weights(path: Path) -> set[str]:
    with safe_open(str(path), 'pt') as file:
        names = set(file.keys())
    return {name.removeprefix('model.') for name in names if name.startswith('model.')}


def newest(folder: Path) -> Path:
    return entries(folder / 'checkpoints')[0].path


def test_a_file_has_the_trained_weights_and_the_buffers(tmp_path: Path) -> None:
    make(tmp_path).fit(1)
    assert saved_weights(newest(tmp_path)) == {
        'head.weight',
        'head.bias',
        'base.1.running_mean',
        'base.1.running_var',
        'base.1.num_batches_tracked',
    }


def test_another_base_is_refused_and_nothing_is_loaded(tmp_path: Path) -> None:
    make(tmp_path).fit(1)
    other = make(tmp_path, seed=1)
    before = {name: t.clone() for name, t in other.model.state_dict().items()}
    with pytest.raises(WeightsError, match=r' 8 frozen .* 6 .*base\.0\.bias'):
        other.fit(2, resume=True)
    assert not differences(before, other.model.state_dict())
    nearly = make(tmp_path)
    nearly.model.base[0].weight[0, 0] += 1e-6
    with pytest.raises(WeightsError, match=r'1 of them .*base\.0\.weight'):
        nearly.fit(2, resume=True)


def test_weights_that_were_trained_once_are_kept(tmp_path: Path) -> None:
    def make_changing(path: Path) -> Learner:
        def set_base(cb: Callback) -> None:
            cb.learn.model.base.requires_grad_(cb.epoch > 0)

        return make(path, Callback(before_epoch=set_base))

    straight = make_changing(tmp_path)
    straight.fit(3)
    weights = saved_weights(newest(tmp_path))
    assert len(weights) == 11  # the file has tied weights once
    for entry in entries(tmp_path / 'checkpoints')[::3]:
        learn = make_changing(tmp_path / entry.path.stem)
        learn.fit(3, resume=entry.path)
        assert not differences(straight.checkpoint_state(), learn.checkpoint_state())
        if entry.info['ba'] < 3 * N:
            assert saved_weights(newest(tmp_path / entry.path.stem)) == weights


def test_the_trained_weights_alone_can_be_loaded(tmp_path: Path) -> None:
    trained = make(tmp_path)
    trained.fit(1)
    learn = make(tmp_path / 'other')
    with pytest.raises(WeightsError, match='strict=False'):
        learn.load(newest(tmp_path), with_opt=False)
    learn.load(newest(tmp_path), with_opt=False, strict=False)
    assert not differences(trained.model.state_dict(), learn.model.state_dict())


def train_on_rank(rank: int, path: Path) -> Any:
    learn = make(path)
    with learn.distributed(batch_size='global'):
        learn.fit(1)
        end = learn.checkpoint_state()
    again = make(path)
    with again.distributed(batch_size='global'):
        again.fit(1, resume=entries(path / 'checkpoints')[1].path)
        same = not differences(end, again.checkpoint_state())
    sharded = make(path)
    try:
        with sharded.distributed('fsdp'):
            sharded.fit(1)
    except OptionError as e:
        return same, str(e)


def test_two_processes(tmp_path: Path) -> None:
    results = run_ranks(train_on_rank, 2, tmp_path)
    assert [same for same, _ in results] == [True, True]
    assert all("'fsdp'" in message for _, message in results)
    assert len(saved_weights(newest(tmp_path))) == 5
