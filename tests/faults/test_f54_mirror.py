"""Row 54: SIGKILL while checkpoints are uploaded to S3, and stores that fail. Nothing is lost but the newest uploads.

A killed run resumes in an empty folder, from the newest whole checkpoint of the store."""

import os
import random
import signal
import sys
import time
import warnings
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from learnkit import EMA, Callback, Checkpoint, DataLoaders, Learner
from learnkit.checkpoint import mirror as module
from tests.faults.run_helpers import State, in_child, quiet, same
from tests.helpers.forks import start
from tests.helpers.ranks import free_port
from tests.helpers.resuming import scramble
from tests.helpers.s3 import BUCKET, S3, started_s3

pytest.importorskip('s3fs')
pytest.importorskip('moto')

N_EPOCH, N_BATCHES = 3, 8


def make(ballast: int) -> Learner:
    scramble(0)
    x = torch.randn(4 * N_BATCHES, 4)
    loader = DataLoader(TensorDataset(x, x[:, :1]), 4, shuffle=True)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
    model.register_buffer('ballast', torch.ones(ballast))
    return quiet(Learner(DataLoaders(loader, loader), model, nn.MSELoss(), lr=0.01, cbs=EMA()))


def train(
    folder: Path,
    run: str | None,  # folder of the store
    ballast: int = 1,  # number of weights that only take time
    is_paced: bool = False,  # whether a batch waits for the last upload
    **options: Any,
) -> State:
    "Train or resume; write the names of all uploaded checkpoints, and of the one that the run resumed from."
    learn = make(ballast)
    upload = module.Mirror.upload

    def note(mirror: module.Mirror, path: Path) -> None:
        upload(mirror, path)
        with (folder / 'uploaded').open('a') as f:
            f.write(f'{path.name}\n')

    def begin(cb: Any) -> None:
        resumed = cb.learn.run.resuming
        (folder / 'resumed').write_text('' if resumed is None else resumed.path.name)
        if resumed is not None:
            scramble(os.getpid() % 1000)

    def wait(cb: Any) -> None:
        names = local_names(folder)
        while (
            is_paced
            and run
            and names
            and names[-1] not in [*read(folder / 'uploaded'), *read(folder / 'resumed')]
        ):
            time.sleep(0.001)

    folder.mkdir(parents=True, exist_ok=True)
    module.Mirror.upload = note  # type: ignore[method-assign]
    watch = Callback(before_fit=begin, before_batch=wait, epoch_checkpoint=wait)
    mirror = None if run is None else f's3://{BUCKET}/{run}'
    options = {
        'every': '1ba',
        'keep_last': 2,
        'mirror': mirror,
        'background': not is_paced,
        **options,
    }
    learn.fit(
        N_EPOCH, cbs=[watch, Checkpoint(folder=folder / 'checkpoints', **options)], resume=True
    )
    learn.remove_cb(watch)
    return learn.checkpoint_state()


def read(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def local_names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / 'checkpoints').glob('*.ckpt'))


@dataclass
class Totals:
    "Counts over all killed runs."

    kills: int = 0
    resumed: int = 0  # kills that left a checkpoint in the store
    within: int = 0  # kills before the newest checkpoint was uploaded
    lost: int = 0  # checkpoints that were newer than the last upload
    most: int = 0


def live(
    s3: S3, folder: Path, run: str, draw: random.Random, totals: Totals, **options: Any
) -> bool:
    "Train in an empty folder until a random instant; return True if the run has ended before."
    before = s3.names(run)
    with start(partial(train, folder, run, **options)) as child:
        n_uploads = draw.randrange(4)
        child.wait(600, lambda: len(read(folder / 'uploaded')) >= n_uploads)
        time.sleep(draw.uniform(0, 0.06))
        is_killed = child.poll() is None
        child.send(signal.SIGKILL)
        child.wait()
        assert is_killed or child.code == 0, child.stderr
    if (folder / 'resumed').exists():
        assert read(folder / 'resumed') == before[-1:]
    uploaded, stored, local = read(folder / 'uploaded'), s3.names(run), local_names(folder)
    assert all(name <= stored[-1] for name in uploaded)
    if is_killed:
        totals.kills += 1
        totals.resumed += bool(stored)
        newest = int(stored[-1][:5]) if stored else 0
        lost = max(0, int(local[-1][:5]) - newest) if local else 0
        assert lost <= 1 or not options.get('is_paced')
        totals.within += lost > 0
        totals.lost += lost
        totals.most = max(totals.most, lost)
    return not is_killed


def kill_runs(s3: S3, tmp_path: Path, n: int, seed: int = 0, **options: Any) -> Totals:
    "Kill runs `n` times in all, about 8 times each, and compare their ends with the run that was not killed."
    draw, totals = random.Random(seed), Totals()
    expected = in_child(partial(train, tmp_path / 'whole', None, **options))
    for i in count():
        run = f'{tmp_path.name}-{seed}-{i}'
        folders = (tmp_path / f'{run}-{k}' for k in count())
        for folder in folders:
            if totals.kills == n or draw.random() < 1 / 8:
                break
            if live(s3, folder, run, draw, totals, **options):
                break
        before, folder = s3.names(run), next(folders)
        assert same(in_child(partial(train, folder, run, **options)), expected)
        assert read(folder / 'resumed') == before[-1:]
        if totals.kills >= n:
            return totals
    raise AssertionError('unreachable')


