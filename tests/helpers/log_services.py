"""Logs of services, written by their libraries and read by these, or from their files."""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Any

import pytest
import torch

from learnkit import Callback
from learnkit.loggers import (
    Logger,
    MlflowLogger,
    TensorBoardLogger,
    WandbLogger,
    log_images,
    log_text,
)
from tests.helpers.log_server import PostLogger, server_points

PIXELS = torch.arange(3 * 4 * 5, dtype=torch.uint8).reshape(1, 3, 4, 5)


PAIR = torch.cat([PIXELS, 200 - PIXELS])


GRID = torch.cat([PAIR[0], torch.full((3, 4, 2), 255, dtype=torch.uint8), PAIR[1]], 2)


def show(cb: Callback) -> None:
    log_images(cb, 'pic', PIXELS)
    log_images(cb, 'grid', PAIR)
    log_text(cb, 'note', 'hello')


def fail(cb: Callback) -> None:
    raise RuntimeError('no more')


def tensorboard(folder: Path) -> Any:
    "Return what TensorBoard reads in a folder."
    accumulator = pytest.importorskip('tensorboard.backend.event_processing.event_accumulator')
    return accumulator.EventAccumulator(
        str(folder), size_guidance={'scalars': 0, 'images': 0, 'tensors': 0}
    ).Reload()


def tensorboard_points(path: Path, name: str) -> list[tuple[int, float]]:
    # TensorBoard leaves out a file whose name sorts before that of an older one, as '.10' does before '.9'
    with TemporaryDirectory() as folder:
        files = sorted((path / 'tb').glob('events.*'), key=lambda file: file.stat().st_mtime_ns)
        for i, file in enumerate(files):
            copyfile(file, Path(folder, f'events.out.tfevents.{i:010d}'))
        return [(e.step, e.value) for e in tensorboard(Path(folder)).Scalars(name)]


def wandb_records(path: Path) -> Iterator[Any]:
    "Yield W&B's records of every part of the run in a folder; W&B's Python client writes such files and reads none."
    for file in sorted(path.glob('wandb/offline-run-*/*.wandb')):
        deadline = monotonic() + 100
        records = wandb_part(file)
        # other records may follow the one of the end
        while not any(record.HasField('exit') for record in records):
            assert monotonic() < deadline, f'W&B has not finished {file}'
            sleep(0.02)  # another process writes it
            records = wandb_part(file)
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
    return pytest.importorskip('mlflow').MlflowClient(tracking_uri=(path / 'mlruns').as_uri())


def mlflow_run(path: Path) -> Any:
    client = mlflow_client(path)
    (run,) = client.search_runs([client.get_experiment_by_name('learnkit').experiment_id])
    return run


def mlflow_points(path: Path, name: str) -> list[tuple[int, float]]:
    return [
        (m.step, m.value)
        for m in mlflow_client(path).get_metric_history(
            mlflow_run(path).info.run_id, name.replace('/', '.')
        )
    ]


Points = Callable[[Path, str], list[tuple[int, Any]]]


# name of a module, logger, and reader of a value's steps and numbers
SERVICES: list[tuple[str, Callable[..., Logger], Points]] = [
    ('tensorboard', lambda **k: TensorBoardLogger('tb', **k), tensorboard_points),
    ('wandb', lambda **k: WandbLogger(**k), wandb_points),
    ('mlflow', lambda **k: MlflowLogger(**k), mlflow_points),
    ('http', lambda **k: PostLogger(**k), server_points),  # over the network
]
