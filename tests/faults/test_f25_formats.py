"""Row 25: files of an older format are brought up to date, those of a newer one are refused."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from file_helpers import same, write

from learnkit import safeload
from learnkit.errors import CheckpointError, DamagedError
from learnkit.safeload import load_state, save_state
from learnkit.seals import FORMAT, read_info

GOLDEN = Path(__file__).parents[1]/'golden'
# What is in golden/format1.ckpt, which was written by `save_state(STATE, path, {'number': 1, 'epoch': 2})`.
W = torch.arange(6, dtype=torch.float32).reshape(2, 3)
STATE: dict[str, Any] = {
    'model': {'w': W, 'tied': W, 'n': torch.tensor(7)},
    'optimizer': {'state': {0: {'step': torch.tensor(3.), 'exp_avg': W.to(torch.bfloat16)}},
                  'param_groups': [{'lr': 0.1, 'betas': (0.9, 0.999), 'params': [0], 'fused': None}]},
    'loop': {'epoch': 2, 'names': ['a', 'ü', ''], 'done': False, 'big': 2**127, 'c': 1 - 2j, 'raw': b'\0\xff'},
    'callbacks': {'ema': {'mask': torch.tensor([True, False]), 'image': torch.ones(1, 2, 2, 2).to(
        memory_format=torch.channels_last), 'short': torch.tensor([1, 2], dtype=torch.uint16)}},
}


def test_a_file_of_format_1() -> None:
    state, info = load_state(GOLDEN/'format1.ckpt')
    assert info == {'format': 1, 'number': 1, 'epoch': 2} and same(state, STATE)
    assert state['model']['tied'] is state['model']['w']
    assert same(torch.load(GOLDEN/'format1.ckpt', weights_only=True), STATE), 'torch reads it too'


def test_a_newer_one_is_refused(tmp_path: Path) -> None:
    save_state({'a': 1}, path := tmp_path/'a.ckpt', {'format': FORMAT + 1})
    with pytest.raises(CheckpointError, match=rf'a\.ckpt has format {FORMAT + 1}, .* to {FORMAT}: update') as e:
        load_state(path)
    assert not isinstance(e.value, DamagedError) and read_info(path) == {'format': FORMAT + 1}


def test_an_older_one_is_brought_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_state({'weights': {'w': W}}, path := tmp_path/'a.ckpt', {'format': 0})
    with pytest.raises(CheckpointError, match=r'has format 0, which this version of .* reads no more'): load_state(path)
    monkeypatch.setitem(safeload.MIGRATIONS, 0, lambda state: {'model': state['weights'], 'loop': {}})
    state, info = load_state(path)
    assert same(state, {'model': {'w': W}, 'loop': {}}) and info == {'format': 0}


def test_each_step_is_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safeload, 'FORMAT', 3)
    for number in (0, 1, 2):
        monkeypatch.setitem(safeload.MIGRATIONS, number, lambda s, n=number: {'steps': [*s['steps'], n]})
    for start in (0, 1):
        save_state({'steps': []}, tmp_path/'a.ckpt', {'format': start})
        assert load_state(tmp_path/'a.ckpt')[0] == {'steps': [0, 1, 2][start:]}


def test_what_is_written_now_is_the_current_format(tmp_path: Path) -> None:
    assert read_info(write(tmp_path/'a.ckpt'))['format'] == FORMAT == 1
