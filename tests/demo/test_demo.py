"""The demo: its data, its accuracy and the files that it writes."""

import csv
from pathlib import Path

import pytest
import torch

from learnkit.demo import digits, main, small_cnn
from learnkit.metrics import accuracy


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


@pytest.mark.parametrize(
    ('epochs', 'least'), [(2, 0.8), pytest.param(15, 0.97, marks=pytest.mark.full)]
)
def test_the_demo_trains_and_writes_its_files(
    epochs: int, least: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(['--epochs', str(epochs), '--out', str(tmp_path)]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {'model.pth', 'history.csv', 'digits.png'}
    model = small_cnn()
    model.load_state_dict(torch.load(tmp_path / 'model.pth', weights_only=True))
    xv, yv = (torch.cat(parts) for parts in zip(*digits().valid, strict=True))
    reached = accuracy(model.eval()(xv), yv).item()
    assert reached >= least

    with (tmp_path / 'history.csv').open(newline='') as f:
        rows = list(csv.DictReader(f))
    assert [int(row['epoch']) for row in rows] == list(range(epochs))
    assert float(rows[-1]['accuracy']) == pytest.approx(reached, abs=1e-6)
    assert f'{reached:.1%} of the validation images' in capsys.readouterr().out
