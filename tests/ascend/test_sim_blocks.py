"""Simulated products and activations in MX blocks, and packed rows, against loops; every rule planted."""

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
from torch._subclasses.fake_tensor import FakeTensorMode

BF16, I32, I64, U8 = torch.bfloat16, torch.int32, torch.int64, torch.uint8
FP8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
Arguments = dict[str, Any]
Change = Callable[[Arguments], Arguments]


def draw(seed: int, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Normal numbers that depend on the seed and the shape alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def codes_and_powers(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    """Codes and exponents of rows in blocks of 32: e4m3[...,K], u8[...,C,2]."""
    n_pairs = -(-shape[-1] // 64)
    exponents = torch.randint(124, 131, (*shape[:-1], n_pairs, 2), generator=torch.Generator().manual_seed(seed + 1))
    return draw(seed, *shape).to(FP8), exponents.to(U8)


def product_call(seed: int = 0, k: int = 96) -> Arguments:
    """A valid call of npu_grouped_matmul on MX blocks: 5 rows, of which 4 are somebody's, and 3 experts."""
    x, x_scale = codes_and_powers(seed, 5, k)
    w, w_scale = codes_and_powers(seed + 9, 3, 7, k)
    return {
        "x": [x],
        "weight": [w.transpose(1, 2)],
        "scale": [w_scale.transpose(1, 2)],
        "per_token_scale": [x_scale],
        "group_list": torch.tensor([1, 0, 3]),
        "group_list_type": 1,
        "split_item": 2,
        "group_type": 0,
        "scale_dtype": 293,
        "per_token_scale_dtype": 293,
        "output_dtype": BF16,
    }


@given(seed=st.integers(0, 999), k=st.sampled_from([16, 32, 64, 96, 128]), turned=st.booleans())
@examples(10)
def test_products_in_blocks(seed: int, k: int, turned: bool) -> None:
    """Every code counts with the power of its block of 32, weights turned or not; rows behind the groups are NaN."""
    a = product_call(seed, k)
    if not turned:
        a |= {name: [a[name][0].contiguous()] for name in ("weight", "scale")}
    with simulate(chip="a5"):
        (y,) = torch.ops.npu.npu_grouped_matmul(**a)
    x, w = a["x"][0].double(), a["weight"][0].double()
    for row, expert in ((0, 0), (1, 2), (2, 2), (3, 2)):
        for n in range(7):
            total = 0.0
            for i in range(k):
                power = int(a["per_token_scale"][0][row].flatten()[i // 32]) - 127
                power += int(a["scale"][0][expert, i // 64, n, i // 32 % 2]) - 127
                total += float(x[row, i] * w[expert, i, n]) * 2.0**power
            assert float(y[row, n]) == pytest.approx(total, rel=0.01, abs=0.05)
    assert bool(y[4].isnan().all())


def activation_call(seed: int = 0, width: int = 48) -> Arguments:
    """A valid call of npu_swiglu_group_quant."""
    return {
        "x": draw(seed, 4, 2 * width) * 3,
        "group_index": torch.tensor([1, 2]),
        "dst_type": FP8,
        "quant_mode": 1,
        "block_size": 32,
        "round_scale": True,
        "clamp_limit": 2.0,
    }


@given(
    seed=st.integers(0, 999), mode=st.sampled_from([0, 1]), width=st.sampled_from([16, 48, 130]), clamp=st.booleans()
)
@examples(15)
def test_activations_in_blocks(seed: int, mode: int, width: int, clamp: bool) -> None:
    """The left half gates, both are clamped, and every block has the scale that just holds its largest number."""
    a = activation_call(seed, width) | {"quant_mode": mode, "round_scale": mode == 1, "block_size": 0}
    a |= {"clamp_limit": 2.0 if clamp else None}
    with simulate(chip="a5", strict_sizes=False):
        y, scale, origin = torch.ops.custom.npu_swiglu_group_quant(**a, output_origin=True)
    block = 32 if mode else 128
    for row in range(3):
        for begin in range(0, width, block):
            h = []
            for i in range(begin, min(begin + block, width)):
                gate, up = float(a["x"][row, i]), float(a["x"][row, width + i])
                if clamp:
                    gate, up = min(gate, 2.0), max(-2.0, min(up, 2.0))
                h.append(gate / (1 + math.exp(-gate)) * up)
            least = max(abs(v) for v in h) / 448
            s = float(scale[row].flatten()[begin // block])
            assert s == pytest.approx(2.0 ** math.ceil(math.log2(max(least, 1e-4 / 448))) if mode else least, rel=1e-5)
            got = (y[row, begin : begin + len(h)].float() * s).tolist()
            assert all(abs(g - v) <= abs(v) / 16 + s * 2**-9 for g, v in zip(got, h, strict=True))
    assert scale.dtype is (E8M0 if mode else torch.float32)
    assert bool(y[3].float().isnan().all())
    assert bool(scale[3].float().isnan().all())
    assert bool(origin[:3].isnan().all()) is (mode == 0)


def row_call(seed: int = 0) -> Arguments:
    """A valid call of kv_compress_epilog; rows of 16 channels, 8 of them rotary."""
    return {
        "kv_compress_cache": torch.zeros(8, 128, dtype=U8).view(FP8),
        "x": draw(seed, 3, 16),
        "slot_mapping": torch.tensor([5, -1, 2], dtype=I32),
    }


def test_packed_rows_go_to_their_slots() -> None:
    """A row is written whole, a slot of -1 is skipped, slot 0 is poisoned, and nothing else changes."""
    a = row_call()
    with simulate(chip="a5", strict_sizes=False, rope_width=8):
        torch.ops.custom.kv_compress_epilog(**a)
        raw = a["kv_compress_cache"].view(U8)
        assert [row for row in range(8) if raw[row].any()] == [2, 5]
        same = torch.zeros(8, 1, 128, dtype=U8).view(FP8)
    with simulate(chip="a5", strict_sizes=False, rope_width=8, providers=("vllm-ascend",)):
        options = {"quant_group_size": 64, "quant_mode": 2, "round_scale_flag": True, "layout": 1}
        slots = torch.tensor([5, 0, 2], dtype=I32)
        torch.ops._C_ascend.kv_compress_epilog(same, a["x"], slots, **options)
    assert torch.equal(same.view(U8)[1:, 0], raw[1:])
    assert bool(same[0].float().isnan().all())


CALLS: dict[str, Callable[[], Arguments]] = {
    "npu::npu_grouped_matmul": product_call,
    "custom::npu_swiglu_group_quant": activation_call,
    "custom::kv_compress_epilog": row_call,
}
FAULTS: dict[str, list[tuple[str, Change, str]]] = {
    "npu::npu_grouped_matmul": [
        ("bf16 weight", lambda a: {"weight": [a["weight"][0].to(BF16)]}, "weight of dtype"),
        ("no row scale", lambda a: {"per_token_scale": None}, "scale and per_token_scale"),
        ("no weight scale", lambda a: {"scale": None}, "scale and per_token_scale"),
        ("no dtype of scales", lambda a: {"scale_dtype": None}, "scale_dtype given"),
        ("no dtype of row scales", lambda a: {"per_token_scale_dtype": None}, "per_token_scale_dtype given"),
        ("float scales by name", lambda a: {"scale_dtype": 6}, "scale_dtype of e8m0"),
        ("float scales", lambda a: {"scale": [a["scale"][0].float()]}, "scale of one byte"),
        ("flat scale", lambda a: {"per_token_scale": [a["per_token_scale"][0].flatten(1)]}, "per_token_scale of shape"),
        ("scale by column first", lambda a: {"scale": [a["scale"][0].transpose(1, 2)]}, "scale of shape"),
        ("scale in another order", lambda a: {"scale": [a["scale"][0].contiguous()]}, "the order of the weight"),
        ("no output dtype", lambda a: {"output_dtype": None}, "output_dtype for"),
        ("FP8 output", lambda a: {"output_dtype": FP8}, "output_dtype among"),
        ("counts as sums", lambda a: {"group_list_type": 0}, "running sums that do not fall"),
    ],
    "custom::npu_swiglu_group_quant": [
        ("float32", lambda a: {"x": a["x"].float()}, "x of dtype"),
        ("rank 3", lambda a: {"x": a["x"].unsqueeze(0)}, "x of shape"),
        ("no rows", lambda a: {"x": a["x"][:0]}, "no empty tensors"),
        ("odd width", lambda a: {"x": a["x"][:, :95].contiguous()}, "a width that is a multiple"),
        ("strided", lambda a: {"x": a["x"].t().contiguous().t()}, "x contiguous"),
        ("weights of rows", lambda a: {"weight": torch.ones(4)}, "weight left out"),
        ("e5m2", lambda a: {"dst_type": torch.float8_e5m2}, "dst_type e4m3"),
        ("unknown mode", lambda a: {"quant_mode": 2}, "quant_mode 0 or 1"),
        ("blocks of the other mode", lambda a: {"block_size": 128}, "block_size 0 or 32"),
        ("scales not rounded", lambda a: {"round_scale": False}, "round_scale=True"),
        ("a limit below 0", lambda a: {"clamp_limit": -1.0}, "no clamp_limit, or one of 0"),
        ("int32 groups", lambda a: {"group_index": a["group_index"].int()}, "group_index of dtype"),
        ("groups too long", lambda a: {"group_index": torch.tensor([3, 2])}, "groups inside the 4 rows"),
    ],
    "custom::kv_compress_epilog": [
        ("float16", lambda a: {"x": a["x"].half()}, "x of dtype"),
        ("rank 3", lambda a: {"x": a["x"].unsqueeze(1)}, "x of shape"),
        ("no rows", lambda a: {"x": a["x"][:0], "slot_mapping": a["slot_mapping"][:0]}, "no empty tensors"),
        ("bytes", lambda a: {"kv_compress_cache": a["kv_compress_cache"].view(U8)}, "cache of dtype"),
        ("pages", lambda a: {"kv_compress_cache": a["kv_compress_cache"].view(2, 4, 1, 128)}, "rows of 128 bytes"),
        ("other rows", lambda a: {"kv_compress_cache": a["kv_compress_cache"].view(16, 64)}, "rows of 128 bytes"),
        ("int64 slots", lambda a: {"slot_mapping": a["slot_mapping"].long()}, "slot_mapping of dtype"),
        ("slots of other rows", lambda a: {"slot_mapping": a["slot_mapping"][:2]}, "slot_mapping of shape"),
        ("too far", lambda a: {"slot_mapping": a["slot_mapping"] + 3}, "slots in -1"),
        ("below the sentinel", lambda a: {"slot_mapping": a["slot_mapping"] - 1}, "slots in -1"),
        ("two writers", lambda a: {"slot_mapping": a["slot_mapping"] * 0 + 3}, "one writer per slot"),
        ("other groups", lambda a: {"quant_group_size": 128}, "quant_group_size=64"),
        ("float scales", lambda a: {"quant_mode": 1}, "quant_mode=2"),
        ("scales not rounded", lambda a: {"round_scale_flag": False}, "round_scale_flag=True"),
        ("a factor", lambda a: {"scale": 2.0}, "scale=1.0"),
    ],
}
PLANTED = [(name, *fault) for name, faults in FAULTS.items() for fault in faults]


def call(name: str, arguments: Arguments) -> Any:
    """Call an operator by its qualified name."""
    namespace, operator = name.split("::")
    return getattr(getattr(torch.ops, namespace), operator)(**arguments)


@pytest.mark.parametrize(("name", "fault", "change", "rule"), PLANTED, ids=[f"{p[0]}-{p[1]}" for p in PLANTED])
def test_every_fault_is_refused(name: str, fault: str, change: Change, rule: str) -> None:
    """A valid call passes; with one fault it is refused by the rule that names it."""
    with simulate(chip="a5", strict_sizes=False, rope_width=8):
        call(name, CALLS[name]())
        a = CALLS[name]()
        with pytest.raises(SimulatorError, match=rule):
            call(name, a | change(a))


def test_blocks_are_for_the_a5() -> None:
    """Other chips multiply no FP8 codes and lack the activation that makes them."""
    with simulate(strict_sizes=False):
        with pytest.raises(SimulatorError, match="x of dtype"):
            torch.ops.npu.npu_grouped_matmul(**product_call())
        assert not hasattr(torch.ops.custom, "npu_swiglu_group_quant")


def test_documented_widths_are_required_unless_relaxed() -> None:
    """Activations in blocks take widths that are a multiple of 256."""
    with simulate(chip="a5"):
        torch.ops.custom.npu_swiglu_group_quant(**activation_call(width=128))
        with pytest.raises(SimulatorError, match="a multiple of 256"):
            torch.ops.custom.npu_swiglu_group_quant(**activation_call())


@pytest.mark.parametrize("mode", [0, 1])
def test_shapes_are_known_without_values(mode: int) -> None:
    """Under fake tensors products and activations in blocks give shape and dtype of their real results."""

    def run(convert: Callable[[Tensor], Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        a = activation_call() | {"quant_mode": mode, "round_scale": mode == 1, "block_size": 0}
        p = product_call()
        a = {k: convert(v) if isinstance(v, Tensor) else v for k, v in a.items()}
        p = {k: [convert(x) for x in v] if isinstance(v, list) else v for k, v in p.items()}
        p["group_list"] = convert(p["group_list"])
        found = [*torch.ops.custom.npu_swiglu_group_quant(**a), *torch.ops.npu.npu_grouped_matmul(**p)]
        return [(tuple(x.shape), x.dtype) for x in found]

    with simulate(chip="a5", strict_sizes=False):
        real = run(lambda x: x)
        with FakeTensorMode() as fake:
            assert run(fake.from_tensor) == real
