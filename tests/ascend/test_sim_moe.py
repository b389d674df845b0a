"""Simulated routing, grouped products, clamped activations and their sum against loops; every rule planted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ascend_sim.rules import SimulatorError
from ascend_sim.simulator import simulate
from hypothesis import given
from hypothesis import strategies as st
from kit.steps import examples
from purestep.ops import experts
from torch import Tensor

BF16, I8, I32, I64 = torch.bfloat16, torch.int8, torch.int32, torch.int64
ALL = ("torch-npu", "cann-recipes", "sgl-kernel-npu", "vllm-ascend")
Arguments = dict[str, Any]


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers that depend on the seed and the shape alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(seed: int, low: int, high: int, *shape: int) -> Tensor:
    """Whole numbers that depend on the seed and the shape alone."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def chosen(seed: int, rows: int, n_experts: int, k: int) -> Tensor:
    """Expert ids without repetition in a row: i32[T,K]."""
    return draw(seed, rows, n_experts).argsort(-1)[:, :k].int().contiguous()


def call(name: str, arguments: Arguments) -> Any:
    """Call an operator by keywords."""
    namespace, operator = name.split("::")
    return getattr(getattr(torch.ops, namespace), operator)(**arguments)


def init_call(seed: int = 0, rows: int = 3, k: int = 2, n_experts: int = 5) -> Arguments:
    """A valid call of npu_moe_init_routing_v2 on all experts."""
    return {
        "x": draw(seed, rows, 6, dtype=BF16),
        "expert_idx": chosen(seed, rows, n_experts, k),
        "active_num": rows * k,
        "expert_num": n_experts,
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "active_expert_range": [0, n_experts],
    }


@given(
    seed=st.integers(0, 999),
    rows=st.integers(1, 6),
    k=st.integers(1, 4),
    window=st.sampled_from([(0, 5), (0, 2), (2, 4), (4, 5)]),
    quant=st.sampled_from([-1, 1]),
    scaled=st.booleans(),
)
@examples(30)
def test_routing_lists_pairs_expert_by_expert(
    seed: int, rows: int, k: int, window: tuple[int, int], quant: int, scaled: bool
) -> None:
    """Rows come expert by expert, in order of token within one; both index kinds say where; the rest is poisoned."""
    scale = draw(seed, rows).abs() if scaled and quant == -1 else None
    a = init_call(seed, rows, k) | {"active_expert_range": list(window), "quant_mode": quant, "scale": scale}
    with simulate():
        out, gather, counts, scales = torch.ops.npu.npu_moe_init_routing_v2(**a)
        _, scatter, _, _ = torch.ops.npu.npu_moe_init_routing_v2(**a, row_idx_type=1)
    pairs = [(t, c) for e in range(*window) for t in range(rows) for c in range(k) if int(a["expert_idx"][t, c]) == e]
    assert counts.tolist() == [int((a["expert_idx"] == e).sum()) for e in range(*window)]
    assert counts.dtype is I64
    assert gather.dtype is I32
    where = {t * k + c: place for place, (t, c) in enumerate(pairs)}
    assert gather.tolist() == [where.get(pair, -1) for pair in range(rows * k)]
    assert scatter[: len(pairs)].tolist() == [t * k + c for t, c in pairs]
    for place, (t, _) in enumerate(pairs):
        row = a["x"][t].float()
        if quant == 1:
            assert float(scales[place]) == pytest.approx(float(row.abs().max()) / 127, rel=1e-6)
            assert (out[place].float() * scales[place] - row).abs().max() <= scales[place] * 0.501
        else:
            assert torch.equal(out[place], a["x"][t])
            assert scale is None or scales[place] == scale[t]
    rest = out[len(pairs) :]
    assert bool(rest.isnan().all() if quant == -1 else (rest == -128).all())
    assert bool(scales[len(pairs) :].isnan().all())
    assert bool((scatter[len(pairs) :] < 0).all())


