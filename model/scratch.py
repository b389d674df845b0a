"""How much memory a step needs besides weights and caches, at most; known before anything is allocated.

The tiles of ``model/reading.py`` and ``model/paged.py`` bound what grows with rows times history; what is left grows
with the tokens of the step, or with the history once.

Source: none; a count of the tensors that are alive at once, checked against an allocator's record by a test.
"""

from __future__ import annotations

import torch

from ..state.capacity import C4_RATIO, C128_RATIO
from ..state.config import Config
from ..state.kv import CacheForm
from .reading import GATHER_BUDGET, MIN_BLOCK, SCORE_BUDGET

__all__ = ["step_scratch"]

F32 = torch.float32.itemsize


def step_scratch(
    config: Config,
    dtype: torch.dtype,
    *,
    tokens: int,
    rows: int,
    context: int,
    form: CacheForm = "plain",
    rounds_activations: bool = False,
) -> int:
    """Bound the bytes that one step holds besides weights and caches.

    Args:
        config: the model's numbers.
        dtype: of activations and caches.
        tokens: fed by the step, at most.
        rows: requests of the step, at most.
        context: longest request.
        form: how caches are stored; quantised rows become numbers when they are read.
        rounds_activations: whether rows that meet quantised weights are rounded.
    Returns:
        Bytes; of a step that returns the logits of each row's last token.
    """
    size = dtype.itemsize
    is_packed = form.startswith(("fp8", "fp4"))
    attention = max(
        _singles(config, size, rows, context, is_packed),
        _chunk(config, size, tokens, context, is_packed),
        _index(config, size, rows, context, is_packed),
    )
    logits = rows * config.vocab_size * 3 * F32
    rounded = tokens * _widest(config) * 6 * F32 if rounds_activations else 0
    return tokens * _per_token(config, size) + attention + logits + rounded


def _widest(config: Config) -> int:
    """Count the channels of the widest rows that meet a quantised weight."""
    chosen = config.num_experts_per_tok + config.n_shared_experts
    groups = config.o_groups * config.o_lora_rank
    return max(config.hidden_size, config.q_lora_rank, groups, chosen * config.moe_intermediate_size)


def _unpacked(n_rows: int, width: int, size: int, is_packed: bool) -> int:
    """Count what turning stored rows into numbers holds besides the numbers: bytes, codes, f32 numbers, a part."""
    return n_rows * width * (3 + F32 + F32 + size) if is_packed else 0


def _per_token(config: Config, size: int) -> int:
    """Count what every fed token holds: residual streams, queries, hidden states of its experts."""
    streams = config.hc_mult * config.hidden_size * (3 * size + 3 * F32)
    heads = config.num_attention_heads * config.head_dim * (4 * size + 2 * F32)
    width = config.hidden_size * (6 * size + 4 * F32)
    chosen = config.num_experts_per_tok + config.n_shared_experts
    experts = chosen * (config.moe_intermediate_size * 6 * F32 + config.hidden_size * (3 * size + F32))
    state = 4 * (config.head_dim + config.index_head_dim) * 3 * F32
    return streams + heads + width + experts + state


def _entries(config: Config, context: int) -> int:
    """Count the compressed entries that a row reads at most."""
    n_c4 = min(context // C4_RATIO, config.index_topk) if config.n_layers_of_ratio(C4_RATIO) else 0
    return max(n_c4, context // C128_RATIO if config.n_layers_of_ratio(C128_RATIO) else 0)


def _singles(config: Config, size: int, rows: int, context: int, is_packed: bool) -> int:
    n_keys = min(config.sliding_window, context) + _entries(config, context)
    block = min(rows, max(MIN_BLOCK, GATHER_BUDGET // (n_keys * config.head_dim)))
    # Gathered, joined, widened; scores, masked scores, weights.
    attended = block * n_keys * (config.head_dim * (2 * size + F32) + config.num_attention_heads * 4 * F32 + 64)
    return attended + _unpacked(block * n_keys, config.head_dim, size, is_packed)


def _chunk(config: Config, size: int, tokens: int, context: int, is_packed: bool) -> int:
    ratio = C4_RATIO if config.n_layers_of_ratio(C4_RATIO) else C128_RATIO
    n_keys = 2 * config.sliding_window + context // ratio
    per_row = config.num_attention_heads * n_keys
    tile = max(1, min(tokens, 2 * config.sliding_window, SCORE_BUDGET // per_row))
    window = (tokens + config.sliding_window) * config.head_dim * size
    return (
        tile * n_keys * (config.num_attention_heads * 4 * F32 + 16)
        + window
        + n_keys * config.head_dim * (3 * size + F32)
        + _unpacked(tokens + config.sliding_window + n_keys, config.head_dim, size, is_packed)
    )


def _index(config: Config, size: int, rows: int, context: int, is_packed: bool) -> int:
    n_c4 = context // C4_RATIO if config.n_layers_of_ratio(C4_RATIO) else 0
    if n_c4 <= config.index_topk:
        return 0
    heads, width = config.index_n_heads, config.index_head_dim
    tile = max(1, min(2 * config.sliding_window, SCORE_BUDGET // (heads * n_c4)))
    chunk = tile * n_c4 * (heads * 3 * F32 + 32) + n_c4 * width * (size + F32)
    block = min(rows, max(MIN_BLOCK, GATHER_BUDGET // (n_c4 * width)))
    singles = block * n_c4 * (width * (2 * size + F32) + heads * 3 * F32 + 64)
    return max(chunk, singles) + _unpacked(max(1, block) * n_c4, width, size, is_packed)
