"""The filter before sampling.

Rules and formulas: kernel sheet 8; the operator's documentation in torch-npu 2.13.0. The order of arguments is logits,
p, k.
"""

from __future__ import annotations

import math

import torch
from ascend_sim.rules import Kernel, Site
from torch import Tensor

__all__ = ["KERNELS"]

_MOST = 1024


def _top_k_top_p(site: Site, *, logits: Tensor, p: Tensor | None, k: Tensor | None) -> Tensor:
    site.dtype("logits", logits, torch.float32, torch.bfloat16, torch.float16)
    site.require(logits.dim() == 2, "logits of shape [B,V]", tuple(logits.shape))
    n_rows, n_tokens = logits.shape
    site.require(p is not None or k is not None, "p or k", "neither")
    values, order = torch.sort(logits.float(), dim=-1, stable=True)
    if k is not None:
        site.tensor("k", k, torch.int32, (n_rows,))
        most = min(_MOST, n_tokens)
        site.require(bool(((k >= 1) & (k <= most)).all()), f"k in 1..{most}", k.tolist())
        smallest = values.gather(1, n_tokens - k.long().unsqueeze(1))
        values = values.masked_fill(values < smallest, -math.inf)
    if p is not None:
        site.tensor("p", p, logits.dtype, (n_rows,))
        site.require(bool(((p >= 0) & (p <= 1)).all()), "p in 0..1", p.tolist())
        drop = values.softmax(-1).cumsum(-1) <= 1 - p.float().unsqueeze(1)
        drop[:, -1] = False
        values = values.masked_fill(drop, -math.inf)
    return torch.empty_like(values).scatter_(1, order, values).to(logits.dtype)


def _fake_top_k_top_p(site: Site, *, logits: Tensor, **_: object) -> Tensor:
    return torch.empty_like(logits)


KERNELS = {
    "npu::npu_top_k_top_p": Kernel(run=_top_k_top_p, fake=_fake_top_k_top_p, strided=frozenset({"logits", "p", "k"})),
}