def matmul_call(
    seed: int = 0, counts: tuple[int, ...] = (2, 0, 3), rows: int = 6, quantised: bool = False
) -> Arguments:
    """A valid call of npu_grouped_matmul by counts."""
    n = len(counts)
    a: Arguments = {
        "split_item": 2,
        "group_type": 0,
        "group_list_type": 1,
        "group_list": torch.tensor(counts),
    }
    if not quantised:
        return a | {"x": [draw(seed, rows, 4, dtype=BF16)], "weight": [draw(seed + 1, n, 4, 8, dtype=BF16)]}
    return a | {
        "x": [whole(seed, -127, 128, rows, 4).to(I8)],
        "weight": [whole(seed + 1, -127, 128, n, 4, 8).to(I8)],
        "scale": [draw(seed + 2, n, 8).abs() / 99],
        "per_token_scale": [draw(seed + 3, rows).abs() / 99],
        "output_dtype": BF16,
    }


@given(
    seed=st.integers(0, 999),
    counts=st.lists(st.integers(0, 3), min_size=2, max_size=4),
    extra=st.integers(0, 2),
    quantised=st.booleans(),
    transposed=st.booleans(),
)
@examples(30)
def test_grouped_product_is_one_product_per_group(
    seed: int, counts: list[int], extra: int, quantised: bool, transposed: bool
) -> None:
    """Every row meets its group's weight; counts and running sums say the same; rows behind the groups are NaN."""
    rows = max(sum(counts) + extra, 1)
    a = matmul_call(seed, tuple(counts), rows, quantised)
    by_sums = a | {"group_list": a["group_list"].cumsum(0), "group_list_type": 0, "split_item": 3}
    if transposed:
        by_sums["weight"] = [a["weight"][0].transpose(1, 2).contiguous().transpose(1, 2)]
    with simulate():
        (out,) = torch.ops.npu.npu_grouped_matmul(**a)
        (same,) = torch.ops.npu.npu_grouped_matmul(**by_sums)
    assert torch.equal(out.nan_to_num(7.0), same.nan_to_num(7.0))
    owner = [e for e, count in enumerate(counts) for _ in range(count)]
    for r in range(rows):
        if r >= len(owner):
            assert bool(out[r].isnan().all())
            continue
        w, x = a["weight"][0][owner[r]].double(), a["x"][0][r].double()
        for c in range(8):
            y = sum(float(x[i]) * float(w[i, c]) for i in range(4))
            if quantised:
                y *= float(a["scale"][0][owner[r], c]) * float(a["per_token_scale"][0][r])
            assert float(out[r, c]) == pytest.approx(y, rel=0.01, abs=1e-2)


def swiglu_call(seed: int = 0, rows: int = 4) -> Arguments:
    """A valid call of npu_clipped_swiglu as V4 needs it."""
    return {"x": draw(seed, rows, 12, dtype=BF16) * 3, "alpha": 1.0, "bias": 0.0, "limit": 2.0, "interleaved": False}


def gated(gate: float, up: float, limit: float, alpha: float, bias: float) -> float:
    """One value of the clamped activation."""
    gate, up = min(gate, limit), max(-limit, min(up, limit))
    return gate / (1 + math.exp(-alpha * gate)) * (up + bias)


@given(
    seed=st.integers(0, 999),
    counts=st.none() | st.lists(st.integers(0, 2), min_size=1, max_size=3),
    interleaved=st.booleans(),
    general=st.booleans(),
)
@examples(20)
def test_clipped_swiglu_clamps_gate_above_and_up_on_both_sides(
    seed: int, counts: list[int] | None, interleaved: bool, general: bool
) -> None:
    """The formula one by one, split in halves or by parity; rows outside the groups are NaN."""
    a = swiglu_call(seed, 6) | {"interleaved": interleaved}
    a |= {"alpha": 1.702, "bias": 1.0} if general else {}
    a |= {} if counts is None else {"group_index": torch.tensor(counts)}
    with simulate():
        out = torch.ops.npu.npu_clipped_swiglu(**a)
        lead = torch.ops.npu.npu_clipped_swiglu(**a | {"x": a["x"].view(2, 3, 12)})
    assert torch.equal(lead.view(6, 6).nan_to_num(7.0), out.nan_to_num(7.0))
    used = 6 if counts is None else sum(counts)
    assert bool(out[used:].isnan().all())
    for r in range(used):
        row = a["x"][r].tolist()
        pairs = zip(row[0::2], row[1::2], strict=True) if interleaved else zip(row[:6], row[6:], strict=True)
        expected = [gated(g, u, a["limit"], a["alpha"], a["bias"]) for g, u in pairs]
        assert out[r].tolist() == pytest.approx(expected, rel=0.01, abs=1e-3)
    if not interleaved and not general:
        torch.testing.assert_close(out[:used], experts.gate_up(a["x"], 2.0).to(BF16)[:used])


