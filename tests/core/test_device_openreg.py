"""Training on `torch_openreg`, PyTorch's example of an accelerator that is not built into torch."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    find_spec('torch_openreg') is None,
    reason="needs torch_openreg, from PyTorch's repository",
)

# `import torch` makes openreg the accelerator of the whole process
SCRIPT = """
import warnings
import torch, torch_openreg
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from learnkit import Adam, Callback, Checkpoint, DataLoaders, Learner, MixedPrecision, SGD
from learnkit import default_device
from learnkit.core.random import capture_rng, restore_rng

warnings.simplefilter('error')
warnings.filterwarnings('ignore', 'Set seed for `openreg`')  # the example cannot be seeded by torch

class Noisy(Dataset):
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i] + 0.1 * torch.randn(4), self.x[i].argmax() % 3

def make(*cbs, opt_func=Adam, device=None, **kwargs):
    torch.manual_seed(0)
    dls = DataLoaders.from_datasets(Noisy(), Noisy(), 8, device=device)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    options = {'opt_func': opt_func, 'lr': 0.01, **kwargs}
    learn = Learner(dls, model, F.cross_entropy, cbs=list(cbs), **options)
    learn.remove_cb(learn.progress)
    learn.logger = lambda row: None
    return learn

def weights(learn):
    return torch.cat([p.detach().flatten().cpu() for p in learn.model.parameters()])

assert default_device() == torch.device('openreg')

def train(device):
    learn = make(opt_func=SGD, device=device)
    learn.fit(2)
    return learn

on_cpu, on_device = train('cpu'), train('openreg')
assert next(on_device.model.parameters()).device.type == 'openreg'
assert torch.equal(weights(on_cpu), weights(on_device))

def draw():
    return Callback(before_batch=lambda cb: torch.rand(2, device='openreg'))

whole = make(draw())
start = capture_rng()
whole.fit(2)
after = torch.rand(3, device='openreg')

def fail(cb):
    if cb.learn.time.ba == 11:
        raise OSError('power')

try:
    with make(draw(), Checkpoint('1ba', folder='run'), Callback(batch_checkpoint=fail, order=200)) as first:
        restore_rng(start)  # torch.manual_seed does not seed this device
        first.fit(2)
except OSError:
    torch.rand(7, device='openreg')
with make(draw(), Checkpoint('1ba', folder='run')) as again:
    again.fit(2, resume=True)
assert torch.equal(weights(again), weights(whole))
assert torch.equal(torch.rand(3, device='openreg'), after)

def draw_on_each():
    return [torch.rand(2, device=f'openreg:{i}').cpu() for i in range(torch.accelerator.device_count())]

state = capture_rng()
drawn = draw_on_each()
restore_rng(state)
assert all(map(torch.equal, drawn, draw_on_each()))

for mode in ('bf16', 'fp16'):
    learn = make(MixedPrecision(mode), microbatch='auto')
    learn.fit(1)
    assert weights(learn).isfinite().all() and not torch.is_autocast_enabled('openreg')
print('trained')
"""


def test_a_learner_trains_and_resumes_on_an_accelerator_from_outside_of_torch(
    tmp_path: Path,
) -> None:
    command = [sys.executable, '-c', SCRIPT]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == ['trained'], done.stderr
