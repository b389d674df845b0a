"""Matrix products. The weight's dtype is what is computed in; the activation's dtype is what comes out.

So a bfloat16 model may keep float32 copies of its weights, where a host multiplies those faster: every bfloat16 value
is a float32 value, products are summed in float32 either way, and the result is rounded once.

Source: DeepSeek-V4 ``inference/model.py``, ``linear`` and ``Attention`` (grouped output path).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["grouped_linear", "linear"]


def linear(x: Tensor, w: Tensor) -> Tensor:
    """Multiply rows by a weight.

    Args:
        x: float[...,H].
        w: float[F,H].
    Returns:
        float[...,F] in the dtype of ``x``.
    """
    if x.dtype is w.dtype:
        return F.linear(x, w)
    return F.linear(x.to(w.dtype), w).to(x.dtype)


def grouped_linear(x: Tensor, w: Tensor) -> Tensor:
    """Multiply every group of channels by its own weight.

    Args:
        x: float[...,G,D].
        w: float[G,U,D].
    Returns:
        float[...,G,U] in the dtype of ``x``.
    """
    return torch.einsum("...gd,gud->...gu", x.to(w.dtype), w).to(x.dtype)
