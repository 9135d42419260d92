"""Tables of everything that learnkit claims about GPUs, measured or checked on one device.

By default the command ends within three minutes: what would begin after `--seconds` is not measured, and says so.

waits       number of times that the host waits for the device in a step, with default callbacks, metrics and one cycle
mlp         a step of a tiny perceptron compared with a hand-written loop; also compiled, and with other packages
resnet      the same for a ResNet-18 on images of 32x32, in bf16
gpt         the same for a GPT with 124 million weights in bf16, with tokens per second and model FLOPs utilization
data        a step with each kind of loader, compared with batches that are on the device already
save        delay of a step while 1 GB is saved
checks      out of memory, the fp16 scaler, memory after a failed fit, exact resume, DDP and FSDP

    python -m benchmarks.gpu
    python -m benchmarks.gpu --seconds 900                 # every row
    python -m benchmarks.gpu --device cpu --small          # the same code in a few seconds
    python -m benchmarks.gpu --sections waits,gpt

Accelerate, fastai, Ignite and Lightning are measured where they are installed: see
`python -m benchmarks.tasks --install`."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import argparse
import gc
import importlib.util
import math
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.cli import names_of
from benchmarks.environments import continue_in
from benchmarks.harness import machine
from benchmarks.models import GPT, ResNet, make_perceptron
from learnkit import (
    Callback,
    Checkpoint,
    CrossEntropyLossFlat,
    DataLoaders,
    Learner,
    MixedPrecision,
    accuracy,
)

__all__ = ['SECTIONS', 'Setting', 'main', 'measure']

Batch = tuple[Tensor, Tensor]
ABSENT = '-'  # for values that a CPU does not have
NO_TIME = 'not measured: no time left'
LR = 1e-3
# dense bf16 FLOPs a second, by a part of the device's name
PEAK_FLOPS = {'H200': 989e12, 'H100': 989e12, 'A100': 312e12, 'L40': 181e12, 'L4': 121e12}


@dataclass(frozen=True)
class Setting:
    "Device of the measurements, and whether their size is reduced."

    device: torch.device
    small: bool
    turns: int = 1  # how often each subject is measured, forwards and backwards
    deadline_s: float = math.inf  # of `time.monotonic`, after which no measurement begins

    def wait(self) -> None:
        "Wait until the device has finished its work."
        if self.on_gpu:
            torch.cuda.synchronize()

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.deadline_s

    @property
    def on_gpu(self) -> bool:
        return self.device.type == 'cuda'

    def allocated(self) -> int:
        "Return the bytes of all tensors that are alive on the device."
        gc.collect()
        if self.on_gpu:
            return torch.cuda.memory_allocated()
        alive = [o for o in gc.get_objects() if type(o) in (Tensor, nn.Parameter)]
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive}
        return sum(sizes.values())


@dataclass
class Table:
    "Table in Markdown."

    title: str
    head: list[str]
    rows: list[list[str]]

    def __str__(self) -> str:
        lines = [self.head, ['---', *['--:'] * (len(self.head) - 1)], *self.rows]
        return '\n'.join([f'{self.title}\n', *['| ' + ' | '.join(line) + ' |' for line in lines]])


SECTIONS: dict[str, Callable[[Setting], Table]] = {}  # by name, in the order of the page


def section(f: Callable[[Setting], Table]) -> Callable[[Setting], Table]:
    "Register a section under the function's name without `measure_`."
    SECTIONS[f.__name__.removeprefix('measure_')] = f
    return f


def make_learner(setting: Setting, model: nn.Module, batches: Any, **options: Any) -> Learner:
    "Return a Learner on the device, with AdamW of torch."
    kwargs = {'opt_func': torch.optim.AdamW, 'lr': LR, **options}
    dls = DataLoaders(batches, device=setting.device)
    return Learner(
        dls, model.to(setting.device), kwargs.pop('loss_func', F.cross_entropy), **kwargs
    )


def make_batches(setting: Setting, n: int, bs: int = 64, width: int = 16) -> list[Batch]:
    "Return `n` batches for a perceptron, on the device."
    x = torch.randn(n * bs, width)
    y = torch.randint(10, (n * bs,))
    return list(zip(x.to(setting.device).split(bs), y.to(setting.device).split(bs), strict=True))


# -- waits for the device --------------------------------------------------------------------------


@section
def measure_waits(setting: Setting) -> Table:
    "Count how often the host waits for the device, from the first batch of a pass to its last."
    n = 8 if setting.small else 64

    def count(loader: str) -> str:
        batches = make_batches(setting, n)
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        where = 'cpu' if loader == 'host' else setting.device
        dls = DataLoaders.from_tensors((x, y), (x, y), bs=64, device=where)
        dls.device = setting.device
        model = make_perceptron(16).to(setting.device)
        learn = Learner(dls, model, F.cross_entropy, metrics=accuracy)
        learn.fit_one_cycle(1)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter('always')
            learn.fit_one_cycle(1, cbs=NoticeWaits(setting.on_gpu))
        waits = sum('synchronizing CUDA operation' in str(w.message) for w in found)
        return f'{waits / n:.2f}' if setting.on_gpu else ABSENT

    rows = [
        ['data on the device', count('device')],
        ['data on the host, read ahead', count('host')],
    ]
    return Table(
        'Waits of the host for the device: default callbacks, bar, accuracy, one cycle, evaluation',
        ['', 'waits a step'],
        rows,
    )


class NoticeWaits(Callback):
    "Make torch warn of each wait for the device during passes over the data."

    order = -20  # leaves a pass before the Recorder reads its results

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu

    def set_mode(self, mode: str) -> None:
        if self.on_gpu:
            torch.cuda.set_sync_debug_mode(mode)

    def before_train(self) -> None:
        self.set_mode('warn')

    def before_validate(self) -> None:
        self.set_mode('warn')

    def after_train(self) -> None:
        self.set_mode('default')

    def after_validate(self) -> None:
        self.set_mode('default')

    def cleanup(self) -> None:
        self.set_mode('default')


# -- steps -----------------------------------------------------------------------------------------


@dataclass
class Case:
    "A model, its batch, and the number of timed steps."

    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[Tensor, Tensor], Tensor]
    bf16: bool
    n_skipped: int  # first steps of an epoch, which are not timed
    n_timed: int
    compile_options: dict[str, Any]
    whole_step: bool = False  # whether the whole step is compiled too, as a CUDA graph


class TimedBatches:
    "Repeat the same batch on the device, and time the later batches of each pass."

    def __init__(self, setting: Setting, case: Case) -> None:
        x, y = case.batch()
        self.batch = x.to(setting.device), y.to(setting.device)
        self.setting = setting
        self.case = case
        self.seconds: list[float] = []  # a step, one value for each pass

    def __len__(self) -> int:
        return self.case.n_skipped + self.case.n_timed + 1

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self.case.n_skipped):
            yield self.batch
        self.setting.wait()
        began = time.perf_counter()
        for _ in range(self.case.n_timed):
            yield self.batch
        self.setting.wait()
        self.seconds.append((time.perf_counter() - began) / self.case.n_timed)
        yield self.batch


Subject = Callable[[Setting, Case, TimedBatches], Callable[[int], object]]


def build_loop(
    setting: Setting, case: Case, batches: TimedBatches, compiled: bool = False
) -> Callable[[int], object]:
    "Build a hand-written loop."
    model = case.model().to(setting.device)
    forward = torch.compile(model, **case.compile_options) if compiled else model
    opt = torch.optim.AdamW(model.parameters(), lr=LR)

    def context() -> AbstractContextManager[Any]:
        return torch.autocast(setting.device.type, torch.bfloat16) if case.bf16 else nullcontext()

    def fit(n_epoch: int) -> None:
        model.train()
        for _ in range(n_epoch):
            for x, y in batches:
                with context():
                    loss = case.loss(forward(x), y)
                loss.backward()
                opt.step()
                opt.zero_grad()

    return fit


def build_learnkit(
    setting: Setting, case: Case, batches: TimedBatches, compiled: str = ''
) -> Callable[[int], object]:
    "Build a Learner with its default callbacks."
    cbs = [MixedPrecision('bf16')] if case.bf16 else []
    learn = make_learner(setting, case.model(), batches, loss_func=case.loss, cbs=cbs)
    if compiled:
        learn.compile(step=compiled == 'step', **case.compile_options)
    return learn.fit


def build_accelerate(
    setting: Setting, case: Case, batches: TimedBatches
) -> Callable[[int], object]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # or it keeps the first one
    accelerator = Accelerator(cpu=not setting.on_gpu, mixed_precision='bf16' if case.bf16 else 'no')
    model = case.model()
    model, opt = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=LR))

    def fit(n_epoch: int) -> None:
        model.train()
        for _ in range(n_epoch):
            for x, y in batches:
                with accelerator.autocast():
                    loss = case.loss(model(x), y)
                accelerator.backward(loss)
                opt.step()
                opt.zero_grad()

    return fit


def build_lightning(setting: Setting, case: Case, batches: TimedBatches) -> Callable[[int], object]:
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = case.model()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = case.loss(self.model(batch[0]), batch[1])
            self.log('train_loss', loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=LR)

    module = Module()

    def fit(n_epoch: int) -> None:
        trainer = Trainer(
            max_epochs=n_epoch,
            accelerator='gpu' if setting.on_gpu else 'cpu',
            devices=1,
            logger=False,
            enable_checkpointing=False,
            precision='bf16-mixed' if case.bf16 else '32-true',
        )
        trainer.fit(module, batches)

    return fit


def build_fastai(setting: Setting, case: Case, batches: TimedBatches) -> Callable[[int], object]:
    from fastai.callback import progress  # noqa: F401  its import makes the bar a default
    from fastai.callback.fp16 import AMPMode, MixedPrecision as FastaiPrecision
    from fastai.data.core import DataLoaders as FastaiLoaders
    from fastai.learner import Learner as FastaiLearner
    from fastai.optimizer import OptimWrapper

    dls = FastaiLoaders(batches, [], device=setting.device)
    opt_func = partial(OptimWrapper, opt=torch.optim.AdamW)
    cbs = [FastaiPrecision(AMPMode.BF16)] if case.bf16 else []
    model = case.model().to(setting.device)
    return FastaiLearner(dls, model, case.loss, opt_func=opt_func, lr=LR, cbs=cbs).fit


def build_ignite(setting: Setting, case: Case, batches: TimedBatches) -> Callable[[int], object]:
    from ignite.engine import Engine

    model = case.model().to(setting.device)
    opt = torch.optim.AdamW(model.parameters(), lr=LR)

    def step(engine: Engine, batch: Batch) -> float:
        model.train()
        opt.zero_grad()
        with torch.autocast(setting.device.type, torch.bfloat16, enabled=case.bf16):
            loss = case.loss(model(batch[0]), batch[1])
        loss.backward()
        opt.step()
        return loss.item()

    trainer = Engine(step)

    def fit(n_epoch: int) -> None:
        trainer.state.max_epochs = None  # begin again
        trainer.run(batches, max_epochs=n_epoch)

    return fit


# by name in the table: the library, and the function
PEERS: dict[str, tuple[str, Subject]] = {
    'Accelerate': ('accelerate', build_accelerate),
    'Lightning': ('lightning', build_lightning),
    'fastai': ('fastai', build_fastai),
    'Ignite': ('ignite', build_ignite),
}


def measure_steps(setting: Setting, case: Case) -> dict[str, tuple[float, float] | str]:
    "Return the seconds per step and the peak memory in MiB by subject, or the reason for their absence."
    subjects: dict[str, Subject] = {'by hand': build_loop, 'learnkit': build_learnkit}
    found: dict[str, tuple[float, float] | str] = {}
    for name, (library, subject) in PEERS.items():
        if importlib.util.find_spec(library):
            subjects[name] = subject
        else:
            found[name] = 'not installed'
    # last, because compiling takes longest
    subjects['by hand, compiled'] = partial(build_loop, compiled=True)
    subjects['learnkit, compiled'] = partial(build_learnkit, compiled='model')
    if case.whole_step:
        subjects['learnkit, whole step'] = partial(build_learnkit, compiled='step')
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for turn in range(setting.turns):
        # forwards, then backwards: a device that warms up favors nobody
        for name in list(subjects)[:: -1 if turn % 2 else 1]:
            if setting.is_over:
                found.setdefault(name, NO_TIME)
                continue
            try:
                seconds, peak = time_subject(setting, case, subjects[name])
            except Exception as e:
                found[name] = f'failed: {type(e).__name__}'
                print(traceback.format_exc(), file=sys.stderr)
                continue
            times[name].append(seconds)
            found[name] = median(times[name]), peak
    return found


def time_subject(setting: Setting, case: Case, subject: Subject) -> tuple[float, float]:
    "Return the seconds per step, and the peak memory in MiB above the memory in use before."
    before = setting.allocated()
    batches = TimedBatches(setting, case)
    fit = subject(setting, case, batches)
    fit(1 if not case.whole_step else 2)  # libraries are loaded, and the step is compiled
    batches.seconds.clear()
    if setting.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    fit(1 if setting.small else 3)
    peak = torch.cuda.max_memory_allocated() - before if setting.on_gpu else 0
    torch.compiler.reset()
    return median(batches.seconds), peak / 2**20


def tabulate_steps(
    title: str, setting: Setting, case: Case, tokens: int = 0, flops: float = 0.0
) -> Table:
    "Return the table of a case; with `tokens` and FLOPs of a step, also throughput and utilization."
    found = measure_steps(setting, case)
    head = ['', 'ms a step', 'over by hand', 'over by hand, compiled', 'peak MiB']
    head += ['tokens a second', 'MFU'] * bool(tokens)
    references = [found[name] for name in ('by hand', 'by hand, compiled')]
    rows = []
    for name, values in found.items():
        if isinstance(values, str):
            rows.append([name, values, *[ABSENT] * (len(head) - 2)])
            continue
        seconds, peak = values
        ratios = [ABSENT if isinstance(r, str) else f'{seconds / r[0]:.2f}' for r in references]
        memory = f'{peak:.1f}' if setting.on_gpu else ABSENT
        row = [name, f'{seconds * 1e3:.3f}', *ratios, memory]
        if tokens:
            peak_flops = find_peak_flops(setting)
            mfu = f'{flops / seconds / peak_flops:.1%}' if peak_flops else ABSENT
            row += [f'{tokens / seconds:,.0f}', mfu]
        rows.append(row)
    return Table(title, head, rows)


def find_peak_flops(setting: Setting) -> float:
    "Return the device's dense bf16 FLOPs per second, or 0 if they are unknown."
    name = torch.cuda.get_device_name() if setting.on_gpu else ''
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), 0.0)


def compile_options(setting: Setting) -> dict[str, Any]:
    "Return the options of torch.compile; in reduced size no code is generated."
    return {'backend': 'eager'} if setting.small else {}


@section
def measure_mlp(setting: Setting) -> Table:
    case = Case(
        lambda: make_perceptron(16, 16),
        lambda: (torch.randn(8, 16), torch.randint(10, (8,))),
        F.cross_entropy,
        bf16=False,
        n_skipped=5 if setting.small else 50,
        n_timed=20 if setting.small else 300,
        compile_options=compile_options(setting),
        whole_step=True,
    )
    return tabulate_steps('A step of a perceptron 16-16-16-10, batch 8, AdamW', setting, case)


@section
def measure_resnet(setting: Setting) -> Table:
    bs, size = (2, 8) if setting.small else (256, 32)
    case = Case(
        lambda: ResNet(4, (1, 1)) if setting.small else ResNet(),
        lambda: (torch.randn(bs, 3, size, size), torch.randint(10, (bs,))),
        F.cross_entropy,
        bf16=True,
        n_skipped=1 if setting.small else 10,
        n_timed=3 if setting.small else 100,
        compile_options=compile_options(setting),
    )
    title = f'A step of a ResNet-18 on images of 32x32, batch {bs}, bf16, AdamW'
    return tabulate_steps(title, setting, case)


@section
def measure_gpt(setting: Setting) -> Table:
    vocabulary, length, width, layers, heads = (
        (50, 16, 16, 1, 2) if setting.small else (50304, 1024, 768, 12, 12)
    )
    bs = 2 if setting.small else 8
    make = partial(GPT, vocabulary, length, width, layers, heads, tied=True)
    case = Case(
        make,
        lambda: tuple(torch.randint(vocabulary, (2, bs, length)).unbind()),  # type: ignore[arg-type, return-value]
        CrossEntropyLossFlat(),
        bf16=True,
        n_skipped=1 if setting.small else 5,
        n_timed=3 if setting.small else 20,
        compile_options=compile_options(setting),
    )
    tokens = bs * length
    with torch.device('meta'):
        n = sum(p.numel() for p in make().parameters())
    # Chowdhery et al., 2022, appendix B
    flops = tokens * (6 * n + 12 * layers * width * length)
    title = f'A step of a GPT with {n / 1e6:.3g} M weights, {bs} sequences of {length}, bf16, AdamW'
    return tabulate_steps(title, setting, case, tokens, flops)


# -- data ------------------------------------------------------------------------------------------


@section
def measure_data(setting: Setting) -> Table:
    "Compare whole epochs with each loader to an epoch over batches that are on the device."
    n, bs = (512, 64) if setting.small else (60_000, 256)
    x = torch.randn(n, 784)
    y = torch.randint(10, (n,))
    make_dls: dict[str, Callable[[], DataLoaders]] = {
        'batches on the device': lambda: DataLoaders(
            list(zip(x.to(setting.device).split(bs), y.to(setting.device).split(bs), strict=True))
        ),
        'TensorLoader on the device': lambda: DataLoaders.from_tensors(
            (x, y), bs=bs, device=setting.device
        ),
        'TensorLoader on the host, read ahead': lambda: DataLoaders.from_tensors((x, y), bs=bs),
        'DataLoader, pinned memory, read ahead': lambda: DataLoaders.from_datasets(
            torch.utils.data.TensorDataset(x, y), bs=bs
        ),
    }
    rows = []
    reference = 0.0
    for name, make in make_dls.items():
        dls = make()
        dls.device = setting.device
        learn = Learner(dls, make_perceptron(784, 512).to(setting.device), F.cross_entropy)
        learn.fit(1)
        took = [time_fit(setting, learn) for _ in range(1 if setting.small else 3)]
        seconds = median(took) / -(-n // bs)
        reference = reference or seconds
        rows.append([name, f'{seconds * 1e3:.3f}', f'{seconds / reference:.2f}'])
    title = f'An epoch of {n} samples of 784 floats in batches of {bs}, shuffled'
    return Table(title, ['', 'ms a step', 'over batches on the device'], rows)


def time_fit(setting: Setting, learn: Learner) -> float:
    "Return the seconds of a fit of one epoch."
    setting.wait()
    began = time.perf_counter()
    learn.fit(1)
    setting.wait()
    return time.perf_counter() - began


# -- saving ----------------------------------------------------------------------------------------


class StepTimes(Callback):
    "Save twice in a fit, and keep the seconds of every step."

    order = 2000  # after the Checkpoint

    def __init__(self, setting: Setting, saver: Checkpoint, n_between: int) -> None:
        self.setting = setting
        self.saver = saver
        self.n_between = n_between
        self.seconds: list[float] = []

    def before_fit(self) -> None:
        self.last = time.perf_counter()

    def batch_checkpoint(self) -> None:
        # the first save allocates the memory that the second uses again
        if self.learn.time.ba in (self.n_between, 2 * self.n_between):
            self.saver.save()
        self.setting.wait()
        now = time.perf_counter()
        self.seconds.append(now - self.last)
        self.last = now


@section
def measure_save(setting: Setting) -> Table:
    "Measure the difference between the longest step after a save and a usual step."
    width = 64 if setting.small else 9200  # weights and two averages: 1 GB
    n = 4 if setting.small else 200
    rows = []
    x = torch.randn(16, width, device=setting.device)
    for background in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            saver = Checkpoint(
                every=None, folder=folder, keep_last=1, background=background, preemption=False
            )
            times = StepTimes(setting, saver, n)
            model = nn.Linear(width, width)
            learn = make_learner(
                setting, model, [(x, x)] * 3 * n, loss_func=F.mse_loss, cbs=[times, saver]
            )
            learn.fit(1)
            learn.close()
        usual = median(times.seconds[:n])
        longest = max(times.seconds[2 * n - 1 :])
        name = 'in the background' if background else 'at once'
        rows.append([name, *[f'{s * 1e3:.2f}' for s in (usual, longest, longest - usual)]])
        del learn, model
    title = f'Saving {3 * 4 * width * (width + 1) / 1e6:,.3g} MB of weights and averages'
    return Table(title, ['', 'ms a step', 'longest step after the save', 'held up'], rows)


# -- checks ----------------------------------------------------------------------------------------


def weights_of(model: nn.Module) -> Tensor:
    "Return all weights in one vector, on the host."
    return torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()


def describe_distance(a: Tensor, b: Tensor) -> str:
    if torch.equal(a, b):
        return 'equal'
    return f'differ by {(a - b).abs().max().item():.1e}'


class OutOfMemoryAbove(Callback):
    "Raise torch's out-of-memory error for more than `n` samples, for use in reduced size."

    def __init__(self, n: int) -> None:
        self.n = n

    def before_pred(self) -> None:
        if len(self.learn.xb[0]) > self.n:
            raise torch.OutOfMemoryError('out of memory, as this check wants it')


def check_out_of_memory(setting: Setting) -> str:
    "Train with `microbatch='auto'` on batches that do not fit, and compare with batches that fit."
    n, width = (64, 16) if setting.small else (2**15, 2048)
    torch.manual_seed(0)
    batches = make_batches(setting, 3, n, width)
    start = {k: v.clone() for k, v in make_perceptron(width, width).state_dict().items()}

    def train(limited: bool) -> Learner:
        model = make_perceptron(width, width)
        model.load_state_dict(start)
        # in small, nothing fills a GPU
        is_made_up = setting.small or not setting.on_gpu
        cbs = [OutOfMemoryAbove(n // 4)] if limited and is_made_up else []
        microbatch = 'auto' if limited else n // 8
        # Adam's steps would turn a last bit of a gradient near zero into a different sign
        learn = make_learner(
            setting, model, batches, opt_func=torch.optim.SGD, microbatch=microbatch, cbs=cbs
        )
        with limit_memory(setting, 2**28) if limited else nullcontext():
            learn.fit(1)
        return learn

    limited = train(True)
    whole = train(False)
    distance = describe_distance(weights_of(limited.model), weights_of(whole.model))
    return f'microbatches of {limited.parts.microbatches.fitting_size} of {n}; weights {distance}'


@contextmanager
def limit_memory(setting: Setting, n_bytes: int) -> Iterator[None]:
    "Limit this process to `n_bytes` of further memory on the GPU."
    if not setting.on_gpu:
        yield
        return
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + n_bytes) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def check_fp16(setting: Setting) -> str:
    "Compare `MixedPrecision('fp16')` with a loop around torch's GradScaler."
    n = 5 if setting.small else 50
    torch.manual_seed(0)
    batches = make_batches(setting, n)
    model = make_perceptron(16).to(setting.device)
    other = make_perceptron(16).to(setting.device)
    other.load_state_dict(model.state_dict())
    precision = MixedPrecision('fp16')
    learn = make_learner(setting, model, batches, opt_func=torch.optim.SGD, cbs=precision)
    learn.fit(1)
    opt = torch.optim.SGD(other.parameters(), lr=LR)
    scaler = torch.amp.GradScaler(setting.device.type)
    for x, y in batches:
        with torch.autocast(setting.device.type, torch.float16):
            loss = F.cross_entropy(other(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    scale = precision.scaler.get_scale()
    distance = describe_distance(weights_of(model), weights_of(other))
    return f'weights {distance}; scale {scale:.0f}, by hand {scaler.get_scale():.0f}'


def check_failed_fit(setting: Setting) -> str:
    "Compare the memory before and after a fit that fails in the middle of a step."
    batches = make_batches(setting, 6)
    learn = make_learner(setting, make_perceptron(16, 512), batches)
    learn.fit(1)
    before = setting.allocated()

    def fail(cb: Any) -> None:
        if cb.iter == 3:
            raise RuntimeError('as this check wants it')

    try:
        learn.fit(1, cbs=Callback(after_loss=fail))
    except RuntimeError:
        pass
    after = setting.allocated()
    return f'{(after - before) / 2**20:+.2f} MiB'


def check_resume(setting: Setting) -> str:
    "Compare an uninterrupted run with an interrupted and resumed run, under deterministic algorithms."
    batches = make_batches(setting, 8)

    def make(folder: str) -> Learner:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 10))
        saver = Checkpoint(every='1ba', folder=folder, preemption=False)
        return make_learner(setting, model, batches, cbs=saver)

    def leave(cb: Any) -> None:
        if cb.learn.time.ba == 11:
            raise KeyboardInterrupt

    stopper = Callback(batch_checkpoint=leave)
    stopper.order = 2000  # after the checkpoint
    torch.use_deterministic_algorithms(True)
    try:
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
            straight = make(one)
            broken = make(two)
            torch.manual_seed(1)
            straight.fit(2)
            torch.manual_seed(1)
            try:
                broken.fit(2, cbs=stopper)
            except KeyboardInterrupt:
                pass
            broken.close()
            resumed = make(two)
            resumed.fit(2, resume=True)
            for learn in (straight, resumed):
                learn.close()
    finally:
        torch.use_deterministic_algorithms(False)
    return f'weights {describe_distance(weights_of(straight.model), weights_of(resumed.model))}'


def check_strategy(setting: Setting, strategy: str) -> str:
    "Compare a fit of one process in a process group with a fit without."
    import torch.distributed as dist

    batches = make_batches(setting, 8)
    torch.manual_seed(0)
    model = make_perceptron(16)
    start = {k: v.clone() for k, v in model.state_dict().items()}
    alone = make_learner(setting, model, batches)
    alone.fit(1)
    other = make_perceptron(16)
    other.load_state_dict(start)
    learn = make_learner(setting, other, batches)
    backend = 'nccl' if setting.on_gpu else 'gloo'
    with tempfile.TemporaryDirectory() as folder:
        store = f'file://{folder}/store'
        dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
        try:
            with learn.distributed(strategy):
                learn.fit(1)
        finally:
            dist.destroy_process_group()
    distance = describe_distance(weights_of(learn.model), weights_of(alone.model))
    return f'{backend}: weights {distance}'


CHECKS: dict[str, Callable[[Setting], str]] = {
    "`microbatch='auto'` where memory runs out": check_out_of_memory,
    "`MixedPrecision('fp16')` and a GradScaler by hand": check_fp16,
    'memory after a failed fit': check_failed_fit,
    'resumed at batch 11 of 16': check_resume,
    'DDP, one process': partial(check_strategy, strategy='ddp'),
    'FSDP2, one process': partial(check_strategy, strategy='fsdp'),
}


@section
def measure_checks(setting: Setting) -> Table:
    "Run every check; a failed check is a row too."
    rows = []
    for name, check in CHECKS.items():
        try:
            said = NO_TIME if setting.is_over else check(setting)
        except Exception as e:
            said = f'failed: {type(e).__name__}: {e}'.splitlines()[0]
            print(traceback.format_exc(), file=sys.stderr)
        rows.append([name, said])
    return Table('What has to hold', ['', 'found'], rows)


# -- the command -----------------------------------------------------------------------------------


def keep_deterministic() -> None:
    "Make cuBLAS deterministic; call this before the first kernel runs."
    os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')


def measure(setting: Setting, name: str) -> Table:
    "Measure a section without the output of trainings."
    with open(os.devnull, 'w') as nowhere, redirect_stdout(nowhere):
        return SECTIONS[name](setting)


def main(argv: list[str] | None = None) -> int:
    "Measure what the command line asks for, print the tables, and return the exit status."
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        'python -m benchmarks.gpu',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('--device', default='cuda', help="'cuda' or 'cpu' (default cuda)")
    parser.add_argument(
        '--seconds', type=float, default=110, help='begin no measurement after that (default 110)'
    )
    parser.add_argument('--small', action='store_true', help='small models and few steps')
    parser.add_argument('--turns', type=int, default=2, help='measurements of each (default 2)')
    parser.add_argument(
        '--sections',
        type=names_of(list(SECTIONS)),
        default=list(SECTIONS),
        metavar=','.join(SECTIONS),
    )
    args = parser.parse_args(argv)
    if args.device == 'cuda' and not torch.cuda.is_available():
        print(
            'not measured: no accelerator (--device cpu --small runs the same code on the CPU, in small)'
        )
        return 0
    keep_deterministic()
    continue_in('tasks', 'benchmarks.gpu', argv)
    torch.set_num_threads(1)
    deadline_s = time.monotonic() + args.seconds
    setting = Setting(torch.device(args.device), args.small, args.turns, deadline_s)
    where = torch.cuda.get_device_name() if setting.on_gpu else 'the CPU'
    print(f'{where}, ' + ', '.join(f'{key} {value}' for key, value in machine().items()))
    failed = False
    for name in args.sections:
        if setting.is_over:
            print(f'\n{name}: {NO_TIME}', flush=True)
            continue
        table = measure(setting, name)
        print(f'\n{table}', flush=True)
        failed |= any('failed' in cell for row in table.rows for cell in row[1:])
    return int(failed)


if __name__ == '__main__':
    sys.exit(main())
