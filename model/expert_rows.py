"""The experts of a layer over ranks: who holds them, who brings the rows, and how sums come back to them.

With ``moe="tp"`` every rank holds a slice of every expert: all rows go to all ranks, and the parts of their sums are
added. With ``moe="ep"`` every rank holds some experts: a row goes where its experts are. The token's owner chooses its
experts in both; what travels is the choice, so a layer that chooses by token id needs no token ids of others.

Source: SGLang 0.5.23 ``models/deepseek_v2.py`` and ``layers/moe``; decode-path sheet 6.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..ops.collectives import all_reduce
from ..ops.expert_ranks import Choice, run_fixed, run_variable
from ..state.shares import RowShares
from .model import Model
from .params import MoEParams
from .row_exchange import gather_rows, own_share, require_shares, return_rows, share_rows
from .variants import activation_rows

__all__ = ["run_experts"]


def run_experts(
    model: Model, p: MoEParams, x: Tensor, ids: Tensor, weights: Tensor, shares: RowShares | None
) -> Tensor:
    """Run the chosen experts and the shared one.

    Args:
        model: the model.
        p: weights of the sublayer.
        x: float[...,T,H]. Normed sublayer input.
        ids: i64[...,T,K]. Chosen experts.
        weights: f32[...,T,K].
        shares: what every replica brings, over several of them.
    Returns:
        float[...,T,H].
    Rounding: routed sum and shared expert added in f32, also over ranks, then one rounding.
    """
    ranks, x = model.ranks, activation_rows(model, x)
    if ranks.world.size > 1 and ranks.parallel.moe == "ep":
        return _run_dealt(model, p, x, ids, weights, shares)
    if ranks.parallel.dp == 1:
        return all_reduce(_run_here(model, p, x, ids, weights), ranks.world).to(x.dtype)
    shares = require_shares(shares)
    choice = Choice(places=ids, weights=weights, per_rank=0)
    rows = gather_rows(x, shares, ranks)
    chosen = choice.unpacked(gather_rows(choice.packed(), shares, ranks))
    return return_rows(_run_here(model, p, rows, chosen.places, chosen.weights), shares, ranks).to(x.dtype)


def _run_here(model: Model, p: MoEParams, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Run what this rank holds of every expert: f32[...,T,H]."""
    return _run_routed(model, p, x, ids, weights) + _run_shared(model, p, x).float()


def _run_routed(model: Model, p: MoEParams, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    routed = model.ops.experts(x, ids, weights, p.w13, p.w2, model.config.swiglu_limit)
    return routed * model.config.routed_scaling_factor if model.numerics.routing_weight == "summed" else routed


def _run_shared(model: Model, p: MoEParams, x: Tensor) -> Tensor:
    limit = model.config.swiglu_limit if model.numerics.clamp_shared_expert else None
    return model.ops.expert(x, p.shared_w13, p.shared_w2, limit)


def _run_dealt(model: Model, p: MoEParams, x: Tensor, ids: Tensor, weights: Tensor, shares: RowShares | None) -> Tensor:
    """Send rows to the ranks that hold their experts; a replica's ranks send a share of its rows each."""
    ranks, n_rows = model.ranks, x.shape[0]
    own, experts = own_share(x, ranks), _experts_of(model, p)
    places = ids if p.place is None else p.place.index_select(0, ids.flatten()).view_as(ids)
    choice = Choice(
        places=own_share(places, ranks), weights=own_share(weights, ranks), per_rank=p.gate.shape[0] // ranks.world.size
    )
    capacity = ranks.parallel.capacity
    if capacity is None or (shares is not None and shares.is_extend):
        routed = run_variable(own, choice, experts, ranks.world)
    else:
        routed = run_fixed(own, choice, experts, ranks.world, capacity)
    return share_rows((routed + _run_shared(model, p, own).float()).to(x.dtype), n_rows, ranks)


def _experts_of(model: Model, p: MoEParams) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if not x.shape[0]:
            return torch.zeros_like(x, dtype=torch.float32)
        return _run_routed(model, p, x, ids, weights)

    return run