def dequant_call(seed: int = 0, counts: tuple[int, ...] | None = (2, 0, 2), width: int = 8) -> Arguments:
    """A valid call of npu_dequant_swiglu_quant on int32 sums."""
    rows, n = 4, 1 if counts is None else len(counts)
    return {
        "x": whole(seed, -9999, 9999, rows, 2 * width).to(I32),
        "weight_scale": draw(seed + 1, n, 2 * width).abs() / 1000,
        "activation_scale": draw(seed + 2, rows).abs(),
        "group_index": None if counts is None else torch.tensor(counts),
        "activate_left": True,
        "quant_mode": 1,
        "swiglu_mode": 1,
        "clamp_limit": 2.0,
        "glu_alpha": 1.0,
        "glu_bias": 0.0,
    }


@given(
    seed=st.integers(0, 999),
    counts=st.none() | st.sampled_from([(2, 0, 2), (1, 2), (4,), (0, 1)]),
    package=st.sampled_from(["npu", "_C_ascend"]),
    clamp=st.booleans(),
    left=st.booleans(),
    plain=st.booleans(),
)
@examples(30)
def test_dequantised_activation_differs_between_packages(
    seed: int, counts: tuple[int, ...] | None, package: str, clamp: bool, left: bool, plain: bool
) -> None:
    """Dequantise, activate, quantise, one by one; clamped, torch-npu pairs channels while vllm-ascend splits halves."""
    a = dequant_call(seed, counts) | {"swiglu_mode": int(clamp), "activate_left": left}
    if plain:
        a |= {"x": draw(seed, 4, 16, dtype=BF16), "weight_scale": None, "activation_scale": None}
    with simulate(providers=ALL, strict_sizes=False):
        codes, scales = call(f"{package}::npu_dequant_swiglu_quant", a)
    owner = [0] * 4 if counts is None else [e for e, count in enumerate(counts) for _ in range(count)]
    for r, e in enumerate(owner):
        row = a["x"][r].double()
        if not plain:
            row = row * a["weight_scale"][e].double() * float(a["activation_scale"][r])
        if package == "npu" and clamp:
            gate, up = row[0::2], row[1::2]
        else:
            gate, up = (row[:8], row[8:]) if left else (row[8:], row[:8])
        limit = 2.0 if clamp else math.inf
        y = torch.tensor([gated(float(g), float(u), limit, 1.0, 0.0) for g, u in zip(gate, up, strict=True)])
        assert float(scales[r]) == pytest.approx(float(y.abs().max()) / 127, rel=1e-5)
        assert (codes[r] * scales[r] - y).abs().max() <= scales[r] * 0.51
    assert bool(scales[len(owner) :].isnan().all())
    assert bool((codes[len(owner) :] == -128).all())


def unpermute_call(seed: int = 0, rows: int = 3, k: int = 2) -> Arguments:
    """A valid call of npu_moe_token_unpermute."""
    order = draw(seed, rows * k).argsort().int()
    return {
        "permuted_tokens": draw(seed, rows * k, 6, dtype=BF16),
        "sorted_indices": order,
        "probs": draw(seed + 1, rows, k, dtype=BF16),
    }


