"""Checkpoints of several processes in parts, written by each process and read by any number of processes."""

import os
import pickle
import resource
import shutil
import signal
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint

from learnkit import EMA, Callback, Checkpoint
from learnkit.checkpoint import dcp
from learnkit.checkpoint.dcp import find_parts_folder, load_shards
from learnkit.checkpoint.file import read_state
from learnkit.checkpoint.folder import find
from learnkit.core.errors import CheckpointError, DamagedError, DistributedError, WeightsError
from tests.helpers.fsdp import learner, max_difference, state_values
from tests.helpers.ranks import run_ranks, started_ranks

pytestmark = pytest.mark.dist


def fit(rank, folder, strategy=None, resume=False, every='2ba', cbs=(), epochs=2, **options):
    "Train with checkpoints on global batches of 8 samples; return the weights, the averages and the history."
    # by another number of processes
    warnings.filterwarnings('ignore', message='The checkpoint is of')
    warnings.filterwarnings('ignore', message='The callbacks differ from those')
    options = {'folder': folder, 'every': every, 'keep_last': None, **options}
    learn = learner(n=40, cbs=[Checkpoint(**options), EMA(0.9), *cbs])
    torch.manual_seed(3)
    if strategy is None:
        with learn.no_bar(), learn.no_logging():
            learn.fit(epochs, resume=resume)
    else:
        with (
            learn.no_bar(),
            learn.no_logging(),
            learn.distributed(
                strategy.removeprefix('h-'),
                batch_size='global',
                timeout='30s',
                **({'replicas': 2} if strategy == 'h-fsdp' else {}),
            ),
        ):
            learn.fit(epochs, resume=resume)
    history = [row[k] for row in learn.history for k in ('train_loss', 'valid_loss')]
    return [
        *state_values(learn),
        *learn.ema.state_dict()['averages'].values(),
        torch.tensor(history),
    ]


@pytest.fixture(scope='module')
def written(tmp_path_factory):
    "Return checkpoints after every second of ten batches for each strategy, and the results of training."
    found = {}
    for strategy in ('fsdp', 'ddp', None):
        folder = tmp_path_factory.mktemp(str(strategy))
        found[strategy] = (
            folder,
            (fit(0, folder) if strategy is None else run_ranks(fit, 2, folder, strategy)[0]),
        )
    return found


def copied(written, tmp_path, strategy='fsdp'):
    "Return a copy of a folder of checkpoints up to the one within the second epoch."
    tmp_path.mkdir(exist_ok=True)
    for path in sorted(written[strategy][0].glob('0000[123]-*')):
        if path.is_dir():
            shutil.copytree(path, tmp_path / path.name)
        else:
            shutil.copy(path, tmp_path)
    assert sorted(tmp_path.glob('*.ckpt'))[-1].name == '00003-ep1-ba6.ckpt'
    return tmp_path


def test_torch_alone_reads_the_model(written):
    folder, end = written['fsdp']
    parts = find_parts_folder(sorted(folder.glob('*.ckpt'))[-1])
    assert sorted(p.name for p in parts.iterdir()) == ['.metadata', '__0_0.distcp', '__1_0.distcp']
    model = learner().model
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # torch warns of a single process
        torch.distributed.checkpoint.load({'model': model.state_dict()}, checkpoint_id=parts)
    values = [*model.state_dict().values()]
    assert max_difference(values, end[: len(values)]) == 0


def but_train_loss(found):
    "Leave out the loss of the interrupted epoch: each process has the loss of its samples only."
    return [*found[:-1], found[-1][[0, 1, 3]]]


@pytest.mark.parametrize(
    ('before', 'after'),
    [('fsdp', 'fsdp'), ('fsdp', 'ddp'), ('fsdp', None), ('ddp', 'fsdp'), (None, 'fsdp')],
)
def test_a_run_resumes_with_other_processes(written, tmp_path, before, after):
    folder, end = copied(written, tmp_path, before), written[before][1]
    again = (
        [fit(0, folder, None, True)] if after is None else run_ranks(fit, 2, folder, after, True)
    )
    for found in again:
        assert max_difference(but_train_loss(end), but_train_loss(found)) < 1e-6
    if before == after:
        assert max_difference(end, again[0]) == 0


