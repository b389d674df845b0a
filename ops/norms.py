"""Root-mean-square norms."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["normalize_query", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale ``x`` to unit root mean square over its last axis and by ``weight``.

    Args:
        x: float[...,H].
        weight: float[H].
        eps: added to the mean square.
    Returns:
        float[...,H] in the dtype of ``x``.
    Rounding: f32 inside, one rounding at the end.
    Source: DeepSeek-V4 ``inference/model.py``, ``RMSNorm``.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def normalize_query(q: Tensor, eps: float, *, rounding: bool) -> Tensor:
    """Scale every query head to unit root mean square; there is no weight.

    Args:
        q: float[...,N,D].
        eps: added to the mean square.
        rounding: round square, mean, sum, root and product to the dtype of ``q``, as the official code does.
    Returns:
        float[...,N,D] in the dtype of ``q``.
    Source: DeepSeek-V4 ``inference/model.py``, ``Attention`` (query path).
    """
    if rounding:
        return q * torch.rsqrt(q.square().mean(-1, keepdim=True) + eps)
    wide = q.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(q.dtype)
