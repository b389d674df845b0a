"""Every layout computes what one process computes: prompts, chunks, decodes, idle replicas, uneven rows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import purestep as ps
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.rank_steps import Feed, Played, Step, play_alone, play_on_ranks, worst_difference
from kit.ranks import RankPool, rank_pool
from kit.steps import examples, ids_of

TOLERANCE = 5e-5
VOCAB = 33
LIMIT_S = 30.0

TWO = [
    ps.Parallel(tp=2),
    ps.Parallel(tp=2, ep=2, moe="ep"),
    ps.Parallel(dp=2),
    ps.Parallel(dp=2, dp_lm_head=True),
    ps.Parallel(dp=2, lm_head_all_to_all=True),
    ps.Parallel(dp=2, ep=2, moe="ep"),
    ps.Parallel(dp=2, ep=2, moe="ep", capacity=3, dp_lm_head=True),
    ps.Parallel(dp=2, ep=2, moe="ep", placement=((7, 0, 6, 1, 5, 2, 4, 3),) * 3),
]
FOUR = [
    ps.Parallel(tp=4),
    ps.Parallel(tp=2, dp=2),
    ps.Parallel(tp=2, dp=2, dp_lm_head=True),
    ps.Parallel(dp=4, lm_head_all_to_all=True),
    ps.Parallel(tp=2, dp=2, ep=4, moe="ep", capacity=2),
    ps.Parallel(dp=4, ep=4, moe="ep"),
]


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    with rank_pool(2) as running:
        yield running


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    with rank_pool(4) as running:
        yield running


def check_layout(pool: RankPool, parallel: ps.Parallel, history: list[Step], **changes: object) -> list[Played]:
    """Play a history on ranks and compare every rank with its replica alone."""
    found: list[Played] = pool.same(
        play_on_ranks, parallel, history, ps.SamplingParams(temperature=0, ignore_eos=True), (0, 4, 128), 0, changes
    )
    for replica in range(parallel.dp):
        alone = play_alone(history, replica, changes=changes)
        for played in found[replica * parallel.tp : (replica + 1) * parallel.tp]:
            assert worst_difference(played, alone) < TOLERANCE
        for a, b in pairwise(found[replica * parallel.tp : (replica + 1) * parallel.tp]):
            assert all(torch.equal(x, y) for x, y in zip(a.logits, b.logits, strict=True))
    return found


def history_for(dp: int) -> list[Step]:
    """Prompts of several lengths, chunks that end inside groups, decodes, idle turns and swapped roles."""
    first: list[Step] = [
        [Feed({0: ids_of(131 if r == 0 else 3 + 4 * r, VOCAB, seed=r), 1: ids_of(9 + r, VOCAB, seed=7 + r)})
         for r in range(dp)],
        [Feed({2: ids_of(6, VOCAB, seed=3)}, sample=False) if r == dp - 1 else None for r in range(dp)],
        [Feed({2: ids_of(5, VOCAB, seed=4)}, logits="all") if r == dp - 1 else () for r in range(dp)],
    ]  # fmt: skip
    later: list[Step] = [[None if (r + k) % 2 else () for r in range(dp)] for k in range(3)]
    return [*first, *later, [None] * dp, [()] * dp, [None] * dp]


@pytest.mark.parametrize("parallel", TWO, ids=str)
def test_two_ranks_compute_what_one_does(two: RankPool, parallel: ps.Parallel) -> None:
    """Logits, tokens and rows of every layout of 2 ranks are those of one process; a replica's ranks agree bitwise."""
    check_layout(two, parallel, history_for(parallel.dp), hash_layers=1)


@pytest.mark.parametrize("parallel", FOUR, ids=str)
def test_four_ranks_compute_what_one_does(four: RankPool, parallel: ps.Parallel) -> None:
    """The same for layouts of 4 ranks: more ranks than output groups, and mixes of TP, DP and EP."""
    check_layout(four, parallel, history_for(parallel.dp), hash_layers=2)


@st.composite
def histories(draw: st.DrawFn, dp: int) -> list[Step]:
    """Draw short histories."""
    tokens = st.integers(1, 20).flatmap(lambda n: st.integers(0, 99).map(lambda seed: ids_of(n, VOCAB, seed=seed)))
    feeds = st.builds(
        Feed,
        st.dictionaries(st.integers(0, 2), tokens, min_size=1, max_size=2),
        st.booleans(),
        st.sampled_from(["last", "all"]),
    )
    entry = st.one_of(st.none(), st.just(()), feeds)
    steps = draw(st.lists(st.tuples(*[entry] * dp), min_size=1, max_size=5))
    return [[Feed({0: ids_of(4, VOCAB, seed=r)}) for r in range(dp)], *(list(step) for step in steps)]


@given(data=st.data(), parallel=st.sampled_from(TWO))
@examples(12)
def test_any_history_on_two_ranks(two: RankPool, data: st.DataObject, parallel: ps.Parallel) -> None:
    """Whatever the replicas do side by side, each gets what it gets alone."""
    check_layout(two, parallel, data.draw(histories(parallel.dp)))


