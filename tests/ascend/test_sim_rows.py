"""Simulated mHC, norm, rotary, scatter and row quantisation against slow second formulations; every rule planted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import oracle.ops as plain
import pytest
import torch
from ascend_sim.rules import SimulatorError
from ascend_sim.simulator import simulate
from ascend_sim.streams import truncate_hf32
from hypothesis import given
from hypothesis import strategies as st
from kit.steps import examples
from purestep.ops import norms, rotary, streams
from torch import Tensor

BF16 = torch.bfloat16
Arguments = dict[str, Any]


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers that depend on the seed and the shape alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def small() -> Any:
    """A machine for small models."""
    return simulate(heads=4, strict_sizes=False)


def call(name: str, arguments: Arguments) -> Any:
    """Call an operator by keywords."""
    namespace, operator = name.split("::")
    return getattr(getattr(torch.ops, namespace), operator)(**arguments)


def hc_pre(seed: int = 0, rows: int = 3, width: int = 32) -> Arguments:
    """A valid call of npu_hc_pre."""
    return {
        "x": draw(seed, rows, 4, width, dtype=BF16),
        "hc_fn": draw(seed + 1, 24, 4 * width) / width**0.5,
        "hc_scale": draw(seed + 2, 3),
        "hc_base": draw(seed + 3, 24),
    }


@given(seed=st.integers(0, 999), rows=st.integers(1, 20), width=st.sampled_from([16, 64]))
@examples(15)
def test_hc_pre_is_the_formula_on_truncated_factors(seed: int, rows: int, width: int) -> None:
    """With HF32 factors the three mixes are those of the plain model, in float64 loops."""
    a = hc_pre(seed, rows, width)
    with small():
        y, post, comb = torch.ops.custom.npu_hc_pre(**a, hc_sinkhorn_iters=7, norm_eps=1e-5, hc_eps=1e-4)
    fn = (a["hc_fn"].numpy().view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    s, b = a["hc_scale"].double().numpy(), a["hc_base"].double().numpy()
    for t in range(rows):
        streams_t = a["x"][t].double().numpy()
        flat = streams_t.reshape(-1)
        z = fn @ flat / math.sqrt((flat * flat).mean() + 1e-5)
        pre = 1 / (1 + np.exp(-(z[:4] * s[0] + b[:4]))) + 1e-4
        np.testing.assert_allclose(post[t], 2 / (1 + np.exp(-(z[4:8] * s[1] + b[4:8]))), atol=2e-6)
        mixing = plain.sinkhorn(torch.tensor(z[8:] * s[2] + b[8:]).view(4, 4), 7, 1e-4)
        np.testing.assert_allclose(comb[t], mixing, atol=2e-6)
        np.testing.assert_allclose(y[t].float(), pre @ streams_t, atol=0.03, rtol=0.01)


def test_hc_pre_differs_from_full_precision_only_by_truncation() -> None:
    """The reference operator, given truncated weights, gives the same; given the full ones, it does not."""
    a = hc_pre(5, 9, 64)
    with small():
        _, post, comb = torch.ops.custom.npu_hc_pre(**a)
    options = {"n_iters": 20, "eps": 1e-6, "norm_eps": 1e-6}
    args = (a["hc_base"], a["hc_scale"])
    _, post_ref, comb_ref = streams.mix_weights(a["x"], truncate_hf32(a["hc_fn"]), *args, **options)
    torch.testing.assert_close(post, post_ref, atol=2e-6, rtol=0)
    torch.testing.assert_close(comb, comb_ref, atol=2e-6, rtol=0)
    _, post_full, _ = streams.mix_weights(a["x"], a["hc_fn"], *args, **options)
    assert 1e-6 < (post - post_full).abs().max() < 4e-3


def test_truncation_goes_towards_zero_and_keeps_ten_bits() -> None:
    """HF32 keeps sign and ten mantissa bits; every bfloat16 number survives."""
    x = draw(0, 1000)
    short = truncate_hf32(x)
    assert (short.abs() <= x.abs()).all()
    assert ((x - short).abs() <= x.abs() * 2**-10).all()
    assert (torch.frexp(short).mantissa * 2**11 % 1 == 0).all()
    assert torch.equal(truncate_hf32(x.bfloat16()), x.bfloat16().float())


def hc_post(seed: int = 0, rows: int = 3, width: int = 32) -> Arguments:
    """A valid call of npu_hc_post on the A3."""
    return {
        "x": draw(seed, rows, width, dtype=BF16),
        "residual": draw(seed + 1, rows, 4, width, dtype=BF16),
        "post": draw(seed + 2, rows, 4),
        "comb": draw(seed + 3, rows, 4, 4),
    }


@given(seed=st.integers(0, 999), rows=st.integers(1, 5))
@examples(10)
def test_hc_post_sums_over_the_first_index(seed: int, rows: int) -> None:
    """Stream i takes ``comb[j, i]`` of stream j; the reference operator agrees; a batch axis changes nothing."""
    a = hc_post(seed, rows)
    with small():
        out = torch.ops.custom.npu_hc_post(**a)
        batched = torch.ops.custom.npu_hc_post(**{k: v.unsqueeze(0) for k, v in a.items()})
    assert torch.equal(out, batched[0])
    for t in range(rows):
        for i in range(4):
            y = a["post"][t, i] * a["x"][t].float()
            y += sum(a["comb"][t, j, i] * a["residual"][t, j].float() for j in range(4))
            torch.testing.assert_close(out[t, i], y.to(BF16), atol=1e-4, rtol=0.01)
    same = streams.update_streams(a["residual"], a["x"], a["post"], a["comb"])
    torch.testing.assert_close(out, same, atol=1e-4, rtol=0.01)
    turned = streams.update_streams(a["residual"], a["x"], a["post"], a["comb"].transpose(1, 2))
    assert not torch.allclose(out.float(), turned.float(), atol=0.1)


@given(seed=st.integers(0, 999), dtype=st.sampled_from([BF16, torch.float32]))
@examples(10)
def test_rms_norm(seed: int, dtype: torch.dtype) -> None:
    """Rows are scaled to unit root mean square; the second result is its inverse."""
    x, gamma = draw(seed, 3, 5, 32, dtype=dtype), draw(seed + 1, 32, dtype=dtype)
    with small():
        y, rstd = torch.ops.npu.npu_rms_norm(x, gamma, 1e-5)
    wide = x.double()
    expected = 1 / torch.sqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(rstd.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(y, norms.rms_norm(x, gamma, 1e-5))


def rotary_call(seed: int = 0, rows: int = 3, heads: int = 4, width: int = 32, part: int = 8) -> Arguments:
    """A valid call of inplace_partial_rotary_mul."""
    angles = draw(seed + 1, rows, part // 2)
    return {
        "x": draw(seed, rows, 1, heads, width, dtype=BF16),
        "r1": angles.cos().repeat_interleave(2, -1).view(rows, 1, 1, part),
        "r2": angles.sin().repeat_interleave(2, -1).view(rows, 1, 1, part),
        "rotary_mode": "interleave",
        "partial_slice": [width - part, width],
    }


@given(seed=st.integers(0, 999), rows=st.integers(1, 4), part=st.sampled_from([2, 8, 32]))
@examples(15)
def test_rotary_turns_pairs_in_place(seed: int, rows: int, part: int) -> None:
    """The slice is turned as complex numbers, the rest keeps its bits; minus sine turns it back."""
    a = rotary_call(seed, rows, part=part)
    before = a["x"].clone()
    factors = torch.complex(a["r1"][:, 0, 0, ::2], a["r2"][:, 0, 0, ::2])
    with small():
        torch.ops.custom.inplace_partial_rotary_mul(**a)
        assert torch.equal(a["x"][..., : 32 - part], before[..., : 32 - part])
        expected = rotary.apply_rotary(before[:, 0], factors.unsqueeze(1))
        torch.testing.assert_close(a["x"][:, 0], expected, atol=1e-6, rtol=0.01)
        torch.ops.custom.inplace_partial_rotary_mul(**a | {"r2": -a["r2"]})
    torch.testing.assert_close(a["x"], before, atol=0.05, rtol=0.02)


@given(seed=st.integers(0, 999), data=st.data())
@examples(15)
def test_scatter_writes_exactly_the_rows(seed: int, data: st.DataObject) -> None:
    """Rows land at their slots and nowhere else; the result is the argument itself."""
    slots = data.draw(st.lists(st.integers(1, 11), min_size=1, max_size=6, unique=True))
    cache, rows = draw(seed, 12, 1, 4), draw(seed + 1, len(slots), 1, 4)
    expected = cache.clone()
    for slot, row in zip(slots, rows, strict=True):
        expected[slot] = row
    index = torch.tensor(slots).unsqueeze(-1)
    with simulate(providers=("torch-npu", "cann-recipes", "vllm-ascend"), strict_sizes=False):
        out = torch.ops.npu.npu_scatter_nd_update_(cache, index, rows)
        assert out is cache
        assert torch.equal(cache, expected)
        other = draw(seed, 12, 4)
        skip = torch.tensor([[-1], *index.tolist()], dtype=torch.int32)
        torch.ops.custom.scatter_nd_update_asc(other, skip, torch.cat((rows[:1, 0], rows[:, 0])))
        assert torch.equal(other, expected[:, 0])
        paged = draw(seed, 12, 1, 4).view(3, 4, 1, 4)
        pairs = torch.stack((index[:, 0] // 4, index[:, 0] % 4), -1)
        torch.ops._C_ascend.npu_scatter_nd_update_v2(paged, pairs, rows)
        assert torch.equal(paged.view(12, 1, 4), expected)


def test_writes_to_the_dummy_slot_are_poisoned() -> None:
    """What several padding rows write to slot 0 turns to NaN, unless that is switched off."""
    index = torch.tensor([[3], [0], [0]])
    for poison in (True, False):
        cache = torch.zeros(5, 4)
        with simulate(strict_sizes=False, poison_dummy=poison):
            torch.ops.npu.npu_scatter_nd_update_(cache, index, torch.ones(3, 4))
        assert bool(cache[0].isnan().all()) is poison
        assert torch.equal(cache[3], torch.ones(4))


@given(seed=st.integers(0, 999), rows=st.integers(1, 5))
@examples(10)
def test_dynamic_quant_halves_ties_and_keeps_zero_rows(seed: int, rows: int) -> None:
    """The largest number of a row becomes 127 or -127; codes times scale are within half a step."""
    x = draw(seed, rows, 16, dtype=BF16)
    x[0] = 0
    with small():
        codes, scale = torch.ops.npu.npu_dynamic_quant(x)
    assert scale.shape == (rows,)
    assert not codes[0].any()
    for t in range(rows):
        top = max(abs(v) for v in x[t].tolist())
        assert scale[t].item() == pytest.approx(top / 127, rel=1e-6)
        if top:
            assert codes[t].abs().max() == 127
            for code, value in zip(codes[t].tolist(), x[t].tolist(), strict=True):
                assert abs(code * top / 127 - value) <= top / 127 * 0.5001


def scatter_call() -> Arguments:
    """A valid call of npu_scatter_nd_update_."""
    return {"input": torch.zeros(8, 4), "indices": torch.tensor([[1], [5], [0], [0]]), "updates": torch.ones(4, 4)}


def norm_call() -> Arguments:
    """A valid call of npu_rms_norm."""
    return {"input": draw(0, 3, 8), "gamma": draw(1, 8)}


def quant_call() -> Arguments:
    """A valid call of npu_dynamic_quant."""
    return {"input": draw(0, 3, 8, dtype=BF16)}


def strided(x: Tensor) -> Tensor:
    """The same numbers in another layout."""
    return torch.stack((x, x), -1)[..., 0]


PLANTED: list[tuple[str, Callable[[], Arguments], str, Callable[[Arguments], Any], str]] = [
    ("custom::npu_hc_pre", hc_pre, "x", lambda a: a["x"].float(), "of dtype"),
    ("custom::npu_hc_pre", hc_pre, "x", lambda a: a["x"][:0], "no empty"),
    ("custom::npu_hc_pre", hc_pre, "x", lambda a: strided(a["x"]), "contiguous"),
    ("custom::npu_hc_pre", hc_pre, "x", lambda a: a["x"][0], "rank 3 or 4"),
    ("custom::npu_hc_pre", hc_pre, "x", lambda a: a["x"][:, :3].contiguous(), "four streams"),
    ("custom::npu_hc_pre", hc_pre, "hc_fn", lambda a: a["hc_fn"].bfloat16(), "hc_fn of dtype"),
    ("custom::npu_hc_pre", hc_pre, "hc_fn", lambda a: a["hc_fn"].t().contiguous(), "hc_fn of shape"),
    ("custom::npu_hc_pre", hc_pre, "hc_scale", lambda a: a["hc_scale"][:1], "hc_scale of shape"),
    ("custom::npu_hc_pre", hc_pre, "hc_base", lambda a: a["hc_base"][:8], "hc_base of shape"),
    ("custom::npu_hc_pre", hc_pre, "hc_sinkhorn_iters", lambda a: 0, "at least one Sinkhorn"),
    ("custom::npu_hc_post", hc_post, "x", lambda a: a["x"].float(), "x of dtype"),
    ("custom::npu_hc_post", hc_post, "residual", lambda a: a["residual"].float(), "residual of dtype"),
    ("custom::npu_hc_post", hc_post, "post", lambda a: a["post"].bfloat16(), "post of dtype"),
    ("custom::npu_hc_post", hc_post, "comb", lambda a: a["comb"].flatten(1), "comb of shape"),
    ("custom::npu_hc_post", hc_post, "residual", lambda a: a["residual"][0], "rank 3 or 4"),
    ("npu::npu_rms_norm", norm_call, "gamma", lambda a: a["gamma"].bfloat16(), "gamma of dtype"),
    ("npu::npu_rms_norm", norm_call, "gamma", lambda a: a["gamma"][:4], "gamma of shape"),
    ("npu::npu_rms_norm", norm_call, "input", lambda a: strided(a["input"]), "contiguous"),
    ("custom::inplace_partial_rotary_mul", rotary_call, "x", lambda a: a["x"][:, 0], "rank 4"),
    ("custom::inplace_partial_rotary_mul", rotary_call, "x", lambda a: strided(a["x"]), "contiguous"),
    ("custom::inplace_partial_rotary_mul", rotary_call, "rotary_mode", lambda a: "half", "interleave"),
    ("custom::inplace_partial_rotary_mul", rotary_call, "partial_slice", lambda a: [28, 36], "inside the width"),
    ("custom::inplace_partial_rotary_mul", rotary_call, "partial_slice", lambda a: [24, 30], "r1 of shape"),
    ("custom::inplace_partial_rotary_mul", rotary_call, "partial_slice", lambda a: [24, 32, 32], "two numbers"),
    ("custom::inplace_partial_rotary_mul", rotary_call, "r1", lambda a: a["r1"][..., ::2].contiguous(), "r1 of shape"),
    ("custom::inplace_partial_rotary_mul", rotary_call, "r2", lambda a: a["r2"].squeeze(1), "r2 of shape"),
    (
        "custom::inplace_partial_rotary_mul",
        rotary_call,
        "r2",
        lambda a: torch.cat((a["r2"][..., ::2], a["r2"][..., ::2]), -1),
        "expanded to pairs",
    ),
    ("npu::npu_scatter_nd_update_", scatter_call, "indices", lambda a: a["indices"] - 1, "indices in 0"),
    ("npu::npu_scatter_nd_update_", scatter_call, "indices", lambda a: a["indices"] + 3, "indices in 0"),
    ("npu::npu_scatter_nd_update_", scatter_call, "indices", lambda a: a["indices"].flatten(), "rank 2"),
    ("npu::npu_scatter_nd_update_", scatter_call, "indices", lambda a: a["indices"] % 4, "one writer per slot"),
    ("npu::npu_scatter_nd_update_", scatter_call, "indices", lambda a: a["indices"].short(), "indices of dtype"),
    ("npu::npu_scatter_nd_update_", scatter_call, "updates", lambda a: a["updates"][:3], "updates of shape"),
    ("npu::npu_scatter_nd_update_", scatter_call, "updates", lambda a: a["updates"].half(), "updates of dtype"),
    ("npu::npu_scatter_nd_update_", scatter_call, "input", lambda a: strided(a["input"]), "contiguous"),
    ("npu::npu_dynamic_quant", quant_call, "input", lambda a: a["input"].float(), "input of dtype"),
    ("npu::npu_dynamic_quant", quant_call, "input", lambda a: a["input"][0], "rank 2"),
    ("npu::npu_dynamic_quant", quant_call, "quant_mode", lambda a: "pertensor", "pertoken"),
    ("npu::npu_dynamic_quant", quant_call, "smooth_scales", lambda a: a["input"][0], "smooth_scales left out"),
    (
        "npu::npu_dynamic_quant",
        quant_call,
        "group_index",
        lambda a: torch.ones(1, dtype=torch.int32),
        "group_index left",
    ),
    ("npu::npu_dynamic_quant", quant_call, "dst_type_max", lambda a: 7.0, "dst_type_max=0.0"),
    ("npu::npu_dynamic_quant", quant_call, "dst_type", lambda a: 24, "dst_type int8"),
]


@pytest.mark.parametrize(
    ("name", "build", "argument", "change", "rule"), PLANTED, ids=[f"{p[0]}-{p[2]}-{p[4]}" for p in PLANTED]
)
def test_every_rule_refuses_its_fault(
    name: str, build: Callable[[], Arguments], argument: str, change: Callable[[Arguments], Any], rule: str
) -> None:
    """A valid call passes; with one fault it is refused by the rule that names it, and nothing was written."""
    arguments = build()
    if rule == "one writer per slot":
        arguments["indices"][0] = 5  # so that 1 and 5 meet
    with small():
        call(name, {k: v.clone() if isinstance(v, Tensor) else v for k, v in build().items()})
        faulty = arguments | {argument: change(arguments)}
        kept = {k: v.clone() for k, v in faulty.items() if isinstance(v, Tensor)}
        with pytest.raises(SimulatorError, match=rule) as caught:
            call(name, faulty)
    assert caught.value.operator == name
    assert all(torch.equal(faulty[k], v) for k, v in kept.items())


@pytest.mark.parametrize("chip", ["a3", "a5"])
def test_the_batch_axis_of_hc_post_is_the_chips(chip: str) -> None:
    """The A5 takes no call without a batch axis; neither does vllm-ascend anywhere."""
    with simulate(chip=chip, providers=("cann-recipes", "vllm-ascend"), strict_sizes=False):
        if chip == "a5":
            with pytest.raises(SimulatorError, match="leading batch axis"):
                torch.ops.custom.npu_hc_post(**hc_post())
        else:
            torch.ops.custom.npu_hc_post(**hc_post())
        with pytest.raises(SimulatorError, match="leading batch axis"):
            torch.ops._C_ascend.npu_hc_post(**hc_post())


def test_widths_are_the_documented_ones_unless_relaxed() -> None:
    """Strict sizes refuse a small model; everything else stays."""
    with simulate(), pytest.raises(SimulatorError, match="hidden width"):
        torch.ops.custom.npu_hc_pre(**hc_pre())
    with simulate():
        y, _, _ = torch.ops.custom.npu_hc_pre(**hc_pre(width=4096, rows=1))
    assert y.shape == (1, 4096)


@pytest.mark.parametrize("name", ["npu::npu_swiglu", "npu::npu_interleave_rope", "npu::npu_mhc_post"])
def test_lookalikes_refuse(name: str) -> None:
    """Operators that cannot do the work exist on the machine and raise."""
    x = torch.ones(2, 4, 8)
    arguments: Arguments = {
        "npu::npu_swiglu": {"input": x},
        "npu::npu_interleave_rope": {"x": x, "cos": x, "sin": x},
        "npu::npu_mhc_post": {"x": x, "h_res": x, "h_out": x, "h_post": x},
    }[name]
    with simulate(chip="a5"), pytest.raises(SimulatorError, match="another operator"):
        call(name, arguments)
