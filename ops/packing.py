"""Quantised cache rows as bytes: FP8 entries, FP8 and FP4 index keys.

Packing rounds exactly as the functions of ``quantize.py`` do, so unpacking gives what those return.

Source: row sizes and their parts, model sheet 6.4; codes and scales, 2.12 and 4.2. The order of the parts in a row is
that of the sheet's list.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .quantize import FP4_STEPS, FP8_MAX, fp4_codes, fp8_codes, power_scale, row_scale, scale_bytes

__all__ = [
    "pack_entries",
    "pack_fp4_keys",
    "pack_fp8_keys",
    "unpack_entries",
    "unpack_fp4_keys",
    "unpack_fp8_keys",
]


def pack_entries(x: Tensor, tail: int, group: int, n_bytes: int, dtype: torch.dtype) -> Tensor:
    """Pack entries: e4m3 codes of all but the last channels, the last ones as they are, scales, zeros.

    Args:
        x: float[...,D].
        tail: channels at the end that stay in ``dtype``.
        group: codes that share a scale.
        n_bytes: width of a row.
        dtype: of the tail.
    Returns:
        u8[...,n_bytes].
    """
    head, rest = x.split((x.shape[-1] - tail, tail), dim=-1)
    codes, scales = fp8_codes(head, group)
    parts = (codes.view(torch.uint8), _reread(rest.to(dtype), torch.uint8), scale_bytes(scales))
    row = torch.cat(parts, dim=-1)
    return torch.nn.functional.pad(row, (0, n_bytes - row.shape[-1]))


def unpack_entries(rows: Tensor, width: int, tail: int, group: int, dtype: torch.dtype) -> Tensor:
    """Unpack what ``pack_entries`` packed.

    Args:
        rows: u8[...,n_bytes].
        width: D.
        tail: as there.
        group: as there.
        dtype: of the tail, and of what is returned.
    Returns:
        float[...,D].
    """
    n_codes, n_tail = width - tail, tail * dtype.itemsize
    codes = rows[..., :n_codes].view(torch.float8_e4m3fn).float()
    rest = _reread(rows[..., n_codes : n_codes + n_tail], dtype)
    scales = power_scale(rows[..., n_codes + n_tail : n_codes + n_tail + -(-n_codes // group)])
    head = codes * scales.repeat_interleave(group, -1)[..., :n_codes]
    return torch.cat((head.to(dtype), rest), dim=-1)


def _reread(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Read a part of rows as numbers of another size, which wants them in memory of their own."""
    return part.clone(memory_format=torch.contiguous_format).view(dtype)


def pack_fp8_keys(x: Tensor) -> Tensor:
    """Pack index keys: e4m3 codes and one f32 scale: float[...,J] -> u8[...,J+4]."""
    scale = row_scale(x)
    codes = (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return torch.cat((codes.view(torch.uint8), _reread(scale, torch.uint8)), dim=-1)


def unpack_fp8_keys(rows: Tensor) -> Tensor:
    """Unpack what ``pack_fp8_keys`` packed: u8[...,J+4] -> f32[...,J]."""
    return rows[..., :-4].view(torch.float8_e4m3fn).float() * _reread(rows[..., -4:], torch.float32)


def pack_fp4_keys(x: Tensor, group: int) -> Tensor:
    """Pack index keys: two e2m1 codes a byte, the even channel in its low half, and power-of-two scales.

    Args:
        x: float[...,J], J even.
        group: codes that share a scale.
    Returns:
        u8[...,B], B = J/2 and one byte a group.
    """
    codes, scales = fp4_codes(x, group)
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.cat((low | high << 4, scale_bytes(scales)), dim=-1)


def unpack_fp4_keys(rows: Tensor, width: int, group: int, dtype: torch.dtype) -> Tensor:
    """Unpack what ``pack_fp4_keys`` packed.

    Args:
        rows: u8[...,B].
        width: J.
        group: as there.
        dtype: of what is returned.
    Returns:
        float[...,J].
    """
    both = rows[..., : width // 2]
    codes = torch.stack((both & 15, both >> 4), dim=-1).flatten(-2)
    table = torch.tensor(FP4_STEPS, device=rows.device)
    values = torch.cat((table, -table)).index_select(0, codes.flatten().long()).view(codes.shape)
    scales = power_scale(rows[..., width // 2 :]).repeat_interleave(group, -1)
    return (values * scales[..., :width]).to(dtype)
