# SPDX-License-Identifier: Apache-2.0
"""Exponential moving average of the weights, for evaluation and after training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from learnkit.callbacks.training import bad_option
from learnkit.comm.dtensor import distribute_like, local_shards
from learnkit.core.autocast import drop_casts
from learnkit.core.errors import OptionError, WeightsError
from learnkit.core.model import has_lazy_tensors
from learnkit.core.roles import find_averaged, matches
from learnkit.core.time import Time
from learnkit.core.validation import is_number
from learnkit.engine.callback import Callback

_HALVES = (torch.float16, torch.bfloat16)  # too coarse to average in


class EMA(Callback):
    """Average the weights over the optimizer's steps, and evaluate and predict with the average.

    After each step `average = decay * average + (1 - decay) * weights` (Polyak and Juditsky, 1992,
    with exponential weights). Only optimizer steps count, not accumulated batches or steps that
    mixed precision skips. It averages all trainable parameters (tied ones once), the running
    statistics of batch and instance norm layers, and the floating-point buffers named by `buffers`.
    All other buffers, such as counters, masks and the vectors of `spectral_norm`, keep their
    current values. Half-precision weights are averaged in single precision.

    With a constant decay of 0.999 the average of a few hundred steps would mostly be the initial
    weights. So the decay warms up: the first update copies the weights, and after t updates the
    decay is `1 - (1 + t)^-warmup`, up to `decay`. The average then reaches back over about the last
    `(1 + t)^warmup` updates (with 2/3, timm's power, the last 100 after 1,000 updates).
    `warmup=None` uses `decay` from the first update on.

    The model holds the average during `validate`, `get_preds` and the evaluations of `fit`.
    Otherwise, also after the fit, the model holds its own weights: `learn.save`, `save_learner` and
    `export` write these. `learn.ema.copy_to()` copies the average into the model permanently,
    `with learn.ema.applied(): learn.export()` temporarily. `SaveModelCallback` saves the evaluated
    weights, which are the average. The next fit continues the average; `restart()` discards it. The
    average of new weights in a model, such as a replaced layer, starts at their present values. For
    another model, and when weights are loaded, the average and its numbers of steps and updates
    restart.

    Checkpointed: the averages by name, and the numbers of steps and updates.

    Raises `OptionError` for invalid options, for `buffers` that the model lacks, and for a second EMA
    in the Learner, and `WeightsError` if a loaded average does not match the model.

    >>> EMA(half_life='1000st').decay
    0.9993070929904525
    """

    remove_on_find = True

    def __init__(
        self,
        decay: float = 0.999,  # share of the average kept at an update: it averages 1/(1-decay) steps
        half_life: str | int | Time | None = None,  # steps to half the weight, instead of `decay`
        start: str | int | Time = 0,  # time of the first average: number of steps, '2ep', '0.5dur'
        every: str | int | Time = 1,  # number of steps between updates
        warmup: float | None = 2 / 3,  # power: decay of update t is at most 1 - (1+t)^-warmup
        *,
        buffers: str
        | Sequence[str] = (),  # names or patterns of buffers to average, such as '*.codebook'
    ) -> None:
        self.every = steps_of(self, every=every)
        self.buffers = (buffers,) if isinstance(buffers, str) else tuple(buffers)
        self.warmup = warmup
        if half_life is not None:
            decay = 0.5 ** (self.every / steps_of(self, half_life=half_life))
        if not is_number(decay) or not 0 <= decay < 1:
            raise bad_option(self, 'a share from 0 to below 1', decay=decay)
        self.decay = float(decay)
        self.start = Time(start) if isinstance(start, (str, Time)) else Time(start, 'st')
        self._opt_steps = 0  # number of optimizer steps before the current one
        # the model's tensors and their own values, while the model holds the average
        self._raw: tuple[list[Tensor], list[Tensor]] | None = None
        # depth of the run for which the model holds the average; None: `applied` or `copy_to`
        self._use_depth: int | None = None
        self.restart()

    def restart(self) -> None:
        "Discard the average; a new average starts with the weights at the next training step."
        self._restore_weights()
        self._averages: dict[str, Tensor] = {}  # by name
        # module of each averaged tensor, by name; empty after loading, until `_link` finds them
        self._owners: dict[str, nn.Module] = {}
        self._tensors: list[Tensor] = []  # the model's tensors, in the order of the averages
        self._has_halves = False  # whether a tensor is in half precision
        self._n_steps = 0
        self._n_updates = 0

    on_weights_restored = restart

    @property
    def has_begun(self) -> bool:
        "Whether an average exists."
        return bool(self._averages)

    # -- averaging ---------------------------------------------------------------------------------

    def before_fit(self) -> None:
        others = [cb for cb in self.learn.cbs if isinstance(cb, EMA) and cb is not self]
        if others:
            raise OptionError(f'{others[0]!r} averages this model already.')
        self._check_buffers()

    def _check_buffers(self) -> None:
        "Raise `OptionError` if a name or pattern of `buffers` selects nothing."
        named = self.learn.model.named_buffers()
        names = [name for name, t in named if t.is_floating_point()]
        for pattern in self.buffers:
            if not any(matches(name, [pattern]) for name in names):
                raise OptionError(
                    f'EMA(buffers={pattern!r}): {type(self.learn.model).__name__} has no such floating-point buffer, '
                    f'but {", ".join(names) or "none at all"}.'
                )

    def before_load(self) -> None:
        self._restore_weights()  # otherwise they would overwrite the loaded weights later

    def after_load(self) -> None:
        self._raw = self._use_depth = None
        self.restart()

    def _discard_other_model(self) -> None:
        "Restart if the average has no tensor of the current model; a loaded average has no owners yet."
        modules = dict(self.learn.model.named_modules())
        owners = [(name.rpartition('.')[0], owner) for name, owner in self._owners.items()]
        if owners and not any(modules.get(path) is owner for path, owner in owners):
            self.restart()

    def before_train(self) -> None:
        self._opt_steps = self.learn.opt.n_steps
        self._restore_weights()
        self._discard_other_model()
        if self._averages:
            self._link()
        elif self.learn.time >= self.start and not has_lazy_tensors(self.learn.model):
            self._link()  # a lazy model has its first values at the first step

    def before_step(self) -> None:
        self._opt_steps = self.learn.opt.n_steps

    def after_step(self) -> None:
        if self.learn.opt.n_steps == self._opt_steps:
            return  # the step was skipped
        # a callback may cancel the next step before `before_step`
        self._opt_steps = self.learn.opt.n_steps
        self._n_steps += 1
        if not self._averages:
            if self.learn.time >= self.start:
                self._link()
        elif self._n_steps % self.every == 0:
            self.update()

    def update(self) -> None:
        "Move the average towards the current weights."
        if self.buffers:
            self._link()  # `forward` may have replaced them
        averages = local_shards(self._averages.values())
        weights = local_shards(self._tensors)
        if self._has_halves:
            weights = [t.to(a.dtype) for t, a in zip(weights, averages, strict=True)]
        if averages:
            with torch.no_grad():
                torch._foreach_lerp_(averages, weights, 1 - self._next_decay())
        self._n_updates += 1

    def _next_decay(self) -> float:
        "Return the decay of the next update."
        if self.warmup is None:
            return self.decay
        return min(self.decay, 1 - (1 + self._n_updates) ** -self.warmup)

    def compiled_step(self) -> dict[str, Any]:
        "Return the update of a compiled step."
        return {'state': self._read_state, 'after_step': move_averages, 'finish': self._count_step}

    def _read_state(self) -> dict[str, Any] | None:
        "Return weight and tensors of the next update; None before the average begins."
        if not self._averages or self.buffers:
            return None  # `forward` may replace buffers that the user names
        is_due = (self._n_steps + 1) % self.every == 0
        return {
            'weight': 1 - self._next_decay() if is_due else 0.0,
            'averages': [*self._averages.values()],
            'weights': self._tensors,
        }

    def _count_step(self, found: dict[str, Any]) -> None:
        self._opt_steps = self.learn.opt.n_steps
        self._n_steps += 1
        if self._n_steps % self.every == 0:
            self._n_updates += 1

    def _link(self) -> None:
        "Match the averages with the current model; new tensors start at their present values."
        model = self.learn.model
        self._discard_other_model()
        if not self._owners:
            check_averages(self._averages, model)
        known = self._owners or dict.fromkeys(self._averages)
        owners = {}
        tensors = {}
        averages = {}
        averaged = find_averaged(model, self.buffers)
        for name, t in find_tensors(model).items():
            owner = model.get_submodule(name.rpartition('.')[0])
            is_known = name in known and known[name] in (owner, None)
            if is_known or name in averaged:
                owners[name] = owner
                tensors[name] = t
                averages[name] = start_average(t, self._averages.get(name) if is_known else None)
        self._averages = averages
        self._owners = owners
        self._tensors = list(tensors.values())
        self._has_halves = any(t.dtype in _HALVES for t in self._tensors)

    # -- using the average -------------------------------------------------------------------------

    def before_validate(self) -> None:
        if self._raw is not None:
            return
        self._discard_other_model()
        if self.has_begun:
            self._use(self.learn.run.depth)

    def after_validate(self) -> None:
        if self._use_depth == self.learn.run.depth:
            self._restore_weights()

    after_cancel_epoch = after_cancel_fit = after_validate

    def cleanup(self) -> None:
        if self._use_depth is not None:
            self._restore_weights()

    def on_run_failed(self) -> None:
        if self._use_depth is not None and self._use_depth >= self.learn.run.depth:
            self._restore_weights()

    def _use(self, depth: int | None) -> None:
        "Copy the average into the model's own memory, so that references to it stay valid."
        self._link()
        self._raw = (self._tensors, [t.detach().clone() for t in self._tensors])
        self._use_depth = depth
        copy_values(self._tensors, list(self._averages.values()))

    def _check_begun(self) -> None:
        if not self.has_begun:
            raise WeightsError(f'EMA has no average yet: it begins at {self.start} of training.')

    def _restore_weights(self) -> None:
        "Restore the model's own weights, bit for bit."
        if self._raw is None:
            return
        copy_values(*self._raw)
        self._raw = self._use_depth = None

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        "Return a context in which the model holds the average; its own weights are restored after it."
        self._check_begun()
        is_outermost = self._raw is None
        if is_outermost:
            self._use(None)
        raw = self._raw
        try:
            yield self.learn.model
        finally:
            # `_raw` differs if weights were loaded meanwhile: these stay
            if is_outermost and self._raw is raw:
                self._restore_weights()

    def copy_to(self) -> nn.Module:
        "Copy the average into the model permanently; return the model."
        self._check_begun()
        if self._raw is None:
            self._use(None)
        self._raw = self._use_depth = None  # nothing restores the model's own weights
        return self.learn.model

    # -- checkpoints -------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        "Return the averages by name, and the numbers of steps and updates."
        return {
            'averages': dict(self._averages),
            'n_steps': self._n_steps,
            'n_updates': self._n_updates,
        }

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the averages. Raises `WeightsError`, and loads nothing, if they do not match the model."
        if self.learn is not None:
            check_averages(sd['averages'], self.learn.model)
        self.restart()
        self._n_steps = sd['n_steps']
        self._n_updates = sd['n_updates']
        if not sd['averages']:
            return
        self._averages = {name: a.clone() for name, a in sd['averages'].items()}
        if self.learn is not None:
            self._link()


def move_averages(params: list[Tensor], state: dict[str, Any]) -> None:
    "Move averages towards the weights in place; a weight of 0 leaves them unchanged."
    for average, t in zip(state['averages'], state['weights'], strict=True):
        average.lerp_(t.to(average.dtype), state['weight'].to(average.dtype))


def copy_values(tensors: list[Tensor], values: list[Tensor]) -> None:
    "Copy values into a model's tensors, hidden from autograd graphs, which see the old ones again."
    for t, value in zip(local_shards(tensors), local_shards(values), strict=True):
        t.data.copy_(value)
    drop_casts()


def find_tensors(model: nn.Module) -> dict[str, Tensor]:
    "Return the parameters and buffers of a model by name, each tensor once."
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def start_average(t: Tensor, average: Tensor | None) -> Tensor:
    "Return the known average of a tensor if its shape matches, otherwise a copy of the tensor."
    dtype = torch.float32 if t.dtype in _HALVES else t.dtype
    if average is None or average.shape != t.shape:
        return t.detach().to(dtype, copy=True)
    return distribute_like(average, t).to(t.device, dtype)


def check_averages(averages: dict[str, Tensor], model: nn.Module) -> None:
    "Raise `WeightsError`, with every difference, if averages do not match the model's tensors."
    shapes = {name: tuple(t.shape) for name, t in find_tensors(model).items()}
    wrong = [
        f'{name}: {tuple(a.shape)} for {shapes.get(name, "none")}'
        for name, a in averages.items()
        if shapes.get(name) != tuple(a.shape)
    ]
    if wrong:
        raise WeightsError(
            f'These averages are of another model than this {type(model).__name__}: {"; ".join(wrong)}. '
            'Build the model as it was saved; nothing was loaded.'
        )


def steps_of(cb: Callback, **option: Any) -> int:
    "Return an option that counts optimizer steps as a number; a batch ('ba') counts as a step."
    [value] = option.values()
    time = Time(value) if isinstance(value, (str, Time)) else Time(value, 'st')
    if time.unit not in ('st', 'ba') or not time:
        raise bad_option(cb, "a number of steps, such as '1000st'", **option)
    return int(time.value)
