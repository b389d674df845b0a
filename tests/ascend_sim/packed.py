"""What the A5 keeps in fp8: packed key/value rows and index keys with their scales.

Rules and layout: kernel sheet 3.3 and 4.5; cann-recipes-infer ``ops/ascendc/docs/custom-npu_kv_compress_epilog.md`` and
``custom-npu_indexer_compress_epilog.md``. One packed row holds the values that are not rotary in fp8, the rotary ones
in bf16, one e8m0 scale per 64 values, and zeros up to a multiple of 128 bytes. In which order these parts lie differs
between releases of the package; only its own kernels read them.
"""

from __future__ import annotations

import torch
from ascend_sim.rules import Kernel, Site
from torch import Tensor

__all__ = ["FP8_MAX", "GROUP", "KERNELS", "pack_rows", "packed_width", "power_of_two_above", "unpack_rows"]

GROUP = 64
FP8_MAX = 448.0
_ALIGN = 128
_FP8 = torch.float8_e4m3fn
_E8M0_BIAS = 127
_SMALLEST = 1e-4  # of a group's largest number, where the kernel looks for its scale
_POISON = 0xFF  # NaN as fp8, as bf16 and as e8m0


def packed_width(width: int, rope: int) -> int:
    """Bytes of a packed row."""
    plain = width - rope
    return -(-(plain + 2 * rope + -(-plain // GROUP)) // _ALIGN) * _ALIGN


def power_of_two_above(x: Tensor) -> Tensor:
    """Round positive numbers up to powers of two; zero counts as the smallest one that e8m0 has."""
    mantissa, exponent = torch.frexp(x)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-_E8M0_BIAS, _E8M0_BIAS)
    return torch.ldexp(torch.ones_like(x), torch.where(x > 0, exponent, -_E8M0_BIAS))


def pack_rows(x: Tensor, rope: int) -> Tensor:
    """Pack key/value rows: bf16[T,D] -> u8[T,bytes]."""
    plain, tail = x.split((x.shape[-1] - rope, rope), -1)
    n_groups = -(-plain.shape[-1] // GROUP)
    groups = torch.nn.functional.pad(plain.float(), (0, n_groups * GROUP - plain.shape[-1])).view(
        len(x), n_groups, GROUP
    )
    scale = power_of_two_above(groups.abs().amax(-1).clamp(min=_SMALLEST) / FP8_MAX)
    codes = (groups / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).flatten(1)[:, : plain.shape[-1]].to(_FP8)
    exponents = (torch.frexp(scale).exponent - 1 + _E8M0_BIAS).to(torch.uint8)
    row = torch.cat((codes.view(torch.uint8), tail.contiguous().view(torch.uint8), exponents), -1)
    return torch.nn.functional.pad(row, (0, packed_width(x.shape[-1], rope) - row.shape[-1]))


def unpack_rows(rows: Tensor, width: int, rope: int) -> Tensor:
    """Undo ``pack_rows``: f32[T,D]."""
    raw = rows.contiguous().view(torch.uint8)
    plain = width - rope
    n_groups = -(-plain // GROUP)
    codes, tail, exponents = raw[:, : plain + 2 * rope + n_groups].split((plain, 2 * rope, n_groups), -1)
    scale = torch.ldexp(torch.ones(exponents.shape), exponents.int() - _E8M0_BIAS)
    scale = torch.where(exponents == _POISON, torch.nan, scale).repeat_interleave(GROUP, -1)[:, :plain]
    values = codes.contiguous().view(_FP8).float() * scale
    return torch.cat((values, tail.contiguous().view(torch.bfloat16).float()), -1)


def _slots(site: Site, slot_mapping: Tensor, n: int, limit: int) -> Tensor:
    slots = site.tensor("slot_mapping", slot_mapping, torch.int32, (n,)).long()
    inside = bool(((slots >= -1) & (slots < limit)).all())
    site.require(inside, f"slots in -1..{limit - 1}", slots.tolist())
    live = slots[slots > 0]
    site.require(len(live.unique()) == len(live), "one writer per slot, but slot 0", slots.tolist())
    return slots


def _bytes(site: Site, name: str, cache: Tensor, width: int) -> Tensor:
    """View a cache as rows of bytes, vllm-ascend's with an axis of heads: u8[S,width]."""
    site.dtype(name, cache, _FP8)
    shape = (len(cache), 1, width) if site.operator.startswith("_C_ascend") else (len(cache), width)
    site.require(tuple(cache.shape) == shape, f"{name} of rows of {width} bytes", tuple(cache.shape))
    return cache.view(torch.uint8).view(-1, width)


def _kv_epilog(
    site: Site,
    *,
    kv_compress_cache: Tensor,
    x: Tensor,
    slot_mapping: Tensor,
    quant_group_size: int,
    quant_mode: int,
    round_scale_flag: bool,
    scale: float = 1.0,
    layout: int = 1,
) -> None:
    site.dtype("x", x, torch.bfloat16)
    site.require(x.dim() == 2, "x of shape [T,D]", tuple(x.shape))
    site.size("the row width", x.shape[1], (512,))
    site.fixed(
        quant_group_size=(quant_group_size, GROUP),
        quant_mode=(quant_mode, 2),
        round_scale_flag=(round_scale_flag, True),
        scale=(scale, 1.0),
        layout=(layout, 1),
    )
    rope = site.rules.rope_width
    cache = _bytes(site, "kv_compress_cache", kv_compress_cache, packed_width(x.shape[1], rope))
    slots = _slots(site, slot_mapping, len(x), len(cache))
    cache[slots[slots >= 0]] = pack_rows(x, rope)[slots >= 0]
    if site.rules.poison_dummy and bool((slots == 0).any()):
        cache[0] = _POISON


def _index_epilog(
    site: Site,
    *,
    indexer_compress_cache: Tensor,
    indexer_compress_scale: Tensor,
    x: Tensor,
    slot_mapping: Tensor,
    quant_mode: int,
    round_scale: bool,
    scale: float,
) -> None:
    site.dtype("x", x, torch.bfloat16)
    site.require(x.dim() == 2, "x of shape [T,J]", tuple(x.shape))
    site.size("the row width", x.shape[1], (128,))
    # Scales are rounded to powers of two in the other mode only, whatever round_scale says.
    site.fixed(quant_mode=(quant_mode, 1), scale=(scale, 1.0))
    cache = _bytes(site, "indexer_compress_cache", indexer_compress_cache, x.shape[1])
    site.tensor("indexer_compress_scale", indexer_compress_scale, torch.float32, (len(cache), 1))
    scales = indexer_compress_scale.view(-1)
    slots = _slots(site, slot_mapping, len(x), len(cache))
    row_scale = x.float().abs().amax(-1) / FP8_MAX
    codes = torch.where(row_scale.unsqueeze(-1) > 0, x.float() / row_scale.unsqueeze(-1), 0.0)
    live = slots >= 0
    cache[slots[live]] = codes.clamp(-FP8_MAX, FP8_MAX).to(_FP8).view(torch.uint8)[live]
    scales[slots[live]] = row_scale[live]
    if site.rules.poison_dummy and bool((slots == 0).any()):
        cache[0] = _POISON
        scales[0] = torch.nan


KERNELS = {
    "custom::kv_compress_epilog": Kernel(run=_kv_epilog),
    "_C_ascend::kv_compress_epilog": Kernel(run=_kv_epilog),
    "custom::indexer_compress_epilog": Kernel(run=_index_epilog),
}
