"""One contract for every callback class of the package; `tests/helpers/every_callback.py` finds the classes.

Each callback trains twice, saves and loads its state, is closed twice, and leaves nothing behind after an exception,
so that the next fit works."""

import inspect
import io
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learnkit import Callback, DataLoaders, Learner
from learnkit.callbacks import LRFinder, ShortEpochCallback
from tests.helpers.every_callback import CLASSES, DEFAULTS, MADE_BY, Net
from tests.helpers.learners import quiet_learner


def make(cls: type[Callback]) -> Callback:
    return MADE_BY.get(cls, cls)()


def learner(cls: type[Callback], path: Path, *cbs: Any) -> Learner:
    "Return a small Learner with a callback of the class, or without it if `defaults` has it."
    torch.manual_seed(0)
    x, y = torch.randn(48, 1, 6, 6), torch.randint(3, (48,))
    dls = DataLoaders.from_tensors((x[:32], y[:32]), (x[32:], y[32:]), bs=8, seed=0)
    returns_activations = cls.__name__.startswith('RNN')
    own = [] if cls in DEFAULTS else [make(cls)]
    if cls.__name__ == 'RNNRegularizer':
        own.insert(0, make(next(c for c in CLASSES if c.__name__ == 'RNNCallback')))
    model = Net(returns_activations)
    return quiet_learner(dls, model, nn.CrossEntropyLoss(), lr=0.01, path=path, cbs=[*own, *cbs])


def own(learn: Learner, cls: type[Callback]) -> Callback:
    return next(cb for cb in learn.cbs if type(cb) is cls)


def traces(learn: Learner) -> dict[str, Any]:
    "Return what callbacks may change during a run and must restore."
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
def test_has_a_docstring_and_a_unique_name(cls: type[Callback]) -> None:
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
    "The exception of these tests."


BATCH_EVENTS = 'before_batch after_pred after_loss before_step after_step after_batch'.split()
EVENTS = ('before_epoch', *BATCH_EVENTS, 'before_validate', 'after_validate', 'after_epoch')
SOME = ('before_epoch', 'after_pred', 'before_step', 'after_batch', 'after_validate')


@by_class
@pytest.mark.parametrize(
    'events', [SOME, pytest.param(EVENTS, marks=pytest.mark.full)], ids=['some', 'all']
)
def test_after_an_exception_the_next_fit_works_and_nothing_is_left(
    cls: type[Callback], events: tuple[str, ...], tmp_path: Path
) -> None:
    "Each fit fails at another event, and the last fit succeeds."

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
