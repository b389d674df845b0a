"""Operators as a compiled graph wants them: static shapes, nothing read by the host, loops that a compiler can fuse.

They compute what the plain ones do, in other orders, within float rounding. Where a library's kernel beats what a
compiler generates, a registered operator calls it: products with packed weights (``ops/packed.py``).

Source: none; the formulas are those of the plain operators.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from . import fused, packed, router
from . import streams as plain
from .blocks import experts_blocked
from .experts import PLAIN, ExpertMath, inner_rows, summed
from .kept import kept
from .linear import grouped_linear as plain_grouped

__all__ = [
    "THIN_ROWS",
    "Turns",
    "apply_rotary",
    "enter_streams",
    "expert",
    "experts",
    "grouped_linear",
    "join_streams",
    "linear",
    "mix_weights",
    "rotary_factors",
    "route_scored",
    "sinkhorn",
    "top_indices",
    "update_streams",
]


class Turns(NamedTuple):
    """Rotary factors as two real tensors, because compilers do not generate code for complex ones.

    Attributes:
        cos: f32[...,R/2].
        sin: f32[...,R/2].
    """

    cos: Tensor
    sin: Tensor

    def unsqueeze(self, axis: int) -> Turns:
        """Add an axis, as to the complex tensor."""
        return Turns(self.cos.unsqueeze(axis), self.sin.unsqueeze(axis))

    def conj(self) -> Turns:
        """Turn back."""
        return Turns(self.cos, -self.sin)


def rotary_factors(positions: Tensor, frequencies: Tensor, dtype: torch.dtype = torch.float32) -> Turns:
    """Compute the rotary factors of every position and pair; see ``rotary.rotary_factors``."""
    angles = positions.float().unsqueeze(-1) * frequencies
    return Turns(angles.cos().to(dtype).float(), angles.sin().to(dtype).float())


def apply_rotary(x: Tensor, factors: Turns) -> Tensor:
    """Rotate the neighbouring pairs of the last R channels; see ``rotary.apply_rotary``."""
    n_pairs = factors.cos.shape[-1]
    head, tail = x.split((x.shape[-1] - 2 * n_pairs, 2 * n_pairs), dim=-1)
    a, b = tail.float().unflatten(-1, (n_pairs, 2)).unbind(-1)
    turned = torch.stack((a * factors.cos - b * factors.sin, a * factors.sin + b * factors.cos), dim=-1)
    return torch.cat((head, turned.flatten(-2).to(x.dtype)), dim=-1)


Weight = Tensor | packed.PackedWeight

THIN_ROWS: Final = 4
"""Rows up to which the compiler generates one sum over a plain weight for all; which are packed, the model decides."""

_PIECE: Final = 4096
"""Channels of all rows that stay in a core's first cache while it goes through a weight."""


def linear(x: Tensor, w: Weight) -> Tensor:
    """Multiply rows by a weight; see ``linear.linear``.

    Few rows and a plain weight become one sum a row over the weight, in f32 whatever the weight is kept in, which the
    compiler computes in one loop.
    """
    if isinstance(w, packed.PackedWeight) or x.shape[:-1].numel() > THIN_ROWS:
        return packed.linear(x, w)
    n = w.shape[-1] // _PIECE if w.shape[-1] % _PIECE == 0 else 1
    rows = kept(x.flatten(0, -2).float()).unflatten(-1, (n, 1, -1))
    wide = w.float().unflatten(-1, (n, -1)).movedim(1, 0)
    out = torch.stack([(wide * row).sum(-1).sum(0) for row in rows.unbind(0)])
    return out.unflatten(0, x.shape[:-1]).to(x.dtype)


def grouped_linear(x: Tensor, w: Tensor | packed.PackedStack) -> Tensor:
    """Multiply every group of channels by its own weight; see ``linear.grouped_linear``."""
    if isinstance(w, packed.PackedStack):
        return packed.grouped_linear(x, w)
    if x.shape[0] > THIN_ROWS:
        return plain_grouped(x, w.float() if fused.EMULATES_BF16 else w)
    rows, wide = kept(x.float()), w.float()
    return torch.stack([(wide * row.unsqueeze(-2)).sum(-1) for row in rows.unbind(0)]).to(x.dtype)


