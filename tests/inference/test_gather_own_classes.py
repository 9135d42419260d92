"""Predictions in containers of a model's classes: several processes return what one process returns."""

from collections import OrderedDict, UserDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from learnkit import BatchError, DataLoaders, DistributedError, Learner
from tests.helpers.distributing import make_data
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist


class Boxes(NamedTuple):
    corners: Tensor
    label: str


class Output(NamedTuple):
    scores: Tensor
    boxes: Any
    note: str = 'plain'


class Named(dict):
    "A dict with an attribute."

    scale = 0


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(5, 3).double()
        for weight in self.lin.parameters():
            weight.data = to_eighths(weight.data)

    def forward(self, x: Tensor) -> Any:
        named, user, default = Named(a=x.sum(1)), UserDict(b=x), defaultdict(list, c=[x[:, 0]])
        named.scale = 3
        return (
            Output(self.lin(x), Boxes(x[:, :2], 'corner'), 'own'),
            OrderedDict(named=named, user=user),
            default,
        )


def of_transformers(x: Tensor) -> Any:
    return pytest.importorskip('transformers.utils').ModelOutput(last=x, pooled=x.sum(1))


def to_eighths(x: Tensor) -> Tensor:
    "Round to values whose sums and products are exact in every order and batch size."
    return (x * 8).round() / 8


def ask(model: Any, n: int = 37) -> list[Any]:
    x, y = make_data(n)
    loaders = DataLoaders.from_tensors(make_data(8), (to_eighths(x), y), bs=4, device='cpu')
    learn = Learner(loaders, Many() if model is Many else Function(model), None)
    learn.remove_cb(learn.progress)
    with learn.distributed('ddp', timeout='20s'):
        return learn.get_preds(with_input=True)


class Function(nn.Module):
    def __init__(self, f: Any) -> None:
        super().__init__()
        self.f, self.weight = f, nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Any:
        return self.f(x)


def seen(o: Any) -> Any:
    "Return a value as plain containers with the names of the classes."
    if isinstance(o, Tensor):
        return o.tolist()
    if isinstance(o, (dict, UserDict)):
        parts: Any = [(k, seen(v)) for k, v in o.items()]
    elif isinstance(o, (list, tuple)):
        parts = list(map(seen, o))
    else:
        return o
    more = getattr(o, 'scale', None), getattr(o, 'default_factory', None)
    return f'{type(o).__module__}.{type(o).__qualname__}', parts, str(more)


def job(rank: int, model: Any) -> Any:
    return seen(ask(model))


@pytest.mark.parametrize('model', [Many, of_transformers])
def test_several_processes_give_what_one_does(model: Any) -> None:
    alone = seen(ask(model))
    assert run_ranks(job, 2, model) == [alone, alone]
    assert 'Output' in str(alone) and len(str(alone)) > 2_000


def local(rank: int) -> str:
    class Inside(NamedTuple):
        x: Tensor

    with pytest.raises((BatchError, DistributedError)) as e:
        ask(Inside)
    return str(e.value)


def test_a_class_that_no_import_finds_is_refused_with_what_to_do() -> None:
    for message in run_ranks(local):
        assert 'predictions cannot be sent to the other processes' in message
