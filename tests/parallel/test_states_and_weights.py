"""Every rank reads its own part of a checkpoint, and states move between layouts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import purestep as ps
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.configs import tiny_config
from kit.models import tiny_model
from kit.rank_states import continue_saved, export_after, import_and_go, load_ascend, load_counted, prints, saved_after
from kit.rank_steps import choosing_model
from kit.ranks import Failure, RankPool, rank_pool
from kit.steps import ENDLESS, examples, fresh, ids_of
from purestep.model.checkpoint import read_checkpoint
from purestep.model.cuts import check_layout, cut_params
from purestep.model.fingerprint import fingerprint
from purestep.model.leaves import leaves_from_params
from purestep.model.placement import balanced_placement, expert_load
from purestep.model.ranks import Ranks
from purestep.ops.collectives import Group
from purestep.serving.checkpoint_tools import convert
from purestep.state.config_reading import config_from_dict
from purestep.step.tiny_checkpoints import random_tensors, write_checkpoint

ONE = ps.Parallel()
TP2 = ps.Parallel(tp=2)
DP2 = ps.Parallel(dp=2)
EP2 = ps.Parallel(tp=2, ep=2, moe="ep", placement=((5, 0, 4, 1, 3, 2),) * 4)


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    with rank_pool(2) as running:
        yield running


def place_of(parallel: ps.Parallel, rank: int) -> Ranks:
    """Make a rank's place without a process group, for cutting alone."""
    attn = Group(size=parallel.tp, rank=rank % parallel.tp)
    return Ranks(parallel=parallel, world=Group(size=parallel.ranks, rank=rank), attn=attn)


@pytest.mark.parametrize("parallel", [TP2, DP2, EP2], ids=["tp", "dp", "ep"])
def test_a_rank_reads_its_own_part_alone(two: RankPool, tmp_path: Path, parallel: ps.Parallel) -> None:
    """The bytes taken out of the files are those that the rank keeps, plus one look at the expert tables."""
    config = tiny_config((0, 4, 128, 4), vocab=65)
    write_checkpoint(tmp_path, config, random_tensors(config, 0), shards=3)
    whole = ps.load_model(tmp_path)
    ids = ids_of(40, 65)
    state, request = ps.open_request(fresh(whole, 1), ENDLESS)
    right = ps.extend_step(whole, state, {request: ids})[1].logits
    size = sum(leaf.nbytes for leaf in leaves_from_params(whole.params).values())
    tables = config["vocab_size"] * config["num_experts_per_tok"] * 8 * config["num_hash_layers"]
    for loaded in two.same(load_counted, parallel, str(tmp_path), ids):
        placed = 0 if not parallel.placement else 4 * 6 * 8  # the note where experts lie was not read
        padding = loaded.held - placed + tables - loaded.read
        assert 0 <= padding <= 2 * 128 * config["hidden_size"] * 4
        assert loaded.read < 0.85 * size
        assert loaded.fingerprint == fingerprint(whole)
        assert torch.allclose(loaded.logits, right, atol=5e-5)


LAYOUTS = [TP2, DP2, ps.Parallel(tp=2, dp=2), ps.Parallel(tp=4), ps.Parallel(tp=4, ep=4, moe="ep")]


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_files_and_memory_are_cut_alike(tmp_path: Path, parallel: ps.Parallel) -> None:
    """What a rank reads from files is what it cuts out of the whole weights, bit for bit, in all naming dialects."""
    config = tiny_config((0, 4, 128), heads=4, experts=8, inter=16, vocab=129, o_groups=2)
    write_checkpoint(tmp_path, config, random_tensors(config, 1))
    _, params = read_checkpoint(tmp_path)
    for rank in range(parallel.ranks):
        ranks = place_of(parallel, rank)
        _, part = read_checkpoint(tmp_path, ranks=ranks)
        cut = leaves_from_params(cut_params(config_from_dict(config), params, ranks))
        read = leaves_from_params(part)
        assert read.keys() == cut.keys()
        assert all(torch.equal(read[path], cut[path]) for path in cut)
        assert all(leaf.is_contiguous() and leaf.storage_offset() == 0 for leaf in read.values())


@pytest.mark.parametrize("form", ["fp8", "fp4"])
def test_quantised_parts_are_parts_of_the_expanded_whole(tmp_path: Path, form: str) -> None:
    """A rank's part of FP8 and FP4 weights is what it would cut out of them expanded, bit for bit."""
    sizes = {"heads": 4, "head_dim": 96, "hidden": 160, "inter": 192, "o_lora": 40, "q_lora": 72, "experts": 4}
    config = tiny_config((4,), vocab=64, hash_layers=0, o_groups=2, **sizes)
    write_checkpoint(tmp_path / "plain", config, random_tensors(config, 1))
    convert(tmp_path / "plain", tmp_path / form, form=form, names="official", max_shard_bytes=10**9)
    read, params = read_checkpoint(tmp_path / form, dtype=torch.float32)
    for parallel in (TP2, ps.Parallel(tp=4), ps.Parallel(dp=2, ep=2, moe="ep")):
        for rank in range(parallel.ranks):
            ranks = place_of(parallel, rank)
            cut = leaves_from_params(cut_params(read, params, ranks))
            part = leaves_from_params(read_checkpoint(tmp_path / form, dtype=torch.float32, ranks=ranks)[1])
            assert part.keys() == cut.keys()
            assert all(torch.equal(part[path], cut[path]) for path in cut)
    with pytest.raises(ps.ConfigError, match="stored"):
        read_checkpoint(tmp_path / form, stored=True, ranks=place_of(TP2, 0))


