"""Memory and time of a save in a training, and memory of a resume, for `python -m benchmarks.checkpoint`.

A stack of linear layers is trained by SGD with momentum on one thread, and every sixth batch is saved: by learnkit's
`Checkpoint`, by `torch.distributed.checkpoint.async_save` (with its defaults, and with staging into memory that it
keeps), and by `torch.save`. Each subject runs in a process of its own, in interleaved rounds; the table has medians.

wait      milliseconds for which the training stands still, with the wait for the previous save
in save   highest resident memory while the training stands still, over the memory just before
between   highest resident memory from this save to the next, over the highest of training before the first save
end       resident memory after the training, over the same level

Memory is in units of the state. The system reports the highest resident memory (VmHWM), which is reset through
`/proc/self/clear_refs`: this benchmark runs on Linux only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ['RESUMES', 'SAVES', 'measure', 'report']

WIDTH = 2048  # of a layer, whose weights and momentum have 33.6 MB
BATCH = 64
INTERVAL = 6  # batches
N_SAVES = 6

Numbers = dict[str, float]  # by the name of the column and of the row
Pause = Callable[[], None]


class Memory:
    "The resident memory of this process, in units of the state."

    def __init__(self, unit: int) -> None:
        self.unit = unit

    def read(self, entry: str) -> float:
        "Return `VmRSS` or `VmHWM`."
        lines = Path('/proc/self/status').read_text().splitlines()
        line = next(line for line in lines if line.startswith(entry))
        return int(line.split()[1]) * 1024 / self.unit

    def reset_peak(self) -> None:
        Path('/proc/self/clear_refs').write_text('5')


def make_model(n_layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(n_layers)])


def make_optimizer(params: Any, lr: float = 1e-4) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


def count_bytes(model: nn.Module) -> int:
    return 2 * sum(p.nbytes for p in model.parameters())


def follow(memory: Memory, save: Callable[[], object], numbers: Numbers) -> Iterator[None]:
    "Save every sixth batch; each `next` is the end of a batch. The numbers of later saves are medians."
    for _ in range(2 * INTERVAL):
        yield
    memory.reset_peak()
    for _ in range(INTERVAL):
        yield
    level = memory.read('VmHWM')
    found: list[tuple[float, float, float]] = []
    for _ in range(N_SAVES):
        memory.reset_peak()
        before = memory.read('VmRSS')
        began = time.perf_counter()
        save()
        wait = time.perf_counter() - began
        in_save = memory.read('VmHWM') - before
        for _ in range(INTERVAL):
            yield
        found.append((wait * 1000, in_save, memory.read('VmHWM') - level))
    columns = ('wait', 'in save', 'between')
    later = [median(values) for values in zip(*found[1:], strict=True)]
    for row, values in (('first', found[0]), ('later', later)):
        numbers.update({f'{column} {row}': v for column, v in zip(columns, values, strict=True)})
    numbers['level'] = level


# ----------------------------------------------------------------------------------------- the saves


def save_by_learnkit(n_layers: int, folder: Path, background: bool) -> Numbers:
    from learnkit import Callback, Checkpoint

    model = make_model(n_layers)
    memory = Memory(count_bytes(model))
    numbers: Numbers = {}
    checkpoint = Checkpoint(None, folder, keep_last=2, background=background, preemption=False)
    course = follow(memory, checkpoint.save, numbers)

    def go_on(cb: Any) -> None:
        if next(course, 'end') == 'end':
            cb.learn.stop()

    learn = _make_learner(model, Callback(batch_checkpoint=go_on), checkpoint)
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
    numbers['end'] = memory.read('VmRSS') - numbers.pop('level')
    return numbers


def _make_learner(model: nn.Module, *cbs: Any) -> Any:
    from learnkit import DataLoaders, Learner

    x = torch.randn(BATCH, next(model.parameters()).shape[1])
    return Learner(
        DataLoaders([(x, x)] * 1000, device='cpu'),
        model,
        F.mse_loss,
        opt_func=make_optimizer,
        lr=1e-4,
        cbs=list(cbs),
    )


def save_by_hand(n_layers: int, folder: Path, make_save: Callable[[Path], Any]) -> Numbers:
    "Train by a hand-written loop; `make_save(folder)` returns a function of the state."
    model = make_model(n_layers)
    opt = make_optimizer(model.parameters())
    memory = Memory(count_bytes(model))
    numbers: Numbers = {}
    save = make_save(folder)
    course = follow(
        memory, lambda: save({'model': model.state_dict(), 'opt': opt.state_dict()}), numbers
    )
    x = torch.randn(BATCH, WIDTH)
    while next(course, 'end') != 'end':
        F.mse_loss(model(x), x).backward()
        opt.step()
        opt.zero_grad()
    save(None)
    numbers['end'] = memory.read('VmRSS') - numbers.pop('level')
    return numbers


def make_torch_save(folder: Path) -> Callable[[Any], None]:
    def save(state: Any) -> None:
        if state is not None:
            torch.save(state, folder / 'checkpoint.pt')

    return save


def make_async_save(folder: Path, cached: bool) -> Callable[[Any], None]:
    from torch.distributed.checkpoint import async_save
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    stager = DefaultStager(StagingOptions(False, False, False, False)) if cached else None
    writing: list[Any] = []

    def save(state: Any) -> None:
        "Save, or wait for the last save if there is no state."
        if writing:
            writing.pop().result()
        if state is None:
            if stager is not None:
                stager.close()
            return
        writing.append(
            async_save(state, checkpoint_id=folder / 'dcp', async_stager=stager, no_dist=True)
        )

    return save


SAVES: dict[str, Callable[[int, Path], Numbers]] = {
    'learnkit, background': lambda n, folder: save_by_learnkit(n, folder, background=True),
    'learnkit, foreground': lambda n, folder: save_by_learnkit(n, folder, background=False),
    'async_save, defaults': lambda n, folder: save_by_hand(
        n, folder, lambda folder: make_async_save(folder, cached=False)
    ),
    'async_save, cached staging': lambda n, folder: save_by_hand(
        n, folder, lambda folder: make_async_save(folder, cached=True)
    ),
    'torch.save': lambda n, folder: save_by_hand(n, folder, make_torch_save),
}


# --------------------------------------------------------------------------------------- the resumes


def resume_by_learnkit(n_layers: int, folder: Path) -> Numbers:
    "Resume from the checkpoint before the last, which is the end of the fit."
    from learnkit import Callback, Checkpoint
    from learnkit.checkpoint.folder import entries

    with tempfile.TemporaryDirectory() as other:  # imports belong to the level
        learn = _make_learner(nn.Linear(4, 4), Checkpoint(None, other, preemption=False))
        with learn.no_bar(), learn.no_logging():
            learn.fit('1ba')
    model = make_model(n_layers)
    memory = Memory(count_bytes(model))
    numbers: Numbers = {}
    levels: list[float] = []

    def look(cb: Any) -> None:
        if cb.training and not numbers:
            numbers['peak'] = memory.read('VmHWM') - levels[-1]
            numbers['end'] = memory.read('VmRSS') - levels[-1]
            cb.learn.stop()

    checkpoint = Checkpoint(None, folder / 'resumed', preemption=False)
    learn = _make_learner(model, Callback(before_batch=look), checkpoint)
    path = entries(folder)[1].path
    with learn.no_bar(), learn.no_logging():
        memory.reset_peak()
        levels.append(memory.read('VmRSS'))
        learn.fit(1, resume=path)
    return numbers


def resume_by_torch(n_layers: int, folder: Path) -> Numbers:
    "Load a file of torch.save as its documentation says."
    model = make_model(n_layers)
    opt = make_optimizer(model.parameters())
    memory = Memory(count_bytes(model))
    memory.reset_peak()
    level = memory.read('VmRSS')
    state = torch.load(folder / 'checkpoint.pt', weights_only=True)
    model.load_state_dict(state['model'])
    opt.load_state_dict(state['opt'])
    del state
    return {'peak': memory.read('VmHWM') - level, 'end': memory.read('VmRSS') - level}


# subject: function, and the subject of `SAVES` whose file it reads
RESUMES: dict[str, tuple[Callable[[int, Path], Numbers], str]] = {
    'learnkit': (resume_by_learnkit, 'learnkit, background'),
    'torch.load': (resume_by_torch, 'torch.save'),
}


# ------------------------------------------------------------------------------------ what is printed


def measure(megabytes: int, rounds: int) -> dict[str, list[Numbers]]:
    "Return the numbers of each subject of both tables in each round; each is measured in a process of its own."
    n_layers = max(round(megabytes * 1e6 / (2 * 4 * WIDTH * WIDTH)), 1)
    found: dict[str, list[Numbers]] = {}
    for i in range(rounds):
        names = list(SAVES)
        for name in names[i % len(names) :] + names[: i % len(names)]:
            with tempfile.TemporaryDirectory() as folder:
                found.setdefault(name, []).append(_run(name, n_layers, folder))
                for resume, (_, source) in RESUMES.items():
                    if source == name:
                        found.setdefault(resume, []).append(_run(resume, n_layers, folder))
    return found


def _run(name: str, n_layers: int, folder: str) -> Numbers:
    "Measure a subject in a new process."
    command = [sys.executable, '-m', 'benchmarks.save_memory', name, str(n_layers), folder]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    numbers: Numbers = json.loads(done.stdout.splitlines()[-1])
    return numbers


def report(megabytes: int, found: dict[str, list[Numbers]]) -> str:
    "Return both tables. Waits are also given as the median of their ratios to `async_save` in the same round."

    def middle(name: str, column: str) -> float:
        return median(numbers[column] for numbers in found[name])

    lines = [
        f'save-memory: a save every sixth batch, {megabytes} MB of state, memory in units of the state',
        f'{"":36}{"wait ms":>9}{"ratio":>8}{"in save":>9}{"between":>9}{"end":>7}',
    ]
    base = found['async_save, defaults']
    for name in SAVES:
        for row in ('first', 'later'):
            column = f'wait {row}'
            ratios = [a[column] / b[column] for a, b in zip(found[name], base, strict=True)]
            end = f'{middle(name, "end"):7.2f}' if row == 'later' else ''
            lines.append(
                f'{name + ", " + row:36}{middle(name, column):9.1f}{median(ratios):8.2f}'
                f'{middle(name, f"in save {row}"):9.2f}{middle(name, f"between {row}"):9.2f}{end}'
            )
    lines += ['', f'resume-memory: {megabytes} MB of state', f'{"":36}{"peak":>9}{"then":>9}']
    for name in RESUMES:
        lines.append(f'{name:36}{middle(name, "peak"):9.2f}{middle(name, "end"):9.2f}')
    return '\n'.join(lines)


def _serve(name: str, n_layers: str, folder: str) -> None:
    warnings.simplefilter('ignore')  # of torch, about its own staging
    torch.set_num_threads(1)
    run = SAVES[name] if name in SAVES else RESUMES[name][0]
    print(json.dumps(run(int(n_layers), Path(folder))))


if __name__ == '__main__':
    _serve(*sys.argv[1:])
