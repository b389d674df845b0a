"""One layer around its attention: mHC, norms, mixture of experts.

Source: DeepSeek-V4 ``inference/model.py``, ``Block`` and ``MoE``; model sheet 2.2, 2.10, 2.11.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..state.shares import RowShares
from .expert_rows import run_experts
from .head import vocabulary_logits
from .model import Model
from .params import LayerParams, MoEParams, StreamParams
from .stages import Tap, untapped

__all__ = ["head_logits", "layer", "mixture", "sublayer_input"]


def sublayer_input(model: Model, p: StreamParams, norm: Tensor, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what a sublayer reads, and the mixes that its output comes back by.

    Args:
        model: the model.
        p: weights of the mHC around it.
        norm: weight of its norm.
        streams: float[...,T,M,H].
    Returns:
        (x float[...,T,H], post f32[...,T,M], comb f32[...,T,M,M]).
    """
    ops, config = model.ops, model.config
    y, post, comb = ops.enter_streams(
        streams,
        p.fn,
        p.base,
        p.scale,
        n_iters=config.hc_sinkhorn_iters,
        eps=config.hc_eps,
        norm_eps=config.rms_norm_eps,
    )
    return ops.rms_norm(y, norm, config.rms_norm_eps), post, comb


def _around(
    model: Model, p: StreamParams, norm: Tensor, streams: Tensor, sublayer: Callable[[Tensor], Tensor]
) -> Tensor:
    """Run ``sublayer`` inside one mHC."""
    x, post, comb = sublayer_input(model, p, norm, streams)
    return model.ops.update_streams(streams, sublayer(x), post, comb)


def mixture(
    model: Model,
    p: MoEParams,
    x: Tensor,
    token_ids: Tensor,
    tap: Tap = untapped,
    shares: RowShares | None = None,
) -> Tensor:
    """Run the mixture of experts.

    Args:
        model: the model.
        p: weights of the sublayer.
        x: float[...,T,H]. Normed sublayer input.
        token_ids: i64[...,T]. What hash layers route by.
        tap: of the layer. Expert ids that it changes are weighed anew from the router logits.
        shares: what every replica brings, over several of them.
    Returns:
        float[...,T,H].
    Rounding: routed sum and shared expert added in f32, then one rounding.
    """
    ops, config, numerics = model.ops, model.config, model.numerics
    # A product that is not to be rounded is asked for in f32: its rows say what it comes out in.
    logits = ops.linear(x if numerics.router_rounding else x.float(), p.gate.float()).float()
    logits = tap("ffn.router_logits", logits)
    if p.tid2eid is not None:
        chosen = p.tid2eid.index_select(0, token_ids.flatten()).unflatten(0, token_ids.shape)
        ids, weights = ops.route_hash(logits, chosen, _weight_factor(model))
    else:
        ids, weights = ops.route_scored(logits, p.bias, config.num_experts_per_tok, _weight_factor(model))
    ids, weights = _tap_choice(model, logits, ids, weights, tap)
    return run_experts(model, p, x, ids, weights, shares)


def _weight_factor(model: Model) -> float:
    """Return what the weights of a token sum to; a factor that the sum of the experts gets is not in it."""
    return 1.0 if model.numerics.routing_weight == "summed" else model.config.routed_scaling_factor


def _tap_choice(model: Model, logits: Tensor, ids: Tensor, weights: Tensor, tap: Tap) -> tuple[Tensor, Tensor]:
    """Let the tap see and replace the choice of experts: (ids i64[...,T,K], weights f32[...,T,K])."""
    used = tap("ffn.expert_ids", ids)
    if used is not ids:
        _, anew = model.ops.route_hash(logits, used, _weight_factor(model))
        # Rows that keep their experts keep their bits, whichever kernel weighed them.
        weights = torch.where((used == ids).all(-1, keepdim=True), weights, anew)
    return used, tap("ffn.expert_weights", weights)


def layer(
    model: Model,
    p: LayerParams,
    streams: Tensor,
    token_ids: Tensor,
    attention: Callable[[Tensor], Tensor],
    tap: Tap = untapped,
    shares: RowShares | None = None,
) -> Tensor:
    """Run one layer on the residual streams.

    Args:
        model: the model.
        p: weights of the layer.
        streams: float[...,T,M,H].
        token_ids: i64[...,T].
        attention: float[...,T,H] -> float[...,T,H]; where the cached and the cache-free path differ.
        tap: of the layer.
        shares: what every replica brings, over several of them.
    Returns:
        float[...,T,M,H].
    """

    def attn(x: Tensor) -> Tensor:
        return tap("attn.output", attention(tap("attn.input", x)))

    def ffn(x: Tensor) -> Tensor:
        return tap("ffn.output", mixture(model, p.ffn, tap("ffn.input", x), token_ids, tap, shares))

    streams = _around(model, p.hc_attn, p.attn_norm, tap("streams", streams), attn)
    return _around(model, p.hc_ffn, p.ffn_norm, tap("ffn.streams", streams), ffn)


def head_logits(model: Model, streams: Tensor, shares: RowShares | None = None) -> Tensor:
    """Compute logits from the final streams.

    Args:
        model: the model.
        streams: float[...,T,M,H].
        shares: what every replica brings, over several of them.
    Returns:
        f32[...,T,V].
    Rounding: f32 product of the rounded hidden row and head.
    """
    p, config, ops = model.params, model.config, model.ops
    weights = ops.head_weights(
        streams, p.hc_head.fn, p.hc_head.base, p.hc_head.scale, eps=config.hc_eps, norm_eps=config.rms_norm_eps
    )
    hidden = ops.rms_norm(ops.join_streams(streams, weights), p.norm, config.rms_norm_eps)
    return vocabulary_logits(model, hidden, shares)
