"""Activations whose bits depend on the number alone, not on where in a tensor it stands.

A library computes the last numbers of a run, which fill no vector register, with other code than the rest. For some
functions the two round differently (seen with AVX-512, not with AVX2), and a row would depend on its place in a tile.
Exponential, logarithm, sum and quotient round alike in both.

Source: none; the formulas are the usual ones.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

__all__ = ["sigmoid", "silu", "softplus"]

_REACH: Final = 80.0
"""Where ``exp`` is far from the largest f32, and a sigmoid from any number that matters."""

_LINEAR: Final = 20.0
"""From where on softplus is its argument, as in torch."""


def sigmoid(x: Tensor) -> Tensor:
    """Compute ``1 / (1 + exp(-x))`` in f32; gradients stay finite everywhere."""
    return 1 / (1 + (-x.clamp(min=-_REACH)).exp())


def silu(x: Tensor) -> Tensor:
    """Compute ``x * sigmoid(x)`` in f32."""
    return x / (1 + (-x.clamp(min=-_REACH)).exp())


def softplus(x: Tensor) -> Tensor:
    """Compute ``log(1 + exp(x))`` in f32."""
    return torch.where(x > _LINEAR, x, x.clamp(max=_LINEAR).exp().log1p())
