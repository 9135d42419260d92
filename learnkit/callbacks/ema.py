"""Exponential moving average of the weights, for evaluation and for the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from learnkit.callbacks.training import bad_option, is_number
from learnkit.core.dtensor import distribute_like, locals_of
from learnkit.core.errors import WeightsError
from learnkit.core.time import Time
from learnkit.engine.callback import Callback

__all__ = ['EMA']

Store = tuple[dict[str, Tensor], str]  # where a module keeps a tensor
_HALVES = (torch.float16, torch.bfloat16)  # too coarse to average in


class Place(NamedTuple):
    "Where a module has a tensor: there it is found also when another one takes its place."

    module: nn.Module
    kind: str  # '_parameters' or '_buffers'
    key: str

    @property
    def tensor(self) -> Tensor:
        return getattr(self.module, self.kind)[self.key]


class EMA(Callback):
    """Average the weights over the optimizer's steps, and evaluate and predict with the average.

    After each step `average = decay * average + (1 - decay) * weights` (Polyak and Juditsky, 1992, with exponential
    weights). Only real steps count: not batches that are accumulated, nor steps that mixed precision skips. What is
    averaged is every trainable parameter, tied ones once, and every floating-point buffer that a checkpoint holds
    (running statistics; not one with infinite entries, such as a mask). Half-precision weights are averaged in single.

    With a constant decay of 0.999 a run of a few hundred steps would average little but the weights that it began with.
    So the average warms up: its first update takes the weights as they are, and after t updates it keeps a share of
    `1 - (1 + t)^-warmup`, until that reaches `decay`. It then reaches back over about the last `(1 + t)^warmup` updates
    (with 2/3, timm's power, over the last 100 after 1,000). `warmup=None` has `decay` from the first update on.

    The model holds the average during `validate`, `get_preds` and the evaluations of `fit`, and its own weights
    otherwise, also after the fit: these are what `learn.save`, `save_learner` and `export` write. `learn.ema.copy_to()`
    puts the average there for good, `with learn.ema.applied(): learn.export()` for a while. `SaveModelCallback` saves
    what was evaluated, the average. Averaging goes on in the next fit, and `restart()` begins anew. Weights that are
    new, of another model or a replaced layer, begin with their present values, and so does everything when weights are
    loaded.

    Checkpointed: the averages by name, and the numbers of steps and updates.

    Raises `OptionError` for bad options and `WeightsError` when a loaded average does not fit the model.

    >>> EMA(half_life='1000st').decay
    0.9993070929904525
    """

    remove_on_find = follows_weights = True

    def __init__(
        self,
        decay: float = 0.999,  # share of the average that a step keeps; 1/(1-decay) steps count
        half_life: str | int | Time | None = None,  # instead of `decay`: steps to half the weight
        start: str | int | Time = 0,  # when averaging begins: a number of steps, '2ep', '0.5dur'
        every: str | int | Time = 1,  # steps from update to update
        warmup: float | None = 2 / 3,  # decay of update t = 0, 1, ... is at most 1 - (1+t)^-warmup
    ) -> None:
        self.every, self.warmup = steps_of(self, every=every), warmup
        if half_life is not None:
            decay = 0.5 ** (self.every / steps_of(self, half_life=half_life))
        if not is_number(decay) or not 0 <= decay < 1:
            raise bad_option(self, 'a share from 0 to below 1', decay=decay)
        if warmup is not None and not (is_number(warmup) and warmup > 0):
            raise bad_option(self, 'a power above 0, such as 2/3, or None', warmup=warmup)
        self.decay = float(decay)
        self.start = Time(start) if isinstance(start, (str, Time)) else Time(start, 'st')
        if self.start.unit == 'tok':
            raise bad_option(self, 'a time: tokens are not counted', start=start)
        self._opt_steps = 0  # the optimizer's steps before the one that it takes
        self._raw: tuple[list[Store], list[Tensor]] | None = (
            None  # the model's own weights, while it has the average
        )
        self._used_at: int | None = (
            None  # the depth of the run that made it hold it; None: `applied` did
        )
        self._paused = False  # that run pauses, and the model has its own weights meanwhile
        self.restart()

    def restart(self) -> None:
        "Forget the average: it begins anew, with the weights as they are when it next could begin."
        self._put_back()
        self._averages: dict[str, Tensor] = {}
        self._places: dict[
            str, Place
        ] = {}  # of each average; empty after loading, until the model is looked at
        self._stores: list[Store] = []  # the same as a list, for every step
        self._n_steps, self._n_updates = 0, 0

    @property
    def has_begun(self) -> bool:
        "Whether there is an average."
        return bool(self._averages)

    # -- averaging ---------------------------------------------------------------------------------

    def before_load(self) -> None:
        self._put_back()  # what is loaded is to stay

    def after_load(self) -> None:
        self._raw = self._used_at = None
        self.restart()

    def before_train(self) -> None:
        self._put_back()
        if self._averages or self.learn.time >= self.start:
            self._link()

    def before_step(self) -> None:
        self._opt_steps = self.learn.opt.n_steps

    def after_step(self) -> None:
        if self.learn.opt.n_steps == self._opt_steps:
            return  # the step was skipped
        self._n_steps += 1
        if self._averages:
            self._update_if_due()
        elif self.learn.time >= self.start:
            self._link()

    def _update_if_due(self) -> None:
        if self._n_steps % self.every == 0:
            self.update()

    def update(self) -> None:
        "Move the average towards the weights as they are now."
        decay = (
            self.decay
            if self.warmup is None
            else min(self.decay, 1 - (1 + self._n_updates) ** -self.warmup)
        )
        averages, now = locals_of(self._averages.values()), locals_of(self._tensors())
        now = [
            t if t.dtype is a.dtype else t.to(a.dtype) for t, a in zip(now, averages, strict=True)
        ]
        if averages:
            get_ema_multi_avg_fn(decay)(averages, now, None)
        self._n_updates += 1

    def _tensors(self) -> list[Tensor]:
        "Return the model's tensors, in the order of their averages."
        return [store[key] for store, key in self._stores]

    def _link(self) -> None:
        "Pair the averages with the model as it is now; what has none begins with its present value."
        known: dict[Any, Tensor] = {
            place: self._averages[name] for name, place in self._places.items()
        }
        if not self._places:
            check_fits(self._averages, self.learn.model)
            known = {
                place: self._averages[name]
                for name, place in places(self.learn.model)
                if name in self._averages
            }
        self._places = {
            name: place
            for name, place in places(self.learn.model)
            if place in known or is_followed(place)
        }
        self._averages = {
            name: begin(place.tensor, known.get(place)) for name, place in self._places.items()
        }
        self._stores = [(getattr(p.module, p.kind), p.key) for p in self._places.values()]

    # -- using the average -------------------------------------------------------------------------

    def before_validate(self) -> None:
        if self._raw is None and self._averages:
            self._use(self.learn.run.depth)

    def after_validate(self) -> None:
        self._end_use(self.learn.run.depth)

    def after_cancel_epoch(self) -> None:
        self._end_use(self.learn.run.depth)

    def after_cancel_fit(self) -> None:
        self._end_use(self.learn.run.depth)

    def cleanup(self) -> None:
        self._end_use(self._used_at)

    def on_run_failed(self) -> None:
        if self._used_at is not None and self._used_at >= self.learn.run.depth:
            self._put_back()

    def on_run_paused(self) -> None:
        if self._used_at == self.learn.run.depth:
            self._put_back()
            self._paused = True

    def on_run_resumed(self) -> None:
        if self._paused and self._raw is None and self._averages:
            self._use(self.learn.run.depth)
        self._paused = False

    def _use(self, depth: int | None) -> None:
        "Put the average into the model, in place: what holds on to its memory need not know."
        if not (self._paused and self._stores):
            self._link()
        self._raw, self._used_at = (
            (self._stores, [t.detach().clone() for t in self._tensors()]),
            depth,
        )
        fill(self._stores, list(self._averages.values()))

    def _end_use(self, depth: int | None) -> None:
        if depth is not None and depth == self._used_at:
            self._put_back()

    def _put_back(self) -> None:
        "Give the model its own weights again, bit for bit."
        if self._raw is None:
            return
        fill(*self._raw)
        self._raw = self._used_at = None

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        "Let the model hold the average for the length of a context; its own weights are there again afterwards."
        self._check_begun()
        own = self._raw is None
        if own:
            self._use(None)
        raw = self._raw
        try:
            yield self.learn.model
        finally:
            if own and self._raw is raw:
                self._put_back()  # otherwise the weights are others by now, loaded for one

    def copy_to(
        self,
        model: nn.Module | None = None,  # with parameters of the same names; None: the Learner's
    ) -> nn.Module:
        "Put the average into a model for good, and return it. Raises `WeightsError` when it does not fit."
        self._check_begun()
        if model is None:
            if self._raw is None:
                self._use(None)
            self._raw = self._used_at = None  # there is no way back
            return self.learn.model
        check_fits(self._averages, model)
        tensors = {name: place.tensor.data for name, place in places(model)}
        for name, average in self._averages.items():
            tensors[name].copy_(distribute_like(average, tensors[name]))
        return model

    def _check_begun(self) -> None:
        if not self.has_begun:
            raise WeightsError(f'EMA has no average yet: it begins at {self.start} of training.')

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        "Return the averages by name, and the numbers of steps and updates."
        return {
            'averages': dict(self._averages),
            'n_steps': self._n_steps,
            'n_updates': self._n_updates,
        }

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Go on from saved averages. Raises `WeightsError`, and loads nothing, when they do not fit the model."
        if self.learn is not None:
            check_fits(sd['averages'], self.learn.model)
        self.restart()
        self._averages = {name: average.clone() for name, average in sd['averages'].items()}
        self._n_steps, self._n_updates = sd['n_steps'], sd['n_updates']
        if self._averages and self.learn is not None:
            self._link()


def fill(stores: list[Store], values: list[Tensor]) -> None:
    "Give a model's tensors other values, in place and unknown to graphs, which will meet the old ones again."
    if not stores:
        return
    torch._foreach_copy_(
        [t.data for t in locals_of(store[key] for store, key in stores)], locals_of(values)
    )


def places(model: nn.Module) -> Iterator[tuple[str, Place]]:
    "Yield every parameter and every buffer that a checkpoint holds, with its name, each tensor once."
    seen: set[int] = set()
    for prefix, m in model.named_modules():
        for kind in ('_parameters', '_buffers'):
            for key, t in getattr(m, kind).items():
                if t is None or id(t) in seen or key in m._non_persistent_buffers_set:
                    continue
                seen.add(id(t))
                yield f'{prefix}.{key}' if prefix else key, Place(m, kind, key)


def is_followed(place: Place) -> bool:
    "Tell whether a tensor is to be averaged: parameters that are trained, and finite floating-point buffers."
    t = place.tensor
    if place.kind == '_parameters':
        return t.requires_grad
    return t.is_floating_point() and bool(t.isfinite().all())


def begin(t: Tensor, average: Tensor | None) -> Tensor:
    "Return the average of a tensor on its device: the one there is, if it fits, or the tensor's present value."
    dtype = torch.float32 if t.dtype in _HALVES else t.dtype
    if average is None or average.shape != t.shape:
        return t.detach().to(dtype, copy=True)
    return distribute_like(average, t).to(t.device, dtype)


def check_fits(averages: dict[str, Tensor], model: nn.Module) -> None:
    "Raise `WeightsError`, with every difference, for averages of other tensors than the model's."
    shapes = {name: tuple(place.tensor.shape) for name, place in places(model)}
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
    "Return an option that counts optimizer steps as a number; a batch is taken for a step, as Composer means it."
    [value] = option.values()
    time = Time(value) if isinstance(value, (str, Time)) else Time(value, 'st')
    if time.unit not in ('st', 'ba') or not time:
        raise bad_option(cb, "a number of steps, such as '1000st'", **option)
    return int(time.value)
