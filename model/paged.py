"""Attention of one layer over the paged caches: write the new state, then read the history including it.

Functions here take raw buffers and index tensors and write the buffers in place; the persistent handles stay outside
(``model/forward.py``). What is written is exactly ``write_rows``.

Source: DeepSeek-V4 ``inference/model.py`` (``Attention.forward``), SGLang 0.5.23
``hardware_backend/npu/attention/ascend_dsv4_backend.py``; model sheet 2.5-2.9, decode-path sheet 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs
import torch
from torch import Tensor

from ..ops.compressor import folded
from ..state.batch import AttentionMetadata, ChunkMetadata, CompressorMetadata, ForwardBatch, SingleMetadata
from ..state.capacity import C4_RATIO, C128_PAGE, C128_RATIO
from ..state.kv import KVLayout
from .attention import compressor_inputs, finish_entries, project_kv, project_output, project_query
from .model import Model
from .params import AttentionParams, CompressorParams
from .pools import Pool, entry_pool, key_pool
from .reading import GATHER_BUDGET, MIN_BLOCK, SCORE_BUDGET, entry_picks, gather_rows, in_token_order, paged_loc
from .stages import Tap, untapped

__all__ = [
    "Rotations",
    "layer_rows",
    "paged_attention",
    "rotations",
    "write_entries",
    "write_rows",
]

_ENTRIES: Final = ("swa", "c4", "c128")
"""Buffers whose rows attention reads."""

Rotations = Mapping[tuple[int, str], Tensor]
"""(ratio, "tokens" or "entries") -> complex64[T or C,R/2], or ``Turns`` in a graph."""


def rotations(model: Model, frequencies: Mapping[int, Tensor], batch: ForwardBatch) -> Rotations:
    """Compute the rotary factors of one forward, shared by all layers of a kind.

    Args:
        model: the model.
        frequencies: its own, f32[R/2] by compress ratio.
        batch: the step.
    """
    found: dict[tuple[int, str], Tensor] = {}
    for ratio, own in frequencies.items():
        if ratio == C128_RATIO and (C4_RATIO, "tokens") in found:
            found[ratio, "tokens"] = found[C4_RATIO, "tokens"]
        else:
            found[ratio, "tokens"] = model.ops.rotary_factors(batch.positions, own, model.turn_dtype)
        if ratio:
            starts = batch.metadata.compressors[ratio].first_pos
            found[ratio, "entries"] = model.ops.rotary_factors(starts, own, model.turn_dtype)
    return found


def write_rows(layout: KVLayout, metadata: AttentionMetadata, layers: range) -> dict[str, Tensor]:
    """List every buffer row that a forward of ``layers`` writes.

    Args:
        layout: of the caches.
        metadata: of the step.
        layers: which layers run.
    Returns:
        Buffer name -> i64[S] rows.
    """
    slots: dict[tuple[str, ...], Tensor] = {("swa",): metadata.swa_loc}
    if C4_RATIO in metadata.compressors:
        slots["c4", "index", "index_scale"] = _entry_loc(metadata, C4_RATIO)
        slots["c4_state", "index_state"] = _state_loc(metadata)
    if C128_RATIO in metadata.compressors:
        slots["c128",] = _entry_loc(metadata, C128_RATIO)
        slots["c128_state",] = metadata.compressors[C128_RATIO].state_loc
    rows: dict[str, Tensor] = {}
    for names, loc in slots.items():  # buffers of one group have as many slots, in the same layers one after the other
        own = [i for i in layers if names[0] in layout.buffers_of(i)]
        if own and loc.numel():
            n_slots, first = layout.n_slots(names[0]), layout.place(names[0], own[0])
            starts = torch.arange(first * n_slots, (first + len(own)) * n_slots, n_slots, device=loc.device)
            found = (starts.unsqueeze(-1) + loc).flatten()
            rows |= {name: found for name in names if name in layout.buffers_of(own[0])}
    return rows


def _entry_loc(metadata: AttentionMetadata, ratio: int) -> Tensor:
    """List the slots of closing entries; kernels fill their lists up with the sink."""
    loc = metadata.compressors[ratio].out_loc
    return loc if metadata.tables is None else torch.cat((loc, loc.new_zeros(1)))


def _state_loc(metadata: AttentionMetadata) -> Tensor:
    """List the slots of C4 state that is written, what is carried into banks of the caches included."""
    own = metadata.compressors[C4_RATIO].state_loc
    if metadata.tables is None or metadata.tables.compressors[C4_RATIO].ring:
        return own
    return torch.cat((own, metadata.tables.compressors[C4_RATIO].carried_to))


def paged_attention(
    model: Model,
    ratio: int,
    p: AttentionParams,
    x: Tensor,
    rows: Mapping[str, Tensor],
    layout: KVLayout,
    batch: ForwardBatch,
    factors: Rotations,
    tap: Tap = untapped,
) -> Tensor:
    """Run the attention sublayer of one layer on the tokens of a step.

    Args:
        model: the model.
        ratio: of the layer.
        p: its attention weights.
        x: float[T,H]. Normed sublayer input.
        rows: the layer's cache rows by buffer; those of ``write_rows`` are written.
        layout: of the caches.
        batch: the step.
        factors: of ``rotations``.
        tap: of the layer.
    Returns:
        float[T,H].
    """
    meta, c4_page = batch.metadata, layout.sizes.c4_page
    turn = factors[ratio, "tokens"]
    q, low = project_query(model, p, x, turn)
    pools = write_entries(model, ratio, p, x, rows, layout, meta, factors)
    picks: Tensor | None = None
    if ratio == C4_RATIO:
        assert p.indexer is not None, "a ratio-4 layer has an indexer: the loader checks it"
        picks = entry_picks(model, p.indexer, x, low, turn, pools["index"], c4_page, batch, tap)
    parts = [] if meta.singles is None else [_attend_singles(model, p, q, picks, pools, ratio, c4_page, meta.singles)]
    parts += [_attend_chunk(model, p, q, picks, pools, ratio, chunk) for chunk in meta.chunks]
    return project_output(model, p, tap("attn.heads", in_token_order(meta, parts)), turn)


def write_entries(
    model: Model,
    ratio: int,
    p: AttentionParams,
    x: Tensor,
    rows: Mapping[str, Tensor],
    layout: KVLayout,
    meta: AttentionMetadata,
    factors: Rotations,
) -> dict[str, Pool]:
    """Write what the tokens of a step add to the caches of one layer: entries, index keys, pooling state.

    Args:
        model: the model.
        ratio: of the layer.
        p: its attention weights.
        x: float[T,H]. Normed sublayer input.
        rows: the layer's cache rows by buffer; those of ``write_rows`` are written.
        layout: of the caches.
        meta: of the step.
        factors: of ``rotations``.
    Returns:
        The layer's entries by buffer, and its index keys if it has any.
    """
    pools = {name: entry_pool(model, layout, rows[name]) for name in _ENTRIES if name in rows}
    pools["swa"].write(meta.swa_loc, project_kv(model, p, x, factors[ratio, "tokens"]))
    if ratio:
        assert p.compressor is not None, "a layer with a ratio has a compressor: the loader checks it"
        name = "c4" if ratio == C4_RATIO else "c128"
        turn, plan = factors[ratio, "entries"], meta.compressors[ratio]
        compress = _fold_tokens if layout.is_online and ratio == C128_RATIO else _compress_tokens
        compress(model, p.compressor, x, pools[name], rows[f"{name}_state"], plan, turn)
    if ratio == C4_RATIO:
        assert p.indexer is not None, "a ratio-4 layer has an indexer: the loader checks it"
        pools["index"] = key_pool(model, layout, rows["index"])
        _compress_tokens(model, p.indexer.compressor, x, pools["index"], rows["index_state"], plan, turn)
    return pools


def layer_rows(buffers: Mapping[str, Tensor], layout: KVLayout) -> list[dict[str, Tensor]]:
    """See the rows of every layer in the cache buffers: float[S,D] by buffer."""
    parts = {name: buffer.unflatten(0, (-1, layout.n_slots(name))).unbind(0) for name, buffer in buffers.items()}
    layers = range(len(layout.kinds))
    return [{name: parts[name][layout.place(name, i)] for name in layout.buffers_of(i)} for i in layers]


def _compress_tokens(
    model: Model,
    p: CompressorParams,
    x: Tensor,
    entries: Pool,
    state: Tensor,
    plan: CompressorMetadata,
    factors: Tensor,
) -> None:
    """Write the entries that close in this step and the state that outlives it.

    Args:
        model: the model.
        p: weights of the compressor.
        x: float[T,H]. Normed sublayer input.
        entries: the layer's entries.
        state: f32[S,2*k*D]. The layer's pooling state.
        plan: where it reads and writes.
        factors: complex64[C,R/2] at the first position of every closing group.
    """
    kv, scores = compressor_inputs(model, p, x, plan.phase)
    current = torch.cat((kv, scores), dim=-1)
    if plan.out_loc.shape[0]:
        # The state is read before it is written: in a ring the oldest and the newest position share a row.
        rows = torch.cat((state.index_select(0, plan.history), current))
        members = rows.index_select(0, plan.members.flatten()).unflatten(0, plan.members.shape)
        kv, scores = members.chunk(2, dim=-1)
        if plan.members.shape[-1] != C128_RATIO:
            kv, scores = _overlap(kv), _overlap(scores)
        pooled = model.ops.pool_group(kv, scores)
        entries.write(plan.out_loc, finish_entries(model, p, pooled, factors))
    state.index_copy_(0, plan.state_loc, current.index_select(0, plan.keep))


def _fold_tokens(
    model: Model,
    p: CompressorParams,
    x: Tensor,
    entries: Pool,
    state: Tensor,
    plan: CompressorMetadata,
    factors: Tensor,
) -> None:
    """Do the same with an online softmax: every group takes its tokens of this step one after the other.

    One after the other on purpose: the state then does not depend on how the tokens came in chunks.
    """
    kv, scores = compressor_inputs(model, p, x, plan.phase)
    nothing = torch.full_like(scores[:1], -torch.inf)  # what a group takes that has fewer tokens in this step
    kv, scores = torch.cat((kv, torch.zeros_like(nothing))), torch.cat((scores, nothing))
    groups = state.index_select(0, plan.history)
    for column in plan.members.unbind(1):
        groups = model.ops.fold_member(groups, kv.index_select(0, column), scores.index_select(0, column))
    n_closing = plan.out_loc.shape[0]
    if n_closing:
        entries.write(plan.out_loc, finish_entries(model, p, folded(groups[:n_closing]), factors))
    state.index_copy_(0, plan.state_loc, groups.index_select(0, plan.keep))


def _overlap(members: Tensor) -> Tensor:
    """Take the a-halves of the earlier group and the b-halves of the later one: f32[C,8,2*D] -> f32[C,8,D]."""
    half = members.shape[-1] // 2
    return torch.cat((members[:, :C4_RATIO, :half], members[:, C4_RATIO:, half:]), dim=1)


def _attend_singles(
    model: Model,
    p: AttentionParams,
    q: Tensor,
    picks: Tensor | None,
    pools: Mapping[str, Pool],
    ratio: int,
    c4_page: int,
    meta: SingleMetadata,
) -> Tensor:
    """Attend from rows with keys of their own, in blocks that bound what is gathered: float[B,N,D]."""
    if meta.rows is not None:
        q = q.index_select(0, meta.rows)
        picks = None if picks is None else picks.index_select(0, meta.rows)
    n_rows = meta.window_loc.shape[0]
    n_keys = meta.window_loc.shape[1] + {0: 0, C4_RATIO: meta.n_c4, C128_RATIO: meta.n_c128}[ratio]
    step = max(MIN_BLOCK, GATHER_BUDGET // (n_keys * model.config.head_dim))
    if n_rows <= step:
        return _attend_block(model, p, q, picks, pools, ratio, c4_page, meta)
    blocks = []
    for a in range(0, n_rows, step):
        part = slice(a, a + step)
        block = attrs.evolve(
            meta,
            window_loc=meta.window_loc[part],
            window_mask=meta.window_mask[part],
            c4_pages=meta.c4_pages[part],
            c4_visible=meta.c4_visible[part],
            c128_pages=meta.c128_pages[part],
            c128_visible=meta.c128_visible[part],
        )
        chosen = None if picks is None else picks[part]
        blocks.append(_attend_block(model, p, q[part], chosen, pools, ratio, c4_page, block))
    return torch.cat(blocks)


def _attend_block(
    model: Model,
    p: AttentionParams,
    q: Tensor,
    picks: Tensor | None,
    pools: Mapping[str, Pool],
    ratio: int,
    c4_page: int,
    meta: SingleMetadata,
) -> Tensor:
    """Gather the keys of every row, attend: float[B,N,D]."""
    mask = [meta.window_mask]
    keys = [gather_rows(pools["swa"], meta.window_loc, meta.window_mask)]
    if ratio == C4_RATIO and meta.n_c4:
        loc_c4, mask_c4 = paged_loc(meta.c4_pages, c4_page, meta.n_c4, meta.c4_visible)
        if picks is not None:
            picks = picks[:, : meta.n_c4]
            loc_c4, mask_c4 = loc_c4.gather(1, picks.clamp(min=0)), picks >= 0
        keys.append(gather_rows(pools["c4"], loc_c4, mask_c4))
        mask.append(mask_c4)
    if ratio == C128_RATIO and meta.n_c128:
        loc_c128, mask_c128 = paged_loc(meta.c128_pages, C128_PAGE, meta.n_c128, meta.c128_visible)
        keys.append(gather_rows(pools["c128"], loc_c128, mask_c128))
        mask.append(mask_c128)
    o = model.ops.attend(
        q.unsqueeze(1),
        torch.cat(keys, dim=1),
        torch.cat(mask, dim=1).unsqueeze(1),
        p.attn_sink,
        scale=model.config.head_dim**-0.5,
        rounding=model.numerics.probability_rounding,
    )
    return o.squeeze(1)


def _attend_chunk(
    model: Model,
    p: AttentionParams,
    q: Tensor,
    picks: Tensor | None,
    pools: Mapping[str, Pool],
    ratio: int,
    chunk: ChunkMetadata,
) -> Tensor:
    """Attend from the tokens of one request over keys that they share, in tiles of query rows: float[T,N,D]."""
    n_rows = chunk.seq_len - chunk.prefix_len
    has_entries = bool(ratio) and chunk.seq_len >= ratio
    entry_loc = chunk.c4_loc if ratio == C4_RATIO else chunk.c128_loc
    rows = slice(chunk.start, chunk.start + n_rows)
    return model.ops.attend_chunk(
        q[rows],
        pools["swa"].read(chunk.window_loc),
        pools["c4" if ratio == C4_RATIO else "c128"].read(entry_loc) if has_entries else None,
        picks[rows] if has_entries and picks is not None else None,
        p.attn_sink,
        first=chunk.prefix_len,
        ratio=ratio,
        reach=model.config.sliding_window,
        scale=model.config.head_dim**-0.5,
        rounding=model.numerics.probability_rounding,
        budget=SCORE_BUDGET,
    )
