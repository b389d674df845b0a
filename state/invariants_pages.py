"""What holds for full slots and pages at any time; decode-path sheet 9.2.

There is no prefix tree here. Instead a fork shares whole pages, so "named by exactly one request" becomes: the page
that a request still writes is its own, and a shared page is full and means the same to all who name it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Final

import numpy as np

from .ledger import Holding, Ints, Ledger, common_prefix
from .partition import count_names, partition
from .violations import Found, listed

__all__ = ["PAGES", "shared_columns"]


def slots_in_pages(ledger: Ledger) -> Found:
    """A03: every slot lies in a page 1..P, none in the sink."""
    size, pages = ledger.sizes.page_size, ledger.sizes.pages
    for holding in ledger.holdings:
        outside = holding.slots[(holding.slots < size) | (holding.slots >= (pages + 1) * size)]
        if len(outside):
            yield holding.name, f"expected slots in pages 1..{pages}, got {listed(outside)}"


def slots_aligned(ledger: Ledger) -> Found:
    """A04: slot and position agree modulo the page size."""
    size = ledger.sizes.page_size
    for holding in ledger.holdings:
        wrong = np.flatnonzero(holding.slots % size != np.arange(len(holding.slots)) % size)
        if len(wrong):
            yield holding.name, f"expected slot mod {size} = position mod {size}, not so at positions {listed(wrong)}"


def pages_contiguous(ledger: Ledger) -> Found:
    """A05: the slots of one page of positions lie in one page, in order."""
    size = ledger.sizes.page_size
    for holding in ledger.holdings:
        position = np.arange(len(holding.slots))
        wrong = np.flatnonzero(holding.slots != holding.slots[position - position % size] + position % size)
        if len(wrong):
            yield holding.name, f"expected first slot of the page + offset, not so at positions {listed(wrong)}"


def full_pages_conserved(ledger: Ledger) -> Found:
    """A11: every full page is free or named by a live request, never both."""
    named = np.concatenate([np.empty(0, np.int64), *(holding.pages for holding in ledger.holdings)])
    yield from partition("full page", ledger.free_pages, named, ledger.sizes.pages)


def free_lists_sound(ledger: Ledger) -> Found:
    """A12: free lists hold no sink and no page twice."""
    for name in ("free_rows", "free_pages", "free_swa_pages", "free_c128_pages"):
        free: Ints = getattr(ledger, name)
        values, counts = np.unique(free, return_counts=True)
        if (free <= 0).any():
            yield name, f"expected pages of at least 1, got {listed(free[free <= 0])}"
        if (counts > 1).any():
            yield name, f"expected every page once, got several times {listed(values[counts > 1])}"


def open_page_exclusive(ledger: Ledger) -> Found:
    """A13: the page that a request writes next is named by it alone."""
    size, names = ledger.sizes.page_size, _page_names(ledger)
    for holding in ledger.holdings:
        if holding.request.kv_len % size == 0 or not len(holding.pages):
            continue
        page = int(holding.pages[-1])
        if not 0 < page < len(names):
            continue  # A03 tells
        if names[page] != 1 or ledger.page_refs[page] != 1:
            found = f"{names[page]} requests, refcount {ledger.page_refs[page]}"
            yield holding.name, f"expected its partly filled page {page} to be its own, got {found}"


def sink_row_empty(ledger: Ledger) -> Found:
    """A15: row 0 of the request table is all zeros."""
    wrong = np.flatnonzero(ledger.req_to_token[0])
    if len(wrong):
        yield "request table", f"expected row 0 to be zero, not so at positions {listed(wrong)}"


def free_counts_true(ledger: Ledger) -> Found:
    """A19: as many pages can be taken as a free list says, so that what was freed can be allocated again."""
    table = ledger.state.table
    lists = {
        "free_rows": table.free_rows,
        "free_pages": table.free_pages,
        "free_swa_pages": table.free_swa_pages,
        "free_c128_pages": table.free_c128_pages,
    }
    for name, free in lists.items():
        in_list: Ints = getattr(ledger, name)
        if len(free) != len(in_list):
            yield name, f"expected its length to count its pages, got {len(free)} for {len(in_list)}"


def page_refs_counted(ledger: Ledger) -> Found:
    """N01: ``page_refs`` counts the live requests that name a page."""
    yield from _compare_counts("page_refs", ledger.page_refs, _page_names(ledger))


def shared_pages_agree(ledger: Ledger) -> Found:
    """N03: two requests share a full page only at equal positions, whole, and after identical tokens."""
    size = ledger.sizes.page_size
    if (_page_names(ledger) <= 1).all():
        return  # nothing is shared
    for one, other in combinations(ledger.holdings, 2):
        if not np.isin(one.pages, other.pages).any():
            continue
        same = common_prefix(one.tokens[: one.request.kv_len], other.tokens[: other.request.kv_len])
        yield from shared_columns(one, other, one.pages, other.pages, same // size, "full page")


def shared_columns(one: Holding, other: Holding, mine: Ints, theirs: Ints, allowed: int, kind: str) -> Found:
    """Find pages that two requests name though they may not.

    Args:
        one: a request.
        other: another one.
        mine: i64[P]. Pages of the first by column.
        theirs: i64[P]. Pages of the second.
        allowed: columns below this may be shared, at equal places.
        kind: what they are, for messages.
    """
    places = {int(page): column for column, page in enumerate(theirs)}
    for column, page in enumerate(mine.tolist()):
        if page not in places:
            continue
        where = f"{one.name}, {other.name}"
        if places[page] != column:
            yield where, f"expected {kind} {page} at equal columns, got {column} and {places[page]}"
        elif column >= allowed:
            yield (
                where,
                f"expected shared {kind}s to be whole and to follow equal tokens, got {page} in column {column}",
            )


def _page_names(ledger: Ledger) -> Ints:
    return count_names([np.unique(holding.pages) for holding in ledger.holdings], ledger.sizes.pages)


def _compare_counts(buffer: str, found: Ints, expected: Ints) -> Found:
    wrong = np.flatnonzero(found != expected)
    if len(wrong):
        pairs = [f"{page}: {expected[page]} but {found[page]}" for page in wrong.tolist()]
        yield buffer, f"expected the number of holders of each page, got {listed(pairs)}"


PAGES: Final[Mapping[str, Callable[[Ledger], Found]]] = {
    "A03": slots_in_pages,
    "A04": slots_aligned,
    "A05": pages_contiguous,
    "A11": full_pages_conserved,
    "A12": free_lists_sound,
    "A13": open_page_exclusive,
    "A15": sink_row_empty,
    "A19": free_counts_true,
    "N01": page_refs_counted,
    "N03": shared_pages_agree,
}
"""Predicates over one state, by id."""
