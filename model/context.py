"""Attention of one layer where every rank of a replica holds a block of every page of the caches.

A rank writes the entries that fall into its blocks and attends over them with the heads of all ranks; what it finds
goes to the rank that holds the head, which merges the parts by their log-sum-exp and counts the sink once. The indexer
scores in the same way: every rank its own entries with all heads, and all ranks pick from all scores.

Entry ``e`` of a page with ``n`` entries lies on rank ``e div (n / ranks)``, so pages keep their numbers everywhere, and
what a token sees of the first ``m`` entries is the first of what each rank holds of them.

Source: SGLang 0.5.23 ``layers/dcp`` (block interleave); decode-path sheet 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..ops.attention import attend_part, merge_parts
from ..ops.collectives import Group, all_gather, all_to_all
from ..state.batch import ForwardBatch, SingleMetadata
from ..state.capacity import C4_RATIO, C128_RATIO
from ..state.kv import KVLayout
from .attention import index_query, index_weights, project_output, project_query
from .model import Model
from .paged import write_entries
from .params import AttentionParams, IndexerParams
from .pools import Pool
from .reading import GATHER_BUDGET, gather_rows, ordered_picks, paged_loc
from .stages import Tap, untapped

__all__ = ["context_attention"]


def context_attention(
    model: Model,
    ratio: int,
    p: AttentionParams,
    x: Tensor,
    rows: Mapping[str, Tensor],
    layout: KVLayout,
    batch: ForwardBatch,
    factors: Any,
    tap: Tap = untapped,
) -> Tensor:
    """Run the attention sublayer of one layer over caches that the ranks of a replica share.

    Args:
        model: the model.
        ratio: of the layer.
        p: its attention weights.
        x: float[T,H]. Normed sublayer input.
        rows: the layer's cache rows of this rank by buffer; those of ``write_rows`` are written.
        layout: of the caches.
        batch: the step.
        factors: of ``rotations``.
        tap: of the layer; it sees this rank's heads.
    Returns:
        float[T,H].
    """
    meta, group = batch.metadata, model.ranks.context
    assert meta.singles is not None, "every token has tables of its own here"
    turn = factors[ratio, "tokens"]
    q, low = project_query(model, p, x, turn)
    pools = write_entries(model, ratio, p, x, rows, layout, meta, factors)
    picks: Tensor | None = None
    if ratio == C4_RATIO:
        assert p.indexer is not None, "a ratio-4 layer has an indexer: the loader checks it"
        picks = _picks(model, p.indexer, x, low, turn, pools["index"], layout, batch, tap)
    out, lse = _attend_own(model, _all_heads(q, group), picks, pools, ratio, layout, meta.singles)
    heads = _to_head_owners(out, lse, p.attn_sink, group).to(x.dtype)
    return project_output(model, p, tap("attn.heads", heads), turn)


def _all_heads(part: Tensor, group: Group) -> Tensor:
    """Bring the heads of all ranks together: float[T,N,D] of this rank's -> float[T,B*N,D]."""
    return all_gather(part, group).unflatten(0, (group.size, -1)).transpose(0, 1).flatten(1, 2)


def _to_head_owners(out: Tensor, lse: Tensor, sink: Tensor, group: Group) -> Tensor:
    """Send every rank what was found for its heads, and merge it: f32[T,N,D] of this rank's heads."""
    both = torch.cat((out, lse.unsqueeze(-1)), dim=-1).unflatten(1, (group.size, -1)).transpose(0, 1)
    parts = all_to_all(both.flatten(0, 1), group).unflatten(0, (group.size, -1))
    return merge_parts(parts[..., :-1], parts[..., -1], sink)


def _local_count(visible: Tensor, page: int, block: int, share: int) -> Tensor:
    """Count how many of the first ``visible`` entries lie on this rank: i64[T]."""
    return visible // page * block + (visible % page - share * block).clamp(0, block)


