"""Cases: the memory that reading a checkpoint takes, in units of its tensors."""

import tempfile
from pathlib import Path

import torch

from learnkit.checkpoint.file import read_state, write_state
from tests.silent.cases import case

SIZE = 1 << 25  # bytes


def resident(entry: str) -> int:
    "Return `VmRSS` or `VmHWM` of this process in bytes."
    lines = Path('/proc/self/status').read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(entry))


@case('memory', 'peak of memory while a checkpoint is read', old='2.0', tolerance=0.15)
def read_checkpoint() -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, 'a.ckpt')
        write_state(path, {'model': {'w': torch.ones(SIZE // 4)}}, {})
        Path('/proc/self/clear_refs').write_text('5')  # resets VmHWM
        before = resident('VmRSS')
        state, _ = read_state(path)
        peak = resident('VmHWM') - before
    assert state['model']['w'].sum() == SIZE // 4
    return peak / SIZE, 1.0
