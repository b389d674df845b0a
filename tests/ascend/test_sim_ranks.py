"""Simulated dispatch and combine over a set of ranks against loops, and against one rank that has every expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from ascend_sim.ranks import Group
from ascend_sim.rules import SimulatorError
from ascend_sim.simulator import simulate
from hypothesis import given
from hypothesis import strategies as st
from kit.steps import examples
from torch import Tensor

BF16, I8, I32 = torch.bfloat16, torch.int8, torch.int32
Arguments = dict[str, Any]


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers that depend on the seed and the shape alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_group(seed: int, rows: tuple[int, ...], n_experts: int, k: int, *, masked: bool = False) -> Group:
    """Draw every rank's rows and experts."""
    return Group(
        x=tuple(draw(seed + r, n, 8, dtype=BF16) for r, n in enumerate(rows)),
        expert_ids=tuple(
            draw(seed + 50 + r, n, n_experts).argsort(-1)[:, :k].int().contiguous() for r, n in enumerate(rows)
        ),
        active=tuple(torch.arange(n) < max(n - 1, 1) for n in rows) if masked else (),
    )


def shared(group: Group, rank: int, n_experts: int) -> Arguments:
    """What dispatch and combine are both told by one rank."""
    sizes = [len(x) for x in group.x]
    return {
        "expert_ids": group.expert_ids[rank],
        "group_ep": "ep",
        "ep_world_size": len(sizes),
        "ep_rank_id": rank,
        "moe_expert_num": n_experts,
        "x_active_mask": group.active[rank] if group.active else None,
        "global_bs": max(sizes) * len(sizes),
    }


def dispatch(group: Group, rank: int, n_experts: int, **more: Any) -> tuple[Tensor, ...]:
    """Call dispatch for one rank."""
    arguments = shared(group, rank, n_experts) | more
    return torch.ops.npu.npu_moe_distribute_dispatch_v2(group.x[rank], **arguments)


@given(
    seed=st.integers(0, 999),
    rows=st.sampled_from([(3,), (2, 2), (1, 3), (2, 1, 3)]),
    local=st.integers(1, 3),
    k=st.integers(1, 3),
    quant=st.sampled_from([0, 2]),
    masked=st.booleans(),
)
@examples(25)
def test_rows_arrive_by_expert_then_rank_then_token(
    seed: int, rows: tuple[int, ...], local: int, k: int, quant: int, masked: bool
) -> None:
    """Every rank gets the rows of its experts in that order, with counts both ways; the rest is poisoned."""
    n_experts = local * len(rows)
    k = min(k, n_experts)
    group = make_group(seed, rows, n_experts, k, masked=masked)
    with simulate(strict_sizes=False, groups={"ep": group}):
        outs = [dispatch(group, r, n_experts, quant_mode=quant) for r in range(len(rows))]
        sums = dispatch(group, 0, n_experts, expert_token_nums_type=0)[3]
    assert sums.tolist() == outs[0][3].cumsum(0).tolist()
    for rank, (received, scales, assist, counts, ep_counts, tp_counts, weights) in enumerate(outs):
        assert len(received) == max(rows) * len(rows) * min(local, k) == len(assist) // 128
        expected, by_rank = [], []
        for e in range(rank * local, (rank + 1) * local):
            for source, x in enumerate(group.x):
                alive = int(group.active[source].sum()) if masked else len(x)
                hits = [x[t] for t in range(alive) if e in group.expert_ids[source][t].tolist()]
                expected += hits
                by_rank.append(len(hits))
        assert counts.tolist() == [sum(by_rank[e * len(rows) : (e + 1) * len(rows)]) for e in range(local)]
        assert ep_counts.tolist() == torch.tensor(by_rank).cumsum(0).tolist()
        assert not len(tp_counts)
        assert not len(weights)
        for place, row in enumerate(expected):
            got = received[place].float() * scales[place] if quant else received[place].float()
            torch.testing.assert_close(got, row.float(), atol=float(row.abs().max()) / 250 if quant else 0, rtol=0)
        rest = received[len(expected) :]
        assert bool((rest == -128).all() if quant else rest.isnan().all())


