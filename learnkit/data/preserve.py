# SPDX-License-Identifier: Apache-2.0
"""Context managers that restore loaders, their samplers and random generators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from operator import is_
from typing import Any

from learnkit.core.random import capture_rng, preserved_generators, restore_rng, state_setter
from learnkit.data.torch_loader import forget_workers


def refill_dict(o: Any, items: dict[Any, Any]) -> None:
    "Give the dict `o` the entries `items` in the same order, unless the entries are identical."
    if (
        len(o) == len(items)
        and all(map(is_, o, items))
        and all(map(is_, o.values(), items.values()))
    ):
        return
    # it is never empty, also if this is interrupted
    o.update(items)
    for key in [key for key in o if key not in items]:
        del o[key]
    if not all(map(is_, o, items)):
        for key, value in items.items():
            del o[key]
            o[key] = value


def preserve_loaders(loaders: list[Any]) -> ExitStack:
    "Return a context that restores these loaders, their samplers and all random generators at its end."
    stack = ExitStack()
    stack.callback(restore_rng, capture_rng())
    for dl in loaders:
        batch_sampler = getattr(dl, 'batch_sampler', None)
        for owner in (
            dl,
            getattr(dl, 'sampler', None),
            batch_sampler,
            getattr(batch_sampler, 'sampler', None),
        ):
            attributes = getattr(owner, '__dict__', {})
            # also drops worker processes that the block has started
            stack.callback(refill_dict, attributes, dict(attributes))
            for setter in filter(None, map(state_setter, attributes.values())):
                stack.callback(setter)
    return stack


@contextmanager
def undisturbed_loader(dl: Any) -> Iterator[None]:
    "Restore a loader, its persistent workers and all random generators after a block that reads from it."
    with preserve_loaders([dl]), preserved_generators(dl):
        forget_workers(dl)  # running workers belong to the training in progress
        yield
