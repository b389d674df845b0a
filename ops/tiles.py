"""Products with stored weights on a CPU: a tile of codes becomes numbers in the cache, is multiplied, and is forgotten.

The bits of a code are moved to where f16 has them, four operations on 16-bit integers; converting that to f32 is one
instruction, and the scale with the constant that the moving left out is one product. Both are exact. FP4's even and odd
columns are not brought together again: the activation is parted in the same way instead, so only the order of a sum
differs from ``expand``.

Measured on 2 shared cores of an AVX2 machine: 0.6 ns a number for FP8 and 0.8 ns for FP4, product with one row
included; torch's own conversion from e4m3 alone takes 3 to 4 ns, a table look-up 5 to 10 ns.

Source: none; the bit layouts are those of ``formats``.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from . import fused
from .formats import BLOCK, GROUP, Fp4Weight, Fp8Weight, StoredWeight, expand, weight_shape

__all__ = ["TILE", "decode_fp4", "decode_fp8", "grouped_linear", "linear"]

TILE: Final = 1 << 20
"""Numbers of a tile: enough to keep two cores busy, and 4 MB in f32 stay in the last cache."""

# Shifts to the left are products, which are faster on whole numbers of 16 bits; what leaves them is lost either way.
_FP8_SHIFT: Final = 1 << 7  # sign, exponent and mantissa of e4m3, sign-extended to 16 bits, to their places in f16
_FP8_MASK: Final = ~0x4000  # the copy of the sign where f16 has its first exponent bit
_FP8_SCALE: Final = 2.0**8  # e4m3 counts exponents from 7, f16 from 15

_FP4_SHIFT: Final = 1 << 5  # the same for the high half of a byte
_FP4_UP: Final = 1 << 4  # the low half takes the place of the high one
_FP4_MASK: Final = ~0x71FF
_FP4_SCALE: Final = 2.0**14  # e2m1 counts exponents from 1


def linear(x: Tensor, w: Tensor | StoredWeight) -> Tensor:
    """Multiply rows by a weight that may be stored, tile by tile; see ``linear.linear``.

    Args:
        x: float[...,H].
        w: float[F,H].
    Returns:
        float[...,F] in the dtype of ``x``.
    """
    if isinstance(w, Tensor):
        return fused.linear(x, w)
    dtype = _compute_dtype(x)
    if not _has_whole_blocks(w):
        return fused.linear(x, expand(w, dtype))
    rows = x.to(dtype)
    if isinstance(w, Fp4Weight):
        rows = rows.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    n_rows, n_columns = weight_shape(w)
    step = max(BLOCK, TILE // n_columns // BLOCK * BLOCK)
    parts = [fused.linear(rows, _tile(w, a, min(a + step, n_rows)).to(dtype)) for a in range(0, n_rows, step)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)).to(x.dtype)


def grouped_linear(x: Tensor, w: Tensor | StoredWeight) -> Tensor:
    """Multiply every group of channels by its own rows of a weight that may be stored; see ``linear.grouped_linear``.

    Args:
        x: float[...,G,D].
        w: float[G,U,D], or stored with [G*U,D].
    Returns:
        float[...,G,U] in the dtype of ``x``.
    """
    if isinstance(w, Tensor):
        return fused.grouped_linear(x, w)
    groups = x.shape[-2]
    rows = weight_shape(w)[-2] // groups
    if not isinstance(w, Fp8Weight) or rows % BLOCK:
        return fused.grouped_linear(x, expand(w, _compute_dtype(x)).unflatten(0, (groups, -1)))
    blocks = rows // BLOCK
    flat = w.scales.flatten(-3, -2)
    outs = []
    for group, part in enumerate(x.unbind(-2)):
        own = Fp8Weight(w.codes[group * rows :][:rows], flat[group * blocks :][:blocks].unsqueeze(0))
        outs.append(linear(part, own))
    return torch.stack(outs, dim=-2)


def decode_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    """Decode whole blocks of FP8; not for NaN, which reading a checkpoint refuses.

    Args:
        codes: fp8[F,H], both axes multiples of 128.
        scales: fp8[f,h] or f32[f,h], below 2 ** 120.
    Returns:
        f32[F,H], equal to ``expand``.
    """
    values = _unscaled_fp8(codes)
    blocks = values.view(scales.shape[0], BLOCK, scales.shape[1], BLOCK)
    blocks.mul_((scales.float() * _FP8_SCALE)[:, None, :, None])
    return values


def decode_fp4(codes: Tensor, scales: Tensor) -> Tensor:
    """Decode rows of FP4 into all their even columns, then all their odd ones.

    Args:
        codes: u8[F,H/2], H a multiple of 32.
        scales: fp8[F,H/32], below 2 ** 114.
    Returns:
        f32[F,H], equal to ``expand`` but for the order of columns and the sign of zeros.
    """
    n_rows, half = codes.shape
    halves = torch.empty((n_rows, 2, half), dtype=torch.int8, device=codes.device)
    torch.mul(codes.view(torch.int8), _FP4_UP, out=halves[:, 0])
    halves[:, 1] = codes.view(torch.int8)
    values = halves.to(torch.int16).mul_(_FP4_SHIFT).bitwise_and_(_FP4_MASK).view(torch.float16).float()
    groups = values.view(n_rows, 2, scales.shape[1], GROUP // 2)
    groups.mul_((scales.float() * _FP4_SCALE)[:, None, :, None])
    return values.flatten(1)


def _unscaled_fp8(codes: Tensor) -> Tensor:
    bits = codes.view(torch.int8).to(torch.int16).mul_(_FP8_SHIFT).bitwise_and_(_FP8_MASK)
    return bits.view(torch.float16).float()


def _tile(w: StoredWeight, a: int, b: int) -> Tensor:
    if isinstance(w, Fp8Weight):
        return decode_fp8(w.codes[a:b], w.scales.flatten(-3, -2)[a // BLOCK : b // BLOCK])
    return decode_fp4(w.codes[a:b], w.scales[a:b])


def _has_whole_blocks(w: StoredWeight) -> bool:
    n_rows, n_columns = weight_shape(w)
    if isinstance(w, Fp4Weight):
        return n_columns % GROUP == 0
    return n_rows // w.scales.shape[-3] % BLOCK == 0 and n_columns % BLOCK == 0


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Choose what tiles are multiplied in: bfloat16 holds every stored number, but not every CPU multiplies it."""
    return x.dtype if x.dtype is torch.bfloat16 and not fused.EMULATES_BF16 else torch.float32
