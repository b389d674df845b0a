"""Embedding and head over a vocabulary that is split over ranks: whose rows are where, before and after.

Over one replica every rank has all rows and a part of the vocabulary. Over several replicas the head is split over a
replica only (``dp_lm_head``), or over all ranks: then rows are gathered, every rank computes its part of the vocabulary
for all of them, and each row's whole vocabulary goes back to its owner.

Source: SGLang 0.5.23 ``layers/vocab_parallel_embedding.py``, ``layers/logits_processor.py``; decode-path sheet 7.
"""

from __future__ import annotations

from torch import Tensor

from ..ops.collectives import Group, all_gather, all_reduce, all_to_all
from ..state.shares import RowShares, can_exchange_logits
from .model import Model
from .row_exchange import require_shares, sum_gather

__all__ = ["embed_ids", "vocabulary_logits"]


def embed_ids(model: Model, token_ids: Tensor) -> Tensor:
    """Look up token embeddings; each of a replica's ranks holds some of them.

    Args:
        model: the model.
        token_ids: i64[...,T].
    Returns:
        float[...,T,H].
    """
    group, shard = model.ranks.attn, model.params.embed
    return all_reduce(model.ops.embed_rows(token_ids, shard, group.rank * shard.shape[0]), group)


def vocabulary_logits(model: Model, hidden: Tensor, shares: RowShares | None) -> Tensor:
    """Compute the logits of this replica's rows.

    Args:
        model: the model.
        hidden: float[...,T,H]. Normed rows.
        shares: what every replica brings, over several of them.
    Returns:
        f32[...,T,V], whole on every rank; padding columns are cut, since their logit of 0 could win.
    """
    ranks, group = model.ranks, model.ranks.head
    if ranks.parallel.dp == 1 or ranks.parallel.dp_lm_head:
        if not hidden.shape[0]:  # the same on all ranks of the replica
            return _no_rows(model, hidden)
        return model.ops.cut_vocabulary(_gather_vocabulary(_product(model, hidden), group), model.config.vocab_size)
    counts = require_shares(shares).logits
    if not sum(counts):
        return _no_rows(model, hidden)
    start = sum(counts[: ranks.replica])
    part = _product(model, sum_gather(hidden, start, sum(counts), ranks))
    if can_exchange_logits(ranks.parallel, counts, n_shards=group.size, n_rows=part.shape[0]):
        own = exchange_logits(part, group)
    else:
        own = _gather_vocabulary(part, group).narrow(0, start, counts[ranks.replica])
    return model.ops.cut_vocabulary(own, model.config.vocab_size)


def exchange_logits(part: Tensor, group: Group) -> Tensor:
    """Give every rank the whole vocabulary of its own rows, at once.

    Args:
        part: f32[B*T,V]. This rank's part of the vocabulary, for the T rows of each of B ranks.
        group: the ranks.
    Returns:
        f32[T,B*V].
    """
    return _beside(all_to_all(part, group), group)


def _no_rows(model: Model, hidden: Tensor) -> Tensor:
    return hidden.new_zeros((0, model.config.vocab_size)).float()


def _product(model: Model, hidden: Tensor) -> Tensor:
    rows = hidden if model.numerics.head_rounding else hidden.float()
    return model.ops.linear(rows, model.params.head.float()).float()


def _gather_vocabulary(part: Tensor, group: Group) -> Tensor:
    """Join the ranks' parts of the vocabulary: f32[...,T,V] -> f32[...,T,B*V]."""
    if group.size == 1:
        return part
    return _beside(all_gather(part.flatten(0, -2), group), group).unflatten(0, part.shape[:-1])


def _beside(stacked: Tensor, group: Group) -> Tensor:
    """Put what lies rank below rank side by side: f32[B*T,V] -> f32[T,B*V]."""
    return stacked.unflatten(0, (group.size, -1)).transpose(0, 1).flatten(1)
