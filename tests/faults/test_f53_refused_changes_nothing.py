"""Row 53: a forged state, and an error or a Cancel before a resumed fit has trained a batch. Nothing has changed.

A digest of model, optimizer, loose buffers, flags, counters, generators, callbacks and loader is as it was before."""

import errno
import os
from collections.abc import Iterator
from functools import cache
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from learnkit import EMA, Callback, Checkpoint, DataLoaders, Learner
from learnkit.callbacks import GradientAccumulation
from learnkit.checkpoint import folder
from learnkit.checkpoint.digest import digest
from learnkit.checkpoint.state import collect_state
from learnkit.core.errors import CancelFitException, CheckpointError, LearnkitError
from learnkit.core.random import seed_all
from tests.faults.run_helpers import quiet

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
REMOVED = object()
NEW = [REMOVED, None, 'x', -1, nan, [], {}, torch.ones(7, 2), torch.ones(2, device='meta')]


def make(*cbs: Any, path: Path = Path()) -> Learner:
    seed_all(3)  # a forged state of the last Learner's generators may have been accepted
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(TensorDataset(X, X[:, :1]), batch_size=4, shuffle=True, generator=generator)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))
    model[2].register_buffer('loose', torch.ones(2), persistent=False)
    cbs = (EMA(), GradientAccumulation(8), *cbs)
    learn = Learner(DataLoaders(loader, loader), model, nn.MSELoss(), lr=0.01, cbs=cbs, path=path)
    learn.create_opt()
    return quiet(learn)


def content(learn: Learner) -> str:
    "Return a digest of all that a resume can change."
    state = collect_state(learn, '')
    loop = {name: state['loop'][name] for name in ('epoch', 'train_iter', 'done', 'n_steps')}
    parts = {
        name: state[name] for name in ('model', 'buffers', 'rng', 'callbacks', 'frozen', 'grads')
    }
    flags = [p.requires_grad for p in learn.model.parameters()]
    generator = learn.dls.train.generator.get_state()
    return digest(
        {**parts, 'loop': loop, 'opt': learn.opt.state_dict(), 'flags': flags, 'g': generator}
    )