def _attend_own(
    model: Model,
    q: Tensor,
    picks: Tensor | None,
    pools: Mapping[str, Pool],
    ratio: int,
    layout: KVLayout,
    meta: SingleMetadata,
) -> tuple[Tensor, Tensor]:
    """Attend over this rank's keys, in blocks that bound what is gathered: (f32[T,N,D], f32[T,N])."""
    n_keys = meta.window_loc.shape[1] + {0: 0, C4_RATIO: meta.n_c4, C128_RATIO: meta.n_c128}[ratio]
    step = max(1, GATHER_BUDGET // (n_keys * model.config.head_dim))
    outs, sums = [], []
    for a in range(0, len(q), step):
        rows = slice(a, a + step)
        keys, mask = (
            [gather_rows(pools["swa"], meta.window_loc[rows], meta.window_mask[rows])],
            [meta.window_mask[rows]],
        )
        if ratio:
            is_c4 = ratio == C4_RATIO
            name, pages = ("c4", meta.c4_pages[rows]) if is_c4 else ("c128", meta.c128_pages[rows])
            visible, most = (meta.c4_visible, meta.n_c4) if is_c4 else (meta.c128_visible, meta.n_c128)
            if most and picks is None:
                loc, seen = _own_entries(layout, name, pages, visible[rows], most)
            elif most and picks is not None:
                loc, seen = _own_picks(layout, pages, picks[rows])
            if most:
                keys.append(gather_rows(pools[name], loc, seen))
                mask.append(seen)
        out, lse = attend_part(
            q[rows].unsqueeze(1),
            torch.cat(keys, dim=1),
            torch.cat(mask, dim=1).unsqueeze(1),
            scale=model.config.head_dim**-0.5,
            rounding=model.numerics.probability_rounding is True,
        )
        outs.append(out.squeeze(1))
        sums.append(lse.squeeze(1))
    return torch.cat(outs), torch.cat(sums)


def _own_entries(layout: KVLayout, name: str, pages: Tensor, visible: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Find what this rank holds of the first ``visible`` entries: (slots i64[T,C], bool[T,C])."""
    block, page = layout.block(name), layout.block(name) * layout.ways
    count = -(-most // page) * block
    return paged_loc(pages, block, count, _local_count(visible, page, block, layout.share))


def _own_picks(layout: KVLayout, pages: Tensor, picks: Tensor) -> tuple[Tensor, Tensor]:
    """Find which picked entries lie on this rank, and where: (slots i64[T,P], bool[T,P])."""
    block, page = layout.block("c4"), layout.block("c4") * layout.ways
    entry = picks.clamp(min=0)
    is_own = (picks >= 0) & (entry % page // block == layout.share)
    return torch.where(is_own, pages.gather(1, entry // page) * block + entry % block, 0), is_own


def _picks(
    model: Model,
    p: IndexerParams,
    x: Tensor,
    low: Tensor,
    turn: Tensor,
    keys: Pool,
    layout: KVLayout,
    batch: ForwardBatch,
    tap: Tap,
) -> Tensor | None:
    """Choose the entries that every token reads, the same on all ranks: i64[T,P], or None where all are read."""
    count, group, meta = model.config.index_topk, model.ranks.context, batch.metadata.singles
    assert meta is not None, "every token has tables of its own here"
    visible = (batch.positions + 1) // C4_RATIO
    if int(batch.seq_lens_cpu.max()) // C4_RATIO <= count:
        if tap is untapped:
            return None
        entry = torch.arange(count, device=x.device)
        return tap("attn.picks", torch.where(entry < visible.unsqueeze(-1), entry, -1))
    query = _all_heads(index_query(model, p, low, turn), group)
    weights = _all_heads(index_weights(model, p, x).unsqueeze(-1), group).squeeze(-1)
    n_pages = -(-meta.n_c4 // (layout.block("index") * layout.ways))
    step = max(1, GATHER_BUDGET // (n_pages * layout.block("index") * model.config.index_head_dim))
    found = []
    for a in range(0, len(query), step):
        rows = slice(a, a + step)
        loc, seen = _own_entries(layout, "index", meta.c4_pages[rows], meta.c4_visible[rows], meta.n_c4)
        scores = model.ops.index_scores(
            query[rows].unsqueeze(1),
            gather_rows(keys, loc, seen),
            weights[rows].unsqueeze(1),
            rounding=model.numerics.index_score_rounding,
        )
        # rank, token, page, entry of the block -> token, entry
        dealt = all_gather(scores.squeeze(1), group).unflatten(0, (group.size, -1)).unflatten(-1, (n_pages, -1))
        whole = dealt.permute(1, 2, 0, 3).flatten(1)
        found.append(ordered_picks(model.ops.pick_entries(whole, visible[rows], count)))
    return tap("attn.picks", torch.cat(found))
