# SPDX-License-Identifier: Apache-2.0
"""Strategy 'fsdp': weights, gradients and optimizer states are sharded over ranks by torch's FSDP2."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import override

from learnkit.checkpoint.state import collect_state
from learnkit.checkpoint.weights import collect_module_state
from learnkit.comm.dtensor import (
    TENSOR,
    close_hosts,
    count_parts,
    gather_full_state,
    is_dtensor,
    local_shard,
    open_hosts,
    reshard,
)
from learnkit.comm.ranks import new_host_group
from learnkit.core.errors import DistributedError, ModelError, OptionError
from learnkit.core.model import has_weights, is_on_meta, wrappers_of
from learnkit.core.validation import check_count, warn_user
from learnkit.distributed.ddp import Parallelism, broadcast_tensors
from learnkit.distributed.initialize import copy_on_meta, fill, take_back
from learnkit.engine.traits import trait_of

if TYPE_CHECKING:
    from learnkit.learner import Learner

Parallelize = Callable[[nn.Module, Any], Any]  # f(model, mesh of `tensor` processes)
Wrap = type | tuple[type, ...] | Callable[[nn.Module], bool] | None


class Sharded(Parallelism):
    """Shard weights, gradients and optimizer states over ranks with `fully_shard`.

    Between `enter` and `leave`, `learn.model` is sharded, and the parameters of the user's model are empty: their
    values move to the shards, one tensor at a time. `leave` restores the user's model: the ranks where it came with
    weights get the trained ones, and a model that came on the meta device stays there. After an error the model is on
    the meta device, because the shards of other ranks may be lost. Optimizers are moved to the parameters of the
    current model, with their states. `wrap` selects the modules that are gathered one at a time;
    the rest of the model is one more unit. With `replicas=2` each half of the processes holds all shards, and gradients
    are averaged over the halves, too: less traffic between machines, for more memory.

    With `tensor=2` two processes train on the same samples, each with a part of the layers that `parallelize` makes
    parallel by torch's `parallelize_module`; shards and samples are divided among such pairs. What a parallel layer
    returns must be equal on both. `learn.world.data_rank` and `data_size` number the pairs.

    Gradients are reduced after every backward pass, also of microbatches and accumulated batches, so that no full
    gradient is kept.

    Raises `ModelError` for a model in a wrapper, and `DistributedError` before training for callbacks and optimizers
    that need full weights.

    >>> Sharded(wrap=nn.TransformerEncoderLayer).wrap.__name__
    'TransformerEncoderLayer'
    """

    def __init__(
        self,
        policy: Any = None,  # mixed precision: torch's `MixedPrecisionPolicy`, or 'bf16'
        wrap: Wrap = None,  # units to shard: class(es) or a function; None: repeated blocks
        offload: Any = False,  # keep shards on the host: True, or torch's `CPUOffloadPolicy`
        weights: str | Path | None = None,  # safetensors file(s) of a model on the meta device
        replicas: int = 1,  # groups of processes that each hold all shards (HSDP)
        tensor: int = 1,  # processes that share the layers that `parallelize` makes parallel
        parallelize: Parallelize | None = None,  # f(model, mesh), which calls `parallelize_module`
    ) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

        self.policies = make_policies(policy)
        self.offload = CPUOffloadPolicy() if offload is True else offload or OffloadPolicy()
        self.wrap = wrap
        self.weights = weights
        self.replicas = check_count('replicas', replicas)
        self.tensor = check_count('tensor', tensor)
        self.parallelize = parallelize
        if tensor > 1 and (parallelize is None or replicas > 1):
            raise OptionError(f'tensor={tensor}: pass parallelize=, and leave out replicas=.')
        self.original: nn.Module | None = None  # the user's model, between `enter` and `leave`
        self._shapes: list[torch.Size] = []  # of its parameters, which are empty between them
        self._are_empty: list[bool] = []  # whether the model of each rank was on the meta device
        self._handled: BaseException | None = None  # exception being handled during `enter`

    # -- sharding and gathering the model ----------------------------------------------------------

    @override
    def check_size(self, size: int) -> None:
        "Raise `OptionError` for a number of processes that `replicas` and `tensor` do not divide."
        if size % (self.replicas * self.tensor):
            name = 'tensor' if self.tensor > 1 else 'replicas'
            raise OptionError(
                f'{name}={getattr(self, name)}: {size} processes are not divided by it.'
            )

    @override
    def enter(self, learn: Learner) -> None:
        "Replace the model by a sharded one, which takes its values."
        check_can_be_sharded(learn)
        check_can_train_sharded(learn)
        original = learn.model
        self._are_empty = learn.world.gather(is_on_meta(original))
        if self.weights is not None and not all(self._are_empty):
            raise OptionError(
                'weights= is for a model on the meta device, `with torch.device("meta"): model = ...`. Load the '
                'weights of another one by `learn.load`.'
            )
        if learn.run.has_lost_weights and self.weights is None:
            warn_user(
                'An error has ended the last context, and the weights went with it: the model gets new ones. Resume '
                'from a checkpoint, `learn.fit(n, resume=True)`, or pass `weights=`.'
            )
        state = self._collect_rest(learn)
        sharded = copy_on_meta(original)
        self._shard(sharded, learn)
        self.original = original
        self._shapes = [p.shape for p in original.parameters()]
        self._handled = sys.exception()
        fill(sharded, original, self._are_empty, learn.world, self.weights)
        replace_model(learn, sharded, state)

    def _collect_rest(self, learn: Learner) -> dict[str, Any] | None:
        "Return the training state without the weights; None if there is none, or no rank could hold it."
        if learn.opt is None or any(self._are_empty):
            return None
        state = collect_state(learn, '')
        del state['model']
        whole: dict[str, Any] = gather_full_state(state)
        return whole

    def _shard(self, model: nn.Module, learn: Learner) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        device = torch.device(getattr(learn.dls, 'device', None) or learn.world.device)
        n_shards = learn.world.size // (self.replicas * self.tensor)
        sizes = {'replica': self.replicas, 'shard': n_shards, TENSOR: self.tensor}
        sizes = {name: n for name, n in sizes.items() if name == 'shard' or n > 1}
        mesh = init_device_mesh(device.type, (*sizes.values(),), mesh_dim_names=(*sizes,))
        open_hosts(mesh, learn.world.control)
        learn.world.writing = new_host_group(timedelta(seconds=learn.world.timeout_s))
        if self.parallelize is not None and self.tensor > 1:
            divide_layers(model, self.parallelize, mesh[TENSOR])
            mesh = mesh['shard']
        inner, outer = self.policies
        for m in [*find_units(model, self.wrap), model]:
            policy = outer if m is model else inner
            fully_shard(m, mesh=mesh, mp_policy=policy, offload_policy=self.offload)
        model.to_empty(device='cpu' if isinstance(self.offload, CPUOffloadPolicy) else device)
        model.register_forward_hook(reshard_without_grad)
        model.register_forward_pre_hook(broadcast_buffers)

    @override
    def leave(self, learn: Learner) -> None:
        """Restore the user's model, with the trained weights.

        If a rank has failed, the weights cannot be gathered, and the user's model is on the meta device."""
        try:
            self._restore_model(learn)
        finally:
            close_hosts()

    def _restore_model(self, learn: Learner) -> None:
        original, self.original = self.original, None
        if original is None:
            return
        reshard(learn.model)
        if self._has_failed(learn):
            for p, shape in zip(original.parameters(), self._shapes, strict=True):
                p.data = p.new_empty(1).expand(shape)
            replace_model(learn, original.to('meta'), None)
            learn.run.has_lost_weights = True
            learn.parts.callbacks.notify('on_weights_restored')
            return
        state = self._collect_rest(learn)
        self.share_buffers(learn)
        if not all(self._are_empty):
            take_back(original, learn.model)
        replace_model(learn, original, state)
        learn.run.has_lost_weights = False

    def _has_failed(self, learn: Learner) -> bool:
        "Return True if this rank or another rank has failed, so that collectives are impossible."
        e = sys.exception()
        return (e is not None and e is not self._handled) or learn.world.is_broken

    # -- training ----------------------------------------------------------------------------------

    @override
    def prepare(self, learn: Learner) -> None:
        "Check the options again, which may have changed within the context."
        reshard(learn.model)
        check_can_train_sharded(learn)

    @override
    def release(self, learn: Learner) -> None:
        "Remove the mesh of hosts after a failure; `leave` restores the model."
        close_hosts()