def saved() -> dict[str, Any]:
    "Return a state in the middle of an epoch and of an accumulation."
    states: list[dict[str, Any]] = []
    keep = Callback(batch_checkpoint=lambda cb: states.append(cb.learn.checkpoint_state()))
    make(keep).fit(2)
    return states[7]


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    "Yield the keys that lead to each entry."
    items: Any = value.items() if isinstance(value, dict) else ()
    if isinstance(value, (list, tuple)) and len(value) < 20:
        items = enumerate(value)
    for key, entry in items:
        yield (*path, key)
        yield from paths(entry, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    "Return a copy with another entry at a path."
    if not path:
        return new
    key, *rest = path
    copy = dict(value) if isinstance(value, dict) else list(value)
    if not rest and new is REMOVED:
        del copy[key]
    else:
        copy[key] = replaced(value[key], tuple(rest), new)
    return copy if isinstance(value, dict) else type(value)(copy)


def _has(learn: Learner, expected: str) -> bool:
    try:
        return content(learn) == expected
    except Exception:  # a forged state of the Recorder fails in many ways
        return False


def try_all(state: dict[str, Any], forgeries: list[tuple[tuple[Any, ...], Any]]) -> dict[str, int]:
    "Resume from each forgery; return how many were refused, were rolled back by another error, or train."
    counts = {'refused': 0, 'rolled back': 0, 'trained': 0}
    for path, new in forgeries:
        learn = make()
        before = content(learn)
        try:
            learn.fit(2, resume=replaced(state, path, new))
        except Exception as e:
            is_kept = _has(learn, before)
            # the Recorder draws its rows later
            assert is_kept or path[0] == 'callbacks', (path, new)
            counts['refused' if isinstance(e, LearnkitError) else 'rolled back'] += is_kept
        else:
            counts['trained'] += 1
    return counts


@pytest.mark.filterwarnings('ignore')  # an entry of a callback may be missing
def test_forged_states() -> None:
    state = saved()
    shallow = [
        path for path in paths(state) if len(path) < 3 and path[0] not in ('callbacks', 'model')
    ]
    forgeries = [(path, new) for i, path in enumerate(shallow) for new in NEW[i % 4 :: 4]]
    counts = try_all(state, forgeries)
    assert counts['refused'] > 90 and counts['refused'] > 0.8 * len(forgeries)


@pytest.mark.full
@pytest.mark.filterwarnings('ignore')
def test_every_entry_of_a_state_in_every_wrong_way() -> None:
    state = saved()
    counts = try_all(state, [(path, new) for path in paths(state) for new in NEW])
    print(f'forged states: {counts}')
    assert counts['refused'] > 1000


EVENTS = (
    'before_load',
    'before_fit',
    'before_epoch',
    'before_train',
    'before_batch',
    'after_loss',
    'before_step',
)


@cache
def train_fresh() -> dict[str, torch.Tensor]:
    "Return the weights of a Learner that trains without a resume."
    learn = make()
    learn.fit(2)
    weights: dict[str, torch.Tensor] = learn.model.state_dict()
    return weights


@pytest.mark.parametrize('error', [ValueError, KeyboardInterrupt, CancelFitException])
@pytest.mark.parametrize('event', EVENTS)
def test_an_error_before_the_first_batch_is_trained(event: str, error: type[BaseException]) -> None:
    state = saved()

    def fail(cb: Callback) -> None:
        if cb.training or event in ('before_load', 'before_fit', 'before_epoch'):
            raise error('no')

    if error is CancelFitException and event not in ('before_fit', 'before_epoch', 'before_train'):
        return  # not legal there, or the checkpoint is in place, and the fit ends there
    learn = make()
    before = content(learn)
    cancels = error is CancelFitException
    context: Any = (
        pytest.warns(UserWarning, match='cancelled before') if cancels else pytest.raises(error)
    )
    with context:
        learn.fit(2, resume=state, cbs=Callback(**{event: fail}))
    assert content(learn) == before and not learn.resumed and learn.time.ba == 0
    learn.fit(2)
    weights = train_fresh()
    assert all(torch.equal(t, weights[name]) for name, t in learn.model.state_dict().items())


@pytest.mark.parametrize('code', [errno.EIO, errno.EACCES, errno.ELOOP])
def test_a_file_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    "The next older one is used, with a warning; the only one is an error. Both name the file."
    learn = make(Checkpoint('3ba', keep_last=None), path=tmp_path)
    learn.fit(1)
    newest, older = (entry.path for entry in folder.entries(tmp_path / 'checkpoints')[:2])
    if code == errno.ELOOP:
        newest.unlink()
        newest.symlink_to(newest)
    else:
        read = folder.read_state

        def fail(path: Path, deferred: Any) -> Any:
            if Path(path) == newest:
                raise OSError(code, os.strerror(code), str(path))
            return read(path, deferred)

        monkeypatch.setattr(folder, 'read_state', fail)
    with pytest.warns(UserWarning, match=f'{newest.name} cannot be read: .*') as caught:
        found = folder.find(True, tmp_path / 'checkpoints')
    assert found is not None and found[0] == older and older.name in str(caught[0].message)
    with pytest.raises(CheckpointError, match=f'{newest.name} cannot be read'):
        folder.find(newest, tmp_path)


@pytest.mark.filterwarnings('ignore:Validating sparse tensor invariants')
@pytest.mark.parametrize('kind', ['sparse_coo', 'meta', 'str'])
def test_weights_that_cannot_be_copied(tmp_path: Path, kind: str) -> None:
    learn = make(path=tmp_path)
    weights: dict[str, Any] = dict(learn.model.state_dict())
    t = weights['3.weight'] + 1
    weights['3.weight'] = {'sparse_coo': t.to_sparse(), 'meta': t.to('meta'), 'str': 'x'}[kind]
    weights['0.weight'] = weights['0.weight'] + 1
    torch.save(weights, tmp_path / 'w.pth')
    before = content(learn)
    with pytest.raises(LearnkitError, match=r'3.weight|state dict'):
        learn.load(tmp_path / 'w.pth')
    assert content(learn) == before


def test_a_log_after_an_error_before_the_first_checkpoint_has_no_row_twice(tmp_path: Path) -> None:
    from learnkit.loggers import JSONLinesLogger
    from learnkit.loggers.files import read_log

    def run(fails_at: int) -> None:
        def fail(cb: Callback) -> None:
            if cb.training and cb.train_iter == fails_at:
                raise ValueError('no')

        log = JSONLinesLogger(every='1ba')
        make(Callback(before_batch=fail), Checkpoint('1ep'), log, path=tmp_path).fit(2, resume=True)

    with pytest.raises(ValueError, match='no'):
        run(fails_at=3)
    with pytest.warns(UserWarning, match='metrics-before.jsonl'):
        run(fails_at=-1)
    assert [row['step'] for row in read_log(tmp_path / 'metrics.jsonl')] == list(range(1, 11))
    assert len(read_log(tmp_path / 'metrics-before.jsonl')) == 3
