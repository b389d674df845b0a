"""Collectives over real processes: what they return, that they change nothing, and that no rank waits for ever."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import purestep as ps
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.rank_collectives import collect, late, mesh_of
from kit.ranks import Failure, RankPool, rank_pool
from kit.steps import examples
from purestep.model.ranks import join_ranks
from purestep.ops.collectives import Group, all_gather, all_reduce, all_to_all, broadcast, reduce_scatter

TP2 = ps.Parallel(tp=2, timeout_s=20)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool(2) as running:
        yield running


DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.int32])


@st.composite
def operands(draw: st.DrawFn) -> tuple[list[torch.Tensor], list[list[int]]]:
    """Draw one tensor per rank and how many of its rows go where."""
    dtype, width = draw(DTYPES), draw(st.integers(1, 3))
    sent = [[draw(st.integers(0, 3)) for _ in range(2)] for _ in range(2)]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return [torch.randint(-9, 9, (sum(n), width), generator=generator).to(dtype) for n in sent], sent


@given(case=operands())
@examples(20)
def test_all_to_all_sends_runs_in_order_of_rank(
    pool: RankPool, case: tuple[list[torch.Tensor], list[list[int]]]
) -> None:
    """Every rank gets the runs that were meant for it, in order of sender, and keeps what it gave."""
    xs, sent = case
    options = [([sent[0][r], sent[1][r]], sent[r]) for r in range(2)]
    runs = [x.split(n) for x, n in zip(xs, sent, strict=True)]
    found = pool.run(collect, [TP2] * 2, ["world"] * 2, ["all_to_all"] * 2, xs, options)
    for rank, (given_x, out) in enumerate(found):
        assert torch.equal(given_x, xs[rank])
        assert torch.equal(out, torch.cat([runs[0][rank], runs[1][rank]]))


@given(dtype=DTYPES, n=st.integers(0, 3), seed=st.integers(0, 99))
@examples(10)
def test_collectives_return_what_they_say_and_change_nothing(
    pool: RankPool, dtype: torch.dtype, n: int, seed: int
) -> None:
    """PAR-07: sum, minimum, gather, scatter and broadcast agree with plain tensors, empty ones too; inputs stay."""
    generator = torch.Generator().manual_seed(seed)
    xs = [torch.randint(-9, 9, (2 * n, 3), generator=generator).to(dtype) for _ in range(2)]
    total = xs[0] + xs[1]
    expected: dict[tuple[str, tuple[Any, ...]], list[torch.Tensor]] = {
        ("all_reduce", ()): [total, total],
        ("all_reduce", ("min",)): [torch.minimum(*xs)] * 2,
        ("all_gather", ()): [torch.cat(xs)] * 2,
        ("reduce_scatter", ()): [total[:n], total[n:]],
        ("broadcast", (1,)): [xs[1]] * 2,
    }
    for (name, options), outs in expected.items():
        found = pool.run(collect, [TP2] * 2, ["world"] * 2, [name] * 2, xs, [options] * 2)
        for (given_x, out), x, right in zip(found, xs, outs, strict=True):
            assert torch.equal(given_x, x), name
            assert torch.equal(out, right), name


def test_strided_operands_are_read_as_they_are(pool: RankPool) -> None:
    """A transposed operand gives what a contiguous one gives."""
    x = torch.arange(6.0).view(2, 3).T
    found = pool.same(collect, TP2, "world", "all_gather", x)
    assert all(torch.equal(out, torch.cat((x, x))) for _, out in found)


def test_one_rank_calls_nothing() -> None:
    """In a group of one every collective is the identity, without a process group."""
    x, alone = torch.arange(4.0), Group()
    for out in (all_reduce(x, alone), all_gather(x, alone), reduce_scatter(x, alone), broadcast(x, alone)):
        assert out is x
    assert all_to_all(x, alone, [4], [4]) is x


@pytest.mark.parametrize("layout", [ps.Parallel(tp=2), ps.Parallel(dp=2)])
def test_ranks_stand_where_the_layout_says(pool: RankPool, layout: ps.Parallel) -> None:
    """Rank d * tp + t is the t-th of replica d, and torch's mesh says the same."""
    for rank, found in enumerate(pool.same(mesh_of, layout)):
        grid = torch.arange(2).view(layout.dp, layout.tp).tolist()
        assert found == (rank, rank // layout.tp, rank % layout.tp, layout.tp, ("dp", "tp"), grid)


def test_a_layout_needs_its_ranks(pool: RankPool) -> None:
    """A layout of other than the running processes is refused, on one process and on two."""
    with pytest.raises(ps.ConfigError, match="expected 2 processes, got no process group"):
        join_ranks(TP2)
    for failure in pool.attempt(mesh_of, [ps.Parallel(tp=4)] * 2):
        assert isinstance(failure, Failure)
        assert "expected 4 processes, got 2 processes" in failure.words


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pp": 2}, "pipeline"),
        ({"tp": 0}, "from 1 up"),
        ({"tp": 2, "ep": 2}, 'moe="tp"'),
        ({"tp": 4, "ep": 2, "moe": "ep"}, "all ranks or none"),
        ({"dp": 2, "dp_lm_head": True, "lm_head_all_to_all": True}, "never leave"),
        ({"dp": 2, "capacity": 4}, "without moe"),
        ({"dp": 2, "ep": 2, "moe": "ep", "placement": ((0, 0, 1),)}, "permutation"),
        ({"timeout_s": 0}, "more than 0"),
        ({"moe": "xp"}, '"ep"'),
    ],
)
def test_layouts_that_do_not_exist_are_refused(fields: dict[str, Any], words: str) -> None:
    """A layout that cannot be is refused by name, pipeline stages among them."""
    with pytest.raises(ps.ConfigError, match=words):
        ps.Parallel(**fields)


def test_a_rank_that_stays_away_is_missed() -> None:
    """Where a rank skips a collective the others get an error in time, and do not hang."""
    with rank_pool(2) as running:
        found = running.attempt(late, [ps.Parallel(tp=2, timeout_s=4)] * 2, [torch.ones(1)] * 2, [True, False])
        assert isinstance(found[0], Failure)
        assert found[0].kind == "RankError"
        assert torch.equal(found[1], torch.ones(1))


def test_a_lost_rank_is_missed() -> None:
    """Where a rank has died the others get an error, and do not hang."""
    with rank_pool(2) as running:
        running.same(collect, ps.Parallel(tp=2, timeout_s=5), "world", "all_reduce", torch.ones(1))
        running.kill(1)
        found = running._pipes[0]
        found.send((late, (ps.Parallel(tp=2, timeout_s=5), torch.ones(1), True)))
        assert found.poll(30)
        is_done, failure = found.recv()
        assert not is_done
        assert failure.kind == "RankError"
