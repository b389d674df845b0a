"""Tables of pages, lengths and slots for Ascend kernels, from the same prepared step as the plain index tensors.

Kernels take every row of a batch at once, however many tokens it feeds, so one set of tables serves decode, extend and
mixtures. A decode may be padded to a *bucket*: a fixed number of rows with tables of a fixed width, so that a captured
graph can be replayed over them.

Source: SGLang 0.5.23 ``hardware_backend/npu/attention/ascend_dsv4_backend.py`` and ``npu/dsv4/``; decode-path sheet
4.5, 4.6, kernel sheet 4.2, 4.3, 9.1.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from ..state.batch import AttentionMetadata, ScheduleBatch
from ..state.capacity import C4_RATIO, C128_PAGE, C128_RATIO
from ..state.errors import ConfigError
from ..state.kv import C4_RING, C128_RING, MAX_BLOCK, KVLayout
from ..state.paged_tables import AscendTables, CompressorTables
from .metadata import Reader, c4_state_loc, compressor_metadata, token_positions

__all__ = ["ascend_metadata", "ascend_tables"]

Ints = NDArray[np.int64]
_REACH = {C4_RATIO: 2 * C4_RATIO, C128_RATIO: C128_RATIO}
"""How far back a group's members lie."""

_NONE = np.empty(0, np.int64)


def ascend_metadata(
    batch: ScheduleBatch,
    tables: Mapping[str, Ints],
    layout: KVLayout,
    device: torch.device,
    *,
    bucket: int | None = None,
) -> AttentionMetadata:
    """Build the metadata of one forward for Ascend kernels.

    Args:
        batch: the prepared step.
        tables: the request table after preparation, as numpy arrays.
        layout: of the caches.
        device: where index tensors go.
        bucket: rows to pad a decode to, with tables as wide as the longest context needs; None for neither.
    Returns:
        What the layers read and write by; ``swa_loc`` has a place in the sink for every idle row.
    """
    reader = Reader(tables, layout, device)
    swa_loc = batch.out_cache_loc_dsv4.out_swa_loc
    return AttentionMetadata(
        swa_loc=reader.tensor(_padded(swa_loc, len(swa_loc) if bucket is None else bucket)),
        compressors=compressor_metadata(reader, batch, token_positions(batch)),
        singles=None,
        chunks=(),
        tables=ascend_tables(batch, tables, layout, device, bucket=bucket),
    )


def ascend_tables(
    batch: ScheduleBatch,
    tables: Mapping[str, Ints],
    layout: KVLayout,
    device: torch.device,
    *,
    bucket: int | None = None,
) -> AscendTables:
    """Build the tables of one forward; see ``ascend_metadata``.

    Raises:
        ConfigError: a bucket for a step that is no decode of that many rows at most.
    """
    reader = Reader(tables, layout, device)
    if bucket is not None and (len(batch.request_ids) > bucket or (batch.extend_lens != 1).any()):
        raise ConfigError(
            f"bucket: expected at most {bucket} rows of one token each, got rows of {batch.extend_lens.tolist()} "
            "tokens; use a larger bucket for more rows, and none for an extend",
            field="bucket",
            expected=f"<= {bucket} rows of one token",
            got=batch.extend_lens.tolist(),
        )
    n_rows = len(batch.request_ids) if bucket is None else bucket
    rows = _Rows(
        reader=reader,
        pool=_padded(batch.req_pool_indices, n_rows),
        start=_padded(batch.prefix_lens, n_rows),
        end=_padded(batch.seq_lens, n_rows),
        longest=int(batch.seq_lens.max()) if bucket is None else layout.sizes.context,
        # Rows of one token each: an idle row holds the place of one.
        n_tokens=int(batch.extend_lens.sum()) if bucket is None else bucket,
        bucket=bucket,
    )
    lens = rows.end - rows.start
    ends = np.cumsum(lens) if bucket is None else np.arange(1, bucket + 1)
    window, c4, c128 = _page_tables(rows)
    compressors = {ratio: _compressor(rows, batch, ratio) for ratio in _REACH if ratio in layout.kinds}
    return AscendTables(
        query_starts=rows.ints(np.append(0, ends)),
        query_ends=rows.ints(ends),
        key_lens=rows.ints(np.maximum(rows.end, 1)),
        start_pos=rows.ints(rows.start),
        used=rows.ints(lens),
        window_table=rows.ints(window),
        c4_table=rows.ints(c4),
        c128_table=rows.ints(c128),
        compressors=compressors,
        live=None if bucket is None else reader.tensor((rows.end > 0).astype(np.float32)),
        max_query=int(lens.max(initial=1)),
        max_keys=int(rows.end.max(initial=1)),
    )


