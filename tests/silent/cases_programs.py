"""What random programs lost when they were killed: attributes, generators, rates, files."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn

from learnkit import Callback, Checkpoint, DataLoaders, Learner
from tests.helpers.learners import quiet_learner
from tests.silent.cases import case

row = partial(case, 'programs', tolerance=0.0)  # bit for bit
N_BATCHES = 4  # of an epoch


def make(path: Path, opt: Any = torch.optim.SGD, cbs: Any = (), freeze: bool = False) -> Learner:
    torch.manual_seed(0)
    x = torch.randn(N_BATCHES * 4, 4)
    y = x.sum(1, keepdim=True)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].requires_grad_(not freeze)
    if isinstance(opt, partial):
        opt = opt(model.parameters())
    dls = DataLoaders.from_tensors((x, y), (x[:4], y[:4]), bs=4, shuffle=False)
    return quiet_learner(
        dls, model, nn.MSELoss(), opt_func=opt, lr=0.05, cbs=cbs, path=path, has_bar=False
    )


@contextmanager
def quiet_folder() -> Iterator[Path]:
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        yield Path(folder)


def resume_after(n: int, path: Path, **options: Any) -> tuple[Learner, Learner]:
    "Train two epochs; train them in a second process from the checkpoint after batch `n`; return both Learners."
    states: dict[int, Any] = {}
    note = partial(note_state, states)
    whole = make(path, **call_all(options))
    whole.fit(2, cbs=Callback(batch_checkpoint=note, epoch_checkpoint=note))
    resumed = make(path, **call_all(options))
    resumed.fit(2, resume=states[n])
    return whole, resumed


def note_state(states: dict[int, Any], cb: Any) -> None:
    states[cb.learn.time.ba] = cb.learn.checkpoint_state()


def call_all(options: dict[str, Any]) -> dict[str, Any]:
    "Return the options with a new list of callbacks."
    return {name: value() if name == 'cbs' else value for name, value in options.items()}


def count(cb: Any) -> None:
    cb.n = vars(cb).get('n', 0) + 1


@row('count in an attribute that a function sets, after a resume', old='3')
def counted_by_function() -> Any:
    with quiet_folder() as path:
        _, resumed = resume_after(5, path, cbs=lambda: [Callback(after_step=count, order=7)])
    cb = next(cb for cb in resumed.cbs if cb.order == 7)
    return cb.n, 2 * N_BATCHES


class Mean(Callback):
    "Averages in single precision."

    def __init__(self) -> None:
        self.mean = np.float32(0.1)

    def after_step(self) -> None:
        self.mean = self.mean * 0.9 + 0.1 / 3


@row('mean of type np.float32 in a callback, after a resume', old='0.23289096323152383')
def single_precision() -> Any:
    with quiet_folder() as path:
        _, resumed = resume_after(5, path, cbs=lambda: [Mean()])
    mean = np.float32(0.1)
    for _ in range(2 * N_BATCHES):
        mean = mean * 0.9 + 0.1 / 3
    return float(resumed.mean.mean), float(mean)


class Noisy(torch.optim.SGD):
    "Adds noise from a generator of its own."

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.noise = torch.Generator().manual_seed(3)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for p in self.param_groups[0]['params']:
            p.add_(torch.randn(p.shape, generator=self.noise), alpha=0.01)


@row('weight after a resume of an optimizer with a generator of its own', old='0.312160')
def generator_of_optimizer() -> Any:
    with quiet_folder() as path:
        whole, resumed = resume_after(5, path, opt=Noisy)
    return float(resumed.model[0].weight[0, 0]), float(whole.model[0].weight[0, 0])


def unfreeze(cb: Any) -> None:
    cb.model[0].requires_grad_(True)


@row('weight after a resume from the epoch after which a layer is unfrozen', old='WeightsError')
def unfrozen_after_epoch() -> Any:
    with quiet_folder() as path:
        cbs = lambda: [Callback(after_epoch=unfreeze)]
        whole, resumed = resume_after(N_BATCHES, path, cbs=cbs, freeze=True)
    return float(resumed.model[0].weight[0, 0]), float(whole.model[0].weight[0, 0])


@row(
    'rate of the next fit of a loaded Learner, optimizer given as an instance',
    old='[0.002500074999999999]',
)
def rate_after_load() -> Any:
    adam = partial(torch.optim.Adam, lr=0.01)
    with quiet_folder() as path:
        learn, loaded = make(path, opt=adam), make(path, opt=adam)
        learn.fit_one_cycle(1)
        loaded.load_checkpoint_state(learn.checkpoint_state())
        loaded.fit(1)
        return loaded.opt.lrs, [0.01]


@row('files of a run that a look changes, Checkpoint passed to the fit', old='2 new checkpoints')
def files_after_look() -> Any:
    with quiet_folder() as path:

        def fit(learn: Learner, **options: Any) -> None:
            saver = Checkpoint('2ba', path / 'run', keep_last=None, background=False)
            learn.fit(2, cbs=saver, **options)

        fit(make(path))
        before = {file: file.stat().st_mtime_ns for file in path.rglob('*.ckpt')}
        make(path).rewind(3, fit=fit, folder=path / 'run').step()
        changed = [f for f in path.rglob('*.ckpt') if before.get(f) != f.stat().st_mtime_ns]
        return [f.name for f in changed], []
