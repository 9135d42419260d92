"""The frame of the bench: what it calls equal, and how it writes the page."""

from __future__ import annotations

import torch

from tests.peers.__main__ import PAGE, begin
from tests.peers.environments import PEERS
from tests.peers.rows import EQUAL, TOO_FAR, compare_numbers


def test_numbers_are_equal_bitwise_or_within_a_limit() -> None:
    a = {'w': torch.tensor([1.0, float('nan')]), 'n': torch.tensor(3)}
    assert compare_numbers(a, {name: t.clone() for name, t in a.items()}) == EQUAL
    assert compare_numbers(a, {**a, 'w': a['w'] + 3e-7}) == 'within 1e-05'
    assert compare_numbers(a, {**a, 'w': a['w'] + 2e-5}) == 'within 0.001'
    assert compare_numbers(a, {**a, 'w': a['w'] + 0.01}) == TOO_FAR
    assert compare_numbers(a, {**a, 'w': torch.ones(2)}) == TOO_FAR  # NaN and a number
    assert compare_numbers(a, {**a, 'w': torch.ones(3)}) == TOO_FAR
    assert compare_numbers(a, {'w': a['w']}) == TOO_FAR


def test_the_page_has_a_part_for_each_package() -> None:
    page = PAGE.read_text('utf-8')
    assert all(page.count(begin(peer)) == 1 for peer in PEERS)
