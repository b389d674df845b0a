"""Quantise-dequantise through FP8 and FP4, the Walsh-Hadamard rotation that precedes the latter, int8 and MX weights.

Source: DeepSeek-V4 ``inference/kernel.py`` (``act_quant``, ``fp4_act_quant``, ``hadamard_transform``); model sheet 2.9,
2.12; torch-npu ``npu_dynamic_mx_quant`` (MX blocks).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "FP4_STEPS",
    "FP8_MAX",
    "Int8Weight",
    "MXWeight",
    "fp4_codes",
    "fp8_codes",
    "hadamard",
    "int8_weight",
    "mx_weight",
    "power_of_two_scale",
    "power_scale",
    "round_fp4",
    "round_fp8",
    "round_fp8_rows",
    "round_int8_rows",
    "row_scale",
    "scale_bytes",
]

FP8_MAX: Final = 448.0
FP8_FLOOR = 1e-4  # smallest group maximum of the official kernel
FP4_MAX = 6.0
FP4_FLOOR = 6.0 * 2.0**-126  # keeps the scale a normal number
FP4_STEPS: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of e2m1, by code."""

_MANTISSA: Final = 23
"""Bits of a float32 below its exponent."""

INT8_MAX = 127.0
MX_BLOCK = 32
FP8_EXPONENT = 8  # of the largest e4m3 number
E8M0_BIAS = 127


class Int8Weight(NamedTuple):
    """A weight as int8 codes; a pytree of two leaves.

    Attributes:
        codes: i8[F,H] or i8[E,F,H].
        scales: f32[F] or f32[E,F]. One for every output channel.
    """

    codes: Tensor
    scales: Tensor


def int8_weight(w: Tensor) -> Int8Weight:
    """Quantise a weight with one scale for every output channel.

    Args:
        w: float[F,H] or float[E,F,H].
    Returns:
        Codes and scales.
    """
    if w.dim() == 3:  # one expert after the other: the float32 copy of a layer's experts is large
        parts = [int8_weight(one) for one in w]
        return Int8Weight(codes=torch.stack([p.codes for p in parts]), scales=torch.stack([p.scales for p in parts]))
    wide = w.float()
    scales = wide.abs().amax(-1) / INT8_MAX
    codes = wide / torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
    return Int8Weight(codes=codes.round().to(torch.int8), scales=scales)


class MXWeight(NamedTuple):
    """A weight as e4m3 codes with a power of two for every 32 inputs (MXFP8); a pytree of two leaves.

    Attributes:
        codes: fp8[E,F,H].
        exponents: u8[E,F,C,2]. As e8m0, in pairs of blocks; C is H/64, rounded up.
    """

    codes: Tensor
    exponents: Tensor


def mx_weight(w: Tensor) -> MXWeight:
    """Quantise a weight in blocks of 32 inputs.

    A block's power of two is the one below its largest number, divided by that below the largest e4m3 number; what
    exceeds e4m3 after that is cut.

    Args:
        w: float[E,F,H].
    Returns:
        Codes and exponents.
    """
    parts = [_mx_blocks(one) for one in w]  # one after the other: the float32 copy of a layer's experts is large
    return MXWeight(codes=torch.stack([p.codes for p in parts]), exponents=torch.stack([p.exponents for p in parts]))


def _mx_blocks(w: Tensor) -> MXWeight:
    blocks = _groups(w, MX_BLOCK)
    amax = blocks.abs().amax(-1)
    exponent = torch.frexp(amax).exponent - 1 - FP8_EXPONENT
    exponent = torch.where(amax > 0, exponent, -E8M0_BIAS).clamp(-E8M0_BIAS, E8M0_BIAS)
    scaled = blocks / torch.ldexp(torch.ones_like(amax), exponent).unsqueeze(-1)
    codes = scaled.clamp(-FP8_MAX, FP8_MAX).flatten(-2)[..., : w.shape[-1]].to(torch.float8_e4m3fn)
    stored = (exponent + E8M0_BIAS).to(torch.uint8)
    pairs = torch.nn.functional.pad(stored, (0, stored.shape[-1] % 2)).unflatten(-1, (-1, 2))
    return MXWeight(codes=codes.contiguous(), exponents=pairs)


def power_of_two_scale(amax: Tensor, limit: float) -> Tensor:
    """Return ``2 ** ceil(log2(amax / limit))``, exact because it reads the exponent instead of a logarithm."""
    mantissa, exponent = torch.frexp(amax / limit)
    # frexp gives mantissa in [0.5, 1): exactly 0.5 is a power of two already.
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.ldexp(torch.ones_like(amax), exponent)


def _groups(x: Tensor, group: int) -> Tensor:
    """Cut the last axis into groups; zeros fill the last one and change no maximum."""
    return torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))


def _joined(grouped: Tensor, x: Tensor) -> Tensor:
    return grouped.flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def round_fp8(x: Tensor, group: int) -> Tensor:
    """Round through e4m3 with one power-of-two scale per ``group`` channels.

    Args:
        x: float[...,D]. A short last group has a scale of its own.
        group: channels that share a scale.
    Returns:
        float[...,D] in the dtype of ``x``.
    """
    grouped, scale = _fp8_scaled(x, group)
    return _joined(grouped.to(torch.float8_e4m3fn).float() * scale, x)


