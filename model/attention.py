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
from ..ops.experts import ACTIVATION_GROUP
from ..state.config import Config
from ..state.kv import FP4_GROUP, FP8_GROUP
from .model import Model
from .params import AttentionParams, CompressorParams, IndexerParams, Weight
from .variants import activation_rows

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
    "round_entries",
    "round_index",
    "spread_index",
]


def _project(model: Model, x: Tensor, w: Weight) -> Tensor:
    """Multiply rows by a weight that releases quantise: float[...,H] -> float[...,F]."""
    return model.ops.linear(activation_rows(model, x), w)


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
    low = ops.rms_norm(_project(model, x, p.wq_a), p.q_norm, eps)
    q = _project(model, low, p.wq_b).unflatten(-1, (-1, model.config.head_dim))
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
        float[...,T,D], rotated; ``round_entries`` rounds it as an attention over it reads it.
    """
    return _turned(model, _project(model, x, p.wkv), p.kv_norm, factors)


def _turned(model: Model, x: Tensor, norm: Tensor, factors: Tensor) -> Tensor:
    """Norm and rotate what becomes an entry: float[...,D], in f32 where its rounding to FP8 wants the wide values."""
    numerics, ops = model.numerics, model.ops
    x = ops.rms_norm(x if numerics.entry_norm_rounding else x.float(), norm, model.config.rms_norm_eps)
    if numerics.entry_norm_rounding:
        x = x.to(model.dtype)
    if numerics.kv_qdq == "wide":
        return ops.apply_rotary(x.float(), factors)
    return ops.apply_rotary(x, factors).to(model.dtype)


def round_entries(model: Model, entries: Tensor) -> Tensor:
    """Round window or compressed entries to what attention reads.

    Args:
        model: the model.
        entries: float[...,D] of ``project_kv`` or ``finish_entries``.
    Returns:
        float[...,D] in the model's dtype.
    """
    if not model.numerics.kv_qdq:
        return entries
    width = model.config.head_dim - model.config.qk_rope_head_dim
    head, tail = entries.split((width, model.config.qk_rope_head_dim), dim=-1)
    return torch.cat((model.ops.round_fp8(head, FP8_GROUP), tail), dim=-1).to(model.dtype)


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
    rows = x if model.numerics.pooling_rounding == "all" else x.float()
    kv, gate = (model.ops.linear(rows, w.float()).float() for w in (p.wkv, p.wgate))
    return kv, gate + p.ape.index_select(0, phase)


def finish_entries(model: Model, p: CompressorParams, pooled: Tensor, factors: Tensor) -> Tensor:
    """Norm and rotate pooled groups into entries; ``round_entries`` or ``round_index`` rounds them.

    Args:
        model: the model.
        p: weights of the compressor.
        pooled: f32[...,C,D].
        factors: complex64[...,C,R/2] at the first position of every group.
    Returns:
        float[...,C,D].
    Rounding: pooled values to the model's dtype before the norm, unless the numerics leave that out.
    """
    if model.numerics.pooling_rounding != "none":
        pooled = pooled.to(model.dtype)
    return _turned(model, pooled, p.norm, factors)


def spread_index(model: Model, x: Tensor) -> Tensor:
    """Spread index queries or keys over their channels before they are rounded.

    Args:
        model: the model.
        x: float[...,J].
    Returns:
        float[...,J] in the model's dtype: rotated by a Walsh-Hadamard matrix, if the numerics say so.
    """
    x = x.to(model.dtype)
    return model.ops.hadamard(x) if model.numerics.indexer_hadamard else x


def round_index(model: Model, x: Tensor) -> Tensor:
    """Round index queries or keys to what is multiplied.

    Args:
        model: the model.
        x: float[...,J].
    Returns:
        float[...,J] in ``model.key_dtype``.
    """
    x = spread_index(model, x)
    match model.numerics.indexer_qdq:
        case "fp8":
            return model.ops.round_fp8_rows(x)
        case "int8":
            return model.ops.round_int8_rows(x)
        case True:
            return model.ops.round_fp4(x, FP4_GROUP)
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
    q = _project(model, low, p.wq_b).unflatten(-1, (-1, model.config.index_head_dim))
    return round_index(model, model.ops.apply_rotary(q, factors.unsqueeze(-2)))


def index_weights(model: Model, p: IndexerParams, x: Tensor) -> Tensor:
    """Compute the weight of every index head, with the scales of dot product and head count.

    Args:
        model: the model.
        p: weights of the indexer.
        x: float[...,T,H].
    Returns:
        float[...,T,I].
    """
    weights = model.ops.linear(x, p.weights_proj)
    return (weights if model.numerics.index_score_rounding else weights.float()) * _index_scale(model.config)


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
    w = p.wo_a
    if isinstance(w, Tensor) and w.dim() == 2:
        w = w.unflatten(0, (-1, model.config.o_lora_rank))
    groups = w.shape[0] if isinstance(w, Tensor) else model.config.o_groups
    rows = o.flatten(-2).unflatten(-1, (groups, -1))
    if model.numerics.wo_a_qdq:
        rows = model.ops.round_fp8(rows, ACTIVATION_GROUP)
    return all_reduce(_project(model, model.ops.grouped_linear(rows, w).flatten(-2), p.wo_b), model.ranks.attn)