# -- options ---------------------------------------------------------------------------------------


def make_policies(policy: Any) -> tuple[Any, Any]:
    "Return the mixed-precision policies of the inner modules and of the whole model."
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = policy or MixedPrecisionPolicy()
    if isinstance(policy, MixedPrecisionPolicy):
        return policy, policy
    if policy != 'bf16':
        raise OptionError(f"policy={policy!r}: pass 'bf16', or torch's MixedPrecisionPolicy.")
    half = partial(MixedPrecisionPolicy, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return half(), half(output_dtype=torch.float32)


# -- the model -------------------------------------------------------------------------------------


def check_can_be_sharded(learn: Learner) -> None:
    "Raise `ModelError` for a model in a wrapper, and `DistributedError` for an optimizer that cannot be made again."
    wrappers = wrappers_of(learn.model)
    if wrappers:
        raise ModelError(
            f"Strategy 'fsdp' shards the model itself, not {type(wrappers[0]).__name__} around it. Pass the "
            'Learner the bare model, and call `learn.compile()` once the strategy is at work.'
        )
    if not callable(learn.opt_func):
        raise DistributedError(
            "Strategy 'fsdp' makes the optimizer for the sharded weights: pass `opt_func` a function or a class, "
            'not an optimizer.'
        )


def check_can_train_sharded(learn: Learner) -> None:
    "Raise `DistributedError` for microbatches of unknown number, and callbacks that need full weights or layers."
    if learn.microbatch in (1, 'auto'):
        raise DistributedError(
            f"microbatch={learn.microbatch!r} with strategy 'fsdp': all processes have to split "
            "batches into as many microbatches. Pass a number, 2 or more, or use strategy 'ddp'."
        )
    unsupported = [cb for cb in learn.cbs if trait_of(cb, 'needs_whole') == 'weights']
    if unsupported:
        raise DistributedError(
            f"{unsupported[0]} works on whole weights, and with strategy 'fsdp' each process has a "
            "part of them. Leave it out, or use strategy 'ddp'."
        )
    divided = [cb for cb in learn.cbs if trait_of(cb, 'needs_whole') == 'layers']
    if divided and learn.world.copies > 1:
        raise DistributedError(
            f'{divided[0]} needs whole layers, and with tensor= each process has a part of some. Leave it out, and '
            "use 'bf16' in place of 'fp16'."
        )


def replace_model(
    learn: Learner,
    model: nn.Module,  # model with the same parameter names
    state: dict[str, Any] | None,  # training state without the weights, or None
) -> None:
    "Replace the Learner's model, and load the training state."
    learn.model = model
    learn.opt = None  # made for the new parameters
    if state is not None:
        learn.load_checkpoint_state({**state, 'model': collect_module_state(model)})


def divide_layers(model: nn.Module, parallelize: Parallelize, mesh: Any) -> None:
    """Let a function divide layers of a model without values between the ranks of a mesh.

    Raises `ModelError` if names have changed or parts are uneven, and `OptionError` if nothing is divided."""
    names = {name for name, _ in model.named_parameters()}
    parallelize(model, mesh)
    params = dict(model.named_parameters())
    changed = names.symmetric_difference(params)
    changed |= {name for name, b in model.named_buffers() if is_dtensor(b)}
    if changed:
        raise ModelError(
            f'parallelize= has changed the parameters or buffers {sorted(changed)[:5]}: leave out layers with tied '
            'weights, and layers with buffers.'
        )
    divided = {name: p for name, p in params.items() if is_dtensor(p)}
    if not divided:
        raise OptionError('parallelize= has divided no layer of the model that it was called with.')
    for name, p in divided.items():
        if local_shard(p).numel() * count_parts(p) != p.numel():
            raise ModelError(
                f'{name} {list(p.shape)} cannot be divided evenly between {mesh.size()} processes.'
            )


def broadcast_buffers(model: nn.Module, _: Any) -> None:
    "Broadcast the first rank's buffers before a training pass, as DistributedDataParallel does."
    if torch.is_grad_enabled():
        broadcast_tensors(model.buffers())


def reshard_without_grad(model: nn.Module, *_: Any) -> None:
    "Free the full weights after a forward pass without gradients, which no backward pass follows."
    if not torch.is_grad_enabled():
        reshard(model)


def find_units(model: nn.Module, wrap: Wrap) -> list[nn.Module]:
    "Return the modules to shard as units, inner modules first. Raises `OptionError` if `wrap` selects none."
    if wrap is None:
        return [m for m in find_blocks(model) if not shares_weights(m, model)]

    def is_selected(m: nn.Module) -> bool:
        return isinstance(m, wrap) if isinstance(wrap, (type, tuple)) else wrap(m)

    units = [m for m in model.modules() if m is not model and has_weights(m) and is_selected(m)]
    units = [m for m in units if not shares_weights(m, model)]
    if not units:
        raise OptionError(
            f'wrap={wrap!r}: {type(model).__name__} has no such submodule with its own weights.'
        )
    return units[::-1]


def find_blocks(m: nn.Module) -> Iterator[nn.Module]:
    "Yield the entries of each `ModuleList` or `Sequential` whose entries with weights have one class."
    entries = []
    if isinstance(m, (nn.ModuleList, nn.Sequential)):
        entries = [c for c in m.children() if has_weights(c)]
    are_blocks = len(entries) > 1 and len({*map(type, entries)}) == 1
    if are_blocks and not isinstance(entries[0], (nn.ModuleList, nn.ModuleDict)):
        yield from entries
    else:
        for c in m.children():
            yield from find_blocks(c)


def shares_weights(m: nn.Module, model: nn.Module) -> bool:
    "Return True if a parameter of a module is also a parameter of another part of the model."
    own_params = {id(p) for p in m.parameters()}
    own_modules = set(map(id, m.modules()))
    return any(
        id(p) in own_params
        for other in model.modules()
        if id(other) not in own_modules
        for p in other.parameters(recurse=False)
    )
