"""Quantised rows and matrix products.

Rules and formulas: kernel sheet 3.1 and 6.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from ascend_sim.rules import Kernel, Site, dtype_of
from torch import Tensor

__all__ = ["KERNELS", "quantise_rows"]

_INT8_MAX = 127.0
_FRACTAL_NZ = 29


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise every row to int8 with a scale of its own: (i8[...,D], f32[...])."""
    wide = x.float()
    scale = wide.abs().amax(-1) / _INT8_MAX
    codes = torch.where(scale.unsqueeze(-1) > 0, wide / scale.unsqueeze(-1), 0.0)
    return codes.round().clamp(-_INT8_MAX, _INT8_MAX).to(torch.int8), scale


def _dynamic_quant(
    site: Site, *, input: Tensor, dst_type: int | None, quant_mode: str, dst_type_max: float, **o: Any
) -> tuple[Tensor, Tensor]:
    site.dtype("input", input, torch.bfloat16, torch.float16)
    site.require(input.dim() >= 2, "input of rank 2 or more", input.dim())
    site.absent(smooth_scales=o["smooth_scales"], group_index=o["group_index"])
    site.fixed(quant_mode=(quant_mode, "pertoken"), dst_type_max=(dst_type_max, 0.0))
    if dst_type is not None:
        site.require(dtype_of(site, "dst_type", dst_type) is torch.int8, "dst_type int8", dst_type)
    return quantise_rows(input)


def _fake_dynamic_quant(site: Site, *, input: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input, dtype=torch.int8), input.new_empty(input.shape[:-1], dtype=torch.float32)


def _output(site: Site, code: int | None) -> torch.dtype:
    dtype = torch.int8 if code is None else dtype_of(site, "output_dtype", code)
    site.require(dtype in (torch.bfloat16, torch.float16), "output_dtype bf16 or f16", dtype)
    return dtype


def _quant_matmul(
    site: Site,
    *,
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    pertoken_scale: Tensor | None,
    bias: Tensor | None,
    output_dtype: int | None,
    **o: Any,
) -> Tensor:
    site.absent(**{name: o[name] for name in ("offset", "x1_dtype", "x2_dtype", "group_sizes", "y_scale")})
    site.dtype("x1", x1, torch.int8)
    site.dtype("x2", x2, torch.int8)
    site.require(x1.dim() == x2.dim() == 2, "x1 [M,K] and x2 [K,N]", (tuple(x1.shape), tuple(x2.shape)))
    site.require(x1.shape[1] == x2.shape[0], f"x2 with {x1.shape[1]} rows", tuple(x2.shape))
    site.dtype("scale", scale, torch.float32, torch.bfloat16)
    site.shape("scale", scale, (x2.shape[1],))
    out = _output(site, output_dtype)
    y = (x1.int() @ x2.int()).float()
    if bias is not None and bias.dtype is torch.int32:
        y = y + site.tensor("bias", bias, torch.int32, (x2.shape[1],))
    y = y * scale.float()
    if pertoken_scale is not None:
        y = y * site.tensor("pertoken_scale", pertoken_scale, torch.float32, (len(x1),)).unsqueeze(-1)
    if bias is not None and bias.dtype is not torch.int32:
        site.dtype("bias", bias, torch.float32, torch.bfloat16, torch.float16)
        site.shape("bias", bias, (x2.shape[1],))
        y = y + bias.float()
    return y.to(out)


def _fake_quant_matmul(site: Site, *, x1: Tensor, x2: Tensor, output_dtype: int | None, **_: object) -> Tensor:
    return x1.new_empty((x1.shape[0], x2.shape[1]), dtype=_output(site, output_dtype))


def _orders(perm: Sequence[int] | None) -> tuple[int, ...]:
    return (0, 1, 2) if perm is None else tuple(perm)


def _transpose_batchmatmul(
    site: Site,
    *,
    input: Tensor,
    weight: Tensor,
    perm_x1: Sequence[int] | None,
    perm_x2: Sequence[int] | None,
    perm_y: Sequence[int] | None,
    batch_split_factor: int | None,
    **o: Any,
) -> Tensor:
    site.absent(bias=o["bias"], scale=o["scale"])
    site.dtype("input", input, torch.bfloat16, torch.float16)
    site.dtype("weight", weight, input.dtype)
    site.require(input.dim() == weight.dim() == 3, "two tensors of rank 3", (input.dim(), weight.dim()))
    site.require(_orders(perm_x1) in {(0, 1, 2), (1, 0, 2)}, "perm_x1 (0,1,2) or (1,0,2)", perm_x1)
    site.require(_orders(perm_x2) in {(0, 1, 2), (0, 2, 1)}, "perm_x2 (0,1,2) or (0,2,1)", perm_x2)
    site.fixed(perm_y=(_orders(perm_y), (1, 0, 2)), batch_split_factor=(batch_split_factor, 1))
    a, b = input.permute(_orders(perm_x1)), weight.permute(_orders(perm_x2))
    site.require(
        a.shape[0] == b.shape[0] and a.shape[2] == b.shape[1], f"matching [G,M,K]={tuple(a.shape)}", tuple(b.shape)
    )
    sizes = (b.shape[1], b.shape[2])
    site.require(all(n % 16 == 0 for n in sizes), "K and N multiples of 16", sizes)
    return (a.float() @ b.float()).to(input.dtype).permute(1, 0, 2).contiguous()


def _fake_transpose_batchmatmul(
    site: Site,
    *,
    input: Tensor,
    weight: Tensor,
    perm_x1: Sequence[int] | None,
    perm_x2: Sequence[int] | None,
    **_: object,
) -> Tensor:
    a = tuple(input.shape[axis] for axis in _orders(perm_x1))
    b = tuple(weight.shape[axis] for axis in _orders(perm_x2))
    return input.new_empty((a[1], a[0], b[2]))


def _format_cast(site: Site, *, input: Tensor, acl_format: int, **o: Any) -> Tensor:
    site.absent(customize_dtype=o["customize_dtype"], input_dtype=o["input_dtype"])
    site.require(acl_format in (2, _FRACTAL_NZ), "format 2 (ND) or 29 (FRACTAL_NZ)", acl_format)
    if acl_format == _FRACTAL_NZ:
        k, n = input.shape[-2:]
        align = 32 if input.dtype is torch.int8 else 16
        site.require(k % 16 == 0 and n % align == 0, f"sides that are multiples of 16 and {align}", (k, n))
    return input.clone()


def _fake_format_cast(site: Site, *, input: Tensor, **_: object) -> Tensor:
    return torch.empty_like(input)


KERNELS = {
    "npu::npu_dynamic_quant": Kernel(run=_dynamic_quant, fake=_fake_dynamic_quant, empty=True),
    "npu::npu_quant_matmul": Kernel(run=_quant_matmul, fake=_fake_quant_matmul, strided=frozenset({"x2"})),
    "npu::npu_transpose_batchmatmul": Kernel(run=_transpose_batchmatmul, fake=_fake_transpose_batchmatmul),
    "npu::npu_format_cast": Kernel(run=_format_cast, fake=_fake_format_cast),
}
