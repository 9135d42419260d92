"""The callback `Checkpoint`: when it writes, which files it keeps, errors, and concurrent changes."""

import threading
import weakref
from concurrent.futures import wait
from pathlib import Path
from threading import Event, Timer
from time import sleep
from typing import Any

import pytest
import torch
from fastcore.basics import noop
from safetensors.torch import load_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from learnkit import (
    Callback,
    CheckpointError,
    DataLoaders,
    Learner,
    MetricError,
    OptionError,
    TimeError,
)
from learnkit.callbacks import Checkpoint, checkpoint as module
from learnkit.callbacks.progress import ProgressCallback
from learnkit.checkpoint import host
from learnkit.checkpoint.digest import differences
from learnkit.checkpoint.folder import entries, load_state
from learnkit.metrics import mae
from tests.helpers.fresh import OPTIMIZER_MODULES, output_of

N = 5  # batches an epoch, of 4 samples each


def make(*cbs: Any, path: Any = '.', **kwargs: Any) -> Learner:
    torch.manual_seed(0)
    x = torch.randn(4 * N, 3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    dls = DataLoaders.from_tensors((x, x[:, :1]), (x[:8], x[:8, 1:2]), bs=4, seed=1)
    learn = Learner(dls, model, nn.MSELoss(), cbs=list(cbs), lr=0.05, path=path, **kwargs)
    learn.remove_cbs(ProgressCallback)
    learn.logger = noop
    return learn


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob('*.ckpt'))


def batches(folder: Path) -> list[int]:
    return [e.info['ba'] for e in reversed(entries(folder))]


# -- when ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('every', 'expected'),
    [
        ('1ep', [5, 10, 15]),
        (2, [10, 15]),
        ('4ba', [4, 8, 12, 15]),
        ('0.2dur', [3, 6, 9, 12, 15, 15]),
        (None, [15]),
        ('6st', [6, 12, 15]),
        ('24sp', [6, 12, 15]),
        ('1iter', [10, 15]),
        ('1h', [15]),
        ('100ep', [15]),
    ],
)
def test_when_it_writes(every: Any, expected: list[int], tmp_path: Path) -> None:
    learn = make(Checkpoint(every, tmp_path, keep_last=None))
    learn.fit(3, iteration=2)
    assert batches(tmp_path) == expected
    numbers = [int(name[:5]) for name in names(tmp_path)]
    assert numbers == list(range(1, len(expected) + 1))


def test_the_end_of_a_fit_that_was_stopped_or_has_a_budget(tmp_path: Path) -> None:
    def stop(cb: Any) -> None:
        if cb.train_iter == 7:
            cb.learn.stop()

    make(Callback(after_step=stop), Checkpoint(None, tmp_path / 'a')).fit(9)
    make(Checkpoint(None, tmp_path / 'b')).fit('7ba')
    make(Checkpoint('3ba', tmp_path / 'c', keep_last=None)).fit(0)
    assert batches(tmp_path / 'a') == [8]
    assert batches(tmp_path / 'b') == [7]
    assert names(tmp_path / 'c') == []


