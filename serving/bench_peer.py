"""The engine that ours is measured beside: transformers' ``DeepseekV4ForCausalLM`` on the same weights.

It runs as its users run it, with eager attention, the only one that it has. A long context is laid in its cache in
exactly the shapes that a prefill leaves.

Source: transformers 5.24 ``models/deepseek_v4/modeling_deepseek_v4.py`` (names and shapes of the cache's parts).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

__all__ = ["load_peer", "peer_cache", "peer_step"]


def load_peer(folder: Path, dtype: torch.dtype) -> Any:
    """Load the peer from a folder that ``write_case`` wrote."""
    bars: Any = logging
    bars.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.requires_grad_(False).train(False)


def peer_cache(model: Any, batch: int, context: int) -> DynamicCache:
    """Lay the peer's cache as a prefill of ``context`` tokens leaves it."""
    config, kind = model.config, model.dtype
    cache = DynamicCache(config=config)

    def noise(*shape: int, dtype: torch.dtype = kind) -> Tensor:
        return (torch.randn(*shape) * 0.5).to(dtype)

    layers: list[Any] = cache.layers
    for layer, layer_type in zip(layers, config.layer_types, strict=True):
        keys = noise(batch, 1, min(context, config.sliding_window - 1), config.head_dim)
        layer.lazy_initialization(keys, keys)
        layer.keys = layer.values = keys
        layer.cumulative_length = context
        if layer_type == "sliding_attention":
            continue
        rate, overlaps = layer.compress_rate, layer_type == "compressed_sparse_attention"
        for name, width in (("compressor", config.head_dim), ("indexer", config.index_head_dim)):
            if name not in layer.compressed_kv:
                continue
            layer.compressed_kv[name] = noise(batch, context // rate, width)
            layer.entry_count[name] = context // rate
            for buffer in (layer.buffer_kv, layer.buffer_gate):
                buffer[name] = noise(batch, context % rate, width * (1 + overlaps))
            if overlaps and context >= rate:
                layer.overlap_kv[name] = noise(batch, rate, width)
                layer.overlap_gate[name] = noise(batch, rate, width, dtype=torch.float32)
    return cache


def peer_step(model: Any, batch: int, context: int) -> Callable[[], object]:
    """Make a function that steps the peer on; it ends in argmax, as ours ends in greedy sampling."""
    cache = peer_cache(model, batch, context)

    def step() -> object:
        tokens = torch.randint(model.config.vocab_size, (batch, 1))
        with torch.inference_mode():
            out = model(input_ids=tokens, cache=cache, use_cache=True, logits_to_keep=1)
            return out.logits[:, -1].argmax(-1)

    return step
