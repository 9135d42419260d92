"""Means of what a loss averages over, and what is added to a loss: against plain torch loops in double precision."""

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnkit import (
    SGD,
    Callback,
    CrossEntropyLossFlat,
    GradientAccumulation,
    Learner,
)
from learnkit.metrics import Perplexity
from tests.helpers.learners import bare_learner
from tests.helpers.ranks import run_ranks

Batch = tuple[Tensor, Tensor]
N_CLASSES = 4


def make_model(n_in: int = 3, n_out: int = N_CLASSES) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(n_in, 6), nn.Tanh(), nn.Linear(6, n_out)).double()


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def token_batches(sizes: Iterable[int], length: int = 5, ignored: int = -100) -> list[Batch]:
    "Batches of sequences in which about half of the targets does not count."
    gen = torch.Generator().manual_seed(7)
    batches = []
    for n in sizes:
        x = torch.randn(n, length, 3, generator=gen, dtype=torch.float64)
        y = torch.randint(N_CLASSES, (n, length), generator=gen)
        y[torch.rand(n, length, generator=gen) < 0.5] = ignored
        y[0, 0] = 0  # at least one counts
        batches.append((x, y))
    return batches


def class_batches(sizes: Iterable[int]) -> list[Batch]:
    gen = torch.Generator().manual_seed(8)
    return [
        (
            torch.randn(n, 3, generator=gen, dtype=torch.float64),
            torch.randint(N_CLASSES, (n,), generator=gen),
        )
        for n in sizes
    ]


def joined(batches: Iterable[Batch]) -> Batch:
    xs, ys = zip(*batches, strict=True)
    return torch.cat(xs), torch.cat(ys)


def learner(
    dls: Any,
    loss_func: Any,
    *cbs: Any,
    model: nn.Module | None = None,
    cls: type[Learner] = Learner,
    **kwargs: Any,
) -> Learner:
    defaults = {'opt_func': SGD, 'lr': 0.5, **kwargs}
    return bare_learner(
        dls, make_model() if model is None else model, loss_func, cls=cls, cbs=cbs, **defaults
    )


def plain_weights(
    steps: Iterable[Batch],
    loss_func: Callable[..., Tensor],
    penalty: Callable[[nn.Module], Tensor] | None = None,
) -> Tensor:
    "Return the weights after one SGD step a batch, in a plain torch loop."
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    for x, y in steps:
        loss = loss_func(model(x), y)
        if penalty is not None:
            loss = loss + penalty(model)
        opt.zero_grad()
        loss.backward()
        opt.step()
    return weights_of(model)


def distance(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


def of_tokens(pred: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(pred.flatten(0, 1), y.flatten(), **options)


# -- what callbacks add to the loss ----------------------------------------------------------------


def penalty(model: nn.Module) -> Tensor:
    return 0.1 * sum(p.square().sum() for p in model.parameters())


def adding(order: int) -> Callback:
    def add(cb: Any) -> None:
        cb.learn.loss_grad = cb.loss_grad + penalty(cb.model)

    cb = Callback(before_backward=add)
    cb.order = order
    return cb


def test_addition_to_loss_grad() -> None:
    batches = class_batches([8] * 4)
    expected = plain_weights(batches, F.cross_entropy, penalty)
    learn = learner(batches, F.cross_entropy, adding(0), microbatch=2)
    learn.fit(1)
    now = distance(weights_of(learn.model), expected)
    assert now < 1e-12


@pytest.mark.parametrize('size', [None, 3])
def test_addition_with_accumulation(size: int | None) -> None:
    batches = class_batches([4] * 6)
    steps = map(joined, zip(batches[::2], batches[1::2], strict=True))
    expected = plain_weights(steps, F.cross_entropy, penalty)
    learn = learner(batches, F.cross_entropy, adding(50), GradientAccumulation(8), microbatch=size)
    learn.fit(1)
    now = distance(weights_of(learn.model), expected)
    assert now < 1e-12


# -- means of a loss with targets that do not count ------------------------------------------------

LOSSES: dict[str, Any] = {
    'function': F.cross_entropy,
    'partial': partial(F.cross_entropy, ignore_index=2),
    'module': nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2, 1.0]).double()),
    'flat': CrossEntropyLossFlat(axis=1, ignore_index=-100),
    'nll': nn.NLLLoss(torch.tensor([1.0, 5.0, 0.2, 1.0]).double(), ignore_index=1),
}


IGNORED = {'partial': 2, 'nll': 1}


class ClassesSecond(nn.Module):
    "Scores of classes at each place of a sequence, with the classes along axis 1."

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).movedim(-1, 1).log_softmax(1)


@pytest.mark.parametrize('kind', LOSSES)
def test_validation_loss(kind: str) -> None:
    loss_func, model = LOSSES[kind], ClassesSecond()
    batches = token_batches([5, 3, 2], ignored=IGNORED.get(kind, -100))
    learn = learner((batches, batches), loss_func, model=model, metrics=Perplexity())
    x, y = joined(batches)
    with torch.no_grad():
        expected = loss_func(model(x), y).item()
    loss, perplexity = learn.validate()
    assert loss == pytest.approx(expected, abs=1e-13)
    assert perplexity == pytest.approx(torch.tensor(expected).exp().item(), abs=1e-6)


