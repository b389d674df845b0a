"""Choosing the largest scores with the lowest index winning every tie."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["top_indices"]


def top_indices(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the ``count`` largest scores, best first, lower index first among equals.

    Args:
        scores: float[...,E]. Not NaN; -0.0 equals 0.0.
        count: at most E.
    Returns:
        i64[...,count].
    """
    # A sum of clipped terms is often exactly zero, so ties are the rule rather than the exception; topk alone leaves
    # their order open. A stable sort does not.
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]
