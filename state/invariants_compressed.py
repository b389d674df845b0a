"""What holds for compressed entries, their pages and the pooling state at any time; decode-path sheet 9.4."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Final

import numpy as np
import torch
from torch import Tensor

from .capacity import C128_PAGE, C128_RATIO
from .invariants_pages import shared_columns
from .kv import C4_RING, KVState
from .ledger import Ledger, c4_state_rows, common_prefix
from .partition import count_names, partition
from .violations import Found, listed

__all__ = ["COMPRESSED", "is_empty_state", "layer_rows"]


def sidecar_filled(ledger: Ledger) -> Found:
    """C06: one C128 page per 16 closed groups, and zeros behind them."""
    pages = ledger.sizes.c128_pages
    for holding in ledger.holdings:
        used, rest = holding.sidecar[: holding.n_c128], holding.sidecar[holding.n_c128 :]
        if len(used) < holding.n_c128 or ((used < 1) | (used > pages)).any():
            yield holding.name, f"expected {holding.n_c128} C128 pages in 1..{pages}, got {listed(used)}"
        if rest.any():
            yield holding.name, f"expected zeros behind {holding.n_c128} C128 pages, got {listed(rest)}"


def c128_refs_counted(ledger: Ledger) -> Found:
    """C09: ``c128_refs`` counts the live requests whose sidecar rows name a page."""
    names = [holding.sidecar[holding.sidecar > 0] for holding in ledger.holdings]
    expected = count_names(names, ledger.sizes.c128_pages)
    wrong = np.flatnonzero(ledger.c128_refs != expected)
    if len(wrong):
        pairs = [f"{page}: {expected[page]} but {ledger.c128_refs[page]}" for page in wrong.tolist()]
        yield "c128_refs", f"expected the number of holders of each page, got {listed(pairs)}"


def c128_pages_conserved(ledger: Ledger) -> Found:
    """C10: every C128 page is free with refcount 0, or held with a higher one."""
    held = np.flatnonzero(ledger.c128_refs)
    yield from partition("C128 page", ledger.free_c128_pages, held[held > 0], ledger.sizes.c128_pages)


def free_rows_cleared(ledger: Ledger) -> Found:
    """C12: rows that nobody owns name no C128 page."""
    owned = {holding.request.row for holding in ledger.holdings}
    for row in np.flatnonzero(ledger.sidecar.any(axis=1)).tolist():
        if row not in owned:
            yield "sidecar", f"expected row {row} to be zero, as nobody owns it"


def shared_entries_agree(ledger: Ledger) -> Found:
    """C13: two requests share a C128 page only at equal columns, whole, and after identical tokens."""
    span = C128_PAGE * C128_RATIO
    named = count_names([h.sidecar[: h.n_c128] for h in ledger.holdings], ledger.sizes.c128_pages)
    if (named <= 1).all():
        return  # nothing is shared
    for one, other in combinations(ledger.holdings, 2):
        mine, theirs = one.sidecar[: one.n_c128], other.sidecar[: other.n_c128]
        if not np.isin(mine, theirs).any():
            continue
        same = common_prefix(one.tokens[: one.request.kv_len], other.tokens[: other.request.kv_len])
        yield from shared_columns(one, other, mine, theirs, same // span, "C128 page")


def state_rows_distinct(ledger: Ledger) -> Found:
    """C14: the last 8 positions of a request have distinct pooling-state rows outside the sink page."""
    for holding in ledger.holdings:
        first = max(0, holding.request.kv_len - C4_RING)
        rows = c4_state_rows(holding.windows[first:], ledger.sizes.page_size)
        if len(set(rows.tolist())) != len(rows) or (rows < C4_RING).any():
            yield holding.name, f"expected distinct C4 state rows from {C4_RING} up, got {listed(rows, 8)}"


def dummy_rows_empty(ledger: Ledger) -> Found:
    """C16: the last row of every pooling state is (0, -inf) in every layer."""
    kv = ledger.state.kv
    for name in kv.handle.names:
        if name.endswith("_state"):
            dummy = layer_rows(kv, name, np.array([kv.layout.dummy(name)]))
            if not is_empty_state(dummy, kv.layout.first_score(name, dummy.shape[1])):
                yield name, "expected the dummy row to be (0, -inf)"


def layer_rows(kv: KVState, name: str, slots: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
    """Copy the same slots of every layer out of a buffer."""
    firsts = np.arange(kv.layout.n_layers(name))[:, None] * kv.layout.n_slots(name)
    return kv.handle.rows(name, torch.from_numpy((firsts + slots).reshape(-1)))


def is_empty_state(rows: Tensor, first_score: int) -> bool:
    """Tell whether all pooling-state rows are (value 0, score -inf), scores from channel ``first_score`` on."""
    values, scores = rows.tensor_split((first_score,), dim=-1)
    return bool((values == 0).all()) and bool((scores == -torch.inf).all())


COMPRESSED: Final[Mapping[str, Callable[[Ledger], Found]]] = {
    "C06": sidecar_filled,
    "C09": c128_refs_counted,
    "C10": c128_pages_conserved,
    "C12": free_rows_cleared,
    "C13": shared_entries_agree,
    "C14": state_rows_distinct,
    "C16": dummy_rows_empty,
}
"""Predicates over one state, by id."""
