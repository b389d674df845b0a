"""Hyper-connections: ``npu_hc_pre`` and ``npu_hc_post``.

Formulas: kernel sheet 2.1 and 2.2. The product of ``npu_hc_pre`` runs in HF32: both factors lose their low 13 mantissa
bits (towards zero), sums are float32.
"""

from __future__ import annotations

import torch
from ascend_sim.rules import Kernel, Site
from torch import Tensor

__all__ = ["KERNELS", "truncate_hf32"]

_HF32_MASK = ~((1 << 13) - 1)


def truncate_hf32(x: Tensor) -> Tensor:
    """Clear the 13 low mantissa bits of float32 numbers."""
    return (x.float().view(torch.int32) & _HF32_MASK).view(torch.float32)


def _pre(
    site: Site,
    *,
    x: Tensor,
    hc_fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    hc_mult: int,
    hc_sinkhorn_iters: int,
    norm_eps: float,
    hc_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    m, d = x.shape[-2:]
    site.require(x.dim() in (3, 4), "x of rank 3 or 4", x.dim())
    site.dtype("x", x, torch.bfloat16)
    site.require(m == hc_mult == 4, "four streams, and hc_mult=4", (m, hc_mult))
    site.size("the hidden width", d, (4096, 7168))
    site.tensor("hc_fn", hc_fn, torch.float32, ((2 + m) * m, m * d))
    site.tensor("hc_scale", hc_scale, torch.float32, (3,))
    site.tensor("hc_base", hc_base, torch.float32, ((2 + m) * m,))
    site.require(hc_sinkhorn_iters >= 1, "at least one Sinkhorn round", hc_sinkhorn_iters)
    flat = x.flatten(-2).float()
    z = truncate_hf32(flat) @ truncate_hf32(hc_fn).t() * (flat.pow(2).mean(-1, keepdim=True) + norm_eps).rsqrt()
    pre = torch.sigmoid(z[..., :m] * hc_scale[0] + hc_base[:m]) + hc_eps
    post = 2 * torch.sigmoid(z[..., m : 2 * m] * hc_scale[1] + hc_base[m : 2 * m])
    c = (z[..., 2 * m :] * hc_scale[2] + hc_base[2 * m :]).reshape(*z.shape[:-1], m, m)
    c = torch.softmax(c, -1) + hc_eps
    c = c / (c.sum(-2, keepdim=True) + hc_eps)
    for _ in range(hc_sinkhorn_iters - 1):
        c = c / (c.sum(-1, keepdim=True) + hc_eps)
        c = c / (c.sum(-2, keepdim=True) + hc_eps)
    y = torch.einsum("...i,...id->...d", pre, x.float()).to(x.dtype)
    return y, post, c


def _fake_pre(site: Site, *, x: Tensor, **_: object) -> tuple[Tensor, Tensor, Tensor]:
    lead, m = x.shape[:-2], x.shape[-2]
    wide = {"dtype": torch.float32}
    return x.new_empty((*lead, x.shape[-1])), x.new_empty((*lead, m), **wide), x.new_empty((*lead, m, m), **wide)


def _post(site: Site, *, x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    batched = residual.dim() == 4
    site.require(residual.dim() in (3, 4), "residual of rank 3 or 4", residual.dim())
    if site.rules.chip == "a5" or site.operator.startswith("_C_ascend"):
        site.require(batched, "a leading batch axis here", tuple(residual.shape))
    *lead, m, d = residual.shape
    site.dtype("residual", residual, torch.bfloat16)
    site.require(m == 4, "four streams", m)
    site.tensor("x", x, residual.dtype, (*lead, d))
    site.tensor("post", post, torch.float32, (*lead, m))
    site.tensor("comb", comb, torch.float32, (*lead, m, m))
    mixed = torch.einsum("...ji,...jd->...id", comb, residual.float())
    return (mixed + post.unsqueeze(-1) * x.float().unsqueeze(-2)).to(x.dtype)


def _fake_post(site: Site, *, residual: Tensor, **_: object) -> Tensor:
    return torch.empty_like(residual)


KERNELS = {
    "custom::npu_hc_pre": Kernel(run=_pre, fake=_fake_pre),
    "custom::npu_hc_post": Kernel(run=_post, fake=_fake_post),
    "_C_ascend::npu_hc_pre_v2": Kernel(run=_pre, fake=_fake_pre),
    "_C_ascend::npu_hc_post": Kernel(run=_post, fake=_fake_post),
}