@given(
    seed=st.integers(0, 999),
    rows=st.sampled_from([(3,), (2, 2), (1, 3), (2, 1, 3)]),
    k=st.integers(1, 3),
    masked=st.booleans(),
)
@examples(15)
def test_combine_is_the_weighted_sum_of_the_experts(seed: int, rows: tuple[int, ...], k: int, masked: bool) -> None:
    """With expert e multiplying by e + 1, every live row gets its weighted multiple; masked rows are undefined."""
    n_experts = 2 * len(rows)
    group = make_group(seed, rows, n_experts, min(k, n_experts), masked=masked)
    with simulate(strict_sizes=False, groups={"ep": group}):
        received = [dispatch(group, r, n_experts) for r in range(len(rows))]
    outputs = []
    for rank, (x, _, _, counts, *_) in enumerate(received):
        y, begin = x.clone(), 0
        for e, count in enumerate(counts.tolist()):
            y[begin : begin + count] *= rank * 2 + e + 1
            begin += count
        outputs.append(y)
    group = attrs.evolve(group, outputs=tuple(outputs))
    with simulate(strict_sizes=False, groups={"ep": group}):
        for r, (_, _, assist, _, counts, _, _) in enumerate(received):
            weights = draw(seed + 90, *group.expert_ids[r].shape)
            out = torch.ops.npu.npu_moe_distribute_combine_v2(
                outputs[r],
                assist_info_for_combine=assist,
                ep_send_counts=counts,
                expert_scales=weights,
                **shared(group, r, n_experts),
            )
            factor = (weights * (group.expert_ids[r] + 1)).sum(-1, keepdim=True)
            alive = int(group.active[r].sum()) if masked else len(out)
            expected = (factor * group.x[r].float())[:alive]
            torch.testing.assert_close(out[:alive].float(), expected, atol=0.1, rtol=0.02)
            assert bool(out[alive:].isnan().all())


def test_shapes_are_those_of_the_real_operator() -> None:
    """32 rows, 6 of 256 experts, 16 ranks: 3,072 rows and 393,216 numbers of assistance, as the genuine Meta gives."""
    x = torch.empty(32, 4096, dtype=BF16, device="meta")
    ids = torch.empty(32, 6, dtype=I32, device="meta")
    with simulate():
        out = torch.ops.npu.npu_moe_distribute_dispatch_v2(x, ids, "ep", 16, 0, 256)
    assert [tuple(o.shape) for o in out] == [(3072, 4096), (3072,), (393216,), (16,), (256,), (0,), (0,)]


