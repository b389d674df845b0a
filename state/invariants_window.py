"""What holds for window pages and the map from full slots to them; decode-path sheet 9.3."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from .ledger import Ints, Ledger
from .partition import count_names, partition
from .violations import Found, listed

__all__ = ["STATE_REACH", "WINDOW"]

STATE_REACH: Final = 8
"""Positions whose pooling state a closing C4 group reads, its own last one included; it lies in window pages."""


def window_mapped(ledger: Ledger) -> Found:
    """W01: every position that the next step may read owns a window slot."""
    reach = max(ledger.state.config.sliding_window, STATE_REACH)
    for holding in ledger.holdings:
        first = max(0, holding.request.kv_len + 1 - reach)
        missing = first + np.flatnonzero(holding.windows[first:] <= 0)
        if len(missing):
            yield holding.name, f"expected window slots for positions from {first}, none for {listed(missing)}"


def map_injective(ledger: Ledger) -> Found:
    """W02: no window slot is the peer of two full slots."""
    counts = np.bincount(ledger.full_to_swa[ledger.full_to_swa > 0])
    if (counts > 1).any():
        yield "full_to_swa", f"expected distinct window slots, got several times {listed(np.flatnonzero(counts > 1))}"


def map_paged(ledger: Ledger) -> Found:
    """W03: peers agree modulo the page size, and those of one full page lie in one window page."""
    size = ledger.sizes.page_size
    peers = ledger.full_to_swa[:-1].reshape(-1, size)
    wrong = (peers > 0) & (peers % size != np.arange(size))
    if wrong.any():
        yield "full_to_swa", f"expected slot mod {size} = peer mod {size}, not so in pages {_rows(wrong)}"
    page = peers // size
    lowest = np.where(peers > 0, page, page.max(initial=0)).min(axis=1, keepdims=True)
    split = (peers > 0) & (page != lowest)
    if split.any():
        yield "full_to_swa", f"expected one window page per full page, not so in pages {_rows(split)}"


def _rows(mask: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> str:
    return listed(np.flatnonzero(mask.any(axis=1)))


def evicted_unmapped(ledger: Ledger) -> Found:
    """W05: what a request has passed has no peer any more, unless a sharer's window has not passed it."""
    size = ledger.sizes.page_size
    keeps = {
        int(page)
        for holding in ledger.holdings
        for page in holding.pages[holding.request.evicted_len // size :].tolist()
    }
    for holding in ledger.holdings:
        passed = holding.request.evicted_len // size
        for column, page in enumerate(holding.pages[:passed].tolist()):
            peers = holding.windows[column * size : (column + 1) * size]
            if page not in keeps and (peers != 0).any():
                yield holding.name, f"expected full page {page} without peers, as everybody has passed it"


def window_pages_conserved(ledger: Ledger) -> Found:
    """W08: every window page is free or held by a live request, never both."""
    named = np.concatenate([np.empty(0, np.int64), *(ledger.swa_pages(holding) for holding in ledger.holdings)])
    yield from partition("window page", ledger.free_swa_pages, named, ledger.sizes.swa_pages)


def map_sentinels(ledger: Ledger) -> Found:
    """W09: the sink and free pages have no peers, and -1 maps to -1."""
    size = ledger.sizes.page_size
    if ledger.full_to_swa[-1] != -1:
        yield "full_to_swa", f"expected -1 at the end, got {ledger.full_to_swa[-1]}"
    peers = ledger.full_to_swa[:-1].reshape(-1, size)
    free = ledger.free_pages[(ledger.free_pages >= 0) & (ledger.free_pages < len(peers))]
    for name, pages in (("the sink", np.zeros(1, np.int64)), ("free pages", free)):
        mapped = pages[(peers[pages] != 0).any(axis=1)]
        if len(mapped):
            yield "full_to_swa", f"expected no peers in {name}, got some in {listed(mapped)}"


def swa_refs_counted(ledger: Ledger) -> Found:
    """N02: ``swa_refs`` counts the live requests whose window has not passed a window page."""
    holders: list[Ints] = [np.unique(ledger.swa_pages(holding)) for holding in ledger.holdings]
    expected = count_names(holders, ledger.sizes.swa_pages)
    # Slots without a peer show as page 0; W01 and W08 tell about them.
    wrong = np.flatnonzero(ledger.swa_refs[1:] != expected[1:]) + 1
    if len(wrong) or ledger.swa_refs[0]:
        pairs = [f"{page}: {expected[page]} but {ledger.swa_refs[page]}" for page in wrong.tolist()]
        yield "swa_refs", f"expected the number of holders of each page and 0 for the sink, got {listed(pairs)}"


WINDOW: Final[Mapping[str, Callable[[Ledger], Found]]] = {
    "W01": window_mapped,
    "W02": map_injective,
    "W03": map_paged,
    "W05": evicted_unmapped,
    "W08": window_pages_conserved,
    "W09": map_sentinels,
    "N02": swa_refs_counted,
}
"""Predicates over one state, by id."""
