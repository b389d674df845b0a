"""Dispatch to the ranks that hold the experts, and the way back: counts, order, sums, placement."""

from __future__ import annotations

from collections.abc import Iterator

import purestep as ps
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.rank_experts import Routed, exchange
from kit.ranks import RankPool, rank_pool
from kit.steps import examples
from purestep.ops.expert_ranks import Choice, destinations, send_order, send_places
from torch import Tensor

EXPERTS = 8
TP2 = ps.Parallel(tp=2, timeout_s=20)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool(2) as running:
        yield running


@st.composite
def routed(draw: st.DrawFn, k: int | None = None, most: int = 6, width: int = 5) -> Routed:
    """Draw rows whose sums are exact: small integers, weights that are powers of two."""
    n, k = draw(st.integers(0, most)), draw(st.integers(1, 4)) if k is None else k
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    ids = torch.rand((n, EXPERTS), generator=generator).argsort(-1)[:, :k]
    x = torch.randint(-8, 9, (n, width), generator=generator).float()
    return Routed(x, ids, 2.0 ** -torch.randint(0, 3, (n, k), generator=generator))


pairs = st.integers(1, 4).flatmap(lambda k: st.tuples(routed(k), routed(k)))
permutations = st.permutations(range(EXPERTS)).map(torch.tensor)


@given(rows=routed(), per_rank=st.sampled_from([1, 2, 4, 8]))
def test_a_row_goes_once_to_every_rank_with_one_of_its_experts(rows: Routed, per_rank: int) -> None:
    """M10: tokens per rank count the tokens with any chosen expert there, and each is sent once, in order."""
    n_ranks = EXPERTS // per_rank
    goes = destinations(rows.ids, per_rank, n_ranks)
    order, counts = send_order(goes)
    wanted = [[t for t, chosen in enumerate(rows.ids.tolist()) if any(e // per_rank == r for e in chosen)]
              for r in range(n_ranks)]  # fmt: skip
    assert counts.tolist() == [len(tokens) for tokens in wanted]
    assert [list(part) for part in order.split(counts.tolist())] == wanted


def test_the_counts_of_the_worked_example() -> None:
    """M10: t0 -> (3,0), t1 -> (1,3), t2 -> (2,3) over two ranks of two experts: 2 and 3 rows, t2 to rank 1 once."""
    order, counts = send_order(destinations(torch.tensor([[3, 0], [1, 3], [2, 3]]), 2, 2))
    assert counts.tolist() == [2, 3]
    assert order.tolist() == [0, 1, 0, 1, 2]


@given(rows=routed(), extra=st.integers(0, 3))
def test_fixed_places_are_distinct_and_stay_with_their_rank(rows: Routed, extra: int) -> None:
    """Places lie in the destination's run in order of token, each once; what goes nowhere lies behind the end."""
    capacity = max(1, len(rows.x)) + extra
    goes = destinations(rows.ids, 2, 4)
    places = send_places(goes, capacity)
    assert bool((places[~goes] == 4 * capacity).all())
    for rank in range(4):
        mine = places[:, rank][goes[:, rank]]
        assert mine.tolist() == list(range(rank * capacity, rank * capacity + len(mine)))


@given(rows=routed())
def test_choices_travel_bit_for_bit(rows: Routed) -> None:
    """What is packed into integers comes back the same, weights included."""
    choice = Choice(places=rows.ids, weights=rows.weights * 0.1, per_rank=2)
    back = choice.unpacked(choice.packed())
    assert torch.equal(back.places, choice.places)
    assert torch.equal(back.weights, choice.weights)


@given(pair=pairs, place=permutations, capacity=st.none() | st.integers(6, 8))
@examples(25)
def test_identity_experts_give_the_weighted_rows_back(
    pool: RankPool, pair: tuple[Routed, Routed], place: Tensor, capacity: int | None
) -> None:
    """M08, M09, M11, M13: experts that return their input give (sum of weights) * x in order, in empty places too."""
    found = pool.run(exchange, [TP2] * 2, list(pair), [place] * 2, [capacity] * 2, ["identity"] * 2)
    for rows, (out, given_x) in zip(pair, found, strict=True):
        assert torch.equal(out, rows.weights.sum(-1, keepdim=True) * rows.x)
        assert torch.equal(given_x, rows.x)


@given(pair=pairs, place=permutations, capacity=st.none() | st.integers(6, 8))
@examples(25)
def test_every_choice_meets_its_own_expert(
    pool: RankPool, pair: tuple[Routed, Routed], place: Tensor, capacity: int | None
) -> None:
    """M09: experts that multiply by their own number give the sum over choices of weight * number * x, exactly."""
    found = pool.run(exchange, [TP2] * 2, list(pair), [place] * 2, [capacity] * 2, ["numbered"] * 2)
    for rows, (out, _) in zip(pair, found, strict=True):
        assert torch.equal(out, (rows.weights * (rows.ids + 1)).sum(-1, keepdim=True) * rows.x)
