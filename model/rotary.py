"""Which rotation a layer uses, and the group sizes of the released quantisation.

Window-only layers use the plain base; layers that compress use another base with YaRN, for everything in the layer.

Source: DeepSeek-V4 ``inference/model.py``; model sheet 2.4.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from ..ops.rotary import rotary_frequencies
from ..state.config import Config

__all__ = ["FP4_GROUP", "FP8_GROUP", "layer_frequencies"]

FP8_GROUP: Final = 64
"""Channels that share a scale in rounded window and attention entries."""

FP4_GROUP: Final = 32
"""Channels that share a scale in rounded index queries and keys."""


def layer_frequencies(config: Config, ratio: int) -> Tensor:
    """Compute the rotary frequencies of a layer kind.

    Args:
        config: the model's numbers.
        ratio: compress ratio of the layer.
    Returns:
        f32[R/2].
    """
    width = config.qk_rope_head_dim
    if ratio == 0:
        return rotary_frequencies(width, config.rope_theta)
    yarn = config.rope_scaling
    if yarn is None:
        return rotary_frequencies(width, config.compress_rope_theta)
    return rotary_frequencies(
        width,
        config.compress_rope_theta,
        factor=yarn.factor,
        original_context=yarn.original_max_position_embeddings,
        beta_fast=yarn.beta_fast,
        beta_slow=yarn.beta_slow,
    )
