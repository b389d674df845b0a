"""Pooling of token groups into compressed entries (ratio 4 with overlap, ratio 128 without).

Source: DeepSeek-V4 ``inference/model.py``, ``Compressor``; model sheet 2.8.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["fold_member", "folded", "overlap_groups", "plain_groups", "pool_group"]


def pool_group(kv: Tensor, scores: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Pool the members of every group with one softmax per channel.

    Args:
        kv: f32[...,A,D]. Members of a group on axis -2.
        scores: f32[...,A,D]. Pooling logits with the position bias; -inf leaves a member out (never all of them).
        dtype: what the softmax weights, their products and the sum are rounded to.
    Returns:
        f32[...,D].
    """
    if dtype is torch.float32:
        return (scores.softmax(-2) * kv).sum(-2)
    return (scores.softmax(-2).to(dtype) * kv.to(dtype)).sum(-2).float()


def fold_member(state: Tensor, kv: Tensor, scores: Tensor) -> Tensor:
    """Let every group take one more member, by an online softmax.

    Args:
        state: f32[A,3*D]. Weighted sum, sum of weights, largest score; (0, 0, -inf) for a group without members.
        kv: f32[A,D].
        scores: f32[A,D]. -inf takes nothing; a group's first member has finite ones.
    Returns:
        f32[A,3*D].
    Source: none; the recurrence of online softmax, in its plainest form.
    """
    weighted, total, top = state.chunk(3, -1)
    new_top = torch.maximum(top, scores)
    old, new = (top - new_top).exp(), (scores - new_top).exp()
    return torch.cat((weighted * old + kv * new, total * old + new, new_top), dim=-1)


def folded(state: Tensor) -> Tensor:
    """Return what a group pools to: f32[A,3*D] -> f32[A,D]."""
    weighted, total, _ = state.chunk(3, -1)
    return weighted / total


def plain_groups(x: Tensor, ratio: int) -> Tensor:
    """Cut a token sequence into its whole groups.

    Args:
        x: f32[...,T,D].
        ratio: tokens per group.
    Returns:
        f32[...,T//ratio,ratio,D].
    """
    n = x.shape[-2] // ratio
    return x[..., : n * ratio, :].unflatten(-2, (n, ratio))


def overlap_groups(x: Tensor, ratio: int, fill: float) -> Tensor:
    """Cut a token sequence into groups that overlap by one: a-halves of the previous group, b-halves of its own.

    Args:
        x: f32[...,T,2*D]. Halves a, b.
        ratio: tokens per group.
        fill: stands in for the group before the first.
    Returns:
        f32[...,T//ratio,2*ratio,D].
    """
    a, b = plain_groups(x, ratio).chunk(2, dim=-1)
    before = torch.full_like(a[..., :1, :, :], fill)
    return torch.cat((torch.cat((before, a[..., :-1, :, :]), dim=-3), b), dim=-2)
