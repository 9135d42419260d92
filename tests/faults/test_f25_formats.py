"""Row 25: files of another format are refused by name. No release has written an older format."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from learnkit.checkpoint.file import FORMAT, read_info, read_state
from learnkit.checkpoint.folder import find
from learnkit.core.errors import CheckpointError, DamagedError
from tests.faults.file_helpers import same, with_metadata, write

GOLDEN = Path(__file__).parents[1] / 'golden'
# What is in golden/format3.ckpt, which was written by `write_state(path, STATE, {'number': 1, 'epoch': 2})`.
W = torch.arange(6, dtype=torch.float32).reshape(2, 3)
STATE: dict[str, Any] = {
    'model': {'w': W, 'tied': W, 'n': torch.tensor(7)},
    'optimizer': {
        'state': {0: {'step': torch.tensor(3.0), 'exp_avg': W.to(torch.bfloat16)}},
        'param_groups': [{'lr': 0.1, 'betas': (0.9, 0.999), 'params': [0], 'fused': None}],
    },
    'loop': {
        'epoch': 2,
        'names': ['a', 'ü', ''],
        'done': False,
        'big': 2**127,
        'c': 1 - 2j,
        'raw': b'\0\xff',
    },
    'callbacks': {
        'ema': {
            'mask': torch.tensor([True, False]),
            'image': torch.ones(1, 2, 2, 2).to(memory_format=torch.channels_last),
            'short': torch.tensor([1, 2], dtype=torch.uint16),
        }
    },
}


def test_a_file_of_the_current_format() -> None:
    state, info = read_state(GOLDEN / 'format3.ckpt')
    assert info == {'format': 3, 'number': 1, 'epoch': 2} and same(state, STATE)
    assert state['model']['tied'] is state['model']['w']
    with safe_open(GOLDEN / 'format3.ckpt', framework='pt') as file:
        assert same(file.get_tensor('model.w'), W), 'the library reads it too'


def test_a_newer_one_is_refused(tmp_path: Path) -> None:
    "golden/format4.ckpt is that file with a 4 in the place of the 3."
    path = GOLDEN / 'format4.ckpt'
    with pytest.raises(
        CheckpointError, match=rf'format4\.ckpt has format 4, .*{FORMAT}: update'
    ) as e:
        read_state(path)
    assert not isinstance(e.value, DamagedError)
    assert read_info(path) == {'format': 4, 'number': 1, 'epoch': 2}
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    (tmp_path / 'a.ckpt').write_bytes(content)
    with pytest.raises(DamagedError, match='digest'):
        read_state(tmp_path / 'a.ckpt')


def test_an_older_one_is_refused(tmp_path: Path) -> None:
    path = with_metadata(write(tmp_path / '00002-ep2-ba2.ckpt'), learnkit='2')
    (tmp_path / '00001-ep1-ba1.ckpt').write_bytes(path.read_bytes())
    for read in (read_state, lambda path: find(path, tmp_path), lambda _: find(True, tmp_path)):
        with pytest.raises(
            CheckpointError, match=r'ep2-ba2\.ckpt has format 2, .*by an older learnkit'
        ) as e:
            read(path)
        assert not isinstance(e.value, DamagedError)
