"""What optimizers do: rates and momenta, norms of gradients, updates, weights and moments, and angles between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from learnkit.callbacks.monitor import Monitor
from learnkit.core.dtensor import grouped, local, sum_of_parts
from learnkit.core.errors import TimeError
from learnkit.core.time import Time
from learnkit.optim.hyperparams import place_of

__all__ = ['LRMonitor', 'OptimizerMonitor']

T = TypeVar('T')

FIRST = ('exp_avg', 'momentum_buffer')  # where torch's optimizers keep the mean of the gradients,
SECOND = ('exp_avg_sq', 'square_avg')  # and the mean of their squares
Table = dict[str, dict[int, T]]  # by kind, by the place of the parameter
SINGLE = (torch.float16, torch.bfloat16, torch.float32)  # their norms are computed in float32


class LRMonitor(Monitor):
    """Log the learning rate of each param group of each optimizer, and on request its momentum.

    The rate is the one that the batch was trained with. An optimizer goes by its class (several of one class also by
    their names in `learn.opt.optimizers`), a group by its own name, where its dict has a `name`, or by its number.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(lr=0.1, cbs=LRMonitor(every='1ep', mom=True))
    >>> with learn.no_bar(): learn.fit(1)
    >>> learn.history[0]['lr-DecoupledSGD/group0'], learn.history[0]['mom-DecoupledSGD/group0']
    (0.1, 0.9)
    """

    order = 55  # before schedulers of torch's kind set the rates of the next batch, at 60
    metric_names = {
        'lr-{optimizer}/{group}': 'the learning rate of a param group',
        'mom-{optimizer}/{group}': 'its momentum (the first beta, for Adam)',
    }
    latest = ('lr-', 'mom-')

    def __init__(
        self,
        every: int | str | Time = '10ba',  # how often it logs
        mom: bool = False,  # also momenta, of the groups that have one
    ) -> None:
        super().__init__(every)
        self.mom = mom

    def measure(self) -> dict[str, Any]:
        "Return rates and momenta."
        return {
            f'{hyper}-{name}': value
            for hyper in ('lr', *(['mom'] if self.mom else []))
            for name, group in _named_groups(self.learn.opt)
            if (value := _read_hyper(group, hyper)) is not None
        }


def _named_groups(opt: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    "Yield the param groups of all optimizers with the names they go by."
    classes = [type(o).__name__ for o in opt.optimizers.values()]
    for key, o in opt.optimizers.items():
        cls = type(o).__name__
        title = cls if classes.count(cls) == 1 else f'{cls}-{key}'
        for i, group in enumerate(o.param_groups):
            yield f'{title}/{group.get("name", f"group{i}")}', group


def _read_hyper(group: dict[str, Any], hyper: str) -> Any:
    where = place_of(hyper, group)
    if where is None:
        return None
    return group[where] if isinstance(where, str) else group[where[0]][where[1]]


class OptimizerMonitor(Monitor):
    """Log norms of gradients, weights, updates and optimizer moments, of each parameter and of all together.

    It looks at the step of the batch that completes a multiple of `every` (at the next one where that has none, while
    gradients accumulate); samples, tokens and time are counted after the step, so with them it looks at the next one.
    Gradients are those that the step sees: unscaled, accumulated and clipped. The update is the
    change of the weights by the step, weights and moments are those after it. Parameters without a gradient are left
    out, and so is what an optimizer does not keep and an angle with a vector that is zero.

    Everything is computed on the device and comes to the host in one transfer a look; for the length of that step the
    weights are there twice. The norm of the second moment is that of its square root, `sqrt(sum(v))`.

    Raises `TimeError` for an interval that is none, and for one in epochs or iterations.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(cbs=OptimizerMonitor(every='5ba'))
    >>> with learn.no_bar(): learn.fit(1)
    >>> row = learn.history[0]
    >>> row['l2_norm/grad/global'] >= row['l2_norm/grad/a'] > 0
    True
    """

    metric_names = {
        'l2_norm/{kind}/global': 'L2 norm over all parameters of the kind below',
        'l2_norm/grad/{parameter}': 'L2 norm of the gradient',
        'l2_norm/param/{parameter}': 'L2 norm of the weights after the step',
        'l2_norm/update/{parameter}': 'L2 norm of the change of the weights by the step',
        'l2_norm/moment/{parameter}': 'L2 norm of the first moment (of the momentum buffer, for SGD)',
        'l2_norm/second_moment_sqrt/{parameter}': 'L2 norm of the square root of the second moment',
        'l2_norm_ratio/update_param/{parameter}': 'norm of the update by that of the weights',
        'cosine/update_grad/{parameter}': 'cosine of the angle between update and gradient',
        'cosine/moment_grad/{parameter}': 'cosine of the angle between first moment and gradient',
    }
    _watched: _Watched | None = None  # from before a step that is looked at until after it

    def __init__(
        self,
        every: int | str | Time = '10ba',  # how often it looks
        per_parameter: bool = True,  # also log the norms and angles of each parameter
    ) -> None:
        super().__init__(every)
        if self.every.unit == 'ep':
            raise TimeError(
                f'every={str(every)!r}: OptimizerMonitor looks at single steps, and none is the end of an '
                "epoch. Give batches, such as '500ba'."
            )
        self.per_parameter = per_parameter

    def after_batch(self) -> None:
        "Leave the looking to the step."

    after_train = after_batch

    def before_step(self) -> None:
        "Keep the weights, when a look is due."
        if self._is_due(ahead=self.every.unit in ('ba', 'st')):
            self._watched = _Watched(self.learn)

    def after_cancel_step(self) -> None:
        "Forget a step that was not taken."
        self._watched = None

    def after_step(self) -> None:
        "Log what the step did."
        if self._watched is not None:
            self.look()

    def measure(self) -> dict[str, float]:
        "Return norms and angles of the step that was taken."
        watched, self._watched = self._watched, None
        return watched.metrics(self.per_parameter) if watched is not None else {}

    def cleanup(self) -> None:
        "Let go of weights."
        self._watched = None


class _Watched:
    "The parameters of one step that have gradients, with their weights before it."

    def __init__(self, learn: Any) -> None:
        named = {id(p): name for name, p in learn.model.named_parameters()}
        stepping = learn.opt.optimizers.values() if learn.turn is None else [learn.opt[learn.turn]]
        pairs = [
            (p, o)
            for o in stepping
            for g in o.param_groups
            for p in g['params']
            if p.grad is not None
        ]
        self.names = [named.get(id(p), f'outside_{i}') for i, (p, _) in enumerate(pairs)]
        self.params, self.are_parts, self.group = grouped(p.detach() for p, _ in pairs)
        self.grads = [_dense(local(p.grad)) for p, _ in pairs]
        self.owners = pairs
        self.before = [p.clone() for p in self.params]
        self.grad_norms = _norms(self.grads)  # now: a step may work in its gradients' memory

    def metrics(self, per_parameter: bool) -> dict[str, float]:
        "Return norms and angles by name; the one place where the host waits for the device."
        states = [o.state.get(p, {}) for p, o in self.owners]
        updates = list(torch._foreach_sub(self.params, self.before)) if self.params else []
        first, second = (_kept(states, keys) for keys in (FIRST, SECOND))
        rows = {
            'grad': dict(enumerate(self.grad_norms)),
            'param': dict(enumerate(_norms(self.params))),
            'update': dict(enumerate(_norms(updates))),
            'moment': dict(zip(first, _norms(list(first.values())), strict=True)),
            'second_moment_sqrt': {
                i: v.sum(dtype=_at_least_single(v)).sqrt() for i, v in second.items()
            },
        }
        dots = {
            'update_grad': {
                i: _dot(u, g)
                for i, (u, g) in enumerate(zip(updates, self.grads, strict=True))
                if per_parameter and u.shape == g.shape
            },
            'moment_grad': {
                i: _dot(m, self.grads[i])
                for i, m in first.items()
                if per_parameter and m.shape == self.grads[i].shape
            },
        }
        norms, products = _fetched([rows, dots], self._of_whole)
        total = {
            f'l2_norm/{kind}/global': math.hypot(*row.values())
            for kind, row in norms.items()
            if row
        }
        return (
            {**total, **self._of_each(norms), **self._angles(norms, products)}
            if per_parameter
            else total
        )

    def _of_whole(self, numbers: Tensor, places: list[tuple[int, int]]) -> Tensor:
        "Return norms, of table 0, and products of whole tensors, of which every process has those of its parts."
        if self.group is None:
            return numbers
        are_norms = torch.tensor([table == 0 for table, _ in places], device=numbers.device)
        total = sum_of_parts(
            torch.where(are_norms, numbers**2, numbers),
            [self.are_parts[i] for _, i in places],
            self.group,
        )
        return torch.where(are_norms, total.abs().sqrt(), total)

    def _of_each(self, norms: Table[float]) -> dict[str, float]:
        "Return each parameter's norms, and how far it moved by how large it is."
        found = {
            f'l2_norm/{kind}/{self.names[i]}': v
            for kind, row in norms.items()
            for i, v in row.items()
        }
        moved = {
            f'l2_norm_ratio/update_param/{self.names[i]}': norms['update'][i] / norm
            for i, norm in norms['param'].items()
            if norm > 0
        }
        return {**found, **moved}

    def _angles(self, norms: Table[float], products: Table[float]) -> dict[str, float]:
        found = {}
        for pair, row in products.items():
            kind, _ = pair.split('_')
            for i, product in row.items():
                if (lengths := norms[kind][i] * norms['grad'][i]) > 0:
                    found[f'cosine/{pair}/{self.names[i]}'] = product / lengths
        return found


def _dense(grad: Tensor) -> Tensor:
    "Return what there is of a gradient: the rows of a sparse one."
    return grad.coalesce().values() if grad.is_sparse else grad.detach()


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    "Return the L2 norm of each tensor, on its device; of half precision in float32."
    if not tensors:
        return []
    dtype = torch.float32 if all(t.dtype in SINGLE for t in tensors) else None
    return list(torch._foreach_norm(tensors, 2, dtype))


def _kept(states: Iterable[Mapping[str, Any]], keys: tuple[str, ...]) -> dict[int, Tensor]:
    "Return what optimizers keep under one of the keys, by the parameter's place."
    found = {
        i: next((s[k] for k in keys if isinstance(s.get(k), Tensor)), None)
        for i, s in enumerate(states)
    }
    return {i: local(t) for i, t in found.items() if t is not None}


def _at_least_single(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    "Return the scalar product, on the device; of half precision in float32."
    dtype = torch.promote_types(_at_least_single(a), b.dtype)
    return torch.linalg.vecdot(a.flatten().to(dtype), b.flatten().to(dtype)).real


def _fetched(
    tables: list[Table[Tensor]],
    of_whole: Callable[[Tensor, list[tuple[int, int]]], Tensor],  # f(numbers, (table, key) of each)
) -> list[Table[float]]:
    "Bring tables of single numbers to the host in one transfer."
    places = [(n, i) for n, table in enumerate(tables) for row in table.values() for i in row]
    numbers = list(chain.from_iterable(row.values() for table in tables for row in table.values()))
    if not numbers:
        return [{kind: {} for kind in table} for table in tables]
    arrived = iter(
        of_whole(torch.stack([n.to(numbers[0].device) for n in numbers]), places).tolist()
    )
    return [
        {kind: {i: next(arrived) for i in row} for kind, row in table.items()} for table in tables
    ]
