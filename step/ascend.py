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
from ..state.kv import C128_RING, KVLayout
from ..state.paged_tables import AscendTables, CompressorTables
from .metadata import Reader, c4_state_loc, compressor_metadata, token_positions

__all__ = ["ascend_metadata", "ascend_tables"]

Ints = NDArray[np.int64]
_REACH = {C4_RATIO: 2 * C4_RATIO, C128_RATIO: C128_RATIO}
"""How far back a group's members lie."""


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
    """

    reader: Reader
    pool: Ints
    start: Ints
    end: Ints
    longest: int
    n_tokens: int

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
    locs = batch.out_cache_loc_dsv4
    out_loc = locs.out_c4_loc if ratio == C4_RATIO else locs.out_c128_loc
    at, positions = token_positions(batch)
    firsts = positions[positions % ratio == ratio - 1] - (ratio - 1)
    size = min(rows.n_tokens, rows.n_tokens // ratio + len(rows.end))
    rest = _left_behind(rows, batch, at, positions) if ratio == C4_RATIO else np.empty(0, np.int64)
    return CompressorTables(
        state_table=rows.ints(_state_table(rows, ratio)),
        loc=rows.ints(_padded(out_loc, size)),
        first_pos=rows.reader.tensor(_padded(firsts, size)),
        rest=rows.reader.tensor(rest),
        rest_loc=rows.reader.tensor(_state_loc(rows, ratio, batch.req_pool_indices[at[rest]], positions[rest])),
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