@given(parallel=st.sampled_from(LAYOUTS), vocab=st.integers(2, 300))
@examples(20)
def test_parts_make_the_whole(parallel: ps.Parallel, vocab: int) -> None:
    """H02: every number of a weight lies on some rank, and what is cut over all ranks lies on one alone."""
    model = choosing_model(vocab=vocab)
    whole = leaves_from_params(model.params)
    parts = [
        leaves_from_params(cut_params(model.config, model.params, place_of(parallel, rank)))
        for rank in range(parallel.ranks)
    ]
    head = torch.cat([part["head"] for part in parts])
    assert torch.equal(head[:vocab], whole["head"])
    assert not head[vocab:].any()
    assert head.shape[0] % 64 == 0
    expected = sum(whole[f"layers.0.ffn.{name}"].double().abs().sum() for name in ("w13", "w2"))
    found = sum(part[f"layers.0.ffn.{name}"].double().abs().sum() for part in parts for name in ("w13", "w2"))
    assert torch.isclose(torch.as_tensor(found), torch.as_tensor(expected))


@pytest.mark.parametrize(
    ("changes", "parallel", "field"),
    [
        ({"heads": 3, "o_groups": 1}, TP2, "num_attention_heads"),
        ({"heads": 12, "o_groups": 3}, ps.Parallel(tp=4), "num_attention_heads"),
        ({"index_heads": 3}, TP2, "index_n_heads"),
        ({"inter": 9}, TP2, "moe_intermediate_size"),
        ({"experts": 7}, ps.Parallel(dp=2, ep=2, moe="ep"), "n_routed_experts"),
        ({}, ps.Parallel(dp=2, ep=2, moe="ep", placement=((1, 0),)), "placement"),
    ],
)
def test_models_that_do_not_divide_are_refused(changes: dict[str, int], parallel: ps.Parallel, field: str) -> None:
    """A layout that would deal heads, widths or experts unevenly is refused, and the error names what."""
    with pytest.raises(ps.ConfigError) as error:
        check_layout(choosing_model(**changes).config, parallel)
    assert error.value.field == field


def test_every_layout_knows_the_whole_models_fingerprint(two: RankPool) -> None:
    """A rank's part has the fingerprint of the whole model, so that files move between layouts."""
    expected = fingerprint(choosing_model())
    for parallel in (TP2, DP2, ps.Parallel(dp=2, ep=2, moe="ep", placement=((7, 0, 6, 1, 5, 2, 4, 3),) * 3)):
        assert two.same(prints, parallel) == [expected] * 2
    assert fingerprint(choosing_model(seed=1)) != expected


def test_a_request_moves_between_layouts(two: RankPool, tmp_path: Path) -> None:
    """A request exported under tp=2 goes on under dp=2 and in one process to the same tokens, and back again."""
    ids = ids_of(150, 33)
    tokens = two.same(export_after, TP2, ids, 6, str(tmp_path))
    assert tokens[0] == tokens[1]
    assert two.same(import_and_go, DP2, str(tmp_path), 6) == tokens
    assert import_and_go(ONE, str(tmp_path), 6) == tokens[0]
    back = tmp_path / "back"
    back.mkdir()
    assert two.same(export_after, DP2, ids, 6, str(back)) == tokens
    assert two.same(import_and_go, TP2, str(back), 6) == tokens


def test_a_state_moves_between_layouts(two: RankPool, tmp_path: Path) -> None:
    """A state saved under tp=2 is restored under dp=2 and in one process, and goes on to the same tokens."""
    tokens = two.same(saved_after, TP2, ids_of(140, 33), 4, str(tmp_path))
    assert two.same(continue_saved, DP2, str(tmp_path), 4) == tokens
    assert continue_saved(ONE, str(tmp_path), 4) == tokens[0]


def test_ascend_kernels_know_no_layouts(two: RankPool, tmp_path: Path) -> None:
    """Layouts with Ascend kernels are refused by name."""
    config = tiny_config((0,), vocab=64)
    write_checkpoint(tmp_path, config, random_tensors(config, 0))
    for failure in two.attempt(load_ascend, [TP2] * 2, [str(tmp_path)] * 2):
        assert isinstance(failure, Failure)
        assert failure.kind == "ConfigError"


@given(
    load=st.integers(1, 3).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 20), min_size=4 * n, max_size=4 * n), min_size=1, max_size=3)
    )
)
def test_balanced_placements_are_permutations_and_spread_the_load(load: list[list[int]]) -> None:
    """Every expert has one place, and no rank's load exceeds another's by more than the heaviest expert's per place."""
    counts = np.array(load)
    for row, places in zip(load, balanced_placement(counts, 4), strict=True):
        assert sorted(places) == list(range(len(row)))
        room = len(row) // 4
        loads = [sum(row[e] for e in range(len(row)) if places[e] // room == rank) for rank in range(4)]
        assert max(loads) - min(loads) <= max(row) * room


def test_recorded_load_counts_every_choice() -> None:
    """The load of a step is how often each expert was chosen, layer by layer, tokens times choices in all."""
    model = tiny_model((0, 4), experts=8, topk=3, hash_layers=1)
    state, request = ps.open_request(fresh(model, 1), ENDLESS)
    _, out = ps.extend_step(model, state, {request: ids_of(9)}, capture=["ffn.expert_ids"])
    assert out.captured is not None
    load = expert_load(model.config, out.captured.stages)
    assert load.shape == (2, 8)
    assert load.sum(1).tolist() == [27, 27]
    ids = out.captured.stages["1.ffn.expert_ids"]
    assert load[1].tolist() == [int((ids == e).sum()) for e in range(8)]
