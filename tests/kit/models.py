"""Tiny models with random weights for tests of the engine, made in memory, once per session.

Nothing near a tie can flip between two ways of computing the same thing: every expert is chosen, and the indexer may
pick every entry. Widths are so small that a step takes milliseconds.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import attrs
import purestep as ps
import torch
from kit.configs import tiny_config
from purestep.model.initial import init_params
from purestep.model.leaves import leaves_from_params, params_from_leaves
from purestep.model.loading import build_model
from purestep.state.config_reading import config_from_dict
from torch import Tensor

__all__ = ["VOCAB", "form_numerics", "rounded_model", "spread", "tiny_model"]

VOCAB = 32

_SIZES = {
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


@cache
def tiny_model(ratios: tuple[int, ...] = (0, 4, 128), *, window: int = 8, seed: int = 0, **changes: Any) -> ps.Model:
    """Make a tiny model in float32.

    Args:
        ratios: compress ratio of each layer.
        window: W.
        seed: of the weights.
        changes: further arguments of ``tiny_config``.
    """
    raw = tiny_config(ratios, window=window, **(_SIZES | changes))
    config = config_from_dict(raw | {"hc_sinkhorn_iters": 2})
    generator = torch.Generator().manual_seed(seed)
    leaves = leaves_from_params(init_params(config, generator, torch.float32))
    drawn = {path: spread(path, leaf, generator) for path, leaf in leaves.items()}
    return build_model(config, params_from_leaves(drawn))


@cache
def rounded_model(
    ratios: tuple[int, ...] = (0, 4, 128),
    *,
    numerics: ps.Numerics,
    dtype: torch.dtype = torch.bfloat16,
    **changes: Any,
) -> ps.Model:
    """Make a tiny model with given numerics.

    Args:
        ratios: compress ratio of each layer.
        numerics: rounding choices.
        dtype: of activations.
        changes: further arguments of ``tiny_model``.
    """
    plain = tiny_model(ratios, **changes)
    stored = leaves_from_params(init_params(plain.config, torch.Generator(), dtype))
    leaves = {name: leaf.to(stored[name].dtype) for name, leaf in leaves_from_params(plain.params).items()}
    return build_model(plain.config, params_from_leaves(leaves), dtype=dtype, numerics=numerics)


def form_numerics(form: str, dtype: torch.dtype, **changes: Any) -> ps.Numerics:
    """Choose numerics that a form of caches holds: the official ones, or those of SGLang for FP8 keys."""
    if form in ("plain", "online") and dtype is torch.float32:
        return attrs.evolve(ps.Numerics.plain(), **changes)
    official = attrs.evolve(ps.Numerics.official(), **changes)
    return attrs.evolve(official, indexer_qdq="fp8") if form.startswith("fp8") else official


def spread(path: str, leaf: Tensor, generator: torch.Generator) -> Tensor:
    """Give a leaf values that matter: fresh models start so small and so neutral that faults would not show."""
    if not leaf.is_floating_point():
        return leaf
    noise = torch.randn(leaf.shape, generator=generator)
    name = path.rsplit(".", 1)[-1]
    if "norm" in name or name == "scale":
        return 1 + 0.3 * noise
    if name in ("embed", "ape", "base", "attn_sink", "bias"):
        return noise
    return noise * (2.0 if name == "head" else 1.0) * leaf.shape[-1] ** -0.5
