"""Caches dealt to the ranks of a replica: who holds what, what is merged, and that steps stay what they are."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import purestep as ps
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.models import tiny_model
from kit.rank_states import cache_rows, fork_and_go, refuse_to_move
from kit.rank_steps import Feed, Step, play_alone, play_on_ranks, worst_difference
from kit.ranks import RankPool, rank_pool
from kit.steps import ENDLESS, examples, ids_of
from purestep.model.loading import build_model
from purestep.model.ranks import Ranks
from purestep.ops.attention import attend, attend_part, merge_parts
from purestep.serving.plan_step import plan_step
from purestep.serving.records import row_independent
from purestep.state.capacity import PoolSizes
from purestep.state.ids import BlockInterleave, VirtualLoc
from purestep.state.invariants_layouts import SHARDED
from purestep.state.kv import KVLayout
from purestep.state.released import RELEASED

DCP2 = ps.Parallel(tp=2, dcp=2, timeout_s=20)
LAYOUTS = [DCP2, ps.Parallel(tp=2, dcp=2, ep=2, moe="ep", timeout_s=20)]
FOUR = [ps.Parallel(tp=4, dcp=4, timeout_s=20), ps.Parallel(tp=2, dp=2, dcp=2, timeout_s=20)]


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    with rank_pool(2) as running:
        yield running


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    with rank_pool(4) as running:
        yield running


def layout_of(ways: int, share: int, page_size: int = 32) -> KVLayout:
    sizes = PoolSizes.of(ps.Capacity(requests=2, tokens=512, context=256), page_size)
    return KVLayout.of(tiny_model().config, sizes, ways=ways, share=share)


@given(
    ways=st.sampled_from([1, 2, 4, 8]), name=st.sampled_from(["swa", "c4", "index", "c128"]), seed=st.integers(0, 99)
)
def test_every_slot_lies_on_one_rank_at_a_place_of_its_own(ways: int, name: str, seed: int) -> None:
    """T07, T08: slots are dealt as the sheet's block interleave deals them, each to one rank and one row of it."""
    whole = layout_of(1, 0)
    slots = np.random.default_rng(seed).permutation(whole.n_slots(name))[:40]
    rows = set()
    for share in range(ways):
        layout = layout_of(ways, share)
        assert layout.n_slots(name) * ways == whole.n_slots(name)
        sheet = BlockInterleave(ways=ways, rank=share, block=layout.block(name))
        loc = VirtualLoc(ids=torch.from_numpy(slots))
        here = layout.is_here(name, slots)
        assert here.tolist() == sheet.is_mine(loc).tolist()
        assert layout.local(name, slots).tolist() == sheet.kernel(loc).ids.tolist()
        rows |= {(share, int(row)) for row in layout.local(name, slots)[here]}
        assert len(layout.rows(name, slots)) == here.sum() * layout.n_layers(name)
    assert len(rows) == len(slots)


@given(ways=st.sampled_from([2, 4]), page_size=st.sampled_from([16, 32]))
def test_the_dealing_satisfies_the_invariants_of_layouts(ways: int, page_size: int) -> None:
    """T07, T08, T09: all invariants of sharded layouts hold for the dealing of full slots."""
    block = layout_of(ways, 0, page_size).block("swa")
    layouts = tuple(BlockInterleave(ways=ways, rank=rank, block=block) for rank in range(ways))
    ids = torch.arange(page_size, 5 * page_size)
    for rule in SHARDED.values():
        assert list(rule(layouts, VirtualLoc(ids=ids))) == []


@given(
    n_keys=st.integers(0, 9),
    parts=st.integers(1, 4),
    seed=st.integers(0, 999),
    sharp=st.sampled_from([0.1, 1.0, 5.0]),
)
def test_merged_parts_are_the_whole(n_keys: int, parts: int, seed: int, sharp: float) -> None:
    """However the keys are split, parts without keys included, merging gives attention over all of them, sink once."""
    generator = torch.Generator().manual_seed(seed)
    q = sharp * torch.randn((2, 3, 4, 8), generator=generator)
    keys = torch.randn((2, n_keys, 8), generator=generator)
    mask = torch.rand((2, 3, n_keys), generator=generator) < 0.7
    sink = 3 * torch.randn(4, generator=generator)
    owner = torch.randint(0, parts, (n_keys,), generator=generator)
    pieces = [
        attend_part(q, keys[:, owner == k], mask[:, :, owner == k], scale=0.5, rounding=False) for k in range(parts)
    ]
    merged = merge_parts(torch.stack([out for out, _ in pieces]), torch.stack([lse for _, lse in pieces]), sink)
    if n_keys:
        assert torch.allclose(merged, attend(q, keys, mask, sink, scale=0.5, rounding=False), atol=1e-5)
    else:
        assert not merged.any()
    assert merged.isfinite().all()


