"""Slots for new positions, and window pages given back: changes of the request table as pure functions.

A step allocates with the old lengths. Full and window pages are taken in lock-step, C4 slots follow from full slots,
C128 slots come from their own pool through the sidecar. Every capacity is tested before the first write.

Source: SGLang 0.5.23 ``mem_cache/allocation.py``, ``hardware_backend/npu/dsv4/dsv4_allocator.py``,
``managers/schedule_batch.py`` (``maybe_evict_swa``); decode-path sheet 1.3, 1.7, 4.2-4.4. Upstream's decode allocation
is not transactional; this one is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Final, NamedTuple

import attrs
import numpy as np
from numpy.typing import NDArray

from ..state.batch import CacheLocs
from ..state.capacity import C4_RATIO, C128_RATIO
from ..state.pages import FreeList, c128_pages, c128_slots, extend_slots
from ..state.table import Edit, RequestTable, read_table, write_table

__all__ = ["Growth", "allocate", "eviction_end"]

Ints = NDArray[np.int64]
_View = Mapping[str, Ints]

MIN_KEPT: Final = 8
"""Positions whose pooling state a C4 entry may still need; no window is evicted closer than this."""


class Growth(NamedTuple):
    """How the requests of a step change, in batch order.

    Attributes:
        rows: i64[B]. Rows of the request table.
        prefix_lens: i64[B]. Positions that own a slot.
        seq_lens: i64[B]. Positions that own one afterwards.
        evicted_lens: i64[B]. Positions whose window page was given back earlier.
        evict_to: i64[B]. The same afterwards.
    """

    rows: Ints
    prefix_lens: Ints
    seq_lens: Ints
    evicted_lens: Ints
    evict_to: Ints

    @classmethod
    def of(cls, requests: Iterable[tuple[int, int, int, int, int]]) -> Growth:
        """Put the numbers of each request into columns."""
        return cls(*np.array([*requests], np.int64).reshape(-1, 5).T.copy())


def eviction_end(pre: int, evicted_len: int, window: int, page_size: int) -> int:
    """Decide up to which position window pages are given back.

    Pages are given back in whole pages, and only once a whole window has passed since the last time (decode-path sheet
    1.7; the interval is the window, 128 in every released model).

    Args:
        pre: position that the step computes first; its window is ``[pre - window + 1, pre]``.
        evicted_len: what was given back earlier.
        window: W.
        page_size: tokens per page.
    Returns:
        The new cursor, at least ``evicted_len``.
    """
    reach = max(window, MIN_KEPT)
    if pre - reach < evicted_len + window:
        return evicted_len
    return max(evicted_len, (pre - reach) // page_size * page_size)


def _evict(view: _View, table: RequestTable, growth: Growth) -> tuple[FreeList, list[Edit]]:
    """Give back the window pages that every sharer's window has passed."""
    size = table.sizes.page_size
    passing = (growth.evict_to > growth.evicted_lens).nonzero()[0]
    if not len(passing):
        return table.free_swa_pages, []
    refs: dict[int, int] = {}
    edits: list[Edit] = []
    freed: list[int] = []
    ends = (column[passing].tolist() for column in (growth.rows, growth.evicted_lens, growth.evict_to))
    for row, start, end in zip(*ends, strict=True):
        for position in range(start // size * size, end // size * size, size):
            first = int(view["req_to_token"][row * table.sizes.context + position])
            page = int(view["full_to_swa"][first]) // size
            refs[page] = refs.get(page, int(view["swa_refs"][page])) - 1
            if refs[page] == 0:
                freed.append(page)
                edits.append(("full_to_swa", first + np.arange(size), 0))
    if refs:
        edits.append(("swa_refs", np.fromiter(refs, np.int64), np.fromiter(refs.values(), np.int64)))
    return table.free_swa_pages.give(freed), edits


def allocate(table: RequestTable, growth: Growth) -> tuple[RequestTable, CacheLocs]:
    """Give every request the slots of its new positions, after giving back passed window pages.

    Args:
        table: the table before the step.
        growth: how each request of the step grows.
    Returns:
        (table, locs): the new table; the slot vectors in token order.
    Raises:
        CapacityError: any pool is short; nothing was changed.
    """
    sizes, rows, prefix, total = table.sizes, growth.rows, growth.prefix_lens, growth.seq_lens
    closes = np.count_nonzero(total // C128_RATIO > prefix // C128_RATIO) > 0  # seldom in a decode
    with read_table(table) as view:
        free_swa, edits = _evict(view, table, growth)
        last = view["req_to_token"][rows * sizes.context + np.maximum(prefix - 1, 0)].astype(np.int64)
        last_swa = view["full_to_swa"][last]
        held = _held_c128(view, table, growth) if closes else []
    free_full, out_full, new_full = extend_slots(table.free_pages, prefix, total, last, sizes.page_size)
    free_swa, out_swa, new_swa = extend_slots(free_swa, prefix, total, last_swa, sizes.page_size)
    free_c128, out_c128 = table.free_c128_pages, np.empty(0, np.int64)
    new_c128: tuple[tuple[int, ...], ...] = ()
    if closes:
        free_c128, out_c128, new_c128 = c128_slots(free_c128, prefix, total, held)

    lens = total - prefix
    within = np.arange(len(out_full)) - (lens.cumsum() - lens).repeat(lens)
    cells = (rows * sizes.context + prefix).repeat(lens) + within
    edits += [("req_to_token", cells, out_full), ("full_to_swa", out_full, out_swa)]
    for name, opened in (("page_refs", new_full), ("swa_refs", new_swa), ("c128_refs", new_c128)):
        pages = [*chain.from_iterable(opened)]
        if pages:
            edits.append((name, np.array(pages, np.int64), 1))
    for row, before, named in zip(rows.tolist() if closes else (), held, new_c128, strict=True):
        if named:
            column = row * sizes.sidecar_width + len(before)
            edits.append(("sidecar", column + np.arange(len(named)), np.array(named, np.int64)))
    table = attrs.evolve(
        table,
        handle=write_table(table, edits),
        free_pages=free_full,
        free_swa_pages=free_swa,
        free_c128_pages=free_c128,
    )
    closing = out_full[out_full % C4_RATIO == C4_RATIO - 1] // C4_RATIO
    return table, CacheLocs(out_full_loc=out_full, out_swa_loc=out_swa, out_c4_loc=closing, out_c128_loc=out_c128)


def _held_c128(view: _View, table: RequestTable, growth: Growth) -> list[list[int]]:
    """List the C128 pages that each request names."""
    starts = (growth.rows * table.sizes.sidecar_width).tolist()
    lengths = [c128_pages(prefix_len) for prefix_len in growth.prefix_lens.tolist()]
    return [view["sidecar"][start : start + n].tolist() for start, n in zip(starts, lengths, strict=True)]