GROUP = make_group(1, (3, 3), 4, 2)
Change = Callable[[Arguments], Arguments]
DUPLICATE = torch.tensor([[0, 0], [1, 2], [2, 3]], dtype=I32)
COMMON: list[tuple[str, Change, str]] = [
    ("int64 ids", lambda a: {"expert_ids": a["expert_ids"].long()}, "expert_ids of dtype"),
    ("flat ids", lambda a: {"expert_ids": a["expert_ids"].flatten()}, "expert_ids of shape"),
    ("an expert twice", lambda a: {"expert_ids": DUPLICATE}, "no expert twice"),
    ("unknown expert", lambda a: {"expert_ids": a["expert_ids"] + 4}, "expert ids below 4"),
    ("no expert", lambda a: {"expert_ids": a["expert_ids"] - 9}, "expert ids below 4"),
    ("too many choices", lambda a: {"expert_ids": a["expert_ids"].repeat(1, 3)}, "K in 1"),
    ("no communicator", lambda a: {"group_ep": ""}, "name of a communicator"),
    ("rank out of range", lambda a: {"ep_rank_id": 2}, "a rank below 2"),
    ("another number of ranks", lambda a: {"ep_world_size": 4}, "the 2 ranks"),
    ("too many ranks", lambda a: {"ep_world_size": 769}, "to 768 ranks"),
    ("experts not shared out", lambda a: {"moe_expert_num": 5}, "as many experts on every rank"),
    ("too many experts", lambda a: {"moe_expert_num": 1026}, "1 to 1024 experts"),
    ("another rank's ids", lambda a: {"ep_rank_id": 1}, "ids and mask"),
    ("mask with holes", lambda a: {"x_active_mask": torch.tensor([True, False, True])}, "true values first"),
    ("mask of numbers", lambda a: {"x_active_mask": torch.ones(3, dtype=I8)}, "x_active_mask of dtype"),
    ("mask of other rows", lambda a: {"x_active_mask": torch.ones(2, dtype=torch.bool)}, "x_active_mask of shape"),
    ("global number of one rank", lambda a: {"global_bs": 3}, "global_bs 0 or 6"),
    ("shared experts", lambda a: {"shared_expert_rank_num": 1}, "shared_expert_rank_num=0"),
    ("shard type", lambda a: {"expert_shard_type": 1}, "expert_shard_type=0"),
    ("zero experts", lambda a: {"zero_expert_num": 1}, "zero_expert_num=0"),
    ("copied experts", lambda a: {"copy_expert_num": 1}, "copy_expert_num=0"),
    ("constant experts", lambda a: {"const_expert_num": 1}, "const_expert_num=0"),
    ("a second communicator", lambda a: {"group_tp": "tp"}, "group_tp=''"),
    ("tensor-parallel ranks", lambda a: {"tp_world_size": 2}, "no tensor-parallel"),
    ("a tensor-parallel rank", lambda a: {"tp_rank_id": 1}, "tp_rank_id=0"),
    ("an algorithm", lambda a: {"comm_alg": "fullmesh_v2"}, "comm_alg=''"),
    ("elastic", lambda a: {"elastic_info": torch.ones(4, dtype=I32)}, "elastic_info left out"),
    ("timing", lambda a: {"performance_info": torch.ones(4, dtype=torch.int64)}, "performance_info left out"),
]
DISPATCH: list[tuple[str, Change, str]] = [
    *COMMON,
    ("float32 rows", lambda a: {"x": a["x"].float()}, "x of dtype"),
    ("rank 3", lambda a: {"x": a["x"].unsqueeze(0)}, r"x of shape \[T,H\]"),
    ("no rows", lambda a: {"x": a["x"][:0], "expert_ids": a["expert_ids"][:0]}, "no empty tensors"),
    ("strided rows", lambda a: {"x": a["x"].t().contiguous().t()}, "x contiguous"),
    ("other rows", lambda a: {"x": a["x"] + 1}, "the rows that"),
    ("quant mode", lambda a: {"quant_mode": 1}, "quant_mode 0 or 2"),
    ("count type", lambda a: {"expert_token_nums_type": 2}, "expert_token_nums_type 0 or 1"),
    ("smoothing", lambda a: {"scales": torch.ones(4, 8)}, "scales left out"),
    ("an output dtype", lambda a: {"y_dtype": 1}, "y_dtype left out"),
    ("bf16 weights", lambda a: {"expert_scales": torch.ones(3, 2, dtype=BF16)}, "expert_scales of dtype"),
    ("flat weights", lambda a: {"expert_scales": torch.ones(6)}, "expert_scales of shape"),
]


@pytest.mark.parametrize(("fault", "change", "rule"), DISPATCH, ids=[p[0] for p in DISPATCH])
def test_dispatch_refuses_every_fault(fault: str, change: Change, rule: str) -> None:
    """A valid call passes; with one fault it is refused by the rule that names it."""
    a = {"x": GROUP.x[0]} | shared(GROUP, 0, 4)
    with simulate(strict_sizes=False, groups={"ep": GROUP}):
        torch.ops.npu.npu_moe_distribute_dispatch_v2(**a)
        with pytest.raises(SimulatorError, match=rule):
            torch.ops.npu.npu_moe_distribute_dispatch_v2(**a | change(a))


