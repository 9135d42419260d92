"""The output of the console logger."""

from pathlib import Path

import pytest

from learnkit import Callback
from learnkit.loggers import ConsoleLogger, log_images, log_text
from tests.helpers.logging_fits import LogHalf, learner, plain_losses


def test_one_line_an_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    learn = learner(tmp_path, LogHalf, ConsoleLogger(every='4ba'))
    with learn.no_bar():
        learn.fit(1)
    first, second, third = capsys.readouterr().out.splitlines()
    losses = plain_losses(1)[0]
    assert first == f'step 4: half={losses[3] / 2:.4g}, loss={losses[3]:.4g}, lr=0.1, mom=0'
    assert second.startswith(f'step 8: half={losses[7] / 2:.4g}, loss={losses[7]:.4g}, ')
    assert third.startswith(f'step 10: half={losses[9] / 2:.4g}, valid_half=') and 'loss=' in third


def test_text_is_printed_and_images_are_not(tmp_path: Path) -> None:
    lines: list[str] = []

    def show(cb: Callback) -> None:
        log_images(cb, 'pic', [[0.0, 1.0]])
        log_text(cb, 'note', 'hello')

    learner(tmp_path, ConsoleLogger(out=lines.append), Callback(after_train=show)).fit(1)
    assert lines[0] == 'step 10: note: hello' and len(lines) == 2
