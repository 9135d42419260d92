"""Exact resume with unusual models, optimizers, loaders and Learners."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing

from learnkit import Callback, CheckpointError, DataLoaders, GradientAccumulation, Learner
from learnkit.checkpoint.optimizer_state import decode_optimizer, encode_optimizer
from tests.helpers.resuming import check_every_place

Batch = tuple[Tensor, Tensor]


def points() -> Batch:
    torch.manual_seed(1)
    return torch.randn(24, 4), torch.randint(3, (24,))


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
    )


def make(
    model: nn.Module | None = None, dls: Any = None, kind: type[Learner] = Learner, **kwargs: Any
) -> Learner:
    x, y = points()
    torch.manual_seed(0)
    dls = DataLoaders.from_tensors((x, y), (x[:8], y[:8]), bs=4) if dls is None else dls
    return kind(dls, net() if model is None else model, nn.CrossEntropyLoss(), lr=0.05, **kwargs)


def some(kept: list[Any]) -> list[Any]:
    return kept[::4]


# Models


def test_lazy_modules() -> None:
    def lazy() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3))

    check_every_place(lambda: make(lazy()), places=some)
    accumulating = lambda: make(lazy(), cbs=GradientAccumulation(12))
    check_every_place(accumulating, places=some)


# Random generators


class Langevin(torch.optim.SGD):
    "Adds noise from a generator of its own to each weight."

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.rngs = [torch.Generator().manual_seed(3), random.Random(4)]
        # replaces `step` by a method of the optimizer, whose state is not searched
        self.scheduler = torch.optim.lr_scheduler.ConstantLR(self, 1.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for p in group['params']:
                noise = torch.randn(p.shape, generator=self.rngs[0])
                p.add_(noise, alpha=0.01 * self.rngs[1].random())


class RandomLoss:
    "Weighs the loss by a random number of its own; it is no module."

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __call__(self, pred: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(pred, y) * float(self.rng.random())


def test_generators_of_optimizers_and_of_any_loss() -> None:
    def two() -> Learner:
        model = net()
        opts = {
            'a': Langevin(model[:2].parameters(), 0.05),
            'b': Langevin(model[4:].parameters(), 1),
        }
        learn = make(model, opt_func=opts)
        learn.loss_func = RandomLoss()
        return learn

    check_every_place(lambda: make(opt_func=Langevin), places=some)
    kept = check_every_place(two, places=some)
    names = ['model', 'loss_func', 'optimizer a', 'optimizer b']
    assert [*kept[0]['generators']] == names


# States that are tensors made of others


class Rounded(Tensor):
    "Tensor that keeps its values as integers and one scale, as optimizers with 8-bit states do."

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Any:
        make = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        return make(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ['codes', 'scale'], [torch.int8, True]

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: Any, size: Any, stride: Any) -> Any:
        assert context == [torch.int8, True]
        return cls(parts['codes'], parts['scale'])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        if func is torch.ops.aten._to_copy.default:
            out = cls(args[0].codes.to(kwargs.get('device')), args[0].scale)
            return return_and_correct_aliasing(func, args, kwargs, out)
        raise NotImplementedError(str(func))  # no `clone`, as in torchao

    def set_values(self, values: Tensor) -> None:
        self.scale.copy_(values.abs().max() / 127 + 1e-8)
        self.codes.copy_((values / self.scale).round())

    def read_values(self) -> Tensor:
        return self.codes * self.scale


class RoundedMomentum(torch.optim.Optimizer):
    "SGD with a momentum of rounded values."

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {'lr': lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group['params']:
                if p not in self.state:
                    codes = torch.zeros(p.shape, dtype=torch.int8)
                    self.state[p] = {'momentum': Rounded(codes, torch.zeros(()))}
                momentum = self.state[p]['momentum']
                momentum.set_values(0.9 * momentum.read_values() + p.grad)
                p.sub_(momentum.read_values(), alpha=group['lr'])


def test_optimizer_states_made_of_other_tensors(tmp_path: Path) -> None:
    kept = check_every_place(lambda: make(opt_func=RoundedMomentum), places=some)
    states = decode_optimizer(kept[-1]['optimizer'])['state']
    assert {type(state['momentum']) for state in states.values()} == {Rounded}
    learn = make(opt_func=RoundedMomentum, path=tmp_path)
    with learn.no_logging():
        learn.fit(1)
        learn.save('here')
        learn.fit(2, resume=kept[0])  # in an optimizer that has states
    again = make(opt_func=RoundedMomentum, path=tmp_path)
    again.load('here')
    [momentum, *_] = [state['momentum'] for state in again.opt.state.values()]
    assert type(momentum) is Rounded and momentum.read_values().abs().max() > 0


def test_a_state_made_of_tensors_makes_nothing_else() -> None:
    codes = torch.ones(2, dtype=torch.int8)
    state = {'state': {0: Rounded(codes, torch.ones(()))}, 'param_groups': []}
    encoded = encode_optimizer(state)
    module, _, *rest = encoded['state'][0]['of']
    for name in (('os', 'system'), (module, 'Batch'), ('no_module', 'A'), ('torch', 'Tensor')):
        encoded['state'][0]['of'] = (*name, *rest)
        with pytest.raises(CheckpointError, match='cannot be read'):
            decode_optimizer(encoded)


# Frozen parameters


class UnfreezeNext(Callback):
    "Unfreezes one more layer after each epoch; it is trained from the next epoch on."

    def after_epoch(self) -> None:
        frozen = [p for p in self.model.parameters() if not p.requires_grad]
        for p in frozen[-2:]:
            p.requires_grad_(True)


def test_layers_that_are_unfrozen_after_an_epoch() -> None:
    def frozen_net() -> nn.Module:
        model = net()
        model[:2].requires_grad_(False)
        return model

    fit = lambda learn, resume: learn.fit(3, resume=resume)
    check_every_place(lambda: make(frozen_net(), cbs=UnfreezeNext()), fit)


# Rates


def test_the_next_fit_of_a_loaded_optimizer_has_its_own_rate() -> None:
    def make_adam() -> Learner:
        model = net()
        return make(model, opt_func=torch.optim.Adam(model.parameters(), lr=0.01))

    learn, loaded = make_adam(), make_adam()
    with learn.no_logging():
        learn.fit_one_cycle(1)
    loaded.load_checkpoint_state(learn.checkpoint_state())
    assert loaded.opt.lrs == learn.opt.lrs != [0.01]
    for each in (learn, loaded):
        with each.no_logging():
            each.fit(1)
        assert each.opt.lrs == [0.01]
