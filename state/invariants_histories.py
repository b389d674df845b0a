"""What closing, retracting, forking and rewinding do to requests; decode-path sheet 9.4 (C12), 9.6 (B13).

Ids as there; those that begin with N are this package's own. What a request's caches hold is compared by content,
whatever the numbers of the slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from .capacity import C128_RATIO
from .invariants_compressed import is_empty_state, layer_rows
from .ledger import Holding, Ints, Ledger, digest_rows, same_record
from .violations import Found, listed

__all__ = ["CLOSED", "FORKED", "RETRACTED", "REWOUND"]


def _gone(before: Ledger, after: Ledger) -> list[Holding]:
    """List the holdings of the requests that are closed or have lost their row."""
    kept = {request_id for request_id, holding in after.by_id.items() if not holding.request.is_parked}
    return [holding for i, holding in before.by_id.items() if i not in kept and not holding.request.is_parked]


def references_dropped(before: Ledger, after: Ledger) -> Found:
    """A19: a closed request's pages lose exactly one reference each; those without any can be allocated again."""
    size, gone = before.sizes.page_size, _gone(before, after)
    for name, free, names in (
        ("page_refs", "free_pages", [holding.pages for holding in gone]),
        ("swa_refs", "free_swa_pages", [before.swa_pages(holding) for holding in gone]),
        ("c128_refs", "free_c128_pages", [h.sidecar[h.sidecar > 0] for h in gone]),
    ):
        expected: Ints = getattr(before, name).copy()
        for pages in names:
            expected[pages] -= 1
        if not np.array_equal(getattr(after, name), expected):
            yield name, "expected one reference less for each page of a closed request"
        n_freed = int(((expected == 0) & (getattr(before, name) > 0)).sum())
        got = len(getattr(after, free)) - len(getattr(before, free))
        if got != n_freed:
            yield free, f"expected {n_freed} pages more, got {got} (pages of {size})"


def bank_cleared(before: Ledger, after: Ledger) -> Found:
    """C12: a freed row has no C128 pages and an empty C128 state, whose bank is (0, -inf)."""
    kv = after.state.kv
    for holding in _gone(before, after):
        row = holding.request.row
        if after.sidecar[row].any():
            yield holding.name, f"expected sidecar row {row} to be zero, got {listed(after.sidecar[row])}"
        if kv.layout.n_layers("c128_state"):
            bank = layer_rows(kv, "c128_state", kv.layout.c128_bank(np.array([row])))
            if not is_empty_state(bank, kv.layout.first_score("c128_state", bank.shape[1])):
                yield holding.name, f"expected an empty C128 state in row {row}"


def others_unchanged(before: Ledger, after: Ledger) -> Found:
    """N08: closing leaves every other request's record, slots and cache rows as they were."""
    yield from _unchanged_but(before, after, None)


def _unchanged_but(before: Ledger, after: Ledger, request_id: int | None) -> Found:
    for other_id, holding in after.by_id.items():
        old = before.by_id.get(other_id)
        if old is not None and other_id != request_id and not _same(before, old, after, holding):
            yield holding.name, "expected no change"


def _same(before: Ledger, old: Holding, after: Ledger, new: Holding) -> bool:
    is_named = np.array_equal(old.slots, new.slots) and np.array_equal(old.sidecar, new.sidecar)
    return same_record(old, new) and is_named and digest_rows(before, old) == digest_rows(after, new)


CLOSED: Final[Mapping[str, Callable[[Ledger, Ledger], Found]]] = {
    "A19": references_dropped,
    "C12": bank_cleared,
    "N08": others_unchanged,
}
"""Predicates over (before, after) of closing requests, by id."""


def retracted_owns_nothing(before: Ledger, after: Ledger, request_id: int) -> Found:
    """B13: a retracted request has no row, slot or page; its tokens, outputs and counts are what they were."""
    old, new = before.by_id.get(request_id), after.by_id.get(request_id)
    if old is None or new is None:
        yield f"request {request_id}", "expected it to be open before and after"
        return
    request = new.request
    if (request.row, request.kv_len, request.evicted_len) != (0, 0, 0):
        lens = f"row {request.row}, kv_len {request.kv_len}, evicted_len {request.evicted_len}"
        yield new.name, f"expected no row, slot or eviction, got {lens}"
    if not np.array_equal(old.tokens, new.tokens) or old.request.output_positions != request.output_positions:
        yield new.name, "expected its tokens and outputs to stay"
    if old.request.finished != request.finished:
        yield new.name, f"expected finished {old.request.finished}, got {request.finished}"
    rows = [row for ledger in (before, after) for row in ledger.state.sampling.rows if row.request_id == request_id]
    if len(rows) != 2 or rows[0] is not rows[1]:
        yield new.name, "expected its sampling row to stay"


def pages_dropped(before: Ledger, after: Ledger, request_id: int) -> Found:
    """A19: a retracted request's pages lose exactly one reference each; those without any are free."""
    yield from references_dropped(before, after)


def row_cleared(before: Ledger, after: Ledger, request_id: int) -> Found:
    """C12: the row that it had is free, names no C128 page and has an empty C128 state."""
    yield from bank_cleared(before, after)


def others_kept(before: Ledger, after: Ledger, request_id: int) -> Found:
    """N08: retracting leaves every other request as it was."""
    yield from _unchanged_but(before, after, request_id)


