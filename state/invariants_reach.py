"""What holds for everything that requests can still read, slot by slot; decode-path sheet 9.6 (B14)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .capacity import C128_PAGE
from .kv import C4_RING
from .ledger import Ints, Ledger, live_rows
from .violations import Found, listed

__all__ = ["REACH"]


def read_rows_taken(ledger: Ledger) -> Found:
    """B14: no cache row that a live request may read lies in a free page or row, and no page is neither.

    Reachable is what attention and compressors would read next, worked out from the slots; the laws of conservation
    (A11, W08, C10) count pages instead.
    """
    sizes = ledger.sizes
    counts = {
        "free_rows": sizes.requests,
        "free_pages": sizes.pages,
        "free_swa_pages": sizes.swa_pages,
        "free_c128_pages": sizes.c128_pages,
    }
    free = {name: _marked(getattr(ledger, name), count) for name, count in counts.items()}
    lists = {
        "swa": (sizes.page_size, "free_swa_pages"),
        "c4": (sizes.c4_page, "free_pages"),
        "index": (sizes.c4_page, "free_pages"),
        "index_scale": (sizes.c4_page, "free_pages"),
        "c128": (C128_PAGE, "free_c128_pages"),
        "c4_state": (C4_RING, "free_swa_pages"),
        "index_state": (C4_RING, "free_swa_pages"),
        "c128_state": (ledger.state.kv.layout.c128_ring, "free_rows"),
    }
    for holding in ledger.holdings:
        for buffer, rows in live_rows(ledger, holding).items():
            per_page, name = lists[buffer]
            pages = rows // per_page
            # The last entry is free, and stands for every page that is none.
            wrong = pages[free[name][np.where((pages < 0) | (pages >= len(free[name])), -1, pages)]]
            if len(wrong):
                yield holding.name, f"expected to read no free page or sink of {buffer}, got {listed(np.unique(wrong))}"
    yield from _none_lost(ledger)


def _marked(free: Ints, count: int) -> NDArray[np.bool_]:
    """Mark the free ones of the pages ``0..count``, the sink, and one entry for what is no page: bool[P]."""
    found = np.zeros(count + 2, bool)
    found[free[(free >= 0) & (free <= count)]] = True
    found[[0, -1]] = True
    return found


def _none_lost(ledger: Ledger) -> Found:
    sizes = ledger.sizes
    held = {
        "free_pages": (sizes.pages, [holding.pages for holding in ledger.holdings]),
        "free_swa_pages": (sizes.swa_pages, [ledger.swa_pages(holding) for holding in ledger.holdings]),
        "free_c128_pages": (sizes.c128_pages, [holding.sidecar[: holding.n_c128] for holding in ledger.holdings]),
    }
    for name, (count, parts) in held.items():
        n_held = len(np.unique(np.concatenate([np.empty(0, np.int64), *parts])))
        n_free = len(getattr(ledger, name))
        if n_held + n_free != count:
            yield name, f"expected {count} pages held or free, got {n_held} and {n_free}"


REACH: Final[Mapping[str, Callable[[Ledger], Found]]] = {"B14": read_rows_taken}
"""Predicates over one state, by id."""
