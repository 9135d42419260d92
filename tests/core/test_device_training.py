"""Training on a device compared with loops by hand; what does not need streams runs on the CPU too."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from learnkit import (
    Adam,
    Callback,
    Checkpoint,
    DataLoaders,
    GuardNonFinite,
    Learner,
    MemoryMonitor,
    MixedPrecision,
    TerminateOnNaNCallback,
    default_device,
)
from learnkit.data.position import LoaderPosition
from learnkit.data.prefetch import read_ahead
from tests.helpers.learners import quiet_learner
from tests.helpers.measuring import devices

N_BATCHES = 8


class Noisy(Dataset[Any]):
    "Samples with noise of the global generator of the process that fetches them."

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(8 * N_BATCHES, 4, generator=generator)
        self.y = self.x.argmax(1) % 3

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i] + 0.1 * torch.randn(4), self.y[i]


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))


def learner(device: str, *cbs: Any, num_workers: int = 0, **kwargs: Any) -> Learner:
    torch.manual_seed(0)
    dls = DataLoaders.from_datasets(Noisy(), None, 8, num_workers=num_workers, device=device)
    options = {'opt_func': Adam, 'lr': 0.01, **kwargs}
    return quiet_learner(dls, make_net(), F.cross_entropy, cbs=list(cbs), has_bar=False, **options)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().cpu() for p in model.parameters()])


@pytest.mark.cuda
def test_the_default_device_is_the_gpu() -> None:
    learn = Learner([(torch.randn(8, 4), torch.zeros(8).long())], make_net(), F.cross_entropy)
    seen = []
    with learn.no_bar(), learn.no_logging():
        learn.fit(1, cbs=Callback(after_loss=lambda cb: seen.append((cb.x.device, cb.loss.device))))
    here = torch.device('cuda', torch.cuda.current_device())
    assert default_device() == torch.device('cuda') and seen == [(here, here)]
    assert learn.get_preds(dl=[torch.randn(8, 4)])[0].device.type == 'cpu'


@pytest.mark.cuda
@pytest.mark.parametrize('num_workers', [0, 2])
def test_batches_are_copied_from_pinned_memory_while_the_gpu_computes(
    num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[bool] = []
    streams = []
    move = Tensor.to

    def record(t: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get('non_blocking'):
            pinned.append(t.is_pinned())
            streams.append(torch.accelerator.current_stream())
        return move(t, *args, **kwargs)

    monkeypatch.setattr(Tensor, 'to', record)
    device = torch.device('cuda', torch.cuda.current_device())
    loader = DataLoader(Noisy(), 8, num_workers=num_workers, generator=torch.Generator())
    torch.manual_seed(0)
    expected = list(loader)
    torch.manual_seed(0)
    loader = DataLoader(Noisy(), 8, num_workers=num_workers, generator=torch.Generator())
    found = list(read_ahead(loader, device, LoaderPosition(loader).begin))
    assert all(pinned) and len(pinned) == 2 * N_BATCHES
    assert torch.accelerator.current_stream() not in streams
    for (x, y), (x_found, y_found) in zip(expected, found, strict=True):
        assert x_found.is_cuda and torch.equal(x_found.cpu(), x) and torch.equal(y_found.cpu(), y)


def train_by_hand(device: str, mode: str | None, batches: list[Any]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3)).to(device)
    opt = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.9, 0.99), eps=1e-5, fused=True)
    scaler = torch.amp.GradScaler(device, enabled=mode == 'fp16')
    dtype = torch.float16 if mode == 'fp16' else torch.bfloat16
    for x, y in batches * 2:
        with torch.autocast(device, dtype) if mode else nullcontext():
            loss = F.cross_entropy(model(x.to(device)).float(), y.to(device))
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    return model


@devices
@pytest.mark.parametrize('mode', [None, 'bf16', 'fp16'])
def test_precisions_and_fused_optimizers_equal_a_loop_by_hand(
    mode: str | None, device: str
) -> None:
    batches = list(DataLoader(Noisy(), 8))
    expected = train_by_hand(device, mode, batches)
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
    cbs = [MixedPrecision(mode)] if mode else []
    dls = DataLoaders(batches, device=device)
    learn = Learner(dls, model, F.cross_entropy, opt_func=Adam, lr=0.01, wd=0.0, cbs=cbs)
    with learn.no_bar(), learn.no_logging():
        learn.fit(2)
    assert tf32 == (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    assert not torch.is_autocast_enabled(device)
    (opt,) = learn.opt.optimizers.values()
    assert opt.param_groups[0]['fused'] is True
    assert next(model.parameters()).device.type == device
    torch.testing.assert_close(weights(model), weights(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ('device', 'num_workers'),
    [
        ('cpu', 0),
        pytest.param('cuda', 0, marks=pytest.mark.cuda),
        pytest.param('cuda', 2, marks=pytest.mark.cuda),
    ],
)
def test_a_run_that_is_resumed_equals_one_without_a_break(
    device: str, num_workers: int, tmp_path: Path
) -> None:
    whole = learner(device, num_workers=num_workers)
    whole.fit(2)
    after = torch.rand(3, device=device)

    def fail(cb: Any) -> None:
        if cb.learn.time.ba == N_BATCHES + 3:
            raise OSError('power')

    def make(*cbs: Any) -> Learner:
        saving = Checkpoint(every='1ba', folder=tmp_path, background=device == 'cuda')
        return learner(device, saving, *cbs, num_workers=num_workers)

    first = make(Callback(batch_checkpoint=fail, order=200))
    with first, pytest.raises(OSError, match='power'):
        first.fit(2)
    torch.rand(7, device=device)
    with make() as again:
        again.fit(2, resume=True)
        assert torch.equal(weights(again.model), weights(whole.model))
        assert torch.equal(torch.rand(3, device=device), after)
        assert [*map(float, again.recorder.losses)] == [*map(float, whole.recorder.losses)]


class CountWaits(Callback):
    "Make torch warn of each wait for the device between the first batch and the last."

    order = -20

    def before_train(self) -> None:
        torch.cuda.set_sync_debug_mode('warn')

    def after_train(self) -> None:
        torch.cuda.set_sync_debug_mode('default')

    def cleanup(self) -> None:
        torch.cuda.set_sync_debug_mode('default')


@pytest.mark.cuda
@pytest.mark.parametrize(
    ('make', 'per_step'),
    [(lambda: [], 0), (lambda: [GuardNonFinite()], 1), (lambda: [TerminateOnNaNCallback()], 1)],
    ids=['default', 'guard', 'losses'],
)
def test_the_host_waits_for_the_gpu_once_a_step_with_a_guard(
    make: Callable[[], list[Callback]], per_step: int
) -> None:
    learn = learner('cuda', *make())
    learn.fit(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        learn.fit(1, cbs=CountWaits())
    waits = [w for w in caught if 'called a synchronizing' in str(w.message)]
    assert len(waits) == per_step * N_BATCHES


@pytest.mark.cuda
def test_memory_is_that_of_the_allocator() -> None:
    kept = torch.zeros(1_000_000, device='cuda')
    learn = learner('cuda', MemoryMonitor(every='1ep'))
    learn.fit(1)
    row = learn.history[-1]
    assert row['memory/current_allocated_mem'] >= kept.nbytes / 1e9
    assert row['memory/current_allocated_mem'] <= row['memory/peak_allocated_mem']
    assert row['memory/peak_allocated_mem'] <= torch.cuda.max_memory_allocated() / 1e9
    assert row['memory/alloc_retries'] == torch.cuda.memory_stats()['num_alloc_retries']