@given(seed=st.integers(0, 999), rows=st.integers(1, 5), k=st.integers(1, 3))
@examples(15)
def test_unpermute_sums_by_token(seed: int, rows: int, k: int) -> None:
    """Token t takes its K rows from ``indices[t*K + k]``; a weight of zero does not wipe out an undefined row."""
    a = unpermute_call(seed, rows, k)
    with simulate():
        out = torch.ops.npu.npu_moe_token_unpermute(**a)
        bare = torch.ops.npu.npu_moe_token_unpermute(a["permuted_tokens"], a["sorted_indices"])
        a["probs"][0, 0], hit = 0, int(a["sorted_indices"][0])
        a["permuted_tokens"][hit] = math.nan
        assert torch.ops.npu.npu_moe_token_unpermute(**a)[0].isnan().all()
    a = unpermute_call(seed, rows, k)
    assert torch.equal(bare, a["permuted_tokens"][a["sorted_indices"].long()])
    for t in range(rows):
        y = sum(
            float(a["probs"][t, c]) * a["permuted_tokens"][int(a["sorted_indices"][t * k + c])].float()
            for c in range(k)
        )
        torch.testing.assert_close(out[t].float(), y, atol=0.02, rtol=0.01)


def finalize_call(seed: int = 0, rows: int = 3, k: int = 2, mode: int = 2) -> Arguments:
    """A valid call of npu_moe_finalize_routing."""
    return {
        "expanded_permuted_rows": draw(seed, rows * k, 6),
        "skip1": None,
        "skip2": None,
        "bias": None,
        "scales": draw(seed + 1, rows, k),
        "expanded_src_to_dst_row": draw(seed, rows * k).argsort().int(),
        "export_for_source_row": None,
        "drop_pad_mode": mode,
    }


@given(seed=st.integers(0, 999), rows=st.integers(1, 4), k=st.integers(1, 3), skip=st.booleans())
@examples(15)
def test_finalize_reads_its_index_by_choice_or_by_row(seed: int, rows: int, k: int, skip: bool) -> None:
    """Mode 0 reads ``index[c * rows + t]``, mode 2 ``index[t * K + c]``; what is added twice is added."""
    for mode in (0, 2):
        a = finalize_call(seed, rows, k, mode)
        a |= {"skip1": draw(seed + 2, rows, 6), "skip2": draw(seed + 3, rows, 6)} if skip else {}
        with simulate(chip="a2"):
            out = torch.ops.npu.npu_moe_finalize_routing(**a)
        for t in range(rows):
            y = torch.zeros(6) if not skip else a["skip1"][t] + a["skip2"][t]
            for c in range(k):
                place = int(a["expanded_src_to_dst_row"][c * rows + t if mode == 0 else t * k + c])
                y = y + a["scales"][t, c] * a["expanded_permuted_rows"][place]
            torch.testing.assert_close(out[t], y)


def test_default_order_of_finalize_is_a_trap() -> None:
    """With the index of routing, mode 2 gives the sum over experts and the default mode something else."""
    a = init_call(3, 3, 2)
    with simulate(chip="a2"):
        rows, index, _, _ = torch.ops.npu.npu_moe_init_routing_v2(**a)
        f = finalize_call(3) | {"expanded_permuted_rows": rows, "expanded_src_to_dst_row": index}
        f |= {"scales": torch.full((3, 2), 0.5, dtype=BF16)}
        good = torch.ops.npu.npu_moe_finalize_routing(**f)
        bad = torch.ops.npu.npu_moe_finalize_routing(**f | {"drop_pad_mode": 0})
    torch.testing.assert_close(good, a["x"])
    assert not torch.allclose(bad.float(), a["x"].float(), atol=0.1)


