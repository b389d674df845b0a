"""Rows to experts and back on one rank: expansion by expert, and the weighted sum.

Rules and formulas: kernel sheet 7.2; the operators' documentation in torch-npu 2.13.0. What no row was routed to is
undefined there and NaN here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from ascend_sim.products import quantise_rows
from ascend_sim.rules import Kernel, SimulatorError, Site
from torch import Tensor

__all__ = ["KERNELS", "poison"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def poison(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Make a tensor of what nobody may read: NaN, or the lowest integer."""
    return torch.full(tuple(shape), math.nan if dtype.is_floating_point else torch.iinfo(dtype).min, dtype=dtype)


def _expert_ids(site: Site, x: Tensor, ids: Tensor, n_experts: int) -> Tensor:
    site.dtype("expert_idx", ids, torch.int32)
    site.require(ids.dim() == 2 and len(ids) == len(x), f"expert_idx of shape [{len(x)},K]", tuple(ids.shape))
    site.require(0 < n_experts <= 10240, "expert_num in 1..10240", n_experts)
    inside = bool(((ids >= 0) & (ids < n_experts)).all())
    site.require(inside, f"expert ids below {n_experts}", ids.tolist())
    return ids.flatten().long()


def _init_routing(
    site: Site,
    *,
    x: Tensor,
    expert_idx: Tensor,
    scale: Tensor | None,
    active_num: int,
    expert_num: int,
    quant_mode: int,
    active_expert_range: Sequence[int],
    row_idx_type: int,
    **o: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    site.require(x.dim() == 2, "x of shape [T,H]", tuple(x.shape))
    site.dtype("x", x, *_FLOATS, torch.int8)
    site.absent(offset=o["offset"], x_dtype=o["x_dtype"])
    for name, only in (("drop_pad_mode", 0), ("expert_tokens_num_type", 1), ("expert_tokens_num_flag", True)):
        site.fixed(**{name: (o[name], only)})
    site.require(quant_mode in (-1, 1), "quant_mode -1 or 1", quant_mode)
    site.require(row_idx_type in (0, 1), "row_idx_type 0 or 1", row_idx_type)
    owners = _expert_ids(site, x, expert_idx, expert_num)
    site.require(len(active_expert_range) == 2, "active_expert_range of two numbers", active_expert_range)
    first, end = active_expert_range
    site.require(0 <= first < end <= expert_num, f"a range inside 0..{expert_num}", active_expert_range)
    n_pairs, n_chosen = expert_idx.numel(), expert_idx.shape[1]
    site.require(active_num in (-1, 0, n_pairs), f"active_num of all {n_pairs} pairs", active_num)
    if scale is not None:
        site.require(quant_mode == -1, "no smoothing scale: not supported", "scale")
        site.tensor("scale", scale, torch.float32, (len(x),))
    live = (owners >= first) & (owners < end)
    order = torch.sort(torch.where(live, owners, expert_num), stable=True).indices[: int(live.sum())]
    sources = x[order // n_chosen]
    scales = poison((n_pairs,), torch.float32)
    if quant_mode == 1:
        site.require(x.dtype is not torch.int8, "x that is not quantised already", x.dtype)
        sources, scales[: len(order)] = quantise_rows(sources)
    elif scale is not None:
        scales[: len(order)] = scale[order // n_chosen]
    rows = poison((n_pairs, x.shape[1]), sources.dtype)
    rows[: len(order)] = sources
    index = torch.full((n_pairs,), -1, dtype=torch.int32) if row_idx_type == 0 else poison((n_pairs,), torch.int32)
    if row_idx_type == 0:
        index[order] = torch.arange(len(order), dtype=torch.int32)
    else:
        index[: len(order)] = order.int()
    return rows, index, torch.bincount(owners[live] - first, minlength=end - first), scales


def _fake_init_routing(
    site: Site, *, x: Tensor, expert_idx: Tensor, quant_mode: int, active_expert_range: Sequence[int], **_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n_pairs = expert_idx.shape[0] * expert_idx.shape[1]
    first, end = active_expert_range
    return (
        x.new_empty((n_pairs, x.shape[1]), dtype=torch.int8 if quant_mode == 1 else x.dtype),
        x.new_empty((n_pairs,), dtype=torch.int32),
        x.new_empty((end - first,), dtype=torch.int64),
        x.new_empty((n_pairs,), dtype=torch.float32),
    )


def _unpermute(
    site: Site,
    *,
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None,
    padded_mode: bool,
    restore_shape: Sequence[int] | None,
) -> Tensor:
    rows = permuted_tokens
    site.absent(restore_shape=restore_shape)
    site.fixed(padded_mode=(padded_mode, False))
    site.dtype("permuted_tokens", rows, *_FLOATS)
    site.require(rows.dim() == 2, "permuted_tokens of rank 2", rows.dim())
    site.dtype("sorted_indices", sorted_indices, torch.int32, torch.int64)
    site.require(sorted_indices.dim() == 1, "sorted_indices of rank 1", sorted_indices.dim())
    inside = bool(((sorted_indices >= 0) & (sorted_indices < len(rows))).all())
    site.require(inside, f"indices in 0..{len(rows) - 1}", sorted_indices.tolist())
    n_chosen = 1
    if probs is not None:
        site.dtype("probs", probs, rows.dtype)
        site.require(probs.dim() == 2, "probs of shape [T,K]", tuple(probs.shape))
        n_chosen = probs.shape[1]
        site.require(len(sorted_indices) == probs.numel(), f"{probs.numel()} indices", len(sorted_indices))
    picked = rows[sorted_indices.long()].float().unflatten(0, (-1, n_chosen))
    if probs is not None:
        picked = picked * probs.float().unsqueeze(-1)
    return picked.sum(1).to(rows.dtype)


def _fake_unpermute(
    site: Site, *, permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None, **_: object
) -> Tensor:
    n_chosen = 1 if probs is None else probs.shape[1]
    return permuted_tokens.new_empty((sorted_indices.shape[0] // n_chosen, permuted_tokens.shape[1]))


def _finalize(
    site: Site,
    *,
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None,
    k: int | None = None,
) -> Tensor:
    """Sum by an index whose order depends on the mode: choice by choice in mode 0, row by row in mode 2."""
    rows, index = expanded_permuted_rows, expanded_src_to_dst_row
    site.require(site.rules.chip == "a2", "the A2, the only chip it is documented for", site.rules.chip)
    site.dtype("expanded_permuted_rows", rows, *_FLOATS)
    site.require(rows.dim() == 2, "expanded_permuted_rows of rank 2", rows.dim())
    site.absent(bias=bias, export_for_source_row=export_for_source_row)
    site.require(drop_pad_mode in (0, 2), "drop_pad_mode 0 or 2", drop_pad_mode)
    site.require(skip2 is None or skip1 is not None, "skip1 wherever there is skip2", None)
    if scales is None:
        raise SimulatorError(site.operator, "scales to be given", None)
    site.dtype("scales", scales, rows.dtype)
    site.require(scales.dim() == 2, "scales of shape [T,K]", tuple(scales.shape))
    n_rows, n_chosen = scales.shape
    site.tensor("expanded_src_to_dst_row", index, torch.int32, (n_rows * n_chosen,))
    inside = bool(((index >= 0) & (index < len(rows))).all())
    site.require(inside, f"rows in 0..{len(rows) - 1}", index.tolist())
    table = index.long().view(n_chosen, n_rows).t() if drop_pad_mode == 0 else index.long().view(n_rows, n_chosen)
    out = (rows[table].float() * scales.float().unsqueeze(-1)).sum(1)
    for name, skip in (("skip1", skip1), ("skip2", skip2)):
        if skip is not None:
            out = out + site.tensor(name, skip, rows.dtype, out.shape).float()
    return out.to(rows.dtype)


def _fake_finalize(site: Site, *, expanded_permuted_rows: Tensor, scales: Tensor, **_: object) -> Tensor:
    return expanded_permuted_rows.new_empty((scales.shape[0], expanded_permuted_rows.shape[1]))


KERNELS = {
    "npu::npu_moe_init_routing_v2": Kernel(run=_init_routing, fake=_fake_init_routing),
    "npu::npu_moe_token_unpermute": Kernel(
        run=_unpermute, fake=_fake_unpermute, strided=frozenset({"permuted_tokens", "sorted_indices", "probs"})
    ),
    "npu::npu_moe_finalize_routing": Kernel(run=_finalize, fake=_fake_finalize),
}
