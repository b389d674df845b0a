"""The lightning indexer: scores of compressed entries and the choice among them.

Source: DeepSeek-V4 ``inference/model.py``, ``Indexer``; model sheet 2.9.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .selection import top_indices

__all__ = ["index_scores", "masked_scores", "padded_picks", "pick_entries"]


def index_scores(q: Tensor, keys: Tensor, weights: Tensor, *, rounding: bool) -> Tensor:
    """Score entries: ``sum over heads of weight * relu(<q, key>)``.

    Args:
        q: float[...,T,I,J].
        keys: float[...,C,J], shared by the T rows.
        weights: float[...,T,I]. Head weights with both scale factors; may be negative.
        rounding: keep products and sums in the dtype of ``weights`` (official) instead of f32.
    Returns:
        f32[...,T,C].
    """
    if not rounding:
        weights = weights.float()
    q, keys = q.to(weights.dtype), keys.to(weights.dtype)
    n_heads = q.shape[-2]
    products = (q.flatten(-3, -2) @ keys.transpose(-1, -2)).unflatten(-2, (-1, n_heads)).relu()
    return (weights.unsqueeze(-2) @ products).squeeze(-2).float()


def pick_entries(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """Choose the best visible entries, always ``count`` wide.

    Args:
        scores: f32[...,T,C].
        visible: i64[...,T]. Entries 0..visible-1 may be chosen.
        count: P.
    Returns:
        i64[...,T,P]; best first, lowest index first on a tie, -1 where there are fewer than P.
    """
    masked, _ = masked_scores(scores, visible)
    return padded_picks(top_indices(masked, min(count, scores.shape[-1])), visible, count)


def masked_scores(scores: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Hide what may not be chosen: (f32[...,T,C] with -inf there, i64[C] indices)."""
    index = torch.arange(scores.shape[-1], device=scores.device)
    return torch.where(index < visible.unsqueeze(-1), scores, -torch.inf), index


def padded_picks(order: Tensor, visible: Tensor, count: int) -> Tensor:
    """Blank what is not visible and pad to ``count`` columns with -1: i64[...,T,P]."""
    picks = torch.where(order < visible.unsqueeze(-1), order, -1)
    return torch.nn.functional.pad(picks, (0, count - picks.shape[-1]), value=-1)
