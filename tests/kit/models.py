"""Tiny models with random weights for tests of the engine, made once per session.

Routing is by table or over all experts and the indexer sees few entries, so that nothing near a tie can flip between
two ways of computing the same thing; widths are so small that a step takes milliseconds.
"""

from __future__ import annotations

import tempfile
from functools import cache
from typing import Any

import purestep as ps
from kit.checkpoints import random_tensors, write_checkpoint
from kit.configs import tiny_config

__all__ = ["VOCAB", "tiny_model"]

VOCAB = 32


@cache
def tiny_model(ratios: tuple[int, ...] = (0, 4, 128), *, window: int = 8, seed: int = 0, **changes: Any) -> ps.Model:
    """Load a tiny model in float32.

    Args:
        ratios: compress ratio of each layer.
        window: W.
        seed: of the weights.
        changes: further arguments of ``tiny_config``.
    """
    sizes = {
        "hash_layers": 1,
        "hidden": 16,
        "heads": 2,
        "head_dim": 8,
        "rope_dim": 4,
        "q_lora": 8,
        "o_groups": 1,
        "o_lora": 8,
        "index_heads": 2,
        "index_dim": 8,
        "index_topk": 1024,
        "experts": 2,
        "topk": 2,
        "inter": 8,
        "vocab": VOCAB,
        "streams": 2,
        "max_positions": 8192,
    }
    config = tiny_config(ratios, window=window, **(sizes | changes))
    config["hc_sinkhorn_iters"] = 2
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(folder, config, random_tensors(config, seed))
        return ps.load_model(folder)
