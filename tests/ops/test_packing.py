"""Quantised cache rows: what is unpacked has the bits of what was rounded, and a row has the size that it must have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.steps import examples
from oracle.ops import E2M1_VALUES, E4M3_VALUES
from purestep.ops import packing
from purestep.ops.quantize import power_scale, round_fp4, round_fp8, round_fp8_rows, scale_bytes
from torch import Tensor

SCALES = st.sampled_from((0.0, 1e-30, 1e-5, 1e-3, 1.0, 40.0, 1e6))


def rows(seed: int, n: int, width: int, scale: float, dtype: torch.dtype) -> Tensor:
    """Draw rows whose channels differ in size."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 2.0 ** torch.randint(-9, 3, (1, width), generator=generator)
    return (torch.randn(n, width, generator=generator) * sizes * scale).to(dtype)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors agree to the bit, signs of zeros included."""
    kind = {2: torch.int16, 4: torch.int32}[one.itemsize]
    return one.dtype is other.dtype and torch.equal(one.view(kind), other.view(kind))


@examples(60)
@given(
    seed=st.integers(0, 2**20),
    n=st.integers(0, 5),
    shape=st.sampled_from([(512, 64), (8, 4), (128, 16), (70, 2), (80, 16)]),
    scale=SCALES,
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    is_wide=st.booleans(),
)
def test_an_entry_is_what_was_rounded(
    seed: int, n: int, shape: tuple[int, int], scale: float, dtype: torch.dtype, is_wide: bool
) -> None:
    """Packed and unpacked, an entry has the rounded head and its own tail, whatever the dtype it came in."""
    width, tail = shape
    x = rows(seed, n, width, scale, torch.float32 if is_wide else dtype)
    packed = packing.pack_entries(x, tail, 64, 720, dtype)
    got = packing.unpack_entries(packed, width, tail, 64, dtype)
    expected = torch.cat((round_fp8(x[:, : width - tail], 64), x[:, width - tail :]), -1).to(dtype)
    assert same_bits(got, expected)


@examples(60)
@given(seed=st.integers(0, 2**20), n=st.integers(0, 5), width=st.sampled_from([128, 32, 8, 34]), scale=SCALES)
def test_a_key_is_what_was_rounded(seed: int, n: int, width: int, scale: float) -> None:
    """Packed and unpacked, FP8 and FP4 index keys are the rounded ones."""
    x = rows(seed, n, width, scale, torch.bfloat16)
    assert same_bits(packing.unpack_fp8_keys(packing.pack_fp8_keys(x)), round_fp8_rows(x))
    got = packing.unpack_fp4_keys(packing.pack_fp4_keys(x, 32), width, 32, torch.bfloat16)
    assert same_bits(got, round_fp4(x, 32))


def test_rows_have_the_released_sizes_and_layout() -> None:
    """448 codes, 64 bfloat16 channels, 7 scales and a zero make 584 bytes; keys make 132 and 68, even channels low."""
    x = torch.arange(512.0).bfloat16().view(1, 512)
    row = packing.pack_entries(x, 64, 64, 584, torch.bfloat16)
    assert row.shape == (1, 584)
    assert row[0, 1].item() == list(E4M3_VALUES).index(4.0)  # channel 1, scale 1/4
    assert row[0, 448:576].view(torch.bfloat16).tolist() == x[0, 448:].tolist()
    assert row[0, 576:].tolist() == [125, 126, 126, 127, 127, 127, 127, 0]
    assert packing.pack_fp8_keys(torch.ones(1, 128)).shape == (1, 132)
    key = packing.pack_fp4_keys(torch.tensor([[1.0, -6.0, 0.5, 3.0] + [0.0] * 124]), 32)
    assert key.shape == (1, 68)
    assert key[0, :2].tolist() == [2 | (7 | 8) << 4, 1 | 5 << 4]
    assert key[0, 64:].tolist() == [127, 1, 1, 1]


def test_every_code_and_every_exponent_is_read() -> None:
    """Each FP4 code of either half, each FP8 code and each power of two comes out as its number."""
    values = [*E2M1_VALUES, *(-v for v in E2M1_VALUES)]
    for low in range(16):
        both = torch.tensor([[low | high << 4, 127] for high in range(16)], dtype=torch.uint8)
        got = packing.unpack_fp4_keys(both, 2, 32, torch.float32)
        assert got.tolist() == [[values[low], high] for high in values]
    codes = torch.cat((torch.arange(127), torch.arange(128, 255))).to(torch.uint8)
    scale = torch.tensor([1.0]).view(torch.uint8)
    got = packing.unpack_fp8_keys(torch.cat((codes, scale)))
    assert got.tolist() == [*E4M3_VALUES, *(-v for v in E4M3_VALUES)]
    exponents = torch.arange(255, dtype=torch.uint8)
    powers = power_scale(exponents)
    assert powers.tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert torch.equal(scale_bytes(powers), exponents)


@pytest.mark.parametrize("pack", [packing.pack_fp8_keys, lambda x: packing.pack_fp4_keys(x, 32)])
def test_packing_leaves_its_argument(pack: Callable[[Tensor], Tensor]) -> None:
    """Packing changes nothing that it was given."""
    x = rows(0, 3, 32, 1.0, torch.bfloat16)
    before = x.clone()
    pack(x)
    assert torch.equal(x, before)
