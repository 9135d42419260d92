"""Parts of a round: of almost equal size, and together the whole round."""

import pytest
from hypothesis import given, strategies as st

from learnkit.data.shard import Order
from learnkit.distributed.shard_spec import ShardSpec


@given(size=st.integers(1, 9), n=st.integers(1, 60), full=st.integers(1, 12), drops=st.booleans())
def test_parts_are_a_partition(size: int, n: int, full: int, drops: bool) -> None:
    ranks = [list(ShardSpec(r, size, drops_last=drops).pieces(n, full)) for r in range(size)]
    seen = []
    for parts in zip(*ranks, strict=True):
        counts = [own for _, _, (own, _) in parts]
        assert max(counts) - min(counts) <= 1 and {k for *_, (_, k) in parts} == {sum(counts)}
        assert [len(rows) for _, rows, _ in parts] == [max(own, 1) for own in counts]
        seen += [start + i for start, rows, (own, _) in parts if own for i in rows]
    assert seen == list(range(n - n % full if drops else n))


@pytest.mark.parametrize('n_at_once', [1, 3])
@pytest.mark.parametrize('drops_last', [False, True])
def test_rounds_are_the_batches_of_all_ranks(drops_last: bool, n_at_once: int) -> None:
    spec = ShardSpec(rank=0, size=2, drops_last=drops_last)
    for n in range(14):
        rounds = list(spec.draw_rounds(iter(range(n)), Order(), n_at_once))
        assert len(rounds) == spec.count_batches(n, spec.per_round)
        assert [i for batches in rounds for i in batches] == list(range(n - n % 2 * drops_last))
        assert all(len(batches) == 2 for batches in rounds[: n // 2])
