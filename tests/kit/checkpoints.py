"""A random tiny checkpoint's model in transformers, as a peer to compare with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from purestep.model.layout import draft_pieces, tensor_pieces
from purestep.model.recoding import file_tensors, recode
from purestep.model.storage import FORMS, Storage, cells_of
from purestep.state.config_reading import config_from_dict
from purestep.step.tiny_checkpoints import random_tensors as random_tensors
from purestep.step.tiny_checkpoints import write_checkpoint as write_checkpoint
from torch import Tensor
from transformers import DynamicCache
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM

__all__ = [
    "PeerDecoder",
    "peer_logits",
    "peer_model",
    "random_tensors",
    "stored_tensors",
    "to_transformers_config",
    "to_transformers_state",
    "write_checkpoint",
]

_LAYER_KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention"}
_HEAVY_KIND = "heavily_compressed_attention"
_SAME_NAME = (
    "vocab_size",
    "hidden_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "q_lora_rank",
    "num_experts_per_tok",
    "n_routed_experts",
    "n_shared_experts",
    "scoring_func",
    "norm_topk_prob",
    "routed_scaling_factor",
    "rope_theta",
    "compress_rope_theta",
    "hc_mult",
    "hc_sinkhorn_iters",
    "hc_eps",
    "swiglu_limit",
    "sliding_window",
    "o_groups",
    "o_lora_rank",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "hidden_act",
    "rms_norm_eps",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "attention_bias",
    "attention_dropout",
)

_YARN_KEYS = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")


def stored_tensors(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], storage: Storage | str = "fp4"
) -> dict[str, Tensor]:
    """Quantise official tensors as a release stores them; the draft block too if it is there."""
    storage = FORMS[storage] if isinstance(storage, str) else storage
    read = config_from_dict(config)
    stored = {}
    for piece in (*tensor_pieces(read), *draft_pieces(read)):
        if piece.name in tensors:
            parts = file_tensors(recode(tensors[piece.name], piece.kind, storage, piece.name))
            cells = cells_of(piece, storage)
            stored |= {cell.name: part for cell, part in zip(cells, parts, strict=True)}
    return stored


def to_transformers_config(config: Mapping[str, Any]) -> DeepseekV4Config:
    """Spell an official config out in transformers' own fields, leaving nothing to its defaults."""
    layers, hash_layers = config["num_hidden_layers"], config["num_hash_layers"]
    ratios = config["compress_ratios"][:layers]
    heavy = next((ratio for ratio in ratios if ratio not in _LAYER_KINDS), 128)
    rotary_share = config["qk_rope_head_dim"] / config["head_dim"]
    main = {"rope_type": "default", "rope_theta": config["rope_theta"], "partial_rotary_factor": rotary_share}
    compress = {**main, "rope_theta": config["compress_rope_theta"]}
    max_positions = config["max_position_embeddings"]
    scaling = config.get("rope_scaling")
    if scaling is not None:
        compress |= {key: scaling[key] for key in _YARN_KEYS}
        compress |= {"rope_type": "yarn", "attention_factor": 1.0}
        # Only checked against the YaRN factor over there, and warned about when it differs.
        max_positions = int(scaling["factor"] * scaling["original_max_position_embeddings"])
    fields: dict[str, Any] = {key: config[key] for key in _SAME_NAME}
    fields |= {
        "max_position_embeddings": max_positions,
        "layer_types": [_LAYER_KINDS.get(ratio, _HEAVY_KIND) for ratio in ratios],
        "mlp_layer_types": ["hash_moe" if layer < hash_layers else "moe" for layer in range(layers)],
        "compress_rates": {"compressed_sparse_attention": 4, _HEAVY_KIND: heavy},
        "partial_rotary_factor": rotary_share,
        "rope_parameters": {"main": main, "compress": compress},
        "attn_implementation": "eager",
        "experts_implementation": "eager",
    }
    return DeepseekV4Config(**fields)


