"""The number formats of releases, decoded one number at a time from the definition of their bits.

Nothing here is shared with the package under test, and no torch conversion is used: numbers are Python floats (exact
here, both factors being short) until one rounding to f32 and one to bf16, done on the bits.

Source: OCP specifications "8-bit floating point" (E4M3) and "Microscaling formats" (E2M1, E8M0); model sheet 4.2.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

__all__ = ["decode_fp4", "decode_fp8", "e2m1", "e4m3", "e8m0", "to_bf16", "to_f32"]

Rows = list[list[float]]


def e4m3(code: int) -> float:
    """Read one sign bit, four exponent bits (bias 7) and three bits of mantissa; all ones is NaN."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def e2m1(code: int) -> float:
    """Read one sign bit, two exponent bits (bias 1) and one bit of mantissa; both zeros are +0."""
    exponent, mantissa = code >> 1 & 3, code & 1
    size = mantissa * 0.5 if exponent == 0 else (2 + mantissa) * 2.0 ** (exponent - 2)
    return -size if code & 8 and size else size


def e8m0(code: int) -> float:
    """Read a power of two; 255 is NaN."""
    return math.nan if code == 255 else 2.0 ** (code - 127)


def to_f32(x: float) -> float:
    """Round a double to f32, ties to even; beyond the largest f32 to infinity."""
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def to_bf16(x: float) -> float:
    """Round an f32 to bf16 on its bits, ties to even."""
    if math.isnan(x):
        return x
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    bits += 0x7FFF + (bits >> 16 & 1)
    return struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))[0]


def decode_fp8(codes: Sequence[Sequence[int]], scales: Sequence[Sequence[float]], block: int = 128) -> Rows:
    """Multiply every code by the scale of its block, counted from the first row and column."""
    return [
        [to_f32(e4m3(code) * scales[i // block][j // block]) for j, code in enumerate(row)]
        for i, row in enumerate(codes)
    ]


def decode_fp4(packed: Sequence[Sequence[int]], scales: Sequence[Sequence[float]], group: int = 32) -> Rows:
    """Unpack two codes a byte, the low half first, and multiply each by the scale of its group in the row."""
    rows = []
    for i, row in enumerate(packed):
        codes = [half for byte in row for half in (byte & 15, byte >> 4)]
        rows.append([to_f32(e2m1(code) * scales[i][j // group]) for j, code in enumerate(codes)])
    return rows
