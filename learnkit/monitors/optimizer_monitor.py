# SPDX-License-Identifier: Apache-2.0
"""Callbacks that log optimizers: rates, momenta, norms of gradients, updates, weights and moments, angles."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from learnkit.comm.dtensor import local_shard, sum_of_parts, unpack_shards
from learnkit.core.errors import TimeError
from learnkit.core.time import Time
from learnkit.monitors.monitor import Monitor
from learnkit.optim.hyperparams import Hypers

if TYPE_CHECKING:
    from learnkit.learner import Learner

FIRST = ('exp_avg', 'momentum_buffer')  # state keys of the mean of gradients in torch's optimizers
SECOND = ('exp_avg_sq', 'square_avg')  # state keys of the mean of squared gradients
PAIRS = ('update_grad', 'moment_grad')  # scalar products
Key = tuple[str, str]  # kind of value, and name of the parameter


class LRMonitor(Monitor):
    """Log the learning rate of each param group of each optimizer, and on request its momentum.

    The logged rate is the rate that the batch was trained with. An optimizer is named by its class
    (several of one class also by their keys in `learn.opt.optimizers`), a group by the `name` in
    its dict, or by its index.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(lr=0.1, cbs=LRMonitor(every='1ep', mom=True))
    >>> with learn.no_bar(): learn.fit(1)
    >>> learn.history[0]['lr-DecoupledSGD/group0'], learn.history[0]['mom-DecoupledSGD/group0']
    (0.1, 0.9)
    """

    order = 55  # before schedulers of torch set the rates of the next batch, at 60
    metric_names = {
        'lr-{optimizer}/{group}': 'the learning rate of a param group',
        'mom-{optimizer}/{group}': 'its momentum (the first beta, for Adam)',
    }
    latest = ('lr-', 'mom-')

    def __init__(
        self,
        every: int | str | Time = '10ba',  # interval of logging
        mom: bool = False,  # whether to log momenta too, for groups that have one
    ) -> None:
        super().__init__(every)
        self.mom = mom

    @override
    def measure(self) -> dict[str, Any]:
        "Return rates and momenta by name."
        values = {}
        hypers = ('lr', 'mom') if self.mom else ('lr',)
        for hyper in hypers:
            for name, group in _name_groups(self.learn.opt):
                value = Hypers([group], set()).get(hyper)
                if value is not None:
                    values[f'{hyper}-{name}'] = value
        return values


def _name_groups(opt: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    "Yield the param groups of all optimizers with their names."
    classes = [type(o).__name__ for o in opt.optimizers.values()]
    for key, o in opt.optimizers.items():
        cls = type(o).__name__
        title = cls if classes.count(cls) == 1 else f'{cls}-{key}'
        for i, group in enumerate(o.param_groups):
            yield f'{title}/{group.get("name", f"group{i}")}', group


class OptimizerMonitor(Monitor):
    """Log norms of gradients, weights, updates and optimizer moments, of each parameter and in total.

    The measured step is the step of the batch that completes a multiple of `every`, or the next
    step if that batch takes no step (while gradients accumulate). Samples, tokens and time are counted
    after a step, so with these units it is the next step. Gradients are measured as the step uses
    them: unscaled, accumulated and clipped. The update is the change of the weights by the step;
    weights and moments are measured after the step. Left out are parameters without a gradient,
    moments that an optimizer does not keep, and angles with zero vectors.

    Values are computed on the device and copied to the host once per measurement; during that step
    a second copy of the weights is in memory. The norm of the second moment is the norm of its
    square root, `sqrt(sum(v))`.

    Raises `TimeError` for an invalid interval, and for epochs.

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
        'l2_norm_ratio/update_param/{parameter}': 'norm of the update divided by norm of the weights',
        'cosine/update_grad/{parameter}': 'cosine of the angle between update and gradient',
        'cosine/moment_grad/{parameter}': 'cosine of the angle between first moment and gradient',
    }
    _watched: _WatchedStep | None = None  # during a measured step

    def __init__(
        self,
        every: int | str | Time = '10ba',  # interval of measurements
        per_parameter: bool = True,  # whether to log norms and angles of each parameter
    ) -> None:
        super().__init__(every)
        if self.every.unit == 'ep':
            raise TimeError(
                f"every={str(every)!r}: OptimizerMonitor measures single steps. Pass batches: '500ba'."
            )
        self.per_parameter = per_parameter

    @override
    def after_batch(self) -> None:
        "Do nothing: values are measured at steps."

    after_train = after_batch

    def before_step(self) -> None:
        "Copy the weights if the step is measured."
        if self._interval.is_due(self.learn, ahead=self._count_ahead()):
            self._watched = _WatchedStep(self.learn)

    def _count_ahead(self) -> int:
        return 1 if self.every.unit in ('ba', 'st') else 0

    def compiled_step(self) -> dict[str, Any]:
        "Return that only measured steps have to be ordinary."
        return {'state': self._read_state}

    def _read_state(self) -> dict[str, Any] | None:
        is_measured = self._interval.is_reached(self.learn, ahead=self._count_ahead())
        return None if is_measured else {}

    def after_cancel_step(self) -> None:
        "Drop a cancelled step."
        self._watched = None

    def after_step(self) -> None:
        "Log norms and angles of the step."
        if self._watched is not None:
            self.look()

    @override
    def measure(self) -> dict[str, float]:
        "Return norms and angles of the measured step, by name."
        watched = self._watched
        self._watched = None
        return watched.compute_values(self.per_parameter) if watched is not None else {}

    def cleanup(self) -> None:
        "Drop the copy of the weights."
        self._watched = None


