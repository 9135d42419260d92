"""Row 44: another program cuts a loaded file short. Nothing of it is mapped, and training continues exactly."""

import gc
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from learnkit import Callback, Learner
from learnkit.callbacks import Checkpoint
from learnkit.checkpoint.folder import entries
from tests.faults.fault_helpers import At
from tests.faults.run_helpers import in_child, make_learner, quiet, same

WIDTH = 64  # so that a weight fills several pages


def make(*cbs: Any) -> Learner:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    return quiet(make_learner([*cbs], model=model))


def mapped(folder: Path) -> list[str]:
    "Return the files of a folder that this process has mapped or open."
    gc.collect()
    maps = Path('/proc/self/maps').read_text().splitlines()
    found = [line.split(maxsplit=5)[5] for line in maps if str(folder) in line]
    for fd in Path('/proc/self/fd').iterdir():
        try:
            target = os.readlink(fd)
        except FileNotFoundError:  # the descriptor that lists the folder
            continue
        if target.startswith(str(folder)) and not target.endswith('.lock'):
            found.append(target)
    return found


def cut(folder: Path) -> None:
    "Truncate every file, like a program that overwrites it in place."
    for path in folder.rglob('*'):
        if path.is_file() and path.name != '.lock':
            os.truncate(path, 0)


def test_after_a_resume(tmp_path: Path) -> None:
    def train(folder: Path, resume: Any = False, *more: Callback) -> Any:
        learn = make(*more)
        learn.fit(3, resume=resume, cbs=Checkpoint('1ba', folder, background=False))
        learn.remove_cbs(At)
        return learn.checkpoint_state()

    straight = in_child(partial(train, tmp_path / 'straight'))
    middle = entries(tmp_path / 'straight')[1].path

    def resume() -> Any:
        seen: list[str] = []

        def look_and_cut(cb: Any) -> None:
            seen.extend(mapped(tmp_path / 'straight'))
            cut(tmp_path / 'straight')

        state = train(tmp_path / 'resumed', middle, At('before_batch', look_and_cut))
        return {'seen': seen, 'state': state}

    found = in_child(resume)
    assert found['seen'] == []
    assert same(straight, found['state'])


LOADS: dict[str, Callable[[Learner, Path], Any]] = {
    'pth': lambda learn, path: learn.load(path, with_opt=True),
    'safetensors': lambda learn, path: learn.load(path.with_suffix('.safetensors')),
    'checkpoint': lambda learn, path: learn.load(path.with_name('a.ckpt'), with_opt=True),
}


@pytest.mark.parametrize('kind', LOADS)
def test_after_a_load(tmp_path: Path, kind: str) -> None:
    "Training after the load equals training after a load of files that are not truncated."
    learn = make()
    learn.fit(1)
    path = learn.save(tmp_path / 'a.pth', with_opt=True)
    learn.save(tmp_path / 'a.safetensors')
    learn.fit(1, cbs=Checkpoint(None, tmp_path / 'run', background=False))
    entries(tmp_path / 'run')[0].path.rename(tmp_path / 'a.ckpt')

    def train(cuts: bool) -> Any:
        learn = make()
        LOADS[kind](learn, path)
        found = mapped(tmp_path)
        if cuts:
            cut(tmp_path)
        learn.fit(1)
        return {'mapped': found, 'state': learn.checkpoint_state()}

    whole, found = in_child(partial(train, False)), in_child(partial(train, True))
    assert whole['mapped'] == found['mapped'] == []
    assert same(whole['state'], found['state'])
