"""Copies of checkpoints in a store: what is uploaded, fetched, and removed, and stores that are slow or fail."""

import asyncio
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from learnkit import Callback, Checkpoint, CheckpointError, Learner, MissingExtraError, OptionError
from learnkit.callbacks import SaveModelCallback
from learnkit.checkpoint import mirror as module
from learnkit.checkpoint.digest import differences
from learnkit.checkpoint.folder import find
from learnkit.checkpoint.mirror import Mirror
from learnkit.loggers import CSVLogger, read_log
from learnkit.testing import synth_learner
from tests.checkpoint.test_folder_callback_files import Journal

URL = 'memory://bucket/run'
ROOT = '/bucket/run'
N = 4  # batches an epoch


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryFileSystem]:
    monkeypatch.setattr(module, 'RETRY_S', 0.001)
    fs = fsspec.filesystem('memory')
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = ['']


def stored(fs: MemoryFileSystem, root: str = ROOT) -> list[str]:
    "Return the names of all files in the store."
    return sorted(path.removeprefix(f'{root}/') for path in fs.find(root))


def local(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob('*.ckpt'))


class Paced(Callback):
    "Wait before each checkpoint until the last one is uploaded, so that none is left out."

    def wait(self) -> None:
        names = local(self.checkpoint.checkpoint_folder())
        while names and f'{ROOT}/{names[-1]}' not in fsspec.filesystem('memory').store:
            time.sleep(0.001)

    before_batch = epoch_checkpoint = wait


def fit(
    folder: Path, n_epoch: int = 2, resume: Any = True, cbs: Any = (), **options: Any
) -> Learner:
    "Train with a checkpoint after each epoch of 4 batches."
    torch.manual_seed(0)
    learn = synth_learner(n_train=N, n_valid=1)
    options = {'every': '1ep', 'mirror': URL, 'background': False, **options}
    with learn.no_bar(), learn.no_logging():
        learn.fit(n_epoch, cbs=[*cbs, Checkpoint(folder=folder, **options)], resume=resume)
    return learn


# -- what the store has ----------------------------------------------------------------------------


@pytest.mark.parametrize('url', [URL, 'file'])
def test_an_empty_folder_resumes_from_the_newest(url: str, tmp_path: Path) -> None:
    url = f'file://{tmp_path}/far/run' if url == 'file' else url
    fit(tmp_path / 'a', 2, mirror=url)
    again = fit(tmp_path / 'b', 4, mirror=url)
    assert local(tmp_path / 'b') == [f'0000{i}-ep{i}-ba{N * i}.ckpt' for i in (2, 3, 4)]
    whole = fit(tmp_path / 'c', 4, mirror=None)
    assert differences(whole.checkpoint_state(), again.checkpoint_state()) == []


def test_the_store_is_pruned_like_the_folder(tmp_path: Path, store: Any) -> None:
    losses = {4: 3.0, 8: 1.0, 12: 2.0, 16: 4.0, 20: 5.0, 24: 6.0}

    class Planned(Callback):
        def after_loss(self) -> None:
            if not self.training:
                self.learn.loss = torch.tensor(losses[self.learn.time.ba])

    options = {'keep_last': 2, 'keep_best': 1, 'cbs': [Planned(), Paced()]}
    fit(tmp_path / 'a', 3, **options)
    kept = ['00002-ep2-ba8.ckpt', '00003-ep3-ba12.ckpt']
    assert local(tmp_path / 'a') == stored(store) == kept
    # the store has the best, and what the folder without it takes for the best
    fit(tmp_path / 'b', 6, **options)
    newest = ['00005-ep5-ba20.ckpt', '00006-ep6-ba24.ckpt']
    assert stored(store) == [*kept, *newest]
    assert local(tmp_path / 'b') == [kept[1], *newest]
    best = find('best', tmp_path / 'c', Mirror(URL))
    assert best is not None and best[0].name == kept[0] and local(tmp_path / 'c') == kept[:1]


def test_files_of_callbacks_are_in_the_store(tmp_path: Path, store: Any) -> None:
    fit(tmp_path / 'a', 3, keep_last=1, keep_best=0, cbs=[Journal(), Paced()])
    files = '00003-ep3-ba12.files/journal/sub/batches.txt'
    assert stored(store) == ['00003-ep3-ba12.ckpt', files]
    journal = Journal()
    fit(tmp_path / 'b', 4, cbs=[journal])
    assert journal.read == [12]


