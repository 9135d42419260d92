"""Row 18: temporaries that a killed process left are not taken for checkpoints, and are swept once it is dead."""

import os
import signal
from pathlib import Path

from learnkit.checkpoint.file import read_state
from learnkit.core.files import atomic_write, sweep
from tests.faults.file_helpers import fork, make_state, same, write


def killed_while_saving(folder: Path) -> int:
    "Fork a child that is killed during a write, and return its process id."

    def save() -> None:
        with atomic_write(folder / '00002-ep1-ba2.ckpt') as tmp:
            tmp.write_bytes(b'PK' * 1000)
            os.kill(os.getpid(), signal.SIGKILL)

    pid = fork(save)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    return pid


def test_what_a_killed_process_left(tmp_path: Path) -> None:
    path, state = write(tmp_path / '00001-ep1-ba1.ckpt'), make_state()
    pid = killed_while_saving(tmp_path)
    left = [p for p in tmp_path.iterdir() if p != path]
    assert len(left) == 1 and f'.tmp-{pid}-' in left[0].name
    assert not list(tmp_path.glob('*.ckpt'))[1:], 'no name of a checkpoint'
    assert same(read_state(path)[0]['loop'], state['loop'])
    assert sweep(tmp_path) == left and os.listdir(tmp_path) == [path.name]
    assert sweep(tmp_path) == []