class _WatchedStep:
    "Parameters of one step that have gradients, with their weights before the step."

    def __init__(self, learn: Learner) -> None:
        named = {id(p): name for name, p in learn.model.named_parameters()}
        params = [p for p in learn.step_parameters if p.grad is not None]
        names = [named.get(id(p), f'outside_{i}') for i, p in enumerate(params)]
        shards, n_replicas = unpack_shards(p.detach() for p in params)
        self.opt = learn.opt
        self.keys = dict(zip(names, params, strict=True))  # keys of the optimizer's state
        self.params = dict(zip(names, shards, strict=True))
        self.n_replicas = dict(zip(names, n_replicas, strict=True))
        self.grads = {name: local_shard(p.grad).detach() for name, p in self.keys.items()}
        self.before = {name: p.clone() for name, p in self.params.items()}
        self.sums = _sum_squares('grad', self.grads)  # now, as a step may overwrite its gradients

    def compute_values(self, per_parameter: bool) -> dict[str, float]:
        "Return norms and angles by name; waits for the device."
        updates = {name: p - self.before[name] for name, p in self.params.items()}
        first = self._find_states(FIRST)
        sums = self.sums | _sum_squares('param', self.params) | _sum_squares('update', updates)
        sums |= _sum_squares('moment', first)
        for name, t in self._find_states(SECOND).items():
            sums['second_moment_sqrt', name] = t.sum(dtype=_at_least_single(t))
        if per_parameter:
            for pair, tensors in (('update_grad', updates), ('moment_grad', first)):
                for name, t in tensors.items():
                    sums[pair, name] = _compute_dot(t, self.grads[name])
        return _name_values(self._fetch(sums), per_parameter)

    def _find_states(self, keys: tuple[str, ...]) -> dict[str, Tensor]:
        "Return the optimizer's tensors under one of the keys, by name of the parameter."
        found = {}
        for name, p in self.keys.items():
            state = self.opt.state.get(p, {})
            tensors = [state[k] for k in keys if isinstance(state.get(k), Tensor)]
            if tensors:
                found[name] = local_shard(tensors[0])
        return found

    def _fetch(self, sums: dict[Key, Tensor]) -> dict[Key, float]:
        "Add up the sums of shards, and copy all to the host in one transfer."
        if not sums:
            return {}
        tensors = list(sums.values())
        stacked = torch.stack([t.to(tensors[0].device) for t in tensors])
        stacked = sum_of_parts(stacked, [self.n_replicas[name] for _, name in sums])
        return dict(zip(sums, stacked.tolist(), strict=True))


def _name_values(sums: dict[Key, float], per_parameter: bool) -> dict[str, float]:
    "Return norms, ratios and cosines by their logged names."
    norms = {key: math.sqrt(abs(s)) for key, s in sums.items() if key[0] not in PAIRS}
    values = {}
    for kind in dict.fromkeys(kind for kind, _ in norms):
        norm = math.hypot(*(n for key, n in norms.items() if key[0] == kind))
        values[f'l2_norm/{kind}/global'] = norm
    if not per_parameter:
        return values
    for (kind, name), norm in norms.items():
        values[f'l2_norm/{kind}/{name}'] = norm
        if kind == 'param' and norm > 0:
            values[f'l2_norm_ratio/update_param/{name}'] = norms['update', name] / norm
    for pair, name in sums.keys() - norms.keys():
        lengths = norms[pair.removesuffix('_grad'), name] * norms['grad', name]
        if lengths > 0:
            values[f'cosine/{pair}/{name}'] = sums[pair, name] / lengths
    return values


def _sum_squares(kind: str, tensors: dict[str, Tensor]) -> dict[Key, Tensor]:
    "Return the sum of squares of each tensor, on its device; half precision is computed in float32."
    norms = {
        name: torch.linalg.vector_norm(t, dtype=_at_least_single(t)) for name, t in tensors.items()
    }
    return {(kind, name): norm.square() for name, norm in norms.items()}


def _at_least_single(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


def _compute_dot(a: Tensor, b: Tensor) -> Tensor:
    "Return the scalar product, on the device; half precision is computed in float32."
    dtype = torch.promote_types(_at_least_single(a), b.dtype)
    return torch.linalg.vecdot(a.flatten().to(dtype), b.flatten().to(dtype)).real