def test_a_new_run_comes_after_the_runs_of_the_store(tmp_path: Path, store: Any) -> None:
    fit(tmp_path / 'a', 2, keep_last=1, keep_best=0)
    fit(tmp_path / 'b', 1, resume=False)
    assert stored(store) == ['00002-ep2-ba8.ckpt', '00003-ep1-ba4.ckpt']


@pytest.mark.parametrize('n_local', [1, 2, 3])
def test_the_newer_checkpoint_is_resumed(n_local: int, tmp_path: Path, store: Any) -> None:
    fit(tmp_path / 'a', n_local, mirror=None, cbs=[Callback(before_fit=lambda cb: None)])
    fit(tmp_path / 'b', 2)
    content = store.cat_file(f'{ROOT}/00002-ep2-ba8.ckpt')
    learn = fit(tmp_path / 'a', 4)
    number = max(n_local, 2)
    path = tmp_path / 'a' / f'0000{number}-ep{number}-ba{4 * number}.ckpt'
    assert (path.read_bytes() == content) == (n_local == 1)
    assert stored(store)[-1] == '00004-ep4-ba16.ckpt' and learn.epoch == 3


def test_a_path_is_resumed_without_the_store(tmp_path: Path, store: Any) -> None:
    fit(tmp_path / 'a', 2)
    shutil.copy(tmp_path / 'a' / '00001-ep1-ba4.ckpt', tmp_path)
    store.store.clear()
    fit(tmp_path / 'b', 2, resume=tmp_path / '00001-ep1-ba4.ckpt')
    assert stored(store) == ['00001-ep2-ba8.ckpt']
    with pytest.raises(CheckpointError, match='no checkpoint'):
        fit(tmp_path / 'c', 2, resume='00009.ckpt')


def test_what_the_store_lacks_is_uploaded_at_the_start(tmp_path: Path, store: Any) -> None:
    fit(tmp_path / 'a', 2, mirror=None)
    fit(tmp_path / 'a', 2)  # trains nothing
    assert stored(store) == ['00002-ep2-ba8.ckpt']


# -- partial uploads -------------------------------------------------------------------------------


@pytest.mark.parametrize('damage', ['cut', 'empty', 'bit', 'no files', 'other files', 'no ckpt'])
def test_a_partial_upload_is_not_resumed(damage: str, tmp_path: Path, store: Any) -> None:
    fit(tmp_path / 'a', 2, cbs=[Journal(), Paced()])
    newest = f'{ROOT}/00002-ep2-ba8'
    content = store.cat_file(f'{newest}.ckpt')
    if damage in ('no files', 'other files'):
        file = f'{newest}.files/journal/sub/batches.txt'
        store.rm_file(file) if damage == 'no files' else store.pipe_file(file, b'9')
    elif damage == 'no ckpt':
        store.rm_file(f'{newest}.ckpt')
    else:
        middle = len(content) // 2
        flipped = content[:-1] + bytes([content[-1] ^ 1])
        cut = {'cut': content[:middle], 'empty': b'', 'bit': flipped}
        store.pipe_file(f'{newest}.ckpt', cut[damage])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        learn = fit(tmp_path / 'b', 2, cbs=[Journal(), Paced()], keep_last=1, keep_best=0)
    assert len(caught) == (damage != 'no ckpt')
    assert all('00001-ep1-ba4.ckpt is used' in str(w.message) for w in caught)
    whole = fit(tmp_path / 'c', 2, mirror=None, cbs=[Journal()])
    assert differences(whole.checkpoint_state(), learn.checkpoint_state()) == []
    # the new one has a higher number, unless the store has no file of this number
    assert stored(store)[-2].startswith('00003' if caught else '00002')


def test_a_file_outside_of_the_folder_is_refused(tmp_path: Path, store: Any) -> None:
    fit(tmp_path / 'a', 1)
    store.store[f'{ROOT}/00001-ep1-ba4.files/../../evil'] = store.store[
        f'{ROOT}/00001-ep1-ba4.ckpt'
    ]
    with pytest.raises(CheckpointError, match='evil'):
        fit(tmp_path / 'b' / 'c', 1)
    assert not (tmp_path / 'b' / 'evil').exists()


