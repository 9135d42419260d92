"""The commands `runs`, `compare` and `plot`: what they print and draw of runs that real fits have written."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from learnkit import Callback, Checkpoint, EarlyStoppingCallback, FixedStopper, Learner
from learnkit.__main__ import main
from learnkit.debug.runs import find_run, load_function, read_history
from learnkit.testing import synth_learner

MAKE = """
import torch
from learnkit import Callback, Checkpoint
from learnkit.testing import synth_learner

def peek(cb):
    if cb.training and cb.learn.time.ba == 7: torch.rand(1)

def make(folder):
    torch.manual_seed(0)
    cbs = [Callback(after_batch=peek)] if 'peeking' in str(folder) else []
    return synth_learner(n_train=10, path=folder, cbs=[Checkpoint('4ba'), *cbs])

number = 3
"""


def train(folder: Path, *cbs: Any, n: Any = 2, seed: int = 0) -> Learner:
    torch.manual_seed(seed)
    learn = synth_learner(n_train=10, path=folder, cbs=[Checkpoint('4ba'), *cbs])
    with learn.no_bar(), learn.no_logging():
        learn.fit(n)
    return learn


def call(*arguments: Any) -> int:
    return main([str(argument) for argument in arguments])


def test_runs_prints_checkpoints_history_and_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learn = train(tmp_path / 'a')
    train(tmp_path / 'b' / 'c')
    for _ in range(2):
        assert call('runs', tmp_path) == 0
        out = capsys.readouterr().out
        for folder in ('a', 'b/c'):
            assert f'{tmp_path / folder / "checkpoints"}, from batch 0' in out
        for path in (tmp_path / 'a' / 'checkpoints').glob('*.ckpt'):
            assert path.name in out
        for row in learn.history:
            assert f'{row["train_loss"]:.6f}' in out and f'{row["valid_loss"]:.6f}' in out
        assert out.count('It ended after 20 batches (2 epochs), its last epoch.') == 2


def stop_at_13(cb: Any) -> None:
    if cb.learn.train_iter == 13:
        cb.learn.stop()


def fail_at_13(cb: Any) -> None:
    if cb.learn.train_iter == 13:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ('cb', 'n', 'expected'),
    [
        (lambda: FixedStopper('13ba'), 2, 'stopped after 13 batches (2 epochs) by FixedStopper.'),
        (
            lambda: EarlyStoppingCallback('valid_loss', patience=1, min_delta=1e9),
            9,
            'stopped after 20 batches (2 epochs) by EarlyStoppingCallback.',
        ),
        (lambda: Callback(after_batch=stop_at_13), 2, 'by Callback(after_batch=stop_at_13).'),
        (lambda: None, '13ba', 'stopped after 13 batches (2 epochs) by the budget.'),
        (lambda: Callback(after_batch=fail_at_13), 2, 'within the fit, after 12 batches (1 epoch)'),
    ],
)
def test_what_has_stopped_a_run_is_named(
    cb: Callable[[], Any],
    n: Any,
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cbs = [cb()] if cb() else []
    try:
        train(tmp_path, *cbs, n=n)
    except KeyboardInterrupt:
        pass
    capsys.readouterr()
    assert call('runs', tmp_path) == 0
    assert expected in capsys.readouterr().out


def test_a_second_fit_is_a_run_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learn = train(tmp_path)
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
    newest = find_run(tmp_path)
    assert newest.first == 20 and read_history(newest) == [learn.history[-1]]
    capsys.readouterr()
    assert call('runs', tmp_path) == 0
    assert 'from batch 20' in capsys.readouterr().out


def test_compare_prints_histories_side_by_side_and_the_first_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / 'making.py'
    file.write_text(MAKE, 'utf-8')
    make = load_function(f'{file}:make')
    learners = [make(tmp_path / name) for name in ('plain', 'peeking')]
    for learn in learners:
        with learn.no_bar(), learn.no_logging():
            learn.fit(2)
    a, b = (learn.history for learn in learners)
    capsys.readouterr()
    assert call('compare', tmp_path / 'plain', tmp_path / 'peeking', '--make', f'{file}:make') == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.lstrip()[:1] in ('0', '1')]
    assert [row[1:5] for row in rows] == [
        [f'{row[name]:.6f}' for name in ('train_loss', 'valid_loss') for row in pair]
        for pair in zip(a, b, strict=True)
    ]
    assert 'batch 6, after_batch: Callback(after_batch=peek) changed random numbers' in out
    assert call('compare', tmp_path / 'plain', tmp_path / 'plain') == 0
    assert 'The first 2 rows are equal' in capsys.readouterr().out


def test_compare_names_the_first_value_that_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = train(tmp_path / 'a'), train(tmp_path / 'b', seed=1)
    capsys.readouterr()
    assert call('compare', tmp_path / 'a', tmp_path / 'b' / 'checkpoints') == 0
    values = f'({a.history[0]["train_loss"]!r} and {b.history[0]["train_loss"]!r})'
    assert f'First difference: train_loss of epoch 0 {values}.' in capsys.readouterr().out


def test_plot_draws_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip('matplotlib.image')
    train(tmp_path)
    for arguments, file in (
        ([], tmp_path / 'history.png'),
        (['--output', tmp_path / 'other'], tmp_path / 'other.png'),
    ):
        capsys.readouterr()
        assert call('plot', tmp_path, *arguments) == 0
        assert capsys.readouterr().out == f'{file}\n'
        pixels = image.imread(file)
        assert pixels.shape[0] > 300 and pixels.shape[1] > 900  # two panels next to each other
        for half in (pixels[:, :500], pixels[:, 500:]):
            assert 0.001 < (half[..., :3].std(-1) > 0.05).mean() < 0.5  # colored lines


def test_wrong_arguments_are_one_line_and_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = (tmp_path / 'runs' / name for name in 'ab')
    train(a)
    train(b)
    file = tmp_path / 'making.py'
    file.write_text(MAKE, 'utf-8')
    (tmp_path / 'empty').mkdir()
    for arguments, message in (
        (['runs', tmp_path / 'nowhere'], 'CheckpointError: .*nowhere is not a folder'),
        (['runs', tmp_path / 'empty'], 'CheckpointError: There is no checkpoint'),
        (['plot', tmp_path], 'CheckpointError: .* has runs in 2 folders'),
        (['compare', a, b, '--make', 'making'], "OptionError: 'making': pass"),
        (['compare', a, b, '--make', f'{file}:mak'], "no function 'mak'. Did you mean `make`"),
        (['compare', a, b, '--make', f'{file}:number'], "no function 'number'"),
        (['compare', a, b, '--make', 'no_such_module:make'], 'no module no_such_module'),
        (['compare', a, b, '--make', 'nowhere.py:make'], 'There is no file nowhere.py'),
    ):
        capsys.readouterr()
        assert call(*arguments) == 1
        captured = capsys.readouterr()
        assert captured.err.count('\n') == 1
        assert re.search(message, captured.err)