RETRACTED: Final[Mapping[str, Callable[[Ledger, Ledger, int], Found]]] = {
    "B13": retracted_owns_nothing,
    "A19": pages_dropped,
    "C12": row_cleared,
    "N08": others_kept,
}
"""Predicates over (before, after, request id), by id."""


def _cut(where: str, old: Holding, new: Holding, n: int, page_size: int) -> Found:
    """Find what is wrong with a record that has another one's first ``n`` tokens."""
    request, n_cached = new.request, new.request.kv_len
    if not np.array_equal(new.tokens, old.tokens[:n]):
        yield where, f"expected the first {n} tokens of {old.name}"
    positions = old.request.output_positions.numpy()
    if not np.array_equal(request.output_positions.numpy(), positions[positions < n]):
        yield where, f"expected those outputs of {old.name} that are among its first {n} tokens"
    if n >= old.request.kv_len and n_cached != old.request.kv_len:
        yield where, f"expected everything cached to be taken over, {old.request.kv_len} tokens, got {n_cached}"
    elif n < old.request.kv_len and (n_cached > n or n_cached % page_size or n_cached % C128_RATIO):
        yield where, f"expected at most {n} tokens, whole pages and whole groups, to be taken over, got {n_cached}"
    expected = None if n < len(old.tokens) else old.request.finished
    if request.finished != expected:
        yield where, f"expected finished {expected}, got {request.finished}"


def fork_continues(before: Ledger, after: Ledger, parent_id: int, fork_id: int, n: int) -> Found:
    """N06: a fork has its parent's tokens, names the parent's whole pages and no page that either may write."""
    parent, fork = after.by_id.get(parent_id), after.by_id.get(fork_id)
    if parent is None or fork is None or fork_id in before.by_id:
        yield f"request {fork_id}", f"expected a new request beside {parent_id}"
        return
    size = after.sizes.page_size
    yield from _cut(fork.name, parent, fork, n, size)
    whole = fork.request.kv_len // size
    if fork.pages[:whole].tolist() != parent.pages[:whole].tolist():
        yield fork.name, f"expected the whole pages of {parent.name}, got {listed(fork.pages)}"
    if np.intersect1d(fork.pages[whole:], parent.pages).size:
        yield fork.name, "expected its partly filled page to be its own"


def fork_reads_same(before: Ledger, after: Ledger, parent_id: int, fork_id: int, n: int) -> Found:
    """N09: what a fork may read has the content of what its parent could read at that length."""
    parent, fork = after.by_id.get(parent_id), after.by_id.get(fork_id)
    if parent is None or fork is None or fork.request.kv_len > parent.request.kv_len:
        return  # N06 tells
    if digest_rows(after, after.cut(parent, fork.request.kv_len)) != digest_rows(after, fork):
        yield fork.name, f"expected the cache content of the first {fork.request.kv_len} tokens of {parent.name}"


def parent_unchanged(before: Ledger, after: Ledger, parent_id: int, fork_id: int, n: int) -> Found:
    """N10: forking leaves every request that was open as it was."""
    yield from _unchanged_but(before, after, None)


FORKED: Final[Mapping[str, Callable[[Ledger, Ledger, int, int, int], Found]]] = {
    "N06": fork_continues,
    "N09": fork_reads_same,
    "N10": parent_unchanged,
}
"""Predicates over (before, after, parent id, fork id, tokens shared), by id."""


def rewound_is_cut(before: Ledger, after: Ledger, request_id: int, n: int) -> Found:
    """N11: a rewound request has its first n tokens and keeps its row, parameters and seed."""
    old, new = before.by_id.get(request_id), after.by_id.get(request_id)
    if old is None or new is None:
        yield f"request {request_id}", "expected it to be open before and after"
        return
    yield from _cut(new.name, old, new, n, after.sizes.page_size)
    if new.request.row != old.request.row:
        yield new.name, f"expected row {old.request.row}, got {new.request.row}"
    rows = [row for ledger in (before, after) for row in ledger.state.sampling.rows if row.request_id == request_id]
    if len(rows) != 2 or (rows[0].params, rows[0].seed) != (rows[1].params, rows[1].seed):
        yield new.name, "expected its parameters and its seed to stay"


def rewound_reads_same(before: Ledger, after: Ledger, request_id: int, n: int) -> Found:
    """N12: what a rewound request may read has the content that it had at that length, under the same full slots."""
    old, new = before.by_id.get(request_id), after.by_id.get(request_id)
    if old is None or new is None or new.request.kv_len > old.request.kv_len:
        return  # N11 tells
    kept = before.cut(old, new.request.kv_len)
    if not np.array_equal(kept.slots, new.slots):
        yield new.name, f"expected slots {listed(kept.slots)}, got {listed(new.slots)}"
    if digest_rows(before, kept) != digest_rows(after, new):
        yield new.name, f"expected the cache content of its first {new.request.kv_len} tokens"


def neighbours_unchanged(before: Ledger, after: Ledger, request_id: int, n: int) -> Found:
    """N13: rewinding leaves every other request as it was, also those that share its pages."""
    yield from _unchanged_but(before, after, request_id)


REWOUND: Final[Mapping[str, Callable[[Ledger, Ledger, int, int], Found]]] = {
    "N11": rewound_is_cut,
    "N12": rewound_reads_same,
    "N13": neighbours_unchanged,
}
"""Predicates over (before, after, request id, tokens kept), by id."""
