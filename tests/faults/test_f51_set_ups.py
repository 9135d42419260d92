"""Row 51: models, losses, loaders and callbacks of many kinds. Each resumes exactly, or was warned of.

What no checkpoint holds is named by a warning at the first checkpoint, before the kill."""

import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from learnkit import Callback, DataLoaders, Learner
from learnkit.callbacks import Checkpoint
from tests.faults.run_helpers import Reach, quiet
from tests.faults.set_ups import BS, CALLBACKS, FITS, LOADERS, LOSSES, MODELS, Plain, loader, mlp
from tests.helpers.harness import run_until_done
from tests.helpers.resuming import scramble

N_EPOCH = 3
AXES = {'model': MODELS, 'loss': LOSSES, 'loader': LOADERS, 'callback': CALLBACKS, 'fit': FITS}


@dataclass
class SetUp:
    "How a Learner is made and trained."

    model: Callable[[], nn.Module] = mlp
    loss: Callable[[], nn.Module] = nn.MSELoss
    train: Callable[[], Any] = field(default_factory=loader)
    n_iter: int | None = None  # batches of an epoch, for a loader without a length
    cbs: tuple[Callable[[], Callback], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)  # for the Learner
    fit: Callable[..., None] = lambda learn, saver, **o: learn.fit(N_EPOCH, cbs=saver('a'), **o)
    every: str = '1ba'
    lost: tuple[str, ...] = ()  # names that the first checkpoint warns of

    def make(self) -> Learner:
        dls = DataLoaders(self.train(), DataLoader(Plain(), BS), device='cpu', n_iter=self.n_iter)
        options = {'lr': 0.01, 'cbs': [make() for make in self.cbs], **self.options}
        return quiet(Learner(dls, self.model(), self.loss(), **options))


def combine(parts: Mapping[str, str]) -> SetUp:
    "Return the set-up of one part of each named axis."
    chosen = [AXES[axis][name] for axis, name in parts.items()]
    fields = {k: v for part in chosen for k, v in part.items()}
    fields['cbs'] = sum((part.get('cbs', ()) for part in chosen), ())
    fields['lost'] = tuple(part['lost'] for part in chosen if 'lost' in part)
    return SetUp(**fields)


# -- comparison, without the package's own ---------------------------------------------------------


def describe(value: Any, where: str = '', depth: int = 0) -> Iterator[tuple[str, str]]:
    "Yield (place, text) of all data in an object: exact bytes of tensors, states of generators, numbers, names."
    if isinstance(value, Tensor):
        yield where, f'{value.dtype} {value.tolist()}'
    elif isinstance(value, (torch.Generator, random.Random, np.random.Generator)):
        state = getattr(value, 'bit_generator', value)
        states = ('get_state', 'getstate', 'state')
        found = next(getattr(state, name) for name in states if hasattr(state, name))
        yield from describe(found() if callable(found) else found, where, depth + 1)
    elif isinstance(value, nn.Module):
        yield where, str([(name, m.training) for name, m in value.named_modules()])
        tensors = [*value.named_parameters(), *value.named_buffers()]
        yield from describe({**dict(tensors), **value.state_dict()}, where, depth + 1)
        frozen = [name for name, p in value.named_parameters() if not p.requires_grad]
        yield from describe(frozen, f'{where} frozen', depth + 1)
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from describe(entry, f'{where}[{key!r}]', depth + 1)
    elif isinstance(value, (list, tuple, set)) or type(value).__name__ == 'deque':
        yield where, f'{type(value).__name__} of {len(value)}'
        for i, entry in enumerate(value):
            yield from describe(entry, f'{where}[{i}]', depth + 1)
    elif hasattr(value, '__dict__') and not callable(value) and depth < 5:
        yield where, type(value).__name__
        own = {k: v for k, v in vars(value).items() if k != 'learn' and k[0] != '_'}
        yield from describe(own, where, depth + 1)
    elif type(value).__module__ in ('builtins', 'numpy', 'enum') and not callable(value):
        yield where, repr(value)


def picture(learn: Learner) -> dict[str, str]:
    "Return everything of a trained Learner that a user sees, as text by its place."
    history = [{k: v for k, v in row.items() if k not in ('time', 'fit')} for row in learn.history]
    own = [cb for cb in learn.cbs if not type(cb).__module__.startswith('learnkit')]
    rngs = (torch.get_rng_state(), random.getstate(), np.random.get_state())
    parts = {
        'model': learn.model,
        'loss': learn.loss_func,
        'optimizer': learn.opt.state_dict(),
        'history': history,
        'callbacks': {cb.name: vars(cb) for cb in own},
        'EMA': [cb.state_dict() for cb in learn.cbs if cb.name == 'ema'],
        'generators': rngs,
    }
    return dict(describe(parts))


