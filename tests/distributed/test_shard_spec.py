"""Parts of a round: of almost equal size, and together the whole round."""

from hypothesis import given, strategies as st

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
