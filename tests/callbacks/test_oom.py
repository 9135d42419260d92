"""The out-of-memory report, and the recording of GPU memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fastcore.basics import noop
from torch import nn

from learnkit import Callback, Checkpoint, DataLoaders, Learner
from learnkit.callbacks import oom
from learnkit.callbacks.oom import MemorySnapshot, OOMObserver, biggest_tensors, write_snapshot
from learnkit.core.errors import OptionError, TimeError
from learnkit.testing import synth_learner


def failing_learner(
    path: Path, error: BaseException, event: str = 'after_backward', **kwargs: Any
) -> Learner:
    def fail(cb: Callback) -> None:
        if cb.training and cb.learn.time.ba == 3:
            raise error

    x, y = torch.randn(64, 300), torch.randint(3, (64,))
    model = nn.Sequential(nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 3))
    dls = DataLoaders.from_tensors((x, y), bs=16)
    cbs = [OOMObserver(), Callback(**{event: fail})]
    learn = Learner(dls, model, nn.CrossEntropyLoss(), path=path, cbs=cbs, **kwargs)
    learn.logger = noop
    return learn


def test_the_report_names_the_place_and_the_cause(tmp_path: Path) -> None:
    error = torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB')
    learn = failing_learner(tmp_path, error)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        learn.fit(2)
    assert raised.value is error and error.args == ('CUDA out of memory. Tried to allocate 2 GiB',)
    assert learn.oom_observer.report == tmp_path / 'oom' / 'oom-batch-3.txt'
    report = learn.oom_observer.report.read_text()
    for text in (
        'batch 3 of epoch 0, in training, Sequential on cpu',
        'Tried to allocate 2 GiB',
        'Inputs:  (Tensor[16, 300] float32,)',
        'Targets: (Tensor[16] int64,)',
        'parameter 0.weight',
        'gradient of 0.weight',
        'exp_avg of 0.weight',
        'in Callback.after_backward',
    ):
        assert text in report
    row = next(line for line in report.splitlines() if 'parameter 0.weight' in line)
    assert row.split()[:4] == [f'{200 * 300 * 4 / 2**20:.2f}', 'cpu', 'float32', '200']


def test_a_second_report_takes_no_place(tmp_path: Path) -> None:
    for name in ('oom-batch-3.txt', 'oom-batch-3-2.txt'):
        learn = failing_learner(tmp_path, torch.OutOfMemoryError('full'), microbatch=4)
        with pytest.raises(torch.OutOfMemoryError):
            learn.fit(1)
        assert learn.oom_observer.report.name == name
        assert 'Microbatches of 4' in learn.oom_observer.report.read_text()


def test_the_cpu_runs_out_too(tmp_path: Path) -> None:
    learn = failing_learner(tmp_path, RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    with pytest.raises(RuntimeError):
        learn.fit(1)
    assert "can't allocate" in learn.oom_observer.report.read_text()


def test_other_errors_get_no_report_and_nothing_is_made(tmp_path: Path) -> None:
    learn = failing_learner(tmp_path, RuntimeError('something else'))
    with pytest.raises(RuntimeError):
        learn.fit(1)
    assert learn.oom_observer.report is None and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_reported_before_training(tmp_path: Path) -> None:
    (tmp_path / 'oom').write_text('a file')
    learn = synth_learner(path=tmp_path, cbs=OOMObserver())
    with pytest.raises(OptionError, match='cannot be written'):
        learn.fit(1)
    assert learn.time.ba == 0
    with pytest.raises(OptionError):
        OOMObserver(folder='')
    with pytest.raises(OptionError):
        OOMObserver(n_tensors=0)


def test_views_without_memory_are_left_out() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.zeros(10_000, 10_000)
    others = [
        torch.eye(3).to_sparse(),
        torch.zeros(10_000, 10_000, device='meta'),
        nn.LazyLinear(3).weight,
        fake,
    ]
    found = {id(t) for _, tensors in biggest_tensors(10_000) for t in tensors}
    assert not any(id(t) in found for t in others)


def test_views_are_one_piece_of_memory_and_the_biggest_come_first() -> None:
    x = torch.zeros(3000, 1000)
    views = [x[:10], x.T]
    size, tensors = biggest_tensors(1)[0]
    assert size == 12_000_000 and all(any(t is v for t in tensors) for v in (x, *views))
    sizes = [size for size, _ in biggest_tensors(50)]
    assert sizes == sorted(sizes, reverse=True)


# ---------------------------------------------------------------------------------------- recording

SNAPSHOT = {
    'segments': [],
    'allocator_settings': {},
    'external_annotations': [],
    'device_traces': [
        [
            {
                'action': 'alloc',
                'addr': 4096,
                'size': 512,
                'stream': 0,
                'time_us': 1,
                'compile_context': None,
                'frames': [{'filename': 'net.py', 'line': 3, 'name': 'forward'}],
            },
            {
                'action': 'free_completed',
                'addr': 4096,
                'size': 512,
                'stream': 0,
                'time_us': 2,
                'frames': [],
            },
        ]
    ],
}


def test_a_snapshot_is_text_and_a_page(tmp_path: Path) -> None:
    text, page = write_snapshot(SNAPSHOT, tmp_path / 'memory-batch-4')
    assert (text.name, page.name) == ('memory-batch-4.json', 'memory-batch-4.html')
    assert json.loads(text.read_text()) == SNAPSHOT and '<script' in page.read_text()
    assert write_snapshot(SNAPSHOT, tmp_path / 'memory-batch-4')[0].name == 'memory-batch-4-2.json'


def test_on_the_cpu_a_message_replaces_the_snapshot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learn = synth_learner(path=tmp_path, cbs=MemorySnapshot())
    learn.dls.to('cpu')
    learn.logger = lambda row: None
    with learn.no_bar():
        learn.fit(1)
    assert 'there is nothing to record' in capsys.readouterr().out
    assert learn.memory_snapshot.files == [] and not list(tmp_path.iterdir())


def test_a_snapshot_added_during_a_fit_on_the_cpu_does_nothing(tmp_path: Path) -> None:
    add = Callback(before_train=lambda cb: cb.learn.add_cb(MemorySnapshot()))
    learn = synth_learner(path=tmp_path, cbs=add)
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
    assert learn.opt.n_steps == 10 and learn.memory_snapshot.files == []


def test_a_resumed_fit_does_not_record_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recordings: list[int] = []
    monkeypatch.setattr(oom, 'model_device', lambda model, dls: torch.device('cuda'))
    monkeypatch.setattr(oom, 'write_snapshot', lambda snapshot, stem: [stem])
    monkeypatch.setattr(torch.cuda.memory, '_snapshot', dict)
    monkeypatch.setattr(
        torch.cuda.memory,
        '_record_memory_history',
        lambda enabled='all', **options: recordings.append(1) if enabled else None,
    )
    for n in (1, 2):
        learn = synth_learner(path=tmp_path, cbs=[MemorySnapshot(interval='2ba'), Checkpoint()])
        with learn.no_bar(), learn.no_logging():
            learn.fit(n, resume=True)
    assert learn.time.ba == 20 and recordings == [1]


@pytest.mark.parametrize(
    ('wrong', 'error'),
    [
        ({'interval': 0}, TimeError),
        ({'interval': '5 parsecs'}, TimeError),
        ({'skip_batches': -1}, OptionError),
        ({'max_entries': 0}, OptionError),
        ({'folder': None}, OptionError),
    ],
)
def test_bad_options_are_refused(wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        MemorySnapshot(**wrong)


@pytest.mark.cuda
def test_on_cuda_it_records_a_few_batches(tmp_path: Path) -> None:
    cbs = MemorySnapshot(skip_batches=2, interval='3ba')
    learn = synth_learner(n_train=10, path=tmp_path, cbs=cbs)
    learn.logger = noop
    learn.fit(1)
    text, page = learn.memory_snapshot.files
    assert text.name == 'memory-batch-5.json' and page.exists()
    assert any(json.loads(text.read_text())['device_traces'])
    learn.fit(1)
    assert len(list((tmp_path / 'memory').iterdir())) == 2


@pytest.mark.cuda
def test_on_cuda_running_out_is_reported(tmp_path: Path) -> None:
    def run_out(cb: Callback) -> None:
        torch.empty(2**45, device='cuda')

    learn = synth_learner(path=tmp_path, cbs=[OOMObserver(), Callback(after_pred=run_out)])
    learn.logger = noop
    with pytest.raises(torch.OutOfMemoryError):
        learn.fit(1)
    assert 'Allocated memory' in learn.oom_observer.report.read_text()
