"""Choice of experts and their weights, scored or by token id.

Source: DeepSeek-V4 ``inference/model.py``, ``Gate``; model sheet 2.10.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .selection import top_indices

__all__ = ["choice_weights", "route_hash", "route_scored", "router_scores"]


def router_scores(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Score every expert, ``sqrt(softplus(logit))`` rounded to ``dtype``: f32[...,E] -> float[...,E]."""
    return F.softplus(logits.float()).to(dtype).float().sqrt().to(dtype)


def choice_weights(scores: Tensor, ids: Tensor, factor: float, epsilon: float) -> Tensor:
    """Weigh chosen experts by their share of the scores: float[...,E] and i64[...,K] -> f32[...,K]."""
    chosen = scores.gather(-1, ids)
    return (chosen / (chosen.sum(-1, keepdim=True) + epsilon) * factor).float()


def route_scored(
    logits: Tensor,
    bias: Tensor,
    count: int,
    factor: float,
    *,
    dtype: torch.dtype = torch.float32,
    epsilon: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Choose by score plus bias, weigh by the score alone.

    ``s = sqrt(softplus(logit))``; the K largest of ``s + bias``; weights ``s / sum(s) * factor``.

    Args:
        logits: f32[...,E].
        bias: f32[E]. Selection only.
        count: K.
        factor: routed scaling factor.
        dtype: what scores and weights are rounded to; the bias is added in f32.
        epsilon: added to the sum of the chosen scores.
    Returns:
        (ids i64[...,K], weights f32[...,K]).
    """
    scores = router_scores(logits, dtype)
    ids = top_indices(scores + bias, count)
    return ids, choice_weights(scores, ids, factor, epsilon)


def route_hash(
    logits: Tensor, ids: Tensor, factor: float, *, dtype: torch.dtype = torch.float32, epsilon: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Weigh experts that the token id has already chosen.

    Args:
        logits: f32[...,E].
        ids: i64[...,K]. The rows of the table at the token ids.
        factor: routed scaling factor.
        dtype: what scores and weights are rounded to.
        epsilon: added to the sum of the chosen scores.
    Returns:
        (ids i64[...,K], weights f32[...,K]).
    """
    return ids, choice_weights(router_scores(logits, dtype), ids, factor, epsilon)
