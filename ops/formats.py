"""The number formats that releases store weights in: FP8 with one scale a block, FP4 with one scale a group.

A stored weight is a value of two tensors, codes and scales, of ``[..., out, in]`` like every weight. FP8 codes are e4m3
(448 at most, no infinity) with a scale for each block of 128 rows and 128 columns; blocks at the edges may be smaller.
FP4 codes are e2m1 with a scale for each 32 columns of a row; a byte holds two neighbours, the even column in its low
four bits. A scale is a power of two in one byte (e8m0, ``2 ** (code - 127)``, 255 is NaN) or, for FP8, an f32.

``expand`` is what a code means: the product of the two numbers in f32, rounded once to the dtype asked for.

Source: DeepSeek-V4 release, ``inference/kernel.py`` and ``inference/convert.py``; OCP specifications "8-bit floating
point" and "Microscaling formats"; model sheet 4.2.
"""

from __future__ import annotations

import itertools
from typing import Final, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.nn import functional as F

from .quantize import FP4_MAX, FP8_MAX, power_of_two_scale

__all__ = [
    "BLOCK",
    "E8M0",
    "GROUP",
    "Fp4Weight",
    "Fp8Weight",
    "StoredWeight",
    "expand",
    "fp4_weight",
    "fp8_weight",
    "is_stored",
    "one_of",
    "refit_fp8",
    "weight_shape",
]

BLOCK: Final = 128
"""Rows and columns that share a scale in FP8."""

GROUP: Final = 32
"""Columns that share a scale in FP4."""

E8M0: Final = torch.float8_e8m0fnu
"""The type of scales that are powers of two."""

_SCALE_MIN: Final = 2.0**-127
_SCALE_MAX: Final = 2.0**127

_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of FP4; bit 3 of a code is the sign."""

_FP8_OVER_FP4: Final = 64.0
"""A block scale below its largest group scale: FP4's 6 becomes 384, which FP8 still holds."""


class Fp8Weight(NamedTuple):
    """A weight as FP8 codes; a pytree of two leaves.

    Attributes:
        codes: fp8[...,F,H].
        scales: fp8[...,p,f,h] (e8m0) or f32[...,p,f,h]. Blocks start anew in each of ``p`` parts of the rows, because
            a weight may be several tensors of a checkpoint, one under the other.
    """

    codes: Tensor
    scales: Tensor


class Fp4Weight(NamedTuple):
    """A weight as FP4 codes; a pytree of two leaves.

    Attributes:
        codes: u8[...,F,H/2]. Two columns a byte, the even one in the low bits.
        scales: fp8[...,F,H/32] (e8m0). A last group may be short.
    """

    codes: Tensor
    scales: Tensor


StoredWeight = Fp8Weight | Fp4Weight


def is_stored(w: object) -> TypeGuard[StoredWeight]:
    """Tell whether a weight is kept as codes and scales of a release."""
    return isinstance(w, Fp8Weight | Fp4Weight)


def weight_shape(w: StoredWeight) -> tuple[int, ...]:
    """Return the shape of the numbers that a stored weight stands for."""
    *lead, columns = w.codes.shape
    return (*lead, columns if isinstance(w, Fp8Weight) else 2 * columns)


def one_of(w: StoredWeight, index: int) -> StoredWeight:
    """Take one weight out of a stack of them; shares storage."""
    return type(w)(w.codes[index], w.scales[index])


def expand(w: StoredWeight, dtype: torch.dtype) -> Tensor:
    """Compute the numbers that a stored weight stands for.

    Args:
        w: the weight.
        dtype: of the result.
    Returns:
        float[...,F,H].
    Rounding: the product of code and scale to f32, then to ``dtype``; both are exact where scales are powers of two and
        nothing leaves the dtype's range.
    """
    return (_expand_fp8(w) if isinstance(w, Fp8Weight) else _expand_fp4(w)).to(dtype)