class Trace(Callback):
    "Keeps the training batches."

    order = 900

    def __init__(self) -> None:
        self.batches: dict[str, str] = {}

    def after_loss(self) -> None:
        if self.training:
            learn = self.learn
            values = (*learn.xb, *learn.yb, learn.loss_grad.detach())
            self.batches[f'{learn.epoch}, {learn.iter}'] = str([v.tolist() for v in values])

    def state_dict(self) -> None:
        return None


# -- runs ------------------------------------------------------------------------------------------


def train(set_up: SetUp, folder: Path, saves: bool = True) -> dict[str, Any]:
    "Train or resume, and return the picture of the result, the training batches and the warnings."
    is_resumed = any(folder.glob('*/*.ckpt'))

    def saver(name: str) -> list[Callback]:
        return [Checkpoint(set_up.every, folder / name)] if saves else []

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        scramble(0)
        learn = set_up.make()
        scramble(int(is_resumed))
        trace = Trace()
        learn.add_cbs([trace, Reach()])
        set_up.fit(learn, saver, resume=saves)
        learn.remove_cbs([Trace, Reach])
    texts = [str(w.message) for w in caught if '/torch/' not in w.filename]
    return {'picture': picture(learn), 'batches': trace.batches, 'warned': texts}


def compare(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    places = [place for place in {**expected, **found} if expected.get(place) != found.get(place)]
    return [f'{p}: {expected.get(p, "")[:60]} | {found.get(p, "")[:60]}' for p in places]


def judge(set_up: SetUp, folder: Path, at: int) -> str:
    "Return 'exact', 'named' or 'exact, named' of a run that is killed in a training batch, or else what is wrong."
    straight = run_until_done(partial(train, set_up, folder / 'straight')).result
    bare = run_until_done(partial(train, set_up, folder / 'bare', saves=False)).result
    job = partial(train, set_up, folder / 'killed')
    try:
        lives = run_until_done(job, kill=[('train after_batch', at)])
    except Exception as e:  # the resumed process failed
        return f'CANNOT RESUME: {str(e)[-600:]}; {straight["warned"]}'
    assert lives.kills == 1
    changed = compare(bare['picture'], straight['picture'])
    if changed and 'in_order' not in set_up.lost:
        return f'SAVING CHANGES {changed[:3]}; {straight["warned"]}'
    killed = lives.result
    again = {place: straight['batches'].get(place, '') for place in killed['batches']}
    found = compare(again, killed['batches'])[:1] + compare(straight['picture'], killed['picture'])
    warned = [text for text in straight['warned'] if text not in bare['warned']]
    unnamed = [name for name in set_up.lost if not any(name in text for text in warned)]
    if unnamed:
        return f'{"SILENT" if found else "UNNAMED"} {unnamed}: {found[:3]}; {warned}'
    if not set_up.lost and (found or warned):
        return f'{"SILENT" if found else "FALSE ALARM"}: {found[:3]}; {warned}'
    return 'named' if found else 'exact, named' if set_up.lost else 'exact'


def draw_parts(seed: int) -> tuple[dict[str, str], int]:
    "Return a random part of each axis, and the training batch to kill."
    rng = random.Random(seed)
    parts = {}
    for axis, choices in AXES.items():
        names = list(choices)
        if rng.random() < 0.8:
            names = [name for name in names if 'lost' not in choices[name]]
        parts[axis] = rng.choice(names)
    return parts, rng.randrange(4, 12)


def judge_all(set_ups: Mapping[str, tuple[Mapping[str, str], int]], folder: Path) -> None:
    "Kill and resume each set-up, and fail if one is neither exact nor named."
    results = {}
    for i, (name, (parts, at)) in enumerate(set_ups.items()):
        results[name] = judge(combine(parts), folder / str(i), at)
    kinds = Counter(result.split(':')[0] for result in results.values())
    print(f'row 51: {len(results)} set-ups, each killed once: {dict(kinds)}')
    right = 'exact', 'named', 'exact, named'
    wrong = {name: result for name, result in results.items() if result not in right}
    assert not wrong, '\n'.join(f'{name}: {result}' for name, result in wrong.items())


def list_directed() -> dict[str, tuple[Mapping[str, str], int]]:
    "Return a set-up of each part, with a batch to kill."
    names = [(axis, name) for axis, parts in AXES.items() for name in parts]
    return {f'{axis}: {name}': ({axis: name}, 6 + i % 6) for i, (axis, name) in enumerate(names)}


SOME = ['loader: ByPass', 'callback: Plainly', 'loader: InList']


def test_some(tmp_path: Path) -> None:
    directed = list_directed()
    chosen = {name: directed[name] for name in SOME}
    # the checkpoint follows the last batch of an epoch
    judge_all({**chosen, 'nodes': ({'loader': 'nodes'}, 6)}, tmp_path)


@pytest.mark.full
def test_every_part_alone(tmp_path: Path) -> None:
    judge_all(list_directed(), tmp_path)


@pytest.mark.full
def test_random_set_ups(tmp_path: Path) -> None:
    judge_all({f'{seed} {draw_parts(seed)}': draw_parts(seed) for seed in range(109)}, tmp_path)
