"""Index tensors that tell the layers where to read and write, built once per step from the request table.

All arithmetic is numpy on the host, over what the step touches and what its rows may read; the results are copied to
the model's device once. Every table is bounded by the row's own length: what lies beyond it is the sink with a false
mask.

Source: SGLang 0.5.23 ``hardware_backend/npu/attention/ascend_dsv4_backend.py``; decode-path sheet 4.3-4.6.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from ..state.batch import (
    AttentionMetadata,
    ChunkMetadata,
    CompressorMetadata,
    ScheduleBatch,
    SingleMetadata,
)
from ..state.capacity import C4_RATIO, C128_PAGE, C128_RATIO
from ..state.kv import C4_RING, C128_RING, KVLayout

__all__ = ["Reader", "attention_metadata", "c4_state_loc", "compressor_metadata", "token_positions"]

Ints = NDArray[np.int64]


def token_positions(batch: ScheduleBatch) -> tuple[Ints, Ints]:
    """Return the batch row and the position of every token: (i64[T], i64[T])."""
    lens = batch.extend_lens
    rows = np.arange(len(lens)).repeat(lens)
    starts = lens.cumsum() - lens
    return rows, batch.prefix_lens[rows] + np.arange(len(rows)) - starts[rows]


def c4_state_loc(swa_loc: Ints, page_size: int) -> Ints:
    """Return the pooling-state slot of a window slot: a ring of 8 per window page."""
    return swa_loc // page_size * C4_RING + swa_loc % C4_RING


@attrs.frozen(eq=False)
class Reader:
    """Host lookups in one version of the request table, while it is being read.

    Attributes:
        tables: buffers as numpy arrays.
        layout: of the caches.
        device: where index tensors go.
    """

    tables: Mapping[str, Ints]
    layout: KVLayout
    device: torch.device

    def full_loc(self, rows: Ints, positions: Ints) -> Ints:
        """Look up the full slots of positions of table rows."""
        context = self.layout.sizes.context
        return self.tables["req_to_token"][rows * context + positions].astype(np.int64)

    def swa_loc(self, rows: Ints, positions: Ints) -> Ints:
        """Look up their window slots."""
        return self.tables["full_to_swa"][self.full_loc(rows, positions)]

    def tensor(self, array: NDArray[np.generic]) -> torch.Tensor:
        """Copy numbers to the device."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


def attention_metadata(
    batch: ScheduleBatch,
    tokens: tuple[Ints, Ints],
    tables: Mapping[str, Ints],
    layout: KVLayout,
    window: int,
    device: torch.device,
    *,
    rowwise: bool = False,
) -> AttentionMetadata:
    """Build the metadata of one forward.

    Args:
        batch: the prepared step.
        tokens: what ``token_positions`` says of it.
        tables: the request table after preparation, as numpy arrays.
        layout: of the caches.
        window: W.
        device: where index tensors go.
        rowwise: let every token read by tables of its own, laid out the same way wherever it comes from; what
            row-independent arithmetic needs.
    Returns:
        What the layers read and write by.
    """
    reader = Reader(tables, layout, device)
    rows, positions = tokens
    lens = batch.extend_lens
    starts = lens.cumsum() - lens
    # Where other ranks hold parts of them, keys lie in no order that the tokens of a chunk could share.
    rowwise = rowwise or layout.ways > 1
    single = np.arange(len(rows)) if rowwise else starts[lens == 1]
    several = [] if rowwise else (lens > 1).nonzero()[0].tolist()
    return AttentionMetadata(
        swa_loc=reader.tensor(layout.local("swa", batch.out_cache_loc_dsv4.out_swa_loc)),
        compressors=compressor_metadata(reader, batch, tokens),
        singles=_singles(reader, batch, rows, positions, single, window, rowwise) if len(single) else None,
        chunks=tuple([_chunk(reader, batch, i, int(starts[i]), window) for i in several]),
    )