@pytest.mark.parametrize('kind', LOSSES)
def test_microbatches_of_tokens(kind: str) -> None:
    loss_func, model, plain = LOSSES[kind], ClassesSecond(), ClassesSecond()
    batches = token_batches([5, 3, 2], ignored=IGNORED.get(kind, -100))
    opt = torch.optim.SGD(plain.parameters(), lr=0.5)
    losses = []
    for x, y in batches:
        loss = loss_func(plain(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    learn = learner(batches, loss_func, model=model, microbatch=2)
    learn.fit(1)
    now = distance(weights_of(model), weights_of(plain))
    assert now < 1e-12 and learn.recorder.smooth_loss.raw == pytest.approx(losses, abs=1e-12)


@pytest.mark.parametrize('size', [None, 2])
def test_accumulation_of_tokens(size: int | None) -> None:
    batches = token_batches([5, 3, 2, 6])
    expected = plain_weights(map(joined, zip(batches[::2], batches[1::2], strict=True)), of_tokens)
    model = make_model()
    loss_func = CrossEntropyLossFlat()
    learner(batches, loss_func, GradientAccumulation(8), model=model, microbatch=size).fit(1)
    now = distance(weights_of(model), expected)
    assert now < 1e-12


def test_processes_of_tokens() -> None:
    ((x, y),) = token_batches([24])
    expected = plain_weights([(x[i : i + 8], y[i : i + 8]) for i in (0, 8, 16)], of_tokens)

    def job(rank: int) -> list[Any]:
        from learnkit import DataLoaders

        dls = DataLoaders.from_tensors((x, y), (x, y), bs=4, shuffle=False)
        learn = learner(dls, CrossEntropyLossFlat())
        with learn.distributed('ddp', timeout='300s'):
            learn.fit(1)
        return [weights_of(learn.model), learn.history[0]['valid_loss']]

    (ours, valid_loss), _ = run_ranks(job)
    model = make_model()
    nn.utils.vector_to_parameters(expected, model.parameters())
    now = distance(ours, expected)
    assert now < 1e-12
    assert valid_loss == pytest.approx(of_tokens(model(x), y).item(), abs=1e-12)


def test_huggingface_model() -> None:
    transformers = pytest.importorskip('transformers')
    config = transformers.GPT2Config(
        vocab_size=11,
        n_positions=8,
        n_embd=8,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )

    def make() -> nn.Module:
        torch.manual_seed(0)
        return transformers.GPT2LMHeadModel(config).double()

    gen = torch.Generator().manual_seed(2)
    ids = torch.randint(11, (12, 6), generator=gen)
    labels = torch.where(torch.rand(12, 6, generator=gen) < 0.5, -100, ids)
    batches = [
        {'input_ids': ids[i : i + n], 'labels': labels[i : i + n]} for i, n in ((0, 5), (5, 7))
    ]
    plain = make()
    opt = torch.optim.SGD(plain.parameters(), lr=0.5)
    for b in batches:
        opt.zero_grad()
        plain(**b).loss.backward()
        opt.step()
    with torch.no_grad():
        expected = plain(input_ids=ids, labels=labels).loss.item()
    learn = learner((batches, batches), None, model=make(), microbatch=2)
    learn.fit(1)
    now = distance(weights_of(learn.model), weights_of(plain))
    assert now < 1e-7 and distance(weights_of(learn.model), weights_of(make())) > 1e-2
    # its loss is in single precision
    assert learn.history[0]['valid_loss'] == pytest.approx(expected, abs=1e-7)


def test_a_batch_of_nothing() -> None:
    batches = token_batches([4] * 3)
    batches[1][1][:] = -100
    learn = learner((batches, batches), CrossEntropyLossFlat(), lr=0.0)
    learn.fit(1)
    model = make_model()
    x, y = joined(batches)
    expected = of_tokens(model(x), y).item()
    now = learn.history[0]
    assert now['train_loss'] == pytest.approx(expected, abs=1e-12)
    assert now['valid_loss'] == pytest.approx(expected, abs=1e-12)
    assert torch.isfinite(torch.tensor(learn.recorder.smooth_loss.smooth)).all()


def test_own_function_is_warned_of() -> None:
    batches = token_batches([4] * 3)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        learner((batches, batches), lambda pred, y: of_tokens(pred, y)).fit(2)
    messages = [str(w.message) for w in seen if 'weight_func' in str(w.message)]
    assert len(messages) == 1 and "weight_func='tokens'" in messages[0]


def test_weight_func_of_tokens() -> None:
    batches = token_batches([5, 3, 2])
    learn = learner((batches, batches), lambda pred, y: of_tokens(pred, y), weight_func='tokens')
    x, y = joined(batches)
    expected = of_tokens(make_model()(x), y).item()
    (loss,) = learn.validate()
    assert loss == pytest.approx(expected, abs=1e-13)