# -- stores that are slow or fail ------------------------------------------------------------------


class Slow:
    "Uploads that wait until `go` is set."

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.go = threading.Event()
        put = MemoryFileSystem.put_file

        def put_slowly(fs: Any, source: str, target: str) -> None:
            self.begun.append(Path(target).name)
            assert self.go.wait(60)
            put(fs, source, target)

        monkeypatch.setattr(MemoryFileSystem, 'put_file', put_slowly)


def test_training_does_not_wait_and_only_the_newest_waits(
    tmp_path: Path, store: Any, monkeypatch: Any
) -> None:
    slow = Slow(monkeypatch)

    def release(cb: Any) -> None:
        # the uploaded file is still there, although it is not one of those that are kept
        assert local(tmp_path) == ['00001-ep0-ba1.ckpt', '00039-ep9-ba39.ckpt']
        assert slow.begun == ['00001-ep0-ba1.ckpt']
        slow.go.set()

    def until_begun(cb: Any) -> None:
        while cb.train_iter == 1 and not slow.begun:
            time.sleep(0.001)

    watch = Callback(
        before_batch=until_begun, batch_checkpoint=lambda cb: cb.train_iter == 40 and release(cb)
    )
    fit(tmp_path, 10, cbs=[watch], every='1ba', keep_last=1, keep_best=0)
    newest = '00041-ep10-ba40.ckpt'
    assert slow.begun[0] == '00001-ep0-ba1.ckpt' and slow.begun[-1] == newest
    assert len(slow.begun) <= 4  # those of the last two batches and of the epoch
    assert local(tmp_path) == stored(store) == [newest]


class Failing:
    "Uploads that fail with errors in turn."

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *errors: BaseException) -> None:
        self.times: list[float] = []
        self.errors = errors
        self.is_on = True
        put = MemoryFileSystem.put_file

        def fail(fs: Any, source: str, target: str) -> None:
            self.times.append(time.monotonic())
            if self.is_on:
                raise self.errors[len(self.times) % len(self.errors)]
            put(fs, source, target)

        monkeypatch.setattr(MemoryFileSystem, 'put_file', fail)


def test_a_store_that_fails_for_a_while(tmp_path: Path, store: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, 'RETRY_S', 0.004)
    failing = Failing(monkeypatch, OSError('no route'), PermissionError('denied'))

    def recover(cb: Any) -> None:
        while cb.epoch == 1 and len(failing.times) < 5:
            time.sleep(0.001)
        failing.is_on = cb.epoch < 1

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        fit(tmp_path, 3, cbs=[Callback(before_epoch=recover)])
    messages = [str(w.message) for w in caught]
    # one for each type of error, in the thread that trains
    assert [m.partition(')')[0] for m in messages] == [
        f'{URL} fails (PermissionError: denied',
        f'{URL} fails (OSError: no route',
    ]
    assert '00003-ep3-ba12.ckpt' in stored(store)
    waits = [b - a for a, b in pairwise(failing.times[:5])]
    assert all(wait >= 0.004 * 2**i for i, wait in enumerate(waits))


@pytest.mark.parametrize('background', [False, True])
def test_a_store_that_is_gone_for_good(background: bool, tmp_path: Path, monkeypatch: Any) -> None:
    failing = Failing(monkeypatch, OSError('gone'))
    monkeypatch.setattr(module, 'WAIT_S', 0.05)
    monkeypatch.setattr(module, 'MAX_RETRY_S', 0.0)

    def wait(cb: Any) -> None:
        while cb.epoch == 1 and len(failing.times) < 1100:  # 2 ** 1024 would be no float
            time.sleep(0.001)

    with (
        pytest.warns(UserWarning, match=f'{URL} fails .OSError: gone'),
        pytest.warns(UserWarning, match='lacks 00002-ep2-ba8.ckpt'),
    ):
        learn = fit(tmp_path, 2, background=background, cbs=[Callback(before_batch=wait)])
    assert len(learn.history) == 2 and local(tmp_path)[-1] == '00002-ep2-ba8.ckpt'


