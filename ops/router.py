"""Choice of experts and their weights, scored or by token id.

Source: DeepSeek-V4 ``inference/model.py``, ``Gate``; model sheet 2.10.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from .selection import top_indices

__all__ = ["route_hash", "route_scored"]


def _weights(scores: Tensor, ids: Tensor, factor: float) -> Tensor:
    chosen = scores.gather(-1, ids)
    return chosen / chosen.sum(-1, keepdim=True) * factor


def route_scored(logits: Tensor, bias: Tensor, count: int, factor: float) -> tuple[Tensor, Tensor]:
    """Choose by score plus bias, weigh by the score alone.

    ``s = sqrt(softplus(logit))``; the K largest of ``s + bias``; weights ``s / sum(s) * factor``.

    Args:
        logits: f32[...,E].
        bias: f32[E]. Selection only.
        count: K.
        factor: routed scaling factor.
    Returns:
        (ids i64[...,K], weights f32[...,K]).
    """
    scores = F.softplus(logits).sqrt()
    ids = top_indices(scores + bias, count)
    return ids, _weights(scores, ids, factor)


def route_hash(logits: Tensor, ids: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Weigh experts that the token id has already chosen.

    Args:
        logits: f32[...,E].
        ids: i64[...,K]. The rows of the table at the token ids.
        factor: routed scaling factor.
    Returns:
        (ids i64[...,K], weights f32[...,K]).
    """
    return ids, _weights(F.softplus(logits).sqrt(), ids, factor)