def test_replicas_of_shards_train_and_resume_as_shards_do(written, tmp_path):
    folder, end = written['fsdp']
    whole = tmp_path / 'whole'
    assert (
        max_difference(but_train_loss(end), but_train_loss(run_ranks(fit, 4, whole, 'h-fsdp')[3]))
        < 1e-5
    )
    for before, after, n in ((folder, 'h-fsdp', 4), (whole, 'fsdp', 2), (whole, None, 1)):
        at = copied({'fsdp': (before, None)}, tmp_path / f'{after}{n}')
        found = fit(0, at, None, True) if n == 1 else run_ranks(fit, n, at, after, True)[0]
        assert max_difference(but_train_loss(end), but_train_loss(found)) < 1e-5


def weights(rank, folder, strategy, others):
    "Save weights in one way and load them in all others."
    learn = learner(cbs=EMA(0.9))
    learn.path = Path(folder)
    with learn.no_bar(), learn.no_logging():
        with learn.distributed('fsdp'):
            learn.fit(1)
            learn.save('sharded', with_opt=True)
            sharded = learn.save('weights', with_opt=False)
            learn.load('alone', with_opt=True)
            loaded = [p.full_tensor() for p in learn.model.parameters()]
            averages = [s['exp_avg'].full_tensor() for s in learn.opt.state.values()]
    return str(sharded), loaded, averages


def test_weights_load_with_and_without_a_strategy(tmp_path):
    alone = learner()
    alone.path = tmp_path
    with alone.no_bar(), alone.no_logging():
        alone.fit(1)
    alone.save('alone', with_opt=True)
    for _, loaded, averages in run_ranks(weights, 2, tmp_path, 'fsdp', None):
        assert max_difference(loaded, state_values(alone)) == 0
        assert max_difference(averages, [s['exp_avg'] for s in alone.opt.state.values()]) == 0
    before = state_values(alone)
    alone.load('sharded', with_opt=True)
    assert max_difference(before, state_values(alone)) > 1e-3
    assert {*alone.opt.state} == {*alone.model.parameters()}
    both = [*state_values(alone)]
    alone.load('weights')
    assert max_difference(both, state_values(alone)) == 0


def test_weights_of_a_checkpoint_load(written):
    learn = learner()
    learn.load(sorted(written['fsdp'][0].glob('*.ckpt'))[-1], with_opt=False)
    assert max_difference(state_values(learn), written['fsdp'][1][: len(state_values(learn))]) == 0


# -- what is damaged -------------------------------------------------------------------------------


def remove(path):
    path.unlink()


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def change(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ('harm', 'name'), [(remove, '.metadata'), (cut, '__0_0.distcp'), (change, '.metadata')]
)
def test_what_is_not_whole_is_passed_over(written, tmp_path, harm, name):
    folder = copied(written, tmp_path)
    *_, before, last = sorted(folder.glob('*.ckpt'))
    harm(find_parts_folder(last) / name)
    with pytest.raises(DamagedError, match=f'{last.name} is not a whole checkpoint: .*{name}'):
        find(last, folder)
    with pytest.warns(UserWarning, match=f'{before.name} is used'):
        assert find(True, folder)[0] == before
    with pytest.raises(WeightsError, match='is not a whole checkpoint'):
        learner().load(last)


def mark(path):
    "Create an empty file, as proof that this function was called."
    Path(path).touch()


class Calls:
    "An object pickled as a call of `mark`."

    def __init__(self, path, function=mark):
        self.path, self.function = str(path), function

    def __reduce__(self):
        return self.function, (self.path,)


def attribute(monkeypatch, owner, module, name):
    "Return a function like `mark`, for the time of a test an attribute of `owner`, by which it is pickled."

    def function(path):
        mark(path)

    function.__module__, function.__qualname__ = module, name
    held = staticmethod(function) if isinstance(owner, type) else function
    monkeypatch.setattr(owner, 'mark', held, raising=False)
    return function


