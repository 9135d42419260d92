"""Claims about modules: a model that has the module trains as in a loop by hand, and what reads a model reads it.

Two epochs of three batches of eight samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint

from learnkit import EMA, Checkpoint, DataLoaders, Learner
from learnkit.callbacks import ActivationCheckpointing
from learnkit.callbacks.hooks import Hook
from learnkit.checkpoint.digest import differences
from learnkit.core.roles import STATISTICS_NORMS
from tests.helpers.resuming import scramble
from tests.sweeps.claims import (
    Claim,
    Inapplicable,
    Killed,
    NothingToTry,
    Weights,
    by_hand,
    run_killed,
    weights_of,
)
from tests.sweeps.modules import BS, Inputs
from tests.sweeps.verdicts import Subject

N_EPOCH, N_BATCH = 2, 3
LR = 0.05
MICROBATCH = 4
KILLS = (2, 3)  # at which batch of its process a run is killed
Batch = tuple[Tensor, ...]  # inputs and targets


def find_tensor(out: Any) -> Tensor:
    "Return the logits of an output, or its first tensor."
    if isinstance(out, Mapping):
        out = out['logits']
    while not isinstance(out, Tensor):
        out = out[0]
    return out


class Model(nn.Module):
    "A model around a module: a scale of its inputs, and a layer behind its mean."

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.body = body
        self.head = nn.Linear(1, 1)

    def forward(self, *xb: Tensor) -> Tensor:
        scaled = [x * self.scale if x.is_floating_point() else x for x in xb]
        out = find_tensor(self.body(*scaled))
        pred: Tensor = self.head(out.reshape(out.shape[0], -1).mean(1, keepdim=True))
        return pred


def make_batches(inputs: Inputs) -> list[Batch]:
    "Return the batches of an epoch."
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(N_BATCH):
        shape = (BS, *inputs.shape)
        xb = [torch.randn(shape, generator=generator) for _ in range(inputs.n)]
        if inputs.n_ids:
            ids = torch.randint(1, inputs.n_ids, shape, generator=generator)
            xb = [ids] * inputs.n
        batches.append((*xb, torch.randn(BS, 1, generator=generator)))
    return batches


def make_model(subject: Subject) -> Model:
    "Return the model, with the same weights each time; a lazy module has its parameters."
    torch.manual_seed(0)
    model = by_hand(lambda: Model(subject.build()))
    if any(is_lazy(p) for p in model.parameters()):
        *xb, _ = make_batches(subject.options)[0]
        with torch.no_grad():
            by_hand(lambda: model.eval()(*xb))
    return model.train()


# -- both loops ------------------------------------------------------------------------------------


def train_by_hand(
    subject: Subject,
    model: nn.Module,
    microbatch: int = BS,
    after_step: Callable[[], Any] = lambda: None,
) -> Weights:
    "Train with a loop of plain torch, and return the weights."
    params = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.SGD(params, LR, momentum=0.9)
    torch.manual_seed(2)
    for _ in range(N_EPOCH):
        for batch in make_batches(subject.options):
            for part in zip(*(column.split(microbatch) for column in batch), strict=True):
                *xb, y = part
                loss = mse_loss(model(*xb), y) * (len(y) / BS)
                loss.backward()
            opt.step()
            opt.zero_grad()
            after_step()
    return weights_of(model)


def sgd(params: Any, lr: float) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr, momentum=0.9)


def make_learner(
    subject: Subject, model: nn.Module, *cbs: Any, folder: Path | None = None, **options: Any
) -> Learner:
    "Return the Learner that trains as `train_by_hand`."
    batches = make_batches(subject.options)
    n_inp = subject.options.n
    dls = DataLoaders(batches, device='cpu', path=folder or '.', n_inp=n_inp)
    return Learner(dls, model, mse_loss, opt_func=sgd, lr=LR, cbs=list(cbs), **options)


def fit(learn: Learner, **options: Any) -> Weights:
    "Train, and return the weights."
    torch.manual_seed(2)
    with learn.no_logging(), learn.no_bar():
        learn.fit(N_EPOCH, **options)
    return weights_of(learn.model)


def compare(expected: Weights, got: Weights, tolerance: float = 0.0) -> list[str]:
    "Return by how much weights differ, more than a tolerance."
    if not differences(expected, got):
        return []
    if expected.keys() != got.keys():
        return ['other names of weights']
    gaps = [(expected[k].double() - got[k].double()).abs().max() for k in expected]
    gap = float(torch.stack(gaps).max())  # NaN if one is
    return [] if gap <= tolerance else [f'weights differ by {gap:.2g}']


# -- claims ----------------------------------------------------------------------------------------


def check_training(subject: Subject, folder: Path) -> list[str]:
    model = make_model(subject)
    expected = by_hand(lambda: train_by_hand(subject, make_model(subject)))
    return compare(expected, fit(make_learner(subject, model)))


def check_summary(subject: Subject, folder: Path) -> list[str]:
    "The number of parameters, and a model and random numbers that stay."
    model = make_model(subject)
    before = weights_of(model)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    learn = make_learner(subject, model)
    text = str(learn.summary())
    n_total = sum(p.numel() for p in model.parameters())
    lines = [] if f'Total params: {n_total:,}\n' in text else ['another number of parameters']
    if not torch.equal(state, torch.get_rng_state()):
        lines.append('random numbers were drawn')
    return lines + compare(before, weights_of(model))


def check_ema(subject: Subject, folder: Path) -> list[str]:
    "An average with a decay of 0.9."
    model = make_model(subject)
    own = make_model(subject)
    average = {name: p.detach().clone() for name, p in own.named_parameters()}

    def update() -> None:
        for name, value in own.named_parameters():
            average[name] = 0.9 * average[name] + 0.1 * value.detach()

    expected = by_hand(lambda: train_by_hand(subject, own, after_step=update))
    ema = EMA(0.9, warmup=None)
    lines = compare(expected, fit(learn := make_learner(subject, model, ema)))
    with ema.applied():
        got = {name: p.detach().clone() for name, p in learn.model.named_parameters()}
    return lines or [f'average: {line}' for line in compare(average, got, 1e-5)]


def check_freezing(subject: Subject, folder: Path) -> list[str]:
    "The module is frozen, and the rest is trained."
    model = make_model(subject)
    if not any(True for _ in model.body.parameters()):
        raise NothingToTry
    own = make_model(subject)
    for body in (model.body, own.body):
        body.requires_grad_(False)
    expected = by_hand(lambda: train_by_hand(subject, own))
    return compare(expected, fit(make_learner(subject, model)))


def train_to_the_end(subject: Subject, folder: Path, seed: int) -> Weights:
    "Train with a checkpoint of each batch, or resume from the newest."
    model = make_model(subject)
    checkpoint = Checkpoint('1ba', folder, background=False)
    learn = make_learner(subject, model, checkpoint, Killed(), folder=folder)
    scramble(seed)
    return fit(learn, resume=True) if seed == 2 else _resume(learn)


def _resume(learn: Learner) -> Weights:
    with learn.no_logging(), learn.no_bar():
        learn.fit(N_EPOCH, resume=True)
    return weights_of(learn.model)


def check_resume(subject: Subject, folder: Path) -> list[str]:
    "Kill twice, resume twice, each time in a new process with other seeds."
    model = make_model(subject)
    expected = by_hand(lambda: train_by_hand(subject, model))
    seeds = iter((2, 77, 78))
    got = run_killed(lambda: train_to_the_end(subject, folder, next(seeds)), KILLS)
    return compare(expected, got)


def check_export(subject: Subject, folder: Path) -> list[str]:
    "The exported program has the outputs of the model, for other sizes of batches too."
    model = make_model(subject)
    learn = make_learner(subject, model, folder=folder)
    *xb, _ = make_batches(subject.options)[0]
    path = learn.export(folder / 'model.pt2')
    program: Any = torch.export.load(path).module()
    for n in (1, 3, BS):
        inputs = [x[:n] for x in xb]
        with torch.no_grad():
            expected = model.eval()(*inputs)
            try:
                got = program(*inputs)
            except RuntimeError:
                by_hand(lambda: export_by_hand(subject)(*xb))
                raise
        if not torch.allclose(expected, got, rtol=1e-4, atol=1e-5):
            return [f'outputs for {n} samples differ by {float((expected - got).abs().max()):.2g}']
    return []


def export_by_hand(subject: Subject) -> Any:
    "Return the program of `torch.export` for the batches of the training, read from a file."
    *xb, _ = make_batches(subject.options)[0]
    file = BytesIO()
    torch.export.save(torch.export.export(make_model(subject).eval(), tuple(xb)), file)
    file.seek(0)
    return torch.export.load(file).module()


def check_compiled(subject: Subject, folder: Path) -> list[str]:
    "`compile()`, with the graph run as it is."
    model = make_model(subject)
    expected = by_hand(lambda: train_by_hand(subject, make_model(subject)))
    learn = make_learner(subject, model).compile(backend='eager')
    return compare(expected, fit(learn), 1e-5)


def check_activation_checkpointing(subject: Subject, folder: Path) -> list[str]:
    model = make_model(subject)
    expected = by_hand(lambda: train_by_hand(subject, make_model(subject)))
    checkpointing = ActivationCheckpointing(lambda module: module is model.body)
    lines = compare(expected, fit(make_learner(subject, model, checkpointing)), 1e-6)
    if not lines:
        return []
    own = make_model(subject)
    own.body.forward = partial(checkpoint, own.body.forward, use_reentrant=False)
    if compare(expected, by_hand(lambda: train_by_hand(subject, own)), 1e-6):
        raise Inapplicable('torch.utils.checkpoint changes the gradients of the loop by hand too')
    return lines


def check_microbatches(subject: Subject, folder: Path) -> list[str]:
    "Half of a batch at a time."
    model = make_model(subject)
    expected = by_hand(lambda: train_by_hand(subject, make_model(subject)))
    split = by_hand(lambda: train_by_hand(subject, make_model(subject), MICROBATCH))
    got = fit(make_learner(subject, model, microbatch=MICROBATCH))
    lines = compare(expected, got, 1e-5)
    is_norm = any(isinstance(m, STATISTICS_NORMS) for m in model.modules())
    if lines and not is_norm and not compare(split, got, 1e-5):
        raise Inapplicable(f'{find_cause(subject)} in each microbatch, as in the loop by hand')
    return lines


def find_cause(subject: Subject) -> str:
    "Return what a forward pass in training does besides computing outputs."
    model = make_model(subject)
    *xb, _ = make_batches(subject.options)[0]
    buffers = [buffer.clone() for buffer in model.buffers()]
    state = torch.get_rng_state()
    model(*xb)
    if not torch.equal(state, torch.get_rng_state()):
        return 'the module draws random numbers'
    is_same = all(map(torch.equal, buffers, model.buffers()))
    return 'the module sees other samples' if is_same else 'the module updates its buffers'


def check_hooks(subject: Subject, folder: Path) -> list[str]:
    "A hook gets the output of the module, and changes nothing."
    model = make_model(subject)
    expected = by_hand(lambda: train_by_hand(subject, make_model(subject)))
    *xb, _ = make_batches(subject.options)[-1]
    shapes = []
    hook = Hook(model.body, lambda module, inp, out: shapes.append(find_tensor(out).shape))
    try:
        lines = compare(expected, fit(make_learner(subject, model)))
    finally:
        hook.remove()
    with torch.no_grad():
        body = model.body(*(x * 1.0 if x.is_floating_point() else x for x in xb))
    shape = find_tensor(body).shape
    if shapes != [shape] * (N_EPOCH * N_BATCH):
        lines.append(f'{len(shapes)} outputs')
    return lines


CLAIMS: dict[str, Claim] = {
    'trains': check_training,
    'summary': check_summary,
    'EMA': check_ema,
    'freezing': check_freezing,
    'kill and resume': check_resume,
    'export': check_export,
    'compile': check_compiled,
    'activation checkpointing': check_activation_checkpointing,
    'microbatches': check_microbatches,
    'hooks': check_hooks,
}
