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


def normalize_query(q: Tensor, eps: float, *, rounding: bool | str) -> Tensor:
    """Scale every query head to unit root mean square; there is no weight.

    Args:
        q: float[...,N,D].
        eps: added to the mean square.
        rounding: round square, mean, sum, root and product to the dtype of ``q``, as the official code does; "factor"
            rounds the root and the product alone, as transformers does.
    Returns:
        float[...,N,D] in the dtype of ``q``.
    Source: DeepSeek-V4 ``inference/model.py``, ``Attention`` (query path).
    """
    if rounding is True:
        mean = q.square().mean(-1, keepdim=True) + eps
        # In f32 and rounded: of a narrower tensor the CPU's root rounds the elements twice that fill no vector.
        return q * torch.rsqrt(mean.float()).to(q.dtype)
    wide = q.float()
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return q * factor.to(q.dtype) if rounding else (wide * factor).to(q.dtype)
