"""The numbers of the released models, and of a toy that has every part of them.

Source: ``config.json`` of DeepSeek-V4-Flash and DeepSeek-V4-Pro; model sheet 1.1, 1.2. The toy's numbers are this
package's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs

from .config import Config

__all__ = ["RELEASED", "family_of"]

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

_PRO: Final = attrs.evolve(
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
)

_TOY: Final = attrs.evolve(
    _FLASH,
    vocab_size=256,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    head_dim=32,
    qk_rope_head_dim=8,
    q_lora_rank=32,
    o_groups=2,
    o_lora_rank=16,
    compress_ratios=(0, 4, 128, 4),
    moe_intermediate_size=32,
    n_routed_experts=8,
    num_experts_per_tok=2,
    index_n_heads=16,
    index_head_dim=16,
    index_topk=16,
    num_hash_layers=1,
    max_position_embeddings=8192,
)

RELEASED: Final[Mapping[str, Config]] = {"flash": _FLASH, "pro": _PRO, "toy": _TOY}
"""Numbers by name."""


def family_of(config: Config) -> str:
    """Name the release whose widths a configuration has, and whether it has all its layers."""
    for name in ("flash", "pro"):
        release = RELEASED[name]
        same = {field: getattr(release, field) for field in ("hidden_size", "num_attention_heads", "q_lora_rank")}
        if all(getattr(config, field) == size for field, size in same.items()):
            has_all = config.compress_ratios == release.compress_ratios
            return f"DeepSeek-V4-{name.capitalize()}" + ("" if has_all else ", some of its layers")
    return "DeepSeek-V4, of other widths"
