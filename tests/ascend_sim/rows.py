"""Row-wise work and writes: RMS norm, partial rotary, scattered rows.

Formulas: kernel sheet 3.1 to 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from ascend_sim.rules import Kernel, SimulatorError, Site
from torch import Tensor

__all__ = ["KERNELS", "check_pairs", "turn_pairs", "write_rows"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def _rms_norm(site: Site, *, input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    site.dtype("input", input, *_FLOATS)
    site.dtype("gamma", gamma, input.dtype, torch.float32)
    site.shape("gamma", gamma, input.shape[-1:])
    wide = input.float()
    rstd = (wide.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()
    return (wide * rstd * gamma.float()).to(input.dtype), rstd


def _fake_rms_norm(site: Site, *, input: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input), input.new_empty((*input.shape[:-1], 1), dtype=torch.float32)


def check_pairs(site: Site, name: str, x: Tensor) -> None:
    """Require cosines or sines that are expanded to neighbouring pairs."""
    same = torch.equal(x[..., 0::2], x[..., 1::2])
    site.require(same, f"{name} expanded to pairs (a0, a0, a1, a1, ...)", "something else")


def turn_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring pairs; everything float32."""
    crossed = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    return x * cos + crossed * sin


def _rotary(site: Site, *, x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str, partial_slice: Sequence[int]) -> None:
    site.require(x.dim() == 4, "x of rank 4", x.dim())
    site.dtype("x", x, *_FLOATS)
    site.require(x.shape[-1] <= 1024 and x.shape[-1] % 2 == 0, "an even width of at most 1024", x.shape[-1])
    site.fixed(rotary_mode=(rotary_mode, "interleave"))
    site.require(len(partial_slice) == 2, "partial_slice of two numbers", partial_slice)
    begin, end = partial_slice
    site.require(0 <= begin < end <= x.shape[-1], "partial_slice inside the width", partial_slice)
    for name, r in (("r1", r1), ("r2", r2)):
        site.dtype(name, r, torch.float32, x.dtype)
        site.shape(name, r, (x.shape[0], 1, 1, end - begin))
        check_pairs(site, name, r)
    part = x[..., begin:end]
    part.copy_(turn_pairs(part.float(), r1.float(), r2.float()))


def write_rows(site: Site, flat: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows of a cache; slot 0 is nobody's, any other slot has one writer.

    Args:
        site: the operator.
        flat: float[S,...] or integers. The cache; written.
        slots: i64[T], none negative.
        rows: as ``flat``, per slot.
    """
    live = slots[slots != 0]
    site.require(len(live.unique()) == len(live), "one writer per slot, but slot 0", slots.tolist())
    flat[slots] = rows
    if site.rules.poison_dummy and len(live) < len(slots) and flat.dtype.is_floating_point:
        flat[0] = math.nan


def _scatter(site: Site, *, input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    site.require(indices.dim() >= 2, "indices of rank 2 or more", indices.dim())
    _write_by_index(site, input, indices, updates, "updates")
    return input


def _write_by_index(site: Site, var: Tensor, indices: Tensor, rows: Tensor, name: str) -> None:
    site.dtype("indices", indices, torch.int32, torch.int64)
    depth = indices.shape[-1]
    site.require(1 <= depth <= var.dim(), "indices into leading axes", tuple(indices.shape))
    site.tensor(name, rows, var.dtype, (*indices.shape[:-1], *var.shape[depth:]))
    limits = torch.tensor(var.shape[:depth])
    index = indices.reshape(-1, depth).long()
    inside = bool(((index >= 0) & (index < limits)).all())
    site.require(inside, f"indices in 0..{[n - 1 for n in var.shape[:depth]]}", indices.tolist())
    strides = torch.tensor([math.prod(var.shape[axis + 1 : depth]) for axis in range(depth)])
    flat = var.view(-1, *var.shape[depth:])
    write_rows(site, flat, (index * strides).sum(-1), rows.reshape(-1, *var.shape[depth:]))


def _scatter_skipping(site: Site, *, var: Tensor, indices: Tensor, update: Tensor) -> None:
    site.require(var.dim() == 2, "var of rank 2", var.dim())
    site.size("the row width", var.shape[1], (1, 128, 512))
    site.dtype("indices", indices, torch.int32, torch.int64)
    site.require(indices.dim() == 2 and indices.shape[1] == 1, "indices of shape [u,1]", tuple(indices.shape))
    site.require(len(indices) <= len(var), "no more rows than var has", len(indices))
    site.tensor("update", update, var.dtype, (len(indices), var.shape[1]))
    site.require(bool((indices < len(var)).all()), f"indices below {len(var)}", indices.tolist())
    slots = indices.flatten().long()
    write_rows(site, var, slots[slots >= 0], update[slots >= 0])


def _scatter_leading(site: Site, *, var: Tensor, indices: Tensor, update: Tensor) -> None:
    _write_by_index(site, var, indices, update, "update")


def _fake_scatter(site: Site, *, input: Tensor, **_: object) -> Tensor:
    return input


def refuse(site: Site, **_: object) -> None:
    """Stand in for an operator that must not be called at all."""
    raise SimulatorError(site.operator, "another operator: this one cannot do V4's work", "a call")


KERNELS = {
    "npu::npu_rms_norm": Kernel(run=_rms_norm, fake=_fake_rms_norm, empty=True),
    "custom::inplace_partial_rotary_mul": Kernel(run=_rotary),
    "_C_ascend::inplace_partial_rotary_mul": Kernel(run=_rotary),
    "npu::npu_scatter_nd_update_": Kernel(run=_scatter, fake=_fake_scatter),
    "custom::scatter_nd_update_asc": Kernel(run=_scatter_skipping),
    "_C_ascend::npu_scatter_nd_update_v2": Kernel(run=_scatter_leading),
}