def test_fits_one_after_another_after_a_failure(
    tmp_path: Path, store: Any, monkeypatch: Any
) -> None:
    failing = Failing(monkeypatch, OSError('gone'))
    monkeypatch.setattr(module, 'WAIT_S', 0.05)
    learn = synth_learner(n_train=N, n_valid=1, cbs=Checkpoint(folder=tmp_path, mirror=URL))
    with learn.no_bar(), learn.no_logging():
        with pytest.warns(UserWarning, match='gone'), pytest.warns(UserWarning, match='lacks'):
            learn.fit(1)
        failing.is_on = False
        monkeypatch.setattr(module, 'WAIT_S', 60)
        learn.fit(1)
        with pytest.raises(ZeroDivisionError):
            learn.fit(2, cbs=Callback(before_validate=lambda cb: cb.epoch and 1 / 0))
        learn.fit(1)
    assert [name[:5] for name in stored(store)] == ['00002', '00003', '00004']
    assert not [t for t in threading.enumerate() if t.name == 'checkpoint-mirror']


def unreadable(*args: Any, **kwargs: Any) -> None:
    raise TimeoutError('no answer')


def test_a_store_that_cannot_be_read(tmp_path: Path, store: Any, monkeypatch: Any) -> None:
    fit(tmp_path / 'a', 1)
    monkeypatch.setattr(MemoryFileSystem, 'ls', unreadable)
    monkeypatch.setattr(module, 'WAIT_S', 0.05)
    for resume in (True, 'latest', 'best'):
        with pytest.raises(CheckpointError, match=f'{URL} cannot be read .TimeoutError: no answer'):
            fit(tmp_path / 'b', 2, resume=resume)
    assert local(tmp_path / 'b') == []
    with (
        pytest.warns(UserWarning, match='cannot be read .TimeoutError'),
        pytest.warns(UserWarning, match='fails .TimeoutError'),
        pytest.warns(UserWarning, match='lacks'),
    ):
        assert len(fit(tmp_path / 'a', 2).history) == 2


def test_a_checkpoint_that_cannot_be_fetched(tmp_path: Path, monkeypatch: Any) -> None:
    fit(tmp_path / 'a', 2)
    monkeypatch.setattr(MemoryFileSystem, 'get_file', unreadable)
    with pytest.raises(CheckpointError, match='TimeoutError: no answer'):
        fit(tmp_path / 'b', 3)


# -- URLs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'url', ['bucket/run', 's3://', 'none://bucket', 's3:/bucket', '', 5, Path('a')]
)
def test_urls_that_are_refused(url: Any) -> None:
    with pytest.raises(OptionError, match='mirror='):
        Checkpoint(mirror=url)


@pytest.mark.parametrize(
    ('url', 'library', 'package'),
    [('gs://bucket/run', 'gcsfs', 'gcsfs'), ('smb://host/run', 'smbclient', 'smbprotocol')],
)
def test_a_missing_library(url: str, library: str, package: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtraError, match=f'pip install {package}$'):
        Checkpoint(mirror=url)


# -- objects that cannot be read -------------------------------------------------------------------


def write_header(length: int, header: bytes) -> bytes:
    return length.to_bytes(8, 'little') + header


FOREIGN = {
    'empty': b'',
    'text': b'notes of somebody',
    'header longer than the file': write_header(60, b'{}' + b' ' * 40),
    'header over the limit': write_header(module.MAX_HEADER + 1, b'{}'),
    'no JSON': write_header(4, b'\xff\xfe\xfd\xfc'),
    'nested': write_header(200_000, b'[' * 200_000),
    'no info': write_header(20, b'{"__metadata__": {}} '),
    'a list': write_header(2, b'[]'),
}


