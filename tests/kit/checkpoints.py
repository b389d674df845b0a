"""Random tiny checkpoints under their official names, and the same model in transformers as a peer to compare with."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM

__all__ = [
    "PeerDecoder",
    "peer_logits",
    "peer_model",
    "random_tensors",
    "to_transformers_config",
    "to_transformers_state",
    "write_checkpoint",
]

# Queries have a fixed norm, so only the keys' norm can make attention sharper: this gives scores a deviation of 1.5.
_KEY_CENTRE = 1.5


class _Weights:
    """Collects random tensors by name; matrices keep the scale of what they multiply."""

    def __init__(self, seed: int, storage: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.storage = storage
        self.tensors: dict[str, Tensor] = {}

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def matrix(self, name: str, out: int, wide: int, gain: float = 1.0) -> None:
        self.tensors[name] = (self.normal(out, wide) * gain * wide**-0.5).to(self.storage)

    def norm(self, name: str, width: int, centre: float = 1.0) -> None:
        self.tensors[name] = (centre + 0.2 * self.normal(width)).to(self.storage)

    def exact(self, name: str, value: Tensor) -> None:
        self.tensors[name] = value.float() if value.is_floating_point() else value

    def streams(self, name: str, rows: int, scales: int, streams: int, hidden: int) -> None:
        self.exact(f"{name}_fn", self.normal(rows, streams * hidden) * (streams * hidden) ** -0.5)
        self.exact(f"{name}_base", 0.5 * self.normal(rows))
        self.exact(f"{name}_scale", 1 + 0.3 * self.normal(scales))

    def compressor(self, prefix: str, ratio: int, width: int, hidden: int, centre: float = 1.0) -> None:
        wide = width * (2 if ratio == 4 else 1)
        self.matrix(f"{prefix}.wkv.weight", wide, hidden)
        self.matrix(f"{prefix}.wgate.weight", wide, hidden)
        self.exact(f"{prefix}.ape", self.normal(ratio, wide))
        self.norm(f"{prefix}.norm.weight", width, centre)

    def expert(self, prefix: str, inter: int, hidden: int) -> None:
        self.matrix(f"{prefix}.w1.weight", inter, hidden)
        self.matrix(f"{prefix}.w2.weight", hidden, inter, gain=2.0)
        self.matrix(f"{prefix}.w3.weight", inter, hidden)

    def attention(self, prefix: str, config: Mapping[str, Any], ratio: int) -> None:
        c, hidden = config, config["hidden_size"]
        heads, width, rank = c["num_attention_heads"], c["head_dim"], c["q_lora_rank"]
        groups, low = c["o_groups"], c["o_lora_rank"]
        self.matrix(f"{prefix}.wq_a.weight", rank, hidden)
        self.norm(f"{prefix}.q_norm.weight", rank)
        self.matrix(f"{prefix}.wq_b.weight", heads * width, rank)
        self.matrix(f"{prefix}.wkv.weight", width, hidden)
        self.norm(f"{prefix}.kv_norm.weight", width, _KEY_CENTRE)
        self.exact(f"{prefix}.attn_sink", self.normal(heads))
        self.matrix(f"{prefix}.wo_a.weight", groups * low, heads * width // groups)
        self.matrix(f"{prefix}.wo_b.weight", hidden, groups * low)
        if ratio:
            self.compressor(f"{prefix}.compressor", ratio, width, hidden, _KEY_CENTRE)
        if ratio == 4:
            index_heads, index_width = c["index_n_heads"], c["index_head_dim"]
            self.matrix(f"{prefix}.indexer.wq_b.weight", index_heads * index_width, rank)
            self.matrix(f"{prefix}.indexer.weights_proj.weight", index_heads, hidden)
            self.compressor(f"{prefix}.indexer.compressor", ratio, index_width, hidden)

    def block(self, prefix: str, config: Mapping[str, Any], ratio: int, is_hash: bool) -> None:
        c, hidden, n = config, config["hidden_size"], config["hc_mult"]
        experts, vocab = c["n_routed_experts"], c["vocab_size"]
        for kind in ("attn", "ffn"):
            self.norm(f"{prefix}.{kind}_norm.weight", hidden)
            self.streams(f"{prefix}.hc_{kind}", (2 + n) * n, 3, n, hidden)
        self.attention(f"{prefix}.attn", c, ratio)
        self.matrix(f"{prefix}.ffn.gate.weight", experts, hidden)
        if is_hash:
            order = torch.rand(vocab, experts, generator=self.generator).argsort(-1)
            self.exact(f"{prefix}.ffn.gate.tid2eid", order[:, : c["num_experts_per_tok"]].contiguous())
        else:
            self.exact(f"{prefix}.ffn.gate.bias", 0.3 * self.normal(experts))
        for name in ("shared_experts", *(f"experts.{e}" for e in range(experts))):
            self.expert(f"{prefix}.ffn.{name}", c["moe_intermediate_size"], hidden)

    def head(self, prefix: str, config: Mapping[str, Any]) -> None:
        n, hidden = config["hc_mult"], config["hidden_size"]
        self.norm(f"{prefix}norm.weight", hidden)
        self.streams(f"{prefix}hc_head", n, 1, n, hidden)


def random_tensors(
    config: Mapping[str, Any], seed: int, storage: torch.dtype = torch.float32, *, mtp: bool = False
) -> dict[str, Tensor]:
    """Draw every tensor of an unquantised checkpoint, by official name.

    Nothing is left at a neutral value (norms, sinks, position biases, selection biases and mHC included), logits have a
    standard deviation of about 2, and no softmax is flat or saturated.

    Args:
        config: from :func:`kit.configs.tiny_config`.
        seed: of the draw; independent of any global generator.
        storage: dtype of what the released files hold in BF16 or FP8; float32 and int64 tensors stay so.
        mtp: also draw the draft block ``mtp.0``, which a loader must skip.
    """
    w = _Weights(seed, storage)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    # One embedding row is used as it is, so its entries have unit scale.
    w.tensors["embed.weight"] = w.normal(vocab, hidden).to(storage)
    for layer in range(config["num_hidden_layers"]):
        ratio = config["compress_ratios"][layer]
        w.block(f"layers.{layer}", config, ratio, is_hash=layer < config["num_hash_layers"])
    w.head("", config)
    w.matrix("head.weight", vocab, hidden, gain=2.0)
    if mtp:
        w.block("mtp.0", config, 0, is_hash=False)
        for name in ("e_proj", "h_proj"):
            w.matrix(f"mtp.0.{name}.weight", hidden, hidden)
        for name in ("enorm", "hnorm"):
            w.norm(f"mtp.0.{name}.weight", hidden)
        w.head("mtp.0.", config)
    return w.tensors


def write_checkpoint(
    folder: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], shards: int = 1
) -> Path:
    """Write ``config.json`` and the tensors, in one file or in ``shards`` files with an index; return the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = list(tensors)
    size = math.ceil(len(names) / shards)
    weight_map = {}
    for shard in range(shards):
        part = names[shard * size : (shard + 1) * size]
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return folder


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
