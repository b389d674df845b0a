"""What the preparation of a step does to tables and pools; decode-path sheet 9.2-9.4 (phase P) and 9.7.

Every predicate takes (before, batch, after), as in ``invariants_prepared.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from .batch import ForwardMode, ScheduleBatch
from .capacity import C4_RATIO, C128_PAGE, C128_RATIO
from .invariants_prepared import Row, rows_of
from .ledger import Ints, Ledger
from .pages import c128_pages
from .violations import Found, listed

__all__ = ["ALLOCATED"]


def _opened(row: Row, size: int) -> Ints:
    """Return the full pages that the row opened."""
    return row.after.pages[-(-row.prefix // size) : -(-row.seq // size)]


def slots_distinct(before: Ledger, batch: ScheduleBatch, after: Ledger) -> Found:
    """A01: the slots of a step are pairwise distinct."""
    if len(set(batch.out_cache_loc.tolist())) != len(batch.out_cache_loc):
        yield "out_cache_loc", f"expected distinct slots, got {listed(batch.out_cache_loc)}"


def slots_new(before: Ledger, batch: ScheduleBatch, after: Ledger) -> Found:
    """A02: no slot of a step belonged to a live request before."""
    taken = np.concatenate([np.empty(0, np.int64), *(holding.slots for holding in before.holdings)])
    both = np.intersect1d(batch.out_cache_loc, taken)
    if len(both):
        yield "out_cache_loc", f"expected slots that nobody owned, got {listed(both)}"


def slots_outside_sink(before: Ledger, batch: ScheduleBatch, after: Ledger) -> Found:
    """A03: no slot of a step lies in the sink page."""
    sunk = batch.out_cache_loc[batch.out_cache_loc < after.sizes.page_size]
    if len(sunk):
        yield "out_cache_loc", f"expected slots of at least {after.sizes.page_size}, got {listed(sunk)}"


def rows_from_head(before: Ledger, batch: ScheduleBatch, after: Ledger) -> Found:
    """N14: requests that were retracted take free rows from the head in batch order, all others keep theirs."""
    n_taken = 0
    for row in rows_of(before, batch, after):
        expected = row.before.request.row
        if row.before.request.is_parked:
            expected = int(before.free_rows[n_taken]) if n_taken < len(before.free_rows) else -1
            n_taken += 1
        if row.after.request.row != expected:
            yield row.name, f"expected row {expected}, got {row.after.request.row}"
    if not np.array_equal(after.free_rows, before.free_rows[n_taken:]):
        yield (
            "free_rows",
            f"expected {n_taken} rows taken from the head, leaving the rest, got {listed(after.free_rows)}",
        )


def slots_continue_page(before: Ledger, batch: ScheduleBatch, after: Ledger) -> Found:
    """A06: within a page the next slot is the last one plus one."""
    size = after.sizes.page_size
    for row in rows_of(before, batch, after):
        if row.prefix % size and row.seq > row.prefix:
            got, last = int(batch.out_cache_loc[row.start]), int(row.before.slots[-1])
            if got != last + 1:
                yield row.name, f"expected slot {last + 1}, got {got}"


def pages_were_free(before: Ledger, batch: ScheduleBatch, after: Ledger) -> Found:
    """A07: at a page border the slot is the first of a page that was free."""
    size = after.sizes.page_size
    for row in rows_of(before, batch, after):
        position = np.arange(row.prefix, row.seq)
        first = batch.out_cache_loc[row.tokens][position % size == 0]
        wrong = first[(first % size != 0) | ~np.isin(first // size, before.free_pages)]
        if len(wrong):
            yield row.name, f"expected first slots of free pages, got {listed(wrong)}"


def pages_from_head(before: Ledger, batch: ScheduleBatch, after: Ledger) -> Found:
    """A08: the free list loses exactly the opened pages, from its head; the rest keeps its order."""
    size = after.sizes.page_size
    n_opened = sum(-(-row.seq // size) - -(-row.prefix // size) for row in rows_of(before, batch, after))
    if not np.array_equal(after.free_pages, before.free_pages[n_opened:]):
        expected, got = listed(before.free_pages[n_opened:]), listed(after.free_pages)
        yield "free_pages", f"expected {n_opened} pages taken from the head, leaving {expected}, got {got}"


def pages_in_batch_order(before: Ledger, batch: ScheduleBatch, after: Ledger) -> Found:
    """A09: the k-th page opened, counted in batch order, is the k-th free one."""
    opened = [_opened(row, after.sizes.page_size) for row in rows_of(before, batch, after)]
    found = np.concatenate([np.empty(0, np.int64), *opened])
    expected = before.free_pages[: len(found)]
    if not np.array_equal(found, expected):
        yield "free_pages", f"expected pages {listed(expected)} in batch order, got {listed(found)}"


def need_forecast(before: Ledger, batch: ScheduleBatch, after: Ledger) -> Found:
    """A10: a decode needs one page for each row whose length is a multiple of the page size, no more and no less."""
    if batch.forward_mode is not ForwardMode.DECODE:
        return
    forecast = int((batch.prefix_lens % after.sizes.page_size == 0).sum())
    consumed = len(before.free_pages) - len(after.free_pages)
    if forecast != consumed:
        yield "free_pages", f"expected {forecast} pages consumed, got {consumed}"


def written_pages_exclusive(before: Ledger, batch: ScheduleBatch, after: Ledger) -> Found:
    """A13: every full and window page that a step writes has refcount 1 and is named by the writer only."""
    size = after.sizes.page_size
    for row in rows_of(before, batch, after):
        pages = np.unique(batch.out_cache_loc[row.tokens] // size)
        others = [other.pages for other in after.holdings if other is not row.after]
        named = np.intersect1d(pages, np.concatenate([np.empty(0, np.int64), *others]))
        if len(named):
            yield row.name, f"expected to write pages of its own, got {listed(named)}"
        swa = np.unique(batch.out_cache_loc_dsv4.out_swa_loc[row.tokens] // size)
        for buffer, refs, written in (("page_refs", after.page_refs, pages), ("swa_refs", after.swa_refs, swa)):
            shared = written[refs[np.clip(written, 0, len(refs) - 1)] != 1]
            if len(shared):
                yield row.name, f"expected {buffer} 1 for written pages, not so for {listed(shared)}"


def table_extended(before: Ledger, batch: ScheduleBatch, after: Ledger) -> Found:
    """A14: the table maps the new positions and is the same everywhere else."""
    expected = before.req_to_token.copy()
    for row in rows_of(before, batch, after):
        expected[row.after.request.row, row.prefix : row.seq] = batch.out_cache_loc[row.tokens]
    wrong = np.argwhere(expected != after.req_to_token)
    if len(wrong):
        places = [f"[{row},{position}]" for row, position in wrong.tolist()]
        yield "req_to_token", f"expected only the new positions to change, not so at {listed(places)}"


def window_covered(before: Ledger, batch: ScheduleBatch, after: Ledger) -> Found:
    """W01: every position in the window of a processed position owns a window slot."""
    window = after.state.config.sliding_window
    for row in rows_of(before, batch, after):
        first = max(0, row.prefix - window + 1)
        missing = first + np.flatnonzero(row.after.windows[first:] <= 0)
        if len(missing):
            yield row.name, f"expected window slots for positions from {first}, none for {listed(missing)}"


def window_slots_mapped(before: Ledger, batch: ScheduleBatch, after: Ledger) -> Found:
    """W04: ``out_swa_loc`` is the peer of ``out_full_loc``, and not the sink."""
    locs = batch.out_cache_loc_dsv4
    if not np.array_equal(locs.out_full_loc, batch.out_cache_loc):
        yield "out_full_loc", "expected out_cache_loc"
    inside = (locs.out_full_loc >= 0) & (locs.out_full_loc < len(after.full_to_swa) - 1)
    expected = after.full_to_swa[np.where(inside, locs.out_full_loc, 0)]
    if not np.array_equal(locs.out_swa_loc, expected) or (locs.out_swa_loc <= 0).any():
        yield "out_swa_loc", f"expected {listed(expected)}, all above 0, got {listed(locs.out_swa_loc)}"


def eviction_behind_window(before: Ledger, batch: ScheduleBatch, after: Ledger) -> Found:
    """W05: only positions before ``prefix - W`` are given back."""
    window = after.state.config.sliding_window
    for row in rows_of(before, batch, after):
        old, new = row.before.request.evicted_len, row.after.request.evicted_len
        if new > max(old, row.prefix - window):
            yield row.name, f"expected evicted_len at most {max(old, row.prefix - window)}, got {new}"


def eviction_moves_on(before: Ledger, batch: ScheduleBatch, after: Ledger) -> Found:
    """W06: the cursor never goes back, stands on a page border, and stays for requests outside the batch."""
    size = after.sizes.page_size
    for request_id, holding in before.by_id.items():
        other = after.by_id.get(request_id)
        if other is None:
            continue
        old, new = holding.request.evicted_len, other.request.evicted_len
        if new < old or (new != old and new % size) or (new != old and request_id not in batch.request_ids):
            yield holding.name, f"expected evicted_len to stay or move on by pages of {size}, got {new} after {old}"


def eviction_touches_window_only(before: Ledger, batch: ScheduleBatch, after: Ledger) -> Found:
    """W07: names, refcounts and C128 pages that existed before the step are as they were."""
    for name, free in (("page_refs", before.free_pages), ("c128_refs", before.free_c128_pages)):
        old, new = getattr(before, name), getattr(after, name)
        wrong = np.setdiff1d(np.flatnonzero(old != new), free)
        if len(wrong):
            yield name, f"expected unchanged counts of pages in use, not so for {listed(wrong)}"


def closing_counted(before: Ledger, batch: ScheduleBatch, after: Ledger) -> Found:
    """C01: one C4 slot per token that closes a group of 4, one C128 slot per token that closes a group of 128."""
    locs = batch.out_cache_loc_dsv4
    for ratio, name, found in (
        (C4_RATIO, "out_c4_loc", locs.out_c4_loc),
        (C128_RATIO, "out_c128_loc", locs.out_c128_loc),
    ):
        expected = int((batch.seq_lens // ratio - batch.prefix_lens // ratio).sum())
        if len(found) != expected:
            yield name, f"expected {expected} closing tokens, got {len(found)}"


def closing_slots(before: Ledger, batch: ScheduleBatch, after: Ledger) -> Found:
    """C02: the j-th closing token's C4 slot is its full slot div 4; its C128 slot follows from the sidecar."""
    c4: list[Ints] = [np.empty(0, np.int64)]
    c128: list[Ints] = [np.empty(0, np.int64)]
    for row in rows_of(before, batch, after):
        position = np.arange(row.prefix, row.seq)
        closing = position % C4_RATIO == C4_RATIO - 1
        c4.append(batch.out_cache_loc[row.tokens][closing] // C4_RATIO)
        groups = np.arange(row.prefix // C128_RATIO, row.seq // C128_RATIO)
        c128.append(row.after.sidecar[groups // C128_PAGE] * C128_PAGE + groups % C128_PAGE)
    locs = batch.out_cache_loc_dsv4
    for name, expected, found in (
        ("out_c4_loc", np.concatenate(c4), locs.out_c4_loc),
        ("out_c128_loc", np.concatenate(c128), locs.out_c128_loc),
    ):
        if not np.array_equal(expected, found):
            yield name, f"expected {listed(expected)}, got {listed(found)}"


def c128_page_opened(before: Ledger, batch: ScheduleBatch, after: Ledger) -> Found:
    """C07: a C128 page is opened exactly where a length passes 128 modulo 2048."""
    span = C128_PAGE * C128_RATIO
    for row in rows_of(before, batch, after):
        lengths = np.arange(row.prefix + 1, row.seq + 1)
        expected = int((lengths % span == C128_RATIO).sum())
        got = np.count_nonzero(row.after.sidecar) - np.count_nonzero(row.before.sidecar)
        if got != expected:
            yield row.name, f"expected {expected} C128 pages opened, got {got}"


def sidecar_extended(before: Ledger, batch: ScheduleBatch, after: Ledger) -> Found:
    """C08: sidecar columns in use before the step and rows of other requests are unchanged."""
    expected = before.sidecar.copy()
    for row in rows_of(before, batch, after):
        columns = slice(c128_pages(row.prefix), c128_pages(row.seq))
        expected[row.after.request.row, columns] = after.sidecar[row.after.request.row, columns]
    wrong = np.argwhere(expected != after.sidecar)
    if len(wrong):
        places = [f"[{row},{column}]" for row, column in wrong.tolist()]
        yield "sidecar", f"expected only new columns to change, not so at {listed(places)}"


def written_entries_exclusive(before: Ledger, batch: ScheduleBatch, after: Ledger) -> Found:
    """C11: every C128 page that a step writes has refcount 1."""
    pages = np.unique(batch.out_cache_loc_dsv4.out_c128_loc // C128_PAGE)
    shared = pages[after.c128_refs[np.clip(pages, 0, len(after.c128_refs) - 1)] != 1]
    if len(shared):
        yield "c128_refs", f"expected refcount 1 for written pages, not so for {listed(shared)}"


def segments_match_table(before: Ledger, batch: ScheduleBatch, after: Ledger) -> Found:
    """E03: a row's slots are its row of the table from prefix to seq, in order."""
    for row in rows_of(before, batch, after):
        expected = after.req_to_token[row.after.request.row, row.prefix : row.seq]
        if not np.array_equal(batch.out_cache_loc[row.tokens], expected):
            yield row.name, f"expected slots {listed(expected)}, got {listed(batch.out_cache_loc[row.tokens])}"


def pages_opened(before: Ledger, batch: ScheduleBatch, after: Ledger) -> Found:
    """E05: full and window pages are opened in lock-step, C128 pages by their own count."""
    rows = tuple(rows_of(before, batch, after))
    size = after.sizes.page_size
    n_full = sum(-(-row.seq // size) - -(-row.prefix // size) for row in rows)
    n_c128 = sum(c128_pages(row.seq) - c128_pages(row.prefix) for row in rows)
    fresh = {page for row in rows for page in (row.after.windows[row.prefix :] // size).tolist()}
    old = {int(row.before.windows[-1]) // size for row in rows if row.prefix % size}
    for name, expected, got in (
        ("free_pages", n_full, len(before.free_pages) - len(after.free_pages)),
        ("free_swa_pages", n_full, len(fresh - old)),
        ("free_c128_pages", n_c128, len(before.free_c128_pages) - len(after.free_c128_pages)),
    ):
        if got != expected:
            yield name, f"expected {expected} pages opened, got {got}"


ALLOCATED: Final[Mapping[str, Callable[[Ledger, ScheduleBatch, Ledger], Found]]] = {
    "A01": slots_distinct,
    "A02": slots_new,
    "A03": slots_outside_sink,
    "A06": slots_continue_page,
    "A07": pages_were_free,
    "A08": pages_from_head,
    "A09": pages_in_batch_order,
    "A10": need_forecast,
    "A13": written_pages_exclusive,
    "A14": table_extended,
    "W01": window_covered,
    "W04": window_slots_mapped,
    "W05": eviction_behind_window,
    "W06": eviction_moves_on,
    "W07": eviction_touches_window_only,
    "C01": closing_counted,
    "C02": closing_slots,
    "C07": c128_page_opened,
    "C08": sidecar_extended,
    "C11": written_entries_exclusive,
    "E03": segments_match_table,
    "E05": pages_opened,
    "N14": rows_from_head,
}
"""Predicates over (before, batch, after), by id."""
