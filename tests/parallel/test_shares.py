"""What all ranks decide from the rows that every replica announces."""

from __future__ import annotations

import itertools

import purestep as ps
import pytest
from hypothesis import given
from hypothesis import strategies as st
from purestep.state.shares import RowShares, can_exchange_logits, local_rows, padding_mode

counts = st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple)


@given(n=st.integers(0, 40), tp=st.integers(1, 5))
def test_a_replicas_rows_are_dealt_once(n: int, tp: int) -> None:
    """B09: the shares of a replica's ranks are its rows, each once, in order, in chunks of one length."""
    parts = [local_rows(n, rank, tp) for rank in range(tp)]
    assert [row for start, stop, _ in parts for row in range(start, stop)] == list(range(n))
    assert {chunk for *_, chunk in parts} == {-(-n // tp)}
    chunk = parts[0][2]
    assert all(stop - start == min(max(n - rank * chunk, 0), chunk) for rank, (start, stop, _) in enumerate(parts))


def test_five_rows_of_two_ranks() -> None:
    """B09: five real rows of eight padded, in two shards, are 4 and 1."""
    assert [min(max(5 - rank * 4, 0), 4) for rank in range(2)] == [4, 1]
    assert RowShares(tokens=(5,), logits=(5,), is_extend=False, tp=2).rounded == (6,)


@given(tokens=counts, tp=st.integers(1, 3), is_extend=st.booleans())
def test_padding_follows_from_the_counts(tokens: tuple[int, ...], tp: int, is_extend: bool) -> None:
    """B10: the mode is that of the sheet: sums for prompts, else the longest where that at most doubles the rows."""
    shares = RowShares(tokens=tokens, logits=tokens, is_extend=is_extend, tp=tp)
    assert all(r % tp == 0 and n <= r < n + tp for n, r in zip(tokens, shares.rounded, strict=True))
    if is_extend and len(tokens) > 1:
        expected = "sum_len"
    else:
        expected = "max_len" if 2 * sum(shares.rounded) >= max(shares.rounded) * len(tokens) else "sum_len"
    assert shares.mode == padding_mode(shares.rounded, is_extend=is_extend) == expected
    if expected == "max_len":
        assert set(shares.padded) == {max(shares.rounded)}
    else:
        assert shares.padded == shares.rounded


EXCHANGES = ps.Parallel(dp=2, lm_head_all_to_all=True)


@pytest.mark.parametrize(
    ("parallel", "rows", "n_shards", "n_rows", "expected"),
    [
        (EXCHANGES, (2, 2), 2, 4, True),
        (EXCHANGES, (2, 1), 2, 3, False),
        (EXCHANGES, (0, 0), 2, 0, False),
        (EXCHANGES, (2, 2), 1, 4, False),
        (EXCHANGES, (2, 2), 2, 2, False),
        (ps.Parallel(dp=2), (2, 2), 2, 4, False),
        (ps.Parallel(dp=2, dp_lm_head=True), (2, 2), 2, 4, False),
        (ps.Parallel(tp=2), (2,), 2, 4, False),
    ],
)
def test_logits_are_exchanged_under_exactly_these_conditions(
    parallel: ps.Parallel, rows: tuple[int, ...], n_shards: int, n_rows: int, expected: bool
) -> None:
    """H06: unequal counts, a replicated head, no rows, a head of the replica, or a switch that is off: no exchange."""
    assert can_exchange_logits(parallel, rows, n_shards=n_shards, n_rows=n_rows) is expected


@given(rows=counts)
def test_the_exchange_is_decided_alike_everywhere(rows: tuple[int, ...]) -> None:
    """H05: the decision has no input that differs between ranks; it is true for equal counts above zero alone."""
    parallel = ps.Parallel(dp=len(rows), lm_head_all_to_all=len(rows) > 1)
    found = can_exchange_logits(parallel, rows, n_shards=len(rows), n_rows=sum(rows))
    assert found == (len(rows) > 1 and rows[0] > 0 and all(a == b for a, b in itertools.pairwise(rows)))
