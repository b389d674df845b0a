"""Stored number formats: every code means what its bits say, and what is written is the nearest that can be read."""

from __future__ import annotations

import math
from typing import Any

import oracle.formats as slow
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.steps import examples
from purestep.ops.formats import (
    BLOCK,
    E8M0,
    GROUP,
    Fp4Weight,
    Fp8Weight,
    expand,
    fp4_weight,
    fp8_weight,
    one_of,
    refit_fp8,
    weight_shape,
)
from torch import Tensor

E4M3 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.bfloat16)


def draw(seed: int, *shape: int) -> Tensor:
    """Normal numbers that depend on the seed and the shape alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_bytes(seed: int, *shape: int) -> Tensor:
    """Bytes that depend on the seed and the shape alone."""
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def assert_bits(got: Tensor, rows: slow.Rows, dtype: torch.dtype) -> None:
    """Compare with the slow decoder bit for bit; any NaN equals any other."""
    expected = torch.tensor([[slow.to_bf16(x) if dtype is torch.bfloat16 else x for x in row] for row in rows])
    assert got.dtype is dtype
    wide = got.float()
    assert torch.equal(wide.isnan(), expected.isnan())
    seen = ~expected.isnan()
    assert torch.equal(wide[seen].view(torch.int32), expected[seen].view(torch.int32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_fp8_code_with_every_scale(dtype: torch.dtype) -> None:
    """All 256 codes of e4m3 under all 256 scales of e8m0 have the value of the slow decoder, bit for bit."""
    codes = torch.arange(256, dtype=torch.uint8).expand(256, 256)
    scales = torch.arange(256, dtype=torch.uint8)
    # One row a block: the scale of block row i is code i.
    stacked = Fp8Weight(codes.unsqueeze(1).view(E4M3), scales.view(256, 1, 1, 1).expand(256, 1, 1, 2).view(E8M0))
    rows = [[slow.to_f32(slow.e4m3(code) * slow.e8m0(scale)) for code in range(256)] for scale in range(256)]
    assert_bits(expand(stacked, dtype).squeeze(1), rows, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_fp4_byte_with_every_scale(dtype: torch.dtype) -> None:
    """All 256 bytes of two e2m1 codes, low half first, under all 256 scales have the slow decoder's values."""
    packed = torch.arange(256, dtype=torch.uint8).expand(256, 256).contiguous()
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1).expand(256, 512 // GROUP).contiguous()
    rows = slow.decode_fp4(packed.tolist(), [[slow.e8m0(s) for s in row] for row in scales.tolist()])
    assert_bits(expand(Fp4Weight(packed, scales.view(E8M0)), dtype), rows, dtype)


@given(
    seed=st.integers(0, 999),
    rows=st.sampled_from([1, 2, 127, 128, 129, 200]),
    columns=st.sampled_from([1, 3, 127, 128, 129, 260]),
    is_f32=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
@examples(12)
def test_fp8_blocks_of_any_shape(seed: int, rows: int, columns: int, is_f32: bool, dtype: torch.dtype) -> None:
    """Blocks count from the first row and column, edges may be partial, and f32 scales may be any number."""
    codes = random_bytes(seed, rows, columns)
    shape = (math.ceil(rows / BLOCK), math.ceil(columns / BLOCK))
    scales = draw(seed, *shape).abs() if is_f32 else random_bytes(seed + 1, *shape).clamp(100, 150).view(E8M0)
    expected = slow.decode_fp8(codes.tolist(), scales.float().tolist())
    assert_bits(expand(Fp8Weight(codes.view(E4M3), scales.unsqueeze(0)), dtype), expected, dtype)


@given(seed=st.integers(0, 999), rows=st.sampled_from([1, 5, 100, 130, 300]), columns=st.sampled_from([4, 130]))
@examples(8)
def test_parts_have_blocks_of_their_own(seed: int, rows: int, columns: int) -> None:
    """Two matrices under each other mean what each means alone, also where a block ends between them."""
    halves = [fp8_weight(draw(seed + at, rows, columns) * 10.0**at) for at in range(2)]
    joined = Fp8Weight(*(torch.cat([half[at] for half in halves], dim=axis) for at, axis in ((0, -2), (1, -3))))
    assert torch.equal(expand(joined, torch.float32), torch.cat([expand(half, torch.float32) for half in halves]))


@given(seed=st.integers(0, 999), rows=st.integers(1, 5), groups=st.sampled_from([2, 30, 32, 34, 100]))
@examples(12)
def test_fp4_groups_of_any_shape(seed: int, rows: int, groups: int) -> None:
    """Groups of 32 columns count from the first column, the last may be short."""
    packed = random_bytes(seed, rows, groups // 2)
    scales = random_bytes(seed + 1, rows, math.ceil(groups / GROUP)).clamp(90, 160)
    expected = slow.decode_fp4(packed.tolist(), [[slow.e8m0(s) for s in row] for row in scales.tolist()])
    weight = Fp4Weight(packed, scales.view(E8M0))
    assert weight_shape(weight) == (rows, groups)
    assert_bits(expand(weight, torch.float32), expected, torch.float32)


QUANTISERS: list[Any] = [fp8_weight, lambda w: fp8_weight(w, scale_dtype=torch.float32), fp4_weight]
SHAPES = st.tuples(st.sampled_from([1, 3, 128, 140]), st.sampled_from([2, 32, 50, 128, 144]))


@pytest.mark.parametrize("quantise", QUANTISERS, ids=["fp8", "fp8 f32", "fp4"])
@given(seed=st.integers(0, 999), shape=SHAPES, size=st.sampled_from([1e-30, 1e-4, 1.0, 1e20]))
@examples(8)
def test_what_fits_is_kept(quantise: Any, seed: int, shape: tuple[int, int], size: float) -> None:
    """Numbers that came out of the format go in and out again without a change, whatever scale they had before."""
    once = expand(quantise(draw(seed, *shape) * size), torch.float32)
    again = quantise(once)
    assert torch.equal(expand(again, torch.float32), once)
    twice = quantise(expand(again, torch.float32))
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(again, twice, strict=True))


@pytest.mark.parametrize("quantise", QUANTISERS, ids=["fp8", "fp8 f32", "fp4"])
@given(seed=st.integers(0, 999), shape=SHAPES)
@examples(8)
def test_rounding_takes_the_nearest(quantise: Any, seed: int, shape: tuple[int, int]) -> None:
    """Every number becomes the nearest one that its scale has, a tie the even code."""
    w = draw(seed, *shape)
    w[..., 0] = torch.round(w[..., 0] * 8) / 8  # some ties
    stored = quantise(w)
    if isinstance(stored, Fp4Weight):
        values, spans = [slow.e2m1(code) for code in range(8)], (1, GROUP)
    else:
        values, spans = [slow.e4m3(code) for code in range(127)], (BLOCK, BLOCK)
    scales = stored.scales.float().squeeze(0) if isinstance(stored, Fp8Weight) else stored.scales.float()
    got = expand(stored, torch.float32)
    table = torch.tensor(values, dtype=torch.float64)
    for i, j in [(i, j) for i in range(0, shape[0], 37) for j in range(0, shape[1], 13)]:
        scale = scales[i // spans[0], j // spans[1]].double()
        distance = (table * scale - w[i, j].double().abs()).abs()
        best = [code for code in range(len(values)) if distance[code] == distance.min()]
        code = next((code for code in best if code % 2 == 0), best[0])
        assert got[i, j].double().abs() == table[code] * scale
        assert code == 0 or got[i, j].sign() == w[i, j].sign()


@pytest.mark.parametrize("quantise", QUANTISERS, ids=["fp8", "fp8 f32", "fp4"])
def test_scales_are_the_smallest_that_hold(quantise: Any) -> None:
    """The largest number of a block uses more than half of the range; a block of zeros has scale one."""
    limit = 6.0 if quantise is fp4_weight else 448.0
    for largest, scale in ((limit, 1.0), (limit * 1.01, 2.0), (limit / 2, 0.5), (limit / 1.99, 1.0), (0.0, 1.0)):
        stored = quantise(torch.tensor([[0.0, -largest]]))
        assert stored.scales.float().flatten().tolist() == [scale]


@given(seed=st.integers(0, 999), shape=SHAPES, is_f32=st.booleans())
@examples(12)
def test_fp4_as_fp8_is_exact(seed: int, shape: tuple[int, int], is_f32: bool) -> None:
    """Every FP4 weight whose group scales lie within a factor of 2 ** 14 is the same weight in FP8."""
    rows, columns = shape
    packed = random_bytes(seed, rows, columns // 2)
    scales = (random_bytes(seed + 1, rows, math.ceil(columns / GROUP)) % 15 + 100).view(E8M0)
    weight = Fp4Weight(packed, scales)
    refitted = refit_fp8(weight, scale_dtype=torch.float32 if is_f32 else E8M0)
    assert refitted.codes.float().abs().max() <= 384
    assert torch.equal(expand(refitted, torch.float32), expand(weight, torch.float32))


def test_stacks_are_taken_apart() -> None:
    """One weight of a stack is that weight, and shares its storage."""
    w = draw(0, 3, 130, 64)
    for quantise in QUANTISERS:
        stack = quantise(w)
        one = one_of(stack, 1)
        assert torch.equal(expand(one, torch.float32), expand(stack, torch.float32)[1])
        assert one.codes.untyped_storage().data_ptr() == stack.codes.untyped_storage().data_ptr()
        assert weight_shape(stack) == (3, 130, 64)