def history_for(dp: int) -> list[Step]:
    """Prompts over several pages, a chunk, decodes past group ends, an idle turn."""
    prompts: list[Step] = [
        [Feed({0: ids_of(150, 33, seed=r), 1: ids_of(9 + r, 33, seed=7 + r)}) for r in range(dp)],
        [Feed({2: ids_of(37, 33, seed=4)}, logits="all") if r == dp - 1 else None for r in range(dp)],
    ]
    return [*prompts, *([[None] * dp] * 9), [None if r else () for r in range(dp)], [None] * dp]


@pytest.mark.parametrize("parallel", LAYOUTS, ids=["tp", "ep"])
def test_two_ranks_over_dealt_caches(two: RankPool, parallel: ps.Parallel) -> None:
    """Prompts, chunks and decodes over caches dealt to 2 ranks give one process's logits, chosen entries too."""
    check(two, parallel, history_for(1))


@pytest.mark.parametrize("parallel", FOUR, ids=["tp4", "tp2dp2"])
def test_four_ranks_over_dealt_caches(four: RankPool, parallel: ps.Parallel) -> None:
    """The same for 4 ranks, in one replica and in two."""
    check(four, parallel, history_for(parallel.dp))


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3), steps=st.integers(0, 6))
@examples(8)
def test_any_lengths_over_dealt_caches(two: RankPool, lengths: list[int], steps: int) -> None:
    """Whatever the lengths of the rows of a batch, each gets what it gets in one process."""
    feed = Feed({i: ids_of(n, 33, seed=n) for i, n in enumerate(lengths)})
    check(two, DCP2, [[feed], *([[None]] * steps)])


def check(pool: RankPool, parallel: ps.Parallel, history: list[Step]) -> None:
    options = {"page_size": 16}
    args = (ENDLESS, (0, 4, 128), 0, {"hash_layers": 1}, options)
    for rank, played in enumerate(pool.same(play_on_ranks, parallel, history, *args)):
        assert worst_difference(played, play_alone(history, rank // parallel.tp, *args)) < 5e-5


def test_forks_share_dealt_pages(two: RankPool) -> None:
    """A fork in the middle of a page and its parent go on as in one process, and states stay sound."""
    alone = fork_and_go(ps.Parallel(), ids_of(45, 33), 37)
    assert two.same(fork_and_go, DCP2, ids_of(45, 33), 37) == [alone] * 2


def test_every_rank_holds_its_share_of_the_caches(two: RankPool) -> None:
    """Entries take half the rows on each of two ranks; pooling state is whole on both."""
    whole = cache_rows(ps.Parallel())
    for rows in two.same(cache_rows, DCP2):
        for name, n in rows.items():
            assert n == (whole[name] if name.endswith("_state") else whole[name] // 2), name


def test_what_dealt_caches_cannot_do_is_refused(two: RankPool) -> None:
    """Moving and saving, row-independent arithmetic, other numbers of ranks and uneven pages are refused by name."""
    assert two.same(refuse_to_move, DCP2) == [["ConfigError"] * 3] * 2
    with pytest.raises(ps.ConfigError, match="dcp"):
        ps.Parallel(tp=4, dcp=2)
    with pytest.raises(ps.ConfigError, match="page_size"):
        layout_of(8, 0, page_size=16)
    model = tiny_model()
    dealt = Ranks(parallel=DCP2)
    with pytest.raises(ps.ConfigError, match="invariant"):
        build_model(model.config, model.params, numerics=ps.Numerics(invariant=True), ranks=dealt)
    with pytest.raises(ps.ConfigError, match="dcp"):
        row_independent(build_model(model.config, model.params, ranks=dealt), None)


def test_plans_know_dealt_caches() -> None:
    """Over 16 ranks each holds a sixteenth of the entries, and more context fits."""
    flash = RELEASED["flash"]
    whole = plan_step(flash, ps.Parallel(tp=16), requests=2, context=8192)
    dealt = plan_step(flash, ps.Parallel(tp=16, dcp=16), requests=2, context=8192)
    assert dealt.per_token * 16 == whole.per_token
    for name in ("swa", "c4", "index", "c128"):
        assert dealt.caches[name] * 16 == whole.caches[name]
