"""What the A5 quantises in blocks, and the grouped product that reads it.

Rules and formulas: kernel sheet 5 and 6.4; the operators' documentation in torch-npu 2.13.0; shapes of the product's
scales from cann/ops-nn @0aa16a4 ``matmul/transpose_quant_batch_mat_mul/docs``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from ascend_sim.packed import FP8_MAX
from ascend_sim.rules import Kernel, SimulatorError, Site, dtype_of
from torch import Tensor

__all__ = ["KERNELS"]

_FP8 = torch.float8_e4m3fn
_FLOATS = (torch.bfloat16, torch.float16)
_BLOCK = 128
_MX_BLOCK = 32
_E8M0_BIAS = 127
_FP8_EXPONENT = 8  # of the largest e4m3 number


def _padded(x: Tensor, block: int) -> Tensor:
    """Cut the last axis into blocks, the last one filled with zeros: f32[...,n,block]."""
    return torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % block)).unflatten(-1, (-1, block))


def _rounded(blocks: Tensor, scale: Tensor, width: int) -> Tensor:
    values = torch.where(scale.unsqueeze(-1) > 0, blocks / scale.unsqueeze(-1), 0.0)
    return values.clamp(-FP8_MAX, FP8_MAX).flatten(-2)[..., :width].to(_FP8)


def _block_quant(
    site: Site,
    *,
    x: Tensor,
    min_scale: float,
    round_mode: str,
    dst_type: int,
    row_block_size: int,
    col_block_size: int,
    dst_type_max: float,
) -> tuple[Tensor, Tensor]:
    site.dtype("x", x, *_FLOATS)
    site.require(x.dim() in (2, 3), "x of rank 2 or 3", x.dim())
    site.fixed(
        round_mode=(round_mode, "rint"),
        row_block_size=(row_block_size, 1),
        col_block_size=(col_block_size, _BLOCK),
        dst_type_max=(dst_type_max, 0.0),
    )
    site.require(min_scale >= 0, "min_scale of 0 or more", min_scale)
    site.require(dtype_of(site, "dst_type", dst_type) is _FP8, "dst_type e4m3", dst_type)
    blocks = _padded(x, _BLOCK)
    scale = (blocks.abs().amax(-1) / FP8_MAX).clamp(min=min_scale)
    return _rounded(blocks, scale, x.shape[-1]), scale


def _fake_block_quant(site: Site, *, x: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    n_blocks = -(-x.shape[-1] // _BLOCK)
    return torch.empty_like(x, dtype=_FP8), x.new_empty((*x.shape[:-1], n_blocks), dtype=torch.float32)


def _mx_quant(
    site: Site,
    *,
    input: Tensor,
    axis: int,
    round_mode: str,
    dst_type: int,
    block_size: int,
    scale_alg: int | None,
    dst_type_max: float,
    max_low_bound: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Share the power of two below a block's largest number: codes, and exponents in pairs of blocks."""
    site.dtype("input", input, *_FLOATS)
    site.require(axis in (-1, input.dim() - 1), "the last axis: others are not simulated", axis)
    site.fixed(
        round_mode=(round_mode, "rint"),
        block_size=(block_size, _MX_BLOCK),
        scale_alg=(scale_alg, 0),
        dst_type_max=(dst_type_max, 0.0),
        max_low_bound=(max_low_bound, 0.0),
    )
    site.require(dtype_of(site, "dst_type", dst_type) is _FP8, "dst_type e4m3", dst_type)
    blocks = _padded(input, _MX_BLOCK)
    largest = blocks.abs().amax(-1)
    exponent = torch.frexp(largest).exponent - 1 - _FP8_EXPONENT
    exponent = torch.where(largest > 0, exponent.clamp(-_E8M0_BIAS, _E8M0_BIAS), -_E8M0_BIAS)
    codes = _rounded(blocks, torch.ldexp(torch.ones_like(largest), exponent), input.shape[-1])
    shared = (exponent + _E8M0_BIAS).to(torch.uint8)
    return codes, torch.nn.functional.pad(shared, (0, shared.shape[-1] % 2)).unflatten(-1, (-1, 2))


