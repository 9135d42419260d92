"""The profiler: the traced batches, the table, and its removal."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from learnkit import SGD, Callback, DataLoaders, Learner, OptionError, TorchProfiler
from tests.helpers.ranks import run_ranks

# torch's own message where only the CPU is recorded
pytestmark = pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")


def learner(path: Path, *cbs: Any) -> Learner:
    torch.manual_seed(0)
    x = torch.randn(24, 3)
    dls = DataLoaders.from_tensors((x, x[:, :1]), (x[:4], x[:4, :1]), bs=2, seed=0, device='cpu')
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    learn = Learner(dls, model, nn.MSELoss(), opt_func=SGD, lr=0.1, path=path, cbs=cbs)
    learn.logger = lambda row: None
    return learn


def counts(path: Path) -> Counter[str]:
    "Return the count of each operation in a trace."
    trace = json.loads(path.read_text())
    names = [e['name'] for e in trace['traceEvents'] if e.get('ph') == 'X']
    return Counter(name.partition('#')[0] if 'Step#' in name else name for name in names)


def fit(learn: Learner, n: int = 1) -> None:
    with learn.no_bar():
        learn.fit(n)


def test_the_batches_that_were_asked_for_are_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []
    see = Callback(after_pred=lambda cb: seen.append(torch.autograd._profiler_enabled()))
    learn = learner(tmp_path, TorchProfiler(wait=2, warmup=1, active=2, repeat=2), see)
    fit(learn)
    profiler = learn.torch_profiler
    assert [p.name for p in profiler.files] == ['trace-batch-3.json', 'trace-batch-8.json']
    assert seen[:12] == [False, False, False, True, True] * 2 + [False, False]
    for path in profiler.files:
        found = counts(path)
        assert found['ProfilerStep'] == 2  # batches
        assert found['aten::linear'] == 4  # two layers each
        assert found['aten::mse_loss'] == 2
    printed = capsys.readouterr().out
    assert printed.count('Self CPU time total') == 2 and str(profiler.files[1]) in printed
    rows = [line.split() for line in profiler.table.splitlines() if 'aten::' in line]
    assert len(rows) <= 10 and all(row[0].startswith('aten::') for row in rows)


def test_an_error_ends_the_recording_and_the_next_fit_records_again(tmp_path: Path) -> None:
    def fail(cb: Callback) -> None:
        if cb.train_iter == 3 and cb.training:
            raise ValueError('in the middle')

    failing = Callback(after_loss=fail)
    learn = learner(tmp_path, TorchProfiler(wait=1, warmup=1, active=5), failing)
    for _ in range(2):
        with pytest.raises(ValueError, match='in the middle'):
            fit(learn)
        assert not torch.autograd._profiler_enabled()
    learn.remove_cb(failing)
    fit(learn)
    files = learn.torch_profiler.files
    assert [counts(p)['aten::mse_loss'] for p in files] == [2, 2, 5]
    assert len({p.name for p in files}) == 3
    assert sorted(files) == sorted((tmp_path / 'profile').iterdir())


def test_a_recording_that_has_only_warmed_up_writes_nothing(tmp_path: Path) -> None:
    learn = learner(
        tmp_path, TorchProfiler(wait=10, warmup=2), TorchProfiler(wait=50, folder='other')
    )
    with pytest.warns(UserWarning, match='recorded no batch') as caught:
        fit(learn)
    assert [str(w.message).partition('. ')[0].split()[-1] for w in caught] == ['12', '51']
    assert not list(tmp_path.rglob('*.json')) and not torch.autograd._profiler_enabled()


def test_mistakes(tmp_path: Path) -> None:
    for bad in ({'active': 0}, {'wait': -1}, {'repeat': 0.5}):
        with pytest.raises(OptionError, match=next(iter(bad))):
            TorchProfiler(**bad)
    (tmp_path / 'profile').write_text('a file')
    with pytest.raises(OptionError, match='cannot be written'):
        fit(learner(tmp_path, TorchProfiler()))


@pytest.mark.dist
def test_each_rank_has_its_file(tmp_path: Path) -> None:
    def job(rank: int) -> list[Any]:
        learn = learner(tmp_path, TorchProfiler(wait=1, active=2, repeat=2))
        with learn.distributed('ddp'):
            fit(learn)
        return [p.name for p in learn.torch_profiler.files]

    # of the 6 batches of each rank the last one warms up for a second recording
    assert run_ranks(job) == [['trace-batch-2-rank0.json'], ['trace-batch-2-rank1.json']]
    for rank in (0, 1):
        assert counts(tmp_path / f'profile/trace-batch-2-rank{rank}.json')['aten::mse_loss'] == 2
