"""Partial, interleaved rotary position embedding with YaRN, and its inverse."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["apply_rotary", "rotary_factors", "rotary_frequencies"]


def rotary_frequencies(
    width: int,
    theta: float,
    *,
    factor: float = 1.0,
    original_context: int = 0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> Tensor:
    """Compute the angle per position of every rotary pair.

    With ``factor`` 1 this is ``theta ** (-2i/R)``. YaRN keeps the fast pairs, divides the slow ones by ``factor`` and
    blends between the pairs that turn ``beta_fast`` and ``beta_slow`` times in the original context.

    Args:
        width: R, even.
        theta: base.
        factor: YaRN stretch; 1 means no YaRN.
        original_context: tokens of the original training context.
        beta_fast: turns above which a pair is kept.
        beta_slow: turns below which a pair is fully stretched.
    Returns:
        f32[R/2].
    Source: YaRN (arXiv:2309.00071); DeepSeek-V4 ``inference/model.py``, ``precompute_freqs_cis``.
    """
    plain = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    if factor == 1.0:
        return plain

    def pair_turning(turns: float) -> float:
        return width * math.log(original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low: float = max(math.floor(pair_turning(beta_fast)), 0)
    high: float = min(math.ceil(pair_turning(beta_slow)), width - 1)
    if low == high:
        high += 0.001  # the published way to avoid 0/0
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp)


def rotary_factors(positions: Tensor, frequencies: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Compute ``exp(i * position * frequency)`` of every position and pair.

    Args:
        positions: i64[...].
        frequencies: f32[R/2].
        dtype: that cosines and sines are rounded to.
    Returns:
        complex64[...,R/2].
    """
    angles = positions.float().unsqueeze(-1) * frequencies
    return torch.complex(angles.cos().to(dtype).float(), angles.sin().to(dtype).float())


def apply_rotary(x: Tensor, factors: Tensor) -> Tensor:
    """Rotate the neighbouring pairs of the last R channels; pass conjugated factors to rotate back.

    Args:
        x: float[...,D].
        factors: complex64, broadcastable to [...,R/2].
    Returns:
        float[...,D] in the dtype of ``x``; the first D-R channels are those of ``x``.
    Rounding: f32 inside, one rounding at the end.
    Source: RoFormer (arXiv:2104.09864), pairs (2i, 2i+1) as in DeepSeek-V4 ``apply_rotary_emb``.
    """
    rotary = 2 * factors.shape[-1]
    head, tail = x.split((x.shape[-1] - rotary, rotary), dim=-1)
    pairs = torch.view_as_complex(tail.float().unflatten(-1, (-1, 2)))
    turned = torch.view_as_real(pairs * factors).flatten(-2)
    return torch.cat((head, turned.to(x.dtype)), dim=-1)
