"""Matrix products beyond ``torch.nn.functional.linear``."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["grouped_linear"]


def grouped_linear(x: Tensor, w: Tensor) -> Tensor:
    """Multiply every group of channels by its own weight.

    Args:
        x: float[...,G,D].
        w: float[G,U,D].
    Returns:
        float[...,G,U].
    Source: DeepSeek-V4 ``inference/model.py``, ``Attention`` (output path).
    """
    return torch.einsum("...gd,gud->...gu", x, w)