def _fake_mx_quant(site: Site, *, input: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    n_pairs = -(-input.shape[-1] // (2 * _MX_BLOCK))
    return torch.empty_like(input, dtype=_FP8), input.new_empty((*input.shape[:-1], n_pairs, 2), dtype=torch.uint8)


def _exponents(site: Site, name: str, scale: Tensor | None, expected: Sequence[int]) -> Tensor:
    """Require shared exponents and turn them into factors."""
    if scale is None:
        raise SimulatorError(site.operator, f"{name} to be given", None)
    site.dtype(name, scale, torch.uint8, torch.float8_e8m0fnu)
    site.shape(name, scale, expected)
    return torch.ldexp(torch.ones(tuple(expected)), scale.view(torch.uint8).int() - _E8M0_BIAS)


def _order(perm: Sequence[int] | None) -> tuple[int, ...]:
    return () if perm is None else tuple(perm)


def _quant_batchmatmul(
    site: Site,
    *,
    x1: Tensor,
    x2: Tensor,
    dtype: int,
    bias: Tensor | None,
    x1_scale: Tensor | None,
    x2_scale: Tensor | None,
    group_sizes: Sequence[int] | None,
    perm_x1: Sequence[int] | None,
    perm_x2: Sequence[int] | None,
    perm_y: Sequence[int] | None,
    batch_split_factor: int | None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
) -> Tensor:
    site.absent(bias=bias, x1_dtype=x1_dtype, x2_dtype=x2_dtype)
    site.dtype("x1", x1, _FP8)
    site.dtype("x2", x2, _FP8)
    site.require(x1.dim() == x2.dim() == 3, "two tensors of rank 3", (x1.dim(), x2.dim()))
    site.fixed(
        perm_x1=(_order(perm_x1), (1, 0, 2)),
        perm_y=(_order(perm_y), (1, 0, 2)),
        batch_split_factor=(batch_split_factor, 1),
    )
    site.require(_order(perm_x2) in {(0, 1, 2), (0, 2, 1)}, "perm_x2 (0,1,2) or (0,2,1)", perm_x2)
    sizes = _order(group_sizes)
    blocked = len(sizes) == 3 and set(sizes[:2]) <= {0, 1} and sizes[2] == _MX_BLOCK
    site.require(blocked, "group_sizes (0,0,32)", group_sizes)
    out = dtype_of(site, "dtype", dtype)
    site.require(out in _FLOATS, "dtype bf16 or f16", out)
    turned = _order(perm_x2) == (0, 2, 1)
    m, g, k = x1.shape
    n = x2.shape[1 if turned else 2]
    site.shape("x2", x2, (g, n, k) if turned else (g, k, n))
    site.require(k % 64 == 0, "K a multiple of 64", k)
    a = _exponents(site, "x1_scale", x1_scale, (m, g, k // 64, 2)).flatten(-2).repeat_interleave(_MX_BLOCK, -1)
    b = _exponents(site, "x2_scale", x2_scale, (g, n, k // 64, 2) if turned else (g, k // 64, n, 2))
    b = b if turned else b.transpose(1, 2)
    b = b.flatten(-2).repeat_interleave(_MX_BLOCK, -1)
    weight = x2.float() if turned else x2.float().transpose(1, 2)
    return torch.einsum("mgk,gnk->mgn", x1.float() * a, weight * b).to(out)


def _fake_quant_batchmatmul(
    site: Site, *, x1: Tensor, x2: Tensor, dtype: int, perm_x2: Sequence[int], **_: object
) -> Tensor:
    n = x2.shape[1 if tuple(perm_x2) == (0, 2, 1) else 2]
    return x1.new_empty((x1.shape[0], x1.shape[1], n), dtype=dtype_of(site, "dtype", dtype))


KERNELS = {
    "npu::npu_dynamic_block_quant": Kernel(run=_block_quant, fake=_fake_block_quant),
    "npu::npu_dynamic_mx_quant": Kernel(run=_mx_quant, fake=_fake_mx_quant),
    "npu::npu_transpose_quant_batchmatmul": Kernel(run=_quant_batchmatmul, fake=_fake_quant_batchmatmul),
}
