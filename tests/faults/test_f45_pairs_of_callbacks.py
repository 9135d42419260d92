"""Row 45: a run with any two callbacks or loggers of the package is killed. The resumed run ends in the same state.

The ordinary form trains groups in which every two classes meet; the full one kills and resumes each pair alone."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path

import pytest

from learnkit import Callback, Learner
from learnkit.callbacks import Checkpoint
from learnkit.checkpoint.digest import WALL_CLOCK, differences
from learnkit.checkpoint.folder import entries
from learnkit.core.errors import MissingExtraError, OptionError
from tests.faults.run_helpers import Reach, State
from tests.helpers.every_callback import DEFAULTS, RESUMED, learner, make_to_resume, weights
from tests.helpers.harness import run_until_done
from tests.helpers.resuming import scramble

Group = tuple[str, ...]
Pair = tuple[str, str]

CLASSES = {cls.__name__: cls for cls in RESUMED if cls not in DEFAULTS}
# services give each run a number, the first time that a logger writes
LEFT_OUT = (*WALL_CLOCK, 'callbacks.mlflow_logger.id', 'callbacks.wandb_logger.id')
# each fit takes a second: in the full form alone
SLOW = {'WandbLogger', 'ExportForInference'}
# what no fit accepts together
REFUSED: set[frozenset[str]] = {
    *map(frozenset, combinations(('CutMix', 'MixHandler', 'MixUp'), 2)),
    frozenset({'GradientAccumulation', 'SAM'}),
}
GROUP_SIZE = 45
N_EPOCH, KILLED_AT = 2, 2  # epochs of 4 batches, of which two callbacks may skip 6


class CopyFolder(Callback):
    "Copy the folder of a run as it is when a process is killed after a batch."

    order = 2000  # after the checkpoint

    def __init__(self, folder: Path, copy: Path) -> None:
        self._folder, self._copy = folder, copy

    def batch_checkpoint(self) -> None:
        if self.learn.time.ba == KILLED_AT:
            shutil.copytree(self._folder, self._copy)

    def state_dict(self) -> None:
        return None


def all_pairs(names: Iterable[str]) -> list[Pair]:
    return [pair for pair in combinations(sorted(names), 2) if frozenset(pair) not in REFUSED]


def cover_pairs(names: Iterable[str], size: int) -> Iterator[Group]:
    "Yield groups of so many names in which every two meet: each next name has met the fewest of the group."
    left = set(map(frozenset, all_pairs(names)))
    while left:
        group = sorted(min(left, key=sorted))
        while len(group) < size:
            gains = {
                name: sum(frozenset({name, other}) in left for other in group)
                for name in sorted(set(names) - set(group))
                if not any(frozenset({name, other}) in REFUSED for other in group)
            }
            name = max(gains, key=gains.__getitem__, default='')
            if not gains.get(name):
                break
            group.append(name)
        left -= set(map(frozenset, combinations(group, 2)))
        yield tuple(sorted(group))


def make(path: Path, names: Sequence[str]) -> Learner:
    "Return a Learner with callbacks of these classes."
    needed = ['RNNCallback'] if 'RNNRegularizer' in names and 'RNNCallback' not in names else []
    cbs = [make_to_resume(CLASSES[name]) for name in (*needed, *names)]
    learn = learner(path, *cbs, rnn=any('RNN' in name for name in names), eval_every='3ba')
    learn.remove_cb(learn.progress)
    learn.logger = lambda row: None
    return learn


def fit(path: Path, names: Sequence[str], *more: Callback) -> State:
    "Train or resume from the newest checkpoint, and return the final state."
    kept = path / 'kept'
    is_resumed = any(kept.glob('*.ckpt'))
    scramble(0)
    learn = make(path, names)
    if is_resumed:
        scramble(1)
    saver = Checkpoint('1ba', kept, keep_last=None, background=False)
    learn.fit(N_EPOCH, resume=kept if is_resumed else False, cbs=[saver, *more])
    state = learn.checkpoint_state()
    learn.close()
    return state


def resumed_differs(folder: Path, names: Sequence[str]) -> list[str]:
    "Train, and resume from the folder after a batch; return the differences at the end."
    path, copy = folder / '1' / 'run', folder / '2' / 'run'
    straight = fit(path, names, CopyFolder(path, copy))
    resumed = fit(copy, names, CopyFolder(copy, folder))
    return differences(straight, resumed, LEFT_OUT)


@pytest.mark.filterwarnings('ignore:Both ParamScheduler and')
@pytest.mark.parametrize('group', list(cover_pairs(set(CLASSES) - SLOW, GROUP_SIZE)))
def test_groups(tmp_path: Path, group: Group) -> None:
    found = resumed_differs(tmp_path, group)
    assert not found, '\n'.join([', '.join(group), *found])


@pytest.mark.parametrize(
    'pair', sorted(REFUSED, key=sorted), ids=lambda pair: '-'.join(sorted(pair))
)
def test_pairs_that_are_refused(tmp_path: Path, pair: frozenset[str]) -> None:
    "Before the first step, by name."
    learn = make(tmp_path, sorted(pair))
    with pytest.raises(OptionError) as e:
        learn.fit(1)
    assert learn.time.ba == 0 and all(name in str(e.value) for name in pair)


def killed_differs(folder: Path, names: Sequence[str]) -> list[str]:
    "Train in one process, and in two processes of which the first is killed; return the differences."

    def job(path: Path, reach: Callable[[], Callback]) -> State:
        return fit(path, names, reach())

    straight = run_until_done(partial(job, folder / '1' / 'run', Reach))
    path = folder / '2' / 'run'
    killed = run_until_done(partial(job, path, Reach), kill=[('train before_step', KILLED_AT)])
    assert killed.kills == 1 and entries(path / 'kept')
    return differences(straight.result, killed.result, LEFT_OUT)


def is_installed(name: str) -> bool:
    "Return True if the library that a class needs is installed."
    try:
        make_to_resume(CLASSES[name])
    except MissingExtraError:
        return False
    return True


@pytest.mark.full
@pytest.mark.filterwarnings('ignore')
def test_every_pair(tmp_path: Path) -> None:
    installed = [name for name in CLASSES if is_installed(name)]
    pairs = all_pairs(installed)
    differ = []
    weights()  # one file for all processes, as its path is a part of what loggers keep
    for i, pair in enumerate(pairs):
        # the service of W&B does not answer in a forked process
        differs = resumed_differs if 'WandbLogger' in pair else killed_differs
        if differs(tmp_path / f'{i}', pair):
            differ.append(pair)
        shutil.rmtree(tmp_path / f'{i}')
    print(
        f'row 45: {len(pairs)} pairs of {len(installed)} classes, each killed once (with WandbLogger, resumed from the '
        f'folder that a kill leaves): {len(pairs) - len(differ)} equal; {len(REFUSED)} pairs refused by name'
    )
    assert not differ