def _padded(numbers: NDArray[np.generic], size: int) -> Ints:
    return np.append(numbers, np.zeros(size - len(numbers), np.int64)).astype(np.int64)


@attrs.frozen(eq=False, kw_only=True)
class _Rows:
    """The rows of a batch, idle ones included.

    Attributes:
        reader: of the request table.
        pool: row of the request table; 0 for an idle row.
        start: positions before the step.
        end: positions after it.
        longest: length that the tables are wide enough for.
        n_tokens: token rows, places of idle rows included.
        bucket: rows that a decode is padded to, or None.
    """

    reader: Reader
    pool: Ints
    start: Ints
    end: Ints
    longest: int
    n_tokens: int
    bucket: int | None

    def ints(self, array: Ints) -> torch.Tensor:
        return self.reader.tensor(array.astype(np.int32))


def _page_tables(rows: _Rows) -> tuple[Ints, Ints, Ints]:
    """Look up the pages of every row: window pages, full pages, C128 pages; the sink beyond its length."""
    sizes = rows.reader.layout.sizes
    firsts = np.arange(max(1, -(-rows.longest // sizes.page_size))) * sizes.page_size
    held = firsts < rows.end[:, None]
    full = np.where(held, rows.reader.full_loc(rows.pool[:, None], np.minimum(firsts, sizes.context - 1)), 0)
    window = rows.reader.tables["full_to_swa"][full]
    columns = np.arange(max(1, -(-(rows.longest // C128_RATIO) // C128_PAGE)))
    sidecar = rows.reader.tables["sidecar"][rows.pool[:, None] * sizes.sidecar_width + columns]
    has_entries = columns * C128_PAGE < rows.end[:, None] // C128_RATIO
    return window // sizes.page_size, full // sizes.page_size, np.where(has_entries, sidecar, 0)


def _compressor(rows: _Rows, batch: ScheduleBatch, ratio: int) -> CompressorTables:
    locs, layout, tensor = batch.out_cache_loc_dsv4, rows.reader.layout, rows.reader.tensor
    out_loc = locs.out_c4_loc if ratio == C4_RATIO else locs.out_c128_loc
    at, positions = token_positions(batch)
    firsts = positions[positions % ratio == ratio - 1] - (ratio - 1)
    size = min(rows.n_tokens, rows.n_tokens // ratio + len(rows.end))
    rest = _left_behind(rows, batch, at, positions) if ratio == C4_RATIO else _NONE
    banks = _banks(rows, ratio) if layout.form == "packed" else None
    table = _state_table(rows, ratio) if banks is None else banks.table
    return CompressorTables(
        state_table=rows.ints(table),
        loc=rows.ints(_padded(out_loc, size)),
        first_pos=tensor(_padded(firsts, size)),
        rest=tensor(rest),
        rest_loc=tensor(_state_loc(rows, ratio, batch.req_pool_indices[at[rest]], positions[rest])),
        ring=0 if banks is None else banks.ring,
        carried=tensor(_NONE if banks is None else banks.carried),
        carried_to=tensor(_NONE if banks is None else banks.carried_to),
        saved=tensor(_NONE if banks is None else banks.saved),
        saved_loc=tensor(_NONE if banks is None else banks.saved_loc),
    )


def _state_loc(rows: _Rows, ratio: int, pool: Ints, positions: Ints) -> Ints:
    if ratio == C128_RATIO:
        return pool * C128_RING + positions % C128_RING
    return c4_state_loc(rows.reader.swa_loc(pool, positions), rows.reader.layout.sizes.page_size)


def _state_table(rows: _Rows, ratio: int) -> Ints:
    """Name the state row of every position that the kernel may look at, one line per row of the batch."""
    layout, reach = rows.reader.layout, _REACH[ratio]
    width = reach + int((rows.end - rows.start).max(initial=1))
    positions = rows.start[:, None] - reach + np.arange(width)
    exists = (positions >= 0) & (positions < rows.end[:, None]) & (rows.end > rows.start)[:, None]
    found = _state_loc(rows, ratio, rows.pool[:, None], np.where(exists, positions, 0))
    return np.where(exists, found, layout.dummy("c4_state" if ratio == C4_RATIO else "c128_state"))


def _left_behind(rows: _Rows, batch: ScheduleBatch, at: Ints, positions: Ints) -> Ints:
    """List the token rows whose C4 state is needed only by a history that is cut at the end of their page.

    The kernel keeps what the next group of this row needs. A cut at a page boundary needs the group before it.
    """
    page_size = rows.reader.layout.sizes.page_size
    kept_from = batch.seq_lens[at] // C4_RATIO * C4_RATIO - C4_RATIO
    return np.flatnonzero((positions % page_size >= page_size - C4_RATIO) & (positions < kept_from))


@attrs.frozen(eq=False, kw_only=True)
class _Banks:
    """Where the compressor of the A5 finds and leaves state; fields as in ``CompressorTables``."""

    table: Ints
    ring: int
    carried: Ints
    carried_to: Ints
    saved: Ints = attrs.field(factory=lambda: _NONE)
    saved_loc: Ints = attrs.field(factory=lambda: _NONE)


def _banks(rows: _Rows, ratio: int) -> _Banks:
    """Give every row a bank: a part of the caches for one token, a ring of its own for several.

    The kernel wants a ring to have a row for every position of a call, history included. Those of the caches have one
    for each position of a group or two.

    Raises:
        ConfigError: more tokens of a row than the largest ring has room for.
    """
    most = int((rows.end - rows.start).max(initial=1))
    if most == 1:
        return _cached_banks(rows, ratio)
    ring = _REACH[ratio] + most - 1
    if ring > MAX_BLOCK:
        room = MAX_BLOCK - _REACH[ratio] + 1
        raise ConfigError(
            f"tokens: expected at most {room} of a request in one step on Ascend A5 kernels, got {most}; feed them in "
            "chunks (extend_step(limit=...), --chunked-prefill-size)",
            field="tokens",
            expected=f"<= {room}",
            got=most,
        )
    row, position = _needed(rows, ratio)
    kept_row, kept = _grid(rows.end // ratio * ratio - (_REACH[ratio] - ratio), rows.end, rows.start)
    return _Banks(
        table=np.arange(1, len(rows.end) + 1),
        ring=ring,
        carried=_state_loc(rows, ratio, rows.pool[row], position),
        carried_to=(row + 1) * ring + position % ring,
        saved=(kept_row + 1) * ring + kept % ring,
        saved_loc=_state_loc(rows, ratio, rows.pool[kept_row], kept),
    )


def _cached_banks(rows: _Rows, ratio: int) -> _Banks:
    """Name banks of the caches: the rows of a request, or of the window page that a token lies in.

    C4 state stays with its window page, so that histories can be cut and shared at pages. What the first group of a
    page needs of the page before is carried along when it closes. A bucket has a fixed number of places for that.
    """
    if ratio == C128_RATIO:
        return _Banks(table=rows.pool, ring=0, carried=_NONE, carried_to=_NONE)
    page_size, dummy = rows.reader.layout.sizes.page_size, rows.reader.layout.dummy("c4_state")
    live = rows.end > 0
    pages = np.where(live, rows.reader.swa_loc(rows.pool, np.maximum(rows.end - 1, 0)) // page_size, 0)
    row, position = _needed(rows, ratio)
    is_before = position // page_size < rows.start[row] // page_size
    row, position = row[is_before], position[is_before]
    size = len(row) if rows.bucket is None else rows.bucket * C4_RATIO
    filling = np.full(size - len(row), dummy)
    return _Banks(
        table=pages,
        ring=0,
        carried=np.append(_state_loc(rows, ratio, rows.pool[row], position), filling),
        carried_to=np.append(pages[row] * C4_RING + position % C4_RING, filling),
    )


def _needed(rows: _Rows, ratio: int) -> tuple[Ints, Ints]:
    """List what groups that close read of earlier steps: (row of the batch, position)."""
    first = rows.start // ratio * ratio
    is_closing = rows.end // ratio * ratio > first
    return _grid(first - (_REACH[ratio] - ratio), np.where(is_closing, rows.start, 0), np.zeros_like(first))


def _grid(first: Ints, end: Ints, least: Ints) -> tuple[Ints, Ints]:
    """List the positions from ``first``, but at least ``least``, up to ``end`` of every row: (row, position)."""
    first = np.maximum(first, least)
    lens = np.maximum(end - first, 0)
    row = np.repeat(np.arange(len(lens)), lens)
    return row, first[row] + np.arange(len(row)) - (np.cumsum(lens) - lens)[row]
