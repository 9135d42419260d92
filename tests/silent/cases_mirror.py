"""Cases: stores that fail, files of callbacks on a new machine, and callbacks of Lightning on a plain model."""

import asyncio
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

from learnkit import Callback, Checkpoint, DataLoaders, Learner
from learnkit.callbacks import SaveModelCallback
from learnkit.checkpoint import mirror as module
from learnkit.interop import from_lightning
from learnkit.loggers import CSVLogger, read_log
from learnkit.testing import synth_learner
from tests.silent.cases import case

URL = 'memory://silent/run'
ROOT = '/silent/run'


def train(folder: str | Path, n_epoch: int, cbs: Any = (), resume: Any = False) -> Learner:
    "Train epochs of four batches with a mirror."
    torch.manual_seed(0)
    learn = synth_learner(n_train=4, n_valid=1)
    learn.path = Path(folder)
    checkpoint = Checkpoint(folder=Path(folder, 'checkpoints'), mirror=URL, background=False)
    with learn.no_bar(), learn.no_logging():
        learn.fit(n_epoch, cbs=[*cbs, checkpoint], resume=resume)
    return learn


def in_store(run: Callable[[Path], Any]) -> Any:
    "Return the result of a function of an empty folder, with an empty store."
    store = fsspec.filesystem('memory')
    retry = mock.patch.multiple(module, RETRY_S=0.001, WAIT_S=0.05)
    try:
        with tempfile.TemporaryDirectory() as folder, retry, warnings.catch_warnings():
            warnings.simplefilter('ignore')
            return run(Path(folder))
    finally:
        if store.exists('/silent'):
            store.rm('/silent', recursive=True)


def list_numbers() -> list[int]:
    names = [Path(path).name for path in fsspec.filesystem('memory').find(ROOT)]
    return sorted(int(name[:5]) for name in names if name.endswith('.ckpt'))