def test_dispatch_has_documented_sizes() -> None:
    """The hidden width, the number of ranks and of rows have limits; the A2 wants weights; unequal ranks say so."""
    run = torch.ops.npu
    ids = torch.tensor([[0, 1]], dtype=I32)
    with simulate():
        with pytest.raises(SimulatorError, match=r"H in 1024\.\.8192"):
            run.npu_moe_distribute_dispatch_v2(torch.ones(1, 512, dtype=BF16), ids, "ep", 2, 0, 4)
        with pytest.raises(SimulatorError, match="2 to 768 ranks"):
            run.npu_moe_distribute_dispatch_v2(torch.ones(1, 1024, dtype=BF16), ids, "ep", 1, 0, 4)
    for chip, most in (("a2", 256), ("a3", 512)):
        with simulate(chip=chip, strict_sizes=False):
            x = torch.ones(most + 1, 8, dtype=BF16)
            with pytest.raises(SimulatorError, match=f"at most {most} rows"):
                run.npu_moe_distribute_dispatch_v2(x, ids.expand(most + 1, 2).contiguous(), "ep", 1, 0, 4)
    many = torch.arange(17, dtype=I32).unsqueeze(0)
    with simulate(strict_sizes=False), pytest.raises(SimulatorError, match=r"K in 1\.\.16"):
        run.npu_moe_distribute_dispatch_v2(torch.ones(1, 8, dtype=BF16), many, "ep", 1, 0, 32)
    with simulate(chip="a2", strict_sizes=False), pytest.raises(SimulatorError, match="expert_scales to be given"):
        run.npu_moe_distribute_dispatch_v2(torch.ones(1, 8, dtype=BF16), ids, "ep", 1, 0, 4)
    uneven = make_group(1, (1, 3), 4, 2)
    with simulate(strict_sizes=False, groups={"ep": uneven}), pytest.raises(SimulatorError, match="as ranks differ"):
        dispatch(uneven, 0, 4, global_bs=0)


COMBINE: list[tuple[str, Change, str]] = [
    *COMMON,
    ("float32 rows", lambda a: {"expand_x": a["expand_x"].float()}, "expand_x of dtype"),
    ("only live rows", lambda a: {"expand_x": a["expand_x"][:4]}, "expand_x of shape"),
    ("other rows", lambda a: {"expand_x": a["expand_x"] + 1}, "the output that"),
    ("another dispatch", lambda a: {"assist_info_for_combine": a["assist_info_for_combine"] + 1}, "assist_info"),
    ("counts of another", lambda a: {"ep_send_counts": a["ep_send_counts"] + 1}, "ep_send_counts of the same"),
    ("bf16 weights", lambda a: {"expert_scales": a["expert_scales"].bfloat16()}, "expert_scales of dtype"),
    ("flat weights", lambda a: {"expert_scales": a["expert_scales"].flatten()}, "expert_scales of shape"),
    ("quantised way", lambda a: {"comm_quant_mode": 2}, "comm_quant_mode=0"),
    ("a shared expert", lambda a: {"shared_expert_x": torch.ones(3, 8)}, "shared_expert_x left out"),
]


@pytest.mark.parametrize(("fault", "change", "rule"), COMBINE, ids=[p[0] for p in COMBINE])
def test_combine_refuses_every_fault(fault: str, change: Change, rule: str) -> None:
    """A valid call passes; with one fault it is refused by the rule that names it."""
    with simulate(strict_sizes=False, groups={"ep": GROUP}):
        received = [dispatch(GROUP, r, 4) for r in range(2)]
    outputs = tuple(r[0].nan_to_num(0.0) for r in received)
    a = {
        "expand_x": outputs[0],
        "assist_info_for_combine": received[0][2],
        "ep_send_counts": received[0][4],
        "expert_scales": torch.ones(3, 2),
    } | shared(GROUP, 0, 4)
    with simulate(strict_sizes=False, groups={"ep": attrs.evolve(GROUP, outputs=outputs)}):
        torch.ops.npu.npu_moe_distribute_combine_v2(**a)
        with pytest.raises(SimulatorError, match=rule):
            torch.ops.npu.npu_moe_distribute_combine_v2(**a | change(a))
    with simulate(strict_sizes=False, groups={"ep": GROUP}), pytest.raises(SimulatorError, match="outputs of every"):
        torch.ops.npu.npu_moe_distribute_combine_v2(**a)
