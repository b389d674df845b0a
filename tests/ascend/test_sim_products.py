"""Simulated products, formats, A5 blocks and the filter before sampling against loops; every rule planted."""

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
from torch import Tensor

BF16, I8, I32, FP8 = torch.bfloat16, torch.int8, torch.int32, torch.float8_e4m3fn
Arguments = dict[str, Any]
Change = Callable[[Arguments], Arguments]


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers that depend on the seed and the shape alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(seed: int, low: int, high: int, *shape: int) -> Tensor:
    """Whole numbers that depend on the seed and the shape alone."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def call(name: str, arguments: Arguments) -> Any:
    """Call an operator by keywords."""
    namespace, operator = name.split("::")
    return getattr(getattr(torch.ops, namespace), operator)(**arguments)


def quant_call(seed: int = 0) -> Arguments:
    """A valid call of npu_quant_matmul."""
    return {
        "x1": whole(seed, -127, 128, 3, 4).to(I8),
        "x2": whole(seed + 1, -127, 128, 4, 5).to(I8),
        "scale": draw(seed + 2, 5).abs() / 99,
        "pertoken_scale": draw(seed + 3, 3).abs() / 99,
        "output_dtype": BF16,
    }


@given(
    seed=st.integers(0, 999),
    bias=st.sampled_from([None, I32, torch.float32, BF16]),
    per_token=st.booleans(),
    turned=st.booleans(),
)
@examples(25)
def test_quantised_product(seed: int, bias: torch.dtype | None, per_token: bool, turned: bool) -> None:
    """``(x1 . x2 + whole bias) * scale[n] * pertoken[m] + float bias``, element by element."""
    a = quant_call(seed)
    a["pertoken_scale"] = a["pertoken_scale"] if per_token else None
    a["bias"] = None if bias is None else (draw(seed + 4, 5) * 9).to(bias)
    x2 = a["x2"]
    a["x2"] = x2.t().contiguous().t() if turned else x2
    with simulate():
        out = torch.ops.npu.npu_quant_matmul(**a)
    for m in range(3):
        for n in range(5):
            y = sum(int(a["x1"][m, k]) * int(x2[k, n]) for k in range(4))
            y += int(a["bias"][n]) if bias is I32 else 0
            value = y * float(a["scale"][n]) * (float(a["pertoken_scale"][m]) if per_token else 1.0)
            value += float(a["bias"][n]) if bias not in (None, I32) else 0.0
            assert float(out[m, n]) == pytest.approx(value, rel=0.01, abs=1e-2)


def turning_call(seed: int = 0, m: int = 3, n: int = 16) -> Arguments:
    """A valid call of npu_transpose_batchmatmul as the grouped output projection needs it."""
    return {
        "input": draw(seed, m, 2, 16, dtype=BF16),
        "weight": draw(seed + 1, 2, 16, n, dtype=BF16),
        "perm_x1": (1, 0, 2),
        "perm_x2": (0, 1, 2),
        "perm_y": (1, 0, 2),
        "batch_split_factor": 1,
    }


@given(seed=st.integers(0, 999), m=st.integers(1, 4), lead=st.booleans(), turned=st.booleans())
@examples(15)
def test_group_product_keeps_rows_first(seed: int, m: int, lead: bool, turned: bool) -> None:
    """Row m, group g of the result is row m, group g of the input times group g of the weight."""
    a = turning_call(seed, m)
    given_call = dict(a)
    if lead:
        given_call |= {"input": a["input"].transpose(0, 1).contiguous(), "perm_x1": (0, 1, 2)}
    if turned:
        given_call |= {"weight": a["weight"].transpose(1, 2).contiguous(), "perm_x2": (0, 2, 1)}
    with simulate():
        out = torch.ops.npu.npu_transpose_batchmatmul(**given_call)
    assert out.is_contiguous()
    for row in range(m):
        for g in range(2):
            y = sum(float(a["input"][row, g, k]) * a["weight"][g, k].double() for k in range(16))
            torch.testing.assert_close(out[row, g].double(), y, atol=0.05, rtol=0.01)


@given(seed=st.integers(0, 999), rows=st.integers(1, 3), width=st.sampled_from([64, 128, 200]), zero=st.booleans())
@examples(15)
def test_blocks_have_a_scale_each(seed: int, rows: int, width: int, zero: bool) -> None:
    """Every 128 numbers of a row share the scale that takes their largest to 448."""
    x = draw(seed, rows, width, dtype=BF16) * (0 if zero else 1)
    with simulate(chip="a5"):
        codes, scale = torch.ops.npu.npu_dynamic_block_quant(x, dst_type=292)
    assert scale.shape == (rows, -(-width // 128))
    for r in range(rows):
        for begin in range(0, width, 128):
            block, s = x[r, begin : begin + 128].float(), float(scale[r, begin // 128])
            assert s == pytest.approx(float(block.abs().max()) / 448)
            got = codes[r, begin : begin + 128].float() * s
            assert bool(((got - block).abs() <= block.abs() / 16 + s * 2**-10).all())


@given(seed=st.integers(0, 999), width=st.sampled_from([32, 64, 96, 130]), zero=st.booleans())
@examples(15)
def test_mx_blocks_share_an_exponent(seed: int, width: int, zero: bool) -> None:
    """Every 32 numbers share the power of two that puts their largest below 512; odd block counts are filled."""
    x = draw(seed, 2, width, dtype=BF16) * (0 if zero else 3)
    with simulate(chip="a5"):
        codes, shared = torch.ops.npu.npu_dynamic_mx_quant(x, dst_type=292)
    n_blocks = -(-width // 32)
    assert shared.shape == (2, -(-n_blocks // 2), 2)
    for r in range(2):
        for b in range(n_blocks):
            block = x[r, 32 * b : 32 * b + 32].float()
            largest = float(block.abs().max())
            exponent = math.floor(math.log2(largest)) - 8 if largest else -127
            assert int(shared[r].flatten()[b]) == exponent + 127
            got = codes[r, 32 * b : 32 * b + 32].float() * 2.0**exponent
            allowed = block.abs() / 16 + 2.0 ** (exponent - 10)
            saturated = block.abs() > 448 * 2.0**exponent
            assert bool((((got - block).abs() <= allowed) | saturated).all())
            assert bool((got.abs()[saturated] == 448 * 2.0**exponent).all())


def mx_call(seed: int = 0, turned: bool = False) -> Arguments:
    """A valid call of npu_transpose_quant_batchmatmul; needs the simulator of the A5."""
    x, w = draw(seed, 3, 2, 64, dtype=BF16), draw(seed + 1, 2, 5, 64, dtype=BF16)
    codes, x_scale = torch.ops.npu.npu_dynamic_mx_quant(x, dst_type=292)
    w_codes, w_scale = torch.ops.npu.npu_dynamic_mx_quant(w, dst_type=292)
    return {
        "x1": codes,
        "x2": w_codes if turned else w_codes.transpose(1, 2).contiguous(),
        "dtype": BF16,
        "x1_scale": x_scale,
        "x2_scale": w_scale if turned else w_scale.transpose(1, 2).contiguous(),
        "group_sizes": (0, 0, 32),
        "perm_x1": (1, 0, 2),
        "perm_x2": (0, 2, 1) if turned else (0, 1, 2),
        "perm_y": (1, 0, 2),
    }


@given(seed=st.integers(0, 999), turned=st.booleans())
@examples(10)
def test_group_product_of_mx_blocks(seed: int, turned: bool) -> None:
    """The product of what the codes and exponents stand for, near the product of the originals."""
    x, w = draw(seed, 3, 2, 64, dtype=BF16), draw(seed + 1, 2, 5, 64, dtype=BF16)
    with simulate(chip="a5"):
        a = mx_call(seed, turned)
        out = torch.ops.npu.npu_transpose_quant_batchmatmul(**a)
        e8m0 = {"x1_scale": a["x1_scale"].view(torch.float8_e8m0fnu)}
        assert torch.equal(out, torch.ops.npu.npu_transpose_quant_batchmatmul(**a | e8m0))
    codes = a["x2"] if turned else a["x2"].transpose(1, 2)
    scales = a["x2_scale"] if turned else a["x2_scale"].transpose(1, 2)
    for m in range(3):
        for g in range(2):
            for n in range(5):
                y = sum(
                    float(a["x1"][m, g, k]) * 2.0 ** (int(a["x1_scale"][m, g].flatten()[k // 32]) - 127)
                    * float(codes[g, n, k]) * 2.0 ** (int(scales[g, n].flatten()[k // 32]) - 127)
                    for k in range(64)
                )  # fmt: skip
                assert float(out[m, g, n]) == pytest.approx(y, rel=0.01, abs=1e-2)
                assert y == pytest.approx(float(x[m, g].double() @ w[g, n].double()), abs=2.5)


def index_call(seed: int = 0) -> Arguments:
    """A valid call of indexer_compress_epilog."""
    return {
        "indexer_compress_cache": torch.zeros(32, 16).to(FP8),
        "indexer_compress_scale": torch.zeros(32, 1),
        "x": draw(seed, 3, 16, dtype=BF16),
        "slot_mapping": torch.tensor([5, 0, 31], dtype=I32),
    }


@given(seed=st.integers(0, 999), rounded=st.booleans())
@examples(15)
def test_index_keys_are_written_with_their_scale(seed: int, rounded: bool) -> None:
    """A key is its codes times its scale, never rounded in this mode; slot 0 is poisoned; nothing else changes."""
    a = index_call(seed)
    with simulate(chip="a5", strict_sizes=False):
        assert torch.ops.custom.indexer_compress_epilog(**a, round_scale=rounded) is None
    codes = a["indexer_compress_cache"].view(-1, 16).float()
    scales = a["indexer_compress_scale"].flatten()
    for row, slot in ((0, 5), (2, 31)):
        x, s = a["x"][row].float(), float(scales[slot])
        assert s == pytest.approx(float(x.abs().max()) / 448)
        assert bool(((codes[slot] * s - x).abs() <= x.abs() / 16 + s * 2**-10).all())
    assert bool(codes[0].isnan().all())
    assert scales[0].isnan()
    others = [slot for slot in range(32) if slot not in (0, 5, 31)]
    assert not codes[others].any()
    assert not scales[others].any()


def filter_call(seed: int = 0, rows: int = 3, width: int = 7) -> Arguments:
    """A valid call of npu_top_k_top_p."""
    return {
        "logits": draw(seed, rows, width) * 2,
        "p": torch.rand(rows, generator=torch.Generator().manual_seed(seed)),
        "k": whole(seed, 1, width + 1, rows).to(I32),
    }


@given(seed=st.integers(0, 999), rows=st.integers(1, 3), use=st.sampled_from(["p", "k", "pk"]), tied=st.booleans())
@examples(30)
def test_filter_keeps_the_likeliest_in_place(seed: int, rows: int, use: str, tied: bool) -> None:
    """The k largest, ties with the last included; of those, from the smallest up, what lies above 1 - p."""
    a = filter_call(seed, rows)
    a["logits"] = a["logits"].round() if tied else a["logits"]
    a |= {name: None for name in ("p", "k") if name not in use}
    with simulate():
        out = torch.ops.npu.npu_top_k_top_p(a["logits"], a["p"], a["k"])
    for r in range(rows):
        row = a["logits"][r].tolist()
        least = sorted(row)[-int(a["k"][r])] if "k" in use else -math.inf
        kept = sorted((v, i) for i, v in enumerate(row) if v >= least)
        if "p" in use:
            total = sum(math.exp(v) for v, _ in kept)
            running, survivors = 0.0, []
            for v, i in kept:
                running += math.exp(v) / total
                assert abs(running - (1 - float(a["p"][r]))) > 1e-6 or running == 0.0
                if running > 1 - float(a["p"][r]):
                    survivors.append((v, i))
            kept = survivors or kept[-1:]
        expected = [-math.inf] * len(row)
        for v, i in kept:
            expected[i] = v
        assert out[r].tolist() == expected


def test_swapped_p_and_k_are_refused() -> None:
    """The order is logits, p, k: the other way round is an error, not another distribution."""
    a = filter_call()
    with simulate(), pytest.raises(SimulatorError, match="k of dtype"):
        torch.ops.npu.npu_top_k_top_p(a["logits"], a["k"], a["p"])


def cast_call() -> Arguments:
    """A valid call of npu_format_cast to FRACTAL_NZ."""
    return {"input": draw(0, 2, 16, 32, dtype=BF16), "acl_format": 29}


def test_format_cast_keeps_values() -> None:
    """Another memory format has the same logical values, in memory of its own."""
    a = cast_call()
    with simulate():
        out = torch.ops.npu.npu_format_cast(**a)
        assert torch.equal(out, a["input"])
        assert out.data_ptr() != a["input"].data_ptr()
        narrow = a["input"][..., :16].contiguous()
        torch.ops.npu.npu_format_cast(narrow, 29)
        torch.ops.npu.npu_format_cast(narrow[..., :5].contiguous(), 2)
        with pytest.raises(SimulatorError, match="multiples of 16 and 32"):
            torch.ops.npu.npu_format_cast(narrow.to(I8), 29)


CALLS: dict[str, Callable[[], Arguments]] = {
    "npu::npu_quant_matmul": quant_call,
    "npu::npu_transpose_batchmatmul": turning_call,
    "npu::npu_format_cast": cast_call,
    "npu::npu_top_k_top_p": filter_call,
    "npu::npu_dynamic_block_quant": lambda: {"x": draw(0, 2, 130, dtype=BF16), "dst_type": 292},
    "npu::npu_dynamic_mx_quant": lambda: {"input": draw(0, 2, 64, dtype=BF16), "dst_type": 292},
    "npu::npu_transpose_quant_batchmatmul": mx_call,
    "custom::indexer_compress_epilog": index_call,
}


def strided(x: Tensor) -> Tensor:
    """Give the same values in another layout."""
    return x.repeat_interleave(2, -1)[..., ::2]


FAULTS: dict[str, list[tuple[str, Change, str]]] = {
    "npu::npu_quant_matmul": [
        ("bf16 rows", lambda a: {"x1": a["x1"].to(BF16)}, "x1 of dtype"),
        ("bf16 weight", lambda a: {"x2": a["x2"].to(BF16)}, "x2 of dtype"),
        ("rank 3", lambda a: {"x1": a["x1"].unsqueeze(0)}, "x1 .M,K. and x2"),
        ("weight turned", lambda a: {"x2": a["x2"].t()}, "x2 with 4 rows"),
        ("strided rows", lambda a: {"x1": strided(a["x1"])}, "x1 contiguous"),
        ("no rows", lambda a: {"x1": a["x1"][:0]}, "no empty tensors"),
        ("scale of other columns", lambda a: {"scale": a["scale"][:1]}, "scale of shape"),
        ("f16 scale", lambda a: {"scale": a["scale"].half()}, "scale of dtype"),
        ("row scale of rank 2", lambda a: {"pertoken_scale": a["pertoken_scale"][:, None]}, "pertoken_scale of shape"),
        ("bf16 row scale", lambda a: {"pertoken_scale": a["pertoken_scale"].to(BF16)}, "pertoken_scale of dtype"),
        ("no output dtype", lambda a: {"output_dtype": None}, "output_dtype bf16"),
        ("float32 output", lambda a: {"output_dtype": torch.float32}, "output_dtype bf16"),
        ("unknown output", lambda a: {"output_dtype": 999}, "number of a known dtype"),
        ("bias of other columns", lambda a: {"bias": torch.ones(4)}, "bias of shape"),
        ("whole bias of other columns", lambda a: {"bias": torch.ones(4, dtype=I32)}, "bias of shape"),
        ("int8 bias", lambda a: {"bias": torch.ones(5, dtype=I8)}, "bias of dtype"),
        ("an offset", lambda a: {"offset": torch.ones(5)}, "offset left out"),
        ("another dtype of x1", lambda a: {"x1_dtype": 1}, "x1_dtype left out"),
        ("another dtype of x2", lambda a: {"x2_dtype": 1}, "x2_dtype left out"),
        ("group sizes", lambda a: {"group_sizes": [0, 0, 32]}, "group_sizes left out"),
        ("scale of y", lambda a: {"y_scale": torch.ones(1)}, "y_scale left out"),
    ],
    "npu::npu_transpose_batchmatmul": [
        ("float32", lambda a: {"input": a["input"].float()}, "input of dtype"),
        ("mixed", lambda a: {"weight": a["weight"].half()}, "weight of dtype"),
        ("rank 2", lambda a: {"input": a["input"][:, 0].contiguous()}, "two tensors of rank 3"),
        ("strided", lambda a: {"input": strided(a["input"])}, "input contiguous"),
        ("strided weight", lambda a: {"weight": a["weight"].transpose(1, 2)}, "weight contiguous"),
        ("no rows", lambda a: {"input": a["input"][:0]}, "no empty tensors"),
        ("unknown order of input", lambda a: {"perm_x1": (2, 1, 0)}, "perm_x1"),
        ("unknown order of weight", lambda a: {"perm_x2": (1, 0, 2)}, "perm_x2"),
        ("groups first", lambda a: {"perm_y": (0, 1, 2)}, "perm_y"),
        ("default order of y", lambda a: {"perm_y": None}, "perm_y"),
        ("default order of input", lambda a: {"perm_x1": None}, "matching"),
        ("split", lambda a: {"batch_split_factor": 2}, "batch_split_factor=1"),
        ("a bias", lambda a: {"bias": torch.ones(2, 16)}, "bias left out"),
        ("a scale", lambda a: {"scale": torch.ones(2, 16)}, "scale left out"),
        ("odd columns", lambda a: {"weight": a["weight"][..., :8].contiguous()}, "multiples of 16"),
        (
            "odd inner width",
            lambda a: {"input": a["input"][..., :8].contiguous(), "weight": a["weight"][:, :8].contiguous()},
            "multiples of 16",
        ),
    ],
    "npu::npu_format_cast": [
        ("unknown format", lambda a: {"acl_format": 3}, "format 2 .ND. or 29"),
        ("odd side", lambda a: {"input": a["input"][:, :8].contiguous()}, "multiples of 16"),
        ("odd last side", lambda a: {"input": a["input"][..., :8].contiguous()}, "multiples of 16"),
        ("custom dtype", lambda a: {"customize_dtype": 1}, "customize_dtype left out"),
        ("input dtype", lambda a: {"input_dtype": 1}, "input_dtype left out"),
        ("strided", lambda a: {"input": strided(a["input"])}, "input contiguous"),
    ],
    "npu::npu_top_k_top_p": [
        ("integers", lambda a: {"logits": a["logits"].int()}, "logits of dtype"),
        ("rank 1", lambda a: {"logits": a["logits"][0]}, "logits of shape"),
        ("no rows", lambda a: {"logits": a["logits"][:0]}, "no empty tensors"),
        ("neither", lambda a: {"p": None, "k": None}, "p or k"),
        ("int64 k", lambda a: {"k": a["k"].long()}, "k of dtype"),
        ("one k", lambda a: {"k": a["k"][:1]}, "k of shape"),
        ("k of 0", lambda a: {"k": a["k"] * 0}, r"k in 1\.\.7"),
        ("k above the vocabulary", lambda a: {"k": a["k"] + 7}, r"k in 1\.\.7"),
        (
            "k above 1024",
            lambda a: {"logits": torch.zeros(3, 2000), "k": a["k"] * 0 + 1025},
            r"k in 1\.\.1024",
        ),
        ("bf16 p", lambda a: {"p": a["p"].to(BF16)}, "p of dtype"),
        ("one p", lambda a: {"p": a["p"][:1]}, "p of shape"),
        ("p above 1", lambda a: {"p": a["p"] + 1}, r"p in 0\.\.1"),
        ("p below 0", lambda a: {"p": a["p"] - 1}, r"p in 0\.\.1"),
    ],
    "npu::npu_dynamic_block_quant": [
        ("float32", lambda a: {"x": a["x"].float()}, "x of dtype"),
        ("rank 1", lambda a: {"x": a["x"][0]}, "rank 2 or 3"),
        ("strided", lambda a: {"x": strided(a["x"])}, "x contiguous"),
        ("no rows", lambda a: {"x": a["x"][:0]}, "no empty tensors"),
        ("default dtype", lambda a: {"dst_type": 1}, "dst_type e4m3"),
        ("blocks of rows", lambda a: {"row_block_size": 128}, "row_block_size=1"),
        ("other blocks", lambda a: {"col_block_size": 64}, "col_block_size=128"),
        ("rounding", lambda a: {"round_mode": "floor"}, "round_mode='rint'"),
        ("another maximum", lambda a: {"dst_type_max": 240.0}, "dst_type_max=0.0"),
        ("negative least scale", lambda a: {"min_scale": -1.0}, "min_scale of 0 or more"),
    ],
    "npu::npu_dynamic_mx_quant": [
        ("integers", lambda a: {"input": a["input"].int()}, "input of dtype"),
        ("strided", lambda a: {"input": strided(a["input"])}, "input contiguous"),
        ("no rows", lambda a: {"input": a["input"][:0]}, "no empty tensors"),
        ("another axis", lambda a: {"axis": 0}, "the last axis"),
        ("default dtype", lambda a: {"dst_type": 296}, "number of a known dtype"),
        ("e5m2", lambda a: {"dst_type": 291}, "dst_type e4m3"),
        ("other blocks", lambda a: {"block_size": 64}, "block_size=32"),
        ("another rule", lambda a: {"scale_alg": 1}, "scale_alg=0"),
        ("rounding", lambda a: {"round_mode": "floor"}, "round_mode='rint'"),
        ("another maximum", lambda a: {"dst_type_max": 6.0}, "dst_type_max=0.0"),
        ("a lower bound", lambda a: {"max_low_bound": 1.0}, "max_low_bound=0.0"),
    ],
    "npu::npu_transpose_quant_batchmatmul": [
        ("bf16", lambda a: {"x1": a["x1"].to(BF16)}, "x1 of dtype"),
        ("bf16 weight", lambda a: {"x2": a["x2"].to(BF16)}, "x2 of dtype"),
        ("rank 2", lambda a: {"x1": a["x1"][:, 0].contiguous()}, "two tensors of rank 3"),
        ("weight turned", lambda a: {"perm_x2": (0, 2, 1)}, "x2 of shape"),
        ("unknown order of weight", lambda a: {"perm_x2": (1, 0, 2)}, "perm_x2"),
        ("default order", lambda a: {"perm_x1": None}, "perm_x1"),
        ("groups first", lambda a: {"perm_y": (0, 1, 2)}, "perm_y"),
        ("split", lambda a: {"batch_split_factor": 2}, "batch_split_factor=1"),
        ("no blocks", lambda a: {"group_sizes": None}, "group_sizes"),
        ("other blocks", lambda a: {"group_sizes": (0, 0, 128)}, "group_sizes"),
        ("blocks of rows", lambda a: {"group_sizes": (32, 0, 32)}, "group_sizes"),
        ("float32 output", lambda a: {"dtype": torch.float32}, "dtype bf16 or f16"),
        ("no scale", lambda a: {"x1_scale": None}, "x1_scale to be given"),
        ("float scale", lambda a: {"x1_scale": a["x1_scale"].float()}, "x1_scale of dtype"),
        ("flat scale", lambda a: {"x1_scale": a["x1_scale"].flatten(-2)}, "x1_scale of shape"),
        ("weight scale turned", lambda a: {"x2_scale": a["x2_scale"].transpose(1, 2).contiguous()}, "x2_scale of sh"),
        ("a bias", lambda a: {"bias": torch.ones(5)}, "bias left out"),
        ("another dtype", lambda a: {"x1_dtype": 24}, "x1_dtype left out"),
        ("another weight dtype", lambda a: {"x2_dtype": 24}, "x2_dtype left out"),
        (
            "odd inner width",
            lambda a: {"x1": a["x1"][..., :32].contiguous(), "x2": a["x2"][:, :32].contiguous()},
            "K a multiple of 64",
        ),
    ],
    "custom::indexer_compress_epilog": [
        ("float32", lambda a: {"x": a["x"].float()}, "x of dtype"),
        ("rank 3", lambda a: {"x": a["x"].unsqueeze(1)}, "x of shape"),
        ("no rows", lambda a: {"x": a["x"][:0], "slot_mapping": a["slot_mapping"][:0]}, "no empty tensors"),
        ("strided", lambda a: {"x": strided(a["x"])}, "x contiguous"),
        ("another mode", lambda a: {"quant_mode": 2}, "quant_mode=1"),
        ("a factor", lambda a: {"scale": 2.0}, "scale=1.0"),
        ("int8 cache", lambda a: {"indexer_compress_cache": a["indexer_compress_cache"].view(I8)}, "cache of dtype"),
        ("f16 scales", lambda a: {"indexer_compress_scale": a["indexer_compress_scale"].half()}, "scale of dtype"),
        ("other width", lambda a: {"x": a["x"][:, :8].contiguous()}, "rows of 8 bytes"),
        ("scales of another cache", lambda a: {"indexer_compress_scale": torch.zeros(16, 1)}, "scale of shape"),
        ("int64 slots", lambda a: {"slot_mapping": a["slot_mapping"].long()}, "slot_mapping of dtype"),
        ("slots of other rows", lambda a: {"slot_mapping": a["slot_mapping"][:2]}, "slot_mapping of shape"),
        ("below the sentinel", lambda a: {"slot_mapping": a["slot_mapping"] - 2}, "slots in -1"),
        ("too far", lambda a: {"slot_mapping": a["slot_mapping"] + 1}, "slots in -1"),
        ("two writers", lambda a: {"slot_mapping": a["slot_mapping"] * 0 + 4}, "one writer per slot"),
    ],
}
PLANTED = [(name, *fault) for name, faults in FAULTS.items() for fault in faults]


@pytest.mark.parametrize(("name", "fault", "change", "rule"), PLANTED, ids=[f"{p[0]}-{p[1]}" for p in PLANTED])
def test_every_fault_is_refused(name: str, fault: str, change: Change, rule: str) -> None:
    """A valid call passes; with one fault it is refused by the rule that names it."""
    on_a5 = name.startswith(("npu::npu_dynamic_", "npu::npu_transpose_quant", "custom::indexer"))
    with simulate(chip="a5" if on_a5 else "a3", strict_sizes=False):
        a = CALLS[name]()
        call(name, a)
        a = CALLS[name]()
        with pytest.raises(SimulatorError, match=rule):
            call(name, a | change(a))


def test_index_keys_have_a_documented_width() -> None:
    """The A5 writes index keys of 128 channels only, unless sizes are relaxed."""
    with simulate(chip="a5"), pytest.raises(SimulatorError, match="row width"):
        torch.ops.custom.indexer_compress_epilog(**index_call())