@given(seed=st.integers(0, 999), rows=st.integers(1, 5), k=st.integers(1, 3))
@examples(10)
def test_the_chain_is_the_reference_experts(seed: int, rows: int, k: int) -> None:
    """Routing, two grouped products around the activation, and the sum give the reference's experts."""
    x, ids = draw(seed, rows, 16, dtype=BF16), chosen(seed, rows, 4, k)
    weights = draw(seed + 1, rows, k).softmax(-1)
    w13, w2 = draw(seed + 2, 4, 16, 16, dtype=BF16) / 4, draw(seed + 3, 4, 16, 8, dtype=BF16) / 3
    with simulate():
        routing = init_call(rows=rows, k=k, n_experts=4) | {"x": x, "expert_idx": ids}
        expanded, index, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(**routing)
        product = {"split_item": 2, "group_type": 0, "group_list_type": 1, "group_list": counts}
        (h,) = torch.ops.npu.npu_grouped_matmul([expanded], [w13.transpose(1, 2)], **product)
        h = torch.ops.npu.npu_clipped_swiglu(h, alpha=1.0, bias=0.0, limit=1.0, interleaved=False)
        (y,) = torch.ops.npu.npu_grouped_matmul([h], [w2.transpose(1, 2)], **product)
        out = torch.ops.npu.npu_moe_token_unpermute(y, index, probs=weights.to(BF16))
    expected = experts.experts_sorted(x, ids.long(), weights, w13, w2, 1.0)
    torch.testing.assert_close(out.float(), expected, atol=0.03, rtol=0.03)


