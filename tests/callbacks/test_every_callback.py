"""One contract for every callback class of the package, found by looking, not listed.

Each is made without arguments, trains, trains again, gives and takes back its state, closes twice, and after an
exception in the middle of a run leaves nothing behind, so that the next fit works."""

from __future__ import annotations

import importlib
import inspect
import io
import pkgutil
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from fastcore.basics import noop
from torch import Tensor, nn

import learnkit
from learnkit import Callback, DataLoaders, Learner, Periodic
from learnkit.callbacks import LRFinder, LRScheduler, ParamScheduler, ShortEpochCallback
from learnkit.callbacks.export import LoadWeights
from learnkit.callbacks.optuna import OptunaPruning
from learnkit.callbacks.progress import ProgressCallback
from learnkit.callbacks.recorder import Recorder
from learnkit.callbacks.schedule import SchedCos
from learnkit.callbacks.stoppers import FixedStopper, ThresholdStopper
from learnkit.core.optional import import_library
from learnkit.engine.train_eval import SkipToEpoch, TrainEvalCallback

DEFAULTS = (TrainEvalCallback, Recorder, ProgressCallback)  # those that every Learner has


def classes() -> list[type[Callback]]:
    "Every public subclass of Callback that the package defines."
    for module in pkgutil.walk_packages(learnkit.__path__, 'learnkit.'):
        importlib.import_module(module.name)

    def below(cls: type) -> Iterator[type]:
        for sub in cls.__subclasses__():
            yield from (sub, *below(sub))

    found = {
        c
        for c in below(Callback)
        if c.__module__.startswith('learnkit.') and not c.__name__.startswith('_')
    }
    return sorted(found, key=lambda c: c.__name__)


@cache
def shared_folder() -> TemporaryDirectory[str]:
    "A folder that is removed when this process ends."
    return TemporaryDirectory()


@cache
def weights() -> Path:
    "A file of weights that fit the model."
    path = Path(shared_folder().name) / 'net.pth'
    torch.save(Net(returns_activations=False).state_dict(), path)
    return path


def needing_arguments() -> dict[type[Callback], Callable[[], Callback]]:
    "How to make those that say nothing without an argument: what to schedule, to skip, to do."
    step_lr = partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    return {
        Periodic: lambda: Periodic(every='1ba', on_every=lambda cb: None),
        SkipToEpoch: lambda: SkipToEpoch(1),
        ParamScheduler: lambda: ParamScheduler({'lr': SchedCos(0.1, 0.0)}),
        FixedStopper: lambda: FixedStopper('1000ep'),
        LoadWeights: lambda: LoadWeights(weights()),
        ThresholdStopper: lambda: ThresholdStopper('valid_loss', 0.0),
        LRScheduler: lambda: LRScheduler(step_lr),
        OptunaPruning: lambda: OptunaPruning(_fixed_trial()),
    }


def _fixed_trial() -> Any:
    "Return a trial that belongs to no study."
    return import_library('optuna', 'OptunaPruning').trial.FixedTrial({})


CLASSES = classes()
MADE_BY = needing_arguments()


def make(cls: type[Callback]) -> Callback:
    return MADE_BY.get(cls, cls)()


