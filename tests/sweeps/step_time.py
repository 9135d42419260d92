"""Time of a training step with each optimizer, compared with a loop by hand.

A model of 0.5 million parameters trains on batches of 64 samples, in turns by the loop by hand and by the Learner.
The seconds are of the processor, with one thread, so that other programs change them little."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from learnkit import Callback, DataLoaders, Learner
from tests.sweeps.claims import WRONG, Inapplicable, by_hand
from tests.sweeps.optimizers import build_for, prepare_process
from tests.sweeps.verdicts import Subject, Verdict, count_libraries, find_version, shorten

MEASURED = 'measured'
FAILED = 'fails'
N_ROUND = 5
MOST_ROUNDS = 15  # while the median is above `LIMIT`, as other programs share the caches
N_BATCH, BS = 12, 64
N_WARM_UP = 4  # batches that are not measured: an optimizer makes its states
N_IN, N_HIDDEN = 256, 1024
LIMIT = 1.3  # ratio from which an optimizer is named


class NoteTimes(Callback):
    "Record when each batch ends."

    order = 200

    def __init__(self) -> None:
        self.times: list[float] = []

    def after_batch(self) -> None:
        self.times.append(process_time())

    def state_dict(self) -> None:
        return None


def make_model(has_bias: bool) -> nn.Sequential:
    torch.manual_seed(0)
    first, last = nn.Linear(N_IN, N_HIDDEN, has_bias), nn.Linear(N_HIDDEN, N_IN, has_bias)
    return nn.Sequential(first, nn.ReLU(), last)


def make_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shape = (BS, N_IN)
    return [
        (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
        for _ in range(N_BATCH)
    ]


def median_step(times: Sequence[float]) -> float:
    "Return the median time between the ends of two batches."
    gaps = [end - start for start, end in pairwise(times)]
    return median(gaps[N_WARM_UP:])


def time_by_hand(opt: Any, model: nn.Module, batches: Any) -> float:
    "Return the seconds of a step of a loop of plain torch."
    times = []
    for x, y in batches:
        loss = mse_loss(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        times.append(process_time())
    return median_step(times)


def time_learner(learn: Learner, note: NoteTimes) -> float:
    "Return the seconds of a step of a fit."
    note.times.clear()
    with learn.no_logging(), learn.no_bar():
        learn.fit(1)
    return median_step(note.times)


def measure_ratio(subject: Subject) -> float:
    "Return the time of the Learner's step divided by that of the loop by hand, in the median over rounds."
    model = make_model(subject.options.model == 'biases')
    batches = make_batches()
    own = deepcopy(model)
    lr = subject.options.lr
    opt = by_hand(lambda: build_for(subject, own.parameters(), own, lr))
    note = NoteTimes()
    dls = DataLoaders(batches, device='cpu')
    learn = Learner(dls, model, mse_loss, opt_func=subject.build, lr=lr, cbs=note)
    if hasattr(opt, 'train'):  # of schedulefree
        opt.train()
    ratios: list[float] = []
    while len(ratios) < N_ROUND or (median(ratios) > LIMIT and len(ratios) < MOST_ROUNDS):
        seconds = by_hand(lambda: time_by_hand(opt, own, batches))
        ratios.append(time_learner(learn, note) / seconds)
    return median(ratios)


def judge(subject: Subject, folder: Path) -> list[Verdict]:
    "Measure an optimizer that steps without a closure."
    verdict = partial(Verdict, subject.library, find_version(subject.library) or '', subject.title)
    if subject.options.closure or subject.options.second_order:
        return []
    if subject.options.model == 'sparse':
        return []
    try:
        prepare_process(subject)
        return [verdict(MEASURED, f'{measure_ratio(subject):.3f}')]
    except Inapplicable as e:
        return [verdict(FAILED, str(e))]
    except Exception as e:
        return [verdict(WRONG, shorten(f'{type(e).__name__}: {e}'))]


def describe(verdicts: Sequence[Verdict]) -> tuple[str, str]:
    "Return a sentence with the median, and a table by library."
    found = [(v, float(v.note)) for v in verdicts if v.verdict == MEASURED]
    if not found:
        return 'Nothing was measured.', ''
    ratios = [ratio for _, ratio in found]
    libraries = list(dict.fromkeys(verdict.library for verdict, _ in found))
    n_above = sum(ratio > LIMIT for ratio in ratios)
    counts = (
        f'{len(found)} optimizers, {count_libraries(len(libraries))}: '
        f'{median(ratios):.2f} of the time of the loop by hand in the median, {n_above} above {LIMIT}.'
    )
    lines = ['| library | optimizers | median | largest |', '|---|--:|--:|---|']
    for library in libraries:
        own = [(v, ratio) for v, ratio in found if v.library == library]
        slowest, largest = max(own, key=lambda pair: pair[1])
        middle = median([ratio for _, ratio in own])
        name = f'{library} {slowest.version}'
        lines.append(f'| {name} | {len(own)} | {middle:.2f} | {largest:.2f}, {slowest.title} |')
    failed = [verdict.title for verdict in verdicts if verdict.verdict == FAILED]
    if failed:
        counts += f' The loop by hand fails with {", ".join(failed)}.'
    if wrong := [verdict.title for verdict in verdicts if verdict.verdict == WRONG]:
        counts += f' {WRONG}, the Learner alone fails: {", ".join(wrong)}.'
    return counts, '\n'.join(lines)
