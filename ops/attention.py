"""Softmax attention of all query heads over one shared key/value head, with a sink.

Key and value are the same vector, so scores and output are two matrix products over one operand.

Source: DeepSeek-V4 ``inference/kernel.py``, ``sparse_attn``; model sheet 2.6.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["attend", "attend_part", "merge_parts", "rounded_scores"]


def attend(q: Tensor, keys: Tensor, mask: Tensor, sink: Tensor, *, scale: float, rounding: bool | str) -> Tensor:
    """Attend from T queries over X keys that they share.

    ``o = sum_m exp(s_m) k_m / (sum_m exp(s_m) + exp(sink))``, ``s = scale * <q, k>`` over the keys that the mask keeps.
    Keys that one query owns alone (decode) are the case T = 1 with the rows as leading axes.

    Args:
        q: float[...,T,N,D].
        keys: float[...,X,D].
        mask: bool[...,T,X]. True keeps.
        sink: f32[N]. Logit of the sink, not scaled.
        scale: of the dot products.
        rounding: round the unnormalised probabilities to the dtype of ``q`` before they meet the values, as the
            official code does; "normalised" divides them first and rounds the scores too, as transformers does.
    Returns:
        float[...,T,N,D] in the dtype of ``q``.
    Rounding: f32 scores, sums and output; one rounding at the end.
    """
    n_heads = q.shape[-2]
    wide = keys.float()
    scores = (q.flatten(-3, -2).float() @ wide.transpose(-1, -2)).unflatten(-2, (-1, n_heads))
    scores = rounded_scores(scores, scale, q.dtype if rounding == "normalised" else None)
    scores = torch.where(mask.unsqueeze(-2), scores, -torch.inf)
    sink = sink.unsqueeze(-1)
    top = scores.amax(-1, keepdim=True)
    # Where probabilities are rounded unnormalised, the sink has no part in what they are scaled by.
    top = (torch.where(top > -torch.inf, top, sink) if rounding is True else torch.maximum(top, sink)).detach()
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True) + (sink - top).exp()
    if rounding == "normalised":
        weights, total = weights / total, torch.ones_like(total)
    if rounding:
        weights = weights.to(q.dtype).float()
    out = (weights.flatten(-3, -2) @ wide).unflatten(-2, (-1, n_heads))
    return (out / total).to(q.dtype)


def attend_part(q: Tensor, keys: Tensor, mask: Tensor, *, scale: float, rounding: bool) -> tuple[Tensor, Tensor]:
    """Attend over some of the keys, without the sink: what ``merge_parts`` puts together.

    Args:
        q: float[...,T,N,D].
        keys: float[...,X,D]. Some of the keys, or none.
        mask: bool[...,T,X]. True keeps.
        scale: of the dot products.
        rounding: as in ``attend``.
    Returns:
        (out f32[...,T,N,D], the softmax over these keys alone, zero where there are none; lse f32[...,T,N], the
        logarithm of their sum of exponentials, -inf where there are none).
    """
    n_heads = q.shape[-2]
    wide = keys.float()
    scores = (q.flatten(-3, -2).float() @ wide.transpose(-1, -2)).unflatten(-2, (-1, n_heads)) * scale
    scores = torch.where(mask.unsqueeze(-2), scores, -torch.inf)
    top = scores.amax(-1, keepdim=True) if keys.shape[-2] else scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    top = torch.where(top == -torch.inf, 0.0, top)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    if rounding:
        weights = weights.to(q.dtype).float()
    out = (weights.flatten(-3, -2) @ wide).unflatten(-2, (-1, n_heads))
    return torch.where(total > 0, out / total, 0.0), (top + total.log()).squeeze(-1)


def merge_parts(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Merge attention over disjoint sets of keys, and count the sink once.

    ``o = sum_k exp(lse_k) out_k / (sum_k exp(lse_k) + exp(sink))``.

    Args:
        out: f32[A,...,T,N,D]. A parts, of ``attend_part``.
        lse: f32[A,...,T,N].
        sink: f32[N].
    Returns:
        f32[...,T,N,D].
    """
    top = torch.maximum(lse.amax(0), sink)
    weights = (lse - top).exp()
    total = weights.sum(0) + (sink - top).exp()
    return (weights.unsqueeze(-1) * out).sum(0) / total.unsqueeze(-1)


def rounded_scores(products: Tensor, scale: float, dtype: torch.dtype | None) -> Tensor:
    """Scale dot products, rounded to ``dtype`` before and after unless that is None: f32, of the same shape."""
    return products * scale if dtype is None else (products.to(dtype) * scale).float()
