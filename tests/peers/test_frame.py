"""The frame of the bench: what it calls equal, and how it writes the page."""

from __future__ import annotations

import torch

from tests.peers.__main__ import PAGE, begin, replace_part, table
from tests.peers.environments import PEERS, Peer
from tests.peers.rows import EQUAL, TOO_FAR, Row, compare_numbers


def test_numbers_are_equal_bitwise_or_within_a_limit() -> None:
    a = {'w': torch.tensor([1.0, float('nan')]), 'n': torch.tensor(3)}
    assert compare_numbers(a, {name: t.clone() for name, t in a.items()}) == EQUAL
    assert compare_numbers(a, {**a, 'w': a['w'] + 3e-7}) == 'within 1e-05'
    assert compare_numbers(a, {**a, 'w': a['w'] + 2e-5}) == 'within 0.001'
    assert compare_numbers(a, {**a, 'w': a['w'] + 0.01}) == TOO_FAR
    assert compare_numbers(a, {**a, 'w': torch.ones(2)}) == TOO_FAR  # NaN and a number
    assert compare_numbers(a, {**a, 'w': torch.ones(3)}) == TOO_FAR
    assert compare_numbers(a, {'w': a['w']}) == TOO_FAR


def test_a_table_counts_what_was_run_and_stands_between_its_marks() -> None:
    rows = [
        Row('Good', True, True, EQUAL),
        Row('Bad', False, False, TOO_FAR, 'a | b'),
        Row('Absent', None, None, '', 'needs a GPU'),
    ]
    text = table(rows)
    assert text.startswith('Callbacks: of 2, 1 run unchanged, 1 have the same keys, 1 equal')
    assert r'| `Bad` | **no** | **no** | differ | a \| b |' in text
    assert '| `Absent` | not run |  |  | needs a GPU |' in text
    peer = Peer('other')
    page = f'before\n{begin(peer)}\n\nold\n\n<!-- end -->\nafter\n'
    new = replace_part(page, peer, text)
    assert new == f'before\n{begin(peer)}\n\n{text}\n\n<!-- end -->\nafter\n'
    assert replace_part(new, peer, text) == new


def test_the_page_has_a_part_for_each_package() -> None:
    page = PAGE.read_text('utf-8')
    assert all(page.count(begin(peer)) == 1 for peer in PEERS)
