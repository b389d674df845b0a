"""The numbers of the released models, for plans without their files.

Source: ``config.json`` of DeepSeek-V4-Flash and DeepSeek-V4-Pro; model sheet 1.1, 1.2.
"""

from __future__ import annotations

from typing import Final

import attrs

from ..state.config import Config

__all__ = ["RELEASED"]

_FLASH: Final = Config(
    vocab_size=129280,
    hidden_size=4096,
    num_hidden_layers=43,
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1024,
    o_groups=8,
    o_lora_rank=1024,
    compress_ratios=(0, 0, *(4, 128) * 20, 4),
    moe_intermediate_size=2048,
    n_routed_experts=256,
    num_experts_per_tok=6,
    index_n_heads=64,
    index_head_dim=128,
    index_topk=512,
    num_hash_layers=3,
)

RELEASED: Final = {
    "v4-flash": _FLASH,
    "v4-pro": attrs.evolve(
        _FLASH,
        hidden_size=7168,
        num_hidden_layers=61,
        num_attention_heads=128,
        q_lora_rank=1536,
        o_groups=16,
        compress_ratios=(128, 128, *(4, 128) * 29, 4),
        moe_intermediate_size=3072,
        n_routed_experts=384,
        index_topk=1024,
        routed_scaling_factor=2.5,
    ),
}
"""Configuration by name."""
