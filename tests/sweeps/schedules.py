"""Claims about schedules: `LRScheduler` sets the rates of the same scheduler in a loop by hand, bit for bit.

Three epochs of four batches; `build(optimizer)` makes a scheduler of 12 steps by batch, or of 3 by epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import lr_scheduler

from learnkit import Callback, Checkpoint, DataLoaders, GradientAccumulation, Learner
from learnkit.callbacks.torch_scheduler import LRScheduler
from learnkit.core.errors import CancelStepException
from tests.helpers.forks import reached
from tests.helpers.resuming import scramble
from tests.sweeps.claims import Claim, by_hand, run_killed
from tests.sweeps.verdicts import Subject

N_EPOCH, N_BATCH = 3, 4
KILLS = (3, 4)  # at which batch of its process a run is killed
N_STEPS = {'batch': N_EPOCH * N_BATCH, 'epoch': N_EPOCH}
LR = 0.1
Rates = list[list[float]]


# -- the table -------------------------------------------------------------------------------------


def list_torch(n: int) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    "Yield torch's schedulers of `n` steps."
    half = max(1, n // 2)
    s = lr_scheduler
    yield 'LambdaLR', lambda o: s.LambdaLR(o, lambda step: 0.9**step)
    yield 'MultiplicativeLR', lambda o: s.MultiplicativeLR(o, lambda step: 0.9)
    yield 'StepLR', lambda o: s.StepLR(o, 1, 0.7)
    yield 'MultiStepLR', lambda o: s.MultiStepLR(o, [1, half])
    yield 'ConstantLR', lambda o: s.ConstantLR(o, total_iters=half)
    yield 'LinearLR', lambda o: s.LinearLR(o, total_iters=n)
    yield 'ExponentialLR', lambda o: s.ExponentialLR(o, 0.8)
    yield 'PolynomialLR', lambda o: s.PolynomialLR(o, n, 2.0)
    yield 'CosineAnnealingLR', lambda o: s.CosineAnnealingLR(o, n)
    yield 'CosineAnnealingWarmRestarts', lambda o: s.CosineAnnealingWarmRestarts(o, half)
    yield 'CyclicLR', lambda o: s.CyclicLR(o, 0.01, 0.1, step_size_up=half, cycle_momentum=False)
    yield 'OneCycleLR', lambda o: s.OneCycleLR(o, 0.1, total_steps=n + 1)
    yield 'SequentialLR', lambda o: s.SequentialLR(o, [s.ConstantLR(o), s.StepLR(o, 1)], [half])
    yield 'ChainedScheduler', lambda o: s.ChainedScheduler([s.ConstantLR(o), s.StepLR(o, 1)])
    yield 'ReduceLROnPlateau', lambda o: s.ReduceLROnPlateau(o, factor=0.5, patience=0)


def list_transformers(n: int) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    "Yield the schedules of transformers by the names of its factory."
    library = import_module('transformers')
    options: dict[str, dict[str, Any]] = {
        'cosine_with_min_lr': {'min_lr': 0.01},
        'cosine_warmup_with_min_lr': {'min_lr': 0.01},
        'warmup_stable_decay': {'num_decay_steps': 1},
        'greedy': {},
    }
    for kind in library.SchedulerType:
        more = options.get(kind.value, {})
        yield (
            kind.value,
            partial(
                library.get_scheduler,
                kind,
                num_warmup_steps=1,
                num_training_steps=n,
                scheduler_specific_kwargs=more,
            ),
        )


def list_timm(n: int) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    "Yield timm's schedulers, whose `step` takes the number of the epoch or of the update."
    library = import_module('timm.scheduler')
    by_epoch = {'t_in_epochs': n == N_STEPS['epoch']}
    warmup = {'warmup_t': 1, 'warmup_lr_init': 0.01}
    for name, options in {
        'CosineLRScheduler': {'t_initial': n},
        'MultiStepLRScheduler': {'decay_t': [2]},
        'PlateauLRScheduler': {'patience_t': 0},
        'PolyLRScheduler': {'t_initial': n},
        'StepLRScheduler': {'decay_t': 1},
        'TanhLRScheduler': {'t_initial': n},
    }.items():
        more = {} if name == 'PlateauLRScheduler' else by_epoch
        yield name, partial(getattr(library, name), **options, **warmup, **more)


def list_pytorch_optimizer(n: int) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    "Yield the schedules that pytorch_optimizer adds to torch's."
    library = import_module('pytorch_optimizer')
    for name in ('CosineScheduler', 'LinearScheduler', 'PolyScheduler'):
        yield name, partial(getattr(library, name), t_max=n, max_lr=0.1)
    yield 'REXScheduler', partial(library.REXScheduler, total_steps=n)
    yield 'get_chebyshev_schedule', partial(library.get_chebyshev_schedule, num_epochs=n)
    wsd = partial(library.get_wsd_schedule, num_warmup_steps=1, num_stable_steps=1)
    yield 'get_wsd_schedule', partial(wsd, num_decay_steps=max(1, n - 2))
    yield (
        'CosineAnnealingWarmupRestarts',
        partial(library.CosineAnnealingWarmupRestarts, first_cycle_steps=n),
    )


LIBRARIES: dict[str, Callable[[int], Iterator[tuple[str, Callable[[Any], Any]]]]] = {
    'torch': list_torch,
    'transformers': list_transformers,
    'pytorch_optimizer': list_pytorch_optimizer,
    'timm': list_timm,
}


def load_schedules(library: str) -> list[Subject]:
    "Return the schedules of an installed library, each by batch and by epoch."
    tables = {unit: dict(LIBRARIES[library](n)) for unit, n in N_STEPS.items()}
    return [
        Subject(library, name, lambda o, unit, name=name: tables[unit][name](o))
        for name in tables['epoch']
    ]


# -- both loops ------------------------------------------------------------------------------------


class NoteRates(Callback):
    "Record the rates with which each batch is trained."

    order = 50

    def __init__(self) -> None:
        self.rates: Rates = []

    def before_batch(self) -> None:
        if self.training:
            reached('batch')
            self.rates.append([g['lr'] for g in self.learn.opt.param_groups])

    def state_dict(self) -> None:
        return None


class SkipEveryThird(Callback):
    "Skip the step of every third batch."

    order = 20

    def before_step(self) -> None:
        if self.train_iter % 3 == 2:
            raise CancelStepException

    def state_dict(self) -> None:
        return None


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))


def split_layers(model: nn.Sequential) -> list[list[nn.Parameter]]:
    return [list(layer.parameters()) for layer in model]


def make_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(N_BATCH):
        x = torch.randn(2, 4, generator=generator)
        batches.append((x, x.sum(1, keepdim=True)))
    return batches


def run_by_hand(
    build: Callable[[Any], Any],
    unit: str,
    is_due: Callable[[int], bool] = lambda i: True,  # whether batch i takes a step
    accumulated: int = 1,
) -> Rates:
    "Return the rates of each batch of a loop of plain torch."
    model = make_model()
    groups = [
        {'params': ps, 'lr': lr} for ps, lr in zip(split_layers(model), (LR / 10, LR), strict=True)
    ]
    opt = torch.optim.SGD(groups, lr=LR)
    scheduler = build(opt)
    rates: Rates = []
    n_advanced = 0
    is_timm = type(scheduler).__module__.startswith('timm.')

    def advance(value: float) -> None:
        nonlocal n_advanced
        n_advanced += 1
        if is_timm and unit == 'batch':
            scheduler.step_update(n_advanced)
        elif is_timm:
            scheduler.step(n_advanced, value)
        elif unit == 'epoch' and 'metrics' in signature(scheduler.step).parameters:
            scheduler.step(value)
        else:
            scheduler.step()

    i = 0
    for _ in range(N_EPOCH):
        for x, y in make_batches():
            rates.append([g['lr'] for g in opt.param_groups])
            (mse_loss(model(x), y) / accumulated).backward()
            i += 1
            if i % accumulated:
                continue
            if is_due(i - 1):
                opt.step()
                if unit == 'batch':
                    advance(0.0)
            opt.zero_grad()
        if unit == 'epoch':
            with torch.no_grad():
                losses = [float(mse_loss(model(x), y)) for x, y in make_batches()]
            advance(sum(losses) / len(losses))
    return rates


def make_learner(
    *cbs: Any, folder: Path | None = None, opt_func: Any = torch.optim.SGD, lr: Any = (LR / 10, LR)
) -> Learner:
    "Return the Learner that trains as `run_by_hand`."
    batches = make_batches()
    dls = DataLoaders(batches, batches, device='cpu', path=folder or '.')
    options = {'splitter': split_layers} if isinstance(lr, tuple) else {}
    lr = list(lr) if isinstance(lr, tuple) else lr
    return Learner(dls, make_model(), mse_loss, opt_func=opt_func, lr=lr, cbs=list(cbs), **options)


def run(*cbs: Any, folder: Path | None = None, resume: bool = False, **options: Any) -> Rates:
    "Return the rates of each batch of a fit."
    note = NoteRates()
    learn = make_learner(note, *cbs, folder=folder, **options)
    with learn.no_logging(), learn.no_bar():
        learn.fit(N_EPOCH, resume=resume)
    return note.rates


def compare(expected: Rates, got: Rates) -> list[str]:
    "Return the first batch with other rates."
    if len(expected) != len(got):
        return [f'{len(got)} batches, by hand {len(expected)}']
    for i, (a, b) in enumerate(zip(expected, got, strict=True)):
        if a != b:
            return [f'batch {i}: {b}, by hand {a}']
    return []


# -- claims ----------------------------------------------------------------------------------------


def check_unit(unit: str, subject: Subject, folder: Path) -> list[str]:
    build = partial(subject.build, unit=unit)
    expected = by_hand(lambda: run_by_hand(build, unit))
    return compare(expected, run(LRScheduler(build, by=unit)))


def check_accumulation(subject: Subject, folder: Path) -> list[str]:
    "A step after two batches."
    build = partial(subject.build, unit='batch')
    expected = by_hand(lambda: run_by_hand(build, 'batch', accumulated=2))
    cbs = LRScheduler(build, by='batch'), GradientAccumulation(batches=2)
    return compare(expected, run(*cbs))


def check_skipped(subject: Subject, folder: Path) -> list[str]:
    "Every third step is skipped, as mixed precision skips steps."
    build = partial(subject.build, unit='batch')

    def is_due(i: int) -> bool:
        return i % 3 != 2

    expected = by_hand(lambda: run_by_hand(build, 'batch', is_due))
    return compare(expected, run(LRScheduler(build, by='batch'), SkipEveryThird()))


def check_resume(unit: str, subject: Subject, folder: Path) -> list[str]:
    "Resume from the checkpoint of every batch."
    build = partial(subject.build, unit=unit)
    expected = by_hand(lambda: run_by_hand(build, unit))
    states: list[Any] = []

    class Keep(Callback):
        order = 2000

        def batch_checkpoint(self) -> None:
            states.append(self.learn.checkpoint_state())

        def state_dict(self) -> None:
            return None

    lines = compare(expected, run(LRScheduler(build, by=unit), Keep()))
    for i, state in enumerate(states[:-1]):
        note = NoteRates()
        learn = make_learner(note, LRScheduler(build, by=unit))
        scramble(i + 10)
        with learn.no_logging(), learn.no_bar():
            learn.fit(N_EPOCH, resume=state)
        lines += [f'resumed after {i}: {line}' for line in compare(expected[i + 1 :], note.rates)]
    return lines[:1]


def check_kills(subject: Subject, folder: Path) -> list[str]:
    "Kill twice by SIGKILL, and resume twice in a new process."
    build = partial(subject.build, unit='batch')
    expected = by_hand(lambda: run_by_hand(build, 'batch'))

    def train() -> Rates:
        cbs = LRScheduler(build, by='batch'), Checkpoint('1ba', folder, background=False)
        return run(*cbs, folder=folder, resume=True)

    got = run_killed(train, KILLS)
    return compare(expected[-len(got) :], got)


def check_optimizers(subject: Subject, folder: Path) -> list[str]:
    "Two optimizers, of which the second has the schedule."
    build = partial(subject.build, unit='batch')
    expected = by_hand(lambda: run_by_hand(build, 'batch'))

    def make(params: Any, lr: Any) -> dict[str, Any]:
        return {'first': torch.optim.SGD(first, lr=0.5), 'second': torch.optim.SGD(groups, lr=LR)}

    note = NoteRates()
    learn = make_learner(note, LRScheduler(build, by='batch', only='second'))
    first = [nn.Parameter(torch.zeros(1))]
    learn.model.register_parameter('unused', first[0])
    groups = [
        {'params': ps, 'lr': lr}
        for ps, lr in zip(split_layers(learn.model), (LR / 10, LR), strict=True)
    ]
    learn.opt_func, learn.lr, learn.splitter = make({}, 0), None, lambda m: list(m.parameters())
    with learn.no_logging(), learn.no_bar():
        learn.fit(N_EPOCH)
    if any(rates[0] != 0.5 for rates in note.rates):
        return ['the rate of the first optimizer has changed']
    return compare(expected, [rates[1:] for rates in note.rates])


CLAIMS: dict[str, Claim] = {
    'by batch': partial(check_unit, 'batch'),
    'by epoch': partial(check_unit, 'epoch'),
    'accumulation': check_accumulation,
    'skipped steps': check_skipped,
    'resume at every batch': partial(check_resume, 'batch'),
    'by epoch, resume at every batch': partial(check_resume, 'epoch'),
    'kill and resume': check_kills,
    'two optimizers': check_optimizers,
}
