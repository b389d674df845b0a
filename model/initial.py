"""Random weights to start training from.

Matrices are normal with deviation 0.02, norms are one, sinks and position and selection biases are zero. mHC starts as
a plain residual network: its scales are small, so that its static bases decide, and those read the mean of the streams,
add the sublayer's output to every stream with weight one, and keep each stream mostly to itself. As all streams start
equal, they stay equal in the first forward pass up to the small dynamic part, from which training tells them apart.

Source: ``initializer_range`` in the DeepSeek-V4 release's ``config.json``; "Hyper-Connections", arXiv:2409.19606, the
part on initialisation (static part as a residual network, small dynamic scales).
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from ..state.config import Config
from .layout import leaf_shapes
from .leaves import params_from_leaves
from .params import Params

__all__ = ["draw_table", "init_params"]

_DEVIATION: Final = 0.02
_MIX_SCALE: Final = 0.01
_OWN_STREAM: Final = 4.0
"""Logit of a stream's own entry in its row of the mix; against zeros this keeps 0.95 of four streams apart."""

_LEAST_ODDS: Final = 1e-4
"""Stands for the odds 0 : 1 of a model with one stream, whose logit would be infinite."""


def init_params(config: Config, generator: torch.Generator, dtype: torch.dtype) -> Params:
    """Draw the weights of a new model.

    Args:
        config: the model's numbers.
        generator: source of all randomness; the weights are made on its device.
        dtype: of the weights, but for what the model keeps in F32.
    Returns:
        The weights. The same generator state gives the same weights.
    """
    leaves = {}
    for path, (shape, kind) in leaf_shapes(config).items():
        if kind == "ids":
            leaves[path] = draw_table(shape, config.n_routed_experts, generator)
        elif kind == "norm":
            leaves[path] = torch.ones(shape, dtype=dtype, device=generator.device)
        elif kind == "f32":
            leaves[path] = _start_f32(path.rsplit(".", 1)[-1], shape, config.hc_mult, generator)
        else:
            leaves[path] = _draw_normal(shape, generator).to(dtype)
    return params_from_leaves(leaves)


def _draw_normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    # Drawn in F32 whatever the model's dtype is, so that one seed is one model up to rounding.
    return _DEVIATION * torch.randn(shape, generator=generator, device=generator.device)


def draw_table(shape: tuple[int, ...], n_experts: int, generator: torch.Generator) -> Tensor:
    """Draw distinct expert ids for every token: the places of the largest of ``n_experts`` random numbers."""
    tokens, chosen = shape
    draws = torch.rand((tokens, n_experts), generator=generator, device=generator.device)
    return draws.topk(chosen, dim=1).indices


def _start_f32(field: str, shape: tuple[int, ...], streams: int, generator: torch.Generator) -> Tensor:
    device = generator.device
    if field == "fn":
        return _draw_normal(shape, generator)
    if field == "scale":
        return torch.full(shape, _MIX_SCALE, device=device)
    if field == "base":
        # A sublayer's mix has all rows; the head's has the first group only.
        return _static_mix(streams)[: shape[0]].to(device)
    return torch.zeros(shape, device=device)


def _static_mix(streams: int) -> Tensor:
    """Give the bases of a plain residual network; f32[(2+M)*M]."""
    mean = torch.full((streams,), -math.log(max(streams - 1, _LEAST_ODDS)))  # sigmoid gives 1 / streams
    add = torch.zeros(streams)  # twice the sigmoid of 0 is 1
    return torch.cat([mean, add, _OWN_STREAM * torch.eye(streams).flatten()])
