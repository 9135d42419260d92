"""A device that is never read: no wait of the host in a steady batch, and few calls beside those of a plain loop."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from learnkit import DataLoaders, GuardNonFinite, Learner
from learnkit.core import device
from tests.helpers.fresh import output_of

META = torch.device('meta')
N, SKIP = 30, 10  # batches, fewer than the Recorder sends at once; batches before the steady part


class FakeAccelerator(TorchDispatchMode):
    "The meta device as an accelerator: counts the calls that it would receive, and what the host would wait for."

    def __init__(self) -> None:
        super().__init__()
        self.n_calls, self.reads = 0, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(t.device == META for t in tensors_of([*args, *kwargs.values()])):
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        self.n_calls += 1
        if name in ('_local_scalar_dense', 'equal', 'is_nonzero'):
            self.reads.append(name)
            return 1.0  # every value is finite
        if name == 'copy_' and args[0].device.type == 'cpu':
            self.reads.append(name)
            return args[0].zero_()
        if name == '_to_copy' and kwargs.get('device') == torch.device('cpu'):
            self.reads.append(name)
            return torch.zeros(args[0].shape, dtype=kwargs.get('dtype') or args[0].dtype)
        return func(*args, **kwargs)


def tensors_of(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_of(value)


class Steady:
    "A loader that notes the calls and reads from its tenth batch to its last."

    def __init__(self, mode: FakeAccelerator) -> None:
        self.mode = mode
        self.batch = torch.empty(8, 16, device=META), torch.empty(8, 1, device=META)

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[Any]:
        for i in range(N):
            if i == SKIP:
                self.began = self.mode.n_calls, len(self.mode.reads)
            yield self.batch
        self.n_calls = (self.mode.n_calls - self.began[0]) / (N - SKIP)
        self.reads = self.mode.reads[self.began[1] :]


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)).to(META)


def run_learner(*cbs: Any) -> Steady:
    with FakeAccelerator() as mode:
        train = Steady(mode)
        learn = Learner(
            DataLoaders(train, device=META),
            make_model(),
            F.mse_loss,
            opt_func=torch.optim.Adam,
            cbs=cbs,
        )
        learn.fit(1)
    return train


def run_plain() -> Steady:
    with FakeAccelerator() as mode:
        train, model = Steady(mode), make_model()
        opt = torch.optim.Adam(model.parameters())
        for x, y in train:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
    return train


def test_a_steady_batch_reads_nothing_and_calls_little(capsys: pytest.CaptureFixture[str]) -> None:
    plain, ours = run_plain(), run_learner()
    assert plain.reads == ours.reads == []
    assert 20 < plain.n_calls < 100
    assert ours.n_calls <= plain.n_calls + 9 <= 70


def test_guard_non_finite_waits_once_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(run_learner(GuardNonFinite()).reads) == N - SKIP
    assert len(run_learner(GuardNonFinite(grads=False)).reads) == N - SKIP


WITHOUT_POSIX = """
import os, signal
import torch
for name in ('killpg', 'fork', 'register_at_fork', 'setsid', 'getpgid', 'statvfs', 'sync'):
    delattr(os, name)
for name in ('SIGKILL', 'SIGUSR1', 'pthread_sigmask', 'sigwaitinfo', 'setitimer'):
    delattr(signal, name)
from learnkit import Checkpoint
from learnkit.testing import synth_learner
learn = synth_learner(cbs=Checkpoint('2ba'))
with learn.no_bar():
    learn.fit(1)
    learn.fit(2, resume=True)
print('trained', learn.time.ep)
"""


def test_it_trains_where_the_system_is_not_posix(tmp_path: Path) -> None:
    assert output_of(WITHOUT_POSIX, cwd=tmp_path).splitlines()[-1] == 'trained 2'


def test_without_an_accelerator_there_is_nothing_to_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        torch.accelerator, 'current_accelerator', lambda check_available=False: None
    )
    assert device.find_accelerator() is None and device.find_used_accelerator() is None
    assert not device.pins_memory() and not device.has_streams(torch.device('cuda'))
    device.synchronize()
    device.empty_cache()
