"""Shards: every process has a part of each weight, its gradient and its averages, by torch's FSDP2."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from learnkit.core.dtensor import (
    close_hosts,
    cut_again,
    distribute_like,
    full_tensor,
    is_dtensor,
    open_hosts,
    whole_state,
)
from learnkit.core.errors import DistributedError, ModelError, OptionError, did_you_mean
from learnkit.core.learner_type import LearnerLike
from learnkit.core.model import wrappers_of
from learnkit.distributed.ddp import share_first
from learnkit.optim.wrapper import OptimWrapper

__all__ = ['Sharded']

Wrap = type | tuple[type, ...] | Callable[[nn.Module], bool] | None
OPTIONS = ('policy', 'wrap', 'reshard_after_forward', 'offload', 'sync_pieces')


class Sharded:
    """Train with `fully_shard`: weights, gradients and the optimizer's averages are cut over the processes.

    While it lasts `learn.model` is a sharded copy of the model, and the user's own waits on the host; at the end that
    has the weights that were trained, and is `learn.model` again. An optimizer goes with them, with its state. What
    module of the model is put together whole at a time is said by `wrap`; the rest of the model is one piece more.

    An evaluation calls the sharded model, so that every process must call it equally often. Gradients are summed up
    over the processes after every backward pass, also of microbatches and accumulated batches, so that none is kept
    whole; `sync_pieces=False` does so once a batch.

    Raises `OptionError` for options that are none, `ModelError` for a model that cannot be cut, and `DistributedError`
    before training for callbacks and optimizers that work on whole weights only.

    >>> Sharded(wrap=nn.TransformerEncoderLayer).wrap.__name__
    'TransformerEncoderLayer'
    """

    averages_late = False
    needs_equal_evaluations = True

    def __init__(
        self,
        policy: Any = None,  # of mixed precision: torch's `MixedPrecisionPolicy`, or 'bf16'
        wrap: Wrap = None,  # units to shard: a class, several, a function; None: repeated blocks
        reshard_after_forward: bool | None = None,  # free weights until backward; None: torch's
        offload: Any = False,  # keep the parts on the host: True, or torch's `CPUOffloadPolicy`
        sync_pieces: bool = True,  # reduce gradients after each microbatch (False: after the last)
        **unknown: Any,
    ) -> None:
        if unknown:
            raise OptionError(
                f"{next(iter(unknown))}: the options of strategy 'fsdp' are "
                f'{", ".join(OPTIONS)}.{did_you_mean(next(iter(unknown)), OPTIONS)}'
            )
        self.policies, self.offload = policies(policy), offload_policy(offload)
        if reshard_after_forward not in (None, True, False):
            raise OptionError(
                f'reshard_after_forward={reshard_after_forward!r}: give True, False, or None.'
            )
        if not (
            wrap is None or callable(wrap) or (isinstance(wrap, tuple) and all(map(callable, wrap)))
        ):
            raise OptionError(
                f'wrap={wrap!r}: give a class of modules, a tuple of them, or a function of a module.'
            )
        self.wrap, self.reshard_after_forward, self.sync_pieces = (
            wrap,
            reshard_after_forward,
            sync_pieces,
        )
        self.original: nn.Module | None = None  # the user's model, while the sharded one is at work
        self._device = torch.device('cpu')  # where that was
        self._learn: Any = None
        self._team: Any = None  # the callback that this is the strategy of
        self._handled: BaseException | None = None  # what was being handled when it began
        self._units: list[Any] = []  # what is cut on its own, the whole model last

    # -- coming and going --------------------------------------------------------------------------

    def enter(self, learn: LearnerLike) -> None:
        "Put a sharded copy in the place of the model, and its parameters in that of the optimizer's."
        original, self._team = learn.model, learn.strategy.team
        check_can_be_cut(original)
        self._device = next(original.parameters()).device
        original.to('cpu')  # before it is copied: a device may have no room for two
        try:
            copy = deepcopy(original)
        except (TypeError, RuntimeError, ValueError) as e:
            raise ModelError(
                f"Strategy 'fsdp' works on a copy of the model, and {type(original).__name__} cannot be "
                f'copied: {e}'
            ) from e
        self._cut(copy, learn)
        self._learn, self.original, self._handled = learn, original, sys.exception()
        self._exchange(learn, copy)

    def _cut(self, model: nn.Module, learn: LearnerLike) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        device = torch.device(getattr(learn.dls, 'device', None) or learn.world.device)
        mesh = init_device_mesh(device.type, (learn.world.size,))
        open_hosts(mesh, learn.world.control)
        inner, outer = self.policies
        options: dict[str, Any] = {
            'mesh': mesh,
            'reshard_after_forward': self.reshard_after_forward,
        }
        if self.offload is not None:
            options['offload_policy'] = self.offload
        self._units = [*units_of(model, self.wrap), model]
        for m in self._units:
            fully_shard(m, **options, **with_policy(outer if m is model else inner))
        model.register_forward_hook(self._let_go)
        model.register_forward_pre_hook(self._share_before)
        if not self.sync_pieces:
            model.register_forward_pre_hook(self._choose_sync)

    def _let_go(self, *_: Any) -> None:
        "Let go of whole weights after a forward pass that no backward pass follows, as that would."
        if torch.is_grad_enabled():
            return
        for m in self._units:
            m.reshard()

    def _exchange(self, learn: LearnerLike, model: nn.Module) -> None:
        "Put another model with the same names in the place of the Learner's."
        followers = [cb for cb in learn.cbs if getattr(cb, 'follows_weights', False)]
        states = [whole_state(cb.state_dict()) for cb in followers]
        new = dict(model.named_parameters())
        exchange_params(
            optimizers_of(learn), {p: new[name] for name, p in learn.model.named_parameters()}
        )
        learn.model = model
        for cb, state in zip(followers, states, strict=True):
            cb.load_state_dict(state)

    def leave(self, learn: LearnerLike) -> None:
        """Put the user's model back, with the weights that were trained.

        Where a process has failed there is nobody to put them together with: it has those that it had before."""
        try:
            self._put_back(learn)
        finally:
            close_hosts(learn.world.control)

    def _put_back(self, learn: LearnerLike) -> None:
        if self.original is None:
            return
        original, sharded = self.original, learn.model
        self.original, self._learn = None, None
        cut_again(sharded)
        if self._is_broken(learn):
            return self._give_up(learn, original.to(self._device))
        self.share_buffers(learn)
        copy_whole(sharded, original)
        original.to(self._device)
        self.original = original
        try:
            self._exchange(learn, original)
        finally:
            self.original, self._units = None, []

    def _is_broken(self, learn: LearnerLike) -> bool:
        "Tell whether this process, or another one, has failed, so that there is nothing more to do together."
        if (e := sys.exception()) is not None and e is not self._handled:
            return True
        return learn.world.is_broken

    def _give_up(self, learn: LearnerLike, original: nn.Module) -> None:
        "Put the user's model back as it was, with an optimizer that begins anew."
        new, optimizers = dict(original.named_parameters()), optimizers_of(learn)
        for o in optimizers:
            if not isinstance(o, OptimWrapper):
                o.state.clear()
        exchange_params(optimizers, {p: new[name] for name, p in learn.model.named_parameters()})
        for cb in learn.cbs:
            if getattr(cb, 'follows_weights', False) and hasattr(cb, 'restart'):
                cb.restart()
        learn.model = original

    # -- at work -----------------------------------------------------------------------------------

    def prepare(self, learn: LearnerLike) -> None:
        "Refuse what works on whole weights only."
        cut_again(learn.model)
        if learn.opt is not None and getattr(learn.opt, 'needs_closure', False):
            raise DistributedError(
                f"{learn.opt!r} looks at all weights as one vector, which strategy 'fsdp' has not "
                "got. Use SGD or Adam, or strategy 'ddp'."
            )
        if learn.microbatch in (1, 'auto'):
            raise DistributedError(
                f"microbatch={learn.microbatch!r} with strategy 'fsdp': all processes have to cut "
                "batches into as many pieces. Give a number, 2 or more, or use strategy 'ddp'."
            )
        odd = [cb for cb in learn.cbs if getattr(cb, 'needs_whole_weights', False)]
        if odd:
            raise DistributedError(
                f"{odd[0]} works on whole weights, and with strategy 'fsdp' each process has a "
                "part of them. Leave it out, or use strategy 'ddp'."
            )

    def _share_before(self, model: nn.Module, _: Any) -> None:
        "Begin a training pass with the first process's running means, as DistributedDataParallel does."
        if torch.is_grad_enabled():
            share_first(model.buffers())

    def _choose_sync(self, *_: Any) -> None:
        learn = self._learn
        learn.model.set_requires_gradient_sync(not learn.microbatch or learn.run.is_last_microbatch)

    def pass_without_sync(self) -> AbstractContextManager[Any]:
        "Return a context for a pass that no step follows: its gradients are cut all the same."
        return nullcontext()

    def share_buffers(self, learn: LearnerLike) -> None:
        "Give every process the first one's buffers (running means, for one), so that all evaluate the same model."
        cut_again(learn.model)
        share_first(learn.model.buffers())

    def catch_up(self, learn: LearnerLike) -> None:
        "There is nothing to do: messages are the same from the first pass on."

    def average_gradients(self, learn: LearnerLike) -> None:
        "There is nothing to do: every pass has averaged its own."

    def release(self, learn: LearnerLike) -> None:
        "Forget the hosts, as a process has failed; `leave` restores the model."
        close_hosts(learn.world.control)


# -- options ---------------------------------------------------------------------------------------


def policies(policy: Any) -> tuple[Any, Any]:
    "Return the policies of mixed precision of the inner modules and of the whole model."
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if policy is None or isinstance(policy, MixedPrecisionPolicy):
        return policy, policy
    if policy != 'bf16':
        raise OptionError(f"policy={policy!r}: give 'bf16', or torch's MixedPrecisionPolicy.")
    half = partial(MixedPrecisionPolicy, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return half(), half(output_dtype=torch.float32)


def with_policy(policy: Any) -> dict[str, Any]:
    return {} if policy is None else {'mp_policy': policy}


def offload_policy(offload: Any) -> Any:
    "Return the policy that keeps weights in host memory between uses; None for False."
    from torch.distributed.fsdp import CPUOffloadPolicy

    if isinstance(offload, CPUOffloadPolicy):
        return offload
    if not isinstance(offload, bool):
        raise OptionError(f"offload={offload!r}: give True or False, or torch's CPUOffloadPolicy.")
    return CPUOffloadPolicy() if offload else None


# -- the model -------------------------------------------------------------------------------------


def check_can_be_cut(model: nn.Module) -> None:
    "Raise `ModelError` for a model that cannot be cut into parts."
    tensors = [*model.parameters(), *model.buffers()]
    name = type(model).__name__
    if wrappers := wrappers_of(model):
        raise ModelError(
            f"Strategy 'fsdp' cuts the model itself, not {type(wrappers[0]).__name__} around it. Give the "
            'Learner the bare model, and call `learn.compile()` once the strategy is at work.'
        )
    if not has_weights(model):
        raise ModelError(f'{name} has no parameters to cut.')
    if any(map(is_lazy, tensors)):
        raise ModelError(
            f'{name} has parameters without a size yet: let one batch through it first.'
        )
    if any(t.is_meta for t in tensors):
        raise ModelError(
            f"{name} is on the device 'meta', where its weights have no values: make it on the CPU."
        )
    if any(map(is_dtensor, tensors)):
        raise ModelError(f'{name} is cut into parts already.')


def units_of(model: nn.Module, wrap: Wrap) -> list[nn.Module]:
    "Return the modules that are cut on their own, inner ones first. Raises `OptionError` where none is meant."
    if wrap is None:
        return [m for m in repeated_blocks(model) if not shares_weights(m, model)]
    is_meant: Any = (lambda m: isinstance(m, wrap)) if isinstance(wrap, (type, tuple)) else wrap
    found = [m for m in model.modules() if m is not model and has_weights(m) and is_meant(m)]
    if not found:
        raise OptionError(f'wrap={wrap!r}: {type(model).__name__} has no such module inside.')
    for m in found:
        if shares_weights(m, model):
            raise OptionError(
                f'wrap={wrap!r}: a {type(m).__name__} shares weights with other parts of the model, so that it cannot '
                'be cut on its own. Leave it out of `wrap`.'
            )
    return found[::-1]


def repeated_blocks(m: nn.Module) -> Iterator[nn.Module]:
    "Yield the entries of lists and sequences of modules whose entries with weights are all of one class."
    entries = (
        [c for c in m.children() if has_weights(c)]
        if isinstance(m, (nn.ModuleList, nn.Sequential))
        else []
    )
    are_blocks = len(entries) > 1 and len({*map(type, entries)}) == 1
    if are_blocks and not isinstance(entries[0], (nn.ModuleList, nn.ModuleDict)):
        yield from entries
    else:
        for c in m.children():
            yield from repeated_blocks(c)


def has_weights(m: nn.Module) -> bool:
    return next(m.parameters(), None) is not None


def shares_weights(m: nn.Module, model: nn.Module) -> bool:
    "Tell whether a weight of a module is one of the model's elsewhere, too."
    inside = {id(p) for p in m.parameters()}
    own = set(map(id, m.modules()))
    return any(
        id(p) in inside
        for other in model.modules()
        if id(other) not in own
        for p in other._parameters.values()
    )


@torch.no_grad()
def copy_whole(sharded: nn.Module, original: nn.Module) -> None:
    "Copy weights and buffers that were put together into the user's model, with their flags."
    trained = dict(sharded.named_parameters())
    for name, p in original.named_parameters():
        p.copy_(full_tensor(trained[name]))
        p.requires_grad_(trained[name].requires_grad)
    buffers = dict(sharded.named_buffers())
    for name, b in original.named_buffers():
        if name in buffers:
            b.copy_(buffers[name])
    modes = {name: m.training for name, m in sharded.named_modules()}
    for name, m in original.named_modules():
        m.training = modes.get(name, m.training)


# -- the optimizer ---------------------------------------------------------------------------------


def optimizers_of(learn: LearnerLike) -> list[torch.optim.Optimizer]:
    "Return the optimizers that have parameters of the model: the Learner's, and ready ones that it will take."
    ready = learn.opt_func.values() if isinstance(learn.opt_func, Mapping) else learn.opt_func
    ready = ready if isinstance(ready, Iterable) else [ready]
    found = [o for o in (learn.opt, *ready) if isinstance(o, torch.optim.Optimizer)]
    inner = [
        x
        for o in found
        for x in ([o, *o.optimizers.values()] if isinstance(o, OptimWrapper) else [o])
    ]
    return list({id(o): o for o in inner}.values())


def exchange_params(optimizers: Iterable[torch.optim.Optimizer], new: Mapping[Any, Any]) -> None:
    "Put other parameters in the places of those of optimizers, with their state and gradients, cut as they are."
    for o in optimizers:
        if isinstance(o, OptimWrapper):
            o.rename_params(new)
        else:
            exchange_in(o, new)


def exchange_in(o: torch.optim.Optimizer, new: Mapping[Any, Any]) -> None:
    "Give an optimizer other parameters for those that it has, with their states."
    for group in o.param_groups:
        group['params'][:] = [new.get(p, p) for p in group['params']]
    states = dict(o.state)
    o.state.clear()  # the very object, which others may read
    for p, state in states.items():
        q = new.get(p, p)
        o.state[q] = {key: distribute_like(value, q) for key, value in state.items()}
