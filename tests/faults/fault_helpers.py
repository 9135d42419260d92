"""What the fault tests share: a learner with everything on, its digest, and what must be true after any failure."""

import gc
import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learnkit import EVENTS, Callback, DataLoaders, Learner
from learnkit.callbacks.step_log import StepLog
from learnkit.core.errors import CancelException
from learnkit.engine.events import LEVELS

# The events of a fit without Cancel, and of a prediction; loading has its own rows.
FIT_EVENTS = [
    e
    for e in EVENTS
    if not e.startswith('after_cancel_')
    and not e.endswith(('_load', '_predict', 'close'))
    and e not in ('after_create', 'after_error')
]
CANCEL_EVENTS = [level.after_cancel for level in LEVELS.values()]
N_EPOCH, N_TRAIN, N_VALID, BS = 2, 3, 2, 4
STATE = 'fitting error logger create_mbar dl xb yb pred loss batch'.split()
ABSENT = object()
# `torch.manual_seed` walks the stack, which takes a millisecond
seed_torch = torch.default_generator.manual_seed


def others_in_full(cases: Iterable[tuple[Any, ...]], is_ordinary: Callable[..., bool]) -> list[Any]:
    "Mark cases for the full form only; the quick form has each value of each parameter."
    return [
        case if is_ordinary(*case) else pytest.param(*case, marks=pytest.mark.full)
        for case in cases
    ]


def mae(pred: Tensor, y: Tensor) -> Tensor:
    return (pred - y).abs().mean()


def make_dls(seed: int = 1) -> DataLoaders:
    g = torch.Generator().manual_seed(7)
    x, v = torch.randn(BS * N_TRAIN, 3, generator=g), torch.randn(BS * N_VALID, 3, generator=g)
    return DataLoaders.from_tensors(
        (x, x.sum(1, keepdim=True)), (v, v.sum(1, keepdim=True)), bs=BS, seed=seed, device='cpu'
    )


def make_model() -> nn.Module:
    seed_torch(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 1))


def make_learner(cbs: Any = None, **kwargs: Any) -> Learner:
    "Return a Learner with everything that a failed run may change: dropout, BatchNorm, Adam, shuffling, metrics."
    options: dict[str, Any] = {
        'dls': make_dls(),
        'model': make_model(),
        'loss_func': nn.MSELoss(),
        'lr': 0.05,
        'opt_func': partial(torch.optim.Adam, weight_decay=0.0),
        'metrics': mae,
        **kwargs,
    }
    return Learner(cbs=cbs, **options)


def start_again(learn: Learner) -> None:
    "Restore weights, optimizer, loaders and RNG of `make_learner`, and nothing else."
    learn.model.load_state_dict(make_model().state_dict())
    learn.dls = make_dls()
    learn.opt = None
    seed_torch(5)


def rows(learn: Learner) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in ('time', 'fit')} for row in learn.history]


def digest(learn: Learner) -> str:
    "Return weights, buffers, optimizer state, the losses and rates of the last fit, and the RNG."
    h = hashlib.sha256()
    for name, t in learn.model.state_dict().items():
        h.update(name.encode() + t.numpy().tobytes())
    for state in learn.opt.state_dict()['state'].values():
        for name, t in sorted(state.items()):
            h.update(name.encode() + torch.as_tensor(t).numpy().tobytes())
    h.update(
        repr(
            (learn.recorder.smooth_loss.raw, learn.recorder.lrs, learn.recorder.smooth_loss.count)
        ).encode()
    )
    h.update(torch.get_rng_state().numpy().tobytes())
    return h.hexdigest()


def weights(learn: Learner) -> list[Tensor]:
    return [t.clone() for t in learn.model.state_dict().values()]


class Mute(Exception):
    "An exception whose `__str__` raises."

    def __str__(self) -> str:
        raise RuntimeError('str() of it failed')

    __repr__ = __str__


_fresh: dict[str, Any] = {}


def fresh() -> dict[str, Any]:
    "Return the results and the final state of a fit of a Learner that never failed."
    if not _fresh:
        learn = make_learner()
        start_again(learn)
        learn.fit(N_EPOCH)
        _fresh.update(
            digest=digest(learn),
            rows=rows(learn),
            keys=set(vars(learn)),
            n_steps=learn.opt.n_steps,
            counters=(learn.epoch, learn.iter, learn.train_iter, learn.n_iter, learn.n_epoch),
        )
    return _fresh


