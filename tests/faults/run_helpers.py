"""Shared by tests of whole runs: trainings in child processes that are signalled and resumed from checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from learnkit import Callback, DataLoaders, Learner
from learnkit.callbacks import Checkpoint
from learnkit.checkpoint.digest import differences, digest
from learnkit.checkpoint.folder import entries, load_state
from tests.faults.fault_helpers import BS, N_TRAIN, N_VALID, make_learner
from tests.helpers.forks import reached, start
from tests.helpers.resuming import scramble

State = dict[str, Any]


class Reach(Callback):
    "Report every event to the harness, alone and with the phase: `after_loss` and `train after_loss`."

    def __init__(self, order: float = 2000) -> None:
        self.__dict__['order'] = order

    def run_event(self, event: str) -> None:
        for name in (event, f'{self.learn.phase} {event}'):
            reached(name)


def torch_dls(
    n_workers: int = 0, n_train: int = N_TRAIN, bs: int = BS, **options: Any
) -> DataLoaders:
    "Return the data of `fault_helpers.make_dls` in torch's loaders."
    g = torch.Generator().manual_seed(7)
    x, v = torch.randn(BS * n_train, 3, generator=g), torch.randn(BS * N_VALID, 3, generator=g)
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    train = DataLoader(dataset, bs, shuffle=True, num_workers=n_workers, **options)
    valid = DataLoader(
        TensorDataset(v, v.sum(1, keepdim=True)), bs, num_workers=n_workers, **options
    )
    return DataLoaders(train, valid, device='cpu')


def quiet(learn: Learner) -> Learner:
    learn.remove_cb(learn.progress)
    learn.logger = lambda row: None
    return learn


def training(
    folder: Path,
    make: Callable[[], Learner] = lambda: make_learner(dls=torch_dls()),
    n_epoch: int = 8,
    order: float = 2000,  # of the callback that names events
    before: Callable[[Learner], Any] = lambda learn: None,
    **options: Any,  # for Checkpoint
) -> Callable[[], State]:
    "Return a job that trains or resumes, and returns everything that training depends on."

    def train() -> State:
        scramble(0)
        learn = quiet(make())
        if any(folder.glob('*.ckpt')):
            scramble(id(learn) % 1000)
        before(learn)
        learn.add_cb(Reach(order))
        cbs = Checkpoint(**{'every': None, 'folder': folder, **options})
        learn.fit(n_epoch, resume=True, cbs=cbs)
        learn.remove_cbs(Reach)
        return learn.checkpoint_state()

    return train


def in_child(job: Callable[[], Any]) -> Any:
    "Return the result of a job in a child process, which must succeed."
    with start(job) as child:
        code = child.wait()
        assert code == 0, child.stderr
        return child.result


def same(a: State, b: State) -> bool:
    found = differences(a, b)
    assert not found, '\n'.join(found)
    return True


def checkpointed(folder: Path, **options: Any) -> Callable[..., Learner]:
    "Return a function that makes a quiet Learner with a Checkpoint, and callbacks before it."

    def make(*cbs: Any, **kwargs: Any) -> Learner:
        scramble(0)
        return quiet(make_learner([*cbs, Checkpoint(**{'folder': folder, **options})], **kwargs))

    return make


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob('*.ckpt'))


def all_load(folder: Path) -> bool:
    "Load every checkpoint of a folder, and check that the folder has no other files."
    assert {p.name for p in folder.iterdir()} - set(names(folder)) <= {'.lock'}
    return all(load_state(e.path)[0] for e in entries(folder))


def content(learn: Learner) -> str:
    "Digest what a load would change: weights, buffers, and the optimizer's state."
    return digest([learn.model.state_dict(), learn.opt and learn.opt.state_dict()['state']])