class Net(nn.Module):
    "Something of everything that a callback may look for: convolution, batch norm, dropout, a hidden state to reset."

    def __init__(self, returns_activations: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = (
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.Dropout(0.1),
        )
        self.head = nn.Linear(4 * 36, 3)
        self.returns_activations, self.resets = returns_activations, 0

    def reset(self) -> None:
        self.resets += 1

    def forward(self, x: Tensor) -> Any:
        "Return scores [B, 3], with raw and dropped activations as a recurrent model of fastai's does when asked."
        raw = self.norm(self.conv(x)).relu()
        dropped = self.drop(raw)
        out = self.head(dropped.flatten(1))
        return (out, [raw.flatten(2)], [dropped.flatten(2)]) if self.returns_activations else out


def learner(cls: type[Callback], path: Path, *cbs: Any) -> Learner:
    "Return a small Learner with a callback of the class, which its `defaults` may have already."
    torch.manual_seed(0)
    x, y = torch.randn(48, 1, 6, 6), torch.randint(3, (48,))
    dls = DataLoaders.from_tensors((x[:32], y[:32]), (x[32:], y[32:]), bs=8, seed=0)
    returns_activations = cls.__name__.startswith('RNN')
    own = [] if cls in DEFAULTS else [make(cls)]
    if cls.__name__ == 'RNNRegularizer':
        own.insert(0, make(next(c for c in CLASSES if c.__name__ == 'RNNCallback')))
    learn = Learner(
        dls, Net(returns_activations), nn.CrossEntropyLoss(), lr=0.01, path=path, cbs=[*own, *cbs]
    )
    learn.logger = noop
    return learn


def own(learn: Learner, cls: type[Callback]) -> Callback:
    return next(cb for cb in learn.cbs if type(cb) is cls)


def traces(learn: Learner) -> dict[str, Any]:
    "What a callback may change for the length of a run, and has to put back."
    hooks = sum(
        len(getattr(m, h))
        for m in learn.model.modules()
        for h in ('_forward_hooks', '_forward_pre_hooks', '_backward_hooks', '_backward_pre_hooks')
    )
    return {
        'hooks': hooks,
        'autocast': torch.is_autocast_enabled('cpu'),
        'grad': torch.is_grad_enabled(),
        'loss': learn.loss_func,
        'reduction': learn.loss_func.reduction,
        'cbs': [type(cb) for cb in learn.cbs],
        'trainable': [p.requires_grad for p in learn.model.parameters()],
        'logger': learn.logger,
        'loaders': [id(dl) for dl in learn.dls],
        'run': [cb.run for cb in learn.cbs],
        'layout': [p.stride() for p in learn.model.parameters()],
        'open': learn.run.levels,
        'depth': learn.run.depth,
        'anomaly': torch.is_anomaly_enabled(),
        'weights': [id(p) for p in learn.model.parameters()],
    }


by_class = pytest.mark.parametrize('cls', CLASSES, ids=lambda cls: cls.__name__)


@by_class
def test_is_made_without_arguments(cls: type[Callback]) -> None:
    required = [
        p.name
        for p in inspect.signature(cls).parameters.values()
        if p.default is p.empty
        and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    assert bool(required) == (cls in MADE_BY), f'{cls.__name__} needs {required}'
    assert isinstance(make(cls), cls)


@cache
def names() -> dict[type[Callback], str]:
    return {cls: make(cls).name for cls in CLASSES}


@by_class
def test_has_a_docstring_and_a_name_of_its_own(cls: type[Callback]) -> None:
    assert cls.__doc__ and cls.__doc__ != Callback.__doc__
    assert [c.__name__ for c in CLASSES if names()[c] == names()[cls]] == [cls.__name__]


@by_class
def test_trains_closes_twice_trains_again_and_leaves_nothing_behind(
    cls: type[Callback], tmp_path: Path
) -> None:
    learn = learner(cls, tmp_path)
    start = [p.detach().clone() for p in learn.model.parameters()]
    before = traces(learn)
    learn.fit(2)
    assert len(learn.history) >= 1
    assert traces(learn) == before
    first = learn.opt.n_steps
    learn.close()
    learn.close()
    own(learn, cls)('close')
    learn.fit(2)
    assert all(p.isfinite().all() for p in learn.model.parameters())
    assert (
        any(not torch.equal(a, b) for a, b in zip(start, learn.model.parameters(), strict=True))
        or not first
    )
    targs = learn.get_preds()[1]
    assert len(targs) == 16 or cls is ShortEpochCallback
    learn.validate()


def tensors_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(tensors_equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(tensors_equal, a, b))
    return bool(a == b) or (a != a and b != b)


@by_class
def test_state_round_trip(cls: type[Callback], tmp_path: Path) -> None:
    learn = learner(cls, tmp_path)
    learn.fit(2)
    state = own(learn, cls).state_dict()
    if state is None:
        return
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert tensors_equal(loaded, state)

    other = learner(cls, tmp_path)
    other.fit(1)
    own(other, cls).load_state_dict(loaded)
    assert tensors_equal(own(other, cls).state_dict(), state)
    other.fit(1)
    assert tensors_equal(loaded, state), 'training changed the dict that was loaded'


class Boom(Exception):
    "What goes wrong."


BATCH_EVENTS = (
    'before_batch',
    'after_pred',
    'after_loss',
    'before_step',
    'after_step',
    'after_batch',
)
EVENTS = ('before_epoch', *BATCH_EVENTS, 'before_validate', 'after_validate', 'after_epoch')
SOME = ('before_epoch', 'after_pred', 'before_step', 'after_batch', 'after_validate')


@by_class
@pytest.mark.parametrize(
    'events', [SOME, pytest.param(EVENTS, marks=pytest.mark.full)], ids=['some', 'all']
)
def test_after_an_exception_the_next_fit_works_and_nothing_is_left(
    cls: type[Callback],
    events: tuple[str, ...],
    tmp_path: Path,
) -> None:
    "The fit that fails at one event comes next after the one that failed at another; the last one does not fail."

    def fail_at(event: str) -> Callable[[Callback], None]:
        def fail(cb: Callback) -> None:
            if event == armed and (
                event not in BATCH_EVENTS or cb.iter >= (cls is not ShortEpochCallback)
            ):
                raise Boom

        return fail

    last = Callback(**{event: fail_at(event) for event in events})
    last.order = 1000
    learn = learner(cls, tmp_path, last)
    before = traces(learn)
    for armed in events:
        if cls is LRFinder and armed.endswith('_validate'):
            continue  # it leaves validation out
        with pytest.raises(Boom):
            learn.fit(2)
        assert traces(learn) == before, armed

    armed = ''
    learn.fit(2)
    assert all(p.isfinite().all() for p in learn.model.parameters())
    assert traces(learn) == before
