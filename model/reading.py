"""Reading the caches by the tables of a step: where rows lie, and which entries a query of a ratio-4 layer picks.

Scores are tiled, so that what is held at once does not grow with the length of the history.

Source: DeepSeek-V4 ``inference/model.py``, ``Indexer``; model sheet 2.9, decode-path sheet 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ..state.batch import AttentionMetadata, ChunkMetadata, ForwardBatch, SingleMetadata
from ..state.capacity import C4_RATIO
from .attention import entry_scores, index_query, index_weights
from .model import Model
from .params import IndexerParams
from .pools import Pool
from .stages import Tap, untapped

__all__ = [
    "GATHER_BUDGET",
    "MIN_BLOCK",
    "SCORE_BUDGET",
    "entry_picks",
    "gather_rows",
    "in_token_order",
    "ordered_picks",
    "paged_loc",
]

GATHER_BUDGET: Final = 1 << 25
"""Largest number of key channels gathered at once for rows that own their keys."""

MIN_BLOCK: Final = 64
"""Rows that are always gathered together; any decode batch of this size stays one block."""

SCORE_BUDGET: Final = 1 << 24
"""Largest number of scores held at once for a chunk; query rows are tiled to stay below it."""


def paged_loc(pages: Tensor, page_size: int, count: int, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Turn page tables into slots.

    Args:
        pages: i64[B,C]. Pages of every row.
        page_size: entries of a page.
        count: entries wanted.
        visible: i64[B]. Entries that the row sees.
    Returns:
        (loc i64[B,C], mask bool[B,C]): slots of entries 0..count-1, and which of them are visible.
    """
    offset = torch.arange(page_size, device=pages.device)
    loc = (pages.unsqueeze(-1) * page_size + offset).flatten(1)[:, :count]
    return loc, torch.arange(count, device=pages.device) < visible.unsqueeze(-1)


def gather_rows(pool: Pool, loc: Tensor, mask: Tensor) -> Tensor:
    """Read pool rows; rows that the mask hides read as zero, whatever lies in the sink.

    Args:
        pool: of one layer.
        loc: i64[B,X].
        mask: bool[B,X].
    Returns:
        float[B,X,D].
    """
    rows = pool.read(loc.flatten()).unflatten(0, loc.shape)
    return rows.masked_fill_(~mask.unsqueeze(-1), 0)


def in_token_order(meta: AttentionMetadata, parts: Sequence[Tensor]) -> Tensor:
    """Join what was computed for the single rows (if there are any) and for each chunk.

    Args:
        meta: of the step.
        parts: results of the single rows, then of the chunks one after the other; rows on axis 0.
    Returns:
        One row per token of the step, in order.
    """
    if len(parts) == 1:
        return parts[0]
    rows = [] if meta.singles is None or meta.singles.rows is None else [meta.singles.rows]
    for chunk in meta.chunks:
        n_rows = chunk.seq_len - chunk.prefix_len
        rows.append(torch.arange(chunk.start, chunk.start + n_rows, device=parts[0].device))
    return torch.cat(list(parts)).index_select(0, torch.cat(rows).argsort())


def ordered_picks(picks: Tensor) -> Tensor:
    """Bring picks into order of position, so that a row reads its entries in one order whether or not it had to choose.

    Args:
        picks: i64[...,P]. In any order; -1 where there are fewer.
    Returns:
        i64[...,P]: ascending, then -1.
    """
    last = torch.iinfo(picks.dtype).max
    picks = torch.where(picks < 0, last, picks).sort(dim=-1).values
    return torch.where(picks == last, -1, picks)


