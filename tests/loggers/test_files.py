"""Logs in CSV and JSON lines: appended, resumed, truncated by a kill, refused; with images and text."""

import csv
import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learnkit import Callback, Checkpoint, OptionError
from learnkit.loggers import CSVLogger, JSONLinesLogger, log_images, log_text, read_log
from tests.helpers.forks import start
from tests.helpers.logging_fits import LogHalf, learner, plain_losses, run_and_resume

BOTH = pytest.mark.parametrize(
    ('cls', 'name'),
    [(CSVLogger, 'metrics.csv'), (JSONLinesLogger, 'metrics.jsonl')],
    ids=['csv', 'jsonl'],
)


def steps(path: Path) -> list[int]:
    return [row['step'] for row in read_log(path)]


@BOTH
def test_numbers_are_restored_exactly(tmp_path: Path, cls: Any, name: str) -> None:
    learn = learner(tmp_path, cls(every='1ba'))
    learn.fit(2)
    rows = read_log(tmp_path / name)
    assert [row['loss'] for row in rows] == [float(v) for v in learn.recorder.smooth_loss.raw]
    expected = [row['valid_loss'] for row in learn.history]
    assert [row['valid_loss'] for row in rows if 'valid_loss' in row] == expected


def test_csv_is_a_plain_table(tmp_path: Path) -> None:
    learner(tmp_path, LogHalf, CSVLogger(every='5ba')).fit(1)
    table = list(csv.reader((tmp_path / 'metrics.csv').read_text().splitlines()))
    assert table[0] == [
        'step',
        'half',
        'loss',
        'lr',
        'mom',
        'valid_half',
        'valid_loss',
        'epoch/epoch',
        'epoch/train_loss',
        'epoch/half',
        'epoch/time',
    ]
    assert len(table) == 11 and all(len(line) == 11 for line in table)
    assert table[1][2:] == [''] * 9 and table[5][3] == '0.1'


@BOTH
def test_another_process_appends_or_starts_over(tmp_path: Path, cls: Any, name: str) -> None:
    learner(tmp_path, cls(every='5ba')).fit(1)
    learner(tmp_path, cls(every='5ba')).fit(1)
    assert steps(tmp_path / name) == [5, 10, 15, 20]
    learner(tmp_path, cls(every='5ba', append=False)).fit(1)
    assert steps(tmp_path / name) == [5, 10]


@BOTH
@pytest.mark.parametrize('every', ['5ba', '20sp'])
def test_resume_drops_what_came_after_the_checkpoint(
    tmp_path: Path, cls: Any, name: str, every: str
) -> None:
    run_and_resume(tmp_path, lambda: cls(every=every))
    rows = read_log(tmp_path / name)
    assert steps(tmp_path / name) == list(range(1, 31))
    expected = [v / 2 for v in plain_losses(3)[0]]
    assert [row['half'] for row in rows] == pytest.approx(expected, rel=1e-6)
    assert [row['step'] for row in rows if 'loss' in row] == list(range(5, 31, 5))
    # the checkpoint came before the row of step 10
    assert [row['step'] for row in rows if 'valid_loss' in row] == [20, 30]


@BOTH
@pytest.mark.parametrize('killed_after', [10, 12, 17, 20])
def test_a_fit_that_had_ended_drops_no_steps_of_the_next_fit(
    tmp_path: Path, cls: Any, name: str, killed_after: int
) -> None:
    def train(kill: bool) -> None:
        learn = learner(tmp_path, LogHalf, cls(every='5ba'))
        if kill:
            learn.add_cb(Callback(batch_checkpoint=die, order=3000))
        for folder in ('a', 'b'):
            learn.fit(1, resume=True, cbs=Checkpoint('2ba', tmp_path / folder, background=False))

    def die(cb: Any) -> None:
        if cb.learn.time.ba == killed_after:
            os._exit(0)

    for kill in (True, False):
        with start(partial(train, kill)) as child:
            assert child.wait() == 0, child.stderr
    rows = read_log(tmp_path / name)
    assert [row['step'] for row in rows] == list(range(1, 21))
    expected = [v / 2 for v in plain_losses(2)[0]]
    assert [row['half'] for row in rows] == pytest.approx(expected, rel=1e-6)
    assert [row['step'] for row in rows if 'valid_loss' in row] == [10, 20]
    if name.endswith('jsonl'):
        lines = (tmp_path / name).read_text().splitlines()
        assert sum('params' in line for line in lines) == 2