def _fp8_scaled(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Divide every group by its scale: (f32[...,C,group], f32[...,C,1])."""
    grouped = _groups(x, group)
    amax = grouped.abs().amax(-1, keepdim=True).clamp(min=FP8_FLOOR)
    scale = power_of_two_scale(amax, FP8_MAX)
    return (grouped / scale).clamp(-FP8_MAX, FP8_MAX), scale


def fp8_codes(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return the codes and scales that ``round_fp8`` rounds through.

    Args:
        x: float[...,D].
        group: channels that share a scale.
    Returns:
        (e4m3 [...,D], f32[...,C]); C groups.
    """
    grouped, scale = _fp8_scaled(x, group)
    return grouped.flatten(-2)[..., : x.shape[-1]].to(torch.float8_e4m3fn), scale.squeeze(-1)


def scale_bytes(scales: Tensor) -> Tensor:
    """Store powers of two as their exponents: f32[...] -> u8[...] (ue8m0)."""
    # The exponent of a float32 has the bias of ue8m0; 2**-127 has exponent 0 in both.
    return (scales.view(torch.int32) >> _MANTISSA).to(torch.uint8)


def power_scale(exponents: Tensor) -> Tensor:
    """Read what ``scale_bytes`` stored: u8[...] -> f32[...]."""
    bits = exponents.to(torch.int32)
    # In float32 that smallest power of two is a mantissa without exponent.
    return torch.where(bits > 0, bits << _MANTISSA, 1 << (_MANTISSA - 1)).view(torch.float32)


def row_scale(x: Tensor) -> Tensor:
    """Compute the scale of every row that brings its largest value to that of e4m3: float[...,D] -> f32[...,1]."""
    return x.float().abs().amax(-1, keepdim=True).clamp(min=FP8_FLOOR) / FP8_MAX


def round_fp8_rows(x: Tensor) -> Tensor:
    """Round every row through e4m3 with one f32 scale.

    Args:
        x: float[...,J].
    Returns:
        f32[...,J].
    Source: SGLang 0.5.23, FP8 index cache; the smallest row maximum is that of the official kernels.
    """
    scale = row_scale(x)
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float() * scale


def round_int8_rows(x: Tensor) -> Tensor:
    """Round every row through int8 with one f16 scale.

    Args:
        x: float[...,J].
    Returns:
        f32[...,J].
    Source: ``npu_dynamic_quant`` as vllm-ascend's indexer calls it; Ascend sheet, indexer.
    """
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True) / INT8_MAX
    codes = (wide / torch.where(scale > 0, scale, 1.0)).round()
    return codes * scale.half().float()


def round_fp4(x: Tensor, group: int) -> Tensor:
    """Round through e2m1 with one power-of-two scale per ``group`` channels; ties go to the even code.

    Args:
        x: float[...,D]. A short last group has a scale of its own.
        group: channels that share a scale.
    Returns:
        float[...,D] in the dtype of ``x``.
    """
    grouped, size, scale = _fp4_rounded(x, group)
    return _joined(size.copysign(grouped) * scale, x)


def _fp4_rounded(x: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round magnitudes to those of e2m1: (groups f32[...,C,group], their sizes, scales f32[...,C,1])."""
    grouped = _groups(x, group)
    amax = grouped.abs().amax(-1, keepdim=True).clamp(min=FP4_FLOOR)
    scale = power_of_two_scale(amax, FP4_MAX)
    size = (grouped / scale).abs().clamp(max=FP4_MAX)
    # The grid 0, .5, 1, 1.5, 2 | 2, 3, 4 | 4, 6 has steps .5, 1 and 2; round() takes ties to even multiples, which are
    # the even codes on each piece.
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return grouped, torch.round(size / step) * step, scale


def fp4_codes(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return the codes and scales that ``round_fp4`` rounds through.

    Args:
        x: float[...,J].
        group: channels that share a scale.
    Returns:
        (u8[...,J], sign in bit 3; f32[...,C]); C groups.
    """
    grouped, size, scale = _fp4_rounded(x, group)
    codes = torch.bucketize(size, torch.tensor(FP4_STEPS, device=x.device)).to(torch.uint8)
    codes = codes | torch.signbit(grouped).to(torch.uint8) << 3
    return codes.flatten(-2)[..., : x.shape[-1]], scale.squeeze(-1)


def hadamard(x: Tensor) -> Tensor:
    """Rotate the last axis by the Walsh-Hadamard matrix in natural order, scaled to be orthogonal.

    Args:
        x: float[...,J], J a power of two.
    Returns:
        float[...,J] in the dtype of ``x``.
    Rounding: f32 inside, one rounding at the end.
    """
    width = x.shape[-1]
    y = x.float()
    half = 1
    while half < width:
        a, b = y.unflatten(-1, (-1, 2, half)).unbind(-2)
        y = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        half *= 2
    return (y * width**-0.5).to(x.dtype)