CALLS: dict[str, Arguments] = {
    "npu::npu_moe_init_routing_v2": init_call(),
    "npu::npu_grouped_matmul": matmul_call(),
    "npu::npu_clipped_swiglu": swiglu_call(),
    "npu::npu_dequant_swiglu_quant": dequant_call(width=64),
    "npu::npu_moe_token_unpermute": unpermute_call(),
}
QUANTISED = matmul_call(quantised=True)
Change = Callable[[Arguments], Arguments]
PLANTED: list[tuple[str, str, Change, str]] = [
    ("npu::npu_moe_init_routing_v2", name, change, rule)
    for name, change, rule in (
        ("no rows", lambda a: {"x": a["x"][:0], "expert_idx": a["expert_idx"][:0]}, "no empty tensors"),
        ("strided rows", lambda a: {"x": a["x"].repeat(1, 2)[:, :6]}, "x contiguous"),
        ("rank 3", lambda a: {"x": a["x"].unsqueeze(0)}, r"x of shape \[T,H\]"),
        ("int32 rows", lambda a: {"x": a["x"].int()}, "x of dtype"),
        ("int64 ids", lambda a: {"expert_idx": a["expert_idx"].long()}, "expert_idx of dtype"),
        ("ids of other rows", lambda a: {"expert_idx": a["expert_idx"][:2]}, "expert_idx of shape"),
        ("unknown expert", lambda a: {"expert_idx": a["expert_idx"] + 5}, "expert ids below 5"),
        ("negative expert", lambda a: {"expert_idx": a["expert_idx"] - 9}, "expert ids below 5"),
        ("no expert number", lambda a: {"expert_num": -1}, "expert_num in 1"),
        ("offset", lambda a: {"offset": torch.ones(1)}, "offset left out"),
        ("another output dtype", lambda a: {"x_dtype": 1}, "x_dtype left out"),
        ("dropping", lambda a: {"drop_pad_mode": 1}, "drop_pad_mode=0"),
        ("running sums", lambda a: {"expert_tokens_num_type": 0}, "expert_tokens_num_type=1"),
        ("no counts", lambda a: {"expert_tokens_num_flag": False}, "expert_tokens_num_flag=True"),
        ("static quantisation", lambda a: {"quant_mode": 0}, "quant_mode -1 or 1"),
        ("unknown index", lambda a: {"row_idx_type": 2}, "row_idx_type 0 or 1"),
        ("no range", lambda a: {"active_expert_range": []}, "two numbers"),
        ("range of three", lambda a: {"active_expert_range": [0, 1, 2]}, "two numbers"),
        ("range upside down", lambda a: {"active_expert_range": [2, 1]}, "a range inside"),
        ("range too far", lambda a: {"active_expert_range": [0, 6]}, "a range inside"),
        ("only some pairs", lambda a: {"active_num": 2}, "active_num of all 6"),
        ("scale of other rows", lambda a: {"scale": torch.ones(2)}, "scale of shape"),
        ("scale of another dtype", lambda a: {"scale": torch.ones(3, dtype=BF16)}, "scale of dtype"),
        ("smoothing", lambda a: {"scale": torch.ones(5, 6), "quant_mode": 1}, "no smoothing scale"),
        ("quantised twice", lambda a: {"x": a["x"].to(I8), "quant_mode": 1}, "not quantised already"),
    )
]
PLANTED += [
    ("npu::npu_grouped_matmul", name, change, rule)
    for name, change, rule in (
        ("no rows", lambda a: {"x": [a["x"][0][:0]]}, "no empty tensors"),
        ("strided rows", lambda a: {"x": [a["x"][0].t().contiguous().t()]}, "x contiguous"),
        ("two inputs", lambda a: {"x": a["x"] * 2}, "one tensor in x"),
        ("a list of weights", lambda a: {"weight": list(a["weight"][0])}, "one tensor in weight"),
        ("float32", lambda a: {"x": [a["x"][0].float()], "weight": [a["weight"][0].float()]}, "x of dtype"),
        ("mixed dtypes", lambda a: {"weight": [a["weight"][0].half()]}, "weight of dtype"),
        ("rank 3", lambda a: {"x": [a["x"][0].unsqueeze(0)]}, r"x of shape \[M,K\]"),
        ("weight of rank 2", lambda a: {"weight": [a["weight"][0][0]]}, "weight of shape"),
        ("weight turned", lambda a: {"weight": [a["weight"][0].transpose(1, 2)]}, "weight with 4 rows"),
        ("weight with holes", lambda a: {"weight": [a["weight"][0].repeat(1, 1, 2)[..., :8]]}, "weight contiguous"),
        ("many results", lambda a: {"split_item": 0}, "split_item 2 or 3"),
        ("no group axis", lambda a: {"group_type": None}, "group_type=0"),
        ("an activation", lambda a: {"act_type": 1}, "act_type=0"),
        ("a bias", lambda a: {"bias": [torch.ones(8)]}, "bias left out"),
        ("int32 groups", lambda a: {"group_list": a["group_list"].int()}, "group_list of dtype"),
        ("groups of other experts", lambda a: {"group_list": a["group_list"][:2]}, "group_list of shape"),
        ("no groups", lambda a: {"group_list": None}, "group_list to be given"),
        ("unknown kind", lambda a: {"group_list_type": 2}, "group_list_type 0 or 1"),
        ("counts as sums", lambda a: {"group_list_type": 0}, "running sums that do not fall"),
        ("sums as counts", lambda a: {"group_list": torch.tensor([2, 2, 5])}, "groups inside the 6 rows"),
        ("negative counts", lambda a: {"group_list": torch.tensor([2, -1, 1])}, "none negative"),
        (
            "one group",
            lambda a: {"weight": [a["weight"][0][:1]], "group_list": torch.tensor([2])},
            "more than one group",
        ),
        ("another output", lambda a: {"output_dtype": torch.float32}, "output_dtype among"),
        ("scales of floats", lambda a: {"scale": [torch.ones(3, 8)]}, "scale left out"),
        ("row scales of floats", lambda a: {"per_token_scale": [torch.ones(6)]}, "per_token_scale left out"),
        ("no output dtype", lambda a: QUANTISED | {"output_dtype": None}, "output_dtype for torch.int8"),
        ("no scale", lambda a: QUANTISED | {"scale": None}, "scale of the weight"),
        ("one scale per expert", lambda a: QUANTISED | {"scale": [torch.ones(3, 1)]}, "scale of shape"),
        ("half scales", lambda a: QUANTISED | {"scale": [torch.ones(3, 8).half()]}, "scale of dtype"),
        (
            "scales of other rows",
            lambda a: QUANTISED | {"per_token_scale": [torch.ones(5)]},
            "per_token_scale of shape",
        ),
        (
            "bf16 row scales",
            lambda a: QUANTISED | {"per_token_scale": [torch.ones(6, dtype=BF16)]},
            "per_token_scale of dtype",
        ),
    )
]
PLANTED += [
    ("npu::npu_clipped_swiglu", name, change, rule)
    for name, change, rule in (
        ("integers", lambda a: {"x": a["x"].int()}, "x of dtype"),
        ("rank 1", lambda a: {"x": a["x"][0]}, "rank 2 or more"),
        ("strided", lambda a: {"x": a["x"].t().contiguous().t()}, "x contiguous"),
        ("no rows", lambda a: {"x": a["x"][:0]}, "no empty tensors"),
        ("another axis", lambda a: {"dim": 0}, "the last axis"),
        ("odd width", lambda a: {"x": a["x"][:, :11].contiguous()}, "an even width"),
        ("no limit", lambda a: {"limit": 0.0}, "a limit above 0"),
        ("int32 groups", lambda a: {"group_index": torch.ones(2, dtype=I32)}, "group_index of dtype"),
        ("groups of rank 2", lambda a: {"group_index": torch.ones(1, 2, dtype=I64)}, "group_index of rank 1"),
        ("negative group", lambda a: {"group_index": torch.tensor([3, -1])}, "none negative"),
        ("groups too long", lambda a: {"group_index": torch.tensor([3, 2])}, "groups inside the 4 rows"),
    )
]
PLANTED += [
    ("npu::npu_dequant_swiglu_quant", name, change, rule)
    for name, change, rule in (
        ("rank 3", lambda a: {"x": a["x"].unsqueeze(0)}, "x of shape"),
        ("int64", lambda a: {"x": a["x"].long()}, "x of dtype"),
        ("no rows", lambda a: {"x": a["x"][:0]}, "no empty tensors"),
        ("odd width", lambda a: {"x": a["x"][:, :127].contiguous()}, "an even width"),
        ("odd tiles", lambda a: dequant_call(width=8), "multiple of 64"),
        ("static", lambda a: {"quant_mode": 0}, "quant_mode=1"),
        ("unknown mode", lambda a: {"swiglu_mode": 2}, "swiglu_mode 0 or 1"),
        ("no clamp", lambda a: {"clamp_limit": 0.0}, "clamp_limit above 0"),
        ("a clamp below 0", lambda a: {"clamp_limit": -1.0}, "clamp_limit above 0"),
        ("float codes", lambda a: {"dst_type": 24}, "dst_type int8"),
        ("a bias", lambda a: {"bias": torch.ones(128)}, "bias left out"),
        ("smoothing", lambda a: {"quant_scale": torch.ones(3, 64)}, "quant_scale left out"),
        ("an offset", lambda a: {"quant_offset": torch.ones(3, 64)}, "quant_offset left out"),
        ("a rounding", lambda a: {"round_mode": 1}, "round_mode left out"),
        ("another axis", lambda a: {"activate_dim": 0}, "activate_dim left out"),
        ("no weight scale", lambda a: {"weight_scale": None}, "weight_scale to be given"),
        ("flat weight scale", lambda a: {"weight_scale": torch.ones(128)}, "weight_scale of shape"),
        ("no row scale", lambda a: {"activation_scale": None}, "activation_scale to be given"),
        ("row scale of rank 2", lambda a: {"activation_scale": torch.ones(4, 1)}, "activation_scale of shape"),
        ("weight scale of floats", lambda a: {"x": a["x"].to(BF16), "activation_scale": None}, "weight_scale left out"),
        ("row scale of floats", lambda a: {"x": a["x"].to(BF16), "weight_scale": None}, "activation_scale left out"),
        ("groups too long", lambda a: {"group_index": torch.tensor([3, 2, 0])}, "groups inside the 4 rows"),
    )
]
PLANTED += [
    ("npu::npu_moe_token_unpermute", name, change, rule)
    for name, change, rule in (
        ("padded", lambda a: {"padded_mode": True}, "padded_mode=False"),
        ("a shape", lambda a: {"restore_shape": [3, 6]}, "restore_shape left out"),
        ("integers", lambda a: {"permuted_tokens": a["permuted_tokens"].int()}, "permuted_tokens of dtype"),
        ("rank 3", lambda a: {"permuted_tokens": a["permuted_tokens"].unsqueeze(0)}, "permuted_tokens of rank 2"),
        ("no rows", lambda a: {"permuted_tokens": a["permuted_tokens"][:0]}, "no empty tensors"),
        ("int16 indices", lambda a: {"sorted_indices": a["sorted_indices"].short()}, "sorted_indices of dtype"),
        ("indices of rank 2", lambda a: {"sorted_indices": a["sorted_indices"].view(3, 2)}, "sorted_indices of rank 1"),
        ("a pair that is elsewhere", lambda a: {"sorted_indices": a["sorted_indices"] - 1}, "indices in 0"),
        ("too far", lambda a: {"sorted_indices": a["sorted_indices"] + 1}, "indices in 0"),
        ("float32 weights", lambda a: {"probs": a["probs"].float()}, "probs of dtype"),
        ("flat weights", lambda a: {"probs": a["probs"].flatten()}, "probs of shape"),
        ("weights of other rows", lambda a: {"probs": a["probs"][:2]}, "4 indices"),
    )
]