@BOTH
def test_a_failed_run_is_written_to_its_end(tmp_path: Path, cls: Any, name: str) -> None:
    def fail(cb: Callback) -> None:
        if cb.iter == 6:
            raise RuntimeError('no more')

    learn = learner(tmp_path, LogHalf, cls(every='1000ba'), Callback(before_step=fail))
    with pytest.raises(RuntimeError, match='no more'):
        learn.fit(1)
    assert steps(tmp_path / name) == [1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(RuntimeError, match='no more'):
        learn.fit(1)
    assert steps(tmp_path / name) == list(range(1, 15)), (
        'the batch that failed has a step of its own'
    )


def test_a_killed_process_loses_nothing(tmp_path: Path) -> None:
    def kill(cb: Any) -> None:
        if cb.iter == 8:
            os.kill(os.getpid(), signal.SIGKILL)

    def job() -> None:
        loggers = CSVLogger(every='1ba'), JSONLinesLogger(every='1ba')
        learner(tmp_path, LogHalf, *loggers, Callback(after_pred=kill)).fit(1)

    with start(job) as child:
        assert child.wait() == -signal.SIGKILL
    for name in ('metrics.csv', 'metrics.jsonl'):
        rows = read_log(tmp_path / name)
        assert [row['step'] for row in rows] == list(range(1, 9))
        assert [row['loss'] for row in rows] == pytest.approx(plain_losses(1)[0][:8], rel=1e-6)


@BOTH
def test_a_torn_line_is_passed_over_and_cut_off(tmp_path: Path, cls: Any, name: str) -> None:
    learner(tmp_path, cls(every='5ba')).fit(1)
    whole = (tmp_path / name).read_bytes()
    for cut in (1, 2, 7):
        (tmp_path / name).write_bytes(whole[:-cut])
        assert steps(tmp_path / name) == [5]
    learner(tmp_path, cls(every='5ba')).fit(1)
    assert steps(tmp_path / name) == [5, 10, 15]
    lines = (tmp_path / name).read_text().splitlines()
    if cls is JSONLinesLogger:
        assert all(json.loads(line) for line in lines)
    else:
        assert len({line.count(',') for line in lines}) == 1


@BOTH
@pytest.mark.parametrize('append', [True, False])
def test_another_file_is_not_touched(tmp_path: Path, cls: Any, name: str, append: bool) -> None:
    (tmp_path / name).write_text('my,data\n1,2\n')
    learn = learner(tmp_path, cls(append=append))
    weights = learn.model.weight.clone()
    with pytest.raises(OptionError, match='Logger'):
        learn.fit(1)
    assert (tmp_path / name).read_text() == 'my,data\n1,2\n'
    assert torch.equal(weights, learn.model.weight)


@BOTH
def test_places_that_cannot_be_written(tmp_path: Path, cls: Any, name: str) -> None:
    (tmp_path / 'file').write_text('')
    (tmp_path / f'folder.{name}').mkdir()
    for place in (f'file/{name}', f'folder.{name}'):
        learn = learner(tmp_path, cls(place))
        with pytest.raises(OptionError, match='cannot be written'):
            learn.fit(1)
        assert learn.time.ba == 0


@BOTH
def test_images_and_text(tmp_path: Path, cls: Any, name: str) -> None:
    pixels = torch.arange(2 * 3 * 4 * 5, dtype=torch.uint8).reshape(2, 3, 4, 5)

    def show(cb: Callback) -> None:
        log_images(cb, 'in/puts', pixels, grid=False)
        log_text(cb.learn, 'note', 'hello\n')

    learner(tmp_path, cls(), Callback(after_epoch=show)).fit(2)
    images = tmp_path / f'{name}.images'
    expected = [f'in_puts-{s}-{i}.png' for s in (10, 20) for i in (0, 1)]
    assert sorted(p.name for p in images.iterdir()) == expected
    image = pytest.importorskip('PIL.Image').open(images / 'in_puts-10-1.png')
    assert torch.equal(torch.from_numpy(np.array(image)), pixels[1].permute(1, 2, 0))
    assert (tmp_path / f'{name}.texts' / 'note-20.txt').read_text() == 'hello\n'
    assert steps(tmp_path / name) == [10, 20]


@BOTH
def test_a_paused_fit_has_the_log_of_one_that_was_not(tmp_path: Path, cls: Any, name: str) -> None:
    straight = learner(tmp_path / 'a', LogHalf, cls(every='3ba'))
    straight.fit(2)
    learn = learner(tmp_path / 'b', LogHalf, cls(every='3ba'))
    learn.fit(2, pause_at='7ba')
    learn.resume(pause_at='10ba')
    learn.wd = 0.0
    learn.resume()
    rows = [read_log(tmp_path / folder / name) for folder in 'ab']
    for row in (*rows[0], *rows[1]):
        row.pop('epoch/time', None)
    assert rows[0] == rows[1]
    learn.fit(1, pause_at='23ba')
    learn.resume(lr=0.5)
    texts = tmp_path / 'b' / f'{name}.texts'
    assert [p.name for p in texts.iterdir()] == ['changes-24.txt']
    assert (texts / 'changes-24.txt').read_text() == f'23ba: lr {learn.lr:.6g} -> 0.5'