def entry_picks(
    model: Model,
    p: IndexerParams,
    x: Tensor,
    low: Tensor,
    turn: Tensor,
    keys: Pool,
    c4_page: int,
    batch: ForwardBatch,
    tap: Tap,
) -> Tensor | None:
    """Choose the entries that every token of a step reads in a ratio-4 layer.

    Args:
        model: the model.
        p: weights of the indexer.
        x: float[T,H]. Normed sublayer input.
        low: float[T,Q]. Low-rank query.
        turn: complex64[T,R/2] at the token positions.
        keys: the layer's index keys, those of this step included.
        c4_page: entries of a page.
        batch: the step.
        tap: of the layer.
    Returns:
        i64[T,P], ascending, then -1; or None where every token reads all that it sees and nobody looks.
    """
    count = model.config.index_topk
    is_choosing = int(batch.seq_lens_cpu.max()) // C4_RATIO > count
    if not is_choosing and tap is untapped:
        return None
    visible = (batch.positions + 1) // C4_RATIO
    if not is_choosing:
        return tap("attn.picks", _all_visible(visible, count))
    meta, index = batch.metadata, (index_query(model, p, low, turn), index_weights(model, p, x))
    parts = [] if meta.singles is None else [_pick_singles(model, index, keys, c4_page, meta.singles)]
    parts += [_pick_chunk(model, index, visible, keys, chunk) for chunk in meta.chunks]
    return tap("attn.picks", in_token_order(meta, parts))


def _all_visible(visible: Tensor, count: int) -> Tensor:
    """Pick everything, where it fits into ``count``: i64[T,P]."""
    entry = torch.arange(count, device=visible.device)
    return torch.where(entry < visible.unsqueeze(-1), entry, -1)


def _pick_singles(model: Model, index: tuple[Tensor, Tensor], keys: Pool, c4_page: int, meta: SingleMetadata) -> Tensor:
    """Choose for rows with entries of their own, in blocks that bound what is gathered: i64[B,P]."""
    if meta.n_c4 <= model.config.index_topk:
        return _all_visible(meta.c4_visible, model.config.index_topk)
    query, weights = index if meta.rows is None else (part.index_select(0, meta.rows) for part in index)
    step = max(MIN_BLOCK, GATHER_BUDGET // (meta.n_c4 * model.config.index_head_dim))
    blocks = []
    for a in range(0, len(query), step):
        rows = slice(a, a + step)
        visible = meta.c4_visible[rows]
        loc, mask = paged_loc(meta.c4_pages[rows], c4_page, meta.n_c4, visible)
        stored = gather_rows(keys, loc, mask)
        blocks.append(_best(model, query[rows].unsqueeze(1), stored, weights[rows].unsqueeze(1), visible.unsqueeze(1)))
    return torch.cat(blocks).squeeze(1)


def _pick_chunk(
    model: Model, index: tuple[Tensor, Tensor], visible: Tensor, keys: Pool, chunk: ChunkMetadata
) -> Tensor:
    """Choose for the tokens of one request over entries that they share, in tiles of query rows: i64[T,P]."""
    query, weights = index
    stored = keys.read(chunk.c4_loc)
    per_row = model.config.index_n_heads * max(1, len(stored))
    step = max(1, min(2 * model.config.sliding_window, SCORE_BUDGET // per_row))
    tiles = []
    n_rows = chunk.seq_len - chunk.prefix_len
    for a in range(0, n_rows, step):
        b = min(a + step, n_rows)
        rows = slice(chunk.start + a, chunk.start + b)
        n_seen = (chunk.prefix_len + b) // C4_RATIO
        if n_seen <= model.config.index_topk:
            tiles.append(_all_visible(visible[rows], model.config.index_topk))
        else:
            tiles.append(_best(model, query[rows], stored[:n_seen], weights[rows], visible[rows]))
    return torch.cat(tiles)


def _best(model: Model, query: Tensor, stored: Tensor, weights: Tensor, visible: Tensor) -> Tensor:
    """Let the indexer choose: i64[...,T,P]."""
    scores = entry_scores(model, query, stored, weights)
    return ordered_picks(model.ops.pick_entries(scores, visible, model.config.index_topk))