@pytest.mark.parametrize(("name", "fault", "change", "rule"), PLANTED, ids=[f"{p[0]}-{p[1]}" for p in PLANTED])
def test_every_fault_is_refused(name: str, fault: str, change: Change, rule: str) -> None:
    """A valid call passes; with one fault it is refused by the rule that names it."""
    a = CALLS[name]
    with simulate():
        call(name, a)
        with pytest.raises(SimulatorError, match=rule):
            call(name, a | change(a))


FINALIZE: list[tuple[str, Change, str]] = [
    ("drop mode", lambda a: {"drop_pad_mode": 1}, "drop_pad_mode 0 or 2"),
    ("integers", lambda a: {"expanded_permuted_rows": a["expanded_permuted_rows"].int()}, "rows of dtype"),
    ("rank 3", lambda a: {"expanded_permuted_rows": a["expanded_permuted_rows"].unsqueeze(0)}, "rows of rank 2"),
    ("a bias", lambda a: {"bias": torch.ones(4, 6)}, "bias left out"),
    (
        "experts of rows",
        lambda a: {"export_for_source_row": torch.zeros(3, 2, dtype=I32)},
        "export_for_source_row left out",
    ),
    ("second alone", lambda a: {"skip2": torch.ones(3, 6)}, "skip1 wherever"),
    ("skip of other rows", lambda a: {"skip1": torch.ones(2, 6)}, "skip1 of shape"),
    ("no scales", lambda a: {"scales": None}, "scales to be given"),
    ("scales of another dtype", lambda a: {"scales": a["scales"].bfloat16()}, "scales of dtype"),
    ("flat scales", lambda a: {"scales": a["scales"].flatten()}, "scales of shape"),
    ("int64 index", lambda a: {"expanded_src_to_dst_row": a["expanded_src_to_dst_row"].long()}, "dst_row of dtype"),
    ("short index", lambda a: {"expanded_src_to_dst_row": a["expanded_src_to_dst_row"][:4]}, "dst_row of shape"),
    ("too far", lambda a: {"expanded_src_to_dst_row": a["expanded_src_to_dst_row"] + 1}, "rows in 0"),
]


@pytest.mark.parametrize(("fault", "change", "rule"), FINALIZE, ids=[p[0] for p in FINALIZE])
def test_finalize_refuses_every_fault(fault: str, change: Change, rule: str) -> None:
    """A valid call passes on the A2, with one fault it is refused; other chips have no such operator."""
    a = finalize_call()
    with simulate(chip="a2"):
        torch.ops.npu.npu_moe_finalize_routing(**a)
        with pytest.raises(SimulatorError, match=rule):
            torch.ops.npu.npu_moe_finalize_routing(**a | change(a))
    with simulate(chip="a3"), pytest.raises(SimulatorError, match="the A2"):
        torch.ops.npu.npu_moe_finalize_routing(**a)


def test_operators_without_a_clamp_are_refused() -> None:
    """The plain SwiGLU exists and refuses: the model's clamp would be lost."""
    with simulate(), pytest.raises(SimulatorError, match="another operator"):
        torch.ops.npu.npu_swiglu(torch.ones(2, 4))
