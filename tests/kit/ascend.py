"""Pairs of tiny bfloat16 models with the same weights: one on simulated Ascend kernels, one on plain functions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import attrs
import purestep as ps
import torch
from ascend_sim.simulator import Machine, simulate
from kit.configs import tiny_config
from kit.models import spread
from purestep.model.initial import init_params
from purestep.model.leaves import leaves_from_params, params_from_leaves
from purestep.model.loading import build_model
from purestep.ops.dispatch import REFERENCE
from purestep.ops.experts import gate_up
from purestep.state.config_reading import config_from_dict
from torch import Tensor

__all__ = ["Pair", "machine_for", "model_pair", "pair_on_machine"]

SIZES: dict[str, Any] = {
    "hash_layers": 1,
    "hidden": 32,
    "heads": 4,
    "head_dim": 16,
    "rope_dim": 8,
    "q_lora": 16,
    "o_groups": 2,
    "o_lora": 16,
    "index_heads": 4,
    "index_dim": 16,
    "index_topk": 1024,
    "experts": 4,
    "topk": 4,
    "inter": 16,
    "vocab": 32,
    "streams": 4,
    "max_positions": 8192,
}
"""As small as the kernels allow; every expert is chosen and every entry may be picked, so that no rounding can change a
choice."""


@attrs.frozen(eq=False, kw_only=True)
class Pair:
    """Two models with the same weights.

    Attributes:
        kernels: on the simulated machine; lives as long as the machine does.
        plain: on plain functions, with the same roundings but for the index keys.
    """

    kernels: ps.Model
    plain: ps.Model


def machine_for(**options: Any) -> contextlib.AbstractContextManager[Machine]:
    """Simulate an A3 that takes small models."""
    return simulate(chip="a3", **{"heads": 4, "strict_sizes": False, "rope_width": SIZES["rope_dim"]} | options)


def model_pair(
    ratios: tuple[int, ...] = (0, 4, 128),
    *,
    seed: int = 0,
    window: int = 128,
    int8_weights: bool = False,
    **changes: Any,
) -> Pair:
    """Make a pair; call it on a simulated machine."""
    config = config_from_dict(tiny_config(ratios, window=window, **(SIZES | changes)))
    generator = torch.Generator().manual_seed(seed)
    leaves = leaves_from_params(init_params(config, generator, torch.bfloat16))
    drawn = {path: spread(path, leaf, generator).to(leaf.dtype) for path, leaf in leaves.items()}
    params = params_from_leaves(drawn)
    numerics = ps.Numerics.ascend(int8_weights=int8_weights)
    plain = build_model(config, params, kernels="reference", dtype=torch.bfloat16, numerics=ps.Numerics.ascend())
    return Pair(
        kernels=build_model(config, params, kernels="ascend", chip="a3", dtype=torch.bfloat16, numerics=numerics),
        plain=attrs.evolve(plain, ops=EMULATED, numerics=numerics) if int8_weights else plain,
    )


def _rounded(x: Tensor) -> Tensor:
    """Round every row through int8 with a scale of its own."""
    scale = (x.float().abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
    return (x.float() / scale).round() * scale


def _linear(x: Tensor, w: Tensor) -> Tensor:
    # What stays in floating point is small or float32: router, weights of the indexer, head.
    is_kept = x.dtype is torch.float32 or w.shape[0] == SIZES["index_heads"]
    return REFERENCE.linear(x, w) if is_kept else (_rounded(x) @ _rounded(w).t()).to(x.dtype)


def _expert(x: Tensor, w13: Tensor, w2: Tensor, limit: float | None) -> Tensor:
    return _linear(gate_up(_linear(x, w13), limit).to(x.dtype), w2)


def _experts(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float32)
    for row in range(len(x)):
        for e, weight in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
            out[row] += weight * _expert(x[row : row + 1], w13[e], w2[e], limit)[0].float()
    return out


EMULATED = attrs.evolve(REFERENCE, name="emulated", linear=_linear, expert=_expert, experts=_experts)
"""Plain operators that round what an int8 product rounds, in floating point."""


@contextlib.contextmanager
def pair_on_machine(*args: Any, machine: dict[str, Any] | None = None, **changes: Any) -> Iterator[Pair]:
    """Simulate a machine and make a pair on it."""
    with machine_for(**(machine or {})):
        yield model_pair(*args, **changes)
