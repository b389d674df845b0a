"""The kernel table with the choices of a ``Numerics`` value bound to its operators, once, when a model is built.

What an operator takes as an argument at every call (how attention rounds its probabilities, say) stays there; here are
the choices that would be the same constant at every call.

Source: model sheet, section 3.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from ..ops.dispatch import Ops
from ..ops.experts import ACTIVATION_GROUP, PLAIN, ExpertMath
from ..state.numerics import Numerics
from .model import Model

__all__ = ["activation_rows", "numeric_ops"]


def numeric_ops(ops: Ops, numerics: Numerics, dtype: torch.dtype, *, is_stored: bool) -> Ops:
    """Bind numeric choices to the operators of a kernel table.

    Args:
        ops: the table.
        numerics: the choices.
        dtype: of activations.
        is_stored: whether weights are kept quantised.
    Returns:
        The same table where the choices are the plain ones.
    """
    bound: dict[str, Any] = {}
    if numerics.router_rounding or numerics.router_epsilon:
        how = {"dtype": dtype if numerics.router_rounding else torch.float32, "epsilon": numerics.router_epsilon}
        bound |= {"route_scored": partial(ops.route_scored, **how), "route_hash": partial(ops.route_hash, **how)}
    if numerics.pooling_rounding == "all":
        bound["pool_group"] = partial(ops.pool_group, dtype=dtype)
    if numerics.stream_rounding:
        bound["update_streams"] = partial(ops.update_streams, rounding=True)
    math = ExpertMath(
        weighs_after=numerics.routing_weight != "inside",
        rounds_steps=numerics.expert_rounding,
        rounds_inner=numerics.rounds_activations(is_stored=is_stored),
    )
    if math != PLAIN:
        bound |= {"experts": partial(ops.experts, how=math), "expert": partial(ops.expert, how=math)}
    return attrs.evolve(ops, **bound) if bound else ops


def activation_rows(model: Model, x: Tensor) -> Tensor:
    """Round rows that meet a weight which releases quantise, as the numerics say.

    Args:
        model: the model.
        x: float[...,H].
    Returns:
        float[...,H] in the dtype of ``x``.
    Rounding: none, or e4m3 with a power-of-two scale for every 128 channels.
    """
    return model.ops.round_fp8(x, ACTIVATION_GROUP) if model.rounds_activations else x
