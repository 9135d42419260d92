"""Optimizers of users, each with one trait that torch's own optimizers lack, and a training with one of them."""

from collections import deque
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from learnkit import DataLoaders, Learner
from tests.helpers.learners import quiet_learner

N_BATCHES = 6
BS = 4


class Own(torch.optim.Optimizer):
    "Gradient descent with a rate of each parameter's own, which subclasses compute from its state."

    options: dict[str, Any] = {}

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {'lr': lr, **deepcopy(self.options)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group['params']:
                if p.grad is not None:
                    p.sub_(group['lr'] * self.scale(p, self.state[p], group))

    def scale(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class Counting(Own):
    "Keeps entries of `state` that are not parameters, as MADGRAD does."

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state.setdefault('k', torch.zeros(1, dtype=torch.long))  # type: ignore[call-overload]
        self.state.setdefault('n', 0)  # type: ignore[call-overload]
        super().step()
        self.state['k'] += 1  # type: ignore[index]
        self.state['n'] += 1  # type: ignore[index]

    def scale(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        k: Any = self.state['k']  # type: ignore[index]
        n: Any = self.state['n']  # type: ignore[index]
        state['sum'] = state.get('sum', 0) + p.grad
        return state['sum'] / (k + n + 1).sqrt()


class Factored(Own):
    "Keeps one number for each row, under the name of an average of the parameter's shape, as Amos does."

    def scale(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        square = p.grad.square().mean(-1, keepdim=True)
        state['exp_avg_sq'] = 0.9 * state.get('exp_avg_sq', 0) + square
        return p.grad / (state['exp_avg_sq'].sqrt() + 0.1)


class SinglePrecision(Own):
    "Keeps float32 averages and integers of parameters of any dtype, as transformers' Adafactor does."

    def scale(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        state['mean'] = 0.9 * state.get('mean', 0) + p.grad.float() / 3
        state['signs'] = state.get('signs', 0) + p.grad.sign().to(torch.int16)
        state['parts'] = [state['mean'].sum(), {'last': state['mean'].clone()}]
        mean = state['mean'] + state['parts'][1]['last'] / 7 + state['signs'] / 1000
        return mean.to(p.dtype)


class Bare(Own):
    "Keeps one float32 tensor as the state of a parameter, not in a dict."

    def scale(self, p: Tensor, state: Any, group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        last = state if isinstance(state, Tensor) else torch.zeros(p.shape)
        self.state[p] = 0.9 * last + p.grad.float() / 3  # type: ignore[assignment]
        return self.state[p].to(p.dtype)  # type: ignore[attr-defined]


class Schedule:
    "An object that is not data."

    factor = 0.7


class Options(Own):
    "Has options of many types, as timm's AdafactorBigVision has a dtype."

    options = {
        'momentum_dtype': torch.float64,
        'device': torch.device('cpu'),
        'layout': torch.strided,
        'memory_format': torch.contiguous_format,
        'nothing': None,
        'pair': (0.5, None),
        'name': 'own',
        'is_on': True,
        'number': np.float32(0.1),
        'whole': np.int64(3),
        'eps': np.float32(0.3),
        'tensor': torch.tensor([0.25, 0.5]),
        'function': torch.tanh,
        'schedule': Schedule(),
        'recent': deque([1.0, 2.0], maxlen=2),
    }

    def scale(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        assert group['layout'] is p.layout and group['device'] == p.device
        assert group['nothing'] is None and group['name'] == 'own' and group['is_on'] is True
        group['recent'].append(len(group['recent']) + group['recent'][-1])
        grad = p.grad.to(group['momentum_dtype'], memory_format=group['memory_format'])
        factor = group['number'] * (group['eps'] * 1.1) * group['whole'] + group['recent'][0] / 10
        state['last'] = state.get('last', 0) * group['pair'][0] + grad * float(factor)
        change = group['function'](state['last']) * group['schedule'].factor * group['tensor'].sum()
        return change.to(p.dtype)


class Values(Own):
    "Keeps values of many types in the state of a parameter."

    def scale(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        if not state:
            state |= {'list': [], 'dict': {'n': 0, 'flags': {}}, 'nothing': None, 'is_first': True}
            state |= {'norms': deque(maxlen=2), 'name': 'abc', 'number': np.float32(0.1)}
            state |= {'dtype': torch.float32, 'pair': (1, 0.5)}
        assert state['nothing'] is None and state['name'] == 'abc' and state['norms'].maxlen == 2
        state['list'].append(float(p.grad.sum()))
        state['dict']['n'] += 1
        state['dict']['flags'][state['dict']['n']] = state['is_first']
        state['is_first'] = not state['is_first']
        state['norms'].append(p.grad.norm())
        state['number'] = state['number'] * 1.1
        count = sum(state['dict']['flags'].values()) + len(state['list']) + state['pair'][1]
        factor = sum(state['norms']) * count * float(state['number'] * 0.3)
        return (p.grad * factor).to(state['dtype']).to(p.dtype)


class Saving(Own):
    "Adds a counter to its state dict, as StableSPAM does."

    n_steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.n_steps += 1
        super().step()

    def scale(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        return p.grad / self.n_steps

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), 'n_steps': self.n_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.n_steps = state_dict.get('n_steps', 0)


class Wrapping(torch.optim.Optimizer):
    "Wraps another optimizer, with a state dict of its own layout, as Lookahead does."

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        self.base = torch.optim.Adam(params, lr)
        self.slow: dict[tuple[int, int], Tensor] = {}
        super().__init__(self.base.param_groups, {'lr': lr})
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        for i, group in enumerate(self.base.param_groups):
            for j, p in enumerate(group['params']):
                slow = self.slow.setdefault((i, j), p.clone())
                slow.lerp_(p, 0.5)
                p.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return {'base': self.base.state_dict(), 'slow': self.slow}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict['base'])
        self.param_groups = self.base.param_groups
        self.slow = state_dict['slow']


class Computing(Own):
    "Computes its rate, and has None as `lr`, as Adafactor with `relative_step`."

    def __init__(self, params: Any, lr: Any = None) -> None:
        super().__init__(params, None)  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group['lr'] is None
            for p in group['params']:
                n = self.state[p]['n'] = self.state[p].get('n', 0) + 1
                p.sub_(p.grad / n)


class Clearing(Own):
    "Keeps the gradients of each sample beside `grad`, and clears them, as Opacus' optimizer does."

    _n_cleared = 0

    def scale(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        state['grads'] = [*state.get('grads', []), p.grad.clone()]
        return sum(state['grads'])

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._n_cleared += 1
        for state in self.state.values():
            state['grads'] = []
        super().zero_grad(set_to_none)


TRAITS: list[Callable[..., torch.optim.Optimizer]] = [
    Counting,
    Factored,
    SinglePrecision,
    Bare,
    Options,
    Values,
    Saving,
    Wrapping,
    Computing,
    Clearing,
]


# -- a training with one of them ---------------------------------------------------------------------


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)


def data(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, N_BATCHES * BS * 3).sin().reshape(-1, 3)
    return x.to(dtype), x.sum(1, keepdim=True).to(dtype)


def learner(
    opt_func: Any, path: Path | str = '.', dtype: torch.dtype = torch.float32, **options: Any
) -> Learner:
    dls = DataLoaders.from_tensors(data(dtype), data(dtype), bs=BS, shuffle=False, device='cpu')
    return quiet_learner(
        dls, net(dtype), nn.MSELoss(), opt_func, **{'lr': 0.05, 'path': path, **options}
    )


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def weights_by_hand(
    opt_func: Any, n_epoch: int = 1, dtype: torch.dtype = torch.float32, lr: float = 0.05
) -> Tensor:
    "Return the weights after a plain loop of torch."
    model = net(dtype)
    opt = opt_func(model.parameters(), lr=lr)
    for _ in range(n_epoch):
        for x, y in zip(*(t.split(BS) for t in data(dtype)), strict=True):
            opt.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            opt.step()
    return weights(model)
