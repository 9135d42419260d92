"""Strategy 'fsdp' with parallel layers: 2 x 2 processes compared with one."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from learnkit import Callback, Checkpoint, DataLoaders, GradientClip, Learner, OptimizerMonitor, mae
from learnkit.core.errors import OptionError
from learnkit.distributed.dtensor import is_dtensor, shard_rows
from learnkit.distributed.fsdp import Sharded
from tests.helpers.fsdp import max_difference
from tests.helpers.ranks import run_ranks

N, N_VALID = 33, 17  # at both ends a sample is left over
OPTIONS: dict[str, Any] = {'tensor': 2, 'batch_size': 'global'}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 12), nn.Linear(12, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x + self.down(torch.relu(self.up(x))))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.dropout = nn.Dropout(0.0)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.dropout(x))
        return out


def parallelize(model: Any, mesh: Any) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh, {'up': ColwiseParallel(), 'down': RowwiseParallel()})


def make(folder: Path, *cbs: Any, dropout: float = 0.0, model: nn.Module | None = None) -> Learner:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N + N_VALID, 8, generator=generator)
    y = x[:, :1] + 0.1 * torch.randn(N + N_VALID, 1, generator=generator)
    torch.manual_seed(1)
    dls = DataLoaders.from_tensors((x[:N], y[:N]), (x[N:], y[N:]), bs=8)
    model = model or Net()
    model.dropout.p = dropout  # type: ignore[union-attr]
    learn = Learner(dls, model, nn.MSELoss(), lr=0.01, metrics=mae, path=folder, cbs=[*cbs])
    learn.logger = lambda *_: None
    torch.manual_seed(3)
    return learn


def values(learn: Learner) -> list[Tensor]:
    return [t.detach().clone() for t in learn.model.state_dict().values()]


def evaluate(learn: Learner) -> list[Any]:
    "Return predictions, values of an evaluation, training losses and the last norm of the gradient."
    preds = learn.get_preds()[0]
    evaluated = torch.tensor([*learn.validate()])
    losses = torch.tensor(learn.recorder.smooth_loss.raw)
    return [preds, evaluated, losses, learn.gradient_clip.total_norm]


def train(rank: int | None, folder: Path) -> tuple[list[Tensor], list[Any]]:
    "Train in one process, or with parallel layers; return weights, and what was measured."
    learn = make(folder, GradientClip(0.1), OptimizerMonitor(every='1ba'))
    with learn.no_bar():
        if rank is None:
            learn.fit(2)
            return values(learn), evaluate(learn)
        with learn.distributed('fsdp', parallelize=parallelize, **OPTIONS):
            up = learn.model.blocks[0].up.weight
            assert is_dtensor(up) and up.to_local().numel() == up.numel() / 4
            assert (learn.world.data_rank, learn.world.data_size) == (rank // 2, 2)
            learn.fit(2)
            found = evaluate(learn)
            learn.get_preds(sink=folder / 'preds')
            learn.save('whole')
    return values(learn), found


@pytest.mark.dist
def test_two_times_two_processes_train_as_one(tmp_path: Path) -> None:
    weights, measured = train(None, tmp_path)
    moved = max_difference(weights, values(make(tmp_path)))
    for own, found in run_ranks(train, 4, tmp_path):
        assert max_difference(own, weights) < 1e-6 < 1e-2 < moved
        for a, b in zip(found, measured, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    files = sorted((tmp_path / 'preds').iterdir())
    parts = [torch.load(file)['preds'] for file in files]
    torch.testing.assert_close(torch.cat(parts), measured[0], rtol=1e-5, atol=1e-6)
    again = make(tmp_path)
    again.load('whole')
    assert max_difference(values(again), weights) < 1e-6


def fail(cb: Any) -> None:
    if cb.learn.train_iter == 7:
        raise InterruptedError


def resume(rank: int, folder: Path, mode: str) -> tuple[list[Tensor], list[float]]:
    "Train with dropout: 'whole', up to a failure, or on from its checkpoint in other numbers of shards."
    cbs = [Checkpoint('2ba')] if mode != 'whole' else []
    if mode == 'killed':
        cbs.append(Callback(before_batch=fail, run_valid=False))
    learn = make(folder, *cbs, dropout=0.0 if mode == 'shards' else 0.2)
    if mode == 'resumed':
        torch.manual_seed(9)
    options = {'batch_size': 'global'} if mode == 'shards' else OPTIONS
    if mode != 'shards':
        options = {**options, 'parallelize': parallelize}
    try:
        with learn.no_bar(), learn.distributed('fsdp', **options):
            learn.fit(2, resume=mode in ('resumed', 'shards'))
    except InterruptedError:
        return [], []
    return values(learn), learn.recorder.smooth_loss.raw


@pytest.mark.dist
def test_a_killed_run_resumes_bit_for_bit_and_in_other_shards(tmp_path: Path) -> None:
    whole, *_ = run_ranks(resume, 4, tmp_path / 'other', 'whole')
    run_ranks(resume, 4, tmp_path, 'killed')
    for weights, losses in run_ranks(resume, 4, tmp_path, 'resumed'):
        assert losses == whole[1]
        assert all(map(torch.equal, weights, whole[0]))


@pytest.mark.dist
def test_shards_of_layers_that_are_not_parallel_take_a_checkpoint(tmp_path: Path) -> None:
    def job(rank: int) -> Any:
        learn = make(tmp_path, Checkpoint('1ep'), Callback(before_batch=fail, run_valid=False))
        with learn.no_bar(), learn.distributed('fsdp', parallelize=parallelize, **OPTIONS):
            learn.fit(2)

    with pytest.raises(Exception, match='InterruptedError'):
        run_ranks(job, 4)
    weights, _ = train_plain(tmp_path / 'plain')
    for own, _ in run_ranks(resume, 2, tmp_path, 'shards'):
        assert max_difference(own, weights) < 1e-6
    alone = make(tmp_path, Checkpoint('2ba'))
    with alone.no_bar():
        alone.fit(2, resume=True)
    assert max_difference(values(alone), weights) < 1e-6


def train_plain(folder: Path) -> tuple[list[Tensor], list[float]]:
    learn = make(folder)
    with learn.no_bar():
        learn.fit(2)
    return values(learn), learn.recorder.smooth_loss.raw


@pytest.mark.dist
def test_a_model_on_the_meta_device_is_initialized_by_layer(tmp_path: Path) -> None:
    with torch.device('meta'):
        empty = Net()

    def job(rank: int) -> list[Tensor]:
        learn = make(tmp_path, model=deepcopy(empty))
        with learn.no_bar(), learn.distributed('fsdp', parallelize=parallelize, **OPTIONS):
            rows = shard_rows(learn.model.blocks[0].up.weight)
            part = learn.model.blocks[0].up.weight.full_tensor()[rows]
            assert torch.equal(part, learn.model.blocks[0].up.weight.to_local())
            return [t.full_tensor() for t in learn.model.state_dict().values()]

    model = deepcopy(empty).to_empty(device='cpu')
    torch.manual_seed(3)
    for m in model.modules():
        if hasattr(m, 'reset_parameters'):
            m.reset_parameters()
    for found in run_ranks(job, 4):
        assert all(map(torch.equal, found, model.state_dict().values()))


def refuse(rank: int) -> str:
    learn = make(Path('.'))
    with (
        pytest.raises(OptionError) as caught,
        learn.distributed('fsdp', tensor=3, parallelize=parallelize),
    ):
        pass
    assert learn.world.size == 1 and not any(map(is_dtensor, learn.model.parameters()))
    return str(caught.value)


def test_numbers_that_do_not_fit_are_refused() -> None:
    for options in ({'tensor': 2}, {'parallelize': parallelize}):
        with pytest.raises(OptionError, match='together with `parallelize=`'):
            Sharded(**options)
    with pytest.raises(OptionError, match='without `replicas=`'):
        Sharded(tensor=2, parallelize=parallelize, replicas=2)
    for text in run_ranks(refuse, 2):
        assert 'tensor=3: 2 processes are not divided by it' in text
