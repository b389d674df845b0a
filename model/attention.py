"""The parts of the attention sublayer that do not touch a cache.

Used by the paged path (``model/paged.py``) and by the cache-free one (``model/sequence.py``), so that both compute the
same thing from the same code: projections, compressor inputs, finished entries, indexer queries, output projection. How
many heads, groups and index heads there are follows from the weights: over several ranks each has its share of them.

Source: DeepSeek-V4 ``inference/model.py``, ``Attention``, ``Compressor``, ``Indexer``; model sheet 2.5-2.9.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.collectives import all_reduce
from ..state.config import Config
from .model import Model
from .params import AttentionParams, CompressorParams, IndexerParams
from .rotary import FP4_GROUP, FP8_GROUP

__all__ = [
    "compressor_inputs",
    "entry_scores",
    "finish_entries",
    "group_rows",
    "index_query",
    "index_weights",
    "project_kv",
    "project_output",
    "project_query",
    "query_heads",
]


def query_heads(model: Model, p: AttentionParams, x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the query heads before their rotation, and the low-rank query that also feeds the indexer.

    Args:
        model: the model.
        p: weights of the sublayer.
        x: float[...,T,H]. Normed sublayer input.
    Returns:
        (q float[...,T,N,D], low float[...,T,Q]).
    """
    ops, eps = model.ops, model.config.rms_norm_eps
    low = ops.rms_norm(ops.linear(x, p.wq_a), p.q_norm, eps)
    q = ops.linear(low, p.wq_b).unflatten(-1, (-1, model.config.head_dim))
    return ops.normalize_query(q, eps, rounding=model.numerics.query_norm_rounding), low


def project_query(model: Model, p: AttentionParams, x: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the rotated query heads and the low-rank query that also feeds the indexer.

    Args:
        model: the model.
        p: weights of the sublayer.
        x: float[...,T,H]. Normed sublayer input.
        factors: complex64[...,T,R/2] at the token positions.
    Returns:
        (q float[...,T,N,D], low float[...,T,Q]).
    """
    q, low = query_heads(model, p, x)
    return model.ops.apply_rotary(q, factors.unsqueeze(-2)), low


def project_kv(model: Model, p: AttentionParams, x: Tensor, factors: Tensor) -> Tensor:
    """Compute the window entry of every token: one vector that is key and value.

    Args:
        model: the model.
        p: weights of the sublayer.
        x: float[...,T,H].
        factors: complex64[...,T,R/2] at the token positions.
    Returns:
        float[...,T,D], rotated, rounded as the numerics say.
    """
    ops = model.ops
    kv = ops.rms_norm(ops.linear(x, p.wkv), p.kv_norm, model.config.rms_norm_eps)
    return _round_entry(model, ops.apply_rotary(kv, factors))


def _round_entry(model: Model, entry: Tensor) -> Tensor:
    if not model.numerics.kv_qdq:
        return entry
    width = model.config.head_dim - model.config.qk_rope_head_dim
    head, tail = entry.split((width, model.config.qk_rope_head_dim), dim=-1)
    return torch.cat((model.ops.round_fp8(head, FP8_GROUP), tail), dim=-1)


def compressor_inputs(model: Model, p: CompressorParams, x: Tensor, phase: Tensor) -> tuple[Tensor, Tensor]:
    """Compute what every token gives to the pooling: a value and a logit per channel.

    Args:
        model: the model.
        p: weights of the compressor.
        x: float[...,T,H].
        phase: i64[T]. Position modulo the ratio.
    Returns:
        (kv f32[...,T,k*D], scores f32[...,T,k*D]), scores with the position bias.
    """
    wide = x.float()
    kv = model.ops.linear(wide, p.wkv.float())
    return kv, model.ops.linear(wide, p.wgate.float()) + p.ape.index_select(0, phase)


def finish_entries(model: Model, p: CompressorParams, pooled: Tensor, factors: Tensor, *, index_key: bool) -> Tensor:
    """Norm, rotate and round pooled groups into cache entries.

    Args:
        model: the model.
        p: weights of the compressor.
        pooled: f32[...,C,D].
        factors: complex64[...,C,R/2] at the first position of every group.
        index_key: the indexer's keys (Hadamard, FP4) instead of attention entries (FP8).
    Returns:
        float[...,C,D].
    Rounding: pooled values to the model's dtype before the norm.
    """
    ops = model.ops
    entry = ops.rms_norm(pooled.to(model.dtype), p.norm, model.config.rms_norm_eps)
    entry = ops.apply_rotary(entry, factors)
    return _round_index(model, entry) if index_key else _round_entry(model, entry)


def _round_index(model: Model, x: Tensor) -> Tensor:
    if model.numerics.indexer_hadamard:
        x = model.ops.hadamard(x)
    if model.numerics.indexer_qdq:
        x = model.ops.round_fp4(x, FP4_GROUP)
    return x


def index_query(model: Model, p: IndexerParams, low: Tensor, factors: Tensor) -> Tensor:
    """Compute the index queries from the low-rank query.

    Args:
        model: the model.
        p: weights of the indexer.
        low: float[...,T,Q].
        factors: complex64[...,T,R/2] at the token positions.
    Returns:
        float[...,T,I,J].
    """
    q = model.ops.linear(low, p.wq_b).unflatten(-1, (-1, model.config.index_head_dim))
    return _round_index(model, model.ops.apply_rotary(q, factors.unsqueeze(-2)))


def index_weights(model: Model, p: IndexerParams, x: Tensor) -> Tensor:
    """Compute the weight of every index head, with the scales of dot product and head count.

    Args:
        model: the model.
        p: weights of the indexer.
        x: float[...,T,H].
    Returns:
        float[...,T,I].
    """
    return model.ops.linear(x, p.weights_proj) * _index_scale(model.config)


def entry_scores(model: Model, query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Score entries with the index heads of all ranks, so that each of them picks the same entries.

    Args:
        model: the model.
        query: float[...,T,I,J]. Of this rank's heads.
        keys: float[...,C,J].
        weights: float[...,T,I]. Of this rank's heads.
    Returns:
        f32[...,T,C].
    """
    scores = model.ops.index_scores(query, keys, weights, rounding=model.numerics.index_score_rounding)
    return all_reduce(scores, model.ranks.attn)


def _index_scale(config: Config) -> float:
    return config.index_head_dim**-0.5 * config.index_n_heads**-0.5


def project_output(model: Model, p: AttentionParams, o: Tensor, factors: Tensor) -> Tensor:
    """Rotate the attention output back and project it, group by group.

    Args:
        model: the model.
        p: weights of the sublayer.
        o: float[...,T,N,D].
        factors: complex64[...,T,R/2] at the token positions.
    Returns:
        float[...,T,H].
    """
    return group_rows(model, p, model.ops.apply_rotary(o, factors.conj().unsqueeze(-2)))


def group_rows(model: Model, p: AttentionParams, o: Tensor) -> Tensor:
    """Project the attention output, rotated back already, group by group.

    Args:
        model: the model.
        p: weights of the sublayer.
        o: float[...,T,N,D].
    Returns:
        float[...,T,H].
    """
    w = p.wo_a if p.wo_a.dim() == 3 else p.wo_a.unflatten(0, (-1, model.config.o_lora_rank))
    low = model.ops.grouped_linear(o.flatten(-2).unflatten(-1, (w.shape[0], -1)), w)
    return all_reduce(model.ops.linear(low.flatten(-2), p.wo_b), model.ranks.attn)
