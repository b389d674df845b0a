"""Gated activations with a clamp, some of which quantise their result.

Rules and formulas: kernel sheet 7.4; the operators' documentation in torch-npu 2.13.0 and, for the order of gate and
up in ``npu_dequant_swiglu_quant``, cann/ops-nn ``quant/dequant_swiglu_quant/docs``: with ``swiglu_mode=1`` the operator
of torch-npu takes even channels as gate and odd ones as up; vllm-ascend's, by the sheet, halves. For
``custom.npu_swiglu_group_quant``, cann-recipes-infer ``ops/ascendc/docs/custom-npu_swiglu_group_quant.md``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from ascend_sim.packed import FP8_MAX, power_of_two_above
from ascend_sim.products import quantise_rows
from ascend_sim.routing import poison
from ascend_sim.rules import Kernel, Site, dtype_of
from torch import Tensor

__all__ = ["KERNELS", "clamped"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_FP8 = torch.float8_e4m3fn


def clamped(gate: Tensor, up: Tensor, limit: float, alpha: float, bias: float) -> Tensor:
    """Gate and clamp: ``min(g, limit) * sigmoid(alpha * min(g, limit)) * (clamp(u) + bias)``."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + bias)


def _used_rows(site: Site, group_index: Tensor | None, n_rows: int) -> int:
    """Count the rows that the groups cover; all without groups."""
    if group_index is None:
        return n_rows
    site.dtype("group_index", group_index, torch.int64)
    site.require(group_index.dim() == 1, "group_index of rank 1", group_index.dim())
    counts = group_index.tolist()
    site.require(min(counts) >= 0, "counts, none negative", counts)
    site.require(sum(counts) <= n_rows, f"groups inside the {n_rows} rows", counts)
    return sum(counts)


