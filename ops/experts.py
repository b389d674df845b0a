"""The gated expert network, and two routes from routed rows to their weighted sum.

``experts_dense`` has static shapes and can be differentiated; ``experts_sorted`` touches only the experts that were
hit.

Source: DeepSeek-V4 ``inference/model.py``, ``Expert`` and ``MoE``; model sheet 2.10, decode-path sheet 6.1-6.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from .linear import linear

__all__ = ["Stack", "expert", "experts_dense", "experts_sorted", "gate_up", "run_sorted"]


class Stack(Protocol):
    """The weights of a layer's experts, one to be taken at a time: a tensor, or something in its place."""

    def __len__(self) -> int:
        """Count the experts."""

    def __getitem__(self, index: int, /) -> Any:
        """Take the weight of one expert, as the matrix product wants it."""


def gate_up(hidden: Tensor, limit: float | None) -> Tensor:
    """Apply the clamped SwiGLU to stacked gate and up projections.

    ``silu(min(g, limit)) * clamp(u, -limit, limit)``.

    Args:
        hidden: float[...,2*F]. Gate half, up half.
        limit: clamp, or None for none.
    Returns:
        f32[...,F].
    Rounding: f32.
    """
    gate, up = hidden.float().chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


def expert(x: Tensor, w13: Tensor, w2: Tensor, limit: float | None) -> Tensor:
    """Run one (shared) expert on every row.

    Args:
        x: float[...,H].
        w13: float[2*F,H].
        w2: float[H,F].
        limit: clamp of the SwiGLU, or None.
    Returns:
        float[...,H] in the dtype of ``x``.
    """
    return linear(gate_up(linear(x, w13), limit).to(x.dtype), w2)


def experts_dense(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    """Run every expert on every row and keep what was routed: static shapes, for differentiation and tracing.

    Args:
        x: float[...,H].
        ids: i64[...,K].
        weights: f32[...,K]. Applied before the down projection.
        w13: float[E,2*F,H].
        w2: float[E,H,F].
        limit: clamp of the SwiGLU.
    Returns:
        f32[...,H].
    """
    n_experts = w13.shape[0]
    table = torch.zeros((*ids.shape[:-1], n_experts), dtype=torch.float32, device=x.device).scatter(-1, ids, weights)
    hidden = gate_up(linear(x, w13.flatten(0, 1)).unflatten(-1, (n_experts, -1)), limit)
    routed = (hidden * table.unsqueeze(-1)).to(x.dtype)
    return linear(routed.flatten(-2), w2.movedim(0, 1).flatten(1)).float()


def experts_sorted(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    """Run the experts that were hit, each on its own rows: dispatch by expert-sorted rows, experts, combine.

    An opaque operator: it reads its own routing on the host, so nothing above it has to.

    Args:
        x: float[T,H].
        ids: i64[T,K].
        weights: f32[T,K]. Applied before the down projection.
        w13: float[E,2*F,H].
        w2: float[E,H,F].
        limit: clamp of the SwiGLU.
    Returns:
        f32[T,H].
    Rounding: expert outputs in the dtype of ``x``, their sum in f32.
    """
    return torch.ops.purestep.experts_sorted(x, ids, weights, w13, w2, limit)


def run_sorted(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Stack, w2: Stack, limit: float, multiply: Callable[..., Tensor]
) -> Tensor:
    """Do the work of ``experts_sorted`` with a given matrix product.

    Rows are expanded token-major, sorted by expert (stable), run expert by expert, put back and summed over the K
    choices of each token in the order of its choices.
    """
    if not ids.numel():
        return torch.zeros_like(x, dtype=torch.float32)
    n_rows, n_chosen = ids.shape
    order = torch.argsort(ids.flatten(), stable=True)
    counts = torch.bincount(ids.flatten(), minlength=len(w13)).tolist()
    hit = [(e, n) for e, n in enumerate(counts) if n]
    rows = x.index_select(0, order // n_chosen).split([n for _, n in hit])
    hidden = torch.cat([multiply(part, w13[e]) for (e, _), part in zip(hit, rows, strict=True)])
    hidden = (gate_up(hidden, limit) * weights.flatten().index_select(0, order).unsqueeze(-1)).to(x.dtype)
    parts = hidden.split([n for _, n in hit])
    out = torch.cat([multiply(part, w2[e]) for (e, _), part in zip(hit, parts, strict=True)])
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return out.index_select(0, place).unflatten(0, (n_rows, n_chosen)).sum(1, dtype=torch.float32)


def _experts_sorted(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    return run_sorted(x, ids, weights, w13, w2, limit, linear)


def _experts_fake(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    return torch.empty_like(x, dtype=torch.float32)


_LIBRARY = torch.library.Library("purestep", "DEF")
_LIBRARY.define("experts_sorted(Tensor x, Tensor ids, Tensor weights, Tensor w13, Tensor w2, float limit) -> Tensor")
_LIBRARY.impl("experts_sorted", _experts_sorted, "CompositeExplicitAutograd")
torch.library.register_fake("purestep::experts_sorted", _experts_fake)