_RENAMED = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}
# Longer names first: "indexer.compressor.wkv" also ends like "compressor.wkv", which also ends like "wkv".
_RENAMED_IN_LAYER = {
    "attn.indexer.compressor.wkv": "self_attn.compressor.indexer.kv_proj",
    "attn.indexer.compressor.wgate": "self_attn.compressor.indexer.gate_proj",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "attn.indexer.compressor.norm": "self_attn.compressor.indexer.kv_norm",
    "attn.indexer.wq_b": "self_attn.compressor.indexer.q_b_proj",
    "attn.indexer.weights_proj": "self_attn.compressor.indexer.scorer.weights_proj",
    "attn.compressor.wkv": "self_attn.compressor.kv_proj",
    "attn.compressor.wgate": "self_attn.compressor.gate_proj",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.compressor.norm": "self_attn.compressor.kv_norm",
    "attn.wq_a": "self_attn.q_a_proj",
    "attn.q_norm": "self_attn.q_a_norm",
    "attn.wq_b": "self_attn.q_b_proj",
    "attn.wkv": "self_attn.kv_proj",
    "attn.kv_norm": "self_attn.kv_norm",
    "attn.wo_a": "self_attn.o_a_proj",
    "attn.wo_b": "self_attn.o_b_proj",
    "attn.attn_sink": "self_attn.sinks",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "hc_attn_fn": "attn_hc.fn",
    "hc_attn_base": "attn_hc.base",
    "hc_attn_scale": "attn_hc.scale",
    "hc_ffn_fn": "ffn_hc.fn",
    "hc_ffn_base": "ffn_hc.base",
    "hc_ffn_scale": "ffn_hc.scale",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "ffn.shared_experts.w3": "mlp.shared_experts.up_proj",
    "ffn.shared_experts.w2": "mlp.shared_experts.down_proj",
}


def _peer_name(name: str) -> str:
    if name in _RENAMED:
        return _RENAMED[name]
    _, layer, rest = name.split(".", 2)
    stem = rest.removesuffix(".weight")
    tail = rest[len(stem) :]
    renamed = _RENAMED_IN_LAYER.get(rest) or _RENAMED_IN_LAYER[stem] + tail
    return f"model.layers.{layer}.{renamed}"


def to_transformers_state(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename official tensors to transformers' names and stack the routed experts; the draft block is left out."""
    state = {}
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("mtp."):
            continue
        prefix, is_expert, rest = name.partition(".ffn.experts.")
        if is_expert:
            expert, part, _ = rest.split(".")
            experts.setdefault(prefix, {})[int(expert), part] = tensor
        else:
            state[_peer_name(name)] = tensor
    for prefix, parts in experts.items():
        count = len(parts) // 3
        gate_up = [torch.cat([parts[e, "w1"], parts[e, "w3"]]) for e in range(count)]
        state[f"model.{prefix}.mlp.experts.gate_up_proj"] = torch.stack(gate_up)
        state[f"model.{prefix}.mlp.experts.down_proj"] = torch.stack([parts[e, "w2"] for e in range(count)])
    return state


def peer_model(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32
) -> DeepseekV4ForCausalLM:
    """Build the transformers model of a checkpoint, for evaluation with eager attention.

    In a dtype below float32 the parameters that transformers insists on keeping in float32 stay so.
    """
    model: DeepseekV4ForCausalLM = DeepseekV4ForCausalLM(to_transformers_config(config))
    model.load_state_dict(to_transformers_state(tensors), strict=True)
    always_f32 = set(model._keep_in_fp32_modules_strict)
    for name, parameter in model.named_parameters():
        keep = not always_f32.isdisjoint(name.split("."))
        parameter.data = parameter.data.to(torch.float32 if keep else dtype)
    model.requires_grad_(False)
    model.train(False)
    return model


def peer_logits(model: DeepseekV4ForCausalLM, ids: Sequence[int]) -> Tensor:
    """Run one pass without a cache; f32[T,V]."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits
    return logits[0].float()


class PeerDecoder:
    """Feeds one sequence to the transformers model in chunks, over its own cache."""

    def __init__(self, model: DeepseekV4ForCausalLM) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config)

    def feed(self, ids: Sequence[int]) -> Tensor:
        """Append tokens and return their logits, f32[T,V]."""
        with torch.no_grad():
            logits: Tensor = self.model(input_ids=torch.tensor([list(ids)]), cache=self.cache, use_cache=True).logits
        return logits[0].float()
