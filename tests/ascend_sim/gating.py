"""Choice of experts, scored or by token id.

Rules and formulas: kernel sheet 7.1. Scores that nobody asked for are undefined.
"""

from __future__ import annotations

from typing import Any

import torch
from ascend_sim.routing import poison
from ascend_sim.rules import Kernel, Site
from torch import Tensor

__all__ = ["KERNELS"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _gate(
    site: Site,
    *,
    x: Tensor,
    k: int,
    bias: Tensor | None = None,
    bias_opt: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    norm_type: int,
    routed_scaling_factor: float,
    eps: float,
    out_flag: bool,
    **o: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    site.dtype("x", x, *_FLOATS)
    site.require(x.dim() == 2, "x of shape [T,E]", tuple(x.shape))
    n_rows, n_experts = x.shape
    site.require(n_experts <= 2048, "at most 2048 experts", n_experts)
    site.require(1 <= k <= min(64, n_experts), f"k in 1..{min(64, n_experts)}", k)
    for name, only in (("renorm", 0), ("k_group", 1), ("group_count", 1), ("group_select_mode", 0)):
        site.fixed(**{name: (o[name], only)})
    site.require(norm_type in (0, 1, 2), "norm_type 0, 1 or 2", norm_type)
    bias = bias_opt if bias is None else bias
    if bias is not None:
        site.tensor("bias", bias, x.dtype, (n_experts,))
    wide = x.float()
    s = {0: wide.softmax(-1), 1: wide.sigmoid(), 2: torch.nn.functional.softplus(wide).sqrt()}[norm_type]
    site.require((input_ids is None) == (tid2eid is None), "input_ids and tid2eid both or neither", "one of them")
    if input_ids is not None and tid2eid is not None:
        site.tensor("input_ids", input_ids, torch.int64, (n_rows,))
        site.tensor("tid2eid", tid2eid, torch.int32, (len(tid2eid), k))
        inside = bool(((input_ids >= 0) & (input_ids < len(tid2eid))).all())
        site.require(inside, f"token ids below {len(tid2eid)}", input_ids.tolist())
        chosen = tid2eid[input_ids].long()
    else:
        chosen = torch.sort(s if bias is None else s + bias.float(), dim=-1, descending=True, stable=True).indices[
            :, :k
        ]
    weights = s.gather(-1, chosen)
    if norm_type:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    scores = s if out_flag else poison(s.shape, torch.float32)
    return (weights * routed_scaling_factor).to(x.dtype), chosen.int(), scores


def _fake_gate(site: Site, *, x: Tensor, k: int, **_: object) -> tuple[Tensor, Tensor, Tensor]:
    shape = (x.shape[0], k)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int32), x.new_empty(x.shape, dtype=torch.float32)


_GATE = Kernel(run=_gate, fake=_fake_gate)

KERNELS = {
    "custom::npu_moe_gating_top_k": _GATE,
    "_C_ascend::moe_gating_top_k": _GATE,
    "_C_ascend::moe_gating_top_k_hash": _GATE,
}
