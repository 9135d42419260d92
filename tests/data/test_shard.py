"""The order that all ranks share is drawn apart from the other random numbers of each rank."""

import random

import numpy as np
import torch

from learnkit.core.random import capture_rng
from learnkit.data.shard import Order


def draw() -> list[float]:
    return [torch.rand(()).item(), np.random.rand(), random.random()]


def seed(n: int) -> None:
    torch.manual_seed(n), np.random.seed(n), random.seed(n)


def test_ranks_draw_one_order_and_their_own_numbers() -> None:
    seed(0)
    alone = [draw(), draw()]
    seed(0)
    shared = capture_rng(devices=False)
    for rank in range(3):
        seed(rank)
        own = draw()
        seed(rank)
        order = Order()
        order.state = shared
        with order, order:  # the inner context draws on
            assert draw() == alone[0]
        # the first rank ends as a single process
        assert draw() == (own if rank else alone[1])