@pytest.fixture(scope='module')
def s3() -> Any:
    with started_s3() as server:
        yield server


def test_some_kills(s3: S3, tmp_path: Path) -> None:
    assert kill_runs(s3, tmp_path, 3).kills == 3


@pytest.mark.full
@pytest.mark.parametrize(
    ('n', 'options'),
    [(50, {}), (50, {'is_paced': True}), (50, {'ballast': 500_000}), (6, {'ballast': 14_000_000})],
    ids=['all at once', 'one after another', 'of 2 MB', 'of 56 MB, in parts'],
)
def test_many_kills(s3: S3, n: int, options: dict[str, Any], request: Any, tmp_path: Path) -> None:
    found = kill_runs(s3, tmp_path, n, 1, **options)
    print(
        f'row 54: {found.kills} kills while checkpoints were uploaded to S3 ({request.node.callspec.id}), '
        f'{found.resumed} of them resumed in an empty folder, all exact; {found.within} kills lost {found.lost} '
        f'checkpoints newer than the last upload, {found.most} at most'
    )
    assert found.resumed > n // 2


# -- stores that fail ------------------------------------------------------------------------------


def train_with(
    s3: S3, folder: Path, run: str, wait_s: float, **events: Any
) -> tuple[list[str], list[str], list[str]]:
    "Train with functions at events; return the warnings, and the names in the folder and in the store."
    module.RETRY_S, module.MAX_RETRY_S, module.WAIT_S = 0.01, 0.05, wait_s
    checkpoint = Checkpoint('1ba', folder, keep_last=1, keep_best=0, mirror=f's3://{BUCKET}/{run}')
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always', UserWarning)
        try:
            make(1).fit(1, cbs=[Callback(**events), checkpoint])
        finally:
            for w in caught:
                print(w.message, file=sys.stderr)
    names = sorted(path.name for path in folder.glob('*.ckpt'))
    return [str(w.message) for w in caught], names, s3.names(run)


def fail_from(s3: S3, cb: Any) -> None:
    "Let the server fail from the fourth batch on."
    if cb.train_iter == 3:
        s3.set_mode(500)


def test_a_server_fails_for_a_while(s3: S3, tmp_path: Path) -> None:
    def recover(cb: Any) -> None:
        while cb.train_iter == 6 and cb.checkpoint._uploader._failures < 3:
            time.sleep(0.001)
        if cb.train_iter == 6:
            s3.set_mode()

    job = partial(
        train_with,
        s3,
        tmp_path,
        'a while',
        60,
        before_batch=partial(fail_from, s3),
        after_batch=recover,
    )
    messages, local, stored = in_child(job)
    assert local == stored == ['00009-ep1-ba8.ckpt']
    assert 1 <= len(messages) <= 2 and 'bucket/a while fails' in messages[0]


def test_a_store_that_is_never_reached(s3: S3, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv('AWS_ENDPOINT_URL', f'http://127.0.0.1:{free_port()}')
    messages, local, stored = in_child(partial(train_with, s3, tmp_path, 'never', 0.5))
    assert local == ['00009-ep1-ba8.ckpt'] and stored == []
    assert 'EndpointConnectionError' in messages[0] and '00009-ep1-ba8' in messages[-1]
    assert len(messages) == 2


@pytest.mark.parametrize(
    ('fault', 'error'),
    [
        ('no bucket', 'FileNotFoundError: The specified bucket does not exist'),
        ('no credentials', 'NoCredentialsError: Unable to locate credentials'),
    ],
)
def test_a_store_that_refuses(
    s3: S3, fault: str, error: str, tmp_path: Path, monkeypatch: Any
) -> None:
    if fault == 'no credentials':
        monkeypatch.delenv('AWS_ACCESS_KEY_ID')
    else:
        monkeypatch.setattr(f'{__name__}.BUCKET', 'none')
    with start(partial(train_with, s3, tmp_path, 'never', 0.5)) as child:
        assert child.wait(600) == 1
        assert 'CheckpointError: mirror=' in child.stderr and error in child.stderr
    assert not list(tmp_path.glob('*.ckpt'))


# -- SIGTERM ---------------------------------------------------------------------------------------


@pytest.mark.parametrize('is_reached', [True, False])
def test_sigterm_waits_for_the_last_upload(s3: S3, tmp_path: Path, is_reached: bool) -> None:
    def send(cb: Any) -> None:
        if cb.train_iter == 4:
            s3.set_mode(200 if is_reached else 500, wait_s=0.05)
            os.kill(os.getpid(), signal.SIGTERM)

    wait_s = 60 if is_reached else 0.5
    try:
        with start(
            partial(train_with, s3, tmp_path, f'{is_reached}', wait_s, before_batch=send)
        ) as child:
            assert child.wait(600) == 128 + signal.SIGTERM
            assert 'SIGTERM: the run is saved' in child.stderr
            assert ('lacks 00005-ep0-ba5.ckpt' in child.stderr) != is_reached
    finally:
        s3.set_mode()
    assert (tmp_path / '00005-ep0-ba5.ckpt').exists()
    assert ('00005-ep0-ba5.ckpt' in s3.names(f'{is_reached}')) == is_reached