def _clipped_swiglu(
    site: Site,
    *,
    x: Tensor,
    group_index: Tensor | None,
    dim: int,
    alpha: float,
    limit: float,
    bias: float,
    interleaved: bool,
) -> Tensor:
    site.dtype("x", x, *_FLOATS)
    site.require(x.dim() > 1, "x of rank 2 or more", x.dim())
    site.require(dim in (-1, x.dim() - 1), "the last axis: others are not simulated", dim)
    site.require(x.shape[-1] % 2 == 0, "an even width", x.shape[-1])
    site.require(limit > 0, "a limit above 0", limit)
    flat = x.flatten(0, -2)
    n_used = _used_rows(site, group_index, len(flat))
    wide = flat[:n_used].float()
    gate, up = (wide[:, 0::2], wide[:, 1::2]) if interleaved else wide.chunk(2, -1)
    out = poison((len(flat), x.shape[-1] // 2), x.dtype)
    out[:n_used] = clamped(gate, up, limit, alpha, bias).to(x.dtype)
    return out.view(*x.shape[:-1], -1)


def _fake_clipped_swiglu(site: Site, *, x: Tensor, **_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _dequantised(
    site: Site, x: Tensor, weight_scale: Tensor | None, activation_scale: Tensor | None, group_index: Tensor | None
) -> tuple[Tensor, int]:
    """Undo the quantisation of the rows in use: (f32[n,2*F], n)."""
    n_groups = 1 if group_index is None else len(group_index)
    if x.dtype is not torch.int32:
        site.absent(weight_scale=weight_scale, activation_scale=activation_scale)
        n_used = _used_rows(site, group_index, len(x))
        return x[:n_used].float(), n_used
    w = site.tensor("weight_scale", weight_scale, torch.float32, (n_groups, x.shape[1]))
    a = site.tensor("activation_scale", activation_scale, torch.float32, (len(x),))
    n_used = _used_rows(site, group_index, len(x))
    per_row = w.expand(n_used, -1) if group_index is None else w.repeat_interleave(group_index, 0)
    return x[:n_used].float() * per_row * a[:n_used].unsqueeze(-1), n_used


def _dequant_swiglu_quant(
    site: Site,
    *,
    x: Tensor,
    weight_scale: Tensor | None,
    activation_scale: Tensor | None,
    group_index: Tensor | None,
    activate_left: bool,
    quant_mode: int,
    swiglu_mode: int,
    clamp_limit: float,
    glu_alpha: float,
    glu_bias: float,
    dst_type: int | None = None,
    round_mode: int | None = None,
    activate_dim: int | None = None,
    **o: Any,
) -> tuple[Tensor, Tensor]:
    site.absent(**{name: o[name] for name in ("bias", "quant_scale", "quant_offset")})
    site.absent(round_mode=round_mode, activate_dim=activate_dim)
    site.fixed(quant_mode=(quant_mode, 1))
    if dst_type is not None:
        site.require(dtype_of(site, "dst_type", dst_type) is torch.int8, "dst_type int8", dst_type)
    site.require(x.dim() == 2, "x of shape [T,2*F]", tuple(x.shape))
    site.dtype("x", x, torch.int32, torch.bfloat16)
    site.require(x.shape[1] % 2 == 0, "an even width", x.shape[1])
    half = x.shape[1] // 2
    grouped = site.rules.strict_sizes and group_index is not None
    site.require(not grouped or (half % 64 == 0 and half <= 10496), "F a multiple of 64, at most 10496", half)
    site.require(swiglu_mode in (0, 1), "swiglu_mode 0 or 1", swiglu_mode)
    wide, n_used = _dequantised(site, x, weight_scale, activation_scale, group_index)
    if swiglu_mode == 1 and site.operator.startswith("npu"):
        gate, up = wide[:, 0::2], wide[:, 1::2]
    else:
        left, right = wide.chunk(2, -1)
        gate, up = (left, right) if activate_left else (right, left)
    if swiglu_mode == 1:
        site.require(clamp_limit > 0, "a clamp_limit above 0", clamp_limit)
        h = clamped(gate, up, clamp_limit, glu_alpha, glu_bias)
    else:
        h = torch.nn.functional.silu(gate) * up
    codes, scales = poison((len(x), half), torch.int8), poison((len(x),), torch.float32)
    codes[:n_used], scales[:n_used] = quantise_rows(h)
    return codes, scales


def _fake_dequant_swiglu_quant(site: Site, *, x: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty((x.shape[0], x.shape[1] // 2), dtype=torch.int8), x.new_empty((x.shape[0],), dtype=torch.float32)


def _swiglu_group_quant(
    site: Site,
    *,
    x: Tensor,
    weight: Tensor | None,
    group_index: Tensor | None,
    dst_type: torch.dtype,
    quant_mode: int,
    block_size: int,
    round_scale: bool,
    clamp_limit: float | None,
    output_origin: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gate the left half, multiply by the right one, quantise in blocks: of 128, or in mode 1 of 32 with e8m0."""
    site.dtype("x", x, torch.bfloat16, torch.float16)
    site.require(x.dim() == 2, "x of shape [T,2*F]", tuple(x.shape))
    aligned = x.shape[1] % (256 if site.rules.strict_sizes else 2) == 0
    site.require(aligned, "a width that is a multiple of 256", x.shape[1])
    site.absent(weight=weight)
    site.require(dst_type is _FP8, "dst_type e4m3", dst_type)
    site.require(quant_mode in (0, 1), "quant_mode 0 or 1", quant_mode)
    block = 32 if quant_mode else 128
    site.require(block_size in (0, block), f"block_size 0 or {block}", block_size)
    site.fixed(round_scale=(round_scale, quant_mode == 1))
    site.require(clamp_limit is None or clamp_limit >= 0, "no clamp_limit, or one of 0 or more", clamp_limit)
    n_used = _used_rows(site, group_index, len(x))
    gate, up = x[:n_used].float().chunk(2, -1)
    h = clamped(gate, up, math.inf if clamp_limit is None else clamp_limit, 1.0, 0.0)
    width = h.shape[1]
    blocks = torch.nn.functional.pad(h, (0, -width % block)).unflatten(-1, (-1, block))
    largest = blocks.abs().amax(-1)
    scale = power_of_two_above(largest.clamp(min=1e-4) / FP8_MAX) if quant_mode else largest / FP8_MAX
    codes = torch.where(scale.unsqueeze(-1) > 0, blocks / scale.unsqueeze(-1), 0.0).clamp(-FP8_MAX, FP8_MAX)
    y = poison((len(x), width), _FP8)
    y[:n_used] = codes.flatten(-2)[:, :width].to(_FP8)
    origin = poison((len(x), width), x.dtype)
    if output_origin and quant_mode:
        origin[:n_used] = h.to(x.dtype)
    if not quant_mode:
        scales = poison((len(x), scale.shape[1]), torch.float32)
        scales[:n_used] = scale
        return y, scales, origin
    shared = (torch.frexp(scale).exponent - 1 + 127).to(torch.uint8)
    pairs = torch.full((len(x), (scale.shape[1] + 1) // 2, 2), 255, dtype=torch.uint8)
    pairs[:n_used] = torch.nn.functional.pad(shared, (0, scale.shape[1] % 2)).unflatten(-1, (-1, 2))
    return y, pairs.view(torch.float8_e8m0fnu), origin


def _fake_swiglu_group_quant(site: Site, *, x: Tensor, quant_mode: int, **_: object) -> tuple[Tensor, Tensor, Tensor]:
    n_rows, width = x.shape[0], x.shape[1] // 2
    shape = (n_rows, -(-width // 64), 2) if quant_mode else (n_rows, -(-width // 128))
    kind = torch.float8_e8m0fnu if quant_mode else torch.float32
    return x.new_empty((n_rows, width), dtype=_FP8), x.new_empty(shape, dtype=kind), x.new_empty((n_rows, width))


_DEQUANT = Kernel(run=_dequant_swiglu_quant, fake=_fake_dequant_swiglu_quant)

KERNELS = {
    "npu::npu_clipped_swiglu": Kernel(run=_clipped_swiglu, fake=_fake_clipped_swiglu),
    "npu::npu_dequant_swiglu_quant": _DEQUANT,
    "_C_ascend::npu_dequant_swiglu_quant": _DEQUANT,
    "custom::npu_swiglu_group_quant": Kernel(run=_swiglu_group_quant, fake=_fake_swiglu_group_quant),
}
