"""Callbacks that change how batches and epochs are trained on: clipping, layouts, short epochs, frozen norm layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from learnkit.core.batch import map_tensors
from learnkit.core.dtensor import is_dtensor, locals_of, total_norm
from learnkit.core.errors import CancelTrainException, CancelValidException, OptionError
from learnkit.core.model import bare_model
from learnkit.data.checks import epoch_length
from learnkit.data.dataloaders import evaluation_loaders
from learnkit.engine.callback import Callback
from learnkit.engine.train_eval import SkipToEpoch

__all__ = [
    'GradientClip',
    'GradientValueClip',
    'ChannelsLast',
    'CastToTensor',
    'ShortEpochCallback',
    'BnFreeze',
    'SkipToEpoch',
    'before_batch_cb',
]

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by number of dimensions


def bad_option(
    cb: object,  # the callback that got it
    need: str,  # what it takes instead
    **option: object,  # the option, by its name
) -> OptionError:
    "Make the error for an option that a callback cannot work with."
    [(name, value)] = option.items()
    return OptionError(f'{type(cb).__name__}({name}={value!r}): give {need}.')


def is_number(value: object) -> bool:
    "Tell whether a value is a real number, and neither NaN nor a truth value."
    return isinstance(value, Real) and not isinstance(value, bool) and value == value


def is_count(value: object, least: int = 1) -> bool:
    "Tell whether a value is a whole number, `least` or more, and no truth value."
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


# ---------------------------------------------------------------------------------------- gradients


class GradientClip(Callback):
    """Scale the gradients of each step down to a total norm of at most `max_norm`.

    The norm is that of all gradients of the optimizer's parameters together, or of the parameters of
    the one that `optimize(only=)` names, as at the step: of the whole batch under microbatches, of
    all batches of a step under `GradientAccumulation`, unscaled under mixed precision. Nothing waits
    for the device. `total_norm` is the norm before clipping at the last step, also after the fit (a
    0-dim tensor).
    Checkpointed: that norm.

    Raises `OptionError` for a norm that is not above 0.

    >>> GradientClip(0.5).max_norm, GradientClip.order
    (0.5, 11)
    """

    order = 11  # right after mixed precision (10) has unscaled the gradients

    def __init__(
        self,
        max_norm: float = 1.0,  # the largest norm that is left as it is
        norm_type: float = 2.0,  # which norm; `inf` for the largest absolute value
    ) -> None:
        if not is_number(max_norm) or max_norm <= 0:
            raise bad_option(self, 'a norm above 0', max_norm=max_norm)
        if not is_number(norm_type) or norm_type <= 0:
            raise bad_option(self, 'the p of a norm: 1, 2, or inf', norm_type=norm_type)
        self.max_norm, self.norm_type = float(max_norm), float(norm_type)
        self.total_norm: Tensor | None = None

    def before_step(self) -> None:
        params = self.learn.step_parameters
        grads = [p.grad for p in params if p.grad is not None] if self.learn.world.size > 1 else []
        if any(map(is_dtensor, grads)):
            self.total_norm = clip_parts(grads, self.max_norm, self.norm_type)
        else:
            self.total_norm = clip_grad_norm_(params, self.max_norm, self.norm_type).detach()

    def state_dict(self) -> dict[str, Any]:
        "Return the last norm."
        return {'total_norm': self.total_norm}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Put it back."
        self.total_norm = sd['total_norm']


def clip_parts(grads: list[Any], max_norm: float, norm_type: float) -> Tensor:
    "Scale gradients of which every process has a part; return their norm before."
    norm = total_norm(grads, norm_type)
    torch._foreach_mul_(locals_of(grads), (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


class GradientValueClip(Callback):
    """Clip each entry of the gradients of what steps to `[-max_value, max_value]`. No state.

    Raises `OptionError` for a value that is not above 0.

    >>> GradientValueClip().max_value
    1.0
    """

    order = GradientClip.order

    def __init__(self, max_value: float = 1.0) -> None:
        if not is_number(max_value) or max_value <= 0:
            raise bad_option(self, 'a number above 0', max_value=max_value)
        self.max_value = float(max_value)

    def before_step(self) -> None:
        params = self.learn.step_parameters
        if self.learn.world.size == 1:
            return clip_grad_value_(params, self.max_value)
        for g in locals_of(p.grad for p in params if p.grad is not None):
            g.clamp_(-self.max_value, self.max_value)


# ------------------------------------------------------------------------------------------ batches


class CastToTensor(Callback):
    """Make plain tensors of tensor subclasses in `xb` and `yb`, however nested, right before mixed precision.

    Subclasses that are no tensor without their class (distributed, nested, quantized ones) stay. No state.

    >>> CastToTensor.order
    9
    """

    order = 9

    def before_batch(self) -> None:
        learn = self.learn
        learn.xb, learn.yb = map_tensors(learn.xb, as_plain), map_tensors(learn.yb, as_plain)


def as_plain(t: Tensor) -> Tensor:
    "Return a tensor without its subclass, sharing its memory; one whose class computes its operations as it is."
    cls = type(t)
    if cls is Tensor or getattr(cls, '__torch_dispatch__', None) is not Tensor.__torch_dispatch__:
        return t
    return t.as_subclass(Tensor)


def before_batch_cb(
    f: Callable[[Any, tuple[Any, ...], tuple[Any, ...]], Any],  # f(callback, xb, yb) -> new xb, yb
) -> Callback:
    """Make a callback that changes batches from a function of the callback, `xb` and `yb`.

    Raises `OptionError` for what is no function.

    >>> @before_batch_cb
    ... def half(cb, xb, yb): return tuple(x / 2 for x in xb), yb
    >>> half
    Callback(before_batch=half)
    """
    if not callable(f):
        raise OptionError(
            f'before_batch_cb({f!r}): give a function f(cb, xb, yb) that returns xb, yb.'
        )

    def before_batch(cb: Callback) -> None:
        cb.learn.xb, cb.learn.yb = f(cb, cb.learn.xb, cb.learn.yb)

    before_batch.__name__ = getattr(f, '__name__', 'before_batch')
    return Callback(before_batch=before_batch)


# ------------------------------------------------------------------------------------------- layers


class ChannelsLast(Callback):
    """Keep images in channels-last layout for the length of a run: convolutions are faster so on many devices.

    The weights of convolutions (4 and 5 dimensions) are converted, with their optimizer state, and put back when the
    run ends. Batches need no conversion: what comes out of a convolution has the layout of its weights. No state.

    >>> from torch import nn
    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(model=nn.Sequential(nn.Conv2d(3, 8, 3)), cbs=ChannelsLast)
    >>> learn('before_fit'); learn.model[0].weight.is_contiguous(memory_format=torch.channels_last)
    True
    >>> learn('cleanup'); learn.model[0].weight.is_contiguous()
    True
    """

    order = -1  # before anything that keeps copies of the weights
    needs_whole_weights = True

    def __init__(self) -> None:
        self._converted: list[nn.Parameter] = []

    def before_fit(self) -> None:
        for p in self.learn.model.parameters():
            wanted = CHANNELS_LAST.get(p.dim())
            if wanted is None or p.is_contiguous(memory_format=wanted):
                continue
            self._converted.append(p)
            self._lay_out(p, wanted)

    def cleanup(self) -> None:
        while self._converted:
            self._lay_out(self._converted.pop(), torch.contiguous_format)

    def _lay_out(self, p: nn.Parameter, layout: torch.memory_format) -> None:
        "Convert a parameter, and what the optimizer keeps for it: fused steps read both in the order of memory."
        p.data = p.data.contiguous(memory_format=layout)
        if p.grad is not None:
            p.grad = p.grad.contiguous(memory_format=layout)
        state = self.learn.opt.state.get(p, {}) if self.learn.opt is not None else {}
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == p.shape:
                state[name] = value.contiguous(memory_format=layout)


class BnFreeze(Callback):
    """Keep frozen batch norm layers in evaluation mode while the rest of the model trains.

    A layer is frozen when it has parameters and none requires a gradient; its running statistics then stay as they are.
    It is looked up before each epoch, so that layers may be frozen and unfrozen in between. Checkpointed: which layers
    it keeps so.

    >>> BnFreeze.run_after
    'TrainEvalCallback'
    """

    run_after = 'TrainEvalCallback'

    def __init__(self) -> None:
        self._frozen: list[nn.Module] = []

    def before_train(self) -> None:
        thawed, self._frozen = self._frozen, list(frozen_norms(self.learn.model))
        for m in thawed:
            m.train()
        for m in self._frozen:
            m.eval()

    def cleanup(self) -> None:
        for m in self._frozen:
            m.train(self.learn.model.training)
        self._frozen = []

    def state_dict(self) -> dict[str, Any]:
        "Return the names of the layers that are kept in evaluation mode."
        named = bare_model(self.learn.model).named_modules() if self._frozen else ()
        frozen = {id(m) for m in self._frozen}
        return {'frozen': [name for name, m in named if id(m) in frozen]}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Remember them, to be trained again once they are unfrozen."
        if self.learn is None:
            return
        named = dict(bare_model(self.learn.model).named_modules())
        self._frozen = [named[name] for name in sd['frozen'] if name in named]


def frozen_norms(model: nn.Module) -> Iterator[nn.Module]:
    "Yield the batch norm layers that have parameters of which none requires a gradient."
    for m in model.modules():
        if (
            isinstance(m, _BatchNorm)
            and (params := list(m.parameters()))
            and not any(p.requires_grad for p in params)
        ):
            yield m


# ------------------------------------------------------------------------------------------- epochs


class ShortEpochCallback(Callback):
    """Train on the first `pct` of each epoch only, for a quick look; as in fastai, on one batch more than that.

    An epoch ends after the first batch whose index is at least `pct` of the number of batches: of 10 batches, `pct=0.2`
    takes 3. Unlike in fastai, all of them are recorded, measured and gathered, also the last one. No state.

    Raises `OptionError` for a `pct` outside 0 to 1, and before training when a loader's length is not known.

    >>> ShortEpochCallback(0.1).pct
    0.1
    """

    order, remove_on_find = 1000, True  # after everyone has heard of the batch

    def __init__(
        self,
        pct: float = 0.01,  # share of the batches, 0 to 1
        short_valid: bool = True,  # whether evaluation is cut as well
    ) -> None:
        if not is_number(pct) or not 0 <= pct <= 1:
            raise bad_option(self, 'a share from 0 to 1', pct=pct)
        self.pct, self.short_valid = pct, short_valid

    def before_fit(self) -> None:
        if not self.learn.fitting:
            return
        dls = self.learn.dls
        loaders = [('train', dls.train), *(evaluation_loaders(dls) if self.short_valid else [])]
        for name, dl in loaders:
            if epoch_length(dls, dl)[0] is None:
                raise OptionError(
                    f'ShortEpochCallback(pct={self.pct}): the {name} loader has no length to take a '
                    'share of. Give it a `__len__`, or DataLoaders an `n_iter`.'
                )

    def after_batch(self) -> None:
        learn = self.learn
        if not learn.n_iter or learn.iter / learn.n_iter < self.pct:
            return
        if learn.training:
            raise CancelTrainException
        if self.short_valid:
            raise CancelValidException
