"""The contract of `torch.optim.Optimizer`: states, options, `zero_grad` and schedulers, against loops of torch."""

import contextlib
import io
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from learnkit import Callback, Checkpoint
from learnkit.callbacks.schedule import LRScheduler
from tests.helpers.own_optimizers import (
    N_BATCHES,
    Clearing,
    Counting,
    Factored,
    Options,
    Saving,
    SinglePrecision,
    Wrapping,
    learner,
    weights,
    weights_by_hand,
)
from tests.silent.cases import case

PART = 'optimizers'


def compare_resumed(opt_func: Any, dtype: torch.dtype = torch.float32) -> tuple[Any, float]:
    "Return the largest difference of resumed weights from a plain loop, which is 0, or the type of the error."
    with TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        try:
            learner(opt_func, folder, dtype).fit(1, cbs=Checkpoint(every='3ba'))
            path = next(iter(sorted(Path(folder, 'checkpoints').glob('*ba3.ckpt'))))
            learn = learner(opt_func, folder, dtype)
            learn.fit(1, resume=path, cbs=Checkpoint(every='3ba'))
        except Exception as e:
            return type(e).__name__, 0.0
    return compare(weights(learn.model), weights_by_hand(opt_func, dtype=dtype)), 0.0


def compare(own: Tensor, by_hand: Tensor) -> float:
    return float((own.double() - by_hand.double()).abs().max())


@case(PART, 'float32 state of bf16 weights, resumed', old='0.00195 away', tolerance=0.0)
def bf16_state() -> tuple[Any, Any]:
    return compare_resumed(SinglePrecision, torch.bfloat16)


@case(PART, "an entry state['k'], as MADGRAD has, resumed", old='CheckpointError', tolerance=0.0)
def counting() -> tuple[Any, Any]:
    return compare_resumed(Counting)


@case(PART, "an entry state['k'], in a second fit", old='AttributeError', tolerance=0.0)
def counting_twice() -> tuple[Any, Any]:
    learn = learner(Counting)
    try:
        learn.fit(1)
        learn.fit(1)
    except AttributeError as e:
        return type(e).__name__, 0.0
    return compare(weights(learn.model), weights_by_hand(Counting, 2)), 0.0


@case(
    PART,
    'exp_avg_sq with one number a row, as Amos has, resumed',
    old='WeightsError',
    tolerance=0.0,
)
def factored() -> tuple[Any, Any]:
    return compare_resumed(Factored)


@case(
    PART, 'a dtype, a device and functions among options, resumed', old='OptionError', tolerance=0.0
)
def options() -> tuple[Any, Any]:
    return compare_resumed(Options)


@case(
    PART, 'a counter in the state dict, as StableSPAM has, resumed', old='0.105 away', tolerance=0.0
)
def added_entry() -> tuple[Any, Any]:
    return compare_resumed(Saving)


@case(
    PART,
    'a state dict of its own layout, as Lookahead has, resumed',
    old='CheckpointError',
    tolerance=0.0,
)
def own_layout() -> tuple[Any, Any]:
    return compare_resumed(Wrapping)


@case(PART, 'calls of zero_grad in 6 steps', old='0')
def zero_grad() -> tuple[Any, Any]:
    learn = learner(Clearing)
    before = {}
    note = Callback(before_batch=lambda cb: before.setdefault('n', cb.learn.opt.opt._n_cleared))
    learn.fit(1, cbs=note)
    return learn.opt.opt._n_cleared - before['n'], N_BATCHES


@case(PART, 'OneCycleLR with linear annealing: the rate of each batch', old='OptimizerError')
def linear_cycle() -> tuple[Any, Any]:
    make = partial(OneCycleLR, max_lr=0.1, total_steps=N_BATCHES, anneal_strategy='linear')
    learn = learner(torch.optim.SGD)
    try:
        learn.fit(1, cbs=LRScheduler(partial(make, cycle_momentum=False), by='batch'))
    except Exception as e:
        return type(e).__name__, ''
    opt = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.05)
    schedule = make(opt, cycle_momentum=False)
    rates = []
    for _ in range(N_BATCHES):
        rates.append(opt.param_groups[0]['lr'])
        opt.step()
        schedule.step()
    return learn.recorder.lrs, rates


class ByEpoch:
    "A scheduler as timm's."

    def __init__(self, opt: Any) -> None:
        self.opt = opt

    def step(self, epoch: int) -> None: ...


@case(PART, "a scheduler as timm's: batches before the error", old='TypeError after 6')
def timm_scheduler() -> tuple[Any, Any]:
    learn = learner(torch.optim.SGD)
    try:
        learn.fit(1, cbs=LRScheduler(ByEpoch))
    except Exception as e:
        return [type(e).__name__, learn.train_iter], ['OptionError', 0]
    return 'no error', ''