def test_a_hostile_folder_runs_nothing(written, tmp_path, monkeypatch):
    "Anyone who can write a folder can write its digests."
    # functions that a pickle finds as attributes of what a description of tensors needs
    of_torch = attribute(monkeypatch, torch.serialization, 'torch', 'serialization.mark')
    of_path = attribute(monkeypatch, Path, 'pathlib', 'Path.mark')
    folder, sentinel = copied(written, tmp_path), tmp_path / 'sentinel'
    path = sorted(folder.glob('*.ckpt'))[-1]
    parts = find_parts_folder(path)
    metadata = (parts / '.metadata').read_bytes()
    bytes_metadata = pickle.loads(metadata)
    name = next(iter(bytes_metadata.state_dict_metadata))
    bytes_metadata.state_dict_metadata[name] = (
        torch.distributed.checkpoint.metadata.BytesStorageMetadata()
    )
    calls = [pickle.dumps(Calls(sentinel, f), 4) for f in (mark, of_torch, of_path)]
    for content in [*calls, pickle.dumps(bytes_metadata), pickle.dumps({'a': 1}), b'']:
        (parts / '.metadata').write_bytes(content)
        with pytest.raises(DamagedError, match=f'{path.name} .*: its parts cannot be read'):
            load_shards(read_state(path)[0], path)
    (parts / '.metadata').write_bytes(metadata)
    (parts / '__0_0.distcp').write_bytes(calls[0] * 1000)
    with pytest.raises(DamagedError, match='cannot be read'):
        load_shards(read_state(path)[0], path)
    assert not sentinel.exists()
    for content in calls:  # each would run
        pickle.loads(content)
        assert sentinel.exists()
        sentinel.unlink()


# -- what goes wrong -------------------------------------------------------------------------------


def no_room(rank, folder, background):
    "Train while one process cannot write files; return the error."
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    try:
        fit(rank, folder, 'fsdp', background=background)
    except (OSError, CheckpointError, DistributedError) as e:
        return type(e).__name__, str(e)


def test_a_disk_error_of_one_process_is_raised_in_all(tmp_path):
    first, second = run_ranks(no_room, 2, tmp_path, True)
    assert first[0] in ('CheckpointError', 'DistributedError')
    assert second[0] in ('OSError', 'CheckpointError')
    assert 'rocess 1' in first[1] and 'File too large' in first[1], first
    assert not list(tmp_path.glob('0*'))


class Dies(Callback):
    "End this process at one of its batches, as SIGKILL does."

    def __init__(self, at):
        self._at = at

    def after_backward(self):
        if self.learn.train_iter == self._at:
            os.kill(os.getpid(), signal.SIGKILL)


def dying(rank, folder, at, who):
    fit(rank, folder, 'fsdp', True, '1ba', [Dies(at)] if rank == who else [])


def test_a_killed_run_resumes_exactly(written, tmp_path):
    for at, who in ((2, 1), (4, 0)):
        with started_ranks(dying, 2, tmp_path, at, who) as children:
            for c in children:
                c.wait(600)
            assert all(c.poll() for c in children)
    for found in run_ranks(fit, 2, tmp_path, 'fsdp', True, '1ba'):
        assert max_difference(found, written['fsdp'][1]) == 0


@pytest.mark.parametrize('strategy', ['fsdp', 'ddp'])
def test_an_empty_folder_resumes_from_a_mirror(written, tmp_path, strategy):
    far, folder = copied(written, tmp_path / 'far', strategy), tmp_path / 'near'
    job = partial(fit, mirror=f'file://{far}')
    for found in run_ranks(job, 2, folder, strategy, True):
        assert max_difference(found, written[strategy][1]) == 0
    newest = sorted(folder.glob('*.ckpt'))[-1]
    files = {p.relative_to(folder) for p in folder.rglob(f'{newest.stem}*/*')} | {Path(newest.name)}
    assert len(files) == (4 if strategy == 'fsdp' else 1)
    assert all((far / file).read_bytes() == (folder / file).read_bytes() for file in files)


def save_without_new_group(rank, folder):
    "Train with checkpoints in parts, and raise an error if a save makes a process group."

    def refuse(*args):
        raise AssertionError('a rank that dies here is noticed only after the timeout')

    dcp.new_host_group = refuse
    fit(rank, folder, 'fsdp', epochs=1)
    return len(list(folder.glob('*.parts')))


def test_a_save_makes_no_process_group(tmp_path):
    assert run_ranks(save_without_new_group, 2, tmp_path / 'a') == [3, 3]
