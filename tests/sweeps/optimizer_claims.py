"""Claims about optimizers: each trains in the Learner as in a loop by hand, bit for bit.

Two epochs of four batches, with a model of 4,800 parameters, so that optimizers with 8-bit states quantize them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from learnkit import (
    EMA,
    Checkpoint,
    DataLoaders,
    GradientAccumulation,
    GradientClip,
    Learner,
    MixedPrecision,
)
from learnkit.checkpoint.digest import differences
from tests.helpers.resuming import scramble
from tests.sweeps.claims import (
    Claim,
    Inapplicable,
    Killed,
    Weights,
    by_hand,
    run_killed,
    weights_of,
)
from tests.sweeps.optimizers import Training, build_for, prepare_process
from tests.sweeps.verdicts import Subject

N_EPOCH, N_BATCH, BS = 2, 4, 4
KILLS = (3, 3)  # at which batch of its process a run is killed
Batches = list[tuple[Tensor, Tensor]]
TORCH_MODES = ('train', 'eval')


class SecondOrder(Learner):
    "Keep the graph of the gradients, as optimizers with a Hessian demand."

    def _backward(self, **options: Any) -> None:
        super()._backward(create_graph=True, **options)


def make_model(kind: str) -> nn.Sequential:
    "Return a model with biases, of matrices only, or with sparse gradients."
    torch.manual_seed(0)
    if kind == 'sparse':
        return nn.Sequential(nn.EmbeddingBag(8, 64, sparse=True))
    has_bias = kind == 'biases'
    layers = [nn.Linear(8, 64, has_bias), nn.Linear(64, 64, has_bias), nn.Linear(64, 1, has_bias)]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def make_batches(kind: str, dtype: torch.dtype = torch.float32) -> Batches:
    "Return the batches of an epoch."
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(N_BATCH):
        x = torch.randn(BS, 8, generator=generator)
        y = x.sum(1, keepdim=True).to(dtype)
        if kind == 'sparse':
            batches.append((x[:, :3].abs().long().clamp(max=7), y.expand(BS, 64)))
        else:
            batches.append((x.to(dtype), y))
    return batches


def split_halves(model: nn.Sequential) -> list[list[nn.Parameter]]:
    "Return two groups of parameters."
    return [list(model[:2].parameters()), list(model[2:].parameters())]


# -- both loops ------------------------------------------------------------------------------------


def train_by_hand(
    subject: Subject,
    model: nn.Module,
    groups: Any = None,  # param groups; None: all parameters
    *,
    opt: Any = None,  # None: a new one
    n_epoch: int = N_EPOCH,
    seed: int = 2,
    dtype: torch.dtype = torch.float32,
    accumulated: int = 1,  # batches of a step
    scaler: Any = None,
    before_step: Callable[[Any], Any] = lambda opt: None,  # f(optimizer)
    after_step: Callable[[], Any] = lambda: None,
) -> list[Weights]:
    "Train with a loop of plain torch, and return the weights before each batch and at the end."
    training: Training = subject.options
    if opt is None:
        opt = build_for(subject, groups or model.parameters(), model, training.lr)
    call_mode(opt, 'train')
    kept = []
    batches = make_batches(training.model, dtype) * n_epoch
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    if scaler is not None:
        context = partial(torch.autocast, 'cpu', torch.float16)
    scramble(seed)
    for i, (x, y) in enumerate(batches):
        kept.append(weights_of(model))

        def evaluate(x: Tensor = x, y: Tensor = y) -> Tensor:
            with torch.enable_grad(), context():
                pred = model(x)
            loss = mse_loss(pred.float() if scaler else pred, y) / accumulated
            (scaler.scale(loss) if scaler else loss).backward(create_graph=training.second_order)
            return loss

        def evaluate_again(evaluate: Callable[[], Tensor] = evaluate) -> Tensor:
            with torch.enable_grad():
                opt.zero_grad()
                loss = evaluate()
                before_step(opt)
                return loss

        if not isinstance(opt, torch.optim.LBFGS):
            evaluate()
        if (i + 1) % accumulated:
            continue
        if scaler:
            scaler.unscale_(opt)
        before_step(opt)
        if scaler:
            scaler.step(opt)
            scaler.update()
        elif training.closure:
            opt.step(evaluate_again)
        else:
            opt.step()
        after_step()
        opt.zero_grad()
    call_mode(opt, 'eval')
    return [*kept, weights_of(model)]


def call_mode(opt: Any, mode: str) -> None:
    "Call `train` or `eval` of an optimizer that has both."
    if all(callable(getattr(opt, name, None)) for name in TORCH_MODES):
        getattr(opt, mode)()


def make_learner(
    subject: Subject,
    model: nn.Module,
    *cbs: Any,
    folder: Path | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Learner:
    "Return the Learner that trains as `train_by_hand`."
    training: Training = subject.options
    opt_func: Any = subject.build
    if training.closure:
        opt_func = partial(_add_closure, opt_func)
    cls = SecondOrder if training.second_order else Learner
    batches = make_batches(training.model, dtype)
    dls = DataLoaders(batches, device='cpu', path=folder or '.')
    options = {'lr': training.lr, **options}
    return cls(dls, model, mse_loss, opt_func=opt_func, cbs=list(cbs), default_cbs=True, **options)


def _add_closure(make: Callable[..., Any], params: Any, lr: Any) -> Any:
    from learnkit.optim import OptimWrapper

    return OptimWrapper(opt=make(params, lr=lr), needs_closure=True)


def fit(learn: Learner, n_epoch: int = N_EPOCH, **options: Any) -> Weights:
    "Train, and return the weights."
    scramble(2)
    with learn.no_logging(), learn.no_bar():
        learn.fit(n_epoch, **options)
    return weights_of(learn.model)


def compare(expected: Weights, got: Weights, what: str = 'weights') -> list[str]:
    "Return the name of what differs in any bit."
    if any(bool(value.isnan().any()) for value in expected.values()):
        raise Inapplicable('the loop by hand ends with NaN')
    lines = differences(expected, got)
    if not lines:
        return []
    gap = max(float((expected[k].float() - got[k].float()).abs().max()) for k in expected)
    return [f'{what} differ by {gap:.2g}']


def prepare(subject: Subject) -> nn.Sequential:
    "Return the model, in a process that is prepared for the optimizer."
    prepare_process(subject)
    return make_model(subject.options.model)


# -- claims ----------------------------------------------------------------------------------------


def check_training(subject: Subject, folder: Path) -> list[str]:
    model = prepare(subject)
    expected = by_hand(lambda: train_by_hand(subject, deepcopy(model)))[-1]
    return compare(expected, fit(make_learner(subject, model)))


def check_groups(subject: Subject, folder: Path) -> list[str]:
    "Two groups, of which the first has a tenth of the rate."
    model = prepare(subject)
    if subject.options.model == 'sparse':
        raise Inapplicable('a model with one parameter')
    lr = subject.options.lr
    lrs = [lr / 10, lr]

    def train() -> list[Weights]:
        own = deepcopy(model)
        groups = [
            {'params': ps, 'lr': rate} for ps, rate in zip(split_halves(own), lrs, strict=True)
        ]
        return train_by_hand(subject, own, groups)

    expected = by_hand(train)[-1]
    return compare(expected, fit(make_learner(subject, model, splitter=split_halves, lr=lrs)))


def check_bf16(subject: Subject, folder: Path) -> list[str]:
    model = prepare(subject).bfloat16()
    half = torch.bfloat16
    expected = by_hand(lambda: train_by_hand(subject, deepcopy(model), dtype=half))[-1]
    return compare(expected, fit(make_learner(subject, model, dtype=half)))


def train_to_the_end(subject: Subject, folder: Path, seed: int) -> Weights:
    "Train with a checkpoint of each batch, or resume from the newest."
    model = prepare(subject)
    checkpoint = Checkpoint('1ba', folder, background=False)
    learn = make_learner(subject, model, Killed(), checkpoint, folder=folder)
    scramble(seed)
    with learn.no_logging(), learn.no_bar():
        learn.fit(N_EPOCH, resume=True)
    return weights_of(learn.model)


def check_resume(subject: Subject, folder: Path) -> list[str]:
    "Kill twice, resume twice, each time in a new process with other seeds."
    model = prepare(subject)
    expected = by_hand(lambda: train_by_hand(subject, deepcopy(model)))[-1]
    if subject.options.needs_group:
        torch.distributed.destroy_process_group()  # its threads are not in a forked process
    seeds = iter((2, 77, 78))
    got = run_killed(lambda: train_to_the_end(subject, folder, next(seeds)), KILLS)
    return compare(expected, got)


def check_rewind(subject: Subject, folder: Path) -> list[str]:
    "Rewind to batch 5, from the checkpoint after batch 3, and train on from there."
    model = prepare(subject)
    expected = by_hand(lambda: train_by_hand(subject, deepcopy(model)))[-1]
    checkpoints = [Checkpoint('3ba', background=False) for _ in range(2)]
    fit(make_learner(subject, deepcopy(model), checkpoints[0], folder=folder))
    again = make_learner(subject, model, checkpoints[1], folder=folder)
    scramble(77)
    with again.no_logging(), again.no_bar():
        moment = again.rewind('5ba')
        again.fit(N_EPOCH, resume=moment)
    return compare(expected, weights_of(again.model))


def check_accumulation(subject: Subject, folder: Path) -> list[str]:
    "Two batches a step."
    model = prepare(subject)
    expected = by_hand(lambda: train_by_hand(subject, deepcopy(model), accumulated=2))[-1]
    return compare(expected, fit(make_learner(subject, model, GradientAccumulation(batches=2))))


def check_scaler(subject: Subject, folder: Path) -> list[str]:
    "Autocast to fp16 and a GradScaler."
    model = prepare(subject)

    def train() -> list[Weights]:
        if subject.options.closure:
            raise TypeError('GradScaler.step takes no closure')
        return train_by_hand(subject, deepcopy(model), scaler=torch.amp.GradScaler('cpu'))

    expected = by_hand(train)[-1]
    return compare(expected, fit(make_learner(subject, model, MixedPrecision('fp16'))))


def check_clipping(subject: Subject, folder: Path) -> list[str]:
    model = prepare(subject)
    if subject.options.model == 'sparse':
        raise Inapplicable('torch clips no sparse gradients')

    def clip(opt: Any) -> None:
        params = [p for group in opt.param_groups for p in group['params']]
        nn.utils.clip_grad_norm_(params, 0.1)

    expected = by_hand(lambda: train_by_hand(subject, deepcopy(model), before_step=clip))[-1]
    return compare(expected, fit(make_learner(subject, model, GradientClip(0.1))))


def check_ema(subject: Subject, folder: Path) -> list[str]:
    "An average with a decay of 0.9."
    model = prepare(subject)
    own = deepcopy(model)
    average = weights_of(own)

    def update() -> None:
        for name, value in own.named_parameters():
            average[name] = 0.9 * average[name] + 0.1 * value.detach()

    expected = by_hand(lambda: train_by_hand(subject, own, after_step=update))[-1]
    ema = EMA(0.9, warmup=None)
    lines = compare(expected, fit(learn := make_learner(subject, model, ema)))
    with ema.applied():
        got = weights_of(learn.model)
    is_close = all(torch.allclose(got[k], average[k], rtol=1e-5, atol=1e-6) for k in average)
    return lines if is_close else [*lines, 'the average differs']


def check_load(subject: Subject, folder: Path) -> list[str]:
    "An epoch, `save`, and an epoch after `load` into a new Learner."
    model = prepare(subject)
    expected = by_hand(lambda: load_by_hand(subject, deepcopy(model)))
    first = make_learner(subject, deepcopy(model), folder=folder)
    fit(first, 1)
    first.save('here')
    again = make_learner(subject, model, folder=folder)
    again.load('here')
    scramble(3)
    with again.no_logging(), again.no_bar():
        again.fit(1)
    return compare(expected, weights_of(again.model))


def load_by_hand(subject: Subject, model: nn.Module) -> Weights:
    "Train an epoch, load the state dicts of the model and the optimizer into new ones, and train another."
    lr = subject.options.lr
    opt = build_for(subject, model.parameters(), model, lr)
    train_by_hand(subject, model, opt=opt, n_epoch=1)
    loaded = make_model(subject.options.model)
    loaded.load_state_dict(model.state_dict())
    opt_loaded = build_for(subject, loaded.parameters(), loaded, lr)
    opt_loaded.load_state_dict(opt.state_dict())
    for group in opt_loaded.param_groups:
        group['lr'] = lr  # a fit begins with the Learner's rate, as in fastai
    return train_by_hand(subject, loaded, opt=opt_loaded, n_epoch=1, seed=3)[-1]


def check_compiled(subject: Subject, folder: Path) -> list[str]:
    "`compile(step=True)`, with the graph run as it is; the other step has a reason."
    if subject.options.eager:
        raise Inapplicable('its own step is compiled, which this sweep turns off')
    model = prepare(subject)
    expected = by_hand(lambda: train_by_hand(subject, deepcopy(model)))[-1]
    learn = make_learner(subject, model).compile(step=True, backend='eager')
    got = fit(learn)
    kind, _, reason = learn.explain_step().partition(':')
    if 'compiled' not in kind and not reason:
        return [f'no reason: {kind}']
    is_close = all(torch.allclose(got[k], expected[k], rtol=1e-5, atol=1e-5) for k in expected)
    return [] if is_close else compare(expected, got)


CLAIMS: dict[str, Claim] = {
    'trains': check_training,
    'groups': check_groups,
    'bf16 model': check_bf16,
    'kill and resume': check_resume,
    'rewind': check_rewind,
    'accumulation': check_accumulation,
    'GradScaler': check_scaler,
    'clipping': check_clipping,
    'EMA': check_ema,
    'load': check_load,
    'compiled step': check_compiled,
}
