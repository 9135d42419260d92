"""Compare the system monitor with Python and /proc."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

from learnkit.core.errors import MissingExtraError
from learnkit.monitors.system_monitor import SystemMonitor, read_gpu
from learnkit.testing import synth_learner

psutil = pytest.importorskip('psutil')
HOST = [name for name in SystemMonitor.metric_names if name.startswith(('cpu', 'disk', 'network'))]


def test_what_is_logged_agrees_with_the_system(tmp_path: Path) -> None:
    learn = synth_learner(path=tmp_path / 'not' / 'there' / 'yet', cbs=SystemMonitor('1ep'))
    learn.fit(1)
    row, disk, ram = learn.history[0], shutil.disk_usage(tmp_path), psutil.virtual_memory()
    logged = set(row) & set(SystemMonitor.metric_names)
    assert {n for n in HOST if not n.startswith('network')} <= logged <= set(HOST)
    assert row['disk_memory_used'] == pytest.approx(disk.used, rel=0.05)
    assert row['disk_memory_free'] == pytest.approx(disk.free, rel=0.05)
    assert row['cpu_memory_available'] == pytest.approx(ram.available, rel=0.3)
    assert 0 <= row['cpu_percentage'] <= 100 and 0 < row['cpu_memory_percent'] <= 100


def test_without_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, 'psutil', None)
    with pytest.raises(
        MissingExtraError, match=r'^SystemMonitor needs psutil: pip install psutil$'
    ):
        SystemMonitor()


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU')
def test_sensors_that_do_not_answer_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda device: (3, 8))
    memory = {'memory_free_bytes': 3, 'memory_used_bytes': 5}
    assert read_gpu(torch.device('cuda')) == memory


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_on_a_gpu() -> None:
    learn = synth_learner(cbs=SystemMonitor('1ep'))
    learn.dls.cuda()
    learn.fit(1)
    free, total = torch.cuda.mem_get_info()
    row = learn.history[0]
    assert row['memory_free_bytes'] + row['memory_used_bytes'] == total
    assert row['memory_free_bytes'] == pytest.approx(free, rel=0.1)
