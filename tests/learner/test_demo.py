"""The demo trains on real data, writes its files, and reports errors in one line."""

import csv
import re
import runpy
import signal
import sys
import warnings
from pathlib import Path

import pytest
import torch

from learnkit.demo import FILES, digits, main, small_cnn
from learnkit.metrics import accuracy
from tests.helpers.forks import start


def run_main(*args: object) -> int:
    return main([str(arg) for arg in args])


def test_split_is_stratified_and_seeded() -> None:
    dls = digits(bs=100, seed=3)
    (x, y), (xv, yv) = (
        [torch.cat(parts) for parts in zip(*dl, strict=True)] for dl in (dls.train, dls.valid)
    )
    assert x.shape == (1437, 1, 8, 8) and xv.shape == (360, 1, 8, 8)
    assert x.min() == 0 and x.max() == 1 and x.dtype == torch.float32
    assert all(abs(int((y == c).sum()) / 4 - int((yv == c).sum())) <= 1 for c in range(10))
    assert torch.equal(torch.cat([b[1] for b in digits(bs=100, seed=3).valid]), yv)
    assert not torch.equal(torch.cat([b[1] for b in digits(bs=100, seed=4).valid]), yv)


@pytest.mark.full
def test_defaults_reach_the_accuracy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main('--out', tmp_path) == 0

    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(FILES)
    model = small_cnn()
    model.load_state_dict(torch.load(tmp_path / 'model.pth', weights_only=True))
    xv, yv = (torch.cat(parts) for parts in zip(*digits().valid, strict=True))
    reached = accuracy(model.eval()(xv), yv).item()
    assert reached >= 0.97

    with (tmp_path / 'history.csv').open(newline='') as f:
        rows = list(csv.DictReader(f))
    assert [int(row['epoch']) for row in rows] == list(range(15))
    assert float(rows[-1]['accuracy']) == pytest.approx(reached, abs=1e-6)
    assert float(rows[-1]['valid_loss']) < float(rows[0]['valid_loss'])
    assert (tmp_path / 'digits.png').read_bytes().startswith(b'\x89PNG\r\n')

    out = capsys.readouterr().out
    assert len(re.findall(r'^ +\d+  ', out, re.M)) == 15
    assert f'{reached:.1%} of the validation images' in out
    assert all(str(tmp_path / name) in out for name in FILES)


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    for name in 'ab':
        assert run_main('--epochs', 1, '--bs', 256, '--out', tmp_path / name) == 0
    a, b = (torch.load(tmp_path / name / 'model.pth', weights_only=True) for name in 'ab')
    assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize(
    'args', [['--epoch', '3'], ['extra'], ['--epochs', '0'], ['--bs', 'ten'], ['--seed', '1.5']]
)
def test_a_wrong_option_is_named_before_training(
    args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2 and args[0] in capsys.readouterr().err


def test_an_unwritable_folder_is_reported_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr('learnkit.demo.train', lambda *args: pytest.fail('it trained'))
    (tmp_path / 'out').write_text('a file')
    assert run_main('--out', tmp_path / 'out') == 2
    out, err = capsys.readouterr()
    assert out == '' and err.count('\n') == 1
    assert str(tmp_path / 'out') in err


@pytest.mark.parametrize('module', ['sklearn', 'matplotlib'])
def test_a_missing_extra_is_one_line(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert run_main() == 2
    err = capsys.readouterr().err
    assert err.count('\n') == 1 and re.search(r'needs (.+): pip install \1$', err.rstrip())


def test_ctrl_c_ends_the_command_with_one_line_and_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, 'argv', ['learnkit.demo', '--epochs', '100000', '--out', str(tmp_path)]
    )
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', RuntimeWarning)  # runpy: the module is there already
        child = start(lambda: runpy.run_module('learnkit.demo', run_name='__main__'))
    with child:
        # a row is there: it trains
        assert (
            child.wait(until=lambda: re.search(r'^ +\d  ', child.stdout, re.M) is not None) is None
        )
        child.send(signal.SIGINT)
        assert child.wait() == 130
        assert child.stderr == 'learnkit.demo: stopped\n'
    assert list(tmp_path.iterdir()) == []
