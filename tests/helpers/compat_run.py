"""Follow a plan with one library, and compare what came of it."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.compat_callbacks import callbacks_of
from tests.helpers.compat_plans import BATCH_EVENTS, EVENTS, NOT_FITTING, RAISER_ORDERS, Place, Plan


class Run:
    "What happened while a plan was followed."

    def __init__(self, plan: Plan) -> None:
        self.plan, self.call, self.counting = plan, -1, True
        self.trace: list[tuple[Any, ...]] = []
        self.losses: list[float] = []
        self.weights: list[float] = []
        self.recorded: list[Any] = []

    def note(self, tag: str, event: str, learn: Any) -> None:
        "Append an event with the counters; outside a fit learnkit keeps the counters, so they are left out there."
        if event not in EVENTS:
            return
        if event == 'after_cancel_step' and tag not in ('first', 'last'):
            return  # fastai ignores `run_train` there
        counters = [getattr(learn, name, 0) for name in ('epoch', 'iter', 'train_iter')]
        if event not in BATCH_EVENTS:
            del counters[1]  # an old batch number means nothing
        counters = [*counters, float(getattr(learn, 'pct_train', 0))] if self.counting else []
        self.trace.append((self.call, tag, event, *counters, bool(learn.training)))

    def digest(self) -> str:
        return sha256(repr(self.trace).encode()).hexdigest()[:16]

    def letters(self) -> str:
        "The events of the tracer that sees them all, one letter each."
        return ''.join(
            chr(ord('a') + EVENTS.index(event)) for _, tag, event, *_ in self.trace if tag == 'last'
        )


def same(a: Any, b: Any, tol: float = 2e-5) -> bool:
    "Return True if floats of two results are within a relative `tol` and everything else is equal."
    if isinstance(a, (list, tuple)):
        if not isinstance(b, (list, tuple)) or len(a) != len(b):
            return False
        return all(same(x, y, tol) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k], tol) for k in a)
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= tol * max(1, abs(a)) or (a != a and b != b)
    return type(a) is type(b) and a == b


STYLE_FILES = [
    Path(__file__).parents[1] / 'compat' / name
    for name in ('fastai_style.py.in', 'fastai_training.py.in')
]
STYLE_IMPORTS = {
    'learnkit': 'from learnkit.all import *; Recorder = as_in_fastai(Recorder)',
    'fastai': 'from fastai.data.all import *; from fastai.learner import *; from fastai.callback.all import *; '
    'from fastai.optimizer import *; from fastai.metrics import *; from fastai.losses import *',
}


def as_in_fastai(recorder: type) -> type:
    "Return a class of Recorders whose `train_loss` is the smoothed loss."

    class Recorder(recorder):  # type: ignore[misc]  # whichever it is
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{'train_loss': 'smooth', **kwargs})

    return Recorder


def style_cases(library: str) -> dict[str, Any]:
    "The cases of `fastai_*.py.in`, run with one library: the import line alone differs."
    names: dict[str, Any] = {
        '__name__': 'fastai_style',
        'FASTAI_EVENTS': EVENTS,
        'as_in_fastai': as_in_fastai,
    }
    with warnings.catch_warnings():
        if library == 'fastai':
            warnings.simplefilter('ignore')
        exec(STYLE_IMPORTS[library], names)
    for file in STYLE_FILES:
        exec(compile(file.read_text(), file, 'exec'), names)
    return {name.removeprefix('case_'): f for name, f in names.items() if name.startswith('case_')}


def rows_comparable(plan: Plan) -> bool:
    "Return True if the Recorder's rows equal fastai's; rows of a cancelled epoch differ, see COMPAT.md."
    whole = all(level not in 'TEVF' for *_, level in plan['raises'])
    return (
        plan['recorder']
        and whole
        and all(call[0] != 'fit' or call[2] == 0 for call in plan['calls'])
    )


def outcome(plan: Plan, lib: Any) -> dict[str, Any]:
    "What of a run is compared."
    run = run_plan(plan, lib)
    res = {
        'events': run.letters(),
        'trace': run.digest(),
        'weights': [float(f'{w:.14g}') for w in run.weights],
        'n_losses': len(run.losses),
        'loss': float(f'{sum(v * (1 + i / 64) for i, v in enumerate(run.losses)):.14g}'),
    }
    if rows_comparable(plan):
        res['recorded'] = [[[round_to(v) for v in part] for part in fit] for fit in run.recorded]
    return res


def round_to(v: Any) -> Any:
    if isinstance(v, list):
        return [round_to(o) for o in v]
    return float(f'{v:.7g}') if isinstance(v, float) else v


def differences(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    "What differs between the outcomes of one plan: events and counters exactly, numbers within their precision."
    tol = {'weights': 1e-12, 'loss': 1e-11, 'recorded': 2e-6}
    return {
        k: (a.get(k), b.get(k)) for k in {*a, *b} if not same(a.get(k), b.get(k), tol.get(k, 0.0))
    }


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def loaders(lib: Any, plan: Plan) -> Any:
    "Plain torch loaders over the same numbers, with an uneven last training batch."
    g = torch.Generator().manual_seed(plan['seed'] + 1)

    def loader(n: int) -> Any:
        x = torch.rand(n, 2, generator=g, dtype=torch.float64)
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=4)

    train, valid = loader(4 * plan['n_train'] - 2), loader(4 * plan['n_valid'])
    return lib.DataLoaders(train, valid, device=torch.device('cpu'))


def mse(pred: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (pred - y).square().mean()


def run_plan(plan: Plan, lib: Any) -> Run:
    "Follow a plan with the given library."
    run = Run(plan)
    cbs = callbacks_of(lib, run)
    planned: dict[int, dict[Place, str]] = {order: {} for order in RAISER_ORDERS}
    for *place, order, level in plan['raises']:
        planned[order][tuple(place)] = level  # type: ignore[index]
    made = [(kind, cbs.make(i, kind, *rest)) for i, (kind, *rest) in enumerate(plan['cbs'])]
    opt_func = lib.SGD if not plan['mom'] else _partial(lib.SGD, plan['mom'])
    lasting = [
        lib.TrainEvalCallback,
        *([_recorder(lib)] if plan['recorder'] else []),
        cbs.Tracer('first', -100),
        cbs.Losses(),
        *(cb for kind, cb in made if kind != 'temporary'),
        *(cbs.Raiser(order, planned[order]) for order in RAISER_ORDERS),
        cbs.Tracer('last', 300),
    ]
    learn = lib.Learner(
        loaders(lib, plan),
        net(plan['seed']),
        mse,
        opt_func=opt_func,
        lr=0.1,
        default_cbs=False,
        cbs=lasting,
    )
    learn.logger = lambda row: None
    temporary = [cb for kind, cb in made if kind == 'temporary']
    for run.call, (what, *args) in enumerate(plan['calls']):
        with _as_documented(learn, lib, run, what):
            CALLS[what](learn, lib, temporary, *args)
            if what == 'fit' and plan['recorder']:
                run.recorded.append(recorded(learn))
    run.weights = [v for p in learn.model.parameters() for v in p.detach().flatten().tolist()]
    return run


def _partial(SGD: Any, mom: float) -> Any:
    return lambda params, lr: SGD(params, lr=lr, mom=mom)


def _recorder(lib: Any) -> Any:
    "A Recorder that smooths losses in double precision; fastai's is made for single."
    rec = lib.Recorder(
        add_time=False, **({} if lib.which == 'fastai' else {'train_loss': 'smooth'})
    )
    zero = torch.zeros((), dtype=torch.float64)
    if lib.which == 'fastai':
        rec.smooth_loss.reset = lambda: vars(rec.smooth_loss).update(count=0, val=zero)
    return rec


def recorded(learn: Any) -> list[Any]:
    rec = learn.recorder
    return [
        [float(v) for v in rec.lrs],
        [float(v) for v in rec.losses],
        [[None if v is None else float(v) for v in row] for row in rec.values],
        [int(i) for i in rec.iters],
    ]


def _fit(learn: Any, lib: Any, temporary: list[Any], n_epoch: int, start_epoch: int) -> None:
    learn.fit(n_epoch, start_epoch=start_epoch, cbs=temporary)


def _validate(learn: Any, lib: Any, temporary: list[Any]) -> None:
    learn.validate(cbs=temporary)


def _by_hand(learn: Any, lib: Any) -> None:
    if learn.opt is None:
        learn.create_opt()
    learn.epoch, learn.train_iter, learn.pct_train, learn.n_iter, learn.n_epoch = 0, 0, 0.0, 4, 1
    learn.training = True


def _one_batch(learn: Any, lib: Any, temporary: list[Any]) -> None:
    _by_hand(learn, lib)
    batches = list(learn.dls.train)
    for i in (0, 2, 1):
        learn.one_batch(i, batches[i])


def _all_batches(learn: Any, lib: Any, temporary: list[Any]) -> None:
    _by_hand(learn, lib)
    learn.dl = learn.dls.train
    learn.all_batches()
    learn.training, learn.dl = False, learn.dls.valid
    learn.all_batches()


def _events(learn: Any, lib: Any, temporary: list[Any]) -> None:
    _by_hand(learn, lib)
    learn(['before_fit', 'before_epoch'])
    learn._do_epoch_train()
    learn._do_epoch_validate()
    learn('after_epoch')
    learn(['after_fit'])


def _with_learn(learn: Any, lib: Any, temporary: list[Any]) -> None:
    with learn:
        learn._do_epoch_validate()


CALLS = {
    'fit': _fit,
    'validate': _validate,
    'one_batch': _one_batch,
    'all_batches': _all_batches,
    'events': _events,
    'with_learn': _with_learn,
}


@contextmanager
def _as_documented(learn: Any, lib: Any, run: Run, what: str) -> Iterator[None]:
    """Do for fastai what learnkit does differently on purpose.

    A fit starts without gradients, `zero_grad` sets them to None, a stand-alone validation puts things back."""
    run.counting = what not in NOT_FITTING
    names = ('training', 'epoch', 'iter', 'n_iter', 'train_iter', 'pct_train')
    before = {name: getattr(learn, name, 0) for name in names}
    modes = [(m, m.training) for m in learn.model.modules()]

    def forget_gradients() -> None:
        for p in learn.model.parameters():
            p.grad = None

    if what == 'fit':
        forget_gradients()
    if lib.which == 'fastai':
        if learn.opt is None:
            learn.create_opt()
        learn.opt.zero_grad = forget_gradients
    yield
    run.counting = True
    if what == 'validate' or (what == 'with_learn' and lib.which == 'fastai'):
        for name, value in before.items():
            setattr(learn, name, value)
        for m, mode in modes:
            m.training = mode
    if what == 'with_learn':
        learn.training = False
