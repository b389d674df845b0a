"""Which rotation a layer uses.

Window-only layers use the plain base; layers that compress use another base with YaRN, for everything in the layer.

Source: DeepSeek-V4 ``inference/model.py``; model sheet 2.4.
"""

from __future__ import annotations

from torch import Tensor

from ..ops.rotary import rotary_frequencies
from ..state.config import Config

__all__ = ["layer_frequencies"]


def layer_frequencies(config: Config, ratio: int, *, window_yarn: bool = False) -> Tensor:
    """Compute the rotary frequencies of a layer kind.

    Args:
        config: the model's numbers.
        ratio: compress ratio of the layer.
        window_yarn: stretch window-only layers as well, as vllm-ascend does.
    Returns:
        f32[R/2].
    """
    width, yarn = config.qk_rope_head_dim, config.rope_scaling
    theta = config.compress_rope_theta if ratio else config.rope_theta
    if yarn is None or not (ratio or window_yarn):
        return rotary_frequencies(width, theta)
    return rotary_frequencies(
        width,
        theta,
        factor=yarn.factor,
        original_context=yarn.original_max_position_embeddings,
        beta_fast=yarn.beta_fast,
        beta_slow=yarn.beta_slow,
    )
