"""What the loggers of all services do."""

from html import unescape
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from learnkit import OptionError
from tests.helpers.log_server import LogHandler, PostLogger, run_address, server_points
from tests.helpers.log_services import SERVICES, tensorboard, wandb_points
from tests.helpers.logging_fits import LogHalf, learner, plain_losses, run_and_resume

# both in one picture, with a white gap


@pytest.fixture(params=SERVICES, ids=[name for name, _, _ in SERVICES])
def service(request: pytest.FixtureRequest) -> Any:
    name, make, points = request.param
    pytest.importorskip(name)
    return make, points


def test_two_fits_are_one_run(tmp_path: Path, service: Any) -> None:
    make, points = service
    train, valid = plain_losses(2)
    learn = learner(tmp_path, LogHalf, make(every='5ba'))
    learn.fit(1)
    learn.fit(1)
    learn.close()
    expected = [(s, pytest.approx(train[s - 1], rel=1e-6)) for s in (5, 10, 15, 20)]
    assert points(tmp_path, 'loss') == expected
    expected = [(s, pytest.approx(v / 2, rel=1e-6)) for s, v in enumerate(train, 1)]
    assert points(tmp_path, 'half') == expected
    expected = [(10 * i, pytest.approx(v, rel=1e-6)) for i, v in enumerate(valid, 1)]
    assert points(tmp_path, 'valid_loss') == expected
    assert points(tmp_path, 'epoch/epoch') == [(10, 0), (20, 0)]


def test_resumed_runs_have_each_step_once(tmp_path: Path, service: Any) -> None:
    make, points = service
    run_and_resume(tmp_path, lambda: make(every='5ba'))
    train = plain_losses(3)[0]
    expected = [(s, pytest.approx(v / 2, rel=1e-6)) for s, v in enumerate(train, 1)]
    assert points(tmp_path, 'half') == expected
    assert [s for s, _ in points(tmp_path, 'loss')] == list(range(5, 31, 5))
    assert {20, 30} <= {s for s, _ in points(tmp_path, 'valid_loss')} <= {10, 20, 30}


@pytest.mark.parametrize(
    'service',
    [service for service in SERVICES if service[0] != 'http'],
    indirect=True,
    ids=lambda service: service[0],
)
def test_a_folder_that_cannot_be_written(tmp_path: Path, service: Any) -> None:
    make, _ = service
    for name in ('tb', 'wandb', 'mlruns'):
        (tmp_path / name).write_text('a file')
    learn = learner(tmp_path, make())
    with pytest.raises(OptionError, match='cannot be written'):
        learn.fit(1)
    assert learn.time.ba == 0


def test_a_server_that_refuses(tmp_path: Path) -> None:
    learn = learner(tmp_path, LogHalf, PostLogger(every='5ba'))
    refused = run_address(tmp_path)
    LogHandler.refused.add(refused)
    with pytest.raises(HTTPError, match='503') as e:
        learn.fit(1)
    assert any('PostLogger.before_batch' in note for note in e.value.__notes__)
    LogHandler.refused.remove(refused)
    assert learn.time.ba == 5 and server_points(tmp_path, 'half') == []
    learn.fit(1)
    assert [step for step, _ in server_points(tmp_path, 'half')] == list(range(6, 16))


def find_changes(path: Path, name: str) -> list[tuple[int, str]]:
    "Return the step and the text of each entry `changes` of a service's log."
    if name == 'tensorboard':
        entries = tensorboard(path / 'tb').Tensors('changes/text_summary')
        return [(e.step, e.tensor_proto.string_val[0].decode()) for e in entries]
    if name == 'wandb':
        texts = {p.name: p.read_text() for p in path.rglob('changes_*.html')}
        found = wandb_points(path, 'changes')
        return [(step, unescape(texts[Path(v['path']).name])) for step, v in found]
    files = list(path.rglob('changes-*.txt'))
    return sorted((int(p.stem.partition('-')[2]), p.read_text()) for p in files)


@pytest.mark.parametrize('name', ['tensorboard', 'wandb', 'mlflow'])
def test_changes_of_a_paused_fit(tmp_path: Path, name: str) -> None:
    pytest.importorskip(name)
    make, points = {n: (make, points) for n, make, points in SERVICES}[name]
    train = plain_losses(2)[0]
    learn = learner(tmp_path, make(every='5ba'))
    learn.fit(2, pause_at='7ba')
    learn.resume(pause_at='12ba')
    learn.wd = 0.0
    learn.resume()
    learn.fit(1, pause_at='23ba')
    learn.resume(lr_scale=1.5, pause_at='26ba')
    learn.resume(lr_scale=0.5)
    learn.close()
    expected = [(s, pytest.approx(train[s - 1], rel=1e-6)) for s in (5, 10, 15, 20)]
    assert points(tmp_path, 'loss')[:4] == expected
    lrs = [f'{learn.lr * f:.6g}' for f in (1, 1.5, 0.75)]
    lines = [f'23ba: lr {lrs[0]} -> {lrs[1]}', f'26ba: lr {lrs[1]} -> {lrs[2]}']
    found = find_changes(tmp_path, name)
    assert [step for step, _ in found] == [24, 27]
    assert all(line in text for line, (_, text) in zip(lines, found, strict=True))
