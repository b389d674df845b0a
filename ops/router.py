"""Choice of experts and their weights, scored or by token id.

Source: DeepSeek-V4 ``inference/model.py``, ``Gate``; model sheet 2.10.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .activations import softplus
from .selection import top_indices

__all__ = ["route_hash", "route_scored"]


def _scores(logits: Tensor, dtype: torch.dtype) -> Tensor:
    return softplus(logits.float()).to(dtype).float().sqrt().to(dtype)


def _weights(scores: Tensor, ids: Tensor, factor: float, epsilon: float) -> Tensor:
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
    choose: Callable[[Tensor, int], Tensor] = top_indices,
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
        choose: finds the K largest, the lowest index first among equals.
    Returns:
        (ids i64[...,K], weights f32[...,K]).
    """
    scores = _scores(logits, dtype)
    ids = choose(scores + bias, count)
    return ids, _weights(scores, ids, factor, epsilon)


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
    return ids, _weights(_scores(logits, dtype), ids, factor, epsilon)