def compressor_metadata(
    reader: Reader, batch: ScheduleBatch, tokens: tuple[Ints, Ints]
) -> dict[int, CompressorMetadata]:
    """Say where the compressors of a step read and write: ratio -> metadata, for the ratios of the layout.

    Args:
        reader: the request table.
        batch: the prepared step.
        tokens: what ``token_positions`` says of it.
    """
    rows, positions = tokens
    found = {}
    if C4_RATIO in reader.layout.kinds:
        found[C4_RATIO] = _c4(reader, batch, rows, positions)
    if C128_RATIO in reader.layout.kinds:
        build = _c128_online if reader.layout.is_online else _c128
        found[C128_RATIO] = build(reader, batch, rows, positions)
    return found


def _c4(reader: Reader, batch: ScheduleBatch, rows: Ints, positions: Ints) -> CompressorMetadata:
    size = reader.layout.sizes.page_size
    swa = batch.out_cache_loc_dsv4.out_swa_loc
    later = positions + C4_RING
    # A state row outlives the step unless a later token of the same request and page takes its place in the ring.
    keep = ((later >= batch.seq_lens[rows]) | (later // size != positions // size)).nonzero()[0]

    def slots(at: Ints, past: Ints) -> Ints:
        return c4_state_loc(reader.swa_loc(batch.req_pool_indices[at], past), size)

    return _compressor(
        reader,
        batch,
        rows,
        positions,
        ratio=C4_RATIO,
        n_members=2 * C4_RATIO,
        out_loc=reader.layout.local("c4", batch.out_cache_loc_dsv4.out_c4_loc),
        dummy=reader.layout.dummy("c4_state"),
        slots=slots,
        keep=keep,
        state_loc=c4_state_loc(swa[keep], size),
    )


def _c128(reader: Reader, batch: ScheduleBatch, rows: Ints, positions: Ints) -> CompressorMetadata:
    pool_rows = batch.req_pool_indices
    keep = (positions + C128_RING >= batch.seq_lens[rows]).nonzero()[0]

    def slots(at: Ints, past: Ints) -> Ints:
        return pool_rows[at] * C128_RING + past % C128_RING

    return _compressor(
        reader,
        batch,
        rows,
        positions,
        ratio=C128_RATIO,
        n_members=C128_RATIO,
        out_loc=reader.layout.local("c128", batch.out_cache_loc_dsv4.out_c128_loc),
        dummy=reader.layout.dummy("c128_state"),
        slots=slots,
        keep=keep,
        state_loc=slots(rows[keep], positions[keep]),
    )


def _c128_online(reader: Reader, batch: ScheduleBatch, rows: Ints, positions: Ints) -> CompressorMetadata:
    """Say which tokens of the step every group takes, those that close first, and which groups stay open."""
    group, phase = positions // C128_RATIO, positions % C128_RATIO
    firsts = np.flatnonzero(np.diff(rows, prepend=-1).astype(bool) | np.diff(group, prepend=-1).astype(bool))
    lens = np.diff(firsts, append=len(rows))
    is_closing = phase[firsts + lens - 1] == C128_RATIO - 1
    order = np.argsort(~is_closing, kind="stable")
    firsts, lens, n_closing = firsts[order], lens[order], int(is_closing.sum())
    slots = batch.req_pool_indices[rows[firsts]]
    column = np.arange(int(lens.max()))
    return CompressorMetadata(
        phase=reader.tensor(phase),
        out_loc=reader.tensor(batch.out_cache_loc_dsv4.out_c128_loc),
        first_pos=reader.tensor(group[firsts[:n_closing]] * C128_RATIO),
        history=reader.tensor(np.where(phase[firsts] > 0, slots, reader.layout.dummy("c128_state"))),
        members=reader.tensor(np.where(column < lens[:, None], firsts[:, None] + column, len(rows))),
        keep=reader.tensor(np.arange(n_closing, len(firsts))),
        state_loc=reader.tensor(slots[n_closing:]),
    )


def _compressor(
    reader: Reader,
    batch: ScheduleBatch,
    rows: Ints,
    positions: Ints,
    *,
    ratio: int,
    n_members: int,
    out_loc: Ints,
    dummy: int,
    slots: object,
    keep: Ints,
    state_loc: Ints,
) -> CompressorMetadata:
    assert callable(slots), "slots looks up state rows"
    phase = positions % ratio
    closing = (phase == ratio - 1).nonzero()[0]
    ends = positions[closing]
    history, members = ends, np.empty((len(ends), n_members), np.int64)
    if len(ends):  # most decodes close nothing
        past = ends[:, None] - np.arange(n_members - 1, -1, -1)
        at = np.broadcast_to(rows[closing][:, None], past.shape)
        # A member is a token of this step, or a state row left by an earlier one, or (before position 0) the dummy.
        is_old = past < batch.prefix_lens[at]
        old_at, old_past = at[is_old], past[is_old]
        history = np.where(old_past < 0, dummy, slots(old_at, np.maximum(old_past, 0)))
        members = closing[:, None] - (ends[:, None] - past) + len(history)
        members[is_old] = np.arange(len(history))
    return CompressorMetadata(
        phase=reader.tensor(phase),
        out_loc=reader.tensor(out_loc),
        first_pos=reader.tensor(ends - (ratio - 1)),
        history=reader.tensor(history),
        members=reader.tensor(members),
        keep=reader.tensor(keep),
        state_loc=reader.tensor(state_loc),
    )


def _singles(
    reader: Reader,
    batch: ScheduleBatch,
    rows: Ints,
    positions: Ints,
    single: Ints,
    window: int,
    rowwise: bool,
) -> SingleMetadata:
    sizes = reader.layout.sizes
    seq, pool_rows = positions[single] + 1, batch.req_pool_indices[rows[single]]
    longest = int(seq.max())
    width = window if rowwise else min(window, longest)
    past = seq[:, None] - np.arange(width, 0, -1)
    mask = past >= 0
    loc = np.where(mask, reader.swa_loc(pool_rows[:, None], np.maximum(past, 0)), 0)
    if reader.layout.ways > 1:
        loc, mask = _own_window(reader.layout, loc, mask)
    n_c4, n_c128 = longest // C4_RATIO, longest // C128_RATIO
    firsts = np.arange(-(-n_c4 // sizes.c4_page)) * sizes.page_size
    held = firsts < seq[:, None]
    full = reader.full_loc(pool_rows[:, None], np.minimum(firsts, sizes.context - 1))
    columns = np.arange(-(-n_c128 // C128_PAGE))
    sidecar = reader.tables["sidecar"][pool_rows[:, None] * sizes.sidecar_width + columns]
    is_all = len(single) == len(rows)
    return SingleMetadata(
        rows=None if is_all else reader.tensor(single),
        window_loc=reader.tensor(loc),
        window_mask=reader.tensor(mask),
        c4_pages=reader.tensor(np.where(held, full // sizes.page_size, 0)),
        c4_visible=reader.tensor(seq // C4_RATIO),
        c128_pages=reader.tensor(sidecar.astype(np.int64)),
        c128_visible=reader.tensor(seq // C128_RATIO),
        n_c4=n_c4,
        n_c128=n_c128,
    )


def _own_window(layout: KVLayout, loc: Ints, mask: NDArray[np.bool_]) -> tuple[Ints, NDArray[np.bool_]]:
    """Keep the window slots that lie on this rank, packed to the left: (i64[B,W], bool[B,W])."""
    is_own = mask & layout.is_here("swa", loc)
    width = max(1, int(is_own.sum(1).max()))
    order = np.argsort(~is_own, axis=1, kind="stable")[:, :width]
    packed = np.take_along_axis(is_own, order, 1)
    return np.where(packed, np.take_along_axis(layout.local("swa", loc), order, 1), 0), packed


def _chunk(reader: Reader, batch: ScheduleBatch, i: int, start: int, window: int) -> ChunkMetadata:
    prefix, seq, row = int(batch.prefix_lens[i]), int(batch.seq_lens[i]), batch.req_pool_indices[i]
    first = max(0, prefix - window + 1)
    ends = np.arange(seq // C4_RATIO) * C4_RATIO + C4_RATIO - 1
    group = np.arange(seq // C128_RATIO)
    pages = reader.tables["sidecar"][row * reader.layout.sizes.sidecar_width + group // C128_PAGE].astype(np.int64)
    return ChunkMetadata(
        start=start,
        prefix_len=prefix,
        seq_len=seq,
        window_start=first,
        window_loc=reader.tensor(reader.swa_loc(row, np.arange(first, seq))),
        c4_loc=reader.tensor(reader.full_loc(row, ends) // C4_RATIO),
        c128_loc=reader.tensor(pages * C128_PAGE + group % C128_PAGE),
    )
