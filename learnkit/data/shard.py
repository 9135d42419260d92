"""The order of the data, which several processes draw alike, and what every share of a loader has."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch

from learnkit.core.random import (
    RNGState,
    capture_host_rng,
    capture_own,
    own_generators,
    restore_own,
    restore_rng,
    same_states,
)
from learnkit.data.torch_loader import epochs_of, is_samplers, set_epochs

__all__ = ['Order', 'Shard']


class Order:
    """The generators that several processes draw the order of their data from, each for itself and all alike.

    As a context it stands for the process's own global generators of Python, torch and NumPy. One of these that nobody
    else has drawn from moves along: the first process's are then as those of a process that draws alone.

    >>> order, state = Order(), capture_host_rng()
    >>> order.state = state
    >>> with order: a = torch.rand(1)
    >>> order.state, other = state, torch.rand(1)
    >>> with order: b = torch.rand(1)
    >>> bool(a == b), bool(torch.rand(1) == other)
    (True, False)
    """

    def __init__(self) -> None:
        self.state: RNGState | None = None  # None: as the process's own are when it is first needed
        self.shares: list[
            tuple[int, int]
        ] = []  # of each batch of the pass: this process's samples, those of all
        self._own: RNGState | None = None  # in the context, the process's own
        self._depth = 0

    def __enter__(self) -> Self:
        self._depth += 1
        if self._depth > 1:
            return self
        self._own = capture_host_rng()
        if self.state is None:
            self.state = self._own
        restore_rng(self.state)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._depth -= 1
        if self._own is None or self._depth:
            return
        before, own, self.state, self._own = self.state or {}, self._own, capture_host_rng(), None
        restore_rng(
            {
                k: self.state[k] if k in before and same_states(v, before[k]) else v
                for k, v in own.items()
            }
        )


class Shard:
    """One process's share of a loader that all of them have.

    What is drawn to put the data into an order is drawn alike in every process; anything else random is its own."""

    whole: Any  # the loader, which is not changed
    cut: Any  # which part of it this is: a `ShardSpec`
    order: Order
    drawing: type[Any] | None = (
        None  # the kind of `LoaderPosition` that goes over it; None: the usual one
    )
    draws_all = False  # every process draws all of `whole`, its data set's generators with it

    def share(
        self,
        i: int,  # a batch of the current pass, or of the last one
    ) -> tuple[int, int] | None:
        "Return how many samples of batch `i` are this process's, 0 if it only fills up, and all have; None: not known."
        shares = self.order.shares
        return shares[i] if i < len(shares) else None

    def order_state(self) -> dict[str, Any]:
        "Return the state of all that the order of the next pass is drawn from, as tensors and plain values."
        return {
            'rng': capture_host_rng(),
            'epochs': epochs_of(self.whole),
            'own': {
                name: state
                for name, state in capture_own(self.whole).items()
                if name in self._drawn_from()
            },
        }

    def take_order(
        self,
        state: Mapping[str, Any],  # the first process's `order_state`
    ) -> None:
        "Draw the passes that follow from another process's generators."
        self.order.state = dict(state['rng'])
        restore_own(self.whole, state['own'])
        set_epochs(self.whole, state['epochs'])

    @contextmanager
    def kept(self) -> Iterator[None]:
        "Leave the order, and what is known of the pass, after the block as they were before it."
        kept = self.order.state, self.order.shares
        try:
            yield
        finally:
            self.order.state, self.order.shares = kept

    def _drawn_from(self) -> list[str]:
        "Name the loader's own generators that an order is drawn from; one that is a global one is not among them."
        return [
            name
            for name, g in own_generators(self.whole).items()
            if (self.draws_all or is_samplers(name))
            and not any(g is other for other in _global_generators())
        ]


def _global_generators() -> list[Any]:
    return [torch.default_generator, random.random.__self__, np.random.random_sample.__self__]  # type: ignore[attr-defined]
