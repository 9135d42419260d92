# SPDX-License-Identifier: Apache-2.0
"""`Order`, the generators that all ranks draw the data order from, and `Shard`, one rank's part of a loader."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch

from learnkit.core.batch import are_equal
from learnkit.core.random import RNGState, capture_rng, own_generators, restore_rng
from learnkit.data.loader_state import capture_loader_state, restore_loader_state
from learnkit.data.torch_loader import belongs_to_sampler


class Order:
    """Generators from which every rank draws the same data order.

    Within the context, the global generators of Python, torch and NumPy have the shared state. A global generator
    whose state equaled the shared state before the context gets the new shared state after it. The generators of the
    first rank therefore end like the generators of a single-process run.

    >>> order, state = Order(), capture_rng(devices=False)
    >>> order.state = state
    >>> with order: a = torch.rand(1)
    >>> order.state, other = state, torch.rand(1)
    >>> with order: b = torch.rand(1)
    >>> bool(a == b), bool(torch.rand(1) == other)
    (True, False)
    """

    def __init__(self) -> None:
        self._state: RNGState | None = None
        # of each batch of the pass: samples of this rank, samples of all ranks
        self.shares: Sequence[tuple[int, int] | None] = []
        self._whole: Order | None = None  # the order of which this is the order of one loader
        self._own: RNGState | None = None  # within the context, the rank's own state
        self._depth = 0

    @property
    def state(self) -> RNGState | None:
        "The shared state; None: the rank's own state at first use."
        return self._state if self._whole is None else self._whole.state

    @state.setter
    def state(self, state: RNGState | None) -> None:
        if self._whole is None:
            self._state = state
        else:
            self._whole.state = state

    def join(
        self,
        whole: Order,  # the order of several loaders
    ) -> None:
        "Draw from the generators of another order, in turn with the other loaders that draw from it."
        self._whole = whole

    def __enter__(self) -> Self:
        self._depth += 1
        if self._depth > 1:
            return self
        self._own = capture_rng(devices=False)
        if self.state is None:
            self.state = self._own
        restore_rng(self.state or {})
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._depth -= 1
        if self._own is None or self._depth:
            return
        before = self.state or {}
        own = self._own
        self.state = capture_rng(devices=False)
        self._own = None
        restored = {}
        for name, state in own.items():
            was_shared = name in before and are_equal(state, before[name])
            restored[name] = self.state[name] if was_shared else state
        restore_rng(restored)


class Shard:
    """One rank's part of a loader that every rank has.

    The order of the data is drawn from the same generators on every rank. All other random numbers differ by rank."""

    source: Any  # the loader, which is not changed
    spec: Any  # the `ShardSpec` that selects this rank's part
    order: Order
    # whether every rank iterates all of `source`, including the data set's generators
    draws_all = False

    def share(
        self,
        i: int,  # number of a batch of the current or last pass
    ) -> tuple[int, int] | None:
        "Return the samples of batch `i` on this rank (0 if only padding) and on all ranks; None if unknown."
        shares = self.order.shares
        return shares[i] if i < len(shares) else None

    def order_state(self) -> dict[str, Any]:
        "Return the generator states and epoch numbers that the next order depends on, as tensors and plain values."
        names = self._order_generators()
        state = capture_loader_state(self.source)
        own = {name: saved for name, saved in state['own'].items() if name in names}
        return {'rng': capture_rng(devices=False), 'epochs': state['epochs'], 'own': own}

    def take_order(
        self,
        state: Mapping[str, Any],  # `order_state` of the first rank
    ) -> None:
        "Draw the following passes from another rank's generator states."
        self.order.state = dict(state['rng'])
        restore_loader_state(self.source, state)

    @contextmanager
    def preserve(self) -> Iterator[None]:
        "Restore the shared order and the shares of the pass at the end of the block."
        state = self.order.state
        shares = self.order.shares
        try:
            yield
        finally:
            self.order.state = state
            self.order.shares = shares

    def _order_generators(self) -> list[str]:
        "Return the names of the loader's own generators that draw the order, without global generators."
        of_python = random.random.__self__  # type: ignore[attr-defined]
        of_numpy = np.random.random_sample.__self__  # type: ignore[attr-defined]
        global_ids = {id(g) for g in (torch.default_generator, of_python, of_numpy)}
        return [
            name
            for name, g in own_generators(self.source).items()
            if (self.draws_all or belongs_to_sampler(name)) and id(g) not in global_ids
        ]


def unshard(dl: Any) -> Any:
    "Return the loader that a shard is a part of, or any other loader itself."
    return dl.source if isinstance(dl, Shard) else dl
