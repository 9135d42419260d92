"""Logs of services, written by their libraries and read by these, or from their files."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from learnkit import Callback, MissingExtraError, OptionError
from learnkit.loggers import (
    Logger,
    MlflowLogger,
    TensorBoardLogger,
    WandbLogger,
    log_images,
    log_text,
)
from tests.helpers.logging_fits import LogHalf, learner, plain_losses, run_and_resume

PIXELS = torch.arange(3 * 4 * 5, dtype=torch.uint8).reshape(1, 3, 4, 5)
PAIR = torch.cat([PIXELS, 200 - PIXELS])
# both in one picture, with a white gap
GRID = torch.cat([PAIR[0], torch.full((3, 4, 2), 255, dtype=torch.uint8), PAIR[1]], 2)


def show(cb: Callback) -> None:
    log_images(cb, 'pic', PIXELS)
    log_images(cb, 'grid', PAIR)
    log_text(cb, 'note', 'hello')


def fail(cb: Callback) -> None:
    raise RuntimeError('no more')


# ------------------------------------------------------------------------------------ the libraries


def tensorboard(folder: Path) -> Any:
    "Return what TensorBoard reads in a folder."
    accumulator = pytest.importorskip('tensorboard.backend.event_processing.event_accumulator')
    return accumulator.EventAccumulator(
        str(folder), size_guidance={'scalars': 0, 'images': 0, 'tensors': 0}
    ).Reload()


def tensorboard_points(path: Path, name: str) -> list[tuple[int, float]]:
    return [(e.step, e.value) for e in tensorboard(path / 'tb').Scalars(name)]


def wandb_records(path: Path) -> Iterator[Any]:
    "Yield W&B's records of every part of the run in a folder; W&B's Python client writes such files and reads none."
    for file in sorted(path.glob('wandb/offline-run-*/*.wandb')):
        deadline = monotonic() + 100
        while not (records := wandb_part(file)) or not records[-1].HasField('exit'):
            assert monotonic() < deadline, f'W&B has not finished {file}'
            sleep(0.02)  # another process writes it
        yield from records


def wandb_part(file: Path) -> list[Any]:
    proto = pytest.importorskip('wandb.proto.wandb_internal_pb2')
    return [proto.Record.FromString(data) for data in log_entries(file.read_bytes())]


def log_entries(data: bytes) -> Iterator[bytes]:
    "Yield the entries of a LevelDB log: blocks of 32 KiB, pieces with checksum, length and place (1: whole, 4: last)."
    at, entry = 7, b''
    assert data[:4] in (b':W&B', b'')
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, place = struct.unpack('<HB', data[at + 4 : at + 7])
        entry += data[at + 7 : at + 7 + size]
        at += 7 + size
        if place in (1, 4):
            yield entry
            entry = b''


def wandb_points(path: Path, name: str) -> list[tuple[int, Any]]:
    points = []
    for record in (r for r in wandb_records(path) if r.HasField('history')):
        row: dict[str, Any] = {
            '/'.join(i.nested_key): json.loads(i.value_json) for i in record.history.item
        }
        parts = {
            key.removeprefix(f'{name}/'): v for key, v in row.items() if key.startswith(f'{name}/')
        }
        if name in row or parts:
            points.append((row['_step'], row.get(name, parts)))
    return points


def mlflow_client(path: Path) -> Any:
    pytest.importorskip('mlflow')
    from learnkit.loggers.mlflow import _allow_folders

    with _allow_folders():
        return pytest.importorskip('mlflow').MlflowClient(tracking_uri=(path / 'mlruns').as_uri())


def mlflow_run(path: Path) -> Any:
    client = mlflow_client(path)
    (run,) = client.search_runs([client.get_experiment_by_name('learnkit').experiment_id])
    return run


def mlflow_points(path: Path, name: str) -> list[tuple[int, float]]:
    return [
        (m.step, m.value)
        for m in mlflow_client(path).get_metric_history(mlflow_run(path).info.run_id, name)
    ]


Points = Callable[[Path, str], list[tuple[int, Any]]]
SERVICES: list[tuple[str, Callable[..., Logger], Points]] = [
    ('tensorboard', lambda **k: TensorBoardLogger('tb', **k), tensorboard_points),
    ('wandb', lambda **k: WandbLogger(**k), wandb_points),
    ('mlflow', lambda **k: MlflowLogger(**k), mlflow_points),
]


@pytest.fixture(params=SERVICES, ids=[name for name, _, _ in SERVICES])
def service(request: pytest.FixtureRequest) -> Any:
    name, make, points = request.param
    pytest.importorskip(name)
    return make, points


# ---------------------------------------------------------------------------------- what all can do


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


def test_a_closed_learner_can_train_again(tmp_path: Path, service: Any) -> None:
    make, points = service
    learn = learner(tmp_path, make(every='5ba'))
    for _ in range(2):
        with learn:
            learn.fit(1)
        learn.close()
    assert [s for s, _ in points(tmp_path, 'loss')] == [5, 10, 15, 20]


def test_two_on_one_folder(tmp_path: Path, service: Any) -> None:
    make, _ = service
    learn = learner(tmp_path, make(), make())
    with pytest.raises(OptionError, match='both log to'):
        learn.fit(1)
    assert learn.time.ba == 0


def test_a_folder_that_cannot_be_written(tmp_path: Path, service: Any) -> None:
    make, _ = service
    for name in ('tb', 'wandb', 'mlruns'):
        (tmp_path / name).write_text('a file')
    learn = learner(tmp_path, make())
    with pytest.raises(OptionError, match='cannot be written'):
        learn.fit(1)
    assert learn.time.ba == 0


@pytest.mark.parametrize('cls', [TensorBoardLogger, WandbLogger, MlflowLogger])
def test_a_missing_library_is_named(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('learnkit.core.optional.find_spec', lambda name: None)
    library = cls.__name__.removesuffix('Logger').lower()
    with pytest.raises(
        MissingExtraError, match=rf'^{cls.__name__} needs {library}: pip install {library}$'
    ):
        cls()


# --------------------------------------------------------------------- what only one service has


def test_tensorboard_images_text_and_configuration(tmp_path: Path) -> None:
    image = pytest.importorskip('PIL.Image')
    with learner(tmp_path, TensorBoardLogger('tb'), Callback(after_epoch=show)) as learn:
        learn.fit(1)
    read = tensorboard(tmp_path / 'tb')
    (event,) = read.Images('pic')
    (tmp_path / 'a.png').write_bytes(event.encoded_image_string)
    assert event.step == 10
    expected = PIXELS[0].permute(1, 2, 0).numpy()
    assert np.array_equal(np.array(image.open(tmp_path / 'a.png')), expected)
    (event,) = read.Images('grid')
    (tmp_path / 'b.png').write_bytes(event.encoded_image_string)
    assert np.array_equal(np.array(image.open(tmp_path / 'b.png')), GRID.permute(1, 2, 0).numpy())
    (note,) = read.Tensors('note/text_summary')
    assert note.tensor_proto.string_val[0] == b'hello' and note.step == 10
    (params,) = read.Tensors('params/text_summary')
    assert json.loads(params.tensor_proto.string_val[0])['model'] == 'Linear'


def test_tensorboard_gives_each_run_a_folder(tmp_path: Path) -> None:
    pytest.importorskip('tensorboard')
    for _ in range(2):
        with learner(tmp_path, TensorBoardLogger(every='5ba')) as learn:
            learn.fit(1)
    folders = sorted((tmp_path / 'runs').iterdir())
    assert len(folders) == 2
    assert all([e.step for e in tensorboard(f).Scalars('loss')] == [5, 10] for f in folders)


def test_tensorboard_finds_its_own_folder_again(tmp_path: Path) -> None:
    pytest.importorskip('tensorboard')
    run_and_resume(tmp_path, lambda: TensorBoardLogger(every='5ba'))
    (folder,) = (tmp_path / 'runs').iterdir()
    assert [e.step for e in tensorboard(folder).Scalars('loss')] == list(range(5, 31, 5))


def test_wandb_images_text_and_configuration(tmp_path: Path) -> None:
    pytest.importorskip('wandb')
    image = pytest.importorskip('PIL.Image')
    with learner(tmp_path, WandbLogger('mine', tags=['a']), Callback(after_epoch=show)) as learn:
        learn.fit(1)
    ((step, pic),) = wandb_points(tmp_path, 'pic')
    (files,) = tmp_path.glob('wandb/offline-run-*/files')
    assert step == 10
    read = np.array(image.open(files / pic['filenames'][0]))
    assert np.array_equal(read, PIXELS[0].permute(1, 2, 0).numpy())
    ((step, pic),) = wandb_points(tmp_path, 'grid')
    assert step == 10 and len(pic['filenames']) == 1
    read = np.array(image.open(files / pic['filenames'][0]))
    assert np.array_equal(read, GRID.permute(1, 2, 0).numpy())
    assert 'hello' in (files / wandb_points(tmp_path, 'note')[0][1]['path']).read_text()
    config = {
        u.key: json.loads(u.value_json) for r in wandb_records(tmp_path) for u in r.config.update
    }
    assert config['model'] == 'Linear' and config['batch_size'] == 4
    run = next(r.run for r in wandb_records(tmp_path) if r.HasField('run'))
    assert run.project == 'mine' and list(run.tags) == ['a']


def test_wandb_text_is_not_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb, logged = pytest.importorskip('wandb'), list[Any]()
    monkeypatch.setattr(wandb, 'Html', str)
    cb = WandbLogger()
    cb._handle = SimpleNamespace(log=lambda values, step: logged.append(values))
    cb.log_text(1, 'note', 'a < b & <script>')
    assert logged == [{'note': '<pre>a &lt; b &amp; &lt;script&gt;</pre>'}]


def test_wandb_run_keeps_its_id_and_reports_a_failure(tmp_path: Path) -> None:
    pytest.importorskip('wandb')
    run_and_resume(tmp_path, lambda: WandbLogger(id='run7'))
    learn = learner(tmp_path, LogHalf, WandbLogger(id='run7'), Callback(before_step=fail))
    with pytest.raises(RuntimeError, match='no more'), learn:
        learn.fit(1)
    ids = {r.run.run_id for r in wandb_records(tmp_path) if r.HasField('run')}
    exits = [r.exit.exit_code for r in wandb_records(tmp_path) if r.HasField('exit')]
    assert ids == {'run7'} and exits == [0, 0, 1]


def test_wandb_run_can_be_taken_over(tmp_path: Path) -> None:
    pytest.importorskip('wandb')
    first, second = (learner(tmp_path, WandbLogger(id='run8', every='5ba')) for _ in range(2))
    first.fit(1)
    second.fit(1)
    first.fit(1)
    first.close()
    second.close()
    assert [s for s, _ in wandb_points(tmp_path, 'loss')] == [5, 10, 15, 20, 25, 30]


def test_wandb_mode_is_checked() -> None:
    pytest.importorskip('wandb')
    with pytest.raises(OptionError, match='mode='):
        WandbLogger(mode='off')


def test_wandb_mode_comes_from_the_environment_unless_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip('wandb')
    monkeypatch.delenv('WANDB_MODE', raising=False)
    assert WandbLogger().mode == 'offline'
    for given, mode in (('online', 'online'), ('disabled', 'disabled'), ('dryrun', 'offline')):
        monkeypatch.setenv('WANDB_MODE', given)
        assert WandbLogger().mode == mode
        assert WandbLogger(mode='shared').mode == 'shared'
    monkeypatch.setenv('WANDB_MODE', 'off')
    with pytest.raises(OptionError, match="WANDB_MODE='off'"):
        WandbLogger()


def test_mlflow_images_text_and_configuration(tmp_path: Path) -> None:
    image = pytest.importorskip('PIL.Image')
    learn = learner(tmp_path, MlflowLogger(run_name='mine'), Callback(after_epoch=show))
    client = mlflow_client(tmp_path)
    learn.fit(1)
    assert mlflow_run(tmp_path).info.status == 'RUNNING'
    learn.fit(2)
    learn.close()
    run = mlflow_run(tmp_path)
    assert run.info.status == 'FINISHED' and run.info.run_name == 'mine'
    found = {k: run.data.params[k] for k in ('model', 'epochs', 'fit_2/epochs')}
    assert found == {'model': 'Linear', 'epochs': '1', 'fit_2/epochs': '2'}
    images = sorted(a.path for a in client.list_artifacts(run.info.run_id, 'images'))
    assert images == [f'images/{name}-{s}-0.png' for name in ('grid', 'pic') for s in (10, 20, 30)]
    for name, expected in (('pic', PIXELS[0]), ('grid', GRID)):
        path = client.download_artifacts(run.info.run_id, f'images/{name}-10-0.png')
        assert np.array_equal(np.array(image.open(path)), expected.permute(1, 2, 0).numpy())
    found = Path(client.download_artifacts(run.info.run_id, 'texts/note-10.txt')).read_text()
    assert found == 'hello'


def test_mlflow_names_below_other_names(tmp_path: Path) -> None:
    "A folder of MLflow holds `half` as a file, and `half/more` as a file in a folder."
    pytest.importorskip('mlflow')

    def log(cb: Callback) -> None:
        for name in ('half', 'half/more', 'later/more'):
            cb.learn.log(name, cb.loss)

    learn = learner(tmp_path, MlflowLogger(every='5ba'), Callback(after_loss=log))
    learn.fit(1)
    learn.add_cb(Callback(after_step=lambda cb: cb.learn.log('later', 1.0)))
    learn.fit(1)
    learn.close()
    for name, logged in (
        ('half', 'half'),
        ('half/more', 'half.more'),
        ('later/more', 'later/more'),
        ('later', 'later.value'),
    ):
        assert mlflow_points(tmp_path, logged), name


def test_mlflow_run_that_failed(tmp_path: Path) -> None:
    pytest.importorskip('mlflow')
    learn = learner(tmp_path, LogHalf, MlflowLogger(), Callback(before_step=fail))
    with pytest.raises(RuntimeError, match='no more'):
        learn.fit(1)
    learn.close()
    assert mlflow_run(tmp_path).info.status == 'FAILED'
    assert [s for s, _ in mlflow_points(tmp_path, 'half')] == [1]


def test_mlflow_leaves_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip('mlflow')
    monkeypatch.delenv('MLFLOW_ALLOW_FILE_STORE', raising=False)
    before = dict(os.environ)
    with learner(tmp_path, MlflowLogger()) as learn:
        learn.fit(1)
    assert 'MLFLOW_ALLOW_FILE_STORE' not in os.environ
    assert before.items() <= os.environ.items()
