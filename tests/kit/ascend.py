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
from purestep.ops.dispatch import REFERENCE, Ops
from purestep.ops.experts import gate_up
from purestep.state.config_reading import config_from_dict
from torch import Tensor

__all__ = ["CHIPS", "Pair", "machine_for", "model_pair", "on", "pair_on_machine"]

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

A5_SIZES = SIZES | {"head_dim": 32}
"""The same for the A5, whose grouped projection takes multiples of 64 channels."""


CHIPS = ("a3", "a5")
"""The two forms of caches and kernels; the A2 has those of the A3."""


def on(chip: str) -> dict[str, Any]:
    """Arguments of ``pair_on_machine`` for a chip; products in MX blocks, which need more tolerance, left out."""
    return {"chip": chip, "numerics": ps.Numerics.ascend_a5(mx_output=False) if chip == "a5" else None}


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
    """Simulate a machine that takes small models, an A3 unless told otherwise."""
    return simulate(**{"chip": "a3", "heads": 4, "strict_sizes": False, "rope_width": SIZES["rope_dim"]} | options)


def model_pair(
    ratios: tuple[int, ...] = (0, 4, 128),
    *,
    seed: int = 0,
    window: int = 128,
    chip: str = "a3",
    numerics: ps.Numerics | None = None,
    **changes: Any,
) -> Pair:
    """Make a pair; call it on a simulated machine."""
    sizes = A5_SIZES if chip == "a5" else SIZES
    config = config_from_dict(tiny_config(ratios, window=window, **(sizes | changes)))
    generator = torch.Generator().manual_seed(seed)
    leaves = leaves_from_params(init_params(config, generator, torch.bfloat16))
    drawn = {path: spread(path, leaf, generator).to(leaf.dtype) for path, leaf in leaves.items()}
    params = params_from_leaves(drawn)
    kernels = build_model(config, params, kernels="ascend", chip=chip, dtype=torch.bfloat16, numerics=numerics)
    chosen = kernels.numerics
    unrounded = attrs.evolve(chosen, int8_weights=False, mx_output=False, mx_experts=False)
    plain = build_model(config, params, kernels="reference", dtype=torch.bfloat16, numerics=unrounded)
    return Pair(kernels=kernels, plain=attrs.evolve(plain, ops=emulated(chosen), numerics=chosen))


def emulated(numerics: ps.Numerics) -> Ops:
    """Plain operators that round what quantised products round, in floating point."""
    table = attrs.evolve(REFERENCE, name="emulated")
    if numerics.int8_weights:
        table = attrs.evolve(table, linear=_linear, expert=_expert, experts=_experts)
    if numerics.mx_output:
        table = attrs.evolve(table, grouped_linear=_grouped_linear)
    if numerics.mx_experts:
        table = attrs.evolve(table, experts=_experts_in_blocks)
    return table


def _in_blocks(x: Tensor, above: bool = False) -> Tensor:
    """Round every 32 numbers through e4m3 with a power of two: the one below their largest, or one that holds it."""
    blocks = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    power = torch.ceil(torch.log2(largest.clamp(min=1e-4) / 448)) if above else torch.floor(torch.log2(largest)) - 8
    codes = (blocks / 2.0**power).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return (codes * 2.0**power).flatten(-2)[..., : x.shape[-1]]


def _grouped_linear(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("...gd,gud->...gu", _in_blocks(x), _in_blocks(w)).to(x.dtype)


def _experts_in_blocks(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float32)
    for row in range(len(x)):
        for e, weight in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
            hidden = (_in_blocks(x[row]) @ _in_blocks(w13[e]).t()).to(x.dtype)
            hidden = _in_blocks(gate_up(hidden, limit), above=True)
            out[row] += weight * (hidden @ _in_blocks(w2[e]).t()).to(x.dtype).float()
    return out


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


@contextlib.contextmanager
def pair_on_machine(
    *args: Any, chip: str = "a3", machine: dict[str, Any] | None = None, **changes: Any
) -> Iterator[Pair]:
    """Simulate a machine and make a pair on it."""
    with machine_for(chip=chip, **(machine or {})):
        yield model_pair(*args, chip=chip, **changes)
