"""Vocabulary-parallel embedding and head: each rank owns a range of token ids. Here the group has one rank.

Source: SGLang 0.5.23 ``layers/vocab_parallel_embedding.py``; decode-path sheet 7.1.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["cut_vocabulary", "embed_rows", "shard_rows"]

PADDING: Final = 64
"""Shards are cut from a vocabulary padded to a multiple of this."""


def shard_rows(n_vocab: int, ranks: int) -> int:
    """Compute the rows of one rank's shard, padding included.

    Args:
        n_vocab: V.
        ranks: of the group; rank s owns ids ``[s * rows, (s + 1) * rows)`` below V.
    Returns:
        Rows per rank.
    """
    unit = PADDING if -(-n_vocab // PADDING) * PADDING % ranks == 0 else PADDING * ranks
    return -(-n_vocab // unit) * unit // ranks


def embed_rows(ids: Tensor, weight: Tensor, first: int) -> Tensor:
    """Look up the ids that this shard owns; all others give zero rows, so that a sum over shards is the lookup.

    Args:
        ids: i64[...,T].
        weight: float[V,H]. The shard.
        first: id of its first row.
    Returns:
        float[...,T,H].
    """
    local = ids - first
    is_mine = (local >= 0) & (local < weight.shape[0])
    rows = F.embedding(torch.where(is_mine, local, 0), weight)
    return torch.where(is_mine.unsqueeze(-1), rows, 0)


def cut_vocabulary(logits: Tensor, n_vocab: int) -> Tensor:
    """Cut the columns of padding rows: their logit is exactly 0, which beats real negative ones.

    Args:
        logits: f32[...,V], padding columns last.
        n_vocab: V.
    Returns:
        f32[...,V] without them.
    """
    return logits[..., :n_vocab]