@pytest.mark.parametrize('content', FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_file_is_skipped(content: bytes, tmp_path: Path, store: Any) -> None:
    fit(tmp_path / 'a', 2)
    store.pipe_file(f'{ROOT}/00009-ep9-ba36.ckpt', content)
    with pytest.warns(UserWarning, match='00009-ep9-ba36.ckpt: DamagedError') as caught:
        learn = fit(tmp_path / 'b', 3, resume='best')
    assert len(caught) == 1
    assert stored(store)[-1] == '00010-ep3-ba12.ckpt' and len(learn.history) == 3


def test_only_as_much_as_the_file_has_is_read(tmp_path: Path, store: Any, monkeypatch: Any) -> None:
    fit(tmp_path / 'a', 1)
    store.pipe_file(f'{ROOT}/00009-ep9-ba36.ckpt', FOREIGN['header longer than the file'])
    ends: list[int] = []
    read = MemoryFileSystem.cat_file

    def note(fs: Any, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> Any:
        ends.append(end if '00009' in path else 0)
        return read(fs, path, start, end, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, 'cat_file', note)
    assert len(Mirror(URL).entries(tmp_path, True)[1]) == 1 and max(ends) == 8


@pytest.mark.parametrize('error', [PermissionError('denied'), OSError(5, 'broken'), KeyError('x')])
@pytest.mark.parametrize('resume', ['best', 'latest', True])
def test_an_unreadable_object_is_named_once(
    error: Exception, resume: Any, tmp_path: Path, store: Any, monkeypatch: Any
) -> None:
    fit(tmp_path / 'a', 2, cbs=[Paced()])
    read, get = MemoryFileSystem.cat_file, MemoryFileSystem.get_file

    def deny(f: Any, fs: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        if '00002' in path:
            raise error
        return f(fs, path, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, 'cat_file', lambda *a, **kw: deny(read, *a, **kw))
    monkeypatch.setattr(MemoryFileSystem, 'get_file', lambda *a, **kw: deny(get, *a, **kw))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        learn = fit(tmp_path / 'b', 3, resume=resume)  # also warns of another length
    assert sum('00002-ep2-ba8.ckpt' in str(w.message) for w in caught) == 1
    assert stored(store)[-1] == '00004-ep3-ba12.ckpt' and len(learn.history) == 3


# -- exceptions that are not errors ----------------------------------------------------------------


@pytest.mark.parametrize(
    'error', [asyncio.CancelledError(), SystemExit(1), KeyboardInterrupt(), GeneratorExit()]
)
def test_any_exception_is_a_failed_upload(
    error: BaseException, tmp_path: Path, store: Any, monkeypatch: Any
) -> None:
    failing = Failing(monkeypatch, error)

    def recover(cb: Any) -> None:
        while cb.epoch == 1 and len(failing.times) < 3:
            time.sleep(0.001)
        failing.is_on = cb.epoch < 1

    with pytest.warns(UserWarning, match=f'{URL} fails .{type(error).__name__}'):
        fit(tmp_path, 2, cbs=[Callback(before_epoch=recover)])
    assert stored(store)[-1] == '00002-ep2-ba8.ckpt'


def test_a_canceled_request_while_the_store_is_listed(tmp_path: Path, monkeypatch: Any) -> None:
    fit(tmp_path / 'a', 1)

    def cancel(*args: Any, **kwargs: Any) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(MemoryFileSystem, 'ls', cancel)
    with pytest.raises(CheckpointError, match=f'{URL} cannot be read .CancelledError'):
        fit(tmp_path / 'b', 2)


# -- stores that refuse ----------------------------------------------------------------------------


class NoCredentialsError(Exception):
    "As in botocore, whose errors are no `OSError`."


@pytest.mark.parametrize(
    'error',
    [
        FileNotFoundError('The specified bucket does not exist'),
        PermissionError('Access Denied'),
        NoCredentialsError('Unable to locate credentials'),
        FileExistsError(17, 'File exists'),
        ValueError('Must provide either a connection_string or account_name'),
    ],
)
@pytest.mark.parametrize('resume', [True, False, 'best'])
def test_a_store_that_refuses_is_an_error_before_training(
    error: Exception, resume: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(MemoryFileSystem, 'pipe_file', refuse)
    batches: list[int] = []
    watch = Callback(before_batch=lambda cb: batches.append(1))
    with pytest.raises(
        CheckpointError, match=f'mirror={URL!r} cannot be .*{type(error).__name__}'
    ) as e:
        fit(tmp_path, 2, resume=resume, cbs=[watch])
    assert [note for note in getattr(e.value, '__notes__', []) if 'and then' in note] == []
    assert batches == [] and local(tmp_path) == []
    monkeypatch.undo()
    fit(tmp_path, 1, mirror=None)  # nothing stays locked


@pytest.mark.parametrize(
    'error', [ConnectionError('no route'), TimeoutError('slow'), OSError(5, 'server error')]
)
def test_a_store_that_does_not_answer_is_a_warning(
    error: Exception, tmp_path: Path, store: Any, monkeypatch: Any
) -> None:
    fit(tmp_path, 1)
    pipe = MemoryFileSystem.pipe_file

    def fail(fs: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        if '.probe' in path:
            raise error
        return pipe(fs, path, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, 'pipe_file', fail)
    with (
        pytest.warns(UserWarning, match='the newest checkpoint of'),
        pytest.warns(UserWarning, match='fails'),
    ):
        learn = fit(tmp_path, 2)
    assert len(learn.history) == 2 and stored(store)[-1] == '00002-ep2-ba8.ckpt'


# -- files of callbacks ----------------------------------------------------------------------------


@pytest.mark.parametrize('mirror', [URL, None])
def test_the_best_weights_travel(mirror: str | None, tmp_path: Path, monkeypatch: Any) -> None:
    losses = {4: 1.0, 8: 2.0, 12: 3.0, 16: 4.0}  # the first epoch is the best

    class Planned(Callback):
        def after_loss(self) -> None:
            if not self.training:
                self.learn.loss = torch.tensor(losses[self.learn.time.ba])

    def train(name: str, n_epoch: int) -> Learner:
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / name)
        cbs = [Planned(), SaveModelCallback(), CSVLogger('log.csv', every='1ba')]
        return fit(tmp_path / name / 'ckpt', n_epoch, cbs=cbs, mirror=mirror)

    whole = train('whole', 4)
    if mirror:
        fsspec.filesystem('memory').rm(ROOT, recursive=True)
    train('a', 2)
    if mirror is None:  # a user copies the folder of the checkpoints alone
        (tmp_path / 'b').mkdir()
        shutil.copytree(tmp_path / 'a' / 'ckpt', tmp_path / 'b' / 'ckpt')
    again = train('b', 4)
    best = torch.load(tmp_path / 'a' / 'models' / 'model.pth', weights_only=True)
    for name, value in best.items():
        assert torch.equal(again.model.state_dict()[name], value)
        assert torch.equal(whole.model.state_dict()[name], value)
    logs = [read_log(tmp_path / name / 'log.csv') for name in ('whole', 'b')]
    steps = [[row['step'] for row in log] for log in logs]
    assert steps[0] == steps[1] == list(range(1, 17))
    assert [row['loss'] for row in logs[0]] == [row['loss'] for row in logs[1]]


def test_checkpoints_share_the_file_of_the_best_weights(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    saved = SaveModelCallback(comp=lambda new, best: best in (float('inf'), float('-inf')))
    fit(tmp_path / 'ckpt', 4, cbs=[saved], mirror=None, keep_last=None)
    files = sorted(tmp_path.glob('ckpt/*.files/save_model/model.pth'))
    assert len(files) == 4 and len({file.stat().st_ino for file in files}) == 1
    # the file of the user is another one, which other programs may change
    own = tmp_path / 'models' / 'model.pth'
    assert own.stat().st_ino != files[0].stat().st_ino and own.read_bytes() == files[3].read_bytes()


class Diary(Callback):
    "Write to a file by hand."

    def __init__(self, file: Any) -> None:
        self.file = file


def test_other_files_are_named_at_the_first_checkpoint(tmp_path: Path) -> None:
    (tmp_path / 'text').write_text('a')
    with (tmp_path / 'open').open('w') as f:
        for file in (tmp_path / 'path', str(tmp_path / 'text'), f):
            name = getattr(file, 'name', file)
            with pytest.warns(UserWarning, match=f'Diary .*{Path(name).name}') as caught:
                fit(tmp_path / 'a', 3, resume=False, cbs=[Diary(file)])
            assert len(caught) == 1
    fit(tmp_path / 'b', 1, mirror=None, cbs=[Diary(tmp_path / 'path')])
    fit(tmp_path / 'c', 1, resume=False, cbs=[Diary('no file'), Journal()])