def _expand_fp8(w: Fp8Weight) -> Tensor:
    rows, columns = w.codes.shape[-2:]
    parts = w.scales.shape[-3]
    scales = w.scales.float().repeat_interleave(BLOCK, -2)[..., : rows // parts, :].flatten(-3, -2)
    return w.codes.float() * scales.repeat_interleave(BLOCK, -1)[..., :columns]


def _expand_fp4(w: Fp4Weight) -> Tensor:
    table = torch.tensor((*_E2M1, 0.0, *(-size for size in _E2M1[1:])), device=w.codes.device)
    codes = torch.stack((w.codes & 15, w.codes >> 4), dim=-1).flatten(-2)
    values = table[codes.int()]
    return values * w.scales.float().repeat_interleave(GROUP, -1)[..., : values.shape[-1]]


def fp8_weight(w: Tensor, *, scale_dtype: torch.dtype = E8M0) -> Fp8Weight:
    """Quantise a weight to FP8 with the smallest power-of-two scale that holds each block.

    Args:
        w: float[...,F,H]. Finite.
        scale_dtype: e8m0 or f32; the scales are powers of two either way.
    Returns:
        Codes and scales in one part; each number is the nearest that its block can hold, ties to even.
    """
    blocks = _blocked(w.float())
    scales = _stored_scale(blocks.abs().amax((-3, -1)), FP8_MAX)
    codes = (blocks / scales[..., None, :, None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return Fp8Weight(_unblocked(codes, w), scales.to(scale_dtype).unsqueeze(-3))


def fp4_weight(w: Tensor) -> Fp4Weight:
    """Quantise a weight to FP4 with the smallest power-of-two scale that holds each group.

    Args:
        w: float[...,F,H]. Finite, H even.
    Returns:
        Codes and scales; each number is the nearest that its group can hold, ties to the even code.
    """
    columns = w.shape[-1]
    groups = F.pad(w.float(), (0, -columns % GROUP)).unflatten(-1, (-1, GROUP))
    scales = _stored_scale(groups.abs().amax(-1), FP4_MAX)
    values = (groups / scales.unsqueeze(-1)).flatten(-2)[..., :columns]
    # Halfway between two magnitudes the even code is taken: its index is even.
    bounds = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(_E2M1)], device=w.device)
    size = values.abs()
    code = torch.bucketize(size, bounds)
    is_tie = size == bounds[code.clamp(max=len(bounds) - 1)]
    code = torch.where(is_tie & (code % 2 == 1), code + 1, code)
    code = (code + 8 * (values < 0)).to(torch.uint8)
    return Fp4Weight(code[..., 0::2] | code[..., 1::2] << 4, scales.to(E8M0))


def refit_fp8(w: Fp4Weight, *, scale_dtype: torch.dtype = E8M0) -> Fp8Weight:
    """Write an FP4 weight as FP8: a block's scale is its largest group scale over 64.

    Exact unless the group scales of one block lie further apart than a factor of 2 ** 14.

    Args:
        w: the weight.
        scale_dtype: e8m0 or f32.
    Returns:
        Codes and scales in one part.
    """
    wide = _expand_fp4(w)
    group_scales = w.scales.float().repeat_interleave(GROUP, -1)[..., : wide.shape[-1]]
    scales = (_blocked(group_scales).amax((-3, -1)) / _FP8_OVER_FP4).clamp(min=_SCALE_MIN)
    codes = (_blocked(wide) / scales[..., None, :, None]).to(torch.float8_e4m3fn)
    return Fp8Weight(_unblocked(codes, wide), scales.to(scale_dtype).unsqueeze(-3))


def _stored_scale(amax: Tensor, limit: float) -> Tensor:
    return power_of_two_scale(amax, limit).clamp(_SCALE_MIN, _SCALE_MAX)


def _blocked(w: Tensor) -> Tensor:
    """Cut a matrix into blocks, with zeros at the edges: float[...,f,128,h,128]."""
    rows, columns = w.shape[-2:]
    return F.pad(w, (0, -columns % BLOCK, 0, -rows % BLOCK)).unflatten(-2, (-1, BLOCK)).unflatten(-1, (-1, BLOCK))


def _unblocked(blocks: Tensor, like: Tensor) -> Tensor:
    rows, columns = like.shape[-2:]
    return blocks.flatten(-2).flatten(-3, -2)[..., :rows, :columns].contiguous()
