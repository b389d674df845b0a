"""One matrix product per expert over rows that are sorted by expert.

Rules and formulas: kernel sheet 7.2; the operator's documentation in torch-npu 2.13.0, and op-plugin
``torch_npu-npu_grouped_matmul.md`` for MX blocks (A5). Rows behind the last group are undefined there and NaN here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from ascend_sim.routing import poison
from ascend_sim.rules import Kernel, SimulatorError, Site, dtype_of
from torch import Tensor

__all__ = ["KERNELS", "group_ends"]

_UNUSED = (
    *("bias", "offset", "antiquant_scale", "antiquant_offset", "activation_input", "activation_quant_scale"),
    *("activation_quant_offset", "tuning_config", "x_dtype", "weight_dtype"),
)
_FP8 = torch.float8_e4m3fn
_MX_BLOCK = 32


def _only(site: Site, name: str, tensors: Sequence[Tensor]) -> Tensor:
    site.require(len(tensors) == 1, f"one tensor in {name}", len(tensors))
    return tensors[0]


def group_ends(site: Site, group_list: Tensor | None, n_groups: int, n_rows: int, kind: int) -> list[int]:
    """Require lengths (kind 1) or their running sums (kind 0), one per group: i64[E]; hand back the running sums."""
    if group_list is None:
        raise SimulatorError(site.operator, "group_list to be given", None)
    site.tensor("group_list", group_list, torch.int64, (n_groups,))
    site.require(kind in (0, 1), "group_list_type 0 or 1", kind)
    site.require(kind == 0 or n_groups > 1, "more than one group where counts are given", n_groups)
    given = group_list.tolist()
    ends = group_list.cumsum(0).tolist() if kind else given
    rising = [0, *ends] == sorted([0, *ends])
    site.require(rising, "counts, none negative" if kind else "running sums that do not fall", given)
    site.require(ends[-1] <= n_rows, f"groups inside the {n_rows} rows", given)
    return ends


def _check_weight(site: Site, w: Tensor) -> None:
    site.require(w.dim() == 3, "weight of shape [E,K,N]", tuple(w.shape))
    dense = w.is_contiguous() or w.transpose(-1, -2).is_contiguous()
    site.require(dense, "weight contiguous, or its transpose", w.stride())


def _out_dtype(site: Site, x: Tensor, code: int | None) -> torch.dtype:
    quantised = x.dtype in (torch.int8, _FP8)
    if quantised:
        site.require(code is not None, f"output_dtype for {x.dtype} factors", None)
    dtype = x.dtype if code is None else dtype_of(site, "output_dtype", code)
    allowed = (torch.bfloat16, torch.float16) if quantised else (x.dtype,)
    site.require(dtype in allowed, f"output_dtype among {allowed}", dtype)
    return dtype


def _grouped_matmul(
    site: Site,
    *,
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    scale: Sequence[Tensor] | None,
    per_token_scale: Sequence[Tensor] | None,
    group_list: Tensor | None,
    split_item: int,
    group_type: int | None,
    group_list_type: int,
    act_type: int,
    output_dtype: int | None,
    **o: Any,
) -> list[Tensor]:
    site.absent(**{name: o[name] for name in _UNUSED})
    a, w = _only(site, "x", x), _only(site, "weight", weight)
    site.require(split_item in (2, 3), "split_item 2 or 3, one result", split_item)
    site.fixed(group_type=(group_type, 0), act_type=(act_type, 0))
    site.dtype("x", a, torch.bfloat16, torch.float16, torch.int8, *((_FP8,) if site.rules.chip == "a5" else ()))
    site.dtype("weight", w, a.dtype)
    site.require(a.dim() == 2, "x of shape [M,K]", tuple(a.shape))
    _check_weight(site, w)
    site.require(a.shape[1] == w.shape[1], f"weight with {a.shape[1]} rows per group", tuple(w.shape))
    ends = group_ends(site, group_list, len(w), len(a), group_list_type)
    quantised = a.dtype is torch.int8
    dtype = _out_dtype(site, a, output_dtype)
    if a.dtype is _FP8:
        a, w = _unblocked(site, a, w, scale, per_token_scale, o)
    else:
        site.absent(scale_dtype=o["scale_dtype"], per_token_scale_dtype=o["per_token_scale_dtype"])
    if not quantised and a.dtype is not torch.float32:
        site.absent(scale=scale, per_token_scale=per_token_scale)
    out = poison((len(a), w.shape[2]), dtype)
    channel, row = _scales(site, a, w, scale, per_token_scale) if quantised else (None, None)
    for e, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        part = a[begin:end]
        if channel is None:
            y = part.float() @ w[e].float()
        else:
            y = (part.int() @ w[e].int()).float() * channel[e].float()
            y = y if row is None else y * row[begin:end].unsqueeze(-1)
        out[begin:end] = y.to(dtype)
    return [out]


def _scales(
    site: Site, a: Tensor, w: Tensor, scale: Sequence[Tensor] | None, per_token_scale: Sequence[Tensor] | None
) -> tuple[Tensor, Tensor | None]:
    site.require(scale is not None, "scale of the weight for int8 factors", None)
    channel = _only(site, "scale", scale or ())
    site.dtype("scale", channel, torch.float32, torch.bfloat16)
    site.shape("scale", channel, (w.shape[0], w.shape[2]))
    if per_token_scale is None:
        return channel, None
    row = site.tensor("per_token_scale", _only(site, "per_token_scale", per_token_scale), torch.float32, (len(a),))
    return channel, row


def _unblocked(
    site: Site,
    a: Tensor,
    w: Tensor,
    scale: Sequence[Tensor] | None,
    per_token_scale: Sequence[Tensor] | None,
    o: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Undo MX blocks of 32 along K: (f32[M,K], f32[E,K,N]). Exponents are stored in the order of their codes."""
    site.require(scale is not None and per_token_scale is not None, "scale and per_token_scale for MX factors", None)
    for name in ("scale_dtype", "per_token_scale_dtype"):
        site.require(o[name] is not None, f"{name} given", None)
        site.require(dtype_of(site, name, o[name]) is torch.float8_e8m0fnu, f"{name} of e8m0", o[name])
    (m, k), (n_groups, _, n) = a.shape, w.shape
    channel, row = _only(site, "scale", scale or ()), _only(site, "per_token_scale", per_token_scale or ())
    n_pairs = -(-k // (2 * _MX_BLOCK))
    for name, x, shape in (
        ("scale", channel, (n_groups, n_pairs, n, 2)),
        ("per_token_scale", row, (m, n_pairs, 2)),
    ):
        site.require(x.element_size() == 1, f"{name} of one byte each", x.dtype)
        site.shape(name, x, shape)
    turned = w.transpose(1, 2).is_contiguous() and not w.is_contiguous()
    same = channel.transpose(1, 2).is_contiguous() if turned else channel.is_contiguous()
    site.require(same and row.is_contiguous(), "scale stored in the order of the weight", channel.stride())
    by_row, by_column = _powers(row, k), _powers(channel.transpose(1, 2), k).transpose(1, 2)
    return a.float() * by_row, w.float() * by_column


def _powers(exponents: Tensor, k: int) -> Tensor:
    """Spread shared exponents over their blocks: u8[...,C,2] -> f32[...,k]."""
    biased = exponents.contiguous().view(torch.uint8).int()
    return torch.ldexp(torch.ones(biased.shape), biased - 127).flatten(-2).repeat_interleave(_MX_BLOCK, -1)[..., :k]


def _fake_grouped_matmul(
    site: Site, *, x: Sequence[Tensor], weight: Sequence[Tensor], output_dtype: int | None, **_: object
) -> list[Tensor]:
    return [x[0].new_empty((x[0].shape[0], weight[0].shape[2]), dtype=_out_dtype(site, x[0], output_dtype))]


KERNELS = {
    "npu::npu_grouped_matmul": Kernel(
        run=_grouped_matmul, fake=_fake_grouped_matmul, strided=frozenset({"weight", "scale"})
    ),
}
