"""The model on whole sequences, without any cache: what training and ``torch.func`` transforms use.

Every shape follows from the length of the input, so ``grad``, ``vmap`` and ``jvp`` go through. Choices (experts, index
picks) are integers and carry no gradient; in particular the indexer learns nothing from a loss on the logits, so train
with ``index_topk >= T/4``, where every visible entry is picked.

Source: model sheet, section 2.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from ..ops.compressor import overlap_groups, plain_groups
from ..ops.dispatch import DIFFERENTIABLE, Ops
from ..ops.streams import split_streams
from .attention import (
    compressor_inputs,
    entry_scores,
    finish_entries,
    index_query,
    index_weights,
    project_kv,
    project_output,
    project_query,
    round_entries,
    round_index,
)
from .head import embed_ids
from .layer import head_logits, layer
from .leaves import expanded, has_stored
from .model import Model
from .params import AttentionParams, CompressorParams
from .variants import numeric_ops

__all__ = ["forward_sequence"]

OVERLAP_RATIO = 4
"""The ratio whose groups overlap and whose entries are chosen by an indexer."""


def _entries(
    model: Model, p: CompressorParams, x: Tensor, ratio: int, frequencies: Tensor, *, index_key: bool
) -> Tensor:
    """Compress the whole sequence: float[...,T//ratio,D]."""
    n_tokens = x.shape[-2]
    phase = torch.arange(n_tokens, device=x.device) % ratio
    kv, scores = compressor_inputs(model, p, x, phase)
    if ratio == OVERLAP_RATIO:
        kv, scores = overlap_groups(kv, ratio, 0.0), overlap_groups(scores, ratio, -torch.inf)
    else:
        kv, scores = plain_groups(kv, ratio), plain_groups(scores, ratio)
    starts = torch.arange(n_tokens // ratio, device=x.device) * ratio
    factors = model.ops.rotary_factors(starts, frequencies, model.turn_dtype)
    entries = finish_entries(model, p, model.ops.pool_group(kv, scores), factors)
    return round_index(model, entries) if index_key else round_entries(model, entries)


def _picked(model: Model, p: AttentionParams, x: Tensor, low: Tensor, visible: Tensor, frequencies: Tensor) -> Tensor:
    """Let the indexer choose among the entries: bool[...,T,C]."""
    indexer = p.indexer
    assert indexer is not None, "a ratio-4 layer has an indexer: the loader checks it"
    factors = model.ops.rotary_factors(torch.arange(x.shape[-2], device=x.device), frequencies, model.turn_dtype)
    keys = _entries(model, indexer.compressor, x, OVERLAP_RATIO, frequencies, index_key=True)
    query, weights = index_query(model, indexer, low, factors), index_weights(model, indexer, x)
    scores = entry_scores(model, query, keys, weights)
    picks = model.ops.pick_entries(scores, visible, model.config.index_topk)
    n_entries = keys.shape[-2]
    # One extra column takes the -1 of missing picks.
    hit = torch.zeros((*picks.shape[:-1], n_entries + 1), device=x.device)
    hit = hit.scatter(-1, torch.where(picks < 0, n_entries, picks), 1.0)
    return hit[..., :n_entries] > 0


def _attention(model: Model, p: AttentionParams, x: Tensor, ratio: int) -> Tensor:
    """Attend within the sequence: float[...,T,H]."""
    config = model.config
    n_tokens = x.shape[-2]
    frequencies = model.frequencies[ratio]
    position = torch.arange(n_tokens, device=x.device)
    factors = model.ops.rotary_factors(position, frequencies, model.turn_dtype)
    q, low = project_query(model, p, x, factors)
    keys = round_entries(model, project_kv(model, p, x, factors))
    age = position.unsqueeze(-1) - position
    mask = (age >= 0) & (age < config.sliding_window)
    n_entries = n_tokens // ratio if ratio else 0
    if n_entries:
        assert p.compressor is not None, "a layer with a ratio has a compressor: the loader checks it"
        entries = _entries(model, p.compressor, x, ratio, frequencies, index_key=False)
        visible = (position + 1) // ratio
        seen = torch.arange(n_entries, device=x.device) < visible.unsqueeze(-1)
        if ratio == OVERLAP_RATIO and n_entries > config.index_topk:
            seen = _picked(model, p, x, low, visible, frequencies)
        keys = torch.cat((keys, entries), dim=-2)
        mask = torch.cat((mask.expand(*seen.shape[:-1], n_tokens), seen), dim=-1)
    o = model.ops.attend(
        q, keys, mask, p.attn_sink, scale=config.head_dim**-0.5, rounding=model.numerics.probability_rounding
    )
    return project_output(model, p, o, factors)


def forward_sequence(model: Model, token_ids: Tensor, *, ops: Ops = DIFFERENTIABLE) -> Tensor:
    """Compute the logits of every position of whole sequences, differentiably and without a cache.

    Args:
        model: the model.
        token_ids: i64[...,T]. Leading axes are independent sequences.
        ops: kernel table used instead of the model's, with its numerics; the default one goes through every
            ``torch.func`` transform.
    Returns:
        f32[...,T,V].
    """
    params = model.params
    ops = numeric_ops(ops, model.numerics, model.dtype, is_stored=has_stored(params))
    model = attrs.evolve(model, ops=ops)
    streams = split_streams(embed_ids(model, token_ids), model.config.hc_mult)
    for stored, ratio in zip(params.layers, model.config.compress_ratios, strict=True):
        p = expanded(stored, model.dtype)

        def attention(x: Tensor, p: AttentionParams = p.attn, ratio: int = ratio) -> Tensor:
            return _attention(model, p, x, ratio)

        streams = layer(model, p, streams, token_ids, attention)
    return head_logits(model, streams)