@pytest.mark.parametrize("parallel", [ps.Parallel(dp=4), ps.Parallel(dp=4, ep=4, moe="ep")], ids=str)
def test_uneven_rows_come_back_in_order(four: RankPool, parallel: ps.Parallel) -> None:
    """PAR-09: replicas with 3, 0, 5 and 1 rows, then with others, get their own rows back in order."""

    def feeds(counts: list[int]) -> list[Step]:
        return [[Feed({0: ids_of(n, VOCAB, seed=n)}, logits="all") if n else () for n in counts]]

    check_layout(four, parallel, [*feeds([3, 0, 5, 1]), *feeds([0, 7, 0, 2]), [None] * 4, *feeds([1, 1, 1, 1])])


@pytest.mark.parametrize("counts", [(3, 0), (5, 1), (1, 4)])
def test_uneven_rows_over_attention_groups(four: RankPool, counts: tuple[int, int]) -> None:
    """PAR-09: the same where two ranks share each replica and rows do not divide by two."""
    step: Step = [Feed({0: ids_of(n, VOCAB, seed=n)}, logits="all") if n else () for n in counts]
    for parallel in (ps.Parallel(tp=2, dp=2), ps.Parallel(tp=2, dp=2, ep=4, moe="ep")):
        check_layout(four, parallel, [step, [None, None]])


def test_head_layouts_agree(two: RankPool) -> None:
    """H03: gathering and exchanging logits give the same bits; a head per replica agrees within rounding."""
    history: list[Step] = [
        [Feed({0: ids_of(9, VOCAB, seed=r)}) for r in range(2)],
        [None, None],
        [None, ()],
        [None] * 2,
    ]
    layouts = ({}, {"lm_head_all_to_all": True}, {"dp_lm_head": True})
    gathered, exchanged, own = (two.same(play_on_ranks, ps.Parallel(dp=2, **layout), history) for layout in layouts)
    for a, c, b in zip(gathered, exchanged, own, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.logits, c.logits, strict=True))
        assert worst_difference(b, a) < TOLERANCE


@pytest.mark.parametrize("vocab", [129, 64, 2])
def test_vocabularies_that_nothing_divides(two: RankPool, vocab: int) -> None:
    """PAR-11: logits are as wide as the vocabulary and equal to one process's, in every head layout."""
    for parallel in (TWO[0], *TWO[2:5]):
        history: list[Step] = [[Feed({0: [1, 0, 1]})] * parallel.dp, [None] * parallel.dp]
        for played in check_layout(two, parallel, history, vocab=vocab):
            assert {logits.shape[1] for logits in played.logits} == {vocab}


def test_hidden_states_are_not_multiples(two: RankPool, four: RankPool) -> None:
    """PAR-05: residual streams and sublayer outputs of every layer are those of one process."""
    stages = ("streams", "attn.output", "ffn.output", "final.streams")
    for pool, parallel in ((two, TWO[0]), (two, TWO[1]), (four, FOUR[1]), (four, FOUR[4])):
        history: list[Step] = [[Feed({0: ids_of(11, VOCAB, seed=r)}) for r in range(parallel.dp)], [None] * parallel.dp]
        options = {"capture": stages}
        found = pool.same(play_on_ranks, parallel, history, ps.SamplingParams(temperature=0), (0, 4), 0, {}, options)
        for rank, played in enumerate(found):
            alone = play_alone(history, rank // parallel.tp, ps.SamplingParams(temperature=0), (0, 4), options=options)
            for mine, right in zip(played.captured, alone.captured, strict=True):
                assert mine.keys() == right.keys()
                assert all(torch.allclose(mine[name], right[name], atol=TOLERANCE) for name in right)


def test_idle_for_long_then_the_other(two: RankPool) -> None:
    """PAR-03: one replica idle for 50 steps, then the other: every step ends, and those that run see no difference."""
    parallel = ps.Parallel(dp=2, timeout_s=10)
    start: list[Step] = [[Feed({0: ids_of(4, VOCAB, seed=r)}) for r in range(2)]]
    history = [*start, *([[None, ()]] * 50), *([[(), None]] * 50)]
    check_layout(two, parallel, history)


@pytest.mark.parametrize("parallel", [TWO[0], TWO[4]], ids=str)
def test_sampled_tokens_agree_for_200_steps(two: RankPool, parallel: ps.Parallel) -> None:
    """PAR-01: 200 sampled steps at temperature 1 give the same ids on all ranks, and those of one process."""
    params = ps.SamplingParams(temperature=1.0, seed=11, ignore_eos=True, repetition_penalty=1.1)
    history: list[Step] = [[Feed({0: [3, 4, 5]})] * parallel.dp, *([[None] * parallel.dp] * 200)]
    found = two.same(play_on_ranks, parallel, history, params, (0, 4), limit_s=120.0)
    alone = play_alone(history, 0, params, (0, 4))
    assert len(alone.tokens) == 201
    assert found[0].tokens == found[1].tokens == alone.tokens