@pytest.mark.parametrize('options', [{'every': '1tok'}, {'every': 0}, {'every': 'often'}])
def test_intervals_that_cannot_be_followed(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(TimeError):
        make(Checkpoint(folder=tmp_path, **options)).fit(1)


@pytest.mark.parametrize(
    'options',
    [
        {'keep_last': 0},
        {'keep_best': -1},
        {'mode': 'less'},
        {'monitor': 'my_score'},
        {'monitor': len},
    ],
)
def test_options_that_cannot_be_followed(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        Checkpoint(**options)


def test_what_is_not_recorded_cannot_be_watched(tmp_path: Path) -> None:
    learn = make(Checkpoint(folder=tmp_path, monitor='acuracy', mode='max'), metrics=mae)
    with pytest.raises(MetricError, match='acuracy'):
        learn.fit(1)
    with pytest.raises(MetricError):
        make(Checkpoint(monitor='valid_loss', folder=tmp_path), default_cbs=False).fit(1)
    assert names(tmp_path) == []


# -- what stays ------------------------------------------------------------------------------------


def losses(*values: float) -> Callback:
    "Set the validation loss of each epoch."

    def loss(cb: Any) -> None:
        if not cb.training and cb.fitting:
            cb.learn.loss = torch.tensor(values[min(cb.epoch, len(values) - 1)])

    return Callback(after_loss=loss)


def epochs(folder: Path) -> list[int]:
    return [int(n.split('-')[1][2:]) for n in names(folder)]


@pytest.mark.parametrize(
    ('keep_last', 'keep_best', 'mode', 'expected'),
    [
        (1, 1, None, [2, 6]),
        (2, 1, 'max', [4, 5, 6]),
        (1, 2, 'min', [2, 3, 6]),
        (None, 0, None, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_the_newest_and_best(
    keep_last: Any, keep_best: int, mode: Any, expected: list[int], tmp_path: Path
) -> None:
    make(
        losses(4.0, 1.0, 1.0, 9.0, 5.0, 6.0),
        Checkpoint('1ep', tmp_path, keep_last, keep_best, mode=mode),
    ).fit(6)
    assert epochs(tmp_path) == expected


def test_without_validation_no_checkpoint_is_best(tmp_path: Path) -> None:
    x = torch.randn(8, 3)
    learn = make(Checkpoint(folder=tmp_path, keep_last=1))
    learn.dls = DataLoaders.from_tensors((x, x[:, :1]), bs=4)
    learn.fit(3)
    assert epochs(tmp_path) == [3] and 'value' not in entries(tmp_path)[0].info
    with pytest.raises(CheckpointError, match='None has a monitored value'):
        learn.fit(4, resume='best')


# -- run after run ---------------------------------------------------------------------------------


def test_fits_of_one_learner(tmp_path: Path) -> None:
    "File numbers continue, each fit deletes only its own files, and a class may be given instead of an instance."
    learn = make(Checkpoint, path=tmp_path)
    for _ in range(2):
        learn.fit(5)
    folder = tmp_path / 'checkpoints'
    assert [int(n[:5]) for n in names(folder)][-3:] == [8, 9, 10] and 6 <= len(names(folder)) <= 8
    assert len({e.info['run'] for e in entries(folder)}) == 2
    learn.fit(7, resume=True)
    assert int(names(folder)[-1][:5]) == 12 and len({e.info['run'] for e in entries(folder)}) == 2
    assert [row['epoch'] for row in learn.history][-7:] == [0, 1, 2, 3, 4, 5, 6]


def test_a_callback_for_a_single_fit(tmp_path: Path) -> None:
    learn = make(path=tmp_path)
    learn.fit(1, cbs=Checkpoint)
    learn.fit(2, cbs=Checkpoint(), resume=True)
    assert epochs(tmp_path / 'checkpoints') == [1, 2] and not hasattr(learn, 'checkpoint')


@pytest.mark.parametrize('which', [True, 'path', 'folder', 'best'])
def test_ways_to_resume(which: Any, tmp_path: Path) -> None:
    straight = make(losses(1.0, 3.0), Checkpoint('3ba', tmp_path, keep_last=None))
    straight.fit(3)
    end, there = straight.checkpoint_state(), names(tmp_path)
    resume = {'path': tmp_path / there[1], 'folder': str(tmp_path)}.get(which, which)
    learn = make(losses(1.0, 3.0), Checkpoint('3ba', tmp_path, keep_last=None))
    torch.manual_seed(99)
    learn.fit(3, resume=resume)
    assert not (found := differences(end, learn.checkpoint_state())), found


def test_nothing_there_yet_begins(tmp_path: Path) -> None:
    learn = make(Checkpoint(folder=tmp_path / 'new'))
    learn.fit(1, resume=True)
    assert len(learn.history) == 1 and epochs(tmp_path / 'new') == [1]
    with pytest.raises(CheckpointError, match='There is no checkpoint'):
        make(path=tmp_path / 'x').fit(1, resume='latest')


# -- what goes wrong -------------------------------------------------------------------------------


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> Any:
    "Return a function that replaces every write by `f(n, write)`, `n` being the number of the write."

    def install(f: Any) -> None:
        real, n = module.write_state, [0]

        def save(*args: Any) -> None:
            n[0] += 1
            f(n[0], lambda: real(*args))

        monkeypatch.setattr(module, 'write_state', save)

    return install


def failing(at: int, error: BaseException) -> Any:
    def write(n: int, real: Any) -> None:
        if n == at:
            raise error
        real()

    return write


def test_an_error_in_the_background_comes_at_the_next_batch(writing: Any, tmp_path: Path) -> None:
    writing(failing(2, error := OSError(28, 'No space left on device')))
    threads = threading.active_count()

    def wait_for_the_write(cb: Any) -> None:
        if (future := cb.learn.checkpoint._writing) is not None:
            wait([future])

    learn = make(Callback(after_batch=wait_for_the_write), Checkpoint('2ba', tmp_path))
    with pytest.raises(OSError, match='No space left') as caught:
        learn.fit(2)
    assert caught.value is error and batches(tmp_path) == [2] and learn.opt.n_steps == 5
    assert any('in Checkpoint.batch_checkpoint (epoch 0, batch 4)' in n for n in error.__notes__)
    assert learn.checkpoint._lock is None and threading.active_count() == threads
    learn.fit(2, resume=True)


def test_the_first_error_stays_and_the_write_is_waited_for(writing: Any, tmp_path: Path) -> None:
    def slow(n: int, real: Any) -> None:
        sleep(0.1)
        real()

    threads = threading.active_count()
    writing(slow)
    for error in (ValueError('a bug'), KeyboardInterrupt()):

        def fail(cb: Any, error: BaseException = error) -> None:
            if cb.training and cb.iter == 1:
                raise error

        learn = make(Callback(after_loss=fail), Checkpoint('1ba', tmp_path, keep_last=1))
        with pytest.raises(type(error)):
            learn.fit(1)
        assert len(names(tmp_path)) and threading.active_count() == threads
        assert all(load_state(e.path) for e in entries(tmp_path))
        assert not list(tmp_path.glob('.*tmp*'))


def test_training_does_not_wait_for_the_disk(writing: Any, tmp_path: Path) -> None:
    order: list[str] = []
    may_write, has_trained = Event(), Event()

    def slow(n: int, real: Any) -> None:
        assert (may_write if n == 1 else has_trained).wait(600)
        real()
        order.append(f'written {n}')

    def end(cb: Any) -> None:
        order.append(f'batch {cb.train_iter}')
        if cb.train_iter == 1:
            Timer(0.2, may_write.set).start()  # while the second save begins
        else:
            has_trained.set()

    writing(slow)
    late = Callback(batch_checkpoint=end)
    late.order = 2000
    make(late, Checkpoint('1ba', tmp_path)).fit(1)
    assert order[:3] == ['batch 1', 'written 1', 'batch 2'], (
        'the first returns at once, the second waits for it'
    )


@pytest.mark.filterwarnings('ignore:These attributes changed since the fit began')
def test_what_is_written_is_the_state_of_its_batch(writing: Any, tmp_path: Path) -> None:
    "Training continues during a slow write."
    writing(lambda n, real: (sleep(0.05), real()))
    kept: dict[int, Any] = {}
    keep = Callback(
        batch_checkpoint=lambda cb: kept.update({cb.learn.time.ba: cb.learn.checkpoint_state()})
    )
    keep.order = 2000
    make(keep, Checkpoint('2ba', tmp_path, keep_last=None)).fit(2)
    for e in entries(tmp_path):
        if e.info['point'] != 'batch':
            continue
        found = [
            d for d in differences(kept[e.info['ba']], load_state(e.path)[0]) if 'sec' not in d
        ]
        assert not found, found


def tensors_of(state: Any) -> dict[str, torch.Tensor]:
    "Return the weights and the momentum of a state."
    momentum = {f'{i}': s['momentum_buffer'] for i, s in state['optimizer']['state'].items()}
    return {**state['model'], **momentum}


def with_momentum(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


@pytest.mark.filterwarnings('ignore:These attributes changed since the fit began')
@pytest.mark.parametrize('min_mapped', [1, 1 << 30], ids=['mapped', 'allocated'])
def test_the_background_copies_into_the_memory_of_the_last_copy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, min_mapped: int
) -> None:
    "And what is written late is the state of its batch, the copy is freed at the end, and a new fit starts again."
    monkeypatch.setattr(host, '_MIN_MAPPED', min_mapped)
    real = module.write_state
    seen: list[dict[str, int]] = []
    alive: list[Any] = []
    expected: list[dict[str, torch.Tensor]] = []

    def write(path: Any, state: Any, info: Any) -> None:
        sleep(0.02)
        tensors = tensors_of(state)
        seen.append({name: t.data_ptr() for name, t in tensors.items()})
        alive.extend(map(weakref.ref, tensors.values()))
        real(path, state, info)

    def keep(cb: Any) -> None:
        state = {'model': cb.model.state_dict(), 'optimizer': cb.opt.state_dict()}
        expected.append({name: t.clone() for name, t in tensors_of(state).items()})

    monkeypatch.setattr(module, 'write_state', write)
    learn = make(
        Callback(batch_checkpoint=keep),
        Checkpoint('1ba', tmp_path, keep_last=None),
        opt_func=with_momentum,
    )
    learn.fit(1)
    assert len(seen) == N + 1 and all(pointers == seen[0] for pointers in seen)
    assert not {p.data_ptr() for p in learn.model.parameters()} & set(seen[0].values())
    assert [ref for ref in alive if ref() is not None] == []
    for e, tensors in zip(reversed(entries(tmp_path)), expected, strict=False):
        written = tensors_of(load_state(e.path)[0])
        assert all(written[name].equal(t) for name, t in tensors.items())
    learn.fit(1)
    assert len(seen) == 2 * (N + 1)


def test_the_foreground_copies_no_tensor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    "The tensors that are written are the tensors that are trained; a save makes no storage as large as a weight."
    wide = nn.Sequential(nn.Linear(3, 4000), nn.Linear(4000, 1))
    learn = make(Checkpoint(None, tmp_path, background=False), opt_func=with_momentum)
    learn.model = wide
    new: list[int] = []
    real = module.write_state
    written: list[dict[str, int]] = []

    def write(path: Any, state: Any, info: Any) -> None:
        written.append({name: t.data_ptr() for name, t in tensors_of(state).items()})
        real(path, state, info)

    def save(cb: Any) -> None:
        state = {'model': cb.model.state_dict(), 'optimizer': cb.opt.state_dict()}
        own = {name: t.data_ptr() for name, t in tensors_of(state).items()}
        with Largest(set(own.values())) as largest:
            cb.learn.checkpoint.save()
        assert written[-1] == own
        new.append(largest.nbytes)

    monkeypatch.setattr(module, 'write_state', write)
    learn.add_cb(Callback(batch_checkpoint=save))
    learn.fit(1)
    assert len(new) == N and max(new) < 8000, 'the smallest weight has 12 to 16 kB'


class Largest(TorchDispatchMode):
    "Note the size of the largest storage that an operation returns and that is not known."

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.known = known
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.data_ptr() not in self.known:
            self.nbytes = max(self.nbytes, out.untyped_storage().nbytes())
        return out


# -- with other callbacks --------------------------------------------------------------------------


def test_a_callback_may_save(tmp_path: Path) -> None:
    paths: list[Path] = []

    def save(cb: Any) -> None:
        if cb.training and cb.iter == 2:
            paths.append(cb.learn.checkpoint.save())

    learn = make(Callback(batch_checkpoint=save), Checkpoint(None, tmp_path))
    learn.fit(1)
    assert [p.name for p in paths] == ['00001-ep0-ba3.ckpt'] and all(p.exists() for p in paths)
    for event in ('after_batch', 'before_epoch', 'after_fit', 'after_validate'):
        wrong = Callback(**{event: lambda cb: cb.learn.checkpoint.save()})
        with pytest.raises(CheckpointError, match='batch_checkpoint'):
            learn.fit(1, cbs=wrong)
    with pytest.raises(CheckpointError, match='batch_checkpoint'):
        learn.checkpoint.save()


def test_nothing_is_written_outside_of_fits(tmp_path: Path) -> None:
    learn = make(Checkpoint('1ba', tmp_path / 'run'), path=tmp_path)
    learn.validate()
    learn.get_preds()
    learn.lr_find(num_it=8, show_plot=False)
    assert learn.check_resume(4)
    assert not (tmp_path / 'run').exists()
    nested = Callback(after_batch=lambda cb: cb.learn.validate() if cb.training else None)
    learn.fit(1, cbs=nested)
    assert len(names(tmp_path / 'run')) == 3 and learn.checkpoint._lock is None


def test_it_may_come_and_go_in_the_middle_of_a_fit(tmp_path: Path) -> None:
    def change(cb: Any) -> None:
        if cb.epoch == 1:
            cb.learn.add_cb(Checkpoint('1ba', tmp_path, keep_last=None))
        if cb.epoch == 2:
            cb.learn.remove_cb(Checkpoint)

    learn = make(Callback(before_train=change))
    learn.fit(3)
    assert batches(tmp_path) == [7, 8, 9, 10], 'its interval begins after its first batch'
    learn.fit(1, cbs=Checkpoint(folder=tmp_path))  # the folder is free


def test_the_interval_continues_after_a_resume(tmp_path: Path) -> None:
    make(Checkpoint('4ba', tmp_path / 'a', keep_last=None)).fit(4)
    path = tmp_path / 'a' / names(tmp_path / 'a')[0]
    make(Checkpoint('4ba', tmp_path / 'b', keep_last=None)).fit(4, resume=path)
    assert batches(tmp_path / 'b') == batches(tmp_path / 'a')[1:] == [8, 12, 16, 20, 20]


def test_the_header_of_a_file(tmp_path: Path) -> None:
    learn = make(Checkpoint(folder=tmp_path))
    learn.fit(2)
    info = entries(tmp_path)[0].info
    assert info['value'] == learn.history[-1]['valid_loss'] and info['monitor'] == 'valid_loss'
    assert (info['point'], info['epoch'], info['ba'], info['format']) == ('epoch', 1, 10, 3)
    tensors = load_file(tmp_path / names(tmp_path)[-1])  # by the library alone
    assert torch.equal(tensors['model.0.weight'], learn.model[0].weight)


# -- pauses ----------------------------------------------------------------------------------------

PAUSED = """
import sys, torch
from torch import nn
from learnkit import Checkpoint, DataLoaders, Learner

folder, step = sys.argv[1:]
torch.manual_seed(0)
x = torch.randn(20, 3)
dls = DataLoaders.from_tensors((x, x.sum(1, keepdim=True)), bs=4, seed=1)
model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))
cbs = Checkpoint(None, on_pause=True)
learn = Learner(dls, model, nn.MSELoss(), lr=0.1, path=folder, cbs=cbs)
learn.logger = lambda row: None
if step == 'pause':
    learn.fit_one_cycle(3, pause_at='7ba')
    learn.resume(lr_scale=0.5, pause_at='9ba')
elif step == 'interrupt':
    import signal

    def press(module, args):
        if learn.time.ba == 10:
            signal.raise_signal(signal.SIGINT)

    model.register_forward_pre_hook(press)
    try:
        learn.fit_one_cycle(3, resume=True)
    except KeyboardInterrupt as e:
        print(e)
else:
    if step == 'straight':
        learn.fit_one_cycle(3, pause_at='7ba')
        learn.resume(lr_scale=0.5)
    else:
        torch.manual_seed(9)
        learn.fit_one_cycle(3, resume=True)
    print(learn.history.changes)
    print([p.tolist() for p in model.parameters()], learn.time.ba)
"""


def test_a_pause_is_resumed_in_a_new_process(tmp_path: Path) -> None:
    straight = output_of(PAUSED, tmp_path / 'straight', 'straight', has=OPTIMIZER_MODULES)
    folder = tmp_path / 'checkpoints'
    output_of(PAUSED, tmp_path, 'pause', has=OPTIMIZER_MODULES)
    names = ['00001-ep1-ba7.ckpt', '00002-ep1-ba9.ckpt', '00003-ep2-ba11.ckpt']
    assert sorted(p.name for p in folder.glob('*.ckpt')) == names[:2]
    assert '11ba' in output_of(PAUSED, tmp_path, 'interrupt', has=OPTIMIZER_MODULES)
    assert sorted(p.name for p in folder.glob('*.ckpt')) == names
    resumed = output_of(PAUSED, tmp_path, 'resume', has=OPTIMIZER_MODULES)
    assert resumed.splitlines()[-2:] == straight.splitlines()[-2:]


def test_a_pause_has_one_checkpoint(tmp_path: Path) -> None:
    learn = make(Checkpoint('2ba', keep_last=None, on_pause=True), path=tmp_path)
    learn.fit(2, pause_at='4ba')
    learn.resume(pause_at='1ep')
    learn.resume(pause_at='7ba')
    learn.resume()
    found = [(e.info['point'], e.info['ba']) for e in entries(tmp_path / 'checkpoints')]
    expected = [('batch', n) for n in (2, 4, 6, 7, 8, 10)]
    assert sorted(found) == sorted([*expected, ('epoch', 5), ('epoch', 10)])


def test_a_pause_writes_nothing_unless_asked(tmp_path: Path) -> None:
    learn = make(Checkpoint(None), path=tmp_path)
    learn.fit(2, pause_at='4ba')
    assert not list((tmp_path / 'checkpoints').glob('*.ckpt'))