def expert(x: Tensor, w13: Weight, w2: Weight, limit: float | None, *, how: ExpertMath = PLAIN) -> Tensor:
    """Run one (shared) expert on every row; see ``experts.expert``."""
    return linear(inner_rows(linear(x, w13), None, limit, how), w2)


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Any, w2: Any, limit: float, *, how: ExpertMath = PLAIN
) -> Tensor:
    """Run the chosen experts of every row; see ``experts.experts_sorted``.

    A product of a row with a gathered weight is a sum that the compiler fuses with the gather: only the chosen weights
    are read, and nothing is copied. Where rows share experts, those that do are multiplied together: few of them by a
    kernel that reads a weight once for a few rows, many by a library's product on packed weights.
    """
    if isinstance(w13, packed.PackedStack):
        return packed.experts(x, ids, weights, w13, w2, limit, how=how)
    if x.is_cpu and x.shape[0] > 1 and ids.numel() > w13.shape[0] // 4:
        return experts_blocked(x, ids, weights, w13, w2, limit, how=how)
    rows = kept(x.float())
    hidden = (rows[:, None, None, :] * w13[ids].float()).sum(-1).to(x.dtype)
    inner = kept(inner_rows(hidden, weights.unsqueeze(-1), limit, how).float())
    out = (inner[:, :, None, :] * w2[ids].float()).sum(-1).to(x.dtype)
    return summed(out, weights.unsqueeze(-1), 1, how)


def top_indices(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the few largest scores by one search each; see ``selection.top_indices``."""
    found = []
    index = torch.arange(scores.shape[-1], device=scores.device)
    for _ in range(count):
        best = scores.argmax(-1, keepdim=True)
        found.append(best)
        scores = torch.where(index == best, -torch.inf, scores)
    return torch.cat(found, dim=-1)


route_scored = partial(router.route_scored, choose=top_indices)
"""Choose by score plus bias, weigh by the score alone; see ``router.route_scored``."""


def sinkhorn(logits: Tensor, n_iters: int, eps: float) -> Tensor:
    """Do the rounds of ``streams.sinkhorn`` on two vectors that scale a fixed matrix: f32[T,M,M]."""
    k = logits.softmax(-1) + eps
    r = torch.ones_like(k[..., 0])
    c = 1.0 / (k.sum(-2) + eps)
    for _ in range(n_iters - 1):
        r = r / (r * (k * c.unsqueeze(-2)).sum(-1) + eps)
        c = c / (c * (k * r.unsqueeze(-1)).sum(-2) + eps)
    return r.unsqueeze(-1) * k * c.unsqueeze(-2)


def mix_weights(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, n_iters: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the three mixes of one mHC; see ``streams.mix_weights``."""
    n = streams.shape[-2]
    flat = streams.flatten(-2).float()
    mixed = linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    pre, post, comb = mixed.split((n, n, n * n), dim=-1)
    base_pre, base_post, base_comb = base.split((n, n, n * n))
    pre = (pre * scale[0] + base_pre).sigmoid() + eps
    post = (post * scale[1] + base_post).sigmoid() * 2
    comb = (comb * scale[2] + base_comb).unflatten(-1, (n, n))
    return pre, post, sinkhorn(comb, n_iters, eps)


def enter_streams(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, n_iters: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what a sublayer reads and how its output comes back; see ``streams.enter_streams``."""
    pre, post, comb = mix_weights(streams, fn, base, scale, n_iters=n_iters, eps=eps, norm_eps=norm_eps)
    return join_streams(streams, pre), post, comb


def join_streams(streams: Tensor, weights: Tensor) -> Tensor:
    """Sum the streams with one weight each; see ``streams.join_streams``."""
    return (weights.unsqueeze(-1) * streams.float()).sum(-2).to(streams.dtype)


def update_streams(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor, *, rounding: bool = False) -> Tensor:
    """Mix the streams among themselves and add the sublayer's output; see ``streams.update_streams``."""
    if rounding:
        return plain.update_streams(streams, y, post, comb, rounding=True)
    mixed = (comb.unsqueeze(-1) * streams.float().unsqueeze(-2)).sum(-3)
    return (mixed + post.unsqueeze(-1) * y.float().unsqueeze(-2)).to(streams.dtype)