def fits_like_fresh(learn: Learner, without: Any = ()) -> None:
    "Assert that the next fit equals a fit of a Learner that never failed."
    fresh()
    learn.remove_cbs(without)
    start_again(learn)
    n = len(learn.history)
    learn.fit(N_EPOCH)
    assert learn.run.pause is None  # the next fit has released what the failed one kept
    assert digest(learn) == fresh()['digest']
    assert rows(learn)[n:] == fresh()['rows']
    expected = fresh()['counters']
    assert (learn.epoch, learn.iter, learn.train_iter, learn.n_iter, learn.n_epoch) == expected
    assert learn.opt.n_steps == fresh()['n_steps']
    is_clean(learn)


def is_clean(learn: Learner, extra: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    "Assert that nothing of a run is left in the Learner."
    assert (learn.run.levels, learn.run.depth, learn.run.stopping) == ((), 0, False)
    state = {name: vars(learn).get(name, ABSENT) for name in STATE}
    assert state == {
        'fitting': False,
        'error': None,
        'logger': print,
        'create_mbar': True,
        'dl': None,
        'xb': (None,),
        'yb': (None,),
        'pred': None,
        'loss': None,
        'batch': None,
    }
    assert 'loss_grad' not in vars(learn)
    # what an evaluation sets on the Learner is the only thing that a run may add to it
    found = set(vars(learn)) - {cb.name for cb in learn.cbs}
    assert found <= fresh()['keys'] | {'final_record'} | extra
    assert learn.loss_func.reduction == 'mean' if isinstance(learn.loss_func, nn.MSELoss) else True
    assert not learn._open_blocks and not learn.parts.callbacks.run_handlers
    assert not learn.parts.modes.saved and all(cb.run for cb in learn.cbs)
    assert list(reachable_tensors(learn)) == []
    assert all(p.grad is None for p in learn.model.parameters())


def reachable_tensors(learn: Learner) -> Iterator[str]:
    """Return the paths of all tensors that the Learner keeps alive, except model, data and optimizer.

    The pause of a fit that failed is left out: `learn.resume()` needs its batch, and the next fit releases it."""
    kept = (learn, learn.model, learn.dls, learn.opt, learn.run.pause)
    apart = {id(o) for o in (*kept, *learn.model.parameters())}
    seen, todo = set(apart), [(name, o) for name, o in vars(learn).items() if id(o) not in apart]
    while todo:
        where, o = todo.pop()
        if id(o) in seen or isinstance(
            o, (type, ModuleType, str, int, float, BaseException, StepLog)
        ):
            continue  # an exception's frames are its own; the recorded numbers are of no run
        seen.add(id(o))
        if isinstance(o, Tensor):
            yield f'{where}: {tuple(o.shape)}'
        parts = (
            (o.__closure__, o.__defaults__, o.__dict__)
            if isinstance(o, FunctionType)
            else gc.get_referents(o)
        )
        todo += [(f'{where}/{type(part).__name__}', part) for part in parts if part is not None]


class At(Callback):
    "Act at the n-th time (from 1) that an event fires in the outermost or the nested run."

    def __init__(self, event: str, do: Any, nth: int = 1, depth: int = 1, order: float = 0) -> None:
        self.seen, self.at, self.do, self.nth, self.depth = 0, event, do, nth, depth
        self.__dict__['order'] = order
        self.__dict__[event] = self.now

    def now(self) -> None:
        if self.learn.run.depth != self.depth:
            return
        self.seen += 1
        if self.seen != self.nth:
            return
        if isinstance(self.do, BaseException):
            raise self.do
        self.do(self)

    def __repr__(self) -> str:
        return f'At({self.at})'


class Watch(Callback):
    "Record events after the end of a run: errors and cleanups, in order."

    order = 90

    def __init__(self) -> None:
        self.fired: list[Any] = []

    def after_error(self) -> None:
        self.fired.append(('after_error', self.learn.error))

    def cleanup(self) -> None:
        self.fired.append(('cleanup', self.learn.error))


def trigger(event: str) -> list[Callback]:
    "Cause an `after_cancel_*` event by a Cancel of its level, in training if possible."
    for level in LEVELS.values():
        if level.after_cancel == event:
            return [At(level.before, level.exception('planned'))]
    return []


def raised_by(f: Any) -> BaseException:
    "Return the exception that `f` raises."
    try:
        f()
    except BaseException as e:
        return e
    raise AssertionError('nothing was raised')


def copy_without_notes(e: BaseException) -> BaseException:
    "Return a copy of `e` without notes and traceback, since several tests share parametrized exceptions."
    new = type(e).__new__(type(e), *e.args)
    new.__dict__.update({k: v for k, v in vars(e).items() if k != '__notes__'})
    return new


def notes(e: BaseException) -> list[str]:
    return list(getattr(e, '__notes__', ()))


def cancel(level: str) -> CancelException:
    return LEVELS[level].exception()
