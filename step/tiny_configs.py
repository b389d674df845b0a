"""Tiny ``config.json`` dicts in the official form, and a strategy that varies them.

Source: ``config.json`` of the DeepSeek-V4 releases (which fields there are); the numbers are this package's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

__all__ = ["configs", "tiny_config"]


def tiny_config(
    ratios: Sequence[int] = (0, 4, 128, 4),
    *,
    hash_layers: int = 1,
    hidden: int = 48,
    heads: int = 4,
    head_dim: int = 32,
    rope_dim: int = 8,
    q_lora: int = 24,
    o_groups: int = 2,
    o_lora: int = 12,
    index_heads: int = 16,
    index_dim: int = 16,
    index_topk: int = 8,
    experts: int = 6,
    topk: int = 2,
    inter: int = 20,
    swiglu_limit: float = 0.6,
    route_scale: float = 1.5,
    window: int = 128,
    vocab: int = 64,
    streams: int = 4,
    rope_theta: float = 10000.0,
    compress_rope_theta: float = 160000.0,
    yarn_factor: float | None = 4.0,
    yarn_original: int = 64,
    mtp_entry: bool = False,
    max_positions: int = 4096,
    torch_dtype: str = "float32",
) -> dict[str, Any]:
    """Build the config of a tiny model that has every part of the real one.

    Args:
        ratios: compress ratio of each main layer: 0, 4 or 128.
        hash_layers: how many of the first layers route by token id.
        hidden: width of the residual streams.
        heads: query heads.
        head_dim: width of a head.
        rope_dim: rotary channels at the end of a head.
        q_lora: low-rank width of the queries.
        o_groups: groups of heads in the output projection.
        o_lora: low-rank width of one output group.
        index_heads: heads of the indexer; with few of them its scores tie at zero.
        index_dim: width of an indexer head, a power of two.
        index_topk: entries that the indexer picks.
        experts: routed experts.
        topk: experts chosen per token.
        inter: width of an expert.
        swiglu_limit: small enough by default that the clamps act.
        route_scale: factor on the routing weights.
        window: sliding window.
        vocab: vocabulary size.
        streams: residual streams of mHC.
        rope_theta: rotary base of ratio-0 layers.
        compress_rope_theta: rotary base of the others.
        yarn_factor: YaRN factor of the layers that compress; None leaves ``rope_scaling`` null.
        yarn_original: context length that YaRN stretches.
        mtp_entry: append the ratio of the draft block, as released checkpoints do.
        max_positions: ``max_position_embeddings``.
        torch_dtype: dtype that the checkpoint claims.
    """
    yarn = None
    if yarn_factor is not None:
        yarn = {
            "type": "yarn",
            "factor": yarn_factor,
            "original_max_position_embeddings": yarn_original,
            "beta_fast": 32,
            "beta_slow": 1,
        }
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        "transformers_version": "4.57.1",
        "torch_dtype": torch_dtype,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": len(ratios),
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "qk_rope_head_dim": rope_dim,
        "q_lora_rank": q_lora,
        "o_groups": o_groups,
        "o_lora_rank": o_lora,
        "sliding_window": window,
        "compress_ratios": [*ratios, 0] if mtp_entry else list(ratios),
        "compress_rope_theta": compress_rope_theta,
        "rope_theta": rope_theta,
        "rope_scaling": yarn,
        "max_position_embeddings": max_positions,
        "index_n_heads": index_heads,
        "index_head_dim": index_dim,
        "index_topk": index_topk,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": topk,
        "moe_intermediate_size": inter,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": route_scale,
        "swiglu_limit": swiglu_limit,
        "num_hash_layers": hash_layers,
        "hc_mult": streams,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "num_nextn_predict_layers": int(mtp_entry),
    }


@st.composite
def configs(
    draw: st.DrawFn, max_layers: int = 4, ratios: Sequence[int] = (0, 4, 128), *, choices: bool = True
) -> dict[str, Any]:
    """Draw a tiny config: every mix of layer kinds, hash layers, windows, head groups, top-k sizes, YaRN on and off.

    Shrinks towards one window-only layer without hash routing.

    Args:
        max_layers: most layers.
        ratios: compress ratios to mix.
        choices: whether experts and index entries are chosen; without, all of them are taken, so that no rounding can
            change a choice.
    """
    kinds = draw(st.lists(st.sampled_from(list(ratios)), min_size=1, max_size=max_layers))
    groups, per_group = draw(st.sampled_from([(2, 2), (1, 2), (2, 1), (4, 1), (1, 3)]))
    experts = draw(st.sampled_from([6, 4, 9]))
    head_dim, rope_dim = draw(st.sampled_from([(32, 8), (16, 8), (24, 4)]))
    return tiny_config(
        kinds,
        hash_layers=draw(st.integers(0, len(kinds))),
        hidden=draw(st.sampled_from([48, 32])),
        heads=groups * per_group,
        head_dim=head_dim,
        rope_dim=rope_dim,
        o_groups=groups,
        index_dim=draw(st.sampled_from([16, 32])),
        index_topk=draw(st.sampled_from([512, 1, 3, 8])) if choices else 1024,
        experts=experts,
        topk=draw(st.integers(1, min(4, experts))) if choices else experts,
        swiglu_limit=draw(st.sampled_from([0.6, 10.0])),
        route_scale=draw(st.sampled_from([1.5, 2.5])),
        window=draw(st.sampled_from([128, 8, 5, 1])),
        yarn_factor=draw(st.sampled_from([4.0, 16.0, None])),
        yarn_original=draw(st.sampled_from([64, 4096])),
        mtp_entry=draw(st.booleans()),
    )
