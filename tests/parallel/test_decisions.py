"""A rank that decides otherwise is found before the step, on all ranks, and nothing hangs or changes."""

from __future__ import annotations

from collections.abc import Iterator

import purestep as ps
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.rank_states import agree, constrained, decide, decode_many
from kit.rank_steps import Feed
from kit.ranks import RankPool, rank_pool
from kit.steps import examples, ids_of

TP2 = ps.Parallel(tp=2, timeout_s=20)
DP2 = ps.Parallel(dp=2, timeout_s=20)
PROMPT = Feed({0: ids_of(6, 33)})


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    with rank_pool(2) as running:
        yield running


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    with rank_pool(4) as running:
        yield running


WITHIN_A_REPLICA = ["other token", "other mask", "idle", "many tokens", "no logits"]
EVERYWHERE = ["other kernels"]
REFUSED = {"unknown request": "RequestError", "other numerics": "ConfigError"}


@pytest.mark.parametrize("wrong", [*WITHIN_A_REPLICA, *EVERYWHERE])
def test_a_rank_that_decides_otherwise_is_found(two: RankPool, wrong: str) -> None:
    """B10: other tokens, masks, rows, logits or kernels on one rank are an error on all ranks, at once."""
    found = two.run(decide, [TP2] * 2, [[PROMPT]] * 2, ["", wrong])
    for kind, words, seconds, same in found:
        assert kind == "RankError"
        assert "nothing was changed" in words
        assert seconds < 5
        assert same


@pytest.mark.parametrize("parallel", [TP2, DP2], ids=["tp", "dp"])
@pytest.mark.parametrize("wrong", REFUSED)
def test_a_rank_that_cannot_begin_tells_the_others(two: RankPool, parallel: ps.Parallel, wrong: str) -> None:
    """A rank whose own step is refused raises its own error; the others hear of it, and do not wait."""
    step = [PROMPT] * parallel.dp
    (kind, words, seconds, same), own = two.run(decide, [parallel] * 2, [step] * 2, ["", wrong])
    assert own[0] == REFUSED[wrong]
    assert kind == "RankError"
    assert "ranks [1] could not" in words
    assert seconds < 5
    assert same
    assert own[3]


@pytest.mark.parametrize("wrong", ["other token", "idle", "many tokens", "no logits"])
def test_replicas_decide_for_themselves(two: RankPool, wrong: str) -> None:
    """What is wrong within a replica is fine between replicas: they run other requests and other steps."""
    found = two.run(decide, [DP2] * 2, [[PROMPT, Feed({0: [5]})]] * 2, ["", wrong])
    assert [kind for kind, *_ in found] == ["fine", "fine"]


def test_one_rank_of_one_replica_is_enough(four: RankPool) -> None:
    """The last of four ranks decides otherwise: all four hear of it."""
    parallel = ps.Parallel(tp=2, dp=2, timeout_s=20)
    found = four.run(decide, [parallel] * 4, [[PROMPT, PROMPT]] * 4, ["", "", "", "other token"])
    assert [kind for kind, *_ in found] == ["RankError"] * 4
    assert all("replica 1" in words for _, words, *_ in found)


def test_more_rows_than_the_capacity_are_refused_by_all(two: RankPool) -> None:
    """A decode with more rows than the layout has room for is a CapacityError on every rank, idle ones included."""
    parallel = ps.Parallel(dp=2, ep=2, moe="ep", capacity=1, timeout_s=20)
    fine = two.run(decide, [parallel] * 2, [[PROMPT, ()]] * 2, ["", "idle"])
    assert [kind for kind, *_ in fine] == ["fine", "fine"]
    assert two.run(decode_many, [parallel] * 2, [2, 0]) == ["CapacityError", "CapacityError"]
    assert two.run(decode_many, [parallel] * 2, [1, 0]) == ["fine", "fine"]


@given(ids=st.lists(st.integers(0, 50), min_size=4, max_size=4), is_constrained=st.booleans(), sync=st.booleans())
@examples(15)
def test_the_smallest_token_wins_within_a_replica(
    four: RankPool, ids: list[int], is_constrained: bool, sync: bool
) -> None:
    """S07, S08: agreement is the minimum over a replica's ranks, never over replicas; without cause it is nothing."""
    parallel = ps.Parallel(tp=2, dp=2, sync_token_ids=sync, timeout_s=20)
    found = four.run(agree, [parallel] * 4, [torch.tensor([i]) for i in ids], [is_constrained] * 4)
    low = [min(ids[:2])] * 2 + [min(ids[2:])] * 2
    assert [int(one) for one in found] == (low if is_constrained or sync else ids)


def test_replicas_of_one_rank_exchange_no_tokens(two: RankPool) -> None:
    """S08: where a replica is one rank, a constrained batch exchanges nothing."""
    found = two.run(agree, [DP2] * 2, [torch.tensor([4]), torch.tensor([2])], [True] * 2)
    assert [int(one) for one in found] == [4, 2]


def test_constrained_batches_agree(two: RankPool) -> None:
    """A masked request samples what its mask allows, on every rank."""
    assert two.same(constrained, TP2, ids_of(5, 33), 29) == [(29, 29)] * 2