@case('mirror', 'uploads beside an object that cannot be read', old='[1]: nothing more is uploaded')
def unreadable_object() -> Any:
    read = MemoryFileSystem.cat_file

    def deny(fs: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        if '00001' in path:
            raise PermissionError('denied')
        return read(fs, path, *args, **kwargs)

    def run(folder: Path) -> list[int]:
        train(folder / 'a', 1)
        with mock.patch.object(MemoryFileSystem, 'cat_file', deny):
            train(folder / 'b', 1)
        return list_numbers()

    return in_store(run), [1, 2]


@case('mirror', "resume='best' beside an object that cannot be read", old='CheckpointError')
def best_beside_unreadable() -> Any:
    read = MemoryFileSystem.cat_file

    def deny(fs: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        if '00009' in path:
            raise PermissionError('denied')
        return read(fs, path, *args, **kwargs)

    def run(folder: Path) -> str:
        train(folder / 'a', 1)
        fsspec.filesystem('memory').pipe_file(f'{ROOT}/00009-ep9-ba36.ckpt', b'foreign')
        try:
            with mock.patch.object(MemoryFileSystem, 'cat_file', deny):
                return f'{len(train(folder / "b", 2, resume="best").history)} epochs'
        except Exception as e:
            return type(e).__name__

    return in_store(run), '2 epochs'


@case('mirror', 'bytes that are read of a file whose header claims more than it has', old='68')
def header_that_lies() -> Any:
    ends: list[int] = []
    read = MemoryFileSystem.cat_file

    def note(fs: Any, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> Any:
        ends.append(end)
        return read(fs, path, start, end, **kwargs)

    def run(folder: Path) -> int:
        content = (60).to_bytes(8, 'little') + b'{' + b' ' * 41
        fsspec.filesystem('memory').pipe_file(f'{ROOT}/00009-ep9-ba36.ckpt', content)
        with mock.patch.object(MemoryFileSystem, 'cat_file', note):
            module.Mirror(URL).entries(folder, with_info=True)
        return max(ends)

    return in_store(run), 8


@case('mirror', 'uploads after a canceled request', old='[]: the thread has ended')
def canceled_request() -> Any:
    put = MemoryFileSystem.put_file
    n_calls: list[int] = []

    def cancel_first(fs: Any, *args: Any, **kwargs: Any) -> Any:
        n_calls.append(1)
        if len(n_calls) == 1:
            raise asyncio.CancelledError
        return put(fs, *args, **kwargs)

    def run(folder: Path) -> list[int]:
        with (
            mock.patch.object(MemoryFileSystem, 'put_file', cancel_first),
            mock.patch.object(module, 'WAIT_S', 20.0),
        ):
            train(folder, 1)
        return list_numbers()

    return in_store(run), [1]


@case(
    'mirror',
    'a bucket that does not exist',
    old='trained 4 batches, a warning in mid-log',
)
def mistyped_bucket() -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise FileNotFoundError('The specified bucket does not exist')

    steps: list[int] = []

    def run(folder: Path) -> str:
        count = Callback(after_step=lambda cb: steps.append(1))
        try:
            with (
                mock.patch.object(MemoryFileSystem, 'put_file', refuse),
                mock.patch.object(MemoryFileSystem, 'pipe_file', refuse),
            ):
                train(folder, 1, [count], resume=True)
        except Exception as e:
            return f'{type(e).__name__} after {len(steps)} steps'
        return f'trained {len(steps)} batches'

    return in_store(run), 'CheckpointError after 0 steps'


@case('mirror', 'best weights on a new machine', old='FileNotFoundError after the last epoch')
def best_weights() -> Any:
    class Planned(Callback):
        "Make the first epoch the best."

        def after_loss(self) -> None:
            if not self.training:
                self.learn.loss = torch.tensor(float(self.learn.time.ba))

    def run(folder: Path) -> Any:
        train(folder / 'a', 1, [Planned(), SaveModelCallback()])
        best = torch.load(folder / 'a' / 'models' / 'model.pth', weights_only=True)
        shutil.rmtree(folder / 'a')
        try:
            learn = train(folder / 'b', 3, [Planned(), SaveModelCallback()], resume=True)
        except Exception as e:
            return type(e).__name__, float(best['a'])
        return float(learn.model.a), float(best['a'])

    return in_store(run)


@case('mirror', 'steps in the log of a new machine', old='[8, 9, 10, 11, 12]')
def log_on_a_new_machine() -> Any:
    def run(folder: Path) -> list[int]:
        for name, n_epoch in (('a', 2), ('b', 3)):
            cbs = [CSVLogger('log.csv', every='1ba')]
            with train(folder / name, n_epoch, cbs, resume=True):
                pass
        return [row['step'] for row in read_log(folder / 'b' / 'log.csv')]

    return in_store(run), list(range(1, 13))


@case('mirror', "Lightning's ModelCheckpoint on a plain model", old='AttributeError after 1 steps')
def lightning_on_a_plain_model() -> Any:
    class Lightning:
        "Read what Lightning's `ModelCheckpoint` reads."

        __module__ = 'lightning.pytorch.callbacks'

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            _ = trainer.lightning_module.automatic_optimization

    steps: list[int] = []
    x = torch.randn(8, 4)
    cb = from_lightning(
        type('ModelCheckpoint', (Lightning,), {'__module__': Lightning.__module__})()
    )
    dls = DataLoaders.from_tensors((x, x), bs=4)
    learn = Learner(dls, nn.Linear(4, 4), nn.MSELoss(), cbs=cb)
    learn.add_cb(Callback(after_step=lambda cb: steps.append(1)))
    try:
        with learn.no_bar(), learn.no_logging():
            learn.fit(1)
    except Exception as e:
        return f'{type(e).__name__} after {len(steps)} steps', 'ModelError after 0 steps'
    return 'trained', 'ModelError after 0 steps'
